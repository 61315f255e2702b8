"""Looks whether a replica differentiates a mean over its own share of the batch, or a term that every replica adds.

Gradients are added up over replicas, so such a step is N times as large as one replica's. What counts is what the loss
is, not how the program calls it: the graph of the scalar that ``backward`` or ``grad`` starts from is followed through
scalar operations to where a mean is taken, by torch's losses, by ``mean``, or as a sum over the number of its elements,
divided before or after it is made. Any factor that is a replica's part of the batch counts as meant, and any division
but by the number of means that are added up, in the loss or over the backward passes of an accumulation.

A term of parameters only, such as a penalty on weights, is looked for beside others; replica 0 may add it for all.
"""

from __future__ import annotations

import math
import re
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch.utils._python_dispatch import _disable_current_modes

from torchstrategy.base.devices import is_capturing, kind_of
from torchstrategy.base.log import CallSite, users_frame, warn_once_at

__all__ = ["NUM_LOOKS", "FoundMean", "MeanLossCheck"]

#: In so many first sums of an optimizer the losses are looked at.
NUM_LOOKS = 3
#: A graph of so many scalar operations is not followed to its end.
_MAX_NODES = 1000
#: In a sum of sums so many terms are looked at.
_MAX_TERMS = 16
#: What `_saved_reduction` is for a mean and for a sum.
_MEAN, _SUM = 1, 2
#: What leaves a sum one, but for a sign or a constant factor, and what adds sums up.
_KEEPS = ("NegBackward", "MulBackward", "ToCopyBackward")
_ADDS = ("AddBackward", "SubBackward", "RsubBackward")
#: The backward functions of collectives between replicas: what is above one is of all replicas.
_COLLECTIVES = ("_AllReduce", "_AllGather")
_STACKS = ("StackBackward", "CatBackward")
#: What makes terms of parameters, and takes nothing that this can't see.
_OF_PARAMETERS = (
    *_KEEPS, *_ADDS, *_STACKS, "PowBackward", "AbsBackward", "SqrtBackward", "ExpBackward", "LogBackward",
    "SumBackward", "NormBackward", "LinalgVectorNormBackward", "ViewBackward", "TBackward", "TransposeBackward",
    "PermuteBackward", "SelectBackward", "SliceBackward", "MmBackward", "SigmoidBackward", "SoftmaxBackward",
    "LogSoftmaxBackward", "SoftplusBackward", "ReluBackward", "ClampBackward",
)  # fmt: skip


class FoundMean(NamedTuple):
    """A mean that a backward pass has started from: what takes it, divides it, and where ``backward`` was called."""

    name: str
    divisor: float
    site: CallSite


class MeanLossCheck:
    """Warns once of a strategy's losses that are means over a replica's share of the batch."""

    def __init__(self) -> None:
        #: In how many further sums losses are looked at.
        self.num_looks = NUM_LOOKS
        self._found: FoundMean | None = None
        self._num_passes: Counter[int] = Counter()  # by replica, since the last sum
        #: By replica, by what terms of parameters only are multiplied, and where.
        self._terms: dict[int, tuple[float, CallSite]] = {}
        #: The gradients of means that ``torch.autograd.grad`` has returned: the program may assign them.
        self._computed: list[tuple[weakref.ref[Tensor], FoundMean]] = []

    def find(self, outputs: Iterable[Any], grad_outputs: Iterable[Tensor | None], context: Any) -> FoundMean | None:
        """Look at what a replica is about to differentiate, in the first sums.

        Args:
            outputs: where the backward pass starts.
            grad_outputs: the gradients it starts with, one for each output; ``None`` means 1.
            context: the replica's.

        Returns:
            The first mean among the outputs that nothing scales, or that may be of an accumulation.
        """
        counts = _Counts(context)
        with _disable_current_modes():  # the numbers in a graph are no part of what a mode watches
            for output, grad in zip(outputs, grad_outputs, strict=True):
                node = output.grad_fn if isinstance(output, Tensor) and output.numel() == 1 else None
                mean = None if node is None else _find_mean(node, counts)
                if mean is not None and _is_one(grad):
                    return FoundMean(*mean, users_frame())
        return None

    def before_backward(self, outputs: Iterable[Any], grad_outputs: Iterable[Tensor | None], context: Any) -> None:
        """Look at what a replica is about to differentiate by ``backward``; ``find`` has the arguments."""
        self._num_passes[context._replica_id] += 1
        outputs, grad_outputs = list(outputs), list(grad_outputs)
        if self.num_looks == 0 or self._found is not None:
            return
        self._found = self.find(outputs, grad_outputs, context)
        only = outputs[0] if len(outputs) == 1 else None
        if isinstance(only, Tensor) and only.numel() == 1 and _is_one(grad_outputs[0]):
            with _disable_current_modes():
                factor = _factor_of_parameters(only.grad_fn, _Counts(context))
            if factor is not None:
                self._terms[context._replica_id] = factor, users_frame()

    def note_computed(self, mean: FoundMean, gradients: Iterable[Tensor | None]) -> None:
        """Remember the gradients of a mean that ``torch.autograd.grad`` has returned."""
        alive = [entry for entry in self._computed if entry[0]() is not None]  # a program may never sum
        self._computed = alive + [(weakref.ref(grad), mean) for grad in gradients if grad is not None]

    def before_sum(self, parameters: Sequence[Tensor], *, is_new: bool, is_edited: bool) -> None:
        """Warn if what is summed comes from such a loss.

        Args:
            parameters: whose gradients are to be summed.
            is_new: whether it is the first sum of these.
            is_edited: whether the program has changed a gradient after its backward pass.
        """
        self.num_looks = max(0, (NUM_LOOKS if is_new else self.num_looks) - 1)
        found, self._found = self._found, None
        terms, self._terms = self._terms, {}
        num_passes, self._num_passes = max(self._num_passes.values(), default=0), Counter()
        computed, self._computed = self._computed, []
        if computed and found is None:
            summed = {id(parameter.grad) for parameter in parameters if parameter.grad is not None}
            found = next((mean for reference, mean in computed if id(reference()) in summed), None)
        if is_edited or any(_has_hooks(parameter) for parameter in parameters):
            return
        if found is None or found.divisor not in {1, num_passes}:
            self._warn_of_terms(terms)
            return
        warn_once_at(
            found.site,
            f"The loss that is differentiated at {found.site} is a mean over this replica's share of the batch "
            f"({found.name}), but the gradients of all replicas are added up: the step becomes larger with each "
            "replica, and examples of small shares weigh more. Average over the global batch: take the loss of each "
            "example, such as by reduction='none', and "
            'ts.nn.compute_average_loss(per_example_loss, global_batch_size="actual"); or, for a loss that comes as a '
            "mean, such as a model's own, ts.nn.scale_mean_loss(loss). A term that every replica computes alike, such "
            "as a penalty on weights, goes through ts.nn.scale_regularization_loss.",
            of=self,
        )

    def _warn_of_terms(self, terms: dict[int, tuple[float, CallSite]]) -> None:
        """Warn of terms of parameters only, which all replicas add alike."""
        factors = {factor for factor, _ in terms.values()}
        if len(factors) != 1 or math.isnan(*factors) or max(terms) == 0:
            return
        site = terms[min(terms)][1]  # other replicas' threads may not have the program's lines
        warn_once_at(
            site,
            f"The loss that is differentiated at {site} has a term of parameters only, such as a penalty on weights or "
            "a learned scale. Every replica adds it, and the gradients of all replicas are added up, so it counts once "
            "for each replica. Give it to ts.nn.scale_regularization_loss, which divides it by their number.",
            of=self,
        )


class _Counts:
    """The numbers by which a program may scale a loss to a replica's part of the global one."""

    def __init__(self, context: Any) -> None:
        self._num_replicas = context.num_replicas_in_sync
        # What the library divides by may happen to be the size of a tensor.
        self._looks_at_sizes = not context.has_scaled_losses
        self._looks_at_divisors = self._looks_at_sizes and not context._scaled_losses
        self._totals = {float(self._num_replicas), *(float(t) for t in context._totals if _can_be_read(t))}
        self.factors = {1.0 / self._num_replicas}
        shares, num_own = context.batch_shares, context._num_own_examples
        if shares is not None and num_own is not None:
            self._totals |= {float(shares.total), float(shares.divisor)}
            self.factors |= {float(num_own), *(num_own / total for total in (shares.total, shares.divisor) if total)}

    def has_factor(self, number: float) -> bool:
        """Say whether a factor may be a replica's part of the batch."""
        return any(math.isclose(number, factor, rel_tol=1e-5) for factor in self.factors)

    def may_average(self, number: float | None) -> bool:
        """Say whether a divisor may be a number of means, and is none by which a program scales to the global batch."""
        is_count = number is not None and number >= 1 and number.is_integer()
        return is_count and self._looks_at_divisors and number not in self._totals

    def is_own_size(self, number: float, sizes: Sequence[int]) -> bool:
        """Say whether a divisor is the number of elements of a replica's own tensor, along its first axes."""
        if not self._looks_at_sizes or not sizes or number <= 1:
            return False
        if number in self._totals or number == sizes[0] * self._num_replicas:
            return False
        return any(number == math.prod(sizes[: k + 1]) for k in range(len(sizes)))


def _find_mean(root: Any, counts: _Counts) -> tuple[str, float] | None:
    """Return what takes a mean in the graph of a scalar, and by what this is divided, 1 if it is one of as many."""
    seen, waiting, divided = {root}, [(root, 1.0)], []
    while waiting and len(seen) < _MAX_NODES:
        node, divisor = waiting.pop()
        name = _mean_of(node, counts)
        if name is not None:
            if divisor == 1:
                return name, 1
            divided.append((name, divisor))
            continue
        if node.name().startswith("DivBackward"):
            divisor *= _number(node, "_saved_other") or math.nan
        for child in _below(node, counts):
            if child not in seen:
                seen.add(child)
                waiting.append((child, divisor))
    return next(((name, 1 if len(divided) == divisor else divisor) for name, divisor in divided), None)


def _factor_of_parameters(root: Any, counts: _Counts) -> float | None:
    """Return by what the terms of a sum that depend on parameters only are multiplied, if others do not."""
    if root is None:
        return None
    factor, has_others = None, False
    seen, waiting = {root}, [(root, 1.0)]
    while waiting and len(seen) < _MAX_NODES:
        node, scale = waiting.pop()
        children = [child for child, _ in node.next_functions if child is not None]
        is_scaled = _is_scaled_here(node, counts)
        if is_scaled or not (node.name().startswith(_ADDS) or (len(children) == 1 and node.name().startswith(_KEEPS))):
            is_term = not is_scaled and _is_of_parameters(node)
            factor, has_others = scale if is_term else factor, has_others or not is_term
            continue
        if node.name().startswith("MulBackward"):
            number = _number(node, "_saved_other")
            scale *= math.nan if number is None else number  # what it is can't be told
        for child in children:
            if child.name().endswith("AccumulateGrad"):
                factor = scale if math.prod(child.variable.shape) == 1 else factor
            elif child not in seen:
                seen.add(child)
                waiting.append((child, scale))
    return factor if has_others else None


def _is_scaled_here(node: Any, counts: _Counts) -> bool:
    number = _number(node, "_saved_other") if node.name().startswith("MulBackward") else None
    return node.name().startswith("DivBackward") or (number is not None and counts.has_factor(number))


def _is_of_parameters(node: Any) -> bool:
    """Say whether nothing but parameters and numbers is in what an operation makes, as far as its graph tells."""
    seen, waiting = {node}, [node]
    while waiting:
        node = waiting.pop()
        if node.name().endswith("AccumulateGrad"):
            continue
        children = [child for child, _ in node.next_functions]
        if not node.name().startswith(_OF_PARAMETERS) or (None in children and not _takes_number(node)):
            return False
        if len(seen) > _MAX_NODES:
            return False
        waiting += (new := {*children} - seen - {None})
        seen |= new
    return True


def _takes_number(node: Any) -> bool:
    """Say whether what an operation of scalars combines with parameters is a number, such as the 0 of a sum."""
    # asking others than scalars for saved tensors could compute them anew
    return _is_scalar(node) and (node.name().startswith(_ADDS) or _number(node, "_saved_other") is not None)


def _mean_of(node: Any, counts: _Counts) -> str | None:
    """Return the name of what takes a mean in one operation, or of a sum that is divided by its size."""
    kind = node.name()
    if kind.startswith("MeanBackward"):
        return "mean" if _num_averaged(node) > 1 and not _is_scaled_below(node, counts) else None
    if getattr(node, "_saved_reduction", None) == _MEAN:
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind.partition("Backward")[0]).lower()
    divisor = _own_size_below(node, counts) if kind.startswith("SumBackward") else None
    number = _number(node, "_saved_other") if kind.startswith(("DivBackward", "MulBackward")) else None
    if number and kind.startswith("MulBackward"):  # by the inverse of a size, perhaps
        number = None if counts.has_factor(number) else round(1 / number, 6)
    if number is not None and any(counts.is_own_size(number, sizes) for sizes in _sums_below(node, counts)):
        divisor = number
    return None if divisor is None else f"a sum over {divisor:g}, the number of its elements"


def _below(node: Any, counts: _Counts) -> Iterator[Any]:
    """Yield the scalars that an operation combines, unless it scales them."""
    kind = node.name()
    if kind.startswith(_COLLECTIVES):
        return
    if kind.startswith("DivBackward") and not counts.may_average(_number(node, "_saved_other")):
        return
    if kind.startswith("MulBackward"):
        numbers = [_number(node, name) for name in ("_saved_self", "_saved_other")]
        if any(number is not None and counts.has_factor(number) for number in numbers):
            return
    for child, _ in node.next_functions:
        if child is None:
            continue
        if _is_scalar(child):
            yield child
        elif kind.startswith(("SumBackward", "MeanBackward")) and child.name().startswith(_STACKS):
            yield from (member for member, _ in child.next_functions if member is not None and _is_scalar(member))


def _sums_below(node: Any, counts: _Counts) -> Iterator[Sequence[int]]:
    """Yield the sizes of what is added up in the sums that an operation is of, but for signs and constant factors."""
    waiting = [node]
    for _ in range(_MAX_TERMS):
        if not waiting:
            return
        node = waiting.pop()
        children = [child for child, _ in node.next_functions if child is not None and _is_scalar(child)]
        if len(children) > 1 and not node.name().startswith(_ADDS):
            continue
        for child in children:
            kind = child.name()
            if kind.startswith("SumBackward"):
                if not _is_scaled_below(child, counts):
                    yield child._saved_self_sym_sizes
            elif getattr(child, "_saved_reduction", None) == _SUM:
                yield from _sizes_of_examples(child)
            elif kind.startswith((*_KEEPS, *_ADDS)):
                waiting.append(child)


def _sizes_of_examples(node: Any) -> Iterator[Sequence[int]]:
    """Yield the sizes of what one of torch's losses adds up; asking for saved tensors could compute them anew."""
    child, index = node.next_functions[0]
    if child is None:
        return
    sizes = tuple(child._input_metadata[index].shape)
    yield sizes
    if node.name().startswith("NllLoss") and len(sizes) > 1:  # of one class each
        yield (sizes[0], *sizes[2:])


def _own_size_below(node: Any, counts: _Counts) -> float | None:
    """Return the number of a replica's own elements by which each of them has been divided before a sum."""
    for _ in range(4):
        (node, *others) = [child for child, _ in node.next_functions if child is not None] or [node]
        if others or not node.name().startswith((*_KEEPS, "DivBackward", "SumBackward")):
            return None
        if not node.name().startswith("DivBackward"):
            continue
        number, sizes = _number(node, "_saved_other"), tuple(node._input_metadata[0].shape)
        # Half a square, and the mean over axes of each example, are common and no mean over examples.
        if number is None or number in {2, *sizes[1:], math.prod(sizes[1:])}:
            return None
        return number if counts.is_own_size(number, sizes) else None
    return None


def _is_scaled_below(node: Any, counts: _Counts) -> bool:
    """Say whether what an operation adds up has been divided by one number, or scaled to a part of the batch."""
    for _ in range(4):
        (node, *others) = [child for child, _ in node.next_functions if child is not None] or [node]
        if others or not node.name().startswith(("MulBackward", "DivBackward", "NegBackward")):
            return False
        number = _number(node, "_saved_other")
        if number is not None and (node.name().startswith("DivBackward") or counts.has_factor(number)):
            return True
    return False


def _num_averaged(node: Any) -> int:
    """Return how many elements a mean is of; 1 if it is one of each example, of which there may be just one."""
    sizes = tuple(node._saved_self_sym_sizes)
    axes = [axis % (1 << 64) for axis in getattr(node, "_saved_dim", None) or ()]
    kept = [axis for axis in range(len(sizes)) if axes and not {axis, (axis - len(sizes)) % (1 << 64)} & set(axes)]
    return 1 if 0 in kept else math.prod(size for axis, size in enumerate(sizes) if axis not in kept)


def _is_scalar(node: Any) -> bool:
    """Say whether an operation gives one number; what has no operation above it is a parameter."""
    return not node.name().endswith("AccumulateGrad") and all(math.prod(o.shape) == 1 for o in node._input_metadata)


def _number(node: Any, name: str) -> float | None:
    """Return a number that an operation has kept for its backward pass; ``None`` if it has kept none, or a tensor."""
    value = getattr(node, name, None)
    if isinstance(value, Tensor):
        value = value.detach().item() if value.numel() == 1 and _can_be_read(value) else None
    return float(value) if isinstance(value, (int, float)) else None


def _is_one(grad: Tensor | None) -> bool:
    """Say whether a backward pass starts with 1, as it does by default; so does what can't be read."""
    return grad is None or (grad.numel() == 1 and (not _can_be_read(grad) or grad.detach().item() == 1))


def _can_be_read(tensor: Tensor) -> bool:
    are_many = is_functorch_wrapped_tensor(tensor) or is_legacy_batchedtensor(tensor)  # as in vmap
    if are_many or tensor.is_meta or torch.compiler.is_compiling():
        return False
    return tensor.is_cpu or not (kind_of(tensor.device).is_traced or is_capturing(tensor.device.type))


def _has_hooks(parameter: Tensor) -> bool:
    """Say whether the program has hooks on a parameter, which may scale its gradient; one is the library's."""
    return bool(parameter._backward_hooks) or len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ()) > 1
