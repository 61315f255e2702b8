"""The tables and the picture of recipes/benchmarks/training.py, made of what it writes to results.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import matplotlib as mpl
import numpy as np
from collective_times import GLOO
from comparisons import COLORS, bootstrap_median_ratio, markdown, ratio_cell, spread_cell
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from training_steps import ALONE, CONCURRENT, OURS, PEERS

TENSORFLOW = "TF MirroredStrategy"
IN_PROCESSES = [*PEERS, OURS]
Results = dict[str, Any]
MB = 2**20


def title(way: str, num_replicas: int) -> str:
    """Return what a way is called in a table."""
    if way in IN_PROCESSES:
        return f"{way}, {num_replicas} processes"
    return way if way == ALONE else f"{way}, 1 process"


def steps_table(results: Results) -> str:
    """Tell how long a step takes, and what ours takes next to it; the best peer's ratio also in words."""
    replicas, settings = results["options"]["replicas"], list(results["options"]["settings"])
    texts = []
    for model, by_setting in results["steps"].items():
        head = [f"{model}, ms a step"]
        for setting in settings:
            head += [setting, f"{OURS} / it", f"{CONCURRENT} / it"]
        rows = [
            [title(way, replicas), *(cell for setting in settings for cell in step_cells(way, by_setting[setting]))]
            for way in known_ways(by_setting[settings[0]])
        ]
        texts += [markdown(head, rows), *(best_peer(model, setting, by_setting[setting]) for setting in settings)]
    return "\n\n".join(texts)


def known_ways(times: dict[str, Any]) -> list[str]:
    """Return the ways that have a row: also those that could not run."""
    return [*dict.fromkeys([*PEERS, *times, TENSORFLOW])]


def step_cells(way: str, times: dict[str, list[float]]) -> list[str]:
    """Return the cells of a way in one setting."""
    if way not in times:
        return ["not run", "", ""]
    cells = ["" if way == mine else ratio_cell(times[mine], times[way]) for mine in (OURS, CONCURRENT)]
    return [spread_cell(times[way], 1e-3), *cells]


def best_peer(model: str, setting: str, times: dict[str, list[float]]) -> str:
    """Return the ratio of ours to the fastest peer with several processes."""
    best = min((way for way in PEERS if way in times), key=lambda way: np.median(times[way]))
    ratio = bootstrap_median_ratio(times[OURS], times[best])
    interval = "{low:.3f} to {high:.3f}".format(**ratio)
    return (
        f"{model}, {setting}: ours / best peer ({best}), median of {len(times[OURS])} pairs: "
        f"{ratio['median']:.3f} (95 % interval {interval})."
    )


def starts_table(results: Results) -> str:
    """Tell what a start takes, and the memory at its peak."""
    head = ["s to the end of the first step", "of them after importing torch or TF"]
    head += ["peak memory, MiB", "ours / it", "after 6 steps, pages that processes share counted once"]
    texts = []
    for model, by_way in results["starts"].items():
        rows = []
        for way in known_ways(by_way):
            starts = by_way.get(way)
            row = ["not run", "", "", "", ""]
            if starts:
                figures = {name: [start[name] for start in starts] for name in ("seconds", "built", "peak", "held")}
                row = [f"{np.median(figures[name]):.2f}" for name in ("seconds", "built")]
                row.append(spread_cell(figures["peak"], MB))
                row.append(
                    "" if way == OURS else ratio_cell([start["peak"] for start in by_way[OURS]], figures["peak"])
                )
                row.append(f"{np.median(figures['held']) / MB:,.0f}")
            rows.append([title(way, results["options"]["replicas"]), *row])
        texts.append(markdown([model, *head], rows))
    return "\n\n".join(texts)


def scaling_table(results: Results) -> str:
    """Tell examples a second by number of replicas, and how many times what the way does with the first number."""
    options, by_number = results["options"], results["scaling"]
    first = next(iter(by_number.values()))
    rows = []
    for way in first:
        rates = {n: int(n) * options["batch_size"] / np.median(times[way]) for n, times in by_number.items()}
        base = next(iter(rates.values()))
        rows.append([way, *(f"{rate:,.0f} ({rate / base:.2f})" for rate in rates.values())])
    head = f"{options['scaling']['model']}, examples a second"
    return markdown([head, *(f"{n} replica{'s' * (n != '1')}" for n in by_number)], rows)


def run_table(results: Results) -> str:
    """Tell what `run` and the records cost."""
    figures = results["run"]
    rows = [[f"`run` of an empty function, {name}", f"{1e6 * cost:.1f} µs"] for name, cost in figures["costs"].items()]
    records = figures["records"]
    rows.append(
        ["a step with the records that ranks compare / without", ratio_cell(records["with"], records["without"])]
    )
    return markdown(["", "cost"], rows)


def collectives_table(results: Results) -> str:
    """Tell what an all-reduce costs by size, and how many times as long gloo takes."""
    figures = results["collectives"]
    megabytes, copy, there_and_back = 4e-6 * figures["largest"], figures["copy_ms"], figures["there_and_back_ms"]
    texts = [
        f"Limits: {megabytes:.1f} MB are copied in memory in {spread_cell(copy, 1)} ms, "
        f"and sent to another process over loopback and back in {spread_cell(there_and_back, 1)} ms."
    ]
    for number, by_way in figures["processes"].items():
        rows = []
        for size, gloo in by_way[GLOO].items():
            cells = [collective_cell(gloo, by_size.get(size)) for by_size in by_way.values()]
            rows.append([f"{4 * int(size):,}", *cells])
        texts.append(markdown([f"bytes, {number} processes", *(f"{way}, µs" for way in by_way)], rows))
    return "\n\n".join(texts)


def collective_cell(gloo: list[float], seconds: list[float] | None) -> str:
    """Return the median, and in brackets how many times as long gloo takes in the same rounds."""
    if seconds is None:
        return ""
    median = f"{1e6 * np.median(seconds):,.0f}"
    return median if seconds is gloo else f"{median} ({np.median(np.array(gloo) / np.array(seconds)):.1f})"


PARTS: dict[str, Callable[[Results], str]] = {
    "steps": steps_table,
    "starts": starts_table,
    "scaling": scaling_table,
    "run": run_table,
    "collectives": collectives_table,
}


def draw(results: Results) -> Figure:
    """Draw the steps of each model, the scaling and the collectives, as far as they were timed."""
    panels: list[Callable[[Axes], None]] = []
    for model, by_setting in results.get("steps", {}).items():
        panels.append(lambda axes, model=model, times=by_setting: draw_steps(axes, model, times))
    if "scaling" in results:
        panels.append(lambda axes: draw_scaling(axes, results))
    if "collectives" in results:
        panels.append(lambda axes: draw_collectives(axes, results["collectives"]["processes"]))
    style = {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#9aa5b1"}
    num_rows = -(-max(1, len(panels)) // 2)
    with mpl.rc_context(style):
        figure = Figure(figsize=(13, 4.6 * num_rows), dpi=120, layout="constrained")
        for axes, panel in zip(figure.subplots(num_rows, 2, squeeze=False).flat, [*panels, *[hide] * 2], strict=False):
            panel(axes)
    return figure


def hide(axes: Axes) -> None:
    """Leave a panel empty."""
    axes.set_axis_off()


def draw_steps(axes: Axes, model: str, by_setting: dict[str, dict[str, list[float]]]) -> None:
    """Draw the median step of each way as bars, one for each setting, with the middle 80 % of the blocks."""
    ways = list(next(iter(by_setting.values())))
    height = 0.8 / len(by_setting)
    for number, (setting, times) in enumerate(by_setting.items()):
        low, median, high = np.array([np.percentile(times[way], (10, 50, 90)) for way in ways]).T * 1e3
        places = np.arange(len(ways)) + (number - (len(by_setting) - 1) / 2) * height
        color = COLORS[number % len(COLORS)]
        axes.barh(places, median, height, xerr=(median - low, high - median), color=color, label=setting)
    axes.set_xlim(0, 1.3e3 * max(np.median(seconds) for times in by_setting.values() for seconds in times.values()))
    axes.set_yticks(np.arange(len(ways)), ways)
    axes.invert_yaxis()
    _finish(axes, f"{model}: ms a step")


def draw_scaling(axes: Axes, results: Results) -> None:
    """Draw the examples a second against the number of replicas."""
    by_number = results["scaling"]
    numbers = [int(n) for n in by_number]
    for way in next(iter(by_number.values())):
        rates = [int(n) * results["options"]["batch_size"] / np.median(times[way]) for n, times in by_number.items()]
        axes.plot(numbers, rates, marker="o", label=way)
    axes.set_xticks(numbers)
    axes.set_xlabel("replicas")
    axes.set_ylim(bottom=0)
    _finish(axes, f"{results['options']['scaling']['model']}: examples a second")


def draw_collectives(axes: Axes, by_number: dict[str, dict[str, dict[str, list[float]]]]) -> None:
    """Draw the time of an all-reduce against its size, for the smallest number of processes."""
    number, by_way = next(iter(by_number.items()))
    for way, by_size in by_way.items():
        axes.loglog(
            [4 * int(size) for size in by_size], [1e6 * np.median(s) for s in by_size.values()], marker="o", label=way
        )
    axes.set_xlabel("bytes")
    _finish(axes, f"all-reduce between {number} processes: µs")


def _finish(axes: Axes, heading: str) -> None:
    axes.set_title(heading, loc="left", fontsize=11)
    axes.grid(axis="both", color="#e4e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.legend(frameon=False)
