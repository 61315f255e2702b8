"""What tells one batch of data from another."""

import pytest
import torch

from torchstrategy.data import data_order


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("size", [0, 1, 3])
def test_bytes_of_a_column_are_those_of_its_values(dtype, size):
    column = torch.arange(4 * size).reshape(size, 4).to(dtype)[:, 2]
    expected = column.clone(memory_format=torch.contiguous_format).numpy().tobytes()
    assert data_order.raw_bytes(column, slice(None)) == expected
