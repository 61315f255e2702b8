"""What a ``model_fn`` returns, and what ``train_and_evaluate`` is told about training and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchstrategy.estimator.export_outputs import DEFAULT_SERVING_SIGNATURE_DEF_KEY, ExportOutput, PredictOutput
from torchstrategy.estimator.exporters import Exporter
from torchstrategy.estimator.session_hooks import CheckpointSaverListener, SessionRunHook, check_steps

__all__ = ["EstimatorSpec", "EvalSpec", "ModeKeys", "TrainSpec", "check_hooks", "check_listeners"]


class ModeKeys:
    """What a ``model_fn`` or an ``input_fn`` is called for.

    Example:
        >>> ts.estimator.ModeKeys.TRAIN, ts.estimator.ModeKeys.EVAL, ts.estimator.ModeKeys.PREDICT
        ('train', 'eval', 'infer')
    """

    TRAIN = "train"
    EVAL = "eval"
    PREDICT = "infer"


class _EstimatorSpec(NamedTuple):
    mode: str | None
    predictions: Any
    loss: Any
    train_op: Any
    eval_metric_ops: dict[str, Any]
    export_outputs: dict[str, ExportOutput] | None
    training_chief_hooks: tuple[SessionRunHook, ...]
    training_hooks: tuple[SessionRunHook, ...]
    scaffold: None
    evaluation_hooks: tuple[SessionRunHook, ...]
    prediction_hooks: tuple[SessionRunHook, ...]
    module: nn.Module | None


class EstimatorSpec(_EstimatorSpec):
    """What a ``model_fn`` returns: a module, and functions of what the module returns.

    The ``model_fn`` is called once for each ``train``, ``evaluate``, ``predict`` or export, so a tensor that it
    computes would be the same in every step. Say how it is computed instead, as a function.

    Args:
        mode: one of ``ModeKeys``: the one that the ``model_fn`` was given.
        predictions: ``predictions(outputs)`` returns a tensor or a dictionary of tensors, ``[batch, ...]``. Needed in
            PREDICT.
        loss: ``loss(outputs, labels)`` returns a scalar tensor: the mean, or the sum, over this replica's batch. Needed
            in TRAIN and EVAL. The estimator averages over replicas, so ``ts.nn.compute_average_loss``, which divides by
            the global batch size, would divide twice.
        train_op: the optimizer, which makes one step after each backward pass. Or a list of optimizers, learning-rate
            schedulers (their ``step`` is called after all optimizers'), a ``torch.amp.GradScaler``, and functions
            without arguments, which are called at their place in the list, such as one before the optimizer that clips
            gradients. Needed in TRAIN.
        eval_metric_ops: metrics by name: each a metric of ``ts.metrics``, which is updated with ``(labels, outputs)``,
            or a pair ``(metric, arguments)``, where ``arguments(features, labels, outputs)`` returns the tuple that it
            is updated with.
        export_outputs: for exported models: signatures by name, each a function of the outputs, or a
            ``ts.estimator.export.PredictOutput``, ``RegressionOutput`` or ``ClassificationOutput``. One must be called
            ``"serving_default"`` if there are several. ``None`` means the predictions.
        training_chief_hooks: hooks of training that run on the chief only.
        training_hooks: hooks of training.
        scaffold: must be ``None``. A scaffold says how a graph's variables are initialized and saved; here modules
            initialize themselves when they are made, ``warm_start_from=`` sets values before training, and hooks do the
            rest.
        evaluation_hooks: hooks of evaluation.
        prediction_hooks: hooks of prediction.
        module: called as ``outputs = module(features)`` in each step. Needed in every mode.

    Raises:
        ValueError: something that the mode needs is missing, ``loss`` is a tensor with several elements, or there are
            several ``export_outputs`` and no default one.
        TypeError: an argument has another type.

    Example:
        >>> def model_fn(features, labels, mode):
        ...     module = torch.nn.Linear(1, 1)
        ...     return ts.estimator.EstimatorSpec(
        ...         mode,
        ...         module=module,
        ...         predictions=lambda outputs: {"y": outputs},
        ...         loss=torch.nn.functional.mse_loss,
        ...         train_op=torch.optim.SGD(module.parameters(), lr=0.1),
        ...     )
        >>> model_fn(None, None, ts.estimator.ModeKeys.TRAIN).mode
        'train'
        >>> ts.estimator.EstimatorSpec("train")
        Traceback (most recent call last):
        ValueError: Missing train_op. ...
    """

    __slots__ = ()

    def __new__(  # noqa: D102, PLR0913 - documented on the class; tf's signature
        cls,
        mode: str | None,
        predictions: Any = None,
        loss: Any = None,
        train_op: Any = None,
        eval_metric_ops: dict[str, Any] | None = None,
        export_outputs: dict[str, Any] | None = None,
        training_chief_hooks: Iterable[SessionRunHook] | None = None,
        training_hooks: Iterable[SessionRunHook] | None = None,
        scaffold: None = None,
        evaluation_hooks: Iterable[SessionRunHook] | None = None,
        prediction_hooks: Iterable[SessionRunHook] | None = None,
        *,
        module: nn.Module | None = None,
    ) -> EstimatorSpec:
        _check_train_op(train_op, mode)
        loss = _checked_loss(loss, mode)
        predictions = _checked_predictions(predictions, mode)
        if mode == ModeKeys.PREDICT:
            export_outputs = _checked_export_outputs(export_outputs, predictions)
        training_hooks = check_hooks(training_hooks)
        evaluation_hooks = check_hooks(evaluation_hooks)
        prediction_hooks = check_hooks(prediction_hooks)
        training_chief_hooks = check_hooks(training_chief_hooks)
        if scaffold is not None:
            raise TypeError(
                "scaffold must be None, because there is no graph to initialize and save. Give the modules their "
                "initial values in model_fn, use Estimator(warm_start_from=) for others, and hooks or saving listeners "
                f"for what happens when training starts or saves. Received: {scaffold!r}"
            )
        if module is not None and not isinstance(module, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module. Received: {module!r}")
        return super().__new__(
            cls,
            mode=mode,
            predictions=predictions,
            loss=loss,
            train_op=train_op,
            eval_metric_ops=_checked_metrics(eval_metric_ops),
            export_outputs=export_outputs,
            training_chief_hooks=training_chief_hooks,
            training_hooks=training_hooks,
            scaffold=None,
            evaluation_hooks=evaluation_hooks,
            prediction_hooks=prediction_hooks,
            module=module,
        )

    @property
    def train_ops(self) -> tuple[Any, ...]:
        """The elements of ``train_op``; a single one is a tuple of one."""
        if self.train_op is None:
            return ()
        return tuple(self.train_op) if isinstance(self.train_op, (list, tuple)) else (self.train_op,)


class _TrainSpec(NamedTuple):
    input_fn: Callable[..., Any]
    max_steps: int | None
    hooks: tuple[SessionRunHook, ...]
    saving_listeners: tuple[CheckpointSaverListener, ...]


class TrainSpec(_TrainSpec):
    """The training of a ``train_and_evaluate``.

    Args:
        input_fn: returns the data, in batches for one replica; see ``Estimator.train``.
        max_steps: the global step at which training ends; ``None`` trains as long as there is data.
        hooks: called in every step, in every process that trains.
        saving_listeners: called before and after each checkpoint.

    Raises:
        TypeError: ``input_fn`` is no function, or a hook or listener has another type.
        ValueError: ``max_steps`` is not positive, or not whole.

    Example:
        >>> ts.estimator.TrainSpec(lambda: [torch.ones(2, 1)], max_steps=100).max_steps
        100
    """

    __slots__ = ()

    def __new__(  # noqa: D102 - documented on the class
        cls,
        input_fn: Callable[..., Any],
        max_steps: int | None = None,
        hooks: Iterable[SessionRunHook] | None = None,
        saving_listeners: Iterable[CheckpointSaverListener] | None = None,
    ) -> TrainSpec:
        _check_input_fn(input_fn)
        check_steps(max_steps=max_steps)
        if max_steps is not None and max_steps <= 0:
            raise ValueError(f"Must specify max_steps > 0, or None for all of the data. Received: {max_steps}")
        return super().__new__(cls, input_fn, max_steps, check_hooks(hooks), check_listeners(saving_listeners))


class _EvalSpec(NamedTuple):
    input_fn: Callable[..., Any]
    steps: int | None
    name: str | None
    hooks: tuple[SessionRunHook, ...]
    exporters: tuple[Exporter, ...]
    start_delay_secs: float
    throttle_secs: float


class EvalSpec(_EvalSpec):
    """The evaluation of a ``train_and_evaluate``.

    Args:
        input_fn: returns the data; see ``Estimator.evaluate``.
        steps: batches of an evaluation; ``None`` means all of the data.
        name: a part of the name of the directory for the results, if there are several evaluations.
        hooks: called in every step.
        exporters: an ``Exporter`` or several, called after each evaluation.
        start_delay_secs: how long an evaluator task waits before its first evaluation, in seconds.
        throttle_secs: the shortest time between the starts of two evaluations, in seconds.

    Raises:
        TypeError: ``input_fn`` is no function, ``name`` no string, or a hook or exporter has another type.
        ValueError: ``steps`` is not positive or not whole, a time is negative, or exporters share a name or have none.

    Example:
        >>> ts.estimator.EvalSpec(lambda: [torch.ones(2, 1)], throttle_secs=60).steps
        100
    """

    __slots__ = ()

    def __new__(  # noqa: D102 - documented on the class
        cls,
        input_fn: Callable[..., Any],
        steps: int | None = 100,
        name: str | None = None,
        hooks: Iterable[SessionRunHook] | None = None,
        exporters: Exporter | Iterable[Exporter] | None = None,
        start_delay_secs: float = 120,
        throttle_secs: float = 600,
    ) -> EvalSpec:
        _check_input_fn(input_fn)
        check_steps(steps=steps)
        if steps is not None and steps <= 0:
            raise ValueError(f"Must specify steps > 0, or None for all of the data. Received: {steps}")
        if name is not None and not isinstance(name, str):
            raise TypeError(f"`name` must be a string. Received: {name!r}")
        hooks = check_hooks(hooks)
        exporters = _checked_exporters(exporters)
        if start_delay_secs < 0:
            raise ValueError(f"Must specify start_delay_secs >= 0. Received: {start_delay_secs}")
        if throttle_secs < 0:
            raise ValueError(f"Must specify throttle_secs >= 0. Received: {throttle_secs}")
        return super().__new__(cls, input_fn, steps, name, hooks, exporters, start_delay_secs, throttle_secs)


def check_hooks(hooks: Iterable[SessionRunHook] | None) -> tuple[SessionRunHook, ...]:
    """Return hooks as a tuple, or raise a TypeError."""
    if isinstance(hooks, SessionRunHook):
        raise TypeError(f"hooks must be a list: [{type(hooks).__name__}(...)]. Received one hook: {hooks!r}")
    hooks = tuple(hooks or ())
    for hook in hooks:
        if not isinstance(hook, SessionRunHook):
            raise TypeError(f"All hooks must be SessionRunHook instances. Received: {hook!r}")
    return hooks


def check_listeners(listeners: Iterable[CheckpointSaverListener] | None) -> tuple[CheckpointSaverListener, ...]:
    """Return saving listeners as a tuple, or raise a TypeError."""
    if isinstance(listeners, CheckpointSaverListener):
        raise TypeError(f"saving_listeners must be a list. Received one listener: {listeners!r}")
    listeners = tuple(listeners or ())
    for listener in listeners:
        if not isinstance(listener, CheckpointSaverListener):
            raise TypeError(f"All saving_listeners must be CheckpointSaverListener instances. Received: {listener!r}")
    return listeners


def _check_train_op(train_op: Any, mode: str | None) -> None:
    if train_op is None:
        if mode == ModeKeys.TRAIN:
            raise ValueError("Missing train_op. Give EstimatorSpec(train_op=) the optimizer.")
        return
    for op in train_op if isinstance(train_op, (list, tuple)) else (train_op,):
        if not (callable(op) or hasattr(op, "step") or isinstance(op, (torch.amp.GradScaler, Tensor))):
            raise TypeError(
                "train_op must be a torch.optim.Optimizer, or a list of optimizers, learning-rate schedulers, a "
                f"GradScaler and functions without arguments. Received: {op!r}"
            )


def _checked_loss(loss: Any, mode: str | None) -> Any:
    if loss is None:
        if mode in (ModeKeys.TRAIN, ModeKeys.EVAL):
            raise ValueError("Missing loss. Give EstimatorSpec(loss=) a function of (outputs, labels).")
        return None
    _check_function_or_tensor(loss, "loss", "(outputs, labels)")
    if not isinstance(loss, Tensor):
        return loss
    if loss.numel() != 1:
        raise ValueError(f"Loss must be scalar. Received a tensor of shape {tuple(loss.shape)}.")
    return loss.reshape(())


def _checked_predictions(predictions: Any, mode: str | None) -> Any:
    if predictions is None:
        if mode == ModeKeys.PREDICT:
            raise ValueError(
                "Missing predictions. Give EstimatorSpec(predictions=) a function of the module's outputs."
            )
        return {}
    if isinstance(predictions, dict):
        for name, value in predictions.items():
            _check_function_or_tensor(value, f"predictions[{name!r}]", "the module's outputs")
        if predictions and all(callable(value) for value in predictions.values()):
            functions = dict(predictions)
            return lambda outputs: {name: fn(outputs) for name, fn in functions.items()}
    else:
        _check_function_or_tensor(predictions, "predictions", "the module's outputs")
    return predictions


def _check_function_or_tensor(value: Any, name: str, arguments: str) -> None:
    if not callable(value) and not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a function of {arguments} that returns tensors. Received: {value!r}")


def _checked_export_outputs(export_outputs: Any, predictions: Any) -> dict[str, ExportOutput]:
    if export_outputs is None:
        default = predictions if callable(predictions) else _constant(predictions)
        return {DEFAULT_SERVING_SIGNATURE_DEF_KEY: PredictOutput(default)}
    if not isinstance(export_outputs, dict):
        raise TypeError(f"export_outputs must be a dict of names to signatures. Received: {export_outputs!r}")
    checked: dict[str, ExportOutput] = {}
    for name, output in export_outputs.items():
        if not isinstance(output, ExportOutput) and not callable(output):
            raise TypeError(
                f"Values in export_outputs must be ExportOutput objects or functions of the module's outputs. Received "
                f"for {name!r}: {output!r}"
            )
        checked[name] = output if isinstance(output, ExportOutput) else PredictOutput(output)
    if len(checked) == 1:
        checked.setdefault(DEFAULT_SERVING_SIGNATURE_DEF_KEY, *checked.values())
    elif checked and DEFAULT_SERVING_SIGNATURE_DEF_KEY not in checked:
        raise ValueError(
            "Multiple export_outputs were provided, but none of them is the default one. Call that one "
            f"{DEFAULT_SERVING_SIGNATURE_DEF_KEY!r}. Received: {sorted(checked)}"
        )
    return checked


def _constant(value: Any) -> Callable[[Any], Any]:
    """Make a function of tensors, which the constructor accepts as tf does and the Estimator refuses."""
    return lambda outputs: value  # noqa: ARG005


def _checked_metrics(metrics: Any) -> dict[str, Any]:
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise TypeError(f"eval_metric_ops must be a dict of names to metrics. Received: {metrics!r}")
    for name, value in metrics.items():
        is_pair = isinstance(value, tuple) and len(value) == 2 and callable(value[1])
        if not _is_metric(value[0] if is_pair else value):
            raise TypeError(
                "Values of eval_metric_ops must be metrics, such as ts.metrics.Mean(), or pairs (metric, arguments) "
                f"with a function arguments(features, labels, outputs). Received for {name!r}: {value!r}"
            )
    return dict(metrics)


def _is_metric(value: Any) -> bool:
    """Say whether it is a metric of ``ts.metrics`` or torchmetrics, without importing these."""
    return isinstance(value, nn.Module) and hasattr(value, "update") and hasattr(value, "compute")


def _check_input_fn(input_fn: Any) -> None:
    if not callable(input_fn):
        raise TypeError(f"`input_fn` must be a function that returns the data. Received: {input_fn!r}")


def _checked_exporters(exporters: Any) -> tuple[Exporter, ...]:
    if not exporters:
        return ()
    given = tuple(exporters if isinstance(exporters, Iterable) else (exporters,))
    if not all(isinstance(exporter, Exporter) for exporter in given):
        raise TypeError(f"`exporters` must be an Exporter, an iterable of Exporter, or `None`. Received: {exporters!r}")
    names = [exporter.name for exporter in given]
    if not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"An Exporter's name must be a string that is not empty. Names of all exporters: {names}")
    if len(set(names)) < len(names):
        raise ValueError(f"`exporters` must have unique names. Names of all exporters: {names}")
    return given
