"""Replicas on two devices that share no memory train as one on the CPU does; their copies are late, as on GPUs."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import torchstrategy as ts
from tests.accelerator import loading
from tests.accelerator.loading import DEVICES, NAME
from tests.gpu.training import make_data, make_net
from tests.programs import CountedKernels, assert_equal
from torchstrategy import testing
from torchstrategy.collectives.cross_device_ops import sum_gradients
from torchstrategy.replicas.fingerprints import fingerprints

pytestmark = pytest.mark.accelerator
STRATEGIES = {
    "MirroredStrategy": lambda: ts.MirroredStrategy(),
    "ReductionToOneDevice": lambda: ts.MirroredStrategy(DEVICES, cross_device_ops=ts.ReductionToOneDevice()),
    "ReductionToOneDevice on the host": lambda: ts.MirroredStrategy(
        DEVICES, cross_device_ops=ts.ReductionToOneDevice("cpu:0")
    ),
    "NcclAllReduce": lambda: ts.MirroredStrategy(DEVICES, cross_device_ops=ts.NcclAllReduce(num_packs=2)),
    "HierarchicalCopyAllReduce": lambda: ts.MirroredStrategy(DEVICES, cross_device_ops=ts.HierarchicalCopyAllReduce()),
    "MultiWorkerMirroredStrategy": lambda: ts.MultiWorkerMirroredStrategy(),
    "CentralStorageStrategy": lambda: ts.experimental.CentralStorageStrategy(DEVICES, DEVICES[1]),
    "CentralStorageStrategy on the host": lambda: ts.experimental.CentralStorageStrategy(DEVICES, "cpu:0"),
}
#: Of ``float32``: the same numbers, added in another order.
CLOSE = 1e-6


def make_model(strategy, make_optimizer=torch.optim.Adam, **options):
    with strategy.scope():
        model = make_net(torch.float32)
        return model, make_optimizer(model.parameters(), lr=0.01, **options)


def train(strategy, model, optimizer, num_epochs=2, autocast=None, scales=False):
    """Train on batches of 5, which two replicas have unequal shares of; return losses and the final values."""
    kind = strategy.placement.devices[0].type
    with strategy.scope():
        scaler = torch.amp.GradScaler(kind, init_scale=2.0**8, growth_interval=3, enabled=scales)

    def step(x, y):
        optimizer.zero_grad()
        with torch.autocast(kind, dtype=autocast, enabled=autocast is not None):
            output = model(x)
        loss = ts.nn.compute_average_loss((output.float() - y).square().mean(1), global_batch_size="actual")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*make_data(torch.float32)), 5)
    losses = [
        float(strategy.reduce("SUM", strategy.run(step, args=tuple(inputs))))
        for _ in range(num_epochs)
        for inputs in strategy.experimental_distribute_dataset(loader)
    ]
    values = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    return {**values, "losses": torch.tensor(losses)}


def on_cpu(**options):
    strategy = ts.OneDeviceStrategy("cpu:0")
    return train(strategy, *make_model(strategy), **options)


@pytest.mark.parametrize("name", STRATEGIES)
def test_two_devices_train_as_one_cpu(name):
    strategy = STRATEGIES[name]()
    assert [str(device) for device in strategy.placement.devices] == list(DEVICES)
    assert_equal(train(strategy, *make_model(strategy)), on_cpu(), CLOSE)


def test_gradients_are_summed_in_their_own_memory_by_both_devices():
    rows = [[torch.randn(size, device=device) for size in (7, 300)] for device in DEVICES]
    expected = [one.cpu() + other.cpu() for one, other in zip(*rows, strict=True)]
    devices = [torch.device(device) for device in DEVICES]
    sums = sum_gradients(ts.NcclAllReduce(), rows, [True, True], devices, ts.experimental.CommunicationOptions())
    for own, row in zip(sums, rows, strict=True):
        assert all(a is b for a, b in zip(own, row, strict=True))
        assert all(torch.equal(a.cpu(), b) for a, b in zip(own, expected, strict=True))


@pytest.mark.parametrize("options", [{"foreach": False}, {"fused": True}], ids=str)
def test_optimizers(options):
    strategy = ts.MirroredStrategy()
    found = train(strategy, *make_model(strategy, torch.optim.AdamW, **options))
    cpu = ts.OneDeviceStrategy("cpu:0")
    assert_equal(found, train(cpu, *make_model(cpu, torch.optim.AdamW)), CLOSE)


def test_the_number_of_examples_may_be_on_a_device():
    count = torch.tensor(4, device=DEVICES[1])
    assert float(ts.nn.compute_average_loss(torch.ones(2), global_batch_size=count)) == 0.5
    assert float(ts.nn.compute_average_loss(torch.ones(2, device=DEVICES[1]), global_batch_size=count.cpu())) == 0.5


@pytest.mark.parametrize(("autocast", "scales"), [(torch.bfloat16, False), (torch.float16, True), (None, True)])
def test_mixed_precision(autocast, scales):
    strategy, one = ts.MirroredStrategy(), ts.OneDeviceStrategy(DEVICES[1])
    found = train(strategy, *make_model(strategy), autocast=autocast, scales=scales)
    tolerance = CLOSE if autocast is None else 2e-2  # halves are rounded before they are added
    assert_equal(found, train(one, *make_model(one), autocast=autocast, scales=scales), tolerance)


def test_modes_of_the_caller_hold_on_both_devices():
    strategy = ts.MirroredStrategy()
    with strategy.scope():
        model = nn.Linear(2, 2)

    def run():
        module = torch.get_device_module(NAME)
        ts.get_replica_context().all_reduce("SUM", torch.ones(1))  # for which each has a thread of its own
        return model(torch.ones(1, 2)).dtype, torch.is_grad_enabled(), module.current_device()

    with torch.autocast(NAME, torch.bfloat16), torch.no_grad():
        found = strategy.run(run)
    assert strategy.experimental_local_results(found) == tuple((torch.bfloat16, False, index) for index in range(2))
    assert torch.get_device_module(NAME).current_device() == 0


def test_replicas_draw_other_numbers_and_the_same_again():
    strategy = ts.MirroredStrategy()

    def draw():
        torch.manual_seed(5)
        found = strategy.run(lambda: nn.functional.dropout(torch.ones(100)))
        return [value.cpu() for value in strategy.experimental_local_results(found)]

    first, second = draw(), draw()
    assert all(torch.equal(own, again) for own, again in zip(first, second, strict=True))
    assert not torch.equal(*first)


def test_collectives():
    strategy = ts.MirroredStrategy()

    def run():
        context = ts.get_replica_context()
        own = torch.full((2,), context.replica_id_in_sync_group + 1.0)
        return context.all_reduce("SUM", own), context.all_gather(own, axis=0)

    sums, gathered = strategy.run(run)
    for device, total, rows in zip(DEVICES, sums.values, gathered.values, strict=True):
        assert total.device == rows.device == torch.device(device)
        assert total.tolist() == [3, 3]
        assert rows.tolist() == [1, 1, 2, 2]
    assert strategy.reduce("MEAN", sums, axis=None).tolist() == [3, 3]


def test_fit():
    x, y = make_data(torch.float32)

    def fit(strategy):
        with strategy.scope():
            model = ts.Model(make_net(torch.float32))
            model.compile("adam", "mse", metrics=["mae"])
        history = model.fit(x, y, batch_size=5, epochs=2, shuffle=False, verbose=0).history
        return {name: torch.tensor(values) for name, values in history.items()} | {
            "predicted": model.predict(x, verbose=0)
        }

    assert_equal(fit(ts.MirroredStrategy()), fit(ts.OneDeviceStrategy("cpu:0")), CLOSE)


def test_batch_norm_over_both_devices():
    def run(strategy):
        with strategy.scope():
            layer = ts.nn.SyncBatchNorm(5)
        x, _ = make_data(torch.float32)
        for inputs in strategy.experimental_distribute_dataset([x]):
            outputs = strategy.run(layer, args=(inputs,))
        rows = torch.cat([value.detach().cpu() for value in strategy.experimental_local_results(outputs)])
        return {"outputs": rows, **{name: value.cpu() for name, value in layer.state_dict().items()}}

    assert_equal(run(ts.MirroredStrategy()), run(ts.OneDeviceStrategy("cpu:0")), CLOSE)


@pytest.mark.parametrize("goes_back", [False, True])
def test_a_checkpoint_moves_between_two_devices_and_the_host(goes_back, tmp_path):
    first, second = ts.MirroredStrategy(), ts.OneDeviceStrategy("cpu:0")
    if goes_back:
        first, second = second, first
    saved, restored = make_model(first), make_model(second)
    train(first, *saved, num_epochs=1)
    path = ts.train.Checkpoint(model=saved[0], optimizer=saved[1]).save(str(tmp_path / "ckpt"))
    ts.train.Checkpoint(model=restored[0], optimizer=restored[1]).restore(path)
    assert_equal(train(second, *restored), train(first, *saved), CLOSE)


def test_bits_have_one_fingerprint_on_every_device():
    torch.manual_seed(0)
    tensors = [torch.randn(size) for size in (1, 1000, 70_000)]
    expected = fingerprints([tensor.cpu() for tensor in tensors])
    for device in DEVICES:
        assert fingerprints([tensor.to(device) for tensor in tensors]) == expected


@pytest.mark.parametrize("change", [None, -0.0, 1e-9, 1.0])
def test_replicas_are_compared_by_few_kernels(change):
    strategy = ts.MirroredStrategy()
    with strategy.scope():
        model = nn.ParameterList(torch.zeros(30) for _ in range(200))
    strategy.run(lambda: None)
    if change is not None:
        slot = next(dicts for dicts, name in strategy.hosting.slots() if name == "150")
        slot[1]["150"].data[7] = change
    with CountedKernels() as counted:
        if change == 1.0:
            with pytest.raises(ts.errors.DivergenceError, match=r"parameter '150'.* differs .* by up to 1"):
                strategy.check_sync()
        else:
            strategy.check_sync()
    assert len(counted.names) < 60
    assert len(model) == 200


def train_by_local_rank(kind=NAME, **options):
    loading.load(kind)
    strategy = ts.MultiWorkerMirroredStrategy(communication_options=ts.experimental.CommunicationOptions(**options))
    here = torch.get_device_module(kind).current_device()
    return [str(strategy.placement.devices[0]), here], train(strategy, *make_model(strategy))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.end_to_end),
        pytest.param({"implementation": "RING", "overlap": True, "bytes_per_pack": 100}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_each_process_takes_the_device_of_its_local_rank(options, process_pool):
    expected = on_cpu()
    found = process_pool(2).run(train_by_local_rank, **options)
    assert [places for places, _ in found] == [[device, index] for index, device in enumerate(DEVICES)]
    for _, values in found:
        assert_equal(values, expected, CLOSE)


def warnings_of_two_devices_each():
    loading.load()
    found = []
    for devices in (["cpu:0", "cpu:1"], DEVICES, DEVICES):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            ts.MultiWorkerMirroredStrategy(devices=devices)
        found.append([str(warning.message) for warning in caught])
    return found


@pytest.mark.slow
def test_processes_with_several_devices_are_told_once_that_one_carries_all(process_pool):
    for none, (one,), no_more in process_pool(2).run(warnings_of_two_devices_each):
        assert none == no_more == []
        assert "through the first one, standin:0" in one
        assert "torchrun --nproc-per-node" in one


@pytest.mark.slow
def test_processes_with_a_chip_each():
    """As with torch_tpu, which calls its devices ``tpu`` and binds a process to one of them."""
    with testing.ProcessPool(2) as pool:
        found = pool.run(train_by_local_rank, "tpu")
    for rank, ((device, _), values) in enumerate(found):
        assert device == f"tpu:{rank}"
        assert_equal(values, on_cpu(), CLOSE)


def test_replicas_at_once():
    """Each on a thread of its own for a whole run, with autograd's threads beside it."""
    strategy = ts.MirroredStrategy(concurrent=True)
    assert_equal(train(strategy, *make_model(strategy)), on_cpu(), CLOSE)


def test_variables():
    strategy = ts.MirroredStrategy()
    with strategy.scope():
        total = ts.Variable(
            0.0, synchronization=ts.VariableSynchronization.ON_READ, aggregation=ts.VariableAggregation.SUM
        )
        mean = ts.metrics.Mean()

    def run():
        own = torch.tensor(ts.get_replica_context().replica_id_in_sync_group + 1.0)
        total.assign_add(own)
        mean.update_state(own)

    strategy.run(run)
    assert float(total) == 3
    assert float(mean.result()) == 1.5


def test_a_worker_of_parameter_servers_computes_on_the_first_device():
    spec = ts.train.ClusterSpec({"worker": ["localhost:1"], "ps": ["localhost:2"]})
    strategy = ts.ParameterServerStrategy._on_worker(spec, 0)
    assert [str(device) for device in strategy.placement.devices] == [DEVICES[0]]


#: What returns a value of a tensor to the program.
READS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.is_nonzero.default)


class Waits(TorchDispatchMode):
    """Notes what makes the program wait for a device: a value that is read, a copy to or from the host that blocks."""

    def __init__(self, found):
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        kinds = {value.device.type for value in args if isinstance(value, torch.Tensor)}
        result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            crosses = len(kinds | {result.device.type}) > 1 and result.ndim > 0 and not kwargs.get("non_blocking")
        else:
            crosses = NAME in kinds and func in READS
        if crosses:
            self._found.append(str(func))
        return result


@pytest.mark.parametrize("name", ["MirroredStrategy", "HierarchicalCopyAllReduce", "CentralStorageStrategy"])
def test_a_step_waits_for_no_device(name):
    strategy = STRATEGIES[name]()
    with strategy.scope():
        model, optimizer = make_model(strategy)
        mean = ts.metrics.Mean()
    found = []

    def step(x, y, read=False):
        with Waits(found):
            optimizer.zero_grad()
            losses = (model(x) - y).square().mean(1)
            loss = ts.nn.compute_average_loss(losses, global_batch_size="actual")
            loss.backward()
            optimizer.step()
            mean.update_state(losses.detach())
            if read:
                float(loss.detach())

    dataset = strategy.experimental_distribute_dataset(
        torch.utils.data.TensorDataset(*make_data(torch.float32)), batch_size=4
    )
    for _ in range(4):  # the first sums look at the gradients
        for batch in dataset:
            found.clear()
            strategy.run(step, args=tuple(batch))
    assert found == []
    strategy.run(step, args=(*batch, True))
    assert found == ["aten._local_scalar_dense.default"] * 2
