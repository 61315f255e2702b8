"""How a model is called with the ``x`` of a batch, in which mode, and what is said if that fails the first time."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.hooks import RemovableHandle

from torchstrategy import errors
from torchstrategy.base import tree
from torchstrategy.base.log import warning_once
from torchstrategy.base.names import dtype_name
from torchstrategy.checkpoint.tracked import to_plain
from torchstrategy.fit.batch_parts import unpack_x_y_sample_weight
from torchstrategy.fit.weight_files import plain_module
from torchstrategy.replicas.mirrored import bodies
from torchstrategy.replicas.record import unrecorded

__all__ = [
    "Evaluating",
    "call_arguments",
    "copy_module",
    "describe_data",
    "example_of",
    "explain_failed_call",
    "explain_unexpected",
    "initialise_lazy_layers",
    "put_into_training",
    "watch_modes",
    "with_mode",
]


class Evaluating:
    """Puts a model into evaluation mode without gradients, and back into the mode of each of its modules."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._no_grad = torch.no_grad()

    def __enter__(self) -> None:
        self._modes = _modes_of(self._model)
        self._model.eval()
        self._no_grad.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._no_grad.__exit__(*error)
        _restore(self._modes)


def put_into_training(model: Any) -> None:
    """Put a model into training mode, but for what the program has frozen and put into evaluation mode.

    That is each module in evaluation mode with parameters of which none is trained, such as a pretrained part with
    batch norms, and all that is in it; and each one without parameters, such as a dropout, that was put into it by
    itself.

    Args:
        model: the model.
    """
    for name, module in model.named_modules():
        if vars(bodies(module)[0]).get("trainable") is False and any(p.requires_grad for p in module.parameters()):
            warning_once(
                f"fit: `trainable` of {name or 'the model'} is False, which is Keras' and which torch does not read: "
                "its parameters are trained. Freeze them by requires_grad_(False), and batch norms in it by eval()."
            )
    kept = [pair for module in _frozen(model, is_alone=True) for pair in _modes_of(module)]
    model.train()
    _restore(kept)


def _frozen(module: Any, *, is_alone: bool) -> Iterator[Any]:
    """Yield the outermost modules that stay in evaluation mode.

    Args:
        module: where to look.
        is_alone: whether its mode is its own, and not that of a larger part that was put into evaluation mode.
    """
    if not module.training:
        parameters = list(module.parameters())
        if not any(p.requires_grad for p in parameters) and (parameters or is_alone):
            yield module
            return
    for child in module.children():
        yield from _frozen(child, is_alone=module.training)


def _modes_of(model: Any) -> list[tuple[Any, bool]]:
    return [(module, module.training) for module in model.modules()]


def _restore(modes: list[tuple[Any, bool]]) -> None:
    for module, training in modes:
        if module.training is not training:
            module.training = training


def initialise_lazy_layers(model: Any, strategy: Any, batch: Any) -> None:
    """Call a model that has parameters without a shape once, so that they get one.

    Replicas get copies of the parameters, which must exist by then.

    Args:
        model: the model.
        strategy: its strategy.
        batch: of a distributed dataset.
    """
    if any(is_lazy(tensor) for tensor in itertools.chain(model.parameters(), model.buffers())):
        x = unpack_x_y_sample_weight(strategy.experimental_local_results(batch)[0])[0]
        with Evaluating(model):
            args, kwargs = call_arguments(model._with_forward.forward, x)
            model(*args, **with_mode(model._with_forward, args, kwargs))


def copy_module(model: nn.Module, convert: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return a plain copy, for one replica and in evaluation mode, of the module that a model was made of.

    Args:
        model: the model.
        convert: makes the copy's tensors.
    """
    module = bodies(plain_module(model))[0]
    module = getattr(module, "_orig_mod", module)  # as it was before torch.compile
    memo: dict[int, Any] = {}
    for tensor in (*module.parameters(), *module.buffers()):
        if not is_lazy(tensor):
            value = convert(to_plain(tensor, "a tensor of the model"))
            is_parameter = isinstance(tensor, nn.Parameter)
            memo[id(tensor)] = nn.Parameter(value, tensor.requires_grad) if is_parameter else value
    with unrecorded():
        copied: nn.Module = copy.deepcopy(module, memo)
    if with_mode(copied, (), {}):  # what calls it does not know
        copied.register_forward_pre_hook(_give_mode, with_kwargs=True)
    return copied.eval()


def _give_mode(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args, with_mode(module, args, kwargs)


def example_of(description: Any, batch_size: int) -> Any:
    """Return inputs of a batch size: zeros of the shapes and dtypes that the trainer noted."""

    def make(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.zeros((batch_size, *shape[1:]) if shape else (), dtype=dtype)

    return map_described(make, description)


def map_described(fn: Callable[[tuple[int, ...], torch.dtype], Any], description: Any) -> Any:
    """Return a structure of descriptions with each of them replaced by what a function of it returns."""
    if is_described(description):
        return fn(*description)
    if isinstance(description, dict):
        return type(description)((name, map_described(fn, item)) for name, item in description.items())
    if isinstance(description, (list, tuple)):
        items = [map_described(fn, item) for item in description]
        return type(description)(*items) if hasattr(description, "_fields") else type(description)(items)
    return description


def is_described(value: Any) -> bool:
    """Say whether a value is the shape and dtype of a tensor."""
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], torch.dtype)


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
#: Parameters that are no inputs: those of Keras' layers.
_FLAGS = ("training", "mask")
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def call_arguments(forward: Callable[..., Any], x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of ``forward`` for the inputs of a model.

    Args:
        forward: the bound method.
        x: a tensor, which is the only argument; a tuple or list, whose parts are arguments if ``forward`` takes more
            than one; or a dict, whose entries are if ``forward`` has parameters of their names.

    Returns:
        Positional and keyword arguments.
    """
    if isinstance(x, Tensor) or not isinstance(x, (tuple, list, Mapping)):
        return (x,), {}
    parameters = inspect.signature(forward).parameters.values()
    if isinstance(x, Mapping):
        named = {parameter.name for parameter in parameters if parameter.kind in _NAMED}
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
        return ((), dict(x)) if named >= x.keys() or (takes_any and len(named) != 1) else ((x,), {})
    num_positional = sum(parameter.kind in _POSITIONAL and parameter.name not in _FLAGS for parameter in parameters)
    takes_more = any(parameter.kind is inspect.Parameter.VAR_POSITIONAL for parameter in parameters)
    return (tuple(x), {}) if num_positional > 1 or takes_more else ((x,), {})


def with_mode(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return keyword arguments with the module's mode, where its ``forward`` has Keras' ``training`` and lacks it here.

    Args:
        module: whose ``forward`` is called.
        args: what it is given.
        kwargs: its keyword arguments.
    """
    forward = getattr(module, "_orig_mod", module).forward  # as it was before torch.compile
    inner = inspect.unwrap(forward)
    code = getattr(inner, "__code__", None)  # a signature takes longer than a small layer, and this is in steps' way
    if code is None or "training" in kwargs:
        return kwargs
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    num_given = len(args) + (hasattr(forward, "__self__") or hasattr(inner, "__self__"))
    is_given = "training" in names[: min(num_given, code.co_argcount)]
    is_named = "training" in names[code.co_posonlyargcount :]
    return {**kwargs, "training": module.training} if is_named and not is_given else kwargs


def watch_modes(model: nn.Module) -> list[RemovableHandle]:
    """Warn of modules in a model that are called without the mode, which Keras would pass on to them; until removed."""
    modules = list(model.modules())
    if any("_orig_mod" in module._modules or vars(module).get("_compiled_call_impl") for module in modules):
        return []  # torch.compile would trace what looks
    inner = [module for module in modules if module is not model and with_mode(module, (), {})]
    return [module.register_forward_pre_hook(_warn_of_default, with_kwargs=True) for module in inner]


def _warn_of_default(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    default = inspect.signature(module.forward).parameters["training"].default
    if with_mode(module, args, kwargs) is not kwargs and bool(default) is not module.training:
        name = type(bodies(module)[0]).__name__
        warning_once(
            f"{name}.forward was called without `training`, which stays {default} where the mode is {module.training}. "
            f"Let what calls it pass it on (nn.Sequential can't), or let {name} read `self.training`."
        )


def explain_failed_call(error: Exception, model: Any, method: str, args: Any, kwargs: Any) -> Exception:
    """Return the error to raise when the first call of a model fails: it names what the model was given.

    Args:
        error: what ``forward`` raised.
        model: the model.
        method: such as ``"fit"``.
        args: what ``forward`` was given.
        kwargs: its keyword arguments.
    """
    named = {name: value for name, value in kwargs.items() if name not in _FLAGS}
    data = named if not args else (args[0] if len(args) == 1 and not named else (*args, *named.values()))
    message = (
        f"{method}(x=...): the model {model.name!r} failed on its first batch. Its forward was given "
        f"{describe_data(data)} and raised {type(error).__name__}: {str(error).rstrip('. ')}. {_advice(model, data)} "
        "The error above shows where in the model it happened."
    )
    return errors.InvalidArgumentError(message)


def explain_unexpected(module: Any, kwargs: Mapping[str, Any]) -> str | None:
    """Return what is wrong with a call whose keyword arguments ``forward`` does not have; ``None`` if it has them.

    Args:
        module: whose ``forward`` was called.
        kwargs: its keyword arguments.
    """
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):  # it is not Python's
        return None
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    unexpected = sorted(kwargs.keys() - {parameter.name for parameter in parameters if parameter.kind in _NAMED})
    if not unexpected:
        return None
    name = type(bodies(module)[0]).__name__
    message = f"{name}.forward has no parameter {' and no '.join(map(repr, unexpected))}, with which it was called."
    if "training" in unexpected:
        return (
            f"{message} Leave `training=` out: fit, evaluate and predict set the mode, which is `self.training` in a "
            "module; in a loop of your own call `model.eval()` before, and `model.train()` after."
        )
    return f"{message} Leave it out, or add it to forward."


def _advice(model: Any, data: Any) -> str:
    """Say what to change, if forward failed because of what it was given."""
    wanted = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    given = {leaf.dtype for leaf in tree.all_leaves(data) if isinstance(leaf, Tensor)}
    if wanted is None or wanted in given or len(given) != 1:
        return "If the shape of x is not what the first layer expects, change x (the first axis is the batch)."
    name, own = dtype_name(wanted), dtype_name(given.pop())
    return (
        f"The model's parameters are {name}, and x is {own}: if the first layer takes no integers, convert x "
        f"(x.to(torch.{name}); images also want a scale, as in x.float() / 255), or the model (model.to(x.dtype)). "
        "(NumPy's float64 arrays are read as torch.get_default_dtype(); tensors keep their dtype.)"
    )


def describe_data(data: Any) -> str:
    """Return shapes and dtypes of a structure of tensors."""
    if isinstance(data, Tensor):
        return f"{str(data.dtype).removeprefix('torch.')}{list(data.shape)}"
    if isinstance(data, Mapping):
        return "{" + ", ".join(f"{key!r}: {describe_data(value)}" for key, value in data.items()) + "}"
    if isinstance(data, Sequence) and not isinstance(data, str):
        return "(" + ", ".join(describe_data(value) for value in data) + ")"
    return type(data).__name__ if tree.all_leaves(data) else repr(data)
