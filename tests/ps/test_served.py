"""Parameters, buffers and variables whose values are elsewhere, as the coordinator's program sees them."""

import copy
import io
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torchstrategy as ts
from tests.ps.memory_client import MemoryStrategy
from torchstrategy.experimental.partitioners import FixedShardsPartitioner
from torchstrategy.ps.served import ServedBuffer, ServedParameter
from torchstrategy.ps.served_variables import ServedVariable, ShardedVariable


@pytest.fixture
def strategy():
    return MemoryStrategy()


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def values(strategy):
    return [value.detach() for value in strategy.client.values.values()]


def test_a_parameter_looks_like_one(strategy):
    with strategy.scope():
        net = make_net()
    weight = net[0].weight
    assert isinstance(weight, nn.Parameter)
    assert type(weight) is ServedParameter
    assert type(net[1].running_mean) is ServedBuffer
    assert (weight.shape, weight.dtype, len(weight), weight.ndim, weight.numel()) == ((4, 3), torch.float32, 4, 2, 12)
    assert weight.requires_grad
    assert weight.is_leaf
    assert weight.grad is None
    assert weight.untyped_storage().nbytes() < 100 or weight.binding.local is not None
    assert len(list(net.parameters())) == 6
    assert "shape=(4, 3)" in repr(weight)
    assert f"value={weight.tolist()}" in repr(weight)


def test_references_from_before_follow(strategy):
    with strategy.scope():
        net = nn.Linear(2, 1)
        before = list(net.parameters())
        optimizer = torch.optim.SGD(before, 1.0)
    assert before[0] is net.weight is optimizer.param_groups[0]["params"][0]
    assert type(before[0]) is ServedParameter


def test_training_here_equals_plain_training(strategy):
    plain = make_net()
    with strategy.scope():
        net = make_net()
        optimizer = torch.optim.AdamW(net.parameters(), 0.1)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), 0.1)
    for _ in range(4):
        x = torch.randn(8, 3)
        for own_net, own_optimizer in ((net, optimizer), (plain, plain_optimizer)):
            own_optimizer.zero_grad()
            own_net(x).square().mean().backward()
            own_optimizer.step()
    for (name, own), other in zip(net.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    "write",
    [
        lambda w: nn.init.constant_(w, 3.0),
        lambda w: w.data.fill_(3.0),
        lambda w: setattr(w, "data", torch.full((4, 3), 3.0)),
        lambda w: w.detach().fill_(3.0),
        lambda w: w.copy_(torch.full((4, 3), 3.0)),
        lambda w: w.copy_(torch.tensor(3.0)),
        lambda w: w.mul_(0).add_(3),
        lambda w: w.__setitem__(slice(None), 3.0),
        lambda w: (torch._foreach_mul_([w], 0.0), torch._foreach_add_([w], 3.0)),
    ],
)
def test_what_is_written_reaches_the_servers(strategy, write):
    with strategy.scope():
        net = make_net()
    with torch.no_grad():
        write(net[0].weight)
    strategy._prepare_closures()
    assert values(strategy)[0].equal(torch.full((4, 3), 3.0))
    assert net[0].weight.detach().equal(torch.full((4, 3), 3.0))


def test_what_others_changed_is_seen(strategy):
    with strategy.scope():
        net = make_net()
        v = ts.Variable(1.0)
    x = torch.ones(2, 3)
    net.eval()(x)
    client = strategy.client
    client.update(net[2].bias.binding.spec, "assign_add", torch.tensor([5.0]))
    client.update(v.binding.spec, "assign", torch.tensor(2.0))
    client.log.clear()
    y = net(x)
    of_net = [t.binding.spec.id for m in net for t in (*m.parameters(), *m.buffers())]
    assert client.log == [("pull", of_net)], "one pull for a call"
    assert float(v) == 2.0
    client.update(net[2].bias.binding.spec, "assign_sub", torch.tensor([5.0]))
    torch.testing.assert_close(net(x), y - 5)


def test_a_graph_of_old_values_is_not_mixed_with_new_ones(strategy):
    with strategy.scope():
        net = nn.Linear(3, 1)
    loss = net(torch.ones(1, 3).requires_grad_()).square().sum()
    strategy.client.update(net.weight.binding.spec, "assign_add", torch.ones(1, 3))
    assert net.weight.sum().isfinite()  # pulls
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_copies_and_files_are_plain(strategy):
    with strategy.scope():
        net = make_net()
    copied = copy.deepcopy(net)
    assert type(copied[0].weight) is nn.Parameter
    assert type(copied[1].running_mean) is torch.Tensor
    torch.testing.assert_close(copied.eval()(torch.ones(2, 3)), net.eval()(torch.ones(2, 3)))
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    make_net().load_state_dict(state)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert type(loaded[0].weight) is nn.Parameter


def test_load_state_dict_does_not_pull(strategy):
    with strategy.scope():
        net = make_net()
    state = {name: torch.full_like(value, 2) for name, value in make_net().state_dict().items()}
    strategy.client.log.clear()
    net.load_state_dict(state)
    assert {entry[0] for entry in strategy.client.log} == {"assign"}
    assert all(bool((value == 2).all()) for value in values(strategy))


def test_buffers_change_where_a_module_runs_here(strategy):
    plain = make_net()
    with strategy.scope():
        net = make_net()
    x = torch.randn(8, 3)
    net(x), plain(x)
    torch.testing.assert_close(values(strategy)[4], plain[1].running_mean)
    assert int(net[1].num_batches_tracked) == 1


class Norms(nn.Module):
    def __init__(self):
        super().__init__()
        self.batch = nn.BatchNorm1d(3)
        self.instance = nn.InstanceNorm1d(3, track_running_stats=True)

    def forward(self, x):
        return self.batch(x), self.instance(x)


def moving_averages_beside_replicas():
    """Say whether servers get moving averages while a strategy with several replicas has replaced torch's norms."""
    replicas = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    strategy = MemoryStrategy()
    with strategy.scope():
        net = Norms()
    plain, x = Norms(), torch.arange(24.0).view(2, 3, 4)
    net(x), plain(x)
    expected = [tensor.detach() for tensor in plain.state_dict().values()]
    found = [value for value in values(strategy) if value.dim()]
    expected = [tensor for tensor in expected if tensor.dim()]
    return replicas.num_replicas_in_sync, sorted(map(str, found)) == sorted(map(str, expected))


def test_moving_averages_beside_a_strategy_with_replicas():
    assert moving_averages_beside_replicas() == (2, True)


@pytest.mark.end_to_end
def test_moving_averages_where_the_strategy_with_replicas_comes_first():
    program = """
import torchstrategy as ts
replicas = ts.MirroredStrategy(["cpu:0", "cpu:1"])
from tests.ps import test_served
print(test_served.moving_averages_beside_replicas())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.strip() == "(2, True)"


def test_frozen_parameters_and_gradients(strategy):
    with strategy.scope():
        net = make_net()
    net[0].requires_grad_(False)
    net(torch.randn(4, 3)).sum().backward()
    assert net[0].weight.grad is None
    assert net[2].weight.grad.shape == (1, 4)
    norm = nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
    assert norm > 1e-3
    torch.testing.assert_close(
        nn.utils.get_total_norm([p.grad for p in net.parameters() if p.grad is not None]), norm * 0 + 1e-3
    )
    net.zero_grad()
    assert net[2].weight.grad is None


def test_embedding_rows(strategy):
    plain = nn.Embedding(10, 3, sparse=True, padding_idx=2)
    with strategy.scope():
        table = nn.Embedding(10, 3, sparse=True, padding_idx=2)
    table.load_state_dict(plain.state_dict())
    indices = torch.tensor([[1, 2, 1], [7, 2, 0]])
    strategy.client.log.clear()
    for module in (table, plain):
        (module(indices).square().sum() + module(indices[0]).sum()).backward()
    assert [entry for entry in strategy.client.log if entry[0] == "pull"] == []
    assert table.weight.grad.is_sparse
    torch.testing.assert_close(table.weight.grad.to_dense(), plain.weight.grad.to_dense())
    assert table.weight.binding.local is None, "the table is not here"
    with pytest.raises(NotImplementedError, match="max_norm"):
        F.embedding(indices, table.weight, max_norm=1.0)
    torch.testing.assert_close(table.weight.sum(), plain.weight.sum())  # any other function pulls all


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_embedding_bags(strategy, mode):
    plain = nn.EmbeddingBag(10, 3, sparse=True, mode=mode, padding_idx=4)
    with strategy.scope():
        table = nn.EmbeddingBag(10, 3, sparse=True, mode=mode, padding_idx=4)
    table.load_state_dict(plain.state_dict())
    indices, offsets = torch.tensor([1, 4, 1, 9, 4]), torch.tensor([0, 3, 3])
    for module in (table, plain):
        module(indices, offsets).square().sum().backward()
    torch.testing.assert_close(table.weight.grad.to_dense(), plain.weight.grad.to_dense())


def test_variables(strategy):
    with strategy.scope():
        v = ts.Variable([1.0, 2.0], name="v")
        count = ts.Variable(3, trainable=False)
    assert type(v) is ServedVariable
    assert (v.name, v.trainable, count.trainable) == ("v:0", True, False)
    assert v.assign_add([1.0, 1.0]) is v
    assert v.tolist() == [2.0, 3.0]
    assert (v * 2).tolist() == [4.0, 6.0]
    assert int(count.assign_sub(1)) == 2
    assert count.numpy() == 2
    with pytest.raises(ValueError, match=r"has shape \(2,\)"):
        v.assign(1.0)
    assert type(copy.deepcopy(v)) is ts.Variable
    v.sum().backward()
    assert v.grad.tolist() == [1.0, 1.0]


@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int64, torch.int8, torch.uint8])
def test_what_bypasses_torchs_functions_finds_nobodys_number(strategy, dtype):
    with strategy.scope():
        v = ts.Variable(torch.tensor(2, dtype=dtype), trainable=False)
    found = torch.tensor(v)
    assert found.item() not in (0, 1, 2)
    assert found.isnan() or abs(found.item()) >= 127


def test_sharded_variables():
    strategy = MemoryStrategy(FixedShardsPartitioner(2))
    with strategy.scope():
        v = ts.Variable(torch.arange(15.0).reshape(5, 3))
    assert type(v) is ShardedVariable
    assert [part.tolist() for part in v] == [torch.arange(9.0).reshape(3, 3).tolist(), [[9, 10, 11], [12, 13, 14]]]
    strategy.client.log.clear()
    rows = F.embedding(torch.tensor([4, 0, 4]), v)
    assert strategy.client.log == [("pull_rows", [0, 4])]
    rows.sum().backward()
    assert v.grad.to_dense()[:, 0].tolist() == [1, 0, 0, 0, 2]
    assert v.sparse_read([1]).tolist() == [[3, 4, 5]]
    v.scatter_add([0, 0], torch.ones(2, 3))
    assert v[0].tolist() == [2, 3, 4]
    with pytest.raises(ts.errors.InvalidArgumentError, match="don't fit 1 rows"):
        v.scatter_add([0], torch.ones(2, 2))


def test_an_optimizers_state(strategy):
    with strategy.scope():
        net = nn.Linear(2, 1)
        optimizer = torch.optim.Adam(net.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler.step()
    state = optimizer.state_dict()
    assert sorted(state["state"]) == [0, 1]
    assert int(state["state"][0]["step"]) == 1
    assert state["param_groups"][0]["lr"] == 0.05
    assert strategy.client.optimizers
    strategy._prepare_closures()
    (served,) = strategy.client.optimizers.values()
    assert served.param_groups[0]["lr"] == 0.05
    with pytest.raises(RuntimeError, match="can't be added"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_a_state_from_before_a_step_begins_anew(strategy):
    with strategy.scope():
        net = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.5)
    before = copy.deepcopy(optimizer.state_dict())
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert optimizer.state_dict()["state"]
    optimizer.load_state_dict(before)
    assert optimizer.state_dict() == before


def test_a_parameter_of_no_module(strategy):
    with strategy.scope():
        weight = nn.Parameter(torch.zeros(2))
        optimizer = torch.optim.SGD([weight], 1.0)
    weight.sum().backward()
    optimizer.step()
    assert weight.tolist() == [-1.0, -1.0]
    assert values(strategy)[0].tolist() == [-1.0, -1.0]


def test_parameters_that_share_memory_are_refused(strategy):
    """Writing to one of them changes the other one, which two variables would not do."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Linear(2, 2)
            self.decoder = nn.Linear(2, 2)
            self.decoder.weight = nn.Parameter(self.encoder.weight.data)

    scope = strategy.scope()
    with pytest.raises(ValueError, match=r"'encoder\.weight' and 'decoder\.weight' share memory"), scope:
        model = Tied()
    with pytest.raises(ValueError, match="share memory"):
        strategy._prepare_closures()
    model.decoder.weight = model.encoder.weight
    strategy._prepare_closures()
    assert model.decoder.weight is model.encoder.weight
    assert len(strategy.client.values) == 3
    with strategy.scope():
        halves = torch.ones(4)
        nn.ParameterList([nn.Parameter(halves[:2]), nn.Parameter(halves[2:])])


def test_a_module_made_in_parts(strategy):
    with strategy.scope():
        net = nn.Sequential(nn.Linear(3, 4))
    with strategy.scope():
        net.append(nn.Linear(4, 1))
    assert all(type(p) is ServedParameter for p in net.parameters())
    assert net(torch.ones(2, 3)).shape == (2, 1)
    assert strategy.hosting.root_of(net[1]) == (net, "1")


def test_gradients_of_rows_do_not_depend_on_the_order_of_calls(strategy):
    plain = nn.Embedding(10, 3, sparse=True)
    with strategy.scope():
        table = nn.Embedding(10, 3, sparse=True)
        optimizer = torch.optim.SGD(table.parameters(), 1.0)
    table.load_state_dict(plain.state_dict())
    plain_optimizer = torch.optim.SGD(plain.parameters(), 1.0)
    indices = torch.tensor([3, 1, 3])
    for module, own in ((table, optimizer), (plain, plain_optimizer)):
        loss = module(indices).square().sum()
        own.zero_grad()
        loss.backward(retain_graph=True)
        loss.backward()
        module.weight.grad.mul_(0.5)
        own.step()
        own.zero_grad()
        assert module.weight.grad is None
    torch.testing.assert_close(values(strategy)[0], plain.weight.detach())


def test_a_dtype_stays(strategy):
    with strategy.scope():
        net = make_net()
    with pytest.raises(RuntimeError, match="Convert the module inside the scope"):
        net.double()
    assert net.to("cpu")[0].weight.dtype == torch.float32
