"""Callbacks that change the learning rate between epochs.

They set the optimizer's parameter groups outside ``run``; the replicas' copies take the values over at the next one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from torchstrategy.checkpoint.tracked import scheduler_name
from torchstrategy.fit.callbacks.callback import Callback, Logs, is_chief
from torchstrategy.fit.callbacks.progress import print_line
from torchstrategy.fit.callbacks.stopping import Goal, check_mode, find_goal, read_monitored
from torchstrategy.replicas.mirrored import bodies

__all__ = ["LearningRateScheduler", "ReduceLROnPlateau", "TorchLRScheduler", "learning_rates"]


class ReduceLROnPlateau(Callback):
    """Reduces the learning rate when a value has stopped improving.

    It adds the rate of the epoch to the logs as ``"learning_rate"``, that of the first parameter group.

    Args:
        monitor: the name of the value in the logs.
        factor: what the learning rate of each parameter group is multiplied by.
        patience: epochs without improvement after which it is.
        verbose: 1 prints a line when it is.
        mode: ``"min"`` or ``"max"``, what is better; ``"auto"`` tells by the metric and its name.
        min_delta: by how much a value must be better to count as an improvement.
        cooldown: epochs after a reduction in which no other one begins to be considered.
        min_lr: the least learning rate.

    Raises:
        ValueError: ``factor`` is not below 1, ``mode`` is none, or ``"auto"`` can't tell (when the training begins).

    Example:
        >>> model = ts.Model(torch.nn.Linear(1, 1))
        >>> model.compile("sgd", "mse")
        >>> reduce = ts.callbacks.ReduceLROnPlateau(monitor="loss", factor=0.5, patience=1, min_delta=100.0)
        >>> history = model.fit(torch.ones(4, 1), torch.ones(4, 1), epochs=3, callbacks=[reduce], verbose=0)
        >>> history.history["learning_rate"]
        [0.01, 0.01, 0.005]
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        factor: float = 0.1,
        patience: int = 10,
        verbose: int = 0,
        mode: str = "auto",
        min_delta: float = 1e-4,
        cooldown: int = 0,
        min_lr: float = 0.0,
    ) -> None:
        super().__init__()
        if not 0 <= factor < 1:
            raise ValueError(f"ReduceLROnPlateau(factor=...) must be from 0 to below 1. Received: {factor!r}")
        self.monitor = monitor
        self.factor = factor
        self.patience = patience
        self.verbose = verbose
        self.mode = check_mode(mode, "ReduceLROnPlateau")
        self.min_delta = min_delta
        self.cooldown = cooldown
        self.min_lr = min_lr
        self._goal = Goal(larger=False)
        self._reset()

    def _reset(self) -> None:
        self.best = self._goal.worst
        self.wait = self.cooldown_counter = 0

    def in_cooldown(self) -> bool:
        """Say whether a reduction is too recent for another one.

        Returns:
            Whether epochs without improvement are not counted now.
        """
        return self.cooldown_counter > 0

    @override
    def on_train_begin(self, logs: Logs = None) -> None:
        self._goal = find_goal(self.monitor, self.mode, self.model, "ReduceLROnPlateau", self.min_delta)
        optimizer_of(self)
        self._reset()

    @override
    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        logs = {} if logs is None else logs
        logs["learning_rate"] = learning_rates(optimizer_of(self))[0]
        current = read_monitored(logs, self.monitor, "ReduceLROnPlateau")
        if current is None:
            return
        if self.in_cooldown():
            self.cooldown_counter -= 1
            self.wait = 0
        if self._goal.is_better(current, self.best):
            self.best = current
            self.wait = 0
        elif not self.in_cooldown():
            self.wait += 1
            if self.wait >= self.patience:
                self._reduce(epoch)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "wait": self.wait, "cooldown_counter": self.cooldown_counter}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.best, self.wait, self.cooldown_counter = state["best"], state["wait"], state["cooldown_counter"]

    def _reduce(self, epoch: int) -> None:
        optimizer = optimizer_of(self)
        old = learning_rates(optimizer)
        new = [max(rate * self.factor, self.min_lr) if rate > self.min_lr else rate for rate in old]
        if new == old:
            return
        set_learning_rates(optimizer, new)
        self.cooldown_counter = self.cooldown
        self.wait = 0
        if self.verbose > 0 and is_chief(self.model):
            print_line(f"Epoch {epoch + 1}: ReduceLROnPlateau sets the learning rate to {_shown(new)}.")


class LearningRateScheduler(Callback):
    """Sets the learning rate at the beginning of each epoch.

    It adds the rate of the epoch to the logs as ``"learning_rate"``, that of the first parameter group.

    Args:
        schedule: takes the epoch, from 0, and the learning rate, and returns the new learning rate. It is called for
            each parameter group, and must return the same on every process. It may also take the epoch only.
        verbose: 1 prints a line each time.

    Raises:
        TypeError: ``schedule`` is no function.
        ValueError: it returned no number (in the training).

    Example:
        >>> model = ts.Model(torch.nn.Linear(1, 1))
        >>> model.compile("sgd", "mse")
        >>> halve = ts.callbacks.LearningRateScheduler(lambda epoch, lr: lr if epoch < 1 else lr * 0.5)
        >>> history = model.fit(torch.ones(4, 1), torch.ones(4, 1), epochs=3, callbacks=[halve], verbose=0)
        >>> history.history["learning_rate"]
        [0.01, 0.005, 0.0025]
    """

    def __init__(self, schedule: Callable[..., float], verbose: int = 0) -> None:
        super().__init__()
        if not callable(schedule):
            raise TypeError(
                "LearningRateScheduler(schedule=...) must be a function of (epoch, lr) that returns the learning rate. "
                f"Received: {schedule!r}. A torch scheduler can be passed to `fit` as a callback itself."
            )
        self.schedule = schedule
        self.verbose = verbose
        self._takes_rate = _takes_two(schedule)
        self._last_epoch: int | None = None

    @override
    def on_train_begin(self, logs: Logs = None) -> None:
        optimizer_of(self)
        self._last_epoch = None

    @override
    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        if epoch == self._last_epoch:
            return  # an interrupted epoch goes on, and is begun once more
        self._last_epoch = epoch
        optimizer = optimizer_of(self)
        rates = [self._new_rate(epoch, rate) for rate in learning_rates(optimizer)]
        set_learning_rates(optimizer, rates)
        if self.verbose > 0 and is_chief(self.model):
            print_line(f"Epoch {epoch + 1}: LearningRateScheduler sets the learning rate to {_shown(rates)}.")

    @override
    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if logs is not None:
            logs["learning_rate"] = learning_rates(optimizer_of(self))[0]

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self._last_epoch}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._last_epoch = state["last_epoch"]

    def _new_rate(self, epoch: int, rate: float) -> float:
        new = self.schedule(epoch, rate) if self._takes_rate else self.schedule(epoch)
        if not _is_number(new):
            raise ValueError(
                f"The schedule of LearningRateScheduler must return the learning rate, a number. Received: {new!r}"
            )
        return float(new)


def optimizer_of(callback: Callback) -> Optimizer:
    """Return the optimizer of a callback's model.

    Raises:
        RuntimeError: it has none.
    """
    optimizer = getattr(callback.model, "optimizer", None)
    if optimizer is None:
        raise RuntimeError(
            f"{type(callback).__name__} sets the learning rate, but the model was compiled without an optimizer. Pass "
            "one to compile(optimizer=...)."
        )
    return optimizer  # type: ignore[no-any-return]


def learning_rates(optimizer: Optimizer) -> list[float]:
    """Return the learning rate of each parameter group."""
    return [float(group["lr"]) for group in optimizer.param_groups]


def set_learning_rates(optimizer: Optimizer, rates: list[float]) -> None:
    """Set the learning rate of each parameter group; a rate that is a tensor stays the same one."""
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def _takes_two(schedule: Callable[..., float]) -> bool:
    try:
        inspect.signature(schedule).bind(0, 0.0)
    except ValueError:  # unknown
        return True
    except TypeError:
        return False
    return True


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _shown(rates: list[float]) -> str:
    return f"{rates[0]:.6g}" if len(set(rates)) == 1 else ", ".join(f"{rate:.6g}" for rate in rates)


class TorchLRScheduler(Callback):
    """Steps a torch learning-rate scheduler in ``fit``.

    A scheduler among the callbacks of ``fit`` is taken as ``TorchLRScheduler(scheduler)``. The rate of the epoch is
    added to the logs as ``"learning_rate"``, that of the first parameter group.

    Args:
        scheduler_or_factory: a scheduler of the model's optimizer; or what makes one of an optimizer, such as
            ``functools.partial(torch.optim.lr_scheduler.StepLR, step_size=10)``, for models that are compiled with an
            optimizer's name.
        interval: ``"epoch"`` steps it after each epoch, ``"step"`` after each optimizer step. With
            ``steps_per_execution`` the latter's rates are set once for each execution.
        monitor: the name of the value in the logs that ``torch.optim.lr_scheduler.ReduceLROnPlateau`` is given.

    Raises:
        TypeError: the first argument is neither.
        ValueError: ``interval`` is none of the two, or does not go with the scheduler; or the scheduler is of another
            optimizer than the model's (when the training begins).

    Example:
        >>> model = ts.Model(torch.nn.Linear(1, 1))
        >>> model.compile("sgd", "mse")
        >>> from torch.optim.lr_scheduler import ExponentialLR
        >>> decay = ts.callbacks.TorchLRScheduler(lambda optimizer: ExponentialLR(optimizer, gamma=0.5))
        >>> history = model.fit(torch.ones(4, 1), torch.ones(4, 1), epochs=3, callbacks=[decay], verbose=0)
        >>> history.history["learning_rate"]
        [0.01, 0.005, 0.0025]
    """

    def __init__(
        self,
        scheduler_or_factory: LRScheduler | Callable[[Optimizer], LRScheduler],
        interval: str = "epoch",
        monitor: str = "val_loss",
    ) -> None:
        super().__init__()
        if not isinstance(scheduler_or_factory, LRScheduler) and not callable(scheduler_or_factory):
            raise TypeError(
                "TorchLRScheduler takes a torch.optim.lr_scheduler.LRScheduler, or a function of the optimizer that "
                f"makes one. Received: {scheduler_or_factory!r}"
            )
        if interval not in ("epoch", "step"):
            raise ValueError(f"TorchLRScheduler(interval=...) must be 'epoch' or 'step'. Received: {interval!r}")
        self.interval = interval
        self.monitor = monitor
        self._scheduler: Any = None
        self._factory: Callable[[Optimizer], LRScheduler] | None = None
        if isinstance(scheduler_or_factory, LRScheduler):
            self._scheduler = scheduler_or_factory
        else:
            self._factory = scheduler_or_factory
        self._iterations = 0

    @property
    def scheduler(self) -> Any:
        """The torch scheduler; ``None`` before the training that makes it."""
        return self._scheduler

    @override
    def on_train_begin(self, logs: Logs = None) -> None:
        optimizer = optimizer_of(self)
        is_ours = self._scheduler is not None and bodies(self._scheduler.optimizer)[0] is bodies(optimizer)[0]
        if not is_ours:
            if self._factory is None:
                raise ValueError(
                    f"The {type(self._scheduler).__name__} among the callbacks is of another optimizer than the "
                    "model's. Make it of the optimizer that is passed to compile(optimizer=...), or pass "
                    "ts.callbacks.TorchLRScheduler with a function that makes it, such as "
                    "functools.partial(torch.optim.lr_scheduler.StepLR, step_size=10)."
                )
            self._scheduler = self._make(optimizer)
        if self.interval == "step" and isinstance(self._scheduler, lr_scheduler.ReduceLROnPlateau):
            raise ValueError("TorchLRScheduler(interval='step') does not go with ReduceLROnPlateau. Use 'epoch'.")
        self._iterations = self.model.iterations

    @override
    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if self.interval == "step":
            self._catch_up()

    @override
    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if logs is not None:
            logs["learning_rate"] = learning_rates(optimizer_of(self))[0]
        if self.interval == "step":
            self._catch_up()
        elif isinstance(self._scheduler, lr_scheduler.ReduceLROnPlateau):
            value = read_monitored(logs, self.monitor, "TorchLRScheduler")
            if value is not None:
                self._scheduler.step(value)
        else:
            self._scheduler.step()

    @override
    def state_dict(self) -> dict[str, Any]:
        if self._scheduler is None:
            return {}
        name = scheduler_name(self._scheduler)
        return {"class": name, "scheduler": self._scheduler.state_dict(), "iterations": self._iterations}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        name = scheduler_name(self._scheduler)
        if state.get("class", name) != name:
            raise ValueError(
                f"The interrupted training had a scheduler {state['class']}, this one has a {name}. Use the same, or "
                "start anew with another directory."
            )
        self._scheduler.load_state_dict(state["scheduler"])
        self._iterations = state["iterations"]

    def _catch_up(self) -> None:
        for _ in range(self.model.iterations - self._iterations):
            self._scheduler.step()
        self._iterations = self.model.iterations

    def _make(self, optimizer: Optimizer) -> LRScheduler:
        scheduler = self._factory(optimizer) if self._factory is not None else None
        if not isinstance(scheduler, LRScheduler):
            raise TypeError(
                "The function given to TorchLRScheduler must return a torch.optim.lr_scheduler.LRScheduler of the "
                f"optimizer that it gets. Received: {scheduler!r}"
            )
        return scheduler
