"""Random numbers that differ between replicas: drawn for all of them at once, and split.

Where a function is traced once for all replicas, every device would draw the same numbers.

``torch.utils.checkpoint`` computes a function again in the backward pass, which must then draw the same numbers. It
looks for ``torch.xla``, which torch_xla does not have, to save and put back the state of the device's.
"""

from __future__ import annotations

import contextlib
import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from torchstrategy.tpu.marks import is_on_device, with_defaults
from torchstrategy.tpu.protocols import AnyRegion
from torchstrategy.tpu.refusals import current_region, refuse
from torchstrategy.xla.runtime import get_runtime

__all__ = ["RANDOM", "install_device_module", "run_random"]

_FACTORIES = {"rand", "randn", "randint", "randperm"}
_LIKE = {"rand_like", "randn_like", "randint_like"}
_FILLS = {
    "bernoulli",
    "normal_functional",
    "uniform",
    "random",
    "exponential",
    "geometric",
    "cauchy",
    "log_normal",
    "normal",
    "rrelu_with_noise_functional",
    "multinomial",
    "native_dropout",
    "poisson",
    "binomial",
    "_standard_gamma",
}
RANDOM = _FACTORIES | _LIKE | _FILLS


def run_random(region: AnyRegion, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation that draws random numbers, so that every replica draws its own."""
    packet = func.overloadpacket.__name__
    generator = kwargs.pop("generator", None)
    on_device = _is_on_device(args, kwargs)
    if not on_device:
        return func(*args, generator=generator, **kwargs) if generator is not None else func(*args, **kwargs)
    if generator is not None:
        refuse(
            "A `generator` was given for random numbers on the device",
            "There, numbers come from one generator for all replicas, which `torch.manual_seed` seeds.",
            "Leave the argument out, or draw on the host, outside `run`, and pass the numbers in.",
        )
    region.seed_before_draws()
    if packet in _FACTORIES:
        return region.wrap_local(func, _factory(region, func, packet, args, kwargs))
    result = (
        _FUNCTIONS[packet](region, func, args, kwargs) if packet in _FUNCTIONS else _fill(region, func, args, kwargs)
    )
    region.mark_results(result, func)
    return result


def _is_on_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    device = kwargs.get("device")
    if device is not None:
        return bool(torch.device(device).type == "xla")
    return any(isinstance(arg, Tensor) and is_on_device(arg) for arg in args)


def _split(region: AnyRegion, drawn: Tensor) -> Tensor:
    """Return each replica's own part of numbers that were drawn for all replicas."""
    own = drawn if region.num_replicas == 1 else region.runtime.enter(drawn, split=True)
    return own.squeeze(0)


def _uniform(region: AnyRegion, like: Tensor, shape: Any = None) -> Tensor:
    """Draw each replica's own numbers from [0, 1)."""
    shape = like.shape if shape is None else shape
    return _split(region, torch.rand((region.num_replicas, *shape), dtype=_float(like), device=like.device))


def _float(like: Tensor) -> torch.dtype:
    return like.dtype if like.dtype in (torch.float32, torch.float64) else torch.float32


def _factory(region: AnyRegion, func: Any, packet: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    n = region.num_replicas
    if packet == "randperm":
        keys = _split(region, torch.rand((n, args[0]), device=kwargs["device"]))
        dtype = kwargs.get("dtype")
        return keys.argsort().to(torch.int64 if dtype is None else dtype)
    position = next(i for i, argument in enumerate(func._schema.arguments) if argument.name == "size")
    args = (*args[:position], [n, *args[position]], *args[position + 1 :])
    return _split(region, func(*args, **kwargs))


def _fill(region: AnyRegion, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Draw with numbers as parameters: as the operation itself does, for a tensor of all replicas."""
    blank = torch.empty((region.num_replicas, *args[0].shape), dtype=args[0].dtype, device=args[0].device)
    return _split(region, func(blank, *args[1:], **kwargs))


def _bernoulli(region: AnyRegion, _func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Tensor:
    like, chance = args[0], args[-1]  # (p), (self, p: number) or (self, p: tensor)
    if not isinstance(chance, Tensor):
        return _uniform(region, like).lt(chance).to(like.dtype)
    return (_uniform(region, chance, like.shape) < chance).to(like.dtype)


def _normal(region: AnyRegion, _func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    mean, std = args[:2]
    if not isinstance(mean, Tensor) and not isinstance(std, Tensor):
        return region.wrap(_split(region, torch.randn((region.num_replicas, *args[2]), **kwargs)) * std + mean)
    like = mean if isinstance(mean, Tensor) else std
    shape = torch.broadcast_shapes(  # type: ignore[no-untyped-call]
        *(arg.shape for arg in (mean, std) if isinstance(arg, Tensor))
    )
    drawn = torch.randn((region.num_replicas, *shape), dtype=like.dtype, device=like.device)
    result: Tensor = _split(region, drawn) * std + mean
    return result


def _exponential(region: AnyRegion, _func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Tensor:
    rate = args[1] if len(args) > 1 else 1.0
    return (-torch.log1p(-_uniform(region, args[0])) / rate).to(args[0].dtype)


def _geometric(region: AnyRegion, _func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Tensor:
    drawn = torch.log1p(-_uniform(region, args[0])) / math.log1p(-args[1])
    return drawn.ceil().clamp(min=1).to(args[0].dtype)


def _cauchy(region: AnyRegion, _func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Tensor:
    median, sigma = with_defaults(args[1:], 0, (0.0, 1.0))
    drawn = torch.tan(math.pi * (_uniform(region, args[0]) - 0.5))
    result: Tensor = (median + sigma * drawn).to(args[0].dtype)
    return result


def _log_normal(region: AnyRegion, _func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Tensor:
    mean, std = with_defaults(args[1:], 0, (1.0, 2.0))
    like = args[0]
    drawn = torch.randn((region.num_replicas, *like.shape), dtype=_float(like), device=like.device)
    return torch.exp(_split(region, drawn) * std + mean).to(like.dtype)


def _multinomial(region: AnyRegion, _func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Tensor:
    """Draw by exponential races: the category whose waiting time, at the rate of its weight, is the shortest."""
    weights, count, replacement = with_defaults(args, 2, (False,))
    if not replacement:
        times = -torch.log1p(-_uniform(region, weights)) / weights
        return torch.where(weights > 0, times, math.inf).topk(count, -1, largest=False).indices
    shape = (*weights.shape[:-1], count, weights.shape[-1])
    times = -torch.log1p(-_uniform(region, weights, shape)) / weights.unsqueeze(-2)
    return torch.where(weights.unsqueeze(-2) > 0, times, math.inf).argmin(-1)


def _native_dropout(
    region: AnyRegion, _func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    value, chance, training = args
    if training is False:
        return value.clone(), torch.ones_like(value, dtype=torch.bool)
    mask = _uniform(region, value) >= chance
    return value * mask * (0.0 if chance == 1 else 1 / (1 - chance)), mask


def _rrelu(region: AnyRegion, _func: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> tuple[Tensor, Tensor]:
    value, noise, lower, upper, training = with_defaults(args, 2, (0.125, 1 / 3, False))
    if not training:
        return torch.where(value > 0, value, value * ((lower + upper) / 2)), noise.clone()
    slope = torch.where(value > 0, 1.0, lower + (upper - lower) * _uniform(region, value)).to(value.dtype)
    return value * slope, slope


def _unsupported(_region: AnyRegion, func: Any, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> Tensor:
    refuse(
        f"{func} draws random numbers on the device",
        "torch_xla has no implementation of it and would compute it on the host, inside the traced function.",
        "Draw on the host, outside `run`, and pass the numbers in.",
    )


_FUNCTIONS = {
    "bernoulli": _bernoulli,
    "normal": _normal,
    "exponential": _exponential,
    "geometric": _geometric,
    "cauchy": _cauchy,
    "log_normal": _log_normal,
    "multinomial": _multinomial,
    "native_dropout": _native_dropout,
    "rrelu_with_noise_functional": _rrelu,
    "poisson": _unsupported,
    "binomial": _unsupported,
    "_standard_gamma": _unsupported,
}


def install_device_module() -> None:
    """Make a ``torch.xla``, unless torch_xla has brought one."""
    if not hasattr(torch, "xla"):
        torch._register_device_module("xla", _DeviceModule("torch.xla"))  # type: ignore[no-untyped-call]


class _DeviceModule(ModuleType):
    """What torch looks for as ``torch.xla``: one device, which stands for all."""

    _initialized = True

    @staticmethod
    def get_rng_state(_device: Any = None) -> Tensor:
        """Return the seed that the next random numbers on the device come from, as a tensor of the host."""
        region = current_region()
        if region is not None:
            # `checkpoint` has saved the host's state by now, and will draw on from it.
            region.seed_before_draws(keep_host=True)
        seed = get_runtime().get_seed()
        return torch.tensor(seed - 2**64 if seed >= 2**63 else seed, dtype=torch.int64, device="cpu")

    @staticmethod
    def set_rng_state(state: Tensor, _device: Any = None) -> None:
        """Draw again what was drawn after ``get_rng_state`` returned the state."""
        get_runtime().set_seed(int(state) % 2**64)

    @staticmethod
    def device(_device: Any) -> contextlib.AbstractContextManager[None]:
        """Do nothing: there is one device."""
        return contextlib.nullcontext()

    @staticmethod
    def current_device() -> int:
        """Return the number of the only device."""
        return 0

    @staticmethod
    def device_count() -> int:
        """Return how many devices tensors can be on."""
        return 1

    @staticmethod
    def is_available() -> bool:
        """Say that there is a device."""
        return True
