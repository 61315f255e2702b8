"""Reads traces of torch's profiler, and tells in a table where the time of a step went."""

from __future__ import annotations

import gzip
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Figures", "drop_last_step", "make_table", "name_rows", "read_trace", "summarise", "table"]

#: What the labels count as. Where threads do different things at once, the first in this order counts.
PARTS = {
    "replica": "forward pass, loss",
    "function": "forward pass, loss",
    "backward": "backward pass",
    "optimizer": "optimizer",
    "move": "moving data",
    "wait": "waiting for other processes",
    "merge": "combining, checking",
    "input": "waiting for input",
    "meet": "combining, checking",
}
REST = "the rest of the program"
_ORDER = {kind: place for place, kind in enumerate(PARTS)}
_COMPUTING = ("replica", "function", "backward", "optimizer")
_LABEL = "ts::"
#: Labels of torch's own, and what they count as.
_OF_TORCH = {"autograd::engine::evaluate_function": "backward", "Optimizer.step": "optimizer"}
_STEP = "ProfilerStep#"
_NAME = "torchstrategy_name"  # of the process, beside the events; torch calls each one "python"
_CATEGORIES = ("user_annotation", "cpu_op")  # GPUs repeat the annotations in a category of their own
_WORTH_TELLING = 0.05  # of a step
_Event = Mapping[str, Any]
_MOST_TRANSFERS = 5


@dataclass
class Figures:
    """Where the time of one process went; times in milliseconds a step.

    Args:
        name: of the process.
        num_steps: that were recorded.
        step: the length of a step.
        parts: what it consists of, by the names of ``PARTS``.
        hidden: how long data moved while a replica computed.
        replicas: how long each replica computed.
        waits: how long each other process was waited for.
        transfers: how long each kind of them took, and how many of it there were in a step.
        operations: how many of torch's operations a step has, and how long they took in all.
    """

    name: str
    num_steps: int
    step: float
    parts: dict[str, float]
    hidden: float
    replicas: dict[str, float]
    waits: dict[str, float]
    transfers: dict[str, tuple[float, float]]
    operations: tuple[float, float]


class _Span(NamedTuple):
    """A time in which a thread was in a label, and in none within it; in microseconds."""

    start: float
    end: float
    kind: str
    detail: str
    replica: str  # whose label is the innermost one of a replica


def read_trace(path: Path) -> dict[str, Any]:
    """Return the content of a trace's file."""
    data = path.read_bytes()
    trace: dict[str, Any] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    return trace


def summarise(trace: Mapping[str, Any]) -> Figures:
    """Add up the labels of the steps in a trace, or of all of it, as one step, if it has none.

    Args:
        trace: in the format of chrome://tracing.

    Raises:
        ValueError: it is empty.
    """
    events = [event for event in trace["traceEvents"] if event.get("cat") in _CATEGORIES]
    steps = [event for event in events if event["name"].startswith(_STEP)]
    num_steps, steps = max(1, len(steps)), steps or events
    if not steps:
        raise ValueError("The trace is empty: nothing was computed while the profiler ran.")
    start, end = min(event["ts"] for event in steps), max(event["ts"] + event["dur"] for event in steps)
    events = [event for event in events if start <= event["ts"] < end]
    unit = 1000 * num_steps
    spans = [span for thread in _by_thread(events, _kind_of) for span in _innermost(thread)]
    parts, hidden = _divide(spans, start, end)
    replicas: dict[str, float] = defaultdict(float)
    waits: dict[str, float] = defaultdict(float)
    transfers: dict[str, tuple[float, float]] = {}
    for span in spans:
        length = (span.end - span.start) / unit
        if span.kind in _COMPUTING and span.replica:
            replicas[span.replica] += length
        elif span.kind == "wait" and span.detail.startswith("for rank "):
            waits[span.detail.removeprefix("for ")] += length
        elif span.kind == "move":
            transfers[span.detail] = (transfers.get(span.detail, (0.0, 0.0))[0] + length, 0.0)
    for name, (length, _) in transfers.items():
        count = sum(event["name"] == f"{_LABEL}move {name}" for event in events)
        transfers[name] = (length, count / num_steps)
    operations = [_outermost(thread) for thread in _by_thread(events, _is_operation)]
    return Figures(
        name=str(trace.get(_NAME, "")),
        num_steps=num_steps,
        step=(end - start) / unit,
        parts={name: length / unit for name, length in parts.items()},
        hidden=hidden / unit,
        replicas=dict(sorted(replicas.items())),
        waits=dict(waits),
        transfers=transfers,
        operations=(sum(map(len, operations)) / num_steps, sum(map(sum, operations)) / unit),
    )


def make_table(figures: Sequence[Figures]) -> str:
    """Return as text where the time went in each process.

    Args:
        figures: of the processes.
    """
    names = list(dict.fromkeys([*PARTS.values(), REST]))
    rows = [(name, [one.parts[name] for one in figures]) for name in names]
    rows = [(name, values) for name, values in rows if any(value > 0 for value in values)]
    rows.append(("a step", [one.step for one in figures]))
    numbers = sorted({one.num_steps for one in figures})
    means = f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"
    width = max(12, *(len(one.name) + 2 for one in figures))
    lines = [
        f"Where the time of a step goes, in ms (means of {means} steps):",
        f"{'':<30}" + "".join(f"{one.name:>{width}}" for one in figures),
    ]
    for name, values in rows:
        shares = [100 * value / one.step for value, one in zip(values, figures, strict=True)]
        cells = [f"{value:.2f} {share:3.0f}%" for value, share in zip(values, shares, strict=True)]
        lines.append(f"  {name:<28}" + "".join(f"{cell:>{width}}" for cell in cells))
    for one in figures:
        lines += [f"  {one.name}: {text}" for text in _details(one)]
    return "\n".join(lines)


def table(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> str:
    """Return as text where the time of a step went, from traces that are there already.

    Those of ``Profile``, of ``ts.callbacks.TensorBoard(profile_batch=...)``, of ``ts.estimator.ProfilerHook`` and of
    ``torch.profiler`` are read.

    Args:
        paths: a trace's file, ``.json`` or ``.json.gz``, or those of several processes, each of which makes a column.

    Raises:
        ValueError: there is no file, or nothing is in a trace.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with torch.profiler.profile() as recorded:
        ...         _ = torch.ones(100, 100) @ torch.ones(100, 100)
        ...     recorded.export_chrome_trace(folder + "/trace.json")
        ...     print(ts.profiler.table(folder + "/trace.json"))  # doctest: +ELLIPSIS
        Where the time of a step goes, in ms (means of 1 steps):
        ...
    """
    files = [Path(path) for path in ([paths] if isinstance(paths, (str, os.PathLike)) else paths)]
    if not files:
        raise ValueError("ts.profiler.table needs the path of at least one trace. Received: none")
    figures = [summarise(read_trace(file)) for file in files]
    return make_table([replace(one, name=one.name or _stem(file)) for one, file in zip(figures, files, strict=True)])


def name_rows(trace: dict[str, Any], name: str) -> None:
    """Give the process of a trace a name, and its threads those of the replicas that run on them."""
    trace[_NAME] = name
    threads: dict[Any, set[str]] = {}
    for event in trace["traceEvents"]:
        if event.get("cat") == "user_annotation" and event["name"].startswith(f"{_LABEL}replica "):
            threads.setdefault(event["tid"], set()).add(event["name"].removeprefix(_LABEL))
    for event in trace["traceEvents"]:
        if event.get("name") == "process_name":
            event["args"]["name"] = name
        elif event.get("name") == "thread_name" and event["tid"] in threads:
            event["args"]["name"] = ", ".join(sorted(threads[event["tid"]]))


def _stem(path: Path) -> str:
    """Return a file's name without what says that it is a trace."""
    return path.name.removesuffix(".gz").removesuffix(".json").removesuffix(".trace").removesuffix(".pt")


def drop_last_step(trace: Mapping[str, Any]) -> None:
    """Make the last step of a trace none."""
    steps = [event for event in trace["traceEvents"] if event.get("name", "").startswith(_STEP)]
    trace["traceEvents"].remove(max(steps, key=lambda event: event["ts"]))


def _kind_of(event: _Event) -> str | None:
    """Return the kind of a label, ``None`` if it is something else."""
    name = str(event["name"])
    if name.startswith(_LABEL):
        return name.removeprefix(_LABEL).partition(" ")[0]
    return next((kind for prefix, kind in _OF_TORCH.items() if name.startswith(prefix)), None)


def _is_operation(event: _Event) -> bool:
    return str(event["name"]).startswith("aten::")


def _by_thread(events: Sequence[_Event], is_wanted: Callable[[_Event], Any]) -> list[list[_Event]]:
    """Return the events of each thread that are wanted, in the order of their beginning, outer ones first."""
    threads = defaultdict(list)
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        if is_wanted(event):
            threads[event["tid"]].append(event)
    return list(threads.values())


def _outermost(thread: Sequence[_Event]) -> list[float]:
    """Return the lengths of the events that are in no other one."""
    lengths, end = [], 0.0
    for event in thread:
        if event["ts"] >= end:
            lengths.append(event["dur"])
            end = event["ts"] + event["dur"]
    return lengths


def _innermost(thread: Sequence[_Event]) -> Iterator[_Span]:
    """Cut the nested labels of a thread into times in which one of them is the innermost."""
    open_labels: list[_Span] = []
    now = 0.0

    def until(time: float) -> Iterator[_Span]:
        nonlocal now
        while open_labels:
            last = open_labels[-1]
            if min(last.end, time) > now:
                yield last._replace(start=now, end=min(last.end, time))
                now = min(last.end, time)
            if last.end > time:
                return
            open_labels.pop()

    for event in thread:
        start = event["ts"]
        yield from until(start)
        now = start
        kind, detail = _kind_of(event) or "", event["name"].removeprefix(_LABEL).partition(" ")[2]
        outer = open_labels[-1].replica if open_labels else ""
        replica = f"replica {detail}" if kind == "replica" else outer
        open_labels.append(_Span(start, start + event["dur"], kind, detail, replica))
    yield from until(float("inf"))


def _divide(spans: Sequence[_Span], start: float, end: float) -> tuple[dict[str, float], float]:
    """Return how the time from ``start`` to ``end`` divides into parts, and how long transfers were hidden."""
    parts = dict.fromkeys([*PARTS.values(), REST], 0.0)
    hidden, now = 0.0, start
    active = [0] * len(_ORDER)
    edges = [(span.start, 1, span.kind) for span in spans] + [(span.end, -1, span.kind) for span in spans]
    for time, change, kind in [*sorted(edges), (end, 0, "")]:
        length = min(time, end) - now
        first = next((name for name, count in zip(_ORDER, active, strict=True) if count), None)
        parts[REST if first is None else PARTS[first]] += length
        if active[_ORDER["move"]] and first in _COMPUTING:
            hidden += length
        now += length
        if kind in _ORDER:
            active[_ORDER[kind]] += change
    return parts, hidden


def _details(figures: Figures) -> Iterator[str]:
    if len(figures.replicas) > 1:
        yield "computing: " + ", ".join(f"{name} {value:.2f} ms" for name, value in figures.replicas.items())
    rank, value = max(figures.waits.items(), key=lambda item: item[1], default=("", 0.0))
    if value > _WORTH_TELLING * figures.step:
        yield f"waited longest for {rank}, {value:.2f} ms a step"
    if figures.hidden > 0:
        yield f"moved data for {figures.hidden:.2f} ms a step while a replica computed"
    transfers = sorted(figures.transfers.items(), key=lambda item: -item[1][0])
    for name, (value, count) in transfers[:_MOST_TRANSFERS]:
        yield f"{name}: {value:.2f} ms, {count:g} a step"
    count, value = figures.operations
    if count:
        yield f"{count:.0f} operations a step of {1000 * value / count:.0f} µs on average"
