"""Which sharding policy several processes follow, and why; and whether they have the same examples to divide."""

from __future__ import annotations

import copy
import os
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, Subset, TensorDataset

from torchstrategy.base.log import logger, warn_once
from torchstrategy.base.options import AutoShardPolicy
from torchstrategy.data.batch import Components
from torchstrategy.data.data_order import (
    Workers,
    check_equal,
    check_kinds,
    checksum,
    is_pipeline,
    kind_of,
    known_length,
    raw_bytes,
)
from torchstrategy.data.numpy import ArrayDataset
from torchstrategy.errors import InvalidArgumentError, NotFoundError

__all__ = ["Sharding", "check_first_batch", "choose_sharding", "held_data", "shard"]

_NUM_COMPARED = 16
_NAMES = (str, os.PathLike, int, float)


@dataclass(frozen=True)
class Sharding:
    """A policy that was decided on.

    Args:
        policy: ``DATA``, ``FILE``, ``OFF`` or ``HINT``.
        reason: why, as a sentence.
        other: what ``AUTO`` might have chosen with another number of processes, ``None`` if nothing else.
    """

    policy: AutoShardPolicy
    reason: str
    other: AutoShardPolicy | None = None


def choose_sharding(data: Any, asked: AutoShardPolicy | None, workers: Workers | None) -> Sharding:
    """Decide how processes divide a dataset; every process calls it.

    Args:
        data: the dataset.
        asked: the policy that was asked for; ``None`` means what the dataset's options say, else ``AUTO``.
        workers: the processes, ``None`` if there is one.

    Raises:
        TypeError: ``asked`` is no policy.
        InvalidArgumentError: ``FILE`` with fewer files than processes.
        NotFoundError: ``FILE`` with several processes and a dataset that is not read from files.
        DisagreementError: the processes have different policies or files.
    """
    policy = _asked_policy(data, asked)
    num_files = _num_files(data)
    if workers is not None and (num_files is not None or policy not in (AutoShardPolicy.AUTO, AutoShardPolicy.DATA)):
        names = repr([_base(name) for name in getattr(_source(data), "files", None) or ()])
        record = [policy.name, num_files, zlib.crc32(names.encode())]
        advice = "Every rank must pass the same dataset, with its files in the same order (sort what a glob found)."
        check_equal(workers, "sharding policy, number of files and hash of their names", record, advice)
    is_auto = policy is AutoShardPolicy.AUTO
    source = _source(data)
    sharding = _choose(policy, num_files, 1 if workers is None else workers.size)
    if policy is AutoShardPolicy.HINT and not (is_pipeline(source) and source.has_shard_hint):
        why = "asked for; the dataset has no shard(SHARD_HINT, SHARD_HINT), so each process reads all the data"
        sharding = Sharding(policy, why)
    if is_auto and num_files is not None:
        file, whole = AutoShardPolicy.FILE, AutoShardPolicy.DATA
        if not source.splits_by_file:
            why = "take, skip, shard, zip or drop_remainder=True give other elements over parts of the files"
            sharding = Sharding(whole, f"chosen by AUTO instead of FILE, because {why}")
        else:
            sharding = replace(sharding, other=whole if sharding.policy is file else file)
    if workers is not None and workers.rank == 0:
        if is_auto and num_files is not None and sharding.policy is AutoShardPolicy.DATA:
            logger.warning("AutoShardPolicy.DATA: %s. Every process reads all files.", sharding.reason)
        elif sharding.policy is not AutoShardPolicy.DATA:
            logger.info("AutoShardPolicy.%s: %s.", sharding.policy.name, sharding.reason)
    return sharding


def shard(data: Any, policy: AutoShardPolicy, num_processes: int, index: int) -> Iterable[Any]:
    """Return what process ``index`` of ``num_processes`` reads, an object of its own."""
    if isinstance(data, DataLoader):
        result = copy.copy(data)
        # DataLoader refuses to have it set; the copy has not started any workers, so it is safe here
        result.__dict__.update(dataset=shard(data.dataset, policy, num_processes, index), _iterator=None)
        return result
    if policy is AutoShardPolicy.FILE and is_pipeline(data) and data.num_files is not None:
        return data.shard_files(num_processes, index)
    if policy is AutoShardPolicy.HINT and is_pipeline(data) and data.has_shard_hint:
        return data.shard_by_hint(num_processes, index)
    return copy.copy(data)


def _asked_policy(data: Any, asked: AutoShardPolicy | None) -> AutoShardPolicy:
    if asked is None:
        source = _source(data)
        has_pipeline = is_pipeline(source)
        asked = source.options().experimental_distribute.auto_shard_policy if has_pipeline else AutoShardPolicy.AUTO
    if not isinstance(asked, AutoShardPolicy):
        raise TypeError(f"auto_shard_policy must be a ts.data.AutoShardPolicy. Received: {asked!r}")
    return asked


def _choose(policy: AutoShardPolicy, num_files: int | None, num_processes: int) -> Sharding:
    is_auto = policy is AutoShardPolicy.AUTO
    if is_auto and num_processes == 1:
        return Sharding(AutoShardPolicy.DATA, "one process reads everything")
    if is_auto and num_files is None:
        return Sharding(AutoShardPolicy.DATA, "the data is not a list of files")
    if policy in (AutoShardPolicy.AUTO, AutoShardPolicy.FILE) and num_processes > 1:
        return _choose_files(num_files, num_processes, is_auto=is_auto)
    reasons = {
        AutoShardPolicy.DATA: "asked for",
        AutoShardPolicy.FILE: "asked for; there is one process, which reads all files",
        AutoShardPolicy.OFF: f"asked for; each of {num_processes} processes reads all the data",
        AutoShardPolicy.HINT: "asked for; each process reads what the dataset's shard hint gives it",
    }
    return Sharding(policy, reasons[policy])


def _choose_files(num_files: int | None, num_processes: int, *, is_auto: bool) -> Sharding:
    if num_files is None:
        raise NotFoundError(
            "Found an unshardable source dataset: AutoShardPolicy.FILE needs a list of files. Make the dataset by "
            "ts.data.Dataset.from_files, or use AutoShardPolicy.DATA."
        )
    if num_files >= num_processes:
        parts = ", ".join(
            f"process {i}: {len(range(i, num_files, num_processes))}" for i in range(min(num_processes, 4))
        )
        more = ", ..." if num_processes > 4 else ""
        who = "chosen by AUTO" if is_auto else "asked for"
        return Sharding(AutoShardPolicy.FILE, f"{who}; of {num_files} files each process reads its own ({parts}{more})")
    problem = f"the dataset only has {num_files} file(s), but there are {num_processes} processes"
    if not is_auto:
        raise InvalidArgumentError(
            f"Could not apply FILE based sharding: {problem}, so that some would have no data. Write the data into at "
            f"least {num_processes} files, start fewer processes, or use AutoShardPolicy.DATA."
        )
    return Sharding(AutoShardPolicy.DATA, f"chosen by AUTO instead of FILE, because {problem}")


def _source(data: Any) -> Any:
    return data.dataset if isinstance(data, DataLoader) else data


def _num_files(data: Any) -> int | None:
    """Return how many files a dataset reads that can be shared out, ``None`` if it does not read files."""
    source = _source(data)
    return source.num_files if is_pipeline(source) else None


def _base(name: Any) -> Any:
    """Return a file's name without its folder, which may be another one on another machine."""
    return [_base(part) for part in name] if isinstance(name, (tuple, list)) else os.path.basename(str(name))


def check_first_batch(workers: Workers, batch: Components, dataset: Any) -> None:
    """Check that the first batches that the ranks loaded are of one kind, and warn if the dataset lists other examples.

    Raises:
        DisagreementError: they are of different kinds.
    """
    heard = workers.exchange("structure of the first batch", [kind_of(batch), _lists_of_examples(dataset)])
    check_kinds([kind for kind, _ in heard])
    lists = [own for _, own in heard]
    different = [rank for rank, own in enumerate(lists) if own != lists[0]]
    if different:
        names = sorted(name for own in lists for name in own if own[name] != lists[0].get(name))
        warn_once(
            f"The dataset of rank{'s' * (len(different) > 1)} {', '.join(map(str, different))} has other examples than "
            f"rank 0's, or has them in another order: its {', '.join(dict.fromkeys(names)) or 'lists'} differ. Each "
            "process loads only its own part of a batch, so examples get lost and come twice. Sort what glob or "
            "os.listdir found, and seed what shuffles, splits or makes up examples alike on every rank. (If only a "
            "cache differs, all is well.)"
        )


def held_data(dataset: Any) -> tuple[int | None, int]:
    """Return what can be compared of a map-style dataset without loading examples: its length, and a checksum.

    Tensors are compared in part, the indices of subsets wholly: a ``random_split`` may have been drawn on each rank.
    """
    return known_length(dataset), _held_checksum(dataset)


def _held_checksum(dataset: Any) -> int:
    if isinstance(dataset, Subset):
        try:
            indices = array("q", dataset.indices).tobytes()
        except (TypeError, OverflowError):  # keys of another kind
            indices = b""
        return zlib.crc32(indices, _held_checksum(dataset.dataset))
    if isinstance(dataset, ConcatDataset):
        return zlib.crc32(repr([_held_checksum(part) for part in dataset.datasets]).encode())
    if type(dataset) in (list, tuple):
        return _checksum_of_entries(dataset)
    if isinstance(dataset, TensorDataset):
        return checksum(dataset.tensors)
    return checksum(dataset.arrays) if isinstance(dataset, ArrayDataset) else 0


def _lists_of_examples(dataset: Any) -> dict[str, int]:
    """Return checksums of a dataset's lists, arrays and tables that have an entry for each example, such as files."""
    if isinstance(dataset, Subset):
        return _lists_of_examples(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        parts = enumerate(dataset.datasets)
        return {f"datasets[{i}].{name}": value for i, part in parts for name, value in _lists_of_examples(part).items()}
    length, found = known_length(dataset), dict[str, int]()
    for name, value in getattr(dataset, "__dict__", {}).items():
        if not length or known_length(value) != length:
            continue
        if type(value) in (list, tuple) and all(isinstance(leaf, _NAMES) for leaf in _leaves(value[0])):
            found[name] = _checksum_of_entries(value)
        elif isinstance(value, (Tensor, np.ndarray)):
            found[name] = checksum([value])
        elif hasattr(value, "iloc"):  # a table of pandas
            found[name] = _checksum_of_entries(value.iloc[:_NUM_COMPARED].to_numpy().tolist())
    return found


def _leaves(entry: Any) -> Iterator[Any]:
    """Yield what an entry consists of; strings each by themselves."""
    if isinstance(entry, (list, tuple, dict)):
        for part in entry.values() if isinstance(entry, dict) else entry:
            yield from _leaves(part)
    else:
        yield entry


def _checksum_of_entries(values: Sequence[Any]) -> int:
    """Return a checksum of the first entries and some others; of paths without their folders, which may differ."""
    value = 0
    for leaf in _leaves([*values[:_NUM_COMPARED], *values[_NUM_COMPARED :: 1 + len(values) // _NUM_COMPARED]]):
        if isinstance(leaf, (Tensor, np.ndarray)):
            data = raw_bytes(leaf if leaf.ndim else leaf[None], slice(None, _NUM_COMPARED))
        else:
            text = os.path.basename(leaf) if isinstance(leaf, (str, os.PathLike)) else repr(leaf)
            data = text.encode(errors="replace") if isinstance(leaf, _NAMES) else type(leaf).__name__.encode()
        value = zlib.crc32(data, value + 1)
    return value
