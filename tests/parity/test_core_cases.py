"""tf.distribute's measured cases: each passes, or is a known difference that ``docs/differences.md`` explains."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from pathlib import Path

import pytest

from tests.parity import (
    area_checkpoint,
    area_collectives,
    area_context,
    area_data,
    area_keras_fit,
    area_loss,
    area_optimizer,
    area_reduce,
    area_run,
    area_variables,
)
from tests.parity.driver import difference, family_of, load_cases, matches, run_case, short
from tests.parity.known_differences import KNOWN_DIFFERENCES, ONE_REPLICA_TITLE, TF_BUGS_TITLE, fixed_tf_bug

# Importing the areas registers their families.
AREAS = (
    area_run,
    area_reduce,
    area_collectives,
    area_context,
    area_variables,
    area_data,
    area_loss,
    area_optimizer,
    area_keras_fit,
    area_checkpoint,
)
DIFFERENCES_PATH = Path(__file__).parents[2] / "docs" / "differences.md"
CASES = load_cases("core_cases.json")
DESCRIBED = load_cases("described_cases.json")  # rules that TF's measurements gave in words, in the form of the figures
KNOWN = {
    case.id: known
    for case in CASES
    for pattern, known in KNOWN_DIFFERENCES.items()
    if not case.tf_bug and re.fullmatch(pattern, case.id)
}
MATRIX_CHUNKS = 8
BY_ID = {case.id: case for case in CASES}


def expected_of(case):
    """What TF measured; of Keras' fit and evaluate for any number of replicas what it measured for one."""
    return area_keras_fit.one_replica(case, BY_ID) if case.id.startswith("8.") else case.expected


def group_of(case):
    """The cases of one family make one test; the big matrix makes several."""
    found = re.match(r"5\.matrix\.(n\d)\.ex(\d+)", case.id)
    return f"matrix-{found[1]}-{int(found[2]) % MATRIX_CHUNKS}" if found else f"{case.id[0]}-{family_of(case)}"


def grouped(cases):
    groups = defaultdict(list)
    for case in cases:
        groups[group_of(case)].append(case)
    marks = {"8-fit": pytest.mark.end_to_end}
    return [pytest.param(members, id=name, marks=marks.get(name, ())) for name, members in groups.items()]


@pytest.mark.filterwarnings("ignore:Variable .* is read outside `run`")  # whose copies differ, as in TF
@pytest.mark.filterwarnings("ignore:The Mean 'mean' was given a replica's part of a loss")  # TF's own pitfall
@pytest.mark.parametrize("cases", grouped(c for c in CASES if not c.tf_bug and c.id not in KNOWN))
def test_cases_equal_tf(cases):
    wrong = [text for case in cases if (text := difference(case, expected_of(case)))]
    assert not wrong, "\n".join([f"{len(wrong)} of {len(cases)} cases differ from TF:", *wrong])


@pytest.mark.parametrize("case", DESCRIBED, ids=lambda case: case.id)
def test_described_rules(case):
    assert difference(case, case.expected) is None


@pytest.mark.parametrize("cases", grouped(case for case in CASES if case.id in KNOWN))
def test_known_differences(cases):
    """Each gives what the list says, which is not what TF gave."""
    wrong = []
    for case in cases:
        (expected,) = [fn(case) for p, (_, fn) in KNOWN_DIFFERENCES.items() if re.fullmatch(p, case.id)]
        got = run_case(case)
        if not matches(expected, got):
            wrong.append(f"{case.id}: expected {short(expected)}, got {short(got)}")
        if matches(case.expected, got):
            wrong.append(f"{case.id}: listed as a known difference, but equal to TF")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("cases", grouped(case for case in CASES if case.tf_bug))
def test_bugs_of_tf_are_not_copied(cases):
    wrong = [text for case in cases if (text := difference(case, fixed_tf_bug(case)))]
    assert not wrong, "\n".join(wrong)


def test_all_copied_cases_are_there():
    assert Counter(case.id[0] for case in CASES) == {
        "1": 124,
        "2": 881,
        "3": 137,
        "4": 593,
        "5": 1372,
        "6": 567,
        "7": 65,
        "8": 145,
        "9": 74,
    }


def test_at_most_three_percent_differ():
    assert len(KNOWN) <= 0.03 * len(CASES)


def test_one_replica_differs_from_keras_where_batches_split_unevenly():
    """The rule that replaces Keras' numbers is not idle, and changes none that are right."""
    differing = {case.id for case in CASES if case.id[0] == "8" and not _is_near(expected_of(case), case.expected)}
    assert {"8.fit_np_b4.n4", "8.fit_ds_b3.patched.n2", "8.fit_ds_b3.n3", "8.fit_l2_b3.n2"} <= differing
    assert not any(
        re.search(r"predict|train_on_batch|evaluate.*\.(n[124]|none)$|\.n1$|\.none$", id) for id in differing
    )


def _is_near(expected, measured):
    return ("raises" in measured and expected == measured) or ("raises" not in measured and matches(expected, measured))


def test_every_pattern_matches_a_case():
    unused = [p for p in KNOWN_DIFFERENCES if not any(re.fullmatch(p, case.id) for case in CASES)]
    assert not unused


def test_every_difference_is_explained_once():
    text = DIFFERENCES_PATH.read_text()
    measured = text.partition("\n## Differences in the measured cases\n")[2].partition("\n## ")[0]
    titles = [title.replace("`", "") for title in re.findall(r"^### (.*)$", measured, re.MULTILINE)]
    assert sorted(titles) == sorted(
        {*(title for title, _ in KNOWN_DIFFERENCES.values()), ONE_REPLICA_TITLE, TF_BUGS_TITLE}
    )
