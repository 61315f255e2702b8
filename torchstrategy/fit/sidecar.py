"""Evaluating a model's checkpoints beside its training, in a process of its own."""

from __future__ import annotations

import os
import re
import time
from typing import Any, NamedTuple

from torchstrategy.base.log import logger, show_info
from torchstrategy.checkpoint.archive import SUFFIX
from torchstrategy.checkpoint.reader import get_checkpoint_state, load_checkpoint
from torchstrategy.errors import DataLossError, NotFoundError
from torchstrategy.fit.callbacks.model_checkpoint import FINISHED
from torchstrategy.fit.inputs import unpack_x_y_sample_weight
from torchstrategy.fit.trainer import trainer_of

__all__ = ["SidecarEvaluator"]

_POLL_S = 0.5
_PROGRESS_S = 60.0


class SidecarEvaluator:
    """Evaluates each new checkpoint of a training that runs in other processes, such as the job's ``evaluator`` task.

    The training saves with ``ts.callbacks.ModelCheckpoint("<checkpoint_dir>/ckpt-{epoch}", save_weights_only=True)``,
    or with a ``ts.train.CheckpointManager`` of a ``ts.train.Checkpoint(model=..., optimizer=...)``. The evaluator takes
    the latest checkpoint each time it is ready for one, so it may pass over some.

    Args:
        model: a compiled model like the one that is trained, made under a strategy of this process.
        data: what ``model.evaluate`` takes: a dataset, ``(x, y)`` or ``(x, y, sample_weight)``.
        checkpoint_dir: the directory that the checkpoints are saved in.
        steps: batches of an evaluation; ``None`` means all of the data.
        max_evaluations: the last checkpoint's number: the evaluator ends after it has evaluated one whose name ends in
            ``-`` and this number or a larger one, as that of the last epoch does with ``ckpt-{epoch}``. If the names
            end in no number, evaluations are counted. ``None`` waits until a ``ModelCheckpoint`` says that its ``fit``
            is done.
        callbacks: given to ``evaluate``; a ``TensorBoard`` draws the values over the training's steps.

    Raises:
        RuntimeError: the model was not compiled.
        ValueError: ``max_evaluations`` is not positive; or a checkpoint does not fit the model (in ``start``).

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> x = y = torch.ones(4, 1)
        >>> def make_model():
        ...     model = ts.Model(torch.nn.Linear(1, 1))
        ...     model.compile("sgd", "mse")
        ...     return model
        >>> save = ts.callbacks.ModelCheckpoint(f"{folder.name}/ckpt-{{epoch}}", save_weights_only=True)
        >>> history = make_model().fit(x, y, epochs=2, callbacks=[save], verbose=0)  # in another process
        >>> ts.SidecarEvaluator(make_model(), (x, y), folder.name, max_evaluations=2).start()
        >>> folder.cleanup()
    """

    def __init__(
        self,
        model: Any,
        data: Any,
        checkpoint_dir: str | os.PathLike[str],
        steps: int | None = None,
        max_evaluations: int | None = None,
        callbacks: Any = None,
    ) -> None:
        trainer_of(model).require_compiled("evaluate")
        if max_evaluations is not None and max_evaluations < 1:
            raise ValueError(f"SidecarEvaluator(max_evaluations=...) must be positive. Received: {max_evaluations}")
        self.model = model
        self.data = data
        self.checkpoint_dir = os.fspath(checkpoint_dir)
        self.steps = steps
        self.max_evaluations = max_evaluations
        self.callbacks = callbacks
        self._num_evaluations = 0

    def start(self) -> None:
        """Evaluate checkpoints as they come, until the last one."""
        show_info()
        seen: _Found | None = None
        while True:
            found = self._wait_for_other(seen)
            if found is None:
                logger.info("SidecarEvaluator: the training is done, and its last checkpoint evaluated.")
                return
            seen = found
            if self._evaluate(found.path) and self._is_last(found.path):
                logger.info("SidecarEvaluator: that was the last of max_evaluations=%d.", self.max_evaluations)
                return

    def _wait_for_other(self, seen: _Found | None) -> _Found | None:
        """Wait for a checkpoint that was not seen; return ``None`` if the training says that none will come."""
        start = said = time.monotonic()
        while True:
            is_finished = self._is_finished()  # before looking for what was saved before that was said
            found = self._agree(self._find())
            if found is not None and found != seen:
                return found
            if is_finished:
                return None
            now = time.monotonic()
            if now - said >= _PROGRESS_S:
                said = now
                logger.info(
                    "SidecarEvaluator: no new checkpoint in %s for %d s. It waits for those of "
                    "ModelCheckpoint(save_weights_only=True) or ts.train.CheckpointManager.",
                    self.checkpoint_dir,
                    now - start,
                )
            time.sleep(_POLL_S)

    def _find(self) -> _Found | None:
        """Return the latest checkpoint."""
        state = get_checkpoint_state(self.checkpoint_dir)
        return None if state is None else _Found(state.model_checkpoint_path, state.all_model_checkpoint_timestamps[-1])

    def _is_finished(self) -> bool:
        is_finished = os.path.exists(os.path.join(self.checkpoint_dir, FINISHED))
        return bool(self._exchange("end of the training", is_finished))

    def _agree(self, found: _Found | None) -> _Found | None:
        found = self._exchange("checkpoint to evaluate", found)
        return None if found is None else _Found(*found)

    def _exchange(self, what: str, value: Any) -> Any:
        """Return the chief's value."""
        workers = self.model.distribute_strategy.workers
        return value if workers is None else workers.exchange(what, value)[0]

    def _evaluate(self, path: str) -> bool:
        """Evaluate a checkpoint; return whether it was still there."""
        try:
            self.model.load_weights(path)
            self._take_iterations(path)
        except (NotFoundError, DataLossError, RuntimeError) as error:
            if os.path.isfile(path + SUFFIX):
                raise
            logger.info("SidecarEvaluator: %s was deleted before it could be read: %s", path, error)
            return False
        data = self.data if isinstance(self.data, tuple) else (self.data,)
        x, y, sample_weight = unpack_x_y_sample_weight(data)
        logs = self.model.evaluate(
            x,
            y,
            sample_weight=sample_weight,
            steps=self.steps,
            callbacks=self.callbacks,
            verbose=0,
            return_dict=True,
        )
        self._num_evaluations += 1
        values = ", ".join(f"{name}={value:.6g}" for name, value in logs.items() if isinstance(value, float))
        logger.info("SidecarEvaluator: %s: %s", path, values)
        return True

    def _take_iterations(self, path: str) -> None:
        """Note how many steps the model was trained for, which is what curves are drawn over."""
        reader = load_checkpoint(path)
        if reader.has_tensor("iterations"):
            trainer_of(self.model).position.iterations = int(reader.get_tensor("iterations"))

    def _is_last(self, path: str) -> bool:
        if self.max_evaluations is None:
            return False
        number = re.search(r"-(\d+)$", path)
        return (self._num_evaluations if number is None else int(number[1])) >= self.max_evaluations


class _Found(NamedTuple):
    """A checkpoint, and when it was written: a name may be used again."""

    path: str
    written: float
