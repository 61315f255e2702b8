"""What one strategy's replicas train: which parameters are whose, what their gradients are, and how they are summed."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle, unserializable_hook

from torchstrategy.base.options import VariableSynchronization
from torchstrategy.gradients.hooks import watch
from torchstrategy.gradients.ledger import GradientLedger
from torchstrategy.gradients.mean_losses import FoundMean
from torchstrategy.gradients.sharded_states import ShardedStates, StateShard, shard_of
from torchstrategy.gradients.summer import GradientSum, GradientSummer
from torchstrategy.replicas.dtensors import is_dtensor, leave_to_fsdp
from torchstrategy.replicas.hosting import Hosting
from torchstrategy.replicas.record import Record, optimizer_parameters
from torchstrategy.replicas.variables import Variable

__all__ = ["ReplicaGradients"]


class ReplicaGradients:
    """The gradients of the parameters that a strategy's scopes recorded.

    Args:
        owner: what to call the strategy in messages.
        record: what the scopes recorded.
        hosting: where the replicas run.
        num_local: replicas of this process that have parameters of their own.
        num_replicas: of the strategy, in all processes.
        ledger: what the gradients are.
        summer: sums them.
        sharded: splits optimizer states over processes; ``None`` if each has all.
    """

    def __init__(
        self,
        owner: str,
        record: Record,
        hosting: Hosting,
        num_local: int,
        num_replicas: int,
        ledger: GradientLedger,
        summer: GradientSummer,
        sharded: ShardedStates | None = None,
    ) -> None:
        self._sharded = sharded
        self.ledger = ledger
        self.summer = summer
        self._owner = owner
        self._record = record
        self._hosting = hosting
        self._num_replicas = num_replicas
        self._parameters: list[dict[int, weakref.ref[Tensor]]] = [{} for _ in range(num_local)]
        #: For each replica, by its id an optimizer and the ids of the parameters that were found to be the replica's.
        self._checked: list[dict[int, tuple[weakref.ref[Optimizer], list[int]]]] = [{} for _ in range(num_local)]
        self._lock = threading.Lock()  # replicas that run at once may find new parameters
        #: By id of each DTensor, whose gradients FSDP2 sums, what ends its hook.
        self._dtensors: dict[int, RemovableHandle] = {}
        weakref.finalize(self, _remove_all, self._dtensors).atexit = False

    def owns(self, local_id: int, value: Any) -> bool:
        """Say whether a tensor is a parameter of a replica, and not another one in the place of one that is gone."""
        known = self._parameters[local_id].get(id(value))
        return known is not None and known() is value

    def local_parameters(self) -> list[Tensor]:
        """Return the parameters of this process's first replica."""
        references = self._parameters[0].values()
        return [parameter for reference in references if (parameter := reference()) is not None]

    def refresh(self) -> None:
        """Look again at which parameters the recorded modules have.

        Raises:
            TypeError: there are DTensors that nobody sums, see ``leave_to_fsdp``.
        """
        if self._num_replicas > 1:
            leave_to_fsdp(self._record, self._num_replicas)
        if self._num_replicas > 1 and self.ledger.defers:
            watch(self)  # before hooks of parameters keep what passes reach
        with self._lock:
            for local_id, before in enumerate(self._parameters):
                found: dict[int, weakref.ref[Tensor]] = {}
                for dicts, name in self._hosting.slots():
                    tensor = dicts[local_id].get(name)
                    if isinstance(tensor, torch.nn.Parameter):
                        known = before.get(id(tensor))
                        if known is None or known() is not tensor:
                            known = weakref.ref(tensor)
                            if self._num_replicas > 1:
                                self._watch(tensor, local_id)
                        found[id(tensor)] = known
                self._parameters[local_id] = found
                self._checked[local_id] = {}

    def _watch(self, parameter: Tensor, local_id: int) -> None:
        """Hear of a parameter's gradients."""
        self._dtensors.pop(id(parameter), None)  # of another one, which was there before
        if not is_dtensor(parameter):
            self.ledger.watch(parameter, local_id)
        elif parameter.is_floating_point() or parameter.is_complex():
            required = parameter.requires_grad
            parameter.requires_grad_()  # a frozen one may be trained later
            hook = _of_all_replicas(self._num_replicas)
            self._dtensors[id(parameter)] = parameter.register_hook(hook)  # type: ignore[no-untyped-call]
            parameter.requires_grad_(required)

    def take_up(self, objects: Iterable[Any]) -> None:
        """Split the states of the optimizers among some plain objects over the processes, if that is asked for."""
        if self._sharded is not None:
            self._sharded.take_up(objects)

    def shard_of(self, optimizer: Optimizer) -> StateShard | None:
        """Return what this process has of an optimizer's states, if they are split."""
        return None if self._sharded is None else shard_of(optimizer)

    def end_run(self, *, has_failed: bool = False) -> None:
        """Do so for the ledger, and for steps that an error has ended."""
        if self._sharded is not None:
            self._sharded.end_run()
        self.ledger.end_run(has_failed=has_failed)

    def check(self, optimizer: Optimizer, local_id: int) -> None:
        """Refuse an optimizer whose gradients a replica can't sum.

        Args:
            optimizer: a plain optimizer, not a facade.
            local_id: the replica's position in the process.

        Raises:
            RuntimeError: its parameters were not made in the strategy's scope.
        """
        parameters = optimizer_parameters(optimizer)
        keys, checked = list(map(id, parameters)), self._checked[local_id]
        known = checked.get(id(optimizer))
        if known is not None and known[1] == keys and known[0]() is optimizer:
            return
        if not all(self.owns(local_id, parameter) for parameter in parameters):
            self._hosting.look_again()
            self.refresh()
        for parameter in parameters:
            if isinstance(parameter, Variable) and parameter.synchronization is VariableSynchronization.ON_READ:
                raise RuntimeError(
                    f"{type(optimizer).__name__} can't train variable {parameter.name!r}: it is ON_READ, so its copies "
                    "may differ between replicas. Make it with synchronization=ON_WRITE."
                )
            if not self.owns(local_id, parameter):
                raise RuntimeError(
                    f"{type(optimizer).__name__} updates a parameter (shape {tuple(parameter.shape)}) that does not "
                    f"belong to this replica of {self._owner}: the model was not made in "
                    "`strategy.scope()`, or its parameters were replaced afterwards. Make the model and the optimizer "
                    "inside `with strategy.scope():`, or give both to `strategy.replicate`; a bare nn.Parameter must "
                    "be part of a module."
                )
        checked[id(optimizer)] = weakref.ref(optimizer), keys

    def part_of(
        self, context: Any, optimizer: Optimizer, *, is_fresh: bool = False, uses_applied: bool = False
    ) -> GradientSum:
        """Return what a replica brings to the sum of a plain optimizer's gradients.

        Args:
            context: the replica's.
            optimizer: the optimizer.
            is_fresh: whether all gradients are this replica's own, whatever they look like.
            uses_applied: whether a sum that a step has used may be used again as it is.
        """
        shares, parameters = context.batch_shares, optimizer_parameters(optimizer)
        own = [p for p in parameters if id(p) not in self._dtensors] if self._dtensors else parameters
        return GradientSum(
            own,
            context._num_own_examples != 0,
            context,
            None if shares is None else shares.step,
            is_fresh,
            uses_applied,
            None if self._hosting.run_hooks is not None else optimizer,  # one copy steps for all
            self.shard_of(optimizer),
            is_divided=len(own) < len(parameters),
        )

    def before_backward(self, context: Any, outputs: Any, grad_outputs: Any, *, create_graph: bool) -> None:
        """Take notice of a call of ``torch.autograd.backward`` that a replica is about to make."""
        self.ledger.begin_backward(context.local_id, create_graph=create_graph)
        if self.summer.mean_losses.num_looks:
            self.summer.mean_losses.before_backward(outputs, grad_outputs, context)

    def before_grad(self, context: Any, outputs: Any, grad_outputs: Any, inputs: Iterable[Any]) -> FoundMean | None:
        """Look at a call of ``torch.autograd.grad`` that a replica is about to make."""
        check = self.summer.mean_losses
        if check.num_looks == 0 or not any(self.owns(context.local_id, value) for value in inputs):
            return None
        return check.find(outputs, grad_outputs, context)

    def after_grad(self, context: Any, mean: FoundMean | None, gradients: Iterable[Tensor | None]) -> None:
        """Take notice of a call of ``torch.autograd.grad`` that a replica has made.

        Args:
            context: the replica's.
            mean: the mean that they are the gradients of, if it is one.
            gradients: what the call returns.
        """
        self.ledger.note_computed(context.local_id)
        if mean is not None:
            self.summer.mean_losses.note_computed(mean, gradients)


def _of_all_replicas(num_replicas: int) -> Callable[[Tensor], Tensor]:
    """Return a hook for the gradient that reaches a DTensor past FSDP2, as from a penalty on it outside ``forward``.

    Autograd takes that loss as one that the ranks compute together, and nobody sums over them. So the sum over
    replicas, all of which compute it alike, is made here.
    """

    @unserializable_hook  # type: ignore[untyped-decorator]
    def sum_up(grad: Tensor) -> Tensor:
        return grad * num_replicas

    return sum_up  # type: ignore[no-any-return]


def _remove_all(handles: dict[int, RemovableHandle]) -> None:
    for handle in handles.values():
        handle.remove()
