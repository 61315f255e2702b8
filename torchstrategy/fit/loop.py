"""The loops of ``fit``, ``evaluate`` and ``predict`` for strategies that compute in ``run``.

Every process runs the same loop, and the logs are equal everywhere, so callbacks decide alike. Metrics are read over
all replicas when somebody looks at the logs: with one process at any time, with several at fixed points, because
reading is a collective there.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from torchstrategy.base import tree
from torchstrategy.base.context import reporting_failures
from torchstrategy.base.log import add_note, warning_once
from torchstrategy.fit.arguments import DataArguments, FitArguments, check_counts, warn_of_nan
from torchstrategy.fit.batch_parts import check_first_batch, class_weight_applier
from torchstrategy.fit.callbacks.callback import History
from torchstrategy.fit.callbacks.callback_list import CallbackList
from torchstrategy.fit.calling import Evaluating, put_into_training
from torchstrategy.fit.inputs import Batches, make_batches, unpack_validation_data
from torchstrategy.fit.rank_comparison import check_alike
from torchstrategy.fit.step_loop import StepLoop
from torchstrategy.fit.steps import FitPosition
from torchstrategy.fit.validation import Validation, split_arrays

__all__ = ["Loop"]

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _reported(method: _Method) -> _Method:
    """Return the method, with its errors told to the other processes: a callback may fail on one of them."""

    @functools.wraps(method)
    def reported(self: Loop, *args: Any, **kwargs: Any) -> Any:
        with reporting_failures(self.strategy, f"Model.{method.__name__}"):
            return method(self, *args, **kwargs)

    return reported  # type: ignore[return-value]


class Loop(StepLoop):
    """One call of ``fit``, ``evaluate`` or ``predict``.

    Args:
        model: the model.
    """

    @staticmethod
    def check(arguments: Mapping[str, Any]) -> None:
        """Refuse arguments of ``compile`` that this loop can't keep; for subclasses."""

    @_reported
    def fit(self, given: FitArguments) -> History:
        """Train.

        Args:
            given: the arguments of ``Model.fit``.
        """
        trainer, model, steps_per_epoch = self.trainer, self.model, given.steps_per_epoch
        trainer.require_compiled("fit")
        check_alike(self.strategy.workers, trainer, given)
        trainer.check_parameters(model)
        parts, validation_data = (given.x, given.y, given.sample_weight), given.validation_data
        if given.validation_split and validation_data is None:
            parts, validation_data = split_arrays(*parts, given.validation_split)
        if given.class_weight is not None:
            self._prepare = class_weight_applier(given.class_weight)
        data = self.make_batches(
            *parts, batch_size=given.batch_size, shuffle=given.shuffle, method="fit", steps=steps_per_epoch
        )
        validation = None
        if validation_data is not None:
            arguments = unpack_validation_data(validation_data, given.validation_batch_size, given.batch_size)
            batches = self.make_batches(**arguments, method="fit", steps=given.validation_steps)
            validation = Validation(batches, given.validation_steps, given.validation_freq)
        _check_can_be_repeated(data, given, steps_per_epoch, "x")
        if validation is not None:
            _check_can_be_repeated(validation.data, given, given.validation_steps, "validation_data")
        steps = data.num_batches if steps_per_epoch is None else steps_per_epoch
        params = {"verbose": given.verbose, "epochs": given.epochs, "steps": steps}
        callbacks = CallbackList(given.callbacks, model=model, params=params, verbose=given.verbose)
        self._agree_on_log_interval(callbacks)
        program = {
            "batch_size": given.batch_size,
            "num_batches": data.num_batches,
            "num_examples": data.num_examples,
            "steps_per_epoch": steps_per_epoch,
            "gradient_accumulation_steps": trainer.accumulation,
        }
        trainer.begin_fit(
            FitPosition(given.initial_epoch, 0, trainer.iterations, None, program), callbacks, data.dataset
        )
        try:
            put_into_training(model)
            model.zero_grad()  # what the program has left
            self.begin("train")
            callbacks.on_train_begin()
            trainer.stop_training = trainer.stop_training or trainer.position.was_stopped
            logs = self._train_epochs(data, validation, callbacks, given.epochs, steps_per_epoch)
            callbacks.on_train_end(logs)
        finally:
            trainer.end_fit()
            callbacks.close()
        history: History = trainer.history
        return history

    @_reported
    def evaluate(
        self,
        x: Any,
        y: Any,
        *,
        batch_size: int | None,
        verbose: int | str,
        sample_weight: Any,
        steps: int | None,
        callbacks: Sequence[Any] | None,
    ) -> dict[str, Any]:
        """Evaluate; the arguments are those of ``Model.evaluate``. Returns the numbers by name."""
        self.trainer.require_compiled("evaluate")
        check_counts("evaluate", steps=steps)
        data = self.make_batches(x, y, sample_weight, batch_size=batch_size, method="evaluate", steps=steps)
        every = self._callbacks_alone(callbacks, data, steps, verbose)
        try:
            return self._test(data, steps, every)
        finally:
            every.close()

    @_reported
    def predict(
        self, x: Any, *, batch_size: int | None, verbose: int | str, steps: int | None, callbacks: Sequence[Any] | None
    ) -> Any:
        """Predict; the arguments are those of ``Model.predict``."""
        check_counts("predict", steps=steps)
        data = self.make_batches(x, batch_size=batch_size, method="predict", steps=steps)
        every = self._callbacks_alone(callbacks, data, steps, verbose)
        outputs: list[Any] = []
        try:
            with Evaluating(self.model):
                self.begin("predict")
                every.on_predict_begin()
                self.run_steps(self._iterate(data), "predict", every, steps, outputs=outputs)
                every.on_predict_end()
        finally:
            every.close()
        if not outputs:
            raise ValueError("predict(x=...): the data gave no batches, so there are no predictions.")
        return tree.map_structure(lambda *leaves: np.concatenate(leaves), outputs)

    @_reported
    def on_batch(
        self, mode: str, x: Any, y: Any = None, sample_weight: Any = None, class_weight: Any = None
    ) -> dict[str, Any]:
        """Train or test on one batch of arrays. Returns its numbers by name."""
        method = f"{mode}_on_batch"
        self.trainer.require_compiled(method)
        if class_weight is not None:
            if sample_weight is not None:
                raise ValueError(f"{method}(class_weight=..., sample_weight=...): pass one of them.")
            self._prepare = class_weight_applier(class_weight, method)
        data = self._one_batch(x, y, sample_weight, method)
        if mode == "train":
            put_into_training(self.model)
            self.model.zero_grad()
            self.begin("train")
            with self._knowing(data):
                self.run_steps(self._iterate(data), "train", _no_callbacks(self.model))
        else:
            with Evaluating(self.model), self._knowing(data):
                self.begin("test")
                self.run_steps(self._iterate(data), "test", _no_callbacks(self.model))
        return self.read_logs()

    @_reported
    def predict_on_batch(self, x: Any) -> Any:
        """Predict for one batch of arrays."""
        outputs: list[Any] = []
        with Evaluating(self.model):
            self.begin("predict")
            data = self._one_batch(x, None, None, "predict_on_batch")
            self.run_steps(self._iterate(data), "predict", _no_callbacks(self.model), outputs=outputs)
        return tree.map_structure(lambda *leaves: np.concatenate(leaves), outputs)

    # ------------------------------------------------------------------------- what other kinds of strategies replace

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
        """Distribute data, so that it can be read again and again."""
        settings: dict[str, Any] = {"batch_size": batch_size, "shuffle": shuffle, "steps": steps}
        return make_batches(self.strategy, x, y, sample_weight, **settings, method=method, names=names)

    def _iterate(self, data: Batches) -> Iterator[Any]:
        """Read data once."""
        for number, batch in enumerate(data.dataset):
            if number == 0:
                check_first_batch(batch, data.names)
            yield batch

    # ---------------------------------------------------------------------------------------------------- pieces

    def _train_epochs(
        self,
        data: Batches,
        validation: Validation | None,
        callbacks: CallbackList,
        epochs: int,
        steps_per_epoch: int | None,
    ) -> dict[str, Any] | None:
        """Train the epochs from the position on; return the last one's logs."""
        trainer, position = self.trainer, self.trainer.position
        iterator: Iterator[Any] | None = None
        logs: dict[str, Any] | None = None
        # A fit that was interrupted after a callback had stopped it finishes its epoch.
        while position.epoch < epochs and (position.step > 0 or not trainer.stop_training):
            epoch, first = position.epoch, position.step
            if first == 0:
                self.begin("train")
            callbacks.on_epoch_begin(epoch)
            if iterator is None or steps_per_epoch is None:
                iterator = self._iterate(data)
            self._is_first = logs is None
            with self._knowing(data):
                # A backup may have been made between the last step and the end of the epoch.
                is_done = position.is_at_end or position.logs is not None or self._stops_now("train")
                rest: Iterator[Any] = iter(()) if is_done else iterator
                done = self.run_steps(rest, "train", callbacks, steps_per_epoch, first)
                if done == 0:  # the epoch before, maybe of an interrupted run, ended with the data
                    iterator = self._iterate(data)
                    done = self.run_steps(iterator, "train", callbacks, steps_per_epoch)
            if done == 0:
                raise ValueError("fit(x=...): the data gave no batches in an epoch, so there is nothing to train on.")
            # A backup may have been made while the epoch was validated.
            before, logs = logs, self.read_logs() if position.logs is None else dict(position.logs)
            warn_of_nan(logs, epoch, before)
            if steps_per_epoch is not None and done < steps_per_epoch and not trainer.stop_training:
                iterator = None
                warning_once(
                    f"fit: the data ended after {done} of steps_per_epoch={steps_per_epoch} batches, so the epoch is "
                    "shorter, and the next one begins at the start of the data. Repeat the data "
                    "(ts.data.Dataset.repeat()), or leave steps_per_epoch out."
                )
            if validation is not None and validation.is_due(epoch + 1):
                position.logs = dict(logs)
                try:
                    numbers = self._test(validation.data, validation.steps, callbacks)
                except Exception as error:
                    add_note(error, "Raised while fit(validation_data=...) was evaluated.")
                    raise
                logs |= {f"val_{name}": value for name, value in numbers.items()}
            position.epoch, position.step, position.is_at_end, position.logs = epoch + 1, 0, False, None
            callbacks.on_epoch_end(epoch, logs)
            trainer.stop_training = self._agree_to_stop()
        return logs

    def _test(self, data: Batches, steps: int | None, callbacks: CallbackList) -> dict[str, Any]:
        with Evaluating(self.model):
            self.begin("test")
            self._is_first = True
            callbacks.on_test_begin()
            with self._knowing(data):
                num_batches = self.run_steps(self._iterate(data), "test", callbacks, steps)
            if num_batches == 0:
                raise ValueError("evaluate(x=...): the data gave no batches, so there is nothing to evaluate.")
            logs = self.read_logs()
            callbacks.on_test_end(logs)
        return logs

    def _knowing(self, data: Batches) -> contextlib.AbstractContextManager[None]:
        """Let the loss look at all labels, if they are there, so that steps need not agree on what it divides by."""
        loss = self.trainer.loss
        if loss is None:
            return contextlib.nullcontext()
        # Also where they are not known: an evaluation may be called in the middle of a fit, by a callback.
        return loss.divisors.knowing(data.labels if self.model._takes_labels_as_given else None)

    def _agree_to_stop(self) -> bool:
        stops = self.trainer.stop_training
        if self.strategy.workers is None:
            return stops
        return bool(self.strategy.reduce("SUM", torch.tensor(float(stops))) > 0)

    def _callbacks_alone(
        self, callbacks: Sequence[Any] | None, data: Batches, steps: int | None, verbose: int | str
    ) -> CallbackList:
        """Return the callbacks of an evaluation or prediction that is not part of ``fit``."""
        params = {"verbose": verbose, "epochs": 1, "steps": data.num_batches if steps is None else steps}
        return CallbackList(callbacks, model=self.model, params=params, verbose=verbose, add_history=False)

    def _one_batch(self, x: Any, y: Any, sample_weight: Any, method: str) -> Batches:
        leaves = [leaf for leaf in tree.all_leaves(x) if getattr(leaf, "ndim", 0)]
        if not leaves:
            raise ValueError(f"{method}(x=...) must be arrays or tensors [batch, ...]. Received: {x!r:.100}")
        return self.make_batches(x, y, sample_weight, batch_size=max(1, leaves[0].shape[0]), method=method, steps=1)


def _check_can_be_repeated(data: Batches, given: FitArguments, steps: int | None, name: str) -> None:
    """Refuse a generator that would be needed again, before an epoch's work is lost."""
    if data.is_one_shot and steps is None and given.epochs - given.initial_epoch > 1:
        raise ValueError(
            f"fit({name}=...) is a generator or another iterator, which can be read once, but there are "
            f"{given.epochs - given.initial_epoch} epochs. Pass something that can be iterated again, such as a "
            "DataLoader or a ts.data.Dataset (from_generator), or say how many batches make an epoch "
            f"({'steps_per_epoch' if name == 'x' else 'validation_steps'})."
        )


def _no_callbacks(model: Any) -> CallbackList:
    return CallbackList(None, model=model, params={}, verbose=0, add_history=False)
