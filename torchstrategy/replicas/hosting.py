"""Where replica functions run: in the caller's thread (one replica a process) or on one thread for each replica."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils import _python_dispatch
from typing_extensions import override

from torchstrategy.collectives.process_group import WorkerGroup
from torchstrategy.context import Frame, pop_frame, push_frame
from torchstrategy.devices import Placement, tensor_device
from torchstrategy.replicas.adapters import OutsideCall, first_run_modes, outside_methods, prepare_body
from torchstrategy.replicas.clone import ReplicaSet, Slot
from torchstrategy.replicas.copies import check_can_be_copied
from torchstrategy.replicas.distributed_variables import DistributedVariable, recorded_variables
from torchstrategy.replicas.divergence import DivergenceCheck
from torchstrategy.replicas.random import RandomStreams
from torchstrategy.replicas.record import Record
from torchstrategy.replicas.runner import MergeRequest, Runner

__all__ = ["CallerModes", "DirectHosting", "Hosting", "ThreadedHosting", "on_device"]

_DEVICE_CONTEXT = "DeviceContext"


class Visits(Protocol):
    """What wants to know when the replicas' tensors are in use: they may stand elsewhere outside ``run``."""

    def arrive(self) -> None:
        """Prepare for replica functions, which start or go on."""

    def depart(self) -> None:
        """Clean up after them; what follows is in cross-replica context."""


class Hosting(Protocol):
    """What a strategy needs of the place where its replicas run."""

    #: What is told of the beginning and end of runs, if anything.
    visits: Visits | None

    def run(self, frames: Sequence[Frame], fn: Callable[..., Any], calls: Sequence[tuple[Any, Any]]) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` for each local replica and return the results."""

    def meet(self, local_id: int, request: MergeRequest) -> Any:
        """Meet the other local replicas; called in a replica function."""

    def adopt_new(self) -> None:
        """Take up what scopes have recorded since the last call."""

    def leave_scope(self) -> None:
        """Prepare what the scope recorded for use before the first run."""

    def slots(self) -> list[Slot]:
        """Return where every parameter and buffer of the recorded modules lives, on each local replica."""

    def counterpart(self, local_id: int, obj: Any) -> Any:
        """Return a replica's counterpart of a user's object or tensor; the object itself if it has none."""

    def original(self, obj: Any) -> Any:
        """Return the user's object that has this counterpart, or ``None``."""


class DirectHosting(Hosting):
    """One replica in this process: the caller's thread, the user's own objects.

    Args:
        strategy: the strategy.
        placement: where its replicas are.
        workers: the processes; ``None`` if there is only this one.
        record: what the strategy's scopes recorded.
        prepare: called once with each recorded object that is not a module.
    """

    def __init__(
        self,
        strategy: Any,
        placement: Placement,
        workers: WorkerGroup | None,
        record: Record,
        prepare: Callable[[Any], None],
    ) -> None:
        self._strategy = strategy
        self._workers = workers
        self._record = record
        self._prepare = prepare
        self._device = placement.devices[0]
        self._streams = RandomStreams(placement.local_replica_ids, placement.devices) if workers is not None else None
        self._slots: list[Slot] | None = None
        self._modes = contextlib.nullcontext if workers is None else first_run_modes
        self.visits = None

    @override
    def run(self, frames: Sequence[Frame], fn: Callable[..., Any], calls: Sequence[tuple[Any, Any]]) -> list[Any]:
        (frame,), ((args, kwargs),) = frames, calls
        modes, self._modes = self._modes, contextlib.nullcontext
        if self._streams is not None:
            self._streams.seed_accelerators()
            self._streams.begin()
            self._streams.enter(0)
        if self.visits is not None:
            self.visits.arrive()
        push_frame(frame)
        try:
            with on_device(self._device), modes():
                return [fn(*args, **kwargs)]
        finally:
            pop_frame(frame)
            if self.visits is not None:
                self.visits.depart()
            if self._streams is not None:
                self._streams.leave(0)
                self._streams.end()

    @override
    def meet(self, local_id: int, request: MergeRequest) -> Any:
        visits = self.visits if request.kind == "merge_call" else None  # the program's function, not ours
        frame = Frame(self._strategy, None)
        push_frame(frame)
        if visits is not None:
            visits.depart()
        try:
            return request.fn([request.payload])[0]
        finally:
            if visits is not None:
                visits.arrive()
            pop_frame(frame)

    @override
    def adopt_new(self) -> None:
        if not self._record.has_new:
            return
        new = _take_new(self._record, self._workers)
        self._slots = None
        for obj in new:
            if not isinstance(obj, (nn.Module, torch.Tensor)):
                self._prepare(obj)
        if self._workers is None:
            return
        for obj in new:
            if isinstance(obj, torch.Tensor):
                continue
            check_can_be_copied(obj)
            prepare_body(obj, 0)
            self._set_outside_methods(obj)
        if self._streams is not None:
            self._streams.hold(new)
        _take_initial_values(new, self._workers)

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
    def slots(self) -> list[Slot]:
        if self._slots is None:
            self._slots = self._find_slots()
        variables = recorded_variables(self._record)
        return self._slots + [variable.slot for variable in variables] if variables else self._slots

    @override
    def counterpart(self, local_id: int, obj: Any) -> Any:
        return obj

    @override
    def original(self, obj: Any) -> Any:
        return None

    def _find_slots(self) -> list[Slot]:
        found: list[Slot] = []
        seen: set[int] = set()
        for obj in self._record:
            if not isinstance(obj, nn.Module):
                continue
            for module in obj.modules():
                if id(module) not in seen:
                    seen.add(id(module))
                    for own in (module._parameters, module._buffers):
                        found.extend(((own,), name) for name, value in own.items() if value is not None)
        return found


class ThreadedHosting(Hosting):
    """Several replicas in this process, each with copies of the recorded objects and a thread of its own.

    Args:
        strategy: the strategy.
        placement: where its replicas are.
        workers: the processes; ``None`` if there is only this one.
        record: what the strategy's scopes recorded.
        prepare: called once with each replica's copy of an object that is not a module.
        concurrent: run the replicas at the same time instead of in turns.
        check_every: number of runs between two checks for divergence.
    """

    def __init__(
        self,
        strategy: Any,
        placement: Placement,
        workers: WorkerGroup | None,
        record: Record,
        prepare: Callable[[Any], None],
        *,
        concurrent: bool,
        check_every: int,
    ) -> None:
        self._strategy = strategy
        self._placement = placement
        self._workers = workers
        self._record = record
        self._concurrent = concurrent
        self._set = ReplicaSet(strategy, placement.devices, record, prepare, self.running)
        self._streams = RandomStreams(placement.local_replica_ids, placement.devices)
        self._check = DivergenceCheck(check_every, self._name)
        self._runners: list[Runner] = []
        self._depth = 0
        self._modes: Callable[[], contextlib.AbstractContextManager[None]] = first_run_modes
        self._lock = threading.RLock()
        self.visits = None

    @override
    def run(self, frames: Sequence[Frame], fn: Callable[..., Any], calls: Sequence[tuple[Any, Any]]) -> list[Any]:
        if not self._lock.acquire(blocking=False):
            raise RuntimeError("Another thread is inside `run` of this strategy. Call `run` from one thread at a time.")
        try:
            _refuse_modes()
            carry = CallerModes()
            modes, self._modes = self._modes, contextlib.nullcontext
            tasks = [
                functools.partial(self._call, frame, device, carry, modes, fn, args, kwargs)
                for frame, device, (args, kwargs) in zip(frames, self._placement.devices, calls, strict=True)
            ]
            return self._run_tasks(tasks)
        finally:
            self._lock.release()

    @override
    def meet(self, local_id: int, request: MergeRequest) -> Any:
        if request.kind == "merge_call":
            request = request._replace(fn=functools.partial(self._call_from_outside, request.fn))
        return self._runners[self._depth - 1].merge(local_id, request)

    @override
    def adopt_new(self) -> None:
        if not self._record.has_new:
            return
        new = _take_new(self._record, self._workers)
        try:
            if self._workers is not None:
                _take_initial_values(new, self._workers)
            self._streams.hold(new)
            self._set.adopt(new)
        except BaseException:
            for obj in new:
                self._record.put_back(obj)
            raise

    @override
    def leave_scope(self) -> None:
        pass  # until the first run there is one object in this process

    @override
    def slots(self) -> list[Slot]:
        return self._set.slots()

    @override
    def counterpart(self, local_id: int, obj: Any) -> Any:
        return self._set.counterpart(local_id, obj)

    @override
    def original(self, obj: Any) -> Any:
        return self._set.original(obj)

    def running(self) -> int | None:
        """Return the local id of the replica whose turn it is, or ``None``."""
        return self._runners[self._depth - 1].current if self._depth else None

    def _run_tasks(self, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
        outermost = self._depth == 0
        if len(self._runners) == self._depth:
            turns = _Turns(self._streams, self._check)
            self._runners.append(Runner(len(tasks), turns, self._call_merge, concurrent=self._concurrent))
        runner = self._runners[self._depth]
        self._before_functions()
        if outermost:
            self._check.begin(self._set.slots)
            self._streams.seed_accelerators()
            if not self._concurrent:  # replicas that run at the same time share the generator
                self._streams.begin()
        self._depth += 1
        try:
            results = runner.run(tasks, self._name)
            if outermost and self._check.active:
                self._check.end()
        finally:
            self._depth -= 1
            self._after_functions()
            if outermost:
                if not self._concurrent:
                    self._streams.end()
                self._check.forget()
        return results

    def _call_merge(self, fn: Callable[[list[Any]], Sequence[Any]], payloads: list[Any]) -> Sequence[Any]:
        frame = Frame(self._strategy, None)
        push_frame(frame)
        try:
            return fn(payloads)
        finally:
            pop_frame(frame)

    def _call_from_outside(self, fn: Callable[[list[Any]], Sequence[Any]], payloads: list[Any]) -> Sequence[Any]:
        """Call the user's merge function, whose changes to replica 0 are for all replicas."""
        self._after_functions()
        results = fn(payloads)
        self._before_functions()
        return results

    def _before_functions(self) -> None:
        self._set.before_run()
        if self.visits is not None:
            self.visits.arrive()

    def _after_functions(self) -> None:
        if self.visits is not None:
            self.visits.depart()
        self._set.after_run()

    def _call(
        self,
        frame: Frame,
        device: torch.device,
        carry: CallerModes,
        modes: Callable[[], contextlib.AbstractContextManager[None]],
        fn: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        push_frame(frame)
        try:
            share = max(1, carry.num_threads // len(self._placement.devices)) if self._concurrent else carry.num_threads
            if torch.get_num_threads() != share:
                torch.set_num_threads(share)
            with carry.entered(), on_device(device), modes():
                return fn(*args, **kwargs)
        finally:
            pop_frame(frame)

    def _name(self, local_id: int) -> str:
        return f"replica {self._placement.first_replica + local_id} on {self._placement.devices[local_id]}"


class _Turns:
    """Switches the random stream, and looks for writes to other replicas' tensors."""

    def __init__(self, streams: RandomStreams, check: DivergenceCheck) -> None:
        self._streams = streams
        self._check = check

    def starts(self, local_id: int) -> None:
        self._check.turn_starts()
        self._streams.enter(local_id)

    def ends(self, local_id: int, *, failed: bool) -> None:
        self._streams.leave(local_id)
        if not failed:  # the replica's own error says more
            self._check.turn_ends(local_id)


class CallerModes:
    """Grad mode, inference mode, autocast and thread count of the thread that calls ``run``."""

    def __init__(self) -> None:
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.num_threads = torch.get_num_threads()
        self.autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled())
            for kind in ("cpu", "cuda", "xla")
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
    with torch.device(device):
        if device.type == "cuda":
            with torch.cuda.device(device):
                yield
        else:
            yield


def on_device(device: torch.device | None) -> contextlib.AbstractContextManager[Any]:
    """Make a replica's device the default one; nothing to do where it is the CPU and the default is, too."""
    if device is None:
        return contextlib.nullcontext()
    to = tensor_device(device)
    if to == torch.get_default_device():
        return contextlib.nullcontext()
    return _entered_device(to)


def _refuse_modes() -> None:
    """Refuse function and dispatch modes of the caller: they would silently not apply on the replicas' threads."""
    modes = [
        type(mode).__name__
        for mode in torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
        if type(mode).__name__ != _DEVICE_CONTEXT and not getattr(mode, "is_carried", False)
    ]
    modes += [type(mode).__name__ for mode in _python_dispatch._get_current_dispatch_mode_stack()]
    if modes:
        raise RuntimeError(
            f"`run` was called inside {', '.join(modes)}, which would not apply to the replicas' threads. Enter it "
            "inside the replica function instead."
        )


def _take_new(record: Record, workers: WorkerGroup | None) -> list[Any]:
    """Return what scopes have recorded; what the program has dropped must be gone on every process alike."""
    if workers is not None and any(isinstance(obj, nn.Module) or _is_new(obj) for obj in record.peek_new()):
        gc.collect()  # not for variables that replica functions make, perhaps in every step
    return record.take_new()


def _is_new(obj: Any) -> bool:
    return isinstance(obj, DistributedVariable) and obj.is_new


def _take_initial_values(objects: Sequence[Any], workers: WorkerGroup) -> None:
    """Give the parameters and buffers of modules, and new variables, the chief's values."""
    tensors: dict[int, torch.Tensor] = {}
    variables = [obj for obj in objects if _is_new(obj)]
    for obj in objects:
        if isinstance(obj, nn.Module):
            for tensor in [*obj.parameters(), *obj.buffers()]:
                if not isinstance(tensor, DistributedVariable):
                    tensors.setdefault(id(tensor), tensor)
    own = [*tensors.values(), *(variable.copy_on(0) for variable in variables)]
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        workers.broadcast(own, "taking the initial values from the chief")
        for variable in variables:
            variable.is_new = False
            for copy in variable.copies[1:]:
                copy.copy_(variable.copy_on(0))
            variable.note_in_step()
