"""Functions and objects of the coordinator's program, sent to a worker and called there."""

import contextlib
import copy
import functools
import gc
import threading
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import nn

import torchstrategy as ts
from tests.ps.memory_client import MemoryStrategy
from torchstrategy.ps.parameter_server_strategy import ParameterServerStrategy
from torchstrategy.ps.served import Served
from torchstrategy.ps.workshop import Workshop


class Cluster:
    """A coordinator and one worker in this process; what passes between them is what would be sent."""

    def __init__(self, partitioner=None):
        self.strategy = MemoryStrategy(partitioner)
        self.client = self.strategy.client
        on_worker = ParameterServerStrategy._on_worker(self.strategy.cluster_spec, 0)
        self.workshop = Workshop(on_worker, self.client)
        self.known = set()
        self.num_sent = 0

    def call(self, fn, *args, resources=None, **kwargs):
        self.strategy._prepare_closures()
        shipped = self.strategy.shipper.function(fn)
        blob, uses = self.strategy.shipper.arguments(args, kwargs)
        for key in (*shipped.needs, *uses):
            if key not in self.known:
                message = self.strategy.shipper.definition(key)
                self.workshop.define(message, resources or {})
                self.known.add(key)
                self.known -= set(message.fields["replaces"])
                self.num_sent += 1
        outcome = self.workshop.run(shipped.key, blob, resources or {})
        if outcome.side is not None:
            self.strategy.shipper.absorb(outcome.side)
        return outcome.value


@pytest.fixture
def cluster():
    return Cluster()


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))


def test_training_on_a_worker_equals_plain_training(cluster):
    plain = make_net().double()
    with cluster.strategy.scope():
        net = make_net().double()
        optimizer = torch.optim.Adam(net.parameters(), 0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    plain_optimizer = torch.optim.Adam(plain.parameters(), 0.1)
    plain_scheduler = torch.optim.lr_scheduler.StepLR(plain_optimizer, 2, 0.5)

    def step(x):
        optimizer.zero_grad()
        loss = net(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    for _ in range(6):
        x = torch.randn(8, 3, dtype=torch.float64)
        loss = cluster.call(step, x)
        scheduler.step()
        plain_optimizer.zero_grad()
        plain_loss = plain(x).square().mean()
        plain_loss.backward()
        plain_optimizer.step()
        plain_scheduler.step()
        torch.testing.assert_close(loss, plain_loss.detach(), rtol=0, atol=1e-12)
    for (name, own), other in zip(net.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=1e-12, msg=name)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0125)
    state, plain_state = optimizer.state_dict()["state"], plain_optimizer.state_dict()["state"]
    torch.testing.assert_close(state[0]["exp_avg"], plain_state[0]["exp_avg"], rtol=0, atol=1e-12)


def test_a_function_is_sent_once(cluster):
    with cluster.strategy.scope():
        net = make_net()

    def predict(x):
        return net(x).detach()

    net.eval()
    x = torch.ones(2, 3)
    first = cluster.call(predict, x)
    num_sent = cluster.num_sent
    assert num_sent == 2  # the net and the function
    torch.testing.assert_close(cluster.call(predict, x), first)
    assert cluster.num_sent == num_sent


def test_training_mode_follows_the_coordinator_and_is_not_sent_twice(cluster):
    with cluster.strategy.scope():
        net = make_net()

    def is_training():
        return net.training, net[1].training

    net.train()
    assert cluster.call(is_training) == (True, True)
    net.eval()
    assert cluster.call(is_training) == (False, False)
    num_sent = cluster.num_sent
    net.train()
    assert cluster.call(is_training) == (True, True)
    assert cluster.num_sent == num_sent


class Described(nn.Module):
    """Has all kinds of attributes, and gives what they are."""

    def __init__(self):
        super().__init__()
        self.factor, self.tensor, self.array = 1.0, torch.ones(2), np.ones(2)
        self.names, self.pair, self.function = {"a": [1]}, (1, 2), torch.sin
        self.layer = nn.Linear(1, 1, bias=False)
        self.register_buffer("seen", torch.zeros(1))
        nn.init.ones_(self.layer.weight)

    def forward(self, x):
        told = [self.factor, self.tensor[0].item(), self.array[0].item(), self.names["a"][0], self.pair[0]]
        return [*told, self.function(torch.zeros(1)).item(), self.seen.item(), self.layer(x).detach().sum().item()]


#: What is changed, and where it shows.
CHANGES = {
    "a number": (lambda m: setattr(m, "factor", 9.0), 0),
    "a tensor": (lambda m: setattr(m, "tensor", torch.full((2,), 9.0)), 1),
    "a tensor in place": (lambda m: m.tensor.fill_(9), 1),
    "an array in place": (lambda m: m.array.fill(9), 2),
    "a list in a dictionary": (lambda m: m.names["a"].__setitem__(0, 9), 3),
    "a tuple": (lambda m: setattr(m, "pair", (9, 2)), 4),
    "a function": (lambda m: setattr(m, "function", torch.cos), 5),
    "a buffer": (lambda m: setattr(m, "seen", torch.full((1,), 9.0)), 6),
    "a buffer in place": (lambda m: m.seen.fill_(9), 6),
    "a layer": (lambda m: setattr(m, "layer", nn.Hardtanh()), 7),
    "a parameter": (lambda m: setattr(m.layer, "weight", nn.Parameter(torch.full((1, 1), 9.0))), 7),
    "a hook": (lambda m: m.layer.register_forward_hook(lambda *args: args[2] * 9), 7),
    "a method": (lambda m: setattr(m.layer, "forward", lambda x: x * 9), 7),
    "the training mode": (lambda m: m.layer.register_forward_pre_hook(lambda m, x: (x[0] * 9,)) and m.eval(), 7),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("is_in_scope", [True, False])
def test_a_change_of_a_module_reaches_the_workers(cluster, change, is_in_scope):
    with cluster.strategy.scope() if is_in_scope else contextlib.nullcontext():
        model = Described()

    def fn(x):
        return model(x)

    x = torch.full((1, 1), 3.0)
    before = cluster.call(fn, x)
    num_sent = cluster.num_sent
    assert cluster.call(fn, x) == before
    assert cluster.num_sent == num_sent
    assert before == model(x)
    make, where = CHANGES[change]
    make(model)
    after = cluster.call(fn, x)
    assert after == model(x)
    assert after[where] != before[where]
    assert after[:where] == before[:where]
    assert cluster.call(model.forward, x) == after


def test_what_is_new_in_a_module_is_on_the_servers(cluster):
    with cluster.strategy.scope():
        net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1))

    def fn():
        return [float(parameter.detach().sum()) for parameter in net.parameters()]

    cluster.call(fn)
    averages = net[1].running_mean
    net[1].running_mean = torch.full((1,), 9.0)
    net[0] = nn.Linear(1, 1, bias=False)  # outside the scope
    assert cluster.call(fn) == fn()
    assert net[1].running_mean is averages
    assert float(averages) == 9
    assert isinstance(net[0].weight, Served)
    with torch.no_grad():
        net[0].weight.fill_(7)
    assert cluster.call(fn)[0] == 7
    net[0] = nn.Linear(1, 1, bias=False)
    before = float(net[0].weight.detach())
    optimizer = torch.optim.SGD(net[0].parameters(), 1.0)

    def train():
        net[0](torch.ones(1, 1)).sum().backward()
        optimizer.step()

    cluster.call(train)
    assert float(net[0].weight.detach()) == before - 1


def test_a_function_leaves_no_mode_and_no_rate_to_the_next_one(cluster):
    with cluster.strategy.scope():
        net = nn.Sequential(nn.Linear(2, 1), nn.Dropout(0.5))
        net.factor = 1.0
        optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def evaluate(fail=False):
        net.eval()
        net.factor = 9.0
        optimizer.param_groups[0]["lr"] = 9.0
        if fail:
            raise KeyError("fail")

    def train():
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return net.training, net[1].training, net.factor

    cluster.call(evaluate)
    assert cluster.call(train) == (True, True, 1.0)
    with pytest.raises(KeyError):
        cluster.call(evaluate, fail=True)
    assert cluster.call(train) == (True, True, 1.0)
    net.eval()
    assert cluster.call(train) == (False, False, 1.0)


def test_a_name_that_stands_for_another_object_is_noticed(cluster):
    factor = 2.0

    def scaled(x):
        return factor * x

    assert cluster.call(scaled, 3.0) == 6.0
    factor = 5.0
    assert cluster.call(scaled, 3.0) == 15.0


def test_a_function_may_use_torch_ops(cluster):
    assert cluster.call(lambda x: torch.ops.aten.add.Tensor(x, x), torch.ones(1)).item() == 2.0


def test_methods_and_partials(cluster):
    class Trainer:
        def __init__(self, net):
            self.net = net

        def predict(self, x):
            return self.net(x).detach()

    with cluster.strategy.scope():
        trainer = Trainer(nn.Linear(3, 1))
    x = torch.ones(2, 3)
    expected = trainer.net(x).detach()
    torch.testing.assert_close(cluster.call(trainer.predict, x), expected)
    torch.testing.assert_close(cluster.call(functools.partial(trainer.predict, x)), expected)


def test_a_module_as_argument_and_a_child_of_one(cluster):
    with cluster.strategy.scope():
        net = make_net()

    def head_of(module, x):
        return module(x).detach(), net[0] is module

    result, same = cluster.call(head_of, net[0], torch.ones(1, 3))
    assert same
    torch.testing.assert_close(result, net[0](torch.ones(1, 3)).detach())


def test_steps_within_one_call_see_each_other(cluster):
    plain = nn.Linear(3, 1).double()
    with cluster.strategy.scope():
        net = nn.Linear(3, 1).double()
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    net.load_state_dict(plain.state_dict())
    plain_optimizer = torch.optim.SGD(plain.parameters(), 0.1, momentum=0.9)
    x = torch.randn(4, 3, dtype=torch.float64)

    def steps(net, optimizer, functional):
        for _ in range(3):
            optimizer.zero_grad()
            y = F.linear(x, net.weight, net.bias) if functional else net(x)
            y.square().mean().backward()
            optimizer.step()

    cluster.call(steps, net, optimizer, functional=False)
    cluster.call(steps, net, optimizer, functional=True)
    steps(plain, plain_optimizer, functional=False)
    steps(plain, plain_optimizer, functional=True)
    torch.testing.assert_close(net.weight.detach().clone(), plain.weight.detach(), rtol=0, atol=1e-12)


def test_variables(cluster):
    with cluster.strategy.scope():
        v = ts.Variable(1.0)
        count = ts.Variable(0, trainable=False, dtype=torch.int64)
    assert type(v).__name__ == "ServedVariable"

    def fn(x):
        v.assign_add(x)
        count.assign_add(1)
        count.assign_add(1)
        return float(v), int(count), ts.get_strategy().run(lambda: v.assign_sub(0.5))

    assert cluster.call(fn, 2.0) == (3.0, 2, torch.tensor(2.5))
    assert float(v) == 2.5
    assert int(count) == 2
    v.assign(7.0)
    assert cluster.call(lambda: v + 1).item() == 8.0
    assert "7.0" in repr(v)


def test_variables_as_arguments(cluster):
    with cluster.strategy.scope():
        v = ts.Variable(2.0)
        net = nn.Linear(1, 1)

    def fn(x, weight):
        x.assign_add(1.0)
        return float(x), weight.detach().clone()

    value, weight = cluster.call(fn, v, net.weight)
    assert value == float(v) == 3.0
    torch.testing.assert_close(weight, net.weight.detach().clone())


class _Iterator:
    _ts_resource_id = 7


def test_an_iterator_as_argument_and_in_a_function(cluster):
    iterator = _Iterator()
    assert cluster.call(lambda: next(iterator), resources={7: iter([5])}) == 5
    assert cluster.call(next, iterator, resources={7: iter([6])}) == 6


def test_a_global_of_a_ts_function_is_noticed(cluster):
    scale = 2.0

    @ts.function
    def scaled(x):
        return scale * x

    assert cluster.call(scaled, 1.0) == 2.0
    scale = 3.0
    assert cluster.call(scaled, 1.0) == 3.0


def test_a_variable_trains(cluster):
    with cluster.strategy.scope():
        w = ts.Variable(torch.zeros(2))
        optimizer = torch.optim.SGD([w], 0.5)

    def step():
        optimizer.zero_grad()
        loss = (w - 1).square().sum() + (w * 0).sum()
        loss.backward()
        optimizer.step()
        return loss.item()

    assert cluster.call(step) == 2.0
    assert cluster.call(step) == 0.0
    torch.testing.assert_close(w.read_value().detach(), torch.ones(2))


def test_an_embedding_pulls_the_rows_that_it_needs(cluster):
    plain = nn.Embedding(50, 2, sparse=True, padding_idx=3)
    with cluster.strategy.scope():
        table = nn.Embedding(50, 2, sparse=True, padding_idx=3)
        optimizer = torch.optim.SparseAdam(table.parameters(), 0.1)
    table.load_state_dict(plain.state_dict())
    plain_optimizer = torch.optim.SparseAdam(plain.parameters(), 0.1)
    indices = torch.tensor([[4, 3, 4], [9, 3, 0]])

    def step(table, optimizer):
        optimizer.zero_grad()
        loss = (table(indices) * torch.arange(12.0).view(2, 3, 2)).sum() + table(indices[0]).sum()
        loss.backward()
        optimizer.step()
        return loss.item()

    cluster.client.log.clear()
    assert cluster.call(step, table, optimizer) == step(plain, plain_optimizer)
    assert [entry for entry in cluster.client.log if entry[0].startswith("pull")] == [
        ("pull_rows", [0, 3, 4, 9]),
        ("pull_rows", [3, 4]),
    ]
    torch.testing.assert_close(cluster.client.values[0].detach(), plain.weight.detach())


def test_an_embedding_bag(cluster):
    plain = nn.EmbeddingBag(20, 2, mode="sum", sparse=True)
    with cluster.strategy.scope():
        table = nn.EmbeddingBag(20, 2, mode="sum", sparse=True)
    table.load_state_dict(plain.state_dict())
    indices, offsets = torch.tensor([1, 5, 1, 7]), torch.tensor([0, 2])
    own = cluster.call(lambda i, o: table(i, o).detach(), indices, offsets)
    torch.testing.assert_close(own, plain(indices, offsets).detach())


def test_metrics_count_what_workers_saw(cluster):
    with cluster.strategy.scope():
        mean = ts.metrics.Mean()
        accuracy = ts.metrics.SparseCategoricalAccuracy()

    def step(values, labels, logits):
        mean.update_state(values)
        accuracy.update_state(labels, logits)

    logits = torch.eye(3)
    cluster.call(step, torch.tensor([1.0, 2.0]), torch.tensor([0, 1, 1]), logits)
    cluster.call(step, torch.tensor([6.0]), torch.tensor([0, 1, 2]), logits)
    assert float(mean.result()) == pytest.approx(3.0)
    assert float(accuracy.result()) == pytest.approx(5 / 6)
    mean.reset_state()
    cluster.call(step, torch.tensor([6.0]), torch.tensor([0, 1, 2]), logits)
    assert float(mean.result()) == 6.0


class Counting(nn.Module):
    """Has metrics among its modules."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(1, 1, bias=False)
        self.mean = ts.metrics.Mean()
        self.both = torchmetrics.MetricCollection({"sum": torchmetrics.SumMetric(), "max": torchmetrics.MaxMetric()})

    def forward(self, x):
        self.mean.update_state(x)
        self.both.update(x)
        return self.net(x)


def test_metrics_made_outside_the_scope_count_what_workers_saw(cluster):
    mean, of_model = ts.metrics.Mean(), ts.metrics.Sum()
    both = torchmetrics.MetricCollection([torchmetrics.MeanMetric(), torchmetrics.SumMetric()])
    with cluster.strategy.scope():
        model = make_net()
    model.seen = of_model  # outside, too

    def fn(x):
        mean.update_state(x)
        model.seen.update_state(x)
        both.update(x)
        both["SumMetric"].update(x)

    for k in range(3):
        cluster.call(fn, torch.tensor(float(k)))
    assert (float(mean.result()), float(of_model.result())) == (1.0, 3.0)
    assert {name: float(value) for name, value in both.compute().items()} == {"MeanMetric": 1.0, "SumMetric": 6.0}
    mean.reset_state()
    cluster.call(lambda: mean.update_state(torch.tensor(5.0)))
    assert float(mean.result()) == 5.0


def test_metrics_of_a_module_count_what_workers_saw(cluster):
    with cluster.strategy.scope():
        net = Counting()
    for values in ([1.0, 2.0], [6.0]):
        cluster.call(lambda x: net(x).detach(), torch.tensor(values)[:, None])
    assert float(net.mean.result()) == pytest.approx(3.0)
    assert {name: float(value) for name, value in net.both.compute().items()} == {"sum": 9.0, "max": 6.0}


def test_metrics_stand_still_for_who_reads_several_states(cluster):
    with cluster.strategy.scope():
        mean = ts.metrics.Mean()
    calls = threading.Thread(target=cluster.call, args=(lambda: mean.update_state(torch.ones(3)),))
    with cluster.strategy.shipper.merging:
        calls.start()
        calls.join(0.2)
        assert float(mean.count) == 0.0
    calls.join()
    assert float(mean.count) == 3.0


def test_a_module_is_not_sent_again_for_what_its_metrics_counted(cluster):
    with cluster.strategy.scope():
        net = Counting()

    def call(x):
        return net(x).detach()

    cluster.call(call, torch.ones(1, 1))
    num_sent = cluster.num_sent
    cluster.call(call, torch.ones(1, 1))
    assert cluster.num_sent == num_sent


def test_buffers_take_what_each_call_changes(cluster):
    with cluster.strategy.scope():
        net = nn.BatchNorm1d(2, affine=False, dtype=torch.float64)
    plain = copy.deepcopy(net)
    x = torch.randn(4, 2, dtype=torch.float64)
    for _ in range(3):
        cluster.call(lambda x: net(x).sum(), x)
        plain(x)
    torch.testing.assert_close(net.running_var.clone(), plain.running_var)
    assert int(net.num_batches_tracked) == 3


def test_an_optimizer_made_outside_the_scope_is_taken_up(cluster):
    with cluster.strategy.scope():
        net = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), 1.0)
    before = net.weight.detach().clone()

    def step():
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    cluster.call(step)
    torch.testing.assert_close(net.weight.detach().clone(), before - 1)


def test_an_optimizer_of_a_module_made_outside_the_scope_is_refused(cluster):
    net = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), 1.0)

    def step():
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    with pytest.raises(ValueError, match=r"not made in the scope of the ParameterServerStrategy"):
        cluster.call(step)


def test_a_module_made_outside_the_scope_with_an_optimizer_made_inside_is_refused(cluster):
    net = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
    with cluster.strategy.scope():
        optimizer = torch.optim.SGD(net.parameters(), 1.0)

    def step():
        net(torch.ones(3, 2)).sum().backward()
        optimizer.step()

    with pytest.raises(TypeError, match=r"The Linear was made outside the scope .* Make the module inside"):
        cluster.call(step)


def test_modules_that_copy_their_parts_train(cluster):
    with cluster.strategy.scope():
        net = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 1, 4, dropout=0.0), 2, enable_nested_tensor=False)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
    before = net.layers[1].linear1.weight.detach().clone()

    def step():
        net(torch.randn(3, 1, 4)).square().sum().backward()
        optimizer.step()
        return net.layers[1].training

    assert cluster.call(step) is True
    assert not torch.equal(net.layers[1].linear1.weight.detach(), before)


def test_what_cannot_be_sent_is_named(cluster):
    import threading  # noqa: PLC0415

    lock = threading.Lock()

    def locked():
        with lock:
            pass

    with pytest.raises(TypeError, match=r"The function .*locked can't be sent to the workers"):
        cluster.call(locked)
    with pytest.raises(TypeError, match="The arguments can't be sent"):
        cluster.call(len, lock)


def test_a_scheduler_belongs_to_the_coordinator(cluster):
    with cluster.strategy.scope():
        net = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(net.parameters(), 1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(TypeError, match=r"Call scheduler.step\(\) in the coordinator's program"):
        cluster.call(lambda: scheduler.step())


def test_a_variable_cannot_be_made_on_a_worker(cluster):
    with pytest.raises(ValueError, match="can't be made in a function that runs on a worker"):
        cluster.call(lambda: ts.Variable(1.0))


def test_writing_to_a_parameter_on_a_worker_is_an_error(cluster):
    with cluster.strategy.scope():
        net = nn.Linear(2, 1)

    def clip():
        with torch.no_grad():
            net.weight.clamp_(-0.01, 0.01)

    with pytest.raises(RuntimeError, match=r"changed the parameter 'weight' in place"):
        cluster.call(clip)
    before = net.weight.detach().clone()
    assert cluster.call(lambda: net.weight.detach().clone()).equal(before)


@pytest.mark.parametrize("partitioner", [None, ts.experimental.partitioners.FixedShardsPartitioner(2)])
@pytest.mark.parametrize("trainable", [False, True])
@pytest.mark.parametrize("write", ["add_", "data", "item", "out", "then_assign"])
def test_writing_to_a_variable_on_a_worker_is_an_error(partitioner, trainable, write):
    cluster = Cluster(partitioner)
    with cluster.strategy.scope():
        v = ts.Variable([1.0, 2.0], name="v", trainable=trainable)

    def fn():
        with torch.no_grad():
            if write == "add_":
                v.add_(1)
            elif write == "data":
                v.data.fill_(7)
            elif write == "item":
                v[0] = 7
            elif write == "out":
                torch.add(v, 1, out=v)
            else:
                v.detach().add_(1)
                v.assign_add([1.0, 1.0])

    for _ in range(2):  # the second call does not suffer from the first one's
        with pytest.raises(RuntimeError, match=r"changed the variable 'v' in place, .* assign_add or assign_sub"):
            cluster.call(fn)
        assert cluster.call(lambda: v.detach().clone()).tolist() == [1.0, 2.0]
    assert cluster.call(lambda: v.assign_add([1.0, 1.0]).read_value()).tolist() == [2.0, 3.0]


def test_writing_to_rows_or_before_a_step_is_an_error(cluster):
    with cluster.strategy.scope():
        table, net = nn.Embedding(4, 1, sparse=True), nn.Linear(1, 1)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
    before = table.weight.detach().clone()

    def train():
        net.weight.data.mul_(0)
        net(torch.ones(1, 1)).sum().backward()
        optimizer.step()
        net(torch.ones(1, 1))  # pulls what the step made, which would hide the write

    with pytest.raises(RuntimeError, match=r"changed the parameter 'weight' in place"):
        cluster.call(lambda: float(table.weight.data.mul_(0).sum()))
    assert cluster.call(lambda: table.weight.detach().clone()).equal(before)
    with pytest.raises(RuntimeError, match=r"changed the parameter 'weight' in place"):
        cluster.call(train)


def test_tied_weights_stay_tied(cluster):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(2, 2)
            self.second = nn.Linear(2, 2)
            self.second.weight = self.first.weight

    with cluster.strategy.scope():
        net = Tied()
    assert cluster.call(lambda: net.first.weight is net.second.weight)
    assert len(cluster.client.values) == 3


def test_a_restored_optimizer_goes_on(cluster):
    with cluster.strategy.scope():
        net = nn.Linear(2, 1)
        optimizer = torch.optim.Adam(net.parameters(), 0.1)
    plain = copy.deepcopy(net)
    plain_optimizer = torch.optim.Adam(plain.parameters(), 0.1)

    def step(net, optimizer):
        optimizer.zero_grad()
        net(torch.ones(1, 2)).square().sum().backward()
        optimizer.step()

    step(plain, plain_optimizer)
    net.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(plain_optimizer.state_dict())
    step(plain, plain_optimizer)
    cluster.call(step, net, optimizer)
    torch.testing.assert_close(net.weight.detach().clone(), plain.weight.detach(), rtol=0, atol=1e-6)


def test_a_bidirectional_lstm(cluster):
    plain = nn.LSTM(2, 3, bidirectional=True)
    with cluster.strategy.scope():
        net = nn.LSTM(2, 3, bidirectional=True)
    net.load_state_dict(plain.state_dict())
    x = torch.randn(4, 1, 2)
    torch.testing.assert_close(cluster.call(lambda x: net(x)[0].detach(), x), plain(x)[0].detach())
    torch.testing.assert_close(net(x)[0].detach(), plain(x)[0].detach())


def use_a_strategy():
    cluster = Cluster()
    with cluster.strategy.scope():
        v = ts.Variable(1.0)
        net = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(net.parameters(), 1.0)

    def fn():
        net(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return float(v)

    cluster.call(fn)
    return weakref.ref(cluster.strategy)


def test_a_dropped_strategy_is_freed():
    strategy = use_a_strategy()
    gc.collect()  # frees the program's objects, which keep their strategy
    gc.collect()
    assert strategy() is None


def test_what_nothing_refers_to_is_unneeded(cluster):
    def call(k):
        return cluster.call(lambda: k)

    assert [call(k) for k in range(5)] == list(range(5))
    gc.collect()
    known = list(cluster.known)
    assert cluster.call(len, "ab") == 2
    assert sorted(cluster.strategy.shipper.unneeded(known)) == sorted(known)
