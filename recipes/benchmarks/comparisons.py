"""Ratios of what was timed side by side, and tables of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

COLORS = ("#7a8a99", "#d1495b")  # of two curves


def bootstrap_median_ratio(first: Sequence[float], second: Sequence[float]) -> dict[str, float]:
    """Return the median of the pairs' ratios and the ends of its 95 % bootstrap interval."""
    ratios = np.array(first) / np.array(second)
    draws = np.random.default_rng(0).choice(ratios, (10_000, len(ratios)))
    low, high = np.percentile(np.median(draws, axis=1), (2.5, 97.5))
    return {"low": float(low), "median": float(np.median(ratios)), "high": float(high)}


def ratio_cell(first: Sequence[float], second: Sequence[float]) -> str:
    """Return the median ratio and its interval as text."""
    return "{median:.2f} ({low:.2f} to {high:.2f})".format(**bootstrap_median_ratio(first, second))


def spread_cell(values: Sequence[float], unit: float) -> str:
    """Return the median, and in brackets what a tenth of the values is below and above, as text.

    Args:
        values: any number of them.
        unit: that the text counts in.
    """
    median, low, high = (_three_digits(value / unit) for value in np.percentile(values, (50, 10, 90)))
    return f"{median} ({low} to {high})"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown whose columns also line up in a terminal."""
    widths = [max(3, *map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [head, ["-" * width for width in widths], *rows]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def _three_digits(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"
