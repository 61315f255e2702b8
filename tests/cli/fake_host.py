"""A host whose environment, names and ports a test chooses."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torchstrategy.base.job import Job
from torchstrategy.cli.host import Host
from torchstrategy.cluster_resolver.cluster_spec import ClusterSpec


@dataclass(frozen=True)
class FakeHost(Host):
    environ: Mapping[str, str] = field(default_factory=dict)
    name: str = "node0"
    interfaces: tuple[str, ...] = ("lo", "eth0")
    num_cores: int = 8
    num_gpus: int = 0
    shm_bytes: int | None = 8 << 30
    max_open_files: int | None = 65536
    cuda_version: str | None = None
    driver_version: str | None = None
    num_tpu_chips: int = 0
    torch_xla_version: str | None = None
    torch_tpu_version: str | None = None
    names: Mapping[str, str] = field(default_factory=lambda: {"node0": "10.0.0.1", "node1": "10.0.0.2"})
    own: tuple[str, ...] = ("127.0.0.1", "127.0.1.1", "10.0.0.1")
    busy: tuple[int, ...] = ()
    states: Mapping[tuple[str, int], str] = field(default_factory=dict)

    def addresses_of(self, name):
        if name.replace(".", "").isdigit():
            return [name]
        if name not in self.names:
            raise OSError("Name or service not known")
        return [self.names[name]]

    def is_own(self, address):
        return address in self.own

    def can_listen(self, address, port):
        return port not in self.busy

    def port_state(self, address, port):
        return self.states.get((address, port), "refused")


def make_job(**changes):
    values = {
        "source": "TF_CONFIG",
        "reason": "TF_CONFIG has a cluster",
        "cluster_spec": ClusterSpec({"worker": ["node0:2222", "node1:2222"]}),
        "task_type": "worker",
        "task_id": 0,
        "rank": 0,
        "size": 2,
        "address": "node0",
        "port": 2222,
    }
    return Job(**{**values, **changes})


def only(findings, name):
    """Return the one finding of that name."""
    (finding,) = [finding for finding in findings if finding.name == name]
    return finding
