import pytest
import torch

from torchstrategy.collectives.summing import as_addable, is_addable, sum_columns, sum_in_order
from torchstrategy.errors import InvalidArgumentError


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_numbers_are_rounded_once(dtype):
    torch.manual_seed(0)
    parts = [torch.randn(1000).to(dtype) for _ in range(5)]
    out = torch.empty(1000, dtype=dtype)
    sum_in_order(parts, out)
    wide = parts[0].float()
    for part in parts[1:]:
        wide = wide + part.float()
    assert torch.equal(out, wide.to(dtype))
    step_by_step = parts[0]
    for part in parts[1:]:
        step_by_step = step_by_step + part
    assert not torch.equal(out, step_by_step)


def test_numbers_are_added_in_the_order_of_the_parts():
    parts = [torch.tensor([1e8]), torch.tensor([-1e8]), torch.tensor([1.0])]
    out = torch.empty(1)
    sum_in_order(parts, out)
    assert out.item() == 1.0
    sum_in_order([parts[0], parts[2], parts[1]], out)
    assert out.item() == 0.0


def test_one_part_is_copied():
    out = torch.empty(2)
    sum_in_order([torch.tensor([1.0, 2.0])], out)
    assert out.tolist() == [1.0, 2.0]


def test_complex_numbers_are_twice_as_many_real_ones():
    tensor = torch.tensor([1 + 2j, 3 + 4j])
    (numbers,) = as_addable([tensor])
    assert numbers.tolist() == [1.0, 2.0, 3.0, 4.0]
    numbers += 1
    assert tensor.tolist() == [2 + 3j, 4 + 5j]


@pytest.mark.parametrize("dtype", [torch.bool, torch.float8_e5m2])
def test_other_dtypes_are_refused(dtype):
    assert not is_addable(dtype)
    with pytest.raises(InvalidArgumentError, match="Can't sum tensors of dtype"):
        as_addable([torch.ones(2).to(dtype)])


@pytest.mark.parametrize("shapes", [[(2, 2)], [(2,), (), (1, 1)]])
def test_sums_of_packed_tensors(shapes):
    like = [torch.empty(shape) for shape in shapes]
    sums = sum_columns([torch.arange(4.0), torch.full((4,), 10.0), torch.full((4,), 100.0)], like)
    assert torch.cat([part.flatten() for part in sums]).tolist() == [110, 111, 112, 113]
    assert [part.shape for part in sums] == [tensor.shape for tensor in like]
    assert len({part.untyped_storage().data_ptr() for part in sums}) == len(shapes)
