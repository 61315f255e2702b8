"""``ts.models``: tf.keras.models' functions."""

from torchstrategy.base import later
from torchstrategy.fit.saving import load_model

__all__ = ["load_model"]

later.explain_absent(__name__)
