"""``RunConfig``: how an Estimator runs, as far as its ``model_fn`` doesn't say."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

from torchstrategy.base.devices import kind_of
from torchstrategy.base.log import logger
from torchstrategy.cluster_resolver.cluster_spec import ClusterSpec
from torchstrategy.cluster_resolver.tf_config import read_tf_config
from torchstrategy.estimator.task import Task, TaskType, read_task
from torchstrategy.ps.parameter_server_strategy import ParameterServerStrategy
from torchstrategy.strategies.strategy import Strategy

__all__ = ["RunConfig", "TaskType"]

_USE_DEFAULT: Any = object()

_REPLACEABLE = (
    "model_dir",
    "tf_random_seed",
    "save_summary_steps",
    "save_checkpoints_steps",
    "save_checkpoints_secs",
    "session_config",
    "keep_checkpoint_max",
    "keep_checkpoint_every_n_hours",
    "log_step_count_steps",
    "train_distribute",
    "device_fn",
    "protocol",
    "eval_distribute",
    "experimental_distribute",
    "experimental_max_worker_delay_secs",
    "session_creation_timeout_secs",
    "checkpoint_save_graph_def",
)
_ALWAYS_NONE = ("session_config", "device_fn", "experimental_distribute")
_BOTH_SAVES = "`save_checkpoints_steps` and `save_checkpoints_secs` cannot be both set."


class RunConfig:
    """How an Estimator trains, saves and logs, and which task of its cluster this process is.

    The cluster and the task come from the environment variable ``TF_CONFIG``. If it has none, they are those of the
    ``train_distribute`` strategy's cluster resolver, such as torchrun's.

    Args:
        model_dir: the directory for checkpoints and event files; the Estimator's argument of this name must agree.
        tf_random_seed: the seed of torch's random numbers that each train, evaluate and predict starts with; ``None``
            leaves them as they are.
        save_summary_steps: event files hold the loss of each so many steps; 0 or ``None`` writes none.
        save_checkpoints_steps: a checkpoint is saved after each so many steps.
        save_checkpoints_secs: a checkpoint is saved after so many seconds; 600 if neither is given. Both ``None`` means
            that none is saved in the course of training.
        session_config: must be ``None``, as there is no session.
        keep_checkpoint_max: how many of the latest checkpoints are kept; 0 or ``None`` keeps all.
        keep_checkpoint_every_n_hours: besides these, one checkpoint for each so many hours is kept.
        log_step_count_steps: each so many steps, the loss and the steps in a second are logged; ``None`` logs none.
        train_distribute: the strategy of training; ``None`` trains on one device, or as ``TF_CONFIG``'s cluster says.
        device_fn: must be ``None``, as modules are put where the strategy says.
        protocol: ``None``, or ``"grpc"``, which means the library's own.
        eval_distribute: the strategy of ``evaluate``; ``None`` evaluates on one device.
        experimental_distribute: must be ``None``; use ``train_distribute`` and ``eval_distribute``.
        experimental_max_worker_delay_secs: the longest time by which a worker's start is put off in an asynchronous
            training; worker *n* waits for 5 (n + 1) seconds at most.
        session_creation_timeout_secs: how long a worker waits for the chief to make the variables, in seconds.
        checkpoint_save_graph_def: has no effect: there is no graph to save.

    Raises:
        ValueError: a value is out of range, both saves are given, ``model_dir`` is empty or differs from the one in
            ``TF_CONFIG``, ``TF_CONFIG`` is wrong, or the strategy is one that an Estimator can't use.
        TypeError: a strategy is none, or ``TF_CONFIG``, or something in it, is of another kind than it should be.
        json.JSONDecodeError: ``TF_CONFIG`` is not JSON.

    Example:
        >>> config = ts.estimator.RunConfig(save_checkpoints_steps=100)
        >>> config.save_checkpoints_steps, config.save_checkpoints_secs, config.is_chief
        (100, None, True)
        >>> config.replace(save_checkpoints_secs=60).save_checkpoints_steps is None
        True
    """

    _model_dir: str | None
    _tf_random_seed: int | None
    _save_summary_steps: int | None
    _save_checkpoints_steps: int | None
    _save_checkpoints_secs: float | None
    _session_config: None
    _keep_checkpoint_max: int | None
    _keep_checkpoint_every_n_hours: float
    _log_step_count_steps: int | None
    _train_distribute: Strategy | None
    _device_fn: None
    _protocol: str | None
    _eval_distribute: Strategy | None
    _experimental_max_worker_delay_secs: int | None
    _session_creation_timeout_secs: float
    _checkpoint_save_graph_def: bool
    _task: Task

    def __init__(  # noqa: PLR0913 - tf's signature
        self,
        model_dir: str | os.PathLike[str] | None = None,
        tf_random_seed: int | None = None,
        save_summary_steps: int | None = 100,
        save_checkpoints_steps: int | None = _USE_DEFAULT,
        save_checkpoints_secs: float | None = _USE_DEFAULT,
        session_config: None = None,
        keep_checkpoint_max: int | None = 5,
        keep_checkpoint_every_n_hours: float = 10000,
        log_step_count_steps: int | None = 100,
        train_distribute: Strategy | None = None,
        device_fn: None = None,
        protocol: str | None = None,
        eval_distribute: Strategy | None = None,
        experimental_distribute: None = None,
        experimental_max_worker_delay_secs: int | None = None,
        session_creation_timeout_secs: float = 7200,
        checkpoint_save_graph_def: bool = True,  # noqa: FBT001, FBT002 - tf's signature
    ) -> None:
        if save_checkpoints_steps is _USE_DEFAULT and save_checkpoints_secs is _USE_DEFAULT:
            save_checkpoints_steps, save_checkpoints_secs = None, 600
        elif save_checkpoints_secs is _USE_DEFAULT:
            save_checkpoints_secs = None
        elif save_checkpoints_steps is _USE_DEFAULT:
            save_checkpoints_steps = None
        elif save_checkpoints_steps is not None and save_checkpoints_secs is not None:
            raise ValueError(_BOTH_SAVES)
        given = locals()
        tf_config = dict(read_tf_config(os.environ))
        if tf_config:
            logger.info("TF_CONFIG environment variable: %s", tf_config)
        given["model_dir"] = _model_dir(tf_config, model_dir)
        for name in _REPLACEABLE:
            setattr(self, f"_{name}", given[name])
        self._tf_config: dict[str, Any] = tf_config
        self._service = _checked_service(tf_config.get("service"))
        _validate(self)
        self._task = read_task(tf_config, train_distribute)

    def replace(self, **kwargs: Any) -> RunConfig:
        """Return a copy with other values.

        Setting one of ``save_checkpoints_steps`` and ``save_checkpoints_secs`` makes the other one ``None``.

        Args:
            **kwargs: arguments of the constructor.

        Raises:
            ValueError: an argument is none of the constructor's, or has a value that it refuses.

        Example:
            >>> ts.estimator.RunConfig().replace(keep_checkpoint_max=2).keep_checkpoint_max
            2
        """
        for name in kwargs:
            if name not in _REPLACEABLE:
                raise ValueError(f"Replacing {name} is not supported. Allowed properties are {list(_REPLACEABLE)}.")
        steps, secs = kwargs.get("save_checkpoints_steps"), kwargs.get("save_checkpoints_secs")
        if steps is not None and secs is not None:
            raise ValueError(_BOTH_SAVES)
        new = copy.copy(self)
        for name, value in kwargs.items():
            setattr(new, f"_{name}", os.fspath(value) if name == "model_dir" and value is not None else value)
        if steps is not None:
            new._save_checkpoints_secs = None
        elif secs is not None:
            new._save_checkpoints_steps = None
        _validate(new)
        if "train_distribute" in kwargs:
            new._task = read_task(new._tf_config, new._train_distribute)
        return new

    def __repr__(self) -> str:
        names = [name for name in _REPLACEABLE if name not in _ALWAYS_NONE]
        names += ["task_type", "task_id", "is_chief", "num_worker_replicas", "num_ps_replicas"]
        values = {name: getattr(self, name) for name in names}
        shown = (f"{name}={_name_of(value)}" for name, value in values.items())
        return f"{type(self).__name__}({', '.join(shown)})"

    @property
    def model_dir(self) -> str | None:
        """The directory for checkpoints and event files."""
        return self._model_dir

    @property
    def tf_random_seed(self) -> int | None:
        """The seed that each train, evaluate and predict starts with."""
        return self._tf_random_seed

    @property
    def save_summary_steps(self) -> int | None:
        """After how many steps the loss is written to an event file."""
        return self._save_summary_steps

    @property
    def save_checkpoints_steps(self) -> int | None:
        """After how many steps a checkpoint is saved."""
        return self._save_checkpoints_steps

    @property
    def save_checkpoints_secs(self) -> float | None:
        """After how many seconds a checkpoint is saved."""
        return self._save_checkpoints_secs

    @property
    def session_config(self) -> None:
        """``None``, as there is no session."""
        return self._session_config

    @property
    def keep_checkpoint_max(self) -> int | None:
        """How many of the latest checkpoints are kept."""
        return self._keep_checkpoint_max

    @property
    def keep_checkpoint_every_n_hours(self) -> float:
        """For how many hours one checkpoint is kept besides the latest ones."""
        return self._keep_checkpoint_every_n_hours

    @property
    def log_step_count_steps(self) -> int | None:
        """After how many steps the loss and the speed are logged."""
        return self._log_step_count_steps

    @property
    def train_distribute(self) -> Strategy | None:
        """The strategy of training."""
        return self._train_distribute

    @property
    def device_fn(self) -> None:
        """``None``, as modules are put where the strategy says."""
        return self._device_fn

    @property
    def protocol(self) -> str | None:
        """How tasks talk, as it was given."""
        return self._protocol

    @property
    def eval_distribute(self) -> Strategy | None:
        """The strategy of evaluation."""
        return self._eval_distribute

    @property
    def experimental_max_worker_delay_secs(self) -> int | None:
        """By how many seconds a worker's start is put off at most."""
        return self._experimental_max_worker_delay_secs

    @property
    def session_creation_timeout_secs(self) -> float:
        """How many seconds a worker waits for the chief to make the variables."""
        return self._session_creation_timeout_secs

    @property
    def checkpoint_save_graph_def(self) -> bool:
        """As it was given; without effect."""
        return self._checkpoint_save_graph_def

    @property
    def task_type(self) -> str:
        """This process's job, ``"chief"``, ``"worker"``, ``"ps"``, ``"evaluator"`` or ``"master"``."""
        return self._task.task_type

    @property
    def task_id(self) -> int:
        """This process's index in its job."""
        return self._task.task_id

    @property
    def is_chief(self) -> bool:
        """Whether this process is the chief, which saves and writes event files."""
        return self._task.is_chief

    @property
    def cluster_spec(self) -> ClusterSpec:
        """The cluster; an empty one without a cluster, and for an evaluator."""
        return self._task.cluster_spec

    @property
    def num_worker_replicas(self) -> int:
        """How many tasks train, which are the workers and the chief."""
        return self._task.num_worker_replicas

    @property
    def num_ps_replicas(self) -> int:
        """How many parameter servers there are."""
        return self._task.num_ps_replicas

    @property
    def global_id_in_cluster(self) -> int | None:
        """This process's number among all tasks, the chief's being 0; ``None`` for an evaluator."""
        return self._task.global_id_in_cluster

    @property
    def master(self) -> str:
        """The address of this process's own task, after ``grpc://`` as in tf; empty without other tasks."""
        return self._task.master

    @property
    def evaluation_master(self) -> str:
        """What ``TF_CONFIG`` says as ``eval_session_master``; empty if nothing."""
        return self._task.evaluation_master

    @property
    def service(self) -> dict[str, Any] | None:
        """What ``TF_CONFIG`` says as ``service``."""
        return self._service


def _model_dir(tf_config: dict[str, Any], model_dir: str | os.PathLike[str] | None) -> str | None:
    model_dir = None if model_dir is None else os.fspath(model_dir)
    if model_dir == "":
        raise ValueError("model_dir should be non-empty.")
    other = tf_config.get("model_dir")
    if other == "":
        raise ValueError("model_dir in TF_CONFIG should be non-empty.")
    if other:
        if model_dir and other != model_dir:
            raise ValueError(
                "The `model_dir` of RunConfig must be the one in TF_CONFIG, if both are set. Received: "
                f"{model_dir!r} and {other!r}"
            )
        logger.info("Using model_dir in TF_CONFIG: %s", other)
    return model_dir or other


def _name_of(value: Any) -> str:
    return type(value).__name__ if isinstance(value, Strategy) else repr(value)


def _checked_service(service: Any) -> dict[str, Any] | None:
    if service is not None and not isinstance(service, dict):
        raise TypeError(f'If "service" is set in TF_CONFIG, it must be a dict. Received: {service!r}')
    return service


def _validate(config: RunConfig) -> None:
    def check(name: str, is_right: Callable[[Any], bool], expected: str) -> None:
        value = getattr(config, f"_{name}")
        try:
            is_valid = value is None or is_right(value)
        except TypeError:  # a text can't be compared
            is_valid = False
        if not is_valid:
            raise ValueError(f"RunConfig's {name} {expected}. Received: {value!r}")

    check("model_dir", bool, "should be non-empty")
    for name in ("save_summary_steps", "save_checkpoints_steps", "save_checkpoints_secs", "keep_checkpoint_max"):
        check(name, lambda value: value >= 0, "should be >= 0")
    for name in ("keep_checkpoint_every_n_hours", "log_step_count_steps", "session_creation_timeout_secs"):
        check(name, lambda value: value > 0, "should be > 0")
    for name in ("tf_random_seed", "experimental_max_worker_delay_secs"):
        check(name, lambda value: isinstance(value, int), "must be an integer")
    nothing: Callable[[Any], bool] = lambda value: False  # noqa: ARG005, E731
    check("session_config", nothing, "must be None: there is no session. What it sets has a place in torch itself")
    check("device_fn", nothing, "must be None: modules are put where the strategy says")
    check("experimental_distribute", nothing, "must be None: use train_distribute and eval_distribute")
    check("protocol", lambda value: value == "grpc", 'must be None or "grpc"')
    for name in ("train_distribute", "eval_distribute"):
        _check_strategy(name, getattr(config, f"_{name}"))


def _check_strategy(name: str, strategy: Any) -> None:
    if strategy is None:
        return
    if not isinstance(strategy, Strategy):
        raise TypeError(f"RunConfig({name}=) must be a strategy. Received: {strategy!r}")
    if kind_of(strategy.placement.devices[0]).is_traced:
        raise ValueError(
            f"RunConfig({name}=) can't be a TPUStrategy: an Estimator's loop reads the loss and calls hooks in every "
            "step, where a TPU's program must run on. Use ts.Model's fit, or a custom loop with strategy.run."
        )
    if isinstance(strategy, ParameterServerStrategy):
        raise ValueError(
            f"RunConfig({name}=) can't be the ParameterServerStrategy of a coordinator: in an Estimator each worker "
            "runs a loop of its own. Use ts.compat.v1.distribute.experimental.ParameterServerStrategy(), or ts.Model's "
            "fit, or a custom loop with a ClusterCoordinator."
        )
