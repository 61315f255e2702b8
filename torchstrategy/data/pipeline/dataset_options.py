"""``ts.data.Options``, and the checks of arguments that a dataset's methods share."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset

from torchstrategy.base.options import AutoShardPolicy
from torchstrategy.errors import InvalidArgumentError

__all__ = [
    "AUTOTUNE",
    "DistributeOptions",
    "Options",
    "check_callable",
    "check_int",
    "check_shard",
    "check_weights",
    "parallel_calls",
]

AUTOTUNE = -1
_AUTOTUNED_CALLS = 4


def check_int(name: str, value: Any, minimum: int | None = None) -> int:
    """Return an argument as an integer.

    Raises:
        TypeError: it is none.
        InvalidArgumentError: it is below the minimum.
    """
    if isinstance(value, Tensor) and value.dim() == 0 and not (value.is_floating_point() or value.is_complex()):
        value = value.item()
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer. Received: {value!r} of type {type(value).__name__}") from None
    if minimum is not None and number < minimum:
        raise InvalidArgumentError(f"{name} must be at least {minimum}. Received: {number}")
    return number


def check_callable(name: str, value: Any) -> Callable[..., Any]:
    """Return an argument that must be a function.

    Raises:
        TypeError: it is none.
    """
    if not callable(value):
        raise TypeError(f"{name} must be a function. Received: {value!r} of type {type(value).__name__}")
    return value  # type: ignore[no-any-return]


def check_shard(num_shards: int, index: int) -> None:
    """Check the numbers of a shard.

    Raises:
        TypeError: one is no integer.
        InvalidArgumentError: one is out of range.
    """
    number = check_int("num_shards", num_shards, 1)
    if not 0 <= check_int("index", index) < number:
        raise InvalidArgumentError(f"index must be in [0, num_shards) = [0, {number}). Received: {index}")


def check_weights(name: str, value: Any, count: int | None = None) -> list[float]:
    """Return numbers of at least 0, not all 0.

    Raises:
        TypeError: it is no list of numbers.
        InvalidArgumentError: there are not ``count`` numbers, or one is negative, or none is positive.
    """
    if not isinstance(value, Iterable) or isinstance(value, IterableDataset):
        raise TypeError(f"{name} must be a list of numbers. Received: {value!r}")
    numbers = [float(number) for number in value]
    if len(numbers) != (len(numbers) if count is None else count):
        raise InvalidArgumentError(f"{name} must have {count} numbers. Received: {numbers}")
    if not numbers or not all(0 <= number < math.inf for number in numbers) or not sum(numbers):
        raise InvalidArgumentError(f"{name} must be numbers of at least 0, not all 0. Received: {numbers}")
    return numbers


def parallel_calls(value: Any) -> int:
    """Return the number of threads for ``num_parallel_calls``; 0 for none.

    Raises:
        TypeError: it is no integer.
        InvalidArgumentError: it is neither positive nor ``AUTOTUNE``.
    """
    if value is None:
        return 0
    number = check_int("num_parallel_calls", value, AUTOTUNE)
    if number == 0:
        raise InvalidArgumentError("num_parallel_calls must be at least 1, ts.data.AUTOTUNE or None. Received: 0")
    number = _AUTOTUNED_CALLS if number == AUTOTUNE else number
    return 0 if number == 1 else number


class DistributeOptions:
    """``Options.experimental_distribute``: how a distributed dataset is divided.

    ``auto_shard_policy`` is an ``AutoShardPolicy``, ``AUTO`` unless it is set.

    Example:
        >>> options = ts.data.Options()
        >>> options.experimental_distribute.auto_shard_policy
        <AutoShardPolicy.AUTO: 0>
    """

    __slots__ = ("_auto_shard_policy",)

    def __init__(self) -> None:
        self._auto_shard_policy: AutoShardPolicy | None = None

    @property
    def auto_shard_policy(self) -> AutoShardPolicy:
        """The policy for several processes."""
        return AutoShardPolicy.AUTO if self._auto_shard_policy is None else self._auto_shard_policy

    @auto_shard_policy.setter
    def auto_shard_policy(self, policy: AutoShardPolicy) -> None:
        if not isinstance(policy, AutoShardPolicy):
            raise TypeError(f"auto_shard_policy must be a ts.data.AutoShardPolicy. Received: {policy!r}")
        self._auto_shard_policy = policy

    def __setattr__(self, name: str, value: Any) -> None:
        _check_name(self, name, ("auto_shard_policy", "_auto_shard_policy"))
        super().__setattr__(name, value)


class Options:
    """Options of a dataset, for ``Dataset.with_options``.

    Besides ``experimental_distribute.auto_shard_policy`` there is ``deterministic``, which may be set and has no
    effect, because the order of elements is always deterministic. tf's other options tune tf's engine; setting one is
    an error.

    Example:
        >>> options = ts.data.Options()
        >>> options.experimental_distribute.auto_shard_policy = ts.data.AutoShardPolicy.DATA
        >>> dataset = ts.data.Dataset.range(4).with_options(options)
        >>> dataset.options().experimental_distribute.auto_shard_policy
        <AutoShardPolicy.DATA: 2>
    """

    __slots__ = ("_deterministic", "_experimental_distribute")

    def __init__(self) -> None:
        self._experimental_distribute = DistributeOptions()
        self._deterministic: bool | None = None

    @property
    def experimental_distribute(self) -> DistributeOptions:
        """Options for distributed datasets."""
        return self._experimental_distribute

    @experimental_distribute.setter
    def experimental_distribute(self, options: DistributeOptions) -> None:
        if not isinstance(options, DistributeOptions):
            raise TypeError(f"experimental_distribute must be a DistributeOptions. Received: {options!r}")
        self._experimental_distribute = options

    @property
    def deterministic(self) -> bool | None:
        """Accepted for tf's sake."""
        return self._deterministic

    @deterministic.setter
    def deterministic(self, value: bool | None) -> None:
        if value is not None and not isinstance(value, bool):
            raise TypeError(f"deterministic must be a bool or None. Received: {value!r}")
        self._deterministic = value

    def merge(self, options: Options) -> Options:
        """Return new options: the given ones, and these where the given ones are not set.

        Args:
            options: those that win.

        Example:
            >>> first, second = ts.data.Options(), ts.data.Options()
            >>> first.deterministic = True
            >>> first.merge(second).deterministic
            True
        """
        merged = Options()
        for source in (self, options):
            policy = source.experimental_distribute._auto_shard_policy
            if policy is not None:
                merged.experimental_distribute.auto_shard_policy = policy
            if source.deterministic is not None:
                merged.deterministic = source.deterministic
        return merged

    def __setattr__(self, name: str, value: Any) -> None:
        names = ("experimental_distribute", "deterministic")
        _check_name(self, name, (*names, *(f"_{name}" for name in names)))
        super().__setattr__(name, value)

    def __repr__(self) -> str:
        policy = self.experimental_distribute.auto_shard_policy
        return f"Options(auto_shard_policy={policy.name}, deterministic={self.deterministic})"


def _check_name(options: Any, name: str, names: tuple[str, ...]) -> None:
    if name not in names:
        what = f"{type(options).__name__} has no option {name!r}"
        if (now := name.removeprefix("experimental_")) in names:
            raise AttributeError(f"{what}: it is {now!r} now.")
        known = ", ".join(known for known in names if not known.startswith("_"))
        raise AttributeError(f"{what}, only {known}. tf's other options tune tf's engine and have no counterpart.")
