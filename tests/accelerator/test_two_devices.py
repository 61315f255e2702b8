"""Replicas on two devices that share no memory train as one on the CPU does; their copies are late, as on GPUs."""

import pytest
import torch

import torchstrategy as ts
from tests.accelerator.loading import DEVICES
from tests.gpu.training import make_data, make_net
from tests.programs import assert_equal

pytestmark = pytest.mark.accelerator
STRATEGIES = {
    "MirroredStrategy": lambda: ts.MirroredStrategy(),
    "ReductionToOneDevice": lambda: ts.MirroredStrategy(DEVICES, cross_device_ops=ts.ReductionToOneDevice()),
    "ReductionToOneDevice on the host": lambda: ts.MirroredStrategy(
        DEVICES, cross_device_ops=ts.ReductionToOneDevice("cpu:0")
    ),
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
