"""``Strategy.check_sync`` compares all that replicas hold alike."""

import re

import pytest
import torch

import torchstrategy as ts
from tests.gradients import sync_programs as programs

SAID = {
    "state": r"'exp_avg' of Adam \(optimizer 0\) for parameter 'head.weight' of Net .* differs between",
    "rate": r"'lr' of group 0 of Adam \(optimizer 0\) differs between .*0\.01.*0\.02",
    "weights": r"parameter 'head.weight' of Net \(shape \(1, 4\)\) differs between .*by up to 1",
}


@pytest.mark.parametrize("name", ["nothing", "rounding", "buffer"])
def test_what_is_equal_passes(name):
    # A buffer that was changed waits for the next synchronisation.
    assert programs.in_process(getattr(programs, name)) is None


def test_a_difference_between_copies_is_named():
    text = programs.in_process(programs.state)
    assert text is not None
    assert "replica 0 on cpu:0 and replica 1 on cpu:1" in text
    assert re.search(SAID["state"], text), text


def test_a_buffer_past_the_version_counter_is_named():
    assert "buffer 'body.1.running_mean' of Net" in programs.in_process(programs.buffer_by_data)


def test_processes(process_pool):
    for found in process_pool(2).run(programs.all_in_processes):
        assert found["nothing"] is None
        assert found["rounding"] is None
        assert found["buffer"] is None
        assert found["buffer_on_one"] is None
        for name, pattern in SAID.items():
            assert found[name] is not None, name
            assert re.search(pattern, found[name]), found[name]


def test_changes_outside_run_reach_all_replicas_first():
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    strategy.run(lambda: None)
    optimizer.param_groups[0]["lr"] = 0.2
    with torch.no_grad():
        model.weight.add_(1)
    model.bias.data.add_(1)
    strategy.check_sync()
    model.bias.data.add_(1)  # looking goes on
    strategy.run(lambda: None)
    strategy.check_sync()


def test_nothing_to_compare():
    ts.OneDeviceStrategy("cpu:0").check_sync()
    ts.MirroredStrategy(["cpu:0", "cpu:1"]).check_sync()


def test_it_is_for_cross_replica_context():
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    with pytest.raises(RuntimeError, match="cross-replica"):
        strategy.run(strategy.check_sync)
