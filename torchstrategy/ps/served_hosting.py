"""What a scope recorded goes to the parameter servers: adoption on the coordinator."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from typing_extensions import override

from torchstrategy.base.log import warn_once
from torchstrategy.ps.bindings import Binding, Kind, RefreshWhenCalled, refuse_shared_memory
from torchstrategy.ps.served import NO_HOOKS, Served
from torchstrategy.ps.served_optimizers import OptimizerLink
from torchstrategy.ps.served_variables import make_served, serve, served_class
from torchstrategy.replicas import metric_states
from torchstrategy.replicas.hosting import DirectHosting
from torchstrategy.replicas.record import owner
from torchstrategy.replicas.variables import Variable, VariableOptions

__all__ = ["ServedHosting"]

#: Of a table with so many rows a step that updates all of them is much slower than one of a batch's.
_MANY_ROWS = 100_000


class _Buffer(NamedTuple):
    """A buffer of a module, with its tensor that is on the servers."""

    module: weakref.ref[nn.Module]
    name: str
    tensor: Tensor

    def take_back(self) -> None:
        """Where the module has put another tensor in its place, take over its value."""
        module = self.module()
        found = None if module is None else module._buffers.get(self.name)
        if module is None or found is None or isinstance(found, Served):
            return
        if found.shape == self.tensor.shape and found.dtype == self.tensor.dtype:
            with torch.no_grad():
                self.tensor.copy_(found)
            module._buffers[self.name] = self.tensor


class ServedHosting(DirectHosting):
    """Hosts the coordinator's side of a program: its objects stay the user's, their values go to the servers.

    Args:
        strategy: a ``ParameterServerStrategy``; has ``bindings``, ``placer``, ``client`` and ``shipper``.
    """

    holds_values = False

    def __init__(self, strategy: Any) -> None:
        super().__init__(strategy, strategy.placement, None, strategy.record)
        self._links: dict[int, OptimizerLink] = {}
        #: Module's id -> its root, which it does not keep alive, and its path there.
        self._roots: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        #: What is pulled when a root is called.
        self._refreshed: weakref.WeakKeyDictionary[nn.Module, list[Binding]] = weakref.WeakKeyDictionary()
        #: Buffers of a root with their modules and names: a module may put another tensor in the place of one.
        self._buffers: weakref.WeakKeyDictionary[nn.Module, list[_Buffer]] = weakref.WeakKeyDictionary()
        self._num_variables = 0
        self._refused: dict[int, weakref.ref[Any]] = {}

    @override
    def adopt_new(self) -> None:
        if not self._record.has_new:
            return
        new = self._record.take_new()
        waiting = [obj for obj in new if _is_lazy(obj)]
        try:
            refuse_shared_memory(named for obj in new if isinstance(obj, nn.Module) for named in _named_tensors(obj))
            self._find_roots()
            for root in {id(root): root for root in (reference() for reference, _ in self._roots.values())}.values():
                if root is not None and not _is_lazy(root) and not self._was_refused(root):
                    self._take(root)
            while new:
                obj = new.pop(0)
                if not isinstance(obj, Optimizer) or _is_lazy(obj):
                    continue
                if self._refused_modules_of(obj):
                    self._refused[id(obj)] = weakref.ref(obj)  # with its module, whose error was raised
                else:
                    self._take(obj)
        finally:
            for obj in {id(obj): obj for obj in (*new, *waiting)}.values():
                self._record.put_back(obj)
        self._slots = None

    def require(self, obj: Any) -> None:
        """See to it that the servers have an object that a function refers to.

        Raises:
            Exception: why they don't.
        """
        if self._record.has_new and _is_lazy(obj):
            for name, tensor in _named_tensors(obj):
                _check_servable(name, tensor)
        if self._was_refused(obj):
            self._take(obj)

    def take_rest(self, obj: Any) -> None:
        """Put on the servers what a module was given since: a layer outside a scope, another tensor as a buffer."""
        if isinstance(obj, nn.Module) and not all(isinstance(tensor, Served) for _, tensor in _named_tensors(obj)):
            self._take(obj)

    def _refused_modules_of(self, obj: Any) -> list[nn.Module]:
        """Return the modules that were refused and have parameters of an optimizer."""
        if not self._refused or not isinstance(obj, Optimizer):
            return []
        parameters = {id(tensor) for _, tensor in _named_tensors(obj)}
        roots = [root for root in (reference() for reference in self._refused.values()) if isinstance(root, nn.Module)]
        return [root for root in roots if any(id(p) in parameters for p in root.parameters())]

    def _was_refused(self, obj: Any) -> bool:
        reference = self._refused.get(id(obj))
        return reference is not None and reference() is obj

    def _take(self, obj: Any) -> None:
        """Put a root or an optimizer on the servers; one that they refuse is not tried again until it is needed."""
        self._refused[id(obj)] = weakref.ref(obj)
        if isinstance(obj, Optimizer):
            self.adopt_optimizer(obj)
        elif not metric_states.is_metric(obj):
            self._adopt_module(obj)
        del self._refused[id(obj)]

    @override
    def leave_scope(self) -> None:
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
        for number, link in self._links.copy().items():
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
        for root in self._refused_modules_of(optimizer):
            self._take(root)  # says again why it was refused, unless that was mended
        if owner(optimizer) is self._strategy:
            in_no_module = [(name, p) for name, p in _named_tensors(optimizer) if not isinstance(p, Served)]
            for name, parameter in in_no_module:
                _check_servable(name, parameter)
            for name, parameter in in_no_module:
                self._serve(name, parameter, Kind.PARAMETER)
        else:
            if not all(isinstance(parameter, Served) for _, parameter in _named_tensors(optimizer)):
                for reference in [reference for reference, path in self._roots.values() if not path]:
                    self.take_rest(reference())  # which the next function would do
            self._record.own(optimizer)
        link = OptimizerLink(optimizer, number, self._strategy.bindings, _binding_of)
        link.define()
        link.attach()
        self._links[number] = link
        self._warn_of_dense_tables(optimizer)

    def adopt_metric(self, metric: nn.Module) -> None:
        """Take up a metric that was made outside the scope: what workers add to it comes back as to others."""
        self._record.add(metric)
        self._find_roots()

    def _warn_of_dense_tables(self, optimizer: Optimizer) -> None:
        """Name large tables of which every step updates all rows, although a batch looks up few."""
        trained: set[int] = {
            id(p) for _, p in _named_tensors(optimizer) if p.requires_grad and p.dim() and len(p) >= _MANY_ROWS
        }
        if not trained:
            return
        modules = [module for module in self._record if isinstance(module, nn.Module)]
        uses = [
            (m, name, p) for m in modules for name, p in m._parameters.items() if p is not None and id(p) in trained
        ]
        trained.difference_update(id(p) for m, name, p in uses if not _is_table(m, name))  # an output layer, say
        tables: dict[int, Any] = {id(p): p for m, _, p in uses if id(p) in trained and not m.sparse}
        for parameter in tables.values():
            warn_once(
                f"Each step of {type(optimizer).__name__} sends and updates all {len(parameter):,} rows of the "
                f"embedding {parameter.binding.spec.name!r}, also those that no batch looks up. Make it with "
                "sparse=True, and give it an optimizer of its own that knows sparse gradients: torch.optim.SparseAdam, "
                "Adagrad or SGD.",
                of=self,
            )

    def _adopt_module(self, root: nn.Module) -> None:
        for name, tensor in _named_tensors(root):
            if not isinstance(tensor, Served):
                _check_servable(name, tensor)  # all of them, before one is changed
        for buffer in self._buffers.get(root, ()):
            buffer.take_back()
        bindings: list[Binding] = []
        for prefix, module in metric_states.modules_but_metrics(root):
            for kind, tensors in ((Kind.PARAMETER, module._parameters), (Kind.BUFFER, module._buffers)):
                for name, tensor in tensors.items():
                    if tensor is None:
                        continue
                    if not isinstance(tensor, Served):
                        self._serve(f"{prefix}.{name}" if prefix else name, tensor, _kind_of(module, name, kind))
                    bindings.append(tensor.binding)
        self._buffers[root] = [
            _Buffer(weakref.ref(module), name, buffer)
            for _, module in metric_states.modules_but_metrics(root)
            for name, buffer in module._buffers.items()
            if isinstance(buffer, Served)
        ]
        known = self._refreshed.get(root)
        if known is None:
            known = self._refreshed[root] = []
            RefreshWhenCalled(root, self._strategy.bindings, known)
        known[:] = [binding for binding in bindings if binding.kind is not Kind.ROWS]

    def _serve(self, name: str, tensor: Tensor, kind: Kind) -> None:
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


def _is_table(module: nn.Module, name: str) -> bool:
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and name == "weight"


def _kind_of(module: nn.Module, name: str, kind: Kind) -> Kind:
    return Kind.ROWS if _is_table(module, name) and module.sparse else kind


def _named_tensors(obj: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield what of a module, but for its metrics, or of an optimizer the servers hold."""
    if isinstance(obj, Optimizer):
        for k, parameter in enumerate(p for group in obj.param_groups for p in group["params"]):
            yield f"parameter_{k}", parameter
    elif isinstance(obj, nn.Module):
        for prefix, module in _modules_of(obj):
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    yield f"{prefix}.{name}" if prefix else name, tensor


def _is_lazy(obj: Any) -> bool:
    return any(is_lazy(tensor) for _, tensor in _named_tensors(obj))


def _check_servable(name: str, tensor: Tensor) -> None:
    """Check that the servers can hold a parameter or buffer.

    Raises:
        ValueError: it has no shape.
        TypeError: it is of a class of its own.
        NotImplementedError: it has hooks.
    """
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


def _binding_of(tensor: Tensor) -> Binding | None:
    return tensor.binding if isinstance(tensor, Served) else None
