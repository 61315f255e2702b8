"""The example of docs/guide/testing.md, which shows this file."""

import torch

import torchstrategy as ts


def train(devices=None):
    """Train one epoch and return the weights; the tests call it in several processes."""
    torch.manual_seed(0)
    strategy = ts.MirroredStrategy(devices)
    with strategy.scope():
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, y):
        optimizer.zero_grad()
        ts.nn.compute_average_loss((model(x) - y).square().mean(dim=1), global_batch_size="actual").backward()
        optimizer.step()

    arrays = (torch.randn(10, 3), torch.randn(10, 1))
    for batch in strategy.experimental_distribute_dataset(arrays, batch_size=4):
        strategy.run(step, args=batch)
    return model.weight.detach().clone()


def test_number_of_replicas_does_not_matter(process_pool):
    alone = train(["cpu:0"])
    torch.testing.assert_close(train(["cpu:0", "cpu:1"]), alone)
    for weight in process_pool(2).run(train):
        torch.testing.assert_close(weight, alone)
