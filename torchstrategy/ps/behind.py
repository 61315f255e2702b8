"""Parameters of modules on a worker, also those that an optimizer has changed on the servers meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

__all__ = ["ParameterBehind", "PulledParameter"]

#: Of the properties of a tensor, those that show its value.
_VALUES = frozenset({"data", "real", "imag", "T", "mT", "H", "mH"})
_data: Any = Tensor.data
_METADATA = frozenset({"__hash__", "size", "dim", "numel", "is_floating_point", "is_complex"})


class PulledParameter(nn.Parameter):
    """A parameter whose ``data`` is not hidden from the count of its changes, so that each of them is noticed."""

    @property
    def data(self) -> Tensor:
        """The value without a graph."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        _data.__set__(self, value)
        torch.autograd.graph.increment_version(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self)] = copied = self._plain()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @override
    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self._plain())

    def _plain(self) -> nn.Parameter:
        return nn.Parameter(self.detach().clone(), self.requires_grad)


class ParameterBehind(PulledParameter):
    """One whose next use in a torch function pulls its value; then it is as before."""

    _pull: Callable[[], None]

    @staticmethod
    def make(parameter: PulledParameter, pull: Callable[[], None]) -> None:
        """Turn a parameter into one that is behind.

        Args:
            parameter: the parameter.
            pull: pulls its value, and calls ``catch_up``.
        """
        parameter._pull = pull  # type: ignore[attr-defined]
        parameter.__class__ = ParameterBehind

    def catch_up(self) -> None:
        """Become one that is not."""
        self.__class__ = PulledParameter  # type: ignore[assignment]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _needs_no_value(func):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for behind in _found((args, kwargs)):
            if isinstance(behind, ParameterBehind):  # the first one of an optimizer pulls all of them
                behind._pull()
        return func(*args, **kwargs)


def _needs_no_value(func: Any) -> bool:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return func.__self__.__name__ not in _VALUES
    return name in _METADATA


def _found(value: Any) -> list[Tensor]:
    """Return the parameters that are behind in a function's arguments."""
    if isinstance(value, ParameterBehind):
        return [value]
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return []
    return [found for item in value for found in _found(item)]
