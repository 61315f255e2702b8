"""What a rank of a job runs for tf.distribute's measured cases of input over several processes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

import torchstrategy as ts
from tests.programs import cpu_devices

Case = dict[str, Any]
SOURCES = ("pipeline", "loader", "stream loader")
LINES_OF_A_FILE = 3

_families: list[tuple[re.Pattern[str], Callable[..., Any]]] = []


def run_cases(cases: list[Case], num_local: int, folder: str) -> dict[str, Any]:
    """Return what this rank's replicas get in each case, in the form of the figures, by id and source."""
    strategy = ts.MultiWorkerMirroredStrategy(devices=cpu_devices(num_local))
    results = {}
    for case in cases:
        for source in sources_of(case):
            results[f"{case['id']} {source}"] = run_case(strategy, case, source, Path(folder))
    return results


def sources_of(case: Case) -> tuple[str, ...]:
    """Numbers in batches can come from several kinds of data."""
    return SOURCES if re.search(r"\.range\d+\.", case["id"]) else SOURCES[:1]


def run_case(strategy: Any, case: Case, source: str, folder: Path) -> Any:
    fn, groups = _family_of(case)
    try:
        made = fn(strategy, case, source, folder, *groups)
        if not isinstance(made, (ts.DistributedDataset, tuple)):
            return made
        dataset, pick = made if isinstance(made, tuple) else (made, lambda element: [element])
        return [[part for leaf in pick(element) for part in _local(strategy, leaf)] for element in dataset]
    except Exception as error:  # noqa: BLE001 - the figures hold exceptions of any type
        return {"exception": error}


def write_files(folder: Path) -> None:
    """File k holds the lines k0, k1, k2."""
    for k in range(5):
        lines = [f"{10 * k + i}\n" for i in range(LINES_OF_A_FILE)]
        (folder / f"{k}.txt").write_text("".join(lines))


def _family_of(case: Case) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    found = [(fn, match.groups()) for pattern, fn in _families if (match := pattern.fullmatch(case["id"]))]
    if len(found) != 1:
        raise LookupError(f"{case['id']} has {len(found)} families")
    return found[0]


def _family(pattern: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        _families.append((re.compile(rf"\dw\dd\.{pattern}"), fn))
        return fn

    return register


def _local(strategy: Any, leaf: Any) -> list[Any]:
    return [part.tolist() for part in strategy.experimental_local_results(leaf)]


def _policy(name: str) -> ts.data.AutoShardPolicy | None:
    return None if name == "none" else ts.data.AutoShardPolicy[name]


class _Stream(IterableDataset[int]):
    def __init__(self, num_examples: int) -> None:
        self._num_examples = num_examples

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._num_examples))


@_family(r"range(\d+)\.batch(\d+)(\.drop)?\.(none|AUTO|DATA|OFF)")
def ranges(s, case, source, folder, num_examples, batch_size, drop, policy):
    n, b = int(num_examples), int(batch_size)
    if source == "pipeline":
        dataset = ts.data.Dataset.range(n).batch(b, drop_remainder=bool(drop))
    else:
        dataset = DataLoader(range(n) if source == "loader" else _Stream(n), b, drop_last=bool(drop))
    return s.experimental_distribute_dataset(dataset, auto_shard_policy=_policy(policy))


@_family("batch_map.AUTO")
def batch_map(s, case, source, folder):
    return s.experimental_distribute_dataset(ts.data.Dataset.range(8).batch(4).map(lambda x: x * 10))


@_family("batch_repeat2.AUTO")
def batch_repeat(s, case, source, folder):
    return s.experimental_distribute_dataset(ts.data.Dataset.range(6).batch(4).repeat(2))


@_family("batch_take1.AUTO")
def batch_take(s, case, source, folder):
    return s.experimental_distribute_dataset(ts.data.Dataset.range(8).batch(4).take(1))


@_family("shuffle_seed.AUTO")
def shuffle_seed(s, case, source, folder):
    return s.experimental_distribute_dataset(ts.data.Dataset.range(8).shuffle(8, seed=1).batch(4))


@_family("tuple.AUTO")
def pairs(s, case, source, folder):
    """For each component the values of all local replicas, one component after the other."""
    dataset = ts.data.Dataset.range(4).map(lambda x: (x, 10 * x)).batch(4)
    return s.experimental_distribute_dataset(dataset), lambda element: element


@_family(r"textline\.(\d)files\.batch(\d)\.(FILE|AUTO|DATA|OFF)")
def text_lines(s, case, source, folder, num_files, batch_size, policy):
    dataset = ts.data.TextLineDataset(_names(folder, int(num_files))).map(_number).batch(int(batch_size))
    return s.experimental_distribute_dataset(dataset, auto_shard_policy=_policy(policy))


@_family(r"list_files_interleave\.2files\.FILE")
def list_files(s, case, source, folder):
    names = ts.data.Dataset.list_files(_names(folder, 2), shuffle=False)
    dataset = names.interleave(ts.data.TextLineDataset, cycle_length=1).map(_number).batch(2)
    return s.experimental_distribute_dataset(dataset, auto_shard_policy=ts.data.AutoShardPolicy.FILE)


@_family(r"fromslices_files_interleave\.4files\.AUTO")
def slices_of_names(s, case, source, folder):
    names = ts.data.Dataset.from_tensor_slices(_names(folder, 4))
    dataset = names.interleave(ts.data.TextLineDataset, cycle_length=2).map(_number).batch(2)
    return s.experimental_distribute_dataset(dataset, auto_shard_policy=ts.data.AutoShardPolicy.AUTO)


@_family(r"range\.HINT(\.shardhint)?")
def hints(s, case, source, folder, has_hint):
    dataset = ts.data.Dataset.range(8)
    dataset = dataset.shard(ts.data.SHARD_HINT, ts.data.SHARD_HINT) if has_hint else dataset
    return s.experimental_distribute_dataset(dataset.batch(4), auto_shard_policy=ts.data.AutoShardPolicy.HINT)


@_family("ctx")
def input_context(s, case, source, folder):
    seen = []

    def dataset_fn(context):
        fields = (context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync)
        seen.extend([*fields, context.get_per_replica_batch_size(8)])
        return ts.data.Dataset.range(8).batch(2)

    s.distribute_datasets_from_function(dataset_fn)
    return seen


@_family(r"ctx\.batch_not_divisible")
def not_divisible(s, case, source, folder):
    return ts.InputContext(num_replicas_in_sync=2).get_per_replica_batch_size(5)


@_family(r"from_function\.shard")
def function_that_shards(s, case, source, folder):
    def dataset_fn(context):
        dataset = ts.data.Dataset.range(8).shard(context.num_input_pipelines, context.input_pipeline_id)
        return dataset.batch(context.get_per_replica_batch_size(4))

    return s.distribute_datasets_from_function(dataset_fn)


@_family(r"from_function\.uneven_lengths")
def uneven_lengths(s, case, source, folder):
    return s.distribute_datasets_from_function(
        lambda context: ts.data.Dataset.range(2 + 2 * context.input_pipeline_id).batch(2)
    )


def _names(folder: Path, num_files: int) -> list[str]:
    return [str(folder / f"{k}.txt") for k in range(num_files)]


def _number(line: Any) -> torch.Tensor:
    return torch.tensor(float(line))
