"""Times this library's parameter servers on a cluster of this host, for recipes/benchmarks/servers.py.

It is a program of its own, as recipes/tensorflow_servers.py is, which times the same work:
``python server_times.py '{"workers": 1, ...}'`` starts servers, prints one line of JSON and ends them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import profiles
import torch
from models import conv_net
from torch import nn

import torchstrategy as ts


def main() -> None:
    """Start a cluster, time it, and print the figures."""
    options = json.loads(sys.argv[1])
    with ts.testing.LocalCluster(options["workers"], options["ps"], environment={"OMP_NUM_THREADS": "1"}) as cluster:
        print(json.dumps(measure(cluster.resolver(), options)), flush=True)


def measure(resolver: ts.cluster_resolver.ClusterResolver, options: dict[str, Any]) -> dict[str, Any]:
    """Time closures, a large parameter, rows of an embedding and training steps."""
    # Both large tensors are cut into a part for each parameter server, all else is whole.
    partitioner = ts.experimental.partitioners.MinSizePartitioner(min_shard_bytes=1 << 21, max_shards=options["ps"])
    strategy = ts.ParameterServerStrategy(resolver, partitioner)
    coordinator = ts.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        counter = ts.Variable(0.0, trainable=False)
        dense = nn.Parameter(torch.zeros(options["floats"]))
        dense_optimizer = torch.optim.SGD([dense], lr=1.0)
        table = nn.Embedding(*options["table"], sparse=True)
        table_optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
        model = conv_net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def empty() -> float:
        return 0.0

    def touch() -> None:
        counter.assign_add(1.0)

    def pull_push() -> None:
        dense.grad = dense.detach()
        dense_optimizer.step()

    def pull_negate_push() -> None:
        dense.grad = -dense.detach()  # in memory of its own
        dense_optimizer.step()

    def rows() -> None:
        indices = torch.randint(options["table"][0], (options["rows"],))
        table_optimizer.zero_grad()
        table(indices).sum().backward()
        table_optimizer.step()

    def train_step(batches):  # noqa: ANN001, ANN202 - the worker's own iterator
        images, labels = next(batches)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    def batches() -> ts.data.Dataset:
        return ts.data.Dataset.from_tensors(random_batch(options["batch_size"])).repeat()

    iterator = iter(coordinator.create_per_worker_dataset(batches))
    repeats = options["repeats"]
    figures = {
        "version": ts.__version__,
        "empty_rate": rates(coordinator, empty, options["closures"], repeats),
        "empty_latency_ms": latencies(coordinator, empty, options["latencies"]),
        "one_variable_rate": rates(coordinator, touch, options["closures"], repeats),
        "one_variable_latency_ms": latencies(coordinator, touch, options["latencies"]),
        "pull_push_ms": per_closure(coordinator, pull_push, options["steps"], repeats),
        "pull_negate_push_ms": per_closure(coordinator, pull_negate_push, options["steps"], repeats),
        "rows_ms": per_closure(coordinator, rows, options["row_steps"], repeats),
        "train_rate": rates(coordinator, train_step, options["train_steps"], repeats, (iterator,)),
    }
    if options["profile"]:
        record(coordinator, train_step, iterator, options)
    strategy.close()
    return figures


def record(coordinator: Any, train_step: Callable[..., Any], iterator: Any, options: dict[str, Any]) -> None:
    """Train on the workers under a profiler."""
    profiled_step = profiles.WorkerProfile(options, Path(options["folder"])).recorded(train_step)
    for _ in range(4 * options["workers"] * sum(options["profile_steps"].values())):  # they share them unevenly
        coordinator.schedule(profiled_step, (iterator,))
    coordinator.join()


def random_batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images and labels of the conv net's shapes."""
    return torch.rand(size, 1, 28, 28), torch.randint(10, (size,))


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
