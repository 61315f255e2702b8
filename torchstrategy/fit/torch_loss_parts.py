"""torch's own losses, which average over the examples they are given, taken apart: a loss for each element.

A module is copied for each call and the copy's ``reduction`` set to ``"none"``, so the user's object stays as it is,
and the copy has the weights of the current replica. ``make_part`` takes apart whatever ``compile`` is given.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchstrategy import errors, losses
from torchstrategy.base.context import has_strategy
from torchstrategy.base.devices import kind_of
from torchstrategy.fit import label_checks
from torchstrategy.fit.label_checks import shape_of
from torchstrategy.fit.loss_parts import (
    FunctionLoss,
    LossPart,
    ObjectLoss,
    check_labels_between_0_and_1,
    chosen_crossentropy,
    loss_object,
    one_for_each_example,
    predictions_of,
)
from torchstrategy.losses.loss import Loss, as_tensor
from torchstrategy.replicas.mirrored import resolve
from torchstrategy.replicas.record import owner
from torchstrategy.strategies.default import get_strategy

__all__ = ["TorchLoss", "make_part"]


@dataclass(frozen=True)
class _Kind:
    """What is known of one of torch's losses.

    Args:
        module: its module class.
        labels: ``"values"`` have the predictions' shape, ``"classes"`` are class ids.
        predictions: what predictions must be.
        takes_logits: whether 0 is the border between two classes.
        has_class_weights: whether a mean divides by the sum of the labels' class weights, without ignored labels.
    """

    module: type[nn.Module]
    labels: str = "values"
    predictions: str = "numbers"
    takes_logits: bool = False
    has_class_weights: bool = False


_KINDS: dict[str, _Kind] = {
    "binary_cross_entropy": _Kind(nn.BCELoss, predictions="probabilities"),
    "binary_cross_entropy_with_logits": _Kind(nn.BCEWithLogitsLoss, takes_logits=True),
    "cross_entropy": _Kind(nn.CrossEntropyLoss, "classes", takes_logits=True, has_class_weights=True),
    "hinge_embedding_loss": _Kind(nn.HingeEmbeddingLoss),
    "huber_loss": _Kind(nn.HuberLoss),
    "kl_div": _Kind(nn.KLDivLoss, predictions="logarithms"),
    "l1_loss": _Kind(nn.L1Loss),
    "mse_loss": _Kind(nn.MSELoss),
    "multi_margin_loss": _Kind(nn.MultiMarginLoss, "classes"),
    "multilabel_margin_loss": _Kind(nn.MultiLabelMarginLoss, "class sets"),
    "multilabel_soft_margin_loss": _Kind(nn.MultiLabelSoftMarginLoss, takes_logits=True),
    "nll_loss": _Kind(nn.NLLLoss, "classes", "logarithms", has_class_weights=True),
    "poisson_nll_loss": _Kind(nn.PoissonNLLLoss),
    "smooth_l1_loss": _Kind(nn.SmoothL1Loss),
    "soft_margin_loss": _Kind(nn.SoftMarginLoss, takes_logits=True),
}
#: Losses whose arguments are more than predictions and labels.
_TAKES_MORE: dict[str, tuple[type[nn.Module], str]] = {
    "cosine_embedding_loss": (nn.CosineEmbeddingLoss, "two predictions and labels"),
    "ctc_loss": (nn.CTCLoss, "the lengths of predictions and labels as well"),
    "gaussian_nll_loss": (nn.GaussianNLLLoss, "variances as well"),
    "margin_ranking_loss": (nn.MarginRankingLoss, "two predictions and labels"),
    "triplet_margin_loss": (nn.TripletMarginLoss, "three predictions"),
    "triplet_margin_with_distance_loss": (nn.TripletMarginWithDistanceLoss, "three predictions"),
}
_REDUCTIONS = ("mean", "batchmean", "sum", "none")


class TorchLoss(LossPart):
    """A loss module, or a function of ``torch.nn.functional``; called with predictions first, as in torch.

    Reduction ``"mean"`` is the mean that torch would take over the global batch, ``"sum"`` the sum over it. With
    ``"none"``, the mean over elements is taken.

    Args:
        loss: a module, a function, or a ``functools.partial`` of a function with keyword arguments.

    Raises:
        ValueError: the loss can't be taken apart.
    """

    def __init__(self, loss: Any) -> None:
        self.loss = loss
        self.is_module = isinstance(loss, nn.Module)
        function = loss.func if isinstance(loss, functools.partial) else loss
        super().__init__(_name(resolve(loss) if self.is_module else function))
        self.kind = self._find_kind(function)
        self.takes_logits = self.kind is not None and self.kind.takes_logits
        self.class_axis = 1 if self.kind is not None and self.kind.labels == "classes" else -1
        reduction = self._option("reduction", "none" if self.is_module else "mean")
        if reduction not in _REDUCTIONS or (reduction == "batchmean" and self.kind is not _KINDS["kl_div"]):
            raise ValueError(
                f"loss={self.name} has reduction={reduction!r}, which compile can't take apart. Use 'mean', 'sum' or "
                "'none'."
            )
        self.is_sum = reduction == "sum"
        self.adds_elements = reduction == "batchmean"
        self._check_options()

    def losses(self, y: Any, y_pred: Tensor) -> Tensor:  # noqa: D102 - the base class's
        scores = predictions_of(y_pred)
        labels = y
        if self.kind is not None:
            labels = self._fitting_labels(self.kind, as_tensor(y, "y", scores.device), scores)
        return one_for_each_example(
            self._with_reduction("none", scores.device)(scores, labels), labels, y_pred, self.name
        )

    def has_divisor(self, y: Any, sample_weight: Any) -> bool:  # noqa: ARG002, D102
        if self.is_sum or self.kind is None or not self.kind.has_class_weights:
            return False
        # Probabilities of classes are divided by the number of examples, in torch too.
        return not (isinstance(y, Tensor) and y.dtype.is_floating_point)

    def divisor(self, y: Any, sample_weight: Any) -> Tensor:  # noqa: ARG002, D102
        labels = as_tensor(y, "y")
        counts = labels != self._option("ignore_index", -100)
        weight: Tensor | None = self._option("weight", None)
        if weight is None:
            return torch.sum(counts)
        weight = weight.to(labels.device, torch.float64 if kind_of(labels.device).has_float64 else None)
        # No boolean index, which would wait for the device; labels that are no classes are the loss's business.
        return torch.as_tensor((weight[labels.long().clamp(0, len(weight) - 1)] * counts).sum())

    def counts_all(self, y: Any) -> bool:  # noqa: D102
        has_weights = self._option("weight", None) is not None
        return not has_weights and not bool((as_tensor(y, "y") == self._option("ignore_index", -100)).any())

    def check(self, y: Any, y_pred: Tensor) -> None:  # noqa: D102
        scores = y_pred.detach().float()
        if self.kind is None:
            self._check_that_means_agree(y, y_pred)
            return
        labels = self._fitting_labels(self.kind, as_tensor(y, "y", scores.device).detach(), scores)
        if scores.numel() == 0:
            return
        if self.kind.predictions == "probabilities":
            remedy = "Use torch.nn.BCEWithLogitsLoss if the model returns logits, or end it with torch.nn.Sigmoid()."
            label_checks.check_between_0_and_1(scores, self.name, remedy)
        elif self.kind.predictions == "logarithms":
            remedy = "End the model with torch.nn.LogSoftmax(dim=1)" + (
                ", or use torch.nn.CrossEntropyLoss, which takes logits." if self.kind.labels == "classes" else "."
            )
            label_checks.check_log_probabilities(scores, self.name, remedy)
        if self.kind.module in (nn.BCELoss, nn.BCEWithLogitsLoss):
            check_labels_between_0_and_1(labels, self.name)
        if self.kind.labels == "classes" and not labels.dtype.is_floating_point:
            ignored = self._option("ignore_index", -100) if self.kind.has_class_weights else None
            label_checks.check_class_ids(labels, scores.shape[1], ignored, self.name)
        if type(resolve(self.loss)) is not self.kind.module and self.is_module:
            self._check_that_means_agree(labels, y_pred)

    def _fitting_labels(self, kind: _Kind, labels: Tensor, scores: Tensor) -> Tensor:
        """Return labels of the dtype that torch wants, after a look at their shape."""
        if kind.labels != "classes":
            _check_same_shape(labels, scores, self.name)
            return labels.to(scores.dtype) if kind.labels == "values" else labels.long()
        if labels.dtype.is_floating_point and kind.module is nn.CrossEntropyLoss and labels.shape == scores.shape:
            return labels.to(scores.dtype)
        classes = tuple(scores.shape[:1]) + tuple(scores.shape[2:])
        remedy = "Convert them: y.long(). Numbers to be predicted are for torch.nn.MSELoss."
        if scores.ndim < 2 or labels.shape != classes:
            raise errors.InvalidArgumentError(
                f"{self.name} takes predictions of shape [batch, classes, ...] and class ids of shape [batch, ...] as "
                f"labels. Received: y_pred {shape_of(scores)}, y {shape_of(labels)} of dtype {labels.dtype}. "
                + _remedy_of_class_shapes(labels, scores, classes)
            )
        label_checks.check_integer_labels(labels, self.name, remedy)
        return labels.long()

    def _with_reduction(self, reduction: str, device: torch.device) -> Callable[[Tensor, Any], Any]:
        """Return what computes the loss, with another reduction and with class weights on a device."""
        if self.is_module:
            body = resolve(self.loss)
            loss: nn.Module = object.__new__(type(body))
            loss.__dict__.update(body.__dict__)  # a tenth of what copy.copy and a module's own setattr take
            if hasattr(loss, "reduction"):
                loss.__dict__["reduction"] = reduction
            if any(buffer is not None and buffer.device != device for buffer in loss._buffers.values()):
                moved = {name: None if buffer is None else buffer.to(device) for name, buffer in loss._buffers.items()}
                loss.__dict__["_buffers"] = moved
            return loss
        function, keywords = self._function_and_keywords()

        def call(scores: Tensor, labels: Any) -> Any:
            moved = {key: x.to(device) if isinstance(x, Tensor) else x for key, x in keywords.items()}
            return function(scores, labels, **(moved | {"reduction": reduction}))

        return call

    def _check_that_means_agree(self, y: Any, y_pred: Tensor) -> None:
        """Compare a module's own mean with what is made of its parts, because we did not write it."""
        reduction = self._option("reduction", "none")
        if reduction == "none" or y_pred.shape[0] == 0 or not label_checks.is_readable(y_pred):
            return
        with torch.no_grad():
            scores = predictions_of(y_pred.detach())
            # A call of forward runs no hooks, which would warn of the mean.
            own = self._with_reduction(reduction, scores.device).forward(scores, y)  # type: ignore[attr-defined]
            parts = self.losses(y, scores)
            num_elements = self.divisor(y, None) if self.has_divisor(y, None) else parts.numel()
            total = parts.sum()
            taken = total if self.is_sum else total / (parts.shape[0] if self.adds_elements else num_elements)
        if not isinstance(own, Tensor) or own.ndim or not torch.allclose(own.to(taken), taken, 1e-4, 1e-6, True):  # noqa: FBT003
            raise errors.InvalidArgumentError(
                f"loss={self.name} can't be taken apart: with reduction={reduction!r} it gives {own}, but with 'none' "
                f"the {'sum' if self.is_sum else 'mean'} over the same batch is {taken}. So its loss over all replicas'"
                " examples is not known. Give it reduction='none', and let it return one loss for each example, of "
                "which the mean is taken."
            )

    def _find_kind(self, function: Any) -> _Kind | None:
        plain: Any = resolve(function) if self.is_module else function
        for name, (module, what) in _TAKES_MORE.items():
            if isinstance(plain, module) or plain is getattr(F, name):
                raise ValueError(
                    f"loss={self.name} can't be used by name or object: it takes {what}, and compile gives a loss "
                    "predictions and labels only. Write a function f(y_true, y_pred) that returns one loss for each "
                    f"example: torch.nn.functional.{name}(..., reduction='none')."
                )
        for name, kind in _KINDS.items():
            if isinstance(plain, kind.module) or plain is getattr(F, name):
                return kind
        if self.is_module:
            return None
        raise ValueError(
            f"loss={self.name}: this function of torch.nn.functional is no loss that can be taken apart into examples. "
            "Write a function f(y_true, y_pred) that returns one loss for each example."
        )

    def _option(self, name: str, default: Any) -> Any:
        if self.is_module:
            return getattr(resolve(self.loss), name, default)
        return self._function_and_keywords()[1].get(name, default)

    def _function_and_keywords(self) -> tuple[Any, dict[str, Any]]:
        if isinstance(self.loss, functools.partial):
            return self.loss.func, self.loss.keywords
        return self.loss, {}

    def _check_options(self) -> None:
        if isinstance(self.loss, functools.partial) and (
            self.loss.args or {"reduce", "size_average"} & set(self.loss.keywords)
        ):
            raise ValueError(
                f"loss={self.name}: bind keyword arguments only, and reduction instead of size_average or reduce: "
                f"functools.partial(torch.nn.functional.{self.name}, reduction='mean')."
            )
        weight = self._option("weight", None)
        if weight is None or self.kind is None or self.kind.labels == "classes":
            return
        is_of_classes = self.kind.module in (nn.BCELoss, nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss)
        if not is_of_classes or (weight.ndim > 1 and weight.shape[0] != 1):
            raise ValueError(
                f"loss={self.name} has weights of shape {shape_of(weight)} for the examples of one batch, which can't "
                "be split over replicas. Give weights with the data: fit(x, y, sample_weight=...)."
            )


def is_torch_function(loss: Any) -> bool:
    """Say whether a loss is a function of ``torch.nn.functional``, perhaps with some arguments bound.

    Args:
        loss: anything.
    """
    function = loss.func if isinstance(loss, functools.partial) else loss
    name = getattr(function, "__name__", None)
    return isinstance(name, str) and getattr(F, name, None) is function


def _name(loss: Any) -> str:
    return getattr(loss, "__name__", None) or type(loss).__name__


def _check_same_shape(labels: Tensor, scores: Tensor, name: str) -> None:
    if labels.shape == scores.shape:
        return
    remedy = "Labels must have one number for each of the model's outputs."
    if labels.ndim == scores.ndim - 1 and scores.shape[-1] == 1:
        remedy = "Write y.unsqueeze(-1) (y[:, None] in NumPy), or end the model with torch.nn.Flatten(0)."
    elif labels.ndim == scores.ndim + 1 and labels.shape[-1] == 1:
        remedy = "Write y.squeeze(-1) (y[:, 0] in NumPy)."
    raise errors.InvalidArgumentError(
        f"{name} takes labels of the predictions' shape; torch would broadcast them. Received: y {shape_of(labels)}, "
        f"y_pred {shape_of(scores)}. {remedy}"
    )


def _remedy_of_class_shapes(labels: Tensor, scores: Tensor, classes: tuple[int, ...]) -> str:
    if tuple(labels.shape) == (*classes, 1) or (labels.ndim == scores.ndim == 2 and labels.shape[1] == 1):
        return "Write y.squeeze(-1) (y[:, 0] in NumPy)."
    if labels.shape == scores.shape:
        return "For one-hot labels, write y.argmax(1), or y.float() with CrossEntropyLoss."
    if scores.ndim > 2 and tuple(labels.shape) == tuple(scores.shape[:-1]):
        return "The classes must be the second axis: y_pred.movedim(-1, 1). (ts.losses takes them last.)"
    return "The model's output must have one number for each class."


_CROSSENTROPIES = ("crossentropy", "ce")


def make_part(loss: Any) -> LossPart | None:
    """Return the loss of an output.

    To be called in the strategy's scope: modules made outside it are noted for the strategy.

    Args:
        loss: a name, an object, a class, a module or a function; ``None`` for no loss.

    Raises:
        ValueError: the name is not known, or the loss can't be taken apart into those of examples.
        TypeError: it is nothing of the above.
    """
    if loss is None:
        return None
    if isinstance(loss, str) and loss.lower() in _CROSSENTROPIES:
        return _AnyCrossentropy(loss)
    if inspect.isclass(loss) and issubclass(loss, (Loss, nn.Module)):
        loss = loss()
    loss = loss_object(losses.get(loss))
    if isinstance(loss, Loss):
        return ObjectLoss(loss)
    if isinstance(loss, nn.Module):
        part = TorchLoss(loss)
        _note_for_the_strategy(loss)
        return part
    return TorchLoss(loss) if is_torch_function(loss) else FunctionLoss(loss)


class _AnyCrossentropy(LossPart):
    """``loss="crossentropy"``: the one that fits the shapes."""

    def losses(self, y: Any, y_pred: Tensor) -> Tensor:
        return ObjectLoss(chosen_crossentropy(y, y_pred)).losses(y, y_pred)

    def check(self, y: Any, y_pred: Tensor) -> None:
        ObjectLoss(chosen_crossentropy(y, y_pred)).check(y, y_pred)


def _note_for_the_strategy(module: nn.Module) -> None:
    """Let each replica have the module's weights, which may have been made outside the scope, on its device."""
    if has_strategy() and owner(module) is None:
        for part in module.modules():
            get_strategy().record.add(part)
