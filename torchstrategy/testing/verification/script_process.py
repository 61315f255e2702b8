"""One process of a verified script: what it is told, and the run of the script with everything recorded."""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import functools
import io
import json
import os
import random
import sys
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

from torchstrategy.base.context import current_replica_context
from torchstrategy.base.devices import cpu_replicas
from torchstrategy.gradients import hooks
from torchstrategy.strategies.strategy import Strategy
from torchstrategy.testing.verification.deviations import Run, dump
from torchstrategy.testing.verification.script_launch import KeptFiles
from torchstrategy.testing.verification.script_recorder import EnoughSteps, ScriptRecorder, Setup

__all__ = ["EXITED", "ScriptRun", "main", "record_path", "run_script"]

EXITED = "SystemExit"  # what the error of a program begins with that ended itself
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_OF_SAMPLERS = ("torch.utils.data.", "accelerate.", "lightning_fabric.", "lightning.")
_OTHERS_S = 20.0
#: Programs and their process groups are never torn down: gloo joins its threads then with Python's lock held, which a
#: thread may wait for that lets go of a collective.
_kept: list[Any] = []


@dataclasses.dataclass
class ScriptRun(Run):
    """A run of a script.

    ``strategies`` has the classes of the strategies that it made, ``world_size`` the number of processes that it
    brought together by ``torch.distributed``, and ``is_cut`` says whether it was ended after the steps to record.
    """

    strategies: list[str] = dataclasses.field(default_factory=list)
    world_size: int = 0
    is_cut: bool = False


def record_path(folder: str, rank: int) -> Path:
    """Return the file that a process's record goes to."""
    return Path(folder) / f"rank{rank}.pt"


def main(path: str) -> NoReturn:
    """Run a script as a file of settings says.

    Args:
        path: the file, with the fields of ``Setup`` as JSON.

    The process ends with exit status 0, or 1 if the program failed.
    """
    setup = Setup(**json.loads(Path(path).read_text(encoding="utf-8")))
    files = KeptFiles(setup.folder).watching()
    files.__enter__()  # to the process's end: the program's threads may write until then
    _kept.append(files)
    run = run_script(setup)
    _wait_for_others(setup)  # which may take it for a failure that this process is gone
    sys.stderr.flush()
    os._exit(0 if run.error is None else 1)  # see _kept


def run_script(setup: Setup) -> ScriptRun:
    """Run a script in this process, and write its record to ``record_path``.

    Args:
        setup: what to run, and how.

    Returns:
        The record.
    """
    run = ScriptRun(setup.size * setup.replicas, setup.size)
    printed = io.StringIO()
    recorder = ScriptRecorder(
        setup.rank, setup.max_steps, setup.max_bytes, lambda: _end_early(run, recorder, setup, printed)
    )
    hooks.install(recorder)  # sums come before what is recorded of a step
    with contextlib.ExitStack() as stack:
        _surround(stack, setup, run, printed)
        stack.enter_context(recorder.recording())
        if "shuffling" in setup.without:  # outermost, so that it sees who calls
            _put(stack, torch, "randperm", _in_order_for_samplers(torch.randperm))
        try:
            _execute(stack, setup.script)
        except EnoughSteps:
            return run
        except SystemExit as error:
            if error.code not in (None, 0):
                run.error = f"{EXITED}: {error.code}"
        except BaseException as error:  # noqa: BLE001 - what the program raises is a result
            trace = _of_program(error.__traceback__)
            run.error = "".join(traceback.format_exception(type(error), error, trace))
        recorder.finish()
        _write(run, recorder, setup, printed)
    return run


def _end_early(run: ScriptRun, recorder: ScriptRecorder, setup: Setup, printed: io.StringIO) -> None:
    """Write the record, and end only when the others have theirs: they may need this process until then."""
    run.is_cut = True
    _write(run, recorder, setup, printed)
    _wait_for_others(setup)


def _execute(stack: contextlib.ExitStack, script: str) -> None:
    """Run a file as ``python`` does."""
    module = types.ModuleType("__main__")
    module.__file__ = script
    module.__builtins__ = builtins  # type: ignore[attr-defined]
    _kept.append(module)
    stack.callback(sys.modules.__setitem__, "__main__", sys.modules["__main__"])
    sys.modules["__main__"] = module
    with io.open_code(os.path.abspath(script)) as file:
        code = compile(file.read(), script, "exec")
    exec(code, module.__dict__)


def _wait_for_others(setup: Setup) -> None:
    deadline = time.monotonic() + _OTHERS_S
    while time.monotonic() < deadline:
        if all(record_path(setup.folder, rank).exists() for rank in range(setup.size)):
            return
        time.sleep(0.02)


def _write(run: ScriptRun, recorder: ScriptRecorder, setup: Setup, printed: io.StringIO) -> None:
    run.replicas = recorder.replicas
    run.is_single_precision = recorder.is_single_precision
    run.known = recorder.known
    run.printed = printed.getvalue()
    path = record_path(setup.folder, setup.rank)
    unfinished = path.with_suffix(".part")
    unfinished.write_bytes(dump(run))
    unfinished.rename(path)


def _surround(stack: contextlib.ExitStack, setup: Setup, run: ScriptRun, printed: io.StringIO) -> None:
    """Make the process what the setup says, until the stack is closed."""
    stack.enter_context(cpu_replicas(setup.replicas))
    stack.enter_context(contextlib.redirect_stdout(printed))
    _put(stack, sys, "argv", [setup.script, *setup.arguments])
    _put(stack, sys, "path", [os.path.dirname(os.path.realpath(setup.script)), *sys.path])
    stack.callback(torch.set_default_dtype, torch.get_default_dtype())
    torch.set_default_dtype(getattr(torch, setup.dtype))
    _seed(setup.rank)
    _note_strategies(stack, run)
    _note_processes(stack, run)
    if setup.batch_factor > 1:
        _enlarge_batches(stack, setup.batch_factor)
    if setup.assumed_replicas is not None:
        _assume_replicas(stack, setup.assumed_replicas)
    if "dropout" in setup.without:
        for name in _DROPOUTS:
            _put(stack, nn.functional, name, _no_dropout)


def _put(stack: contextlib.ExitStack, owner: Any, name: str, value: Any) -> None:
    stack.callback(setattr, owner, name, getattr(owner, name))
    setattr(owner, name, value)


def _seed(rank: int) -> None:
    """Make a program without seeds repeat itself; its processes draw different numbers, as they would."""
    torch.manual_seed(rank)
    random.seed(rank)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(rank)


def _note_strategies(stack: contextlib.ExitStack, run: ScriptRun) -> None:
    construct = Strategy.__init__

    @functools.wraps(construct)
    def __init__(strategy: Strategy, *args: Any, **kwargs: Any) -> None:
        construct(strategy, *args, **kwargs)
        ours = (cls.__name__ for cls in type(strategy).__mro__ if cls.__module__.startswith("torchstrategy."))
        run.strategies.append(next(ours))

    _put(stack, Strategy, "__init__", __init__)


def _note_processes(stack: contextlib.ExitStack, run: ScriptRun) -> None:
    begin = dist.init_process_group

    @functools.wraps(begin)
    def init_process_group(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        begin(_on_cpu(backend), *args, **kwargs)
        run.world_size = dist.get_world_size()
        _kept.append(dist.group.WORLD)

    make = dist.new_group

    @functools.wraps(make)
    def new_group(*args: Any, **kwargs: Any) -> Any:
        if "backend" in kwargs:
            kwargs["backend"] = _on_cpu(kwargs["backend"])
        group = make(*args, **kwargs)
        _kept.append(group)
        return group

    for module in (dist, dist.distributed_c10d):
        _put(stack, module, "init_process_group", init_process_group)
        _put(stack, module, "new_group", new_group)


def _on_cpu(backend: str | None) -> str | None:
    return "gloo" if backend and "nccl" in backend else backend  # GPUs are hidden


def _enlarge_batches(stack: contextlib.ExitStack, factor: int) -> None:
    construct = DataLoader.__init__
    known: set[tuple[int, int]] = set()  # a loader that is made from another one has its size already
    kept = []

    @functools.wraps(construct)
    def __init__(loader: Any, dataset: Any, batch_size: Any = 1, *args: Any, **kwargs: Any) -> None:
        if batch_size is not None and kwargs.get("batch_sampler") is None and (id(dataset), batch_size) not in known:
            batch_size *= factor
            known.add((id(dataset), batch_size))
            kept.append(dataset)
        construct(loader, dataset, batch_size, *args, **kwargs)

    _put(stack, DataLoader, "__init__", __init__)


def _assume_replicas(stack: contextlib.ExitStack, number: int) -> None:
    real = Strategy.num_replicas_in_sync

    def num_replicas_in_sync(strategy: Strategy) -> int:
        caller = sys._getframe(1).f_globals.get("__name__", "")
        is_ours = caller.partition(".")[0] == "torchstrategy"
        own: int = real.__get__(strategy)
        return own if is_ours or current_replica_context() is not None else number

    _put(stack, Strategy, "num_replicas_in_sync", property(num_replicas_in_sync))


def _in_order_for_samplers(draw: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(draw)
    def randperm(n: int, *args: Any, **kwargs: Any) -> Any:
        is_sampler = sys._getframe(1).f_globals.get("__name__", "").startswith(_OF_SAMPLERS)
        return torch.arange(n) if is_sampler else draw(n, *args, **kwargs)

    return randperm


def _no_dropout(input: Any, *_: Any, **__: Any) -> Any:
    return input


def _of_program(trace: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback that begins in the program."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace
