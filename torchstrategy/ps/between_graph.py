"""Asynchronous training without a coordinator: chief and workers run the program, and share variables on servers."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from torchstrategy.base.addresses import are_loopback
from torchstrategy.base.devices import Placement, full_device_name, local_devices, names_for_log
from torchstrategy.base.log import logger
from torchstrategy.base.options import InputOptions, VariableSynchronization
from torchstrategy.cluster_resolver.cluster_spec import ClusterSpec
from torchstrategy.cluster_resolver.multi_worker_util import validate_addresses
from torchstrategy.cluster_resolver.resolver import ClusterResolver
from torchstrategy.cluster_resolver.simple import SimpleClusterResolver
from torchstrategy.cluster_resolver.tf_config import TFConfigClusterResolver
from torchstrategy.data.own_streams import InputContext
from torchstrategy.errors import DeadlineExceededError, UnavailableError
from torchstrategy.gradients.hooks import install
from torchstrategy.ps.bindings import Kind
from torchstrategy.ps.served import Served
from torchstrategy.ps.served_optimizers import SharedStep, SharedVariable, push_steps
from torchstrategy.ps.served_variables import make_served
from torchstrategy.ps.sharing import SharedValues
from torchstrategy.ps.sharing_client import SharingClient, SharingLink, connect, finish
from torchstrategy.ps.transport.control_loop import ControlLoop
from torchstrategy.ps.transport.secret import find_secret
from torchstrategy.ps.transport.sockets import require
from torchstrategy.replicas.on_read import make_variable
from torchstrategy.replicas.variables import Variable, VariableOptions
from torchstrategy.strategies.extended import StrategyExtended
from torchstrategy.strategies.strategy import Strategy

__all__ = ["BetweenGraphParameterServerStrategy"]

_JOBS = ("chief", "master", "worker", "ps", "evaluator")
_CHIEFS = ("chief", "master")


class BetweenGraphParameterServerStrategy(Strategy):
    """Asynchronous training without a coordinator: TensorFlow 1's ``ParameterServerStrategy``.

    The chief and each worker run the same program, each its own loop on all its devices, against variables that live on
    the parameter servers: before each ``run`` a process pulls what has changed, and ``optimizer.step()`` sends the
    gradients, summed over the process's replicas, with which the servers update. Processes don't wait for each other.

    The chief makes the variables. At its first ``run``, or in ``wait_until_ready``, it gives them their values, also
    restored ones, and the workers, which have waited for that, begin. Only the chief saves checkpoints. Without a
    cluster this process trains alone.

    A task ``ps`` runs ``ts.Server``, or ``ts.estimator.train_and_evaluate``. It and an evaluator may make the strategy,
    as the one program of all tasks does, but can't train with it.

    Args:
        cluster_resolver: describes the cluster and this task; ``None`` reads ``TF_CONFIG``.
        devices: this process's devices, such as ``["/gpu:0", "/gpu:1"]`` or ``["cpu:0", "cpu:1"]``; a number means so
            many GPUs, or CPU replicas where there are no GPUs; ``None`` means all visible GPUs, or one CPU replica.
        timeout_seconds: how long to wait for the parameter servers, and as a worker for the chief.

    Raises:
        TypeError: ``cluster_resolver`` is no resolver.
        ValueError: the cluster has no ``ps`` or nobody who trains, or this task is none of it.

    Example:
        >>> strategy = ts.compat.v1.distribute.experimental.ParameterServerStrategy(devices=["cpu:0", "cpu:1"])
        >>> strategy.num_replicas_in_sync  # in this process
        2
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        *,
        devices: Sequence[str | torch.device] | int | None = None,
        timeout_seconds: float = 1800.0,
    ) -> None:
        resolver = TFConfigClusterResolver() if cluster_resolver is None else cluster_resolver
        if not isinstance(resolver, ClusterResolver):
            raise TypeError(
                "cluster_resolver must be a ts.cluster_resolver.ClusterResolver, such as TFConfigClusterResolver(). "
                f"Received: {cluster_resolver!r}"
            )
        self.cluster_spec = ClusterSpec(resolver.cluster_spec())
        self._cluster_task = _check_task(self.cluster_spec, resolver)
        own = local_devices(devices)
        super().__init__(Placement(len(own), 0, own))
        # Also for one replica: an optimizer made outside the scope must not update this process's copies.
        install(self)
        self.record.takes_up = True
        self._cluster_resolver = resolver
        self._timeout_s = timeout_seconds
        self._shared: SharedValues | None = None
        #: Whether there is something new that is not shared yet.
        self._is_behind = False
        self._closing: Callable[[], Any] = lambda: None
        #: Number of the training that this process has finished, and what was made for it and earlier ones.
        self._finished: int | None = None
        self._old: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        if self._cluster_task is None:
            logger.info("ParameterServerStrategy trains in this process alone, on %s: no cluster was found.", own)
        else:
            self._task = self._cluster_task
            logger.info(
                "ParameterServerStrategy with compute_devices = %s, as /job:%s/task:%d of the cluster %s",
                names_for_log(own, *self._task),
                *self._task,
                self.cluster_spec.as_dict(),
            )

    @property
    @override
    def is_chief(self) -> bool:
        """Whether this process makes and saves the variables, as the chief, or worker 0 where there is none, does."""
        return self._cluster_task is None or self._cluster_task == self._chief_task

    @property
    @override
    def cluster_resolver(self) -> Any:
        """The resolver that described the cluster."""
        return self._cluster_resolver

    @property
    @override
    def extended(self) -> StrategyExtended:
        return _SharedExtended(self)

    @override
    def scope(self) -> Any:
        """Return a context manager that makes this strategy current, and connects to the parameter servers.

        Raises:
            RuntimeError: this task does not train.
            UnavailableError: a parameter server refuses this task.
            DeadlineExceededError: a parameter server does not answer.

        Example:
            >>> strategy = ts.compat.v1.distribute.experimental.ParameterServerStrategy()
            >>> with strategy.scope():
            ...     model = torch.nn.Linear(2, 1)
        """
        self._open()
        return super().scope()

    def wait_until_ready(self, timeout_seconds: float | None = None) -> None:
        """Let, as the chief, the workers begin with the variables that were made; wait for that, as a worker.

        The first ``run`` does it, too. Call it after restoring, to read a shared ``ts.Variable`` before the first run.

        Args:
            timeout_seconds: how long to wait for the chief; ``None`` means the strategy's limit.

        Raises:
            DeadlineExceededError: the chief does not come.
            InvalidArgumentError: this task's program has made other variables than the chief's.
            UnavailableError: a parameter server is gone.
        """
        self._require_cross_replica()
        self._take_up_new()
        shared = self._open()
        if shared is not None:
            shared.get_ready(self._timeout_s if timeout_seconds is None else timeout_seconds)
            shared.pull()

    def alone(self) -> BetweenGraphParameterServerStrategy:
        """Return a strategy for this process's devices without the cluster, such as for evaluating a checkpoint.

        Returns:
            The strategy itself if it has no cluster.

        Example:
            >>> strategy = ts.compat.v1.distribute.experimental.ParameterServerStrategy()
            >>> strategy.alone() is strategy
            True
        """
        if self._cluster_task is None:
            return self
        return type(self)(SimpleClusterResolver(ClusterSpec({})), devices=self.placement.devices)

    def close(self, *, finished: bool = True) -> None:
        """Disconnect from the parameter servers; the next ``scope`` begins another training.

        Args:
            finished: tell the parameter servers that this process needs them no longer. One that
                ``ts.estimator.train_and_evaluate`` runs ends when the chief and all workers are done; a process that
                has not said so is waited for during the grace time, as it may come back.
        """
        shared, self._shared = self._shared, None
        if shared is not None:
            self._finished = shared.client.number
            self._old.update((id(obj), obj) for obj in self.record)
            if finished:
                finish(shared.client.links)
        self._closing()

    def leave(self, timeout_seconds: float = 10.0) -> None:
        """Tell the parameter servers that this process will not train, so that they need not wait for it.

        Args:
            timeout_seconds: how long to look for servers, which may be gone.
        """
        if self._cluster_task is None or self._shared is not None:
            return
        try:
            loop, links = self._connect(timeout_seconds)
        except (DeadlineExceededError, UnavailableError) as error:
            logger.info("The parameter servers are not told that this process does not train: %s", error)
            return
        finish(links)
        loop.close()

    @override
    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> Any:
        """Feed this process's replicas from the dataset of per-replica batches that a function returns.

        Each training process has input pipelines of its own: the chief the first ones, then the workers in order.
        """
        index, count = self._position
        if not callable(dataset_fn) or count == 1:
            return super().distribute_datasets_from_function(dataset_fn, options)

        @functools.wraps(dataset_fn)
        def in_cluster(own: InputContext) -> Any:
            first = index * own.num_input_pipelines
            return dataset_fn(
                InputContext(count * own.num_input_pipelines, first + own.input_pipeline_id, own.num_replicas_in_sync)
            )

        return super().distribute_datasets_from_function(in_cluster, options)

    @property
    def _chief_task(self) -> tuple[str, int]:
        return next(((job, 0) for job in _CHIEFS if job in self.cluster_spec.jobs), ("worker", 0))

    @property
    def _position(self) -> tuple[int, int]:
        """This process's number among those that train, and how many there are."""
        tasks = training_tasks(self.cluster_spec)
        return (tasks.index(self._task), len(tasks)) if self._task in tasks else (0, 1)

    def _open(self) -> SharedValues | None:
        """Return what this process shares, connected; ``None`` if it trains alone."""
        if self._shared is not None or self._cluster_task is None:
            return self._shared
        job, _ = self._cluster_task
        if job not in (*_CHIEFS, "worker"):
            self._refuse_task(job)
        loop, links = self._connect(self._timeout_s)
        self._closing = weakref.finalize(self, loop.close)
        chief_job, chief_index = self._chief_task
        try:
            client = SharingClient(
                links,
                f"/job:{chief_job}/task:{chief_index}",
                is_chief=self.is_chief,
                timeout_seconds=self._timeout_s,
                after=self._finished,
            )
        except BaseException:
            self._closing()
            raise
        self._shared = SharedValues(client, self.placement.devices[0], len(links), is_chief=self.is_chief)
        return self._shared

    def _connect(self, timeout_seconds: float) -> tuple[ControlLoop, list[SharingLink]]:
        """Connect to all parameter servers."""
        require()
        addresses = [self.cluster_spec.task_address("ps", k) for k in self.cluster_spec.task_indices("ps")]
        secret = find_secret(are_loopback(addresses))
        loop = ControlLoop()
        try:
            links = connect(
                addresses,
                "/job:{}/task:{}".format(*self._task),
                is_chief=self.is_chief,
                loop=loop,
                secret=secret,
                timeout_seconds=timeout_seconds,
            )
        except BaseException:
            loop.close()
            raise
        return loop, links

    @override
    def _check_lone_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self._cluster_task is not None:
            raise RuntimeError(
                f"{type(optimizer).__name__}.step() would update this process's values only: its parameters were not "
                f"made in the scope of the {type(self).__name__}. Make module and optimizer inside "
                "`with strategy.scope():`."
            )

    def _refuse_task(self, job: str) -> NoReturn:
        if job == "ps":
            raise RuntimeError(
                "This process is a parameter server (job 'ps'), which does not train. Run `ts.Server(cluster, 'ps', "
                "index).join()` here, or ts.estimator.train_and_evaluate, which does that."
            )
        raise RuntimeError(
            "This process is the evaluator, which does not train. Evaluate without the strategy: leave out "
            "RunConfig(eval_distribute=...), or give it another one."
        )

    @override
    def _take_up_new(self) -> None:
        self.record.claim()
        if self.record.has_new and self._cluster_task is not None:
            gc.collect()  # what the program has dropped must be gone in every process alike
        self._is_behind = self._is_behind or self.record.has_new
        super()._take_up_new()
        if self._is_behind:  # what was refused is refused again, instead of being trained here alone
            self._share()
            self._is_behind = False

    def _share(self) -> None:
        """Put new modules and optimizers on the parameter servers."""
        shared = self._open()
        if shared is not None:
            objects = [obj for obj in self.record if self._old.get(id(obj)) is not obj]
            shared.adopt(objects)
            for obj in objects:
                if isinstance(obj, Optimizer):
                    push_steps(obj)

    @override
    def _run_replicas(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shared = self._open()
        if shared is None:
            return super()._run_replicas(fn, args, kwargs)
        shared.get_ready(self._timeout_s)
        shared.pull()
        result = super()._run_replicas(fn, args, kwargs)
        shared.push_buffers()
        return result

    @override
    def _make_variable(self, context: Any, value: Tensor, options: VariableOptions) -> Variable | None:
        shared = self._open()
        if shared is None or options.trainable or options.synchronization is VariableSynchronization.ON_READ:
            return make_variable(self, context, value, options)
        if context is not None:
            raise ValueError(
                "A ts.Variable on parameter servers can't be made in `run`, where each call would make another one. "
                "Make it in `strategy.scope()`."
            )
        binding = shared.create(options.name, value, Kind.VARIABLE, trainable=False)
        variable: Variable = make_served(SharedVariable, shared.bindings, binding, options)
        self.record.own(variable)
        return variable

    @override
    def _before_capture(self) -> None:
        shared = self._shared
        if shared is not None:
            shared.pull()

    def _step(self, parts: Sequence[SharedStep]) -> list[None]:
        """Sum the gradients and send them once, while all replicas wait."""
        if self.num_replicas_in_sync > 1:
            self.gradients.summer([part.gradients for part in parts])
        if self._shared is None:
            raise RuntimeError("The strategy was closed. Make model and optimizer anew, in `strategy.scope()`.")
        self._shared.step([part.optimizer for part in parts])
        for part in parts:
            self.gradients.ledger.note_step(part.gradients.parameters)
        return [None] * len(parts)


class _SharedExtended(StrategyExtended):
    """Variables are on the parameter servers."""

    _strategy: BetweenGraphParameterServerStrategy

    @property
    @override
    def parameter_devices(self) -> tuple[str, ...]:
        """Full names of the devices that hold variables."""
        if self._strategy._cluster_task is None:
            return super().parameter_devices
        cpu = torch.device("cpu", 0)
        return tuple(full_device_name(cpu, "ps", index) for index in self._strategy.cluster_spec.task_indices("ps"))

    @property
    @override
    def experimental_between_graph(self) -> bool:
        return True

    @property
    @override
    def experimental_should_init(self) -> bool:
        return self._strategy.is_chief

    @override
    def _copies_of(self, v: Any) -> tuple[Any, ...]:
        if isinstance(v, Served):
            shared = self._strategy._shared
            return (v,) if shared is not None and v.bindings is shared.bindings else ()
        return super()._copies_of(v)


def training_tasks(spec: ClusterSpec) -> list[tuple[str, int]]:
    """Return job and index of the tasks that train, the chief first."""
    return [(job, k) for job in (*_CHIEFS, "worker") if job in spec.jobs for k in spec.task_indices(job)]


def _check_task(spec: ClusterSpec, resolver: ClusterResolver) -> tuple[str, int] | None:
    """Return this process's job and index; ``None`` if there is no cluster.

    Raises:
        ValueError: the cluster is not one for parameter servers, or has no such task.
    """
    if not spec.jobs:
        return None
    if unknown := [job for job in spec.jobs if job not in _JOBS]:
        raise ValueError(f"The cluster has the jobs {unknown}; known are {', '.join(_JOBS)}. Received: {spec!r}")
    if "ps" not in spec.jobs or not training_tasks(spec):
        raise ValueError(
            "The cluster must have a parameter server, job 'ps', and a 'chief' or 'worker' that trains. "
            f"Received: {spec!r}"
        )
    if sum(spec.num_tasks(job) for job in _CHIEFS if job in spec.jobs) > 1:
        raise ValueError(f"The cluster must have at most one chief. Received: {spec!r}")
    validate_addresses(spec, type(resolver).__name__)
    job, index = resolver.task_type, resolver.task_id
    if job == "evaluator":  # need not be in the cluster
        return job, index or 0
    if job not in spec.jobs or index not in spec.task_indices(job):
        raise ValueError(
            f"This process is /job:{job}/task:{index}, which the cluster does not have: {spec!r}. Set TF_CONFIG's "
            "'task' to one of its tasks."
        )
    return job, index
