import functools
import itertools

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import torchstrategy as ts
from torchstrategy.ps.server.assignment import make_dataset, make_iterator


class Indexable(torch.utils.data.Dataset):
    """Does not raise at its end, as many of torch's do not."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return index % 3


class CallableDataset(list):
    def __call__(self):
        raise AssertionError("it is a dataset, no function")


def with_context(context):
    assert (context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync) == (1, 0, 1)
    return [context.get_per_replica_batch_size(8)]


def with_option(num=2, *args, **kwargs):
    assert not args
    return list(range(num))


@pytest.mark.parametrize(
    ("value", "elements"),
    [
        ([1, 2], [1, 2]),
        (lambda: [1, 2], [1, 2]),
        (with_context, [8]),
        (functools.partial(with_option, 3), [0, 1, 2]),
        (with_option, [0, 1]),
        (Indexable(), [0, 1, 2]),
        (Indexable, [0, 1, 2]),
        (CallableDataset([5]), [5]),
        (ts.data.Dataset.range(3), [0, 1, 2]),
        (lambda: ts.data.Dataset.range(3).repeat(2), [0, 1, 2, 0, 1, 2]),
        (DataLoader(TensorDataset(torch.arange(3))), [0, 1, 2]),
        (torch.arange(3), [0, 1, 2]),
        ({"a": 1}, ["a"]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_each_iterator_begins_anew(value, elements):
    dataset = make_dataset(value)
    for _ in range(2):
        found = [e[0] if isinstance(e, list) else e for e in itertools.islice(make_iterator(dataset), 10)]
        assert [e if isinstance(e, str) else int(e) for e in found] == elements


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (3, "Received: 3"),
        (lambda: None, "Received from the dataset function: None"),
        (lambda a, b: [a, b], "This one needs: a, b"),
        (lambda *, batch_size: [batch_size], "This one needs: batch_size"),
    ],
)
def test_other_things_are_refused(value, message):
    with pytest.raises(TypeError, match=message):
        make_dataset(value)
