"""Keeping the position in the training data in the checkpoints.

tf keeps it in files beside the checkpoints. Here it is part of them, so that a training that was killed at any moment
finds a model and a position that belong together.
"""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from torchstrategy.base.log import logger
from torchstrategy.estimator.session import Session
from torchstrategy.estimator.session_hooks import SessionRunHook, check_estimator, is_asynchronous
from torchstrategy.estimator.specs import ModeKeys

__all__ = ["CheckpointInputPipelineHook"]


class CheckpointInputPipelineHook(SessionRunHook):
    """Lets a training that goes on from a checkpoint go on with the data after it, instead of from the data's start.

    Without this hook ``input_fn`` starts anew with each call of ``train``, as in tf. With it a training that was killed
    and started again sees the batches that an unbroken one would have seen; a training that had come to the end of its
    data begins anew. Give it to every process, and to every call of ``train`` that shall go on.

    The number of workers may change in between. A dataset with ``state_dict`` and ``load_state_dict`` resumes where it
    was; of any other the batches are read again up to the position, so their order must be the same: let the data
    shuffle by torch's default generator, by a ``torch.Generator`` that is its attribute, or by ``ts.data.Dataset``.

    Args:
        estimator: whose training it is for.
        external_state_policy: must be ``None``; what the position can't hold is warned of.

    Raises:
        TypeError: ``estimator`` is no ``Estimator``.
        ValueError: ``external_state_policy`` is given; or, by the training, its workers are asynchronous.

    Example:
        >>> estimator = ts.estimator.LinearRegressor([ts.feature_column.numeric_column("x")])
        >>> hook = ts.estimator.CheckpointInputPipelineHook(estimator)
    """

    def __init__(self, estimator: Any, external_state_policy: None = None) -> None:
        check_estimator(estimator)
        if external_state_policy is not None:
            raise ValueError(f"external_state_policy must be None. Received: {external_state_policy!r}")

    @override
    def after_create_session(self, session: Session, coord: Session) -> None:
        if session.mode != ModeKeys.TRAIN:
            return
        if is_asynchronous(session.strategy):
            raise ValueError(
                "CheckpointInputPipelineHook can't be used with asynchronous workers: they are at different batches "
                "when the chief saves a checkpoint. Remove the hook, or train by ts.MultiWorkerMirroredStrategy."
            )
        position = _DataPosition(session.dataset)
        session.checkpoint.input_pipeline = position  # gets the values that were restored for this name
        if session.global_step > 0 and not position.is_restored:
            logger.warning(
                "The checkpoint of step %d holds no position in the data: it was saved without "
                "CheckpointInputPipelineHook. The data starts anew.",
                session.global_step,
            )


class _DataPosition:
    """The position in the data as an object of a checkpoint."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.is_restored = False

    @property
    def state_is_collective(self) -> bool:
        return bool(self._dataset.state_is_collective)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self._dataset.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._dataset.load_state_dict(state)
        self.is_restored = True
