"""Where replica functions run: what a strategy needs of it, a process with one replica, and the caller's modes."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils import _python_dispatch
from typing_extensions import override

from torchstrategy.base.context import Frame, pop_frame, push_frame
from torchstrategy.base.devices import Placement, accelerator_module, tensor_device
from torchstrategy.base.labels import label
from torchstrategy.base.log import raised_by_all
from torchstrategy.base.names import difference_of_ranks
from torchstrategy.collectives.process_group import WorkerGroup
from torchstrategy.errors import InvalidArgumentError
from torchstrategy.replicas.adapters import OutsideCall, outside_methods, prepare_body
from torchstrategy.replicas.copies import check_can_be_copied
from torchstrategy.replicas.distributed_variables import DistributedVariable, recorded_variables
from torchstrategy.replicas.dtensors import is_dtensor, leave_to_fsdp
from torchstrategy.replicas.module_tensors import Slot
from torchstrategy.replicas.random import RandomStreams
from torchstrategy.replicas.record import Record
from torchstrategy.replicas.runner import MergeRequest

__all__ = [
    "CallerModes",
    "DirectHosting",
    "Hosting",
    "on_device",
    "one_thread",
    "refuse_modes",
    "take_initial_values",
    "take_new",
]

_DEVICE_CONTEXT = "DeviceContext"


class CallerModes:
    """Grad mode, inference mode, autocast and thread count of the thread that calls ``run``."""

    def __init__(self) -> None:
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.num_threads = torch.get_num_threads()
        accelerator = torch.accelerator.current_accelerator()
        self.autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
            for kind in {"cpu", "cuda", "xla", *([accelerator.type] if accelerator else [])}
            if torch.is_autocast_enabled(kind)
        ]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Enter them on another thread."""
        if self.grad and not self.inference and not self.autocast:
            yield  # a fresh thread is like this
            return
        with contextlib.ExitStack() as stack:
            if self.inference:
                stack.enter_context(torch.inference_mode())
            if not self.grad:
                stack.enter_context(torch.no_grad())
            for kind, dtype, cache in self.autocast:
                stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=cache))
            yield


@contextlib.contextmanager
def _entered_device(device: torch.device) -> Iterator[None]:
    module = accelerator_module(device)
    with torch.device(device), contextlib.nullcontext() if module is None else module.device(device):
        yield


def on_device(device: torch.device | None) -> contextlib.AbstractContextManager[Any]:
    """Make a device the default one, unless it is; ``None`` leaves the default.

    Args:
        device: as tensors report it, of ``tensor_device``.
    """
    if device is None or device == torch.get_default_device():
        return contextlib.nullcontext()
    return _entered_device(device)


def refuse_modes() -> None:
    """Refuse function and dispatch modes of the caller: they would silently not apply on the replicas' threads."""
    modes = [
        type(mode).__name__
        for mode in torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        if type(mode).__name__ != _DEVICE_CONTEXT
    ]
    modes += [type(mode).__name__ for mode in _python_dispatch._get_current_dispatch_mode_stack()]
    if modes:
        raise RuntimeError(
            f"`run` was called inside {', '.join(modes)}, which would not apply to the replicas' threads. Enter it "
            "inside the replica function instead."
        )


class RunHooks(Protocol):
    """What wants to know when the replicas' tensors are in use: they may stand elsewhere outside ``run``."""

    def enter(self) -> None:
        """Prepare for replica functions, which start or go on."""

    def leave(self) -> None:
        """Clean up after them; what follows is in cross-replica context."""


class Hosting(Protocol):
    """What a strategy needs of the place where its replicas run."""

    #: Whether this process holds the values of what was recorded; others may, which hold more than it could.
    holds_values: bool = True
    #: What is told of the beginning and end of runs, if anything.
    run_hooks: RunHooks | None

    def run(self, frames: Sequence[Frame], fn: Callable[..., Any], calls: Sequence[tuple[Any, Any]]) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` for each local replica and return the results."""

    def meet(self, local_id: int, request: MergeRequest) -> Any:
        """Meet the other local replicas; called in a replica function."""

    def adopt_new(self) -> None:
        """Take up what scopes have recorded since the last call."""

    def leave_scope(self) -> None:
        """Prepare what the scope recorded for use before the first run."""

    def catch_up(self) -> None:
        """Let the other replicas of this process have what was changed outside ``run``."""

    def slots(self) -> list[Slot]:
        """Return where every parameter and buffer of the recorded modules lives, on each local replica."""

    def look_again(self) -> None:
        """Let ``slots`` find parameters that modules have got meanwhile."""

    def takes_turns(self) -> bool:
        """Say whether only one replica of this process computes at a time, until it meets the others or is done."""
        return False

    def counterpart(self, local_id: int, obj: Any) -> Any:
        """Return a replica's counterpart of a user's object or tensor; the object itself if it has none."""

    def original(self, obj: Any) -> Any:
        """Return the user's object that has this counterpart, or ``None``."""

    def keeping_streams(self) -> contextlib.AbstractContextManager[None]:
        """Return what lets the replicas' random numbers go on afterwards as if nothing had been drawn inside."""
        streams: RandomStreams | None = getattr(self, "_streams", None)
        return contextlib.nullcontext() if streams is None else streams.kept()


class DirectHosting(Hosting):
    """One replica in this process: the caller's thread, the user's own objects.

    Args:
        strategy: the strategy.
        placement: where its replicas are.
        workers: the processes; ``None`` if there is only this one.
        record: what the strategy's scopes recorded.
    """

    def __init__(
        self,
        strategy: Any,
        placement: Placement,
        workers: WorkerGroup | None,
        record: Record,
    ) -> None:
        self._strategy = strategy
        self._workers = workers
        self._record = record
        self._device = tensor_device(placement.devices[0])
        self._replica = placement.first_replica
        self._streams = RandomStreams(placement.local_replica_ids, placement.devices) if workers is not None else None
        self._slots: list[Slot] | None = None
        #: The modules in which the slots were found, not held, and what was there.
        self._looked_in: list[weakref.ref[nn.Module]] = []
        self._seen: tuple[int, list[int]] = (0, [])
        self._lock = threading.RLock()
        self.run_hooks = None

    @override
    def run(self, frames: Sequence[Frame], fn: Callable[..., Any], calls: Sequence[tuple[Any, Any]]) -> list[Any]:
        if self._workers is None:
            return self._run(frames, fn, calls)
        with one_thread(self._lock):
            return self._run(frames, fn, calls)

    def _run(self, frames: Sequence[Frame], fn: Callable[..., Any], calls: Sequence[tuple[Any, Any]]) -> list[Any]:
        (frame,), ((args, kwargs),) = frames, calls
        if self._streams is not None:
            self._streams.seed_accelerators()
            self._streams.begin()
            self._streams.enter(0)
        if self.run_hooks is not None:
            self.run_hooks.enter()
        push_frame(frame)
        try:
            with on_device(self._device), label("replica", self._replica):
                return [fn(*args, **kwargs)]
        finally:
            pop_frame(frame)
            if self.run_hooks is not None:
                self.run_hooks.leave()
            if self._streams is not None:
                self._streams.leave(0)
                self._streams.end()

    @override
    def meet(self, local_id: int, request: MergeRequest) -> Any:
        run_hooks = self.run_hooks if request.kind == "merge_call" else None  # the program's function, not ours
        frame = Frame(self._strategy, None)
        push_frame(frame)
        if run_hooks is not None:
            run_hooks.leave()
        try:
            with label("merge", request.kind):
                return request.fn([request.payload])[0]
        finally:
            if run_hooks is not None:
                run_hooks.enter()
            pop_frame(frame)

    @override
    def adopt_new(self) -> None:
        if not self._record.has_new:
            return
        if self._workers is not None:
            for obj in _without_tensors(self._record.peek_new()):
                check_can_be_copied(obj)
            leave_to_fsdp(self._record.peek_new(), self._workers.size)
        new = take_new(self._record, self._workers)
        self._slots = None
        if self._workers is None:
            return
        for obj in _without_tensors(new):
            prepare_body(obj, 0)
            self._set_outside_methods(obj)
        if self._streams is not None:
            self._streams.hold(new)
        take_initial_values(new, self._workers)

    @override
    def leave_scope(self) -> None:
        if self._workers is not None:  # a metric's result before the first run is that of all processes, too
            for obj in self._record.peek_new():
                self._set_outside_methods(obj)

    def _set_outside_methods(self, obj: Any) -> None:
        for name, method in outside_methods(type(obj)).items():
            if not isinstance(obj.__dict__.get(name), OutsideCall):
                obj.__dict__[name] = OutsideCall(self._strategy, obj, name, method)

    @override
    def catch_up(self) -> None:
        pass

    @override
    def takes_turns(self) -> bool:
        return True

    @override
    def look_again(self) -> None:
        self._slots = None

    @override
    def slots(self) -> list[Slot]:
        if self._slots is None or self._look() != self._seen:
            self._slots = self._find_slots()
        if not self._record.tensor_references:
            return self._slots
        return self._slots + [variable.slot for variable in recorded_variables(self._record)]

    @override
    def counterpart(self, local_id: int, obj: Any) -> Any:
        return obj

    @override
    def original(self, obj: Any) -> Any:
        return None

    def _look(self) -> tuple[int, list[int]]:
        """Return how many buffers there are, and which modules are in others."""
        count, children = 0, list[int]()
        for reference in self._looked_in:
            if (module := reference()) is not None:
                values = vars(module)
                for value in values["_buffers"].values():
                    count += value is not None
                children += map(id, values["_modules"].values())
        return count, children

    def _find_slots(self) -> list[Slot]:
        found: list[Slot] = []
        seen: set[int] = set()
        self._looked_in = []
        for obj in self._record:
            if not isinstance(obj, nn.Module):
                continue
            for module in obj.modules():
                if id(module) not in seen:
                    seen.add(id(module))
                    if isinstance(vars(module).get("_modules"), dict):
                        self._looked_in.append(weakref.ref(module))
                    for own in (module._parameters, module._buffers):
                        if not isinstance(own, dict):  # TorchScript's view, which has no `get`
                            own = dict(own.items())
                        found.extend(((own,), name) for name, value in own.items() if value is not None)
        self._seen = self._look()
        return found


@contextlib.contextmanager
def one_thread(lock: threading.RLock) -> Iterator[None]:
    """Refuse a second thread, whose replicas would meet those of the first.

    Raises:
        RuntimeError: another thread holds the lock.
    """
    if not lock.acquire(blocking=False):
        raise RuntimeError("Another thread is inside `run` of this strategy. Call `run` from one thread at a time.")
    try:
        yield
    finally:
        lock.release()


def take_new(record: Record, workers: WorkerGroup | None) -> list[Any]:
    """Return what scopes have recorded; what the program has dropped must be gone on every process alike."""
    if workers is not None and any(isinstance(obj, nn.Module) or _is_new(obj) for obj in record.peek_new()):
        gc.collect()  # not for variables that replica functions make, perhaps in every step
    return record.take_new()


def _without_tensors(objects: Sequence[Any]) -> list[Any]:
    return [obj for obj in objects if not isinstance(obj, torch.Tensor)]


def _is_new(obj: Any) -> bool:
    return isinstance(obj, DistributedVariable) and obj.is_new


def take_initial_values(objects: Sequence[Any], workers: WorkerGroup) -> None:
    """Give the parameters and buffers of modules, and new variables, the chief's values, but for DTensors.

    Raises:
        InvalidArgumentError: the ranks have other models; the message names the first parameter that differs.
    """
    tensors: dict[int, torch.Tensor] = {}
    names: dict[int, str] = {}
    operation = "taking the initial values from the chief"
    variables = [obj for obj in objects if _is_new(obj)]
    for obj in objects:
        if isinstance(obj, nn.Module):
            for name, tensor in [*obj.named_parameters(), *obj.named_buffers()]:
                if not isinstance(tensor, DistributedVariable) and not is_dtensor(tensor):
                    tensors.setdefault(id(tensor), tensor)
                    names[id(tensor)] = f"{name} of {type(obj).__name__}"  # the outer module's, which comes later
    own = [*tensors.values(), *(variable.copy_on(0) for variable in variables)]
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        try:
            workers.broadcast(own, operation)
        except InvalidArgumentError:  # on all ranks
            named = [f"{names.get(id(part), 'a variable')}, {part.dtype}{list(part.shape)}" for part in own]
            lines = difference_of_ranks(workers.exchange("naming what differs", named))
            what = "the ranks must bring the same number, shapes and dtypes of tensors"
            text = f"{operation}: {what}. Build the same model on every rank.\n{lines}"
            raise raised_by_all(InvalidArgumentError(text)) from None
        for variable in variables:
            variable.is_new = False
            for copy in variable.copies[1:]:
                copy.copy_(variable.copy_on(0))
            variable.note_in_step()
