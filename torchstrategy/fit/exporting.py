"""Writing a model's forward pass as a program of torch.export, which runs without this library."""

from __future__ import annotations

import inspect
import os
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from torchstrategy.base import tree
from torchstrategy.checkpoint.storage import write_file
from torchstrategy.fit.calling import call_arguments, copy_module, describe_data, example_of
from torchstrategy.fit.trainer import trainer_of
from torchstrategy.fit.weight_files import strategy_of, write_as_one

__all__ = ["export", "trace"]

_EXAMPLE_BATCH_SIZE = 3  # a batch of 1 would be taken for a constant


def export(
    model: nn.Module,
    path: str | os.PathLike[str],
    example_inputs: Any = None,
    dynamic_batch: bool = True,  # noqa: FBT001, FBT002 - the model's method; beside tf's `overwrite`
    overwrite: bool = True,  # noqa: FBT001, FBT002
) -> None:
    """Write the forward pass, in evaluation mode and on the CPU, as a program of ``torch.export``.

    ``torch.export.load(path).module()`` runs it without this library and without the model's code. Cross-replica
    context, on every process; the chief writes.

    Args:
        model: the model.
        path: the file; torch's name for such files ends in ``.pt2``.
        example_inputs: an ``x`` as for ``predict``, of any values. ``None`` takes zeros of the shapes that the model
            saw first in ``fit``, ``evaluate`` or ``predict``.
        dynamic_batch: whether the program takes batches of any size, which are the first axis of all inputs. ``False``
            fixes the size to that of ``example_inputs``.
        overwrite: whether an existing file may be replaced.

    Raises:
        ValueError: there are no inputs to trace the model with, or they have no common batch size.
        RuntimeError: torch can't export the model; the message has the reason. Or another process could not write.
        FileExistsError: the file is there and may not be replaced.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> model = ts.Model(torch.nn.Linear(2, 1))
        >>> model.export(f"{folder.name}/model.pt2", example_inputs=torch.ones(4, 2))
        >>> torch.export.load(f"{folder.name}/model.pt2").module()(torch.ones(7, 2)).shape
        torch.Size([7, 1])
        >>> folder.cleanup()
    """
    example = _find_example(model, example_inputs)

    def write(file: str) -> None:
        module = copy_module(model, lambda tensor: tensor.clone())
        args, kwargs = call_arguments(module.forward, example)
        program = trace(module, args, kwargs, dynamic_batch=dynamic_batch)
        write_file(file, lambda opened: torch.export.save(program, opened))

    write_as_one(strategy_of(model), path, write, overwrite=overwrite, method="export")


def _find_example(model: nn.Module, example_inputs: Any) -> Any:
    """Return inputs on the CPU."""
    if example_inputs is not None:
        return tree.map_leaves(lambda leaf: torch.as_tensor(leaf).detach().cpu(), example_inputs)
    description = trainer_of(model).example_input
    if description is None:
        raise ValueError(
            "export(example_inputs=None): the model has seen no data yet, so the shapes of its inputs are not known. "
            "Pass example_inputs=x, a batch as for predict, or call fit, evaluate or predict before."
        )
    return example_of(description, _EXAMPLE_BATCH_SIZE)


def trace(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, dynamic_batch: bool) -> Any:
    """Return a module's forward pass as a program of ``torch.export``.

    Args:
        module: the module, in evaluation mode and on the CPU.
        args: an example of the arguments of its ``forward``.
        kwargs: an example of the keyword arguments.
        dynamic_batch: whether the program takes batches of any size, the first axis of all tensors.

    Raises:
        ValueError: the arguments have no common batch size.
        RuntimeError: torch can't export the module.
    """
    if not dynamic_batch:
        return _trace_fixed(module, args, kwargs)
    args, kwargs = _with_larger_batch(args, kwargs)
    batch = torch.export.Dim("batch")
    bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
    shapes = {name: tree.map_leaves(lambda leaf: {0: batch} if leaf.ndim else None, x) for name, x in bound.items()}
    try:
        return torch.export.export(module, args, kwargs, dynamic_shapes=shapes)
    except Exception as error:
        program = _trace_fixed(module, args, kwargs)  # raises with the reason if it isn't the batch size
        del program
        raise RuntimeError(
            f"export: {type(module).__name__} can't be exported for batches of any size: {_reason(error)}. Its forward "
            "computes something that depends on the number of examples as a Python number. Change that, or pass "
            "dynamic_batch=False, with which it can be exported."
        ) from error


def _trace_fixed(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return torch.export.export(module, args, kwargs)
    except Exception as error:
        raise RuntimeError(
            f"export: torch.export can't trace {type(module).__name__} with the inputs "
            f"{describe_data(kwargs or args)}: {_reason(error)}. Its forward must not branch on the values of tensors, "
            "and inputs must be such as predict takes; the cause is above."
        ) from error


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:4])[:500]}".rstrip(". ")


def _with_larger_batch(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return inputs with more than one example: torch takes an axis of size 1 for one that always has it.

    Raises:
        ValueError: the inputs differ in the number of their examples.
    """
    sizes = Counter(leaf.shape[0] for leaf in tree.all_leaves((args, kwargs)) if leaf.ndim)
    if len(sizes) != 1:
        raise ValueError(
            "export(dynamic_batch=True): the inputs must have one batch size, the length of their first axes. They are "
            f"{describe_data(kwargs or args)}. Pass dynamic_batch=False if that is meant."
        )
    (size,) = sizes

    def enlarge(leaf: Tensor) -> Tensor:
        if not leaf.ndim or size > 1:
            return leaf
        return leaf.new_zeros(_EXAMPLE_BATCH_SIZE, *leaf.shape[1:])

    larger: tuple[tuple[Any, ...], dict[str, Any]] = tree.map_leaves(enlarge, (args, kwargs))
    return larger
