"""Exports: a directory with a program of ``torch.export`` that computes all signatures, and their description."""

from __future__ import annotations

import contextlib
import json
import os
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchstrategy.base import tree
from torchstrategy.base.log import logger
from torchstrategy.base.names import dtype_name
from torchstrategy.checkpoint.storage import (
    copy_file,
    delete_directory,
    is_file,
    is_remote,
    list_directories,
    local_copy,
    open_file,
    write_file,
)
from torchstrategy.errors import NotFoundError
from torchstrategy.estimator.building import build_restored
from torchstrategy.estimator.export_outputs import ExportOutput, ServingInputReceiver
from torchstrategy.estimator.specs import ModeKeys
from torchstrategy.fit.calling import describe_data
from torchstrategy.fit.exporting import trace

__all__ = ["SavedModel", "Signature", "export_saved_model", "load"]

_PROGRAM = "model.pt2"
_DESCRIPTION = "signatures.json"
_ASSETS = "assets.extra"
_SINGLE_INPUT = "input"


def export_saved_model(
    estimator: Any,
    export_dir_base: str | os.PathLike[str],
    serving_input_receiver_fn: Callable[[], ServingInputReceiver],
    assets_extra: Mapping[str, str] | None,
    checkpoint_path: str | None,
    experimental_mode: str,
) -> str:
    """Write an export; see ``Estimator.export_saved_model``."""
    receiver = _call_receiver_fn(serving_input_receiver_fn)
    if experimental_mode != ModeKeys.PREDICT:
        raise ValueError(
            "experimental_mode must be ModeKeys.PREDICT: a program of torch.export does not train and has no metrics. "
            f"Received: {experimental_mode!r}"
        )
    path = checkpoint_path or estimator.latest_checkpoint()
    if path is None:
        raise ValueError(
            f"Couldn't find trained model at {estimator.model_dir}. Call train before, or pass checkpoint_path."
        )
    missing = [source for source in (assets_extra or {}).values() if not is_file(source)]
    if missing:
        raise NotFoundError(f"export_saved_model(assets_extra=...): there is no file {missing[0]}.")
    features = receiver.features_of(receiver.receiver_tensors)
    spec = build_restored(
        estimator._model_fn, features, None, ModeKeys.PREDICT, estimator.params, estimator.config, path
    )
    program, description = _make_program(spec, receiver)
    text = json.dumps({"checkpoint": os.path.basename(path), "signatures": description}, indent=2).encode()

    def write(directory: str) -> None:
        write_file(os.path.join(directory, _PROGRAM), lambda file: torch.export.save(program, file))
        for destination, source in (assets_extra or {}).items():
            with local_copy(source) as local:
                copy_file(local, os.path.join(directory, _ASSETS, destination))
        # The last one: without it a directory is no export.
        write_file(os.path.join(directory, _DESCRIPTION), lambda file: file.write(text))

    directory = _write_export(os.fspath(export_dir_base), write)
    logger.info("SavedModel written to: %s", directory)
    return directory


def load(export_dir: str | os.PathLike[str]) -> SavedModel:
    """Load what ``Estimator.export_saved_model`` wrote. The program that made the model is not needed.

    Args:
        export_dir: the directory, whose name is a time.

    Raises:
        NotFoundError: it is no such directory.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> def model_fn(features, labels, mode):
        ...     module = torch.nn.Linear(1, 1)
        ...     optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        ...     loss = torch.nn.functional.mse_loss
        ...     predictions = lambda outputs: {"y": outputs}
        ...     return ts.estimator.EstimatorSpec(
        ...         mode, predictions=predictions, module=module, loss=loss, train_op=optimizer
        ...     )
        >>> estimator = ts.estimator.Estimator(model_fn, folder.name)
        >>> estimator = estimator.train(lambda: (torch.ones(2, 1), torch.ones(2, 1)), steps=1)
        >>> receiver_fn = ts.estimator.export.build_raw_serving_input_receiver_fn(torch.ones(2, 1))
        >>> path = estimator.export_saved_model(f"{folder.name}/export", receiver_fn)
        >>> model = ts.estimator.export.load(path)
        >>> model.signatures["serving_default"](torch.ones(5, 1))["y"].shape
        torch.Size([5, 1])
        >>> folder.cleanup()
    """
    directory = os.fspath(export_dir)
    try:
        with open_file(os.path.join(directory, _DESCRIPTION)) as file:
            description = json.load(file)
    except (FileNotFoundError, NotADirectoryError):
        inside = sorted(list_directories(directory))
        exports = [name for name in inside if is_file(os.path.join(directory, name, _DESCRIPTION))]
        hint = f" Its exports are {exports}: load one of them." if exports else ""
        raise NotFoundError(f"{directory} is not what export_saved_model returned.{hint}") from None
    with local_copy(os.path.join(directory, _PROGRAM)) as path:
        program = torch.export.load(path).module()
    return SavedModel(program, description["signatures"])


class SavedModel:
    """An exported model; made by ``ts.estimator.export.load``.

    Args:
        program: the module of the program of ``torch.export``. It takes the received tensors, in a dict or as one, and
            returns for each signature a dict of tensors.
        description: of the signatures, by name.
    """

    def __init__(self, program: nn.Module, description: Mapping[str, Any]) -> None:
        self.program = program
        #: The signatures by name; ``"serving_default"`` is always there.
        self.signatures = {name: Signature(program, name, content) for name, content in description.items()}


class Signature:
    """One of the ways to call an exported model.

    Args:
        program: see ``SavedModel``.
        name: the signature's name.
        description: its inputs, outputs, method and constants.
    """

    def __init__(self, program: nn.Module, name: str, description: Mapping[str, Any]) -> None:
        self._program = program
        self.name = name
        #: ``"predict"``, ``"regress"`` or ``"classify"``.
        self.method: str = description["method"]
        #: ``dtype`` and ``shape`` of each input by name; an axis of any length is ``None``.
        self.inputs: dict[str, Any] = description["inputs"]
        #: The same of each output.
        self.outputs: dict[str, Any] = description["outputs"]
        #: What is the same for all examples, such as the names of classes.
        self.constants: dict[str, Any] = description["constants"]
        self._takes_one: bool = description["takes_one"]

    def __call__(self, *args: Tensor, **kwargs: Tensor) -> dict[str, Tensor]:
        """Return the signature's tensors by name.

        Args:
            args: the one tensor, of a model that takes one; or a dict.
            kwargs: the tensors by the names of ``inputs``.

        Raises:
            TypeError: there are other inputs.
        """
        given: Any = dict(args[0]) if len(args) == 1 and not kwargs and isinstance(args[0], Mapping) else kwargs
        if self._takes_one and len(args) == 1 and isinstance(args[0], Tensor) and not kwargs:
            given = {_SINGLE_INPUT: args[0]}
        elif args and given is kwargs:
            given = None
        if given is None or given.keys() != self.inputs.keys():
            received = f"{len(args)} tensors without names" if given is None else sorted(given)
            raise TypeError(
                f"The signature {self.name!r} takes the inputs {sorted(self.inputs)} by name. Received: {received}"
            )
        inputs = given[_SINGLE_INPUT] if self._takes_one else {name: given[name] for name in self.inputs}
        with torch.no_grad():
            made: dict[str, Tensor] = self._program(inputs)[self.name]
        return made


class ServedModule(nn.Module):
    """A module with what is done to its inputs before and to its outputs after.

    Args:
        module: the module.
        features_of: makes the features of what is received.
        signatures: what is computed of the outputs, by the signatures' names.
    """

    def __init__(
        self, module: nn.Module, features_of: Callable[[Any], Any], signatures: Mapping[str, ExportOutput]
    ) -> None:
        super().__init__()
        self.module = module
        self._features_of = features_of
        self._signatures = signatures

    def compute(self, inputs: Any) -> dict[str, dict[str, Any]]:
        """Return everything that the signatures hold."""
        outputs = self.module(self._features_of(inputs))
        return {name: signature.compute(outputs) for name, signature in self._signatures.items()}

    def forward(self, inputs: Any) -> dict[str, dict[str, Tensor]]:
        """Return the signatures' tensors."""
        return {
            name: {key: value for key, value in values.items() if isinstance(value, Tensor)}
            for name, values in self.compute(inputs).items()
        }


def _call_receiver_fn(serving_input_receiver_fn: Any) -> ServingInputReceiver:
    if serving_input_receiver_fn is None:
        raise ValueError(
            "serving_input_receiver_fn must be defined. ts.estimator.export.build_raw_serving_input_receiver_fn makes "
            "one of example features."
        )
    receiver = serving_input_receiver_fn()
    if not isinstance(receiver, ServingInputReceiver):
        raise TypeError(
            "serving_input_receiver_fn must return a ts.estimator.export.ServingInputReceiver. Received: "
            f"{receiver!r:.200}"
        )
    return receiver


def _make_program(spec: Any, receiver: ServingInputReceiver) -> tuple[Any, dict[str, Any]]:
    """Return the program and the description of its signatures."""
    module: nn.Module = spec.module.cpu()  # where model_fn itself may have moved it
    module.requires_grad_(requires_grad=False)
    served = ServedModule(module, receiver.features_of, spec.export_outputs).eval()
    example = receiver.receiver_tensors
    try:
        with torch.no_grad():
            computed = served.compute(example)
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError) as error:
        raise ValueError(
            f"The model failed with the features of serving_input_receiver_fn: {type(error).__name__}: "
            f"{str(error).rstrip('.')}. They must be such as input_fn returns; the cause is above. It was given "
            f"{describe_data(receiver.features_of(example))}."
        ) from error
    program = trace(served, (example,), {}, dynamic_batch=receiver.dynamic_batch)
    takes_one = isinstance(example, Tensor)
    inputs = {_SINGLE_INPUT: example} if takes_one else dict(example)
    describe = _DynamicShapes(tree.all_leaves(example)[0].shape[:1] if receiver.dynamic_batch else None)
    description: dict[str, Any] = {}
    for name, values in computed.items():
        others = sorted(key for key, value in values.items() if not isinstance(value, Tensor))
        if len(others) == len(values):
            raise ValueError(
                f"The signature {name!r} of export_outputs computes no tensor, but {values!r:.200}. Only tensors, or a "
                "dict with tensors, can be exported."
            )
        if others:
            logger.info("The export's signature %r lacks %s: only tensors can be exported.", name, ", ".join(others))
        description[name] = {
            "method": spec.export_outputs[name].method,
            "takes_one": takes_one,
            "inputs": {key: describe(value) for key, value in inputs.items()},
            "outputs": {key: describe(value) for key, value in values.items() if isinstance(value, Tensor)},
            "constants": spec.export_outputs[name].constants,
        }
    return program, description


class _DynamicShapes:
    """Describes tensors: the first axis is ``None`` if it is that of the examples and may have any length."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch

    def __call__(self, tensor: Tensor) -> dict[str, Any]:
        shape: list[int | None] = list(tensor.shape)
        if self._batch and shape and shape[0] == self._batch[0]:
            shape[0] = None
        return {"dtype": dtype_name(tensor.dtype), "shape": shape}


def _write_export(base: str, write: Callable[[str], None]) -> str:
    """Write a directory whose name is the time, or the next second that is free; it is complete or not there.

    A store can't rename directories: there it is an export when its last file is there.
    """
    made = os.path.join(base, str(_next_timestamp(base)) if is_remote(base) else f"temp-{uuid.uuid4().hex}")
    try:
        write(made)
        return made if is_remote(base) else _take_timestamp(made, base)
    except BaseException:
        with contextlib.suppress(OSError):
            delete_directory(made)
        raise


def _next_timestamp(base: str) -> int:
    return max(int(time.time()), *(int(name) + 1 for name in list_directories(base) if name.isdigit()), 0)


def _take_timestamp(temporary: str, base: str) -> str:
    """Give a directory on this host its name."""
    timestamp = _next_timestamp(base)
    while True:
        directory = os.path.join(base, str(timestamp))
        try:
            os.rename(temporary, directory)
        except OSError:
            if not os.path.exists(directory):
                raise
            timestamp += 1
        else:
            return directory
