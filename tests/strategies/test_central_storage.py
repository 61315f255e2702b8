"""CentralStorageStrategy: the numbers of MirroredStrategy, with parameters and optimizer state once on the host."""

import functools
import logging
import pickle

import pytest
import torch
from torch import nn

import torchstrategy as ts
from tests.parity.test_equivalence import CASES
from tests.programs import cpu_devices, largest_difference, train
from tests.strategies import central_programs as programs
from tests.strategies.central_programs import EXACT, IN_PROCESSES, VARIANTS
from torchstrategy.replicas.host_memory import HostMemory

FULL_NAME = "/job:localhost/replica:0/task:0/device:CPU:{}"
# Mirrored replicas of one process don't see these, so one replica is the measure.
BETTER = ["written outside by data", "replaced outside"]


def central(count, **options):
    return programs.make("central", cpu_devices(count), **options)


def linear(strategy, optimizer=torch.optim.Adam, **options):
    with strategy.scope():
        model = nn.Linear(3, 2)
        return model, optimizer(model.parameters(), **{"lr": 0.1, **options})


def step_of(model, optimizer):
    def step():
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()

    return step


@functools.cache
def mirrored(count, variant):
    return programs.train("mirrored", cpu_devices(count), variant)


@pytest.fixture(scope="module")
def one_replica():
    return {name: train([], **program) for name, (program, _) in CASES.items()}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_replicas_in_one_process_train_as_one(name, count, one_replica):
    program, tolerance = CASES[name]
    assert largest_difference(one_replica[name], programs.equivalence(cpu_devices(count), **program)) <= tolerance


@pytest.mark.parametrize("hosting", IN_PROCESSES)
@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_as_one(name, hosting, one_replica, process_pool):
    program, tolerance = CASES[name]
    for result in process_pool(2).run(programs.equivalence, IN_PROCESSES[hosting], **program):
        assert largest_difference(one_replica[name], result) <= tolerance


@pytest.mark.parametrize("way", [programs.train, programs.with_copies, programs.without_views])
@pytest.mark.parametrize("variant", VARIANTS)
def test_numbers_of_mirrored_in_one_process(variant, way):
    count = 1 if way is programs.with_copies and variant == "plain" else 2  # one with copies is one GPU
    assert largest_difference(mirrored(count, variant), way("central", cpu_devices(count), variant)) <= EXACT


@pytest.mark.filterwarnings("ignore:Buffer .* has got another value on each replica")
@pytest.mark.parametrize("with_hook", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_an_optimizer_leaves_buffers_of_anothers_model(count, with_hook):
    devices = cpu_devices(count)
    expected = programs.buffers_of_two_optimizers("mirrored", devices, with_hook)
    assert largest_difference(expected, programs.buffers_of_two_optimizers("central", devices, with_hook)) <= EXACT


@pytest.mark.slow
@pytest.mark.parametrize("way", [programs.train, programs.with_copies])
@pytest.mark.parametrize("variant", BETTER)
def test_writes_outside_run_that_torch_does_not_count(variant, way, process_pool):
    expected = programs.train("mirrored", ["cpu:0"], variant, has_norm=False)
    found = [way("central", cpu_devices(count), variant, has_norm=False) for count in (2, 3)]
    for devices in IN_PROCESSES.values():
        found += process_pool(2).run(way, "central", devices, variant, has_norm=False)
    for result in found:
        assert largest_difference(expected, result) <= EXACT


def test_concurrent_replicas():
    expected = train(cpu_devices(2), optimizer_name="adam")
    assert largest_difference(expected, train(central(2, concurrent=True), optimizer_name="adam")) <= 1e-6


def test_kernels_that_do_not_tell_which_pages_were_written_to(monkeypatch):
    monkeypatch.setattr("torchstrategy.collectives.host_blocks._says_page_flags", lambda: False)
    for variant in ("plain", "written in run", "written outside"):
        found = programs.train("central", cpu_devices(2), variant)
        assert largest_difference(mirrored(2, variant), found) <= EXACT


@pytest.mark.parametrize("way", ["closure", "sparse", "two optimizers", "sparse closure"])
def test_other_optimizers(way):
    def run(strategy):
        torch.manual_seed(0)
        with strategy.scope():
            table, layer = nn.Embedding(6, 3, sparse="sparse" in way), nn.Linear(3, 1)
            sparse = torch.optim.SparseAdam if "sparse" in way else torch.optim.Adagrad
            optimizers = [sparse(table.parameters(), lr=0.1), torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)]
        (batch,) = strategy.experimental_distribute_dataset(torch.tensor([0, 1, 1, 2, 5]), batch_size=5)

        def loss(ids):
            for optimizer in optimizers:
                optimizer.zero_grad()
            total = ts.nn.compute_average_loss(layer(table(ids)).square().flatten(), global_batch_size="actual")
            total.backward()
            return total

        def step(ids):
            if "closure" not in way:
                loss(ids)
            return [optimizer.step(*((lambda: loss(ids)),) * ("closure" in way)) for optimizer in optimizers]

        for _ in range(3):
            strategy.run(step, args=(batch,))
        return [parameter.detach().flatten().tolist() for parameter in (*table.parameters(), *layer.parameters())]

    assert largest_difference(run(ts.get_strategy()), run(central(3))) <= 1e-6


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_closure_whose_gradients_are_partly_zeros(by_hand):
    """The host takes them for cleared by its optimizer, and the other replicas clear theirs."""

    def run(strategy):
        with strategy.scope():
            layer = nn.Linear(1, 1)
            optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        torch.nn.init.ones_(layer.weight)

        def closure():
            context = ts.get_replica_context()
            loss = layer.weight.square().sum()
            if context.replica_id_in_sync_group == context.num_replicas_in_sync - 1:
                loss = loss + 0 * layer.bias.sum()  # used on one replica only
            loss = ts.nn.scale_regularization_loss(loss)
            if not by_hand:
                optimizer.zero_grad()
                loss.backward()
                return loss
            parameters = [layer.weight, layer.bias]
            for parameter, own in zip(
                parameters, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True
            ):
                if parameter.grad is not None:
                    parameter.grad.zero_()
                if own is not None:
                    parameter.grad = own if parameter.grad is None else parameter.grad + own
            return loss

        for _ in range(4):
            strategy.run(lambda: optimizer.step(closure))
        return layer.weight.item()

    assert run(central(2)) == pytest.approx(run(ts.get_strategy()))


def test_the_host_has_the_only_copy_of_parameters_and_state():
    strategy = central(3)
    model, optimizer = linear(strategy)
    strategy.run(step_of(model, optimizer))
    first, *others = strategy.experimental_local_results(optimizer)
    assert [len(body.state) for body in (first, *others)] == [2, 0, 0]
    (block,) = strategy._memory._blocks
    assert [block.changed(view) for view in range(3)] == [[], [], []], "a view without pages of its own takes no memory"
    gradients = strategy.run(lambda: model.weight.grad.data_ptr())
    assert len(set(strategy.experimental_local_results(gradients))) == 3
    block.memory[0].zero_()
    left = strategy.run(lambda: model.weight.count_nonzero())
    assert strategy.reduce("SUM", left) == 0, "all replicas read the host's memory"


def test_hooks_of_an_optimizer_run_once_for_each_update():
    strategy = central(3)
    model, optimizer = linear(strategy)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(ts.in_cross_replica_context()))
    strategy.run(step_of(model, optimizer))
    assert calls == [True]


def test_a_step_that_the_program_took_in_the_scope():
    def weights(strategy):
        with strategy.scope():
            torch.manual_seed(0)
            model = nn.Linear(3, 2)
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
            take_step = optimizer.step

        def step():
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            take_step()

        for _ in range(3):
            strategy.run(step)
        return model.weight.detach().clone()

    assert torch.equal(weights(central(2)), weights(ts.MirroredStrategy(cpu_devices(2))))


def test_steps_outside_run_are_refused_as_by_mirrored():
    strategy = central(2)
    model, optimizer = linear(strategy)
    strategy.run(step_of(model, optimizer))
    with pytest.raises(RuntimeError, match=r"Adam.step\(\) was called outside `run` of the CentralStorageStrategy"):
        optimizer.step()


def test_an_error_in_the_update_leaves_everything_in_place():
    strategy = central(2)
    model, optimizer = linear(strategy)
    step = step_of(model, optimizer)
    strategy.run(step)
    before = model.weight.detach().clone()
    hook = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        strategy.run(step)
    torch.testing.assert_close(model.weight.detach(), before, rtol=0, atol=0)
    hook.remove()
    strategy.run(step)
    assert not torch.equal(model.weight.detach(), before)


def test_a_graph_from_before_the_update_can_not_be_used():
    strategy = central(2)
    model, optimizer = linear(strategy)

    def step():
        out = model(torch.ones(1, 3, requires_grad=True)).square().sum()
        out.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        out.backward()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        strategy.run(step)


def test_optimizer_and_model_pickle_as_plain_ones(tmp_path):
    strategy = central(2)
    model, optimizer = linear(strategy)
    strategy.run(step_of(model, optimizer))
    assert type(pickle.loads(pickle.dumps(optimizer))) is torch.optim.Adam
    torch.save(model.state_dict(), tmp_path / "model.pt")
    torch.testing.assert_close(torch.load(tmp_path / "model.pt")["weight"], model.weight.detach())
    assert (tmp_path / "model.pt").stat().st_size < 4000, "a tensor is saved without the rest of the host's memory"


@pytest.mark.parametrize("variant", ["swapped outside", "swapped in run", "transposed outside", "kept outside",
                                     "hook before", "hook after", "hook after, copies", "sam"])  # fmt: skip
def test_memory_that_is_exchanged_and_other_tensors_that_are_written(variant, monkeypatch):
    if "copies" in variant:
        monkeypatch.setattr("torchstrategy.replicas.host_states._can_read", lambda device, memory: False)
    expected = programs.exchange("mirrored", cpu_devices(2), variant)
    assert largest_difference(expected, programs.exchange("central", cpu_devices(2), variant)) <= EXACT


def test_an_optimizer_inside_another_ones_step_needs_summed_gradients():
    class Both(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            self.inner.step()

    strategy = central(2)
    with strategy.scope():
        model = nn.Linear(3, 2)
        optimizer = Both([model.weight], lr=0.1)
        optimizer.inner = torch.optim.SGD([model.bias], lr=0.1)

    def step(sums):
        model(torch.ones(1, 3)).sum().backward()
        if sums:
            ts.get_replica_context().sum_gradients(optimizer.inner)
        optimizer.step()

    before = model.bias.detach().clone()
    with pytest.raises(RuntimeError, match="inside another optimizer's step on the host"):
        strategy.run(step, args=(False,))
    optimizer.zero_grad()
    optimizer.inner.zero_grad()
    strategy.run(step, args=(True,))
    torch.testing.assert_close(model.bias.detach(), before - 0.2)


def test_a_gradient_that_the_program_drops():
    strategy = central(2)
    model, optimizer = linear(strategy, torch.optim.SGD)
    weight, bias = model.weight.detach().clone(), model.bias.detach().clone()

    def step():
        model(torch.ones(1, 3)).sum().backward()
        model.weight.grad = None
        optimizer.step()

    strategy.run(step)
    assert torch.equal(model.weight, weight)
    assert not torch.equal(model.bias, bias)


def test_conjugated_parameters_and_buffers_that_are_parameters():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.other = nn.Parameter(torch.full((2,), 1 + 2j).conj()), nn.Parameter(torch.ones(2))
            self.register_buffer("view", self.other.detach())

    strategy = central(2)
    with strategy.scope():
        model = Tied()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.25)

    def step():
        optimizer.zero_grad()
        (model.weight.real + model.other).sum().backward()
        optimizer.step()

    strategy.run(step)
    assert model.weight.tolist() == [0.5 - 2j] * 2
    assert model.other.tolist() == model.view.tolist() == [0.5] * 2


def test_an_optimizer_that_clears_gradients_itself():
    class Clearing(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            self.zero_grad()

    strategy = central(2)
    model, optimizer = linear(strategy, Clearing)

    def step():
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return int(model.weight.grad is None)

    assert strategy.reduce("SUM", strategy.run(lambda: torch.tensor(step()))) == 2
    strategy.run(step)


# Variables


def test_variable_is_a_single_one():
    strategy = central(2)
    with strategy.scope():
        v = ts.Variable([1.0, 2.0], aggregation=ts.VariableAggregation.MEAN)
    assert len(v.values) == len(strategy.experimental_local_results(v)) == 1
    strategy.run(lambda: v.assign(torch.full((2,), 1.0 + ts.get_replica_context().replica_id_in_sync_group)))
    assert v.tolist() == [1.5, 1.5]
    assert repr(v).startswith("AggregatingVariable(<ts.Variable 'Variable:0' shape=(2,)")
    v.assign_add([1.0, 1.0])
    assert strategy.experimental_local_results(strategy.run(lambda: v.read_value().sum().item())) == (5.0, 5.0)
    assert strategy.extended.update(v, lambda one, x: one.assign_sub(x), args=([0.5, 0.5],), group=False)
    assert strategy.experimental_local_results(strategy.run(lambda: v.sum().item())) == (4.0, 4.0)


@pytest.mark.parametrize("synchronization", ["AUTO", "ON_WRITE", "ON_READ"])
def test_assigning_in_run_needs_an_aggregation(synchronization):
    strategy = central(2)
    with strategy.scope():
        v = ts.Variable(1.0, synchronization=ts.VariableSynchronization[synchronization])
    with pytest.raises(ValueError, match="needs an aggregation method for AggregatingVariable 'Variable:0'"):
        strategy.run(lambda: v.assign(torch.ones(())))
    v.assign(3.0)
    assert float(v) == 3.0


def test_a_trained_variable():
    def run(strategy):
        with strategy.scope():
            v = ts.Variable(2.0)
            optimizer = torch.optim.SGD([v], lr=0.1)

        def step():
            optimizer.zero_grad()
            (v * v / strategy.num_replicas_in_sync).backward()
            optimizer.step()

        for _ in range(2):
            strategy.run(step)
        return float(v)

    assert run(central(3)) == pytest.approx(run(ts.get_strategy()))


# Devices


def test_info_line(caplog):
    with caplog.at_level(logging.INFO, "torchstrategy"):
        strategy = ts.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"])
    line = "Using CentralStorageStrategy with compute_devices = cpu:0, cpu:1, variable_device = cpu:0"
    assert caplog.messages.count(line) == 1
    assert strategy.extended.worker_devices == (FULL_NAME.format(0), FULL_NAME.format(1))
    assert strategy.extended.parameter_devices == (FULL_NAME.format(0),)


def test_the_only_device_hosts_parameters():
    strategy = ts.experimental.CentralStorageStrategy(["cpu:1"])
    assert strategy.parameter_device == torch.device("cpu:1")
    model, optimizer = linear(strategy)
    strategy.run(step_of(model, optimizer))
    assert strategy._memory is None, "there is nothing to keep elsewhere"


@pytest.mark.parametrize("name", ["/job:worker/task:1/device:CPU:0", "/job:localhost/replica:0/task:1/device:CPU:0"])
def test_devices_of_other_hosts_are_refused(name):
    with pytest.raises(ValueError, match="is a device of another task"):
        ts.experimental.CentralStorageStrategy(["cpu:0", name])
    with pytest.raises(ValueError, match="is a device of another task"):
        ts.experimental.CentralStorageStrategy(["cpu:0"], name)


@pytest.mark.parametrize(
    ("devices", "kind", "message"),
    [([], ValueError, "at least one"), (["cpu:0", "/cpu:0"], ValueError, "twice"), ("cpu:0", TypeError, "list")],
)
def test_bad_devices(devices, kind, message):
    with pytest.raises(kind, match=message):
        ts.experimental.CentralStorageStrategy(devices)


@pytest.mark.parametrize("target", ["central", "mirrored", "default"])
def test_checkpoints_restore_into_any_strategy(target, tmp_path, process_pool):
    expected = process_pool(2).run(programs.saved, "central", None, str(tmp_path / "two"))[0]
    in_process = programs.saved("central", cpu_devices(2), str(tmp_path / "one"))
    assert largest_difference([expected], [in_process]) <= EXACT
    devices = None if target == "default" else cpu_devices(3)
    for name in ("one", "two"):
        assert largest_difference([expected], [programs.restored(target, devices, str(tmp_path / name))]) <= EXACT
    if target != "default":
        for result in process_pool(2).run(programs.restored, target, None, str(tmp_path / "one")):
            assert largest_difference([expected], [result]) <= EXACT


def test_the_gpu_is_a_compute_device_of_a_host():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    expected = programs.train("mirrored", ["cpu:0"], "clip")
    assert largest_difference(expected, programs.train("central", ["cuda:0"], "clip")) <= 1e-6
    strategy = ts.experimental.CentralStorageStrategy(["cuda:0"], "cpu:0")
    model, optimizer = linear(strategy)
    strategy.run(step_of(model, optimizer))
    assert isinstance(strategy._memory, HostMemory)
    assert {model.weight.device.type, *(s["exp_avg"].device.type for s in optimizer.state.values())} == {"cpu"}
    assert strategy.run(lambda: model.weight.device.type) == "cuda"


def test_check_sync_asks_the_optimizer_that_steps():
    strategy = central(2)
    model, optimizer = linear(strategy)
    for _ in range(2):
        strategy.run(step_of(model, optimizer))
    strategy.check_sync()


@pytest.mark.parametrize("what", ["buffer", "tensor", "in_a_dict"])
def test_what_is_written_past_torch_reaches_every_replica(what):
    strategy = central(2)
    model, optimizer = linear(strategy)
    model.register_buffer("buffer", torch.ones(1))
    model.tensor, model.table = torch.ones(1), {"a": torch.ones(1)}
    step = step_of(model, optimizer)
    strategy.run(step)

    def held():
        return model.table["a"] if what == "in_a_dict" else getattr(model, what)

    for value in (2.0, 3.0):
        held().data.add_(1.0)
        strategy.run(step)
        own = strategy.experimental_local_results(strategy.run(lambda: held().clone()))
        assert [tensor.item() for tensor in own] == [value, value]


def test_parameters_may_move_to_shared_memory_outside_run():
    strategy = central(2)
    model, optimizer = linear(strategy)
    step = step_of(model, optimizer)
    strategy.run(step)
    model.share_memory()
    before = model.weight.detach().clone()
    strategy.run(step)
    own = strategy.experimental_local_results(strategy.run(lambda: model.weight.detach().clone()))
    assert torch.equal(own[0], own[1])
    assert not torch.equal(own[0], before)
    strategy.check_sync()
