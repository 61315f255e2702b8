"""Counts what a training step costs in the library: Python calls for each parameter, and files that it touches.

``python -m tests.step_calls`` prints both for two replicas in a process and for two processes; tests/test_step_calls.py
keeps them from growing. Calls are counted and not timed, so they are the same on every machine.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from pathlib import Path

import torch

import torchstrategy as ts
from torchstrategy.testing import run_in_processes

LIBRARY = str(Path(ts.__file__).parent)
#: A step is like the others after these: plans are made, the first comparisons and searches are done.
NUM_WARM = 30
NUM_COUNTED = 4


class Tiny(torch.nn.Module):
    """Many small parameters, of which each has a gradient."""

    def __init__(self, num_parameters):
        super().__init__()
        self.parts = torch.nn.ParameterList(torch.ones(2) for _ in range(num_parameters))

    def forward(self, x):
        return x * torch.stack(list(self.parts)).sum()


def count_calls(make, num_parameters):
    """Return the library's Python calls in a step, by file; a mean over ``NUM_COUNTED`` steps after warming up.

    Args:
        make: returns a strategy, which trains a model of that many parameters.
        num_parameters: of the model.
    """
    calls = Counter()
    is_counting = False

    own = threading.get_ident()

    def count(frame, event, _):
        if not is_counting or event != "call" or not frame.f_code.co_filename.startswith(LIBRARY):
            return
        # Not the threads that watch the other processes: they have a clock of their own.
        if threading.get_ident() == own or threading.current_thread().name.startswith("torchstrategy-replica-"):
            calls[frame.f_code.co_filename[len(LIBRARY) + 1 :]] += 1

    threading.setprofile(count)  # for the replicas' threads, which the strategy makes
    sys.setprofile(count)
    try:
        strategy = make()
        with strategy.scope():
            model = Tiny(num_parameters)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

        def step(x):
            optimizer.zero_grad()
            ts.nn.compute_average_loss(model(x)).backward()
            optimizer.step()

        (batch,) = strategy.experimental_distribute_dataset(torch.ones(4), batch_size=4)
        for number in range(NUM_WARM + NUM_COUNTED):
            is_counting = number >= NUM_WARM
            strategy.run(step, args=(batch,))
        is_counting = False
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return Counter({name: number / NUM_COUNTED for name, number in calls.items()})


def in_process(num_parameters):
    """Count for both of two replicas in this process."""
    return count_calls(lambda: ts.MirroredStrategy(["cpu:0", "cpu:1"]), num_parameters)


def _of_rank(num_parameters):
    return count_calls(ts.MirroredStrategy, num_parameters)


def in_processes(num_parameters):
    """Count for two processes of one replica each; the chief's."""
    return run_in_processes(_of_rank, 2, num_parameters)[0]


def of_parameters(calls, num_parameters):
    """Return the calls for each parameter, without the search for edits, which does what the time of a step allows."""
    return sum(number for file, number in calls.items() if file != "replicas/edits.py") / num_parameters


def main():
    for name, count in (("two replicas in a process", in_process), ("two processes", in_processes)):
        few, many = count(100), count(600)
        each, further = of_parameters(many, 600), (600 * of_parameters(many, 600) - 100 * of_parameters(few, 100)) / 500
        print(f"{name}: {each:.1f} calls a parameter and step ({further:.1f} for each further one), {len(many)} files")
        for file, number in many.most_common(15):
            print(f"  {number / 600:6.2f}  {file}")


if __name__ == "__main__":
    main()
