"""The part of ``ts.Model`` that runs on replicas: the steps, which subclasses may override, and what they use."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchstrategy.base.later import explains_absent
from torchstrategy.base.names import snake_case
from torchstrategy.base.values import example_counts, note_scaled
from torchstrategy.fit.arguments import entry_point
from torchstrategy.fit.batch_parts import unpack_x_y_sample_weight
from torchstrategy.fit.calling import call_arguments, explain_failed_call, explain_unexpected, watch_modes, with_mode
from torchstrategy.fit.steps import current_step
from torchstrategy.fit.trainer import ATTRIBUTE, Trainer, is_metric, trainer_of
from torchstrategy.losses.layer_losses import losses_of
from torchstrategy.nn import scale_mean_loss, scale_regularization_loss
from torchstrategy.optimizers.by_name import check_takes_no_closure
from torchstrategy.replicas.mirrored import resolve
from torchstrategy.strategies.default import get_replica_context, get_strategy

if TYPE_CHECKING:
    from torchstrategy.fit.callbacks.callback import History
    from torchstrategy.strategies.strategy import Strategy

__all__ = ["TrainableModule"]

_FUNCTIONAL = (
    "there is no functional API. Derive from ts.Model and call the layers in forward(self, x), or give it a module: "
    "ts.Model(torch.nn.Sequential(...))."
)


@explains_absent("Model")
class TrainableModule(nn.Module):
    """The base of ``ts.Model``: how it is called, its steps and its attributes.

    Args:
        module: the module to train; ``None`` for subclasses that define ``forward``.
        name: the model's name in messages; ``None`` means the class's name in snake case.
    """

    @entry_point("ts.Model", inputs=_FUNCTIONAL, outputs=_FUNCTIONAL, layers="make it of torch.nn.Sequential(*layers).")
    def __init__(self, module: nn.Module | None = None, name: str | None = None) -> None:
        super().__init__()
        if module is not None and not isinstance(module, nn.Module):
            raise TypeError(
                f"ts.Model wraps a torch.nn.Module: ts.Model(torch.nn.Sequential(...)). Received: {module!r}"
            )
        self.__dict__[ATTRIBUTE] = Trainer(get_strategy())
        if module is not None:
            self.module = module
        self.name = name if name is not None else snake_case(type(self if module is None else module).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model with the ``x`` of a batch: a tensor, several in a tuple or list, or a dict of them.

        In a step a ``forward`` with Keras' parameter ``training`` gets the mode, as Keras' own steps give it.
        """
        if len(args) == 1 and not kwargs and not isinstance(args[0], Tensor):
            args, kwargs = call_arguments(self._with_forward.forward, args[0])
        state = current_step()
        if state.method:
            kwargs = with_mode(self._with_forward, args, kwargs)
        watched = watch_modes(self._with_forward) if state.is_checked else []
        try:
            if state.autocast is None:
                return super().__call__(*args, **kwargs)
            with torch.autocast(trainer_of(self).device_of(self).type, state.autocast):
                return super().__call__(*args, **kwargs)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            unexpected = explain_unexpected(self._with_forward, kwargs) if isinstance(error, TypeError) else None
            if unexpected is not None:
                raise TypeError(unexpected) from None  # forward has not begun
            if state.is_checked and not isinstance(error, NotImplementedError):
                raise explain_failed_call(error, self, state.method, args, kwargs) from error
            raise
        finally:
            for handle in watched:
                handle.remove()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the predictions; subclasses override it.

        Args:
            args: the inputs; ``x`` of the data, or its parts if it is a tuple or list.
            kwargs: the entries of ``x`` if it is a dict.

        Returns:
            A tensor ``[batch, ...]``, or a tuple, list or dict of them for several outputs.

        Raises:
            NotImplementedError: there is no wrapped module, and the subclass does not define ``forward``.
        """
        if "module" not in self._modules:
            if hasattr(type(self), "call"):
                raise NotImplementedError(f"{type(self).__name__} defines `call`, as in Keras: name it `forward`.")
            raise NotImplementedError(
                f"{type(self).__name__} must define forward(self, x), or be given a module: ts.Model(module)."
            )
        return self.module(*args, **kwargs)

    def train_step(self, data: Any) -> dict[str, Any] | None:
        """Train on one replica's share of a batch. Replica context.

        An override computes a loss, calls ``self.minimize(loss)`` and returns what logs show.

        Args:
            data: ``(x, y)``, ``(x, y, sample_weight)``, or whatever the dataset holds.

        Returns:
            What logs show besides the metrics that were updated, by name: metrics, which are read over all replicas, or
            scalars, which are shown as their mean over replicas in the last step. A name of a metric means that metric.
        """
        x, y, sample_weight = unpack_x_y_sample_weight(data)
        y_pred = self(x)
        loss = self.compute_loss(x, y, y_pred, sample_weight)
        self.track_loss(loss)
        self.minimize(loss)
        return self.compute_metrics(x, y, y_pred, sample_weight)

    def test_step(self, data: Any) -> dict[str, Any] | None:
        """Evaluate one replica's share of a batch; as ``train_step``, without an update. Replica context."""
        x, y, sample_weight = unpack_x_y_sample_weight(data)
        y_pred = self(x)
        own = type(resolve(self)).compute_loss
        if self.loss is not None or trainer_of(self).layer_losses.of(self) or own is not TrainableModule.compute_loss:
            mode = {"training": False} if _takes_training(own) else {}  # as in Keras, an override may do without
            self.track_loss(self.compute_loss(x, y, y_pred, sample_weight, **mode))
        return self.compute_metrics(x, y, y_pred, sample_weight)

    def predict_step(self, data: Any) -> Any:
        """Return the predictions for one replica's share of a batch. Replica context."""
        return self(unpack_x_y_sample_weight(data)[0])

    def compute_loss(
        self,
        x: Any = None,  # noqa: ARG002 - for overrides
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,  # noqa: ARG002, FBT001, FBT002 - tf's signature
    ) -> Tensor:
        """Return this replica's share of the loss: the sum over replicas is that of the global batch. Replica context.

        An override divides by the size of the global batch too:
        ``ts.nn.compute_average_loss(per_example_loss, global_batch_size="actual")``.

        Args:
            x: inputs.
            y: labels.
            y_pred: predictions.
            sample_weight: weights of examples, or ``None``.
            training: whether the model is trained or evaluated.

        Returns:
            A scalar: the compiled loss, and the losses of layers and regularizers. Where the compiled loss has
            ``reduction="none"``, the mean, whose gradient is that of the sum.

        Raises:
            ValueError: there is no loss, there are no labels for it, or it has ``reduction="none"`` and there are
                losses of layers or regularizers.
        """
        trainer = trainer_of(self)
        loss: Tensor | None = None
        method = current_step().method or "fit"
        if trainer.loss is not None:
            if y is None:
                raise ValueError(f"{method}(y=...): the loss of the model needs labels, and the data has none.")
            if current_step().is_checked:
                trainer.loss.check_first(y, y_pred, current_step().labels_on_host)
            loss = trainer.loss(y, y_pred, sample_weight)
        layers = trainer.layer_losses.of(self)
        if layers:
            if loss is not None and trainer.loss is not None and trainer.loss.is_unreduced:
                raise ValueError(
                    f"{method}: a loss with reduction='none' leaves one number for each example, to which the losses "
                    "of layers and regularizers can't be added. Give it reduction='sum', which has the same "
                    "gradients, or leave the reduction out for the mean."
                )
            total = torch.stack([value.sum() for value in layers]).sum()
            # By examples, which is exact where shares are uneven: what layers add is a mean over them, or equal on all.
            is_known = total.is_floating_point() and example_counts(get_replica_context()) is not None
            scaled = scale_mean_loss(total) if is_known else scale_regularization_loss(total)
            loss = scaled if loss is None else loss + scaled
        if loss is None:
            raise ValueError(
                f"{method} needs something to minimize: pass loss= to compile(), attach regularizers or added losses, "
                "or override train_step or compute_loss."
            )
        return note_scaled(get_replica_context(), loss)

    def compute_metrics(self, x: Any, y: Any, y_pred: Any, sample_weight: Any = None) -> dict[str, Any]:  # noqa: ARG002
        """Update the compiled metrics. Replica context.

        Args:
            x: inputs.
            y: labels.
            y_pred: predictions.
            sample_weight: weights of examples, or ``None``.

        Returns:
            A dict without entries: logs show all metrics that were updated. An override adds what they show besides.
        """
        metrics = trainer_of(self).metrics
        if metrics is not None and y is not None:
            metrics.update_state(y, y_pred, sample_weight)
        return {}

    def clip_gradients(self) -> None:
        """Change the gradients before an update, when they are summed over replicas; does nothing. Replica context.

        If the optimizer trains a part of the model only, change that part's gradients.

        Example:
            >>> class Clipped(ts.Model):
            ...     def clip_gradients(self):
            ...         torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm=1.0)
        """

    def minimize(self, loss: Tensor) -> None:
        """Add the gradients of a loss, and update the parameters if the optimizer step is complete. Replica context.

        Args:
            loss: this replica's share, a scalar with a graph.

        Raises:
            RuntimeError: the model was not compiled with an optimizer.
        """
        trainer, state = trainer_of(self), current_step()
        optimizer, scaler = trainer.optimizer, trainer.scaler
        if optimizer is None:
            raise RuntimeError("The model has no optimizer: compile(optimizer=...).")
        if state.is_checked:
            check_takes_no_closure(optimizer)
        if not loss.requires_grad:
            raise ValueError(
                "The loss does not depend on any parameter that is trained: all of the model's are frozen "
                "(requires_grad=False), or its forward or the loss cuts the graph (detach(), no_grad(), NumPy)."
            )
        self._check_kept(state.gradients)
        if state.method and not state.tracked:
            self.track_loss(loss)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if not state.is_last:
            if state.method:
                kept = [(parameter, parameter.grad) for parameter in self.parameters()]
                state.gradients[:] = [(of, grad, grad._version) for of, grad in kept if grad is not None]
            return
        clips = type(self).clip_gradients is not TrainableModule.clip_gradients
        if scaler is not None:
            if clips:
                scaler.unscale_(optimizer)  # sums, too
                self.clip_gradients()
            scaler.step(optimizer)
            scaler.update()
        else:
            if clips:
                context: Any = get_replica_context()
                context.sum_gradients(optimizer)
                self.clip_gradients()
            optimizer.step()
        optimizer.zero_grad()  # at once, so that gradients take no memory during the next forward pass

    def _check_kept(self, gradients: list[tuple[Tensor, Tensor, int]]) -> None:
        """Check that what the batches before have added is there as it was."""
        if any(of.grad is not grad or grad._version != version for of, grad, version in gradients):
            raise RuntimeError(
                "The gradients of the batches before this one were cleared or changed, which make one optimizer step "
                "with it, by compile(gradient_accumulation_steps=) or ElasticTraining(max_replica_batch_size=). Leave "
                "out zero_grad(): self.minimize(loss) clears gradients after the step. Clip in clip_gradients."
            )

    def track_loss(self, loss: Tensor) -> None:
        """Add this replica's share of a batch's loss to what logs show as ``loss``. Replica context.

        A step that does not call it shows what it gave to ``minimize``.
        """
        tracker = trainer_of(self).loss_tracker
        if tracker is not None:
            tracker.track(loss)

    @property
    def compiled(self) -> bool:
        """Whether ``compile`` was called."""
        return trainer_of(self).is_compiled

    @property
    def distribute_strategy(self) -> Strategy:
        """The strategy in whose scope the model was made."""
        return trainer_of(self).strategy

    @property
    def optimizer(self) -> Any:
        """The compiled optimizer."""
        return trainer_of(self).optimizer

    @property
    def iterations(self) -> int:
        """Optimizer steps since ``compile``."""
        return trainer_of(self).iterations

    @property
    def loss(self) -> Any:
        """What ``compile`` was given as ``loss``."""
        return trainer_of(self).arguments.get("loss")

    @property
    def losses(self) -> list[Tensor]:
        """The losses of layers and regularizers, as ``ts.losses_of`` gives them."""
        return losses_of(self)

    @property
    def metrics(self) -> list[Any]:
        """All metrics that logs show, of the loss, of ``compile`` and those that are attributes of the model."""
        return list(trainer_of(self).named_metrics(_attribute_metrics(self)).values())

    @property
    def metrics_names(self) -> list[str]:
        """The names of ``metrics`` in logs."""
        return list(self._named_metrics())

    @property
    def history(self) -> History | None:
        """What the last ``fit`` returned."""
        history: History | None = trainer_of(self).history
        return history

    @property
    def stop_training(self) -> bool:
        """Whether ``fit`` ends after the current batch or, with several processes, the current epoch."""
        return trainer_of(self).stop_training

    @stop_training.setter
    def stop_training(self, value: bool) -> None:
        trainer_of(self).stop_training = bool(value)

    def _named_metrics(self) -> dict[str, Any]:
        """Return all metrics by their names in logs."""
        overridden = type(resolve(self)).metrics is not TrainableModule.metrics
        return trainer_of(self).named_metrics(self.metrics if overridden else _attribute_metrics(self))

    @property
    def _takes_labels_as_given(self) -> bool:
        """Whether the loss sees the labels of the data, and not what a step of the user's makes of them."""
        cls = type(resolve(self))
        names = ("train_step", "test_step", "compute_loss")
        return all(getattr(cls, name) is getattr(TrainableModule, name) for name in names)

    @property
    def _with_forward(self) -> Any:
        """The module whose ``forward`` has the parameters that say how inputs are passed: the wrapped one, or this."""
        wrapped = type(self).forward is TrainableModule.forward and "module" in self._modules
        return self.module if wrapped else self


@functools.lru_cache(maxsize=16)
def _takes_training(function: Callable[..., Any]) -> bool:
    parameters = inspect.signature(function).parameters
    return "training" in parameters or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


def _attribute_metrics(model: nn.Module) -> list[Any]:
    """Return the metrics among a model's submodules, not those inside of metrics."""
    found: list[Any] = []

    def look(module: Any) -> None:
        for child in module.children():
            if is_metric(child):
                found.append(child)
            else:
                look(child)

    look(model)
    return found
