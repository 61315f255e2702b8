"""Compares all that replicas hold alike, on demand: parameters, synchronised buffers and what optimizers remember.

All ranks hold equal bits, because they add up gradients in one order and make the same steps. So bits are compared
first, by fingerprints that know the place of each element. Only parameters whose bits differ are looked at element by
element: ranks on unlike hardware may round differently.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchstrategy.base.log import logger, warning_once
from torchstrategy.collectives.process_group import WorkerGroup
from torchstrategy.errors import DisagreementError, DivergenceError
from torchstrategy.gradients.sharded_states import shard_of
from torchstrategy.replicas.buffers import BufferSync
from torchstrategy.replicas.divergence import difference, may_differ
from torchstrategy.replicas.dtensors import is_dtensor
from torchstrategy.replicas.fingerprints import fingerprints, have_equal_bits
from torchstrategy.replicas.hosting import Hosting
from torchstrategy.replicas.mirrored import bodies
from torchstrategy.replicas.record import Record

__all__ = ["check_sync", "compare_between_ranks"]

_COMPARISON = "the comparison of parameters between ranks"


def compare_between_ranks(tensors: Sequence[Tensor], workers: WorkerGroup, name: Callable[[int], str]) -> None:
    """Raise unless tensors are equal on all ranks, rounding apart; every rank calls this.

    Args:
        tensors: of equal shapes and dtypes on all ranks.
        workers: the processes.
        name: says what the tensor at a position is.

    Raises:
        DivergenceError: one differs by more than rounding.
    """
    found = differences_between_ranks(tensors, workers)
    large = {k: value for k, value in found.items() if value is not None}
    if large:
        k, text = next(iter(large.items()))
        more = f" {len(large) - 1} more of {len(tensors)} do." if len(large) > 1 else ""
        raise DivergenceError(
            f"{name(k)} differs between the ranks before its gradients are summed: "
            f"{text}.{more} Every rank must change parameters in the same way: load weights on all ranks, not on the "
            "chief only, and let an optimizer that draws random numbers take them from a generator that it seeds in "
            "each step."
        )
    if found:
        warning_once(
            f"{len(found)} of {len(tensors)} parameters differ between the ranks in the last bits, such as "
            f"{name(next(iter(found)))}. That is rounding, as on ranks with unlike hardware or numbers of threads; it "
            "is compared with a tolerance."
        )


def differences_between_ranks(tensors: Sequence[Tensor], workers: WorkerGroup) -> dict[int, str | None]:
    """Return the positions of the tensors whose bits differ between ranks; every rank calls this.

    Returns:
        For each position how the tensors differ, the same text on all ranks; ``None`` where that may be rounding.
    """
    numbers = fingerprints(tensors)
    digest = hashlib.sha256(repr(numbers).encode()).hexdigest()[:16]
    if len(set(workers.exchange(_COMPARISON, digest))) == 1:
        return {}
    rows = workers.exchange(_COMPARISON, numbers)
    found: dict[int, str | None] = {}
    for k in [k for k, column in enumerate(zip(*rows, strict=True)) if len(set(column)) > 1]:
        own = tensors[k].detach()
        first = own.to_dense() if own.is_sparse else own.clone()
        workers.broadcast([first], _COMPARISON)
        with torch.no_grad():
            texts = workers.exchange(_COMPARISON, difference(first, own.to_dense() if own.is_sparse else own))
        apart = {rank: text for rank, text in enumerate(texts) if text is not None}
        ranks = [rank for rank, row in enumerate(rows) if row[k] != rows[0][k]]
        found[k] = None
        if apart:
            rank, text = next(iter(apart.items()))
            others = f" (so do ranks {', '.join(map(str, ranks[1:]))})" if len(ranks) > 1 else ""
            found[k] = f"rank {rank}'s from rank 0's {text}{others}"
    return found


_OPERATION = "check_sync"
#: So many differences are told apart in the message.
_NUM_SHOWN = 10
#: What one replica holds: by its name, a tensor or a plain value.
_Holding = dict[str, Any]


def check_sync(
    record: Record, hosting: Hosting, buffers: BufferSync, workers: WorkerGroup | None, name_of: Callable[[int], str]
) -> None:
    """Compare the replicas of this process, and the processes; every rank calls this.

    Args:
        record: what the strategy's scopes recorded.
        hosting: where the replicas' objects are.
        buffers: knows which buffers wait to be synchronised.
        workers: the processes; ``None`` if there is only this one.
        name_of: says which replica a local id is.

    Raises:
        DivergenceError: something differs by more than rounding; the message names all of it.
        DisagreementError: the processes do not hold the same things.
    """
    holdings = _holdings(record, hosting, buffers, workers)
    found: dict[str, str] = {}
    rounded: list[str] = []
    for local_id, other in enumerate(holdings[1:], 1):
        are_equal = _known_equal(holdings[0], other)
        for name, value in holdings[0].items():
            if name in are_equal:
                continue
            text = _difference(value, other.get(name))
            if text is not None:
                found.setdefault(name, f"between {name_of(0)} and {name_of(local_id)} {text}")
            elif isinstance(value, Tensor) and not _equal_bits(value, other[name]):
                rounded.append(name)
    if workers is not None:
        between = _between_ranks(holdings[0], workers)
        found.update({name: text for name, text in between.items() if text is not None and name not in found})
        rounded += [name for name, text in between.items() if text is None]
        # An error is raised on all ranks alike, or the others would wait.
        counts = workers.exchange(_OPERATION, sorted(found))
        for rank, names in enumerate(counts):
            found.update({name: f"on rank {rank}" for name in names if name not in found})
    if found:
        shown = "\n".join(f"  {name} differs {text}" for name, text in [*found.items()][:_NUM_SHOWN])
        more = f"\n  and {len(found) - _NUM_SHOWN} more" if len(found) > _NUM_SHOWN else ""
        raise DivergenceError(
            f"{len(found)} of {len(holdings[0])} things that all replicas hold alike differ:\n{shown}{more}\nEvery "
            "replica must make the same changes: load weights and optimizers on all ranks, update by "
            "`optimizer.step()`, and use the same hyper-parameters."
        )
    if rounded:
        logger.info(
            "check_sync: %d of %d things differ in the last bits, which is rounding, such as %s.",
            len(set(rounded)),
            len(holdings[0]),
            rounded[0],
        )


def _holdings(record: Record, hosting: Hosting, buffers: BufferSync, workers: WorkerGroup | None) -> list[_Holding]:
    """Return for each local replica what it holds, by names that are the same on all replicas and processes."""
    gc.collect()  # what the program has dropped must be gone on every process alike
    names = _names(record)
    slots = hosting.slots()
    candidates = buffers.candidates()
    is_changed = buffers.changed(candidates, by_value=False)
    if workers is not None:  # a rank without examples has not changed what waits on the others
        rows = workers.exchange(_OPERATION, is_changed)
        is_changed = [any(row[k] for row in rows if k < len(row)) for k in range(len(candidates))]
    waiting = {(id(dicts[0]), name) for (dicts, name), waits in zip(candidates, is_changed, strict=True) if waits}
    num_local = len(slots[0][0]) if slots else 1
    holdings: list[_Holding] = [{} for _ in range(num_local)]
    for dicts, key in slots:
        first = dicts[0].get(key)
        if not isinstance(first, Tensor) or may_differ(first) or (id(dicts[0]), key) in waiting or is_dtensor(first):
            continue
        for holding, own in zip(holdings, dicts, strict=True):
            holding[_unique(holding, names.get(id(first), f"tensor {key!r}"))] = own.get(key)
    optimizers = [obj for obj in record if isinstance(obj, Optimizer)]
    for number, optimizer in enumerate(optimizers):
        what = f"{type(bodies(optimizer)[0]).__name__} (optimizer {number})"
        # Where one copy steps for all, the others' have neither state nor a say.
        copies = bodies(optimizer)[: num_local if hosting.run_hooks is None else 1]
        rows = [dict(_optimizer_state(copy, what, names if i == 0 else {})) for i, copy in enumerate(copies)]
        rows += rows[:1] * (num_local - len(rows))
        for holding, row in zip(holdings, rows, strict=False):
            holding.update(zip(rows[0], row.values(), strict=False))
    return holdings


def _optimizer_state(optimizer: Optimizer, what: str, names: dict[int, str]) -> Iterator[tuple[str, Any]]:
    position = 0
    for k, group in enumerate(optimizer.param_groups):
        for key, value in sorted(group.items()):
            if key != "params" and isinstance(value, (int, float, str, bool, tuple, Tensor, type(None))):
                yield f"{key!r} of group {k} of {what}", value
        if shard_of(optimizer) is not None:
            continue  # each rank has the states of other parameters
        for parameter in group["params"]:
            known = names.get(id(parameter), f"parameter {position}")
            for key, value in sorted(optimizer.state.get(parameter, {}).items()):
                if isinstance(value, (int, float, bool, Tensor)) and not is_dtensor(value):
                    yield f"{key!r} of {what} for {known} ({position})", value
            position += 1


def _names(record: Record) -> dict[int, str]:
    """Return the qualified name of each parameter and buffer of replica 0."""
    modules = [bodies(obj)[0] for obj in record if isinstance(obj, nn.Module)]
    inner = {id(child) for module in modules for child in module.modules() if child is not module}
    names: dict[int, str] = {}
    for module in [module for module in modules if id(module) not in inner]:
        for kind, pairs in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
            for name, tensor in pairs:
                names.setdefault(
                    id(tensor), f"{kind} {name!r} of {type(module).__name__} (shape {tuple(tensor.shape)})"
                )
    return names


def _unique(holding: _Holding, name: str) -> str:
    return name if name not in holding else f"{name} (number {len(holding)})"


def _difference(first: Any, other: Any) -> str | None:
    if isinstance(first, Tensor) and isinstance(other, Tensor):
        return difference(_plain(first), _plain(other))
    if isinstance(first, Tensor) or isinstance(other, Tensor) or first != other:
        return f"({_short(first)} and {_short(other)})"
    return None


def _known_equal(holding: _Holding, other: _Holding) -> set[str]:
    """Return the names of the tensors of accelerators whose bits are equal."""
    pairs = {name: (value, other.get(name)) for name, value in holding.items() if isinstance(value, Tensor)}
    both = {name: (a, b) for name, (a, b) in pairs.items() if isinstance(b, Tensor)}
    return {name for name, is_equal in zip(both, have_equal_bits(list(both.values())), strict=True) if is_equal}


def _short(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.detach().to_dense() if tensor.is_sparse else tensor.detach()


def _equal_bits(first: Tensor, other: Tensor) -> bool:
    return torch.equal(_plain(first), _plain(other).to(first.device))


def _between_ranks(holding: _Holding, workers: WorkerGroup) -> dict[str, str | None]:
    """Return how the first local replicas of the processes differ, by names; ``None`` where that may be rounding."""
    tensors = {name: value for name, value in holding.items() if isinstance(value, Tensor)}
    layout = [[name, list(value.shape), str(value.dtype)] for name, value in tensors.items()]
    plain = {name: repr(value) for name, value in holding.items() if name not in tensors}
    digest = hashlib.sha256(repr([layout, list(plain)]).encode()).hexdigest()
    if len(set(workers.exchange(_OPERATION, digest))) > 1:
        rows = workers.exchange(_OPERATION, [*(f"{name} {shape} {dtype}" for name, shape, dtype in layout), *plain])
        apart = sorted({name for row in rows for name in row if any(name not in other for other in rows)})
        raise DisagreementError(
            f"The ranks do not hold the same things: {len(apart)} are not on all of them or differ in shape or dtype, "
            f"such as {apart[0] if apart else 'their order'}. Every rank must make the same objects in the scope, and "
            "load the same optimizers."
        )
    found: dict[str, str | None] = {}
    rows = workers.exchange(_OPERATION, list(plain.values()))
    for k, name in enumerate(plain):
        apart_ranks = [rank for rank, row in enumerate(rows) if row[k] != rows[0][k]]
        if apart_ranks:
            found[name] = f"between the ranks ({rows[0][k]} on rank 0, {rows[apart_ranks[0]][k]} on {apart_ranks[0]})"
    names = list(tensors)
    for k, text in differences_between_ranks(list(tensors.values()), workers).items():
        found[names[k]] = None if text is None else f"between the ranks: {text}"
    return found


def names_of(record: Record, parameters: Sequence[Tensor]) -> list[str]:
    """Return what to call parameters in messages: their qualified names where a scope has recorded their module."""
    names = _names(record)
    return [
        names.get(id(parameter), f"parameter {k} of an optimizer (shape {tuple(parameter.shape)})")
        for k, parameter in enumerate(parameters)
    ]
