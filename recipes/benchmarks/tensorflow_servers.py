"""Times TensorFlow's own ParameterServerStrategy, for recipes/benchmarks/servers.py to compare with.

It is started in a Python environment that has TensorFlow, as a program of its own:
``python tensorflow_servers.py '{"workers": 1, ...}'`` starts servers, prints one line of JSON and ends them.
It needs nothing but TensorFlow and takes its sizes from the benchmark, so that both time the same work.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import tensorflow as tf

WEIGHTS = ((3, 3, 1, 32), (32,), (3, 3, 32, 64), (64,), (1600, 64), (64,), (64, 10), (10,))  # of the conv net


def main() -> None:
    """Run one task of the cluster, or the coordinator with a cluster around it."""
    if "TF_CONFIG" in os.environ:
        serve()
        return
    options = json.loads(sys.argv[1])
    with cluster(options["ps"], options["workers"]) as addresses:
        print(json.dumps(measure(addresses, options)), flush=True)
        os._exit(0)  # TensorFlow's coordinator waits for its servers at exit; they end with this process


def serve() -> None:
    """Serve until the process that started this one ends."""
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
    server = tf.distribute.Server(resolver.cluster_spec(), resolver.task_type, resolver.task_id, protocol="grpc")
    threading.Thread(target=end_with_parent, daemon=True).start()
    server.join()


def end_with_parent() -> None:
    """End this process when the other end of its standard input is closed, as at the death of its starter."""
    sys.stdin.buffer.read()
    os._exit(0)


@contextlib.contextmanager
def cluster(num_ps: int, num_workers: int) -> Iterator[dict[str, list[str]]]:
    """Start server processes on free ports of this host; they end with the block, or with this process."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(num_ps + num_workers + 1)]
    free = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    addresses = {"worker": free[:num_workers], "ps": free[num_workers:-1], "chief": free[-1:]}
    servers = []
    for job in ("ps", "worker"):
        for index in range(len(addresses[job])):
            task = json.dumps({"cluster": addresses, "task": {"type": job, "index": index}})
            servers.append(
                subprocess.Popen(
                    [sys.executable, __file__], stdin=subprocess.PIPE, env={**os.environ, "TF_CONFIG": task}
                )
            )
    try:
        yield addresses
    finally:
        for server in servers:
            server.kill()
            server.wait()


def measure(addresses: dict[str, list[str]], options: dict[str, Any]) -> dict[str, Any]:
    """Time closures, a large variable and rows of an embedding."""
    spec = tf.train.ClusterSpec(addresses)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(spec, rpc_layer="grpc")
    shards = tf.distribute.experimental.partitioners.FixedShardsPartitioner(options["ps"])
    plain = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(plain)
    with plain.scope():
        counter = tf.Variable(0.0)
        weights = [tf.Variable(tf.random.normal(shape, stddev=0.05)) for shape in WEIGHTS]
    # A second strategy would connect again; the partitioner is only asked when a variable is made.
    plain.extended._variable_partitioner = shards
    with plain.scope():
        dense = tf.Variable(tf.zeros([options["floats"]]))
        table = tf.Variable(tf.zeros(options["table"]))

    @tf.function
    def empty() -> tf.Tensor:
        return tf.constant(0.0)

    @tf.function
    def touch() -> tf.Tensor:
        return counter.assign_add(1.0)

    @tf.function
    def pull_negate_push() -> None:
        for part in getattr(dense, "variables", [dense]):
            part.assign_add(-part)  # what needs no computing would be copied on the servers, without the worker

    @tf.function
    def rows() -> None:
        indices = tf.random.uniform([options["rows"]], maxval=options["table"][0], dtype=tf.int64)
        with tf.GradientTape() as tape:
            values = tf.nn.embedding_lookup(table, indices)
            loss = tf.reduce_sum(values)
        parts = list(getattr(table, "variables", [table]))
        for part, gradient in zip(parts, tape.gradient(loss, parts), strict=True):
            part.scatter_sub(gradient)

    @tf.function
    def train_step(iterator: Any) -> tf.Tensor:
        images, labels = next(iterator)
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, conv_net(weights, images))
            loss = tf.reduce_mean(losses)
        for variable, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            variable.assign_sub(0.01 * gradient)
        return loss

    def batches() -> tf.data.Dataset:
        size = options["batch_size"]
        images, labels = tf.random.uniform([size, 28, 28, 1]), tf.random.uniform([size], maxval=10, dtype=tf.int32)
        return tf.data.Dataset.from_tensors((images, labels)).repeat()

    iterator = iter(coordinator.create_per_worker_dataset(batches))
    repeats = options["repeats"]
    return {
        "version": tf.__version__,
        "empty_rate": rates(coordinator, empty, options["closures"], repeats),
        "empty_latency_ms": latencies(coordinator, empty, options["latencies"]),
        "one_variable_rate": rates(coordinator, touch, options["closures"], repeats),
        "one_variable_latency_ms": latencies(coordinator, touch, options["latencies"]),
        "pull_negate_push_ms": per_closure(coordinator, pull_negate_push, options["steps"], repeats),
        "rows_ms": per_closure(coordinator, rows, options["row_steps"], repeats),
        "train_rate": rates(coordinator, train_step, options["train_steps"], repeats, (iterator,)),
    }


def conv_net(weights: list[tf.Variable], images: tf.Tensor) -> tf.Tensor:
    """Return the logits of the network that models.conv_net builds."""
    for kernel, bias in zip(weights[0:4:2], weights[1:4:2], strict=True):
        images = tf.nn.max_pool2d(tf.nn.relu(tf.nn.conv2d(images, kernel, 1, "VALID") + bias), 2, 2, "VALID")
    hidden = tf.nn.relu(tf.reshape(images, [-1, 1600]) @ weights[4] + weights[5])
    return hidden @ weights[6] + weights[7]


def rates(
    coordinator: Any, function: Callable[..., Any], closures: int, repeats: int, args: tuple[Any, ...] = ()
) -> list[float]:
    """Return closures a second, all scheduled at once, of each repeat."""
    return [1000 / milliseconds for milliseconds in per_closure(coordinator, function, closures, repeats, args)]


def per_closure(
    coordinator: Any, function: Callable[..., Any], closures: int, repeats: int, args: tuple[Any, ...] = ()
) -> list[float]:
    """Return milliseconds a closure of each repeat; with several workers they share the closures."""
    times = []
    for repeat in range(-1, repeats):  # the first is the warm-up
        number = closures if repeat >= 0 else max(4, closures // 10)
        started = time.perf_counter()
        for _ in range(number):
            coordinator.schedule(function, args)
        coordinator.join()
        if repeat >= 0:
            times.append(1000 * (time.perf_counter() - started) / number)
    return times


def latencies(coordinator: Any, function: Callable[[], Any], count: int) -> list[float]:
    """Return milliseconds from `schedule` to the value, of one closure at a time."""
    times = []
    for _ in range(count):
        started = time.perf_counter()
        coordinator.schedule(function).fetch()
        times.append(1000 * (time.perf_counter() - started))
    return times


if __name__ == "__main__":
    main()
