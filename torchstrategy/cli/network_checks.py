"""The doctor's checks of the network, as far as they need no job: names, interfaces, proxies.

Each takes the host, and the job if it cares.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping

from torchstrategy.base.job import Job
from torchstrategy.cli.host import Host
from torchstrategy.cli.report import Finding

__all__ = ["check_host_name", "check_interface_settings", "check_proxies", "is_loopback"]

_SECTION = "Network"
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")


def check_host_name(host: Host, job: Job | None) -> Iterator[Finding]:
    """Ask whether other hosts could reach this one under its name."""
    try:
        addresses = host.addresses_of(host.name)
    except OSError as error:
        remedy = f"add a line `<address> {host.name}` to /etc/hosts, or use addresses instead of names"
        yield Finding(_SECTION, "host name", "warn", f"{host.name} does not resolve ({error})", remedy)
        return
    text = f"{host.name} is {', '.join(addresses)}"
    if all(map(is_loopback, addresses)) and not _stays_on_this_host(host, job):
        text += ": other hosts can't reach this one by the address that it gives for itself"
        remedy = f"give {host.name} its real address in /etc/hosts, or set GLOO_SOCKET_IFNAME to the interface to use"
        yield Finding(_SECTION, "host name", "warn", text, remedy)
    else:
        yield Finding(_SECTION, "host name", "ok", text)


def check_interface_settings(host: Host) -> Iterator[Finding]:
    """Look for interfaces that variables name and this host lacks."""
    yield Finding(_SECTION, "interfaces", "info", ", ".join(host.interfaces))
    for variable, chosen in (
        ("GLOO_SOCKET_IFNAME", _named_interfaces),
        ("TP_SOCKET_IFNAME", _named_interfaces),
        ("NCCL_SOCKET_IFNAME", _nccl_interfaces),
    ):
        value = host.environ.get(variable)
        if not value:
            continue
        found = chosen(value, host.interfaces)
        if found:
            yield Finding(_SECTION, variable, "ok", f"{value}: {', '.join(found)}")
        else:
            text = f"{value} names no interface of this host, which has {', '.join(host.interfaces)}"
            yield Finding(_SECTION, variable, "FAIL", text, f"unset {variable}, or name an interface of this host")


def check_proxies(host: Host) -> Iterator[Finding]:
    """Say what proxies do here: nothing to torch's connections, but the Kubernetes API server may hide behind one."""
    proxies = [name for name in _PROXIES if _either_case(host.environ, name)]
    if not proxies:
        return
    text = f"{', '.join(proxies)} set; connections between the processes don't use them"
    server = host.environ.get("KUBERNETES_SERVICE_HOST")
    excepted = [part.strip().lstrip(".") for part in (_either_case(host.environ, "no_proxy") or "").split(",")]
    if server and "*" not in excepted and server not in excepted:
        text = f"{', '.join(proxies)} set: requests to the Kubernetes API server at {server} go through the proxy"
        yield Finding(_SECTION, "proxies", "warn", text, f"export no_proxy=$no_proxy,{server}")
    else:
        yield Finding(_SECTION, "proxies", "info", text)


def is_loopback(address: str) -> bool:
    """Say whether an IP address leads back to the host itself.

    Args:
        address: the address.
    """
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _stays_on_this_host(host: Host, job: Job | None) -> bool:
    if job is None:
        return False
    try:
        return all(map(is_loopback, host.addresses_of(job.address)))
    except OSError:
        return False


def _named_interfaces(value: str, interfaces: tuple[str, ...]) -> list[str]:
    return [name for name in value.split(",") if name.strip() in interfaces]


def _nccl_interfaces(value: str, interfaces: tuple[str, ...]) -> list[str]:
    """Return what NCCL would use: ``eth`` are prefixes, ``=eth0`` exact names, and ``^`` leaves some out."""
    excludes = value.startswith("^")
    value = value.removeprefix("^")
    exact = value.startswith("=")
    names = [name.strip() for name in value.removeprefix("=").split(",") if name.strip()]

    def matches(interface: str) -> bool:
        return interface in names if exact else interface.startswith(tuple(names))

    return [interface for interface in interfaces if matches(interface) is not excludes]


def _either_case(environ: Mapping[str, str], name: str) -> str | None:
    return environ.get(name) or environ.get(name.upper())
