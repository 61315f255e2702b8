"""Variables of parameter servers in the program's hands, whole or in parts, and how parameters become served."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from torchstrategy.base.context import current_frame
from torchstrategy.errors import InvalidArgumentError
from torchstrategy.ps.bindings import Binding, Bindings, can_require_grad
from torchstrategy.ps.layout import to_row_numbers, to_row_values
from torchstrategy.ps.served import Served, ServedBuffer, ServedParameter
from torchstrategy.replicas.variables import Variable, VariableOptions, fitting, make_copy

__all__ = ["ServedVariable", "ShardedVariable", "make_served", "serve", "served_class"]


class ServedVariable(Served, Variable):  # type: ignore[misc]
    """A ``ts.Variable`` on one parameter server, made in the scope of a ``ParameterServerStrategy``.

    Its assignments are atomic: of several workers that add to it at the same time, all count.
    """

    @property
    def variables(self) -> tuple[Tensor, ...]:
        """Copies of the values of the parts, in order."""
        value = self.read_value()
        if not self.binding.spec.is_sharded:
            return (value,)
        return tuple(value[part.start : part.stop].clone() for part in self.binding.spec.parts)

    @override
    def read_value(self) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return self.bindings.read(self.binding).clone()

    value = read_value

    @override
    def _update(self, method: str, value: Any) -> Any:
        self.bindings.update(self.binding, method, self._fitting(_detached(value)))
        frame = current_frame()
        inside = frame is not None and frame.replica_context is not None
        return self.read_value().detach() if inside else self

    def _fitting(self, value: Any) -> Tensor:
        return fitting(self, value)

    @override
    def _plain(self) -> Tensor:
        return make_copy(Variable, self.bindings.read(self.binding).detach(), self.options)  # type: ignore[no-any-return]

    @override
    def __repr__(self) -> str:  # type: ignore[override]
        return Served.__repr__(self)

    @override
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return Served.__deepcopy__(self, memo)

    @override
    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class ShardedVariable(ServedVariable):
    """A ``ts.Variable`` whose rows are shared out to several parameter servers by a partitioner.

    It is used like one tensor; an assignment is atomic for each part. ``variables``, over which iterating goes, has the
    parts' values. ``scatter_...`` change rows without pulling others, and an embedding look-up pulls only its rows.
    """

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.variables)

    def __getitem__(self, index: Any) -> Tensor:
        """Index as numpy does, with negative steps."""
        indices = index if isinstance(index, tuple) else (index,)
        flipped = []
        for axis, own in enumerate(indices):
            if isinstance(own, slice) and own.step is not None and own.step < 0:
                if any(not isinstance(other, (int, slice)) for other in indices):
                    raise NotImplementedError("A negative step together with None, ... or arrays as index.")
                flipped.append((axis, own))
        if not flipped:
            return super().__getitem__(index)
        value = self.read_value()
        for axis, own in flipped:
            value = value.index_select(axis, torch.tensor(range(*own.indices(value.shape[axis])), dtype=torch.int64))
        axes = dict(flipped)
        return value[tuple(slice(None) if axis in axes else own for axis, own in enumerate(indices))]

    def scatter_add(self, indices: Any, values: Any) -> ShardedVariable:  # type: ignore[override]
        """Add to rows; a row that is named twice gets both.

        Args:
            indices: numbers of rows, ``[k]``.
            values: what to add, ``[k, *shape[1:]]``, or what broadcasts to it.

        Returns:
            The variable.

        Raises:
            InvalidArgumentError: an index is negative, too large or no integer, or the values' shape or dtype does not
                fit; no row is changed then.
        """
        return self._scatter("scatter_add", indices, values)

    def scatter_sub(self, indices: Any, values: Any) -> ShardedVariable:
        """Subtract from rows, as ``scatter_add``."""
        return self._scatter("scatter_sub", indices, values)

    def scatter_update(self, indices: Any, values: Any) -> ShardedVariable:
        """Replace rows, as ``scatter_add``; of a row that is named twice one value stays."""
        return self._scatter("scatter_update", indices, values)

    def scatter_max(self, indices: Any, values: Any) -> ShardedVariable:
        """Replace rows by the element-wise maximum, as ``scatter_add``."""
        return self._scatter("scatter_max", indices, values)

    def scatter_min(self, indices: Any, values: Any) -> ShardedVariable:
        """Replace rows by the element-wise minimum, as ``scatter_add``."""
        return self._scatter("scatter_min", indices, values)

    def scatter_mul(self, indices: Any, values: Any) -> ShardedVariable:
        """Multiply rows, as ``scatter_add``."""
        return self._scatter("scatter_mul", indices, values)

    def scatter_div(self, indices: Any, values: Any) -> ShardedVariable:
        """Divide rows, as ``scatter_add``; integers can't be divided by 0."""
        return self._scatter("scatter_div", indices, values)

    def sparse_read(self, indices: Any) -> Tensor:
        """Return rows, pulling only these.

        Args:
            indices: numbers of rows, of any shape ``[...]``.

        Returns:
            The rows, ``[..., *shape[1:]]``.

        Raises:
            InvalidArgumentError: an index is negative, too large or no integer.
        """
        numbers = to_row_numbers(self.name, self.shape, _detached(indices))
        with torch._C.DisableTorchFunctionSubclass():
            rows, positions = self.bindings.look_up(self.binding, numbers)
            return rows[positions]

    gather_nd = sparse_read

    def _scatter(self, method: str, indices: Any, values: Any) -> ShardedVariable:
        numbers = to_row_numbers(self.name, self.shape, _detached(indices))
        if numbers.dim() != 1:
            raise InvalidArgumentError(
                f"{method} takes the numbers of rows as a vector. Received: shape {tuple(numbers.shape)}"
            )
        rows = to_row_values(self.name, self.shape, self.dtype, len(numbers), _detached(values))
        with torch._C.DisableTorchFunctionSubclass():
            self.bindings.client.scatter(self.binding.spec, method, numbers, rows)
            self.binding.point = -1
        return self

    @override
    def _fitting(self, value: Any) -> Tensor:
        try:
            return super()._fitting(value)
        except ValueError as error:
            raise InvalidArgumentError(str(error)) from error


def make_served(cls: type[Any], bindings: Bindings, binding: Binding, options: VariableOptions | None = None) -> Any:
    """Return a served tensor of a class for a binding."""
    spec = binding.spec
    with torch.inference_mode(False):  # noqa: FBT003 - it outlives the mode
        nothing = _nothing(spec.shape, spec.dtype, bindings.device)
        needs_grad = binding.requires_grad and can_require_grad(nothing)
        tensor = Tensor._make_subclass(cls, nothing, needs_grad)
    tensor.binding, tensor.bindings = binding, bindings
    binding.show(tensor)
    if options is not None:
        tensor.options, tensor.user_variable, tensor.diverges = options, None, False
        if needs_grad:
            tensor._is_param = True
    return tensor


def serve(tensor: Tensor, bindings: Bindings, binding: Binding) -> None:
    """Turn a module's own parameter or buffer into a served one, so that whoever holds it follows the variable."""
    is_parameter = isinstance(tensor, nn.Parameter)
    tensor.__class__ = ServedParameter if is_parameter else ServedBuffer
    served: Any = tensor
    served.binding, served.bindings = binding, bindings
    binding.show(served)
    with torch._C.DisableTorchFunctionSubclass():
        tensor.grad = None
        tensor.data = _nothing(tensor.shape, tensor.dtype, tensor.device)


def _nothing(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of one element that looks like one of a shape.

    Code that bypasses torch's functions, such as ``torch.tensor`` and ``torch.arange`` of a variable, sees NaN or the
    extreme integer in it, which is nobody's number.
    """
    element = torch.full((1,) * len(shape), _nobodys(dtype), dtype=dtype, device=device)
    return element.expand(tuple(shape))


def _nobodys(dtype: torch.dtype) -> float:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    if dtype == torch.bool:
        return False
    info = torch.iinfo(dtype)
    return info.min or info.max


def served_class(spec: Any) -> type[ServedVariable]:
    """Return the class of a ``ts.Variable`` with this specification."""
    return ShardedVariable if spec.is_sharded else ServedVariable


def _detached(value: Any) -> Any:
    """Return a tensor's value, pulled if need be; others as they are."""
    return value.detach() if isinstance(value, Tensor) else value
