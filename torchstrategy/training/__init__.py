"""Training by ``ts.Model``: ``compile``, ``fit``, ``evaluate``, ``predict``, and saving."""
