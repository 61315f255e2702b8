"""Ways to use a model that tests compare between strategies: own steps, callbacks, single batches, datasets."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import torchstrategy as ts
from tests.fit.fit_programs import default_dtype, new_strategy

NUM_EXAMPLES = 10


class OwnSteps(ts.Model):
    """A step with a loss of its own, a metric that is an attribute, a scalar, and clipped gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        self.error = ts.metrics.Mean(name="error")

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        predictions = self(x)
        per_example = (predictions - y).square().mean(1)
        self.minimize(ts.nn.compute_average_loss(per_example, global_batch_size="actual"))
        self.error.update_state((predictions - y).abs())
        return {"error": self.error.result(), "mean_x": x.mean() if len(x) else torch.zeros(())}

    def clip_gradients(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), max_norm=0.5)


class BatchLogs(ts.callbacks.Callback):
    """Keeps the logs after each batch."""

    log_interval = 1

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.seen.append([batch, *(float(value) for value in logs.values())])


class StopAfterTwoEpochs(ts.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            self.model.stop_training = True


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(NUM_EXAMPLES, 3, generator=torch.Generator().manual_seed(0))
    return x, x.sum(1, keepdim=True)


def compiled(strategy: ts.Strategy) -> ts.Model:
    with strategy.scope():
        model = ts.Model(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
    model.compile(functools.partial(torch.optim.SGD, lr=0.1), "mse", metrics=["mae"])
    return model


def own_steps(strategy: ts.Strategy) -> Any:
    with strategy.scope():
        model = OwnSteps()
    model.compile("sgd")
    return model.fit(*data(), batch_size=4, epochs=2, verbose=0).history


def callbacks(strategy: ts.Strategy) -> Any:
    model, logs = compiled(strategy), BatchLogs()
    every = [
        logs,
        ts.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True),
        ts.callbacks.ReduceLROnPlateau("loss", patience=0, min_delta=1.0),
        ts.callbacks.LearningRateScheduler(lambda epoch, rate: 0.9 * rate),
    ]
    history = model.fit(*data(), batch_size=3, epochs=5, verbose=0, validation_split=0.3, callbacks=every).history
    return history, logs.seen, model.module[0].weight.tolist()


def torch_scheduler(strategy: ts.Strategy) -> Any:
    model = compiled(strategy)
    scheduler = torch.optim.lr_scheduler.StepLR(model.optimizer, 1, gamma=0.5)
    return model.fit(*data(), batch_size=3, epochs=3, verbose=0, callbacks=[scheduler]).history


def stopped(strategy: ts.Strategy) -> Any:
    return compiled(strategy).fit(*data(), epochs=9, verbose=0, callbacks=[StopAfterTwoEpochs()]).history


def single_batches(strategy: ts.Strategy) -> Any:
    model, (x, y) = compiled(strategy), data()
    trained = [model.train_on_batch(x[:4], y[:4]), model.train_on_batch(x[4:5], y[4:5])]
    tested = model.test_on_batch(x, y)
    return trained, tested, model.predict_on_batch(x).tolist(), model.predict(x, batch_size=3, verbose=0).tolist()


def steps_of_an_epoch(strategy: ts.Strategy) -> Any:
    model, dataset = compiled(strategy), ts.data.Dataset.from_tensor_slices(data()).batch(3).repeat()
    history = model.fit(
        dataset,
        epochs=3,
        steps_per_epoch=3,
        validation_data=dataset,
        validation_steps=2,
        validation_freq=2,
        verbose=0,
    )
    return history.history, model.evaluate(dataset, steps=2, verbose=0)


def distributed_dataset(strategy: ts.Strategy) -> Any:
    dataset = ts.data.Dataset.from_tensor_slices(data()).batch(3)
    model, dataset = compiled(strategy), strategy.experimental_distribute_dataset(dataset)
    return model.fit(dataset, epochs=2, verbose=0).history, model.predict(dataset, verbose=0).tolist()


def generator(strategy: ts.Strategy) -> Any:
    x, y = data()
    batches = ((x[i : i + 3], y[i : i + 3]) for i in range(0, NUM_EXAMPLES, 3))
    return compiled(strategy).fit(batches, verbose=0).history


class Clipped(ts.Model):
    """Clips the gradients of the whole batch, which must have their right size by then."""

    def clip_gradients(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), max_norm=0.5)


def ignored_labels(strategy: ts.Strategy) -> Any:
    """Labels that are ignored in no part of a batch, in all of one replica's part, and in some of each."""
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    y[6:8] = y[[9, 11]] = -100
    weight = torch.arange(12.0) / 8
    numbers = []
    for settings, loss, is_weighted in [
        ({}, nn.CrossEntropyLoss(), False),
        ({"steps_per_execution": 2}, nn.CrossEntropyLoss(), True),
        ({"gradient_accumulation_steps": 2}, nn.CrossEntropyLoss(weight=torch.tensor([0.5, 1.0, 2.0])), False),
        ({"gradient_accumulation_steps": 2, "steps_per_execution": 4}, nn.CrossEntropyLoss(), True),
    ]:
        torch.manual_seed(1)
        with strategy.scope():
            model = Clipped(nn.Linear(3, 3))
            ts.regularize(model, "module.weight", ts.regularizers.L2(0.1))
        model.compile(functools.partial(torch.optim.SGD, lr=0.5), loss, metrics=["accuracy"], **settings)
        loader = DataLoader(TensorDataset(x, y, weight) if is_weighted else TensorDataset(x, y), 4)
        history = model.fit(loader, epochs=2, validation_data=loader, verbose=0).history
        numbers.append([history, model.module.weight.tolist()])
    return numbers


USES = {
    use.__name__: use
    for use in (
        own_steps,
        callbacks,
        torch_scheduler,
        stopped,
        single_batches,
        steps_of_an_epoch,
        distributed_dataset,
        generator,
        ignored_labels,
    )
}


def use_on(devices: Sequence[str] | str | None, name: str) -> Any:
    with default_dtype(torch.float64):
        torch.manual_seed(0)
        return USES[name](new_strategy(devices))
