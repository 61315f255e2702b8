"""A coordinator that restores, saves numbers of variables on parameter servers, and is killed at a call for files."""

import json
import sys

import torch

import torchstrategy as ts
from torchstrategy.testing.faults import file_fault


def main(folder, last, kind, at):
    strategy = ts.ParameterServerStrategy(ts.cluster_resolver.TFConfigClusterResolver())
    ts.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        values = [ts.Variable(torch.zeros(400_000)), ts.Variable(torch.zeros(3))]  # the first passes through a file
        step = ts.Variable(0, trainable=False)
    checkpoint = ts.train.Checkpoint(values=values, step=step)
    manager = ts.train.CheckpointManager(checkpoint, folder, 2)
    with file_fault(None if kind == "none" else kind, at, folder) as calls:
        manager.restore_or_initialize()
        numbers = {value.numpy().max().item() for value in values} | {value.numpy().min().item() for value in values}
        assert numbers == {float(step.numpy())}, numbers
        print(json.dumps(["restored", int(step.numpy())]), flush=True)
        for number in range(int(step.numpy()) + 1, last + 1):
            for value in values:
                value.assign(torch.full(value.shape, float(number)))
            step.assign(number)
            manager.save()
            print(json.dumps(["saved", number]), flush=True)
    print(json.dumps(["calls", calls]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
