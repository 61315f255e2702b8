"""Asynchronous training: variables on parameter servers, functions on workers, one coordinator."""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from torchstrategy.base.addresses import are_loopback
from torchstrategy.base.devices import Placement, full_device_name, local_devices, tensor_device
from torchstrategy.base.later import explains_arguments
from torchstrategy.base.log import logger, warn_once
from torchstrategy.base.options import AutoShardPolicy, InputOptions, RunOptions
from torchstrategy.cluster_resolver.cluster_spec import ClusterSpec
from torchstrategy.cluster_resolver.multi_worker_util import hint_of_jobs, validate_addresses
from torchstrategy.cluster_resolver.resolver import ClusterResolver
from torchstrategy.data.own_streams import InputContext
from torchstrategy.errors import UnavailableError
from torchstrategy.ps.bindings import Bindings
from torchstrategy.ps.client import ParameterClient
from torchstrategy.ps.layout import Placer
from torchstrategy.ps.links import ServerLink, grace_seconds, wait_for_servers
from torchstrategy.ps.partitioning import Partitioner
from torchstrategy.ps.served import Served
from torchstrategy.ps.served_hosting import ServedHosting
from torchstrategy.ps.shipping import Shipper
from torchstrategy.ps.transport.control_loop import ControlLoop
from torchstrategy.ps.transport.secret import find_secret
from torchstrategy.ps.transport.sockets import require
from torchstrategy.replicas.hosting import Hosting
from torchstrategy.replicas.variables import Variable, VariableOptions
from torchstrategy.strategies.extended import StrategyExtended
from torchstrategy.strategies.strategy import Strategy

__all__ = ["ParameterServerStrategy", "close_strategies_of"]

_JOBS = ("chief", "worker", "ps", "evaluator")
_PLACEMENTS = ("round_robin", "by_size")
_HINT = "Is `python -m torchstrategy server` running there, with the same cluster and the same secret?"


class ParameterServerStrategy(Strategy):
    """Asynchronous training: variables live on parameter servers, and functions run on workers.

    This is for the *coordinator*, the one process that runs the program. Tasks ``worker`` and ``ps`` of the cluster run
    a ``ts.Server`` each. Modules, optimizers and variables made in ``scope()`` are put on the parameter servers when
    the scope closes; functions given to ``ts.coordinator.ClusterCoordinator(strategy).schedule`` use them unchanged:
    a worker pulls the parameters that changed, and ``optimizer.step()`` sends gradients, with which the servers
    update. Updates of different workers are not synchronised.

    Args:
        cluster_resolver: describes the cluster, which needs a ``ps`` and a ``worker`` job.
        variable_partitioner: called with the shape and dtype of each variable that is no scalar; returns into how many
            parts its axes are cut, such as ``ts.experimental.partitioners.MinSizePartitioner(max_shards=2)``. Only the
            first axis can be cut. ``None`` cuts nothing.
        placement: which server gets a variable or part: ``"round_robin"``, in the order in which they are made, or
            ``"by_size"``, the one that has the fewest bytes.
        max_staleness: ``None`` lets workers go on independently. With ``s`` no function starts while one that started
            more than ``s`` functions before is still running; 0 runs one function at a time, in order. What the
            program assigns to variables acts at once: call ``join`` before.
        timeout_seconds: how long to wait for the parameter servers.
        ps_grace_s: for how many seconds a parameter server that is out of reach is waited for. If the same process is
            back by then, so are its variables, and all goes on; 0 makes it an error at once, as is one whose process
            has ended. ``None`` takes ``TORCHSTRATEGY_PS_GRACE_S``, by default 30.

    Raises:
        TypeError: ``cluster_resolver`` is no resolver, or ``variable_partitioner`` can't be called.
        ValueError: the cluster lacks a job or has a wrong one, this task is not the coordinator's, or an option is
            unknown.
        ImportError: pyzmq or cloudpickle is not installed.
        DeadlineExceededError: a parameter server can't be reached.

    Example:
        >>> with ts.testing.LocalCluster(num_workers=1, num_ps=1) as cluster:
        ...     strategy = ts.ParameterServerStrategy(cluster.resolver())
        ...     with strategy.scope():
        ...         v = ts.Variable(1.0)
        ...     coordinator = ts.coordinator.ClusterCoordinator(strategy)
        ...     result = coordinator.schedule(lambda: 2 * v.assign_add(2.0).read_value())
        ...     coordinator.join()
        ...     print(float(v), result.fetch())
        ...     strategy.close()
        3.0 6.0
    """

    _is_on_worker = False
    hosting: Any  # on the coordinator a ServedHosting

    @explains_arguments(
        "A cluster resolver says where the tasks are: `ts.cluster_resolver.TFConfigClusterResolver()` reads TF_CONFIG. "
        "Estimators take `ts.compat.v1.distribute.experimental.ParameterServerStrategy()`, which needs none."
    )
    def __init__(
        self,
        cluster_resolver: ClusterResolver,
        variable_partitioner: Partitioner | Callable[..., Sequence[int]] | None = None,
        *,
        placement: str = "round_robin",
        max_staleness: int | None = None,
        timeout_seconds: float = 1800.0,
        ps_grace_s: float | None = None,
    ) -> None:
        spec = _check_cluster(cluster_resolver)
        if variable_partitioner is not None and not callable(variable_partitioner):
            raise TypeError(
                "variable_partitioner must be a partitioner, such as "
                f"ts.experimental.partitioners.MinSizePartitioner(). Received: {variable_partitioner!r}"
            )
        if placement not in _PLACEMENTS:
            raise ValueError(f"placement must be one of {', '.join(_PLACEMENTS)}. Received: {placement!r}")
        if max_staleness is not None and (not isinstance(max_staleness, int) or max_staleness < 0):
            raise ValueError(f"max_staleness must be None or an integer of at least 0. Received: {max_staleness!r}")
        self._ps_grace_s = grace_seconds(ps_grace_s)
        require()
        super().__init__(Placement(1, 0, (torch.device("cpu", 0),)))
        self._task = ("chief", 0)
        self._cluster_resolver: ClusterResolver | None = cluster_resolver
        self.cluster_spec = spec
        self.max_staleness = max_staleness
        #: Of two coordinators the one that began later goes on: servers refuse the other.
        self.incarnation = time.time_ns()
        addresses = [address for job in ("ps", "worker") for address in _addresses(spec, job)]
        self.secret = find_secret(are_loopback(addresses))
        self.loop = ControlLoop()
        #: What is closed with the strategy: whoever works with it adds its own.
        self.resources = contextlib.ExitStack()
        self.resources.callback(self.loop.close)
        self._closing = weakref.finalize(self, self.resources.close)
        _connected.add(self)
        logger.info(
            "ParameterServerStrategy is now connecting to cluster with cluster_spec: %s (%d workers, %d ps)",
            spec.as_dict(),
            self._num_workers,
            self._num_ps,
        )
        try:
            self._servers = [self._connect(index) for index in range(spec.num_tasks("ps"))]
            wait_for_servers(self._servers, "the coordinator", _HINT, timeout_seconds)
            client = ParameterClient(self._servers)
        except BaseException:
            self.close()
            raise
        self._serve_with(client, variable_partitioner, by_size=placement == "by_size")

    def _serve_with(self, client: ParameterClient, partitioner: Any, *, by_size: bool) -> None:
        """Put what scopes record on the servers behind a client."""
        self.client = client
        self.bindings = Bindings(client, self.placement.devices[0], is_coordinator=True)
        self.placer = Placer(self._num_ps, partitioner, by_size=by_size)
        self.shipper = Shipper(self)

    @override
    def _make_hosting(self, *, concurrent: bool, check_every: int) -> Hosting:
        if self._is_on_worker:
            return super()._make_hosting(concurrent=concurrent, check_every=check_every)
        return ServedHosting(self)

    @classmethod
    def _on_worker(cls, cluster_spec: ClusterSpec, worker_index: int, device: torch.device | None = None) -> Any:
        """Return what stands for the coordinator's strategy in a worker."""
        strategy = cls.__new__(cls)
        if device is None:
            device = local_devices(None)[0]
        strategy._is_on_worker = True
        Strategy.__init__(strategy, Placement(1, 0, (device,)))
        strategy._task = ("worker", worker_index)
        strategy._cluster_resolver = None
        strategy.cluster_spec = cluster_spec
        return strategy

    @property
    def _num_workers(self) -> int:
        return self.cluster_spec.num_tasks("worker")

    @property
    def _num_ps(self) -> int:
        return self.cluster_spec.num_tasks("ps")

    @property
    @override
    def cluster_resolver(self) -> Any:
        """The resolver that described the cluster; ``None`` in a worker."""
        return self._cluster_resolver

    @property
    @override
    def extended(self) -> StrategyExtended:
        return StrategyExtended(self) if self._is_on_worker else _ServedExtended(self)

    def close(self) -> None:
        """Disconnect from the cluster, whose servers go on and wait for the next coordinator."""
        self._closing()

    def _prepare_closures(self) -> None:
        """Bring the servers up to date before a function is scheduled: new objects, hyper-parameters, written values.

        Raises:
            UnavailableError: a parameter server is gone.
        """
        self._take_up_new()
        self.hosting.send_changes()

    def _adopt_optimizer(self, optimizer: Any) -> None:
        """Take up an optimizer that was made outside the scope, for parameters that were made inside.

        Raises:
            ValueError: it has other parameters as well.
        """
        self.hosting.adopt_optimizer(optimizer)

    @override
    def _coordinator_class(self) -> Any:
        from torchstrategy.ps.coordinator.cluster_coordinator import ClusterCoordinator  # noqa: PLC0415 - few need it here

        return ClusterCoordinator

    def _ps_failure(self, index: int) -> UnavailableError | None:
        """Return why a parameter server is lost, or ``None`` while it is there."""
        return self._servers[index].failure

    @override
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        if not self._is_on_worker:
            warn_once(
                "ParameterServerStrategy.run was called in the coordinator's program, so the function runs here and "
                "not on a worker. Schedule it: ts.coordinator.ClusterCoordinator(strategy).schedule(...)."
            )
        return super().run(fn, args, kwargs, options)

    @override
    def experimental_distribute_dataset(
        self,
        dataset: Any,
        options: InputOptions | None = None,
        *,
        batch_size: int | None = None,
        auto_shard_policy: AutoShardPolicy | None = None,
    ) -> Any:
        self._check_on_worker("experimental_distribute_dataset")
        return super().experimental_distribute_dataset(
            dataset, options, batch_size=batch_size, auto_shard_policy=auto_shard_policy
        )

    @override
    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> Any:
        self._check_on_worker("distribute_datasets_from_function")
        return super().distribute_datasets_from_function(dataset_fn, options)

    def _check_on_worker(self, method: str) -> None:
        if not self._is_on_worker:
            raise ValueError(
                f"{method} of a ParameterServerStrategy must be called on the workers, each of which reads a dataset "
                "of its own: give ClusterCoordinator.create_per_worker_dataset a function that calls it."
            )

    @override
    def _make_variable(self, context: Any, value: Tensor, options: VariableOptions) -> Variable | None:
        if self._is_on_worker:
            raise ValueError(
                "A ts.Variable can't be made in a function that runs on a worker: each call, and each repetition "
                "after a failure, would make another one. Make it in the coordinator's program, in `strategy.scope()`."
            )
        return self.hosting.make_variable(value, options)  # type: ignore[no-any-return]

    @override
    def _take_up_new(self) -> None:
        if not self._is_on_worker:
            self.hosting.adopt_new()

    def _connect(self, index: int) -> ServerLink:
        link = ServerLink(index, self.cluster_spec.task_address("ps", index), grace_s=self._ps_grace_s)
        link.connect(self.loop, {"role": "coordinator", "incarnation": self.incarnation}, secret=self.secret)
        return link


_connected: weakref.WeakSet[ParameterServerStrategy] = weakref.WeakSet()


def close_strategies_of(cluster_spec: ClusterSpec) -> None:
    """Close this process's strategies of a cluster, which is about to end."""
    for strategy in list(_connected):
        if strategy.cluster_spec == cluster_spec:
            strategy.close()


class _ServedExtended(StrategyExtended):
    """Variables are on the parameter servers."""

    @property
    @override
    def worker_devices(self) -> tuple[str, ...]:
        return (f"/device:{tensor_device(self._strategy.placement.devices[0]).type.upper()}:0",)

    @property
    @override
    def parameter_devices(self) -> tuple[str, ...]:
        cpu = torch.device("cpu", 0)
        return tuple(full_device_name(cpu, "ps", index) for index in range(self._strategy._num_ps))  # type: ignore[attr-defined]

    @override
    def _copies_of(self, v: Any) -> tuple[Any, ...]:
        bindings = self._strategy.bindings  # type: ignore[attr-defined]
        return (v,) if isinstance(v, Served) and v.bindings is bindings else ()


def _check_cluster(resolver: Any) -> ClusterSpec:
    """Return the cluster of a resolver.

    Raises:
        TypeError: it is no resolver.
        ValueError: the cluster is not one for parameter servers, or this task is not its coordinator.
    """
    if not isinstance(resolver, ClusterResolver):
        raise TypeError(
            "cluster_resolver must be a ts.cluster_resolver.ClusterResolver, such as TFConfigClusterResolver(). "
            f"Received: {resolver!r}"
        )
    spec = ClusterSpec(resolver.cluster_spec())
    for job in spec.jobs:
        if job not in _JOBS:
            raise ValueError(
                f"The cluster has a job {job!r}; known are {', '.join(_JOBS)}. Received: {spec!r}{hint_of_jobs([job])}"
            )
    if not spec.jobs:
        raise ValueError(
            f"There is no cluster to train on: {type(resolver).__name__} found none. Set TF_CONFIG in the environment, "
            "or describe the cluster with a ts.cluster_resolver.SimpleClusterResolver. For a first try, "
            "ts.testing.LocalCluster starts one on this host."
        )
    for job, what in (("worker", "worker"), ("ps", "parameter server")):
        if job not in spec.jobs or not spec.num_tasks(job):
            raise ValueError(f"The cluster must have at least one {what}, job {job!r}. Received: {spec!r}")
    if "chief" in spec.jobs and spec.num_tasks("chief") > 1:
        raise ValueError(f"The cluster must have at most one chief, the coordinator. Received: {spec!r}")
    validate_addresses(spec, type(resolver).__name__)
    task, index = resolver.task_type, resolver.task_id
    if task in ("worker", "ps"):
        raise ValueError(
            f"This process is /job:{task}/task:{index}. The ParameterServerStrategy is for the coordinator (the "
            "chief); workers and parameter servers run ts.Server(...).join(), or `python -m torchstrategy server`."
        )
    if task == "chief" and ("chief" not in spec.jobs or index not in spec.task_indices("chief")):
        raise ValueError(f"This process is /job:chief/task:{index}, which the cluster does not have: {spec!r}")
    return spec


def _addresses(spec: ClusterSpec, job: str) -> list[str]:
    return [spec.task_address(job, index) for index in spec.task_indices(job)]
