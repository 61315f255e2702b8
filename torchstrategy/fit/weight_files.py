"""Files of weights: a ``state_dict`` that plain torch reads; and how the processes of a job write a file as one."""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchstrategy import errors
from torchstrategy.base.context import current_replica_context, reporting_failures
from torchstrategy.checkpoint.archive import FORMAT, SUFFIX, WEIGHTS, read_archive, write_archive
from torchstrategy.checkpoint.directory import Index, read_index
from torchstrategy.checkpoint.fencing import Fence, publish
from torchstrategy.checkpoint.objects import capture_together, track_object
from torchstrategy.checkpoint.process_reports import agree_on_restore, write_together
from torchstrategy.checkpoint.storage import is_directory, is_file, spilled_to
from torchstrategy.checkpoint.tracked import Plan
from torchstrategy.fit.safetensors_files import SAFE_SUFFIX, find_safetensors, read_safetensors, write_safetensors
from torchstrategy.fit.trainer import ATTRIBUTE, trainer_of
from torchstrategy.replicas.mirrored import bodies
from torchstrategy.replicas.record import owner
from torchstrategy.strategies.default import get_strategy

__all__ = [
    "MODEL_FORMAT",
    "capture_weights",
    "find_file",
    "is_listed",
    "load_weights",
    "plain_module",
    "require_cross_replica",
    "save_weights",
    "strategy_of",
    "write_as_one",
    "write_weights",
]

_Path = str | os.PathLike[str]

#: Says what ``Model.save`` writes.
MODEL_FORMAT = "torchstrategy.model"
_FILE_SUFFIXES = (".pt", ".pth", ".bin")
_WRAPPED = "module."
_REMEDY = "Take another file."
_OWN_MODULES = "torchstrategy.fit."  # some of which import this one


def save_weights(
    model: nn.Module,
    path: _Path,
    overwrite: bool = True,  # noqa: FBT001, FBT002 - tf's signature, as the model's method
) -> None:
    """Write a model's weights. Cross-replica context, on every process; the chief writes, completely or not at all.

    The file holds the ``state_dict``, which plain torch reads:
    ``module.load_state_dict(torch.load(path, weights_only=True))``. A path that ends in ``.safetensors`` holds the same
    tensors in that format, of the package safetensors, with their checksums in its metadata, and weights that share
    memory each by itself.
    A path that ends in none of ``.pt``, ``.pth``, ``.bin`` and ``.safetensors`` is, as in tf, the beginning of a name:
    the file is ``<path>.pt``, and it becomes its directory's latest checkpoint, which
    ``ts.train.Checkpoint(model=...)`` restores as well. A model that was made of a module, as ``ts.Model(module)``, has
    the names of that module.

    Args:
        model: the model, or any module.
        path: the file, or the beginning of its name; its directory is made if need be.
        overwrite: whether an existing file may be replaced.

    Raises:
        FileExistsError: it may not.
        OSError: the file can't be written; what was there before is unchanged.
        ValueError: a weight has no shape yet, or is a variable that is no buffer, which a ``state_dict`` lacks; or
            what ``.safetensors`` can't hold.
        ImportError: for ``.safetensors``, the package is not installed.
        RuntimeError: called in replica context, or another process could not write.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> model = ts.Model(torch.nn.Linear(2, 1))
        >>> model.save_weights(f"{folder.name}/weights.pt")
        >>> list(torch.load(f"{folder.name}/weights.pt", weights_only=True))
        ['weight', 'bias']
        >>> folder.cleanup()
    """
    write_weights(model, path, overwrite=overwrite)


def write_weights(model: nn.Module, path: _Path, *, overwrite: bool = True, fence: Fence | None = None) -> None:
    """Do what ``save_weights`` does.

    Args:
        model: the model.
        path: the file, or the beginning of its name.
        overwrite: whether an existing file may be replaced.
        fence: of the directory, what a writer of several files knows of others that write there.
    """
    require_cross_replica("save_weights")
    strategy = strategy_of(model)
    name = os.fspath(path)
    becomes_latest = is_listed(name)
    capture = capture_weights(model, strategy, name)
    iterations = trainer_of(model).iterations if ATTRIBUTE in bodies(model)[0].__dict__ else 0
    about = {"holds": WEIGHTS, "iterations": iterations}

    def write(file: str) -> None:
        is_safe = name.lower().endswith(SAFE_SUFFIX)
        if is_safe:
            find_safetensors()  # where it is written only, and before the work
        with spilled_to(os.path.dirname(file)):
            weights = capture()
            if is_safe:
                write_safetensors(file, weights)
            elif becomes_latest:
                _publish(name, weights, about, fence or Fence(os.path.dirname(name)))
            else:
                write_archive(file, weights, about)

    write_as_one(strategy, name + SUFFIX if becomes_latest else name, write, overwrite=overwrite, method="save_weights")


def is_listed(path: _Path) -> bool:
    """Say whether ``save_weights`` makes a path its directory's latest checkpoint: it has no file's suffix."""
    return os.path.splitext(os.fspath(path))[1].lower() not in (*_FILE_SUFFIXES, SAFE_SUFFIX)


def _publish(prefix: str, weights: Any, about: dict[str, Any], fence: Fence) -> None:
    """Write weights and make them the latest checkpoint of their directory, which keeps the others."""
    directory, name = os.path.split(prefix)

    before = read_index(directory, may_be_gone=True) or Index({})
    written = {**{other: seconds for other, seconds in before.written.items() if other != name}, name: time.time()}
    publish(
        fence,
        name,
        lambda file, seal, check: write_archive(file, weights, {**about, **seal}, check),
        Index(written, before.last_preserved),
        is_numbered=False,
    )


def load_weights(
    model: nn.Module,
    path: _Path,
    strict: bool = True,  # noqa: FBT001, FBT002 - torch's signature, as the model's method
) -> None:
    """Give a model the weights that a file holds. Cross-replica context, on every process.

    Only tensors are read, no code is run. Floating-point weights of another precision are converted.

    Args:
        model: the model, or any module.
        path: what ``save_weights``, ``Model.save``, ``ModelCheckpoint`` or ``torch.save(module.state_dict(), path)``
            wrote, or a file of safetensors, whose name must end in ``.safetensors``. The suffix ``.pt`` may be left
            out.
        strict: whether the model and the file must have weights of the same names. ``False`` loads those that both
            have.

    Raises:
        NotFoundError: there is no such file.
        DataLossError: it is damaged, or none of these.
        ValueError: names or shapes differ; nothing was changed.
        ImportError: for ``.safetensors``, the package is not installed.
        RuntimeError: called in replica context, or another process could not load.
    """
    require_cross_replica("load_weights")
    strategy = strategy_of(model)
    plan, error = Plan(), None
    try:
        file = find_file(path)
        plan = _plan_weights(plain_module(model), _read_weights(file), file, strategy, strict=strict)
    except Exception as raised:  # noqa: BLE001 - whatever it is, the waiting processes must hear of it
        error = raised
    agree_on_restore(strategy, os.fspath(path), error)
    with reporting_failures(strategy, f"loading weights of {os.fspath(path)}"):
        plan.apply()


def plain_module(model: nn.Module) -> nn.Module:
    """Return the module that a model was made of; the model itself if it is a subclass with a ``forward``."""
    module = model._modules.get("module")
    definer = next((cls for cls in type(bodies(model)[0]).__mro__ if "forward" in vars(cls)), None)
    is_wrapper = definer is not None and definer.__module__.startswith(_OWN_MODULES)
    return module if is_wrapper and module is not None else model


def capture_weights(model: nn.Module, strategy: Any, path: _Path) -> Callable[[], Any]:
    """Do what all processes must do together to read a model's weights, before some write them to a file.

    Returns:
        A function for the process that writes. It returns the ``state_dict`` as plain data, and raises ``ValueError``
        if that would lack values.
    """
    capture = capture_together({"model": track_object("model", plain_module(model))}, strategy, os.fspath(path))
    return lambda: _without_attributes(model, capture()["model"])


def strategy_of(model: nn.Module) -> Any:
    """Return the strategy that a model was made with."""
    return getattr(model, "distribute_strategy", None) or owner(model) or get_strategy()


def write_as_one(strategy: Any, path: _Path, write: Callable[[str], None], *, overwrite: bool, method: str) -> None:
    """Let the chief write a file, and all processes succeed or fail.

    Args:
        strategy: the strategy.
        path: the file.
        write: called with the path.
        overwrite: whether an existing file may be replaced.
        method: the name of the method that was called.

    Raises:
        FileExistsError: the file is there and may not be replaced.
        RuntimeError: called in replica context, or another process could not write.
    """
    require_cross_replica(method)
    file = os.fspath(path)

    def checked() -> None:
        if is_directory(file):
            raise IsADirectoryError(
                f"{method}: {file} is a directory. Pass the path of a file, such as {file}/model.pt."
            )
        if is_file(file) and not overwrite:
            raise FileExistsError(f"{method}: {file} is there already. Pass overwrite=True to replace it.")
        write(file)

    write_together(strategy, file, checked)


def require_cross_replica(method: str) -> None:
    """Check that a method was called outside ``run``.

    Raises:
        RuntimeError: it was called inside.
    """
    if current_replica_context() is not None:
        raise RuntimeError(
            f"{method} was called in replica context, where every replica would do it at once. Call it outside of "
            "train_step and of the functions that you give to strategy.run."
        )


def find_file(path: _Path) -> str:
    """Return the file of a path that may lack the suffix.

    Raises:
        NotFoundError: it is not there.
    """
    name = os.fspath(path)
    for candidate in (name, name + SUFFIX):
        if is_file(candidate):
            return candidate
    if is_directory(name):
        raise errors.NotFoundError(
            f"{name} is a directory, not a file. Pass a file in it; of a directory of checkpoints, the latest is "
            f"ts.train.latest_checkpoint({name!r})."
        )
    raise errors.NotFoundError(f"There is no file {name}, nor {name + SUFFIX}.")


def _read_weights(file: str) -> Mapping[str, Any]:
    """Return the ``state_dict`` in a file.

    Raises:
        DataLossError: it holds none.
    """
    if file.lower().endswith(SAFE_SUFFIX):
        return read_safetensors(file)
    content = read_archive(file, what="a file of weights", remedy=_REMEDY, may_be_old=True)
    kind = content.get("format") if isinstance(content, dict) else None
    if kind == FORMAT:
        entry = content["objects"].get("model") or content["objects"].get("root")
        if entry is None or entry["kind"] != "module":
            raise errors.DataLossError(
                f"{file} is a checkpoint without a model: it holds {sorted(content['objects'])}. Read it with "
                "ts.train.Checkpoint(...).restore."
            )
        return entry["state"]  # type: ignore[no-any-return]
    if kind == MODEL_FORMAT:
        return content["weights"]  # type: ignore[no-any-return]
    if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
        raise errors.DataLossError(
            f"{file} does not hold weights by name, but a {type(content).__name__}. Expected a file of save_weights, "
            "Model.save, ModelCheckpoint or torch.save(module.state_dict(), path)."
        )
    return content


def _plan_weights(module: nn.Module, weights: Mapping[str, Any], file: str, strategy: Any, *, strict: bool) -> Plan:
    """Compare weights with a module; nothing changes.

    Raises:
        ValueError: they don't fit.
    """
    tracked = track_object("model", module)
    own = {name.removeprefix("model."): value for name, value in _named_values(tracked).items()}
    weights = _without_wrapper(weights, own)
    missing = [name for name in own if name not in weights]
    unexpected = [name for name in weights if name not in own]
    mismatched = [
        f"{name} (the model has {tuple(own[name].shape)}, the file {tuple(value.shape)})"
        for name, value in weights.items()
        if _has_shape(own.get(name)) and isinstance(value, Tensor) and value.shape != own[name].shape
    ]
    if mismatched or (strict and (missing or unexpected)):
        _raise_mismatch(file, missing if strict else [], unexpected if strict else [], mismatched)
    state = OrderedDict((name, _converted(value, own[name])) for name, value in weights.items() if name in own)
    state._metadata = getattr(weights, "_metadata", {})  # type: ignore[attr-defined]
    return tracked.plan(state, strategy)


def _without_wrapper(weights: Mapping[str, Any], own: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return weights by the names that a wrapped module gives them, if they were saved with its wrapper's."""
    if any(name in own for name in weights) or not all(name.startswith(_WRAPPED) for name in weights):
        return weights
    return {name.removeprefix(_WRAPPED): value for name, value in weights.items()}


def _raise_mismatch(file: str, missing: list[str], unexpected: list[str], mismatched: list[str]) -> NoReturn:
    parts = {
        "the file lacks weights of the model": missing,
        "the file has weights that the model lacks": unexpected,
        "shapes differ": mismatched,
    }
    reasons = "; ".join(f"{reason}: {_shown(names)}" for reason, names in parts.items() if names)
    advice = (
        "Build the model as it was when it was saved"
        if mismatched
        else "Build the model as it was when it was saved, or pass strict=False to load the weights that both have"
    )
    raise ValueError(f"The weights in {file} do not fit the model, which is unchanged: {reasons}. {advice}.")


def _shown(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _named_values(tracked: Any) -> dict[str, Any]:
    """Return a module's values by the names that are saved."""
    return dict(zip(tracked.leaves(), tracked._state().values(), strict=True))


def _has_shape(value: Any) -> bool:
    return isinstance(value, Tensor) and not is_lazy(value)


def _converted(value: Any, own: Any) -> Any:
    """Return a weight in the precision that the model has."""
    if not _has_shape(own) or not isinstance(value, Tensor) or value.dtype == own.dtype:
        return value
    both_float = value.is_floating_point() and own.dtype.is_floating_point
    return value.to(own.dtype) if both_float else value


def _without_attributes(model: nn.Module, state: Any) -> Any:
    """Check that a captured state holds nothing that the module's ``load_state_dict`` would not know."""
    module = bodies(plain_module(model))[0]
    known = {key.replace("_orig_mod.", "") for key in module.state_dict(keep_vars=True)}
    others = [name for name in state if name not in known]
    if others:
        raise ValueError(
            f"The variables {_shown(others)} are plain attributes, which a file of weights can't hold. Register them: "
            "self.register_buffer(name, ts.Variable(...)); or save the model with ts.train.Checkpoint."
        )
    return state
