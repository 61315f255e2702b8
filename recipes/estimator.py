"""tf's tutorial "Multi-worker training with Estimator": train, evaluate, export. Commands: conf/estimator.yaml."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import hydra  # pip install hydra-core
import numpy as np
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import torchstrategy as ts

IMAGES = Path(__file__).parent / "data" / "fashion_mnist_slice.npz"
CONF = "." if Path(__file__).with_name("estimator.yaml").exists() else "../conf"  # a copy has it beside itself
ModeKeys = ts.estimator.ModeKeys


@hydra.main(config_path=CONF, config_name="estimator", version_base="1.3")
def main(config: DictConfig) -> None:
    """Train, evaluate each checkpoint, export the last one; or what TF_CONFIG says is this task's part of it."""
    folder = Path(HydraConfig.get().runtime.output_dir)
    torch.set_default_dtype(getattr(torch, config.dtype))  # of the data and the weights
    run_config = ts.estimator.RunConfig(
        train_distribute=instantiate(config.strategy, _convert_="all"),
        tf_random_seed=config.seed,
        save_checkpoints_steps=config.save_every,
        save_summary_steps=20,
        experimental_max_worker_delay_secs=0,  # asynchronous workers begin at once
    )
    classifier = ts.estimator.Estimator(make_model_fn(config), str(folder / "model"), run_config)
    # With it a restart goes on with the next batch; without it, as in tf, the data begin anew.
    hooks = [ts.estimator.CheckpointInputPipelineHook(classifier)] if config.keep_position else []
    train_spec = ts.estimator.TrainSpec(make_input_fn(config), config.max_steps, hooks)
    images = torch.zeros(2, 1, 28, 28)  # as an example: the exported program takes any number
    exporter = ts.estimator.FinalExporter("final", ts.estimator.export.build_raw_serving_input_receiver_fn(images))
    eval_spec = ts.estimator.EvalSpec(
        make_input_fn(config), steps=None, exporters=exporter, start_delay_secs=0, throttle_secs=0
    )
    metrics, exports = ts.estimator.train_and_evaluate(classifier, train_spec, eval_spec) or (None, None)
    if exports:  # the program is plain PyTorch, without the model's code
        program = torch.export.load(Path(exports[0]) / "model.pt2").module()
        images, labels = load_images(config.data, "test").tensors
        classes = torch.cat([program(batch)["serving_default"]["classes"] for batch in images.split(1000)])
        accuracy = (classes == labels).double().mean()
        figures = f"test accuracy {metrics['accuracy']:.4f}, loss {metrics['loss']:.4f}"
        print(f"After {metrics['global_step']} steps: {figures}")
        print(f"Accuracy of the exported program: {accuracy:.4f}; files: {folder}")
    elif run_config.is_chief:
        print(f"Not evaluated here: an evaluator does it, or {config.max_steps} steps were made before, in {folder}")


def make_input_fn(config: DictConfig) -> Callable[..., ts.data.Dataset]:
    """Return the function that makes each worker's data."""

    def input_fn(mode: str, input_context: ts.InputContext | None = None) -> ts.data.Dataset:
        part = "train" if mode == ModeKeys.TRAIN else "test"
        dataset = ts.data.Dataset.from_tensor_slices(load_images(config.data, part).tensors)
        if mode != ModeKeys.TRAIN:
            return dataset.batch(config.batch_size)
        if input_context is not None:  # each worker reads other images
            dataset = dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
        return dataset.shuffle(10_000, seed=config.seed).repeat().batch(config.batch_size)

    return input_fn


def make_model_fn(config: DictConfig) -> Callable[..., ts.estimator.EstimatorSpec]:
    """Return the function that makes the model, and all that a mode needs besides."""

    def model_fn(features: Tensor, labels: Tensor | None, mode: str) -> ts.estimator.EstimatorSpec:
        del features, labels  # the first batch, for models that need its shapes
        module = nn.Sequential(
            *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
            *(nn.Linear(32 * 13 * 13, 64), nn.ReLU(), nn.Linear(64, 10)),
        )
        if mode == ModeKeys.PREDICT:
            return ts.estimator.EstimatorSpec(mode, predictions=predict, module=module)
        if mode == ModeKeys.EVAL:
            metrics = {"accuracy": ts.metrics.SparseCategoricalAccuracy()}
            return ts.estimator.EstimatorSpec(mode, loss=compute_loss, eval_metric_ops=metrics, module=module)
        optimizer = instantiate(config.optimizer, _convert_="all")(module.parameters())
        return ts.estimator.EstimatorSpec(mode, loss=compute_loss, train_op=optimizer, module=module)

    def predict(logits: Tensor) -> dict[str, Tensor]:
        return {"logits": logits, "classes": logits.argmax(dim=-1)}

    def compute_loss(logits: Tensor, labels: Tensor) -> Tensor:
        # Of one replica's batch: the Estimator takes the mean over the replicas.
        return nn.functional.cross_entropy(logits, labels, reduction="sum") / config.batch_size

    return model_fn


def load_images(file: str | None, part: str) -> TensorDataset:
    """Return images `[1, 28, 28]` in [0, 1] and labels, to "train" or "test" with; made up where there is no file."""
    if file or IMAGES.exists():
        arrays = np.load(file or IMAGES)
        images, labels = arrays[f"{part}_images"], arrays[f"{part}_labels"]
    else:
        print(f"Made up images to {part} with, because {IMAGES} is not there. data=FILE.npz reads yours.")
        labels = np.arange(2000) % 10
        images = np.random.default_rng(len(part)).integers(128, size=(2000, 28, 28)) + 12 * labels[:, None, None]
    return TensorDataset(torch.tensor(images[:, None]) / 255, torch.tensor(labels).long())


if __name__ == "__main__":
    main()
