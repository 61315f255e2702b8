"""The losses of a model's layers: regularizers of parameters, and losses that layers add while they run.

An added loss belongs to the call in which it was added and is forgotten when the outermost module is called again. A
hook on the modules that were being called does that, so a model that adds no losses pays nothing. What was added is
kept beside the modules: neither copies and pickles nor ``state_dict`` see it.

The classes of ``ts.losses`` are plain objects, not modules: they have no state, and ``call`` gives per-example losses
to whoever reduces them. What layers add by ``ts.add_loss`` is kept beside the modules and forgotten when the
outermost module is called again; a pre-hook, put there by the first ``add_loss``, sees that. The modules being called
are read from Python's frames, so nothing has to be undone when a forward fails, and models without added losses pay
nothing.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torchstrategy import errors
from torchstrategy.base.context import current_frame, current_replica_context
from torchstrategy.base.devices import kind_of
from torchstrategy.base.log import users_frame, warn_once_at
from torchstrategy.replicas.adapters import register_trace_end
from torchstrategy.replicas.mirrored import resolve

__all__ = ["LayerLosses", "add_loss", "losses_of", "regularize"]

#: The attribute of a module that holds its regularizers: parameter name -> function. It is copied with the module.
_REGULARIZERS = "_ts_regularizers"
#: One key for all replicas' objects: hooks whose keys differ between replicas are removed.
_HOOK = "torchstrategy.add_loss"
_MAX_NAMES = 20

_Module = TypeVar("_Module", bound=nn.Module)

_added: weakref.WeakKeyDictionary[nn.Module, list[Tensor]] = weakref.WeakKeyDictionary()
#: How often `regularize` was called, by which it is known whether another look at a model's modules is needed.
_num_changes = 0


def regularize(module: _Module, name: str, regularizer: Callable[[Tensor], Tensor] | None) -> _Module:
    """Attach a regularizer to a parameter, as ``kernel_regularizer=`` does in Keras.

    ``ts.losses_of(model)`` then holds its value for any model that contains the module. It is part of the module's
    copies, on every replica too, but not of its ``state_dict``.

    Args:
        module: the module, or one that contains it.
        name: the parameter's name in it, such as ``"weight"`` or ``"encoder.0.weight"``. Of a parametrized one, the
            value after the parametrization counts.
        regularizer: such as ``ts.regularizers.L2(1e-4)``, or another function from a tensor to a scalar; ``None``
            removes what was attached.

    Returns:
        ``module``, so that it can be called where a layer is made.

    Raises:
        ValueError: there is no such parameter, or it has a regularizer already.
        TypeError: ``module`` is no module, ``name`` no string, or ``regularizer`` no function.

    Example:
        >>> layer = ts.regularize(torch.nn.Linear(2, 1), "weight", ts.regularizers.L2(0.5))
        >>> _ = torch.nn.init.ones_(layer.weight)
        >>> [loss.item() for loss in ts.losses_of(torch.nn.Sequential(layer, torch.nn.ReLU()))]
        [1.0]
    """
    _check_module(module)
    if isinstance(regularizer, type) or not (regularizer is None or callable(regularizer)):
        raise TypeError(
            "regularizer must be an object like ts.regularizers.L2(1e-4), or a function from a tensor to a scalar. "
            f"Received: {regularizer!r}"
        )
    if not isinstance(name, str):
        raise TypeError(f"name must be a parameter's name, such as 'weight'. Received: {name!r}")
    path, _, own_name = name.rpartition(".")
    try:
        owner = module.get_submodule(path)
    except AttributeError:
        owner = None
    if owner is None or own_name not in _own_parameters(owner):
        raise ValueError(f"{type(module).__name__} has no parameter {name!r}. It has: {_listed(module)}")
    attached: dict[str, Callable[[Tensor], Tensor]] = dict(getattr(owner, _REGULARIZERS, {}))
    if regularizer is None:
        attached.pop(own_name, None)
    elif own_name in attached:
        raise ValueError(
            f"{name!r} has a regularizer already: {attached[own_name]!r}. Attach one that does both, such as L1L2, or "
            "remove the first: ts.regularize(module, name, None)."
        )
    else:
        attached[own_name] = regularizer
    setattr(owner, _REGULARIZERS, attached)
    global _num_changes
    _num_changes += 1
    return module


def add_loss(value: Tensor, module: nn.Module | None = None) -> None:
    """Add a loss, such as one that depends on activations; to be called while a module runs, in its ``forward``.

    ``ts.losses_of(model)`` then holds it until the model is called again. On several replicas each one adds its own.
    Average over the replica's batch and scale the losses with ``ts.nn.scale_regularization_loss``, as in tf: that is
    the mean over the global batch if all shares are equal.

    Args:
        value: a tensor; one with several elements counts with their sum. If the replica's share of the batch is empty,
            a value that is not finite, such as a mean over nothing, counts as 0.
        module: the module that the loss belongs to; ``None`` means the one whose ``forward`` is running.

    Raises:
        TypeError: ``value`` is no tensor, or ``module`` no module.
        InvalidArgumentError: ``value`` is boolean or complex.
        RuntimeError: no module is being called.
        ValueError: ``module`` is not part of the one that is being called.

    Example:
        >>> class Sparse(torch.nn.Linear):
        ...     def forward(self, x):
        ...         y = super().forward(x)
        ...         ts.add_loss(0.01 * y.abs().mean())
        ...         return y
        >>> model = torch.nn.Sequential(Sparse(2, 2), torch.nn.ReLU())
        >>> _ = model(torch.ones(3, 2))
        >>> len(ts.losses_of(model))
        1
    """
    if torch.compiler.is_compiling():  # walking the frames is left to Python
        torch.compiler.disable(_add)(value, module)  # type: ignore[no-untyped-call]
    else:
        _add(value, module)


def losses_of(model: nn.Module) -> list[Tensor]:
    """Return the losses of a model's layers, as ``model.losses`` does in Keras.

    In a replica function they are this replica's, outside it replica 0's.

    Args:
        model: the model.

    Returns:
        The values of all regularizers, computed now, then the losses that the most recent call added; of modules, and
        not of names: what is shared counts once.

    Raises:
        TypeError: ``model`` is no module.

    Example:
        >>> model = ts.regularize(torch.nn.Linear(2, 1), "weight", ts.regularizers.L2(1e-4))
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> def loss_of(per_example_loss):
        ...     loss = ts.nn.compute_average_loss(per_example_loss, global_batch_size="actual")
        ...     return loss + ts.nn.scale_regularization_loss(ts.losses_of(model))
        >>> loss_of(torch.ones(3)).item() > 1.0
        True
    """
    _check_module(model)
    modules = [resolve(module) for module in model.modules()]
    penalties = [
        regularizer(getattr(module, name))
        for module in modules
        for name, regularizer in module.__dict__.get(_REGULARIZERS, {}).items()
    ]
    return penalties + [loss for module in modules for loss in _added.get(module, ())]


class LayerLosses:
    """The losses of one model's layers, for loops: a look at all modules is spared where there can't be any."""

    def __init__(self) -> None:
        self._seen = -1
        self._is_regularized = True

    def begin(self) -> None:
        """Look at the modules when they are needed next; they may have changed."""
        self._seen = -1

    def of(self, model: nn.Module) -> list[Tensor]:
        """Return what ``losses_of`` does.

        Args:
            model: the model, the same since ``begin``.
        """
        if self._seen != _num_changes:
            self._is_regularized = any(resolve(module).__dict__.get(_REGULARIZERS) for module in model.modules())
            self._seen = _num_changes
        return losses_of(model) if self._is_regularized or _added else []


def _add(value: Tensor, module: nn.Module | None) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(f"The value of add_loss must be a tensor. Received: {value!r}")
    if value.dtype == torch.bool or value.dtype.is_complex:
        raise errors.InvalidArgumentError(f"The value of add_loss must be of a real dtype. Received: {value.dtype}")
    running = _running(sys._getframe(1))
    target = _target(running, module)
    if running:
        _forget_at_next_call(running[-1])
    for other in (target, *running[:-1]):
        _hooks(other).setdefault(_HOOK, _before_call)
    _warn_of_sum(value)
    _added.setdefault(target, []).append(_without_nothing(value))


def _warn_of_sum(value: Tensor) -> None:
    """Warn of a sum over the examples of a replica's share, where a mean is meant."""
    context = current_replica_context()
    if context is None or context.num_replicas_in_sync == 1 or value.grad_fn is None:
        return
    num_own, node = context._num_own_examples, value.grad_fn
    sizes: tuple[int, ...] = tuple(value.shape)
    while not sizes and node.name().startswith(("MulBackward", "NegBackward", "SumBackward")):
        if node.name().startswith("SumBackward"):
            over = tuple(getattr(node, "_saved_dim", None) or (0,))
            sizes = tuple(node._saved_self_sym_sizes)  # type: ignore[attr-defined]
            if 0 not in over or len(sizes) < 2:
                return
        children = [child for child, _ in node.next_functions if child is not None]
        if len(children) != 1:
            return
        node = children[0]
    if not sizes or sizes[0] != num_own or num_own == 1 or _is_of_parameter(node, sizes):
        return
    site = users_frame()
    warn_once_at(
        site,
        f"The loss that is added at {site} is a sum over the examples of this replica's share of the batch. Such "
        "losses are averaged over the replicas, so this one counts the less the more replicas there are. Add a mean "
        "over examples: ts.add_loss(value.mean()), or the sum over len(x).",
        of=context.strategy,
    )


def _is_of_parameter(node: Any, sizes: tuple[int, ...]) -> bool:
    """Say whether what an operation makes is of one parameter, element by element."""
    while not node.name().endswith("AccumulateGrad"):
        children = [child for child, _ in node.next_functions if child is not None]
        if len(children) != 1:
            return False
        node = children[0]
    return tuple(node.variable.shape) == sizes


def _target(running: list[nn.Module], module: nn.Module | None) -> nn.Module:
    if module is None:
        if not running:
            raise RuntimeError(
                "add_loss was called while no module is being called. Call it in the `forward` of a module that is "
                "called as `model(x)` (not `model.forward(x)`), or say which module is meant: "
                "add_loss(value, module=self)."
            )
        return running[0]
    _check_module(module)
    target: nn.Module = resolve(module)
    if running and all(member is not target for member in running[-1].modules()):
        raise ValueError(
            f"{type(module).__name__} is not part of {type(running[-1]).__name__}, which is being called, so it would "
            "never be known when the loss is out of date. Pass a module that is."
        )
    return target


def _running(frame: FrameType | None) -> list[nn.Module]:
    """Return the modules that are being called on this thread, the innermost one first."""
    found: list[nn.Module] = []
    while frame is not None:
        name = frame.f_code.co_name
        if name in ("_call_impl", "run"):
            caller = frame.f_locals.get("self")
            if name == "run" and _is_current(caller):
                break  # a module from whose `forward` the program calls `run` has calls of its own
            if name == "_call_impl" and isinstance(caller, nn.Module):
                found.append(caller)
        frame = frame.f_back
    return found


def _is_current(strategy: Any) -> bool:
    frame = current_frame()
    return frame is not None and frame.strategy is strategy


def _before_call(module: nn.Module, args: Any) -> None:  # noqa: ARG001 - a hook's signature
    if torch.compiler.is_compiling():
        torch.compiler.disable(_begin_call)(module)  # type: ignore[no-untyped-call]
    else:
        _begin_call(module)


def _begin_call(module: nn.Module) -> None:
    running = _running(sys._getframe(1))
    if len(running) > 1:
        _forget_at_next_call(running[-1])
    else:
        _forget(module)


def _forget_at_next_call(outermost: nn.Module) -> None:
    """Hook the outermost module; what it holds without a hook is from an earlier call of a part of it."""
    if _HOOK not in _hooks(outermost):
        _hooks(outermost)[_HOOK] = _before_call
        _forget(outermost)


def _hooks(module: nn.Module) -> dict[Any, Callable[..., Any]]:
    return module._forward_pre_hooks


def _forget(outermost: nn.Module) -> None:
    for module in outermost.modules():
        _added.pop(module, None)


def _forget_on(device_type: str) -> None:
    for module, values in _added.copy().items():
        if any(value.device.type == device_type for value in values):
            _added.pop(module, None)


register_trace_end(_forget_on)


def _without_nothing(value: Tensor) -> Tensor:
    """Return 0 for a loss that is not finite because there was nothing to average."""
    context = current_replica_context()
    shares = None if context is None else context.batch_shares
    if shares is None or context._num_own_examples:
        return value
    if kind_of(value.device).is_traced:  # where values can't be looked at while a program is traced
        return torch.where(value.isfinite().all(), value, 0.0)
    if value.isfinite().all():
        return value
    # A constant of its own: zero times the gradients of a mean over nothing would be nan.
    return torch.zeros_like(value, requires_grad=value.requires_grad)


def _own_parameters(module: nn.Module) -> set[str]:
    """Return the names of a module's own parameters and parametrized tensors."""
    own = {name for name, _ in module.named_parameters(recurse=False, remove_duplicate=False)}
    return own | {name for name in getattr(module, "parametrizations", ()) if isinstance(getattr(module, name), Tensor)}


def _listed(module: nn.Module) -> str:
    names = [
        f"{prefix}.{name}" if prefix else name
        for prefix, member in module.named_modules()
        for name in sorted(_own_parameters(member))
    ]
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return ", ".join(names[:_MAX_NAMES]) + more if names else "no parameters"


def _check_module(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"Expected a torch.nn.Module. Received: {module!r}")
