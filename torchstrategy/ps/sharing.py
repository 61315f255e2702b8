"""The variables of a program that every task runs for itself, on parameter servers without a coordinator.

A process computes with plain parameters, one set for each of its replicas. Before each run it pulls what has changed.
An optimizer's step sends the gradients, which the process's replicas have summed, and pulls what the servers made of
the parameters. What a run adds to buffers is added to the servers'. What the program writes to a parameter is assigned.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from typing_extensions import override

from torchstrategy.ps.behind import PulledParameter
from torchstrategy.ps.bindings import Binding, Bindings, Kind, refuse_shared_memory
from torchstrategy.ps.layout import Placer
from torchstrategy.ps.optimizer_updates import plain_ones
from torchstrategy.ps.served import Served
from torchstrategy.ps.served_optimizers import BindingOf, OptimizerLink, hyper_parameters
from torchstrategy.ps.sharing_client import SharingClient
from torchstrategy.ps.store import check_value
from torchstrategy.replicas import metric_states
from torchstrategy.replicas.distributed_variables import DistributedVariable
from torchstrategy.replicas.mirrored import bodies
from torchstrategy.replicas.record import optimizer_parameters
from torchstrategy.replicas.variables import Variable

__all__ = ["SharedValues"]


class SharedValues:
    """What one process has on the parameter servers.

    Args:
        client: talks to the servers.
        device: of the process's first replica.
        num_ps: number of servers.
        is_chief: whether this process makes the variables; others find them there.
    """

    def __init__(self, client: SharingClient, device: torch.device, num_ps: int, *, is_chief: bool) -> None:
        self.client = client
        self.bindings = Bindings(client, device, is_coordinator=True)
        self._placer = Placer(num_ps)
        self._is_chief = is_chief
        self._places: dict[int, _Place] = {}
        self._optimizers: weakref.WeakKeyDictionary[Optimizer, SharedOptimizer] = weakref.WeakKeyDictionary()
        self._num_published = -1

    def create(self, name: str, value: Tensor, kind: Kind, *, trainable: bool, local: Tensor | None = None) -> Binding:
        """Make the next variable.

        Args:
            name: for messages.
            value: its initial value, which counts in the chief.
            kind: what it is to the program.
            trainable: whether it gets gradients.
            local: the program's tensor for it.
        """
        number = len(self.client.layout.variables)
        spec = self._placer.place(number, name, tuple(value.shape), value.dtype, trainable)
        if self._is_chief:
            self.client.create(spec, value.detach().cpu())
        self.client.know([spec])
        self.client.layout.variables.append(spec)
        binding = self.bindings.add(spec, kind, local)
        binding.note()
        return binding

    def adopt(self, objects: Iterable[Any]) -> None:
        """Take up new modules and trainable variables, with all their copies, and then the optimizers of these."""
        objects = list(objects)
        roots = _roots(objects)
        refuse_shared_memory(named for root in roots for named in bodies(root)[0].named_parameters())
        for root in roots:
            self._adopt_module(root)
        for obj in objects:
            if isinstance(obj, DistributedVariable) and obj.trainable:
                name = obj.options.name
                self._adopt_tensors(name, [{name: copy} for copy in obj.copies], name, obj)
        for obj in objects:
            own = bodies(obj)[0]
            if isinstance(own, Optimizer) and own not in self._optimizers:
                self._adopt_optimizer(own)

    def optimizer(self, optimizer: Optimizer) -> SharedOptimizer:
        """Return what stands on the servers for an optimizer of the first replica."""
        return self._optimizers[optimizer]

    def get_ready(self, timeout_seconds: float) -> None:
        """Let, as the chief, the others use what was made; wait, as another task, until they may."""
        made = len(self.client.layout.variables) + len(self.client.layout.optimizers)
        if made == self._num_published:
            return
        if self._is_chief:
            self.pull()
            self.client.publish()
        else:
            for place in self._living():
                if place.binding.versions is None:  # what this task's program gave it does not count
                    place.accept()
            self.client.attach(timeout_seconds)
            self.client.confirm(timeout_seconds)
        self._num_published = made

    def pull(self) -> None:
        """Give the first replica's tensors the servers' values, after giving these what the program has written."""
        places = self._living()
        self._refresh(places)
        for place in places:
            place.accept()

    def push_buffers(self) -> None:
        """Add to the servers' buffers what a run has added to this process's."""
        changed = [(place, change) for place in self._living() if (change := place.buffer_change()) is not None]
        if changed:
            self.client.update_many([(place.binding.spec, *change) for place, change in changed])
            for place, _ in changed:
                place.accept()

    def step(self, optimizers: Sequence[Optimizer]) -> None:
        """Send the gradients that the first of the replicas' optimizers has, and pull its parameters for all.

        Args:
            optimizers: of the replicas of this process, in order; their gradients are summed already.
        """
        first = optimizers[0]
        if first not in self._optimizers:
            raise RuntimeError(
                f"This {type(first).__name__} was made for a training that the strategy has closed. Make model and "
                "optimizer anew, in `strategy.scope()`."
            )
        own = [self._places[id(p)] for group in first.param_groups for p in group["params"]]
        self.bindings.write_back([place.binding for place in own])
        if not self._optimizers[first].push():
            return
        self._refresh(own)
        for place in own:
            place.accept()
            place.spread()

    def _refresh(self, places: Sequence[_Place]) -> None:
        for place in places:
            place.note_unseen()
        self.bindings.mark_stale()
        with torch._C.DisableTorchFunctionSubclass():
            self.bindings.refresh([place.binding for place in places])

    def _adopt_module(self, module: nn.Module) -> None:
        copies = [list(metric_states.modules_but_metrics(body)) for body in bodies(module)]
        for column in zip(*copies, strict=True):
            path, first = column[0]
            for kind in ("_parameters", "_buffers"):
                dicts = [part.__dict__[kind] for _, part in column]
                for name in list(dicts[0]):
                    self._adopt_tensors(f"{path}.{name}" if path else name, dicts, name, first)

    def _adopt_tensors(self, name: str, dicts: Sequence[dict[str, Any]], key: str, owner: Any) -> None:
        first = dicts[0][key]
        if first is None or isinstance(first, Served) or self._place_of(first) is not None:
            return
        if is_lazy(first):
            raise ValueError(
                f"The parameter {name!r} of a lazy module has no shape yet, so it can't be put on a parameter server. "
                "Call the module once with an example input inside the scope, right after it is made."
            )
        is_parameter = isinstance(first, (nn.Parameter, Variable))
        kind = Kind.PARAMETER if is_parameter else Kind.BUFFER
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            binding = self.create(name, first.detach(), kind, trainable=is_parameter, local=first)
        binding.requires_grad = first.requires_grad
        self._places[id(first)] = place = _Place(binding, dicts, key, owner)
        place.accept()

    def _adopt_optimizer(self, optimizer: Optimizer) -> None:
        number = len(self.client.layout.optimizers)
        shared = SharedOptimizer(optimizer, number, self.bindings, self._binding_of, is_chief=self._is_chief)
        groups = shared.groups_of_ids()
        if self._is_chief:
            shared.define()
        optimizer.state.clear()  # the servers have it
        self.client.layout.optimizers.append((type(optimizer).__name__, groups))
        self._optimizers[optimizer] = shared

    def _place_of(self, tensor: Tensor) -> _Place | None:
        place = self._places.get(id(tensor))
        return place if place is not None and place.first is tensor else None

    def _binding_of(self, tensor: Tensor) -> Binding | None:
        place = self._place_of(tensor)
        return None if place is None else place.binding

    def _living(self) -> list[_Place]:
        """Return the places of what the program still has, at the tensors that it has now."""
        for key, place in self._places.copy().items():
            first = place.first
            if first is None:
                del self._places[key]
                self.bindings.by_id.pop(place.binding.spec.id, None)
            elif first is not place.binding.local:
                place.follow(first)
                del self._places[key]
                self._places[id(first)] = place
        return list(self._places.values())


class _Place:
    """Where a variable's value is in this process: a parameter or buffer of each replica's module.

    Args:
        binding: of the first replica's tensor.
        dicts: ``_parameters`` or ``_buffers`` of the module on each replica.
        key: the tensor's name there.
        owner: the first replica's module, with which the place is gone.
    """

    def __init__(self, binding: Binding, dicts: Sequence[dict[str, Any]], key: str, owner: Any) -> None:
        self.binding = binding
        self._dicts = list(dicts)
        self._key = key
        self._owner = weakref.ref(owner)
        #: The value when the servers were last told of it, of what can be changed so that no version tells of it.
        self._known: Tensor | None = None
        self._let_writes_count()

    @property
    def first(self) -> Tensor | None:
        """The first replica's tensor; ``None`` if the module, or its tensor, no longer exists."""
        return None if self._owner() is None else self._dicts[0].get(self._key)

    def follow(self, first: Tensor) -> None:
        """Take up a tensor that the program has put in the place of the one that was there.

        Raises:
            InvalidArgumentError: it has another shape or dtype.
        """
        spec = self.binding.spec
        check_value(spec.name, spec.shape, spec.dtype, first)
        self.binding.local = first
        self._let_writes_count()
        self.binding.note_write()

    def accept(self) -> None:
        """Take the present value as one that the servers know."""
        self.binding.note()
        local = self.binding.local
        if self.binding.kind is Kind.BUFFER or isinstance(local, Variable):
            with torch._C.DisableTorchFunctionSubclass():
                self._known = None if local is None else local.detach().clone()

    def note_unseen(self) -> None:
        """Take as changed what no version tells of: a batch norm was called outside ``run``, or ``data`` written to."""
        if self._is_changed():
            self.binding.note_write()

    def buffer_change(self) -> tuple[str, Tensor] | None:
        """Return how to tell the servers what was written to a buffer, if anything was."""
        now, known = self.binding.local, self._known
        if self.binding.kind is not Kind.BUFFER or now is None or known is None or not self._is_changed():
            return None
        if now.dtype is torch.bool:
            return "assign", now.detach().cpu()
        change = now.detach() - known
        if not bool(torch.isfinite(change).all()):  # there is nothing to add to an infinite value that makes it another
            return "assign", now.detach().cpu()
        return "assign_add", change.cpu()

    def _let_writes_count(self) -> None:
        """Let writes to a parameter's ``data`` count as changes of it; its copies are of one class."""
        for own in self._dicts:
            if type(own[self._key]) is nn.Parameter:
                own[self._key].__class__ = PulledParameter

    def _is_changed(self) -> bool:
        now, known = self.binding.local, self._known
        if now is None or known is None:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            same_numbers = now.is_floating_point() and torch.allclose(now, known, rtol=0, atol=0, equal_nan=True)
            return not same_numbers and not torch.equal(now, known)

    def spread(self) -> None:
        """Give the other replicas the first one's value."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for own in self._dicts[1:]:
                own[self._key].copy_(self._dicts[0][self._key])


class SharedOptimizer(OptimizerLink):
    """An optimizer of the first replica, whose updates run on the servers with the hyper-parameters of this process.

    Args:
        optimizer: the optimizer.
        optimizer_id: its number on the servers.
        bindings: the process's variables.
        binding_of: returns a parameter's binding.
        is_chief: whether the state that this process loads is the one that counts.
    """

    def __init__(
        self, optimizer: Optimizer, optimizer_id: int, bindings: Bindings, binding_of: BindingOf, *, is_chief: bool
    ) -> None:
        super().__init__(optimizer, optimizer_id, bindings, binding_of)
        self._plain: Any = type(optimizer)
        self._is_chief = is_chief

    def groups_of_ids(self) -> list[list[int]]:
        """Return the ids of its parameters.

        Raises:
            ValueError: one is not on the servers.
        """
        return [[self._binding(p).spec.id for p in group["params"]] for group in self.optimizer.param_groups]

    def push(self) -> bool:
        """Send the gradients; say whether there were any."""
        gradients = {}
        for parameter in self._parameters():
            if parameter.grad is not None:
                gradients[self._binding(parameter).spec.id] = parameter.grad.detach().cpu()
        if gradients:
            self._bindings.client.push(self.id, gradients, list(map(plain_ones, hyper_parameters(self.optimizer))))
        return bool(gradients)

    @override
    def state_dict(self) -> dict[str, Any]:
        states = {}
        for index, parameter in enumerate(self._parameters()):
            state = self._bindings.client.optimizer_state(self.id, self._binding(parameter).spec)
            if state:
                states[index] = state
        return {**self._plain.state_dict(self.optimizer), "state": states}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._plain.load_state_dict(self.optimizer, state_dict)
        if self._is_chief:
            self._send_state()
            self.send_changes()
        self.optimizer.state.clear()

    def _parameters(self) -> list[Tensor]:
        return optimizer_parameters(self.optimizer)


def _roots(objects: Sequence[Any]) -> list[nn.Module]:
    """Return the modules that are no part of another one, without metrics."""
    modules = [obj for obj in objects if isinstance(obj, nn.Module) and not metric_states.is_metric(obj)]
    parts = {id(part) for module in modules for part in list(bodies(module)[0].modules())[1:]}
    return [module for module in modules if id(bodies(module)[0]) not in parts]
