"""What tests of ``ts.Model`` and of checkpoints run in processes with virtual devices."""

from __future__ import annotations

from pathlib import Path

import torch

import torchstrategy as ts
from tests.fit.fit_programs import FitProgram, default_dtype, fit

PROGRAMS = {
    "two outputs, weighted": FitProgram("two", "both", weights="sample", validation_split=0.2),
    "ignored labels": FitProgram("classes", "ignoring"),
    "accumulated and regularized": FitProgram(is_regularized=True, adds_loss=True, accumulation=3),
    "class weights": FitProgram("classes", "logits", weights="class", validation_split=0.3, steps_per_execution=2),
    "momentum": FitProgram(optimizer="momentum", batch_size=4, reads="loader"),
}


def compare_fit(name):
    """``fit``, ``evaluate`` and ``predict`` on the devices, and with one replica on the CPU."""
    program = PROGRAMS[name]
    with default_dtype(program.dtype):
        return fit(ts.TPUStrategy(), program), fit(ts.get_strategy(), program)


def compilations_of_fit():
    """Compilations of the first three epochs of ``fit`` with an evaluation after each, and of three more."""
    strategy = ts.TPUStrategy()
    with strategy.scope():
        net = torch.nn.Linear(3, 1)
        model = ts.Model(net)
        model.compile(optimizer=torch.optim.SGD(net.parameters(), lr=0.1), loss="mse", metrics=["mae"])
    x = torch.arange(30.0).reshape(10, 3) / 30
    counts = [strategy.num_compilations]
    for _ in range(2):
        model.fit(x, x[:, :1], batch_size=4, epochs=3, validation_data=(x, x[:, :1]), shuffle=False, verbose=0)
        counts.append(strategy.num_compilations)
    return counts[1] - counts[0], counts[2] - counts[1]


def make_state(strategy):
    with strategy.scope():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        metric = ts.metrics.Mean()
        total = ts.Variable(
            torch.tensor(0.0),
            trainable=False,
            synchronization=ts.VariableSynchronization.ON_READ,
            aggregation=ts.VariableAggregation.SUM,
        )
    dataset = strategy.experimental_distribute_dataset(torch.arange(32.0).reshape(16, 2) / 32, batch_size=8)
    checkpoint = ts.train.Checkpoint(model=model, optimizer=optimizer, metric=metric, total=total, dataset=dataset)

    @ts.function
    def step(batch):
        def fn(x):
            loss = model(x).square().mean(1)
            metric.update_state(loss.detach())
            total.assign_add(x.sum())
            ts.nn.compute_average_loss(loss, global_batch_size="actual").backward()
            optimizer.step()
            optimizer.zero_grad()

        strategy.run(fn, args=(batch,))

    return checkpoint, dataset, step


def look_at(checkpoint):
    state = checkpoint.model.state_dict()
    numbers = {name: value.detach().cpu().double().tolist() for name, value in state.items()}
    slots = checkpoint.optimizer.state_dict()["state"].values()
    momentum = [slot["momentum_buffer"].detach().cpu().tolist() for slot in slots]
    return numbers, momentum, float(checkpoint.metric.result()), float(checkpoint.total.read_value())


def cross_checkpoint(folder, writer, reader):
    """Save under one strategy after 3 steps, restore under another; states there and here, and after one more step."""
    made = {"tpu": ts.TPUStrategy, "mirrored": lambda: ts.MirroredStrategy(["cpu:0", "cpu:1"]), "none": ts.get_strategy}
    first, dataset, step = make_state(made[writer]())
    for x in dataset:
        step(x)
    iterator = iter(dataset)
    step(next(iterator))
    path = first.save(Path(folder) / "ckpt")
    kept = look_at(first)
    later, _, go_on = make_state(made[reader]())
    later.restore(path).assert_consumed()
    restored = look_at(later)
    go_on(next(iter(later.dataset)))
    step(next(iterator))
    content = torch.load(f"{path}.pt", weights_only=True, map_location=None)
    devices = {str(leaf.device) for leaf in torch.utils._pytree.tree_leaves(content) if isinstance(leaf, torch.Tensor)}
    return kept, restored, look_at(first), look_at(later), devices
