"""``Strategy.check_sync`` compares all that replicas hold alike."""

import re

import pytest
import torch

import torchstrategy as ts
from tests.gradients import sync_programs as programs
from tests.programs import CountedKernels
from torchstrategy.replicas.fingerprints import fingerprints

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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8, torch.complex64])
@pytest.mark.parametrize("shape", [(), (3,), (1024,), (70, 1030)])
def test_a_flipped_bit_of_any_element_shows(shape, dtype):
    value = torch.zeros(shape).to(dtype)
    before = fingerprints([value])
    bits = value.view(-1).view(torch.uint8)
    for place in {0, len(bits) // 2, len(bits) - 1}:
        for bit in (1, 128):
            bits[place] ^= bit
            assert fingerprints([value]) != before
            bits[place] ^= bit
    assert fingerprints([value]) == before


def test_bits_are_told_apart_that_compare_as_equal():
    payloads = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert len(set(fingerprints([*payloads, torch.tensor(0.0), torch.tensor(-0.0)]))) == 4


def test_a_fingerprint_does_not_depend_on_what_is_beside_it_or_on_strides():
    torch.manual_seed(0)
    shapes = [(5,), (0,), (1024,), (3, 4, 5, 6), (300, 1000), (2, 1200, 2, 2), (1100, 1100)]
    tensors = [torch.randn(shape) for shape in shapes] + [torch.arange(9), torch.ones(3, dtype=torch.bool)]
    tensors += [torch.eye(4).to_sparse(), torch.randn(3, dtype=torch.complex64).conj()]
    alone = [fingerprints([tensor])[0] for tensor in tensors]
    assert len(set(alone)) == len(alone)
    assert fingerprints(tensors) == alone
    strided = [tensor.transpose(0, -1).contiguous().transpose(0, -1) for tensor in tensors[:7]]
    assert fingerprints(strided) == alone[:7]


def test_few_kernels_compare_many_parameters():
    tensors = [torch.randn(size) for size in (1, 7, 100, 1024, 5000) for _ in range(100)]
    with CountedKernels() as counted:
        fingerprints(tensors)
    assert len(counted.names) < len(tensors) / 5  # with 64 rows of 1024 elements at a time, as on a CPU
