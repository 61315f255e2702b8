"""What a scope recorded goes to the parameter servers: adoption on the coordinator."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from typing_extensions import override

from torchstrategy.parameter_server.bindings import Binding, Kind, RefreshWhenCalled
from torchstrategy.parameter_server.optimizers import OptimizerLink
from torchstrategy.parameter_server.served import NO_HOOKS, Served, make_served, serve, served_class
from torchstrategy.replicas import metric_states
from torchstrategy.replicas.hosting import DirectHosting
from torchstrategy.replicas.record import owner
from torchstrategy.replicas.variables import Variable, VariableOptions

__all__ = ["ServedHosting"]


class ServedHosting(DirectHosting):
    """Hosts the coordinator's side of a program: its objects stay the user's, their values go to the servers.

    Args:
        strategy: a ``ParameterServerStrategy``; has ``bindings``, ``placer``, ``client`` and ``shipper``.
    """

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy, strategy.placement, None, strategy.record, _nothing)
        self._links: dict[int, OptimizerLink] = {}
        #: Module's id -> its root, which it does not keep alive, and its path there.
        self._roots: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        #: What is pulled when a root is called.
        self._refreshed: weakref.WeakKeyDictionary[nn.Module, list[Binding]] = weakref.WeakKeyDictionary()
        self._num_variables = 0

    @override
    def adopt_new(self) -> None:
        if not self._record.has_new:
            return
        new = self._record.take_new()
        try:
            self._find_roots()
            for root in {id(root): root for root in (reference() for reference, _ in self._roots.values())}.values():
                if root is not None and not metric_states.is_metric(root):
                    self._adopt_module(root)
            while new:  # what was refused is not tried again by the next scope
                obj = new.pop(0)
                if isinstance(obj, Optimizer):
                    self.adopt_optimizer(obj)
        except BaseException:
            for obj in new:
                self._record.put_back(obj)
            raise
        self._slots = None

    @override
    def leave_scope(self) -> None:
        if any(not _is_lazy(obj) for obj in self._record.peek_new()):
            self.adopt_new()

    def make_variable(self, value: Tensor, options: VariableOptions) -> Variable:
        """Make a ``ts.Variable`` on the servers."""
        binding = self._create(options.name, value, Kind.VARIABLE, trainable=options.trainable)
        variable: Variable = make_served(served_class(binding.spec), self._strategy.bindings, binding, options)
        self._record.own(variable)
        return variable

    def root_of(self, obj: Any) -> tuple[Any, str]:
        """Return the outermost recorded module that contains a recorded module, and the way to it."""
        reference, path = self._roots.get(id(obj), (None, ""))
        root = None if reference is None else reference()
        return (obj, "") if root is None else (root, path)

    def send_changes(self) -> None:
        """Tell the servers what the program changed: values that it wrote, and hyper-parameters."""
        self._strategy.bindings.write_back(self._strategy.bindings.by_id.values())
        for number, link in list(self._links.items()):
            if link.is_needed:
                link.send_changes()
            else:
                del self._links[number]

    def adopt_optimizer(self, optimizer: Optimizer) -> None:
        """Make an optimizer's counterpart on the servers.

        Raises:
            ValueError: it has parameters that the servers don't have, or can't update there.
        """
        number = self._strategy.shipper.number(optimizer)
        if number in self._links:
            return
        if owner(optimizer) is self._strategy:
            for k, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
                if not isinstance(parameter, Served):  # made in the scope, in no module
                    self._serve(f"parameter_{k}", parameter, Kind.PARAMETER)
        else:
            self._record.own(optimizer)
        link = OptimizerLink(optimizer, number, self._strategy.bindings, _binding_of)
        link.define()
        link.attach()
        self._links[number] = link

    def _adopt_module(self, root: nn.Module) -> None:
        bindings: list[Binding] = []
        for prefix, module in metric_states.modules_but_metrics(root):
            for kind, tensors in ((Kind.PARAMETER, module._parameters), (Kind.BUFFER, module._buffers)):
                for name, tensor in tensors.items():
                    if tensor is None:
                        continue
                    if not isinstance(tensor, Served):
                        self._serve(f"{prefix}.{name}" if prefix else name, tensor, _kind_of(module, name, kind))
                    bindings.append(tensor.binding)
        known = self._refreshed.get(root)
        if known is None:
            known = self._refreshed[root] = []
            RefreshWhenCalled(root, self._strategy.bindings, known)
        known[:] = [binding for binding in bindings if binding.kind is not Kind.ROWS]

    def _serve(self, name: str, tensor: Tensor, kind: Kind) -> None:
        if is_lazy(tensor):
            raise ValueError(
                f"The parameter {name!r} of a lazy module has no shape yet, so it can't be put on a parameter server. "
                "Call the module once with an example input inside the scope, right after it is made."
            )
        if type(tensor) not in (nn.Parameter, torch.Tensor):
            raise TypeError(
                f"The parameter or buffer {name!r} is a {type(tensor).__name__}, which parameter servers don't hold. "
                "Use an nn.Parameter, a plain tensor or a ts.Variable."
            )
        if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
            raise NotImplementedError(NO_HOOKS.format(name=name))
        binding = self._create(name, tensor.detach(), kind, trainable=isinstance(tensor, nn.Parameter))
        binding.requires_grad = tensor.requires_grad
        serve(tensor, self._strategy.bindings, binding)

    def _create(self, name: str, value: Tensor, kind: Kind, *, trainable: bool) -> Binding:
        strategy = self._strategy
        spec = strategy.placer.place(self._num_variables, name, tuple(value.shape), value.dtype, trainable)
        self._num_variables += 1
        strategy.client.create(spec, value.cpu())
        binding: Binding = strategy.bindings.add(spec, kind)
        return binding

    def _find_roots(self) -> None:
        modules = [obj for obj in self._record if isinstance(obj, nn.Module)]
        children = {id(child) for module in modules for child in _descendants(module)}
        self._roots = {}
        for root in modules:
            if id(root) not in children:
                reference = weakref.ref(root)
                for path, module in _modules_of(root):
                    self._roots.setdefault(id(module), (reference, path))


def _modules_of(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that belong to a root: of a metric all, of another one not its metrics, which are roots."""
    return root.named_modules() if metric_states.is_metric(root) else metric_states.modules_but_metrics(root)


def _descendants(root: nn.Module) -> Iterator[nn.Module]:
    return (module for _, module in _modules_of(root) if module is not root)


def _kind_of(module: nn.Module, name: str, kind: Kind) -> Kind:
    looks_up = isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and name == "weight" and module.sparse
    return Kind.ROWS if looks_up else kind


def _is_lazy(obj: Any) -> bool:
    return isinstance(obj, nn.Module) and any(is_lazy(p) for p in (*obj.parameters(), *obj.buffers()))


def _binding_of(tensor: Tensor) -> Binding | None:
    return tensor.binding if isinstance(tensor, Served) else None


def _nothing(_: Any) -> None:
    pass
