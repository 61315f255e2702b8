"""Batches as ``x``, ``y`` and ``sample_weight``."""

import pytest

import torchstrategy as ts

PARTS = [("x",), ("x", "y"), ("x", "y", "w"), (("x1", "x2"),), (["x1"], "y"), ({"a": "x"}, "y"), ("x", None, "w")]


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("kind", [tuple, list])
def test_what_was_packed_is_unpacked(parts, kind):
    full = (*parts, None, None)[:3]
    assert ts.utils.unpack_x_y_sample_weight(kind(parts)) == full
    assert ts.utils.unpack_x_y_sample_weight(ts.utils.pack_x_y_sample_weight(*parts)) == full


@pytest.mark.parametrize("x", ["x", {"a": "x"}, 3])
def test_x_alone(x):
    assert ts.utils.pack_x_y_sample_weight(x) == x
    assert ts.utils.unpack_x_y_sample_weight(x) == (x, None, None)


@pytest.mark.parametrize("data", [(), (1, 2, 3, 4), [1, 2, 3, 4]])
def test_other_numbers_of_parts(data):
    with pytest.raises(ValueError, match=rf"\(x, y, sample_weight\).* a {type(data).__name__} of {len(data)} parts"):
        ts.utils.unpack_x_y_sample_weight(data)
