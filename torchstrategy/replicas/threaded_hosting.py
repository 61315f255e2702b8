"""Several replicas in this process, each with copies of the recorded objects and a thread of its own."""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from typing_extensions import override

from torchstrategy.base.context import Frame, pop_frame, push_frame
from torchstrategy.base.devices import Placement, accelerator_module, tensor_device
from torchstrategy.base.labels import label
from torchstrategy.base.log import name_error
from torchstrategy.collectives.process_group import WorkerGroup
from torchstrategy.errors import DivergenceError
from torchstrategy.patches import keep_freed_memory
from torchstrategy.replicas.clone import ReplicaSet
from torchstrategy.replicas.divergence import DivergenceCheck, check_copies, differences_between_copies
from torchstrategy.replicas.edits import OutsideEdits
from torchstrategy.replicas.hosting import (
    CallerModes,
    Hosting,
    on_device,
    one_thread,
    refuse_modes,
    take_initial_values,
    take_new,
)
from torchstrategy.replicas.module_tensors import Slot
from torchstrategy.replicas.random import RandomStreams
from torchstrategy.replicas.record import Record
from torchstrategy.replicas.runner import MergeRequest, Runner, Turns

__all__ = ["ThreadedHosting"]

#: From how many bytes of one replica's parameters on it pays to sum gradients with the threads of all cores, while the
#: replicas wait: threads of OpenMP go on looking for work for milliseconds, during which the replicas lack these cores.
_BYTES_FOR_ALL_CORES = 32 << 20


class ThreadedHosting(Hosting):
    """Several replicas in this process, each with copies of the recorded objects and a thread of its own.

    Args:
        strategy: the strategy.
        placement: where its replicas are.
        workers: the processes; ``None`` if there is only this one.
        record: what the strategy's scopes recorded.
        concurrent: run the replicas at the same time instead of in turns.
        check_every: number of runs between two checks for divergence.
    """

    def __init__(
        self,
        strategy: Any,
        placement: Placement,
        workers: WorkerGroup | None,
        record: Record,
        *,
        concurrent: bool,
        check_every: int,
    ) -> None:
        self._strategy = strategy
        self._placement = placement
        self._devices = [tensor_device(device) for device in placement.devices]
        self._workers = workers
        self._record = record
        self._concurrent = concurrent
        self._set = ReplicaSet(strategy, placement.devices, record, self.running)
        self._streams = RandomStreams(placement.local_replica_ids, placement.devices, concurrent=concurrent)
        self._cores = _Cores(len(placement.devices))
        if concurrent and sum(device.type == "cpu" for device in placement.devices) > 1:
            keep_freed_memory()  # the kernel gives a process memory for one thread at a time
        self._check = DivergenceCheck(check_every, self._placement.name_of)
        self._edits = OutsideEdits(
            self._watched_slots,
            self._placement.name_of,
            record.written_past,
            lambda: self._set.num_layouts,
        )
        #: What the last run's error said, if it failed: the replicas may not have come equally far. The error itself
        #: would hold all that the function held.
        self._failure = ""
        self._runners: list[Runner] = []
        self._depth = 0
        self._lock = threading.RLock()
        self.run_hooks = None

    @override
    def run(self, frames: Sequence[Frame], fn: Callable[..., Any], calls: Sequence[tuple[Any, Any]]) -> list[Any]:
        with one_thread(self._lock):
            refuse_modes()
            carry = CallerModes()
            tasks = [
                functools.partial(self._call, local_id, frame, carry, fn, args, kwargs)
                for local_id, (frame, (args, kwargs)) in enumerate(zip(frames, calls, strict=True))
            ]
            # What replicas get before they begin outlives the mode, which each enters by itself.
            with torch.inference_mode(False) if carry.inference else contextlib.nullcontext():  # noqa: FBT003
                return self._run_tasks(tasks)

    @override
    def meet(self, local_id: int, request: MergeRequest) -> Any:
        if request.kind == "merge_call":
            request = request._replace(fn=functools.partial(self._call_from_outside, request.fn))
        with label("meet", request.kind):
            return self._runners[self._depth - 1].merge(local_id, request)

    @override
    def adopt_new(self) -> None:
        if not self._record.has_new:
            return
        new = take_new(self._record, self._workers)
        try:
            if self._workers is not None:
                take_initial_values(new, self._workers)
            self._streams.hold(new)
            self._set.adopt(new)
            if any(isinstance(obj, torch.nn.Module) for obj in new):
                self._edits.renew()
            parameters = [dicts[0].get(name) for dicts, name in self._set.slots()]
            num_bytes = sum(p.numel() * p.element_size() for p in parameters if isinstance(p, torch.nn.Parameter))
            self._cores.are_used_by_merges = num_bytes >= _BYTES_FOR_ALL_CORES
        except BaseException:
            for obj in new:
                self._record.put_back(obj)
            raise
        if not self._depth:
            self._edits.before_run()
            self._look()

    @override
    def leave_scope(self) -> None:
        pass  # until the first run there is one object in this process

    @override
    def catch_up(self) -> None:
        self._edits.catch_up()
        self._set.before_run()
        self._set.after_run()
        self._look()

    @override
    def takes_turns(self) -> bool:
        return not self._concurrent

    @override
    def look_again(self) -> None:
        pass  # facades tell of what their modules get

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
        """Return the local id of the replica that a thread without a context works for, or ``None``."""
        if not self._depth:
            return None
        if self._concurrent:  # autograd has a thread for each accelerator
            return _on_current_device(self._placement.devices)
        return self._runners[self._depth - 1].current

    def _run_tasks(self, tasks: Sequence[Callable[[], Any]]) -> list[Any]:
        outermost = self._depth == 0
        if len(self._runners) == self._depth:
            turns: Turns = self._cores if self._concurrent else _Turns(self._streams, self._check)
            self._runners.append(Runner(len(tasks), turns, self._call_merge, concurrent=self._concurrent))
        runner = self._runners[self._depth]
        num_threads = self._cores.num_threads = torch.get_num_threads()
        if outermost:
            self._edits.before_run()
        self._before_functions()
        if outermost:
            self._compare_after_failure()
            self._check.begin(self._set.slots)
        self._begin_streams(outermost=outermost)
        self._depth += 1
        start = time.perf_counter()
        seconds = 0.0
        try:
            results = runner.run(tasks, self._placement.name_of)
            seconds = time.perf_counter() - start
            if outermost:
                self._end_outermost(seconds)
        except BaseException as error:
            if outermost:
                self._failure = name_error(error)
                self._edits.forget()
            raise
        finally:
            self._depth -= 1
            self._end_streams(outermost=outermost)  # first: the program's generators are noted as it will see them
            self._after_functions()
            if self._concurrent:
                self._cores.num_threads = num_threads
                torch.set_num_threads(num_threads)
            if outermost:
                self._check.forget()
                self._compare_if_failed()
        if outermost and self.run_hooks is not None:  # which have given the program's tensors their memory
            self._edits.after_run(seconds)
        return results

    def _watched_slots(self) -> list[Slot]:
        """Return where tensors are that the program may write to in a way that torch does not tell of."""
        slots = self._set.slots() + self._set.attribute_slots()
        if self.run_hooks is None:
            return slots
        return [  # the hooks see to it that all replicas have what is written to parameters
            (dicts, name) for dicts, name in slots if not isinstance(dicts[0].get(name), torch.nn.Parameter)
        ]

    def _end_outermost(self, seconds: float) -> None:
        """Compare the replicas after a run that took so many seconds."""
        if self.run_hooks is None:  # where one copy steps for all, the others' groups have no say
            check_copies(self._set.optimizers(), self._placement.name_of)
        if self._check.active:
            self._check.end()
        if self.run_hooks is None:
            self._edits.after_run(seconds)

    def _compare_after_failure(self) -> None:
        """Look whether a run that failed has left the replicas with different parameters.

        Raises:
            DivergenceError: it has, and the program has not restored them since.
        """
        if not self._failure:
            return
        found = differences_between_copies(self._set.slots(), self._placement.name_of)
        if found:
            name, shape, text = found[0]
            raise DivergenceError(
                f"The previous run failed ({self._failure}) when some replicas had come further than others: parameter "
                f"{name!r} (shape {tuple(shape)}) differs between {text} ({len(found)} do). Restore the model and the "
                "optimizer, by a checkpoint or `load_state_dict`, before the next run; or let the function raise on "
                "all replicas at the same point."
            )
        self._failure = ""

    def _compare_if_failed(self) -> None:
        """Look whether the replicas are equal all the same: what differs when the next run starts was then written."""
        if self._failure:
            with contextlib.suppress(Exception):  # the run's own error says more
                if not differences_between_copies(self._set.slots(), self._placement.name_of):
                    self._failure = ""
                    self._look()

    def _look(self) -> None:
        """Remember what the replicas hold alike outside ``run``, to tell what is written there."""
        if not self._failure:
            self._edits.look()

    def _begin_streams(self, *, outermost: bool) -> None:
        """Take the random streams from the program, or from the merge function that calls ``run``."""
        if outermost:
            self._streams.seed_accelerators()
            self._streams.begin()
        elif not self._concurrent:
            self._streams.leave(0)

    def _end_streams(self, *, outermost: bool) -> None:
        """Give them back."""
        if outermost:
            self._streams.end()
        elif not self._concurrent:
            self._streams.enter(0)

    def _call_merge(self, fn: Callable[[list[Any]], Sequence[Any]], payloads: list[Any]) -> Sequence[Any]:
        frame = Frame(self._strategy, None)
        push_frame(frame)
        try:
            with label("merge"):
                return fn(payloads)
        finally:
            pop_frame(frame)

    def _call_from_outside(self, fn: Callable[[list[Any]], Sequence[Any]], payloads: list[Any]) -> Sequence[Any]:
        """Call the user's merge function, which acts on replica 0 for all replicas and draws from its stream."""
        self._after_functions()
        if self._concurrent:  # on replica 0's thread, which has its stream
            torch.set_num_threads(self._cores.num_threads)
        else:
            self._streams.enter(0)
        try:
            return fn(payloads)
        finally:
            if self._concurrent:
                torch.set_num_threads(_share(self._cores.num_threads, len(payloads)))
            else:
                self._streams.leave(0)
            self._before_functions()

    def _before_functions(self) -> None:
        self._set.before_run()
        if self.run_hooks is not None:
            self.run_hooks.enter()

    def _after_functions(self) -> None:
        if self.run_hooks is not None:
            self.run_hooks.leave()
        self._set.after_run()

    def _call(
        self,
        local_id: int,
        frame: Frame,
        carry: CallerModes,
        fn: Callable[..., Any],
        args: Any,
        kwargs: Any,
    ) -> Any:
        push_frame(frame)
        try:
            share = _share(carry.num_threads, len(self._placement.devices)) if self._concurrent else carry.num_threads
            if torch.get_num_threads() != share:
                torch.set_num_threads(share)
            with (
                carry.entered(),
                on_device(self._devices[local_id]),
                self._streams.on_this_thread(local_id),
                label("replica", frame.replica_context._replica_id),
            ):
                result = fn(*args, **kwargs)
                self._strategy.gradients.ledger.hear()  # in this replica's turn: the next one can't tell whose they are
                return result
        finally:
            pop_frame(frame)


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


class _Cores:
    """Divides the cores between replicas that run at once.

    Args:
        num_replicas: of this process.
    """

    def __init__(self, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        #: How many threads the caller of ``run`` has for operators.
        self.num_threads = 1
        #: Whether the caller's thread has them where the replicas meet, too, and not only its share as a replica.
        self.are_used_by_merges = False

    def starts(self, local_id: int) -> None:  # noqa: ARG002 - replica 0, on the caller's thread
        torch.set_num_threads(_share(self.num_threads, self._num_replicas))

    def ends(self, local_id: int, *, failed: bool) -> None:  # noqa: ARG002
        if self.are_used_by_merges:
            torch.set_num_threads(self.num_threads)


def _share(num_threads: int, num_replicas: int) -> int:
    """Return how many threads each of the replicas has that run at once."""
    return max(1, num_threads // num_replicas)


def _on_current_device(devices: Sequence[torch.device]) -> int | None:
    """Return which replica's accelerator is this thread's; autograd has a thread for each."""
    module = accelerator_module(devices[0])
    if module is None or not module.is_initialized():
        return None
    here = torch.device(devices[0].type, module.current_device())
    return devices.index(here) if here in devices else None
