"""Torch's learning-rate schedulers as callbacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from typing_extensions import override

from torchstrategy.fit.callbacks.callback import Callback, Logs
from torchstrategy.fit.callbacks.monitor import read_monitored
from torchstrategy.fit.callbacks.rates import learning_rates, optimizer_of
from torchstrategy.replicas.mirrored import bodies

__all__ = ["TorchLRScheduler"]


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
        if self.interval == "step" and isinstance(self._scheduler, ReduceLROnPlateau):
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
        elif isinstance(self._scheduler, ReduceLROnPlateau):
            value = read_monitored(logs, self.monitor, "TorchLRScheduler")
            if value is not None:
                self._scheduler.step(value)
        else:
            self._scheduler.step()

    @override
    def state_dict(self) -> dict[str, Any]:
        if self._scheduler is None:
            return {}
        return {"scheduler": self._scheduler.state_dict(), "iterations": self._iterations}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
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
