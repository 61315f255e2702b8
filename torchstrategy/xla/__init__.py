"""What the library needs of XLA devices, behind one small interface; nothing else imports ``torch_xla``."""
