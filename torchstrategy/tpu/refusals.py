"""What can't be done with tensors of the device while a replica function is traced, and what to do instead.

Most of it is refused where operations are handled (``operations.py``); calls that a dispatch mode does not see are
replaced as long as a thread traces a function.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
import torch._tensor_str
from torch import Tensor

from torchstrategy.base.log import call_site, is_users_file
from torchstrategy.tpu.batch_norm import reads_batch_count
from torchstrategy.tpu.marks import any_on_device, is_on_device, with_defaults
from torchstrategy.tpu.protocols import AnyRegion
from torchstrategy.xla.kernels import CUTS, functions_to_refuse

__all__ = [
    "DATA_DEPENDENT",
    "HOST_COPIES",
    "allowed_calls",
    "check_stays_on_device",
    "current_region",
    "explain_host_tensor",
    "refuse",
    "refuse_branching",
    "refuse_copy_to_host",
    "refuse_distributed",
    "refuse_dynamic_shape",
    "refuse_embedding_bag",
    "refuse_host_computation",
    "refuse_mask",
    "refuse_sparse_gradients",
    "refused_calls",
]

_WHY = (
    "Inside `run` a function is traced once for all replicas and computed when the step ends: there are no numbers "
    "yet, and each replica would have its own."
)
_INSTEAD = (
    "Return the tensor from the function and read it outside (`strategy.reduce`, "
    "`strategy.experimental_local_results`), or compute with tensors, for example `torch.where` instead of `if`."
)
_DYNAMIC = "The shape of the result depends on a tensor's values, but shapes must be known when the function is traced."
_STATIC = (
    "Keep the shape: multiply by the mask, or use `torch.where(mask, x, other)` or `x.masked_fill(mask, number)`; or "
    "do this outside `run`, for example in the dataset."
)

#: Code that reads numbers for the program: the end of its file's path, what the program calls it, and what to do.
_READERS = (
    (
        "torch/amp/grad_scaler.py",
        "`GradScaler`, which leaves out steps whose gradients overflow,",
        "TPUs compute in bfloat16, which has the range of float32 and needs no scaling: leave the scaler out, or make "
        "it with `enabled=False`.",
    ),
    (
        "torch/optim/lbfgs.py",
        "`LBFGS`, which decides by losses and gradients how far to go,",
        "Train with another optimizer here, or with this one under another strategy.",
    ),
    (
        "torch/optim/asgd.py",
        "`ASGD`, which computes its rate by the number of steps,",
        "Train with another optimizer here: SGD, and `AveragedModel(model)` for the mean of the weights.",
    ),
    (
        "torch/optim/_adafactor.py",
        "`Adafactor`, whose steps follow the size of its updates,",
        "Train with another optimizer here, such as Adam.",
    ),
    (
        "torch/optim/swa_utils.py",
        "An average's function, such as `get_swa_multi_avg_fn`,",
        "`AveragedModel(model)` takes the same mean without `multi_avg_fn`; `get_ema_multi_avg_fn` reads nothing.",
    ),
    (
        "logging/__init__.py",
        "A logger with a format for numbers, such as `%f`,",
        "Return the tensor from the function and log it outside; `%s` shows here what a tensor is.",
    ),
)

#: Operations that return a number, which the host needs now.
HOST_COPIES = {"_local_scalar_dense", "is_nonzero", "equal", "_to_cpu"}
DATA_DEPENDENT = {
    "nonzero",
    "masked_select",
    "unique_dim",
    "_unique",
    "_unique2",
    "unique_consecutive",
    "unique_dim_consecutive",
    "bincount",
}


def refuse(what: str, why: str, instead: str) -> NoReturn:
    """Raise what is not possible here.

    Raises:
        RuntimeError: always.
    """
    raise RuntimeError(f"{what} at {call_site()}. {why} {instead}")


def explain_host_tensor(error: BaseException | None) -> None:
    """Say what to do where torch_xla has refused a tensor of the host.

    Raises:
        RuntimeError: that is what the error is.
    """
    if isinstance(error, RuntimeError) and ("Expected XLA tensor" in str(error) or "not an XLA tensor" in str(error)):
        raise RuntimeError(
            "An operation got a tensor that is on the host beside one that is on the device. Make modules in "
            "`strategy.scope()`, pass tensors to `run` as arguments, and make others in the function that runs, where "
            f"the device is the default. ({error})"
        ).with_traceback(error.__traceback__) from None


def refuse_copy_to_host(region: AnyRegion, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation that needs numbers on the host, unless its tensor is on the device."""
    value = _first_on_device(args)
    if value is None:
        return func(*args, **kwargs)
    if reads_batch_count(region, value):
        return 1
    if region.outer_operation is not None:
        refuse_host_computation(region.outer_operation)
    what = f"a {region.describe(value)}"
    for who, instead in _readers():
        refuse(f"{who} reads the number of {what}", _WHY, instead)
    refuse(f"{_host_action(func)} of {what}", _WHY, _INSTEAD)


def _readers() -> Iterator[tuple[str, str]]:
    """Yield what reads a number for the program, the innermost first."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = Path(frame.f_code.co_filename).as_posix()
        yield from ((who, instead) for end, who, instead in _READERS if file.endswith(f"/{end}"))
        if is_users_file(frame.f_code.co_filename):
            return
        frame = frame.f_back


def check_stays_on_device(region: AnyRegion, func: Any, args: tuple[Any, ...], device: Any) -> None:
    """Refuse a copy from the device to another one.

    Raises:
        RuntimeError: it is one.
    """
    if device is not None and torch.device(device).type != "xla":
        value = _first_on_device(args)
        if value is not None:
            refuse(f"{_host_action(func)} of a {region.describe(value)}", _WHY, _INSTEAD)


def refuse_dynamic_shape(region: AnyRegion, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation whose result's shape depends on values, unless its tensor is on the device."""
    if not any_on_device((*args, *kwargs.values())):
        return func(*args, **kwargs)
    value = _first_on_device(args)
    refuse(f"`{_name(func)}` of a {region.describe(value)}", _DYNAMIC, _STATIC)


def refuse_mask(region: AnyRegion, mask: Tensor) -> NoReturn:
    """Refuse ``x[mask]``."""
    refuse(f"Indexing with a mask (a {region.describe(mask)})", _DYNAMIC, _STATIC)


def refuse_host_computation(func: Any) -> NoReturn:
    """Refuse what torch_xla would compute on the host."""
    refuse(
        f"`{_name(func)}` of a tensor on the device",
        "torch_xla has no implementation of it (for these arguments) and would compute it on the host. " + _WHY,
        "Use other operations, or do this outside `run`.",
    )


def refuse_sparse_gradients() -> NoReturn:
    """Refuse ``Embedding(sparse=True)``."""
    refuse("An embedding with `sparse=True`", "XLA has no sparse gradients.", "Use `sparse=False`.")


def refuse_embedding_bag(_region: AnyRegion, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``EmbeddingBag``, unless it is on the device."""
    if not any_on_device(args):
        return func(*args, **kwargs)
    is_sparse = with_defaults(args, 3, (False, 0, False, None, False, -1))[5]
    refuse(
        f"`EmbeddingBag` with a table on the device{' and `sparse=True`' if is_sparse else ''}",
        f"torch_xla has no implementation of it{', and XLA no sparse gradients' if is_sparse else ''}.",
        "Use `nn.Embedding` and take the sum, mean or maximum over each bag's rows, padded to one length.",
    )


def refuse_branching(name: str) -> NoReturn:
    """Refuse ``torch.cond`` and its kin, whose branches are traced by other means."""
    refuse(
        f"`torch.{name}` was called inside `run`",
        "Its functions would be traced apart from the step, where nobody sees which values differ between replicas.",
        "Compute both branches and choose by `torch.where(condition, a, b)`; write loops of a fixed length in Python.",
    )


def _is_logged() -> bool:
    """Say whether a logger formats a message: it would print an error and go on."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users_file(frame.f_code.co_filename):
        if frame.f_code.co_filename == logging.__file__:
            return True
        frame = frame.f_back
    return False


def _describe_symbol(region: AnyRegion, value: Tensor) -> str:
    """Return what stands for a tensor in a log, as tf shows a graph's."""
    return f"<a {region.describe(value)}, {value.dtype}: no number inside `run`>"


def _refuse_printing(region: AnyRegion, value: Tensor) -> NoReturn:
    """Refuse ``print(tensor)``."""
    refuse(f"Printing a {region.describe(value)}", _WHY, _INSTEAD)


def _refuse_cut(name: str) -> NoReturn:
    """Refuse torch_xla's functions that run what was traced so far."""
    refuse(
        f"torch_xla's `{name}` was called inside `run`",
        "It would run half of a step. The strategy runs what was traced when the step ends.",
        "Leave the call out, or make it outside `run`.",
    )


def _refuse_collective(name: str) -> NoReturn:
    """Refuse collectives that know nothing of the replicas."""
    refuse(
        f"The collective `{name}` was called inside `run`",
        "It does not reach the other replicas, whose function this same trace is.",
        "Use `get_replica_context().all_reduce(...)` or `all_gather(...)` instead.",
    )


def refuse_distributed(_region: AnyRegion, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a collective of torch.distributed, unless its tensors are on the device."""
    if not any_on_device((*args, *kwargs.values())):
        return func(*args, **kwargs)
    _refuse_collective(f"torch.distributed: {func.overloadpacket.__name__.rstrip('_')}")


def _first_on_device(values: Any) -> Any:
    for value in values:
        if isinstance(value, Tensor) and is_on_device(value):
            return value
        if isinstance(value, (list, tuple)) and (found := _first_on_device(value)) is not None:
            return found
    return None


def _name(func: Any) -> str:
    return str(func).removesuffix(".default").removeprefix("aten.")


def _host_action(func: Any) -> str:
    if "_local_scalar_dense" in str(func) or "is_nonzero" in str(func):
        return "Reading the number (`.item()`, `float()`, `bool()`, `if`)"
    if "equal" in str(func):
        return "Comparing the values (`torch.equal`)"
    return "Copying to the host (`.cpu()`, `.to()`, `.tolist()`, `print`)"


class _Thread(threading.local):
    region: AnyRegion | None = None


_thread = _Thread()
_lock = threading.Lock()
_num_regions = 0  # of all threads
_originals: list[tuple[Any, str, Any]] = []


def current_region() -> AnyRegion | None:
    """Return what watches the function that this thread traces, ``None`` outside, and while the library works."""
    return _thread.region


@contextlib.contextmanager
def refused_calls(region: AnyRegion) -> Iterator[None]:
    """Refuse these calls in this thread."""
    global _num_regions
    outer, _thread.region = _thread.region, region
    with _lock:
        _num_regions += 1
        if _num_regions == 1:
            _replace()
    try:
        yield
    finally:
        _thread.region = outer
        with _lock:
            _num_regions -= 1
            if not _num_regions:
                _restore()


@contextlib.contextmanager
def allowed_calls() -> Iterator[None]:
    """Allow these calls again in this thread, for the library's own use."""
    outer, _thread.region = _thread.region, None
    try:
        yield
    finally:
        _thread.region = outer


def _replace() -> None:
    printing = torch._tensor_str._str
    _originals.append((torch._tensor_str, "_str", printing))
    torch._tensor_str._str = _unless_on_device(printing)
    for module, name in functions_to_refuse():
        original = getattr(module, name)
        _originals.append((module, name, original))
        setattr(module, name, _unless_traced(original, name))


def _restore() -> None:
    while _originals:
        module, name, original = _originals.pop()
        setattr(module, name, original)


def _unless_on_device(original: Callable[..., str]) -> Callable[..., str]:
    @functools.wraps(original)
    def to_string(value: Any, *args: Any, **kwargs: Any) -> str:
        if _thread.region is not None and value.is_xla:
            if _is_logged():
                return _describe_symbol(_thread.region, value)
            _refuse_printing(_thread.region, value)
        return original(value, *args, **kwargs)

    return to_string


def _unless_traced(original: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _thread.region is None:
            return original(*args, **kwargs)
        return _refuse_cut(name) if name in CUTS else _refuse_collective(f"xm.{name}")

    return call
