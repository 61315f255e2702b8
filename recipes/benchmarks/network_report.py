"""The tables of recipes/benchmarks/network.py."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from comparisons import markdown, ratio_cell, spread_cell
from network_model import Costs
from network_steps import WAYS
from slow_network import Link
from training_steps import OURS

ByLink = Mapping[Link, Mapping[str, float]]


def steps_table(link: Link, times: Mapping[str, list[float]], sent: Mapping[str, list[float]]) -> str:
    """Tell how long a step takes in each way over one link, and how ours compares.

    Args:
        link: of each host.
        times: seconds of a step, by way.
        sent: bytes that a host sends in a step, by way.
    """
    head = [str(link), "seconds a step (10 to 90 %)", "MB sent"]
    rows = [
        [way, spread_cell(times[way], 1), f"{np.median(sent[way]) / 1e6:.1f}"] if way in times else [way, "not run", ""]
        for way in WAYS
    ]
    for mine in [way for way in (OURS, "ours, bf16", "ours, PowerSGD") if way in times]:
        head.append(f"{mine} / it")
        for row in rows:
            other = row[0]
            row.append(ratio_cell(times[mine], times[other]) if other in times and other != mine else "")
    return markdown(head, rows)


def model_table(costs: Costs, measured: ByLink, predicted: ByLink, num_fitted: int) -> str:
    """Compare the model with what was measured.

    Args:
        costs: what the model was fitted to.
        measured: seconds of a step, by link and way.
        predicted: the same by the model.
        num_fitted: links, the first of them, that it was fitted to.
    """
    text = (
        f"Model: forward {costs.forward:.3f} s, backward {costs.backward:.3f} s, optimizer {costs.optimizer:.3f} s, "
        f"{costs.efficiency:.0%} of the rate, {costs.waits:.1f} delays for each MiB. Predicted / "
        "measured seconds a step:"
    )
    links = list(measured)
    head = ["", "own work", *(f"{link}{', fitted' if n < num_fitted else ''}" for n, link in enumerate(links))]
    rows = []
    for way, own_work in costs.own_work.items():
        cells = []
        for link in links:
            first, second = predicted[link][way], measured[link][way]
            cells.append(f"{first:.2f} / {second:.2f} ({first / second - 1:+.0%})")
        rows.append([way, f"{own_work:.2f}", *cells])
    return f"{text}\n\n{markdown(head, rows)}"


def hosts_table(way: str, predicted: Mapping[int, Mapping[Link, float]]) -> str:
    """Tell what the model predicts for other numbers of hosts.

    Args:
        way: to train.
        predicted: seconds of a step, by number of hosts and link.
    """
    links = list(next(iter(predicted.values())))
    head = [f"{way}: predicted seconds a step", *map(str, links)]
    rows = [[f"{n} hosts", *(f"{by_link[link]:.2f}" for link in links)] for n, by_link in predicted.items()]
    return markdown(head, rows)
