"""Optimizers by name, as ``compile(optimizer=...)`` takes them: torch's classes with tf.keras' hyper-parameters."""

from torchstrategy.training.optimizers import get

__all__ = ["get"]
