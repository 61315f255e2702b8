"""``fit``, ``evaluate`` and ``predict`` of a model on parameter servers: steps are scheduled on the workers.

The coordinator reads the data and sends each step its batches, so every example counts once, whichever worker gets it;
the data of a ``DatasetCreator`` is read by the workers. Metrics come back with the results.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from typing_extensions import override

from torchstrategy.base.log import logger
from torchstrategy.base.values import PerWorkerValues
from torchstrategy.cluster_resolver.detect import training_nothing
from torchstrategy.fit.arguments import DataArguments, named_arguments
from torchstrategy.fit.callbacks.callback_list import CallbackList
from torchstrategy.fit.calling import Evaluating
from torchstrategy.fit.cluster_steps import (
    Coordinator,
    ScheduledSteps,
    WorkerSteps,
    forget_worker_steps,
    named_outputs,
    worker_steps,
)
from torchstrategy.fit.inputs import Batches, DatasetCreator, make_batches
from torchstrategy.fit.loop import Loop
from torchstrategy.strategies.one_device import OneDeviceStrategy

__all__ = ["ClusterLoop"]

#: The compiled metrics that know the model's outputs.
_built: weakref.WeakSet[Any] = weakref.WeakSet()
_HALVES = ("fp16", "float16", "mixed_float16", torch.float16)


class ClusterLoop(Loop):
    """One call of ``fit``, ``evaluate`` or ``predict`` of a model on parameter servers.

    Args:
        model: the model, made in the scope of a ``ParameterServerStrategy``.
    """

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._coordinator: Coordinator = self.strategy._coordinator_class()(self.strategy)
        self._scheduled = 0  # batches of this epoch
        self._is_at_end = False
        self._on_workers: Any = None  # the datasets that are gone through, if the workers have some of their own
        self._checks = False  # whether a step is under way that looks at the data closely, and raises the best errors

    @override
    @staticmethod
    def check(arguments: Mapping[str, Any]) -> None:
        for name, is_possible, why in (
            (
                "gradient_accumulation_steps",
                arguments["gradient_accumulation_steps"] in (None, 0, 1),
                "the servers update with each step's gradients as they come. Use larger batches",
            ),
            (
                "jit_compile",
                arguments["jit_compile"] is not True,
                "each worker would compile the model, and again when the program changes it. Leave it out",
            ),
            (
                "amp",
                arguments["amp"] not in _HALVES,
                "the loss's scale would be another one on each worker. Use 'bf16'",
            ),
        ):
            if not is_possible:
                raise ValueError(
                    f"compile({name}={arguments[name]!r}) is not possible for a model on parameter servers: {why}."
                )

    @override
    def make_batches(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        batch_size: int | None = None,
        shuffle: bool = False,
        method: str,
        steps: int | None = None,
        names: DataArguments | None = None,
    ) -> Batches:
        if isinstance(x, PerWorkerValues):
            raise TypeError(
                f"{method}(x=...) is a {type(x).__name__}. Pass the function that makes each worker's dataset, as "
                "ts.utils.DatasetCreator(dataset_fn)."
            )
        if not isinstance(x, DatasetCreator):
            with training_nothing():
                reader = OneDeviceStrategy("cpu:0")  # the coordinator reads all of the data; workers get whole batches
            settings: dict[str, Any] = {"batch_size": batch_size, "shuffle": shuffle, "steps": steps}
            return make_batches(reader, x, y, sample_weight, **settings, method=method, names=names)
        names = named_arguments(method) if names is None else names
        for value, name in ((y, names.y), (sample_weight, names.sample_weight), (batch_size, names.batch_size)):
            if value is not None:
                raise ValueError(
                    f"{name} is for arrays. {names.x} is a DatasetCreator, whose function's batches hold everything: "
                    "leave it out."
                )
        if steps is None:
            raise ValueError(
                f"{names.x} is a DatasetCreator, so on parameter servers the number of steps is needed: each worker "
                "has a dataset of its own, which gives batches as long as there are steps. Pass steps_per_epoch= to "
                "fit and validation_steps= for its validation_data; evaluate and predict have steps=."
            )
        make = functools.partial(_distributed, self.strategy, x.dataset_fn, x.input_options)
        dataset: Any = _WorkerBatches(self._coordinator.create_per_worker_dataset(make))
        return Batches(dataset, None, None, names)

    @override
    def _iterate(self, data: Batches) -> Iterator[Any]:
        if not isinstance(data.dataset, _WorkerBatches):
            return super()._iterate(data)
        self._on_workers = data.dataset.per_worker
        return iter(data.dataset)

    @override
    def begin(self, mode: str) -> None:
        self._coordinator.join()  # what the program has scheduled may count in the same metrics
        super().begin(mode)
        if isinstance(self.trainer.dataset, _WorkerBatches):
            self.trainer.dataset = None  # it has no position that could be saved

    @override
    def run_steps(
        self,
        iterator: Iterator[Any],
        mode: str,
        callbacks: CallbackList,
        limit: int | None = None,
        first: int = 0,
        outputs: list[Any] | None = None,
    ) -> int:
        end = getattr(callbacks, f"on_{mode}_batch_end")
        saves = _saves_after(callbacks) if mode == "train" else _never
        steps = ScheduledSteps(self._coordinator, is_training=mode == "train")
        position = self.trainer.position
        iterations, done = position.iterations - first, first
        self._scheduled, self._is_at_end = first, False
        executions = self._executions(iterator, mode, callbacks, limit)
        for num_batches, result in steps.results(executions, lambda: self._checks or saves(self._scheduled - 1)):
            is_first, self._checks = self._checks, False
            done += num_batches
            if mode == "train":
                position.step = done
                if not self._is_at_end and saves(done - 1):
                    steps.wait()  # if the program got a signal since there was more scheduled
                    position.step = self._scheduled
                position.iterations = iterations + position.step
            if outputs is None:
                self.trainer.note_outputs(named_outputs(result, self._named), None)
                if is_first and mode == "train":
                    position.shown = list(self.trainer.shown_metrics(self._named))
                end(done - 1, self._batch_logs(mode, is_first=is_first))
            else:
                arrays = [self._to_arrays(output) for output in result]
                outputs += arrays
                end(done - 1, {"outputs": arrays[-1]})
        self._coordinator.join()
        return done

    @override
    def read_logs(self) -> dict[str, Any]:
        with self._coordinator.strategy.shipper.merging:  # results of other steps may come in meanwhile
            return super().read_logs()

    def _executions(
        self, iterator: Iterator[Any], mode: str, callbacks: CallbackList, limit: int | None
    ) -> Iterator[tuple[int, Any, tuple[Any, ...]]]:
        """Yield for each execution its number of batches, the function and its arguments."""
        begin = getattr(callbacks, f"on_{mode}_batch_begin")
        run: WorkerSteps | None = None
        while run is None or not self._stops_now(mode):
            windows = self._take(iterator, mode, None if limit is None else limit - self._scheduled)
            if not windows:
                # The data begins anew from here, so what would save now waits for the end of the epoch.
                self._is_at_end = True
                return
            if run is None:
                run = self._function(mode, windows[0][0])
            begin(self._scheduled)
            num_batches = sum(map(len, windows))
            self._scheduled += num_batches
            self._checks, self._is_first = self._is_first, False
            yield num_batches, run, (mode, windows, self._checks)

    def _function(self, mode: str, batch: Any) -> WorkerSteps:
        """Return what workers call, given the first batch."""
        if self._is_first and not isinstance(batch, PerWorkerValues):
            self.trainer.note_example(batch)
        if mode != "predict":
            self._build(batch)
        return worker_steps(self.model, self._prepare if mode == "train" else None)

    def _build(self, batch: Any) -> None:
        """Make what the compiled losses and metrics lack until the model's outputs are known, before workers get them.

        A worker computes the outputs. If it can't, the first step fails likewise, or does not need them.
        """
        trainer = self.trainer
        if trainer.metrics is None or trainer.metrics in _built:
            return
        source = iter(self._on_workers) if isinstance(batch, PerWorkerValues) else batch  # leaves the iterator alone
        try:
            with Evaluating(self.model):
                outputs = self._coordinator.schedule(WorkerSteps(self.model), ("outputs", [[source]], False))
                y, y_pred = outputs.get()
            with self.strategy.scope():
                if trainer.loss is not None:
                    trainer.loss.build(y_pred)
                trainer.metrics.build(y, y_pred)
        except Exception as error:  # noqa: BLE001 - whatever the model raises
            logger.debug("The model's outputs are not known before the first step: %r", error)
            with contextlib.suppress(Exception):
                self._coordinator.join()
            return
        _built.add(trainer.metrics)
        forget_worker_steps(self.model)  # a prediction may have been made before
        self._named = self.model._named_metrics()


class _WorkerBatches:
    """Datasets on the workers. A batch is whichever a worker's iterator gives next."""

    def __init__(self, per_worker: Any) -> None:
        self.per_worker = per_worker

    def __iter__(self) -> Iterator[PerWorkerValues]:
        return itertools.repeat(iter(self.per_worker))


def _distributed(strategy: Any, dataset_fn: Callable[[Any], Any], options: Any) -> Any:
    return strategy.distribute_datasets_from_function(dataset_fn, options)


def _saves_after(callbacks: CallbackList) -> Callable[[int], bool]:
    """Return what says whether a callback saves after a batch, before which all steps must have ended."""
    own = [callback.saves_after for callback in callbacks.callbacks if hasattr(callback, "saves_after")]
    return lambda batch: sum(saves_after(batch) for saves_after in own) > 0  # all are asked


def _never(_: int) -> bool:
    return False
