import pytest
import torch
from torch import nn

import torchstrategy as ts
from tests.programs import cpu_devices
from torchstrategy.base.options import CommunicationOptions
from torchstrategy.collectives import cross_device_ops as ops_module
from torchstrategy.collectives import summing
from torchstrategy.collectives.cross_device_ops import sum_gradients

OPS = {
    "one device": ts.ReductionToOneDevice,
    "hierarchical": ts.HierarchicalCopyAllReduce,
    "unpacked": lambda: ts.HierarchicalCopyAllReduce(num_packs=0),
    "nccl": ts.NcclAllReduce,
}


@pytest.fixture(autouse=True)
def _nccl_falls_back_quietly(monkeypatch):
    monkeypatch.setattr(ops_module, "warn_once", lambda message: None)


def gradients_of(ops, count):
    strategy = ts.MirroredStrategy(cpu_devices(count), cross_device_ops=ops)
    with strategy.scope():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, dtype=torch.float64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fn():
        i = ts.get_replica_context().replica_id_in_sync_group
        model[1](model[0](torch.full((2, 3), i + 1.0)).double()).sum().backward()
        ts.get_replica_context().sum_gradients(optimizer)
        return [parameter.grad.clone() for parameter in model.parameters()]

    return [strategy.experimental_local_results(value) for value in strategy.run(fn)]


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_all_give_every_replica_the_same_sum(name, count):
    expected = gradients_of(None, count)
    for values, reference in zip(gradients_of(OPS[name](), count), expected, strict=True):
        for value in values:
            torch.testing.assert_close(value, reference[0], rtol=0, atol=1e-5)


def test_results_are_separate_tensors():
    value = ts.PerReplica((torch.ones(2), torch.ones(2)))
    for make in OPS.values():
        first, second = make().reduce("sum", value, [torch.device("cpu", 0), torch.device("cpu", 1)]).values
        first.add_(1)
        assert second.tolist() == [2.0, 2.0]
        assert value.values[0].tolist() == [1.0, 1.0]


def test_reduce_to_device_and_accumulation_fn_are_used():
    calls = []

    def add(tensors):
        calls.append([tensor.device for tensor in tensors])
        return torch.stack(tensors).sum(0) * 10

    strategy = ts.MirroredStrategy(cpu_devices(2), ts.ReductionToOneDevice("cpu:1", add))
    value = strategy.run(lambda: torch.tensor(1.0))
    assert strategy.reduce("sum", value) == 20.0
    assert len(calls) == 1


def test_num_packs_is_honoured():
    packs = []

    class Counting(ts.HierarchicalCopyAllReduce):
        def _all_reduce(self, buffers):
            packs.append(buffers[0].numel())
            return super()._all_reduce(buffers)

    devices = [torch.device("cpu", i) for i in range(2)]
    pairs = [(ts.PerReplica((torch.ones(n), torch.ones(n))), devices) for n in (1, 2, 3, 4, 5)]
    results = Counting(num_packs=2).batch_reduce("sum", pairs)
    assert packs == [3, 12]
    assert [result.values[1].tolist() for result in results] == [[2.0] * n for n in (1, 2, 3, 4, 5)]


def test_a_users_own_ops_are_used_for_gradients_reduce_and_all_reduce():
    class Recording(ts.CrossDeviceOps):
        def __init__(self):
            self.calls = []

        def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
            self.calls.append(reduce_op)
            total = sum(per_replica_value.values)
            if reduce_op is ts.ReduceOp.MEAN:
                total = total / len(per_replica_value.values)
            return self.broadcast_implementation(total, destinations)

        def broadcast_implementation(self, tensor, destinations):
            return ts.Mirrored(tensor.clone() for _ in destinations)

    ops = Recording()
    gradients_of(ops, 2)
    assert ops.calls == [ts.ReduceOp.SUM] * 4
    strategy = ts.MirroredStrategy(cpu_devices(2), ops)
    strategy.reduce("mean", strategy.run(lambda: torch.ones(())))
    strategy.run(lambda: ts.get_replica_context().all_reduce("sum", torch.ones(())))
    assert ops.calls[4:] == [ts.ReduceOp.MEAN, ts.ReduceOp.SUM]


@pytest.mark.parametrize("num_packs", [-1, 1.5])
def test_bad_num_packs(num_packs):
    with pytest.raises(ValueError, match="num_packs"):
        ts.NcclAllReduce(num_packs)


def test_bad_values():
    devices = [torch.device("cpu", 0), torch.device("cpu", 1)]
    ops = ts.ReductionToOneDevice()
    with pytest.raises(ts.errors.InvalidArgumentError, match="equal shapes"):
        ops.reduce("sum", ts.PerReplica((torch.ones(1), torch.ones(2))), devices)
    with pytest.raises(ts.errors.InvalidArgumentError, match="equal dtypes"):
        ops.reduce("sum", ts.PerReplica((torch.ones(1), torch.ones(1).double())), devices)
    with pytest.raises(ValueError, match="PerReplica of tensors"):
        ops.reduce("sum", torch.ones(1), devices)


def test_nccl_without_gpus_says_so(monkeypatch):
    said = []
    monkeypatch.setattr(ops_module, "warn_once", said.append)
    value = ts.PerReplica((torch.ones(1), torch.ones(1)))
    ts.NcclAllReduce().reduce("sum", value, [torch.device("cpu", 0), torch.device("cpu", 1)])
    assert "one GPU for each replica" in said[0]


# Sums of gradients, in place.


def gradients(count, *, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    shapes = [(3, 4), (5,), (), (0, 2), (2, 3, 4, 5)]
    return [[torch.randn(shape, generator=generator).to(dtype) for _ in range(count)] for shape in shapes]


def sums_of(rows, ops=None, may_overwrite=None):
    devices = [torch.device("cpu", i) for i in range(len(rows[0]))]
    may_overwrite = [True] * len(rows) if may_overwrite is None else may_overwrite
    by_replica = [list(column) for column in zip(*rows, strict=True)]
    sums = sum_gradients(ops or ts.ReductionToOneDevice(), by_replica, may_overwrite, devices, CommunicationOptions())
    return [list(row) for row in zip(*sums, strict=True)]


@pytest.mark.parametrize("ops", [ts.ReductionToOneDevice, ts.NcclAllReduce, ts.HierarchicalCopyAllReduce])
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.filterwarnings("ignore:NcclAllReduce needs one GPU:UserWarning")
def test_gradients_are_summed_in_their_own_memory(count, dtype, ops):
    rows = gradients(count, dtype=dtype)
    expected = [sum(row[1:], row[0].clone()) for row in rows]
    found = sums_of(rows, ops())
    for row, own, total in zip(rows, found, expected, strict=True):
        assert all(a is b for a, b in zip(row, own, strict=True))
        for value in own:
            torch.testing.assert_close(value, total, rtol=0, atol=0)


@pytest.mark.parametrize("in_place", [True, False])
def test_no_more_than_a_bucket_is_packed_at_a_time(in_place, monkeypatch):
    packed = []

    def recorded(tensors):
        packed.append(sum(tensor.nbytes for tensor in tensors))
        return summing.pack(tensors)

    monkeypatch.setattr(ops_module, "pack", recorded)
    rows = [[torch.ones(2, size) for _ in range(2)] for size in (100, 20, 30, 40, 10)]
    by_replica = [list(column) for column in zip(*rows, strict=True)]
    options = CommunicationOptions(bytes_per_pack=400)
    devices = [torch.device("cpu", i) for i in range(2)]
    sums = sum_gradients(ts.HierarchicalCopyAllReduce(), by_replica, [in_place] * 5, devices, options)
    assert all((total == 2).all() for row in sums for total in row)
    assert max(packed) == (400 if in_place else 800)  # a tensor that is larger lies flat already


def test_gradients_that_must_stay_get_sums_beside_them():
    rows = gradients(2)
    before = [[value.clone() for value in row] for row in rows]
    found = sums_of(rows, may_overwrite=[True, False, True, False, True])
    for k, (row, own, values) in enumerate(zip(rows, found, before, strict=True)):
        torch.testing.assert_close(own[1], values[0] + values[1], rtol=0, atol=0)
        if k in (1, 3):
            torch.testing.assert_close(row, values, rtol=0, atol=0)


def test_gradients_keep_their_memory_format():
    rows = [[torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last) for _ in range(2)]]
    expected = rows[0][0] + rows[0][1]
    for value in sums_of(rows)[0]:
        torch.testing.assert_close(value, expected, rtol=0, atol=0)
        assert value.is_contiguous(memory_format=torch.channels_last)


def test_gradients_of_other_ops_go_through_them():
    class Doubling(ts.ReductionToOneDevice):
        def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
            total = super().reduce_implementation(reduce_op, per_replica_value, destinations, options)
            return ts.Mirrored([2 * value for value in total.values])

    ops = [Doubling(), ts.ReductionToOneDevice(accumulation_fn=lambda tensors: 2 * sum(tensors))]
    for each in ops:
        assert [value.tolist() for value in sums_of([[torch.ones(2), torch.ones(2)]], each)[0]] == [[4, 4], [4, 4]]


def test_gradients_of_different_shapes_are_refused():
    with pytest.raises(ts.errors.InvalidArgumentError, match="equal shapes"):
        sums_of([[torch.ones(2), torch.ones(3)]])
