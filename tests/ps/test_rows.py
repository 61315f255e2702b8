"""Rows of variables: what names them and what is brought for them is checked, and their gradients can be asked for."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchstrategy as ts
from tests.ps.memory_client import MemoryStrategy
from torchstrategy.experimental.partitioners import FixedShardsPartitioner

NO_ROWS = {
    "too large": ([5], "rows 0 to 4. Received: index 5"),
    "negative": ([0, -1], "rows 0 to 4. Received: index -1"),
    "fractions": ([0.0], "named by integers. Received: indices of torch.float32"),
    "bools": ([True], "named by integers. Received: indices of torch.bool"),
    "an empty tensor of fractions": (torch.tensor([]), "named by integers"),
    "text": ("a", "named by integers. Received: 'a'"),
    "nothing": (None, "named by integers. Received: None"),
    "huge": ([2**70], "named by integers"),
}
SCATTERS = ["add", "sub", "update", "max", "min", "mul", "div"]


@pytest.fixture
def strategy():
    return MemoryStrategy(FixedShardsPartitioner(2))


@pytest.fixture
def variable(strategy):
    with strategy.scope():
        return ts.Variable(torch.arange(15.0).reshape(5, 3))


@pytest.mark.parametrize("name", NO_ROWS)
@pytest.mark.parametrize("method", ["sparse_read", "gather_nd", *(f"scatter_{name}" for name in SCATTERS)])
def test_what_names_no_rows_is_refused(variable, method, name):
    indices, match = NO_ROWS[name]
    values = () if method in ("sparse_read", "gather_nd") else (1.0,)
    with pytest.raises(ts.errors.InvalidArgumentError, match=match):
        getattr(variable, method)(indices, *values)
    assert variable.tolist() == torch.arange(15.0).reshape(5, 3).tolist()


@pytest.mark.parametrize("method", SCATTERS)
@pytest.mark.parametrize(
    ("indices", "values", "match"),
    [
        ([0], torch.ones(2, 3), "don't fit 1 rows"),
        ([0, 1], torch.ones(3, 3), "don't fit 2 rows"),
        ([0], torch.ones(1, 2), "don't fit 1 rows"),
        ([0], "x", "it is no tensor"),
        ([0], torch.ones(3, dtype=torch.complex64), "has dtype torch.float32. Received: values of torch.complex64"),
        (0, 1.0, "as a vector"),
        ([[0], [1]], 1.0, "as a vector"),
    ],
)
def test_what_does_not_fit_the_rows_is_refused(variable, method, indices, values, match):
    with pytest.raises(ts.errors.InvalidArgumentError, match=match):
        getattr(variable, f"scatter_{method}")(indices, values)


@pytest.mark.parametrize("indices", [[], torch.zeros(0, dtype=torch.int64), torch.zeros(0, dtype=torch.int32)])
def test_no_rows_at_all(variable, indices):
    assert variable.sparse_read(indices).shape == (0, 3)
    assert variable.scatter_add(indices, torch.ones(0, 3)) is variable
    assert variable.scatter_add(indices, 1.0).tolist() == torch.arange(15.0).reshape(5, 3).tolist()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64])
def test_indices_of_any_shape_and_integer_dtype(variable, dtype):
    read = variable.sparse_read(torch.tensor([[0, 4], [1, 0]], dtype=dtype))
    assert read[..., 0].tolist() == [[0, 12], [3, 0]]
    assert variable.sparse_read(torch.tensor(1, dtype=dtype)).tolist() == [3, 4, 5]


def test_fractions_are_not_cut_off(strategy):
    with strategy.scope():
        counts = ts.Variable(torch.zeros(4, 2, dtype=torch.int64), trainable=False)
    with pytest.raises(ts.errors.InvalidArgumentError, match=r"values of torch\.float32"):
        counts.scatter_add([0], 1.5)
    assert counts.scatter_add([0], 1).tolist()[0] == [1, 1]


def test_other_tensors_on_the_servers_as_indices_and_values(strategy, variable):
    with strategy.scope():
        numbers = ts.Variable(torch.tensor([1, 2]), trainable=False)
        layer = nn.Linear(3, 2, bias=False)
        whole = nn.Linear(3, 5, bias=False)
    weight = layer.weight.detach().clone()
    assert variable.sparse_read(numbers)[:, 0].tolist() == [3, 6]
    variable.scatter_add(numbers, layer.weight)
    torch.testing.assert_close(variable[1:3].detach(), torch.arange(3.0, 9.0).reshape(2, 3) + weight)
    variable.assign(whole.weight)
    assert torch.equal(variable.detach(), whole.weight.detach())


@pytest.mark.parametrize(
    "indices", [torch.tensor([0.5]), torch.tensor([True]), torch.tensor([]), torch.tensor([1], dtype=torch.int16)]
)
def test_a_look_up_takes_integers_only(strategy, variable, indices):
    with strategy.scope():
        table = nn.Embedding(5, 3, sparse=True)
    for call in (lambda: table(indices), lambda: F.embedding(indices, variable)):
        with pytest.raises(RuntimeError, match="are looked up by a tensor of int64 or int32"):
            call()


def test_the_padding_row_must_be_there(variable):
    with pytest.raises(ts.errors.InvalidArgumentError, match=r"padding_idx must be a row of 'Variable', -5 to 4"):
        F.embedding(torch.tensor([1]), variable, padding_idx=7)


@pytest.fixture
def tables(strategy):
    plain = nn.Embedding(10, 3, sparse=True)
    with strategy.scope():
        served = nn.Embedding(10, 3, sparse=True)
    served.load_state_dict(plain.state_dict())
    return plain, served


IDS = torch.tensor([3, 1, 3])


def test_gradients_of_a_table_can_be_asked_for(tables):
    found = []
    for table in tables:
        loss = table(IDS).square().sum() + table(IDS[:1]).sum()
        (gradient,) = torch.autograd.grad(loss, table.weight, retain_graph=True)
        assert gradient.is_sparse
        assert table.weight.grad is None
        (scaled,) = torch.autograd.grad([loss], [table.weight], grad_outputs=[torch.tensor(2.0)])
        found.append((gradient.to_dense(), scaled.to_dense()))
    for expected, received in zip(*found, strict=True):
        torch.testing.assert_close(received, expected)


def test_gradients_of_a_table_that_was_not_used(strategy, tables):
    with strategy.scope():
        other = nn.Embedding(4, 2, sparse=True)
    weight = tables[1].weight
    loss = tables[1](IDS).sum()
    with pytest.raises(RuntimeError, match=r"Variable 'weight', .* appears to not have been used in the graph"):
        torch.autograd.grad(loss, [weight, other.weight], retain_graph=True)
    used, unused = torch.autograd.grad(loss, [weight, other.weight], allow_unused=True, retain_graph=True)
    assert used.to_dense().sum() == 9
    assert unused is None
    assert torch.autograd.grad(loss, other.weight, materialize_grads=True)[0].tolist() == [[0.0, 0.0]] * 4


def test_a_penalty_on_the_gradient_of_a_table(tables):
    table = tables[1]
    (gradient,) = torch.autograd.grad(table(IDS).square().sum(), table.weight, create_graph=True)
    gradient.to_dense().square().sum().backward()
    # Row 3 is looked up twice: its gradient is 4 w, row 1's is 2 w.
    factors = torch.zeros(10, 1)
    factors[1], factors[3] = 8.0, 32.0
    torch.testing.assert_close(table.weight.grad.to_dense(), factors * table.weight.detach())


def test_dense_and_sparse_uses_together(variable):
    loss = F.embedding(torch.tensor([1, 1]), variable).sum() + (2 * variable).sum()
    (gradient,) = torch.autograd.grad(loss, variable)
    assert gradient[:, 0].tolist() == [2, 4, 2, 2, 2]


def test_backward_to_some_inputs_only(strategy, tables):
    table = tables[1]
    with strategy.scope():
        layer, other = nn.Linear(3, 1), nn.Linear(3, 1)
    layer(table(IDS)).sum().backward(inputs=[table.weight, layer.bias])
    assert table.weight.grad.to_dense().count_nonzero() == 6
    assert layer.bias.grad.tolist() == [3.0]
    assert layer.weight.grad is None
    assert other.weight.grad is None
