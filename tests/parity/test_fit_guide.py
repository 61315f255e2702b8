"""The numbers that two versions of the guide to distributed training print for ``fit`` and ``evaluate``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import nn

import torchstrategy as ts
from tests.fit.fit_programs import default_dtype
from tests.programs import cpu_devices, strategy_for

# A step takes the error from e to 0.96 e, and the loss is its square: of the first ten steps the guide prints the mean.
RATIO = 0.96**2
START_2020 = 1 + (2.4687 * 10 * (1 - RATIO) / (1 - RATIO**10)) ** 0.5
START_2024 = 1.0022993619

# Two epochs on a dataset, its evaluation, two epochs on arrays.
PRINTED = {
    2020: ["2.4687", "1.0912", "0.67764", "0.4823", "0.2132"],
    2024: ["1.0416e-04", "1.0196e-04", "1.0130e-04", "1.0099e-04", "1.0056e-04"],
}
FORMATS = {2020: [".4f", ".4f", ".5f", ".4f", ".4f"], 2024: [".4e"] * 5}


def guide_numbers(devices: Sequence[str] | None, version: int, dtype: torch.dtype = torch.float64) -> list[float]:
    with default_dtype(dtype):
        strategy = strategy_for(devices)
        with strategy.scope():
            layer = nn.Linear(1, 1)
            nn.init.constant_(layer.weight, START_2020 if version == 2020 else START_2024)
            nn.init.zeros_(layer.bias)
            if version == 2024:
                ts.regularize(layer, "weight", ts.regularizers.L2(1e-4))
            model = ts.Model(nn.Sequential(layer))
            model.compile(loss="mse", optimizer="sgd")
        one = torch.ones(1)
        dataset = ts.data.Dataset.from_tensors((one, one)).repeat(100).batch(10)
        first = model.fit(dataset, epochs=2, verbose=0)
        evaluated = model.evaluate(dataset, verbose=0)
        inputs, targets = np.ones((100, 1)), np.ones((100, 1))
        second = model.fit(inputs, targets, epochs=2, batch_size=10, verbose=0)
    return [*first.history["loss"], evaluated, *second.history["loss"]]


def printed(numbers, version):
    return [f"{number:{form}}" for number, form in zip(numbers, FORMATS[version], strict=True)]


@pytest.mark.parametrize("version", PRINTED)
@pytest.mark.parametrize("devices", [[], *map(cpu_devices, (1, 2, 4))], ids=["default", "1", "2", "4"])
def test_in_one_process(version, devices):
    assert printed(guide_numbers(devices, version), version) == PRINTED[version]


@pytest.mark.end_to_end
@pytest.mark.parametrize("version", PRINTED)
@pytest.mark.parametrize("devices", [None, cpu_devices(2)], ids=["2 processes", "2 processes x 2 replicas"])
def test_in_two_processes(version, devices, process_pool):
    for numbers in process_pool(2).run(guide_numbers, devices, version):
        assert printed(numbers, version) == PRINTED[version]


@pytest.mark.parametrize("version", PRINTED)
@pytest.mark.parametrize("devices", [[], *map(cpu_devices, (1, 2, 4))], ids=["default", "1", "2", "4"])
def test_in_single_precision(version, devices):
    """The errors of 2024 are 0.002 beside a weight of 1, so that rounding the weight moves the last printed digit."""
    numbers = guide_numbers(devices, version, torch.float32)
    assert numbers == pytest.approx([float(text) for text in PRINTED[version]], rel=6e-5 if version == 2024 else 1.1e-4)
