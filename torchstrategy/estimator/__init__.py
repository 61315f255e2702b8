"""The Estimator API: train, evaluate, predict and export a ``model_fn``, on one device or a cluster."""

from __future__ import annotations

import typing

from torchstrategy.base import later

if typing.TYPE_CHECKING:
    from torchstrategy.estimator import experimental, export
    from torchstrategy.estimator.canned import (
        BaselineClassifier,
        BaselineEstimator,
        BaselineRegressor,
        DNNClassifier,
        DNNEstimator,
        DNNLinearCombinedClassifier,
        DNNLinearCombinedEstimator,
        DNNLinearCombinedRegressor,
        DNNRegressor,
        LinearClassifier,
        LinearEstimator,
        LinearRegressor,
    )
    from torchstrategy.estimator.converted_model import model_to_estimator
    from torchstrategy.estimator.estimator import Estimator
    from torchstrategy.estimator.exporters import BestExporter, Exporter, FinalExporter, LatestExporter
    from torchstrategy.estimator.heads import (
        BinaryClassHead,
        Head,
        LogisticRegressionHead,
        MultiClassHead,
        PoissonRegressionHead,
        RegressionHead,
    )
    from torchstrategy.estimator.input_pipeline_hook import CheckpointInputPipelineHook
    from torchstrategy.estimator.logging_hooks import LoggingTensorHook, StepCounterHook
    from torchstrategy.estimator.run_config import RunConfig, TaskType
    from torchstrategy.estimator.saver_hook import CheckpointSaverHook
    from torchstrategy.estimator.session import Session
    from torchstrategy.estimator.session_hooks import (
        CheckpointSaverListener,
        SessionRunArgs,
        SessionRunContext,
        SessionRunHook,
        SessionRunValues,
    )
    from torchstrategy.estimator.specs import EstimatorSpec, EvalSpec, ModeKeys, TrainSpec
    from torchstrategy.estimator.stopping_hooks import (
        FinalOpsHook,
        GlobalStepWaiterHook,
        NanLossDuringTrainingError,
        NanTensorHook,
        StopAtStepHook,
    )
    from torchstrategy.estimator.summary_hooks import ProfilerHook, SummarySaverHook
    from torchstrategy.estimator.timers import SecondOrStepTimer
    from torchstrategy.estimator.training_and_evaluation import train_and_evaluate
    from torchstrategy.estimator.warm_start import VocabInfo, WarmStartSettings

__all__ = [
    "BaselineClassifier",
    "BaselineEstimator",
    "BaselineRegressor",
    "BestExporter",
    "BinaryClassHead",
    "CheckpointInputPipelineHook",
    "CheckpointSaverHook",
    "CheckpointSaverListener",
    "DNNClassifier",
    "DNNEstimator",
    "DNNLinearCombinedClassifier",
    "DNNLinearCombinedEstimator",
    "DNNLinearCombinedRegressor",
    "DNNRegressor",
    "Estimator",
    "EstimatorSpec",
    "EvalSpec",
    "Exporter",
    "FinalExporter",
    "FinalOpsHook",
    "GlobalStepWaiterHook",
    "Head",
    "LatestExporter",
    "LinearClassifier",
    "LinearEstimator",
    "LinearRegressor",
    "LoggingTensorHook",
    "LogisticRegressionHead",
    "ModeKeys",
    "MultiClassHead",
    "NanLossDuringTrainingError",
    "NanTensorHook",
    "PoissonRegressionHead",
    "ProfilerHook",
    "RegressionHead",
    "RunConfig",
    "SecondOrStepTimer",
    "Session",
    "SessionRunArgs",
    "SessionRunContext",
    "SessionRunHook",
    "SessionRunValues",
    "StepCounterHook",
    "StopAtStepHook",
    "SummarySaverHook",
    "TaskType",
    "TrainSpec",
    "VocabInfo",
    "WarmStartSettings",
    "experimental",
    "export",
    "model_to_estimator",
    "train_and_evaluate",
]

_NAMES = {
    "canned": (
        "BaselineClassifier",
        "BaselineEstimator",
        "BaselineRegressor",
        "DNNClassifier",
        "DNNEstimator",
        "DNNLinearCombinedClassifier",
        "DNNLinearCombinedEstimator",
        "DNNLinearCombinedRegressor",
        "DNNRegressor",
        "LinearClassifier",
        "LinearEstimator",
        "LinearRegressor",
    ),
    "converted_model": ("model_to_estimator",),
    "estimator": ("Estimator",),
    "exporters": ("BestExporter", "Exporter", "FinalExporter", "LatestExporter"),
    "heads": (
        "BinaryClassHead",
        "Head",
        "LogisticRegressionHead",
        "MultiClassHead",
        "PoissonRegressionHead",
        "RegressionHead",
    ),
    "session_hooks": (
        "CheckpointSaverListener",
        "SessionRunArgs",
        "SessionRunContext",
        "SessionRunHook",
        "SessionRunValues",
    ),
    "input_pipeline_hook": ("CheckpointInputPipelineHook",),
    "logging_hooks": ("LoggingTensorHook", "StepCounterHook"),
    "run_config": ("RunConfig", "TaskType"),
    "saver_hook": ("CheckpointSaverHook",),
    "session": ("Session",),
    "specs": ("EstimatorSpec", "EvalSpec", "ModeKeys", "TrainSpec"),
    "stopping_hooks": (
        "FinalOpsHook",
        "GlobalStepWaiterHook",
        "NanLossDuringTrainingError",
        "NanTensorHook",
        "StopAtStepHook",
    ),
    "summary_hooks": ("ProfilerHook", "SummarySaverHook"),
    "timers": ("SecondOrStepTimer",),
    "training_and_evaluation": ("train_and_evaluate",),
    "warm_start": ("VocabInfo", "WarmStartSettings"),
}
_LATER = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}
_LATER |= {name: f"{__name__}.{name}" for name in ("experimental", "export")}

if not typing.TYPE_CHECKING:  # torchmetrics and torch.export take a second to import: only their users wait
    __getattr__, __dir__ = later.import_later(__name__, _LATER)
