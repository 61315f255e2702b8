"""XLA's own collectives between devices that are driven apart."""

import pytest
import torch

from tests.programs import largest_difference
from tests.tpu import backend_programs as programs

SIZE = 4


def test_sums_and_gathers_of_every_dtype(xla_process):
    found = xla_process(SIZE, fresh=True).run(programs.collectives, SIZE)
    assert [one.pop("rank") for one in found] == list(range(SIZE))
    for one in found:
        for name, result in one.items():
            kind, dtype = name.split()
            if kind == "sum":
                assert result == [SIZE * i + 60 for i in range(6)], name
            else:
                rows = [[float(i + rank - 1) for i in range(3)] for rank in range(SIZE)]
                expected = torch.tensor(rows).to(getattr(torch, dtype.removeprefix("torch."))).double().tolist()
                assert result == (expected if dtype != "torch.uint8" else [[255.0, 0.0, 1.0], *expected[1:]]), name


def test_devices_that_are_driven_apart_train_like_one(xla_process):
    """Nothing is read from a device, and nothing is compiled after the second step."""
    weights, loss = programs.train_alone(SIZE, 5)
    found = xla_process(SIZE, fresh=True).run(programs.train, SIZE, 5)
    for one in found:
        assert largest_difference(weights, one["weights"]) <= 1e-5
        assert one["reads"] == 0 < one["later reads"]
    assert sum(one["loss"] for one in found) == pytest.approx(loss, abs=1e-5)
    seen = [set(column) for column in zip(*(one["compilations"] for one in found), strict=True)]
    assert seen[1:] == [seen[-1]] * 4
