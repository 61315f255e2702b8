"""A small model whose training is known, for the tests of hooks."""

import torch

import torchstrategy as ts
from tests.estimator import lines


class Line(lines.Line):
    def forward(self, features):
        return super().forward(features["x"])


def model_fn(features, labels, mode, params):
    module = Line()
    return ts.estimator.EstimatorSpec(
        mode,
        module=module,
        predictions=lambda outputs: {"y": outputs},
        loss=lambda outputs, labels: torch.mean((outputs - labels) ** 2),
        train_op=torch.optim.SGD(module.parameters(), lr=params.get("lr", 0.01)),
    )


def batches(start=0, number=4, size=2):
    """Return batches of points of the line y = 2 x + 1."""
    x = torch.arange(float(start), float(start + number * size)).reshape(number, size)
    return [({"x": part}, 2 * part + 1) for part in x]


def make_estimator(model_dir, lr=0.01, **config):
    return ts.estimator.Estimator(
        model_fn, model_dir=str(model_dir), config=ts.estimator.RunConfig(**config), params={"lr": lr}
    )


class Recorder(ts.estimator.SessionRunHook):
    """Notes what it is called with."""

    def __init__(self, fetches="global_step", name="", events=None):
        self.fetches = fetches
        self.name = name
        self.events = [] if events is None else events
        self.results = []

    def _note(self, event):
        self.events.append(f"{self.name}{event}")

    def begin(self):
        self._note("begin")

    def after_create_session(self, session, coord):
        self._note("create")

    def before_run(self, run_context):
        self._note("before")
        return ts.estimator.SessionRunArgs(self.fetches)

    def after_run(self, run_context, run_values):
        self._note("after")
        self.results.append(run_values.results)

    def end(self, session):
        self._note("end")
