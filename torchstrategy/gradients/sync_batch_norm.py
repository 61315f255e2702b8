"""Batch normalisation over the examples of all replicas.

Each replica brings its count, mean and sum of squared deviations, and combines all of them in the order of replicas, so
that shares may be uneven or empty and all replicas compute the same bits. Forward and backward pass exchange one small
row of each replica: `[2 * channels + 1]` and `[2 * channels]`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from torchstrategy import patches
from torchstrategy.base.context import current_replica_context
from torchstrategy.base.devices import kind_of
from torchstrategy.base.options import ReduceOp
from torchstrategy.collectives.reductions import differentiable_all_gather
from torchstrategy.gradients.lone_values import trains_on_one

__all__ = ["SyncBatchNorm", "serve_layers_of_torch"]

_GRADIENT = "the gradient of SyncBatchNorm"


class SyncBatchNorm(nn.SyncBatchNorm):
    r"""Batch normalisation with the mean and the variance of the global batch, on every device.

    In replica context the statistics are those of all replicas' examples, so that N replicas train like one replica
    with ``torch.nn.BatchNorm1d``, ``BatchNorm2d`` or ``BatchNorm3d``, also where shares of a batch are uneven or empty.
    Every replica must call the layer. It is so in training, and in evaluation with ``track_running_stats=False``, where
    torch's own layer takes the statistics of the share. Elsewhere the layer is a plain batch norm.

    A share's :math:`n_i` values for each channel have the mean :math:`m_i` and the sum of squared deviations
    :math:`M_i`. With :math:`n = \sum n_i` the mean is :math:`m = \sum n_i m_i / n` and the variance
    :math:`\sum (M_i + n_i (m_i - m)^2) / n` (Chan, Golub and LeVeque, "Algorithms for computing the sample variance",
    1983).

    Parameters, buffers and ``state_dict`` are those of torch's layers. ``torch.nn.SyncBatchNorm`` does the same as this
    class in the replica context of a strategy with several replicas.

    Args:
        num_features: number of channels, the size of axis 1 of the input.
        eps: is added to the variance.
        momentum: weight of a batch in the running statistics; ``None`` means that all batches count alike.
        affine: whether there are a weight and a bias, ``[num_features]`` each.
        track_running_stats: whether there are running statistics, which are used in evaluation.
        process_group: must be ``None``.
        **kwargs: ``device``, ``dtype``, and ``bias`` where torch's batch norm has it.

    Raises:
        ValueError: a ``process_group`` is given; when called, there is only one value for each channel over all
            replicas (not looked for on accelerators, which would have to be waited for).

    Example:
        >>> strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     norm = ts.nn.SyncBatchNorm(1, affine=False)
        >>> dataset = strategy.experimental_distribute_dataset(torch.tensor([[1.0], [3.0], [5.0]]), batch_size=3)
        >>> strategy.experimental_local_results(strategy.run(norm, args=(next(iter(dataset)),)))
        (tensor([[-1.2247],
                [ 0.0000]]), tensor([[1.2247]]))
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,  # noqa: FBT001, FBT002 - torch's signature
        track_running_stats: bool = True,  # noqa: FBT001, FBT002
        process_group: Any = None,
        **kwargs: Any,
    ) -> None:
        _check_group(process_group)
        super().__init__(num_features, eps, momentum, affine, track_running_stats, process_group, **kwargs)

    @override
    def forward(self, input: Tensor) -> Tensor:
        if _uses_batch(self):
            return _normalise(self, input, _BatchNorm.forward)
        return _BatchNorm.forward(self, input)

    @override
    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_group: Any = None) -> Any:
        """Make the batch norms in a module synchronised ones: the same objects, of another class.

        Call it before the first ``run``, and before a compiler sees the module.

        Args:
            module: a module, at any depth of which batch norms are changed.
            process_group: must be ``None``.

        Returns:
            The module.

        Raises:
            ValueError: a ``process_group`` is given, a lazy batch norm has no shape yet, or a batch norm does more than
                torch's; nothing is changed then.

        Example:
            >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
            >>> isinstance(ts.nn.SyncBatchNorm.convert_sync_batchnorm(model)[1], torch.nn.SyncBatchNorm)
            True
        """
        _check_group(process_group)
        layers = {
            name: layer
            for name, layer in module.named_modules()
            if type(layer) is nn.SyncBatchNorm
            or (isinstance(layer, _BatchNorm) and not isinstance(layer, nn.SyncBatchNorm))
        }
        for name, layer in layers.items():
            _check_convertible(name, layer)
        for layer in layers.values():
            layer.__class__ = cls
            layer.process_group = None  # type: ignore[assignment]
        return module


def _check_convertible(name: str, layer: nn.Module) -> None:
    if any(map(nn.parameter.is_lazy, layer.parameters())):
        raise ValueError(
            f"The batch norm {name!r} is not initialised yet. Call the model on one batch before "
            "`convert_sync_batchnorm`."
        )
    if nn.utils.parametrize.is_parametrized(layer):
        raise ValueError(f"The batch norm {name!r} is parametrized. Convert the model before you parametrize it.")
    if type(layer).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward):
        raise ValueError(
            f"The batch norm {name!r} is a {type(layer).__qualname__}, whose own `forward` would be lost. Put a "
            "`ts.nn.SyncBatchNorm` and what else it does in its place; of timm's models, "
            "`timm.layers.convert_sync_batchnorm(model)` does so."
        )


def serve_layers_of_torch(user: Any) -> None:
    """Let ``torch.nn.SyncBatchNorm`` do what ours does where replicas run.

    Torch's own runs on accelerators only, and synchronises the processes of torch's default group: without such a group
    it would normalise each share by itself, without a word. Replacing ``forward`` reaches layers that were unpickled,
    copied or converted, and leaves their class as it is.

    Args:
        user: as long as it lives torch's layer is changed: a strategy.
    """
    _forward_of_torch.use(user)


def _replace_forward() -> list[Callable[[], None]]:
    original = nn.SyncBatchNorm.forward

    @functools.wraps(original)
    def forward(self: Any, input: Tensor) -> Tensor:
        if self.process_group is None and _uses_batch(self):
            return _normalise(self, input, original)
        return original(self, input)

    why = "torch's own knows no replicas of a strategy"
    return [patches.replace(nn.SyncBatchNorm, "forward", forward, why, patches.STRATEGIES)]


_forward_of_torch = patches.WhileUsed(_replace_forward)


def _check_group(process_group: Any) -> None:
    if process_group is not None:
        raise ValueError(
            "ts.nn.SyncBatchNorm synchronises all replicas of the strategy in whose `run` it is called, and no other "
            "group. Leave process_group out, or use torch.nn.SyncBatchNorm."
        )


def _uses_batch(layer: Any) -> bool:
    """Say whether a layer normalises with statistics of the batch, not with the running ones."""
    return layer.training or (layer.running_mean is None and layer.running_var is None)


@_disable_dynamo  # replicas meet in it; torch.compiler.disable would import the compiler here
def _normalise(layer: Any, value: Tensor, plain: Any) -> Tensor:
    """Normalise over all replicas; by the function ``plain`` where there are none to meet."""
    context: Any = current_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return plain(layer, value)  # type: ignore[no-any-return]
    layer._check_input_dim(value)
    layer._check_non_zero_input_channels(value)
    # As `_BatchNorm.forward`: the batch counts before anything can fail.
    tracks = layer.training and layer.track_running_stats
    if tracks:
        layer.num_batches_tracked.add_(1)
    results = _Normalise.apply(value, layer.weight, layer.bias, layer.eps, context)  # type: ignore[no-untyped-call]
    result, mean, variance, count = results
    if tracks:
        _update_running(layer, mean, variance, count)
    return result  # type: ignore[no-any-return]


def _update_running(layer: Any, mean: Tensor, variance: Tensor, count: Tensor) -> None:
    with torch.no_grad():
        num_batches = layer.num_batches_tracked.to(mean.dtype)
        factor = num_batches.reciprocal() if layer.momentum is None else mean.new_full((), layer.momentum)
        factor = torch.where(count > 0, factor, 0.0)  # without any example all stays as it is
        unbiased = variance * (count / (count - 1).clamp(min=1))
        for running, new in ((layer.running_mean, mean), (layer.running_var, unbiased)):
            running.copy_(torch.lerp(running.to(mean.dtype), new, factor))


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, value: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, context: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mean, variance, count = _combine(_all_rows(_own_row(value), context))
        if value.device.type == "cpu" and count == 1 and not trains_on_one.get():
            raise ValueError(
                "Expected more than 1 value per channel when training. Over all replicas there is one: "
                f"input {tuple(value.shape)} on replica {context.replica_id_in_sync_group}."
            )
        ctx.save_for_backward(value, weight, bias, mean, variance, count)
        ctx.eps, ctx.context = eps, context
        ctx.mark_non_differentiable(mean, variance, count)
        ctx.set_materialize_grads(False)
        weight, bias = (None if tensor is None else tensor.to(mean.dtype) for tensor in (weight, bias))
        result = functional.batch_norm(value, mean, variance, weight, bias, training=False, eps=eps)
        return result, mean, variance, count

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:
        value, weight, bias, mean, variance, count = ctx.saved_tensors
        if grad is None:
            grad = torch.zeros_like(value)
        if torch.is_grad_enabled():  # create_graph=True
            return *_differentiable_gradients(ctx, value, weight, bias, grad), None, None
        scale = (variance + ctx.eps).rsqrt()
        sums = _own_sums(grad, value, mean, variance, ctx.eps)
        grads = [None, *(None if p is None else s.to(p.dtype) for p, s in zip((weight, bias), sums, strict=True))]
        if ctx.needs_input_grad[0]:
            totals = ctx.context._gather_rows(torch.cat(sums), _GRADIENT).sum(0).view(2, -1)
            if weight is not None:
                scale = scale * weight.to(mean.dtype)
            # scale * (grad - mean of grad - normalised * mean of (grad * normalised)), with means over all replicas
            of_values, of_ones = -scale * totals / count
            wide = value.to(mean.dtype)
            rest = functional.batch_norm(wide, mean, variance, of_values, of_ones, training=False, eps=ctx.eps)
            grads[0] = rest.addcmul_(grad.to(mean.dtype), _along_channels(scale, value)).to(value.dtype)
        return *grads, None, None


def _differentiable_gradients(
    ctx: Any, value: Tensor, weight: Tensor | None, bias: Tensor | None, grad: Tensor
) -> list[Any]:
    """Return the gradients, computed anew by operations that autograd can differentiate again."""
    inputs: list[Any] = [value, weight, bias]
    wide = value.to(torch.promote_types(value.dtype, torch.float32))
    mean, variance, _ = _combine(_all_rows(_differentiable_row(wide), ctx.context))
    result = (wide - _along_channels(mean, value)) * _along_channels((variance + ctx.eps).rsqrt(), value)
    if weight is not None:
        result = result * _along_channels(weight, value)
    if bias is not None:
        result = result + _along_channels(bias, value)
    wanted = [k for k, needed in enumerate(ctx.needs_input_grad[:3]) if needed]
    found = torch.autograd.grad(result.to(value.dtype), [inputs[k] for k in wanted], grad, create_graph=True)
    grads: list[Any] = [None] * 3
    for k, gradient in zip(wanted, found, strict=True):
        grads[k] = gradient
    return grads


def _own_row(value: Tensor) -> Tensor:
    """Return the share's ``[mean, squared deviations, count]`` as ``[2 * channels + 1]``; halves in ``float32``."""
    dtype = torch.promote_types(value.dtype, torch.float32)
    channels = value.shape[1]
    count = value.numel() // channels
    if count == 0:
        return torch.zeros(2 * channels + 1, dtype=dtype, device=value.device)
    if not kind_of(value.device).has_batch_norm_statistics:
        return _differentiable_row(value.to(dtype))
    # Several times as fast as var_mean on a CPU. The running statistics only say in which dtype to compute.
    running = torch.zeros(2, channels, dtype=dtype, device=value.device)
    mean, variance = torch.batch_norm_update_stats(value, running[0], running[1], 0.0)
    return torch.cat([mean, variance * count, mean.new_full((1,), count)])


def _differentiable_row(value: Tensor) -> Tensor:
    others = [axis for axis in range(value.dim()) if axis != 1]
    count = value.numel() // value.shape[1]
    if count == 0:
        return torch.cat([value.sum(others), value.sum(others), value.new_zeros(1)])
    variance, mean = torch.var_mean(value, others, correction=0)
    return torch.cat([mean, variance * count, mean.new_full((1,), count)])


def _all_rows(row: Tensor, context: Any) -> Tensor:
    """Return all replicas' rows in the order of replicas; differentiable."""
    (rows,) = differentiable_all_gather(
        lambda own: ([context._gather_rows(own[0][0], "SyncBatchNorm")], [context.replica_id_in_sync_group]),
        lambda grads: context._all_reduce(ReduceOp.SUM, grads, _GRADIENT),
        0,
        [row.unsqueeze(0)],
    )
    return rows


def _combine(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean, biased variance and count of what all replicas have."""
    channels = rows.shape[1] // 2
    means, deviations, counts = rows[:, :channels], rows[:, channels:-1], rows[:, -1:]
    count = counts.sum()
    some = count.clamp(min=1)
    mean = (means * counts).sum(0) / some
    variance = (deviations + counts * (means - mean).square()).sum(0) / some
    return mean, variance, count


def _own_sums(grad: Tensor, value: Tensor, mean: Tensor, variance: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the share's sums of gradient times normalised value, and of the gradient: those of weight and bias."""
    if value.numel() == 0:
        return torch.zeros_like(mean), torch.zeros_like(mean)
    statistics = (mean, variance, None, None)  # given ones, as in evaluation
    is_training, wanted = False, [False, True, True]
    _, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
        grad, value, torch.ones_like(mean), *statistics, is_training, eps, wanted
    )
    return of_weight, of_bias


def _along_channels(vector: Tensor, value: Tensor) -> Tensor:
    return vector.view(-1, *(1,) * (value.dim() - 2))
