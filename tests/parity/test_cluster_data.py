"""tf.distribute's measured cases of input over several processes, run by as many real processes.

Each case gives what TF gave, or what a known difference makes of it: these are listed here, with the title of their
entry in ``docs/differences.md`` and with what has to come instead.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from itertools import chain
from pathlib import Path

import pytest

from tests.parity import cluster_data
from tests.parity.driver import EXCEPTIONS

HERE = Path(__file__).parent
DIFFERENCES_PATH = HERE.parents[1] / "docs" / "differences.md"
CASES = json.loads((HERE / "cluster_data_cases.json").read_text())
LAYOUTS = {"2w1d": (2, 1), "3w1d": (3, 1), "2w2d": (2, 2)}
CUT = "..."  # the figures hold 12 steps
RANDOM_ORDER = "2w2d.shuffle_seed.AUTO"


def in_replica_order(of_processes):
    """Give chunk i, which in TF goes to process i mod P, to replica i; there are two processes of two replicas."""
    steps = []
    for parts in zip(*of_processes, strict=True):
        components = [[part[i : i + 2] for part in parts] for i in range(0, len(parts[0]), 2)]
        chunks = [[first[0], second[0], first[1], second[1]] for first, second in components]
        steps.append([list(chain(*(c[start : start + 2] for c in chunks))) for start in (0, 2)])
    return [list(own) for own in zip(*steps, strict=True)]


def without_last_step(of_processes):
    """Leave out the step in which nobody has an example."""
    assert not any(chain(*(own[-1] for own in of_processes))), "TF's last step has data"
    return [own[:-1] for own in of_processes]


def cut_by_data(of_processes):
    """One file holds the lines 0, 1 and 2, in a batch of up to 4."""
    return [[[[0, 1]]], [[[2]]]]


def interleaved_by_data(of_processes):
    """Two files at a time, 0 and 1 first; each line of the first goes to replica 0, of the second to replica 1."""
    numbers = [start + line for start in (0, 20) for line in range(3)]
    return [[[[number + 10 * i]] for number in numbers] for i in range(2)]


def same_everywhere(of_processes):
    return [of_processes[0]] * len(of_processes)


# Pattern over a case's id -> title of the entry in docs/differences.md, and what makes our result of TF's
KNOWN_DIFFERENCES = {
    r"2w2d\.(range(?![01]\.|5\.batch1).*|batch_map|batch_take1|tuple)\.(none|DATA|AUTO)|2w2d\.textline.*\.DATA": (
        "Chunk i goes to replica i",
        in_replica_order,
    ),
    r"2w[12]d\.range5\.batch1\.OFF|2w2d\.textline\.(2files\.batch2\.OFF|[34]files\.batch2\.(FILE|AUTO))"
    r"|3w1d\.textline\.4files\.batch2\.AUTO": (
        "No step is without data",
        without_last_step,
    ),
    r"2w1d\.textline\.1files\.batch4\.AUTO": ("AUTO cuts batches where files are too few", cut_by_data),
    r"2w1d\.fromslices_files_interleave\.4files\.AUTO": ("A list of files is called one", interleaved_by_data),
    r"2w1d\.textline\.1files\.batch2\.FILE": ("A mistake raises the same on every process", same_everywhere),
}


@pytest.fixture(scope="module")
def results(process_pool, tmp_path_factory):
    """For each kind of job what its ranks got in each case."""
    folder = tmp_path_factory.mktemp("lines")
    cluster_data.write_files(folder)
    found = {}

    def of(layout):
        if layout not in found:
            num_processes, num_local = LAYOUTS[layout]
            pool = process_pool(num_processes)
            found[layout] = pool.run(cluster_data.run_cases, cases_of(layout), num_local, str(folder))
        return found[layout]

    return of


def cases_of(layout):
    return [case for case in CASES if case["id"].startswith(layout)]


def by_process(case):
    """Return what TF gave to each process."""
    num_processes = LAYOUTS[case["id"][:4]][0]
    expected = case["expected"]
    if "per_process" in expected:
        return [expected["per_process"][f"worker{i}"] for i in range(num_processes)]
    return [expected.get("every_process", expected)] * num_processes


def known_difference(case):
    found = [entry for pattern, entry in KNOWN_DIFFERENCES.items() if re.fullmatch(pattern, case["id"])]
    assert len(found) <= 1
    return found[0] if found else None


def equal(expected, got):
    if isinstance(expected, dict):
        return isinstance(got, dict) and isinstance(got["exception"], EXCEPTIONS.get(expected["exception"], ()))
    if isinstance(got, dict):
        return False
    if CUT in expected:
        return len(got) >= len(expected) and got[: len(expected) - 1] == expected[:-1]
    return got == expected


def all_equal(expected, got):
    return all(equal(one, other) for one, other in zip(expected, got, strict=True))


@pytest.mark.end_to_end
@pytest.mark.parametrize("layout", LAYOUTS)
def test_measured_cases(layout, results):
    ranks = results(layout)
    wrong = []
    for case in cases_of(layout):
        difference = known_difference(case)
        tf = by_process(case)
        expected = difference[1](tf) if difference else tf
        for source in cluster_data.sources_of(case):
            got = [rank[f"{case['id']} {source}"] for rank in ranks]
            if case["id"] == RANDOM_ORDER:
                tf, got, expected = ([sorted(chain(*chain(*chain(*value))))] for value in (tf, got, expected))
            if not all_equal(expected, got):
                wrong.append(f"{case['id']} {source}: expected {expected}, got {got}")
            if difference and all_equal(tf, got):
                wrong.append(f"{case['id']} {source} is listed as a difference, but equal to TF")
    assert not wrong, "\n".join([f"{len(wrong)} results:", *wrong])


def test_all_cases_are_there():
    assert Counter(case["id"][:4] for case in CASES) == {"2w1d": 60, "3w1d": 42, "2w2d": 43}


def test_every_pattern_matches_a_case():
    unused = [p for p in KNOWN_DIFFERENCES if not any(re.fullmatch(p, case["id"]) for case in CASES)]
    assert not unused


def test_every_difference_is_explained():
    text = DIFFERENCES_PATH.read_text()
    section = text.partition("\n## Differences between one process and many\n")[2].partition("\n## ")[0]
    titles = re.findall(r"^### (.*)$", section, re.MULTILINE)
    assert {title for title, _ in KNOWN_DIFFERENCES.values()} <= set(titles)
