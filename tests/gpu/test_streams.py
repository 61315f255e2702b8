"""Batches travel to a GPU beside the computation, from pinned memory, and arrive on the stream that is current."""

import pytest
import torch

import torchstrategy as ts
from tests.gpu.training import DEVICES, train
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


@pytest.mark.gpu
def test_a_program_may_have_a_stream_of_its_own():
    """What the current stream is given after ``next`` comes after the copy, and the memory is not given away before."""
    strategy = ts.OneDeviceStrategy("cuda:0")
    data = torch.arange(64 * 4096, dtype=torch.float64).reshape(64, 4096)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), 4)
    matrix = torch.eye(4096, dtype=torch.float64, device="cuda:0")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())

    def product(batch):
        assert torch.cuda.current_stream() == stream
        for _ in range(20):
            batch = batch @ matrix
        return batch.sum(1)

    with torch.cuda.stream(stream):
        sums = [
            strategy.run(product, args=tuple(inputs)) for inputs in strategy.experimental_distribute_dataset(loader)
        ]
    stream.synchronize()
    assert torch.equal(torch.cat(sums).cpu(), data.sum(1))


@pytest.mark.gpu
def test_a_step_on_a_stream_of_its_own_trains_alike():
    expected = train("cuda:0", None)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        found = train("cuda:0", ts.OneDeviceStrategy("cuda:0"), num_ahead=2)
    assert_equal(found, expected, 1e-10)
