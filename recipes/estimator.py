"""tf's tutorial "Multi-worker training with Estimator" in PyTorch: `model_fn`, `input_fn`, `train_and_evaluate`.

The commands that run it are at the head of conf/estimator.yaml. Every task of a cluster is started by the same command:
by its TF_CONFIG it knows what it is.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import checks
import hydra
import jobs
import profiles
import reports
import tasks
import torch
from custom_loop import get_dtype
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from tqdm import tqdm

import torchstrategy as ts

BUFFER_SIZE = 10_000
ModeKeys = ts.estimator.ModeKeys


@hydra.main(config_path="../conf", config_name="estimator", version_base="1.3")
def main(config: DictConfig) -> None:
    """Be a task of TF_CONFIG's cluster, or start one here, or train and evaluate in this process or torchrun's."""
    checks.integers(config, "batch_size", "max_steps", "save_every", "cluster.workers")
    checks.integers(config, "cluster.ps", "cluster.max_restarts", least=0)
    checks.flags(config, "linear", "keep_position")
    checks.profile(config)
    run_path = Path(HydraConfig.get().runtime.output_dir).absolute()
    model_path = run_path / "model" if config.model_dir is None else Path(config.model_dir)
    if config.linear:
        train_linear(config, model_path, run_path)
        return
    check_folder_is_given()
    started = time.perf_counter()
    is_task = bool(ts.cluster_resolver.TFConfigClusterResolver().cluster_spec())
    if not is_task and (config.cluster.ps != 0 or config.cluster.workers != 1):
        start_cluster(config, run_path)
    else:
        train_and_evaluate(config, model_path)
    job = None if is_task else ts.cluster_resolver.find_job()
    if not is_task and (job is None or job.rank == 0):
        report(config, run_path, model_path, time.perf_counter() - started)


def check_folder_is_given() -> None:
    """Refuse to let processes that train together save in different folders."""
    is_one_of_several = ts.cluster_resolver.TFConfigClusterResolver().cluster_spec() or jobs.world_size() > 1
    if is_one_of_several and not any(
        option.startswith(("folder=", "model_dir=")) for option in HydraConfig.get().overrides.task
    ):
        raise ValueError("This process is one of several: give all of them the same folder=FOLDER, which all see.")


def train_and_evaluate(config: DictConfig, model_path: Path) -> None:
    """Train, evaluate each checkpoint, export the last one: or what this task's part of it is."""
    dtype = get_dtype(config.precision)
    torch.set_default_dtype(torch.float64 if dtype == torch.float64 else torch.float32)  # of the data and the weights
    strategy = instantiate(config.strategy, _convert_="all")
    run_config = ts.estimator.RunConfig(
        train_distribute=strategy,
        tf_random_seed=config.seed,
        save_checkpoints_steps=config.save_every,
        save_summary_steps=20,
        experimental_max_worker_delay_secs=0,  # asynchronous workers begin at once
    )
    classifier = ts.estimator.Estimator(make_model_fn(config, dtype), str(model_path), run_config)
    hooks = [Progress(config.max_steps), Kill(config)]
    if config.keep_position:
        hooks.append(ts.estimator.CheckpointInputPipelineHook(classifier))
    run_path = Path(HydraConfig.get().runtime.output_dir)
    profile = profiles.Profile(config, run_path, strategy, task_name(strategy))
    hooks.append(profiles.ProfileHook(profile))
    images = torch.zeros(2, 1, 28, 28)  # as an example: the exported program takes any number
    exporter = ts.estimator.FinalExporter("final", ts.estimator.export.build_raw_serving_input_receiver_fn(images))
    train_spec = ts.estimator.TrainSpec(make_input_fn(config), config.max_steps, hooks)
    eval_spec = ts.estimator.EvalSpec(
        make_input_fn(config), steps=None, exporters=exporter, start_delay_secs=0, throttle_secs=0
    )
    with profile:
        ts.estimator.train_and_evaluate(classifier, train_spec, eval_spec)


def make_input_fn(config: DictConfig) -> Callable[..., ts.data.Dataset]:
    """Return the function that makes each worker's data."""

    def input_fn(mode: str, input_context: ts.InputContext | None = None) -> ts.data.Dataset:
        train_data, test_data = instantiate(config.data, _convert_="all")
        if mode != ModeKeys.TRAIN:
            return ts.data.Dataset.from_tensor_slices(test_data.tensors).batch(config.batch_size)
        dataset, seed = ts.data.Dataset.from_tensor_slices(train_data.tensors), config.seed
        if input_context is not None:
            number = input_context.input_pipeline_id
            if config.input == "shard":
                dataset = dataset.shard(input_context.num_input_pipelines, number)
            else:
                seed += number
        return dataset.shuffle(BUFFER_SIZE, seed=seed).repeat().batch(config.batch_size)

    if config.input not in ("shard", "seed"):
        raise ValueError(f"input must be shard or seed. Received: {config.input}")
    return input_fn


def make_model_fn(config: DictConfig, dtype: torch.dtype) -> Callable[..., ts.estimator.EstimatorSpec]:
    """Return the function that makes the model, and all that a mode needs besides."""

    def model_fn(features: Tensor, labels: Tensor | None, mode: str) -> ts.estimator.EstimatorSpec:
        del features, labels  # the first batch, for models that need its shapes
        module = Autocast(instantiate(config.model), dtype)
        if mode == ModeKeys.PREDICT:
            return ts.estimator.EstimatorSpec(mode, predictions=predict, module=module)
        if mode == ModeKeys.EVAL:
            metrics = {"accuracy": ts.metrics.SparseCategoricalAccuracy()}
            return ts.estimator.EstimatorSpec(mode, loss=compute_loss, eval_metric_ops=metrics, module=module)
        optimizer = instantiate(config.optimizer, _convert_="all")(module.parameters())
        device = next(module.parameters()).device.type
        train_op = [torch.amp.GradScaler(device), optimizer] if dtype == torch.float16 else optimizer
        return ts.estimator.EstimatorSpec(mode, loss=compute_loss, train_op=train_op, module=module)

    def predict(logits: Tensor) -> dict[str, Tensor]:
        return {"logits": logits, "classes": logits.argmax(dim=-1)}

    def compute_loss(logits: Tensor, labels: Tensor) -> Tensor:
        # Of one replica's batch: the Estimator takes the mean over the replicas.
        return nn.functional.cross_entropy(logits, labels, reduction="sum") / config.batch_size

    return model_fn


class Autocast(nn.Module):
    """A model whose forward pass computes in another type.

    Args:
        model: with parameters of torch's default type.
        dtype: such as ``torch.bfloat16``.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.model = model
        self.dtype = dtype if dtype in (torch.bfloat16, torch.float16) else None

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits."""
        with torch.autocast(images.device.type, self.dtype, enabled=self.dtype is not None):
            return self.model(images).to(torch.get_default_dtype())


def task_name(strategy: ts.Strategy) -> str | None:
    """Return the name of a task that trains by itself; those that train together have ranks."""
    resolver = ts.cluster_resolver.TFConfigClusterResolver()
    is_asynchronous = strategy.workers is None and resolver.cluster_spec()
    return f"{resolver.task_type} {resolver.task_id}" if is_asynchronous else None


class Progress(ts.estimator.SessionRunHook):
    """A hook of one's own: a bar for the steps, where there is a terminal.

    Args:
        max_steps: the last one.
    """

    def __init__(self, max_steps: int) -> None:
        self._max_steps = max_steps

    def after_create_session(self, session: ts.estimator.Session, coord: ts.estimator.Session) -> None:
        """Begin where the latest checkpoint ended."""
        del coord
        hidden = None if session.is_chief else True  # None hides it where stderr is no terminal
        self._bar = tqdm(total=self._max_steps, initial=session.global_step, leave=False, disable=hidden, unit="step")

    def before_run(self, run_context: ts.estimator.SessionRunContext) -> ts.estimator.SessionRunArgs:
        """Ask for the loss of the step that comes."""
        del run_context
        return ts.estimator.SessionRunArgs("loss")

    def after_run(self, run_context: ts.estimator.SessionRunContext, run_values: ts.estimator.SessionRunValues) -> None:
        """Show it."""
        self._bar.set_postfix(loss=f"{run_values.results:.4f}", refresh=False)
        self._bar.update(run_context.session.global_step - self._bar.n)

    def end(self, session: ts.estimator.Session) -> None:
        """Remove the bar."""
        del session
        self._bar.close()


class Kill(ts.estimator.SessionRunHook):
    """Ends a process as a crash or the kernel does, without a word.

    Args:
        config: the recipe's.
    """

    def __init__(self, config: DictConfig) -> None:
        resolver = ts.cluster_resolver.TFConfigClusterResolver()
        is_meant = config.kill.task == f"{resolver.task_type}_{resolver.task_id}" and tasks.attempt() == 0
        self._steps_left = config.kill.step if is_meant else None

    def after_run(self, run_context: ts.estimator.SessionRunContext, run_values: ts.estimator.SessionRunValues) -> None:
        """Count the steps of this process."""
        del run_context, run_values
        if self._steps_left is not None:
            self._steps_left -= 1
            if self._steps_left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


def train_linear(config: DictConfig, model_path: Path, run_path: Path) -> None:
    """Train the guide's linear model on examples that are all equal."""
    strategy = instantiate(config.strategy, _convert_="all")
    run_config = ts.estimator.RunConfig(train_distribute=strategy, eval_distribute=strategy)
    regressor = ts.estimator.LinearRegressor(
        feature_columns=[ts.feature_column.numeric_column("feats")],
        optimizer="SGD",
        model_dir=str(model_path),
        config=run_config,
    )

    def input_fn() -> ts.data.Dataset:
        dataset = ts.data.Dataset.from_tensors(({"feats": [1.0]}, [1.0]))
        return dataset.repeat(1000).batch(10)

    with profiles.Profile(config, run_path, strategy) as profile:
        regressor.train(input_fn=input_fn, steps=10, hooks=[profiles.ProfileHook(profile)])
    for name in regressor.get_variable_names():
        tqdm.write(f"{name}: {regressor.get_variable_value(name)}")
    tqdm.write(f"Evaluation: {regressor.evaluate(input_fn=input_fn, steps=10)}")


def start_cluster(config: DictConfig, run_path: Path) -> None:
    """Start this command once for each task of a cluster, and wait until training and evaluation have ended."""
    num_ps, num_workers = config.cluster.ps, config.cluster.workers
    if jobs.world_size() > 1:
        raise ValueError("cluster.workers and cluster.ps start a cluster: leave them out where processes are started.")
    numbers = {"ps": num_ps, "chief": int(num_ps > 0), "worker": num_workers, "evaluator": 1}
    options = [*HydraConfig.get().overrides.task, f"model_dir={run_path / 'model'}"]
    if num_ps > 0:
        options.append("strategy=parameter_server")
    try:
        tasks.LocalTasks(Path(__file__), options, numbers, run_path / "tasks", config.cluster.max_restarts).run()
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None


def report(config: DictConfig, run_path: Path, model_path: Path, seconds: float) -> None:
    """Draw what the events of training and evaluation tell, and test the exported program."""
    trained, evaluated = read_events(model_path), read_events(model_path / "eval")
    curves = {
        "loss": {"train": trained["loss"], "evaluation": evaluated["loss"]},
        "accuracy": {"evaluation": evaluated["accuracy"]},
    }
    title = f"estimator on {HydraConfig.get().runtime.choices.data}"
    reports.draw_curves(curves, title, "step").savefig(run_path / "learning_curve.png")
    steps, last = evaluated["loss"][-1][0], {name: points[-1][1] for name, points in evaluated.items()}
    (run_path / "results.json").write_text(json.dumps({"last": last, "steps": steps, "seconds": seconds}))
    tqdm.write(f"Accuracy of the exported program: {test_export(config, model_path / 'export' / 'final'):.4f}")
    tqdm.write(
        f"Test accuracy: {last['accuracy']:.4f}, loss: {last['loss']:.4f} after {steps} steps in {seconds:.1f} s; "
        f"files: {run_path}"
    )


def read_events(path: Path) -> dict[str, reports.Curve]:
    """Return the scalars of the events in a folder, by name; of steps that were made again, the last ones."""
    logging.getLogger("tensorboard").setLevel(logging.WARNING)
    events = EventAccumulator(str(path)).Reload()
    return {
        name: sorted({event.step: event.value for event in events.Scalars(name)}.items())
        for name in events.Tags()["scalars"]
    }


def test_export(config: DictConfig, path: Path) -> float:
    """Load the latest export by plain PyTorch, without the model's code, and return its accuracy."""
    program = torch.export.load(max(path.iterdir()) / "model.pt2").module()
    _, (images, labels) = (data.tensors for data in instantiate(config.data, _convert_="all"))
    classes = torch.cat([program(batch)["serving_default"]["classes"] for batch in images.split(1000)])
    return float((classes == labels).float().mean())


if __name__ == "__main__":
    main()
