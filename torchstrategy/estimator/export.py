"""``ts.estimator.export``: what an exported model takes and computes, and loading one."""

from torchstrategy.estimator.export_outputs import (
    ClassificationOutput,
    ExportOutput,
    PredictOutput,
    RegressionOutput,
    ServingInputReceiver,
    TensorServingInputReceiver,
    build_raw_serving_input_receiver_fn,
)
from torchstrategy.estimator.saved_model import SavedModel, Signature, load

__all__ = [
    "ClassificationOutput",
    "ExportOutput",
    "PredictOutput",
    "RegressionOutput",
    "SavedModel",
    "ServingInputReceiver",
    "Signature",
    "TensorServingInputReceiver",
    "build_raw_serving_input_receiver_fn",
    "load",
]
