"""Values that differ between replicas, and the tags that batches carry.

``PerReplica`` holds one value for each replica of this process. It exists only where this process hosts several
replicas; with one replica a plain value is the replica's value.

``global_batch_size="actual"`` needs the true size of the global batch before the replica function starts; dividing
afterwards would be wrong for accumulation, regularisation, several losses and gradient scalers. So each batch of a
distributed dataset carries on its tensors how it was split (``BatchShares``: examples for each replica). The tags
belong to the batch, not to the iterator: batches may be listed, prefetched or reordered. ``run`` collects the tags of
its arguments, and asking for the size never communicates. Where it can't be known (no tag, or arguments with
different splits, or a loss without one row for each example) it raises, by rules that all replicas decide alike.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NoReturn

import torch
from typing_extensions import TypeVar  # with a default: a bare `PerReplica` is of anything

from torchstrategy.base import tree
from torchstrategy.base.devices import kind_of

__all__ = [
    "BatchShares",
    "DistributedValues",
    "LeafT",
    "Mirrored",
    "PerReplica",
    "PerWorkerValues",
    "RemoteTensor",
    "ValueContext",
    "ValueT",
    "example_counts",
    "get_shares",
    "is_scaled",
    "known_counts",
    "local_results",
    "mark_windows",
    "note_scaled",
    "num_rows_of",
    "regroup",
    "select_replica",
    "set_shares",
    "shares_of",
]

ValueT = TypeVar("ValueT", default=Any)
#: What can't be a structure of values: `run` returns it as it is, or one `PerReplica` of it.
LeafT = TypeVar("LeafT", bound=torch.Tensor | float | str)


@dataclass(frozen=True)
class BatchShares:
    """How many examples of one global batch each replica (of all processes) received.

    Args:
        shares: one count for each replica in sync, in the order of replica ids.
        step: how many elements its iterator had given before it, where several processes compare that.
        window: if the batch is one of several that make one optimizer step, their number and their examples in all.
    """

    shares: tuple[int, ...]
    step: int | None = field(default=None, compare=False, repr=False)
    window: tuple[int, int] | None = field(default=None, repr=False)

    @property
    def total(self) -> int:
        """Examples in the global batch."""
        return sum(self.shares)

    @property
    def divisor(self) -> int:
        """Examples of one optimizer step, by which the losses of the batch are divided."""
        return self.total if self.window is None else self.window[1]

    @property
    def num_parts(self) -> int:
        """Batches of one optimizer step."""
        return 1 if self.window is None else self.window[0]


_OR_TAKE = "Or take `strategy.experimental_local_results(value)` or `strategy.reduce(...)` first."


class DistributedValues(Generic[ValueT]):
    """One value for each replica of this process; for type checkers ``PerReplica[torch.Tensor]`` says of what.

    Args:
        values: the values in the order of replica ids.
        shares: how the global batch that the values are part of was split, if they are part of one.
    """

    def __init__(self, values: Iterable[ValueT], shares: BatchShares | None = None) -> None:
        self._values = tuple(values)
        self.shares = shares

    @property
    def values(self) -> tuple[ValueT, ...]:
        """The values in the order of replica ids."""
        return self._values

    def __repr__(self) -> str:
        rows = ",\n".join(f"  {i}: {value!r}" for i, value in enumerate(self._values))
        return f"{type(self).__name__}:{{\n{rows}\n}}"

    def __bool__(self) -> bool:
        raise TypeError(self._outside("truth value"))

    def __float__(self) -> NoReturn:
        raise TypeError(self._outside("float()"))

    def __int__(self) -> NoReturn:
        raise TypeError(self._outside("int()"))

    def __format__(self, spec: str) -> str:
        if spec:
            raise TypeError(self._outside(f"format {spec!r}"))
        return repr(self)

    def _refuse_arithmetic(self, *_: Any) -> NoReturn:
        raise TypeError(self._outside("arithmetic"))

    def _refuse_comparison(self, *_: Any) -> NoReturn:
        raise TypeError(self._outside("order"))

    def __len__(self) -> NoReturn:
        raise TypeError(self._outside("length"))

    def __getitem__(self, index: Any) -> NoReturn:
        raise TypeError(self._outside("elements"))

    __iter__ = None  # else __getitem__ would make it one that can be iterated over
    __lt__ = __le__ = __gt__ = __ge__ = _refuse_comparison
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse_arithmetic

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(self._outside(f"attribute {name!r}"))

    def __reduce__(self) -> Any:
        return type(self), (self._values, self.shares)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise ValueError(
            f"{getattr(func, '__name__', func)}() was given a {cls.__name__}, one value for each replica: call the "
            f"function that calls it by `strategy.run(fn, args=(value,))`. {_OR_TAKE}"
        )

    @classmethod
    def _outside(cls, what: str) -> str:
        return (
            f"A {cls.__name__} has no {what}: it holds one value for each replica. Use it inside "
            f"`strategy.run(fn, args=(value,))`. {_OR_TAKE}"
        )


class PerReplica(DistributedValues[ValueT]):
    """Values that may differ between replicas, such as what ``Strategy.run`` returns.

    Example:
        >>> from torchstrategy.base.values import PerReplica
        >>> PerReplica((1, 2))
        PerReplica:{
          0: 1,
          1: 2
        }
    """


class Mirrored(DistributedValues[ValueT]):
    """Equal values on every replica, such as the result of an all-reduce."""


class PerWorkerValues:
    """One value for each worker, which is there already. As an argument of ``schedule`` it is the worker's own.

    ``iter`` of what ``ClusterCoordinator.create_per_worker_dataset`` returns makes one.

    Args:
        values: what stands for the workers' values on the coordinator, in the order of workers.

    Example:
        >>> with ts.testing.LocalCluster(num_workers=1, num_ps=1) as cluster:
        ...     strategy = ts.ParameterServerStrategy(cluster.resolver())
        ...     coordinator = ts.coordinator.ClusterCoordinator(strategy)
        ...     numbers = iter(coordinator.create_per_worker_dataset(lambda: range(3)))
        ...     print(isinstance(numbers, ts.coordinator.PerWorkerValues))
        ...     print([coordinator.schedule(lambda it: next(it), args=(numbers,)).fetch() for _ in range(3)])
        ...     strategy.close()
        True
        [0, 1, 2]
    """

    #: Which of a worker's values it is, negative for none: a function or an argument that has it in it gets that one.
    #: The class has the attribute for what pickles these.
    _ts_resource_id: int = -1

    def __init__(self, values: Iterable[Any]) -> None:
        self._values = tuple(values)


class RemoteTensor(torch.Tensor):
    """A tensor of the program whose values other processes hold: its own memory is of no use."""

    def snapshot(self) -> torch.Tensor:
        """Return the present value on the CPU."""
        raise NotImplementedError


class ValueContext:
    """What ``experimental_distribute_values_from_function`` tells the function about one replica.

    Args:
        replica_id_in_sync_group: the replica's id.
        num_replicas_in_sync: number of replicas.
    """

    def __init__(self, replica_id_in_sync_group: int = 0, num_replicas_in_sync: int = 1) -> None:
        self.replica_id_in_sync_group = replica_id_in_sync_group
        self.num_replicas_in_sync = num_replicas_in_sync

    def __repr__(self) -> str:
        return (
            f"ValueContext(replica_id_in_sync_group={self.replica_id_in_sync_group}, "
            f"num_replicas_in_sync={self.num_replicas_in_sync})"
        )


def regroup(per_replica: Sequence[Any]) -> Any:
    """Turn one structure for each replica into one structure with ``PerReplica`` leaves.

    A leaf that is the same object on every replica stays plain, as in tf.

    Raises:
        ValueError: the structures differ.
    """
    if len(per_replica) == 1:
        return per_replica[0]
    first = per_replica[0]
    if all(value is first for value in per_replica) and not isinstance(first, (tuple, list, dict)):
        return first
    return tree.map_structure(_regroup_leaf, per_replica)


def select_replica(local_id: int, structure: Any) -> Any:
    """Return what the replica with this position in the process sees of a structure.

    Raises:
        IndexError: a distributed value has no value for the replica.
    """
    return tree.map_leaves(lambda leaf: _select(local_id, leaf), structure)


def local_results(value: Any, num_local: int) -> tuple[Any, ...]:
    """Return this process's values of a distributed value or a structure of them."""
    if isinstance(value, DistributedValues):
        return value.values
    if isinstance(value, (tuple, list, dict)) and num_local > 1:
        return tuple(select_replica(i, value) for i in range(num_local))
    return (value,)


def get_shares(leaf: Any) -> BatchShares | None:
    """Return the tag of a batch's leaf: how its global batch was split, or ``None``."""
    if isinstance(leaf, DistributedValues):
        return leaf.shares
    if isinstance(leaf, torch.Tensor):
        return getattr(leaf, "_ts_shares", None)
    return None


def set_shares(leaf: Any, shares: BatchShares) -> Any:
    """Tag a batch's leaf (a tensor, or a distributed value and its tensors) and return it."""
    if isinstance(leaf, DistributedValues):
        leaf.shares = shares
        for value in leaf.values:
            set_shares(value, shares)
    elif isinstance(leaf, torch.Tensor):
        leaf._ts_shares = shares  # type: ignore[attr-defined]
    return leaf


def shares_of(structure: Any) -> list[BatchShares]:
    """Return the different ways in which the batches in a structure were split."""
    found: dict[BatchShares, None] = {}
    for leaf in tree.all_leaves(structure):
        shares = get_shares(leaf)
        if shares is not None:
            found[shares] = None
    return list(found)


def mark_windows(windows: Iterable[Sequence[Any]]) -> None:
    """Tag the batches that make one optimizer step with how many examples they have together.

    Args:
        windows: the batches of each step.
    """
    for window in windows:
        if len(window) == 1:
            continue
        tagged = [[(leaf, get_shares(leaf)) for leaf in tree.all_leaves(batch)] for batch in window]
        found = [[(leaf, shares) for leaf, shares in batch if shares is not None] for batch in tagged]
        total = sum(batch[0][1].total for batch in found if batch)
        for leaf, shares in (pair for batch in found for pair in batch):
            set_shares(leaf, BatchShares(shares.shares, shares.step, (len(window), total)))


def num_rows_of(structure: Any) -> int | None:
    """Return the length of the first tensor in a structure; ``None`` without one."""
    leaves = tree.all_leaves(structure)
    return next((leaf.shape[0] for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()), None)


def example_counts(context: Any, num_rows: int | None = None) -> tuple[int, int] | None:
    """Return how many examples of a batch a replica has, and by how many the losses of the batch are divided.

    Args:
        context: the replica's context; ``None`` outside of all, where one replica has the given rows.
        num_rows: what one replica alone has of a batch that no dataset has counted; ``None`` means the rows of the
            first tensor that its function was called with.

    Returns:
        Both; ``None`` if there are several replicas, and no batch or several among the function's arguments.
    """
    shares = None if context is None else context.batch_shares
    if shares is not None:
        return context._num_own_examples, shares.divisor
    if context is not None and context.num_replicas_in_sync > 1:
        return None
    rows = num_rows_of(context._inputs) if num_rows is None and context is not None else num_rows
    return None if rows is None else (rows, rows)


def known_counts(context: Any, num_rows: int | None = None) -> tuple[int, int]:
    """Return ``example_counts``, which must be known.

    Raises:
        RuntimeError: they are not.
    """
    found = example_counts(context, num_rows)
    if found is None:
        context.actual_batch_size()  # raises, and says why
        raise RuntimeError("How many examples the batch has is not known.")
    return found


def note_scaled(context: Any, loss: torch.Tensor) -> torch.Tensor:
    """Remember that a replica's loss was divided by the numbers of the global batch; return it."""
    if context is not None and context.num_replicas_in_sync > 1 and not torch.compiler.is_compiling():
        # The operation's number, since the operation would hold all that its gradient needs.
        made_by = None if loss.grad_fn is None else loss.grad_fn._sequence_nr()
        context._scaled_losses = [*context._scaled_losses[-7:], (weakref.ref(loss), made_by)]
    return loss


def is_scaled(context: Any, value: torch.Tensor) -> bool:
    """Say whether a value is such a loss, which may have lost its graph, or a sum with one."""
    noted = [] if context is None else context._scaled_losses
    losses = [loss for reference, _ in noted if (loss := reference()) is not None]
    has_memory = bool(losses) and not kind_of(value.device).is_traced
    if any(value is loss or (has_memory and value.data_ptr() == loss.data_ptr()) for loss in losses):
        return True
    made_by, waiting = {number for _, number in noted}, [value.grad_fn] if noted else []
    while waiting and len(waiting) < 16:
        node = waiting.pop()
        if node is not None and node._sequence_nr() in made_by:
            return True
        if node is not None and node.name().startswith("AddBackward"):
            waiting += [child for child, _ in node.next_functions]
    return False


def _regroup_leaf(*leaves: Any) -> Any:
    first = leaves[0]
    if all(leaf is first for leaf in leaves):
        return first
    return PerReplica(leaves)


def _select(local_id: int, leaf: Any) -> Any:
    if not isinstance(leaf, DistributedValues):
        return leaf
    try:
        return leaf.values[local_id]
    except IndexError:
        raise IndexError(
            f"A {type(leaf).__name__} holds {len(leaf.values)} values, but replica {local_id} of this process needs "
            "its own. Make it with this strategy, for example by experimental_distribute_values_from_function."
        ) from None
