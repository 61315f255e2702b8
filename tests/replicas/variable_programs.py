"""Programs with variables that tests run on replicas of one process and on several processes."""

from __future__ import annotations

import torch
from torch import nn

import torchstrategy as ts
from tests.programs import strategy_for

SUM, MEAN, FIRST, NO_AGGREGATION = (
    ts.VariableAggregation.SUM,
    ts.VariableAggregation.MEAN,
    ts.VariableAggregation.ONLY_FIRST_REPLICA,
    ts.VariableAggregation.NONE,
)
ON_READ, ON_WRITE = ts.VariableSynchronization.ON_READ, ts.VariableSynchronization.ON_WRITE


def own_number() -> torch.Tensor:
    """1., 2., ... by the replica's id."""
    return torch.tensor(ts.get_replica_context().replica_id_in_sync_group + 1.0)


def assigned(devices, synchronization, aggregation, method="assign"):
    """Assign in run; return the local values and what is read outside run."""
    strategy = strategy_for(devices)
    with strategy.scope():
        variable = ts.Variable(2.0, synchronization=synchronization, aggregation=aggregation)
    strategy.run(lambda: getattr(variable, method)(own_number()))
    return [float(v) for v in strategy.experimental_local_results(variable)], variable.read_value().item()


def initial_values(devices):
    """Values that differ between processes until the first run; one made in the scope, one in run."""
    strategy = strategy_for(devices)
    rank = strategy.workers.rank if strategy.workers else 0
    with strategy.scope():
        variable = ts.Variable(10.0 + rank, synchronization=ON_READ, aggregation=SUM)
    made = strategy.run(lambda: ts.Variable(own_number(), aggregation=FIRST))
    strategy.run(lambda: made.assign_add(own_number()))
    strategy.run(lambda: variable.assign_add(1.0))
    return float(variable.read_value()), [float(v) for v in strategy.experimental_local_results(made)]


def filled_by_its_layer(devices):
    """A variable that gets random numbers in place, after it was made, other ones on each process."""
    strategy = strategy_for(devices)
    torch.manual_seed(strategy.workers.rank)
    with strategy.scope(), torch.no_grad():
        variable = ts.Variable(torch.zeros(3))
        made = variable.read_value().tolist()
        nn.init.normal_(variable)
    strategy.run(lambda: None)
    return made, variable.tolist()


class Scale(nn.Module):
    """A layer in the style of tf: variables as attributes."""

    def __init__(self, dtype):
        super().__init__()
        self.scale = ts.Variable(torch.full((3,), 0.5, dtype=dtype), name="scale")
        self.calls = ts.Variable(0, trainable=False, aggregation=FIRST)
        self.register_buffer("examples", ts.Variable(0.0, synchronization=ON_READ, aggregation=SUM))

    def forward(self, x):
        if self.training:
            self.calls.assign_add(1)
            self.examples.assign_add(float(len(x)))
        return x * self.scale


def train(devices, optimizer_name="SGD", dtype=torch.float64, compiled=False):
    """Train a net with variables as parameters on 11 examples in batches of 4; return all that it learnt."""
    torch.manual_seed(3)
    strategy = strategy_for(devices)
    x, y = torch.randn(11, 3, dtype=dtype), torch.randn(11, 1, dtype=dtype)
    with strategy.scope():
        layer = Scale(dtype)
        model = nn.Sequential(nn.Linear(3, 3, dtype=dtype), layer, nn.Linear(3, 1, dtype=dtype))
        offset = ts.Variable(torch.tensor([0.25], dtype=dtype))
        optimizer = getattr(torch.optim, optimizer_name)([*model.parameters(), offset], lr=0.05)
        forward = torch.compile(model, backend="eager") if compiled else model
    dataset = strategy.experimental_distribute_dataset((x, y), batch_size=4)

    def step(x, y):
        optimizer.zero_grad()
        per_example = (forward(x) + offset - y).square().mean(1)
        loss = ts.nn.compute_average_loss(per_example, global_batch_size="actual")
        loss = loss + ts.nn.scale_regularization_loss(0.01 * offset.square().sum())
        loss.backward()
        optimizer.step()

    for _ in range(2):
        for batch in dataset:
            strategy.run(step, args=batch)
    values = {name: value.tolist() for name, value in model.state_dict().items()}
    return {**values, "offset": offset.read_value().tolist(), "calls": int(layer.calls)}
