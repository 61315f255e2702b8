"""What the doctor asks of this host. Tests put another one in its place."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

__all__ = ["Host", "PortState", "num_usable_cores", "parse_driver_version"]

PortState = Literal["open", "refused", "silent", "unreachable"]
_ANSWER_TIMEOUT_S = 2.0


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


def _max_open_files() -> int | None:
    try:
        import resource  # noqa: PLC0415 - not on Windows
    except ImportError:
        return None
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
