"""``ts.Model``: a module that trains itself, under any strategy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torchstrategy.fit import exporting, saving
from torchstrategy.fit import summary as summaries
from torchstrategy.fit.arguments import LOADING, FitArguments, entry_point
from torchstrategy.fit.loop import Loop
from torchstrategy.fit.trainable import TrainableModule
from torchstrategy.fit.trainer import trainer_of

if TYPE_CHECKING:
    from torchstrategy.fit.callbacks.callback import History

__all__ = ["Model"]

_EAGERLY = "leave it out: steps run eagerly, so that `print` and debuggers work in them, unless jit_compile=True."


class Model(TrainableModule):
    """A module with ``compile``, ``fit``, ``evaluate`` and ``predict``, under the strategy in whose scope it is made.

    Wrap a module, ``ts.Model(torch.nn.Sequential(...))``, or derive from it and define ``forward``. With any number of
    replicas ``fit`` gives the numbers of one: each loss is the mean over the examples of the global batch, however the
    batch was split, and ``batch_size`` is that of the global batch.

    A subclass may override ``train_step``, ``test_step``, ``predict_step``, ``compute_loss``, ``compute_metrics`` and
    ``clip_gradients``. They run in replica context, once for each replica, on its share of the batch.

    Args:
        module: the module to train; ``None`` for subclasses that define ``forward``.
        name: the model's name in messages; ``None`` means the class's name in snake case.

    Raises:
        TypeError: ``module`` is no module.

    Example:
        >>> strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
        >>> with strategy.scope():
        ...     model = ts.Model(torch.nn.Linear(1, 1))
        ...     model.compile(optimizer="sgd", loss="mse")
        >>> x = y = torch.ones(100, 1)
        >>> history = model.fit(x, y, batch_size=10, epochs=2, verbose=0)
        >>> history.history["loss"][1] < history.history["loss"][0]
        True
    """

    @entry_point("compile", run_eagerly=_EAGERLY, auto_scale_loss='leave it out: amp="fp16" scales the loss.')
    def compile(  # noqa: PLR0913 - Keras' signature
        self,
        optimizer: Any = "rmsprop",
        loss: Any = None,
        loss_weights: Any = None,
        metrics: Any = None,
        weighted_metrics: Any = None,
        steps_per_execution: int = 1,
        jit_compile: bool | str | None = None,  # noqa: FBT001 - Keras' signature
        gradient_accumulation_steps: int = 1,
        amp: Any = None,
        tune: bool = True,  # noqa: FBT001, FBT002 - as those before
    ) -> None:
        """Say how the model is trained. Inside the strategy's scope or outside it.

        (``torch.nn.Module.compile`` is ``jit_compile=True`` here.)

        Args:
            optimizer: a name, such as ``"sgd"``, with Keras' default settings; an optimizer of this model's parameters;
                or what makes one of parameters, such as ``functools.partial(torch.optim.SGD, lr=0.1)``.
            loss: a name, such as ``"mse"``; a ``ts.losses`` object; a torch loss, which is taken apart into the losses
                of examples; or a function of ``(y_true, y_pred)`` that returns one loss for each example. For several
                outputs a list or dict of them. ``None`` if ``train_step`` or layers have losses of their own.
            loss_weights: factors of the outputs' losses: a list or dict of numbers.
            metrics: names, ``ts.metrics`` or torchmetrics metrics, or functions of ``(y_true, y_pred)``; a list, and
                for several outputs a list of lists or a dict.
            weighted_metrics: metrics that take sample weights and class weights into account.
            steps_per_execution: batches between two calls of callbacks, which run without any other Python code.
            jit_compile: compile the model by ``torch.compile``; ``None`` and ``"auto"`` mean no.
            gradient_accumulation_steps: batches that make one optimizer step, which is exactly that of one batch of all
                their examples. (In Keras it is the mean of the batches' steps, and goes on over the end of an epoch.)
            amp: ``"bf16"`` or ``"fp16"`` computes forward passes in mixed precision; ``"fp16"`` scales the loss.
            tune: let the first ``fit`` do what ``ts.utils.tune`` does, but for the convolutions.

        Raises:
            ValueError: a name is not known, a number is out of range, a loss can't be taken apart, or the model was not
                made in the scope that ``compile`` is called in.
            TypeError: an argument is of the wrong type.

        Example:
            >>> model = ts.Model(torch.nn.Linear(2, 3))
            >>> model.compile("adam", loss=torch.nn.CrossEntropyLoss(), metrics=["accuracy"])
            >>> model.compiled
            True
        """
        arguments = {
            "optimizer": optimizer,
            "loss": loss,
            "loss_weights": loss_weights,
            "metrics": metrics,
            "weighted_metrics": weighted_metrics,
            "steps_per_execution": steps_per_execution,
            "jit_compile": jit_compile,
            "gradient_accumulation_steps": gradient_accumulation_steps,
            "amp": amp,
            "tune": tune,
        }
        _loop_class(self).check(arguments)
        trainer_of(self).compile(self, arguments)

    @entry_point("fit", **LOADING)
    def fit(  # noqa: PLR0913 - Keras' signature
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: int | str = "auto",
        callbacks: Sequence[Any] | None = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,  # noqa: FBT001, FBT002 - tf's signature
        class_weight: Mapping[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | Sequence[int] = 1,
    ) -> History:
        """Train the model. Cross-replica context; every process of the strategy calls it.

        The model is put into training mode, but for parts with frozen parameters that are in evaluation mode.

        Args:
            x: inputs: an array or tensor ``[examples, ...]``, or a tuple, list or dict of them; a ``DataLoader``, a
                ``ts.data.Dataset``, a map-style dataset, another re-iterable of global batches ``(x, y)`` or
                ``(x, y, sample_weight)``; a distributed dataset; or a ``ts.utils.DatasetCreator``.
            y: labels, if ``x`` is arrays.
            batch_size: examples of a global batch, for arrays and map-style datasets; ``None`` means 32 or,
                with ``steps_per_epoch``, as many as so many batches need to hold all examples.
            epochs: the epoch to end before, so ``epochs - initial_epoch`` are trained.
            verbose: 1 shows a progress bar for each epoch, 2 one line, 0 nothing; ``"auto"`` is 1. Where standard
                output is no terminal, 1 is as 2.
            callbacks: objects of ``ts.callbacks``, of your own classes, or torch learning-rate schedulers, which step
                once an epoch.
            validation_split: share of the arrays' last examples that is set aside for validation.
            validation_data: what ``evaluate`` is called with after epochs: ``(x, y)``, ``(x, y, sample_weight)`` or a
                dataset.
            shuffle: shuffle arrays and map-style datasets anew for each epoch.
            class_weight: weight of the examples of a class, by its number; others weigh 1.
            sample_weight: ``[examples]``, or a weight for each of their losses, if ``x`` is arrays.
            initial_epoch: number of the first epoch.
            steps_per_epoch: batches of an epoch; the next epoch goes on in the data. ``None`` means all of the data.
            validation_steps: batches of a validation; ``None`` means all.
            validation_batch_size: examples of a global batch of a validation; ``None`` means ``batch_size``, and if
                that is ``None`` too, 32 or as many as ``validation_steps`` batches need to hold all examples.
            validation_freq: epochs between two validations, or the numbers (from 1) of the epochs that have one.

        Returns:
            A ``History``: ``history.history`` holds a list for each name, with a number for each epoch.

        Raises:
            RuntimeError: the model was not compiled.
            ValueError: arguments don't fit together; the message names them.
            TypeError: ``x`` is nothing that can be read.
            InvalidArgumentError: the data does not fit the model, the loss or a metric.
        """
        given = FitArguments(
            x=x,
            y=y,
            batch_size=batch_size,
            epochs=epochs,
            verbose=verbose,
            callbacks=callbacks,
            validation_split=validation_split,
            validation_data=validation_data,
            shuffle=shuffle,
            class_weight=class_weight,
            sample_weight=sample_weight,
            initial_epoch=initial_epoch,
            steps_per_epoch=steps_per_epoch,
            validation_steps=validation_steps,
            validation_batch_size=validation_batch_size,
            validation_freq=validation_freq,
        )
        return _loop_class(self)(self).fit(given)

    @entry_point("evaluate", **LOADING)
    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: int | str = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Sequence[Any] | None = None,
        return_dict: bool = False,  # noqa: FBT001, FBT002 - tf's signature
    ) -> Any:
        """Compute the loss and the metrics; every example counts once. Cross-replica context.

        Args:
            x: inputs, as for ``fit``.
            y: labels.
            batch_size: examples of a global batch; ``None`` means 32 or, with ``steps``, as many as so many batches
                need to hold all examples.
            verbose: as for ``fit``.
            sample_weight: as for ``fit``.
            steps: number of batches; ``None`` means all of the data.
            callbacks: as for ``fit``.
            return_dict: return a dict.

        Returns:
            The loss if there are no metrics, else a list of the loss and the metrics in the order of
            ``metrics_names``; or a dict by name.

        Raises:
            RuntimeError: the model was not compiled.
            ValueError: arguments don't fit together.

        Example:
            >>> model = ts.Model(torch.nn.Flatten())
            >>> model.compile(optimizer=None, loss="mse")
            >>> model.evaluate(torch.ones(3, 1), torch.zeros(3, 1), verbose=0)
            1.0
        """
        logs = _loop_class(self)(self).evaluate(
            x, y, batch_size=batch_size, verbose=verbose, sample_weight=sample_weight, steps=steps, callbacks=callbacks
        )
        return _in_form(logs, return_dict=return_dict)

    @entry_point("predict", **LOADING)
    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: int | str = "auto",
        steps: int | None = None,
        callbacks: Sequence[Any] | None = None,
    ) -> Any:
        """Return the predictions for all examples, in the order of the data. Cross-replica context.

        Args:
            x: inputs, as for ``fit``; labels in a dataset are left out.
            batch_size: examples of a global batch; ``None`` means 32 or, with ``steps``, as many as so many batches
                need to hold all examples.
            verbose: as for ``fit``.
            steps: number of batches; ``None`` means all of the data.
            callbacks: as for ``fit``.

        Returns:
            A NumPy array ``[examples, ...]``, or the model's structure of them; the same in every process.

        Raises:
            ValueError: arguments don't fit together, or a prediction has no entry for each example.

        Example:
            >>> ts.Model(torch.nn.Flatten()).predict(torch.arange(3.0).reshape(3, 1), verbose=0).shape
            (3, 1)
        """
        return _loop_class(self)(self).predict(
            x, batch_size=batch_size, verbose=verbose, steps=steps, callbacks=callbacks
        )

    @entry_point("train_on_batch")
    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Mapping[int, float] | None = None,
        return_dict: bool = False,  # noqa: FBT001, FBT002 - tf's signature
    ) -> Any:
        """Make one training step on one global batch of arrays. Cross-replica context.

        Metrics start anew in each call, as in Keras 3.

        Args:
            x: inputs, arrays ``[batch, ...]``.
            y: labels.
            sample_weight: weights.
            class_weight: weights of classes.
            return_dict: return a dict.

        Returns:
            The loss and the metrics of this batch, as ``evaluate`` gives them.
        """
        logs = _loop_class(self)(self).on_batch("train", x, y, sample_weight, class_weight)
        return _in_form(logs, return_dict=return_dict)

    @entry_point("test_on_batch")
    def test_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        return_dict: bool = False,  # noqa: FBT001, FBT002 - tf's signature
    ) -> Any:
        """Evaluate one global batch of arrays; arguments and result are as for ``train_on_batch``."""
        return _in_form(_loop_class(self)(self).on_batch("test", x, y, sample_weight), return_dict=return_dict)

    @entry_point("predict_on_batch")
    def predict_on_batch(self, x: Any) -> Any:
        """Return the predictions for one global batch of arrays, as ``predict`` does."""
        return _loop_class(self)(self).predict_on_batch(x)

    def reset_metrics(self) -> None:
        """Let the loss and all metrics start anew. Cross-replica context."""
        trainer_of(self).reset_metrics(self._named_metrics())

    save_weights = saving.save_weights
    load_weights = saving.load_weights
    save = saving.save_model
    export = exporting.export
    summary = summaries.summary


def _loop_class(model: Model) -> type[Loop]:
    if trainer_of(model).strategy._coordinator_class() is not None:
        from torchstrategy.fit.cluster_loop import ClusterLoop  # noqa: PLC0415 - the coordinator

        return ClusterLoop
    return Loop


def _in_form(logs: dict[str, Any], *, return_dict: bool) -> Any:
    if return_dict:
        return logs
    values = list(logs.values())
    return values[0] if len(values) == 1 else values
