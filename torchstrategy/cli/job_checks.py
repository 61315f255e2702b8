"""The doctor's checks of the network and the job: what was found and why, contradictions, addresses and ports.

Each takes the host, and the job if it cares.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torchstrategy.base.addresses import split_address
from torchstrategy.base.job import Job
from torchstrategy.cli.host import Finding, Host, PortState
from torchstrategy.cluster_resolver.detect import explain, find_job

__all__ = [
    "check_addresses",
    "check_both_sources",
    "check_host_name",
    "check_interface_settings",
    "check_proxies",
    "check_store",
    "check_stray_variables",
    "detect",
    "is_loopback",
]

_NETWORK = "Network"
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")


def check_host_name(host: Host, job: Job | None) -> Iterator[Finding]:
    """Ask whether other hosts could reach this one under its name."""
    try:
        addresses = host.addresses_of(host.name)
    except OSError as error:
        remedy = f"add a line `<address> {host.name}` to /etc/hosts, or use addresses instead of names"
        yield Finding(_NETWORK, "host name", "warn", f"{host.name} does not resolve ({error})", remedy)
        return
    text = f"{host.name} is {', '.join(addresses)}"
    if all(map(is_loopback, addresses)) and not _stays_on_this_host(host, job):
        text += ": other hosts can't reach this one by the address that it gives for itself"
        remedy = f"give {host.name} its real address in /etc/hosts, or set GLOO_SOCKET_IFNAME to the interface to use"
        yield Finding(_NETWORK, "host name", "warn", text, remedy)
    else:
        yield Finding(_NETWORK, "host name", "ok", text)


def check_interface_settings(host: Host) -> Iterator[Finding]:
    """Look for interfaces that variables name and this host lacks."""
    yield Finding(_NETWORK, "interfaces", "info", ", ".join(host.interfaces))
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
            yield Finding(_NETWORK, variable, "ok", f"{value}: {', '.join(found)}")
        else:
            text = f"{value} names no interface of this host, which has {', '.join(host.interfaces)}"
            yield Finding(
                _NETWORK,
                variable,
                "FAIL",
                text,
                f"unset {variable}, or name an interface of this host",
            )


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
        yield Finding(_NETWORK, "proxies", "warn", text, f"export no_proxy=$no_proxy,{server}")
    else:
        yield Finding(_NETWORK, "proxies", "info", text)


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


_SECTION = "Job"
_FIREWALL = "allow TCP between the hosts of the job on all ports: most ports are chosen at the start"


class _Task(NamedTuple):
    name: str
    host: str
    port: int
    addresses: list[str]


def detect(host: Host) -> tuple[Job | None, list[Finding]]:
    """Find the job as a strategy would.

    Args:
        host: whose environment is read.

    Returns:
        The job, ``None`` if this process stands alone or the job can't be found; and what there is to say.
    """
    findings: list[Finding] = []
    try:
        lines = [line.partition(": ") for line in explain(host.environ)]
        findings += [Finding(_SECTION, source, "info", text) for source, _, text in lines]
        job = find_job(environ=host.environ)
    except (ValueError, TypeError, KeyError, IndexError, RuntimeError) as error:
        text = f"{type(error).__name__}: {error}"
        remedy = "a strategy will raise this error here: mend the variables, or unset them to run alone"
        return None, [*findings, Finding(_SECTION, "job", "FAIL", text, remedy)]
    if job is None:
        findings.append(Finding(_SECTION, "job", "ok", "none: this process stands alone"))
    else:
        task = f", task {job.task_type}:{job.task_id}" if job.task_type else ""
        attempt = f", restart {job.attempt}" if job.attempt else ""
        text = f"{job.reason}\nrank {job.rank} of {job.size}{task}{attempt}; the ranks meet at {job.address}:{job.port}"
        findings.append(Finding(_SECTION, "job", "ok", text))
    return job, findings


def check_stray_variables(host: Host, job: Job | None) -> Iterator[Finding]:
    """Look for variables of a launcher that are there without the others."""
    environ = host.environ
    if environ.get("WORLD_SIZE") and not environ.get("RANK"):
        several = environ["WORLD_SIZE"].strip() != "1"
        text = f"WORLD_SIZE={environ['WORLD_SIZE']} is set without RANK"
        remedy = "start the program with torchrun or `torchstrategy launch`, or unset WORLD_SIZE"
        yield Finding(_SECTION, "WORLD_SIZE", "FAIL" if several else "warn", text, remedy)
    if environ.get("RANK") and not environ.get("WORLD_SIZE"):
        text = f"RANK={environ['RANK']} is set without WORLD_SIZE and means nothing"
        yield Finding(_SECTION, "RANK", "warn", text, "unset RANK, or set WORLD_SIZE and the other variables too")
    port = environ.get("MASTER_PORT", "")
    if job is None and port.isdecimal() and not host.can_listen("127.0.0.1", int(port)):
        text = f"MASTER_PORT={port} is in use on this host, and this process belongs to no job"
        yield Finding(_SECTION, "MASTER_PORT", "warn", text, f"unset MASTER_PORT; {_who_listens(int(port))}")


def check_both_sources(host: Host) -> Iterator[Finding]:
    """Compare ``TF_CONFIG`` with torchrun's variables where both are set."""
    if not host.environ.get("TF_CONFIG") or host.environ.get("WORLD_SIZE", "1").strip() in ("", "1"):
        return
    rank, size = host.environ.get("RANK", "(unset)"), host.environ["WORLD_SIZE"]
    described = _rank_and_size(host.environ["TF_CONFIG"])
    if described is not None and (rank, size) == tuple(map(str, described)):
        text = f"TF_CONFIG and torchrun's variables agree: rank {rank} of {size}"
        yield Finding(_SECTION, "TF_CONFIG", "ok", text)
        return
    other = "no cluster" if described is None else f"rank {described[0]} of {described[1]}"
    text = f"torchrun's variables say rank {rank} of {size} and are taken; TF_CONFIG says {other}"
    remedy = "unset TF_CONFIG, or start the program without torchrun to use it"
    yield Finding(_SECTION, "TF_CONFIG", "warn", text, remedy)


def check_addresses(host: Host, job: Job | None) -> Iterator[Finding]:
    """Resolve the address of each task, and ask the other hosts for an answer."""
    if job is None or job.source in ("torchrun", "Ray Train"):  # of which only the store's address is known
        return
    tasks, findings = _resolve_tasks(host, job)
    yield from findings
    own = f"{job.task_type}:{job.task_id}"
    yield from _check_own(host, [task for task in tasks if task.name == own], tasks)
    others = [task for task in tasks if task.name != own]
    states = host.port_states([(task.addresses[0], task.port) for task in others])
    for task, state in zip(others, states, strict=True):
        if state == "silent":
            text = f"{task.host}:{task.port} does not answer: the host is down, or a firewall drops what is sent"
            yield Finding(_SECTION, task.name, "warn", text, _FIREWALL)
        elif state == "unreachable":
            text = f"there is no way to {task.host} ({task.addresses[0]}) from here"
            yield Finding(_SECTION, task.name, "FAIL", text, "check the address, and the routes between the hosts")
    num_answers = sum(state in ("open", "refused") for state in states)
    if others:
        text = f"{num_answers} of {len(others)} other tasks' hosts answer, {states.count('open')} of the tasks run"
        yield Finding(_SECTION, "other tasks", "ok" if num_answers == len(others) else "info", text)


def check_store(host: Host, job: Job | None) -> Iterator[Finding]:
    """Try the port at which all ranks meet: connect to it, or see whether rank 0 could open it here."""
    if job is None or job.size == 1:
        return
    where = f"{job.address}:{job.port}"
    try:
        address = host.addresses_of(job.address)[0]
    except OSError as error:
        remedy = "write an address that every host can resolve, or mend DNS"
        yield Finding(_SECTION, "store", "FAIL", f"{job.address} does not resolve ({error})", remedy)
        return
    if job.rank == 0 and not job.hosted:
        if host.can_listen("", job.port):
            yield Finding(_SECTION, "store", "ok", f"{where}: the port is free, rank 0 will open it here")
        else:
            text = f"{where}: the port is in use, by this job if it runs now, else by another process"
            yield Finding(_SECTION, "store", "warn", text, f"{_who_listens(job.port)}, or choose another port")
        return
    yield _store_finding(host.port_state(address, job.port), where, job)


def _store_finding(state: PortState, where: str, job: Job) -> Finding:
    if state == "open":
        return Finding(_SECTION, "store", "ok", f"{where} answers")
    if state == "refused" and not job.hosted:
        return Finding(_SECTION, "store", "ok", f"{where}: the host answers; rank 0 has not started yet")
    if state == "refused":
        remedy = "the launcher that kept it has ended: start the job again"
        return Finding(_SECTION, "store", "FAIL", f"{where}: nothing listens there", remedy)
    text = f"{where} does not answer" if state == "silent" else f"there is no way to {where} from here"
    return Finding(_SECTION, "store", "FAIL", text, _FIREWALL)


def _resolve_tasks(host: Host, job: Job) -> tuple[list[_Task], list[Finding]]:
    spec = job.cluster_spec
    pairs = [(kind, index) for kind in spec.jobs for index in spec.task_indices(kind)]
    named = {f"{kind}:{index}": spec.task_address(kind, index) for kind, index in pairs}
    tasks: list[_Task] = []
    findings: list[Finding] = []
    seen: dict[str, str] = {}
    for name, address in named.items():
        other = seen.setdefault(address, name)
        if other != name:
            text = f"{address} is the address of {other} too"
            findings.append(Finding(_SECTION, name, "FAIL", text, "give each task a host and port of its own"))
        try:
            name_or_ip, port = split_address(address, name)
        except ValueError as error:
            findings.append(Finding(_SECTION, name, "FAIL", str(error)))
            continue
        try:
            tasks.append(_Task(name, name_or_ip, port, host.addresses_of(name_or_ip)))
        except OSError as error:
            remedy = "write an address that every host can resolve, or mend DNS"
            findings.append(Finding(_SECTION, name, "FAIL", f"{name_or_ip} does not resolve ({error})", remedy))
    return tasks, findings


def _check_own(host: Host, own: list[_Task], tasks: list[_Task]) -> Iterator[Finding]:
    for task in own:
        has_other_hosts = not all(is_loopback(address) for other in tasks for address in other.addresses)
        if not any(map(host.is_own, task.addresses)):
            text = f"{task.host} ({', '.join(task.addresses)}) is no address of this host"
            remedy = "check the task's index: each host needs its own; a Kubernetes service's address is fine"
            yield Finding(_SECTION, "own address", "warn", text, remedy)
        elif has_other_hosts and all(map(is_loopback, task.addresses)):
            text = f"{task.host} is {', '.join(task.addresses)} here, which other hosts can't reach"
            remedy = f"give {task.host} its real address in /etc/hosts, or write the address into the cluster"
            yield Finding(_SECTION, "own address", "FAIL", text, remedy)
        else:
            yield Finding(_SECTION, "own address", "ok", f"{task.host}:{task.port} is this host")


def _rank_and_size(tf_config: str) -> tuple[int, int] | None:
    """Return rank and size that a ``TF_CONFIG`` gives, ``None`` if it gives none."""
    try:
        config = json.loads(tf_config)
        chiefs, workers = (len(config["cluster"].get(kind, ())) for kind in ("chief", "worker"))
        index = int(config["task"]["index"]) + (chiefs if config["task"]["type"] == "worker" else 0)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return (index, chiefs + workers) if chiefs + workers else None


def _who_listens(port: int) -> str:
    return f"`ss -ltnp 'sport = :{port}'` shows who uses it"
