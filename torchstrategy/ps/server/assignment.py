"""What one coordinator has a worker do, over one connection: one thing after another, on a thread of its own.

A coordinator that comes back over a new connection, or a newer one, begins anew with a thread that is free at once. The
old thread may still be inside a function. What that pushes is refused, since the connections to the parameter servers
are closed, and what it returns is dropped: the function runs again elsewhere.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from torchstrategy.base.log import logger
from torchstrategy.data.own_streams import InputContext
from torchstrategy.errors import OutOfRangeError
from torchstrategy.ps.current_worker import as_worker
from torchstrategy.ps.results import encode_error, encode_result
from torchstrategy.ps.transport.client_session import Session
from torchstrategy.ps.transport.limits import Limits
from torchstrategy.ps.transport.messages import Message

__all__ = ["KINDS", "Assignment", "Bench", "make_dataset", "make_iterator"]


def make_dataset(value: Any) -> Any:
    """Return the dataset of this worker: all of it, whichever worker this is.

    Args:
        value: a dataset, or a function that makes one. A function that needs an argument gets an ``InputContext`` of
            one pipeline.

    Raises:
        TypeError: it is neither, or the function needs more, or returns something else.
    """
    dataset = value
    if callable(value) and not _can_be_iterated(value):
        dataset = value(InputContext()) if _num_needed(value) else value()
    if not _can_be_iterated(dataset):
        where = "" if dataset is value else " from the dataset function"
        raise TypeError(
            "A per-worker dataset must be a ts.data.Dataset, a DataLoader or something else to iterate over, or a "
            f"function that returns one. Received{where}: {dataset!r}"
        )
    return dataset


def make_iterator(dataset: Any) -> Iterator[Any]:
    """Return a new iterator from the dataset's beginning.

    Args:
        dataset: what ``make_dataset`` returned.
    """
    if hasattr(dataset, "__iter__"):
        return iter(dataset)
    # Indexable datasets of torch need not raise IndexError at their end, which Python would go by.
    return (dataset[index] for index in range(len(dataset)))


def _can_be_iterated(value: Any) -> bool:
    is_indexable = hasattr(value, "__getitem__") and hasattr(value, "__len__")
    return not isinstance(value, type) and (isinstance(value, Iterable) or is_indexable)


def _num_needed(fn: Callable[..., Any]) -> int:
    """Return how many arguments a dataset function needs.

    Raises:
        TypeError: they are more than one.
    """
    try:
        parameters = inspect.signature(fn).parameters.values()
    except ValueError:  # some functions written in C don't tell
        return 0
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [each for each in parameters if each.default is each.empty and each.kind not in variadic]
    if len(needed) > 1 or any(each.kind is each.KEYWORD_ONLY for each in needed):
        names = ", ".join(each.name for each in needed)
        raise TypeError(f"A dataset function takes no argument, or an InputContext. This one needs: {names}")
    return len(needed)


#: Of requests that an assignment takes.
KINDS = ("configure", "define", "resource", "run", "forget")

_LIBRARY = str(Path(__file__).parents[1])
_OK = Message("ok", {})


class Bench(Protocol):
    """What an assignment works with: definitions, and connections to the parameter servers."""

    def configure(self, fields: dict[str, Any]) -> None:
        """Connect to the parameter servers."""

    def define(self, message: Message, resources: Mapping[int, Any]) -> None:
        """Load a definition."""

    def load(self, blob: bytes, resources: Mapping[int, Any]) -> Any:
        """Return a pickled object."""

    def run(self, key: str, arguments: bytes, resources: Mapping[int, Any]) -> Any:
        """Call a function; returns a value and what goes beside it."""

    def forget(self, keys: Iterable[str]) -> None:
        """Drop definitions."""

    def failed_ps(self, error: BaseException) -> int | None:
        """Return which parameter server an error is about, if it is about one."""

    def close(self) -> None:
        """Disconnect, from any thread; what runs fails at its next call of a parameter server, or is waiting."""


class Assignment:
    """Answers one connection's requests in their order.

    Args:
        session: the coordinator's connection.
        index: the worker's.
        make_bench: makes a bench, for each ``"configure"`` message.
        limits: how large an answer may be.
    """

    def __init__(self, session: Session, index: int, make_bench: Callable[[], Bench], limits: Limits) -> None:
        self._session = session
        self._index = index
        self._make_bench = make_bench
        self._limits = limits
        self._bench: Bench | None = None
        self._is_configured = False
        self._resources: dict[int, Any] = {}
        self._requests: deque[Message] = deque()
        self._condition = threading.Condition()
        self._is_closed = False
        self._num_failed = 0
        self._doing = ("nothing yet", time.monotonic())
        methods = (self._configure, self._define, self._make_resource, self._run, self._forget)
        self._actions: dict[str, Callable[[Message], Message]] = dict(zip(KINDS, methods, strict=True))
        # A daemon, because a function that never ends must not keep the process.
        self._thread = threading.Thread(target=self._work, name=f"closures of worker {index}", daemon=True)
        self._thread.start()

    def add(self, request: Message) -> None:
        """Queue a request; the answer goes over the session.

        Args:
            request: the request.
        """
        with self._condition:
            self._requests.append(request)
            self._condition.notify()

    def cancel(self, closures: Collection[int]) -> list[int]:
        """Answer functions that have not begun with ``"cancelled"``.

        Args:
            closures: their ids.

        Returns:
            Those that were cancelled.
        """
        with self._condition:
            cancelled = {
                request.number: request.fields["closure"]
                for request in self._requests
                if request.kind == "run" and request.fields["closure"] in closures
            }
            self._requests = deque(request for request in self._requests if request.number not in cancelled)
        for number, closure in cancelled.items():
            self._session.reply(number, Message("cancelled", {"closure": closure}))
        return list(cancelled.values())

    def describe(self) -> str:
        """Say what it is doing, and for how long."""
        what, since = self._doing
        return f"worker {self._index} is doing {what} for {time.monotonic() - since:.1f} s"

    def close(self) -> None:
        """Drop everything; the thread ends as soon as it is outside the user's functions."""
        with self._condition:
            self._is_closed = True
            self._requests.clear()
            self._condition.notify()
            bench = self._bench
        if bench is not None:
            bench.close()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread of a closed assignment to end.

        Returns:
            Whether it has ended.
        """
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        with as_worker(self._index):
            while (request := self._next()) is not None:
                reply = self._answer(request)
                if not self._is_closed:
                    self._session.reply(request.number, reply)
                del request, reply  # a queue may stay empty for long, and a result may be large
        self._bench = None
        self._resources.clear()

    def _next(self) -> Message | None:
        with self._condition:
            self._doing = ("nothing", time.monotonic())
            self._condition.wait_for(lambda: self._requests or self._is_closed)
            if self._is_closed:
                return None
            request = self._requests.popleft()
            closure = request.fields.get("closure")
            self._doing = (request.kind if closure is None else f"closure {closure}", time.monotonic())
            return request

    def _answer(self, message: Message) -> Message:
        try:
            return self._actions[message.kind](message)
        except BaseException as error:  # noqa: BLE001 - also a sys.exit() in the user's function
            logger.debug("%s: %s failed", self.describe(), message.kind, exc_info=True)
            return Message("error", encode_error(error))

    def _configure(self, message: Message) -> Message:
        bench = self._make_bench()
        self._is_configured = False
        with self._condition:
            old, self._bench = self._bench, bench
            is_closed = self._is_closed
        self._resources.clear()
        if old is not None:
            old.close()
        if is_closed:
            bench.close()
        bench.configure(message.fields)
        self._is_configured = True
        return _OK

    def _define(self, message: Message) -> Message:
        self._ready_bench().define(message, self._resources)
        return _OK

    def _make_resource(self, message: Message) -> Message:
        fields = message.fields
        self._resources.pop(fields["id"], None)
        if fields["kind"] == "dataset":
            made = make_dataset(self._ready_bench().load(message.blobs[0], self._resources))
        elif fields["kind"] == "iterator":
            if fields["of"] not in self._resources:
                raise ValueError(f"There is no dataset {fields['of']} on this worker.")
            made = make_iterator(self._resources[fields["of"]])
        else:
            raise ValueError(f"A resource is a dataset or an iterator. Received: {fields['kind']!r}")
        self._resources[fields["id"]] = made
        return _OK

    def _forget(self, message: Message) -> Message:
        for number in message.fields.get("resources", ()):
            self._resources.pop(number, None)
        self._ready_bench().forget(message.fields.get("keys", ()))
        return _OK

    def _run(self, message: Message) -> Message:
        closure = message.fields["closure"]
        if message.fields.get("failures", self._num_failed) != self._num_failed:
            # It was sent before the coordinator knew that a function has failed here, and decides what that means.
            return Message("cancelled", {"closure": closure})
        bench = self._ready_bench()
        try:
            value, side = bench.run(message.fields["function"], message.blobs[0], self._resources)
            reply = encode_result(value, side)
            self._check_size(reply)
        except StopIteration as error:
            return self._failed(closure, OutOfRangeError("End of sequence").with_traceback(error.__traceback__), None)
        except BaseException as error:  # noqa: BLE001 - also a sys.exit() in the user's function
            return self._failed(closure, error, bench.failed_ps(error))
        return reply._replace(fields={"closure": closure})

    def _failed(self, closure: int, error: BaseException, ps: int | None) -> Message:
        self._num_failed += 1
        error.__traceback__ = _of_program(error.__traceback__)
        return Message("failed", {**encode_error(error), "closure": closure, "ps": ps})

    def _ready_bench(self) -> Bench:
        if self._bench is None or not self._is_configured:
            raise RuntimeError("This worker was not configured.")
        return self._bench

    def _check_size(self, reply: Message) -> None:
        num_bytes = sum(map(len, reply.blobs)) + sum(tensor.nbytes for tensor in reply.tensors)
        if num_bytes > self._limits.max_control_bytes:
            raise ValueError(
                f"The result has {num_bytes:,} bytes; at most {self._limits.max_control_bytes:,} are allowed "
                "(TORCHSTRATEGY_MAX_CONTROL_BYTES on all tasks). Return less, or write it to a file."
            )


def _of_program(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without the library's frames at its beginning, or all of it if there are no others."""
    part = trace
    while part is not None and part.tb_frame.f_code.co_filename.startswith(_LIBRARY):
        part = part.tb_next
    return part or trace
