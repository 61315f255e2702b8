import gc
import weakref

import numpy as np
import pytest
import torch

import torchstrategy as ts
from tests.data.fake_cuda import GARBAGE, FakeCuda
from tests.data.fake_workers import one_process
from torchstrategy.base.devices import Placement
from torchstrategy.base.values import BatchShares, PerReplica, get_shares
from torchstrategy.data import prefetch
from torchstrategy.data.batch import components, split_batch
from torchstrategy.data.distribute import distribute_dataset
from torchstrategy.data.prefetch import DeviceCopies

GPUS = tuple(torch.device("cuda", i) for i in range(2))


@pytest.fixture
def cuda(monkeypatch):
    fake = FakeCuda()
    monkeypatch.setattr(prefetch, "accelerator_module", lambda device: fake if device.type == "cuda" else None)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: fake.record_stream(tensor, stream))
    prefetch._side_stream.cache_clear()
    with fake:
        yield fake
    prefetch._side_stream.cache_clear()


def placement(*devices):
    return Placement(len(devices), 0, tuple(map(torch.device, devices)))


def start(copies, batch, place):
    return copies.start(split_batch(components(batch), place))


# --- without an accelerator


def test_on_cpus_nothing_is_copied_and_nothing_is_ahead():
    place = one_process(2)
    copies = DeviceCopies(place, to_device=True)
    x = torch.arange(5)
    local = split_batch(components(x), place)
    in_flight = copies.start(local)
    assert not copies.is_needed
    assert in_flight.local is local
    values = copies.finish(in_flight).values
    assert [value.tolist() for value in values] == [[0, 1, 2], [3, 4]]
    assert all(value.untyped_storage().data_ptr() == x.untyped_storage().data_ptr() for value in values)


def test_every_kind_of_component_reaches_the_user():
    place = one_process(2)
    copies = DeviceCopies(place, to_device=True)
    sparse = torch.eye(2).to_sparse()
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged)
    objects = np.array([{"a": 1}, None], dtype=object)
    batch = {"x": torch.arange(2), "n": None, "s": ["a", "b"], "o": objects, "e": sparse, "r": ragged, "empty": ()}
    element = copies.finish(start(copies, batch, place))
    assert element["n"] is None
    assert element["empty"] == ()
    assert element["s"].values == (["a"], ["b"])
    assert [type(value) for value in element["s"].values] == [list, list]
    assert element["o"].values[0][0] is objects[0]
    assert element["e"].values[1].to_dense().tolist() == [[0, 1]]
    assert element["r"].values[1].unbind()[0].tolist() == [0, 0, 0]
    assert all(get_shares(element[key]) == BatchShares((1, 1)) for key in ("x", "s", "o", "e", "r"))
    assert get_shares(element["x"].values[1]) == BatchShares((1, 1))


def test_one_replica_gets_plain_leaves_and_other_values_as_they_are():
    place = one_process(1)
    copies = DeviceCopies(place, to_device=True)
    scalar = torch.tensor(3.0)
    x, same, names, three = copies.finish(start(copies, (torch.arange(2), scalar, ["a"], 3), place))
    assert x.tolist() == [0, 1]
    assert get_shares(x) == BatchShares((2,))
    assert same is scalar
    assert get_shares(scalar) is None
    assert type(names) is list
    assert three == 3


def test_a_device_without_streams_gets_its_copies_at_once():
    place = placement("meta")
    copies = DeviceCopies(place, to_device=True)
    assert copies.is_needed
    in_flight = start(copies, {"x": torch.ones(3, 2), "s": ["a", "b", "c"]}, place)
    assert in_flight.arrivals == []
    element = copies.finish(in_flight)
    assert element["x"].is_meta
    assert element["x"].shape == (3, 2)
    assert element["s"] == ["a", "b", "c"]
    assert get_shares(element["x"]) == BatchShares((3,))


def test_elements_stay_on_the_host_if_they_are_not_to_be_fetched(cuda):
    place = placement("cuda:0", "cuda:1")
    copies = DeviceCopies(place, to_device=False)
    element = copies.finish(start(copies, torch.arange(4), place))
    assert not copies.is_needed
    assert [value.device.type for value in element.values] == ["cpu", "cpu"]
    assert (cuda.copies, cuda.num_pinned, cuda.num_streams) == ([], 0, 0)


# --- with CUDA devices that are not there


def test_copies_go_from_pinned_memory_on_a_side_stream_and_the_consumer_waits_for_them(cuda):
    place = placement("cuda:0")
    copies = DeviceCopies(place, to_device=True)
    source = torch.arange(3)
    in_flight = start(copies, source, place)
    [(device, stream, is_pinned)] = cuda.copies
    assert device == GPUS[0]
    assert stream is not cuda.current_stream(GPUS[0])
    assert is_pinned
    assert in_flight.local.columns[0][0].tolist() == [GARBAGE] * 3, "the copy has only been asked for"
    source.fill_(5)  # as a data set does that fills one buffer again and again

    element = copies.finish(in_flight)
    assert element.device == GPUS[0]
    assert element.tolist() == [0, 1, 2]
    assert cuda.current_stream(GPUS[0]).num_waits == 1
    assert cuda.recorded == [(element.data_ptr(), cuda.current_stream(GPUS[0]))]
    assert get_shares(element) == BatchShares((3,))


def test_the_stream_that_waits_is_the_current_one_at_the_finish(cuda):
    place = placement("cuda:0")
    copies = DeviceCopies(place, to_device=True)
    in_flight = start(copies, torch.arange(3), place)
    own = cuda.Stream(GPUS[0])
    with cuda.stream(own):
        element = copies.finish(in_flight)
    assert own.num_waits == 1
    assert cuda.recorded == [(element.data_ptr(), own)]


def test_what_is_pinned_already_is_used_as_it_is(cuda):
    place = placement("cuda:0", "cuda:1")
    copies = DeviceCopies(place, to_device=True)
    x = cuda.pinned(torch.arange(4))
    element = copies.finish(start(copies, (x, torch.arange(4)), place))
    assert [is_pinned for _, _, is_pinned in cuda.copies] == [True] * 4
    assert cuda.num_pinned == 2  # the two shares of the other component
    assert [value.tolist() for value in element[0].values] == [[0, 1], [2, 3]]


def test_each_device_has_one_stream_that_all_iterators_share(cuda):
    place = placement("cuda:0", "cuda:1")
    for _ in range(3):
        copies = DeviceCopies(place, to_device=True)
        element = copies.finish(start(copies, {"x": torch.arange(3), "y": torch.arange(3.0)}, place))
        assert isinstance(element["x"], PerReplica)
        assert [value.device for value in element["x"].values] == list(GPUS)
        assert [value.tolist() for value in element["y"].values] == [[0, 1], [2]]
    assert cuda.num_streams == 2
    assert {(device, stream) for device, stream, _ in cuda.copies} == {(s.device, s) for _, s, _ in cuda.copies}
    assert [cuda.current_stream(device).num_waits for device in GPUS] == [3, 3], "one wait for an element and device"


def test_an_element_waits_for_its_own_copies_and_not_for_later_ones(cuda):
    place = placement("cuda:0")
    copies = DeviceCopies(place, to_device=True)
    flights = [start(copies, torch.full((2,), i), place) for i in range(3)]
    assert copies.finish(flights[0]).tolist() == [0, 0]
    assert flights[1].local.columns[0][0].tolist() == [GARBAGE] * 2
    assert copies.finish(flights[2]).tolist() == [2, 2]
    assert copies.finish(flights[1]).tolist() == [1, 1]


def test_what_lies_on_its_device_is_left_alone(cuda):
    place = placement("cuda:0")
    copies = DeviceCopies(place, to_device=True)
    scalar = cuda.on_device(torch.tensor(1.0), GPUS[0])
    in_flight = start(copies, (scalar, ["a"], None), place)
    assert in_flight.arrivals == []
    assert copies.finish(in_flight)[0] is scalar
    assert cuda.copies == []


def test_a_cpu_replica_beside_a_gpu(cuda):
    place = placement("cuda:0", "cpu:0")
    copies = DeviceCopies(place, to_device=True)
    element = copies.finish(start(copies, torch.arange(4), place))
    assert [value.device.type for value in element.values] == ["cuda", "cpu"]
    assert [value.tolist() for value in element.values] == [[0, 1], [2, 3]]
    assert len(cuda.copies) == 1


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse ... tensor support")
@pytest.mark.parametrize(
    ("make", "num_parts"),
    [
        (lambda: torch.eye(3).to_sparse(), 2),
        (lambda: torch.eye(3).to_sparse_csr(), 3),
        (lambda: torch.eye(3).to_sparse_csc(), 3),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged), 2),
        (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(1)]), 1),
    ],
    ids=["coo", "csr", "csc", "jagged", "nested"],
)
def test_tensors_of_several_parts_keep_the_memory_of_each(cuda, make, num_parts):
    copy = prefetch._send(row := [make()], GPUS[0])
    assert row[0] is copy.copies[0]
    assert cuda.num_pinned == 0
    prefetch._receive(copy)
    assert len({pointer for pointer, _ in cuda.recorded}) == num_parts


def test_subclasses_and_tensors_with_gradients_are_not_pinned(cuda):
    class Image(torch.Tensor):
        pass

    place = placement("cuda:0")
    copies = DeviceCopies(place, to_device=True)
    copies.finish(start(copies, (torch.ones(2).as_subclass(Image), torch.ones(2).requires_grad_()), place))
    assert [is_pinned for _, _, is_pinned in cuda.copies] == [False, False]
    assert cuda.num_pinned == 0


def test_empty_shares_reach_their_devices_without_being_pinned(cuda):
    place = placement("cuda:0", "cuda:1")
    copies = DeviceCopies(place, to_device=True)
    element = copies.finish(start(copies, torch.ones(1, 3), place))
    assert [(value.device, value.shape) for value in element.values] == [(GPUS[0], (1, 3)), (GPUS[1], (0, 3))]
    assert cuda.num_pinned == 1


def test_dropping_what_is_in_flight_frees_it_and_waits_for_nothing(cuda):
    place = placement("cuda:0")
    copies = DeviceCopies(place, to_device=True)
    in_flight = start(copies, torch.arange(3), place)
    cuda._devices.clear()  # what the fake keeps
    [stream] = [stream for _, stream, _ in cuda.copies]
    target = weakref.ref(in_flight.local.columns[0][0])
    stream.queue.clear()
    del in_flight
    gc.collect()
    assert target() is None
    assert cuda.current_stream(GPUS[0]).num_waits == 0
    assert cuda.recorded == []


def test_an_error_in_a_copy_leaves_later_elements_right(cuda):
    place = placement("cuda:0")
    copies = DeviceCopies(place, to_device=True)
    cuda.fail_copy = 1
    with pytest.raises(torch.OutOfMemoryError):
        start(copies, (torch.ones(2), torch.ones(2)), place)
    assert cuda.current_stream(GPUS[0]).name == "default"
    cuda.fail_copy = None
    assert copies.finish(start(copies, torch.arange(2), place)).tolist() == [0, 1]


@pytest.mark.parametrize("num_ahead", [1, 2])
def test_as_many_elements_travel_ahead_as_the_options_say(cuda, num_ahead):
    batches = [torch.full((2,), i) for i in range(5)]
    options = ts.InputOptions(experimental_per_replica_buffer_size=num_ahead)
    iterator = iter(distribute_dataset(batches, placement("cuda:0"), None, options))
    assert next(iterator).tolist() == [0, 0]
    assert len(cuda.copies) == 1 + num_ahead
    assert [element.tolist() for element in iterator] == [[i, i] for i in range(1, 5)]
    assert len(cuda.copies) == 5


def test_a_dataset_may_leave_its_elements_on_the_host(cuda):
    options = ts.InputOptions(experimental_fetch_to_device=False)
    dataset = distribute_dataset([torch.arange(4)], placement("cuda:0", "cuda:1"), None, options)
    [element] = dataset
    assert [value.tolist() for value in element.values] == [[0, 1], [2, 3]]
    assert cuda.copies == []


# --- with a CUDA device


@pytest.mark.gpu
@pytest.mark.parametrize("pin_memory", [False, True])
def test_elements_on_a_real_gpu_are_the_hosts(pin_memory):
    strategy = ts.OneDeviceStrategy("/gpu:0")
    data = torch.arange(64 * 4096, dtype=torch.float64).reshape(64, 4096)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(data), 4, pin_memory=pin_memory)
    options = ts.InputOptions(experimental_per_replica_buffer_size=3)
    matrix = torch.eye(4096, dtype=torch.float64, device="cuda:0")
    sums = []
    for (batch,) in strategy.experimental_distribute_dataset(loader, options):
        assert batch.device == torch.device("cuda", 0)
        product = batch
        for _ in range(20):  # keeps the stream busy, so that the host is far ahead and memory is freed under way
            product = product @ matrix
        del batch
        sums.append(product.sum(1))
    assert torch.equal(torch.cat(sums).cpu(), data.sum(1))


@pytest.mark.gpu
def test_a_host_buffer_may_be_filled_again_on_a_real_gpu():
    place = placement("cuda:0")
    copies = DeviceCopies(place, to_device=True)
    buffer = torch.empty(1 << 22)
    flights = [start(copies, buffer.fill_(i), place) for i in range(4)]
    assert [copies.finish(flight).unique().tolist() for flight in flights] == [[0], [1], [2], [3]]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Sparse ... tensor support")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_tensors_reach_a_real_gpu(layout):
    place = placement("cuda:0")
    copies = DeviceCopies(place, to_device=True)
    element = copies.finish(start(copies, torch.eye(3).to_sparse(layout=layout), place))
    assert element.device == torch.device("cuda", 0)
    assert torch.equal(element.cpu().to_dense(), torch.eye(3))


@pytest.mark.gpu
def test_ragged_tensors_reach_a_real_gpu():
    place = placement("cuda:0")
    copies = DeviceCopies(place, to_device=True)
    source = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)], layout=torch.jagged)
    element = copies.finish(start(copies, source, place))
    assert element.device == torch.device("cuda", 0)
    assert [row.tolist() for row in element.unbind()] == [[1, 1], [0, 0, 0]]
