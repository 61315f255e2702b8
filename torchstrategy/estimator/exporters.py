"""What happens to a model after an evaluation: exports of the best, the latest, or the final one."""

from __future__ import annotations

import abc
import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from typing_extensions import override

from torchstrategy.base.log import logger
from torchstrategy.checkpoint.storage import delete_directory, find_files, list_directories
from torchstrategy.estimator.eval_metrics import read_eval_metrics

__all__ = ["BestExporter", "Exporter", "FinalExporter", "LatestExporter"]

_Receiver = Callable[[], Any]
_TIMESTAMP_LENGTH = 10


class Exporter(abc.ABC):
    """Base class of what ``EvalSpec(exporters=)`` holds: called after each evaluation."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The name of the directory of exports."""

    @abc.abstractmethod
    def export(
        self,
        estimator: Any,
        export_path: str,
        checkpoint_path: str,
        eval_result: dict[str, Any],
        is_the_final_export: bool,  # noqa: FBT001 - tf's signature
    ) -> str | None:
        """Export the model, or decide not to.

        Args:
            estimator: the estimator that was evaluated.
            export_path: the directory for this exporter's exports.
            checkpoint_path: the checkpoint that was evaluated.
            eval_result: what ``evaluate`` returned.
            is_the_final_export: whether training has ended.

        Returns:
            The directory of the export; ``None`` if there was none.
        """


class _ModelExporter(Exporter):
    """Exports the model by the estimator's ``export_saved_model``."""

    def __init__(
        self,
        name: str,
        serving_input_receiver_fn: _Receiver,
        assets_extra: Mapping[str, str] | None,
        *,
        as_text: bool,
    ) -> None:
        self._name = name
        self._receiver_fn = serving_input_receiver_fn
        self._assets_extra = assets_extra
        self._as_text = as_text

    @property
    @override
    def name(self) -> str:
        return self._name

    def _export(self, estimator: Any, export_path: str, checkpoint_path: str) -> str:
        return estimator.export_saved_model(  # type: ignore[no-any-return]
            export_path,
            self._receiver_fn,
            assets_extra=self._assets_extra,
            as_text=self._as_text,
            checkpoint_path=checkpoint_path,
        )


class FinalExporter(_ModelExporter):
    """Exports the model once: after the evaluation of ``TrainSpec``'s ``max_steps``.

    As in tf, there is no final export if training has no ``max_steps`` or ends before.

    Args:
        name: the name of the directory for the exports, in ``<model_dir>/export``.
        serving_input_receiver_fn: returns a ``ts.estimator.export.ServingInputReceiver``.
        assets_extra: files to copy beside the model; see ``Estimator.export_saved_model``.
        as_text: without effect.

    Example:
        >>> receiver_fn = ts.estimator.export.build_raw_serving_input_receiver_fn({"x": torch.ones(2, 1)})
        >>> ts.estimator.FinalExporter("final", receiver_fn).name
        'final'
    """

    def __init__(
        self,
        name: str,
        serving_input_receiver_fn: _Receiver,
        assets_extra: Mapping[str, str] | None = None,
        as_text: bool = False,  # noqa: FBT001, FBT002 - tf's signature
    ) -> None:
        super().__init__(name, serving_input_receiver_fn, assets_extra, as_text=as_text)

    @override
    def export(
        self,
        estimator: Any,
        export_path: str,
        checkpoint_path: str,
        eval_result: dict[str, Any],
        is_the_final_export: bool,
    ) -> str | None:
        if not is_the_final_export:
            return None
        logger.info("Performing the final export in the end of training.")
        return self._export(estimator, export_path, checkpoint_path)


class LatestExporter(_ModelExporter):
    """Exports the model after each evaluation, and deletes old exports.

    Args:
        name: the name of the directory for the exports, in ``<model_dir>/export``.
        serving_input_receiver_fn: returns a ``ts.estimator.export.ServingInputReceiver``.
        assets_extra: files to copy beside the model; see ``Estimator.export_saved_model``.
        as_text: without effect.
        exports_to_keep: how many exports to keep; ``None`` keeps all.

    Raises:
        ValueError: ``exports_to_keep`` is not positive.

    Example:
        >>> receiver_fn = ts.estimator.export.build_raw_serving_input_receiver_fn({"x": torch.ones(2, 1)})
        >>> ts.estimator.LatestExporter("latest", receiver_fn, exports_to_keep=2).name
        'latest'
    """

    def __init__(
        self,
        name: str,
        serving_input_receiver_fn: _Receiver,
        assets_extra: Mapping[str, str] | None = None,
        as_text: bool = False,  # noqa: FBT001, FBT002 - tf's signature
        exports_to_keep: int | None = 5,
    ) -> None:
        super().__init__(name, serving_input_receiver_fn, assets_extra, as_text=as_text)
        self._exports_to_keep = _checked_number(exports_to_keep)

    @override
    def export(
        self,
        estimator: Any,
        export_path: str,
        checkpoint_path: str,
        eval_result: dict[str, Any],
        is_the_final_export: bool,
    ) -> str | None:
        exported = self._export(estimator, export_path, checkpoint_path)
        _delete_old_exports(export_path, self._exports_to_keep)
        return exported


def _loss_smaller(best_eval_result: Mapping[str, Any], current_eval_result: Mapping[str, Any]) -> bool:
    """Say whether the loss of the current evaluation is smaller than that of the best one."""
    for name, result in (("best_eval_result", best_eval_result), ("current_eval_result", current_eval_result)):
        if not result or "loss" not in result:
            raise ValueError(f"{name} cannot be empty or without a loss. Received: {result!r}")
    best, current = best_eval_result["loss"], current_eval_result["loss"]
    return bool(best > current or (math.isnan(best) and not math.isnan(current)))


class BestExporter(_ModelExporter):
    """Exports the model if its evaluation is the best one so far.

    Args:
        name: the name of the directory for the exports, in ``<model_dir>/export``.
        serving_input_receiver_fn: returns a ``ts.estimator.export.ServingInputReceiver``.
        event_file_pattern: the files in ``model_dir`` that hold the results of evaluations. From them the exporter of a
            program that was started again knows the best result. ``None`` does without.
        compare_fn: ``compare_fn(best_eval_result, current_eval_result)`` says whether the current one is better. By
            default it is if its loss is smaller.
        assets_extra: files to copy beside the model; see ``Estimator.export_saved_model``.
        as_text: without effect.
        exports_to_keep: how many exports to keep; ``None`` keeps all.

    Raises:
        ValueError: ``exports_to_keep`` is not positive, or ``compare_fn`` is ``None`` or takes other arguments.

    Example:
        >>> receiver_fn = ts.estimator.export.build_raw_serving_input_receiver_fn({"x": torch.ones(2, 1)})
        >>> def is_better(best_eval_result, current_eval_result):
        ...     return current_eval_result["accuracy"] > best_eval_result["accuracy"]
        >>> ts.estimator.BestExporter("best", receiver_fn, compare_fn=is_better).name
        'best'
    """

    def __init__(
        self,
        name: str = "best_exporter",
        serving_input_receiver_fn: _Receiver | None = None,
        event_file_pattern: str | None = "eval/*.tfevents.*",
        compare_fn: Callable[..., bool] = _loss_smaller,
        assets_extra: Mapping[str, str] | None = None,
        as_text: bool = False,  # noqa: FBT001, FBT002 - tf's signature
        exports_to_keep: int | None = 5,
    ) -> None:
        if compare_fn is None:
            raise ValueError("`compare_fn` must not be None: leave it out to compare losses.")
        names = set(inspect.signature(compare_fn).parameters)
        for argument in ("best_eval_result", "current_eval_result"):
            if argument not in names:
                raise ValueError(f"compare_fn ({compare_fn}) must include {argument} argument. It has: {sorted(names)}")
        super().__init__(name, serving_input_receiver_fn, assets_extra, as_text=as_text)  # type: ignore[arg-type]
        self._pattern = event_file_pattern
        self._compare_fn = compare_fn
        self._exports_to_keep = _checked_number(exports_to_keep)
        self._model_dir: str | None = None
        self._best: Mapping[str, Any] | None = None
        self._has_exported = False

    @override
    def export(
        self,
        estimator: Any,
        export_path: str,
        checkpoint_path: str,
        eval_result: dict[str, Any],
        is_the_final_export: bool,
    ) -> str | None:
        if self._pattern and self._model_dir != estimator.model_dir:
            logger.info("Loading best metric from event files.")
            self._model_dir = estimator.model_dir
            self._best = self._read_best(find_files(estimator.model_dir, self._pattern))
        if not self._is_best(eval_result):
            return None
        logger.info("Performing best model export.")
        exported = self._export(estimator, export_path, checkpoint_path)
        self._best, self._has_exported = eval_result, True
        _delete_old_exports(export_path, self._exports_to_keep)
        return exported

    def _is_best(self, result: Mapping[str, Any]) -> bool:
        if self._best is None:
            return True
        # The files hold this evaluation too: it was written just before.
        if not self._has_exported and _are_equal(self._best, result):
            return True
        return bool(self._compare_fn(best_eval_result=self._best, current_eval_result=result))

    def _read_best(self, files: Sequence[str]) -> Mapping[str, Any] | None:
        best: Mapping[str, Any] | None = None
        for directory in sorted({os.path.dirname(path) for path in files}):
            for result in read_eval_metrics(directory).values():
                if best is None or self._compare_fn(best_eval_result=best, current_eval_result=result):
                    best = result
        return best


def _are_equal(written: Mapping[str, Any], result: Mapping[str, Any]) -> bool:
    """Say whether a result is one that was written, as ``float32`` numbers, without the step."""
    return all(name in result and np.float32(result[name]) == np.float32(value) for name, value in written.items())


def _checked_number(exports_to_keep: int | None) -> int | None:
    if exports_to_keep is not None and exports_to_keep <= 0:
        raise ValueError(f"`exports_to_keep`, if provided, must be a positive number. Received: {exports_to_keep}")
    return exports_to_keep


def _delete_old_exports(directory: str, number: int | None) -> None:
    """Leave the latest exports of a directory."""
    if number is None:
        return
    exports = [name for name in list_directories(directory) if len(name) == _TIMESTAMP_LENGTH and name.isdigit()]
    for name in sorted(exports)[:-number]:
        try:
            delete_directory(os.path.join(directory, name))
        except OSError as error:  # the new export is complete; an old one that stays only takes room
            logger.warning("Could not delete the old export %s: %s", os.path.join(directory, name), error)
