"""``Model.summary``: a table of a model's layers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchstrategy.fit.callbacks.progress import print_line
from torchstrategy.fit.calling import call_arguments, copy_module, example_of
from torchstrategy.fit.trainer import is_metric, trainer_of
from torchstrategy.fit.weight_files import plain_module, strategy_of
from torchstrategy.replicas.mirrored import bodies

__all__ = ["summary"]

_GAP = "  "
_BATCH_SIZES = (2, 3)  # an axis that differs between them is the batch


def summary(
    model: nn.Module,
    line_length: int | None = None,
    print_fn: Callable[[str], Any] | None = None,
    expand_nested: bool = False,  # noqa: FBT001, FBT002 - Keras' signature, as the model's method
    show_trainable: bool = False,  # noqa: FBT001, FBT002
) -> None:
    """Print a table of the model's layers: their output shapes, as far as they are known, and numbers of parameters.

    Shapes are known after the model has seen data. They are found without computing anything.

    Args:
        model: the model.
        line_length: width of the table; ``None`` means as wide as its content.
        print_fn: called with the text; ``None`` prints it to standard output, on the chief only.
        expand_nested: list the layers of layers too, indented.
        show_trainable: say of each layer whether its parameters are trained.

    Example:
        >>> ts.Model(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU())).summary()
        Model: "sequential"
        -----------------------------------
        Layer (type)  Output shape  Param #
        ===================================
        0 (Linear)    ?                   9
        1 (ReLU)      ?                   0
        ===================================
        Total params: 9 (36.0 B)
        Trainable params: 9 (36.0 B)
        Non-trainable params: 0 (0.0 B)
    """
    module = bodies(plain_module(model))[0]
    shapes = _find_shapes(model)
    header = ["Layer (type)", "Output shape", "Param #", *(["Trainable"] if show_trainable else [])]
    rows = [
        [_title(name, layer), shapes.get(name, "?"), _count(layer), *([_trained(layer)] if show_trainable else [])]
        for name, layer in _layers(module, expand_nested=expand_nested)
    ]
    lines = [f'Model: "{getattr(model, "name", type(module).__name__)}"', *_table(header, rows, line_length)]
    text = "\n".join([*lines, *_totals(module)])
    if print_fn is not None:
        print_fn(text)
    elif strategy_of(model).is_chief:
        print_line(text)


def _layers(module: nn.Module, *, expand_nested: bool) -> Iterator[tuple[str, nn.Module]]:
    """Yield layers by the names that they have in the module; the module itself if it has parameters of its own."""
    children = [(name, child) for name, child in module.named_children() if not is_metric(child)]
    if not children or any(True for _ in module.parameters(recurse=False)):
        yield "", module
    for name, child in children:
        yield name, child
        if expand_nested:
            yield from ((f"{name}.{below}", layer) for below, layer in _layers(child, expand_nested=True) if below)


def _find_shapes(model: nn.Module) -> dict[str, str]:
    """Return each layer's output shape by its name, by calling a copy whose tensors have shapes only."""
    description = trainer_of(model).example_input
    if description is None:
        return {}
    first, second = (_call_without_values(model, description, size) for size in _BATCH_SIZES)
    return {name: _join(shape, second.get(name)) for name, shape in first.items()}


def _call_without_values(model: nn.Module, description: Any, batch_size: int) -> dict[str, Any]:
    """Return the shapes of the layers' outputs, as far as they don't depend on values."""
    outputs: dict[str, Any] = {}
    with contextlib.suppress(Exception), torch.device("meta"), torch.no_grad():
        module = copy_module(model, lambda tensor: torch.empty_like(tensor, device="meta"))
        for name, layer in module.named_modules():
            layer.register_forward_hook(
                lambda _layer, _args, output, name=name: outputs.update({name: _shapes(output)})
            )
        args, kwargs = call_arguments(module.forward, example_of(description, batch_size))
        module(*args, **kwargs)
    return outputs


def _shapes(output: Any) -> Any:
    if isinstance(output, Tensor):
        return torch.Size(output.shape)
    if isinstance(output, dict):
        return {str(name): _shapes(value) for name, value in output.items()}
    if isinstance(output, (list, tuple)):
        return [_shapes(value) for value in output]
    return None


def _join(first: Any, second: Any) -> str:
    """Return the text of a layer's output shapes, with ``None`` where two batch sizes make them differ."""
    if type(first) is not type(second) or first is None:
        return "?"
    if isinstance(first, torch.Size):
        if len(first) != len(second):
            return "?"
        return str(tuple(a if a == b else None for a, b in zip(first, second, strict=True)))
    if isinstance(first, dict):
        return "{" + ", ".join(f"{name}: {_join(shape, second.get(name))}" for name, shape in first.items()) + "}"
    return "[" + ", ".join(_join(a, b) for a, b in zip(first, second, strict=False)) + "]"


def _title(name: str, layer: nn.Module) -> str:
    indent = _GAP * name.count(".")
    return f"{indent}{name.rpartition('.')[2]} ({type(layer).__name__})" if name else f"({type(layer).__name__})"


def _count(layer: nn.Module) -> str:
    parameters = list(layer.parameters())
    if any(is_lazy(parameter) for parameter in parameters):
        return "?"
    return f"{sum(parameter.numel() for parameter in parameters):,}"


def _trained(layer: nn.Module) -> str:
    flags = {parameter.requires_grad for parameter in layer.parameters()}
    return {frozenset(): "-", frozenset({True}): "Y", frozenset({False}): "N"}.get(frozenset(flags), "partly")


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], line_length: int | None) -> list[str]:
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    total = sum(widths) + len(_GAP) * (len(widths) - 1)
    if line_length is not None and line_length > total:
        widths[0] += line_length - total
        total = line_length
    elif line_length is not None:
        widths = _narrowed(widths, total - line_length)
        total = sum(widths) + len(_GAP) * (len(widths) - 1)

    def line(row: Sequence[str]) -> str:
        cells = [_cut(cell, width) for cell, width in zip(row, widths, strict=True)]
        shown = [
            cell.rjust(width) if i == 2 else cell.ljust(width) for i, (cell, width) in enumerate(_zip(cells, widths))
        ]
        return _GAP.join(shown).rstrip()

    return ["-" * total, line(header), "=" * total, *map(line, rows), "=" * total]


def _zip(cells: Sequence[str], widths: Sequence[int]) -> Iterator[tuple[str, int]]:
    return zip(cells, widths, strict=True)


def _narrowed(widths: list[int], excess: int) -> list[int]:
    """Return narrower first columns, as far as they stay legible."""
    narrowed = list(widths)
    for i in (1, 0):
        taken = min(excess, max(0, narrowed[i] - 12))
        narrowed[i] -= taken
        excess -= taken
    return narrowed


def _cut(cell: str, width: int) -> str:
    return cell if len(cell) <= width else cell[: width - 1] + "…"


def _totals(module: nn.Module) -> list[str]:
    parameters = list(module.parameters())
    kinds = {
        "Total params": parameters,
        "Trainable params": [p for p in parameters if p.requires_grad],
        "Non-trainable params": [p for p in parameters if not p.requires_grad],
    }
    lines = [f"{kind}: {_size(tensors)}" for kind, tensors in kinds.items()]
    buffers = list(module.buffers())
    return lines + ([f"Buffers: {_size(buffers)}"] if buffers else [])


def _size(tensors: Sequence[Tensor]) -> str:
    known = [tensor for tensor in tensors if not is_lazy(tensor)]
    num_bytes = float(sum(tensor.numel() * tensor.element_size() for tensor in known))
    unit = "B"
    for larger in ("KB", "MB", "GB", "TB"):
        if num_bytes < 1024:
            break
        num_bytes, unit = num_bytes / 1024, larger
    text = f"{sum(tensor.numel() for tensor in known):,} ({num_bytes:.1f} {unit})"
    return text if len(known) == len(tensors) else f"{text}, and those of lazy layers, which have no shape yet"
