"""tf.distribute's measured cases of partitioners, and of where variables of a parameter server go. All are equal."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

import torchstrategy as ts
from tests.parity.driver import EXCEPTIONS
from torchstrategy.ps.layout import Placer

CASES = json.loads((Path(__file__).parent / "partitioner_cases.json").read_text())
DTYPES = {
    "f16": torch.float16,
    "f32": torch.float32,
    "f64": torch.float64,
    "i8": torch.int8,
    "i64": torch.int64,
    "bool": torch.bool,
    "str": str,
}
partitioners = ts.experimental.partitioners


def counts(inputs):
    partitioner = getattr(partitioners, inputs["cls"])(**inputs["args"])
    return partitioner(inputs["shape"], DTYPES[inputs["dtype"]])


def along_axis_1():
    chosen = [
        partitioners.FixedShardsPartitioner(2),
        partitioners.MinSizePartitioner(4, max_shards=10),
        partitioners.MaxSizePartitioner(8),
    ]
    return [partitioner([4, 6], torch.float32, axis=1) for partitioner in chosen]


def device(ps):
    return f"/job:ps/task:{ps}/device:CPU:0"


def places(placer, shapes, dtypes=None, ps=None):
    """Return the device of each variable, or of each of its shards."""
    found = []
    for index, shape in enumerate(shapes):
        dtype = dtypes[index] if dtypes else torch.float32
        parts = placer.place(index, "v", shape, dtype, True, ps=ps).parts
        found.append(device(parts[0].ps) if len(parts) == 1 else [device(part.ps) for part in parts])
    return found


def with_own_place():
    placer = Placer(2)
    return [*places(placer, [()], ps=1), *places(placer, [()], ps=1), *places(placer, [()])]


def of_other_dtypes():
    placer = Placer(2)
    places(placer, [()])  # the case's first of several went to task 1
    return places(placer, [(), (), ()], [torch.float32, torch.int64, torch.bool])


def kinds():
    placer = Placer(2, partitioners.FixedShardsPartitioner(2))
    specs = [placer.place(i, "v", shape, torch.float32, True) for i, shape in enumerate([(5, 3), (1, 4), (), (4,)])]
    return ["ShardedVariable" if spec.is_sharded else "CachingVariable" for spec in specs]


def shards_of_rows(rows, num_shards, first_ps):
    placer = Placer(2, partitioners.FixedShardsPartitioner(num_shards))
    for _ in range(first_ps):
        placer.place(0, "before", (), torch.float32, True)
    parts = placer.place(1, "v", (rows,), torch.float32, True).parts
    values = torch.arange(rows)
    return [
        [part.stop - part.start for part in parts],
        [values[part.start : part.stop].tolist() for part in parts],
        [f":0/task:{part.ps}/device:CPU:0" for part in parts],
        None,
    ]


def given_counts(inputs):
    placer = Placer(2, lambda shape, dtype: inputs["partitioner returns"])
    spec = placer.place(0, "v", inputs["variable shape"], torch.float32, True)
    kind = "ShardedVariable" if spec.is_sharded else "CachingVariable"
    return [kind, [list(spec.part_shape(index)) for index in range(len(spec.parts))]]


def run(case):
    name, inputs = case["id"], case["inputs"]
    special = {
        "part.err.max_bytes0": lambda: partitioners.MaxSizePartitioner(0),
        "part.err.max_shards_neg": lambda: partitioners.MaxSizePartitioner(4, max_shards=-1),
        "part.err.fixed_noarg": lambda: partitioners.FixedShardsPartitioner(),
        "part.axis1": along_axis_1,
        "ps.roundrobin": lambda: places(Placer(2), [()] * 5),
        "ps.explicit_device": with_own_place,
        "ps.nontrainable_int_string": of_other_dtypes,
        "sh.types": kinds,
        "sh.placement_after": lambda: places(
            Placer(2, partitioners.FixedShardsPartitioner(2)), [(5, 3), (1, 4), (), (4,)]
        ),
    }
    if name in special:
        return special[name]()
    if name.startswith("sh.offsets."):  # earlier variables of that program had advanced the round
        return shards_of_rows(inputs["rows"], inputs["shards"], {"7": 1, "5": 0, "3": 1}[name.split(".")[2]])
    return given_counts(inputs) if name.startswith("sh.partitioner.") else counts(inputs)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_measured_cases(case):
    if "exception" in case["expected"]:
        with pytest.raises(EXCEPTIONS[case["expected"]["exception"]]):
            run(case)
    else:
        assert run(case) == case["expected"]["output"]


def test_all_cases_are_there():
    assert Counter(case["id"].split(".")[0] for case in CASES) == {
        "fixed": 17, "min": 44, "max": 39, "part": 4, "ps": 3, "sh": 7
    }  # fmt: skip
