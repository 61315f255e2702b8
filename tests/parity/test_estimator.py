"""tf.estimator's measured cases.

Each case gives what TF gave, or what a known difference makes of it: these are listed here, with the title of their
entry in ``docs/differences.md`` and with what has to come instead.
"""

import json
import math
import re
from pathlib import Path

import pytest

from tests.clusters import new_cluster
from tests.parity import area_estimator
from tests.parity.estimator import run_task
from torchstrategy.testing import ProcessPool

HERE = Path(__file__).parent
DIFFERENCES_PATH = HERE.parents[1] / "docs" / "differences.md"
SECTION = "Differences of estimators"
CASES = {case["id"]: case for case in json.loads((HERE / "estimator_cases.json").read_text())}
IN_CLUSTERS = {name: case for name, case in CASES.items() if case["area"] == "cluster"}
ALONE = [name for name in CASES if name not in IN_CLUSTERS]
TOLERANCE = 1e-6

# The processes of the figures' clusters, and what they run
CLUSTERS = {
    "chief_worker_evaluator": (["chief", "worker"], True, {"is_sharded": False, "everywhere": True}),
    "chief_worker_evaluator_nostrat": (["chief", "worker"], True, {"is_sharded": False, "everywhere": False}),
    "2workers_sharded": (["worker", "worker"], False, {"is_sharded": True, "everywhere": True}),
}


def without_optimizers_names(found):
    """TF's names of the optimizer's variables, as they are here."""
    renamed = {}
    for name, value in found["vars"].items():
        slot = re.fullmatch(r"training/(SGD|Ftrl|Adagrad|Adam)/(.+/.+)", name)
        if slot is not None:
            renamed[f"optimizer/{slot[2]}"] = value
        elif not name.startswith("training/"):
            renamed[name] = value
    return {**found, "vars": renamed}


def true_tasks(found):
    tasks = enumerate(found)
    return {
        name: {"task_type": "worker", "task_id": i, "is_chief": i == 0, "num_worker_replicas": 2, "global_id": i}
        for i, name in tasks
    }


# Pattern over a case's id -> title of the entry in docs/differences.md, and what makes our result of TF's
KNOWN_DIFFERENCES = {
    r"spec\.mode_none": ("There is no scaffold", lambda tf: []),
    r"(Linear|DNN)\w+\.(default_opt|var_data|3class|SGD)|mirrored\.seed\.train_eval": (
        "An optimizer's variables are named after the parameters",
        without_optimizers_names,
    ),
    r"est\.cluster\..*\.config": ("RunConfig says which task a process really is", true_tasks),
}


def known_difference(name):
    return next((found for pattern, found in KNOWN_DIFFERENCES.items() if re.fullmatch(pattern, name)), None)


def expected_of(case, kind="output"):
    expected = case["expected"][kind]
    difference = known_difference(case["id"])
    return expected if difference is None else difference[1](expected)


def equal(expected, got):
    if isinstance(expected, dict):
        return (
            isinstance(got, dict)
            and expected.keys() == got.keys()
            and all(equal(value, got[key]) for key, value in expected.items())
        )
    if isinstance(expected, list):
        return isinstance(got, list) and len(expected) == len(got) and all(map(equal, expected, got))
    if isinstance(expected, float) and type(got) in (int, float):
        return math.isclose(expected, got, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return type(expected) is type(got) and expected == got


@pytest.mark.parametrize("name", ALONE)
def test_measured_cases(name, tmp_path, monkeypatch):
    case = CASES[name]
    monkeypatch.delenv("TF_CONFIG", raising=False)
    if "exception" in case["expected"]:
        with pytest.raises(Exception) as error:  # noqa: PT011 - the name is compared
            area_estimator.run_case(case, tmp_path, monkeypatch)
        assert case["expected"]["exception"] in [cls.__name__ for cls in type(error.value).__mro__], error.value
        return
    got = area_estimator.run_case(case, tmp_path, monkeypatch)
    expected = expected_of(case)
    assert equal(expected, got), f"expected {expected}\n     got {got}"
    if known_difference(name):
        assert not equal(case["expected"]["output"], got), "listed as a difference, but equal to TF"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What the processes of each of the figures' clusters give, by their names."""
    found = {}

    def of(layout):
        if layout not in found:
            jobs, has_evaluator, options = CLUSTERS[layout]
            tasks = [(job, jobs[:i].count(job)) for i, job in enumerate(jobs)] + [("evaluator", 0)] * has_evaluator
            folder = str(tmp_path_factory.mktemp(layout) / "model")
            with ProcessPool(len(tasks), timeout_s=100.0) as pool:
                ranks = pool.run(run_task, new_cluster(jobs), tasks, folder, **options)
            found[layout] = {f"{job}{index}": rank for (job, index), rank in zip(tasks, ranks, strict=True)}
        return found[layout]

    return of


@pytest.mark.end_to_end
@pytest.mark.timeout(120)
@pytest.mark.parametrize("layout", CLUSTERS)
def test_measured_clusters(layout, results):
    found = results(layout)
    for case in area_estimator.names_of(list(IN_CLUSTERS.values()))[layout]:
        what = case["id"].split(".", 3)[3]
        for process, expected in expected_of(case, "per_process").items():
            got = found[process][what]
            if process == "evaluator0" and what == "input_context_calls":
                got, expected = set(got), set(expected)  # how many checkpoints it finds is a matter of time
                assert got == expected
                continue
            assert equal(expected, got), f"{case['id']} of {process}: expected {expected}, got {got}"
        if known_difference(case["id"]):
            assert not equal(case["expected"]["per_process"], {name: found[name][what] for name in found})


def test_an_evaluator_may_make_the_strategy(results):
    """TF's dies with a KeyError there."""
    found = results("chief_worker_evaluator")["evaluator0"]
    assert found["result"] == "None"
    assert set(found["input_context_calls"]) == {None}


@pytest.mark.parametrize(("reduction", "loss"), [("mean", 21.0), ("sum", 42.0)])
def test_replicas_losses_are_averaged(reduction, loss, tmp_path):
    """A rule that TF's figures give in words: of sums over the replicas' batches as well."""
    (first, _), values = area_estimator.batch_semantics(reduction, "mirrored2", str(tmp_path / "mirrored"))
    assert first == [1, loss]
    _, alone = area_estimator.batch_semantics(reduction, "single", str(tmp_path / "alone"))
    assert values != alone


def test_all_cases_have_a_family():
    for name in ALONE:
        area_estimator.family_of(CASES[name])
    assert {area_estimator.cluster_of(case) for case in IN_CLUSTERS.values()} == CLUSTERS.keys()


def test_every_difference_is_explained():
    section = DIFFERENCES_PATH.read_text().partition(f"\n## {SECTION}\n")[2].partition("\n## ")[0]
    titles = set(re.findall(r"^### (.*)$", section, re.MULTILINE))
    assert {title for title, _ in KNOWN_DIFFERENCES.values()} <= titles
