"""The callback that ``fit`` returns."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from torchstrategy.fit.callbacks.callback import Callback, Logs

__all__ = ["History"]


class History(Callback):
    """Collects the logs of the epochs; ``fit`` makes one and returns it.

    Attributes:
        epoch: the numbers of the epochs, from 0.
        history: a list of values for each name in the logs.

    Example:
        >>> model = ts.Model(torch.nn.Linear(1, 1))
        >>> model.compile("sgd", "mse")
        >>> history = model.fit(torch.ones(4, 1), torch.ones(4, 1), epochs=3, verbose=0)
        >>> history.epoch, list(history.history), len(history.history["loss"])
        ([0, 1, 2], ['loss'], 3)
    """

    def __init__(self) -> None:
        super().__init__()
        self.epoch: list[int] = []
        self.history: dict[str, list[Any]] = {}

    @override
    def on_train_begin(self, logs: Logs = None) -> None:
        self.epoch = []

    @override
    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self.epoch.append(epoch)
        for name, value in (logs or {}).items():
            self.history.setdefault(name, []).append(value)

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"epoch": list(self.epoch), "history": {name: list(values) for name, values in self.history.items()}}

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch = list(state["epoch"])
        self.history = {name: list(values) for name, values in state["history"].items()}
