"""Everything that the library does to torch and to Python, and when it ends.

Nothing here is done by an import, except that the sources which torch's import leaves in ``linecache`` are dropped.

constructors of modules, optimizers, schedulers, gradient scalers; copying them
    A scope records what is made in it, also by copies and by unpickling. Until the last scope is left.
constructors of optimizers and schedulers
    What is made outside a scope for what was made inside is taken up. Until no strategy with several replicas is left
    that had a scope: ``strategy.replicate`` needs none.
torch's global optimizer step hooks; ``GradScaler.unscale_``, ``GradScaler.step``
    Gradients are summed at ``optimizer.step()``, or before a scaler looks for infinities. Until no strategy with
    several replicas is left.
``torch.nn.SyncBatchNorm.forward``
    Torch's own knows no replicas of a strategy. Until the same.
``functional.batch_norm``, ``functional.group_norm``
    A share of one value for each channel trains. Until the same, or none that fits a model.
``Module.zero_grad``, ``Optimizer.zero_grad``
    Cleared gradients are new ones. Until the same, of those that have looked at their parameters, as a run does.
``torch.autograd._engine_run_backward``
    ``backward`` and ``grad`` tell of gradients. Until the same.
``sys.excepthook``, ``threading.excepthook``
    The other processes hear of an error that ends the program, or the thread that has made the strategy. Until the
    strategy is collected.
``Module._compiled_call_impl``
    ``ts.function`` compiles what it calls. Until no module is left that one has called.
operators that draw random numbers, on a dispatch key of their own; ``torch.random.default_generator``
    Replicas that run at once draw from streams of their own. Until no strategy with such replicas is left; other
    threads have not switched the key on.
the C library's ``mallopt``
    Steps find the memory that the last one freed: ``concurrent=True``, ``ts.utils.tune()`` (so ``Model.fit``),
    ``ts.utils.keep_freed_memory()``. Until the process ends.
the process's limit of open files
    Neither ranks nor strangers who connect to the job's store use it up: the soft limit becomes the hard one, in the
    process that keeps the store, and in the first one that comes there. Until the process ends.

On the program's own objects: a recorded object changes its class at the first ``run`` with several replicas in a
process (to a facade of the same name), and parameters of several replicas get a hook that tells of their backward
passes, until the strategy is collected.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import linecache
import multiprocessing.util
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

__all__ = [
    "PROCESS",
    "STRATEGIES",
    "Patch",
    "WhileUsed",
    "active",
    "allow_files",
    "forget_sources",
    "keep_freed_memory",
    "note",
    "replace",
    "watch_end",
]

#: When changes end.
STRATEGIES = "no strategy with several replicas is left"
PROCESS = "the process ends"

#: Of glibc's <malloc.h>: what to keep at the end of the heap, to fetch beyond a request, and to map by itself.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3
_KEEPING = "the C library's mallopt: freed memory is kept"

_FILES = "the process's limit of open files"

_MISSING = object()
#: How often it is looked whether a compilation has ended, in seconds.
_WAIT_S = 0.1
_active: dict[object, Patch] = {}


class Patch(NamedTuple):
    """Something that the library has changed in this process.

    Args:
        what: the attribute or the behaviour.
        why: what for.
        until: when it ends.
    """

    what: str
    why: str
    until: str


def active() -> list[Patch]:
    """Return what is changed now, in the order in which it was.

    Example:
        >>> from torchstrategy import patches
        >>> strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> any(patch.what.endswith("SyncBatchNorm.forward") for patch in patches.active())
        True
    """
    return list(_active.values())


def note(what: str, why: str, until: str, undo: Callable[[], object] | None = None) -> Callable[[], None]:
    """List a change that is made by other means than ``replace``.

    Args:
        what: the behaviour.
        why: what for.
        until: when it ends.
        undo: ends it.

    Returns:
        What ends it and takes it from the list.
    """
    key = object()
    _active[key] = Patch(what, why, until)

    def end() -> None:
        if _active.pop(key, None) is not None and undo is not None:
            undo()

    return end


def replace(owner: Any, name: str, replacement: Any, why: str, until: str) -> Callable[[], None]:
    """Replace an attribute of a class or module.

    Args:
        owner: the class or module.
        name: of the attribute, which the class may have inherited.
        replacement: what stands there from now on.
        why: what for.
        until: when it ends.

    Returns:
        What puts back the attribute as it was. Where another package has replaced it since, by something that may call
        ours, it stays.
    """
    original = vars(owner).get(name, _MISSING)
    setattr(owner, name, replacement)

    def undo() -> None:
        if vars(owner).get(name) is not replacement:
            return
        if original is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, original)

    module = f"{owner.__module__}." if isinstance(owner, type) else ""
    return note(f"{module}{getattr(owner, '__qualname__', owner.__name__)}.{name}", why, until, undo)


def watch_end(
    show: Callable[..., None], tell: Callable[[BaseException], None], close: Callable[[], None], thread: int
) -> Callable[[], None]:
    """Hear of the end of this process's program, and of an error that ends it.

    Args:
        show: takes the place of ``sys.excepthook``.
        tell: called with an error that ends the thread, or the program where ``show`` may not have been asked.
        close: called at the end.
        thread: the identifier of a thread, after which the program may live on.

    Returns:
        What ends this.
    """
    before = threading.excepthook

    def on_thread(ended: threading.ExceptHookArgs) -> None:
        is_it = ended.thread is not None and ended.thread.ident == thread
        if is_it and isinstance(ended.exc_value, Exception):  # SystemExit is a regular end
            tell(ended.exc_value)
        before(ended)

    def leave() -> None:
        error = sys.exc_info()[1]  # in a child of multiprocessing, which has no use for hooks
        if error is None and not hasattr(sys, "ps1"):  # at a prompt the last error has ended nothing
            error = getattr(sys, "last_value", None)  # of which a hook that the program has set since was told
        if isinstance(error, SystemExit):  # torch.multiprocessing raises it for an error
            error = (error.__context__ or error) if error.code else None
        if error is not None:
            tell(error)
        close()

    why, until = "the other processes hear of an error that ends the program", "the strategy is collected"
    ends = [replace(sys, "excepthook", show, why, until), replace(threading, "excepthook", on_thread, why, until)]
    atexit.register(leave)
    at_exit = multiprocessing.util.Finalize(None, leave, exitpriority=0)  # a forked child ends without atexit

    def end() -> None:
        atexit.unregister(leave)
        at_exit.cancel()
        for undo in ends:
            undo()

    return end


class WhileUsed:
    """Changes that are made when they have a first user, and end when the last one is gone.

    Args:
        install: makes them, and returns what ends each.

    Example:
        >>> from torchstrategy import patches
        >>> import string
        >>> shouting = patches.WhileUsed(lambda: [patches.replace(string, "digits", "0!", "an example", "it is gone")])
        >>> strategy = ts.MirroredStrategy(["cpu:0"])
        >>> shouting.use(strategy)
        >>> string.digits
        '0!'
        >>> del strategy
        >>> import gc
        >>> _ = gc.collect()
        >>> string.digits
        '0123456789'
    """

    def __init__(self, install: Callable[[], Iterable[Callable[[], None]]]) -> None:
        self._install = install
        self._ends: Sequence[Callable[[], None]] | None = None
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = threading.Lock()

    def use(self, user: Any) -> None:
        """Make the changes, if they are not made, for as long as an object lives at least."""
        with self._lock:
            if user in self._users:
                return
            if self._ends is None:
                self._ends = list(self._install())
            self._users.add(user)
        weakref.finalize(user, self._leave).atexit = False

    @property
    def has_users(self) -> bool:
        """Whether a user is left."""
        references = list(self._users.data)  # type: ignore[attr-defined]  # at once: another thread may add one
        return any(reference() is not None for reference in references)

    def _leave(self) -> None:
        if _is_compiling():  # it has seen what is replaced, and looks at it again for its guards
            again = threading.Timer(_WAIT_S, self._leave)
            again.daemon = True
            with contextlib.suppress(RuntimeError):  # the program ends
                again.start()
            return
        # A user may be collected at any time, also where this thread has the lock: who has it looks again.
        while self._ends is not None and not self.has_users and self._lock.acquire(blocking=False):
            try:
                if self._ends is not None and not self.has_users:
                    ends, self._ends = self._ends, None
                    for end in reversed(ends):
                        end()
            finally:
                self._lock.release()


def _is_compiling() -> bool:
    """Say whether torch compiles something, in this thread or in another one."""
    if torch._guards.CompileContext.try_get() is not None:
        return True
    compiler = sys.modules.get("torch._dynamo.convert_frame")
    if compiler is None:
        return False
    lock = getattr(compiler, "compile_lock", None)
    if lock is None or not lock.acquire(blocking=False):  # without a lock it is being imported: in order to compile
        return True
    lock.release()
    return False


def keep_freed_memory() -> bool:
    """Let this process keep the memory that it frees, for the next training step on the CPU.

    By default the C library gives large blocks back to the kernel, and every step asks for its activations and
    gradients anew: the kernel then clears thousands of pages in each step. The process's memory stays at its peak
    instead. Call it at the start of the program; it changes the whole process. Strategies with ``concurrent=True`` and
    several replicas on the CPU call it, because threads that ask for memory at the same time wait for each other.

    Returns:
        Whether it worked: the C library must be glibc (Linux).

    Example:
        >>> worked = ts.utils.keep_freed_memory()
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    largest = 2**31 - 1
    worked = all(  # blocks of over 32 MiB, glibc's limit, are mapped by themselves all the same
        mallopt(option, value)
        for option, value in ((_M_TRIM_THRESHOLD, largest), (_M_TOP_PAD, 64 << 20), (_M_MMAP_THRESHOLD, 32 << 20))
    )
    if worked and not any(patch.what == _KEEPING for patch in active()):
        note(_KEEPING, "steps find the memory that the last one freed", PROCESS)
    return worked


def allow_files() -> None:
    """Let this process open as many files as the system allows it; torch's store has one open for each caller."""
    try:
        import resource  # noqa: PLC0415 - not on Windows
    except ImportError:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        note(_FILES, "those who connect while the job starts don't use it up", PROCESS)


def forget_sources() -> None:
    """Drop the sources that torch's import has read and left in memory, 2 MB; a traceback reads what it shows again."""
    folder = os.path.dirname(torch.__file__)
    for name in [name for name in linecache.cache if name.startswith(folder)]:
        del linecache.cache[name]
