"""A user's program: `tests/test_wheel.py` has its types checked, and runs it with one and with two replicas."""

import sys

import torch
from torch import Tensor
from typing_extensions import assert_type

import torchstrategy as ts


def train(strategy: ts.Strategy) -> float:
    with strategy.scope():
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = ts.nn.compute_average_loss((model(x) - y).square().sum(1), global_batch_size="actual")
        assert_type(loss, Tensor)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def count(x: Tensor) -> int:
        return len(x)

    def first_row(x: Tensor) -> Tensor:
        return x[:1]

    def look(x: Tensor) -> None:
        context = ts.get_replica_context()
        assert context is not None
        assert_type(context.replica_id_in_sync_group, int)

    dataset = ts.data.Dataset.from_tensor_slices((torch.ones(9, 3), torch.ones(9, 1))).shuffle(9).batch(4)
    assert_type(dataset, ts.data.Dataset)
    mean = ts.metrics.Mean()
    for x, y in strategy.experimental_distribute_dataset(dataset):
        losses = strategy.run(step, args=(x, y))
        assert_type(losses, Tensor | ts.PerReplica[Tensor])
        own = strategy.experimental_local_results(losses)
        assert_type(own, tuple[Tensor, ...])
        assert all(isinstance(loss, Tensor) for loss in own)
        total = strategy.reduce("SUM", losses, axis=None)
        assert_type(total, Tensor)
        mean.update_state(total.item())
        rows = strategy.run(first_row, args=(x,))
        assert_type(strategy.gather(rows, axis=0), Tensor)
        counts = strategy.run(count, args=(x,))
        assert_type(counts, int | ts.PerReplica[int])
        assert all(isinstance(number, int) for number in strategy.experimental_local_results(counts))
        assert strategy.run(look, args=(x,)) is None
    return float(mean.result())


def fit(strategy: ts.Strategy) -> dict[str, list[float]]:
    with strategy.scope():
        model = ts.Model(torch.nn.Linear(3, 1))
    model.compile(optimizer="sgd", loss="mse", metrics=["mae"])
    dataset = ts.data.Dataset.from_tensor_slices((torch.ones(9, 3), torch.ones(9, 1))).batch(4)
    history = model.fit(dataset, epochs=2, verbose=0, callbacks=[ts.callbacks.EarlyStopping("loss")])
    return dict(history.history)


if __name__ == "__main__":
    for number in sys.argv[1:]:
        strategy = ts.MirroredStrategy([f"cpu:{i}" for i in range(int(number))])
        print(f"{number}: {train(strategy):.3f} {sorted(fit(strategy))}")
