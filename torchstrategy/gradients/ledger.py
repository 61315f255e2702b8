"""What each gradient is: a replica's own, the sum over replicas, or a sum that a step has used.

The facts are kept here and not on the program's tensors: for each parameter, which tensor its gradient was, with which
version, when it was computed, summed or used last. What the program does meanwhile shows in ``p.grad``: another
tensor, ``None``, or zeros are a new beginning, whoever made them. Where that does not tell a sum from new gradients,
the replicas do: sums are equal on all of them, to the bit. What is equal and may still be both is refused.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from torchstrategy.base.context import current_replica_context
from torchstrategy.gradients.notes import LOCAL, UNKNOWN, Note, State, are_cleared, is_traced, nothing, refusal
from torchstrategy.replicas.fingerprints import fingerprints
from torchstrategy.replicas.object_hooks import OwnQueue

__all__ = ["GradientLedger", "hear_all"]


#: So many first steps of an optimizer leave fingerprints of the sums that they have used, in case they are used again.
_NUM_KEPT = 3
#: So many times a replica's gradients are cleared is looked at what became of them.
_NUM_LOOKS = 20


class GradientLedger:
    """What the gradients of one strategy's parameters are.

    Args:
        num_local: number of this process's replicas.
        running: returns the position of the replica whose turn it is, or ``None``; for the threads of autograd, which
            have no context.
        at_once: whether replicas compute at the same time, so that each hook must tell whose backward pass called it.
            Else hooks only keep what they are called with: a call of Python amid torch's own code costs a
            gradient more than everything that the library does with it later.
    """

    def __init__(self, num_local: int, running: Callable[[], int | None] = nothing, *, at_once: bool = False) -> None:
        self._running = running
        self._at_once = at_once
        #: The parameters that backward passes have reached, until ``hear`` looks at their gradients.
        self._reached = OwnQueue()
        self._num_runs = 0
        #: Of the hooks, by id of the parameter; they end with the ledger.
        self._handles: dict[int, RemovableHandle] = {}
        self._lock = threading.RLock()
        weakref.finalize(self, _remove_all, self._handles).atexit = False
        _ledgers.add(self)
        #: A weak reference to what hears of each backward pass in ``run``, for sums that begin meanwhile.
        self.early: Callable[[], Any] = nothing
        #: By id of the parameter.
        self._notes: dict[int, Note] = {}
        #: For each local replica those whose gradients were not simply its own when last seen.
        self._open: list[set[Note]] = [set() for _ in range(num_local)]
        #: Those of gradients that are sums that no step has used.
        self._unused: set[Note] = set()
        #: For each replica, those to whose gradients the present backward pass adds by way of new tensors.
        self._grow_anew: list[set[Note]] = [set() for _ in range(num_local)]
        #: For each, how often it has computed gradients without giving them to parameters.
        self._num_computed = [0] * num_local
        #: For each, how often it was looked at what had become of gradients that were about to be cleared.
        self._num_looks = [0] * num_local
        #: Where a replica's own gradients were cleared in this run after their parameters had been changed.
        self.cleared_at = ""
        #: Numbers of backward passes.
        self.passes = itertools.count(1)
        #: The number that stood there when the present run began.
        self._passes_before = 0
        #: How many steps have used the gradient of a parameter that is an optimizer's first, by its id.
        self._num_steps: Counter[int] = Counter()
        #: Whether a used sum was met again, so that all steps leave fingerprints.
        self._meets_used = False

    def watch(self, parameter: Tensor, local_id: int) -> None:
        """Take up a parameter of a local replica, and hear of its backward passes.

        Args:
            parameter: a replica's own.
            local_id: the replica's position in the process.
        """
        key, own = id(parameter), weakref.ref(self)

        def forget(reference: weakref.ref[Tensor]) -> None:
            ledger = own()
            note = None if ledger is None else ledger._notes.get(key)
            if ledger is not None and note is not None and note.parameter is reference:
                ledger._close(note)
                ledger._num_steps.pop(key, None)
                ledger._handles.pop(key, None)
                del ledger._notes[key]

        known = self._notes.get(key)
        if known is None or known.parameter() is not parameter or known.local_id != local_id:
            note = self._notes[key] = Note(weakref.ref(parameter, forget), local_id, own)
            is_floating = parameter.is_floating_point() or parameter.is_complex()
            if parameter.is_leaf and not parameter.is_inference() and is_floating:
                required = parameter.requires_grad
                parameter.requires_grad_()  # a frozen one may be trained later
                hook = self._reached.append if self.defers else note.note_backward
                self._handles[key] = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                parameter.requires_grad_(required)

    def current(self) -> int | None:
        """Return the position of the replica that this thread computes for; ``None`` outside ``run``."""
        context = current_replica_context()
        is_own = context is not None and context.strategy.gradients.ledger is self
        return context.local_id if is_own else self._running()

    @property
    def defers(self) -> bool:
        """Whether hooks only keep what they are called with."""
        return not self._at_once and self.early() is None

    def hear(self) -> None:
        """Look at the gradients of parameters that backward passes have reached.

        Between a backward pass in ``run`` and this there may be no switch to another replica.

        Raises:
            RuntimeError: as ``Note.note_backward``, after all of them were looked at.
        """
        if self._reached:
            with self._lock:
                self._hear(self.current())

    def hear_outside(self) -> None:
        """Look at what passes outside ``run`` have reached, unless there is a run: its own thread looks then.

        Raises:
            RuntimeError: as ``hear``.
        """
        if self._reached:
            with self._lock:
                if self._num_runs == 0:
                    self._hear(None)

    def begin_run(self) -> None:
        """Take what has been reached up to now as outside ``run``, and what will be as inside.

        Raises:
            RuntimeError: as ``hear``.
        """
        with self._lock:
            self._num_runs += 1
            if self._num_runs == 1:
                self._hear(None)
                self._passes_before = next(self.passes)

    def _hear(self, current: int | None, *, ends_run: bool = False) -> None:
        notes, passes, problem = self._notes, self.passes, None
        for _ in range(len(self._reached)):
            reached = self._reached.popleft()
            note = notes.get(id(reached))
            tensor = None if note is None else note.parameter()
            if note is None or tensor is None or tensor is not reached:  # a program's hook returned it; torch refuses
                continue
            grad = tensor.grad
            if ends_run:
                current = note.local_id
            if note.state is UNKNOWN and current == note.local_id and grad is not None:  # nearly all, in each step
                note.state, note.gradient, note.version = LOCAL, weakref.ref(grad), grad._version
                note.passes, note.written = next(passes), tensor._version
                continue
            try:
                self.note_backward(note, grad, current)
            except RuntimeError as error:
                problem = problem or error
        if problem is not None:
            raise problem

    def begin_backward(self, local_id: int, *, create_graph: bool = False) -> None:
        """Look at the gradients that a backward pass of a replica may add to.

        Args:
            local_id: the replica's position in the process.
            create_graph: whether the pass adds by way of new tensors.
        """
        anew = self._grow_anew[local_id]
        self.sweep(local_id)
        anew.clear()
        for note in list(self._open[local_id]):
            parameter = note.parameter()
            grad = None if parameter is None else parameter.grad
            if grad is None:
                continue
            if create_graph or grad.is_sparse:
                anew.add(note)
            if grad is not note.gradient():  # replaced, but neither cleared nor used: what is it?
                self._set(note, State.DOUBTFUL, grad, note.passes)
            elif note.state is State.APPLIED:
                note.version = grad._version  # changed in place, maybe, but not cleared

    def note_computed(self, local_id: int) -> None:
        """Take notice of gradients that a replica has computed without giving them to parameters."""
        self._num_computed[local_id] += 1

    def sweep(self, local_id: int) -> None:
        """Forget what is known of a replica's gradients that the program has cleared or, after a step, replaced."""
        self.hear()
        same: list[tuple[Note, Tensor]] = []
        closed = []
        for note in list(self._open[local_id]):
            parameter = note.parameter()
            grad = None if parameter is None else parameter.grad
            if grad is not None and (grad is note.gradient() or note.state is State.SUMMED):
                same.append((note, grad))
            else:
                closed.append(note)
        if same:
            closed += [note for (note, _), is_cleared in zip(same, are_cleared(same), strict=True) if is_cleared]
        for note in closed:  # of all parameters in each step, so without a call for each
            note.state = UNKNOWN
        self._open[local_id].difference_update(closed)
        if self._unused:
            self._unused.difference_update(closed)

    def note_backward(self, note: Note, grad: Tensor | None, current: int | None) -> None:
        """Take notice of a backward pass that has added to a gradient.

        Args:
            note: what was known of it.
            grad: what the gradient is now.
            current: the replica whose pass it is; ``None`` outside ``run``.

        Raises:
            RuntimeError: the pass is another replica's, or the gradient was a sum that no step has used.
        """
        if current is not None and current != note.local_id:
            shape = () if (parameter := note.parameter()) is None else tuple(parameter.shape)
            raise RuntimeError(
                f"The backward pass of local replica {current} reached a parameter (shape {shape}) of local replica "
                f"{note.local_id}. A tensor or list of parameters taken from the model outside `run` belongs to "
                "replica 0: read it from the model inside the replica function."
            )
        if grad is None:
            self._close(note)
            return
        state = State.OUTSIDE if current is None else State.LOCAL
        if note.state is not State.UNKNOWN and (note.gradient() is grad or note in self._grow_anew[note.local_id]):
            state = self._grown(note, grad, state)
        self._set(note, state, grad, next(self.passes))

    def _grown(self, before: Note, grad: Tensor, new: State) -> State:
        """Return what became of a gradient to which a backward pass has added."""
        if before.state is State.SUMMED:
            self._set(before, State.MIXED, grad, next(self.passes))  # for programs that go on after this error
            raise RuntimeError(
                f"`backward` adds to a gradient (shape {tuple(grad.shape)}) that is already the sum over replicas. "
                "Call `optimizer.step()` or `optimizer.zero_grad()` after `sum_gradients` or `scaler.unscale_`, before "
                "the next backward."
            )
        if before.state is State.APPLIED:
            is_untouched = before.gradient() is not grad or grad._version == before.version + 1
            # A hook of the program's may have changed it after this pass, before it was looked at.
            hooks = () if (parameter := before.parameter()) is None else parameter._post_accumulate_grad_hooks
            return State.MIXED if is_untouched or len(hooks or ()) > 1 else new
        if before.state is State.DOUBTFUL:
            return State.MIXED
        return new if before.state is State.LOCAL else before.state

    def note_sum(self, parameters: Iterable[Tensor], run: Any) -> None:
        """Note that the present gradients are sums over replicas, made in a call of ``run``."""
        self._note(parameters, State.SUMMED, run)

    def note_step(self, parameters: Sequence[Tensor]) -> None:
        """Note that an optimizer's step has used the present gradients."""
        self._note(parameters, State.APPLIED, None)
        if not parameters:
            return
        first = id(parameters[0])
        if self._meets_used or self._num_steps[first] < _NUM_KEPT:
            self._num_steps[first] += 1
            self._keep_fingerprints([note for p in parameters if (note := self._known(p)) is not None])

    def forget_unused(self, parameters: Iterable[Tensor]) -> None:
        """Let sums that no step has used, because it was left out, count as what they stand for no longer."""
        self.hear()
        for parameter in parameters:
            note = self._notes.get(id(parameter))
            if note in self._unused:
                self._close(note)

    def end_run(self, *, has_failed: bool = False) -> None:
        """Remember what sums hold that the run has not used: a step in a later run may use them.

        Passes that are looked at only now were not told of, as those that code in C++ makes. Each counts as its
        parameter's replica's.

        Args:
            has_failed: whether the run ends by an error, which another one may not hide.

        Raises:
            RuntimeError: as ``hear``.
        """
        self.cleared_at = ""
        with contextlib.suppress(RuntimeError) if has_failed else contextlib.nullcontext():
            with self._lock:
                try:
                    if self._num_runs == 1:
                        self._hear(None, ends_run=True)
                finally:
                    self._num_runs -= 1
            self._keep_fingerprints([note for note in list(self._unused) if note.fingerprint is None])

    def _keep_fingerprints(self, notes: Iterable[Note]) -> None:
        left = [(note, grad) for note in notes if (grad := note.gradient()) is not None and not is_traced(grad)]
        if not left:
            return
        for (note, grad), number in zip(left, fingerprints([grad for _, grad in left]), strict=True):
            note.version, note.fingerprint = grad._version, number

    def states(self, parameters: Sequence[Tensor], run: Any, *, uses_applied: bool = False) -> list[State]:
        """Say of each gradient whether it is to be summed: ``LOCAL``, ``SUMMED``, ``EDITED`` or ``DOUBTFUL``.

        Args:
            parameters: an optimizer's; one without a gradient is ``LOCAL``.
            run: the replica's context.
            uses_applied: whether a sum that a step has used may be used again as it is.

        Raises:
            RuntimeError: a gradient comes from outside ``run``, or holds a sum that was used and, on top of it, a later
                backward's.
        """
        self.hear()
        states = [State.LOCAL] * len(parameters)
        unclear: list[int] = []
        for k, parameter in enumerate(parameters):
            note, grad = self._notes.get(id(parameter)), parameter.grad
            if note is not None and grad is not None and note.state not in (State.LOCAL, State.UNKNOWN):
                states[k] = self._state(note, grad, run, uses_applied=uses_applied)
                # Sums that were used, too, may be zeros by now, where another replica has new gradients.
                is_sum = states[k] is State.SUMMED and (uses_applied or note.state is State.SUMMED)
                if states[k] is not State.LOCAL and not is_sum:
                    unclear.append(k)
        pairs = [(self._notes[id(parameters[k])], parameters[k].grad) for k in unclear]
        used = []
        for k, is_cleared in zip(unclear, are_cleared(pairs), strict=True):  # type: ignore[arg-type]
            if is_cleared:
                states[k] = State.LOCAL
            elif states[k] in (State.OUTSIDE, State.MIXED):
                raise RuntimeError(refusal(states[k], k, parameters[k]))
            elif states[k] is State.SUMMED:
                used.append(parameters[k])
        if used:  # what the program does to them before the next step, such as clipping, is done to sums
            self._note(used, State.SUMMED, run)
        return states

    def _state(self, note: Note, grad: Tensor, run: Any, *, uses_applied: bool) -> State:
        """Return what a gradient that was not simply the replica's own is now."""
        is_same = note.gradient() is grad
        has_computed = note.num_computed != self._num_computed[note.local_id]
        if note.state is State.SUMMED:
            if is_same and self._is_still(note, grad, run):
                return State.SUMMED
            return State.DOUBTFUL if has_computed else State.EDITED
        if not is_same:
            return State.LOCAL
        if note.state is not State.APPLIED:
            return note.state
        if uses_applied or self._is_unchanged(note, grad):
            return State.SUMMED
        if note.version != grad._version:
            return State.LOCAL if has_computed else State.DOUBTFUL
        # Of a late optimizer's first use of others' sums nothing more tells: if all replicas hold the same, it is one.
        return State.DOUBTFUL if has_computed or note.fingerprint is not None else State.EDITED

    def _is_unchanged(self, note: Note, grad: Tensor) -> bool:
        """Say whether a tensor is known to hold the sum that a step has used."""
        self._meets_used = True
        if is_traced(grad):
            return note.version == grad._version
        return note.fingerprint is not None and fingerprints([grad])[0] == note.fingerprint

    def _is_still(self, note: Note, grad: Tensor, run: Any) -> bool:
        """Say whether a tensor still holds the sum: in the run that made it, all changes in place are changes of it."""
        if note.run is not None and note.run() is run:
            return True
        if note.version != grad._version:
            return False
        if is_traced(grad):
            return True
        return note.fingerprint is not None and fingerprints([grad])[0] == note.fingerprint

    def is_local(self, parameter: Tensor) -> bool:
        """Say whether a parameter's gradient is known to be one replica's own."""
        self.hear()
        note, grad = self._notes.get(id(parameter)), parameter.grad
        return note is not None and grad is not None and note.state is State.LOCAL and note.gradient() is grad

    def was_reached(self, parameter: Tensor) -> bool:
        """Say whether a backward pass of the present run, or of the last one if there is none, has reached it."""
        note = self._notes.get(id(parameter))
        return note is not None and note.passes > self._passes_before

    def is_sum(self, parameter: Tensor) -> bool:
        """Say whether a parameter's gradient is a sum over replicas, used or not, or might be."""
        note = self._known(parameter)
        return note is not None and note.state is not State.LOCAL and note.gradient() is parameter.grad

    def own_pass(self, parameter: Tensor) -> int | None:
        """Return the number of the backward pass that has left a replica's own gradient as it is; else ``None``."""
        note, grad = self._notes.get(id(parameter)), parameter.grad
        if note is None or grad is None or note.state is not State.LOCAL:
            return None
        return note.passes if note.gradient() is grad and note.version == grad._version else None

    def notes_of(self, parameters: Iterable[Tensor]) -> list[Note | None]:
        """Return what is known of the gradient of each parameter."""
        self.hear()
        return list(map(self._notes.get, map(id, parameters)))

    def was_edited(self, parameter: Tensor) -> bool:
        """Say whether a replica's own gradient was changed in place since its backward pass, other than to zeros."""
        self.hear()
        note, grad = self._notes.get(id(parameter)), parameter.grad
        if note is None or grad is None or note.state is not State.LOCAL or note.gradient() is not grad:
            return False
        return note.version != grad._version and not are_cleared([(note, grad)])[0]

    def with_written(self, local_id: int) -> list[tuple[Tensor, Tensor, int]]:
        """Return a replica's parameters changed since their own gradients of this run; only in its first calls.

        Args:
            local_id: the replica's position in the process.

        Returns:
            Each with its gradient, and the gradient's version.
        """
        self._num_looks[local_id] += 1
        if self._num_looks[local_id] > _NUM_LOOKS:
            return []
        self.hear()
        found = []
        for note in list(self._notes.values()):
            if note.state is LOCAL and note.local_id == local_id and note.passes > self._passes_before:
                parameter, grad = note.parameter(), note.gradient()
                if parameter is not None and parameter._version != note.written and parameter.grad is grad is not None:
                    found.append((parameter, grad, grad._version))
        return found

    def was_replaced(self, parameter: Tensor) -> bool:
        """Say whether the program has put another tensor in the place of a gradient that a backward pass has left."""
        note, grad = self._notes.get(id(parameter)), parameter.grad
        return note is not None and grad is not None and note.state is State.LOCAL and note.gradient() is not grad

    def is_the_programs(self, parameter: Tensor) -> bool:
        """Say whether the program has assigned a gradient, or changed one that is no sum as far as is known."""
        note, grad = self._notes.get(id(parameter)), parameter.grad
        if note is None or grad is None or note.state not in (State.LOCAL, State.UNKNOWN, State.APPLIED):
            return False
        return note.gradient() is not grad or note.version != grad._version

    def take(self, parameter: Tensor) -> Note | None:
        """Return what is known of a parameter's gradient, for ``put``."""
        self.hear()
        note, grad = self._known(parameter), parameter.grad
        if note is None or grad is None or (note.state is not State.SUMMED and note.gradient() is not grad):
            return None
        copied = Note(note.parameter, note.local_id, note.ledger)
        copied.follow(note, grad)
        return copied

    def put(self, parameter: Tensor, note: Note | None) -> None:
        """Know what ``take`` has returned, or what it returned of another tensor that the gradient stands for now."""
        self.hear()
        own, grad = self._notes.get(id(parameter)), parameter.grad
        if own is None:
            return
        if note is None or grad is None:
            self._close(own)
            return
        own.follow(note, grad)
        self._file(own)

    def _known(self, parameter: Tensor) -> Note | None:
        """Return a parameter's note if anything is known of its gradient."""
        note = self._notes.get(id(parameter))
        return None if note is None or note.state is State.UNKNOWN else note

    def _note(self, parameters: Iterable[Tensor], state: State, run: Any) -> None:
        """Note that present gradients are sums; of many parameters in each step, so in few operations."""
        self.hear()
        reference = None if run is None else weakref.ref(run)
        seen: list[list[Note]] = [[] for _ in self._open]
        for parameter in parameters:
            note, grad = self._notes.get(id(parameter)), parameter.grad
            if grad is None or note is None:
                continue
            if note.gradient() is not grad:
                note.gradient = weakref.ref(grad)
            note.state, note.version, note.fingerprint, note.run = state, grad._version, None, reference
            note.num_computed = self._num_computed[note.local_id]
            seen[note.local_id].append(note)
        for known, notes in zip(self._open, seen, strict=True):
            known.update(notes)
            (self._unused.update if state is State.SUMMED else self._unused.difference_update)(notes)

    def _set(self, note: Note, state: State, grad: Tensor, passes: int) -> None:
        note.set(state, grad, passes)
        self._file(note)

    def _file(self, note: Note) -> None:
        """Keep a note where one looks for those in its state."""
        (self._open[note.local_id].discard if note.state is State.LOCAL else self._open[note.local_id].add)(note)
        (self._unused.add if note.state is State.SUMMED else self._unused.discard)(note)

    def _close(self, note: Note) -> None:
        """Know nothing any more."""
        note.state = State.UNKNOWN
        self._open[note.local_id].discard(note)
        self._unused.discard(note)


#: All that there are, of all strategies.
_ledgers: weakref.WeakSet[GradientLedger] = weakref.WeakSet()


def hear_all() -> None:
    """Look at what a backward pass of this thread has reached, and at what passes outside of all runs have.

    Raises:
        RuntimeError: as ``GradientLedger.hear``, the first of all ledgers'.
    """
    context, problem = current_replica_context(), None
    own: GradientLedger | None = None if context is None else context.strategy.gradients.ledger
    references = list(_ledgers.data)  # type: ignore[attr-defined]  # at once: another thread may make a strategy
    for ledger in [reference() for reference in references]:
        try:
            if own is not None and ledger is own:
                own.hear()
            elif ledger is not None:
                ledger.hear_outside()
        except RuntimeError as error:
            problem = problem or error
    if problem is not None:
        raise problem


def _remove_all(handles: dict[int, RemovableHandle]) -> None:
    for handle in handles.values():
        handle.remove()
