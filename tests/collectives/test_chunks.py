import pytest
import torch

from torchstrategy.collectives.summing import copy_in, copy_out, divide


@pytest.mark.parametrize("num_parts", [1, 3])
@pytest.mark.parametrize("sizes", [(), (0,), (1,), (0, 3, 0), (40,), (7, 7, 7, 7), (1,) * 50, (100, 1, 30, 2)])
def test_each_number_is_in_one_place(sizes, num_parts):
    tensors = list(torch.arange(sum(sizes)).split(sizes))
    chunks = divide(tensors, sizes, 16, num_parts, 4)
    area, seen = torch.zeros(16 * 8, dtype=torch.uint8), []
    for chunk in chunks:
        assert sum(chunk.lengths) == 16 or chunk is chunks[-1]
        assert len(chunk.parts) == len(chunk.lengths) == num_parts
        for place, pieces, length in zip(chunk.places(area), chunk.parts, chunk.lengths, strict=True):
            assert sum(map(len, pieces)) == len(place) == length
            copy_in(place, pieces)
            seen.append(place.clone())
            copy_out(-place, pieces)
    assert torch.equal(torch.cat([torch.zeros(0, dtype=torch.int64), *seen]), torch.arange(sum(sizes)))
    assert all(torch.equal(a, -b) for a, b in zip(tensors, torch.arange(sum(sizes)).split(sizes), strict=True))


def test_parts_are_whole_units_but_for_the_last():
    (chunk,) = divide([torch.zeros(13)], (13,), 16, 3, 4)
    assert chunk.lengths == (8, 5, 0)
