"""What a scope records goes to the servers; what can't yet, or never can, leaves the rest of the program alone."""

import warnings

import pytest
import torch
from torch import nn

import torchstrategy as ts
from tests.ps.memory_client import MemoryStrategy
from torchstrategy.ps.served import Served


@pytest.fixture
def strategy():
    return MemoryStrategy()


def served(module):
    return [isinstance(tensor, Served) for tensor in (*module.parameters(), *module.buffers())]


def ship(strategy, fn):
    strategy._prepare_closures()
    return strategy.shipper.function(fn)


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LazyLinear(2),
        lambda: nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(2)),
        lambda: nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.ReLU()),
    ],
)
def test_a_lazy_module_waits_and_lets_others_pass(strategy, make):
    with strategy.scope():
        lazy = make()
        optimizer = torch.optim.SGD(lazy.parameters(), 0.1)
    with strategy.scope():
        other = nn.Linear(3, 1)
        variable = ts.Variable(1.0)
    assert all(served(other))
    assert not any(served(lazy))
    ship(strategy, lambda: other(torch.ones(1, 3)) + variable)
    for fn in (lambda: lazy(torch.ones(2, 3)), optimizer.step):
        with pytest.raises(ValueError, match=r"of a lazy module has no shape yet.* Call the module once"):
            ship(strategy, fn)
    lazy(torch.ones(2, 3))
    ship(strategy, lambda: (lazy(torch.ones(2, 3)), optimizer.step()))
    assert all(served(lazy))
    lazy(torch.eye(2, 3)).sum().backward()  # of equal rows, the normalized are 0, where ReLU has no gradient
    before = [p.detach().clone() for p in lazy.parameters()]
    optimizer.step()
    assert any(not torch.equal(p, old) for p, old in zip(lazy.parameters(), before, strict=True))


def test_a_lazy_module_gets_its_shapes_in_a_later_scope(strategy):
    with strategy.scope():
        lazy = nn.LazyLinear(2)
    with strategy.scope():
        lazy(torch.ones(1, 3))
    assert all(served(lazy))


class Tagged(torch.Tensor):
    """A tensor of a class of its own."""


def with_a_hook():
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    module[1].weight.register_hook(lambda gradient: 2 * gradient)
    return module


def with_a_subclass():
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    module[1].running_mean = torch.zeros(2).as_subclass(Tagged)
    return module


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [(with_a_hook, NotImplementedError, "hook on the tensor '1.weight'"), (with_a_subclass, TypeError, "is a Tagged")],
)
def test_a_refused_module_is_named_once_and_where_it_is_used(strategy, make, error, match):
    scope = strategy.scope()
    scope.__enter__()
    module = make()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    beside = nn.Linear(2, 1)
    with pytest.raises(error, match=match):
        scope.__exit__(None, None, None)
    assert not any(served(module))  # none of it, not half of it
    with strategy.scope():
        other = nn.Linear(3, 1)
    assert all(served(other) + served(beside))
    ship(strategy, lambda: other(torch.ones(1, 3)))
    for fn in (lambda: module(torch.ones(1, 2)), optimizer.step):
        for _ in range(2):
            with pytest.raises(error, match=match):
                ship(strategy, fn)


def test_what_was_refused_is_taken_once_it_is_mended(strategy):
    with pytest.raises(TypeError, match="Tagged"), strategy.scope():
        module = with_a_subclass()
    module[1].running_mean = torch.zeros(2)
    ship(strategy, lambda: module(torch.ones(2, 2)))
    assert all(served(module))


def test_what_is_shipped_was_not_tried_again_in_vain(strategy):
    with strategy.scope():
        first = nn.Linear(2, 1)
    created = len(strategy.client.values)
    for _ in range(3):
        ship(strategy, lambda: first(torch.ones(1, 2)))
    assert len(strategy.client.values) == created


ROWS = 100_000


def told(strategy, make_model, make_optimizer):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with strategy.scope():
            model = make_model()
            optimizer = make_optimizer(model.parameters())
        del optimizer
    return [str(w.message) for w in caught if "embedding" in str(w.message)]


@pytest.mark.parametrize("table", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.RMSprop, torch.optim.SGD])
def test_a_large_table_with_a_dense_gradient_is_named(strategy, table, cls):
    (text,) = told(strategy, lambda: nn.ModuleDict({"of_user": table(ROWS, 2), "of_day": table(7, 2)}), cls)
    assert f"{cls.__name__} sends and updates all 100,000 rows of the embedding 'of_user.weight'" in text
    assert "sparse=True" in text
    assert "SparseAdam" in text


class Tied(nn.Module):
    """The output layer has the table's weights, so their gradient is dense."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(ROWS, 2)
        self.out = nn.Linear(2, ROWS, bias=False)
        self.out.weight = self.table.weight


@pytest.mark.parametrize(
    ("make_model", "cls"),
    [
        (lambda: nn.Embedding(ROWS, 2, sparse=True), torch.optim.SparseAdam),
        (lambda: nn.Embedding.from_pretrained(torch.zeros(ROWS, 2)), torch.optim.Adam),
        (lambda: nn.Embedding(1000, 2), torch.optim.Adam),
        (lambda: nn.Linear(2, ROWS), torch.optim.Adam),
        (Tied, torch.optim.Adam),
    ],
)
def test_no_word_of_other_tables(strategy, make_model, cls):
    assert told(strategy, make_model, cls) == []
