"""Slurm's short forms of host names and of numbers of tasks."""

from __future__ import annotations

import re
from collections.abc import Iterator

__all__ = ["expand_hostlist", "expand_tasks_per_node"]

_PART = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_HOSTS = re.compile(r"([^\[\]]*)(?:\[([^\[\]]+)\])?")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?", re.ASCII)
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?", re.ASCII)


def expand_hostlist(hostlist: str) -> list[str]:
    """Return the host names that Slurm's short form stands for, in its order.

    Args:
        hostlist: names separated by commas; a name may end in ranges of numbers in brackets. Numbers keep the leading
            zeros of their range; a range that runs backwards is empty.

    Raises:
        ValueError: the text has another form, such as two pairs of brackets in one name or text after one.

    Example:
        >>> from torchstrategy.cluster_resolver.hostlist import expand_hostlist
        >>> expand_hostlist("gpu[08-10,12],login")
        ['gpu08', 'gpu09', 'gpu10', 'gpu12', 'login']
    """
    if not hostlist:
        return []
    parts = _PART.findall(hostlist)
    if not parts or ",".join(parts) != hostlist.removesuffix(","):
        raise _bad_hostlist(hostlist)
    return [host for part in parts for host in _expand_part(part, hostlist)]


def expand_tasks_per_node(tasks_per_node: str) -> list[int]:
    """Return the number of tasks on each host that Slurm's short form stands for.

    Args:
        tasks_per_node: numbers separated by commas; ``"4(x2)"`` is ``"4,4"``.

    Raises:
        ValueError: the text has another form.

    Example:
        >>> from torchstrategy.cluster_resolver.hostlist import expand_tasks_per_node
        >>> expand_tasks_per_node("4(x2),3")
        [4, 4, 3]
    """
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        match = _COUNT.fullmatch(part)
        if match is None:
            raise ValueError(f"Numbers of tasks must look like '4(x2),3'. Received: {tasks_per_node!r}")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _expand_part(part: str, hostlist: str) -> Iterator[str]:
    match = _HOSTS.fullmatch(part)
    if match is None:
        raise _bad_hostlist(hostlist)
    prefix, ranges = match.groups()
    if ranges is None:
        yield prefix
        return
    for one in ranges.split(","):
        found = _RANGE.fullmatch(one)
        if found is None:
            raise _bad_hostlist(hostlist)
        first, last = found[1], found[2] or found[1]
        yield from (f"{prefix}{number:0{len(first)}d}" for number in range(int(first), int(last) + 1))


def _bad_hostlist(hostlist: str) -> ValueError:
    return ValueError(f"Host names must look like 'n[01-03,7],login'. Received: {hostlist!r}")
