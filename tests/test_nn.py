"""Losses over replicas; tf's measured cases of the same functions are in tests/parity."""

import math
import warnings

import numpy as np
import pytest
import torch

import torchstrategy as ts
from torchstrategy.base import log
from torchstrategy.errors import InvalidArgumentError

VECTOR = torch.tensor([1.0, 2.0, 3.0])
MATRIX = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])


def mirrored(num_replicas):
    return ts.MirroredStrategy(devices=[f"cpu:{i}" for i in range(num_replicas)])


@pytest.mark.parametrize(
    ("loss", "size", "expected"),
    [
        (VECTOR, None, 2.0),
        (VECTOR, 6, 1.0),
        (VECTOR, torch.tensor(6), 1.0),
        (VECTOR, torch.tensor(6, dtype=torch.int32), 1.0),
        (VECTOR, np.int64(6), 1.0),
        (VECTOR, "actual", 2.0),
        (VECTOR, 0, 0.0),
        (VECTOR, torch.tensor(0), 0.0),
        (MATRIX, None, 10.5),  # all elements of an example are summed
        (torch.zeros(0), None, 0.0),
        (torch.zeros(0, 2), "actual", 0.0),
        (torch.tensor([1.0, math.inf]), 4, math.inf),
        ([1.0, 2.0, 3.0], 4, 1.5),
        (np.array([1.0, 2.0], dtype=np.float32), 4, 0.75),
    ],
)
def test_sum_divided_by_global_batch_size(loss, size, expected):
    result = ts.nn.compute_average_loss(loss, global_batch_size=size)
    assert result.item() == expected
    assert result.dtype == torch.float32
    assert result.shape == ()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_float_dtypes_are_kept(dtype):
    result = ts.nn.compute_average_loss(VECTOR.to(dtype), torch.ones(3, dtype=torch.float64), 4)
    assert result.dtype == dtype
    assert result.item() == 1.5


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_integers_become_float64(dtype):
    result = ts.nn.compute_average_loss(torch.tensor([1, 2, 4], dtype=dtype), global_batch_size=4)
    assert result.dtype == torch.float64
    assert result.item() == 1.75
    assert ts.nn.scale_regularization_loss(torch.tensor(3, dtype=dtype)).dtype == torch.float64


def test_halves_do_not_overflow():
    loss = torch.full((1000,), 100.0, dtype=torch.float16)  # the sum, 1e5, is beyond float16
    assert ts.nn.compute_average_loss(loss).item() == 100.0
    size = torch.tensor(100_000)  # so is the batch size
    assert ts.nn.compute_average_loss(loss, global_batch_size=size).item() == 1.0


@pytest.mark.parametrize(
    ("loss", "weight", "expected"),
    [
        (VECTOR, 2.0, 12.0),
        (VECTOR, [1.0, 0.5, 2.0], 8.0),
        (VECTOR, [[1.0], [0.5], [2.0]], 8.0),
        (VECTOR, [2.0], 12.0),
        (VECTOR, [1, 0, 2], 7.0),
        (VECTOR, [True, False, True], 4.0),
        (MATRIX, [1.0, 3.0], 51.0),  # [batch]: one weight for each example
        (MATRIX, [[1.0], [3.0]], 51.0),
        (MATRIX, [[1.0, 0.0, 2.0]], 23.0),
        (MATRIX, [[1.0, 0.0, 1.0], [0.5, 0.5, 0.5]], 11.5),
        (torch.tensor([1, 2, 4]), 0.5, 3.5),  # fractions of integers are not cut off
    ],
)
def test_sample_weight(loss, weight, expected):
    assert ts.nn.compute_average_loss(loss, torch.tensor(weight), 1).item() == expected
    assert ts.nn.compute_average_loss(loss, weight, 1).item() == expected


@pytest.mark.parametrize(
    ("loss", "weight"),
    [(VECTOR, [1.0, 2.0]), (VECTOR, [[1.0, 2.0, 3.0]]), (MATRIX, [1.0, 2.0, 3.0]), (VECTOR[:1], [1.0, 2.0, 3.0])],
)
def test_sample_weight_that_does_not_fit(loss, weight):
    with pytest.raises(InvalidArgumentError, match="broadcastable to per_example_loss"):
        ts.nn.compute_average_loss(loss, torch.tensor(weight), 1)


@pytest.mark.parametrize(
    ("size", "error"),
    [
        (4.0, TypeError),
        (True, TypeError),
        ("4", TypeError),
        (np.float32(4), TypeError),
        (torch.tensor(4.0), TypeError),
        (torch.tensor([4]), ValueError),
        ([2, 3], ValueError),
        (-1, InvalidArgumentError),
        (torch.tensor(-1), InvalidArgumentError),
    ],
)
def test_bad_global_batch_size(size, error):
    with pytest.raises(error, match="global_batch_size must"):
        ts.nn.compute_average_loss(VECTOR, global_batch_size=size)


def test_bad_losses():
    with pytest.raises(ValueError, match="one entry for each example"):
        ts.nn.compute_average_loss(torch.tensor(3.0), global_batch_size=4)
    for bad in (torch.tensor([True]), "text", None, [None]):
        with pytest.raises(InvalidArgumentError):
            ts.nn.compute_average_loss(bad)
        with pytest.raises(InvalidArgumentError):
            ts.nn.scale_regularization_loss(bad)


def test_gradients():
    x = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    weight = torch.tensor([1.0, 0.5, 2.0], requires_grad=True)
    ts.nn.compute_average_loss(x.square(), weight, torch.tensor(6)).backward()
    torch.testing.assert_close(x.grad, torch.tensor([1 / 3, 1 / 3, 2.0]))
    torch.testing.assert_close(weight.grad, torch.tensor([1 / 6, 4 / 6, 9 / 6]))


@pytest.mark.parametrize("size", [None, 0, torch.tensor(0), "actual"])
def test_an_empty_share_has_zero_gradients(size):
    parameter = torch.nn.Parameter(torch.tensor([2.0]))
    ts.nn.compute_average_loss(parameter.expand(0) * 1.0, global_batch_size=size).backward()
    assert parameter.grad.item() == 0.0


def test_tensors_of_an_accelerator_are_not_read():
    loss = torch.ones(3, device="meta")  # has no values
    for size in (None, torch.tensor(6, device="meta"), 0):
        assert ts.nn.compute_average_loss(loss, torch.ones(3, device="meta"), size).device.type == "meta"
    assert ts.nn.scale_regularization_loss(loss).device.type == "meta"


def test_list_of_losses_keeps_the_graph():
    x = torch.tensor(2.0, requires_grad=True)
    ts.nn.compute_average_loss([x * 1, x * 3], global_batch_size=2).backward()
    assert x.grad.item() == 2.0
    x.grad = None
    ts.nn.scale_regularization_loss([x * 1, (x * 3).expand(2)]).backward()
    assert x.grad.item() == 7.0


@pytest.mark.parametrize(("value", "expected"), [(2.0, 2.0), ([1.0, 2.0], 3.0), (torch.ones(2, 2), 4.0), ([], 0.0)])
@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_scale_regularization_loss(num_replicas, value, expected):
    strategy = mirrored(num_replicas)
    for result in strategy.experimental_local_results(strategy.run(ts.scale_regularization_loss, args=(value,))):
        assert result.item() == expected / num_replicas


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_none_multiplies_by_the_number_of_replicas(num_replicas):
    strategy = mirrored(num_replicas)
    results = strategy.experimental_local_results(strategy.run(ts.compute_average_loss, args=(VECTOR,)))
    assert [r.item() for r in results] == pytest.approx([2.0 / num_replicas] * num_replicas)


def test_none_with_uneven_shares_warns_once(monkeypatch):
    monkeypatch.setattr(log, "_said", set())
    strategy = mirrored(2)

    def run(num_examples, fn=ts.compute_average_loss):
        (batch,) = strategy.experimental_distribute_dataset(torch.ones(num_examples), batch_size=8)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            strategy.run(fn, args=(batch,))
        return caught

    assert run(8) == []
    assert run(7, lambda x: ts.compute_average_loss(x, global_batch_size="actual")) == []
    assert run(7, lambda x: ts.compute_average_loss(torch.cat([x, x]))) == []  # of something else than examples
    (warning,) = run(7, lambda x: ts.compute_average_loss(x))
    assert "the shares of this batch are uneven" in str(warning.message)
    assert 'global_batch_size="actual"' in str(warning.message)
    assert warning.filename == __file__
    assert run(7) == []


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_contexts(num_replicas):
    strategy = mirrored(num_replicas)
    with strategy.scope():
        assert ts.compute_average_loss(VECTOR, global_batch_size=4).item() == 1.5
        for call in (
            lambda: ts.compute_average_loss(VECTOR),
            lambda: ts.compute_average_loss(VECTOR, global_batch_size="actual"),
            lambda: ts.scale_regularization_loss(VECTOR),
        ):
            with pytest.raises(RuntimeError, match="in cross-replica context"):
                call()

    def fn():
        return ts.get_replica_context().merge_call(lambda _: ts.compute_average_loss(VECTOR, global_batch_size=4))

    assert {r.item() for r in strategy.experimental_local_results(strategy.run(fn))} == {1.5}


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 4])
def test_actual_is_exact_for_every_batch(num_replicas):
    data = torch.arange(1.0, 8.0)
    strategy = mirrored(num_replicas)
    dataset = strategy.experimental_distribute_dataset(torch.utils.data.TensorDataset(data), batch_size=5)
    losses = []
    for (batch,) in dataset:
        parts = strategy.run(lambda x: ts.compute_average_loss(x, global_batch_size="actual"), args=(batch,))
        losses.append(strategy.reduce("sum", parts, axis=None).item())
    assert losses == pytest.approx([data[:5].mean().item(), data[5:].mean().item()], rel=1e-6)


def test_actual_needs_losses_of_this_replicas_share():
    strategy = mirrored(2)
    (batch,) = next(
        iter(strategy.experimental_distribute_dataset(torch.utils.data.TensorDataset(torch.zeros(4, 3)), batch_size=4))
    )
    with pytest.raises(ValueError, match=r"6 entries, but this replica's share of the batch is 2") as raised:
        strategy.run(lambda x: ts.compute_average_loss(x.reshape(-1), global_batch_size="actual"), args=(batch,))
    assert 'global_batch_size=ctx.all_reduce("sum", torch.tensor(my_count))' in str(raised.value)

    def with_the_remedy(x):
        loss = x.reshape(-1) + 1
        ctx = ts.get_replica_context()
        return ts.compute_average_loss(loss, global_batch_size=ctx.all_reduce("sum", torch.tensor(len(loss))))

    assert strategy.reduce("sum", strategy.run(with_the_remedy, args=(batch,)), axis=None).item() == 1.0


def test_actual_without_a_distributed_batch():
    with pytest.raises(RuntimeError, match="all_reduce"):
        mirrored(2).run(lambda: ts.compute_average_loss(VECTOR, global_batch_size="actual"))


# torch's compiler reads this attribute of its inputs, and hides the warning unless warnings are errors.
READS_GRAD = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")


@READS_GRAD
@pytest.mark.slow
@pytest.mark.parametrize("size", [None, 6, torch.tensor(6), "actual"])
def test_under_torch_compile(size):
    compiled = torch.compile(
        lambda x: ts.compute_average_loss(x.square(), torch.tensor([1.0, 0.5, 2.0]), size), backend="eager"
    )
    x = VECTOR.clone().requires_grad_()
    result = compiled(x)
    result.backward()
    divisor = 6 if size == 6 else 3
    assert result.item() == pytest.approx(21.0 / divisor)
    torch.testing.assert_close(x.grad, torch.tensor([2.0, 2.0, 12.0]) / divisor)


@READS_GRAD
@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_under_torch_compile_in_run(num_replicas):
    strategy = mirrored(num_replicas)
    data = torch.arange(1.0, 8.0)
    dataset = strategy.experimental_distribute_dataset(torch.utils.data.TensorDataset(data), batch_size=4)
    compiled = torch.compile(lambda x: ts.compute_average_loss(x * 2, global_batch_size="actual"), backend="eager")
    losses = [strategy.reduce("sum", strategy.run(compiled, args=batch), axis=None).item() for batch in dataset]
    assert losses == pytest.approx([5.0, 12.0])


@pytest.mark.parametrize(
    ("size", "is_distributed", "message"),
    [
        (3, True, "global_batch_size=3, but this batch has 4 examples over all replicas"),
        (4, False, "This replica alone has 4 losses, and there are 2 replicas, but global_batch_size=4"),
    ],
)
def test_a_size_smaller_than_the_batch_is_warned_of(size, is_distributed, message, monkeypatch):
    monkeypatch.setattr(log, "_said", set())
    strategy = mirrored(2)
    values = torch.arange(4.0)
    losses = next(iter(strategy.experimental_distribute_dataset(values, batch_size=4))) if is_distributed else values
    with pytest.warns(UserWarning, match=message):
        strategy.run(ts.nn.compute_average_loss, args=(losses,), kwargs={"global_batch_size": size})


@pytest.mark.parametrize(("size", "weight"), [(4, None), (8, None), (5, None), (3, torch.ones(1))])
def test_sizes_that_are_not_warned_of(size, weight):
    strategy = mirrored(2)
    arguments = {"sample_weight": weight, "global_batch_size": size}
    for losses in strategy.experimental_distribute_dataset(torch.ones(5), batch_size=4):
        total = strategy.reduce("SUM", strategy.run(ts.nn.compute_average_loss, args=(losses,), kwargs=arguments))
        assert total == pytest.approx(float(strategy.gather(losses, axis=0).sum()) / size)
