"""Losses that add up over replicas: what each replica contributes to the loss of the global batch; and `SyncBatchNorm`.

Every divisor is known before ``backward()``; nothing is rescaled afterwards. Halves are added up in ``float32``, so
that neither the sum nor a large batch size overflows.
"""

from __future__ import annotations

import numbers
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchstrategy import errors
from torchstrategy.base import later
from torchstrategy.base.context import get_replica_context, get_strategy, has_strategy, in_cross_replica_context
from torchstrategy.base.log import warn_once
from torchstrategy.base.values import known_counts, note_scaled
from torchstrategy.gradients.sync_batch_norm import SyncBatchNorm

__all__ = ["SyncBatchNorm", "compute_average_loss", "scale_mean_loss", "scale_regularization_loss"]

later.explain_absent(__name__)

_ACTUAL = "actual"


def compute_average_loss(
    per_example_loss: Tensor, sample_weight: Tensor | None = None, global_batch_size: int | Tensor | str | None = None
) -> Tensor:
    """Sum this replica's per-example losses and divide by the global batch size.

    Summing the results over all replicas gives the mean over the whole global batch, so gradients must be
    all-reduced with ``SUM``. With ``"actual"`` a partial last batch is exact; a constant makes its examples weigh less.
    To be called in replica context; in cross-replica context only with a number as ``global_batch_size``.

    Args:
        per_example_loss: ``[batch, ...]``, float or int; ``batch`` is this replica's share and may be 0. All elements
            of an example are summed.
        sample_weight: broadcastable to ``per_example_loss``, or ``[batch]`` for a loss of ``[batch, n]``; ``None``
            means every example weighs 1. Weights do not change the divisor.
        global_batch_size: examples in the batch over all replicas, an integer or a scalar integer tensor. ``None``
            means ``batch`` times ``num_replicas_in_sync``, which is right only if every replica got the same share
            (where not, a warning says so once);
            ``"actual"`` means the true number of this step's examples, as the distributed dataset counted them.

    Returns:
        Scalar of ``per_example_loss``'s dtype (integers become ``float64``); 0 if ``global_batch_size`` is 0.

    Raises:
        ValueError: ``per_example_loss`` is a scalar, ``global_batch_size`` is no scalar, or with ``"actual"``
            ``batch`` is not this replica's share of the batch that was distributed.
        TypeError: ``global_batch_size`` is not an integer.
        InvalidArgumentError: ``per_example_loss`` is boolean, ``sample_weight`` does not fit, or
            ``global_batch_size`` is negative (not looked for in tensors on an accelerator, which would wait for it).
        RuntimeError: called in cross-replica context without a number as ``global_batch_size``, or ``"actual"`` is
            not known.

    Example:
        >>> loss = torch.tensor([1.0, 2.0, 3.0])
        >>> ts.nn.compute_average_loss(loss)
        tensor(2.)
        >>> ts.nn.compute_average_loss(loss, global_batch_size=6)  # the other replica holds the other 3
        tensor(1.)
        >>> ts.nn.compute_average_loss(loss, sample_weight=torch.tensor([1.0, 0.0, 1.0]), global_batch_size="actual")
        tensor(1.3333)
    """
    loss = _loss_tensor(per_example_loss, "per_example_loss")
    context = get_replica_context()
    if context is not None:
        context.has_scaled_losses = True
    if loss.ndim == 0:
        raise ValueError(
            "per_example_loss must have one entry for each example, shape [batch, ...]. Received a scalar: use a loss "
            "with reduction='none', or scale_regularization_loss for a term that is equal on all replicas."
        )
    divisor = _divisor(loss, global_batch_size)
    if isinstance(divisor, int) and global_batch_size is not None and sample_weight is None:
        _warn_if_too_small(divisor, loss.shape[0])
    result_dtype, sum_dtype = _dtypes(loss)
    if sample_weight is not None:
        loss = loss.to(sum_dtype) * _matching_weight(sample_weight, loss).to(sum_dtype)
    return note_scaled(context, _divide_no_nan(loss.sum(dtype=sum_dtype), divisor).to(result_dtype))


def scale_mean_loss(loss: Tensor, weight: int | float | Tensor | None = None) -> Tensor:
    """Scale a mean over this replica's share of a batch to the share's part of the mean over the global batch.

    For losses that come as a mean: of a model that returns its own, of a library, or of torch's losses with
    ``reduction="mean"``. Summing the results over all replicas gives the mean over the whole global batch, also where
    shares are uneven or empty. To be called in replica context; with a ``weight``, by every replica.

    Args:
        loss: the mean, a tensor with one element. If the share is empty, whatever it is counts as 0.
        weight: how many things ``loss`` is the mean of: tokens, elements, items, or the sum of their weights, a number
            or a scalar tensor that is not negative. ``None`` means this replica's examples, as the distributed dataset
            has counted them, also over the batches that ``Model.fit`` accumulates.

    Returns:
        ``loss * weight / (the sum of all replicas' weights)``, in the shape and dtype of ``loss``.

    Raises:
        ValueError: ``loss`` or ``weight`` has more than one element.
        TypeError: ``loss`` is no tensor, or ``weight`` no number.
        InvalidArgumentError: ``weight`` is negative (not looked for on an accelerator, which would wait for it).
        RuntimeError: called in cross-replica context; or without a ``weight`` although the examples are not known; or
            with one in a batch that is one of several of an optimizer step of ``Model.fit``.

    Example:
        >>> strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> def step(x):
        ...     return ts.nn.scale_mean_loss(x.mean())
        >>> dataset = strategy.experimental_distribute_dataset(torch.tensor([1.0, 2.0, 6.0]), batch_size=3)
        >>> strategy.reduce("SUM", strategy.run(step, args=(next(iter(dataset)),)))
        tensor(3.)
    """
    if not isinstance(loss, Tensor) or not loss.is_floating_point():
        raise TypeError(f"loss must be a tensor of a float dtype, such as `criterion(outputs, y)`. Received: {loss!r}")
    if loss.numel() != 1:
        raise ValueError(
            f"loss must have one element, a mean. Received shape {tuple(loss.shape)}: for one loss for each example "
            "use compute_average_loss."
        )
    context = get_replica_context()
    if context is None:
        raise RuntimeError(
            "scale_mean_loss was called in cross-replica context, where there is no replica's share of a batch. Call "
            "it in a function given to strategy.run."
        )
    own, total = known_counts(context, 1) if weight is None else _part_of_weights(context, loss, weight)
    result_dtype, sum_dtype = _dtypes(loss)
    if isinstance(own, Tensor):
        masked = loss.masked_fill(own == 0, 0.0)
    else:
        masked = loss if own else loss.masked_fill(torch.ones_like(loss, dtype=torch.bool), 0.0)  # keeps the graph
    return note_scaled(context, _divide_no_nan(masked.to(sum_dtype) * own, total).to(result_dtype))


def scale_regularization_loss(regularization_loss: Tensor) -> Tensor:
    """Divide a loss that every replica computes alike by the number of replicas.

    Summing the results over all replicas gives the loss once. To be called in replica context.

    Args:
        regularization_loss: tensor of any shape, whose elements are summed, or a list of such tensors.

    Returns:
        Scalar of the same dtype (integers become ``float64``).

    Raises:
        RuntimeError: called in cross-replica context.
        InvalidArgumentError: not a tensor or a number, or boolean.

    Example:
        >>> weight = torch.tensor([3.0, 4.0])
        >>> ts.nn.scale_regularization_loss(weight.square().sum())  # one replica
        tensor(25.)
    """
    if in_cross_replica_context() and has_strategy():
        raise RuntimeError(
            "scale_regularization_loss was called in cross-replica context, where there is no replica's part of a "
            "loss. Call it in replica context: in a function given to strategy.run."
        )
    loss = _sum_all(regularization_loss)
    context = get_replica_context()
    if context is not None:
        context.has_scaled_losses = True
    # Each of the batches that make one optimizer step adds its part.
    return note_scaled(context, loss / (_num_replicas() * _num_parts(context)))


def _part_of_weights(context: Any, loss: Tensor, weight: Any) -> tuple[Tensor, Tensor]:
    """Return this replica's weight, and the sum of all replicas', in the precision that losses are added up in."""
    if isinstance(weight, bool) or not isinstance(weight, (int, float, Tensor, np.generic, numbers.Number)):
        raise TypeError(f"weight must be a number or a scalar tensor. Received: {weight!r}")
    num_parts = _num_parts(context)
    if num_parts > 1:
        raise RuntimeError(
            f"scale_mean_loss was given a weight in one of {num_parts} batches of one optimizer step, of which "
            "the others' weights are not known. Leave out the weight, which weighs by examples, or count beforehand "
            "and use compute_average_loss with the number of all things in the step as global_batch_size."
        )
    own = (
        torch.as_tensor(weight).detach().to(loss.device, torch.float64 if loss.device.type == "cpu" else torch.float32)
    )
    if own.numel() != 1:
        raise ValueError(f"weight must be one number, such as mask.sum(). Received shape {tuple(own.shape)}")
    if own.device.type == "cpu" and not torch.compiler.is_compiling() and own < 0:
        raise errors.InvalidArgumentError(f"weight must not be negative. Received: {float(own)}")
    own = own.reshape(())
    return own, context.all_reduce("SUM", own)


def _divisor(loss: Tensor, global_batch_size: Any) -> int | Tensor:
    if global_batch_size is None:
        if in_cross_replica_context() and has_strategy():
            raise RuntimeError(
                "compute_average_loss was called in cross-replica context, where there is no replica's share of a "
                "batch. Call it in a function given to strategy.run, or pass global_batch_size as a number."
            )
        return _divisor_of_equal_shares(loss.shape[0])
    if isinstance(global_batch_size, str) and global_batch_size == _ACTUAL:
        return _actual_batch_size(loss)
    if isinstance(global_batch_size, numbers.Integral) and not isinstance(global_batch_size, bool):
        if global_batch_size < 0:
            raise errors.InvalidArgumentError(f"global_batch_size must not be negative. Received: {global_batch_size}")
        return int(global_batch_size)
    num_parts = _num_parts(get_replica_context())
    if num_parts > 1:
        warn_once(
            f"global_batch_size is a tensor in one of {num_parts} parts of one optimizer step. It must be what "
            "all parts have over all replicas: counted in this part alone, it makes the step too large."
        )
    return _divisor_tensor(global_batch_size)


def _divisor_of_equal_shares(num_losses: int) -> int:
    """Return the size of the global batch if every replica has so many losses."""
    context = get_replica_context()
    num_parts = _num_parts(context)
    if num_parts == 1:
        _warn_of_uneven_shares(context, num_losses)
        return num_losses * _num_replicas()
    own, total = known_counts(context, num_losses)  # of all batches of the optimizer step
    return total if own == num_losses else num_losses * _num_replicas() * num_parts


def _warn_of_uneven_shares(context: Any, num_losses: int) -> None:
    shares = None if context is None or torch.compiler.is_compiling() else context.batch_shares
    if shares is None or len(set(shares.shares)) == 1 or num_losses != context._num_own_examples:
        return
    warn_once(
        "compute_average_loss without global_batch_size divides by this replica's share of the batch times the number "
        "of replicas, as in tf, but the shares of this batch are uneven, so that the examples of small ones weigh more "
        'than the others. Say global_batch_size="actual", which is exact for every batch.',
        stacklevel=6,
    )


def _num_parts(context: Any) -> int:
    """Return how many batches make the optimizer step that a replica works on."""
    shares = None if context is None else context.batch_shares
    return 1 if shares is None else int(shares.num_parts)


def _divisor_tensor(global_batch_size: Any) -> Tensor:
    if isinstance(global_batch_size, (list, tuple, np.ndarray, np.generic)):
        global_batch_size = torch.as_tensor(global_batch_size)
    if not isinstance(global_batch_size, Tensor):
        raise TypeError(
            f"global_batch_size must be an integer, 'actual' or None. Received: {global_batch_size!r} of type "
            f"{type(global_batch_size).__name__}"
        )
    if global_batch_size.ndim != 0:
        raise ValueError(f"global_batch_size must be a scalar. Received shape {tuple(global_batch_size.shape)}")
    if global_batch_size.dtype.is_floating_point or global_batch_size.dtype in (torch.bool, torch.complex64):
        raise TypeError(f"global_batch_size must be an integer. Received dtype {global_batch_size.dtype}")
    # Reading a tensor waits for an accelerator and breaks a compiled graph, so only plain CPU tensors are looked at.
    if global_batch_size.device.type == "cpu" and not torch.compiler.is_compiling() and global_batch_size < 0:
        raise errors.InvalidArgumentError(f"global_batch_size must not be negative. Received: {int(global_batch_size)}")
    return global_batch_size


def _warn_if_too_small(global_batch_size: int, num_losses: int) -> None:
    """Warn of a global batch size that is smaller than the batch, and of a batch that every replica got whole."""
    context = get_replica_context()
    if torch.compiler.is_compiling() or context is None or num_losses == 0:
        return
    shares = context.batch_shares
    if context.num_replicas_in_sync == 1 and (shares is None or shares.num_parts == 1):
        return
    remedy = 'Give the number of examples over all replicas, or "actual".'
    if shares is None and num_losses >= global_batch_size > 0:
        warn_once(
            f"This replica alone has {num_losses} losses, and there are {context.num_replicas_in_sync} replicas, but "
            f"global_batch_size={global_batch_size}. If every replica was given the same batch, the sum over replicas "
            "counts it several times: iterate over `strategy.experimental_distribute_dataset(dataset)`, which gives "
            f"each replica its share. {remedy}"
        )
    elif shares is not None and global_batch_size < shares.divisor and num_losses == context._num_own_examples:
        if shares.num_parts == 1:
            warn_once(
                f"global_batch_size={global_batch_size}, but this batch has {shares.total} examples over all replicas, "
                f"so the loss is too large. {remedy}"
            )
        else:
            warn_once(
                f"global_batch_size={global_batch_size}, but the {shares.num_parts} parts of this step have "
                f"{shares.divisor} examples over all replicas, so the loss is too large. {remedy}"
            )


def _num_replicas() -> int:
    number: int = get_strategy().num_replicas_in_sync
    return number


def _actual_batch_size(loss: Tensor) -> int | Tensor:
    replica_context = get_replica_context()
    if replica_context is None:
        raise RuntimeError(
            'compute_average_loss(global_batch_size="actual") was called in cross-replica context, where no batch is '
            "being processed. Call it in a function given to strategy.run, or pass a number."
        )
    share, divisor = known_counts(replica_context, loss.shape[0])
    if loss.shape[0] != share:
        raise ValueError(
            f"per_example_loss has {loss.shape[0]} entries, but this replica's share of the batch is {share} examples, "
            'so "actual" is not its divisor. If the entries are tokens, masked elements or pairs, count them: '
            'global_batch_size=ctx.all_reduce("sum", torch.tensor(my_count)) with ctx = ts.get_replica_context().'
        )
    # As a tensor, a compiled program is not compiled anew for each size.
    return divisor if replica_context.batch_shares is None else replica_context.actual_batch_size()


def _matching_weight(sample_weight: Any, loss: Tensor) -> Tensor:
    """Return the weights with as many dimensions as the loss where they differ by one, by tf's rule."""
    weight = _as_tensor(sample_weight, "sample_weight", loss.device)
    original = tuple(weight.shape)
    if weight.ndim == loss.ndim + 1 and weight.shape[-1] == 1:
        weight = weight.squeeze(-1)
    elif 0 < weight.ndim == loss.ndim - 1:
        weight = weight.unsqueeze(-1)
    if not _broadcasts_to(weight, loss):
        raise errors.InvalidArgumentError(
            f"sample_weight must be a scalar, or broadcastable to per_example_loss of shape {tuple(loss.shape)}. "
            f"Received shape {original}"
        )
    return weight


def _broadcasts_to(weight: Tensor, loss: Tensor) -> bool:
    if weight.ndim > loss.ndim:
        return False
    pairs = zip(reversed(weight.shape), reversed(loss.shape), strict=False)
    return all(own in (1, size) for own, size in pairs)


def _divide_no_nan(total: Tensor, divisor: int | Tensor) -> Tensor:
    if isinstance(divisor, Tensor):
        divisor = divisor.to(total.device, non_blocking=not total.is_cpu)
        # The quotient by zero is replaced before it is formed: its gradient would be nan even where it is masked.
        empty = divisor == 0
        return (total / divisor.masked_fill(empty, 1).to(total.dtype)).masked_fill(empty, 0.0)
    if divisor == 0:
        return total.masked_fill(torch.ones_like(total, dtype=torch.bool), 0.0)  # keeps the graph for backward()
    return total / divisor


def _sum_all(value: Any) -> Tensor:
    if isinstance(value, (list, tuple)) and any(isinstance(part, Tensor) for part in value):
        return torch.stack([_sum_all(part) for part in value]).sum()
    loss = _loss_tensor(value, "regularization_loss")
    result_dtype, sum_dtype = _dtypes(loss)
    return loss.sum(dtype=sum_dtype).to(result_dtype)


def _dtypes(loss: Tensor) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtype of the result and the one to add up in."""
    if not loss.dtype.is_floating_point:
        return torch.float64, torch.float64
    return loss.dtype, torch.float32 if loss.dtype.itemsize < 4 else loss.dtype


def _loss_tensor(value: Any, name: str) -> Tensor:
    loss = _as_tensor(value, name)
    if loss.dtype == torch.bool or loss.dtype.is_complex:
        raise errors.InvalidArgumentError(f"{name} must be of a float or integer dtype. Received: {loss.dtype}")
    return loss


def _as_tensor(value: Any, name: str, device: torch.device | None = None) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, (list, tuple)) and any(isinstance(part, Tensor) for part in value):
        return torch.stack([_as_tensor(part, name, device) for part in value])  # as_tensor would cut the graph
    try:
        return torch.as_tensor(value, device=device)
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        raise errors.InvalidArgumentError(f"{name} must be a tensor or numbers. Received: {value!r}") from error
