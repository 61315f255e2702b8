"""Compares the numbers that two runs of a program print: nothing else tells what it makes of losses and metrics."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass

__all__ = ["PrintedDifference", "printed_differences"]

# Whole numbers are left out: numbers of replicas, batches and steps may well differ.
_NUMBER = re.compile(r"(?<![\w.])[-+]?(?:\d+\.\d*(?:[eE][-+]?\d+)?|\d+[eE][-+]?\d+|nan|inf)(?![\w.])")


@dataclass(frozen=True)
class PrintedDifference:
    """A number that is printed otherwise: the line without its numbers, which of such lines, and which number of it."""

    pattern: str
    occurrence: int
    position: int
    line: str
    value: float
    expected: float

    @property
    def place(self) -> tuple[str, int, int]:
        """Where it is, for comparing with other runs."""
        return self.pattern, self.occurrence, self.position


def printed_differences(mine: str, right: str, tolerance: float) -> list[PrintedDifference]:
    """Return the numbers with a decimal point or an exponent that differ in lines which are alike apart from them.

    Args:
        mine: what one run printed.
        right: what the run printed that it is compared with.
        tolerance: how far numbers may be apart, relative to their size; the last printed digit may differ by one.
    """
    known = _by_pattern(right)
    found = []
    for pattern, lines in _by_pattern(mine).items():
        for occurrence, (line, other) in enumerate(zip(lines, known.get(pattern, []), strict=False)):
            pairs = zip(_NUMBER.findall(line), _NUMBER.findall(other), strict=True)
            for position, (a, b) in enumerate(pairs):
                if not _is_close(a, b, tolerance):
                    found.append(PrintedDifference(pattern, occurrence, position, line, float(a), float(b)))
    return found


def _by_pattern(text: str) -> dict[str, list[str]]:
    lines = defaultdict(list)
    for line in text.splitlines():
        if _NUMBER.search(line):
            lines[_NUMBER.sub("#", line).strip()].append(line.strip())
    return lines


def _is_close(a: str, b: str, tolerance: float) -> bool:
    first, second = float(a), float(b)
    if a == b or (first != first and second != second):
        return True
    digit = max(_last_digit(a), _last_digit(b))
    return abs(first - second) <= 1.5 * digit + tolerance * max(abs(first), abs(second))


def _last_digit(text: str) -> float:
    mantissa, _, exponent = text.lower().partition("e")
    _, _, decimals = mantissa.partition(".")
    return float(10.0 ** (int(exponent or 0) - len(decimals)))
