"""What hooks are: the points at which a train, evaluate or predict calls them, what they ask for, and what they get.

The names are those of tf, where a session runs a graph. Here a step of the loop stands for a run of the session.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from torchstrategy.base.tree import map_leaves
from torchstrategy.estimator.run_config import RunConfig
from torchstrategy.estimator.warm_start import as_current
from torchstrategy.ps.between_graph import BetweenGraphParameterServerStrategy
from torchstrategy.replicas.variables import Variable

if TYPE_CHECKING:
    from torchstrategy.strategies.strategy import Strategy

__all__ = [
    "CheckpointSaverListener",
    "HookCalls",
    "SessionRunArgs",
    "SessionRunContext",
    "SessionRunHook",
    "SessionRunValues",
    "check_estimator",
    "check_steps",
    "is_asynchronous",
    "resolve_fetches",
    "show_value",
]


def show_value(value: Any) -> str:
    """Return a value as text; floats with the digits that float32 has, which is what they come from.

    Args:
        value: a number, a tensor, an array, or anything else.
    """
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        value = value.float().numpy() if value.dtype is torch.bfloat16 else value.numpy()
    elif isinstance(value, float) and (not math.isfinite(value) or abs(value) <= torch.finfo(torch.float32).max):
        value = np.float32(value)
    with np.printoptions(suppress=True):
        return str(value)


def is_asynchronous(strategy: Strategy) -> bool:
    """Say whether each process of a strategy trains at its own pace with shared variables."""
    return isinstance(strategy, BetweenGraphParameterServerStrategy)


def check_estimator(estimator: Any) -> None:
    """Check that what hooks are made for is an ``Estimator``, by what it has: its class uses hooks itself.

    Raises:
        TypeError: it is not.
    """
    is_estimator = isinstance(getattr(estimator, "config", None), RunConfig) and callable(
        getattr(estimator, "eval_dir", None)
    )
    if not is_estimator:
        raise TypeError(f"`estimator` must have type `ts.estimator.Estimator`. Received: {estimator!r}")


@dataclasses.dataclass(frozen=True)
class SessionRunArgs:
    """What a hook asks for at a step; ``before_run`` returns it.

    Args:
        fetches: a name, a tensor, a function, or any nesting of them in lists, tuples and dicts. Names are ``"loss"``
            (a float, the mean over all replicas), ``"global_step"`` (an int, as it was before the step), ``"outputs"``
            (what the module returned on this process's first replica) and those of the module's parameters and buffers
            (their tensors after the step). Such a tensor itself, or the global step's variable, gives the same. A
            function is called with the session after the step. ``None`` asks for nothing.
        feed_dict: must be ``None``; there are no placeholders to feed.
        options: must be ``None``.

    Raises:
        TypeError: a leaf of ``fetches`` is neither a name nor a tensor or a function.
        ValueError: ``feed_dict`` or ``options`` is given.

    Example:
        >>> ts.estimator.SessionRunArgs({"step": "global_step", "loss": "loss"}).fetches["step"]
        'global_step'
    """

    fetches: Any
    feed_dict: None = None
    options: None = None

    def __post_init__(self) -> None:
        for name in ("feed_dict", "options"):
            if getattr(self, name) is not None:
                raise ValueError(
                    f"SessionRunArgs({name}=...) has no meaning without a graph; leave it None. Received: "
                    f"{getattr(self, name)!r}"
                )
        resolve_fetches(self.fetches, lambda leaf: leaf)


@dataclasses.dataclass(frozen=True)
class SessionRunValues:
    """What a hook gets after a step.

    Args:
        results: the values of the fetches, in the structure of the fetches; ``None`` if the hook asked for nothing.
        options: always ``None``; there for tf's signature.
        run_metadata: always ``None``.
    """

    results: Any
    options: None = None
    run_metadata: None = None


class SessionRunContext:
    """A step as hooks see it: what it belongs to, and the way to ask for the end of the loop.

    Args:
        session: the running train, evaluate or predict.
        original_args: what the loop itself asks for at each step.
    """

    def __init__(self, session: Any, original_args: SessionRunArgs | None = None) -> None:
        self._session = session
        self._original_args = SessionRunArgs(None) if original_args is None else original_args
        self._stop_requested = False

    @property
    def session(self) -> Any:
        """The running train, evaluate or predict."""
        return self._session

    @property
    def original_args(self) -> SessionRunArgs:
        """What the loop itself asks for at each step."""
        return self._original_args

    @property
    def stop_requested(self) -> bool:
        """Whether a hook has asked for the end at this step."""
        return self._stop_requested

    def request_stop(self) -> None:
        """Let the loop end after this step; of processes that step together, all end."""
        self._stop_requested = True
        self._session.request_stop()


class SessionRunHook:
    """Base class of what a train, evaluate or predict calls at certain points.

    Override what you need. Hooks are called in the order in which they were given, on every process, outside
    ``strategy.run``. An exception ends the loop; ``end`` is not called then.

    Example:
        >>> class PrintLoss(ts.estimator.SessionRunHook):
        ...     def before_run(self, run_context):
        ...         return ts.estimator.SessionRunArgs({"step": "global_step", "loss": "loss"})
        ...
        ...     def after_run(self, run_context, run_values):
        ...         print(f"step {run_values.results['step']}: {run_values.results['loss']:.2f}")
    """

    def begin(self) -> None:
        """Is called once, before the model's values are restored."""

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Is called once the model is made and restored.

        Args:
            session: the train, evaluate or predict that begins.
            coord: the same, as what ``should_stop`` and ``request_stop`` belong to.
        """

    def before_run(self, run_context: SessionRunContext) -> SessionRunArgs | None:
        """Is called before each step.

        Args:
            run_context: the step.

        Returns:
            What ``after_run`` shall get; ``None`` for nothing.
        """

    def after_run(self, run_context: SessionRunContext, run_values: SessionRunValues) -> None:
        """Is called after each step.

        Args:
            run_context: the step.
            run_values: what ``before_run`` asked for.
        """

    def end(self, session: Any) -> None:
        """Is called after the last step, unless an exception ended the loop.

        Args:
            session: the train, evaluate or predict that ends.
        """

    def _around_step(self) -> contextlib.AbstractContextManager[Any]:
        """Return what surrounds the step itself, between ``before_run`` and ``after_run`` of all hooks."""
        return contextlib.nullcontext()

    def _release(self) -> None:
        """Give up what the hook holds, such as open files. It is called whatever ended the loop."""


class CheckpointSaverListener:
    """Base class of what is called before and after each checkpoint of a training.

    Give listeners to ``Estimator.train(saving_listeners=...)``. They are called where checkpoints are written.

    Example:
        >>> class PrintStep(ts.estimator.CheckpointSaverListener):
        ...     def after_save(self, session, global_step_value):
        ...         print(f"saved at step {global_step_value}")
    """

    def begin(self) -> None:
        """Is called once, before the first checkpoint."""

    def before_save(self, session: Any, global_step_value: int) -> None:
        """Is called before a checkpoint is written.

        Args:
            session: the training.
            global_step_value: the step that is saved.
        """

    def after_save(self, session: Any, global_step_value: int) -> bool | None:
        """Is called after a checkpoint was written.

        Args:
            session: the training.
            global_step_value: the step that was saved.

        Returns:
            ``True`` to ask for the end of the training.
        """

    def end(self, session: Any, global_step_value: int) -> None:
        """Is called after the last checkpoint.

        Args:
            session: the training.
            global_step_value: the last step.
        """


class HookCalls:
    """Calls hooks around the steps of a loop. As a context manager it lets them give up what they hold.

    Args:
        hooks: the hooks, in the order in which they are called.
        global_step: what ``get_global_step`` returns in them.
    """

    def __init__(self, hooks: Sequence[SessionRunHook], global_step: Variable) -> None:
        self._hooks = list(hooks)
        self._global_step = global_step
        self._around_step = contextlib.ExitStack()

    def __enter__(self) -> HookCalls:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as stack:
            for hook in self._hooks:
                stack.callback(hook._release)
            stack.push(self._around_step)

    def begin(self) -> None:
        """Call ``begin``."""
        with as_current(self._global_step):
            for hook in self._hooks:
                hook.begin()

    def after_create_session(self, session: Any) -> None:
        """Call ``after_create_session``."""
        with as_current(self._global_step):
            for hook in self._hooks:
                hook.after_create_session(session, session)

    def before_run(self, session: Any) -> None:
        """Call ``before_run`` and keep what the hooks ask for.

        Raises:
            TypeError: a hook returned something else than ``SessionRunArgs`` or ``None``.
        """
        self._context = SessionRunContext(session)
        self._requests: list[SessionRunArgs | None] = []
        for hook in self._hooks:
            with as_current(self._global_step):
                request = hook.before_run(self._context)
            if request is not None and not isinstance(request, SessionRunArgs):
                raise TypeError(
                    f"{type(hook).__name__}.before_run must return SessionRunArgs or None. Received: {request!r}"
                )
            self._requests.append(request)
        for hook in self._hooks:
            self._around_step.enter_context(hook._around_step())

    def after_run(self, resolve: Callable[[Any], Any]) -> None:
        """Call ``after_run``.

        Args:
            resolve: gives the value of a fetch: a name, a tensor, or a function of the session.
        """
        self._around_step.close()
        # all are resolved first, so that no hook changes what another one gets
        results = [None if request is None else resolve_fetches(request.fetches, resolve) for request in self._requests]
        with as_current(self._global_step):
            for hook, result in zip(self._hooks, results, strict=True):
                hook.after_run(self._context, SessionRunValues(result))

    def end(self, session: Any) -> None:
        """Call ``end``."""
        with as_current(self._global_step):
            for hook in self._hooks:
                hook.end(session)


def check_steps(**numbers: Any) -> None:
    """Check that numbers of steps are whole ones; ``None`` is none. ``1e5`` is whole.

    Raises:
        ValueError: one is not, such as a quotient, a text, or NaN, which no step would ever reach.
    """
    for name, number in numbers.items():
        try:
            is_whole = number is None or bool(number % 1 == 0)
        except (TypeError, RuntimeError):
            is_whole = False
        if not is_whole:
            raise ValueError(f"{name} must be a whole number of steps. Received: {number!r}")


def resolve_fetches(fetches: Any, resolve: Callable[[Any], Any]) -> Any:
    """Put the value of each fetch in its place.

    Args:
        fetches: a nesting of names, tensors and functions, or ``None``.
        resolve: gives the value of one of them.

    Raises:
        TypeError: a leaf is neither a name nor a tensor or a function.
    """
    if fetches is None:
        return None

    def resolve_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, (str, Tensor)) and not callable(leaf):
            raise TypeError(
                "A fetch must be a name, such as 'loss', 'global_step' or that of a parameter, a tensor, a function of "
                f"the session, or lists, tuples and dicts of these. Received: {leaf!r}"
            )
        return resolve(leaf)

    return map_leaves(resolve_leaf, fetches)
