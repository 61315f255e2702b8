"""Batches travel to a GPU beside the computation, from pinned memory, and arrive on the stream that is current."""

import pytest
import torch

import torchstrategy as ts
from tests.gpu.training import ACCELERATORS, DEVICES, train
from tests.programs import assert_equal
from torchstrategy.data.prefetch import _side_stream

#: Some tenths of a second of a GPU's clock: much longer than the host needs to ask for a batch.
LONG = 1_000_000_000


@pytest.mark.parametrize("num_ahead", [1, 3])
@pytest.mark.parametrize("device", DEVICES)
def test_batches_that_travel_ahead_change_nothing(device, num_ahead):
    found = train(device, ts.OneDeviceStrategy(device), num_ahead=num_ahead)
    assert_equal(found, train(device, None), 1e-10)


@pytest.mark.gpu
@pytest.mark.parametrize("pin_memory", [False, True])
def test_copies_end_while_the_gpu_is_busy(pin_memory):
    strategy = ts.OneDeviceStrategy("cuda:0")
    data = torch.utils.data.TensorDataset(torch.arange(8 << 19, dtype=torch.float32).reshape(8, -1))
    loader = torch.utils.data.DataLoader(data, 1, pin_memory=pin_memory)
    batches = iter(strategy.experimental_distribute_dataset(loader))
    for _ in range(3):  # from now on pinned memory is used again, and none is allocated, which might wait
        next(batches)
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    is_idle = torch.cuda.Event()
    is_idle.record()
    (batch,) = next(batches)  # sends the one after it on its way
    _side_stream(torch.device("cuda", 0)).synchronize()
    assert not is_idle.query()
    assert batch[0, 0].item() == 3 << 19  # waits for the sleeping stream


@pytest.mark.accelerator
@pytest.mark.parametrize("pin_memory", [False, True])
def test_the_next_batch_is_on_its_way_when_one_is_used(pin_memory):
    strategy = ts.OneDeviceStrategy("standin:0")
    data = torch.utils.data.TensorDataset(torch.arange(8.0))
    batches = iter(
        strategy.experimental_distribute_dataset(torch.utils.data.DataLoader(data, 2, pin_memory=pin_memory))
    )
    next(batches)
    assert not _side_stream(torch.device("standin", 0)).query()


@pytest.mark.parametrize("device", ACCELERATORS)
def test_a_batch_lives_as_long_as_its_stream_reads_it(device):
    strategy = ts.OneDeviceStrategy(device)
    data = torch.arange(24.0).reshape(6, 4)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), 2)
    kept = []

    def keep(batch):
        kept.append(torch.empty(batch.shape, device="cpu", pin_memory=True).copy_(batch, non_blocking=True))

    for inputs in strategy.experimental_distribute_dataset(loader):
        strategy.run(keep, args=tuple(inputs))
        del inputs
    torch.accelerator.synchronize()
    assert torch.equal(torch.cat(kept), data)


@pytest.mark.parametrize("device", ACCELERATORS)
def test_a_program_may_have_a_stream_of_its_own(device):
    """What the current stream is given after ``next`` comes after the copy, and the memory is not given away before."""
    size = 4096 if device == "cuda:0" else 64
    module = torch.get_device_module(device)
    strategy = ts.OneDeviceStrategy(device)
    data = torch.arange(64 * size, dtype=torch.float64).reshape(64, size)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), 4)
    matrix = torch.eye(size, dtype=torch.float64, device=device)
    stream = module.Stream()
    stream.wait_stream(module.current_stream())

    def product(batch):
        assert module.current_stream() == stream
        for _ in range(20):
            batch = batch @ matrix
        return batch.sum(1)

    with module.stream(stream):
        sums = [
            strategy.run(product, args=tuple(inputs)) for inputs in strategy.experimental_distribute_dataset(loader)
        ]
    stream.synchronize()
    assert torch.equal(torch.cat(sums).cpu(), data.sum(1))


@pytest.mark.parametrize("device", ACCELERATORS)
def test_a_step_on_a_stream_of_its_own_trains_alike(device):
    expected = train(device, None)
    module = torch.get_device_module(device)
    with module.stream(module.Stream()):
        found = train(device, ts.OneDeviceStrategy(device), num_ahead=2)
    assert_equal(found, expected, 1e-10)
