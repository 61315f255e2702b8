"""``ts.function``: runs a Python function as it is written, and compiles the modules that it calls.

``nn.Module.__call__`` looks at the attribute ``_compiled_call_impl``. The class attribute becomes a descriptor, which
gives the outermost modules that are called inside a ``ts.function`` a switch between plain and compiled calls.

A step function runs as it is written; what is compiled are the modules that it calls, because the function itself is
full of what no tracer understands: the meeting of replicas, the loop over data, logging. Other ways to the modules
were worse: global hooks recompile what the user has compiled, and finding modules in closures misses what is reached
through attributes.

On a CPU nothing is compiled unless ``jit_compile=True``: the tutorial's conv net took 16 to 77 seconds to compile on
two cores and ran no faster afterwards. Modules of equal structure, such as the replicas' copies, share one compiled
function. Empty batches run as they are, because torch compiles a size of 0 for itself.
"""

from __future__ import annotations

import contextlib
import functools
import types
import warnings
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple, ParamSpec, TypeVar, overload

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_hooks

from torchstrategy import patches
from torchstrategy.base import tree
from torchstrategy.base.context import current_replica_context
from torchstrategy.base.devices import kind_of, visible_devices
from torchstrategy.base.log import add_note, info_once, logger
from torchstrategy.replicas.adapters import is_a
from torchstrategy.replicas.module_tensors import buffers_read
from torchstrategy.replicas.object_hooks import HooksWithin
from torchstrategy.xla import runtime, system

__all__ = ["function", "functions_run_eagerly", "run_functions_eagerly"]

P = ParamSpec("P")
R = TypeVar("R")

_runs_eagerly = False
#: The running function; ``None`` inside the modules that it calls. Threads of replicas inherit it.
_current_call: ContextVar[_Call | None] = ContextVar("torchstrategy_function_call", default=None)
_switches: weakref.WeakKeyDictionary[nn.Module, _Switch] = weakref.WeakKeyDictionary()
_compiled: dict[Any, _CompiledForward] = {}


@overload
def function(
    func: Callable[P, R],
    input_signature: Any = ...,
    autograph: bool = ...,  # noqa: FBT001 - tf's signature
    jit_compile: bool | None = ...,  # noqa: FBT001
    reduce_retracing: bool = ...,  # noqa: FBT001
    *,
    backend: str | Callable[..., Any] = ...,
) -> Callable[P, R]: ...


@overload
def function(
    func: None = ...,
    input_signature: Any = ...,
    autograph: bool = ...,  # noqa: FBT001 - tf's signature
    jit_compile: bool | None = ...,  # noqa: FBT001
    reduce_retracing: bool = ...,  # noqa: FBT001
    *,
    backend: str | Callable[..., Any] = ...,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...


def function(
    func: Callable[..., Any] | None = None,
    input_signature: Any = None,
    autograph: bool = True,  # noqa: FBT001, FBT002 - tf's signature
    jit_compile: bool | None = None,  # noqa: FBT001
    reduce_retracing: bool = False,  # noqa: FBT001, FBT002
    *,
    backend: str | Callable[..., Any] = "inductor",
) -> Any:
    """Return the function, in whose calls modules are compiled by ``torch.compile``. Either context; also a decorator.

    The function's own Python code runs as it is written, in every call, so there is nothing to trace and no need to
    write it for a tracer. A module that is called in it, or in a function that it gives to ``strategy.run``, runs as it
    is in the first step and is compiled from the second one on. One that can't be compiled runs as it is, and a line in
    the log says so; so do modules whose gradients are differentiated again, calls with an empty batch, and all modules
    while there are global module hooks. Random layers draw other numbers when they are compiled.

    Args:
        func: any callable; ``None`` returns a decorator.
        input_signature: without meaning here; accepted for programs written for tf.
        autograph: without meaning here, too.
        jit_compile: ``True`` compiles on every device and raises if that fails, ``False`` never compiles. ``None``
            compiles modules that are on a GPU, and inside another ``ts.function`` means what that one says. On a CPU
            compiling takes longer than most programs gain.
        reduce_retracing: compile for any batch size at once, not for the first one before the others.
        backend: ``torch.compile``'s.

    Returns:
        A function with the same name, signature and documentation; ``python_function`` is the given one.

    Raises:
        TypeError: ``func`` is not callable, or ``jit_compile`` is neither a bool nor ``None``.

    Example:
        >>> @ts.function
        ... def total(values):
        ...     result = 0.0
        ...     for value in values:
        ...         result += value
        ...     return result
        >>> total([1.0, 2.0])
        3.0
    """
    if jit_compile is not None and not isinstance(jit_compile, bool):
        raise TypeError(f"jit_compile must be True, False or None. Received: {jit_compile!r}")
    if func is None:
        return functools.partial(
            function,
            input_signature=input_signature,
            autograph=autograph,
            jit_compile=jit_compile,
            reduce_retracing=reduce_retracing,
            backend=backend,
        )
    if not callable(func):
        raise TypeError(f"ts.function needs a callable. Received: {func!r}")
    how = _How(jit_compile, True if reduce_retracing else None, backend)
    plain = func

    @functools.wraps(plain, updated=())
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return _call(plain, how, args, kwargs)  # nothing else: it can be pickled, to be sent to workers

    wrapper.python_function = plain  # type: ignore[attr-defined]
    return wrapper


def run_functions_eagerly(run_eagerly: bool) -> None:  # noqa: FBT001 - tf's signature
    """Let every ``ts.function`` run its modules as they are, or compile them again.

    Args:
        run_eagerly: whether modules run as they are.

    Raises:
        TypeError: it is neither ``True`` nor ``False``.

    Example:
        >>> ts.config.run_functions_eagerly(True)
        >>> ts.config.functions_run_eagerly()
        True
        >>> ts.config.run_functions_eagerly(False)
    """
    global _runs_eagerly
    if not isinstance(run_eagerly, bool):
        raise TypeError(f"run_eagerly must be True or False. Received: {run_eagerly!r}")
    _runs_eagerly = run_eagerly


def functions_run_eagerly() -> bool:
    """Say whether ``run_functions_eagerly(True)`` holds.

    Returns:
        ``True`` if no ``ts.function`` compiles.

    Example:
        >>> ts.config.functions_run_eagerly()
        False
    """
    return _runs_eagerly


class _How(NamedTuple):
    """How a function compiles what it calls."""

    jit_compile: bool | None
    dynamic: bool | None
    backend: str | Callable[..., Any]


class _Call:
    """A running call of a function that may compile."""

    def __init__(self, how: _How) -> None:
        self.how = how


class _CompiledForward:
    """``forward`` of a module and of others like it, such as the other replicas', with the same hooks within."""

    def __init__(self, how: _How, hooks: tuple[int, ...]) -> None:
        self.hooks, self.failed = hooks, False
        # A code object of its own, because torch counts recompilations, of which it allows 8, by code object.
        forward = types.FunctionType(_forward.__code__.replace(), globals())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler uses names that torch itself has deprecated
            self.call = torch.compile(forward, backend=how.backend, dynamic=how.dynamic)


def _forward(module: Any, args: Any, kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


class _Finder:
    """What ``nn.Module._compiled_call_impl`` becomes: ``None``, as before, for all but the outermost modules."""

    def __get__(self, module: nn.Module | None, owner: Any = None) -> Callable[..., Any] | None:
        call = _current_call.get()
        if module is None or call is None:
            return None
        switch = _switches.get(module)
        if switch is None and next(module.parameters(), None) is not None:
            switch = _switches[module] = _Switch(module, call)
            _finding.use(module)
        return switch


def _find_modules() -> list[Callable[[], None]]:
    torch._dynamo.eval_frame.skip_code(_Finder.__get__.__code__)
    why, until = "ts.function compiles the modules that it calls", "no module that one has called is left"
    return [patches.replace(nn.Module, "_compiled_call_impl", _Finder(), why, until)]


#: During calls, and for the modules that were called: a class that changed in each call would make Python look up the
#: attributes of all modules anew.
_finding = patches.WhileUsed(_find_modules)


class _Switch:
    """Stands between a module's ``__call__`` and its hooks and ``forward``; made in the function call that met it."""

    def __init__(self, module: nn.Module, first_call: _Call) -> None:
        self._module = weakref.ref(module)
        self._name = type(module).__name__
        self._first_call: _Call | None = first_call
        self._was_called = self._was_trained = False
        self._hooks = HooksWithin()
        # What computes little, was compiled or compiles itself is left alone.
        self._stays_plain = (
            isinstance(module, torch.jit.ScriptModule)
            or is_a(module, "torchmetrics.metric.Metric")
            or hasattr(module, "_torchdynamo_orig_callable")  # what torch.compile(module) returns
        )
        self._forwards: dict[_How, _CompiledForward] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module()
        call = _current_call.get()
        if call is None:
            return module._call_impl(*args, **kwargs)
        token = _current_call.set(None)
        try:
            # `forward` may be put on the object at any time; _forward would call its class's.
            is_plain = self._stays_plain or "forward" in module.__dict__
            if is_plain or not self._compiles_on(module, call.how) or _must_run_plain(args, kwargs):
                return module._call_impl(*args, **kwargs)
            if self._is_first_step(call):
                return self._call_first(module, args, kwargs)
            return self._call_compiled(module, call.how, args, kwargs)
        finally:
            _current_call.reset(token)

    def _compiles_on(self, module: nn.Module, how: _How) -> bool:
        if how.jit_compile:
            return True
        device = next((parameter.device.type for parameter in module.parameters()), None)
        if device is not None and kind_of(device).is_compiled:
            return True
        info_once(f"{self._name} on {device} is not compiled. ts.function(jit_compile=True) compiles it there.")
        return False

    def _is_first_step(self, call: _Call) -> bool:
        """Say whether a module may yet get its parameters, or turn out to have gradients that are differentiated."""
        trains = torch.is_grad_enabled()
        was_called = self._was_trained if trains else self._was_called
        self._was_called, self._was_trained = True, self._was_trained or trains
        if self._first_call is not call:
            self._first_call = None
        return not was_called or (self._first_call is not None and trains)

    def _call_first(self, module: Any, args: Any, kwargs: Any) -> Any:
        before = [(buffer, buffer._version) for buffer in buffers_read(module)] if torch.is_grad_enabled() else []
        result = module._call_impl(*args, **kwargs)
        if any(buffer._version != version for buffer, version in before):
            # Its compiled backward pass may compute parts of the forward pass again, from what they hold by then.
            self._stay_plain("it writes to buffers in place")
        for leaf in tree.all_leaves(result):
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(self._look_at_gradient)  # type: ignore[no-untyped-call]
        return result

    def _stay_plain(self, why: str) -> None:
        self._stays_plain = True
        logger.info("%s runs as it is, because %s.", self._name, why)

    def _look_at_gradient(self, gradient: Tensor) -> None:  # noqa: ARG002 - torch's signature
        self._first_call = None
        if torch.is_grad_enabled() and not self._stays_plain:  # create_graph=True, which compiled modules can't do
            self._stay_plain("its gradients are differentiated")

    def _call_compiled(self, module: Any, how: _How, args: Any, kwargs: Any) -> Any:
        hooks = self._hooks.look(module)
        forward = self._forwards.get(how)
        if forward is None:
            forward = self._forwards[how] = _compiled_forward(module, how, hooks)
        if forward.hooks != hooks:
            info_once(f"{self._name} runs as it is while hooks within it are others than when it was compiled.")
        if forward.hooks != hooks or forward.failed:
            return module._call_impl(*args, **kwargs)
        try:
            return _call_with_hooks(module, forward, args, kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            failure = error
        result = module._call_impl(*args, **kwargs)  # if the error is the user's own, this raises it unwrapped
        text = str(failure).split("\n\nSet TORCHDYNAMO_VERBOSE")[0].split("\n\nfrom user code")[0]
        reason = f"{type(failure).__name__}: {' '.join(text.split())}"
        if how.jit_compile:
            raise RuntimeError(f"jit_compile=True, but {self._name} can't be compiled: {reason}") from failure
        forward.failed = True
        logger.warning(
            "%s can't be compiled and runs as it is. ts.function(jit_compile=False) doesn't try. %s", self._name, reason
        )
        return result


def _call(func: Callable[..., Any], how: _How, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    token = _current_call.set(_start(how))
    in_graph = contextlib.nullcontext() if current_replica_context() is not None else runtime.one_graph()
    try:
        with in_graph:
            return func(*args, **kwargs)
    except RuntimeError as error:
        _explain(error)
        raise
    finally:
        _current_call.reset(token)


def _start(how: _How) -> _Call | None:
    """Return a call that compiles, or ``None`` where nothing is to be compiled."""
    if _runs_eagerly:
        return None
    outer = _current_call.get()
    if how.jit_compile is None and outer is not None:
        return outer
    if how.jit_compile is not False and system.current() is not None:
        return None  # XLA compiles what is traced here
    if how.jit_compile is None and not any(kind_of(name.split(":")[0]).is_compiled for name in visible_devices()):
        info_once("No GPU here: a ts.function runs as it is. ts.function(jit_compile=True) compiles for the CPU.")
        return None
    if how.jit_compile is False:
        return None
    call = _Call(how)
    _finding.use(call)
    return call


def _must_run_plain(args: Any, kwargs: Any) -> bool:
    if torch.compiler.is_compiling() or torch_hooks._has_any_global_hook():  # type: ignore[no-untyped-call]
        return True
    # An empty batch would be compiled for itself, as torch compiles sizes 0 and 1, to compute nothing.
    return any(isinstance(leaf, Tensor) and leaf.numel() == 0 for leaf in tree.all_leaves((args, kwargs)))


def _compiled_forward(module: nn.Module, how: _How, hooks: tuple[int, ...]) -> _CompiledForward:
    modules = tuple((name, type(child)) for name, child in module.named_modules())
    tensors = [*module.named_parameters(), *module.named_buffers()]
    kinds = tuple((name, tuple(t.shape), t.dtype, t.device, t.requires_grad) for name, t in tensors)
    key = (how, hooks, modules, kinds)
    if key not in _compiled:
        info_once(
            f"Compiling {type(module).__name__}: its next calls take longer. To do without: "
            "ts.config.run_functions_eagerly(True) or ts.function(jit_compile=False)."
        )
        _compiled[key] = _CompiledForward(how, hooks)
    return _compiled[key]


def _call_with_hooks(module: Any, forward: _CompiledForward, args: Any, kwargs: Any) -> Any:
    """Run a module's hooks around the compiled ``forward``, as they run around the plain one."""
    if not (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks):
        return forward.call(module, args, kwargs)
    state = module.__dict__
    state["forward"] = lambda *a, **k: forward.call(module, a, k)
    try:
        return module._call_impl(*args, **kwargs)
    finally:
        state.pop("forward", None)


def _explain(error: RuntimeError) -> None:
    """Say in an error of the compiler that comes out of the function how to do without."""
    if "torch.compile" in str(error) and not getattr(error, "__notes__", None):
        add_note(error, "ts.function(jit_compile=False) runs the modules as they are, without torch.compile.")
