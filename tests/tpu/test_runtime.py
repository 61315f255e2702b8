"""The adapter of torch_xla on virtual devices: the values that it takes and gives, and when it can be started."""

import pytest
import torch

from tests.tpu import runtime_programs as programs

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def parts_of(runtime, shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(5)
    size = torch.Size((runtime.num_devices, *shape))
    return list(torch.randint(0, 2 if dtype is torch.bool else 100, size, generator=generator).to(dtype))


def test_properties(runtime):
    assert runtime.name.startswith("torch_xla 2.")
    assert (runtime.num_devices, runtime.num_local_devices) == (4, 4)
    assert (runtime.process_index, runtime.process_count) == (0, 1)
    assert (runtime.hardware, str(runtime.device)) == ("CPU", "xla:0")
    assert (runtime.is_started, runtime.is_spmd, runtime.is_requested) == (True, True, True)
    assert runtime.device_coordinates() == [[index, 0, 0, 0] for index in range(4)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_each_replica_sees_its_rows(runtime, dtype):
    parts = parts_of(runtime, (2, 3), dtype)
    batch = runtime.upload(parts)
    assert (batch.shape, batch.dtype, batch.device.type) == ((8, 3), dtype, "xla")
    for part, row in zip(parts, runtime.rows(batch), strict=True):
        assert torch.equal(part, row)
    local = runtime.enter(batch, split=True)
    assert local.shape == (2, 3)
    stacked = runtime.stack(local)
    assert (stacked.shape, stacked.dtype) == ((4, 2, 3), dtype)
    runtime.sync()
    for part, row in zip(parts, runtime.rows(stacked), strict=True):
        assert row.dtype is dtype
        assert torch.equal(part[None], row)
    assert torch.equal(stacked.cpu(), torch.stack(parts))
    assert torch.equal(batch.cpu(), torch.cat(parts))  # entering has left it as it was


@pytest.mark.parametrize("shape", [(2, 1, 3, 1, 2), (1, 2, 1, 3, 1, 2), (1, 2, 1, 3, 1, 2, 2)], ids=len)
def test_many_dimensions(runtime, shape):
    parts = parts_of(runtime, shape)
    batch = runtime.upload(parts)
    assert torch.equal(batch.cpu(), torch.cat(parts))
    local = runtime.enter(batch, split=True)
    assert local.shape == shape
    stacked = runtime.stack(local * 2)
    whole = runtime.stack(runtime.enter(batch, split=False))
    runtime.sync()
    assert torch.equal(stacked.cpu(), torch.stack(parts) * 2)
    assert torch.equal(whole.cpu()[3], torch.cat(parts))
    assert torch.equal(runtime.replicate(batch * 3).cpu(), torch.cat(parts) * 3)
    assert [row.shape for row in runtime.rows(stacked)] == [(1, *shape)] * 4


@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0), (1,), (2, 0, 1, 1, 1, 1)], ids=str)
def test_empty_shares(runtime, shape):
    parts = parts_of(runtime, shape)
    local = runtime.enter(runtime.upload(parts), split=True)
    stacked, sums = runtime.stack(local * 2), runtime.stack(local.sum())
    runtime.sync()
    assert [tuple(row.shape) for row in runtime.rows(stacked)] == [(1, *shape)] * 4
    assert [row.item() for row in runtime.rows(sums)] == [part.sum().item() for part in parts]


@pytest.mark.parametrize("shape", [(), (3,), (3, 5)], ids=str)
def test_whole_values_enter_as_they_are(runtime, shape):
    value = torch.randn(shape, dtype=torch.float64)
    there = value.to(runtime.device)
    local = runtime.enter(there, split=False)
    assert local.shape == shape
    assert not local.requires_grad
    stacked = runtime.stack(local)
    runtime.sync()
    assert all(torch.equal(row[0], value) for row in runtime.rows(stacked))
    assert torch.equal(there.cpu(), value)


def test_sums_of_local_values_reach_all(runtime):
    parts = parts_of(runtime, (5,), torch.float64)
    local = runtime.enter(runtime.upload(parts), split=True)
    total = runtime.stack(local.square()).sum(0)
    runtime.sync()
    assert torch.equal(total.cpu(), torch.stack(parts).square().sum(0))


@pytest.mark.parametrize("shape", [(6, 2), (3,), ()], ids=str)
def test_what_cannot_be_divided(runtime, shape):
    value = torch.zeros(shape).to(runtime.device)
    for call in (runtime.rows, lambda value: runtime.enter(value, split=True)):
        with pytest.raises(ValueError, match="must be a multiple"):
            call(value)


@pytest.mark.parametrize(
    "parts",
    [
        [torch.zeros(2)] * 3,
        [torch.zeros(2)] * 3 + [torch.zeros(1)],
        [torch.zeros(2)] * 3 + [torch.zeros(2, dtype=torch.int64)],
        [torch.zeros(())] * 4,
        [],
    ],
    ids=["too few", "shapes", "dtypes", "scalars", "none"],
)
def test_parts_that_do_not_match(runtime, parts):
    with pytest.raises(ValueError, match="upload takes 4 tensors"):
        runtime.upload(parts)


def test_uploaded_values_are_copies(runtime):
    parts = parts_of(runtime, (4,))
    expected = torch.cat(parts)
    there = runtime.upload(parts)
    for part in parts:
        part.zero_()
    assert torch.equal(there.cpu(), expected)


def test_rows_of_values_that_are_not_split(runtime):
    value = torch.arange(8.0).view(8, 1).to(runtime.device)  # on its way, and nothing was computed
    rows = [[[2.0 * index], [2.0 * index + 1]] for index in range(4)]
    assert [row.tolist() for row in runtime.rows(value)] == rows
    assert [row.tolist() for row in runtime.rows(runtime.replicate(value))] == rows
    assert [row.tolist() for row in runtime.rows(runtime.split(value.expand(8, 4), [1, 4]))] == [
        [row * 4 for row in part] for part in rows
    ]


def test_rows_make_a_traced_value_sync_once(runtime):
    value = torch.arange(4).to(runtime.device)
    doubled, other = value * 2, value * 5
    before = runtime.num_compilations()
    assert [row.tolist() for row in runtime.rows(doubled)] == [[0], [2], [4], [6]]
    assert [row.tolist() for row in runtime.rows(other)] == [[0], [5], [10], [15]]
    assert runtime.num_compilations() <= before + 1


def test_rows_wait_for_what_is_being_computed(runtime):
    value = torch.eye(600, dtype=torch.float64).to(runtime.device)
    for _ in range(6):
        value = value @ value * 2
    sums = runtime.stack(runtime.enter(value, split=False).sum())
    runtime.sync()
    assert [row.item() for row in runtime.rows(sums)] == [600 * 2.0**63] * 4


def test_constant_shapes_compile_once(runtime):
    def step(batch, weight):
        return runtime.stack(runtime.enter(batch, split=True) * weight).sum(0)

    weight = runtime.replicate(torch.tensor(1.5).to(runtime.device))
    counts = []
    for _ in range(4):
        weight = step(runtime.upload(parts_of(runtime, (1, 13))), weight).mean()
        runtime.sync()
        counts.append(runtime.num_compilations())
    assert counts[1:] == [counts[1]] * 3
    assert counts[1] - counts[0] <= 1


def test_replicate(runtime):
    value = torch.arange(6.0).to(runtime.device)
    assert runtime.replicate(value) is value
    assert runtime.replicate(value) is value
    parts = parts_of(runtime, (2,))
    split = runtime.upload(parts)
    assert runtime.replicate(split) is split
    assert torch.equal(split.cpu(), torch.cat(parts))
    assert torch.equal((split + value[:1]).cpu(), torch.cat(parts))


@pytest.mark.parametrize("is_synced", [True, False])
def test_replicate_what_was_stacked(runtime, is_synced):
    parts = parts_of(runtime, (2,))
    stacked = runtime.stack(runtime.enter(runtime.upload(parts), split=True))
    if is_synced:
        runtime.sync()
    assert runtime.replicate(stacked) is stacked
    assert torch.equal((stacked * 1).cpu(), torch.stack(parts))
    assert [row[0].tolist() for row in runtime.rows(stacked)] == [part.tolist() for part in parts]


def test_replicate_a_divided_parameter(runtime):
    weight = torch.nn.Parameter(torch.arange(8.0).to(runtime.device))
    divided = torch.nn.Parameter(runtime.split(weight.detach(), [4]))
    assert runtime.replicate(divided) is divided
    assert divided.is_leaf
    assert divided.requires_grad
    with torch.autograd.set_multithreading_enabled(False):
        divided.square().sum().backward()
    assert divided.grad.tolist() == [2.0 * index for index in range(8)]


SOURCES = {
    "uploaded": lambda runtime, parts: runtime.upload(parts),
    "sent": lambda runtime, parts: torch.cat(parts).to(runtime.device),
    "traced": lambda runtime, parts: torch.cat(parts).to(runtime.device) * 1,
    "replicated": lambda runtime, parts: runtime.replicate(torch.cat(parts).to(runtime.device)),
    "divided": lambda runtime, parts: runtime.split(torch.cat(parts).to(runtime.device), [2]),
    "stacked": lambda runtime, parts: runtime.stack(runtime.enter(runtime.upload(parts), split=True)).flatten(),
}


@pytest.mark.parametrize("source", SOURCES)
def test_any_shared_value_enters_both_ways(runtime, source):
    """A sharding can be noted once on each node of the graph, and a clone of a value takes it along."""
    parts = parts_of(runtime, (2,))
    value = SOURCES[source](runtime, parts)
    for _ in range(2):
        rows = runtime.stack(runtime.enter(value, split=True))
        whole = runtime.stack(runtime.enter(value, split=False))
        runtime.sync()
        assert torch.equal(rows.cpu(), torch.stack(parts))
        assert torch.equal(whole.cpu(), torch.cat(parts).expand(4, 8))
    assert torch.equal(runtime.split(value, [4]).cpu(), torch.cat(parts))


def test_replicated_parameters_stay_the_same_objects(runtime):
    module = torch.nn.Linear(3, 2).to(runtime.device)
    weight, expected = module.weight, module.weight.cpu()
    runtime.replicate(weight)
    assert module.weight is weight
    assert weight.requires_grad
    assert torch.equal(weight.cpu(), expected)


@pytest.mark.parametrize("partition", [[2, 2], [4, 1], [1, 4], [2, 1], [1, 1]], ids=str)
@pytest.mark.parametrize("shape", [(8, 4), (5, 6)], ids=["even", "uneven"])
def test_split(runtime, partition, shape):
    value = torch.randn(shape, dtype=torch.float64)
    leaf = value.to(runtime.device).requires_grad_()
    divided = runtime.split(leaf, partition)
    result = divided @ divided.t()
    with torch.autograd.set_multithreading_enabled(False):
        result.square().sum().backward()
    runtime.sync()
    expected = value.clone().requires_grad_()
    (expected @ expected.t()).square().sum().backward()
    torch.testing.assert_close(result.detach().cpu(), (value @ value.t()))
    torch.testing.assert_close(leaf.grad.cpu(), expected.grad)
    assert torch.equal(divided.detach().cpu(), value)


def test_split_values_lie_on_several_devices(runtime):
    divided = runtime.split(torch.arange(32.0).view(8, 4).to(runtime.device), [4, 1])
    runtime.sync()
    assert [row.flatten().tolist() for row in runtime.rows(divided)] == [
        [float(number) for number in range(8 * index, 8 * index + 8)] for index in range(4)
    ]


@pytest.mark.parametrize("partition", [[4], [3, 1], [4, 4], [0, 1], []], ids=str)
def test_partitions_that_do_not_fit(runtime, partition):
    with pytest.raises(ValueError, match="can't be divided into"):
        runtime.split(torch.zeros(8, 4).to(runtime.device), partition)


def test_place(runtime):
    value = torch.arange(3.0).to(runtime.device)
    assert runtime.place(value, 3).tolist() == [0.0, 1.0, 2.0]
    for index in (4, -1):
        with pytest.raises(ValueError, match=f"no device {index}: there are 4"):
            runtime.place(value, index)


def test_random_numbers_repeat_from_a_seed(runtime):
    def draw(seed):
        runtime.set_seed(seed)
        return torch.rand(4, device=runtime.device).tolist()

    first = draw(3)
    assert draw(3) == first
    assert draw(4) != first


def test_collectives_of_other_programs_are_refused(runtime):
    value = torch.ones(2, device=runtime.device)
    for call in (runtime.sum_over_devices, runtime.gather_over_devices):
        with pytest.raises(RuntimeError, match="one process for each device"):
            call(value)


@pytest.mark.parametrize("num_devices", [1, 2, 4])
def test_numbers_of_devices(xla_process, num_devices):
    expected = [[6.0 * index] for index in range(num_devices)]
    found = xla_process(num_devices).run(programs.replicas_view)
    assert found == (num_devices, num_devices, (2, 3), expected, sum(row for (row,) in expected))


def test_starting_twice(xla_process):
    was, is_started, message = xla_process(fresh=True).run(programs.starts_twice)
    assert (was, is_started) == (False, True)
    assert "can't change to with one process for each device" in message


def test_a_tensor_before_the_start(xla_process):
    message = xla_process(fresh=True).run(programs.starts_after_a_tensor)
    assert "initialize_tpu_system() before the first tensor" in message


def test_spmd_by_the_program_itself(xla_process):
    is_spmd, message = xla_process(fresh=True).run(programs.starts_after_the_program_chose_spmd)
    assert is_spmd
    assert "remove the call" in message


def test_a_backward_on_the_host_before_the_start(xla_process):
    host, device = xla_process(fresh=True).run(programs.trains_after_a_backward_on_the_host)
    assert host == device == [2.0, 4.0]


def test_threads_of_autograd(xla_process):
    assert xla_process(fresh=True).run(programs.trains_on_other_threads_too) == [2.0, 4.0]


def test_counting_devices_starts_nothing(xla_process):
    assert xla_process(2, fresh=True).run(programs.counts_devices) == ((2, 2), False, (2, 2))


def test_one_process_for_each_device(xla_process):
    found = xla_process(1, fresh=True).run(programs.drives_one_device)
    assert found["modes"] == (True, False, True)
    assert found["devices"] == (1, 1, 0)
    assert (found["sum"], found["gathered"]) == ([1.0, 2.0], [[False, True]])
    assert found["gradient"] == [2.0, 4.0]


def test_several_devices_in_one_of_the_processes(xla_process):
    message = xla_process(4, fresh=True).run(programs.drives_several_without_spmd)
    assert "drives 4 devices" in message
    assert "CPU_NUM_DEVICES=1" in message


def test_virtual_devices_of_two_processes_are_apart(xla_process):
    connects, sums, gathers, variables = xla_process(1, fresh=True).run(programs.is_one_of_two_processes)
    assert not connects
    assert sums == gathers
    assert "XLA does not connect the 2 processes" in sums
    assert variables == {"PJRT_LOCAL_PROCESS_RANK": "1", "PJRT_LOCAL_PROCESS_COUNT": "2"}


def test_joining_after_the_runtime_was_used(xla_process):
    assert "before it could be told which device" in xla_process(1, fresh=True).run(programs.joins_too_late)


def test_programs_of_collectives(xla_process):
    *sums, first, second = xla_process(4, fresh=True).run(programs.programs_of_collectives)
    for text, dtype in zip(sums, ("f32", "bf16", "s64"), strict=True):
        assert "all-reduce(" in text
        assert f"{dtype}[2]" in text
    for text in (first, second):
        assert "all-gather(" in text
        assert "pred[4,3]" in text


def test_compilation_cache(xla_process, tmp_path):
    path = tmp_path / "new" / "cache"
    for _ in range(2):
        files, result, late = xla_process(2, fresh=True).run(programs.keeps_programs, str(path))
        assert result == 63
        assert files
        assert "comes too late" in late


def test_replicas_of_one_host_are_neighbours(xla_process):
    assert xla_process(4).run(programs.owners_are_neighbours) == [0, 2, 1, 3]
