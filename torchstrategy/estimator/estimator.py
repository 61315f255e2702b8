"""``Estimator``: a ``model_fn`` with a directory of checkpoints, trained, evaluated and asked for predictions."""

from __future__ import annotations

import copy
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torchstrategy.base.log import hide_own_frames, hides_own_frames, logger, show_info
from torchstrategy.checkpoint.reader import latest_checkpoint
from torchstrategy.checkpoint.storage import is_file
from torchstrategy.errors import NotFoundError
from torchstrategy.estimator import evaluation, training
from torchstrategy.estimator.building import Definition
from torchstrategy.estimator.export_outputs import ServingInputReceiver
from torchstrategy.estimator.model_fn import call_model_fn, verify_model_fn_args
from torchstrategy.estimator.run_config import RunConfig
from torchstrategy.estimator.saved_model import export_saved_model
from torchstrategy.estimator.session_hooks import CheckpointSaverListener, SessionRunHook, check_steps, show_value
from torchstrategy.estimator.specs import EstimatorSpec, ModeKeys, check_hooks, check_listeners
from torchstrategy.estimator.stopping_hooks import StopAtStepHook
from torchstrategy.estimator.task import TaskType
from torchstrategy.estimator.warm_start import WarmStartSettings, as_array, as_settings, load_variables

__all__ = ["Estimator"]


class Estimator:
    """A model that is trained, evaluated and asked for predictions, and that lives in a directory of checkpoints.

    ``model_fn`` is called once in each ``train``, ``evaluate``, ``predict`` and export; ``train`` and the others then
    take the values from the directory's latest checkpoint. So an estimator that is made anew with the same directory
    goes on where the last one has stopped.

    Args:
        model_fn: called with those of ``features``, ``labels`` (one replica's batch, as an example), ``mode``,
            ``params`` and ``config`` that it names. Returns an ``EstimatorSpec``.
        model_dir: the directory, which may be one that fsspec finds, such as ``"s3://bucket/run"``; ``None`` means that
            of the configuration, else a new temporary one.
        config: a ``RunConfig``; ``None`` means its defaults.
        params: hyper-parameters, which ``model_fn`` and ``input_fn`` get; they are copied.
        warm_start_from: a checkpoint, a directory of checkpoints, or ``WarmStartSettings``: where parameters begin when
            a training begins without a checkpoint of its own.

    Raises:
        ValueError: ``model_fn`` has other arguments, the two directories differ, or an argument is of another kind; or
            ``model_dir`` has a scheme that fsspec does not know, or is memory where several processes need it.
        ImportError: a package is not installed that fsspec needs for ``model_dir``.
        NotADirectoryError: ``model_dir`` is a file.

    Example:
        >>> import tempfile
        >>> folder = tempfile.TemporaryDirectory()
        >>> def model_fn(features, labels, mode):
        ...     module = torch.nn.Linear(1, 1)
        ...     return ts.estimator.EstimatorSpec(
        ...         mode,
        ...         module=module,
        ...         predictions=lambda outputs: {"y": outputs},
        ...         loss=torch.nn.functional.mse_loss,
        ...         train_op=torch.optim.SGD(module.parameters(), lr=0.1),
        ...     )
        >>> def input_fn():
        ...     x = torch.linspace(0, 1, 8)[:, None]
        ...     return ts.data.Dataset.from_tensor_slices((x, 2 * x)).repeat().batch(4)
        >>> estimator = ts.estimator.Estimator(model_fn, folder.name)
        >>> _ = estimator.train(input_fn, steps=200)
        >>> estimator.evaluate(input_fn, steps=2)["global_step"]
        200
        >>> next(estimator.predict(input_fn))["y"].shape
        (1,)
        >>> folder.cleanup()
    """

    def __init__(
        self,
        model_fn: Callable[..., Any],
        model_dir: str | os.PathLike[str] | None = None,
        config: RunConfig | None = None,
        params: Any = None,
        warm_start_from: str | os.PathLike[str] | WarmStartSettings | None = None,
    ) -> None:
        _check_no_overrides(type(self))
        show_info()
        self._config = _with_model_dir(config, model_dir)
        logger.info("Using config: %s", self._config)
        if model_fn is None:
            raise ValueError("model_fn must be provided to Estimator.")
        verify_model_fn_args(model_fn, params)
        self._model_fn = model_fn
        self._params = copy.deepcopy(params or {})
        self._warm_start_settings = as_settings(warm_start_from)

    @property
    def model_dir(self) -> str:
        """The directory of checkpoints and summaries."""
        return str(self._config.model_dir)

    @property
    def config(self) -> RunConfig:
        """A copy of the configuration."""
        return copy.copy(self._config)

    @property
    def params(self) -> Any:
        """A copy of the hyper-parameters."""
        return copy.deepcopy(self._params)

    @property
    def model_fn(self) -> Callable[..., EstimatorSpec]:
        """The ``model_fn`` with the params bound, which takes ``features``, ``labels``, ``mode`` and ``config``."""

        def public_model_fn(features: Any, labels: Any, mode: str, config: RunConfig) -> EstimatorSpec:
            return call_model_fn(self._model_fn, features, labels, mode, self.params, config)

        return public_model_fn

    @hides_own_frames
    def train(
        self,
        input_fn: Callable[..., Any],
        hooks: Sequence[SessionRunHook] | None = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Sequence[CheckpointSaverListener] | None = None,
    ) -> Estimator:
        """Train, from the latest checkpoint if there is one, until the data ends or enough steps were made.

        Under the configuration's ``train_distribute`` each replica gets its own batches of ``input_fn``; losses and
        gradients are the mean over replicas. A last group with fewer batches than replicas is dropped. Every process
        of such a strategy calls this.

        Args:
            input_fn: called once with those of ``mode``, ``params``, ``config`` and, under a strategy,
                ``input_context`` that it names. Returns a ``ts.data.Dataset``, a ``DataLoader`` or another re-iterable
                of batches ``(features, labels)``, or one such batch, which is used in every step.
            hooks: called around each step.
            steps: how many steps to make now; ``None`` makes all.
            max_steps: at which global step to stop; nothing is done if the latest checkpoint is there already.
            saving_listeners: called before and after each checkpoint, on the process that writes it.

        Returns:
            The estimator.

        Raises:
            ValueError: both ``steps`` and ``max_steps`` are given, or one is not positive or not whole; or
                ``model_fn`` or ``input_fn`` returns something else than it should.
            TypeError: a hook or a listener is none.
            NanLossDuringTrainingError: the loss is no number any more.
            NotFoundError: the latest checkpoint is of another model.
        """
        if steps is not None and max_steps is not None:
            raise ValueError("Can not provide both steps and max_steps.")
        _check_positive(steps=steps, max_steps=max_steps)
        if max_steps is not None and training.has_saved(self.config, max_steps):
            logger.info("Skipping training since max_steps has already saved.")
            training.skip_training(self.config)
            return self
        all_hooks = list(check_hooks(hooks))
        if steps is not None or max_steps is not None:
            all_hooks.append(StopAtStepHook(steps, max_steps))
        loss = training.train_model(
            self._definition(), input_fn, all_hooks, check_listeners(saving_listeners), self._warm_start_settings
        )
        logger.info("Loss for final step: %s.", show_value(loss))
        return self

    @hides_own_frames
    def evaluate(
        self,
        input_fn: Callable[..., Any],
        steps: int | None = None,
        hooks: Sequence[SessionRunHook] | None = None,
        checkpoint_path: str | os.PathLike[str] | None = None,
        name: str | None = None,
    ) -> dict[str, Any]:
        """Evaluate a checkpoint on all batches of the data, or on some.

        Under the configuration's ``eval_distribute`` each replica gets its own batches; no batch is dropped.

        Args:
            input_fn: as for ``train``.
            steps: how many steps to make, each with a batch for each replica; ``None`` takes all data.
            hooks: called around each step.
            checkpoint_path: what to evaluate; ``None`` means the latest checkpoint, or if there is none the values that
                ``model_fn`` sets.
            name: of the data set, if there are several: results go to ``model_dir/eval_<name>``.

        Returns:
            The metrics of the spec by name, ``"loss"``, the mean over batches, and ``"global_step"``.

        Raises:
            ValueError: ``steps`` is not positive or not whole, the data has no batch, or a metric has a name that is
                taken.
            NotFoundError: there is no such checkpoint, or it is of another model.
        """
        _check_positive(steps=steps)
        all_hooks = list(check_hooks(hooks))
        if steps is not None:
            all_hooks.append(evaluation.EvaluationStepsHook(steps))
        path = None if checkpoint_path is None else os.fspath(checkpoint_path)
        return evaluation.evaluate_model(self._definition(), input_fn, path, all_hooks, self.eval_dir(name))

    def predict(
        self,
        input_fn: Callable[..., Any],
        predict_keys: Sequence[str] | str | None = None,
        hooks: Sequence[SessionRunHook] | None = None,
        checkpoint_path: str | os.PathLike[str] | None = None,
        yield_single_examples: bool = True,  # noqa: FBT001, FBT002 - tf's
    ) -> Iterator[Any]:
        """Yield the model's predictions, on one device. Work begins with the first ``next``.

        Args:
            input_fn: as for ``train``; labels are left out.
            predict_keys: names of the predictions to yield; ``None`` means all.
            hooks: called around each batch.
            checkpoint_path: whose values to use; ``None`` means the latest checkpoint, or if there is none the values
                that ``model_fn`` sets.
            yield_single_examples: yield one example after another; ``False`` yields batches.

        Yields:
            A dictionary of NumPy arrays, or an array if the spec's predictions are one tensor.

        Raises:
            ValueError: ``predict_keys`` names none of the predictions, or they differ in their number of examples.
            NotFoundError: there is no such checkpoint, or it is of another model.
        """
        path = None if checkpoint_path is None else os.fspath(checkpoint_path)
        try:
            yield from evaluation.predict_with_model(
                self._definition(),
                input_fn,
                path,
                check_hooks(hooks),
                predict_keys,
                yield_single_examples=yield_single_examples,
            )
        except (Exception, KeyboardInterrupt) as error:
            hide_own_frames(error)
            raise

    @hides_own_frames
    def export_saved_model(
        self,
        export_dir_base: str | os.PathLike[str],
        serving_input_receiver_fn: Callable[[], ServingInputReceiver],
        assets_extra: Mapping[str, str] | None = None,
        as_text: bool = False,  # noqa: ARG002, FBT001, FBT002 - tf's
        checkpoint_path: str | os.PathLike[str] | None = None,
        experimental_mode: str = ModeKeys.PREDICT,
    ) -> str:
        """Write a checkpoint's model as a program of ``torch.export``, which runs without this library.

        ``model_fn`` is called in PREDICT, without labels. The directory ``<export_dir_base>/<time in seconds>`` then
        holds the program ``model.pt2``, whose results are dictionaries of tensors by the names of the signatures, the
        spec's ``export_outputs``: ``torch.export.load(path).module()(received)["serving_default"]``. With
        ``ts.estimator.export.load(directory)`` each signature is a function.

        Args:
            export_dir_base: the directory for exports.
            serving_input_receiver_fn: returns a ``ts.estimator.export.ServingInputReceiver`` with examples of what the
                exported model is called with.
            assets_extra: files to copy to the directory ``assets.extra`` of the export: paths by names in it.
            as_text: has no meaning here.
            checkpoint_path: what to export; ``None`` means the latest checkpoint.
            experimental_mode: only ``ModeKeys.PREDICT``.

        Returns:
            The directory of the export.

        Raises:
            ValueError: there is no checkpoint, or another mode is asked for.
            NotFoundError: there is no such checkpoint, or it is of another model; or an asset is not there.
            RuntimeError: torch can't export the model; the message has the reason.
        """
        path = None if checkpoint_path is None else os.fspath(checkpoint_path)
        return export_saved_model(
            self, export_dir_base, serving_input_receiver_fn, assets_extra, path, experimental_mode
        )

    def latest_checkpoint(self) -> str | None:
        """Return the path of the latest checkpoint, or ``None``."""
        return latest_checkpoint(self.model_dir)

    def eval_dir(self, name: str | None = None) -> str:
        """Return the directory for the summaries of evaluations.

        Args:
            name: what ``evaluate`` was given.
        """
        return os.path.join(self.model_dir, "eval" if not name else f"eval_{name}")

    def get_variable_names(self) -> list[str]:
        """Return the names of the variables in the latest checkpoint.

        Raises:
            ValueError: there is no checkpoint.
        """
        return list(self._variables())

    def get_variable_value(self, name: str) -> Any:
        """Return the value that a variable has in the latest checkpoint, as a NumPy array.

        Args:
            name: a module's parameter or buffer by its name there, ``"global_step"``, or what an optimizer keeps:
                ``"optimizer/<parameter>/<slot>"``.

        Raises:
            ValueError: there is no checkpoint.
            NotFoundError: it has no such variable.
        """
        variables = self._variables()
        if name not in variables:
            raise NotFoundError(f"Key {name} not found in checkpoint. It holds: {', '.join(variables)}")
        return as_array(variables[name])

    def _definition(self) -> Definition:
        return Definition(self._model_fn, self.config, self.params)

    def _variables(self) -> dict[str, Any]:
        path = self.latest_checkpoint()
        if path is None:
            raise ValueError(f"Could not find trained model at {self.model_dir}. Train it first.")
        return load_variables(path)


def _with_model_dir(config: Any, model_dir: str | os.PathLike[str] | None) -> RunConfig:
    """Return a configuration with a directory.

    Raises:
        ValueError: it is no configuration, or has another directory, or one that can't be meant.
        NotADirectoryError: the directory is a file.
    """
    if config is None:
        config = RunConfig()
        logger.info("Using default config.")
    if not isinstance(config, RunConfig):
        raise ValueError(f"config must be an instance of `RunConfig`, but provided {config}.")
    path = None if model_dir is None else os.fspath(model_dir)
    if path is not None and config.model_dir is not None and path != config.model_dir:
        raise ValueError(
            "`model_dir` are set both in constructor and `RunConfig`, but with different values. In constructor: "
            f"{path!r}, in `RunConfig`: {config.model_dir!r}"
        )
    path = path or config.model_dir
    if path is not None:
        _check_directory(path, config)
    if path is None:
        path = tempfile.mkdtemp()
        logger.warning("Using temporary folder as model directory: %s", path)
    return config if config.model_dir == path else config.replace(model_dir=path)


def _check_directory(path: str, config: RunConfig) -> None:
    if _ONE_SLASH.match(path):
        raise ValueError(
            f"model_dir={path!r} has one slash after its scheme, as pathlib writes it. Give a store's address as a "
            "string, with two slashes."
        )
    several = config.num_worker_replicas > 1 or config.num_ps_replicas > 0 or config.task_type == TaskType.EVALUATOR
    if several and path.startswith("memory://"):
        raise ValueError(
            f"model_dir={path!r} is in this process's memory, where the other processes of the job don't see its "
            "checkpoints. Give a folder or a store that all of them see."
        )
    if is_file(path):
        raise NotADirectoryError(f"model_dir is a file: {path!r}. Give a directory, which need not exist.")


_ONE_SLASH = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/[^/]")


def _check_positive(**numbers: int | None) -> None:
    check_steps(**numbers)
    for name, number in numbers.items():
        if number is not None and number <= 0:
            raise ValueError(f"Must specify {name} > 0, given: {number}")


def _check_no_overrides(cls: type) -> None:
    """Refuse subclasses that change methods: what an estimator does is in its ``model_fn``, and in hooks."""
    allowed = {"model_fn", "export_saved_model"}
    public = {name for name in vars(Estimator) if not name.startswith("_")} - allowed
    for parent in cls.__mro__:
        if overridden := public & set(vars(parent)) if parent is not Estimator else set():
            raise ValueError(
                f"Subclasses of Estimator cannot override members of Estimator. {cls.__name__} does override "
                f"{sorted(overridden)}."
            )
