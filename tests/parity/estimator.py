"""What tf.estimator's measured cases run: the model, the data and the hooks of the figures, and a cluster's program."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import torchstrategy as ts
from tests.clusters import as_task

est = ts.estimator


class Line(nn.Module):
    """``w * x + b``, from zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))
        self.b = nn.Parameter(torch.zeros(()))

    def forward(self, features: Any) -> torch.Tensor:
        x = features["feats"] if isinstance(features, dict) else features
        return self.w * x + self.b


def line_model_fn(learning_rate: float = 0.2, reduction: str = "mean") -> Any:
    def model_fn(features: Any, labels: Any, mode: str) -> Any:
        module = Line()
        return est.EstimatorSpec(
            mode,
            module=module,
            loss=lambda outputs, labels: nn.functional.mse_loss(outputs, labels, reduction=reduction),
            train_op=torch.optim.SGD(module.parameters(), lr=learning_rate),
            predictions=lambda outputs: {"p": outputs},
            eval_metric_ops={"mae": ts.metrics.MeanAbsoluteError()},
        )

    return model_fn


def seed_input_fn() -> Any:
    """The tutorial's data: the same example again and again, in batches of 10."""
    data = ts.data.Dataset.from_tensors(({"feats": torch.ones(1)}, torch.ones(1)))
    return data.repeat(1000).batch(10)


def batches(rows: int = 8, repeat: int | None = 1) -> Any:
    """``y = 2 x + 1`` for x = 0, 1, ..., in batches of 2."""
    x = torch.arange(rows, dtype=torch.float32)
    return ts.data.Dataset.from_tensor_slices((x, 2 * x + 1)).repeat(repeat).batch(2)


class Recorder(est.SessionRunHook):
    """Keeps the loss and the global step of each step, as the event files of the figures do, and what was called."""

    def __init__(self) -> None:
        self.losses: list[list[float]] = []
        self.fetched: list[int] = []
        self.events: list[str] = []

    def begin(self) -> None:
        self.events.append("begin")

    def after_create_session(self, session: Any, coord: Any) -> None:
        self.events.append("after_create_session")

    def before_run(self, run_context: Any) -> Any:
        return est.SessionRunArgs({"step": "global_step", "loss": "loss"})

    def after_run(self, run_context: Any, run_values: Any) -> None:
        self.fetched.append(run_values.results["step"])
        self.losses.append([run_values.results["step"] + 1, run_values.results["loss"]])

    def end(self, session: Any) -> None:
        self.events.append("end")


def checkpoints(model_dir: Any) -> list[str]:
    """Return the checkpoints of a directory under the names of TF's files."""
    found = {re.match(r"model\.ckpt-\d+", name) for name in os.listdir(model_dir)}
    return sorted(f"{match[0]}.index" for match in found if match)


def variables(estimator: Any, names: Any = None) -> dict[str, Any]:
    chosen = estimator.get_variable_names() if names is None else names
    return {name: plain(estimator.get_variable_value(name)) for name in chosen}


def plain(value: Any) -> Any:
    """Return results in the form of the figures."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return plain(value.tolist())
    return value.decode() if isinstance(value, bytes) else value


def run_task(
    cluster: dict[str, list[str]], tasks: list[tuple[str, int]], model_dir: str, *, is_sharded: bool, everywhere: bool
) -> dict[str, Any]:
    """Run this process's task of the figures' cluster program.

    Args:
        cluster: the cluster of ``TF_CONFIG``.
        tasks: job and index of each process.
        model_dir: the directory that all share.
        is_sharded: whether ``input_fn`` shards the data by its input context.
        everywhere: whether an evaluator makes the strategy, too.
    """
    job, index = tasks[int(os.environ["RANK"])]
    calls: list[Any] = []

    def input_fn(mode: str, input_context: Any = None) -> Any:
        data = batches(repeat=None).unbatch()
        if input_context is None:
            calls.append(None)
        else:
            context = [
                input_context.num_input_pipelines,
                input_context.input_pipeline_id,
                input_context.num_replicas_in_sync,
            ]
            calls.append(context)
            if is_sharded:
                data = data.shard(*context[:2])
        return data.batch(2)

    hook = Recorder()
    with as_task(cluster, job, index):
        strategy = None
        if everywhere or job != "evaluator":
            strategy = ts.MultiWorkerMirroredStrategy(devices=["cpu:0"])
        config = est.RunConfig(train_distribute=strategy, save_checkpoints_steps=2)
        estimator = est.Estimator(line_model_fn(0.01), model_dir, config)
        result = est.train_and_evaluate(
            estimator,
            est.TrainSpec(input_fn, max_steps=4, hooks=[hook]),
            est.EvalSpec(input_fn, steps=2, start_delay_secs=0, throttle_secs=0),
        )
    return {
        "result": repr(result),
        "model_dir_is_given": Path(estimator.model_dir) == Path(model_dir),
        "input_context_calls": calls,
        "vars": variables(estimator, ("b", "global_step", "w")),
        "config": {
            "task_type": estimator.config.task_type,
            "task_id": estimator.config.task_id,
            "is_chief": estimator.config.is_chief,
            "num_worker_replicas": estimator.config.num_worker_replicas,
            "global_id": estimator.config.global_id_in_cluster,
        },
        "loss_summary_chief": hook.losses,
        "hook_global_steps": hook.fetched,
        "files": checkpoints(model_dir),
    }
