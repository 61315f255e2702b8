"""Enums and frozen option classes that users pass to strategies."""

from __future__ import annotations

import enum
import numbers
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

__all__ = [
    "AutoShardPolicy",
    "Choice",
    "CollectiveHints",
    "CommunicationImplementation",
    "CommunicationOptions",
    "InputOptions",
    "InputReplicationMode",
    "PowerSGD",
    "ReduceOp",
    "RunOptions",
    "VariableAggregation",
    "VariableSynchronization",
    "register_implementation_name",
]


class _ChoiceMeta(enum.EnumMeta):
    if not TYPE_CHECKING:  # a checker would allow any name

        def __getattr__(cls, name: str) -> Any:
            try:
                return super().__getattr__(name)  # finds members before Python 3.12
            except AttributeError:
                raise AttributeError(_no_member(cls, name), name=name, obj=cls) from None


class Choice(enum.Enum, metaclass=_ChoiceMeta):
    """An enum that says of what it has not which members it has."""

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        raise ValueError(_no_member(cls, value))


def _no_member(cls: type[enum.Enum], name: object) -> str:
    return f"{name!r} is not a valid {cls.__name__}. Its members are {', '.join(cls.__members__)}."


class ReduceOp(Choice):
    """How values of several replicas become one."""

    SUM = "SUM"
    MEAN = "MEAN"

    @classmethod
    def parse(cls, value: object) -> ReduceOp:
        """Return the member for a member or its name in any letter case.

        Args:
            value: a ``ReduceOp`` or a string such as ``"sum"``.

        Returns:
            The member.

        Raises:
            ValueError: ``value`` names no member.
            TypeError: ``value`` is neither a member nor a string.

        Example:
            >>> ts.ReduceOp.parse("sum")
            <ReduceOp.SUM: 'SUM'>
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, str):
            return cls.__members__.get(value.upper()) or cls(value)
        raise TypeError(f"A reduce op must be a ReduceOp or a string, 'SUM' or 'MEAN'. Received: {value!r}")


class VariableSynchronization(Choice):
    """When the replicas' copies of a variable are brought together.

    ``ON_WRITE``, which ``AUTO`` means: every copy gets the same value whenever one is assigned. ``ON_READ``: each
    replica writes its own copy, and reading in cross-replica context aggregates them. ``NONE``: not with replicas.
    """

    AUTO = "AUTO"
    NONE = "NONE"
    ON_WRITE = "ON_WRITE"
    ON_READ = "ON_READ"

    def __repr__(self) -> str:
        return str(self)


class VariableAggregation(Choice):
    """How values that replicas assign to a variable, or their copies of it, become one value."""

    NONE = "NONE"
    SUM = "SUM"
    MEAN = "MEAN"
    ONLY_FIRST_REPLICA = "ONLY_FIRST_REPLICA"

    def __repr__(self) -> str:
        return str(self)


class AutoShardPolicy(Choice):
    """How several processes divide a dataset of global batches among themselves, as ``tf.data.experimental`` has it.

    ``DATA`` cuts every global batch: each replica gets its chunk, and a step holds the batch of a single replica.
    ``FILE`` gives each process files of its own. ``OFF`` gives every process the whole dataset. ``HINT`` replaces
    ``dataset.shard(SHARD_HINT, SHARD_HINT)``. ``AUTO`` is ``FILE`` where several processes read a dataset of at least
    as many files, else ``DATA``.
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


class CommunicationImplementation(Choice):
    """What carries collectives between processes: ``RING`` takes tensors on any device, ``NCCL`` those on GPUs.

    ``RING`` is gloo. ``AUTO`` is NCCL for GPUs; on CPUs it takes the fastest way for a tensor's size and the processes'
    hosts: messages, shared memory, or gloo.
    """

    AUTO = "AUTO"
    RING = "RING"
    NCCL = "NCCL"


_COMPRESSED_DTYPES = ("bf16", "fp16")
# Names that users have registered for ways of communication of their own; their code is in a higher layer.
_registered_implementations: set[str] = set()


def register_implementation_name(name: str) -> str:
    """Let ``CommunicationOptions`` take a name as ``implementation``.

    Args:
        name: a name other than that of a ``CommunicationImplementation``; letter case does not count.

    Returns:
        The name as ``CommunicationOptions`` stores it: in lower case.

    Raises:
        TypeError: ``name`` is no string.
        ValueError: it is empty, or the name of a ``CommunicationImplementation``.

    Example:
        >>> from torchstrategy.base.options import register_implementation_name
        >>> register_implementation_name("MyMPI")
        'mympi'
        >>> ts.experimental.CommunicationOptions(implementation="mympi").implementation
        'mympi'
    """
    if not isinstance(name, str):
        raise TypeError(f"The name of an implementation must be a string. Received: {name!r}")
    if not name.strip() or name.upper() in CommunicationImplementation.__members__:
        raise ValueError(
            f"The name of an implementation of your own must be another than AUTO, RING and NCCL. Received: {name!r}"
        )
    _registered_implementations.add(name.lower())
    return name.lower()


@dataclass(frozen=True)
class PowerSGD:
    """Gradients that travel as products of two thin matrices: PowerSGD of Vogels et al. (2019), arXiv:1905.13727.

    The gradient of a parameter ``[n, ...]`` is taken as a matrix of ``n`` rows and ``m`` columns, for which
    ``rank * (n + m)`` numbers travel. What a sum leaves out of a process's gradient is added to its next one. Gradients
    that would hardly become smaller, such as those of biases, travel as they are.

    Args:
        rank: columns of the thin matrices; more of them are nearer to the true sum and cost more.
        start_after: sums of each gradient that are made in full before the first one that is compressed.
        min_compression: a gradient travels in full unless that takes at least so many times as many numbers.

    Raises:
        TypeError: ``rank`` or ``start_after`` is no integer, or ``min_compression`` no number.
        ValueError: ``rank`` is not positive, ``start_after`` is negative, or ``min_compression`` is less than 1.

    Example:
        >>> ts.experimental.CommunicationOptions(gradient_compression=ts.experimental.PowerSGD(rank=4))
        ... # doctest: +ELLIPSIS
        CommunicationOptions(... gradient_compression=PowerSGD(rank=4, start_after=100, min_compression=2.0))
    """

    rank: int = 1
    start_after: int = 100
    min_compression: float = 2.0

    def __post_init__(self) -> None:
        for name, least in (("rank", 1), ("start_after", 0)):
            value = getattr(self, name)
            if not isinstance(value, numbers.Integral) or isinstance(value, bool):
                raise TypeError(f"{name} of PowerSGD must be an integer. Received: {value!r}")
            if value < least:
                raise ValueError(f"{name} of PowerSGD must be at least {least}. Received: {value}")
        if not isinstance(self.min_compression, numbers.Real):
            raise TypeError(f"min_compression of PowerSGD must be a number. Received: {self.min_compression!r}")
        if not self.min_compression >= 1:
            raise ValueError(f"min_compression of PowerSGD must be at least 1. Received: {self.min_compression}")


@dataclass(frozen=True)
class CommunicationOptions:
    """How collectives between processes are carried out.

    Args:
        bytes_per_pack: upper size in bytes of one gradient bucket; 0 chooses 32 MiB. Of sums that begin during
            ``backward`` it is at most 4 MiB on CPUs; on accelerators at most 64 MiB, and 1 MiB in the first one.
        timeout_seconds: seconds after which a collective that not all ranks have joined fails; ``None`` means 1800, and
            so do 0 and negative numbers, which tf accepts as well.
        implementation: what carries the data: a ``CommunicationImplementation``, its name in any letter case, or a name
            that was given to ``ts.experimental.register_communication``.
        overlap: whether sums of gradients begin while ``backward`` still computes others, with one replica in each
            process; ``None`` means where gradients travel over a network. On accelerators changes through
            ``p.grad.data``, which torch does not count, are looked for in the first steps and in every 100th one:
            those that begin later may go unnoticed between these.
        gradient_compression: how gradients that travel over a network become smaller, at the price of exactness:
            ``"bf16"``, ``"fp16"``, or a ``ts.experimental.PowerSGD``; ``None`` means not at all.

    Raises:
        TypeError: ``bytes_per_pack`` is no integer, ``timeout_seconds`` no number, or ``overlap`` no bool.
        ValueError: ``bytes_per_pack`` is negative, or there is no such implementation or compression.

    Example:
        >>> options = ts.experimental.CommunicationOptions(bytes_per_pack=1 << 20, implementation="ring")
        >>> options.implementation
        <CommunicationImplementation.RING: 'RING'>
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO
    overlap: bool | None = None
    gradient_compression: str | PowerSGD | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.bytes_per_pack, numbers.Integral):
            raise TypeError(f"bytes_per_pack must be an integer. Received: {self.bytes_per_pack!r}")
        if not isinstance(self.timeout_seconds, (numbers.Real, type(None))):
            raise TypeError(f"timeout_seconds must be a number of seconds or None. Received: {self.timeout_seconds!r}")
        if self.bytes_per_pack < 0:
            raise ValueError(f"bytes_per_pack must be 0 or positive. Received: {self.bytes_per_pack}")
        if not isinstance(self.overlap, (bool, type(None))):
            raise TypeError(f"overlap must be True, False or None. Received: {self.overlap!r}")
        object.__setattr__(self, "implementation", _parse_implementation(self.implementation))
        object.__setattr__(self, "gradient_compression", _parse_compression(self.gradient_compression))

    @property
    def bucket_bytes(self) -> int:
        """Size in bytes at which a gradient bucket is closed."""
        return self.bytes_per_pack or 32 << 20

    @property
    def deadline_seconds(self) -> float | None:
        """``timeout_seconds`` if it is positive; ``None`` if the default is meant."""
        return self.timeout_seconds if self.timeout_seconds is not None and self.timeout_seconds > 0 else None

    def merge(self, options: CommunicationOptions) -> CommunicationOptions:
        """Return these options with what others set in its place.

        Args:
            options: the others; their ``bytes_per_pack`` counts unless 0, their ``timeout_seconds`` unless ``None``,
                their ``implementation`` unless ``AUTO``, ``overlap`` and ``gradient_compression`` unless ``None``.

        Example:
            >>> first = ts.experimental.CommunicationOptions(bytes_per_pack=1, timeout_seconds=2.0)
            >>> first.merge(ts.experimental.CommunicationOptions(timeout_seconds=3.0)).timeout_seconds
            3.0
        """
        is_auto = options.implementation is CommunicationImplementation.AUTO
        return CommunicationOptions(
            options.bytes_per_pack or self.bytes_per_pack,
            self.timeout_seconds if options.timeout_seconds is None else options.timeout_seconds,
            self.implementation if is_auto else options.implementation,
            self.overlap if options.overlap is None else options.overlap,
            self.gradient_compression if options.gradient_compression is None else options.gradient_compression,
        )


def CollectiveHints(bytes_per_pack: int = 0, timeout_seconds: float | None = None) -> CommunicationOptions:
    """Return ``CommunicationOptions`` with these values: the name that they had in tf at first.

    Args:
        bytes_per_pack: as for ``CommunicationOptions``.
        timeout_seconds: as for ``CommunicationOptions``.

    Raises:
        TypeError: as for ``CommunicationOptions``.
        ValueError: ``bytes_per_pack`` is negative.

    Example:
        >>> ts.experimental.CollectiveHints(bytes_per_pack=1 << 20).bytes_per_pack
        1048576
    """
    return CommunicationOptions(bytes_per_pack=bytes_per_pack, timeout_seconds=timeout_seconds)


def _parse_implementation(value: object) -> CommunicationImplementation | str:
    if isinstance(value, CommunicationImplementation):
        return value
    if isinstance(value, str):
        if value.upper() in CommunicationImplementation.__members__:
            return CommunicationImplementation[value.upper()]
        if value.lower() in _registered_implementations:
            return value.lower()
    names = ", ".join([*CommunicationImplementation.__members__, *sorted(_registered_implementations)])
    raise ValueError(
        f"implementation must be one of {names}, in any letter case, or a CommunicationImplementation. A way of your "
        f"own needs a name first: ts.experimental.register_communication. Received: {value!r}"
    )


def _parse_compression(value: object) -> str | PowerSGD | None:
    if value is None or isinstance(value, PowerSGD):
        return value
    if isinstance(value, str) and value.lower() in _COMPRESSED_DTYPES:
        return value.lower()
    raise ValueError(
        "gradient_compression must be None, 'bf16', 'fp16' or a ts.experimental.PowerSGD(rank=...). "
        f"Received: {value!r}"
    )


class InputReplicationMode(Choice):
    """Whether a dataset function is called once per worker or once per replica."""

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


@dataclass(frozen=True)
class InputOptions:
    """How a distributed dataset feeds the replicas.

    Args:
        experimental_fetch_to_device: move elements to the replicas' devices; ``None`` means yes.
        experimental_replication_mode: once per worker (the default) or once per replica.
        experimental_place_dataset_on_device: keep the dataset itself on the device; for a dataset function only with
            ``PER_REPLICA``, and elsewhere it changes no batch.
        experimental_per_replica_buffer_size: elements whose copies to an accelerator are started before they are asked
            for; without effect on CPUs.

    Raises:
        ValueError: ``experimental_per_replica_buffer_size`` is not positive.
        TypeError: ``experimental_replication_mode`` is no ``InputReplicationMode``.

    Example:
        >>> ts.InputOptions(experimental_per_replica_buffer_size=2).experimental_per_replica_buffer_size
        2
    """

    experimental_fetch_to_device: bool | None = None
    experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 1

    def __post_init__(self) -> None:
        if self.experimental_fetch_to_device is None:
            object.__setattr__(self, "experimental_fetch_to_device", True)
        if not isinstance(self.experimental_replication_mode, InputReplicationMode):
            raise TypeError(
                "experimental_replication_mode must be a ts.InputReplicationMode. "
                f"Received: {self.experimental_replication_mode!r}"
            )
        if self.experimental_per_replica_buffer_size < 1:
            raise ValueError(
                "experimental_per_replica_buffer_size must be at least 1. "
                f"Received: {self.experimental_per_replica_buffer_size}"
            )


@dataclass(frozen=True)
class RunOptions:
    """Options of ``Strategy.run``; they have a meaning on TPUs only and are ignored elsewhere.

    Args:
        experimental_enable_dynamic_batch_size: allow batches of differing sizes.
        experimental_bucketizing_dynamic_shape: pad dynamic shapes to buckets.
        experimental_xla_options: options for the compiler.

    Example:
        >>> ts.RunOptions().experimental_enable_dynamic_batch_size
        True
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: object | None = None
