import math

import numpy as np
import pytest
import torch

from torchstrategy.estimator.session_hooks import show_value


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (float(np.float32(0.04)), "0.04"),
        (0.8822945654392242, "0.88229454"),
        (1e40, "1e+40"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (3, "3"),
        ("text", "text"),
        (torch.tensor(0.1), "0.1"),
        (torch.tensor([1.0, 1e-6], dtype=torch.bfloat16), "[1.       0.000001]"),
        (torch.ones(2, requires_grad=True), "[1. 1.]"),
    ],
)
def test_values_as_tf_shows_them(value, shown):
    assert show_value(value) == shown
