"""Planted mistakes are found, with their causes."""

import functools

import numpy as np
import pytest
import torch

import torchstrategy as ts
from tests.testing.verification.planted import CAUSES, build, make_batches

KINDS = ["mlp", "conv", "transformer"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mistake", CAUSES)
@pytest.mark.parametrize("kind", KINDS)
def test_cause_is_named_in_one_process(kind, mistake):
    report = ts.testing.verify_replication(
        functools.partial(build, kind=kind, mistake=mistake), make_batches(kind), replicas=(2, 3), processes=()
    )
    assert not report.ok
    assert report.kinds == {CAUSES[mistake]}, str(report)


def with_noise(strategy, noise):
    program = build(strategy)
    inner, forward = program["model"], program["model"].forward
    inner.forward = lambda x: forward(x + torch.as_tensor(noise(x)))
    return program


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("equal", [False, True])
def test_random_numbers_of_numpy_are_seen(equal):
    def noise(x):
        if equal:
            np.random.seed(3)
        return np.random.normal(size=x.shape)

    report = ts.testing.verify_replication(
        functools.partial(with_noise, noise=noise), make_batches("mlp"), replicas=(2,), processes=()
    )
    assert report.kinds == {"equal random streams" if equal else "random numbers can't be compared"}, str(report)


QUICK = [("mlp", "one rank"), ("mlp", "seen twice")]  # each starts processes, which takes seconds


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "mistake"),
    [
        pytest.param(k, m, marks=[] if (k, m) in QUICK else pytest.mark.slow, id=f"{k}-{m}")
        for k in KINDS
        for m in CAUSES
    ],
)
def test_cause_is_named_in_processes(kind, mistake):
    report = ts.testing.verify_replication(
        functools.partial(build, kind=kind, mistake=mistake), make_batches(kind), replicas=(), processes=(2,)
    )
    assert not report.ok
    assert report.kinds == {CAUSES[mistake]}, str(report)
