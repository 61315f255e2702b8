"""An optimizer that runs where the parameters live: any ``torch.optim.Optimizer``, fed with pushed gradients.

Each parameter server has its own copy of the optimizer, over the parts that it holds. That is right only if the update
of an element needs nothing but this element's gradient and state, which is tried out when the optimizer arrives.
Torch's own optimizers keep nothing but state of single parameters, so several pushes may run at once in them, each
through a shell of the optimizer that sees its own parameters only; others are stepped as a whole, one push at a time.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import pickle
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from torchstrategy.checkpoint.storage import new_tensor
from torchstrategy.errors import InvalidArgumentError, NotFoundError, UnimplementedError
from torchstrategy.ps.optimizer_states import accepts_gradients, refuse_coupling
from torchstrategy.ps.store import Key, ParameterStore, StoredPart, check_rows, check_value, copy_bytes

__all__ = ["Definition", "Gradient", "ServedOptimizer", "as_numbers", "attributes_of", "plain_ones"]

_SMALL_BYTES = 1 << 20
_BATCH_BYTES = 8 << 20  # parts are stepped together up to here, so that a pull does not wait for a whole model's update


class Definition(NamedTuple):
    """What an optimizer is, without parameters and state.

    Attributes:
        cls: its class.
        defaults: its ``defaults``.
        groups: its ``param_groups``, with ids of variables as ``"params"``.
        attributes: what else its constructor left in it.
        sharded: ids of those of its variables that are cut into several parts, wherever these are.
    """

    cls: type[Optimizer]
    defaults: dict[str, Any]
    groups: list[dict[str, Any]]
    attributes: dict[str, Any]
    sharded: frozenset[int]

    @classmethod
    def load(cls, pickled: bytes, sharded: Iterable[int]) -> Definition:
        """Return a definition from its pickled dict of ``class``, ``defaults``, ``groups`` and maybe ``attributes``.

        Raises:
            TypeError: it is something else.
        """
        fields = pickle.loads(pickled)
        if not isinstance(fields, dict) or not {"class", "defaults", "groups"} <= fields.keys():
            raise TypeError(f"An optimizer is defined by its class, defaults and groups. Received: {fields!r:.200}")
        kind = fields["class"]
        if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
            raise TypeError(f"An optimizer is a torch.optim.Optimizer. Received: {kind!r}")
        return cls(kind, fields["defaults"], fields["groups"], fields.get("attributes", {}), frozenset(sharded))


class Gradient(NamedTuple):
    """The gradient of one part: dense, or the rows ``indices`` of it."""

    key: Key
    values: Tensor
    indices: Tensor | None = None


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """Return what a definition needs beside class, defaults and groups: what the constructor left in the optimizer.

    Raises:
        UnimplementedError: one of them holds parameters or another optimizer, or a step needs a closure.
    """
    refuse_closures(type(optimizer))
    attributes = {
        name: value
        for name, value in vars(optimizer).items()
        if name not in ("defaults", "state", "param_groups")
        and not name.startswith(("_optimizer_", "_opt_", "_warned_", "_zero_grad_profile"))
        and not callable(getattr(type(optimizer), name, None))  # a method that somebody has replaced
    }
    for name, value in attributes.items():
        if _holds_parameters(value):
            raise UnimplementedError(
                f"{type(optimizer).__name__} can't run on parameter servers: its attribute {name!r} holds parameters "
                "or another optimizer, which would not be those of the servers."
            )
    return attributes


class ServedOptimizer:
    """One optimizer over the parts of its variables that this server holds. Any thread may call it.

    Args:
        definition: what it is.
        store: has the parts.

    Raises:
        UnimplementedError: its updates couple what lives apart, or it needs a closure.
    """

    def __init__(self, definition: Definition, store: ParameterStore) -> None:
        refuse_closures(definition.cls)
        if not torch._C._check_sparse_tensor_invariants():
            torch._C._set_check_sparse_tensor_invariants(False)  # noqa: FBT003 - said once, so that torch does not warn
        self._name = definition.cls.__name__
        self._is_torchs = definition.cls.__module__.startswith("torch.optim.")
        self._num_threads = torch.get_num_threads()
        self._lock = threading.Lock()  # guards the groups, and a step of an optimizer that is not torch's
        self._parts: dict[Key, StoredPart] = {}
        self._groups_of: dict[Key, int] = {}
        self._accepts: dict[tuple[int, bool], bool] = {}
        groups = []
        for index, group in enumerate(definition.groups):
            found = [item for variable in group["params"] for item in store.parts_of(variable)]
            self._parts.update(found)
            self._groups_of.update((key, index) for key, _ in found)
            groups.append({**group, "params": [part.parameter for _, part in found]})
        #: Hyper-parameters of each group as the program gave them last: what steps have made of others stays.
        self._given = [{name: as_numbers(v) for name, v in group.items() if name != "params"} for group in groups]
        self._optimizer = _make(definition, groups)
        for index, group in enumerate(definition.groups):
            if group["params"]:
                is_sharded = not definition.sharded.isdisjoint(group["params"])
                refuse_coupling(self._name, functools.partial(self._trial, index), is_sharded=is_sharded)
        for part in self._parts.values():
            _start_state(self._optimizer, part.parameter)

    def set_hyper(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take over changed hyper-parameters of each group, such as a scheduler's learning rate.

        Raises:
            ValueError: there is another number of groups.
        """
        self._check_groups(groups)
        with self._lock:
            self._change(groups)
            self._accepts.clear()

    def push(self, gradients: Sequence[Gradient], hyper: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """Update the parts that got gradients, and return their new versions, in order.

        Args:
            gradients: of some parts.
            hyper: hyper-parameters of each group for this step; ``None`` takes those that ``set_hyper`` gave.

        Raises:
            ValueError: ``hyper`` is for another number of groups.
            NotFoundError: a part is not the optimizer's.
            InvalidArgumentError: a gradient has not the part's shape or dtype, or a kind that the optimizer does not
                take.
            IndexError: a row is out of range.
        """
        for gradient in gradients:
            self._check(gradient)
        if len({gradient.key for gradient in gradients}) != len(gradients):
            raise InvalidArgumentError("A push has one gradient for each part.")
        ordered = sorted(gradients, key=lambda gradient: gradient.key)  # an order of locks that all pushes share
        versions: dict[Key, int] = {}
        if hyper is not None:
            self._check_groups(hyper)
        for batch in self._batches(ordered) if self._is_torchs else [ordered]:
            versions.update(zip((gradient.key for gradient in batch), self._update(batch, hyper), strict=True))
        return [versions[gradient.key] for gradient in gradients]

    def state(self, key: Key) -> dict[str, Any]:
        """Return a copy of the state of one part; empty before its first step.

        Raises:
            NotFoundError: the part is not the optimizer's.
        """
        part = self._find(key)
        with part.lock:
            return self.copy_state(key)

    def copy_state(self, key: Key) -> dict[str, Any]:
        """Return the same for who holds the part's lock; empty of a part that is not the optimizer's."""
        state = self._optimizer.state.get(self._parts[key].parameter, {}) if key in self._parts else {}
        return {name: _copied(value) for name, value in state.items()}

    def load_state(self, key: Key, state: Mapping[str, Any]) -> None:
        """Replace the state of one part; an empty one begins anew.

        Raises:
            NotFoundError: the part is not the optimizer's.
        """
        part = self._find(key)
        owned = {name: _copied(value) for name, value in state.items()}
        with part.lock:
            self._optimizer.state.pop(part.parameter, None)
            if owned:
                self._optimizer.state[part.parameter] = owned
            else:
                _start_state(self._optimizer, part.parameter)

    def between_steps(self) -> contextlib.AbstractContextManager[Any]:
        """Return what keeps an optimizer that is not torch's from making a step; it may change its settings in one."""
        return contextlib.nullcontext() if self._is_torchs else self._lock

    def settings(self) -> tuple[list[dict[str, Any]], dict[str, Any], list[dict[str, Any]]]:
        """Return the groups' hyper-parameters as they are now, what else is in the optimizer, and what was given."""
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self._optimizer.param_groups]
        return groups, attributes_of(self._optimizer), self._given

    def load_settings(
        self,
        groups: Sequence[Mapping[str, Any]],
        attributes: Mapping[str, Any],
        given: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        """Take over what ``settings`` returned."""
        self.set_hyper(groups)
        vars(self._optimizer).update(attributes)
        self._given = self._given if given is None else list(given)

    def _check_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        own = self._optimizer.param_groups
        if len(groups) != len(own):
            raise ValueError(f"{self._name} has {len(own)} groups of parameters. Received: {len(groups)}")
        if not all(isinstance(group, Mapping) for group in groups):
            raise ValueError(f"Hyper-parameters of a group are a dictionary. Received: {groups!r:.200}")

    def _change(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Take over what the program has changed; a number of steps that the optimizer has in its group goes on."""
        for group, given, changed in zip(self._optimizer.param_groups, self._given, groups, strict=True):
            for name, new in changed.items():
                value = _of_kind(group.get(name), new)
                if name != "params" and (name not in given or given[name] != as_numbers(value)):
                    group[name], given[name] = value, as_numbers(value)

    def _update(self, gradients: Sequence[Gradient], hyper: Sequence[Mapping[str, Any]] | None) -> list[int]:
        """Step with the parts locked, and return their new versions."""
        parts = [self._parts[gradient.key] for gradient in gradients]
        with contextlib.ExitStack() as stack:
            if not self._is_torchs:
                stack.enter_context(self._lock)
            for part in parts:
                stack.enter_context(part.lock)
            stack.enter_context(self._threads_for(gradients))
            try:
                for part, gradient in zip(parts, gradients, strict=True):
                    part.writable()
                    part.parameter.grad = _as_grad(gradient, part.parameter)
                self._step(gradients, hyper)
            finally:
                for part in parts:
                    part.parameter.grad = None
                    part.version += 1
            return [part.version for part in parts]

    def _step(self, gradients: Sequence[Gradient], hyper: Sequence[Mapping[str, Any]] | None) -> None:
        if not self._is_torchs:
            self._change(hyper or [{}] * len(self._optimizer.param_groups))
            self._optimizer.step()
            return
        for is_sparse in (False, True):
            keys = [gradient.key for gradient in gradients if (gradient.indices is not None) == is_sparse]
            if keys:
                self._shell(keys, hyper, is_sparse=is_sparse).step()

    @contextlib.contextmanager
    def _threads_for(self, gradients: Sequence[Gradient]) -> Iterator[None]:
        """Compute with one thread where all tensors are small: fused kernels share out every tensor.

        With more threads than free cores, 200 tensors of 16 KiB took 0.5 s.
        """
        is_small = all(gradient.values.nbytes <= _SMALL_BYTES for gradient in gradients)
        torch.set_num_threads(1 if is_small else self._num_threads)  # of the calling thread
        try:
            yield
        finally:
            torch.set_num_threads(self._num_threads)

    def _shell(self, keys: Sequence[Key], hyper: Sequence[Mapping[str, Any]] | None, *, is_sparse: bool) -> Optimizer:
        """Return an optimizer of these parts only, which shares its state with the real one."""
        groups: dict[int, dict[str, Any]] = {}
        with self._lock:
            for key in keys:
                index = self._groups_of[key]
                if index not in groups:
                    known = self._optimizer.param_groups[index]
                    own = hyper[index] if hyper else {}
                    groups[index] = {**known, **{name: _of_kind(known.get(name), new) for name, new in own.items()}}
                    groups[index]["params"] = []
                groups[index]["params"].append(self._parts[key].parameter)
        state = self._optimizer.state
        for group in groups.values():
            if "fused" in group:
                group["fused"] = not is_sparse and (group["fused"] or _may_fuse(group, state))
        return _like(self._optimizer, list(groups.values()), state)

    def _check(self, gradient: Gradient) -> None:
        part = self._find(gradient.key)
        shape = part.parameter.shape
        if gradient.indices is not None:
            check_rows(part.name, shape, gradient.indices)
            shape = torch.Size((len(gradient.indices), *shape[1:]))
        check_value(part.name, shape, part.parameter.dtype, gradient.values)
        if not part.parameter.requires_grad:
            raise InvalidArgumentError(f"Variable {part.name!r} is not trainable and takes no gradients.")
        is_sparse = gradient.indices is not None
        if not self._accepts_kind(self._groups_of[gradient.key], is_sparse=is_sparse):
            raise InvalidArgumentError(_wrong_kind(self._name, part.name, is_sparse=is_sparse))

    def _accepts_kind(self, index: int, *, is_sparse: bool) -> bool:
        known = self._accepts.get((index, is_sparse))
        if known is None:
            with self._lock:
                known = accepts_gradients(functools.partial(self._trial, index), is_sparse=is_sparse)
                self._accepts[index, is_sparse] = known
        return known

    def _find(self, key: Key) -> StoredPart:
        part = self._parts.get(key)
        if part is None:
            raise NotFoundError(f"{self._name} has no part {key.part} of a variable {key.variable} on this server.")
        return part

    def _batches(self, gradients: Sequence[Gradient]) -> Iterator[list[Gradient]]:
        batch: list[Gradient] = []
        num_bytes = 0
        for gradient in gradients:
            if batch and num_bytes + gradient.values.nbytes > _BATCH_BYTES:
                yield batch
                batch, num_bytes = [], 0
            batch.append(gradient)
            num_bytes += gradient.values.nbytes
        if batch:
            yield batch

    def _trial(self, index: int, parameters: list[Tensor], is_sparse: bool) -> Optimizer:  # noqa: FBT001
        """Return an optimizer of other parameters, with a rate that shows what it does, to be tried out."""
        group = {**self._optimizer.param_groups[index], "params": parameters}
        if "lr" in group:
            group["lr"] = torch.full_like(group["lr"], 0.1) if isinstance(group["lr"], Tensor) else 0.1
        if is_sparse and "fused" in group:
            group["fused"] = False
        attributes = {k: v for k, v in vars(self._optimizer).items() if k not in ("state", "param_groups")}
        optimizer = _like(self._optimizer, [group], defaultdict(dict))
        vars(optimizer).update(copy.deepcopy(attributes))
        for parameter in parameters:
            _start_state(optimizer, parameter)
        return optimizer


def refuse_closures(cls: type[Optimizer]) -> None:
    """Refuse optimizers that evaluate the model again.

    Raises:
        UnimplementedError: ``cls.step`` can't be called without a closure.
    """
    arguments = list(inspect.signature(cls.step).parameters.values())[1:]
    needed = [a for a in arguments if a.default is a.empty and a.kind not in (a.VAR_POSITIONAL, a.VAR_KEYWORD)]
    if needed or issubclass(cls, torch.optim.LBFGS):
        raise UnimplementedError(
            f"{cls.__name__} needs a closure that evaluates the model again, which a parameter server can't do: it has "
            "parameters and gradients only. Use another optimizer, or another strategy."
        )


def _make(definition: Definition, groups: list[dict[str, Any]]) -> Optimizer:
    """Make an optimizer as unpickling one does: no constructor runs."""
    cls = definition.cls
    optimizer = cls.__new__(cls)
    attributes = copy.deepcopy(definition.attributes)
    state: dict[Tensor, Any] = defaultdict(dict)
    optimizer.__setstate__({**attributes, "defaults": definition.defaults, "state": state, "param_groups": groups})
    return optimizer


def _like(optimizer: Optimizer, groups: list[dict[str, Any]], state: Any) -> Optimizer:
    """Return an optimizer of other parameters, or of other state."""
    other = object.__new__(type(optimizer))
    other.__dict__.update(vars(optimizer), param_groups=groups, state=state)
    return other


def _start_state(optimizer: Optimizer, parameter: Tensor) -> None:
    """Make the state that a constructor would have made: of torch's optimizers, only Adagrad's makes any."""
    if isinstance(optimizer, torch.optim.Adagrad) and not optimizer.state[parameter]:
        value = optimizer.defaults["initial_accumulator_value"]
        filled = complex(value, value) if parameter.is_complex() else value
        optimizer.state[parameter].update(step=torch.tensor(0.0), sum=torch.full_like(parameter.data, filled))


def _copied(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.is_sparse:  # SGD's momentum of sparse gradients
        return value.to_dense()
    copied = new_tensor(value.shape, value.dtype)
    copy_bytes(copied, value)
    return copied


def _may_fuse(group: Mapping[str, Any], state: Mapping[Tensor, Any]) -> bool:
    """Say whether torch's fused kernels can make this step: the group leaves it open, and the state fits them."""
    chosen = any(group.get(name) for name in ("foreach", "differentiable", "capturable")) or group["fused"] is not None
    if chosen or isinstance(group["lr"], Tensor):  # which the plain step computes with in its own precision
        return False
    if not all(parameter.dtype in (torch.float32, torch.float64) for parameter in group["params"]):
        return False
    states = [state.get(parameter, {}) for parameter in group["params"]]
    steps = [own["step"] for own in states if "step" in own]
    buffers = {own.get("momentum_buffer") is not None for own in states}  # SGD's kernel wants all of them or none
    return len(buffers) == 1 and all(isinstance(step, Tensor) and step.dtype == torch.float32 for step in steps)


def plain_ones(group: dict[str, Any]) -> dict[str, Any]:
    """Return what of a group can travel with a push, tensors as numbers: all that schedulers change is of this kind."""
    values = {name: as_numbers(value) for name, value in group.items()}
    return {name: value for name, value in values.items() if _is_plain(value)}


def as_numbers(value: Any) -> Any:
    """Return a hyper-parameter with numbers in the place of tensors, which servers give back their dtype."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(as_numbers, value))
    return value.tolist() if isinstance(value, Tensor) else value


def _is_plain(value: Any) -> bool:
    """Say whether JSON gives a value back as it is, but for tuples; others come by ``set_hyper``."""
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def _of_kind(known: Any, value: Any) -> Any:
    """Return a hyper-parameter that has come as numbers as the tensor that it was, if it was one."""
    if isinstance(known, (tuple, list)) and isinstance(value, (tuple, list)) and len(known) == len(value):
        return type(known)(map(_of_kind, known, value))
    return torch.as_tensor(value, dtype=known.dtype) if isinstance(known, Tensor) and value is not None else value


def _as_grad(gradient: Gradient, parameter: Tensor) -> Tensor:
    if gradient.indices is None:
        return gradient.values
    # The rows were checked; torch trusts the flag, so it is not taken from elsewhere.
    is_coalesced = bool((gradient.indices[1:] > gradient.indices[:-1]).all())
    return torch.sparse_coo_tensor(
        gradient.indices[None], gradient.values, parameter.shape, check_invariants=False, is_coalesced=is_coalesced
    )


def _wrong_kind(optimizer: str, variable: str, *, is_sparse: bool) -> str:
    if is_sparse:
        return (
            f"{optimizer}, as it is set, does not take sparse gradients such as that of variable {variable!r}. For "
            "embeddings choose SparseAdam or Adagrad, or SGD without weight decay, or make the layer with "
            "sparse=False."
        )
    return (
        f"{optimizer} does not take dense gradients such as that of variable {variable!r}. Choose Adam for it, in an "
        "optimizer of its own, or make the layer with sparse=True."
    )


def _holds_parameters(value: Any) -> bool:
    if isinstance(value, (torch.nn.Parameter, Optimizer, torch.nn.Module)):
        return True
    if isinstance(value, Mapping):
        return any(map(_holds_parameters, (*value.keys(), *value.values())))
    return isinstance(value, (list, tuple, set)) and any(map(_holds_parameters, value))
