"""``ClusterCoordinator``: the program's side of a parameter-server cluster."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from torchstrategy.base import tree
from torchstrategy.base.context import raise_failures
from torchstrategy.base.labels import label
from torchstrategy.base.log import hides_own_frames, logger
from torchstrategy.base.values import PerWorkerValues
from torchstrategy.errors import UnavailableError
from torchstrategy.ps.coordinator.backend import ClusterStrategy, StrategyBackend
from torchstrategy.ps.coordinator.closures import Closure, ClosureQueue
from torchstrategy.ps.coordinator.cluster import Cluster
from torchstrategy.ps.coordinator.per_worker import PerWorkerDataset, PerWorkerIterator, RemoteValue, Resource
from torchstrategy.ps.coordinator.watchdog import Timers, Watchdog
from torchstrategy.ps.links import number_from
from torchstrategy.strategies.strategy import Strategy

__all__ = ["ClusterCoordinator"]

_STUCK_AFTER_S = 600.0
_MAX_PS_FAILURES = 3


class ClusterCoordinator:
    """Runs functions on the workers of a ``ParameterServerStrategy``; there is one for each strategy.

    Functions are queued, and each runs on whichever worker is free. One that was running on a worker that is lost runs
    again on another, so a function runs at least once. Parameters that it trains are on the parameter servers, which
    apply what each function's ``optimizer.step()`` sends as it arrives.

    When a function raises an exception, or a parameter server is lost that one needs, the functions that are still
    queued are cancelled, and the next ``schedule``, ``join`` or ``done`` raises the exception. After that the program
    can go on.

    Args:
        strategy: the strategy; its workers connect as soon as they are there.
        stuck_after_s: when no function has ended for so long, what everybody is doing is logged; 0 for never. ``None``
            takes ``TORCHSTRATEGY_STUCK_AFTER_S``, by default 600.
        max_ps_failures: how many times a function is run again that could not reach a parameter server which is there;
            while the strategy waits for one (``ps_grace_s``), that does not count. ``None`` takes
            ``TF_COORDINATOR_IGNORE_TRANSIENT_PS_FAILURES``, by default 3.

    Raises:
        TypeError: the strategy is none that has a cluster.
        ValueError: an environment variable is no number.

    Example:
        >>> with ts.testing.LocalCluster(num_workers=2, num_ps=1) as cluster:
        ...     strategy = ts.ParameterServerStrategy(cluster.resolver())
        ...     with strategy.scope():
        ...         model = torch.nn.Linear(2, 1)
        ...         optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...     def train_step(x, y):
        ...         optimizer.zero_grad()
        ...         loss = torch.nn.functional.mse_loss(model(x), y)
        ...         loss.backward()
        ...         optimizer.step()
        ...         return loss
        ...     coordinator = ts.coordinator.ClusterCoordinator(strategy)
        ...     x, y = torch.randn(4, 2), torch.randn(4, 1)
        ...     losses = [coordinator.schedule(train_step, args=(x, y)) for _ in range(20)]
        ...     coordinator.join()
        ...     print(losses[-1].fetch() < losses[0].fetch())
        ...     strategy.close()
        True
    """

    _strategy: ClusterStrategy

    def __new__(cls, strategy: Any, **_: Any) -> ClusterCoordinator:
        """Return the strategy's coordinator if it has one."""
        if getattr(strategy, "_is_on_worker", False):
            raise TypeError(
                "A ClusterCoordinator can't be made in a function that runs on a worker. Make it in the coordinator's "
                "program, and schedule functions from there."
            )
        if not isinstance(strategy, Strategy) or strategy._coordinator_class() is None:
            raise TypeError(
                "A ClusterCoordinator needs a ts.ParameterServerStrategy. Received: "
                f"{strategy!r}. Other strategies compute in `strategy.run`."
            )
        known = vars(strategy).get("_cluster_coordinator")
        return super().__new__(cls) if known is None else known

    def __init__(
        self,
        strategy: Any,
        *,
        stuck_after_s: float | None = None,
        max_ps_failures: int | None = None,
    ) -> None:
        if vars(strategy).get("_cluster_coordinator") is self:
            return
        if stuck_after_s is None:
            stuck_after_s = number_from("TORCHSTRATEGY_STUCK_AFTER_S", _STUCK_AFTER_S)
        if max_ps_failures is None:
            max_ps_failures = int(number_from("TF_COORDINATOR_IGNORE_TRANSIENT_PS_FAILURES", _MAX_PS_FAILURES))
        self._strategy = strategy
        self._numbers = itertools.count()
        self._preparing = threading.Lock()
        self._backend = StrategyBackend(strategy)
        timers = Timers()
        strategy.resources.callback(timers.close)
        self._cluster = Cluster(
            self._backend,
            self._backend.worker_addresses,
            strategy.loop.call_soon,
            timers.call_later,
            max_staleness=strategy.max_staleness,
            max_ps_failures=max_ps_failures,
        )
        self._watchdog = Watchdog(self._cluster, stuck_after_s)
        for worker in self._cluster.workers:
            worker.attach(self._backend.connect(worker.index, worker))
        strategy.resources.callback(_say_what_is_left, weakref.ref(self._cluster.queue))
        vars(strategy)["_cluster_coordinator"] = self

    @property
    def strategy(self) -> Strategy:
        """The strategy whose workers run the functions."""
        return self._strategy  # type: ignore[return-value]

    @hides_own_frames
    def schedule(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> RemoteValue:
        """Queue a function for the next free worker and return at once; wait only while the queue is very long.

        The function, the arguments and what they refer to are sent to the worker as they are now, except for what was
        made in the strategy's scope and per-worker values: of these the worker uses its own. A function can't be given
        another one's result, which is on another worker: fetch it first.

        Args:
            fn: any callable, also a ``ts.function``. It runs in cross-replica context of the strategy.
            args: its positional arguments.
            kwargs: its keyword arguments.

        Returns:
            What stands for its result: None, numbers, strings, tensors, arrays and containers of these.

        Raises:
            TypeError: ``fn`` is not callable, or it or an argument can't be sent.
            ValueError: a ``RemoteValue`` is among the arguments.
            UnavailableError: a parameter server was lost that an earlier function needed.
            Exception: what an earlier function raised.
        """
        _check_call(fn, args, kwargs)
        self._cluster.queue.raise_error()
        raise_failures()
        own = _per_worker_values(args, kwargs)
        result = RemoteValue(_name_of(fn), self._cluster.idle)
        with self._preparing:
            self._strategy._prepare_closures()
            function = self._strategy.shipper.function(fn)
            blob, needs = self._ship_arguments(args or (), dict(kwargs or {}))
            closure = Closure(
                next(self._numbers),
                _name_of(fn),
                function.key,
                self._backend.definitions((*needs, *function.needs)),
                blob,
                result,
                resources=[values._ts_resource_id for values in own],
                kept=(fn, own),
            )
        if self._cluster.submit(closure):
            time.sleep(0)  # lets the loop's thread send it
        self._watchdog.watch()
        return result

    @hides_own_frames
    def join(self) -> None:
        """Wait until all functions have ended.

        While all workers are lost it waits for one to come back, and a line in the log says so every half minute.

        Raises:
            UnavailableError: a parameter server was lost that a function needed.
            Exception: what a function raised. The next call does not raise it again.
        """
        with label("wait", "for the workers"):
            self._cluster.queue.join()
            raise_failures()

    def done(self) -> bool:
        """Say whether all functions have ended, without waiting.

        Returns:
            ``True`` if nothing is queued or running.

        Raises:
            UnavailableError: a parameter server was lost that a function needed.
            Exception: what a function raised. The next call does not raise it again.
        """
        return self._cluster.queue.is_done()

    @hides_own_frames
    def fetch(self, val: Any) -> Any:
        """Wait for results and return them, tensors as numpy arrays.

        Args:
            val: a ``RemoteValue``, or a nested structure with some.

        Returns:
            The structure with results in their places; what is no ``RemoteValue`` stays as it is.

        Raises:
            CancelledError: a function was not run, because of the error that is its ``__cause__``.
            Exception: what a function raised.
        """
        return tree.map_leaves(lambda leaf: leaf.fetch() if isinstance(leaf, RemoteValue) else leaf, val)

    def create_per_worker_dataset(self, dataset: Any) -> PerWorkerDataset:
        """Make a dataset on every worker; each one goes through all of it, so let each shuffle by a seed of its own.

        Args:
            dataset: a function that returns a dataset, which each worker calls, if it takes an argument with a
                ``ts.InputContext`` of one pipeline; or a dataset, which is sent to each worker. A dataset is a
                ``DataLoader``, a ``ts.data.Dataset`` or anything else that can be iterated over again and again.

        Returns:
            What ``iter`` makes an iterator on every worker of, as an argument for ``schedule``.

        Raises:
            TypeError: it is neither, or can't be sent.
        """
        if not callable(dataset) and not hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__"):
            raise TypeError(
                "create_per_worker_dataset needs a dataset, or a function that returns one. Received: "
                f"{dataset!r} ({type(dataset).__name__})"
            )
        if isinstance(dataset, (Iterator, PerWorkerValues, Mapping, str)):
            raise TypeError(
                "create_per_worker_dataset needs what can be gone through again and again, batch by batch: a "
                f"ts.data.Dataset, a DataLoader, or a function that returns one. Received: a {type(dataset).__name__}"
            )
        name = f"the dataset of {_name_of(dataset)}" if callable(dataset) else f"the {type(dataset).__name__}"
        with self._preparing:
            self._strategy._prepare_closures()
            blob, needs = self._strategy.shipper.value(dataset, name)
            definitions = self._backend.definitions(needs)
        resource = self._resource("dataset", name, blob=blob, definitions=definitions)
        values = PerWorkerDataset(resource, self._make_iterator)
        self._share(resource, values)
        return values

    def _ship_arguments(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[bytes, tuple[str, ...]]:
        try:
            return self._strategy.shipper.arguments(args, kwargs)
        except (TypeError, NotImplementedError) as error:
            for leaf in tree.all_leaves((args, kwargs)):
                if isinstance(leaf, Iterator):
                    raise TypeError(
                        f"A {type(leaf).__name__} can't be sent to the workers. Give the dataset to "
                        "create_per_worker_dataset, and to the function iter() of what that returns."
                    ) from error
            raise

    def _make_iterator(self, dataset: PerWorkerDataset) -> PerWorkerIterator:
        resource = self._resource("iterator", "an iterator of a per-worker dataset", of=dataset._ts_resource_id)
        values = PerWorkerIterator(resource, dataset)
        self._share(resource, values)
        return values

    def _resource(self, kind: str, name: str, **parts: Any) -> Resource:
        values = [RemoteValue(name, self._cluster.idle) for _ in self._cluster.workers]
        return Resource(self._cluster.resources.next_id(), kind, name, values, **parts)

    def _share(self, resource: Resource, values: PerWorkerValues) -> None:
        self._cluster.add(resource)
        self._cluster.resources.drop_with(values)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A ClusterCoordinator can't be sent to workers or pickled. Let the functions that you schedule refer to "
            "modules, optimizers and values, not to the coordinator or to objects that hold it."
        )


def _say_what_is_left(queue: weakref.ref[ClosureQueue]) -> None:
    """Say, when the strategy is closed or the program ends, what the program did not wait for."""
    left = queue()
    if left is None:
        return
    num_left, error = len(left) + left.num_running, left.pending_error
    if num_left:
        logger.warning("%d scheduled function(s) had not ended when the strategy was closed: join() waits.", num_left)
    elif error is not None and error.__traceback__ is None and not isinstance(error, UnavailableError):  # not fetched
        logger.warning("A scheduled function had failed, which a join() would have raised: %r", error)


def _check_call(fn: Any, args: Any, kwargs: Any) -> None:
    if not callable(fn):
        raise TypeError(f"schedule needs a function. Received: {fn!r}")
    if args is not None and not isinstance(args, (tuple, list)):
        raise TypeError(f"args must be a tuple or list, such as `args=(x,)`. Received: {type(args).__name__}")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs must be a dictionary. Received: {type(kwargs).__name__}")


def _per_worker_values(args: Any, kwargs: Any) -> list[PerWorkerValues]:
    if not args and not kwargs:
        return []
    found = [leaf for leaf in tree.all_leaves((args, kwargs)) if isinstance(leaf, PerWorkerValues)]
    if any(values._ts_resource_id < 0 for values in found):
        raise ValueError("PerWorkerValues are made by iter() of what create_per_worker_dataset returns.")
    return found


def _name_of(fn: Any) -> str:
    return str(getattr(fn, "__qualname__", None) or type(fn).__name__).replace("<locals>.", "")
