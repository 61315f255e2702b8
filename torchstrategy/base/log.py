"""The library's logger: prefixed with the process's rank, silent on ranks other than the chief below WARNING.

And the line of the user's program that a message is about.

Importing installs nothing. The first strategy gives the logger a handler if neither it nor the root logger has one,
so that the INFO lines of the tf guides appear without a logging set-up.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import opcode
import os
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple, TypeVar

from torch._compile import _disable_dynamo

__all__ = [
    "CallSite",
    "add_note",
    "call_site",
    "guard_lines",
    "hide_own_frames",
    "hides_own_frames",
    "info_once",
    "is_of_library",
    "is_raised_by_all",
    "is_users_file",
    "line_of_program",
    "log_apart",
    "logger",
    "name_error",
    "note_replica",
    "raised_by_all",
    "set_rank",
    "show_info",
    "show_uncaught",
    "shows_all_frames",
    "users_frame",
    "warn_once",
    "warn_once_at",
    "warning_once",
    "without_compiler",
]

#: Not those of a program in another folder called torch.
_PACKAGE, _TORCH, _STDLIB = (
    os.path.join(folder, "")
    for folder in (Path(__file__).parents[1], Path(str(find_spec("torch").origin)).parent, Path(os.__file__).parent)  # type: ignore[union-attr]
)
_Error = TypeVar("_Error", bound=Exception)
_Function = TypeVar("_Function", bound=Callable[..., Any])


class CallSite(NamedTuple):
    """A line of the user's program: the file's path, the number and the function."""

    path: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{Path(self.path).name}:{self.line} ({self.function})" if self.path else "unknown call site"


def call_site() -> str:
    """Return ``file:line (function)`` of the innermost frame outside this library and torch."""
    return str(users_frame())


def users_frame() -> CallSite:
    """Return the innermost frame outside this library and torch, and of no progress bar around a dataset."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users_file(frame.f_code.co_filename) and not _is_bar(frame.f_code):
            return CallSite(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
        frame = frame.f_back
    return CallSite("", 0, "")


def _is_bar(code: CodeType) -> bool:
    """Say whether a call is a generator of an installed package, such as tqdm's, with which the chief may be alone."""
    return bool(code.co_flags & inspect.CO_GENERATOR) and "-packages" in code.co_filename


@functools.lru_cache(maxsize=1024)
def is_users_file(file: str) -> bool:
    """Say whether a file is the user's, and not of this library, of torch or of ``logging``, or generated code."""
    return not is_of_library(file) and file != logging.__file__


def is_of_library(file: str) -> bool:
    """Say whether a file is of this library or of torch, or generated code."""
    return file.startswith((_PACKAGE, _TORCH, "<"))


def shows_all_frames() -> bool:
    """Say whether ``TORCHSTRATEGY_FULL_TRACEBACK`` asks for tracebacks with all calls."""
    return os.environ.get("TORCHSTRATEGY_FULL_TRACEBACK", "0") != "0"


def show_uncaught(
    hook: Callable[..., Any], kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Give an uncaught error to a hook; what Python's would print goes out in one piece, as ranks share a terminal.

    The library's calls are left out of an interruption's traceback.
    """
    if isinstance(error, KeyboardInterrupt):
        hide_own_frames(error)
        trace = error.__traceback__
    if hook is not sys.__excepthook__ or sys.stderr is None:
        hook(kind, error, trace)
        return
    sys.stderr.write("".join(traceback.format_exception(kind, error, trace)))
    sys.stderr.flush()


def raised_by_all(error: _Error) -> _Error:
    """Return an error that every rank raises, because all see the same difference: one of them shows its calls."""
    error.__dict__["_is_raised_by_all"] = True
    return error


def is_raised_by_all(error: BaseException) -> bool:
    """Say whether an error is one of ``raised_by_all``."""
    return "_is_raised_by_all" in error.__dict__


def name_error(error: BaseException) -> str:
    """Return an error's class and what it says, which may fail where the class is the program's."""
    try:
        text = str(error)
    except Exception:  # noqa: BLE001 - the error itself is what is to be told
        text = "<its message can't be read>"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def line_of_program(trace: TracebackType | None) -> str:
    """Return the last line of the program in a traceback, as ``train.py:12 in step``; empty if there is none."""
    lines = [f for f in traceback.extract_tb(trace) if is_users_file(f.filename)]
    return f"{lines[-1].filename}:{lines[-1].lineno} in {lines[-1].name}" if lines else ""


def hide_own_frames(error: BaseException) -> None:
    """Leave the library's calls out of the traceback of an error that was caught to be raised again.

    Those are its calls between calls of the program, and before torch's where torch has raised the error. What follows
    the program's last line goes altogether where the library has raised an error of its own, which says all that there
    is to say, and at an interruption. It stays where something else failed in the library, which may be its fault.
    ``TORCHSTRATEGY_FULL_TRACEBACK=1`` keeps all, and so does Python 3.10.
    """
    if shows_all_frames():
        return
    for each in _chain(error):
        entries = []
        entry = each.__traceback__
        while entry is not None:
            entries.append(entry)
            entry = entry.tb_next
        each.__traceback__ = None
        for entry in reversed(_shown(each, entries)):
            each.__traceback__ = TracebackType(each.__traceback__, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)


def hides_own_frames(function: _Function) -> _Function:
    """Decorate what programs call: ``hide_own_frames`` for each error that leaves it."""

    @functools.wraps(function)
    def entered(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (Exception, KeyboardInterrupt) as error:
            hide_own_frames(error)
            raise

    return entered  # type: ignore[return-value]


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that Python shows before it."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


def _shown(error: BaseException, entries: list[TracebackType]) -> list[TracebackType]:
    """Return which entries of a traceback are shown."""
    if not entries:
        return entries
    files = [entry.tb_frame.f_code.co_filename for entry in entries]
    first = 1 + max((i for i, file in enumerate(files) if _is_programs(file)), default=-1)
    between, is_own = [], False
    for entry, file in zip(entries[:first], files, strict=False):
        is_own = file.startswith(_PACKAGE) or (is_own and _is_pythons(file))  # what the library calls of Python's
        if not is_own:
            between.append(entry)
    after = list(zip(entries[first:], files[first:], strict=True))
    if isinstance(error, KeyboardInterrupt):
        is_own = any(file.startswith(_PACKAGE) for _, file in after)
    else:
        is_own = hasattr(error, _CUT) or (files[-1].startswith(_PACKAGE) and _raises(entries[-1]))
    if is_own:
        setattr(error, _CUT, True)
        return between
    keeps_all = not files[-1].startswith(_TORCH)
    return between + [entry for entry, file in after if keeps_all or not file.startswith(_PACKAGE)]


#: Attribute of an error whose traceback ends with a call of the library, not where it was raised.
_CUT = "_torchstrategy_cut"


def _raises(entry: TracebackType) -> bool:
    """Say whether an entry is a statement ``raise``."""
    return entry.tb_frame.f_code.co_code[entry.tb_lasti] == opcode.opmap["RAISE_VARARGS"]


def _is_programs(file: str) -> bool:
    """Say whether a file is of the program or of a package that it uses, and not Python's, torch's or the library's."""
    if file.startswith("<"):  # what was typed is the program's
        return not file.startswith(("<frozen", "<eval_with_key"))
    return is_users_file(file) and not _is_pythons(file)


def _is_pythons(file: str) -> bool:
    """Say whether a file is of Python's own library."""
    return file.startswith(_STDLIB) and "-packages" not in file


logger = logging.getLogger("torchstrategy")

_said: set[str] = set()
_said_of: weakref.WeakKeyDictionary[object, set[str]] = weakref.WeakKeyDictionary()
_said_lock = threading.Lock()
_guard: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext


class _RankFormatter(logging.Formatter):
    rank: int | None = None

    def format(self, record: logging.LogRecord) -> str:
        rank = "" if self.rank is None else f"[rank {self.rank}] "
        return f"{record.levelname}:torchstrategy:{rank}{record.getMessage()}"


class _StderrHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to the ``sys.stderr`` of the moment, as redirections and notebooks expect."""

    @property
    def stream(self) -> object:
        return sys.stderr

    @stream.setter
    def stream(self, value: object) -> None:
        pass

    def emit(self, record: logging.LogRecord) -> None:
        with _guard():
            super().emit(record)


def guard_lines(guard: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
    """Enter what a function returns around each line, such as one that takes progress bars out of its way."""
    global _guard
    _guard = guard


def show_info() -> None:
    """Let INFO lines through unless the user has configured logging."""
    if logger.handlers or logging.getLogger().handlers:
        return
    handler = _StderrHandler()
    handler.setFormatter(_RankFormatter())
    logger.addHandler(handler)
    logger.propagate = False
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)


def set_rank(rank: int) -> None:
    """Prefix lines with the rank; ranks other than 0 say warnings and errors only."""
    _RankFormatter.rank = rank
    if rank != 0 and logger.level in (logging.NOTSET, logging.INFO):
        logger.setLevel(logging.WARNING)


def info_once(message: str) -> None:
    """Log a line the first time this process says it."""
    if _is_new(message, None):
        logger.info(message)


def warning_once(message: str) -> None:
    """Log a line at level WARNING the first time this process says it: a program may well mean what it does."""
    if _is_new(message, None):
        logger.warning(message)


def log_apart(log: Callable[..., None], *message: Any) -> None:
    """Log in a thread of the library's, which an error of the program's own handler must not end."""
    with contextlib.suppress(Exception):
        log(*message)


def add_note(error: BaseException, note: str) -> None:
    """Add a line to an error; before Python 3.11, whose tracebacks don't show notes, to the log as well."""
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        error.__notes__ = [*getattr(error, "__notes__", ()), note]
        logger.info(note)  # the program may catch the error


def note_replica(error: BaseException, name: str) -> None:
    """Say in an error which replica raised it, and what a dict by parameter has to do with that."""
    add_note(error, f"Raised by {name}.")
    if isinstance(error, KeyError) and any(hasattr(key, "requires_grad") for key in error.args):
        add_note(
            error,
            "A dict by parameter that was made outside `run` has those of replica 0. Key it by names, of "
            "`model.named_parameters()`, or keep it in an attribute of the module or optimizer, of which each replica "
            "has one.",
        )


def warn_once(message: str, stacklevel: int = 3, *, of: object = None) -> None:
    """Issue a ``UserWarning`` the first time it is said.

    Args:
        message: the text.
        stacklevel: as that of ``warnings.warn``.
        of: what it is said of, such as a strategy: it is said once of each; ``None`` means once in this process.
    """
    if _is_new(message, of):
        warnings.warn(message, UserWarning, stacklevel=stacklevel)


def warn_once_at(site: Any, message: str, *, of: object) -> None:
    """Issue a ``UserWarning`` about a line of the program that was called before.

    Args:
        site: the line, with ``path`` and ``line``.
        message: the text.
        of: what it is said of; it is said once of each, and once in this process of ``None``.
    """
    if _is_new(message, of):
        warnings.warn_explicit(message, UserWarning, site.path, site.line)


@_disable_dynamo  # torch.compiler.disable would import the compiler here
def without_compiler(method: Callable[..., Any], *args: Any) -> Any:
    """Call a method in a function that ``torch.compile`` traces: what it would trace next is the library."""
    info_once(
        "torch.compile met a call of a strategy or of its dataset, which runs as it is, and so does what it calls. "
        "Compile the model instead, in the scope (`model.compile()`), or decorate the function with ts.function."
    )
    return method(*args)


def _is_new(message: str, of: object) -> bool:
    """Say whether a message is said for the first time of something."""
    with _said_lock:  # replicas may run at the same time
        said = _said if of is None else _said_of.setdefault(of, set())
        is_new = message not in said
        said.add(message)
    return is_new
