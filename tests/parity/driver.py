"""Run tf.distribute's measured cases against this library.

A case is an id, a situation in words or figures, and what TensorFlow did. A family is a function that builds the
situation from a case and returns what this library does; the rest here turns that into the form of the figures and
compares. Each case runs in a thread of its own: contexts can't leak from one to the next, and a hang is a result.
"""

from __future__ import annotations

import functools
import json
import math
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

import torchstrategy as ts
from torchstrategy.replicas import record

FIGURES = Path(__file__).parent
HANG_S = 20.0
TOLERANCE = 1e-6

# TF's names of classes and modules, and what stands for them here.
TF_NAMES = {
    r"_(?:Mirrored|OneDevice|Default)ReplicaContext": "ReplicaContext",
    r"_DefaultDistributionStrategy": "DefaultStrategy",
    r"EagerTensor": "Tensor",
    r"ResourceVariable": "Variable",
    r"VariableAggregationV2": "VariableAggregation",
    r"<tf\.Variable": "<ts.Variable",
    r"_BatchDataset|_VariantDataset": "DataLoader",
    r"RaggedTensor": "NestedTensor",
    r"tensorflow\.python\.distribute\.mirrored_strategy": "torchstrategy.strategies.mirrored_strategy",
    r"tensorflow\.python\.distribute\.one_device_strategy": "torchstrategy.strategies.one_device",
    r"tensorflow\.python\.distribute\.input_lib": "torchstrategy.data.distributed_dataset",
    r"tf\.distribute\.InputContext\b": "InputContext",
    r"dtype=tf\.(\w+), name=None": r"dtype=torch.\1",
    r"<tf\.Tensor: shape=\(\), dtype=float32, numpy=(\d\.)0>": r"tensor(\1)",
    r"tf\.Tensor\((\d\.)0, shape=\(\), dtype=float32\)": r"tensor(\1)",
}

_ANY_OF_FOUR = (ValueError, TypeError, RuntimeError, IndexError)
# TF's exceptions, and what this library may raise instead: the one table of all areas.
EXCEPTIONS: dict[str, tuple[type[Exception], ...]] = {
    "ValueError": (ValueError,),
    "TypeError": (TypeError,),
    "RuntimeError": (RuntimeError,),
    "IndexError": (IndexError,),
    "KeyError": (KeyError,),
    "NotImplementedError": (NotImplementedError,),
    "StopIteration": (StopIteration,),
    "AssertionError": _ANY_OF_FOUR,
    "AttributeError": (*_ANY_OF_FOUR, AttributeError),
    "InvalidArgumentError": (ts.errors.InvalidArgumentError,),
    "OutOfRangeError": (ts.errors.OutOfRangeError,),
    "DataLossError": (ts.errors.DataLossError,),
    "NotFoundError": (ts.errors.NotFoundError,),
}


@dataclass(frozen=True)
class Case:
    """One measured case; ``host`` is "n3", "onedevice", "default", "central", "central2", "outside", "none" or ""."""

    id: str
    inputs: Any
    expected: Any
    tf_bug: bool = False
    groups: tuple[str | None, ...] = field(default=(), compare=False)

    @functools.cached_property
    def host(self) -> str:
        found = re.search(r"\.(n\d+|onedevice|default|central2?|outside|none)$|^5\.matrix\.(n\d)", self.id)
        return (found[1] or found[2]) if found else ""

    @functools.cached_property
    def name(self) -> str:
        return self.id.removesuffix(f".{self.host}") if self.host else self.id

    @property
    def num_replicas(self) -> int:
        return int(self.host[1:]) if re.fullmatch(r"n\d+", self.host) else 1


@dataclass(frozen=True)
class Raw:
    """A family's result that already has the form of the figures."""

    value: Any


_families: list[tuple[re.Pattern[str], Callable[[Any, Case], Any]]] = []


def family(area: int, pattern: str | None = None) -> Callable[[Callable[[Any, Case], Any]], Callable[[Any, Case], Any]]:
    """Register a function for the cases of an area whose name matches (by default: is the function's name).

    The function gets the strategy of the case and the case, whose ``groups`` are the pattern's.
    """

    def register(fn: Callable[[Any, Case], Any]) -> Callable[[Any, Case], Any]:
        _families.append((re.compile(rf"{area}\.(?:{pattern or fn.__name__})"), fn))
        return fn

    return register


def load_cases(name: str) -> list[Case]:
    """Return the cases of a file, with TF's class names in the expectations replaced by ours."""
    text = (FIGURES / name).read_text()
    for pattern, ours in TF_NAMES.items():
        text = re.sub(pattern, ours, text)
    return [Case(row["id"], row["inputs"], row["expected"], bool(row.get("tf_bug"))) for row in json.loads(text)]


def family_of(case: Case) -> str:
    """Return the name of the case's family.

    Raises:
        LookupError: not exactly one family fits.
    """
    return _find_family(case)[0].__name__


def difference(case: Case, expected: Any) -> str | None:
    """Run a case and return how its result differs from ``expected``, or ``None`` if it does not."""
    got = run_case(case)
    return None if matches(expected, got) else f"{case.id}: expected {short(expected)}, got {short(got)}"


def run_case(case: Case) -> Any:
    """Run a case in a thread of its own and return its result in the form of the figures."""
    result: list[Any] = [{"hang": f"no result after {HANG_S} s"}]
    thread = threading.Thread(target=lambda: result.__setitem__(0, _outcome(case)), daemon=True)
    thread.start()
    thread.join(HANG_S)
    return result[0]


@functools.cache
def strategy_for(host: str) -> Any:
    """Return the strategy of a host name; one for each, so that 3,000 cases don't start 3,000 thread pools."""
    if re.fullmatch(r"n\d+", host):
        return mirrored(int(host[1:]))
    if host == "onedevice":
        return ts.OneDeviceStrategy("cpu:0")
    if host.startswith("central"):
        devices = [f"cpu:{i}" for i in range(int(host.removeprefix("central") or 1))]
        return ts.experimental.CentralStorageStrategy(compute_devices=devices, parameter_device="cpu:0")
    return ts.get_strategy()


def mirrored(num_replicas: int) -> Any:
    """Return a new strategy with so many CPU replicas."""
    return ts.MirroredStrategy(devices=[f"cpu:{i}" for i in range(num_replicas)])


def context_name() -> str | None:
    """Return the public name of the current replica context's class."""
    context = ts.get_replica_context()
    return "ReplicaContext" if isinstance(context, ts.ReplicaContext) else None


def replica_id() -> int:
    """Return the current replica's id."""
    return ts.get_replica_context().replica_id_in_sync_group


def per_replica(strategy: Any, fn: Callable[[int], Any] = lambda i: torch.tensor(i + 1.0)) -> Any:
    """Return what ``run`` makes of ``fn(replica id)``; by default of the scalars 1., 2., ..."""
    return strategy.run(lambda: fn(replica_id()))


def normalise(value: Any) -> Any:
    """Return a result in the form of the figures."""
    for types, form in _FORMS:
        if isinstance(value, types):
            return form(value)
    return {"object": type(value).__name__}


def matches(expected: Any, got: Any) -> bool:
    """Say whether a normalised result is what was expected, numbers within 1e-6."""
    if isinstance(expected, dict) and "raises" in expected:
        raised = got.get("exception") if isinstance(got, dict) else None
        return isinstance(raised, EXCEPTIONS[expected["raises"]])
    if isinstance(expected, dict) and "object" in expected:  # the repr beside it is TF's own
        return isinstance(got, dict) and got.get("object") == expected["object"]
    if isinstance(expected, dict):
        return (
            isinstance(got, dict)
            and expected.keys() == got.keys()
            and all(matches(value, got[key]) for key, value in expected.items())
        )
    if isinstance(expected, list):
        return isinstance(got, list) and len(expected) == len(got) and all(map(matches, expected, got))
    if isinstance(expected, float) or isinstance(got, float):
        return (
            _is_number(expected)
            and _is_number(got)
            and math.isclose(expected, got, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        )
    return type(expected) is type(got) and expected == got


def _find_family(case: Case) -> tuple[Callable[[Any, Case], Any], tuple[str | None, ...]]:
    found = [(fn, match.groups()) for pattern, fn in _families if (match := pattern.fullmatch(case.name))]
    if len(found) != 1:
        raise LookupError(f"{case.id} has {len(found)} families: {[fn.__name__ for fn, _ in found]}")
    return found[0]


def _outcome(case: Case) -> Any:
    fn, groups = _find_family(case)
    open_scopes = record._active
    try:
        value = fn(strategy_for(case.host), Case(case.id, case.inputs, case.expected, case.tf_bug, groups))
        return normalise(value)
    except Exception as error:  # noqa: BLE001 - the figures hold exceptions of any type
        return {"exception": error}
    finally:
        while record._active > open_scopes:  # some cases are about scopes that are never left
            record.stop_recording()


def _array(kind: str, value: torch.Tensor) -> Any:
    dtype = str(value.dtype).removeprefix("torch.")
    return {"kind": kind, "dtype": dtype, "shape": list(value.shape), "value": _numbers(value.detach().tolist())}


def _ndarray(value: np.ndarray[Any, Any]) -> Any:
    numbers = _numbers(value.tolist())
    return {"kind": "ndarray", "dtype": str(value.dtype), "shape": list(value.shape), "value": numbers}


def _numbers(value: Any) -> Any:
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_numbers(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def short(value: Any) -> str:
    """Return a result as a text of limited length."""
    if isinstance(value, dict) and "exception" in value:
        error = value["exception"]
        return f"{type(error).__name__}: {str(error)[:200]}"
    return json.dumps(value, separators=(",", ":"))[:400]


# The first type that fits decides: a bool is an int, and a numpy scalar may be a float.
_FORMS: list[tuple[Any, Callable[[Any], Any]]] = [
    ((type(None), bool, str), lambda v: v),
    (Raw, lambda v: v.value),
    (np.generic, lambda v: {"kind": f"np.{v.dtype}", "value": _numbers(v.item())}),
    ((int, float), lambda v: {"py": type(v).__name__, "value": _numbers(v)}),
    (ts.DistributedValues, lambda v: {"kind": type(v).__name__, "values": [normalise(part) for part in v.values]}),
    (ts.Variable, lambda v: _array(type(v).__name__, v.detach())),
    (torch.Tensor, lambda v: _array("Tensor", v)),
    (np.ndarray, _ndarray),
    (tuple, lambda v: {"tuple": [normalise(part) for part in v]}),
    (list, lambda v: {"list": [normalise(part) for part in v]}),
    (dict, lambda v: {"dict": {str(key): normalise(part) for key, part in v.items()}}),
]
