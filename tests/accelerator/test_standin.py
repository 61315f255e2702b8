"""The accelerator for tests is what it says: two memories, refusals, late copies, random numbers of its own."""

import copy
import io
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn

from tests.accelerator.loading import DEVICES, NAME

pytestmark = pytest.mark.accelerator
MIXED = "Expected all tensors to be on the same device"


@pytest.fixture
def streams():
    """Return the current stream of the first device, idle, and one of its own."""
    torch.accelerator.synchronize(0)
    return torch.accelerator.current_stream(DEVICES[0]), torch.get_device_module(NAME).Stream(DEVICES[0])


def send(stream, number=3.0):
    """Ask for a copy from pinned memory to the first device."""
    with stream:
        return torch.full((4,), number).pin_memory().to(DEVICES[0], non_blocking=True)


def test_torch_finds_it():
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator().type == NAME
    assert torch.accelerator.device_count() == 2
    assert torch.get_device_module(NAME).current_device() == 0
    with torch.device(DEVICES[1]):
        assert torch.ones(2).device == torch.device(DEVICES[1])
    with pytest.raises(RuntimeError, match="There is no device 2"):
        torch.ones(2, device=f"{NAME}:2")


@pytest.mark.parametrize("other", ["cpu", DEVICES[1]])
def test_devices_do_not_mix(other):
    here, there = torch.ones(2, 2, device=DEVICES[0]), torch.ones(2, 2, device=other)
    for mix in (torch.add, torch.matmul, torch.equal, torch.Tensor.add_, torch.Tensor.add, nn.functional.linear):
        with pytest.raises(RuntimeError, match=MIXED):
            mix(here, there)
    for mix in (torch.cat, torch.stack):
        with pytest.raises(RuntimeError, match=MIXED):
            mix([here, there])


def test_one_number_of_the_host_and_its_indices_may_be_used():
    x = torch.arange(6.0, device=DEVICES[1]).view(2, 3)
    assert (x + torch.tensor(1.0)).tolist() == [[1, 2, 3], [4, 5, 6]]
    assert x[torch.tensor([1])].tolist() == [[3, 4, 5]]
    x[torch.tensor([True, False])] = 7.0
    assert x.tolist() == [[7, 7, 7], [3, 4, 5]]


def test_it_gives_no_arrays():
    x = torch.ones(2, device=DEVICES[0])
    with pytest.raises(TypeError, match="can't convert standin:0 device type tensor to numpy"):
        x.numpy()


@pytest.mark.slow
def test_a_program_that_reads_its_memory_ends():
    program = (
        "import ctypes, torch; from tests.accelerator import loading; loading.load(); "
        "x = torch.ones(2, device='standin:0'); print('asks', flush=True); "
        "ctypes.c_float.from_address(x.data_ptr()).value"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "asks\n"
    assert done.returncode < 0, done.stderr


def test_copies_are_copies():
    host = torch.arange(6.0).view(2, 3)
    first = host.to(DEVICES[0])
    second = first.to(DEVICES[1])
    back = second.t().cpu()
    host.zero_()
    first.zero_()
    assert second.tolist() == [[0, 1, 2], [3, 4, 5]]
    second.zero_()
    assert back.tolist() == [[0, 3], [1, 4], [2, 5]]


def test_views_share_memory():
    x = torch.zeros(2, 3, device=DEVICES[1])
    x.t()[1:].view(2, 2).add_(1)
    x[:, 0].fill_(5)
    assert x.tolist() == [[5, 1, 1], [5, 1, 1]]
    assert x.unfold(1, 2, 1).shape == (2, 2, 2)
    assert torch.view_as_complex(x[:, 1:].contiguous()).tolist() == [1 + 1j, 1 + 1j]


def test_memory_that_nobody_has_written_is_no_number():
    assert torch.empty(3, device=DEVICES[0]).isnan().all()
    x = torch.ones(2, device=DEVICES[0]).resize_(3)
    assert x[:2].tolist() == [1, 1]
    assert x[2].isnan()


def test_a_copy_is_late_until_something_waits(streams):
    current, side = streams
    batch = send(side)
    assert batch.isnan().all()  # the current stream was not told to wait
    current.wait_stream(side)
    assert batch.tolist() == [3.0] * 4

    batch = send(side)
    event = side.record_event()
    assert not event.query()
    assert event.query()  # time passes between two looks
    assert batch.tolist() == [3.0] * 4

    batch = send(side)
    torch.accelerator.synchronize(0)
    assert batch.tolist() == [3.0] * 4


def test_an_event_waits_for_what_came_before_it_only(streams):
    current, side = streams
    first = send(side)
    event = side.record_event()
    second = send(side)
    current.wait_event(event)
    assert first.tolist() == [3.0] * 4
    assert second.isnan().all()
    side.synchronize()
    assert second.tolist() == [3.0] * 4


def test_streams_that_wait_for_each_other(streams):
    _, side = streams
    other = torch.get_device_module(NAME).Stream(DEVICES[0])
    batch = send(side)
    other.wait_stream(side)
    with other:
        copied = torch.empty(4, device=DEVICES[0]).copy_(batch)
    other.synchronize()
    assert copied.tolist() == [3.0] * 4


def test_only_pinned_memory_is_read_later(streams):
    _, side = streams
    plain, pinned = torch.ones(4), torch.ones(4).pin_memory()
    assert (plain.is_pinned(), pinned.is_pinned()) == (False, True)
    with side:
        copies = [memory.to(DEVICES[0], non_blocking=True) for memory in (plain, pinned)]
    plain.zero_()
    pinned.zero_()
    side.synchronize()
    assert [float(c.sum()) for c in copies] == [4, 0]


def test_the_host_reads_old_numbers_if_it_does_not_wait(streams):
    current, _ = streams
    found = torch.zeros(4).pin_memory()
    found.copy_(torch.ones(4, device=DEVICES[0]), non_blocking=True)
    assert found.tolist() == [0] * 4
    current.synchronize()
    assert found.tolist() == [1] * 4


@pytest.mark.parametrize("is_recorded", [False, True])
def test_memory_that_is_freed_too_soon(streams, is_recorded):
    _, side = streams
    x, target = torch.ones(4, device=DEVICES[0]), torch.zeros(4).pin_memory()
    with side:
        target.copy_(x, non_blocking=True)
    if is_recorded:
        x.record_stream(side)
    del x
    side.synchronize()
    assert target.tolist() == [1] * 4 if is_recorded else target.isnan().all()


def test_random_numbers_of_each_device():
    def draw():
        torch.manual_seed(1)
        own = [torch.rand(3, device=device) for device in DEVICES]
        masks = nn.functional.dropout(torch.ones(20, device=DEVICES[0]))
        return [value.tolist() for value in (*own, masks, torch.rand(3), torch.rand(3, device=DEVICES[0]))]

    first = draw()
    assert draw() == first
    assert first[0] == first[1]  # torch gives all devices one seed
    assert first[4] != first[0]
    generator = torch.Generator(DEVICES[1]).manual_seed(2)
    state = generator.get_state()
    drawn = torch.rand(3, device=DEVICES[1], generator=generator)
    generator.set_state(state)
    assert torch.equal(torch.rand(3, device=DEVICES[1], generator=generator), drawn)
    with pytest.raises(RuntimeError, match="Expected a 'standin' device type for generator"):
        torch.rand(3, device=DEVICES[1], generator=torch.Generator())


@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
def test_a_model_trains_as_on_the_cpu(options):
    def train(device):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
        with torch.random.fork_rng(devices=[]):
            x, y = torch.randn(5, 1, 4, 4), torch.tensor([0, 1, 2, 1, 0])
        net.to(device)
        optimizer = torch.optim.Adam(net.parameters(), 0.1, **options)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x.to(device)), y.to(device)).backward()
            optimizer.step()
        return {name: value.cpu() for name, value in net.state_dict().items()}

    expected = train("cpu")
    for name, value in train(DEVICES[1]).items():
        torch.testing.assert_close(value, expected[name], msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    net = nn.Linear(3, 2).to(DEVICES[0])
    with torch.autocast(NAME, dtype):
        output = net(torch.ones(2, 3, device=DEVICES[0]))
        assert output.dtype is dtype
        assert output.softmax(1).dtype is torch.float32
    output.sum().backward()
    assert net.weight.grad.dtype is torch.float32


def test_saved_tensors_come_back():
    x = torch.arange(3.0, device=DEVICES[1])
    file = io.BytesIO()
    torch.save({"x": x, "view": x[1:]}, file)
    for place, device in ((None, DEVICES[1]), ("cpu", "cpu"), (DEVICES[0], DEVICES[0])):
        file.seek(0)
        loaded = torch.load(file, map_location=place)
        assert loaded["x"].device == torch.device(device)
        loaded["view"].add_(1)
        assert loaded["x"].tolist() == [0, 2, 3]
    for copied in (copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert copied.device == x.device
        assert copied.tolist() == x.tolist()
