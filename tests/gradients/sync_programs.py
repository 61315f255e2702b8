"""Programs for test_sync_check.py: each makes one thing differ between replicas, or nothing."""

import torch

import torchstrategy as ts

STEPS = 3


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        self.head = torch.nn.Linear(4, 1)

    def forward(self, x):
        return self.head(self.body(x))


def train(strategy, change=None):
    """Train for some steps, let ``change(things, replica_id)`` write past all that is noticed, and compare."""
    with strategy.scope():
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.Adam(model.parameters(), 0.01)

    def step(x):
        optimizer.zero_grad()
        ts.nn.compute_average_loss(model(x).square().sum(1)).backward()
        optimizer.step()

    x = strategy.experimental_distribute_values_from_function(
        lambda context: torch.randn(4, 3, generator=torch.Generator().manual_seed(context.replica_id_in_sync_group))
    )
    for _ in range(STEPS):
        strategy.run(step, args=(x,))
    if change is not None:
        strategy.run(lambda: change(model, optimizer, ts.get_replica_context().replica_id_in_sync_group))
    try:
        strategy.check_sync()
    except ts.errors.DivergenceError as error:
        return str(error)
    return None


def nothing(model, optimizer, replica):
    pass


def state(model, optimizer, replica):
    optimizer.state[model.head.weight]["exp_avg"].data.mul_(1 + replica)


def rate(model, optimizer, replica):
    optimizer.param_groups[0]["lr"] = 0.01 * (1 + replica)


def buffer(model, optimizer, replica):
    model.body[1].running_mean.add_(replica)


def buffer_on_one(model, optimizer, replica):
    if replica == 1:
        model.body[1].running_mean.add_(1)


def buffer_by_data(model, optimizer, replica):
    model.body[1].running_mean.data.add_(replica)


def rounding(model, optimizer, replica):
    optimizer.state[model.head.weight]["exp_avg"].data.mul_(1 + 1e-7 * replica)


def in_process(change):
    return train(ts.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]), change)


def all_in_processes():
    """Return what is said of each change, on this rank."""
    changes = (nothing, state, rate, buffer, buffer_on_one, rounding)
    found = {change.__name__: train(ts.MirroredStrategy(), change) for change in changes}

    def weights(model, optimizer, replica):
        model.head.weight.data.add_(replica)

    found["weights"] = train(ts.MirroredStrategy(), weights)
    return found
