"""Trains under TensorFlow's own MirroredStrategy, for recipes/benchmarks/training.py to compare with.

It is started in a Python environment that has TensorFlow and needs nothing but that and ``blocks``, beside this file.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import tensorflow as tf
from blocks import Program, serve

layers = tf.keras.layers


def main() -> None:
    """Answer the benchmark."""
    options = json.loads(sys.argv[1])
    tf.config.threading.set_intra_op_parallelism_threads(options["threads"])
    tf.config.threading.set_inter_op_parallelism_threads(options["threads"])
    (cpu,) = tf.config.list_physical_devices("CPU")
    replicas = [tf.config.LogicalDeviceConfiguration()] * options["num_replicas"]
    tf.config.set_logical_device_configuration(cpu, replicas)
    serve(lambda _: make_program(options), tf.__version__)


def make_program(options: dict[str, Any]) -> Program:
    """Build the training step as TensorFlow's tutorial on custom loops does."""
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(options["num_replicas"])])
    size = options["num_replicas"] * options["batch_size"]
    with strategy.scope():
        model = make_model(**options["model"])
        optimizer = tf.keras.optimizers.Adam(options["optimizer"]["lr"])
        optimizer.build(model.trainable_variables)
    images, labels = tf.random.uniform([size, 28, 28, 1]), tf.random.uniform([size], maxval=10, dtype=tf.int32)
    dataset = tf.data.Dataset.from_tensor_slices((images, labels)).batch(size)
    batch = next(iter(strategy.experimental_distribute_dataset(dataset)))

    def replica_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(images, training=True))
            loss = tf.nn.compute_average_loss(losses, global_batch_size=size)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def distributed_step(images: Any, labels: Any) -> tf.Tensor:
        losses = strategy.run(replica_step, args=(images, labels))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    return Program(lambda: distributed_step(*batch).numpy(), model.count_params())


def make_model(_target_: str, **arguments: Any) -> tf.keras.Model:
    """Build the model of models.py that a node of conf/benchmarks/model names, with the same number of parameters."""
    images = tf.keras.Input([28, 28, 1])
    return tf.keras.Model(images, MODELS[_target_](images, **arguments))


def conv_net(x: Any, filters: Sequence[int] = (32, 64), *, pool_first: bool = False) -> Any:
    """Return the logits of the tutorial's network."""
    for number in filters:
        x = layers.Conv2D(number, 3, activation=None if pool_first else "relu")(x)
        x = layers.MaxPooling2D()(x)
        x = layers.ReLU()(x) if pool_first else x
    return layers.Dense(10)(layers.Dense(64, activation="relu")(layers.Flatten()(x)))


def mlp(x: Any, hidden_size: int, num_layers: int = 1, dropout: float = 0.0) -> Any:
    """Return the logits of a network of dense layers."""
    x = layers.Flatten()(x)
    for _ in range(num_layers):
        x = layers.Dense(hidden_size, activation="relu")(x)
    return layers.Dense(10)(layers.Dropout(dropout)(x) if dropout else x)


def many_parameters(x: Any, width: int, num_layers: int) -> Any:
    """Return the logits of a network of many tiny dense layers, each with a way around it."""
    x = layers.Dense(width)(layers.Flatten()(x))
    for _ in range(num_layers - 2):
        x = x + layers.Dense(width, activation="tanh")(x)
    return layers.Dense(10)(x)


class Positions(layers.Layer):
    """Adds a vector that it learns to each token."""

    def build(self, shape: Any) -> None:
        """Make the vectors."""
        self.positions = self.add_weight(shape=shape[1:], initializer="random_normal")

    def call(self, x: Any) -> Any:
        """Add them."""
        return x + self.positions


def transformer(x: Any, width: int, num_heads: int, num_layers: int, dropout: float) -> Any:
    """Return the logits of an encoder with torch's layers: normalization after sums, ReLU, dropout at four places."""
    x = Positions()(layers.Dense(width)(layers.Reshape([28, 28])(x)))
    for _ in range(num_layers):
        attention = layers.MultiHeadAttention(num_heads, width // num_heads, dropout=dropout)
        x = layers.LayerNormalization(epsilon=1e-5)(x + layers.Dropout(dropout)(attention(x, x)))
        hidden = layers.Dropout(dropout)(layers.Dense(4 * width, activation="relu")(x))
        x = layers.LayerNormalization(epsilon=1e-5)(x + layers.Dropout(dropout)(layers.Dense(width)(hidden)))
    return layers.Dense(10)(layers.GlobalAveragePooling1D()(x))


MODELS = {
    "models.ManyParameters": many_parameters,
    "models.conv_net": conv_net,
    "models.shallow_conv_net": functools.partial(conv_net, filters=[32]),
    "models.mlp": mlp,
    "models.deep_mlp": mlp,
    "models.Transformer": transformer,
}

if __name__ == "__main__":
    main()
