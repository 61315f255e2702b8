"""tf.distribute's measured cases of MultiWorkerMirroredStrategy, run by real processes that TF_CONFIG describes.

Each case gives what TF gave, or what a known difference makes of it: these are listed here, with the title of their
entry in ``docs/differences.md`` and with what has to come instead.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

import torchstrategy as ts
from tests.clusters import new_cluster, run_programs
from tests.parity import multi_worker, multi_worker_rules
from torchstrategy.testing import ProcessPool

HERE = Path(__file__).parent
DIFFERENCES_PATH = HERE.parents[1] / "docs" / "differences.md"
CASES = {case["id"]: case for case in json.loads((HERE / "multi_worker_cases.json").read_text())}
LAYOUTS = {
    "2w1d": (["worker", "worker"], 1),
    "2w2d": (["worker", "worker"], 2),
    "chief2w1d": (["chief", "worker", "worker"], 1),
}
TOLERANCE = 2e-6
ADAM = r"train\..*\.adam"
ADAM_TOLERANCE = 2e-5  # TF computes 1 - 0.999 ** step in float32
DEADLINE_S = 4.0

INIT = r"init\..*"
LOSS = r"die\..*"
# Custom loops by name: the batch size, what each replica divides its loss by, and the number of rows
LOOPS = {
    **{f"G{size}.{kind}": (size, kind) for size in (4, 6) for kind in ("global", "mean", "auto")},
    "G5.global.partial": (5, "global"),
    "G4.global.n9": (4, "global", 9),
    "G5.mean.partial": (5, "mean"),
    "G5.auto.partial": (5, "auto"),
}
ALONE = r"train\.single\..*"


def of_first_replica(layout, name):
    """What the job's first replica brings counts on every process."""
    _, num_local = LAYOUTS[layout]
    if name.startswith("var."):
        return lambda tf: [[tf[0][0]] * num_local] * len(tf)
    return lambda tf: [[local, tf[0][1]] for local, _ in tf]


def sums_of_leaves(layout, name):
    def leaf_by_leaf(tf):
        total = multi_worker_rules.results(*shape_of(layout))["reduce.sum"][0]
        return [{"a": total, "b": total}] * len(tf)

    return leaf_by_leaf


def of_one_process(layout, name):
    alone = CASES[f"train.single.{name.partition('.')[2].removeprefix('k2.')}"]["expected"]["every_process"]
    return lambda tf: [alone] * len(tf)


# Pattern over a case's id -> title of the entry in docs/differences.md, and what makes our result of TF's
KNOWN_DIFFERENCES = {
    r".*\.var\.assign(_add)?\.ONLY_FIRST|.*\.onread\.ONLY_FIRST\.after_add": (
        "The first replica is that of the job",
        of_first_replica,
    ),
    r".*\.reduce\.nested": ("reduce works on structures", sums_of_leaves),
    r"train\.2w1d\.fit\.G6|train\.2w2d\..*\.fit\.G5\.partial": ("fit trains like one process", of_one_process),
    r".*\.var\.cross_assign_worker_dependent": ("Values before the first run are the chief's", of_first_replica),
}
UNCAUGHT = "die.raise"  # an error that nobody catches ends a program, but not a process of a pool
MADE_LATE = {"init.after_tf_op": "A strategy may be made at any time"}


def shape_of(layout):
    jobs, num_local = LAYOUTS[layout]
    return len(jobs), num_local


def known_difference(case_id):
    found = [entry for pattern, entry in KNOWN_DIFFERENCES.items() if re.fullmatch(pattern, case_id)]
    assert len(found) <= 1
    return found[0] if found else None


def names_of(layout):
    """The processes' names in the figures, in the order of ranks."""
    jobs, _ = LAYOUTS[layout]
    return [f"{job}{jobs[:rank].count(job)}" for rank, job in enumerate(jobs)]


def described(layout):
    """The results of the general rules, by the id that the case has or would have."""
    num_processes, num_local = shape_of(layout)
    rules = multi_worker_rules.results(num_processes, num_local)
    found = {f"{layout}.{name}": expected for name, expected in rules.items()}
    for name, arguments in LOOPS.items():
        training = multi_worker_rules.training(num_processes * num_local, *arguments)
        found[f"train.{layout}.loop.{name}"] = [training] * num_processes
    return found


def by_process(case, layout):
    """Return what TF gave to each process."""
    expected = case["expected"]
    names = names_of(layout)
    if case["id"].endswith("random_same_as_chief"):  # other random numbers than TF's
        torch.manual_seed(multi_worker.CHIEFS_SEED)
        return [torch.randn(2).tolist() * len(names)] * len(names)
    if "per_process" in expected:
        return [expected["per_process"][name] for name in names]
    return [expected.get("every_process", expected)] * len(names)


def equal(expected, got, tolerance=TOLERANCE):
    if isinstance(expected, dict) and "exception" in expected:
        return isinstance(got, dict) and expected["exception"] in got.get("exception", ())
    if isinstance(expected, dict):
        return (
            isinstance(got, dict)
            and expected.keys() == got.keys()
            and all(equal(v, got[k], tolerance) for k, v in expected.items())
        )
    if isinstance(expected, list):
        return (
            isinstance(got, list)
            and len(expected) == len(got)
            and all(equal(e, g, tolerance) for e, g in zip(expected, got, strict=True))
        )
    if isinstance(expected, float) and type(got) in (int, float):
        both_nan = math.isnan(expected) and math.isnan(got)
        return both_nan or math.isclose(expected, got, rel_tol=tolerance, abs_tol=tolerance)
    return type(expected) is type(got) and expected == got


def cases_of(layout):
    """The cases that a job of this layout runs, by id."""
    return {i: case for i, case in CASES.items() if layout in i.split(".")}


@pytest.fixture(scope="module")
def results(process_pool, tmp_path_factory):
    """For each layout what its processes got in each case, measured or described."""
    found = {}

    def of(layout):
        if layout not in found:
            num_processes, num_local = shape_of(layout)
            cases = [{"id": case_id} for case_id in dict.fromkeys([*described(layout), *cases_of(layout)])]
            folder = str(tmp_path_factory.mktemp(layout))
            pool = process_pool(num_processes)
            found[layout] = pool.run(multi_worker.run_cases, cases, new_cluster(LAYOUTS[layout][0]), num_local, folder)
        return found[layout]

    return of


def wrong_results(expected_by_id, ranks, layout):
    wrong = []
    for case_id, tf in expected_by_id.items():
        difference = known_difference(case_id)
        expected = difference[1](layout, case_id.partition(".")[2])(tf) if difference else tf
        got = [rank[case_id] for rank in ranks]
        if not equal(expected, got, ADAM_TOLERANCE if re.fullmatch(ADAM, case_id) else TOLERANCE):
            wrong.append(f"{case_id}: expected {expected}, got {got}")
        if difference and equal(tf, got):
            wrong.append(f"{case_id} is listed as a difference, but equal to TF")
    return wrong


@pytest.mark.end_to_end
@pytest.mark.parametrize("layout", LAYOUTS)
def test_measured_cases(layout, results):
    expected = {case_id: by_process(case, layout) for case_id, case in cases_of(layout).items()}
    wrong = wrong_results(expected, results(layout), layout)
    assert not wrong, "\n".join([f"{len(wrong)} results:", *wrong])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_described_rules(layout, results):
    wrong = wrong_results(described(layout), results(layout), layout)
    assert not wrong, "\n".join([f"{len(wrong)} results:", *wrong])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rules_are_what_tf_did(layout):
    for case_id, expected in described(layout).items():
        for measured in (case_id, case_id.replace(".loop.", ".k2.loop.")):  # TF's two versions of Keras
            if measured in CASES:
                assert equal(by_process(CASES[measured], layout), expected), measured


@pytest.mark.parametrize("case_id", [i for i in CASES if re.fullmatch(ALONE, i)])
def test_training_without_a_strategy(case_id):
    assert equal(CASES[case_id]["expected"]["every_process"], multi_worker.run_case(ts.get_strategy(), {"id": case_id}))


@pytest.mark.parametrize("case_id", [i for i in CASES if re.fullmatch(INIT, i)])
def test_construction(case_id, monkeypatch):
    case = CASES[case_id]
    config = case["inputs"]["TF_CONFIG"]
    monkeypatch.delenv("TF_CONFIG", raising=False)
    if config is not None:
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    got = multi_worker.make_in_one_process(case)
    if case_id in MADE_LATE:
        assert got["output"]["num_replicas"] == 1
    else:
        assert equal(case["expected"], got)


@pytest.mark.slow
@pytest.mark.parametrize("case_id", [i for i in CASES if re.fullmatch(LOSS, i)])
def test_loss_of_a_worker(case_id, tmp_path):
    """The survivors' steps, and the kinds of their errors; TF's seconds are not compared."""
    expected = CASES[case_id]["expected"]
    names = list(expected["steps"])
    arguments = (new_cluster(["worker"] * len(names)), case_id.removeprefix("die."), DEADLINE_S, str(tmp_path))
    if case_id == UNCAUGHT:
        code = f"from tests.parity.multi_worker import lose_a_worker; lose_a_worker{arguments!r}"
        run_programs(["-c", code], [{"RANK": str(rank)} for rank in range(len(names))], HERE.parents[1])
    else:
        with ProcessPool(len(names), timeout_s=60.0) as pool:
            pool.outcomes(multi_worker.lose_a_worker, *arguments)
    for name in names:
        seen = json.loads((tmp_path / f"{name}.json").read_text())
        assert seen["steps"] == expected["steps"][name]
        assert ("died" in seen) == ("retry" in seen) == (name in expected["died"])
        if "died" not in seen:
            continue
        died, again = expected["died"][name], expected["retry"][name]["exception"]
        assert seen["died"]["at_step"] == died["at_step"]
        assert died["exception"] in seen["died"]["exception"]
        assert "ank 1" in seen["died"]["message"]  # the one that is gone or silent
        assert again in seen["retry"]["exception"]


def test_every_case_is_run_or_counted():
    of_layouts = [i for layout in LAYOUTS for i in cases_of(layout)]
    assert len(of_layouts) == len(set(of_layouts))
    kinds = {kind: [i for i in CASES if re.fullmatch(kind, i)] for kind in (INIT, LOSS, ALONE)}
    assert Counter({kind: len(ids) for kind, ids in kinds.items()}) == {INIT: 8, LOSS: 5, ALONE: 5}
    assert sorted([*of_layouts, *(i for ids in kinds.values() for i in ids)]) == sorted(CASES)


def test_every_pattern_matches_a_case():
    unused = [p for p in KNOWN_DIFFERENCES if not any(re.fullmatch(p, case_id) for case_id in CASES)]
    assert not unused


def test_every_difference_is_explained():
    text = DIFFERENCES_PATH.read_text()
    section = text.partition("\n## Differences between one process and many\n")[2].partition("\n## ")[0]
    titles = re.findall(r"^### (.*)$", section, re.MULTILINE)
    listed = {title for title, _ in KNOWN_DIFFERENCES.values()}
    assert listed | {*MADE_LATE.values()} <= set(titles)
