"""Optimizer states that are split over ranks: ZeRO stage 1.

Each rank has the states of whole parameters only, steps these, and gets the other weights from the ranks that have
stepped them. Whole parameters and not flat parts of all, so that an update may look at a parameter's shape and layout,
as Adafactor's and Muon's do, and so that a checkpoint needs no knowledge of the split. The price is that a parameter of
more than its share of the model unbalances the ranks.

Gradients are summed as ever, to all ranks: ``p.grad`` means the same after a step, and clipping, scalers, sums that
begin early and compression know nothing of the split. While the optimizer steps, the gradients of parameters that
others own are set aside, which torch's optimizers take as nothing to do.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from torchstrategy.base import tree
from torchstrategy.base.devices import kind_of
from torchstrategy.base.log import call_site, warning_once
from torchstrategy.base.names import lines_of_ranks
from torchstrategy.collectives.process_group import WorkerGroup
from torchstrategy.collectives.summing import copy_in, copy_out, divide, memory_order
from torchstrategy.errors import DisagreementError
from torchstrategy.replicas.dtensors import is_dtensor, keeps_parts
from torchstrategy.replicas.record import optimizer_parameters

__all__ = ["ShardedStates", "StateShard", "classes_to_shard", "describe", "shard_of"]

#: Of what all ranks send in one round of a gathering.
_ROUND_BYTES = 32 << 20
#: Those of torch whose update of one parameter depends on others.
_LOOKING_AT_ALL = (torch.optim.LBFGS,)


def classes_to_shard(asked: bool | Sequence[type], devices: Sequence[torch.device]) -> tuple[type, ...] | None:  # noqa: FBT001
    """Return the optimizer classes beyond torch's whose states are to be split; ``None`` if none are to be.

    Args:
        asked: a strategy's argument ``shard_optimizer_states``.
        devices: of this process's replicas.

    Raises:
        TypeError: it is neither a bool nor a sequence of optimizer classes.
        ValueError: this process has several replicas, or one on an XLA device.
    """
    if asked is False:
        return None
    classes = () if asked is True else asked
    if not isinstance(classes, (list, tuple)) or not all(
        isinstance(cls, type) and issubclass(cls, Optimizer) for cls in classes
    ):
        raise TypeError(
            "shard_optimizer_states must be True, False, or a list of further optimizer classes that update each "
            f"parameter by itself, such as [MyOptimizer]. Received: {asked!r}"
        )
    if len(devices) > 1:
        raise ValueError(
            f"shard_optimizer_states needs one replica in each process, but this one has {len(devices)}: "
            f"{', '.join(map(str, devices))}. Start a process for each device, by torchrun or `torchstrategy launch`, "
            "or leave the argument out."
        )
    if kind_of(devices[0]).is_traced:
        raise ValueError("shard_optimizer_states has no effect on XLA devices. Leave it out.")
    return tuple(classes)


def describe(classes: Sequence[type] | None) -> str:
    """Return what to add to a strategy's name, which must be the same on all ranks."""
    return "" if classes is None else f" with shard_optimizer_states={[cls.__qualname__ for cls in classes] or True}"


def _steps_alone(optimizer: Optimizer, classes: Collection[type]) -> bool:
    """Say whether an optimizer's update of a parameter is known to depend on that parameter alone."""
    name = type(optimizer).__name__
    if any(map(is_dtensor, optimizer_parameters(optimizer))):
        return False  # FSDP2 has divided the states with the parameters
    if any(group.get("differentiable") for group in optimizer.param_groups):
        warning_once(f"The states of {name} are not split over ranks, because its steps are to be differentiated.")
        return False
    if type(optimizer) in classes:
        return True
    step: Any = inspect.unwrap(type(optimizer).step)
    if step.__module__.startswith("torch.optim.") and not isinstance(optimizer, _LOOKING_AT_ALL):
        return True
    if isinstance(optimizer, _LOOKING_AT_ALL):
        warning_once(f"The states of {name} are not split over ranks, because it looks at all parameters together.")
    else:
        warning_once(
            f"The states of {name} are not split over ranks: it is not of torch.optim, and its update of a parameter "
            "may depend on other parameters. If it does not, say so by "
            f"shard_optimizer_states=[{name}] where the strategy is made."
        )
    return False


#: Those that are split, of all strategies.
_shards: weakref.WeakKeyDictionary[Optimizer, StateShard] = weakref.WeakKeyDictionary()


def shard_of(optimizer: Any) -> StateShard | None:
    """Return what this rank has of an optimizer's states, if they are split over ranks."""
    return _shards.get(optimizer) if isinstance(optimizer, Optimizer) else None


class ShardedStates:
    """The optimizers of one strategy whose states are split over its processes.

    Args:
        workers: the processes, each with one replica.
        classes: optimizers beyond torch's that update each parameter by itself.
    """

    def __init__(self, workers: WorkerGroup, classes: Collection[type]) -> None:
        self._workers = workers
        self._classes = classes
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def take_up(self, optimizers: Iterable[Any]) -> None:
        """Split the states of those among some objects that are optimizers, before they have any if possible."""
        for optimizer in optimizers:
            if isinstance(optimizer, Optimizer) and optimizer not in self._known:
                self._known.add(optimizer)
                if _steps_alone(optimizer, self._classes):
                    _shards[optimizer] = StateShard(self._workers, optimizer)

    def end_run(self) -> None:
        """Give back the gradients that steps have left aside which an error ended."""
        for optimizer in self._known:
            if (shard := shard_of(optimizer)) is not None:
                shard.show()


class StateShard:
    """What this rank has of one optimizer's states.

    Args:
        workers: the processes.
        optimizer: a plain optimizer, not a facade.
    """

    def __init__(self, workers: WorkerGroup, optimizer: Optimizer) -> None:
        self._workers = workers
        self._name = type(optimizer).__name__
        #: By id of a parameter, the parameter and its owner. They are added, never moved: states would have to move.
        self._owners: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._loads = [0] * workers.size
        #: Gradients that are set aside.
        self._hidden: list[tuple[Tensor, Tensor]] = []
        self._is_stepping = False
        self._version = 0
        #: How often states were loaded; each rank must do so for its part.
        self.num_loads = 0
        #: How often steps have written to the parameters, which differs from rank to rank.
        self.num_writes = 0
        #: How many steps did not come to their end, since ranks' weights were compared.
        self.num_unfinished = 0
        self._before = optimizer.register_step_pre_hook(lambda optimizer, *_: self._hide(optimizer))
        self._after = optimizer.register_step_post_hook(lambda optimizer, *_: self._finish(optimizer))
        optimizer.register_state_dict_post_hook(self._gather_states)
        optimizer.register_load_state_dict_pre_hook(self._leave_out)
        optimizer.register_load_state_dict_post_hook(self._note_load)

    def owners_of(self, parameters: Sequence[Tensor]) -> list[int]:
        """Return the rank that owns each parameter: the same on all ranks, which bring them in the same order.

        A lazy parameter's owner is not known before its shape; until then it is this rank.
        """
        known = self._owners
        new = {}
        for parameter in parameters:
            entry = known.get(id(parameter))
            if (entry is None or entry[0]() is not parameter) and not is_lazy(parameter):
                new[id(parameter)] = parameter
        for parameter in sorted(new.values(), key=lambda one: -one.nbytes):
            owner = self._loads.index(min(self._loads))
            self._loads[owner] += parameter.nbytes
            known[id(parameter)] = weakref.ref(parameter), owner
        return [self._workers.rank if is_lazy(one) else known[id(one)][1] for one in parameters]

    def begin(self, optimizer: Optimizer) -> None:
        """Begin a step: all gradients are sums."""
        self.show()
        # The program's own hooks see all gradients before the step and all weights after it.
        cast(OrderedDict[int, Any], optimizer._optimizer_step_pre_hooks).move_to_end(self._before.id)
        cast(OrderedDict[int, Any], optimizer._optimizer_step_post_hooks).move_to_end(self._after.id, last=False)
        self._version = _version_of(optimizer)
        self._is_stepping = True

    @contextlib.contextmanager
    def shown(self, optimizer: Optimizer) -> Iterator[None]:
        """Let a closure see all gradients."""
        self._show()
        try:
            yield
        finally:
            self._hide(optimizer)

    def show(self) -> None:
        """Give back the gradients of a step that an error has ended, if there was one."""
        if self._is_stepping:
            self._is_stepping = False
            self.num_unfinished += 1
            self._show()

    def must_compare(self, rows: Sequence[Sequence[int] | None]) -> bool:
        """Say whether the ranks' weights are to be compared, because a step did not come to its end; once.

        Args:
            rows: by rank, ``num_loads`` and ``num_unfinished``; ``None`` where states are not split.

        Raises:
            DisagreementError: the ranks have not loaded their parts equally often.
        """
        self.num_unfinished = 0
        loads = [None if row is None else row[0] for row in rows]
        if any(number != loads[0] for number in loads):
            raise DisagreementError(
                f"The states of {self._name} are split over ranks, which have not loaded them equally often:\n"
                + lines_of_ranks([f"{number} times" for number in loads])
                + f"\n(Found before the sum of gradients at {call_site()}.) Call `load_state_dict` or "
                "`ts.train.Checkpoint.restore` on every rank: each takes its part."
            )
        return any(row is not None and row[1] for row in rows)

    def _hide(self, optimizer: Optimizer) -> None:
        """Leave the optimizer what this rank owns."""
        if not self._is_stepping:
            return
        parameters, rank = optimizer_parameters(optimizer), self._workers.rank
        for parameter, owner in zip(parameters, self.owners_of(parameters), strict=True):
            if owner != rank:
                optimizer.state.pop(parameter, None)  # as Adagrad makes it at once, or a program assigned it
                if parameter.grad is not None:
                    self._hidden.append((parameter, parameter.grad))
                    parameter.grad = None

    def _show(self) -> None:
        hidden, self._hidden = self._hidden, []
        for parameter, grad in hidden:
            if parameter.grad is None:
                parameter.grad = grad

    def _finish(self, optimizer: Optimizer) -> None:
        if not self._is_stepping:
            return
        self._unscale(optimizer)
        self._show()
        try:
            self._gather_weights(optimizer)
        except BaseException:
            self.show()
            raise
        self._is_stepping = False
        self.num_writes += _version_of(optimizer) - self._version

    def _unscale(self, optimizer: Any) -> None:
        """Do with the gradients that are set aside what a fused step does with those that it uses under a scaler."""
        scale = getattr(optimizer, "grad_scale", None)
        if scale is not None:
            factor = torch.where(optimizer.found_inf > 0, 1.0, scale)
            for _, grad in self._hidden:
                grad.div_(factor.to(grad.device, grad.dtype))

    def _gather_weights(self, optimizer: Optimizer) -> None:
        """Bring the weights that ranks have stepped to all others."""
        parameters = optimizer_parameters(optimizer)
        groups: dict[tuple[torch.dtype, torch.device], list[dict[int, Tensor]]] = {}
        for parameter, owner in zip(parameters, self.owners_of(parameters), strict=True):
            if parameter.grad is not None:
                rows = groups.setdefault((parameter.dtype, parameter.device), [{} for _ in self._loads])
                rows[owner][id(parameter)] = parameter.detach()
        with torch.no_grad():
            for rows in groups.values():
                self._gather([list(row.values()) for row in rows])

    def _gather(self, rows: Sequence[Sequence[Tensor]]) -> None:
        """Overwrite parameters of one dtype and device by those of their owners.

        Args:
            rows: by rank, the parameters that it owns.
        """
        operation = f"gathering the weights that {self._name} has stepped"
        rank, size = self._workers.rank, self._workers.size
        some = next(parameter for row in rows for parameter in row)
        length = max(1, _ROUND_BYTES // size // some.element_size())
        flat = [[_flat(parameter) for parameter in row] for row in rows]
        chunks = [divide(row, tuple([one.numel() for one in row]), length, 1, 1) for row in flat]
        for k in range(max(map(len, chunks))):
            parts = [row[k].parts[0] if k < len(row) else [] for row in chunks]
            sizes = [sum([piece.numel() for piece in pieces]) for pieces in parts]
            own = some.new_empty(sizes[rank])
            copy_in(own, parts[rank])
            found = self._workers.all_gather_tensors(own, operation)
            received = [one.numel() for one in found]
            if received != sizes:
                raise RuntimeError(  # the others, which may see nothing amiss, are told of it
                    f"The ranks have stepped different parameters of {self._name} at {call_site()}: rank {rank} "
                    f"expects {sizes} numbers of the ranks, and they have sent {received}. Every rank must leave the "
                    "optimizer the same gradients: a hook that drops some must do so on all ranks."
                )
            for other, (pieces, numbers) in enumerate(zip(parts, found, strict=True)):
                if other != rank:
                    copy_out(numbers, pieces)
        for other, row in enumerate(rows):
            for parameter, values in zip(row, flat[other], strict=True):
                if other != rank and values.data_ptr() != parameter.data_ptr():  # it has gaps in memory
                    parameter.copy_(values.view(parameter.shape))

    def _gather_states(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Complete a ``state_dict`` by what the other ranks have, in the host's memory; every rank calls this.

        Where ``keeps_parts`` is false it stays this rank's part.
        """
        operation = f"{self._name}.state_dict()"
        workers, rank = self._workers, self._workers.rank
        owners = self.owners_of(parameters := optimizer_parameters(optimizer))
        places: dict[int, int] = {}
        for k, parameter in enumerate(parameters):
            places.setdefault(id(parameter), k)
        mine = {k for k in places.values() if owners[k] == rank}
        state = {k: value for k, value in state_dict["state"].items() if not isinstance(k, int) or k in mine}
        file = io.BytesIO()
        torch.save(tree.map_leaves(_on_host, {k: v for k, v in state.items() if isinstance(k, int)}), file)
        own = torch.frombuffer(file.getbuffer(), dtype=torch.uint8)
        sizes = workers.exchange(operation, len(own))
        needed = [other for other in range(workers.size) if other != rank and keeps_parts.get()]
        buffers = {other: own.new_empty(sizes[other]) for other in needed}
        length = max(1, _ROUND_BYTES // workers.size)
        for start in range(0, max(sizes), length):
            parts = workers.all_gather_tensors(own[start : start + length], operation)
            for other, buffer in buffers.items():
                buffer[start : start + length] = parts[other]
        for buffer in buffers.values():
            state.update(torch.load(io.BytesIO(buffer.numpy().tobytes()), map_location="cpu", weights_only=True))
        in_order = sorted((k for k in state if isinstance(k, int)), key=int)
        rest = {k: value for k, value in state.items() if not isinstance(k, int)}
        return {**state_dict, "state": {**{k: state[k] for k in in_order}, **rest}}

    def _leave_out(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a ``state_dict`` that is about to be loaded without what other ranks own."""
        parameters = optimizer_parameters(optimizer)
        saved = [k for group in state_dict["param_groups"] for k in group["params"]]
        owner_of = dict(zip(saved, self.owners_of(parameters), strict=False))
        rank = self._workers.rank
        state = {k: value for k, value in state_dict["state"].items() if owner_of.get(k, rank) == rank}
        return {**state_dict, "state": state}

    def _note_load(self, _: Optimizer) -> None:
        self.num_loads += 1


def _version_of(optimizer: Optimizer) -> int:
    return sum([parameter._version for parameter in optimizer_parameters(optimizer)])


def _flat(parameter: Tensor) -> Tensor:
    """Return a parameter's numbers in one dimension: its own memory, or a copy if that has gaps."""
    order = memory_order(parameter)
    return (parameter if order is None else parameter.permute(order)).reshape(-1)


def _on_host(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    value = value.detach().cpu()
    is_part = value.layout is torch.strided and value.untyped_storage().nbytes() > value.nbytes
    return value.clone() if is_part else value  # torch would save all of the memory that it is a part of
