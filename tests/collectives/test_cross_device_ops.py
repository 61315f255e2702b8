import pytest
import torch
from torch import nn

import torchstrategy as ts
from tests.programs import cpu_devices
from torchstrategy.collectives import cross_device_ops as ops_module

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
