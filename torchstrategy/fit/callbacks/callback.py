"""What a callback is: the hooks that training calls, and the state that a continued training needs; and ``History``.

Every process calls the same hooks with equal logs, so that all decide alike. What prints or writes asks ``is_chief``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from typing_extensions import override

__all__ = ["HOOKS", "Callback", "History", "is_chief"]

#: Every hook, in the order in which a training calls them first.
HOOKS = (
    "on_train_begin",
    "on_epoch_begin",
    "on_train_batch_begin",
    "on_batch_begin",
    "on_train_batch_end",
    "on_batch_end",
    "on_test_begin",
    "on_test_batch_begin",
    "on_test_batch_end",
    "on_test_end",
    "on_epoch_end",
    "on_train_end",
    "on_predict_begin",
    "on_predict_batch_begin",
    "on_predict_batch_end",
    "on_predict_end",
)

Logs = Any  # a mapping from names to numbers, or None where a hook is called without it


class Callback:
    """Base class of what ``fit``, ``evaluate`` and ``predict`` call at certain points.

    Override the hooks that you need; hooks that nobody overrides cost nothing. All are called outside ``run``, on every
    process alike, with equal logs: a decision such as ``self.model.stop_training = True`` must be the same everywhere,
    and what prints or writes files should do so if ``self.model.distribute_strategy.is_chief``.

    The logs of batches are running means over the epoch. Reading a value from them may wait for the device, so do not
    read it at every batch without need. With several processes it is the value of the last synchronisation, of which
    there is one every ``log_interval`` batches. The logs of epochs are a plain dict of floats, to which a callback may
    add values for those after it.

    Attributes:
        model: the model that is trained, evaluated or used for predictions.
        params: ``verbose``, ``epochs`` and ``steps``; the last is ``None`` where it is not known.
        log_interval: every how many batches this callback reads the logs in ``on_train_batch_end``; ``None`` means that
            it does not care how old they are.

    Example:
        >>> class PrintLoss(ts.callbacks.Callback):
        ...     def on_epoch_end(self, epoch, logs=None):
        ...         print(f"epoch {epoch}: {logs['loss']:.2f}")
        >>> model = ts.Model(torch.nn.Linear(1, 1, bias=False))
        >>> torch.nn.init.zeros_(model.module.weight).requires_grad
        True
        >>> model.compile("sgd", "mse")
        >>> history = model.fit(torch.ones(4, 1), torch.ones(4, 1), epochs=2, callbacks=[PrintLoss()], verbose=0)
        epoch 0: 1.00
        epoch 1: 0.96
    """

    log_interval: int | None = None

    #: Whether it is called after all others, as one that saves their states must be.
    runs_last: bool = False

    # On the class, so that a subclass whose constructor does not call this one's works.
    model: Any = None
    params: Any = None

    def __init__(self) -> None:
        self.model = None
        self.params = None

    def set_model(self, model: Any) -> None:
        """Take the model, before any hook.

        Args:
            model: the model.
        """
        self.model = model

    def set_params(self, params: Mapping[str, Any]) -> None:
        """Take what is known of the coming training, evaluation or prediction.

        Args:
            params: ``verbose``, ``epochs`` and ``steps``.
        """
        self.params = params

    def state_dict(self) -> dict[str, Any]:
        """Return what this callback needs to go on after an interruption as if there had been none.

        Returns:
            Numbers, strings, tensors, and lists and dicts of these.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take up what ``state_dict`` returned; it is called after ``on_train_begin``.

        Args:
            state: what ``state_dict`` returned.
        """

    def _release(self) -> None:
        """Give back what it holds open: called at the end of ``fit``, ``evaluate`` and ``predict``, failed ones too."""

    def on_train_begin(self, logs: Logs = None) -> None:
        """Called when ``fit`` begins."""

    def on_train_end(self, logs: Logs = None) -> None:
        """Called when ``fit`` ends, with the last epoch's logs."""

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        """Called before an epoch of ``fit``; a continued epoch is begun once more."""

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        """Called after an epoch of ``fit`` and its validation, whose values have names with ``val_``."""

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Called before a batch of ``fit``, or before several with ``steps_per_execution``."""
        self.on_batch_begin(batch, logs)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Called after a batch of ``fit``, or after several with ``steps_per_execution``; ``batch`` is the last one."""
        self.on_batch_end(batch, logs)

    def on_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Another name of ``on_train_batch_begin``."""

    def on_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Another name of ``on_train_batch_end``."""

    def on_test_begin(self, logs: Logs = None) -> None:
        """Called when ``evaluate`` or the validation of ``fit`` begins."""

    def on_test_end(self, logs: Logs = None) -> None:
        """Called when ``evaluate`` or the validation of ``fit`` ends."""

    def on_test_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Called before a batch of ``evaluate`` or of validation."""

    def on_test_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Called after a batch of ``evaluate`` or of validation."""

    def on_predict_begin(self, logs: Logs = None) -> None:
        """Called when ``predict`` begins."""

    def on_predict_end(self, logs: Logs = None) -> None:
        """Called when ``predict`` ends."""

    def on_predict_batch_begin(self, batch: int, logs: Logs = None) -> None:
        """Called before a batch of ``predict``."""

    def on_predict_batch_end(self, batch: int, logs: Logs = None) -> None:
        """Called after a batch of ``predict``, with its ``outputs`` in the logs."""


def is_chief(model: Any) -> bool:
    """Say whether this process prints and writes for a model's job."""
    return bool(getattr(getattr(model, "distribute_strategy", None), "is_chief", True))


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
