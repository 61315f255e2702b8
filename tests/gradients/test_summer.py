"""The comparison of parameters between processes."""

import pytest
import torch

from torchstrategy.gradients import summer


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (5,), (8, 3), (1, 40), (40, 1), (9, 2, 3)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int64], ids=str)
def test_sums_in_parts_are_those_of_all_elements(monkeypatch, shape, dtype):
    monkeypatch.setattr(summer, "_PART_NUMBERS", 7)
    values = (10 * torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).to(dtype)
    parts = [values, values.T if values.dim() == 2 else values[..., None].expand(*shape, 2)]
    found = summer._checksums(parts)
    for part, (total, size) in zip(parts, found, strict=True):
        numbers = torch.view_as_real(part) if part.is_complex() else part
        assert total == pytest.approx(float(numbers.double().sum()), rel=1e-12, abs=1e-12)
        assert size == pytest.approx(float(numbers.double().abs().sum()), rel=1e-12, abs=1e-12)
