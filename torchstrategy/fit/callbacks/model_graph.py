"""A module's graph of operations for TensorBoard, found by torch.fx without computing anything."""

from __future__ import annotations

import copy
from typing import Any

from torch import fx, nn

from torchstrategy.replicas.mirrored import bodies
from torchstrategy.replicas.record import unrecorded

__all__ = ["model_graph"]


def model_graph(model: nn.Module) -> tuple[Any, Any] | None:
    """Return a ``GraphDef`` and ``RunMetadata``, or ``None`` if the model's operations depend on its data.

    Args:
        model: the model. ``forward`` is called with stand-ins for tensors, on a copy that shares the model's tensors,
            because it may keep what it gets.
    """
    from tensorboard.compat.proto.config_pb2 import RunMetadata  # noqa: PLC0415 - optional
    from tensorboard.compat.proto.graph_pb2 import GraphDef  # noqa: PLC0415
    from tensorboard.compat.proto.node_def_pb2 import NodeDef  # noqa: PLC0415

    graph = _trace(_wrapped(bodies(model)[0]))
    if graph is None:
        return None
    names: dict[fx.Node, str] = {}
    nodes = []
    for node in graph.nodes:
        names[node] = _free_name(_name(node), names)
        inputs = [names[source] for source in node.all_input_nodes]
        nodes.append(NodeDef(name=names[node], op=_operation(node), input=inputs))
    return GraphDef(node=nodes), RunMetadata()


def _wrapped(model: nn.Module) -> nn.Module:
    """Return the module that a ``ts.Model`` was made of, or the model itself."""
    is_ours = type(model).forward.__module__.startswith(f"{__name__.split('.')[0]}.")
    module = model._modules.get("module")
    return module if is_ours and module is not None else model


def _trace(model: nn.Module) -> fx.Graph | None:
    tensors: dict[int, Any] = {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}
    try:
        with unrecorded():
            return fx.Tracer().trace(copy.deepcopy(model, tensors))
    except Exception:  # noqa: BLE001 - user code that gets stand-ins for tensors may raise anything
        return None


def _name(node: fx.Node) -> str:
    """Return a name whose parts, between slashes, are the modules that a node stands in."""
    paths = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    inside = paths[-1].replace(".", "/") if paths else ""
    if node.op == "call_module":
        return inside or str(node.target).replace(".", "/")
    return f"{inside}/{node.name}" if inside else node.name


def _free_name(name: str, names: dict[fx.Node, str]) -> str:
    taken = set(names.values())
    free, count = name, 1
    while free in taken:
        count += 1
        free = f"{name}_{count}"
    return free


def _operation(node: fx.Node) -> str:
    if node.op == "call_module":
        module = node.graph.owning_module
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        return stack[-1][1].__name__ if stack else type(module).__name__
    if node.op in ("placeholder", "output", "get_attr"):
        return {"placeholder": "Input", "output": "Output", "get_attr": "Parameter"}[node.op]
    return str(getattr(node.target, "__name__", node.target))
