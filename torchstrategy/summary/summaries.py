"""What can be written: scalars, histograms, images and texts.

Of all replicas only the chief's replica 0 writes; elsewhere the functions return before they look at the data, so no
device is waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchstrategy import errors
from torchstrategy.base.values import PerReplica
from torchstrategy.summary.writer import (
    default_step,
    default_writer,
    import_tensorboard,
    should_record_summaries,
    writes_here,
)

__all__ = ["histogram", "image", "scalar", "text"]


def scalar(name: str, data: Any, step: Any = None, description: str | None = None) -> bool:
    """Write one number. Either context: over all replicas it is written once, by the chief's replica 0.

    Inside ``run`` that is replica 0's own number, so reduce it first if replicas have different ones.

    Args:
        name: under which TensorBoard shows it.
        data: a number or scalar tensor.
        step: the step, an integer or integer scalar; ``None`` means the one that is set.
        description: Markdown that TensorBoard shows with it.

    Returns:
        Whether it was written: not without a writer, where ``record_if`` forbids it, or on another replica.

    Raises:
        ValueError: there is no step, or ``data`` is a ``PerReplica``.
        TypeError: the step is no integer.
        InvalidArgumentError: ``data`` is no scalar.

    Example:
        >>> ts.summary.scalar("loss", 0.5, step=1)  # there is no writer
        False
    """

    def make(summaries: Any) -> list[Any]:
        value = _array(data, "scalar", name)
        if value.ndim:
            raise errors.InvalidArgumentError(
                f"ts.summary.scalar({name!r}) needs one number. Received shape {value.shape}: take its mean or sum, or "
                "use ts.summary.histogram."
            )
        return [summaries.scalar(name, value)]

    return _write("scalar", name, data, step, description, make)


def histogram(
    name: str, data: Any, step: Any = None, buckets: int | None = None, description: str | None = None
) -> bool:
    """Write the distribution of numbers. Either context: it is written once, by the chief's replica 0.

    Args:
        name: under which TensorBoard shows it.
        data: numbers of any shape, also none.
        step: the step; ``None`` means the one that is set.
        buckets: number of buckets; ``None`` means 30.
        description: Markdown that TensorBoard shows with it.

    Returns:
        Whether it was written.

    Raises:
        ValueError: there is no step, ``data`` is a ``PerReplica``, or ``buckets`` is not positive.
        InvalidArgumentError: ``data`` are no finite numbers.

    Example:
        >>> ts.summary.histogram("weights", torch.randn(3, 2), step=1)  # there is no writer
        False
    """
    if buckets is not None and buckets < 1:
        raise ValueError(f"buckets must be at least 1. Received: {buckets}")

    def make(summaries: Any) -> list[Any]:
        values = _array(data, "histogram", name)
        if not np.isfinite(values).all():
            raise errors.InvalidArgumentError(
                f"ts.summary.histogram({name!r}) needs finite numbers. Received {int((~np.isfinite(values)).sum())} of "
                f"{values.size} that are infinite or not a number."
            )
        if values.size == 0:
            return [summaries.histogram_raw(name, 0.0, 0.0, 0, 0.0, 0.0, [0.0], [0])]
        return [summaries.histogram(name, values, 30 if buckets is None else buckets)]

    return _write("histogram", name, data, step, description, make)


def image(name: str, data: Any, step: Any = None, max_outputs: int = 3, description: str | None = None) -> bool:
    """Write images. Either context: they are written once, by the chief's replica 0.

    Several images get the names ``name/0``, ``name/1`` and so on.

    Args:
        name: under which TensorBoard shows them.
        data: ``[k, h, w, c]``, ``c`` from 1 to 4; floats from 0 to 1, to which they are clipped, or ``uint8``.
        step: the step; ``None`` means the one that is set.
        max_outputs: number of images that are written at most.
        description: Markdown that TensorBoard shows with them.

    Returns:
        Whether they were written.

    Raises:
        ValueError: there is no step, ``data`` is a ``PerReplica``, or ``max_outputs`` is negative.
        InvalidArgumentError: ``data`` has another shape or dtype.

    Example:
        >>> ts.summary.image("digits", torch.rand(8, 28, 28, 1), step=1)  # there is no writer
        False
    """
    if max_outputs < 0:
        raise ValueError(f"max_outputs must not be negative. Received: {max_outputs}")

    def make(summaries: Any) -> list[Any]:
        images = _pixels(data, name, max_outputs)
        names = [name] if len(images) == 1 else [f"{name}/{i}" for i in range(len(images))]
        return [summaries.image(tag, own, dataformats="HWC") for tag, own in zip(names, images, strict=True)]

    return _write("image", name, data, step, description, make)


def text(name: str, data: str, step: Any = None, description: str | None = None) -> bool:
    """Write a text. Either context: it is written once, by the chief's replica 0.

    Args:
        name: under which TensorBoard shows it.
        data: Markdown.
        step: the step; ``None`` means the one that is set.
        description: Markdown that TensorBoard shows with it.

    Returns:
        Whether it was written.

    Raises:
        ValueError: there is no step, or ``data`` is a ``PerReplica``.
        InvalidArgumentError: ``data`` is no string.

    Example:
        >>> ts.summary.text("settings", "`lr` = 0.1", step=0)  # there is no writer
        False
    """

    def make(summaries: Any) -> list[Any]:
        if not isinstance(data, str):
            raise errors.InvalidArgumentError(f"ts.summary.text({name!r}) needs a string. Received: {data!r}")
        summary = summaries.text(name, data)
        summary.value[0].tag = name  # torch appends "/text_summary"
        return [summary]

    return _write("text", name, data, step, description, make)


def _write(
    kind: str, name: str, data: Any, step: Any, description: str | None, make: Callable[[Any], list[Any]]
) -> bool:
    """Write what ``make`` makes of torch's functions for summaries, if it is to be written here."""
    writer = default_writer()
    if writer is None or not should_record_summaries():
        return False
    step = default_step() if step is None else step
    if step is None:
        raise ValueError(
            f"ts.summary.{kind}({name!r}) has no step. Pass step=..., or set one with writer.as_default(step=...) or "
            "ts.summary.experimental.set_step(...)."
        )
    if isinstance(data, PerReplica):
        raise ValueError(
            f"ts.summary.{kind}({name!r}) received a PerReplica, one value for each replica. Make it one value first: "
            'strategy.reduce("MEAN", value, axis=None), or strategy.gather(value, axis=0).'
        )
    if writer.is_noop or not writes_here():
        return False
    number = _step_number(step)
    summaries = make(import_tensorboard().summary)
    for summary in summaries:
        if description is not None:
            summary.value[0].metadata.summary_description = description
        writer.add(summary, number)
    return bool(summaries)


def _step_number(step: Any) -> int:
    try:
        return int(step)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"A summary's step must be an integer or an integer scalar. Received: {step!r}") from error


def _array(data: Any, kind: str, name: str) -> np.ndarray[Any, Any]:
    try:
        tensor = data.detach() if isinstance(data, Tensor) else torch.as_tensor(data)
        if tensor.is_complex():
            raise TypeError("complex")
        return tensor.to("cpu", torch.float64).numpy()
    except (TypeError, ValueError, RuntimeError) as error:
        raise errors.InvalidArgumentError(f"ts.summary.{kind}({name!r}) needs numbers. Received: {data!r}") from error


def _pixels(data: Any, name: str, max_outputs: int) -> np.ndarray[Any, Any]:
    """Return images as bytes."""
    images = data.detach() if isinstance(data, Tensor) else torch.as_tensor(np.asarray(data))
    if images.ndim != 4 or not 1 <= images.shape[3] <= 4:
        raise errors.InvalidArgumentError(
            f"ts.summary.image({name!r}) needs images of shape [k, h, w, c], c from 1 to 4. Received shape "
            f"{tuple(images.shape)}. torch's [k, c, h, w] becomes it by images.permute(0, 2, 3, 1)."
        )
    images = images[:max_outputs].cpu()
    if images.dtype.is_floating_point:
        images = (images.float().clamp(0, 1).nan_to_num() * 255.5).to(torch.uint8)  # as tf rounds them
    if images.dtype != torch.uint8:
        raise errors.InvalidArgumentError(
            f"ts.summary.image({name!r}) needs floats from 0 to 1, or uint8. Received dtype {images.dtype}."
        )
    return images.numpy()
