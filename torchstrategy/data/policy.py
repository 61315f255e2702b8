"""Which sharding policy several processes follow, and why."""

from __future__ import annotations

import copy
import os
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import DataLoader

from torchstrategy.base.log import logger
from torchstrategy.base.options import AutoShardPolicy
from torchstrategy.data.data_order import Workers, check_equal, is_pipeline
from torchstrategy.errors import InvalidArgumentError, NotFoundError

__all__ = ["Sharding", "choose_sharding", "shard"]


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
