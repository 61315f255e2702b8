"""What watches a replica function that is traced once for all replicas: which tensors differ between them.

Torch's XLA tensors are wrappers around plain ones. A dispatch mode sees only the plain ones, and operations that change
tensors or make views arrive as pure functions. So whether a value is local follows the flow of data alone.
"""

from __future__ import annotations

import contextlib
import gc
import time
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import Self, override

from torchstrategy.tpu.marks import (
    MARK,
    Site,
    any_local,
    describe_site,
    find_site,
    forget_backward,
    get_mark,
    is_on_device,
)
from torchstrategy.tpu.operations import HANDLERS, NUMBERS, TENSOR_PLACES, WRITERS, handler_of
from torchstrategy.tpu.random_draws import install_device_module
from torchstrategy.tpu.refusals import allowed_calls, explain_host_tensor, refused_calls
from torchstrategy.xla.kernels import KEYS
from torchstrategy.xla.runtime import TpuRuntime

__all__ = ["Region"]

#: How long a thread of autograd's or XLA's may take to let go of what it has worked with.
_LET_GO_S = 0.2


class Region(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """One trace of a replica function; everything inside ``with region:`` is the user's.

    A value is *local* if an operation computed it from a local one, and so differs between replicas; all other values
    are *shared*. Operations that would end the process or give wrong numbers raise ``RuntimeError``; random numbers
    differ between replicas.

    Args:
        runtime: the devices.
        num_replicas: how many replicas the trace is for.
    """

    supports_higher_order_operators = True  # to be refused by us

    def __init__(self, runtime: TpuRuntime, num_replicas: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.runtime = runtime
        self.num_replicas = num_replicas
        self._has_seed = False
        self._owes_draw = False
        #: The operation whose own operations the region sees at the moment.
        self.outer_operation: Any = None
        self.is_decomposing = False
        #: The count of batches that a batch norm layer read before it calls its operation.
        self.batch_count: Tensor | None = None
        #: The marks of what was made here. Not the tensors: torch 2.9 ends the process if one is asked for by a weak
        #: reference while a thread of autograd's frees it.
        self._marks: list[weakref.ref[Site]] = []
        self._entered: dict[int, tuple[Tensor, Tensor]] = {}
        self._patches: list[contextlib.AbstractContextManager[None]] = []

    @override
    def __torch_dispatch__(  # noqa: C901 - in one piece for speed
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # The hot path: some microseconds for each operation of a step.
        try:
            handler = HANDLERS[id(func)]
        except KeyError:
            handler = handler_of(func)
        for arg in args:
            if arg.__class__ is Tensor:
                if getattr(arg, MARK, None) is not None:
                    break
            elif arg.__class__ is list and any_local(arg):
                break
        else:
            if not kwargs or not any_local(kwargs.values()):
                if handler is not None:
                    return handler(self, func, args, kwargs or {})
                return func._op(*args, **kwargs) if kwargs else func._op(*args)
        if handler not in WRITERS:
            args = self.entered(args)
            if kwargs:
                kwargs = dict(zip(kwargs, self.entered(tuple(kwargs.values())), strict=True))
        if handler is not None:
            return handler(self, func, args, kwargs or {})
        if [place for place in TENSOR_PLACES[id(func)] if place < len(args) and args[place].__class__ in NUMBERS]:
            result = func._op(*args, **kwargs) if kwargs else func._op(*args)
        else:
            # It is on the device, as an argument is. This way torch does not ask its function modes about the call.
            redispatch = func._handle.redispatch_boxed
            result = redispatch(KEYS, *args, **kwargs) if kwargs else redispatch(KEYS, *args)
        site = find_site(func)
        if result.__class__ is Tensor:
            setattr(result, MARK, site)
            self._marks.append(weakref.ref(site))
        elif result is not None:
            self.mark_results(result, site)
        return result

    def entered(self, values: Any) -> Any:
        """Return arguments with what each replica sees of a shared tensor in its place.

        XLA's partitioner fails on operations of which some arguments are local and others are not.
        """
        return type(values)(
            [
                self.enter(value)
                if isinstance(value, Tensor)
                else self.entered(value)
                if value.__class__ is list or value.__class__ is tuple
                else value
                for value in values
            ]
        )

    def forget(self) -> None:
        """Let go of what shared tensors became here."""
        self._entered.clear()

    def enter(self, value: Tensor) -> Tensor:
        """Return what each replica sees of a shared plain tensor; others as they are."""
        if self.num_replicas == 1 or getattr(value, MARK, None) is not None or not is_on_device(value):
            return value
        known = self._entered.get(id(value))
        if known is None:
            own = self.runtime.enter(value, split=False)
            setattr(own, MARK, find_site(None))  # not in self._marks: it lives as long as the region
            known = self._entered[id(value)] = (value, own)  # plain tensors are values: they don't change
        return known[1]

    def seed_before_draws(self, *, keep_host: bool = False) -> None:
        """Seed the device, once, from the generator of the host.

        Args:
            keep_host: leave that generator's state as it is until the region ends.
        """
        if self._has_seed:
            return
        self._has_seed, self._owes_draw = True, keep_host
        state = torch.get_rng_state()
        self.runtime.set_seed(_draw_seed())
        if keep_host:
            torch.set_rng_state(state)

    def site_if_local(self, func: Any, values: Iterable[Any]) -> Site | None:
        """Return where an operation was called if its results are local."""
        return find_site(func) if any_local(values) else None

    def marked(self, results: Any, func: Any, values: Iterable[Any]) -> Any:
        """Return an operation's results, marked as local if it was computed from a local value."""
        site = self.site_if_local(func, values)
        if site is not None:
            self.mark_results(results, site)
        return results

    def mark_results(self, results: Any, site: Any) -> None:
        """Make every tensor that an operation returned local."""
        if not isinstance(site, Site):
            site = find_site(site)
        if isinstance(results, Tensor):
            setattr(results, MARK, site)
            self._marks.append(weakref.ref(site))
        elif isinstance(results, (tuple, list)):
            for result in results:
                self.mark_results(result, site)

    def wrap(self, plain: Tensor) -> Tensor:
        """Return what the program gets for a plain tensor that an operation made without one of the device.

        Without it, what is written to a view of the tensor would never reach the tensor.
        """
        if self.outer_operation is not None:
            return plain  # for the operation's kernel, not for the program
        wrapped: Tensor = torch._to_functional_tensor(plain)
        return wrapped

    def wrap_local(self, func: Any, plain: Tensor) -> Tensor:
        """Return what the program gets for a plain tensor that differs between replicas."""
        self.mark_results(plain, func)
        return self.wrap(plain)

    @contextlib.contextmanager
    def inside(self, func: Any, *, decomposed: bool = False) -> Iterator[None]:
        """See the operations that an operation calls, or is decomposed into by Python code."""
        outer = self.outer_operation, self.is_decomposing
        self.outer_operation, self.is_decomposing = outer[0] or func, decomposed
        torch._C._push_on_torch_dispatch_stack(self)
        try:
            yield
        finally:
            torch._C._pop_torch_dispatch_stack(None)
            self.outer_operation, self.is_decomposing = outer

    def plain(self, value: Tensor) -> Tensor:
        """Return the tensor that a dispatch mode sees for what the program holds."""
        if not torch._is_functional_tensor(value):
            return value
        # A view of a tensor that was written to is computed anew; in a region, so that it is marked as well.
        torch._C._push_on_torch_dispatch_stack(self)
        try:
            torch._sync(value)  # type: ignore[attr-defined, no-untyped-call]
        finally:
            torch._C._pop_torch_dispatch_stack(None)
        plain: Tensor = torch._from_functional_tensor(value)
        return plain

    def mark_local(self, value: Tensor) -> Tensor:
        """Say that a tensor differs between replicas; returns it."""
        self.mark_results(self.plain(value), None)
        return value

    def mark_shared(self, value: Tensor) -> Tensor:
        """Say that all replicas hold the same value; returns it."""
        plain = self.plain(value)
        if get_mark(plain) is not None:
            delattr(plain, MARK)
        return value

    def mark_of(self, value: Tensor) -> object:
        """Return what a tensor is marked with: another object once it was written to in the region."""
        return get_mark(self.plain(value))

    def is_local(self, value: Tensor) -> bool:
        """Say whether a tensor differs between replicas."""
        return is_on_device(value) and get_mark(self.plain(value)) is not None

    def has_living_local_values(self) -> bool:
        """Say whether anything, such as an autograd graph, still holds a local value of this region. Fast."""
        return any(mark() is not None for mark in self._marks)

    def local_values(self) -> list[Tensor]:
        """Return the local tensors that Python code can still reach; slow if there are any.

        Those that a living autograd graph keeps may be among them. Values that were marked as shared, or replaced
        (``tensor.data = ...``), do not count.
        """
        if not self.has_living_local_values():
            return []
        gc.collect()
        deadline = time.monotonic() + _LET_GO_S
        while self.has_living_local_values() and time.monotonic() < deadline:
            time.sleep(0.001)
        if not self.has_living_local_values():
            return []
        found = [obj for obj in gc.get_objects() if issubclass(type(obj), Tensor) and is_on_device(obj)]
        return [tensor for tensor in found if torch._is_functional_tensor(tensor) and self.is_local(tensor)]

    def describe(self, value: Tensor) -> str:
        """Return what a tensor is and where the program computed it, for messages."""
        text = f"tensor of shape {tuple(value.shape)}"
        site = get_mark(self.plain(value)) if is_on_device(value) else None
        return text if site is None else f"{text} from {describe_site(site)}"

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let what the library does itself be neither watched nor refused."""
        modes = [torch._C._pop_torch_dispatch_stack(None) for _ in range(torch._C._len_torch_dispatch_stack())]
        try:
            with allowed_calls():
                yield
        finally:
            for mode in reversed(modes):
                torch._C._push_on_torch_dispatch_stack(mode)

    @contextlib.contextmanager
    def resumed(self) -> Iterator[None]:
        """Watch and refuse again, within ``paused``."""
        torch._C._push_on_torch_dispatch_stack(self)
        try:
            yield
        finally:
            torch._C._pop_torch_dispatch_stack(None)

    @override
    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        install_device_module()
        self._patches.append(refused_calls(self))
        self._patches[-1].__enter__()
        return self

    @override
    def __exit__(self, *exception: Any) -> None:
        forget_backward()  # its frame holds tensors
        self._patches.pop().__exit__(*exception)
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        if self._owes_draw:
            self._owes_draw = False
            _draw_seed()
        explain_host_tensor(exception[1])


def _draw_seed() -> int:
    return int(torch.randint(2**31, (), device="cpu").item())
