"""The inner loop of a model's methods: batches run on the replicas, and the logs that callbacks get between them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any

import numpy as np
import torch

from torchstrategy.base import tree
from torchstrategy.base.devices import kind_of
from torchstrategy.base.labels import label
from torchstrategy.base.values import mark_windows
from torchstrategy.data.micro_batches import micro_batches
from torchstrategy.fit.arguments import check_context
from torchstrategy.fit.batch_parts import unpack_x_y_sample_weight
from torchstrategy.fit.callbacks.callback_list import CallbackList
from torchstrategy.fit.calling import initialise_lazy_layers
from torchstrategy.fit.steps import StepState, Windows, run_windows
from torchstrategy.fit.trainer import trainer_of
from torchstrategy.fit.tuning import tune_for_fit
from torchstrategy.replicas import functions
from torchstrategy.xla import runtime

__all__ = ["BatchLogs", "StepLoop"]


class BatchLogs(MutableMapping[str, Any]):
    """What callbacks get after a batch: the loss and the metrics of the epoch so far, computed when they are read.

    Args:
        read: returns the numbers; called once, when they are first needed.
    """

    def __init__(self, read: Callable[[], dict[str, Any]]) -> None:
        self._read = read
        self._values: dict[str, Any] | None = None

    def expire(self) -> None:
        """Say that the batch is over: what was not read until now would be the numbers of a later one."""
        if self._values is None:
            self._read = _refuse

    @property
    def _data(self) -> dict[str, Any]:
        if self._values is None:
            self._values = dict(self._read())
        return self._values

    def copy(self) -> dict[str, Any]:
        """Return the numbers as a plain dict."""
        return dict(self._data)

    def __getitem__(self, name: str) -> Any:
        return self._data[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._data[name] = value

    def __delitem__(self, name: str) -> None:
        del self._data[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)

    def __repr__(self) -> str:
        return repr(self._data)


def _refuse() -> dict[str, Any]:
    raise RuntimeError(
        "The logs of a batch are computed when they are read, and these were kept unread until after the hook that got "
        "them. Read them in the hook, such as logs['loss'], or keep logs.copy()."
    )


#: Batches between two synchronisations of logs between processes, unless a callback wants them more often.
LOG_INTERVAL = 100
_METHODS = {"train": "fit", "test": "evaluate", "predict": "predict"}


class StepLoop:
    """Runs the batches of one call of ``fit``, ``evaluate`` or ``predict``.

    Args:
        model: the model.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.trainer = trainer_of(model)
        self.strategy = self.trainer.strategy
        check_context(self.strategy, "fit, evaluate and predict")
        self._named: dict[str, Any] = {}
        self._prepare: Any = None
        #: Where the program has put a model, if that is not where the default strategy leaves data.
        self._device: torch.device | None = self.trainer.device_of(model)
        if self._device in self.strategy.placement.devices or self._device.type == "cpu":
            self._device = None
        self._is_traced = kind_of(self.strategy.placement.devices[0]).is_traced
        self._is_first = True
        self._log_interval = LOG_INTERVAL
        self._num_executions = {"train": 0, "test": 0}
        self._synchronised: dict[str, Any] = {}

    def begin(self, mode: str) -> None:
        """Begin an epoch, an evaluation or a prediction."""
        self._open(mode)
        if mode != "predict":
            self.trainer.reset_metrics(self._named)

    def run_steps(
        self,
        iterator: Iterator[Any],
        mode: str,
        callbacks: CallbackList,
        limit: int | None = None,
        first: int = 0,
        outputs: list[Any] | None = None,
    ) -> int:
        """Run batches until the data or ``limit`` is reached, or a callback stops the training.

        Args:
            iterator: gives batches.
            mode: ``"train"``, ``"test"`` or ``"predict"``.
            callbacks: called before and after each execution.
            limit: number of the batch to stop before; ``None`` means the end of the data.
            first: number of the first batch.
            outputs: receives the predictions of each execution, as arrays.

        Returns:
            The number of the batch after the last one.
        """
        begin, end = getattr(callbacks, f"on_{mode}_batch_begin"), getattr(callbacks, f"on_{mode}_batch_end")
        position = self.trainer.position
        done = first
        for num_executions in itertools.count():
            windows = self._take(iterator, mode, None if limit is None else limit - done)
            if not windows:
                break
            begin(done)
            results = self._execute(windows, mode)
            done += sum(map(len, windows))
            if mode == "train":
                position.step = done
                position.iterations += len(windows)
            if outputs is None:
                logs = self._batch_logs(mode, is_first=num_executions == 0)
                end(done - 1, logs)
                logs.expire()
            else:
                arrays = [self._to_arrays(result) for result in results]
                outputs += arrays
                end(done - 1, {"outputs": arrays[-1]})
            if self._stops_now(mode):
                break
        return done

    def read_logs(self) -> dict[str, Any]:
        """Return the numbers since the metrics were reset, over all replicas."""
        return self.trainer.read_logs(self._named)

    def _open(self, mode: str) -> None:
        self._is_first = True
        self._synchronised = {}
        self.trainer.layer_losses.begin()
        if mode != "predict":
            self._named = self.model._named_metrics()

    def _take(self, iterator: Iterator[Any], mode: str, limit: int | None) -> list[list[Any]]:
        """Read the batches of one execution."""
        trainer = self.trainer
        size = trainer.accumulation if mode == "train" else 1
        windows = []
        for _ in range(math.ceil(trainer.steps_per_execution / size)):
            wanted = size if limit is None else min(size, limit)
            with label("input"):
                window = list(itertools.islice(iterator, wanted))
            if mode == "train":
                trainer.position.is_at_end = len(window) < wanted
            if not window:
                break
            windows.append(window)
            if limit is not None:
                limit -= len(window)
        return windows

    def _execute(self, windows: Windows, mode: str) -> list[Any]:
        """Run one execution; return what its steps returned, of training and tests the last one only."""
        trainer, model = self.trainer, self.model
        last, num_parts, limit = windows[-1][-1], 1, trainer.max_replica_batch_size
        if limit is not None and mode != "predict":
            num_local = self.strategy.placement.num_local
            cut = [[micro_batches(batch, num_local, limit) for batch in window] for window in windows]
            windows, num_parts = [list(itertools.chain.from_iterable(parts)) for parts in cut], len(cut[-1][-1])
        mark_windows(windows)
        if self._is_first:
            trainer.note_example(windows[0][0])
            initialise_lazy_layers(model, self.strategy, windows[0][0])
            if mode == "train" and trainer.arguments["tune"] and not trainer.is_tuned:
                trainer.is_tuned = True
                tune_for_fit(model, trainer.optimizer)
        run: Callable[..., Any] = self.strategy.run
        if trainer.jit_compile and not self._is_traced:  # which compiles all of an execution in any case
            run = functions.function(run, jit_compile=True)
        # Not arguments, in which run would look for values that differ between replicas.
        work = functools.partial(
            run_windows,
            step=_step_of(model, mode),
            prepare=self._prepare if mode == "train" else None,
            num_parts=num_parts,
            device=self._device,
            divide=self._divide(windows, mode),
            state=StepState(
                method=_METHODS[mode],
                autocast=trainer.autocast,
                is_checked=self._is_first,
                labels_on_host=self._labels(windows[0][0]) if self._is_first and mode != "predict" else (),
            ),
        )
        fn = runtime.named(work, f"{type(model).__name__}.{mode}_step")
        is_first, self._is_first = self._is_first, False
        with runtime.one_graph():
            if mode == "predict":  # each step's outputs are needed
                return [run(fn, args=([window],)) for window in windows]
            outputs = run(fn, args=(windows,))
        trainer.note_outputs(outputs, last)
        if is_first:
            self._named = model._named_metrics()  # the first predictions tell how many outputs there are
            if mode == "train":
                trainer.position.shown = list(trainer.shown_metrics(self._named))
        return []

    def _labels(self, batch: Any) -> list[Any]:
        """Return the replicas' labels on the host, where steps can't look at theirs."""
        if not self._is_traced or not self.model._takes_labels_as_given:
            return []
        return [unpack_x_y_sample_weight(own)[1] for own in self.strategy.experimental_local_results(batch)]

    def _divide(
        self, windows: Windows, mode: str
    ) -> Callable[[int, list[Any]], contextlib.AbstractContextManager[None]] | None:
        """Return what tells the losses of a window their divisors, if they need not find them by themselves."""
        loss, strategy = self.trainer.loss, self.strategy
        if loss is None or mode == "predict":
            return None
        divisors, devices = loss.divisors, strategy.placement.devices
        is_window = any(len(window) > 1 for window in windows)
        if not self._is_first and self.model._takes_labels_as_given:  # the first batch's are looked at in its step
            if strategy.workers is not None:
                # At the start of a step all ranks have just met. In its middle they would wait for each other again.
                if is_window or (len(devices) == 1 and devices[0].type == "cpu"):
                    return lambda _, batches: divisors.over_replicas(batches)
            elif len(devices) > 1 and (mode == "test" or self._prepare is None):
                sums = divisors.of_windows(windows, strategy)
                if any(sum_ is not None for sum_ in sums):
                    return lambda number, _: divisors.using(sums[number])
        # Of one batch, the loss finds the divisor itself.
        alone = contextlib.nullcontext()
        return (lambda _, own: divisors.over_replicas(own) if len(own) > 1 else alone) if is_window else None

    def _to_arrays(self, outputs: Any) -> Any:
        """Return predictions over all replicas as arrays, in the order of the data."""
        strategy = self.strategy
        if strategy.workers is not None:
            outputs = strategy.gather(outputs, axis=0)
        return tree.map_structure(
            lambda *leaves: np.concatenate([_to_array(leaf) for leaf in leaves]),
            list(strategy.experimental_local_results(outputs)) if strategy.workers is None else [outputs],
        )

    def _batch_logs(self, mode: str, *, is_first: bool) -> BatchLogs:
        """Return the logs after an execution: live ones, or with several processes the last synchronised ones.

        Args:
            mode: of the loop.
            is_first: whether it was the first execution of an epoch or evaluation.
        """
        if self.strategy.workers is None:
            return BatchLogs(self.read_logs)
        self._num_executions[mode] += 1
        if is_first or self._num_executions[mode] % (self._log_interval if mode == "train" else LOG_INTERVAL) == 0:
            self._synchronised = self.read_logs()
        return BatchLogs(lambda: self._synchronised)

    def _stops_now(self, mode: str) -> bool:
        """Say whether a callback has stopped the training; between processes that is agreed at the end of the epoch."""
        return mode == "train" and self.trainer.stop_training and self.strategy.workers is None

    def _agree_on_log_interval(self, callbacks: CallbackList) -> None:
        interval = callbacks.log_interval or LOG_INTERVAL
        if self.strategy.workers is not None:
            interval = int(self.strategy.gather(torch.tensor([interval]), axis=0).min())
        self._log_interval = max(1, interval // self.trainer.steps_per_execution)


def _step_of(model: Any, mode: str) -> Callable[[Any], Any]:
    """Return the step; the model's method is looked up inside ``run``, where it is the replica's."""
    name = f"{mode}_step"
    return lambda data: getattr(model, name)(data)


def _to_array(value: Any) -> np.ndarray[Any, Any]:
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        raise ValueError(
            "predict: a prediction must be a tensor [batch, ...] with one entry for each example. Received: "
            f"{tuple(value.shape) if isinstance(value, torch.Tensor) else value!r}"
        )
    value = value.detach().cpu()
    array: np.ndarray[Any, Any] = (value.float() if value.dtype is torch.bfloat16 else value).numpy()
    return array
