"""Tensors in the program's hands whose values are on the parameter servers.

A served tensor has the shape and dtype of its variable and no memory: in a torch function its binding's local tensor
takes its place, pulled before if a newer value may be there. What a function writes to it is assigned to the variable.
An embedding look-up pulls only the rows that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from torchstrategy.base.names import dtype_name
from torchstrategy.base.values import RemoteTensor
from torchstrategy.checkpoint.storage import new_tensor
from torchstrategy.ps.bindings import Binding, Bindings, Kind
from torchstrategy.ps.layout import check_padding_index
from torchstrategy.replicas.distributed_variables import replaced

__all__ = ["NO_HOOKS", "Served", "ServedBuffer", "ServedParameter", "value_of"]

#: What can be asked of a served tensor itself: it has the variable's shape, dtype and so on.
_METADATA = frozenset({
    "size", "dim", "ndimension", "numel", "nelement", "element_size", "get_device", "is_floating_point", "is_complex",
    "is_signed", "__len__", "is_inference", "type", "is_shared", "is_pinned", "is_set_to",
})  # fmt: skip
_METADATA_PROPERTIES = frozenset({
    "shape", "dtype", "device", "ndim", "layout", "is_leaf", "grad_fn", "requires_grad", "is_sparse", "is_quantized",
    "is_meta", "is_cuda", "is_cpu", "is_mps", "is_xpu", "is_mkldnn", "names", "itemsize", "nbytes", "output_nr",
    "retains_grad", "name", "is_nested", "is_sparse_csr", "is_maia", "is_mtia", "is_ipu", "is_xla", "is_vulkan",
})  # fmt: skip
#: They write moving averages without moving their version, if this argument is true. By name: while a strategy has
#: several replicas, another function stands in the place of torch's, and calls it.
_WRITES_UNSEEN = {"torch.nn.functional.batch_norm": "training", "torch.nn.functional.instance_norm": "use_input_stats"}
#: Said of hooks on a tensor.
NO_HOOKS = (
    "A hook on the tensor {name!r} would not run on the workers. Change its gradient in the function that you "
    "schedule, between backward() and step(), or use a hook of a module or of the optimizer."
)
_NUM_SHOWN = 100
#: Larger values are written piece by piece.
_NUM_BYTES_AT_ONCE = 1 << 26
_LOOKUPS = (F.embedding, F.embedding_bag, torch.embedding, torch.embedding_bag)


class Served(RemoteTensor):
    """Mixed in before a tensor class."""

    binding: Binding
    bindings: Bindings

    @property
    def placement(self) -> tuple[str, ...]:
        """Full names of the devices that hold the variable's parts."""
        return tuple(f"/job:ps/replica:0/task:{part.ps}/device:CPU:0" for part in self.binding.spec.parts)

    @override
    def snapshot(self) -> Tensor:
        """Return the present value on the CPU, read piece by piece; in a file if it is large, see ``new_tensor``."""
        spec = self.binding.spec
        self.bindings.write_back([self.binding])
        value = new_tensor(spec.shape, spec.dtype)
        self.bindings.client.read_into(spec, value)
        return value

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.autograd.grad:
                return _gradients_of(*args, **kwargs)
            if func is torch.autograd.backward:
                return _backward(*args, **kwargs)
            about = _about_the_tensor(func, args[0] if args else None)
            if about is not None:
                return about(func, args, kwargs)
            if func in _LOOKUPS and len(args) > 1:
                return _look_up(func, args, kwargs)
            used: list[Served] = []

            def local(tensor: Served) -> Tensor:
                used.append(tensor)
                return tensor.bindings.read(tensor.binding)

            result = func(*replaced(args, local, Served), **replaced(kwargs, local, Served))
            writes = used and kwargs.get(_WRITES_UNSEEN.get(_full_name(func), ""))
            for tensor in used:
                if writes and tensor.binding.kind is Kind.BUFFER:
                    tensor.binding.note_write()
                tensor.bindings.write_back([tensor.binding])
        for tensor in used:
            if result is tensor.binding.local:  # an in-place function returns what it was given
                return tensor
        return result

    @override
    def __repr__(self) -> str:  # type: ignore[override]
        spec = self.binding.spec
        dtype = dtype_name(spec.dtype)
        where = ", ".join(f"ps {part.ps}" for part in spec.parts)
        kind, value = type(self).__name__, ""
        if self.numel() <= _NUM_SHOWN:
            with torch._C.DisableTorchFunctionSubclass():
                value = f", value={self.bindings.read(self.binding).tolist()}"
        return f"<ts.{kind} {spec.name!r} shape={tuple(spec.shape)} dtype={dtype} on {where}{value}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a plain tensor with the variable's present value."""
        memo[id(self)] = copied = self._plain()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def _plain(self) -> Tensor:
        value = self.bindings.read(self.binding).detach().clone()
        return nn.Parameter(value, self.binding.requires_grad) if isinstance(self, nn.Parameter) else value


class ServedParameter(Served, nn.Parameter):
    """A parameter of a module that was made in the scope of a ``ParameterServerStrategy``."""


class ServedBuffer(Served):
    """A buffer of such a module."""


def _full_name(func: Any) -> str:
    return f"{getattr(func, '__module__', '')}.{getattr(func, '__name__', '')}"


def _about_the_tensor(func: Any, target: Any) -> Callable[..., Any] | None:
    """Return what answers for a function that needs no value, or ``None``."""
    if not isinstance(target, Served):
        return None
    name = getattr(func, "__name__", "")
    of_property = func.__self__.__name__ if name in ("__get__", "__set__", "__delete__") else None
    if name in _METADATA or (name == "__get__" and of_property in _METADATA_PROPERTIES):
        return _plain_call
    if of_property in ("grad", "_grad"):
        return _gradient
    if of_property == "data":
        return _data
    if name == "copy_" and not torch.is_grad_enabled():
        return _overwrite
    if name in ("register_hook", "register_post_accumulate_grad_hook"):
        raise NotImplementedError(NO_HOOKS.format(name=target.binding.spec.name))
    if name == "requires_grad_" or (name == "__set__" and of_property == "requires_grad"):
        return _set_requires_grad
    return None


def _plain_call(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    return func(*args, **kwargs)


def _gradient(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:  # noqa: ARG001 - as the others
    binding: Binding = args[0].binding
    if func.__name__ == "__get__":
        return binding.gradient()
    grad = args[1] if func.__name__ == "__set__" else None
    if grad is not None and not grad.is_sparse and binding.local is None and binding.kind is not Kind.ROWS:
        args[0].bindings.read(binding)  # what has the gradient
    binding.set_gradient(grad)
    return None


def _data(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Give the value without its graph; what is written to it is noticed, unlike writes to a tensor's ``data``."""
    target = args[0]
    local = target.bindings.read(target.binding)
    if func.__name__ == "__get__":
        return local.detach()
    spec, value = target.binding.spec, args[1]
    if value.dtype != spec.dtype or value.shape != target.shape:
        raise RuntimeError(
            f"{spec.name!r} has dtype {spec.dtype} and shape {spec.shape} on the parameter servers and can't become "
            f"{value.dtype} {tuple(value.shape)}. Convert the module inside the scope, before its scope closes."
        )
    result = func(local, value, **kwargs)
    target.binding.note_write()
    target.bindings.write_back([target.binding])
    return result


def _overwrite(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:  # noqa: ARG001 - as the others
    """Assign a value, as ``load_state_dict`` does, without pulling the old one."""
    target, value = args[0], value_of(args[1])
    binding = target.binding
    value = value.detach().to(binding.spec.dtype).expand(target.shape).cpu()
    binding.note()  # what was written before does not count
    if binding.spec.num_bytes > _NUM_BYTES_AT_ONCE:
        target.bindings.client.write_from(binding.spec, value)
        binding.versions = None
    else:
        target.bindings.client.update(binding.spec, "assign", value)
    binding.point = -1
    return target


def _set_requires_grad(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    target = args[0]
    result = func(*args, **kwargs)
    binding = target.binding
    binding.requires_grad = target.requires_grad
    if binding.local is not None:
        binding.local.requires_grad_(target.requires_grad)
    return result


def _look_up(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Call an embedding function with only the rows that it needs."""
    first = args[1] if isinstance(args[1], Served) else args[0]  # torch.embedding takes the weight first
    is_functional = first is args[1]
    indices = args[0] if is_functional else args[1]
    if not isinstance(first, Served) or not _pulls_rows(first.binding):
        return func(*replaced(args, value_of, Served), **replaced(kwargs, value_of, Served))
    if not is_functional:
        raise NotImplementedError(
            f"{func.__name__} of the variable {first.binding.spec.name!r}, of which only rows are pulled: use "
            "torch.nn.functional.embedding, or the module torch.nn.Embedding."
        )
    names = _EMBEDDING if func is F.embedding else _EMBEDDING_BAG
    options = {**dict(zip(names, args[2:], strict=False)), **kwargs}
    if options.get("max_norm") is not None:
        raise NotImplementedError(
            f"max_norm changes the rows of {first.binding.spec.name!r} at each look-up, which parameter servers don't "
            "do. Leave it out, or regularize the embedding."
        )
    numbers = value_of(indices)
    if not isinstance(numbers, Tensor) or numbers.dtype not in (torch.int64, torch.int32):
        received = numbers.dtype if isinstance(numbers, Tensor) else type(numbers).__name__
        raise RuntimeError(
            f"Rows of {first.binding.spec.name!r} are looked up by a tensor of int64 or int32. Received: {received}"
        )
    rows, positions = first.bindings.look_up(first.binding, numbers)
    if options.get("padding_idx") is not None:
        padding = check_padding_index(first.binding.spec.name, len(first), options["padding_idx"])
        where = (numbers == padding).nonzero()
        options["padding_idx"] = int(positions[tuple(where[0])]) if len(where) else None
    options["sparse"] = False  # these rows are few; the gradient of the whole is sparse
    return func(positions, rows, **replaced(options, value_of, Served))


def _leaves(tensor: Any) -> list[Any]:
    """Return what autograd knows a tensor as: a served one by its rows, and by the local tensor."""
    if not isinstance(tensor, Served):
        return [tensor]
    return [leaf for leaf in (tensor, tensor.binding.local) if leaf is not None and leaf.requires_grad] or [tensor]


def _backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,  # noqa: FBT001 - torch's signature
    create_graph: bool = False,  # noqa: FBT001, FBT002
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """Do what ``torch.autograd.backward`` does."""
    if inputs is not None:
        inputs = [leaf for tensor in ([inputs] if isinstance(inputs, Tensor) else inputs) for leaf in _leaves(tensor)]
    tensors, grad_tensors = replaced(tensors, value_of, Served), replaced(grad_tensors, value_of, Served)
    torch.autograd.backward(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)


def _gradients_of(outputs: Any, inputs: Any, grad_outputs: Any = None, **options: Any) -> tuple[Any, ...]:
    """Do what ``torch.autograd.grad`` does; the gradient of a table is that of all look-ups, and of its dense uses."""
    outputs, grad_outputs = replaced(outputs, value_of, Served), replaced(grad_outputs, value_of, Served)
    wanted = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    leaves = list(map(_leaves, wanted))
    allows_unused = options.pop("allow_unused", None)
    fills = options.pop("materialize_grads", False)
    if fills and allows_unused is False:
        raise ValueError("Expected allow_unused to be True or not passed when materialize_grads=True, but got: False.")
    found = torch.autograd.grad(
        outputs, [leaf for own in leaves for leaf in own], grad_outputs, allow_unused=True, **options
    )
    remaining = iter(found)
    results = []
    for k, (tensor, own) in enumerate(zip(wanted, leaves, strict=True)):
        parts = [part for part in (next(remaining) for _ in own) if part is not None]
        parts.sort(key=lambda part: part.is_sparse)  # torch adds a sparse tensor to a dense one only
        if not parts and not fills and not allows_unused:
            name = f"Variable {tensor.binding.spec.name!r}" if isinstance(tensor, Served) else f"Input {k}"
            raise RuntimeError(
                f"{name}, one of the differentiated tensors, appears to not have been used in the graph. Set "
                "allow_unused=True if this is the desired behavior."
            )
        if not parts:
            results.append(torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device) if fills else None)
        else:
            results.append(parts[0] if len(parts) == 1 else parts[0] + parts[1])
    return tuple(results)


def _pulls_rows(binding: Binding) -> bool:
    """Say whether a look-up pulls rows only; the gradient is sparse then, which a module must have asked for."""
    is_dense = binding.kind is Kind.PARAMETER and binding.requires_grad and torch.is_grad_enabled()
    return binding.kind is Kind.ROWS or (binding.spec.is_sharded and not is_dense)


_EMBEDDING = ("padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
_EMBEDDING_BAG = (
    "offsets", "max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse", "per_sample_weights",
    "include_last_offset", "padding_idx",
)  # fmt: skip


def value_of(value: Any) -> Any:
    """Return a served tensor's present value, and anything else as it is."""
    return value.bindings.read(value.binding) if isinstance(value, Served) else value
