import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.data.profiles import quick
from torchstrategy.ps.layout import Part, Placer, VariableSpec, cut_evenly
from torchstrategy.ps.partitioning import FixedShardsPartitioner


@given(st.integers(0, 200), st.integers(1, 50))
@quick(100)
def test_rows_are_cut_evenly(num_rows, num_shards):
    rows = cut_evenly(num_rows, num_shards)
    assert len(rows) == num_shards
    assert sum(rows) == num_rows
    assert rows == sorted(rows, reverse=True)
    assert rows[0] - rows[-1] <= 1


@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6)), max_size=8), st.booleans())
@quick(100)
def test_parts_cover_every_row_once(num_ps, variables, by_size):
    shards = iter([count for _, count in variables])
    placer = Placer(num_ps, lambda shape, dtype: [next(shards)], by_size=by_size)
    for number, (rows, _) in enumerate(variables):
        spec = placer.place(number, "v", (rows, 2), torch.float32, True)
        value = torch.arange(2 * rows).view(rows, 2)
        parts = [spec.cut(value, index) for index in range(len(spec.parts))]
        assert torch.equal(torch.cat(parts), value)
        assert [spec.part_shape(index) for index in range(len(spec.parts))] == [part.shape for part in parts]
        assert all(0 <= part.ps < num_ps for part in spec.parts)
        assert VariableSpec.from_json(spec.to_json()) == spec


def test_a_place_of_its_own_is_whole_and_not_counted():
    placer = Placer(3, FixedShardsPartitioner(2))
    assert placer.place(0, "w", (4,), torch.float32, True, ps=2).parts == (Part("w", 2, 0, 4),)
    assert [part.ps for part in placer.place(1, "v", (4,), torch.float32, True).parts] == [0, 1]


def test_by_size_fills_the_emptiest():
    placer = Placer(2, by_size=True)
    sizes = [100, 10, 10, 10, 200, 1]
    assert [placer.place(i, "v", (n,), torch.float32, True).parts[0].ps for i, n in enumerate(sizes)] == [
        0, 1, 1, 1, 1, 0
    ]  # fmt: skip


def test_by_size_counts_what_has_a_place_of_its_own():
    placer = Placer(2, by_size=True)
    placer.place(0, "w", (100,), torch.float32, True, ps=0)
    assert placer.place(1, "v", (1,), torch.float32, True).parts[0].ps == 1


def test_scalars_and_single_rows_are_not_cut():
    placer = Placer(2, FixedShardsPartitioner(3))
    for shape in [(), (1, 5), (0, 5)]:
        spec = placer.place(0, "s", shape, torch.int64, False)
        assert not spec.is_sharded
        assert spec.parts[0].name == "s"
        assert spec.part_shape(0) == shape


def test_size():
    assert Placer(1).place(0, "w", (3, 5), torch.float64, True).num_bytes == 120
    assert Placer(1).place(0, "w", (), torch.bfloat16, True).num_bytes == 2


@pytest.mark.parametrize(
    ("counts", "message"),
    [([1, 2], "along axis 0 only"), ([], "number of shards"), (None, "number of shards"), (["a"], "number of shards")],
)
def test_partitioners_that_are_wrong(counts, message):
    placer = Placer(2, lambda shape, dtype: counts)
    with pytest.raises(ValueError, match=message):
        placer.place(0, "w", (4, 4), torch.float32, True)


def test_servers_that_there_are_not():
    with pytest.raises(ValueError, match="num_ps=0"):
        Placer(0)
    with pytest.raises(ValueError, match="no parameter server 2 for variable 'w'"):
        Placer(2).place(0, "w", (4,), torch.float32, True, ps=2)


@pytest.mark.parametrize(
    "change",
    [{"dtype": "load"}, {"dtype": 3}, {"shape": None}, {"parts": [["w", 0]]}, {"parts": None}, {"id": "x"}],
)
def test_json_that_is_no_variable(change):
    fields = Placer(1).place(0, "w", (4,), torch.float32, True).to_json()
    with pytest.raises(ValueError, match="not the fields of a variable"):
        VariableSpec.from_json({**fields, **change})
    with pytest.raises(ValueError, match="not the fields of a variable"):
        VariableSpec.from_json({})
