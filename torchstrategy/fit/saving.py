"""A file that holds all of a model: what to build, weights, compile()'s arguments and the optimizer's state.

It is the archive that ``torch.save`` writes. All but the objects' classes and functions is plain data, which is read
without running code; those are pickles within it.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from torchstrategy import errors
from torchstrategy.base import tree
from torchstrategy.base.context import has_strategy
from torchstrategy.base.names import uncompiled_name
from torchstrategy.checkpoint.archive import check_version, read_archive, write_archive
from torchstrategy.checkpoint.objects import capture_together, track_object
from torchstrategy.checkpoint.process_reports import agree_on_restore
from torchstrategy.checkpoint.storage import spilled_to
from torchstrategy.checkpoint.tracked import to_plain
from torchstrategy.fit.architecture import dump_objects, load_objects
from torchstrategy.fit.safetensors_files import SAFE_SUFFIX
from torchstrategy.fit.trainer import Trainer, trainer_of
from torchstrategy.fit.weight_files import (
    MODEL_FORMAT,
    capture_weights,
    find_file,
    load_weights,
    plain_module,
    require_cross_replica,
    save_weights,
    strategy_of,
    write_as_one,
)
from torchstrategy.optimizers.by_name import plain_class
from torchstrategy.replicas.mirrored import bodies
from torchstrategy.strategies.default import get_strategy

__all__ = ["load_model", "load_weights", "save_model", "save_weights"]

_Path = str | os.PathLike[str]
_VERSION = 1


def save_model(
    model: nn.Module,
    path: _Path,
    overwrite: bool = True,  # noqa: FBT001, FBT002 - tf's signature, as the model's method
) -> None:
    """Write all of a model to one file. Cross-replica context, on every process.

    Beside the weights it holds what ``load_model`` builds the model of, which is its classes' names and its attributes;
    and if it is compiled, ``compile``'s arguments and the optimizer's state. The chief writes; the file is complete or
    not there.

    Args:
        model: the model.
        path: the file; its directory is made if need be.
        overwrite: whether an existing file may be replaced.

    Raises:
        FileExistsError: it may not.
        OSError: the file can't be written; what was there before is unchanged.
        TypeError: a part of the model can't be pickled, such as a lambda.
        ValueError: a weight has no shape yet, or is a variable that is no buffer; or the path ends in
            ``.safetensors``.
        RuntimeError: called in replica context, or another process could not write.
    """
    if os.fspath(path).lower().endswith(SAFE_SUFFIX):
        raise ValueError(
            f"Model.save: a file of safetensors holds weights only. Take a path that ends in .pt, or save_weights. "
            f"Received: {os.fspath(path)}"
        )
    strategy = strategy_of(model)
    require_cross_replica("Model.save")
    capture = capture_weights(model, strategy, path)
    trainer = trainer_of(model)
    parts = _stateful_parts(trainer) if trainer.is_compiled else {}
    tracked = {name: track_object(name, obj) for name, obj in parts.items()}
    capture_training = capture_together(tracked, strategy, os.fspath(path))

    def write(file: str) -> None:
        with spilled_to(os.path.dirname(file)):
            content = _content_of(model, capture(), capture_training)
            write_archive(file, content)

    write_as_one(strategy, path, write, overwrite=overwrite, method="Model.save")


def load_model(
    path: _Path,
    compile: bool = True,  # noqa: FBT001, FBT002 - Keras' signature
    *,
    trust: bool = False,
) -> Any:
    """Build a model that ``Model.save`` wrote, under the current strategy or none, so that training can go on exactly.

    The file names the classes and functions that the model is made of, and loading it imports and calls them. So
    ``trust`` files only from sources that you would take a program from, as with ``torch.load(weights_only=False)``. To
    read the weights of any file safely, build the model and call ``load_weights``.

    Args:
        path: the file.
        compile: whether to compile the model as it was, and to restore the optimizer's state.
        trust: whether the file may run code.

    Returns:
        The model.

    Raises:
        NotFoundError: there is no such file.
        DataLossError: it is damaged or was not written by ``Model.save``.
        ValueError: it is not trusted.
        ImportError: a class or function that the model needs is not here.
        RuntimeError: another process could not load.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> model = ts.Model(torch.nn.Linear(2, 1))
        >>> model.compile("adam", "mse")
        >>> model.save(f"{folder.name}/model.pt")
        >>> with ts.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        ...     loaded = ts.models.load_model(f"{folder.name}/model.pt", trust=True)
        >>> history = loaded.fit(torch.ones(4, 2), torch.ones(4, 1), verbose=0)
        >>> folder.cleanup()
    """
    require_cross_replica("load_model")
    strategy = get_strategy()
    content: dict[str, Any] = {}
    objects: list[Any] = []
    error: Exception | None = None
    try:
        file = find_file(path)
        content = _read(file)
        if not trust:
            raise ValueError(
                f"{file} holds pickled objects, which can run any code when they are loaded. If it comes from where "
                "you would take a program from, pass trust=True. Otherwise build the model and call "
                "model.load_weights(path), which reads the weights only."
            )
        names = ["model", "compile"] if compile and content["training"] is not None else ["model"]
        objects = load_objects(content["program"], names, file)
    except Exception as raised:  # noqa: BLE001 - whatever it is, the waiting processes must hear of it
        error = raised
    agree_on_restore(strategy, os.fspath(path), error)
    _take_up(strategy, objects)
    model = objects[0]
    trainer_of(model).example_input = content["example_input"]
    if len(objects) > 1:
        _compile(model, objects[1], content["training"], strategy)
    return model


def _content_of(model: nn.Module, weights: Any, capture_training: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what a file holds."""
    body = bodies(model)[0]
    own = bodies(plain_module(model))[0].state_dict(keep_vars=True)
    known = {
        id(value): weights[uncompiled_name(name)] for name, value in own.items() if uncompiled_name(name) in weights
    }
    objects = {"model": body}
    training = None
    trainer = trainer_of(model)
    if trainer.is_compiled:
        objects["compile"] = _arguments_of(body, trainer)
        training = capture_training()
        training["iterations"] = trainer.iterations
    return {
        "format": MODEL_FORMAT,
        "version": _VERSION,
        "weights": weights,
        "program": dump_objects(objects, known),
        "training": training,
        "example_input": _plain_or_none(trainer.example_input),
    }


def _plain_or_none(value: Any) -> Any:
    try:
        return to_plain(value, "example_input")
    except TypeError:  # inputs of another kind; they only serve export and summary
        return None


def _stateful_parts(trainer: Trainer) -> dict[str, Any]:
    return {name: obj for name in ("optimizer", "scaler") if (obj := getattr(trainer, name)) is not None}


def _arguments_of(body: nn.Module, trainer: Trainer) -> dict[str, Any]:
    """Return what ``compile`` is given when the model is loaded: the optimizer as its class and settings."""
    if trainer.optimizer is None:
        return trainer.arguments
    optimizer = bodies(trainer.optimizer)[0]
    names = {id(parameter): name for name, parameter in body.named_parameters()}
    groups = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    settings = {"class": plain_class(type(optimizer)), "groups": groups, "defaults": dict(optimizer.defaults)}
    return {**trainer.arguments, "optimizer": settings}


def _read(file: str) -> dict[str, Any]:
    is_safe = file.lower().endswith(SAFE_SUFFIX)
    content = {} if is_safe else read_archive(file, what="a saved model", remedy="Load another file.")
    if is_safe or (isinstance(content, dict) and content and all(isinstance(v, Tensor) for v in content.values())):
        raise errors.DataLossError(
            f"{file} holds weights only, as save_weights and by default ModelCheckpoint write them: build the model "
            "and call model.load_weights. For all of it use Model.save or ModelCheckpoint(save_weights_only=False)."
        )
    if not isinstance(content, dict) or content.get("format") != MODEL_FORMAT:
        raise errors.DataLossError(
            f"{file} was not written by Model.save. If it holds weights, build the model and call load_weights."
        )
    check_version(file, content, _VERSION)
    return content


def _take_up(strategy: Any, objects: list[Any]) -> None:
    """Let the current strategy know the unpickled objects, whose constructors were not called."""
    if not has_strategy():
        return
    for leaf in tree.all_leaves(objects):
        if isinstance(leaf, nn.Module):
            strategy.replicate(leaf)


def _compile(model: Any, arguments: dict[str, Any], training: dict[str, Any], strategy: Any) -> None:
    """Compile a loaded model and restore the optimizer."""
    settings = arguments.pop("optimizer")
    optimizer = None if settings is None else _make_optimizer(model, settings)
    model.compile(optimizer=optimizer, **arguments)
    trainer = trainer_of(model)
    for name, obj in _stateful_parts(trainer).items():
        track_object(name, obj).plan(training[name], strategy).apply()
    trainer.position.iterations = training["iterations"]


def _make_optimizer(model: nn.Module, settings: dict[str, Any]) -> Any:
    parameters = dict(model.named_parameters())
    groups = [{"params": [parameters[name] for name in names]} for names in settings["groups"]]
    accepted = inspect.signature(settings["class"]).parameters
    defaults = {name: value for name, value in settings["defaults"].items() if name in accepted}
    try:
        return settings["class"](groups, **defaults)
    except TypeError as error:
        raise TypeError(
            f"load_model can't make the optimizer {settings['class'].__name__} of its defaults "
            f"{settings['defaults']}: {error}. Pass compile=False, and call model.compile(...) yourself."
        ) from error
