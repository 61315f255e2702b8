"""tf.distribute's measured cases of sharded variables."""

import json
import re
from pathlib import Path

import pytest
import torch

import torchstrategy as ts
from tests.parity.driver import EXCEPTIONS
from tests.ps.memory_client import MemoryStrategy
from torchstrategy.experimental.partitioners import FixedShardsPartitioner
from torchstrategy.ps.served_variables import ShardedVariable

HERE = Path(__file__).parent
DIFFERENCES_PATH = HERE.parents[1] / "docs" / "differences.md"
CASES = json.loads((HERE / "sharded_variable_cases.json").read_text())

# Pattern over a case's id -> title of the entry in docs/differences.md, and what comes instead of TF's
KNOWN_DIFFERENCES = {
    r"sh\.types": (
        "A sharded variable is a tensor",
        {"output": ["ShardedVariable", "ServedVariable", "ServedVariable", "ShardedVariable"]},
    ),
    r"sh\.convert": ("A sharded variable is a tensor", {"output": [True, True, True, True]}),
    r"sh\.convert_dtype": ("A sharded variable is a tensor", {"output": "torch.float64"}),
    r"sh\.ctor\.ok": ("A sharded variable is a tensor", {"exception": "TypeError"}),
    r"sh\.ctor\.dtype": ("A sharded variable is a tensor", {"exception": "TypeError"}),
}


def variable(value, partitioner=None):
    strategy = MemoryStrategy(partitioner or FixedShardsPartitioner(2))
    with strategy.scope():
        return ts.Variable(value)


def rows():
    return variable(torch.arange(15.0).reshape(5, 3))


def types():
    strategy = MemoryStrategy(FixedShardsPartitioner(2))
    with strategy.scope():
        return [type(ts.Variable(torch.zeros(shape))).__name__ for shape in ((5, 3), (1, 4), (), (4,))]


def placement_after():
    strategy = MemoryStrategy(FixedShardsPartitioner(2))
    with strategy.scope():
        made = [ts.Variable(torch.zeros(shape)) for shape in ((5, 3), (1, 4), (), (4,))]
    names = [[name.replace("/replica:0", "") for name in v.placement] for v in made]
    return [own if len(own) > 1 else own[0] for own in names]


def offsets(inputs):
    v = variable(torch.arange(float(inputs["rows"])), FixedShardsPartitioner(inputs["shards"]))
    return [[len(part) for part in v], [part.tolist() for part in v], [name[-20:] for name in v.placement], None]


def assign():
    v = rows()
    v.assign(torch.full((5, 3), 7.0))
    return [part.tolist() for part in v.variables]


def convert():
    v = rows()
    plain = torch.arange(15.0).reshape(5, 3)
    return [
        torch.as_tensor(v.numpy()).equal(plain),
        bool((v.numpy() == plain.numpy()).all()),
        (v @ torch.ones(3)).equal(plain.sum(1)),
        v.clone().equal(plain),
    ]


def scatter_add():
    v = variable(torch.full((5, 3), 100.0))
    v.scatter_add([0, 0], 1.0)
    return v[0].tolist()


def from_partitioner(inputs):
    v = variable(torch.zeros(inputs["variable shape"]), lambda shape, dtype: inputs["partitioner returns"])
    return [type(v).__name__, [list(part.shape) for part in v]]


def run(case):
    name, inputs = case["id"], case["inputs"]
    if name.startswith("sh.index."):
        found = eval(name.removeprefix("sh.index."), {"sv": rows()}).detach()
        return found.tolist()
    if name.startswith("sh.offsets."):
        return offsets(inputs)
    if name.startswith("sh.partitioner."):
        return from_partitioner(inputs)
    return {
        "sh.types": types,
        "sh.placement_after": placement_after,
        "sh.assign": assign,
        "sh.assign_scalar": lambda: rows().assign(1.0),
        "sh.convert": convert,
        "sh.convert_dtype": lambda: str(rows().to(torch.float64).dtype),
        "sh.convert_ref": lambda: "attr" if hasattr(rows(), "as_ref") else "no attr",
        "sh.scatter_add": scatter_add,
        "sh.ctor.ok": lambda: ShardedVariable([torch.zeros(2, 2), torch.zeros(1, 2)]),
        "sh.ctor.empty": lambda: ShardedVariable([]),
        "sh.ctor.dtype": lambda: ShardedVariable([torch.zeros(2), torch.zeros(2, dtype=torch.int64)]),
    }[name]()


def outcome(case):
    try:
        return {"output": run(case)}
    except Exception as error:  # noqa: BLE001
        return error


def equal(case, expected, got):
    if "exception" in expected:
        return isinstance(got, Exception) and isinstance(got, EXCEPTIONS.get(expected["exception"], ()))
    wanted = expected["output"]
    if case["id"].startswith("sh.offsets.") and isinstance(got, dict):
        # The measured variables were made one after the other: only the turns of the servers are the same.
        tasks = [re.findall(r"task:(\d)", " ".join(names)) for names in (wanted[2], got["output"][2])]
        turns = [[task == own[0] for task in own] for own in tasks]
        return wanted[:2] == got["output"][:2] and turns[0] == turns[1]
    return got == {"output": wanted}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["id"])
def test_measured_cases(case):
    found = [entry for pattern, entry in KNOWN_DIFFERENCES.items() if re.fullmatch(pattern, case["id"])]
    got = outcome(case)
    if found:
        assert not equal(case, case["expected"], got), "listed as a difference, but equal to TF"
    expected = found[0][1] if found else case["expected"]
    assert equal(case, expected, got), f"expected {expected}, got {got!r}"


def test_differences_are_documented():
    text = DIFFERENCES_PATH.read_text()
    for title, _ in KNOWN_DIFFERENCES.values():
        assert f"### {title}\n" in text


def test_all_cases_are_there():
    assert len(CASES) == 24
