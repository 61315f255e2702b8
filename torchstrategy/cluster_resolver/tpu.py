"""``TPUClusterResolver``: the hosts of a TPU, and starting the devices of this one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torchstrategy.base import how_to_install
from torchstrategy.base.addresses import join_address, split_address
from torchstrategy.base.job import Job
from torchstrategy.base.later import explains_absent
from torchstrategy.cluster_resolver.cluster_spec import ClusterSpec
from torchstrategy.cluster_resolver.detect import find_job
from torchstrategy.cluster_resolver.multi_worker_util import task_count
from torchstrategy.cluster_resolver.resolver import ClusterResolver, format_master_url, make_service
from torchstrategy.errors import UnimplementedError
from torchstrategy.xla import system
from torchstrategy.xla.runtime import TpuRuntime, get_runtime, is_installed

__all__ = ["TPUClusterResolver", "TPUSystemMetadata", "initialize_system"]

_LOCAL = "local"
_DEFAULT_PORT = 8470
_CACHE = "TORCHSTRATEGY_XLA_CACHE"


class TPUSystemMetadata(NamedTuple):
    """What a TPU system has, as ``tf.tpu.experimental.TPUSystemMetadata``.

    Args:
        num_cores: devices on all hosts.
        num_hosts: hosts.
        num_of_cores_per_host: devices on each host.
        topology: a ``ts.tpu.experimental.Topology``; ``None`` before the system is initialised.
        devices: names of this process's devices.
    """

    num_cores: int
    num_hosts: int
    num_of_cores_per_host: int
    topology: Any
    devices: list[str]


@explains_absent("cluster_resolver.TPUClusterResolver")
class TPUClusterResolver(ClusterResolver):
    """Says where the hosts of a TPU are.

    PyTorch programs run on the hosts themselves: there, pass ``"local"``. Addresses and names are for programs that
    want to know where these hosts are.

    Args:
        tpu: ``"local"``, addresses such as ``"grpc://10.0.0.2:8470,grpc://10.0.0.3:8470"``, or the name of a Cloud TPU;
            ``None`` and an empty string look at ``KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS`` and ``TPU_NAME``.
        zone: zone of a TPU that is given by name.
        project: project of a TPU that is given by name.
        job_name: the job that the hosts belong to.
        coordinator_name: a job to add for the program that drives the TPU; needs ``coordinator_address``.
        coordinator_address: its address.
        credentials: Google's credentials; ``"default"`` asks ``google.auth`` for them.
        service: a client of the API ``tpu``, version ``v1``, or what acts like one; ``None`` makes one.
        discovery_url: a URL template for Google's client to find the API.
        environ: the environment variables to read instead of ``os.environ``. Not in tf.

    Raises:
        ValueError: no TPU is given, a name comes without zone and project, or a coordinator without address.
        ImportError: a name is given, but neither a service nor the client's package is there.

    Example:
        >>> resolver = ts.cluster_resolver.TPUClusterResolver("grpc://10.0.0.2,grpc://10.0.0.3:8471")
        >>> resolver.cluster_spec()
        ClusterSpec({'worker': ['10.0.0.2:8470', '10.0.0.3:8471']})
        >>> resolver.master()
        'grpc://10.0.0.2:8470'
    """

    def __init__(  # noqa: PLR0913 - tf's arguments
        self,
        tpu: str | None = None,
        zone: str | None = None,
        project: str | None = None,
        job_name: str = "worker",
        coordinator_name: str | None = None,
        coordinator_address: str | None = None,
        credentials: Any = "default",
        service: Any = None,
        discovery_url: str | None = None,
        *,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        environ = os.environ if environ is None else environ
        self._tpu = tpu or environ.get("KUBE_GOOGLE_CLOUD_TPU_ENDPOINTS") or environ.get("TPU_NAME")
        if not self._tpu:
            raise ValueError(
                "Please provide a TPU Name to connect to. On a TPU's own host it is 'local'; else pass addresses such "
                "as 'grpc://10.0.0.2:8470', or a name with zone and project."
            )
        self._coordinator: dict[str, list[str]] = {}
        if coordinator_name:
            if not coordinator_address:
                raise ValueError(f"The coordinator {coordinator_name!r} needs an address: pass coordinator_address.")
            self._coordinator[coordinator_name] = [coordinator_address]
        self._task_type: str = job_name
        self._task_id = 0
        self._node = ""
        if self._is_name:
            if not (zone and project):
                raise ValueError(f"The TPU {self._tpu!r} is given by name: pass its zone and project as well.")
            self._node = f"projects/{project}/locations/{zone}/nodes/{self._tpu}"
            self._service = make_service("tpu", credentials, discovery_url) if service is None else service

    @staticmethod
    def connect(tpu: str | None = None, zone: str | None = None, project: str | None = None) -> TPUClusterResolver:
        """Make a resolver and initialise the TPU: all that comes before ``ts.TPUStrategy(resolver)``.

        Args:
            tpu: as for the constructor.
            zone: zone of a TPU that is given by name.
            project: project of a TPU that is given by name.

        Returns:
            The resolver.

        Raises:
            ImportError: torch_xla is not installed, or does not fit to torch.
            NotFoundError: this host has no TPU.
            RuntimeError: something lives on the TPU already.
            UnimplementedError: the TPU is not this host's.
        """
        resolver = TPUClusterResolver(tpu, zone, project)
        initialize_system(resolver)
        return resolver

    def cluster_spec(self) -> ClusterSpec:
        """Return the TPU's hosts, and the coordinator if there is one; an empty cluster for ``"local"``.

        Raises:
            RuntimeError: the TPU of this name is not ready.
        """
        if self._tpu == _LOCAL:
            return ClusterSpec({})
        hosts = self._hosts_of_name() if self._is_name else [_with_port(part) for part in str(self._tpu).split(",")]
        return ClusterSpec({self._task_type: hosts, **self._coordinator})

    def master(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,  # noqa: ARG002 - tf's is always grpc
    ) -> str:
        """Return the address of a task, the TPU's first host unless told otherwise; ``""`` for ``"local"``.

        Args:
            task_type: the task's job.
            task_id: its index there.
            rpc_layer: without meaning here: the protocol is ``"grpc"``.

        Raises:
            ValueError: there is no such task.
        """
        if self._tpu == _LOCAL:
            return ""
        if task_type is None or task_id is None:
            task_type, task_id = self._task_type, self._task_id or 0
        return format_master_url(self.cluster_spec().task_address(task_type, task_id), "grpc")

    def get_master(self) -> str:
        """Return ``master()``."""
        return self.master()

    def get_job_name(self) -> str:
        """Return the job that the TPU's hosts belong to."""
        return self._task_type

    def get_coordination_service_leader(self) -> str:
        """Return tf's name of the TPU's first host."""
        return f"/job:{self._task_type}/task:0"

    def get_tpu_system_metadata(self) -> TPUSystemMetadata:
        """Return how many devices and hosts the TPU has.

        Raises:
            UnimplementedError: the TPU is not this host's, or torch_xla is not installed.
        """
        runtime = self._runtime("get_tpu_system_metadata")
        if runtime is None:
            raise UnimplementedError(
                f"Nothing is known about TPUs without torch_xla: {how_to_install('tpu')}, with PJRT_DEVICE=TPU."
            )
        num_cores, num_here = runtime.count_devices()
        names = [f"/job:localhost/replica:0/task:0/device:TPU:{index}" for index in range(num_here)]
        started = system.current()
        topology = None if started is None else started.topology
        return TPUSystemMetadata(num_cores, num_cores // max(num_here, 1), num_here, topology, names)

    def num_accelerators(
        self,
        task_type: str | None = None,  # noqa: ARG002
        task_id: int | None = None,  # noqa: ARG002
        config_proto: Any = None,  # noqa: ARG002
    ) -> dict[str, int]:
        """Return ``{"TPU": number of devices on this host}``, whatever the arguments are; nothing is started.

        Virtual devices count if they are asked for by ``PJRT_DEVICE=CPU``.

        Raises:
            UnimplementedError: the TPU is not this host's.
        """
        runtime = self._runtime("num_accelerators")
        return {"TPU": 0 if runtime is None else runtime.count_devices()[1]}

    @property
    def _is_name(self) -> bool:
        return self._tpu != _LOCAL and not any(mark in str(self._tpu) for mark in ":,.")

    def _hosts_of_name(self) -> list[str]:
        node = self._service.projects().locations().nodes().get(name=self._node).execute()
        if node.get("state") != "READY":
            raise RuntimeError(f"TPU {self._tpu!r} is not yet ready; state: {node.get('state')!r}.")
        endpoints = node.get("networkEndpoints") or [node]
        return [join_address(endpoint["ipAddress"], int(endpoint["port"])) for endpoint in endpoints]

    def _runtime(self, method: str) -> TpuRuntime | None:
        """Return the runtime; ``None`` if torch_xla is not installed or finds no devices that are meant."""
        self.check_local(method)
        if not is_installed():
            return None
        runtime = get_runtime()
        return runtime if runtime.is_requested else None

    def check_local(self, what: str) -> None:
        """See that the TPU is this host's.

        Args:
            what: for the message: what can't be done otherwise.

        Raises:
            UnimplementedError: it is another machine's.
        """
        if self._tpu != _LOCAL:
            raise UnimplementedError(
                f"{what} can't reach a TPU from another machine, because torch_xla can't. Run the program on the "
                "TPU's host with TPUClusterResolver('local')."
            )


def initialize_system(
    resolver: TPUClusterResolver,
    cache_path: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
) -> system.TpuSystem:
    """Start the devices of this process: one of them if the process is one of a job's, else all.

    Args:
        resolver: where the TPU is.
        cache_path: a folder for compiled programs; ``None`` means that of ``TORCHSTRATEGY_XLA_CACHE``, if any.
        environ: the environment variables; ``None`` means those of this process.

    Raises:
        ImportError: torch_xla is not installed, or does not fit to torch.
        NotFoundError: this host has no TPU.
        RuntimeError: something lives on the TPU already.
        UnimplementedError: the TPU is not this host's.
    """
    environ = os.environ if environ is None else environ
    resolver.check_local("initialize_tpu_system")
    cache_path = cache_path or environ.get(_CACHE) or None
    job = find_job(environ=environ)
    if job is None or job.size == 1:
        return system.initialize(spmd=True, cache_path=cache_path)
    local_rank, local_size = _place_on_host(job)
    return system.initialize(
        spmd=False, local_rank=local_rank, local_size=local_size, num_processes=job.size, cache_path=cache_path
    )


def _place_on_host(job: Job) -> tuple[int, int]:
    """Return a process's number among those of its host, and how many these are."""
    if job.local_rank is not None and job.local_size is not None:
        return job.local_rank, job.local_size
    spec = job.cluster_spec
    tasks = [(kind, index) for kind in ("chief", "worker") for index in range(task_count(spec, kind))]
    hosts = [split_address(spec.task_address(*task), job.source)[0] for task in tasks]
    here = [rank for rank, host in enumerate(hosts) if host == hosts[job.rank]]
    return here.index(job.rank), len(here)


def _with_port(address: str) -> str:
    address = address.strip().removeprefix("grpc://")
    return address if ":" in address else f"{address}:{_DEFAULT_PORT}"
