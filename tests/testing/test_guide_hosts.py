"""The example of docs/guide/testing.md with several hosts, which shows this file."""

import pytest
import torch

import torchstrategy as ts
from torchstrategy.testing.faults import Fault
from torchstrategy.testing.network import Network


def train(num_steps, fault=None):
    """Train on as many workers as there are and return the weights."""
    torch.manual_seed(0)
    options = ts.experimental.CommunicationOptions(timeout_seconds=20)
    strategy = ts.MultiWorkerMirroredStrategy(communication_options=options)
    with strategy.scope():
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):
        optimizer.zero_grad()
        ts.nn.compute_average_loss((model(x) - y).square().mean(dim=1), global_batch_size="actual").backward()
        optimizer.step()

    arrays = (torch.randn(10, 3), torch.randn(10, 1))
    batches = list(strategy.experimental_distribute_dataset(arrays, batch_size=4))
    for number in range(num_steps):
        if fault is not None:
            fault.strike(rank=strategy.cluster_resolver.task_id, step=number)
        strategy.run(step, args=batches[number % 3])
    return model.weight.detach().clone()


@pytest.fixture
def network():
    try:
        network = Network(2)
    except RuntimeError as error:
        pytest.skip(str(error))
    with network:
        yield network


@pytest.mark.slow
def test_a_slow_link_does_not_change_the_weights(network):
    network.shape(1, delay_ms=5, rate_mbit=50, loss_percent=0.5)
    alone = train(10)
    with ts.testing.ProcessPool(2, launcher="TF_CONFIG", network=network) as pool:
        for weight in pool.run(train, 10):
            torch.testing.assert_close(weight, alone)


@pytest.mark.slow
def test_a_killed_worker_is_named():
    with ts.testing.ProcessPool(2, launcher="TF_CONFIG") as pool:
        survivor, killed = pool.outcomes(train, 10, Fault("kill", rank=1, step=7))
    assert "exit code -9" in str(killed.error)
    assert isinstance(survivor.error, ts.errors.ReplicaFailedError)
    assert "Rank 1 does not answer" in str(survivor.error)
