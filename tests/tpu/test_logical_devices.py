"""One replica that spans all devices: its tensors are split over them by XLA's partitioner."""

import pytest
import torch

import torchstrategy as ts
from torchstrategy.xla import system


def spanning(**options):
    topology = system.require_initialized().topology
    assignment = ts.tpu.experimental.DeviceAssignment.build(topology, list(topology.mesh_shape), num_replicas=1)
    return ts.TPUStrategy(
        experimental_device_assignment=assignment, **{"experimental_spmd_xla_partitioning": True, **options}
    )


def trained():
    strategy = spanning()
    torch.manual_seed(0)
    with strategy.scope():
        layer = torch.nn.Linear(8, 4)
        optimizer = torch.optim.SGD(layer.parameters(), 0.1)

    @ts.function
    def step(x):
        def replica_step(x):
            x = strategy.experimental_split_to_logical_devices(x, [4, 1])
            optimizer.zero_grad()
            loss = strategy.experimental_replicate_to_logical_devices(layer(x)).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return strategy.run(replica_step, args=(x,))

    torch.manual_seed(1)
    losses = [step(torch.randn(16, 8)).item() for _ in range(3)]
    return strategy.num_replicas_in_sync, losses, layer.weight.detach().cpu()


def test_one_replica_over_all_devices_trains_as_on_one(xla_process):
    num_replicas, losses, weight = xla_process(4).run(trained)
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    torch.manual_seed(1)
    expected = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = layer(torch.randn(16, 8)).square().mean()
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert num_replicas == 1
    assert losses == pytest.approx(expected, abs=1e-6)
    torch.testing.assert_close(weight, layer.weight.detach(), rtol=1e-5, atol=1e-6)


def dropped():
    strategy = spanning()

    def draw():
        torch.manual_seed(3)
        return ts.function(lambda: strategy.run(lambda: torch.nn.functional.dropout(torch.ones(1000), 0.25)))().cpu()

    first, second = draw(), draw()
    return (first == 0).float().mean().item(), first.max().item(), torch.equal(first, second)


def test_one_replica_over_all_devices_draws_random_numbers(xla_process):
    rate, scaled, is_repeated = xla_process(4).run(dropped)
    assert rate == pytest.approx(0.25, abs=0.06)
    assert scaled == pytest.approx(4 / 3)
    assert is_repeated


def refused():
    strategy, other = spanning(), spanning(experimental_spmd_xla_partitioning=False)
    x = torch.ones(8, 2).to(strategy.runtime.device)
    calls = {
        "rank": lambda: strategy.experimental_split_to_logical_devices(x, [4]),
        "parts": lambda: strategy.experimental_split_to_logical_devices(x, [3, 1]),
        "option": lambda: other.experimental_split_to_logical_devices(x, [4, 1]),
        "device": lambda: strategy.experimental_assign_to_logical_device(x, 4),
    }
    messages = {}
    for name, call in calls.items():
        try:
            call()
        except (ValueError, RuntimeError) as error:
            messages[name] = f"{type(error).__name__}: {error}"
    kept = strategy.experimental_assign_to_logical_device(x, 3)
    return messages, kept is x, strategy.experimental_split_to_logical_devices(x, [1, 1]) is x


def test_partitions_that_do_not_fit_are_refused(xla_process):
    messages, is_kept, is_whole = xla_process(4).run(refused)
    assert "one number for each of the tensor's 2 dimensions" in messages["rank"]
    assert "must be the number of a replica's devices, 4" in messages["parts"]
    assert "experimental_spmd_xla_partitioning=True" in messages["option"]
    assert "must be less than the number of devices of a replica, 4" in messages["device"]
    assert is_kept
    assert is_whole
