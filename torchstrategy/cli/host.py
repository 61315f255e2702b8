"""What the doctor asks of this host, in whose place tests put another one; and how findings are printed."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import re
import socket
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch

__all__ = [
    "Finding",
    "Host",
    "PortState",
    "Status",
    "as_json",
    "as_text",
    "count_tpu_chips",
    "has_failed",
    "num_usable_cores",
    "parse_driver_version",
    "version_of",
]

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


PortState = Literal["open", "refused", "silent", "unreachable"]
_ANSWER_TIMEOUT_S = 2.0
# As torch_xla's _internal/tpu.py has them.
_TPU_VENDOR = "0x1ae0"
_TPU_DEVICES = {"0x0027", "0x005e", "0x0063", "0x006f", "0x0056", "0x0062", "0x0076"}


@dataclass(frozen=True)
class Host:
    """This host and the process's environment.

    Args:
        environ: the environment variables.
        name: the host's name.
        interfaces: names of its network interfaces.
        num_cores: cores that this process may use.
        num_gpus: GPUs that torch sees.
        shm_bytes: size of ``/dev/shm``, ``None`` where there is none.
        max_open_files: how many files and sockets a process may have open.
        cuda_version: of CUDA, if torch was built with it.
        driver_version: of the NVIDIA driver, if it is loaded.
        num_tpu_chips: TPU chips on its PCI bus.
        torch_xla_version: of torch_xla, if it is installed.
        torch_tpu_version: of torch_tpu, if it is installed.
    """

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    name: str = field(default_factory=socket.gethostname)
    interfaces: tuple[str, ...] = field(default_factory=lambda: tuple(name for _, name in socket.if_nameindex()))
    num_cores: int = field(default_factory=lambda: num_usable_cores())
    num_gpus: int = field(default_factory=torch.cuda.device_count)
    shm_bytes: int | None = field(default_factory=lambda: _shm_bytes())
    max_open_files: int | None = field(default_factory=lambda: _max_open_files())
    cuda_version: str | None = torch.version.cuda
    driver_version: str | None = field(default_factory=lambda: _driver_version())
    num_tpu_chips: int = field(default_factory=lambda: count_tpu_chips(Path("/sys/bus/pci/devices")))
    torch_xla_version: str | None = field(default_factory=lambda: version_of("torch-xla"))
    torch_tpu_version: str | None = field(default_factory=lambda: version_of("torch-tpu"))

    def addresses_of(self, name: str) -> list[str]:
        """Return the IP addresses of a host.

        Args:
            name: its name, or an address.

        Raises:
            OSError: the name does not resolve.
        """
        try:
            return list(dict.fromkeys(str(target[0]) for *_, target in socket.getaddrinfo(name, None)))
        except UnicodeError as error:  # such as an empty label
            raise OSError(f"{name!r} is no host name: {error}") from None

    def is_own(self, address: str) -> bool:
        """Say whether an IP address is one of this host's.

        Args:
            address: the address.
        """
        return self.can_listen(address, 0)

    def can_listen(self, address: str, port: int) -> bool:
        """Say whether a server could take a port here.

        Args:
            address: one of this host's IP addresses.
            port: the port.
        """
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError, OverflowError), socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
            probe.bind((address, port))
            probe.listen()
            return True
        return False

    def port_state(self, address: str, port: int) -> PortState:
        """Say what a port answers.

        Args:
            address: an IP address.
            port: the port.

        Returns:
            ``"open"``: something listens; ``"refused"``: the host says that nothing does; ``"silent"``: no answer
            within seconds; ``"unreachable"``: there is no way to the address.
        """
        try:
            socket.create_connection((address, port), timeout=_ANSWER_TIMEOUT_S).close()
        except ConnectionRefusedError:
            return "refused"
        except TimeoutError:
            return "silent"
        except (OSError, OverflowError):  # the second: there is no such port
            return "unreachable"
        return "open"

    def port_states(self, targets: Iterable[tuple[str, int]]) -> list[PortState]:
        """Return what several ports answer, asked at the same time.

        Args:
            targets: IP addresses with ports.
        """
        with ThreadPoolExecutor(max_workers=32) as pool:
            return list(pool.map(lambda target: self.port_state(*target), targets))


def num_usable_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _shm_bytes() -> int | None:
    try:
        status = os.statvfs("/dev/shm")
    except (OSError, AttributeError):
        return None
    return status.f_frsize * status.f_blocks


def _driver_version() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    return parse_driver_version(text)


def parse_driver_version(text: str) -> str:
    """Return the version from what the NVIDIA driver says of itself.

    Args:
        text: contents of ``/proc/driver/nvidia/version``.

    Example:
        >>> from torchstrategy.cli.host import parse_driver_version
        >>> parse_driver_version("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build")
        '580.65.06'
    """
    found = re.search(r"Kernel Module.*?\s(\d[\d.]+)\s", text)
    return found[1] if found else "unknown"


def count_tpu_chips(bus: Path) -> int:
    """Return how many devices of a PCI bus are TPU chips, v2 to 7.

    Args:
        bus: the folder with an entry for each device.

    Example:
        >>> from pathlib import Path
        >>> from torchstrategy.cli.host import count_tpu_chips
        >>> count_tpu_chips(Path("/there/is/no/bus"))
        0
    """
    found = 0
    for vendor_path in bus.glob("*/vendor"):
        with contextlib.suppress(OSError):
            vendor, device = (path.read_text().strip() for path in (vendor_path, vendor_path.with_name("device")))
            found += vendor == _TPU_VENDOR and device in _TPU_DEVICES
    return found


def version_of(package: str) -> str | None:
    """Return the version of an installed package; ``None`` if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _max_open_files() -> int | None:
    try:
        import resource  # noqa: PLC0415 - not on Windows
    except ImportError:
        return None
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
