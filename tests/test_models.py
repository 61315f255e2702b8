"""Compiled models, activation checkpointing and memory formats in every hosting; all of it also at once."""

import pytest
import torch
from torch import nn

import torchstrategy as ts
from tests.model_programs import train
from tests.programs import cpu_devices, largest_difference

# torch's compiler reads this attribute of its inputs, and hides the warning unless warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

LAST = {"memory_format": torch.channels_last, "fused": True}
ALL = {**LAST, "use_reentrant": False}


def _slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


def check_numbers(results, tolerance=1e-10, **reference):
    """Compare with one replica of a plain model; return the numbers of compiled graphs for each result."""
    expected, _, _ = train([], **reference)
    for numbers, _, formats in results:
        assert largest_difference(expected, numbers) < tolerance
        assert formats == dict.fromkeys(["input", "local gradient", "gradient", "weight", "momentum"], True)
    return [graphs for _, graphs, _ in results]


def check_graphs(rows):
    """Assert that something was compiled, in the first two epochs only: each has a full and a short batch."""
    for graphs in rows:
        assert 1 <= graphs[1] == graphs[-1] <= 4


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["module", "function"])
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_compiled_models(num_replicas, compiler):
    # with 3 replicas the short batch leaves one of them without examples
    check_graphs(check_numbers([train(cpu_devices(num_replicas), compiler)]))


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["module", "function"])
@pytest.mark.parametrize(("num_processes", "devices"), [(2, None), _slow(3, None), _slow(2, ["cpu:0", "cpu:1"])])
def test_compiled_models_in_processes(num_processes, devices, compiler, process_pool):
    check_graphs(check_numbers(process_pool(num_processes).run(train, devices, compiler)))


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["module", "function"])
def test_compiled_models_with_synchronised_batch_norm(compiler, process_pool):
    # replicas meet in the layer, so what comes before it is compiled apart from what follows
    results = [train(cpu_devices(2), compiler, norm=ts.nn.SyncBatchNorm)]
    results += process_pool(2).run(train, None, compiler, norm=nn.SyncBatchNorm)
    for graphs in check_numbers(results, norm=nn.BatchNorm2d):
        assert 1 <= graphs[1] == graphs[-1] <= 8


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("compiler", ["module", "function"])
@pytest.mark.parametrize(("num_processes", "devices"), [(1, ["cpu:0", "cpu:1"]), (2, None)])
def test_inductor(num_processes, devices, compiler, process_pool):
    # In other processes, because inductor leaves threads and environment variables behind.
    options = {"backend": "inductor", "epochs": 3}
    results = process_pool(num_processes).run(train, devices, compiler, **options, timeout_s=500)
    check_graphs(check_numbers(results, epochs=3))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(use_reentrant, process_pool):
    results = [train(cpu_devices(count), use_reentrant=use_reentrant) for count in (1, 2, 3)]
    results += process_pool(2).run(train, None, use_reentrant=use_reentrant)
    check_numbers(results)


@pytest.mark.parametrize("make", [ts.MirroredStrategy, ts.experimental.CentralStorageStrategy])
def test_channels_last(make):
    check_numbers([train(cpu_devices(count), strategy=make, **LAST) for count in (1, 2, 3)])


@pytest.mark.slow
@pytest.mark.parametrize("make", [ts.MirroredStrategy, ts.experimental.CentralStorageStrategy])
@pytest.mark.parametrize(("num_processes", "devices"), [(2, ["cpu:0"]), (3, ["cpu:0"]), (2, ["cpu:0", "cpu:1"])])
def test_channels_last_in_processes(num_processes, devices, make, process_pool):
    check_numbers(process_pool(num_processes).run(train, devices, strategy=make, **LAST))


@pytest.mark.slow
@pytest.mark.parametrize("compiler", ["module", "function"])
def test_all_at_once(compiler, process_pool):
    options = {**ALL, "backend": "aot_eager"}
    results = [train(cpu_devices(2), compiler, **options), *process_pool(2).run(train, None, compiler, **options)]
    check_graphs(check_numbers(results))


def overlapping(devices):
    options = ts.experimental.CommunicationOptions(overlap=True)
    return ts.MultiWorkerMirroredStrategy(devices=devices, communication_options=options)


def test_channels_last_while_backward_computes(process_pool):
    check_numbers(process_pool(2).run(train, ["cpu:0"], strategy=overlapping, **LAST))


def different_formats(formats):
    strategy = ts.MirroredStrategy()
    with strategy.scope():
        model = nn.Conv2d(2, 4, 3).to(memory_format=formats[strategy.placement.first_replica])
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step():
        model(torch.ones(1, 2, 3, 3)).sum().backward()
        optimizer.step()

    try:
        strategy.run(step)
    except ts.errors.InvalidArgumentError as error:
        return str(error)


def test_ranks_with_different_formats_are_refused(process_pool):
    for message in process_pool(2).run(different_formats, [torch.channels_last, torch.contiguous_format]):
        assert "memory formats" in message
        assert "axes [0, 2, 3, 1] in memory" in message
