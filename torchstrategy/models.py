"""``ts.models``: tf.keras.models' functions."""

from torchstrategy.fit.saving import load_model

__all__ = ["load_model"]
