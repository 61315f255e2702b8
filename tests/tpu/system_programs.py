"""What the tests of the TPU system run in processes of their own."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn

import torchstrategy as ts
from tests.programs import Lines
from tests.tpu.runtime_programs import message_of
from torchstrategy.xla.runtime import get_runtime

initialize = ts.tpu.experimental.initialize_tpu_system
shutdown = ts.tpu.experimental.shutdown_tpu_system


def in_tf_order() -> dict[str, Any]:
    before = ts.config.list_logical_devices("TPU")
    resolver = ts.cluster_resolver.TPUClusterResolver("local")
    ts.config.experimental_connect_to_cluster(resolver)
    topology = initialize(resolver)
    strategy = ts.TPUStrategy(resolver)
    assignment = ts.tpu.experimental.DeviceAssignment.build(topology, computation_shape=[4, 1, 1, 1])
    return {
        "devices": (before, [device.name for device in ts.config.list_logical_devices("TPU")]),
        "topology": (topology.mesh_shape, topology.num_tasks, topology.num_tpus_per_task),
        "metadata": resolver.get_tpu_system_metadata()[:3],
        "knows_topology": resolver.get_tpu_system_metadata().topology is topology,
        "accelerators": resolver.num_accelerators(),
        "replicas": strategy.num_replicas_in_sync,
        "one_replica": ts.TPUStrategy(resolver, assignment).num_replicas_in_sync,
    }


def strategy_first() -> tuple[str, int]:
    message = message_of(ts.TPUStrategy)
    initialize()
    return message, ts.TPUStrategy().num_replicas_in_sync


def connects() -> int:
    return ts.TPUStrategy(ts.cluster_resolver.TPUClusterResolver.connect("local")).num_replicas_in_sync


def initialises_again() -> dict[str, str]:
    """Return what is said with nothing alive, then with each kind of object."""
    initialize()
    log = Lines()
    initialize()
    device = get_runtime().device
    said = {"nothing": "\n".join(log.lines)}
    strategy = ts.TPUStrategy()
    said["strategy"] = message_of(initialize)
    del strategy
    tensor = torch.zeros(3, 5, device=device)
    said["tensor"] = message_of(initialize)
    del tensor
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).to(device)
    said["module"] = message_of(initialize)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(torch.ones(4, 3, device=device)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    said["optimizer"] = message_of(initialize)
    del net, optimizer
    gc.collect()
    said["deleted"] = message_of(initialize)
    return said


def initialises_after_a_tensor_of_the_program() -> str:
    import torch_xla.runtime

    torch_xla.runtime.use_spmd()
    tensor = torch.zeros(7, device="xla")
    message = message_of(initialize)
    assert tensor.shape == (7,)
    return message


def shuts_down() -> dict[str, Any]:
    said: dict[str, Any] = {"too early": message_of(shutdown)}
    initialize()
    log = Lines()
    strategy = ts.TPUStrategy()
    with strategy.scope():
        net = nn.Linear(3, 2)
    strategy.run(net, (torch.ones(1, 3),))
    shutdown()
    said["log"] = [line for line in log.lines if "shut down" in line]
    said["run"] = message_of(strategy.run, lambda: None)
    said["scope"] = message_of(strategy.scope)
    said["new strategy"] = message_of(ts.TPUStrategy)
    said["devices"] = ts.config.list_logical_devices("TPU")
    said["with a module alive"] = message_of(initialize)
    del net, strategy
    gc.collect()
    initialize()
    strategy = ts.TPUStrategy()
    said["anew"] = [int(i) for i in strategy.experimental_local_results(strategy.run(_replica_id))]
    del strategy
    gc.collect()
    shutdown()
    said["quiet"] = [line for line in log.lines if "shut down" in line][1:]
    return said


def _replica_id() -> torch.Tensor:
    return torch.as_tensor(ts.get_replica_context().replica_id_in_sync_group) * 1


def wrong_resolvers() -> list[str]:
    said = []
    for call in (initialize, shutdown):
        for resolver in (
            ts.cluster_resolver.TPUClusterResolver("grpc://10.0.0.2:8470"),
            ts.cluster_resolver.TFConfigClusterResolver(),
        ):
            try:
                call(resolver)
            except (TypeError, ts.errors.UnimplementedError) as error:
                said.append(f"{type(error).__name__}: {error}")
    return said
