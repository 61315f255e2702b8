"""A CPU generator of a thread's own, from which torch draws there where it would draw from its default one.

torch has one default CPU generator, which replicas that run at the same time can't take turns with. On their threads a
dispatch key is switched on for which every operator that takes a generator has a kernel: it passes the thread's own.
All other operators fall through and cost what they did. That reaches what torch calls by itself, too, such as the mask
of a dropout or the seeds of a compiled model. ``torch.manual_seed`` and its kind mean the thread's generator as well.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from torchstrategy import patches

__all__ = ["own_generator"]

# It stands before all other keys, and torch itself has no use for it.
_KEY = "TESTING_ONLY_GenericMode"


class _Own(threading.local):
    generator: torch.Generator | None = None


_own = _Own()


@contextlib.contextmanager
def own_generator(generator: torch.Generator, user: object) -> Iterator[None]:
    """Let this thread draw from a generator where it would draw from torch's default one of the CPU.

    Args:
        generator: of the CPU.
        user: as long as it lives the kernels stay.
    """
    _kernels.use(user)
    before, _own.generator = _own.generator, generator
    _switch_key(on=True)
    try:
        yield
    finally:
        _own.generator = before
        _switch_key(on=before is not None)


def _switch_key(*, on: bool) -> None:
    torch._C._dispatch_tls_set_dispatch_key_included(_KEY, on)


class _DefaultGenerator:
    """Stands for torch's default generator in ``torch.random``; on some threads it is another one."""

    def __init__(self, default: torch.Generator) -> None:
        self._default = default

    def __getattr__(self, name: str) -> Any:
        own = _own.generator
        return getattr(self._default if own is None else own, name)


def _install() -> list[Callable[[], None]]:
    """Register the kernels; without the key they are never called."""
    rest = torch.library.Library("_", "IMPL", _KEY)  # type: ignore[no-untyped-call]
    rest.fallback(torch.library.fallthrough_kernel)  # type: ignore[no-untyped-call]
    drawing = torch.library.Library("aten", "IMPL", _KEY)  # type: ignore[no-untyped-call]
    known = set(torch._C._dispatch_get_all_op_names())
    for schema in torch._C._jit_get_all_schemas():
        position = _generator_of(schema)
        if position is None or not schema.name.startswith("aten::"):
            continue
        by_name = bool(schema.arguments[position].kwarg_only)
        plain = schema.overload_name.replace("generator_", "").replace("_generator", "").replace("generator", "")
        for overload in {schema.overload_name, plain}:  # torch.rand, for one, has an overload without a generator, too
            if f"{schema.name}{'.' * bool(overload)}{overload}" in known:
                operator, target = _operator(schema.name, overload), _operator(schema.name, schema.overload_name)
                kernel = _kernel(operator, target, None if by_name else position)
                drawing.impl(operator, kernel)  # type: ignore[no-untyped-call]
    why = "replicas that run at once draw from streams of their own"
    own, until = _DefaultGenerator(torch.default_generator), "no strategy whose replicas run at once is left"

    def remove() -> None:
        drawing._destroy()  # type: ignore[no-untyped-call]
        rest._destroy()  # type: ignore[no-untyped-call]

    return [
        patches.note("operators that draw random numbers, on a dispatch key of their own", why, until, remove),
        patches.replace(torch.random, "default_generator", own, why, until),
    ]


_kernels = patches.WhileUsed(_install)


def _operator(name: str, overload: str) -> torch._ops.OpOverload:
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"))
    return getattr(packet, overload or "default")  # type: ignore[no-any-return]


def _generator_of(schema: Any) -> int | None:
    """Return the position of an operator's optional generator among its arguments."""
    for position, argument in enumerate(schema.arguments):
        if str(argument.type) == "Optional[Generator]":
            return position
    return None


def _kernel(operator: torch._ops.OpOverload, target: torch._ops.OpOverload, position: int | None) -> Callable[..., Any]:
    """Return what an operator does on threads that have a generator.

    Args:
        operator: the operator.
        target: it, or its overload that takes a generator.
        position: of the generator in its arguments; ``None`` if it is passed by name only.
    """

    def draw(*args: Any, **kwargs: Any) -> Any:
        own = _own.generator
        _switch_key(on=False)
        try:
            if own is None or _is_traced() or not _is_on_cpu(args, kwargs):
                return operator(*args, **kwargs)
            if position is None or len(args) <= position:
                if kwargs.get("generator") is None:
                    kwargs["generator"] = own
            elif args[position] is None:
                args = (*args[:position], own, *args[position + 1 :])
            return target(*args, **kwargs)
        finally:
            _switch_key(on=True)

    return draw


def _is_traced() -> bool:
    """Say whether a compiler looks at what would be drawn."""
    if not torch._C._len_torch_dispatch_stack():
        return False
    kinds = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(kind) is not None for kind in (kinds.FAKE, kinds.PROXY, kinds.FUNCTIONAL))


def _is_on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value.device.type == "cpu"
    device = kwargs.get("device")
    return device is None or torch.device(device).type == "cpu"
