"""Area 5: how global batches reach the replicas.

A tf.data pipeline becomes a DataLoader or a re-iterable of batches.
"""

from __future__ import annotations

import functools
import itertools

import torch
from torch.utils.data import DataLoader

import torchstrategy as ts
from tests.parity.driver import Raw, family

data_family = functools.partial(family, 5)


class Pipeline:
    """A re-iterable: every ``iter`` calls ``make`` again."""

    def __init__(self, make):
        self._make = make

    def __iter__(self):
        return iter(self._make())


def ranged(num_examples, batch_size, drop_remainder=False):
    """``tf.data.Dataset.range(num_examples).batch(batch_size)``."""
    return DataLoader(range(num_examples), batch_size=batch_size, drop_last=drop_remainder)


def steps(s, dataset):
    """For each step the list of each replica's part."""
    return [[part.tolist() for part in s.experimental_local_results(element)] for element in dataset]


def distributed_steps(s, dataset, options=None, **arguments):
    return steps(s, s.experimental_distribute_dataset(dataset, options, **arguments))


@data_family("matrix.*")
def matrix(s, case):
    i = case.inputs
    dataset = ranged(i["examples"], i["global_batch"], i["drop_remainder"])
    return Raw({"steps": distributed_steps(s, dataset)})


# the objects


@data_family("type")
def type_and_repr(s, case):
    dataset = s.experimental_distribute_dataset(ranged(5, 4))
    return type(dataset).__name__, repr(dataset)[: repr(dataset).index(" object") + len(" object")]


@data_family()
def iter_type(s, case):
    return type(iter(s.experimental_distribute_dataset(ranged(5, 4)))).__name__


@data_family()
def element_spec(s, case):
    """A PerReplica of specs stands for TF's PerReplicaSpec."""
    spec = s.experimental_distribute_dataset(ranged(5, 4)).element_spec
    if isinstance(spec, ts.PerReplica):
        return f"PerReplicaSpec({', '.join(map(repr, spec.values))})"
    return repr(spec)


# pipelines


@data_family()
def dataset_unbatched(s, case):
    return distributed_steps(s, Pipeline(lambda: (torch.tensor(i) for i in range(5))))


@data_family()
def dataset_unbatched_vec(s, case):
    return distributed_steps(s, Pipeline(lambda: iter(torch.tensor([[1, 2], [3, 4]]))))


@data_family()
def dataset_double_batch(s, case):
    return distributed_steps(s, Pipeline(lambda: torch.arange(10).reshape(5, 2).split(2)))


@data_family()
def batch_then_map(s, case):
    return distributed_steps(s, Pipeline(lambda: (10 * batch for batch in ranged(6, 4))))


@data_family()
def batch_take(s, case):
    return distributed_steps(s, Pipeline(lambda: itertools.islice(ranged(20, 4), 2)))


@data_family()
def batch_prefetch(s, case):
    return distributed_steps(s, ranged(6, 4))


@data_family()
def map_batch_stateful_reiter(s, case):
    dataset = s.experimental_distribute_dataset(ranged(5, 4))
    return [steps(s, dataset), steps(s, dataset)]


def features():
    return torch.arange(10.0).reshape(5, 2)


@data_family()
def struct_dict(s, case):
    rows = [{"x": row, "y": i} for i, row in enumerate(features())]
    return list(s.experimental_distribute_dataset(DataLoader(rows, batch_size=4)))


@data_family()
def struct_nested(s, case):
    pairs = zip(features().split(4), torch.arange(5).split(4), strict=True)
    batches = [({"a": x}, y) for x, y in pairs]
    return list(s.experimental_distribute_dataset(Pipeline(lambda: batches)))


@data_family()
def struct_mixed_batchdim(s, case):
    return list(s.experimental_distribute_dataset(Pipeline(lambda: ((b, b.sum()) for b in ranged(5, 4)))))


@data_family()
def ragged(s, case):
    """Rows of different lengths: a nested tensor."""
    rows = [torch.arange(float(i + 1)) for i in range(4)]
    batches = [torch.nested.nested_tensor(part, layout=torch.jagged) for part in (rows[:2], rows[2:])]
    return [type(element).__name__ for element in s.experimental_distribute_dataset(Pipeline(lambda: batches))]


@data_family()
def window(s, case):
    """Elements that are data sets themselves."""
    windows = [ranged(2, 1) for _ in range(3)]
    return [type(element).__name__ for element in s.experimental_distribute_dataset(Pipeline(lambda: windows))]


@data_family()
def ds_none(s, case):
    return s.experimental_distribute_dataset(None)


@data_family()
def iter_in_fn(s, case):
    total, count = torch.tensor(0.0), torch.tensor(0, dtype=torch.int32)
    for element in s.experimental_distribute_dataset(ranged(5, 4)):
        total += s.reduce("SUM", s.run(lambda x: x.sum().float(), args=(element,)), axis=None)
        count += 1
    return total, count


@data_family()
def empty_trailing_shape(s, case):
    dataset = s.experimental_distribute_dataset(DataLoader(torch.ones(3, 2), batch_size=3))
    return [[list(part.shape) for part in s.experimental_local_results(element)] for element in dataset]


@data_family("reduce_(mean|sum)_over_uneven")
def reduce_over_uneven(s, case):
    dataset = s.experimental_distribute_dataset(Pipeline(lambda: (batch.float() for batch in ranged(5, 4))))
    return [s.reduce(case.groups[0], element, axis=0) for element in dataset]


@data_family()
def per_replica_mean_of_empty(s, case):
    dataset = s.experimental_distribute_dataset(ranged(5, 4))
    return [s.run(lambda x: x.float().mean(), args=(element,)) for element in dataset]


@data_family("iteration_end|get_next_end")
def after_the_last(s, case):
    iterator = iter(s.experimental_distribute_dataset(ranged(5, 4)))
    elements = [next(iterator) for _ in range(2)]
    return next(iterator) if case.name == "5.iteration_end" else (iterator.get_next(), elements)


@data_family()
def per_replica_batch_size(s, case):
    context = ts.InputContext(num_replicas_in_sync=2)
    try:
        odd = context.get_per_replica_batch_size(7)
    except ValueError as error:
        odd = type(error).__name__
    return *map(context.get_per_replica_batch_size, (8, 0, -4)), odd


# data sets from a function


@data_family("from_function(?:_b(\\d)(d)?)?_len(\\d+)")
def from_function(s, case):
    batch_size, drop, num_examples = case.groups
    dataset = ranged(int(num_examples), int(batch_size or 1), bool(drop))
    return steps(s, s.distribute_datasets_from_function(lambda ctx: dataset))


@data_family()
def from_function_str(s, case):
    seen = []

    def dataset_fn(ctx):
        seen.append(str(ctx))
        return ranged(4, 1)

    s.distribute_datasets_from_function(dataset_fn)
    return seen[0]


@data_family()
def from_function_lazy(s, case):
    calls = []

    def dataset_fn(ctx):
        calls.append(ctx)
        return ranged(4, 1)

    s.distribute_datasets_from_function(dataset_fn)
    return len(calls)


@data_family()
def from_function_notds(s, case):
    return list(s.distribute_datasets_from_function(lambda ctx: [1, 2, 3, 4]))


@data_family()
def experimental_dffs(s, case):
    return hasattr(s, "experimental_distribute_datasets_from_function")


# values from a function

VALUES = {
    "ctx": lambda ctx: str([ctx.num_replicas_in_sync, ctx.replica_id_in_sync_group]),
    "py": lambda ctx: ctx.replica_id_in_sync_group,
    "same_py": lambda ctx: 7,
    "tuple": lambda ctx: (torch.tensor(1.0), torch.tensor(2.0)),
    "dict": lambda ctx: {"a": torch.tensor(ctx.replica_id_in_sync_group, dtype=torch.int32)},
    "none": lambda ctx: None,
}


@data_family("values_(ctx|py|same_py|tuple|dict|none)")
def values(s, case):
    return s.experimental_distribute_values_from_function(VALUES[case.groups[0]])


@data_family()
def values_calls(s, case):
    calls = []
    s.experimental_distribute_values_from_function(lambda ctx: calls.append(ctx.replica_id_in_sync_group))
    return calls


# options


def parse_options(text):
    """``"fetch_to_device=False,replication_mode=InputReplicationMode.PER_REPLICA"`` -> ``InputOptions``."""
    read = {"True": True, "False": False}
    read |= {str(mode): mode for mode in ts.InputReplicationMode}
    pairs = (item.split("=") for item in text.split(","))
    return ts.InputOptions(**{f"experimental_{name}": read[value] for name, value in pairs})


def from_function_with_contexts(s, options=None):
    """Steps of a small data set from a function, and the input contexts that the function was given."""
    seen = []

    def dataset_fn(ctx):
        seen.append((ctx.num_input_pipelines, ctx.input_pipeline_id, ctx.num_replicas_in_sync))
        return ranged(3, 1)

    return steps(s, s.distribute_datasets_from_function(dataset_fn, options)), seen


@data_family("opt_dataset\\[(.*)\\]")
def opt_dataset(s, case):
    return distributed_steps(s, ranged(5, 4), parse_options(case.groups[0]))


@data_family("opt_from_fn\\[(.*)\\]")
def opt_from_fn(s, case):
    return from_function_with_contexts(s, parse_options(case.groups[0]))


@data_family()
def opt_per_replica_leaks(s, case):
    from_function_with_contexts(s, parse_options("replication_mode=InputReplicationMode.PER_REPLICA"))
    result, seen = from_function_with_contexts(s)
    return result, [num_pipelines for num_pipelines, _, _ in seen]


@data_family()
def opt_default(s, case):
    return str(ts.InputOptions())


@data_family("autoshard_(AUTO|OFF|FILE|DATA|HINT)")
def autoshard(s, case):
    policy = ts.data.AutoShardPolicy[case.groups[0]]
    dataset = ts.data.Dataset.range(9).batch(4)
    by_argument = distributed_steps(s, dataset, auto_shard_policy=policy)
    options = ts.data.Options()
    options.experimental_distribute.auto_shard_policy = policy
    assert distributed_steps(s, dataset.with_options(options)) == by_argument
    assert distributed_steps(s, ranged(9, 4), auto_shard_policy=policy) == by_argument
    return by_argument
