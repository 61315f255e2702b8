"""tf.distribute's measured cases of ``ParameterServerStrategy`` and ``ClusterCoordinator``, with real servers.

Each case gives what TF gave, or what a known difference makes of it: these are listed here, with the title of their
entry in ``docs/differences.md``. Of cases whose numbers depend on timing only the others are compared.
"""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import torchstrategy as ts
from tests.parity.coordinator import CASES as RESULTS
from tests.parity.coordinator import FAULTS
from tests.parity.driver import EXCEPTIONS

HERE = Path(__file__).parent
DIFFERENCES_PATH = HERE.parents[1] / "docs" / "differences.md"
CASES = json.loads((HERE / "coordinator_cases.json").read_text())
SECTION = "Differences of parameter servers"

#: What depends on timing in cases that do.
TIMED = {"v_after", "v_final", "v", "count"}
SENT = "Functions are sent, not traced"

# Pattern over a case's id -> title of the entry in docs/differences.md, and what comes instead of TF's
KNOWN_DIFFERENCES = {
    r"ps\.info": (
        "Devices of parameters are those of the servers",
        {
            "num_replicas_in_sync": 1,
            "worker_devices": ["/device:CPU:0"],
            "parameter_devices": [f"/job:ps/replica:0/task:{ps}/device:CPU:0" for ps in range(2)],
            "num_workers": 2,
            "num_ps": 2,
        },
    ),
    r"ps\.explicit_device": ("Devices of parameters are those of the servers", RuntimeError),
    r"co\.schedule_py_fn": (SENT, "RemoteValue"),
    r"co\.py_fn_fetch": (SENT, 5),
    r"err\.trace_time": (SENT, ["KeyError", None]),
    r"err\.python_fn": (SENT, ["ZeroDivisionError", "ZeroDivisionError"]),
    r"fault\.all_workers_dead_then_one_back": (
        "One worker is enough to go on",
        {
            "join_blocked_15s_with_all_workers_dead": True,
            "still_blocked_35s_after_worker0_back": False,
            "join_after_both_back": [["ok", None]],
        },
    ),
    r"err\.which_cancelled": (
        "A function that runs is not interrupted",
        {
            "join": "InvalidArgumentError",
            "fetch": ["ok", "ok", "InvalidArgumentError", "CancelledError"],
            "done": True,
        },
    ),
}


@pytest.fixture
def cluster(local_cluster):
    return local_cluster(2, 2)


def run(case, cluster, function):
    """Return what our function of a case returns or raises."""
    strategy = ts.ParameterServerStrategy(cluster.resolver())
    try:
        coordinator = ts.coordinator.ClusterCoordinator(strategy)
        try:
            given = SimpleNamespace(case=case, cluster=cluster, strategy=strategy, coordinator=coordinator)
            return function(given)
        except Exception as error:  # noqa: BLE001 - compared with TF's
            return error
    finally:
        strategy.close()


def without_timed(case, value):
    if case["deterministic"] or not isinstance(value, dict):
        return value
    kept = {key: part for key, part in value.items() if key not in TIMED}
    if "fetch" in kept:  # those after the one that fails may have begun, but not all of them
        kept["fetch"] = [*kept["fetch"][:3], kept["fetch"][-1]]
    return kept


def equal(case, got):
    """Say whether a result is TF's."""
    expected = case["expected"]
    if "exception" in expected:
        return isinstance(got, EXCEPTIONS.get(expected["exception"], ()))
    return without_timed(case, got) == without_timed(case, expected["output"])


def check(case, got):
    found = [entry for pattern, entry in KNOWN_DIFFERENCES.items() if re.fullmatch(pattern, case["id"])]
    if not found:
        assert equal(case, got), f"expected {case['expected']}, got {got!r}"
        return
    assert not equal(case, got), "listed as a difference, but equal to TF"
    expected = found[0][1]
    if isinstance(expected, type):
        assert isinstance(got, expected)
    else:
        assert without_timed(case, got) == expected


@pytest.mark.parametrize("case", [case for case in CASES if case["id"] in RESULTS], ids=lambda case: case["id"])
def test_measured_cases(case, cluster):
    check(case, run(case, cluster, RESULTS[case["id"]]))


@pytest.mark.parametrize("case", [case for case in CASES if case["id"] in FAULTS], ids=lambda case: case["id"])
def test_faults(case, cluster):
    check(case, run(case, cluster, FAULTS[case["id"]]))


def test_all_cases_are_there():
    assert {case["id"] for case in CASES} == {*RESULTS, *FAULTS}
    assert (len(RESULTS), len(FAULTS)) == (27, 5)


def test_every_pattern_matches_a_case():
    assert not [p for p in KNOWN_DIFFERENCES if not any(re.fullmatch(p, case["id"]) for case in CASES)]


def test_every_difference_is_explained():
    section = DIFFERENCES_PATH.read_text().partition(f"\n## {SECTION}\n")[2].partition("\n## ")[0]
    titles = set(re.findall(r"^### (.*)$", section, re.MULTILINE))
    assert {title for title, _ in KNOWN_DIFFERENCES.values()} <= titles
