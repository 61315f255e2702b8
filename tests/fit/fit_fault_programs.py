"""Programs for processes in which one rank does, or meets, what the others don't."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import torchstrategy as ts
from torchstrategy.testing.faults import Fault


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(20, 4, generator=generator), torch.randint(0, 3, (20,), generator=generator)


class Struck(ts.Model):
    """A model that a fault strikes inside of a step."""

    def __init__(self, fault: Fault | None = None, rank: int = 0) -> None:
        super().__init__(nn.Linear(4, 3))
        self.fault, self.rank, self.num_steps = fault, rank, 0

    def train_step(self, data: Any) -> Any:
        if self.fault is not None:
            self.fault.strike(self.rank, self.num_steps)
        self.num_steps += 1
        return super().train_step(data)


class Strike(ts.callbacks.Callback):
    """Lets a fault strike after a batch."""

    def __init__(self, fault: Fault, rank: int) -> None:
        super().__init__()
        self.fault, self.rank = fault, rank

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.fault.strike(self.rank, batch)


def made(rank: int = 0, fault: Fault | None = None, **options: Any) -> ts.Model:
    torch.manual_seed(0)
    strategy = ts.MirroredStrategy()
    with strategy.scope():
        model = Struck(fault, rank)
    model.compile(**{"optimizer": "sgd", "loss": nn.CrossEntropyLoss(), "metrics": ["accuracy"], **options})
    return model


def rank_of(model: ts.Model) -> int:
    workers = model.distribute_strategy.workers
    return 0 if workers is None else workers.rank


def strikes(fault: Fault, where: str) -> None:
    """Train while a fault strikes in ``"step"`` or ``"callback"``."""
    model = made()
    rank = rank_of(model)
    callbacks = []
    if where == "step":
        model.fault, model.rank = fault, rank
    else:
        callbacks = [Strike(fault, rank)]
    model.fit(*data(), batch_size=4, epochs=3, verbose=0, callbacks=callbacks)


def trains_unlike(name: str) -> Any:
    """Train with one argument that depends on the rank; return the history."""
    probe = ts.MirroredStrategy()
    rank = 0 if probe.workers is None else probe.workers.rank
    options: dict[str, Any] = {
        "loss": {"loss": nn.CrossEntropyLoss(label_smoothing=[0.0, 0.1][rank])},
        "executions": {"steps_per_execution": [1, 2][rank]},
    }.get(name, {})
    x, y = data()
    arguments: dict[str, Any] = {
        "epochs": {"epochs": [1, 2][rank]},
        "validation": {"validation_data": [(x, y), None][rank]},
        "checkpoints": {"callbacks": [[ts.callbacks.ModelCheckpoint("never_written_{epoch}.pt")], []][rank]},
        "stopping": {"callbacks": [[ts.callbacks.EarlyStopping("loss", restore_best_weights=True)], []][rank]},
    }.get(name, {})
    if name == "values":
        x = x + rank
    elif name == "length":
        x, y = x[: 20 - rank], y[: 20 - rank]
    model = made(**options)
    return model.fit(x, y, **{"batch_size": 4, "epochs": 1, "verbose": 0, **arguments}).history


def reads_logs_on_one_rank() -> Any:
    """Read logs on the chief only, after batches and epochs; return the history and what was read."""
    model, read = made(), []
    callback = ts.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: read.append(dict(logs)),
        on_epoch_end=lambda epoch, logs: read.append(dict(logs)),
    )
    callbacks = [callback, ts.callbacks.History()] if rank_of(model) == 0 else []
    history = model.fit(*data(), batch_size=4, epochs=2, verbose=0, callbacks=callbacks)
    return history.history, len(read)


def evaluates_on_one_rank(method: str, folder: str) -> None:
    """Call a method, in which processes meet, from a callback of the chief."""
    model = made()
    x, y = data()
    calls = {
        "evaluate": lambda: model.evaluate(x, y, verbose=0),
        "predict": lambda: model.predict(x, verbose=0),
        "compute": lambda: model.metrics[1].compute(),
        "save_weights": lambda: model.save_weights(f"{folder}/weights.pt"),
    }
    callbacks = [ts.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: calls[method]())]
    model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=callbacks if rank_of(model) == 0 else None)


def stops_on_one_rank(rank: int) -> Any:
    """Let one rank ask for an end; return how many epochs there were."""
    model = made()

    def stop(batch: int, logs: Any) -> None:
        if rank_of(model) == rank and batch == 1:
            model.stop_training = True

    callbacks = [ts.callbacks.LambdaCallback(on_train_batch_end=stop)]
    return len(model.fit(*data(), batch_size=4, epochs=4, verbose=0, callbacks=callbacks).history["loss"])


def goes_on_after_an_error() -> Any:
    """Let a callback fail on all ranks, catch that, and train again; return the losses."""
    model = made()
    try:
        fault = Fault("error", rank_of(model), 2)
        model.fit(*data(), batch_size=4, verbose=0, callbacks=[Strike(fault, fault.rank)])
    except OSError:
        return model.fit(*data(), batch_size=4, epochs=2, verbose=0, shuffle=False).history["loss"]
    raise AssertionError("the callback's error was lost")


def catches_an_error_on_one_rank() -> str:
    """Let a callback fail on rank 0, which catches that and lives on; return what each rank caught."""
    model = made()
    callbacks = [Strike(Fault("error", 0, 1), rank_of(model))]
    try:
        model.fit(*data(), batch_size=4, epochs=2, verbose=0, callbacks=callbacks)
    except (OSError, ts.errors.ReplicaFailedError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("the callback's error was lost")


def has_nan() -> Any:
    """Train on data with one nan, in rank 1's share; return the numbers of epochs with and without a callback."""
    x, y = data()
    x[3] = float("nan")
    lengths = []
    for callbacks in ([], [ts.callbacks.TerminateOnNaN()]):
        history = made().fit(x, y, batch_size=4, epochs=3, shuffle=False, verbose=0, callbacks=callbacks).history
        lengths.append(len(history["loss"]))
    return lengths


class Unloadable(nn.Linear):
    """Takes up no weights on rank 1."""

    def get_extra_state(self) -> int:
        return 0

    def set_extra_state(self, state: int) -> None:
        if ts.get_strategy().workers.rank == 1:
            raise ValueError("no weights for me")


def loads_weights_where_one_rank_cannot(path: str) -> list[str]:
    """Return what each rank says of that, and of a sum after it."""
    strategy, messages = ts.MirroredStrategy(), []
    with strategy.scope():
        model = ts.Model(Unloadable(4, 3))
        model.save_weights(path)
        try:
            model.load_weights(path)
        except ValueError as error:
            messages.append(str(error))
    try:
        strategy.reduce("SUM", torch.ones(()))
    except ts.errors.ReplicaFailedError as error:
        messages.append(str(error))
    return messages
