"""One stream of random numbers for each replica.

torch has one default CPU generator. A replica's state is put into it for the replica's turn; of replicas that run at
the same time the first uses it, and the others have generators of their own. Replica 0 draws from the program's own
stream, as one replica would; the others' streams derive from its state and their ids, and start anew whenever the
program's stream was moved or seeded outside. Switching costs about a microsecond. Accelerators have a generator each,
which ``torch.manual_seed`` seeds alike: there only the seeds are changed. A generator that an object of the scope holds
has streams in the same way, because all processes seed theirs alike.

torch has one default CPU generator, which replicas that run at the same time can't take turns with. On their threads a
dispatch key is switched on for which every operator that takes a generator has a kernel: it passes the thread's own.
All other operators fall through and cost what they did. That reaches what torch calls by itself, too, such as the mask
of a dropout or the seeds of a compiled model. ``torch.manual_seed`` and its kind mean the thread's generator as well.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchstrategy import patches
from torchstrategy.base.devices import accelerator_module

__all__ = ["RandomStreams", "derive_seed", "own_generator", "replica_generator"]

# It stands before all other keys, and torch itself has no use for it.
_KEY = "TESTING_ONLY_GenericMode"


class _Own(threading.local):
    generator: torch.Generator | None = None


_own = _Own()


@contextlib.contextmanager
def own_generator(generator: torch.Generator, user: object) -> Iterator[None]:
    """Let this thread draw from a generator where it would draw from torch's default one of the CPU.

    Args:
        generator: of the CPU.
        user: as long as it lives the kernels stay.
    """
    _kernels.use(user)
    before, _own.generator = _own.generator, generator
    _switch_key(on=True)
    try:
        yield
    finally:
        _own.generator = before
        _switch_key(on=before is not None)


def _switch_key(*, on: bool) -> None:
    torch._C._dispatch_tls_set_dispatch_key_included(_KEY, on)


class _DefaultGenerator:
    """Stands for torch's default generator in ``torch.random``; on some threads it is another one."""

    def __init__(self, default: torch.Generator) -> None:
        self._default = default

    def __getattr__(self, name: str) -> Any:
        own = _own.generator
        return getattr(self._default if own is None else own, name)


def _install() -> list[Callable[[], None]]:
    """Register the kernels; without the key they are never called."""
    rest = torch.library.Library("_", "IMPL", _KEY)  # type: ignore[no-untyped-call]
    rest.fallback(torch.library.fallthrough_kernel)  # type: ignore[no-untyped-call]
    drawing = torch.library.Library("aten", "IMPL", _KEY)  # type: ignore[no-untyped-call]
    known = set(torch._C._dispatch_get_all_op_names())
    for schema in torch._C._jit_get_all_schemas():
        position = _generator_of(schema)
        if position is None or not schema.name.startswith("aten::"):
            continue
        by_name = bool(schema.arguments[position].kwarg_only)
        plain = schema.overload_name.replace("generator_", "").replace("_generator", "").replace("generator", "")
        for overload in {schema.overload_name, plain}:  # torch.rand, for one, has an overload without a generator, too
            if f"{schema.name}{'.' * bool(overload)}{overload}" in known:
                operator, target = _operator(schema.name, overload), _operator(schema.name, schema.overload_name)
                kernel = _kernel(operator, target, None if by_name else position)
                drawing.impl(operator, kernel)  # type: ignore[no-untyped-call]
    drawing.impl(torch.ops.aten.native_dropout.default, _native_dropout)  # type: ignore[no-untyped-call]
    why = "replicas that run at once draw from streams of their own"
    own, until = _DefaultGenerator(torch.default_generator), "no strategy whose replicas run at once is left"

    def remove() -> None:
        drawing._destroy()  # type: ignore[no-untyped-call]
        rest._destroy()  # type: ignore[no-untyped-call]

    return [
        patches.note("operators that draw random numbers, on a dispatch key of their own", why, until, remove),
        patches.replace(torch.random, "default_generator", own, why, until),
    ]


_kernels = patches.WhileUsed(_install)


def _operator(name: str, overload: str) -> torch._ops.OpOverload:
    packet = getattr(torch.ops.aten, name.removeprefix("aten::"))
    return getattr(packet, overload or "default")  # type: ignore[no-any-return]


def _generator_of(schema: Any) -> int | None:
    """Return the position of an operator's optional generator among its arguments."""
    for position, argument in enumerate(schema.arguments):
        if str(argument.type) == "Optional[Generator]":
            return position
    return None


def _kernel(operator: torch._ops.OpOverload, target: torch._ops.OpOverload, position: int | None) -> Callable[..., Any]:
    """Return what an operator does on threads that have a generator.

    Args:
        operator: the operator.
        target: it, or its overload that takes a generator.
        position: of the generator in its arguments; ``None`` if it is passed by name only.
    """

    def draw(*args: Any, **kwargs: Any) -> Any:
        own = _own.generator
        _switch_key(on=False)
        try:
            if own is None or _is_traced() or not _is_on_cpu(args, kwargs):
                return operator(*args, **kwargs)
            if position is None or len(args) <= position:
                if kwargs.get("generator") is None:
                    kwargs["generator"] = own
            elif args[position] is None:
                args = (*args[:position], own, *args[position + 1 :])
            return target(*args, **kwargs)
        finally:
            _switch_key(on=True)

    return draw


def _native_dropout(value: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:  # noqa: FBT001
    """Do what the operator does on the CPU: it takes no generator, and what a dispatch mode calls passes the key by."""
    own = _own.generator
    _switch_key(on=False)
    try:
        if own is None or train is False or _is_traced() or value.device.type != "cpu":
            found: tuple[Tensor, Tensor] = torch.ops.aten.native_dropout.default(value, p, train)
            return found
        mask = torch.empty_like(value, dtype=torch.bool).bernoulli_(1 - p, generator=own)
        return value * mask * (0.0 if p == 1 else 1 / (1 - p)), mask
    finally:
        _switch_key(on=True)


def _is_traced() -> bool:
    """Say whether a compiler looks at what would be drawn."""
    if not torch._C._len_torch_dispatch_stack():
        return False
    kinds = torch._C._TorchDispatchModeKey
    return any(torch._C._get_dispatch_mode(kind) is not None for kind in (kinds.FAKE, kinds.PROXY, kinds.FUNCTIONAL))


def _is_on_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return value.device.type == "cpu"
    device = kwargs.get("device")
    return device is None or torch.device(device).type == "cpu"


class RandomStreams:
    """The random streams of this process's replicas.

    Args:
        replica_ids: ids of this process's replicas.
        devices: their devices.
        generator: the one that the replicas use in turn; ``None`` for torch's default one.
        concurrent: whether the replicas draw at the same time: each but the first has a generator of its own.
    """

    def __init__(
        self,
        replica_ids: Sequence[int],
        devices: Sequence[torch.device],
        generator: torch.Generator | None = None,
        *,
        concurrent: bool = False,
    ) -> None:
        self._replica_ids = replica_ids
        self._generator = torch.default_generator if generator is None else generator
        self._generators = [
            torch.Generator() if concurrent and local_id else self._generator for local_id in range(len(replica_ids))
        ]
        self._at_once = range(len(replica_ids)) if concurrent else ()
        self._held: dict[torch.Generator, RandomStreams] = {}
        self._held_in_run: list[RandomStreams] = []
        own = [hasattr(accelerator_module(device), "default_generators") for device in devices]
        self._accelerators = [(i, d) for i, d, is_own in zip(replica_ids, devices, own, strict=True) if i and is_own]
        self._seeds: dict[int, int] = {}
        #: The other replicas' streams; replica 0's is the program's.
        self._states: list[Tensor | None] = [None] * len(replica_ids)
        self._start: Tensor | None = None
        self._program: Tensor | None = None
        self._entries: list[Tensor | None] = [None] * len(replica_ids)
        self._moved = False

    def hold(self, objects: Iterable[Any]) -> None:
        """Take up the generators that recorded objects hold, for the first replica; others have their counterparts."""
        first = self._replica_ids[0]
        if first == 0:
            return
        for obj in objects:
            for member in obj.modules() if isinstance(obj, nn.Module) else (obj,):
                for value in member.__dict__.values():
                    if isinstance(value, torch.Generator) and value not in self._held:
                        self._held[value] = RandomStreams([first], [value.device], value)

    def begin(self) -> None:
        """Take over the generator for a run; replicas that draw at the same time enter here, and leave at the end."""
        self._held_in_run = list(self._held.values())
        for held in self._held_in_run:
            held.begin()
        state = self._generator.get_state()
        if self._program is None or not torch.equal(state, self._program):
            self._states = [None] * len(self._replica_ids)
        self._start = self._program = state
        self._moved = False
        for local_id in self._at_once:
            self.enter(local_id)

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Let the streams go on afterwards as if the runs inside had not been, as ``fork_rng`` does the program's."""
        program, states, seeds = self._program, list(self._states), dict(self._seeds)
        try:
            yield
        finally:
            self._program, self._states, self._seeds = program, states, seeds

    def seed_accelerators(self) -> None:
        """Give the accelerators' generators seeds of their own if the user has seeded them alike since."""
        for replica_id, device in self._accelerators:
            generator = _default_generator(device)
            seed = generator.initial_seed()
            if seed != self._seeds.get(replica_id):
                self._seeds[replica_id] = derive_seed(torch.tensor([seed]), replica_id)
                generator.manual_seed(self._seeds[replica_id])

    def enter(self, local_id: int) -> None:
        """Put a replica's stream into its generator."""
        for held in self._held_in_run if local_id == 0 else ():
            held.enter(0)
        generator = self._generators[local_id]
        start, program = self._begun()
        if self._replica_ids[local_id] == 0:
            generator.set_state(program)
            return
        state = self._states[local_id]
        if state is None:
            # From the state at the start of the run: where replica 0's stream is by now depends on merge points.
            generator.manual_seed(derive_seed(start, self._replica_ids[local_id]))
            state = generator.get_state()
        else:
            generator.set_state(state)
        self._entries[local_id] = state

    def leave(self, local_id: int) -> None:
        """Take a replica's stream out of its generator."""
        for held in self._held_in_run if local_id == 0 else ():
            held.leave(0)
        state = self._generators[local_id].get_state()
        if self._replica_ids[local_id] == 0:
            self._program = state
            return
        entry = self._entries[local_id]
        self._moved = self._moved or entry is None or not torch.equal(state, entry)
        self._states[local_id] = state

    def end(self) -> None:
        """Give the generator back to the program.

        If replicas drew but the program's stream did not move, it moves by one draw: seeding it again with the same
        seed is then visible to ``begin``.
        """
        for local_id in self._at_once:
            self.leave(local_id)
        for held in self._held_in_run:
            held.end()
        start, program = self._begun()
        self._generator.set_state(program)
        if self._moved and torch.equal(program, start):
            torch.empty((), dtype=torch.int64, device=self._generator.device).random_(generator=self._generator)
            self._program = self._generator.get_state()

    def on_this_thread(self, local_id: int) -> contextlib.AbstractContextManager[None]:
        """Let this thread draw from a replica's generator, if that is not the default one."""
        generator = self._generators[local_id]
        return contextlib.nullcontext() if generator is self._generator else own_generator(generator, self)

    def _begun(self) -> tuple[Tensor, Tensor]:
        if self._start is None or self._program is None:
            raise RuntimeError("RandomStreams.begin() was not called.")
        return self._start, self._program


def replica_generator(generator: torch.Generator, replica_id: int) -> torch.Generator:
    """Return a replica's counterpart of a generator that the user made: its stream is another one."""
    return torch.Generator(generator.device).manual_seed(derive_seed(generator.get_state(), replica_id))


def _default_generator(device: torch.device) -> torch.Generator:
    module = accelerator_module(device)
    module.init()
    generator: torch.Generator = module.default_generators[device.index or 0]
    return generator


def derive_seed(state: Tensor, replica_id: int) -> int:
    """Return the seed of a replica's stream for a state of the program's."""
    digest = hashlib.blake2b(state.numpy().tobytes(), digest_size=8, person=replica_id.to_bytes(8, "little"))
    return int.from_bytes(digest.digest(), "little") >> 1
