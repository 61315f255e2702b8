"""What modules hold, once on the parameter device: central storage.

Every parameter and buffer gets its place in a block of the host's memory. A replica on the CPU computes on a *view* of
that memory, which takes none itself (``collectives.host_blocks``); one on another device on a copy, which is refreshed
when the host's value has changed. A view and a copy are the replica's own to write to, as a mirrored parameter is. When
an optimizer steps, replica 0's parameters become the host's memory for the time of the step; afterwards all replicas
see it, and what they wrote to their views is gone. Outside ``run`` the user's tensors are views of the host's memory.

With several processes the chief is the host; the others see its memory, and the state of its optimizers.

Parameters and buffers live once, in memory without a name (``memfd_create``). Replicas on CPUs, and the other
processes of the host, read them through private mappings: a page that is not written takes no memory, an update of
the host's is seen at once, and what a replica writes is its own, as under ``MirroredStrategy``. Replicas on GPUs have
copies that are refreshed. ``step()`` is one meeting: the gradients are summed, what replica 0 wrote becomes the
host's, one optimizer updates the host's memory, and all private pages are dropped. The parameter objects in the
program's hands stay; only their memory changes. The optimizer's state is the chief's, and moves to shared memory
after its first step, so that every rank can read and save it. Sharing the parameters directly was rejected, because
what several replicas or ranks write would count several times.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from torchstrategy.base.context import updating
from torchstrategy.base.devices import tensor_device
from torchstrategy.base.names import lines_of_ranks
from torchstrategy.collectives.host_blocks import HostBlock, PlainBlock, can_map, make_block, share_block
from torchstrategy.errors import InvalidArgumentError
from torchstrategy.replicas.fingerprints import fingerprints
from torchstrategy.replicas.host_states import Place, StateSharing
from torchstrategy.replicas.mirrored import bodies
from torchstrategy.replicas.module_tensors import Slot

__all__ = ["HostMemory"]

_OPERATION = "the update on the host"
_NUM_LOOKS = 10


class HostMemory:
    """The host's memory of one strategy.

    Args:
        strategy: the strategy.
        device: the parameter device.
        check_every: number of updates between two comparisons of copies with the host's memory; the first ten are
            always compared.
    """

    def __init__(self, strategy: Any, device: torch.device, check_every: int) -> None:
        self._strategy = strategy
        self._workers = strategy.workers
        self._device = tensor_device(device)
        self._devices = [tensor_device(own) for own in strategy.placement.devices]
        self._places: dict[int, Place] = {}
        #: Blocks, and whether they are of parameters.
        self._blocks: weakref.WeakKeyDictionary[HostBlock | PlainBlock, bool] = weakref.WeakKeyDictionary()
        self._states = StateSharing(self._workers, functools.partial(self._share, num_views=1))
        #: What the user's views of parameters had of their own when the last run ended.
        self._left: dict[HostBlock | PlainBlock, list[tuple[int, int, int]]] = {}
        self._has_copies = False
        self._has_new = self._is_inside = False
        self._check_every = check_every
        self._num_updates = 0
        #: Whether replica functions write to parameters in a way that their versions don't tell, by ``.data``.
        self._is_written_unseen = False
        #: The ids of the buffers that the latest update's hooks have written to.
        self._written: set[int] = set()

    @property
    def is_host(self) -> bool:
        """Whether this process has the memory and makes the updates."""
        return self._workers is None or self._workers.rank == 0

    def take_up(self, slots: Sequence[Slot]) -> None:
        """Give new parameters and buffers a place; with several processes all must call it.

        Raises:
            InvalidArgumentError: the processes bring different ones.
            TypeError: a parameter can't be kept on the host.
        """
        missing = self._missing(slots)
        if self._workers is not None:
            self._workers.agree("placing parameters on the host", _layouts(missing), "parameters and buffers")
        with _plainly():
            self._host(self._without_own(missing))

    def enter(self) -> None:
        """Let the replicas' tensors be what they compute on; called when a run starts or goes on."""
        with _plainly():
            self._release_replaced()
            self._settle([(place, [place.outside, *place.inside[1:]]) for place in list(self._places.values())])
            for place in self._copied_first():
                if place.is_written():
                    place.inside[0].copy_(place.outside)
                place.put(place.inside[:1])
                place.note()
            for block in self._parameter_blocks():
                if block.changed(0):  # outside, by the program; replicas write to parameters in the same way
                    self._spread(block)
            if self._has_new:
                self._has_new = False
                self._drop_equal_copies()
        self._is_inside = True
        for optimizer in self._optimizers():
            for body in bodies(optimizer)[1:]:
                body.state.clear()  # the host has it

    def leave(self) -> None:
        """Let the user's tensors be the host's; called when a run ends or a merge function starts."""
        self._is_inside = False
        with _plainly():
            self._settle([(place, place.inside[:1]) for place in self._copied_first()])
            for place in self._copied_first():
                self._fetch(place)
                place.put([place.outside])
            if self._has_copies:
                self._left = {block: block.stamp() for block in self._parameter_blocks()}

    @contextlib.contextmanager
    def on_host(self, optimizer: Optimizer) -> Iterator[None]:
        """Let replica 0's tensors be the host's memory, and their gradients be there.

        In the process that is the host, while all replicas wait. All tensors, not the optimizer's alone: its hooks may
        write to others, such as a moving average of the parameters.
        """
        with _plainly():
            self._num_updates += 1
            looks = self._num_updates <= _NUM_LOOKS or self._num_updates % self._check_every == 0
            self._settle([(place, place.inside) for place in list(self._places.values())])
            for place in self._copied_first():
                self._fetch(place, looks=looks)
            for block in self._blocks:
                block.publish()
            moved = [self._enter(place) for place in list(self._places.values())]
            for name in ("grad_scale", "found_inf"):  # given to the optimizer by a GradScaler
                if isinstance(getattr(optimizer, name, None), Tensor):
                    setattr(optimizer, name, getattr(optimizer, name).to(self._device))
            firsts = [place.first() for place, _ in moved if not place.is_parameter]
            buffers = [(first, first._version) for first in firsts if first is not None]
        try:
            with updating():
                yield
        finally:
            with _plainly():
                self._written = {id(first) for first, version in buffers if first._version != version}
                self._settle([(place, [place.host]) for place, _ in moved if place.host is not None])
                for place, grad in moved:
                    self._leave(place, grad)

    def finish(self, optimizer: Optimizer, command: str = "") -> str:
        """Let all replicas see the host's memory after a step.

        Args:
            optimizer: replica 0's in this process.
            command: what the chief wants the others to do next.

        Returns:
            The chief's command.

        Raises:
            InvalidArgumentError: the processes have different new parameters.
        """
        with _plainly():
            if not self.is_host:
                self._settle([(place, place.inside) for place in list(self._places.values())])
            missing = self._missing(self._strategy.hosting.slots())
            slots = self._strategy._buffers.candidates() if self._strategy.num_replicas_in_sync > 1 else []
            state, written = None, [k for k, (dicts, name) in enumerate(slots) if id(dicts[0][name]) in self._written]
            if self._workers is not None:
                state, command, written = self._agree(missing, optimizer, command, written)
            kept = self._own_buffers([slot for k, slot in enumerate(slots) if k not in written])
            self._host(missing)
            for block in self._blocks:
                for view in range(len(block.views)):
                    block.refresh(view)
            for tensor, value in kept:
                with torch.autograd.grad_mode._unsafe_preserve_version_counter(tensor):  # its value is the one it had
                    tensor.copy_(value)
            for place in self._updated(optimizer):
                for own, is_copied in zip(place.inside, place.is_copied, strict=True):
                    if is_copied:
                        own.copy_(place.outside)
                increment_version(place.living())
                place.note()
        if state is not None:
            self._states.follow(optimizer, state)
        self._states.refresh(optimizer)
        return command

    def _own_buffers(self, slots: Sequence[Slot]) -> list[tuple[Tensor, Tensor]]:
        """Return what replicas still have of their own in some buffers, with the values; replica 0's is the host's.

        Another optimizer trains their modules, and brings them together when it steps.
        """
        are_own = self._strategy._buffers.changed(slots) if slots else []
        own = [slot for slot, is_own in zip(slots, are_own, strict=True) if is_own]
        return [(body[name], body[name].clone()) for dicts, name in own for body in dicts[self.is_host :]]

    def _agree(
        self, missing: Sequence[Sequence[Tensor]], optimizer: Optimizer, command: str, written: Sequence[int]
    ) -> tuple[Any, str, list[int]]:
        """Wait for the chief's step; return what it says of its optimizer's state, its command, and what it wrote."""
        own: list[Any] = [_layouts(missing), None, command, self._is_written_unseen, written]
        if self.is_host:
            own[1] = self._states.describe(optimizer)
        rows = self._workers.exchange(_OPERATION, own)
        if any(row[0] != rows[0][0] for row in rows):
            raise InvalidArgumentError(
                "The ranks have different new parameters or buffers:\n" + lines_of_ranks([row[0] for row in rows])
            )
        self._is_written_unseen = rows[0][3]
        return rows[0][1], str(rows[0][2]), rows[0][4]

    def _missing(self, slots: Sequence[Slot]) -> list[list[Tensor]]:
        """Return the replicas' tensors that have no place yet."""
        found: dict[int, list[Tensor]] = {}
        for dicts, name in slots:
            first = dicts[0].get(name)
            if first is None or id(first) in found:
                continue
            column: list[Any] = [own.get(name) for own in dicts]
            place = self._places.get(id(first))
            if (place is None or not place.has(column)) and self._can_be_placed(name, column):
                found[id(first)] = column
        return list(found.values())

    def _without_own(self, columns: Sequence[Sequence[Tensor]]) -> list[Sequence[Tensor]]:
        """Leave out the buffers that replicas have made: they are their own until the modules' optimizer steps."""
        buffers = [column for column in columns if not isinstance(column[0], nn.Parameter)]
        own = [fingerprints(column) for column in buffers]
        rows = [own] if self._workers is None or not own else self._workers.exchange("comparing new buffers", own)
        differ = [column for k, column in enumerate(buffers) if len({bits for row in rows for bits in row[k]}) > 1]
        return [column for column in columns if not any(column is other for other in differ)]

    def _can_be_placed(self, name: str, column: Sequence[Any]) -> bool:
        first = column[0]
        if all(_is_plain(tensor) and tensor.shape == first.shape for tensor in column):
            return bool(first.numel() > 0)
        if isinstance(first, nn.Parameter) and self._workers is not None:
            raise TypeError(
                f"Parameter {name!r} is a {type(first).__name__} of layout {first.layout}, which can't be kept in "
                "memory that processes share. Use dense parameters, or MirroredStrategy."
            )
        return False

    def _host(self, columns: Sequence[Sequence[Tensor]]) -> None:
        """Give tensors a place; parameters and buffers apart, because replicas write to buffers in every step."""
        for tensor in (tensor for column in columns for tensor in column):
            if tensor.is_conj() or tensor.is_neg():  # the bytes are not the value
                tensor.data = tensor.resolve_conj().resolve_neg()
        of_parameters = {_address(column[0]) for column in columns if isinstance(column[0], nn.Parameter)}
        groups: dict[bool, list[Sequence[Tensor]]] = {True: [], False: []}
        for column in columns:
            groups[_address(column[0]) in of_parameters].append(column)
        for is_parameter, own in groups.items():
            # By storage, so that tensors which share memory still do.
            storages = {_address(column[0]): column[0].untyped_storage() for column in own}
            if not own:
                continue
            block = self._share([storage.nbytes() for storage in storages.values()], len(self._devices))
            self._blocks[block], self._has_new = is_parameter, True
            for part, storage in zip(block.memory or (), storages.values(), strict=block.memory is not None):
                part.copy_(torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage))
            if self._workers is not None:
                self._workers.exchange("filling the host's memory", len(storages))
            numbers = {address: number for number, address in enumerate(storages)}
            places = [Place(column, block, numbers[_address(column[0])], self._devices) for column in own]
            for column, place in zip(own, places, strict=True):
                self._has_copies = self._has_copies or any(place.is_copied)
                self._add(place, column[0])

    def _add(self, place: Place, first: Tensor) -> None:
        key, places, reference = id(first), self._places, weakref.ref(place)

        def forget() -> None:
            if places.get(key) is reference():
                places.pop(key, None)

        places[key] = place
        weakref.finalize(first, forget).atexit = False
        place.put(place.inside if self._is_inside else [place.outside, *place.inside[1:]])
        if self._is_inside:
            place.note()

    def _share(self, sizes: Sequence[int], num_views: int) -> HostBlock | PlainBlock:
        block: HostBlock | PlainBlock
        if self._workers is not None:
            exchange = functools.partial(self._workers.exchange, "sharing the host's memory")
            block = share_block(exchange, self._workers.rank, sizes, num_views)
        elif self._device.type == "cpu" and can_map():
            block = make_block(sizes, num_views)
        else:
            block = PlainBlock(sizes, self._device)
        return block

    def _parameter_blocks(self) -> list[HostBlock | PlainBlock]:
        return [block for block, is_of_parameters in self._blocks.items() if is_of_parameters]

    def _spread(self, block: HostBlock | PlainBlock) -> None:
        """Give the other replicas what replica 0's view has."""
        to_copies = self._has_copies and block.stamp() != self._left.get(block)
        if self._workers is None:
            block.publish()
            block.refresh(0)
            for view in range(1, len(block.views)):
                block.refresh(view)
        else:
            block.spread()
        for place in list(self._places.values()) if to_copies else ():
            for own, is_copied in zip(place.inside, place.is_copied, strict=True):
                if is_copied and place.block is block:
                    own.copy_(place.outside)

    def _drop_equal_copies(self) -> None:
        """Refresh views of new memory, into which the replicas were given what replica 0 and the host have."""
        for block in self._parameter_blocks():  # of buffers each replica may have its own
            for view in range(1, 0 if block.changed(0) else len(block.views)):
                block.refresh(view)

    def _copied_first(self) -> list[Place]:
        """Return the places of tensors which replica 0 computes on a copy of."""
        return [place for place in list(self._places.values()) if place.is_copied[0]]

    def _places_of(self, optimizer: Optimizer) -> list[Place]:
        parameters = (id(parameter) for group in optimizer.param_groups for parameter in group["params"])
        return [self._places[key] for key in parameters if key in self._places]

    def _release_replaced(self) -> None:
        """Forget the places of tensors that got other memory outside run: the program may have kept the old one.

        They have a new place after the next step.
        """
        for place in list(self._places.values()):
            first = place.first()
            if first is None or place.is_copied[0] or not (place.is_lost() or place.moved_from([place.outside])):
                continue
            self._places.pop(id(first), None)
            value = first.detach()
            place.put([value, *(value.to(own.device, copy=True) for own in place.inside[1:])])
            increment_version(place.living()[1:])

    def _updated(self, optimizer: Optimizer) -> list[Place]:
        """Return what an optimizer's step changed: its own, and what its hooks wrote to if replicas have copies."""
        own = self._places_of(optimizer)
        known = set(map(id, own))
        others = {id(place): place for place in list(self._places.values()) if self._has_copies and place.is_written()}
        return [*own, *(place for key, place in others.items() if key not in known)]

    def _settle(self, wanted: Sequence[tuple[Place, Sequence[Tensor]]]) -> None:
        """Put back tensors that the program has given other memory; forget their places if they no longer fit."""
        values: list[tuple[Tensor, Tensor]] = []
        found: list[tuple[Place, Sequence[Tensor]]] = []
        for place, data in wanted:
            first, moved = place.first(), place.moved_from(data)
            if first is None or not moved:
                continue
            if place.fits(first):
                found.append((place, data))  # copies, because two tensors may have changed places
                values += [(own, tensor.clone()) for own, tensor in moved if place.fits(tensor)]
                increment_version([tensor for _, tensor in moved])
            else:
                self._places.pop(id(first), None)
        for own, value in values:
            own.copy_(value)
        for place, data in found:
            place.put(data)

    def _fetch(self, place: Place, *, looks: bool = False) -> None:
        """Bring to the host what replica 0's function has written to its copy."""
        own = place.inside[0]
        if looks and place.is_parameter and not self._is_written_unseen and not place.is_written():
            self._is_written_unseen = not torch.equal(own, place.outside.to(own.device))
        if place.is_written() or self._is_written_unseen or not place.is_parameter:  # nor are writes to buffers seen
            place.outside.copy_(own)
            place.note()

    def _enter(self, place: Place) -> tuple[Place, Tensor | None]:
        tensor, host = place.first(), place.host
        if host is None:
            raise RuntimeError("Only the host makes updates.")
        grad = tensor.grad if tensor is not None and tensor.is_leaf else None
        if tensor is None or grad is None or grad.device == host.device:
            place.put([host])
            return place, None
        tensor.grad = None
        place.put([host])
        tensor.grad = grad.to(host.device)
        return place, grad

    def _leave(self, place: Place, grad: Tensor | None) -> None:
        parameter = place.first()
        if parameter is None or self._places.get(id(parameter)) is not place:  # it was given another shape
            return
        if grad is None:
            place.put(place.inside[:1])
            return
        is_cleared = parameter.grad is None
        parameter.grad = None
        place.put(place.inside[:1])
        parameter.grad = None if is_cleared else grad

    def _optimizers(self) -> list[Optimizer]:
        return [obj for obj in self._strategy.record if isinstance(obj, Optimizer)]


@contextlib.contextmanager
def _plainly() -> Iterator[None]:
    """Treat tensors as memory: nothing is recorded, and variables stand for themselves."""
    with torch.inference_mode(False), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():  # noqa: FBT003
        yield


def _is_plain(tensor: Any) -> bool:
    return (
        isinstance(tensor, Tensor)
        and type(tensor).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
        and tensor.layout is torch.strided
        and not tensor.is_quantized
        and not tensor.is_inference()
    )


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _layouts(columns: Sequence[Sequence[Tensor]]) -> list[list[Any]]:
    """Return what decides the places of tensors, to be compared between processes."""
    return [
        [str(t.dtype), list(t.shape), list(t.stride()), t.storage_offset(), t.untyped_storage().nbytes()]
        for t in (column[0] for column in columns)
    ]
