"""What a process holds for the variables on the parameter servers: the last value that it pulled, and its version.

The coordinator and the workers have one ``Bindings`` each. A binding keeps one local tensor for its variable, a leaf of
autograd; a refresh gives it the memory of what was pulled, so that modules and optimizers may hold it.
"""

from __future__ import annotations

import functools
import itertools
import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchstrategy.base.devices import tensor_device
from torchstrategy.ps.behind import ParameterBehind, PulledParameter
from torchstrategy.ps.layout import rows_of

if TYPE_CHECKING:
    from torchstrategy.ps.client import ParameterClient
    from torchstrategy.ps.layout import VariableSpec

__all__ = ["Binding", "Bindings", "Kind", "RefreshWhenCalled", "can_require_grad", "refuse_shared_memory", "version_of"]


class Kind(str, Enum):
    """What a variable on the parameter servers is to the program."""

    PARAMETER = "parameter"  # of a module; workers hold a plain copy
    ROWS = "rows"  # a parameter of which only looked-up rows are pulled
    BUFFER = "buffer"  # of a module; what a function changes is added to it
    VARIABLE = "variable"  # a ts.Variable


class Binding:
    """One variable, as one process sees it.

    Args:
        spec: where the variable is.
        kind: what it is to the program.
        local: the tensor that holds what was pulled; ``None`` makes one at the first read.
    """

    def __init__(self, spec: VariableSpec, kind: Kind, local: Tensor | None = None) -> None:
        self.spec = spec
        self.kind = kind
        self.local = local
        self.versions: tuple[int, ...] | None = None
        #: The refresh point at which ``local`` was last known to be the variable's value.
        self.point = -1
        #: The program's tensor, which has no memory: autograd gathers the gradient of rows there.
        self._shown: weakref.ref[Tensor] | None = None
        self.requires_grad = spec.trainable
        self._noted: int | None = None

    @property
    def was_written(self) -> bool:
        """Whether the program changed the local tensor since it was pulled."""
        return self.local is not None and self._noted is not None and version_of(self.local) != self._noted

    def note_write(self) -> None:
        """Take the local tensor as changed, whatever its version says."""
        self._noted = _UNKNOWN

    def note(self) -> None:
        """Take the local tensor's present value as that of the variable."""
        if self.local is not None:
            self._noted = version_of(self.local)

    def store(self, value: Tensor, versions: tuple[int, ...], device: torch.device) -> None:
        """Take a value that was pulled, of the variable's shape and dtype; its memory is used."""
        value = value.to(device)
        if self.local is None:
            with torch.inference_mode(False):  # noqa: FBT003 - it outlives the mode
                self.local = value.detach().requires_grad_(self.requires_grad and can_require_grad(value))
        elif self.kind is Kind.BUFFER:
            with torch.no_grad():
                self.local.copy_(value)  # a module may hold views of it
        else:
            self.local.data = value
            # A graph that was built with the old value must not go backward with the new one.
            torch.autograd.graph.increment_version(self.local)
        self.versions = versions
        self.note()

    def show(self, tensor: Tensor) -> None:
        """Note the program's tensor for the variable."""
        self._shown = weakref.ref(tensor)

    @property
    def shown(self) -> Tensor | None:
        """The program's tensor for the variable, if it has one that is not ``local``."""
        return None if self._shown is None else self._shown()

    def gradient(self) -> Tensor | None:
        """Return the gradient of the variable, sparse for rows; ``None`` if there is none."""
        dense = None if self.local is None else self.local.grad
        shown = self.shown
        with torch._C.DisableTorchFunctionSubclass():
            sparse = None if shown is None else shown.grad
            if sparse is None or shown is None:
                return dense
            if dense is not None and self.local is not None:
                # One tensor, which may be changed in place.
                self.local.grad, shown.grad = dense + sparse, None
                return self.local.grad
            if sparse.is_sparse and not sparse.is_coalesced():
                shown.grad = sparse.coalesce()
            return shown.grad

    def set_gradient(self, grad: Tensor | None) -> None:
        """Replace the gradient."""
        is_sparse = grad is not None and grad.is_sparse
        shown = self.shown
        if grad is not None and (shown if is_sparse else self.local) is None:
            raise RuntimeError(
                f"{self.spec.name!r}, of which only rows are pulled, can't have a dense gradient here. Give it a "
                "sparse one, or compute it by a backward pass."
            )
        if shown is not None:
            with torch._C.DisableTorchFunctionSubclass():
                shown.grad = grad if is_sparse else None
        if self.local is not None:
            self.local.grad = None if is_sparse else grad


class Bindings:
    """The variables on the parameter servers, as one process sees them.

    Args:
        client: talks to the parameter servers.
        device: where the local tensors are.
        is_coordinator: ask for a newer value at every read, and assign to the variables what the program writes to
            their local tensors. In a worker variables are as they were where the function started, or when they
            were pulled after the last step of their optimizer.
    """

    def __init__(self, client: ParameterClient, device: torch.device, *, is_coordinator: bool) -> None:
        self.client = client
        self.device = tensor_device(device)
        self.by_id: dict[int, Binding] = {}
        #: Variables that are pulled together when one of them is read, such as those of the function that runs.
        self.pulled_together: Sequence[Binding] = ()
        self._reads_are_fresh = self._writes_back = is_coordinator
        self._point = 0
        self._depth = 0
        self._lock = threading.RLock()

    def add(self, spec: VariableSpec, kind: Kind, local: Tensor | None = None) -> Binding:
        """Note a variable; one that is known stays as it is."""
        binding = self.by_id.get(spec.id)
        if binding is None:
            binding = self.by_id[spec.id] = Binding(spec, kind, local)
        return binding

    def mark_stale(self) -> None:
        """Make this a refresh point: the next read asks the servers."""
        self._point += 1

    def refresh(self, bindings: Iterable[Binding]) -> None:
        """Pull what has changed on the servers, with one request to each, after giving them what was written here.

        Raises:
            UnavailableError: a parameter server is gone.
        """
        with self._lock:
            wanted = [binding for binding in bindings if binding.point != self._point]
            if not wanted:
                return
            self.write_back(wanted)
            known = {b.spec.id: b.versions for b in wanted if b.versions is not None and b.local is not None}
            with torch.inference_mode(False):  # noqa: FBT003 - what is pulled outlives the mode
                pulled = self.client.pull([binding.spec for binding in wanted], known)
                for binding in wanted:
                    if isinstance(binding.local, ParameterBehind):
                        binding.local.catch_up()
                    if binding.spec.id in pulled:
                        versions, value = pulled[binding.spec.id]
                        binding.store(value, versions, self.device)
                    binding.point = self._point

    def fall_behind(self, bindings: Sequence[Binding]) -> None:
        """Note that an optimizer has changed variables on the servers: whoever uses one next pulls all of them."""
        for binding in bindings:
            binding.point = -1
            if type(binding.local) is PulledParameter:
                ParameterBehind.make(binding.local, functools.partial(self.refresh, bindings))

    def read(self, binding: Binding) -> Tensor:
        """Return the local tensor, refreshed if need be."""
        counts = binding.kind is Kind.VARIABLE and not binding.spec.trainable
        if (self._reads_are_fresh and not self._depth) or counts:
            binding.point = -1
        together = self.pulled_together if binding in self.pulled_together else [binding]
        self.refresh(together)
        if binding.local is None:
            raise RuntimeError(f"The parameter servers sent no value of {binding.spec.name!r}.")
        return binding.local

    def look_up(self, binding: Binding, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Pull only some rows of a variable.

        Args:
            binding: the variable.
            indices: numbers of rows, integers of any shape; may repeat.

        Returns:
            The rows, ``[k, ...]``, and for each index its position among them, of the shape of ``indices``.
        """
        self.write_back([binding])
        unique, positions = torch.unique(indices, return_inverse=True)
        unique = unique.to(device="cpu", dtype=torch.int64)
        rows = self.client.pull_rows(binding.spec, unique).detach().to(self.device)
        shown = binding.shown
        if shown is not None and binding.requires_grad and torch.is_grad_enabled():
            rows = rows_of(shown, unique.to(self.device), rows)
        return rows, positions

    def update(self, binding: Binding, method: str, value: Tensor) -> None:
        """Change a variable on the servers: ``assign``, ``assign_add`` or ``assign_sub``."""
        self.write_back([binding])
        self.client.update(binding.spec, method, value)
        binding.point = -1

    def write_back(self, bindings: Iterable[Binding]) -> None:
        """Assign to the variables what the program wrote to their local tensors, such as by ``copy_`` or ``init``.

        Raises:
            RuntimeError: this is a worker, where only buffers may be written: of others the servers would not hear.
        """
        written = [b for b in bindings if b.was_written and (self._writes_back or b.kind is not Kind.BUFFER)]
        if written and not self._writes_back:
            raise RuntimeError(_not_written(written[0]))
        if written:
            self.client.update_many([(b.spec, "assign", b.local.detach()) for b in written])  # type: ignore[union-attr]
            for binding in written:
                binding.note()
                binding.versions = None

    def forget_gradients(self) -> None:
        """Drop every gradient and the rows that were pulled."""
        for binding in self.by_id.values():
            binding.set_gradient(None)

    def enter(self, bindings: Iterable[Binding]) -> None:
        """Begin a block in which variables are refreshed once, for all reads; ``leave`` ends it."""
        if self._reads_are_fresh and not self._depth:
            self.mark_stale()
        self.refresh(bindings)
        self._depth += 1

    def leave(self) -> None:
        """End the block that ``enter`` began."""
        self._depth -= 1


class RefreshWhenCalled:
    """Hooks of a module that pull all of its variables with one request when it is called.

    A copy of the module, here or in another process, has none of it.

    Args:
        module: the module.
        bindings: the process's variables.
        of_module: the module's.
    """

    def __init__(self, module: nn.Module, bindings: Bindings, of_module: Sequence[Binding]) -> None:
        self._bindings = bindings
        self._of_module = of_module
        self._num_entered = 0
        module.register_forward_pre_hook(_Hook(self._enter))
        module.register_forward_hook(_Hook(self._leave), always_call=True)

    def _enter(self, *_: Any) -> None:
        self._bindings.enter(self._of_module)
        self._num_entered += 1

    def _leave(self, *_: Any) -> None:
        if self._num_entered:  # not where the refresh has failed
            self._num_entered -= 1
            self._bindings.leave()


class _Hook:
    """A hook that does nothing in a copy."""

    def __init__(self, fn: Callable[..., None] | None = None) -> None:
        self._fn = fn

    def __call__(self, *args: Any) -> None:
        if self._fn is not None:
            self._fn(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Hook:
        return _Hook()

    def __reduce__(self) -> Any:
        return _Hook, ()


_UNKNOWN = -1


def _not_written(binding: Binding) -> str:
    what = "variable" if binding.kind is Kind.VARIABLE else "parameter"
    remedy = (
        "Use its assign, assign_add or assign_sub, which reach the servers"
        if binding.kind is Kind.VARIABLE
        else "Parameters change by their optimizer's step(); use a ts.Variable, whose assign reaches the servers"
    )
    return (
        f"A function on a worker changed the {what} {binding.spec.name!r} in place, but only this worker's copy of it. "
        f"{remedy}, or change the {what} in the coordinator's program."
    )


def refuse_shared_memory(named: Iterable[tuple[str, Tensor]]) -> None:
    """Check that parameters which are to become variables of their own have memory of their own.

    Raises:
        ValueError: a write to one of them would change another one.
    """
    places: dict[int, dict[int, tuple[int, int, str]]] = {}
    for name, tensor in named:
        if type(tensor) is nn.Parameter and tensor.is_contiguous() and tensor.numel():
            start = tensor.data_ptr()
            of_storage = places.setdefault(tensor.untyped_storage().data_ptr(), {})
            known = of_storage.get(id(tensor), (0, 0, ""))[2]
            of_storage[id(tensor)] = (start, start + tensor.nbytes, max(known, name, key=len))
    for of_storage in places.values():
        ordered = sorted(of_storage.values(), key=operator.itemgetter(0))
        for (_, stop, first), (start, _, second) in itertools.pairwise(ordered):
            if start < stop:
                raise ValueError(
                    f"The parameters {first!r} and {second!r} share memory, but on parameter servers each of them "
                    "would be a variable of its own, and no longer change with the other. To tie them, let the modules "
                    "have one parameter, as by `second.weight = first.weight`; else give one a copy: "
                    "`nn.Parameter(weight.detach().clone())`."
                )


def version_of(tensor: Tensor) -> int:
    """Return the count of a tensor's changes."""
    try:
        return tensor._version
    except RuntimeError:  # an inference tensor
        return 0


def can_require_grad(value: Tensor) -> bool:
    """Say whether a tensor's dtype is one of which gradients are taken."""
    return value.is_floating_point() or value.is_complex()
