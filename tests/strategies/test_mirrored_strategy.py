import logging

import pytest
import torch
from torch import nn

import torchstrategy as ts
from tests.programs import cpu_devices

FULL_NAME = "/job:localhost/replica:0/task:0/device:CPU:{}"


def strategy_of(count, **options):
    return ts.MirroredStrategy(cpu_devices(count), **options)


def test_default_is_one_cpu_replica_without_gpus():
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    assert ts.MirroredStrategy().num_replicas_in_sync == 1


@pytest.mark.parametrize("names", [["/cpu:0", "CPU:1"], [FULL_NAME.format(0), FULL_NAME.format(1)], ["cpu", "cpu:1"]])
def test_device_names(names):
    assert ts.MirroredStrategy(names).placement.devices == (torch.device("cpu:0"), torch.device("cpu:1"))


@pytest.mark.parametrize(
    ("devices", "kind", "message"),
    [
        ([], ValueError, "at least one"),
        (["cpu:0", "/cpu:0"], ValueError, "twice"),
        (["/gpu:63"], ValueError, "Visible devices: .*cpu:0"),
        (["quantum:0"], ValueError, "Can't read the device name"),
        ("cpu:0", TypeError, "list of devices"),
        ([3], TypeError, "string or a torch.device"),
    ],
)
def test_bad_devices(devices, kind, message):
    with pytest.raises(kind, match=message):
        ts.MirroredStrategy(devices)


def test_bad_options():
    with pytest.raises(TypeError, match="cross_device_ops"):
        strategy_of(2, cross_device_ops="nccl")
    with pytest.raises(ValueError, match="check_every"):
        strategy_of(2, check_every=0)


def test_says_which_devices_it_uses(caplog):
    caplog.set_level(logging.DEBUG, "torchstrategy")
    logging.getLogger("torchstrategy").propagate = True
    strategy_of(2)
    assert "Using MirroredStrategy with devices cpu:0, cpu:1" in caplog.text
    assert f"In tf's names: {FULL_NAME.format(0)}, {FULL_NAME.format(1)}" in caplog.text


def test_torchrun_variables_that_do_not_fit(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(RuntimeError, match=r"RANK.* not set"):
        ts.MirroredStrategy()
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "port")
    with pytest.raises(RuntimeError, match="MASTER_PORT must be an integer"):
        ts.MirroredStrategy()
    monkeypatch.setenv("MASTER_PORT", "29500")
    with pytest.raises(RuntimeError, match="MultiWorkerMirroredStrategy"):
        ts.MirroredStrategy()


def test_step_outside_run_is_refused_and_changes_nothing():
    strategy = strategy_of(2)
    with strategy.scope():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    model(torch.ones(1, 1)).sum().backward()
    with pytest.raises(RuntimeError, match="outside `run`"):
        optimizer.step()
    assert torch.equal(model.weight, before)


def test_scope_of_one_device_trains_without_run():
    strategy = strategy_of(1)
    with strategy.scope():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()


def test_error_on_a_small_share_names_shares_and_remedy():
    strategy = strategy_of(2)
    (batch,) = strategy.experimental_distribute_dataset(torch.ones(1, 4), batch_size=2)
    with pytest.raises(RuntimeError) as caught:
        strategy.run(lambda x: x.view(x.shape[0], -1), args=(batch,))
    if hasattr(caught.value, "__notes__"):
        assert "shares of [1, 0]" in "".join(caught.value.__notes__)
        assert "replica 1 on cpu:1" in "".join(caught.value.__notes__)


def test_an_error_about_other_ranks_says_nothing_of_shares():
    strategy = strategy_of(2)
    (batch,) = strategy.experimental_distribute_dataset(torch.ones(1, 4), batch_size=2)

    def fail(x):
        raise ts.errors.DisagreementError("the ranks differ")

    with pytest.raises(ts.errors.DisagreementError) as caught:
        strategy.run(fail, args=(batch,))
    assert "shares" not in "".join(getattr(caught.value, "__notes__", []))


def test_actual_batch_size_rules():
    strategy = strategy_of(2)
    (a,) = strategy.experimental_distribute_dataset(torch.arange(5.0), batch_size=5)
    (b,) = strategy.experimental_distribute_dataset(torch.arange(3.0), batch_size=3)
    sizes = strategy.run(lambda x: ts.get_replica_context().actual_batch_size(), args=(a,))
    assert [int(size) for size in strategy.experimental_local_results(sizes)] == [5, 5]
    with pytest.raises(RuntimeError, match="split differently"):
        strategy.run(lambda x, y: ts.get_replica_context().actual_batch_size(), args=(a, b))
    named = strategy.run(lambda x, y: ts.get_replica_context().actual_batch_size(y), args=(a, b))
    assert int(strategy.experimental_local_results(named)[1]) == 3
    with pytest.raises(RuntimeError, match="all_reduce"):
        strategy.run(lambda: ts.get_replica_context().actual_batch_size())
    with pytest.raises(ValueError, match="all_reduce"):
        strategy.run(lambda x: ts.compute_average_loss(torch.ones(4), global_batch_size="actual"), args=(a,))


def test_hand_made_all_reduce_is_not_summed_again():
    strategy = strategy_of(2)
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def fn():
        context = ts.get_replica_context()
        model(torch.ones(1, 1)).sum().backward()
        for parameter in model.parameters():
            parameter.grad = context.all_reduce("mean", parameter.grad)
        context.mark_summed(optimizer)
        optimizer.step()

    strategy.run(fn)
    assert model.weight.item() == -1.0


def test_gradients_stay_local_until_the_step_and_are_summed_once():
    strategy = strategy_of(3)
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    seen = []

    def fn():
        context = ts.get_replica_context()
        i = context.replica_id_in_sync_group
        model(torch.full((1, 1), i + 1.0)).sum().backward()
        seen.append(float(model.weight.grad))
        context.sum_gradients(optimizer)
        context.sum_gradients(optimizer)
        seen.append(float(model.weight.grad))
        optimizer.step()
        return model.weight.detach().clone()

    results = strategy.experimental_local_results(strategy.run(fn))
    assert sorted(seen) == [1.0, 2.0, 3.0, 6.0, 6.0, 6.0]
    assert [float(value) for value in results] == [-6.0, -6.0, -6.0]


def test_backward_into_a_summed_gradient_is_refused():
    strategy = strategy_of(2)
    with strategy.scope():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def fn():
        model(torch.ones(1, 1)).sum().backward()
        ts.get_replica_context().sum_gradients(optimizer)
        model(torch.ones(1, 1)).sum().backward()

    with pytest.raises(RuntimeError, match="already the sum over replicas"):
        strategy.run(fn)


def test_announces_the_gradient_sum_once(caplog):
    caplog.set_level(logging.INFO, "torchstrategy")
    logging.getLogger("torchstrategy").propagate = True
    strategy = strategy_of(2, cross_device_ops=ts.HierarchicalCopyAllReduce(num_packs=3))
    with strategy.scope():
        model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(7)])
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def fn():
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    for _ in range(2):
        strategy.run(fn)
    line = "14 tensors, num_replicas = 2, implementation = HierarchicalCopyAllReduce, num_packs = 3"
    assert caplog.text.count(line) == 1
