"""What the doctor finds, and how it is shown."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

__all__ = ["Finding", "Status", "as_json", "as_text", "has_failed"]

Status = Literal["info", "ok", "warn", "FAIL"]


@dataclass(frozen=True)
class Finding:
    """One line of the doctor's report.

    Args:
        section: heading under which it stands.
        name: what was looked at.
        status: ``"info"`` for a plain fact, ``"ok"``, ``"warn"``, or ``"FAIL"`` for what will break a job.
        detail: what was found.
        remedy: what to do about it.
    """

    section: str
    name: str
    status: Status
    detail: str
    remedy: str | None = None


def has_failed(findings: Sequence[Finding]) -> bool:
    """Say whether anything will break a job.

    Args:
        findings: the report.
    """
    return any(finding.status == "FAIL" for finding in findings)


def as_text(findings: Sequence[Finding]) -> str:
    """Return the report as aligned text.

    Args:
        findings: the report; those of a section follow each other.
    """
    width = max((len(finding.name) for finding in findings), default=0)
    lines: list[str] = []
    section = None
    for finding in findings:
        if finding.section != section:
            section = finding.section
            lines += ["", section]
        mark = "" if finding.status == "info" else finding.status
        head = f"  {mark:<4}  {finding.name:<{width}}  "
        lines += _indent(head, finding.detail)
        if finding.remedy:
            lines += _indent(" " * len(head), f"-> {finding.remedy}")
    counts = {status: sum(finding.status == status for finding in findings) for status in ("ok", "warn", "FAIL")}
    lines += ["", ", ".join(f"{count} {status}" for status, count in counts.items())]
    return "\n".join(lines[1:]) + "\n"


def as_json(findings: Sequence[Finding]) -> str:
    """Return the report as one JSON object with ``status``, the worst of all, and ``findings``.

    Args:
        findings: the report.
    """
    worst = next((status for status in ("FAIL", "warn") if any(finding.status == status for finding in findings)), "ok")
    return json.dumps({"status": worst, "findings": [asdict(finding) for finding in findings]}, indent=2) + "\n"


def _indent(head: str, text: str) -> list[str]:
    rest = " " * len(head)
    lines = [
        part
        for line in text.splitlines()
        for part in textwrap.wrap(line, max(40, 120 - len(head)), break_on_hyphens=False, break_long_words=False)
    ]
    return [f"{head if index == 0 else rest}{line}".rstrip() for index, line in enumerate(lines or [""])]
