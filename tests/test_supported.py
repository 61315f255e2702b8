"""The table of docs/supported.md is what these tests, and tests/tpu/test_supported_cells.py, find.

After an intended change, write the page's table with ``python tests/test_supported.py`` and review its diff.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

import torchstrategy as ts
from tests import cells
from torchstrategy.testing import ProcessPool

PAGE = Path(__file__).parents[1] / "docs" / "supported.md"
BEGIN, END = "<!-- the table is written by tests/test_supported.py -->\n", "<!-- its end -->"
ONE, TWO = ["cpu:0"], ["cpu:0", "cpu:1"]
EQUAL, REFUSED = "equal", "refused"

#: Each row: strategy, hosting, devices of a process, number of processes, and what a loop, fit and an Estimator do.
ROWS = [
    ("default", "one process, 1 replica", None, 1, (EQUAL, EQUAL, EQUAL)),
    ("OneDeviceStrategy", "one process, 1 replica", None, 1, (EQUAL, EQUAL, EQUAL)),
    ("MirroredStrategy", "one process, 2 replicas", TWO, 1, (EQUAL, EQUAL, EQUAL)),
    ("concurrent", "one process, 2 replicas in threads", TWO, 1, (EQUAL, EQUAL, EQUAL)),
    ("MirroredStrategy", "`torchrun`, 2 processes", ONE, 2, (EQUAL, EQUAL, EQUAL)),
    ("MirroredStrategy", "`torchrun`, 2 processes of 2 replicas", TWO, 2, (EQUAL, EQUAL, EQUAL)),
    ("MultiWorkerMirroredStrategy", "one process, 2 replicas", TWO, 1, (EQUAL, EQUAL, EQUAL)),
    ("MultiWorkerMirroredStrategy", "`torchrun`, 2 processes", ONE, 2, (EQUAL, EQUAL, EQUAL)),
    ("MultiWorkerMirroredStrategy", "`TF_CONFIG`, 2 workers", ONE, 2, (EQUAL, EQUAL, EQUAL)),
    ("MultiWorkerMirroredStrategy", "`TF_CONFIG`, 2 workers of 2 replicas", TWO, 2, (EQUAL, EQUAL, EQUAL)),
    ("CentralStorageStrategy", "one process, 2 replicas", TWO, 1, (EQUAL, EQUAL, EQUAL)),
    ("CentralStorageStrategy", "`torchrun`, 2 processes", ONE, 2, (EQUAL, EQUAL, EQUAL)),
    ("ParameterServerStrategy", "1 worker, 2 parameter servers", None, 0, (EQUAL, EQUAL, REFUSED)),
    ("TPUStrategy", "one process, 4 virtual devices", None, 0, (EQUAL, EQUAL, REFUSED)),
    ("TPUStrategy", "a process for each of 2 virtual devices", None, 0, (EQUAL, EQUAL, REFUSED)),
]
TPU_ROWS = [row for row in ROWS if row[0] == "TPUStrategy"]
NAMES = {
    "default": "the default strategy",
    "concurrent": "`MirroredStrategy(concurrent=True)`",
    "CentralStorageStrategy": "`experimental.CentralStorageStrategy`",
}
MARKS = {EQUAL: "✓", REFUSED: "an error says so"}


def table() -> str:
    """Return the page's table."""
    lines = ["| strategy | hosting | a loop of your own | `fit` | `Estimator` |", "| --- | --- | --- | --- | --- |"]
    lines += [
        "| " + " | ".join([NAMES.get(name, f"`{name}`"), hosting, *(MARKS[found] for found in ways)]) + " |"
        for name, hosting, _, _, ways in ROWS
    ]
    return "\n".join(lines) + "\n"


@functools.cache
def expected(way: str, folder: Path) -> list[float]:
    return cells.train(way, "default", None, folder)


def is_equal(found: list[float], way: str, tmp_path: Path) -> None:
    assert found == pytest.approx(expected(way, tmp_path / "expected"), rel=0, abs=1e-10)
    assert expected(way, tmp_path / "expected") != cells.weights(cells.net())


@pytest.fixture(scope="module")
def workers():
    with ProcessPool(2, launcher="TF_CONFIG") as pool:
        yield pool


@pytest.mark.slow
@pytest.mark.parametrize("way", cells.WAYS)
@pytest.mark.parametrize("row", [row for row in ROWS if row[3]], ids=lambda row: f"{row[0]}, {row[1]}".replace("`", ""))
def test_a_strategy_trains_the_weights_of_one_replica(row, way, tmp_path, process_pool, request):
    strategy, hosting, devices, num_processes, _ = row
    if num_processes == 1:
        found = [cells.train(way, strategy, devices, tmp_path / "run")]
    else:
        pool = request.getfixturevalue("workers") if "TF_CONFIG" in hosting else process_pool(num_processes)
        found = pool.run(cells.train, way, strategy, devices, tmp_path / "run")
    for each in found:
        is_equal(each, way, tmp_path)


@pytest.fixture(scope="module")
def cluster():
    with ts.testing.LocalCluster(num_workers=1, num_ps=2) as cluster:
        yield cluster


@pytest.mark.slow
@pytest.mark.parametrize("way", ["custom_loop", "fit"])
def test_parameter_servers_with_one_worker_train_the_weights_of_one_replica(way, cluster, tmp_path):
    strategy = ts.ParameterServerStrategy(cluster.resolver(), timeout_seconds=60)
    try:
        train = {"custom_loop": cells.scheduled, "fit": cells.fit}[way]
        is_equal(train(strategy, tmp_path), way, tmp_path)
    finally:
        strategy.close()


@pytest.mark.slow
def test_an_estimator_refuses_a_coordinator(cluster, tmp_path):
    strategy = ts.ParameterServerStrategy(cluster.resolver(), timeout_seconds=60)
    try:
        with pytest.raises((ValueError, TypeError), match="ParameterServerStrategy"):
            cells.estimator(strategy, tmp_path)
    finally:
        strategy.close()


def test_the_page_shows_the_table():
    text = PAGE.read_text(encoding="utf-8")
    assert text.partition(BEGIN)[2].partition(END)[0] == table(), f"python {__file__} writes it"
    assert all(found in MARKS for row in ROWS for found in row[4])
    assert {row[4] for row in ROWS if row[3]} == {(EQUAL, EQUAL, EQUAL)}  # what the tests above hold


if __name__ == "__main__":
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.partition(END)[2], encoding="utf-8")
