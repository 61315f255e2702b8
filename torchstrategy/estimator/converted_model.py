"""An Estimator of a compiled ``ts.Model``."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchstrategy.base import tree
from torchstrategy.base.context import has_strategy
from torchstrategy.base.log import logger
from torchstrategy.estimator.estimator import Estimator
from torchstrategy.estimator.export_outputs import DEFAULT_SERVING_SIGNATURE_DEF_KEY, PredictOutput
from torchstrategy.estimator.run_config import RunConfig
from torchstrategy.estimator.specs import EstimatorSpec, ModeKeys
from torchstrategy.fit.calling import call_arguments, copy_module
from torchstrategy.fit.compiled_loss import CompiledLoss
from torchstrategy.fit.model import Model
from torchstrategy.fit.outputs import Outputs
from torchstrategy.fit.saving import load_model
from torchstrategy.fit.trainable import TrainableModule
from torchstrategy.fit.trainer import is_metric, trainer_of
from torchstrategy.fit.weight_files import plain_module
from torchstrategy.losses.layer_losses import losses_of
from torchstrategy.optimizers.by_name import check_takes_no_closure, plain_class
from torchstrategy.replicas.mirrored import bodies, resolve
from torchstrategy.strategies.default import get_strategy

__all__ = ["model_to_estimator"]

_OVERRIDABLE = (
    "train_step",
    "test_step",
    "predict_step",
    "compute_loss",
    "compute_metrics",
    "clip_gradients",
    "minimize",
)
_CHECKPOINT_FORMATS = ("saver", "checkpoint")
_SINGLE_OUTPUT = "output"


def model_to_estimator(  # noqa: PLR0913 - tf's signature, and one more
    keras_model: Model | None = None,
    keras_model_path: str | os.PathLike[str] | None = None,
    custom_objects: None = None,
    model_dir: str | os.PathLike[str] | None = None,
    config: RunConfig | None = None,
    checkpoint_format: str = "saver",
    metric_names_map: Mapping[str, str] | None = None,
    export_outputs: Mapping[str, Any] | None = None,
    *,
    trust: bool = False,
) -> Estimator:
    """Return an Estimator that trains a copy of a compiled model, from its weights on.

    Training starts with the model's weights and a new optimizer of the compiled one's class and settings; on one
    replica it makes the steps that ``fit`` would make with the same batches. The model itself stays as it is.
    Predictions have the outputs' names, as in logs; the only output of a model is called ``output``.

    Args:
        keras_model: the compiled model.
        keras_model_path: or a file of ``Model.save``, with ``trust=True``.
        custom_objects: must be ``None``: the file names all classes.
        model_dir: the directory for checkpoints; see ``Estimator``.
        config: the estimator's configuration.
        checkpoint_format: ``"saver"`` or ``"checkpoint"``, which are the same here.
        metric_names_map: other names for metrics in what ``evaluate`` returns, by the names that the model gives them.
        export_outputs: further signatures of an exported model; see ``EstimatorSpec``.
        trust: whether the file at ``keras_model_path`` may run code, see ``ts.models.load_model``.

    Raises:
        ValueError: not exactly one of model and path is given, the model was not compiled, has steps of its own or was
            compiled with settings that only ``fit`` knows, or a metric to rename does not exist (in ``evaluate``).
        TypeError: ``keras_model`` is no ``ts.Model``.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> model = ts.Model(torch.nn.Linear(1, 1))
        >>> model.compile("sgd", "mse", metrics=["mae"])
        >>> estimator = ts.estimator.model_to_estimator(model, model_dir=folder.name)
        >>> estimator = estimator.train(lambda: (torch.ones(2, 1), torch.ones(2, 1)), steps=3)
        >>> sorted(estimator.evaluate(lambda: (torch.ones(2, 1), torch.ones(2, 1)), steps=1))
        ['global_step', 'loss', 'mae']
        >>> folder.cleanup()
    """
    if (keras_model is None) == (keras_model_path is None):
        raise ValueError(
            "model_to_estimator needs either keras_model or keras_model_path. Received: "
            f"{'neither' if keras_model is None else 'both'}."
        )
    if custom_objects is not None:
        raise ValueError("custom_objects must be None: a file of Model.save names the classes that it needs.")
    if checkpoint_format not in _CHECKPOINT_FORMATS:
        raise ValueError(f"checkpoint_format must be one of {_CHECKPOINT_FORMATS}. Received: {checkpoint_format!r}")
    model = keras_model if keras_model_path is None else load_model(keras_model_path, trust=trust)
    if not isinstance(model, Model):
        raise TypeError(f"keras_model must be a ts.Model. Received: {model!r:.200}")
    model_fn = _ModelFn(model, dict(metric_names_map or {}), dict(export_outputs or {}))
    return Estimator(model_fn, model_dir, config)


class _ModelFn:
    """The ``model_fn``: makes a copy of the model and of all that ``compile`` made."""

    def __init__(self, model: Model, metric_names: dict[str, str], export_outputs: dict[str, Any]) -> None:
        _check_model(model)
        trainer = trainer_of(model)
        self._arguments = trainer.arguments
        self._metric_names = metric_names
        self._export_outputs = export_outputs
        self._module = copy_module(model, torch.clone)
        self._optimizer = None
        if trainer.optimizer is not None:
            own = bodies(plain_module(model))[0]
            self._optimizer = _Optimizer(own, bodies(trainer.optimizer)[0])

    def __call__(self, features: Any, labels: Any, mode: str) -> EstimatorSpec:
        module = self._make_module()
        arguments = self._arguments
        loss = (
            None if arguments["loss"] is None else CompiledLoss(_copied(arguments["loss"]), arguments["loss_weights"])
        )
        if mode == ModeKeys.PREDICT:
            signatures = {DEFAULT_SERVING_SIGNATURE_DEF_KEY: PredictOutput(_predictions), **self._export_outputs}
            return EstimatorSpec(mode, _predictions, export_outputs=signatures, module=module)

        def total_loss(outputs: Any, labels: Any) -> Tensor:
            layers = [value.sum() for value in losses_of(module)]
            own = [] if loss is None else [loss(labels, outputs, alone=True)]
            if not own and not layers:
                raise ValueError("The model has nothing to minimize: compile it with loss=, or let layers add losses.")
            return torch.stack([*own, *layers]).sum() if layers else own[0]

        if mode == ModeKeys.EVAL:
            metrics = self._make_metrics(module, loss, features, labels)
            return EstimatorSpec(mode, _predictions, total_loss, eval_metric_ops=metrics, module=module)
        if self._optimizer is None:
            raise ValueError("The model was compiled without an optimizer: call model.compile(optimizer=...).")
        return EstimatorSpec(mode, _predictions, total_loss, self._optimizer.make(module), module=module)

    def _make_module(self) -> nn.Module:
        device = torch.get_default_device()
        module = copy.deepcopy(self._module).to(device)
        if not isinstance(module, TrainableModule):  # whose own call does it
            module.register_forward_pre_hook(_spread_features, prepend=True, with_kwargs=True)
        if has_strategy():
            get_strategy().replicate(module)
        return module

    def _make_metrics(self, module: nn.Module, loss: CompiledLoss | None, features: Any, labels: Any) -> dict[str, Any]:
        """Return the compiled metrics with what makes their arguments, by name."""
        from torchstrategy.fit.compiled_metrics import CompiledMetrics  # noqa: PLC0415 - torchmetrics

        arguments = self._arguments
        compiled = CompiledMetrics(_copied(arguments["metrics"]), _copied(arguments["weighted_metrics"]), loss)
        module.eval()
        with torch.no_grad():
            compiled.build(labels, module(features))
        metrics = {
            name: (metric, _arguments_for(place, is_ours=is_ours))
            for name, metric, place, is_ours in compiled.with_places()
        }
        unknown = [name for name in self._metric_names if name not in metrics]
        if unknown:
            raise ValueError(f"metric_names_map renames {unknown}, but the model's metrics are {sorted(metrics)}.")
        return {self._metric_names.get(name, name): pair for name, pair in metrics.items()}


class _Optimizer:
    """The class and the settings of an optimizer, with the names of what it trains.

    Args:
        module: the module that it trains.
        optimizer: the optimizer.
    """

    def __init__(self, module: nn.Module, optimizer: Any) -> None:
        check_takes_no_closure(optimizer)
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._class = plain_class(type(optimizer))
        self._groups = [
            {**group, "params": [names[id(parameter)] for parameter in group["params"]]}
            for group in optimizer.param_groups
        ]
        accepted = inspect.signature(self._class).parameters
        self._defaults = {name: value for name, value in optimizer.defaults.items() if name in accepted}

    def make(self, module: nn.Module) -> torch.optim.Optimizer:
        """Return such an optimizer for a copy of the module."""
        parameters = dict(module.named_parameters())
        groups = [{**group, "params": [parameters[name] for name in group["params"]]} for group in self._groups]
        made: torch.optim.Optimizer = self._class(groups, **self._defaults)
        return made


def _check_model(model: Model) -> None:
    trainer = trainer_of(model)
    if not trainer.is_compiled:
        raise ValueError("The model has not been compiled yet. Call model.compile(optimizer=..., loss=...) before.")
    cls = type(resolve(model))
    overridden = [name for name in _OVERRIDABLE if getattr(cls, name) is not getattr(TrainableModule, name)]
    if overridden:
        raise ValueError(
            f"{cls.__name__} overrides {', '.join(overridden)}, which an Estimator does not call. Train it with fit, "
            "or write a model_fn."
        )
    for name, default in (("amp", None), ("gradient_accumulation_steps", 1)):
        value = trainer.arguments[name]
        if value not in (default, None, False):
            raise ValueError(
                f"The model was compiled with {name}={value!r}, which an Estimator has no counterpart for. Train it "
                "with fit, or write a model_fn."
            )
    if trainer.jit_compile:
        logger.warning("model_to_estimator: compile(jit_compile=True) has no effect on an Estimator.")


def _predictions(outputs: Any) -> dict[str, Tensor]:
    parts = Outputs(outputs)
    return dict(zip(parts.names or (_SINGLE_OUTPUT,), parts.tensors, strict=True))


def _arguments_for(place: int, *, is_ours: bool) -> Any:
    """Return a function that makes the arguments of the metric of an output."""

    def arguments(features: Any, labels: Any, outputs: Any) -> tuple[Any, Any]:  # noqa: ARG001
        parts = Outputs(outputs)
        needed = [i == place for i in range(len(parts.tensors))]
        label, scores = parts.parts_of(labels, "labels", needed)[place], parts.tensors[place]
        return (label, scores) if is_ours else (scores, label)

    return arguments


def _spread_features(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let the features be arguments of ``forward``, as ``ts.Model`` does with inputs."""
    return call_arguments(module.forward, args[0]) if len(args) == 1 and not kwargs else (args, kwargs)


def _copied(spec: Any) -> Any:
    """Return losses or metrics with new ones in place of the modules among them, which belong to the model."""

    def copy_of(leaf: Any) -> Any:
        if not isinstance(leaf, nn.Module):
            return leaf
        copied: Any = copy.deepcopy(bodies(leaf)[0])
        for metric in filter(is_metric, copied.modules()):  # those of fit hold what it counted
            metric.reset()
        return copied

    return tree.map_leaves(copy_of, spec)
