"""A job of which a rank is killed at each step ends as the unbroken one does; and what is not so is found."""

import json

import pytest

from tests.soak.attempts import Failure, Runner
from tests.soak.every_step import prove
from tests.soak.jobs import Job


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["fit", "loop"])
def test_ten_kills(tmp_path, kind):
    runner = prove(kind, 2, 10, tmp_path)
    assert len(runner.times) == 10


JOB = Job("loop", 4)  # 9 examples in each of two epochs
FIRST = [[0, 1, 2, 3, 4, 5, 6, 7], [8]] * 2
RESULT = ["result", [1.0], 9.0]


def steps(*numbers, ids=FIRST):
    return [["step", number, ids[number - 1], 1.0] for number in numbers]


RESTORED = ["restored", 2, 1.0]
WRONG = {
    "a step is made twice": ([*steps(1, 2, 2, 3, 4), RESULT], "makes step 2 after 2"),
    "a step is left out": ([*steps(1, 2), RESTORED, *steps(4), RESULT], "makes step 4 after 2"),
    "the end is missing": ([*steps(1, 2, 3), RESULT], "made 3 steps"),
    "other weights": ([*steps(1, 2, 3, 4), ["result", [2.0], 9.0]], "other weights"),
    "an example twice": ([*steps(1, 2, 3, 4, ids=[*FIRST[:3], [7]]), RESULT], "the examples of an epoch"),
}


def runner_that_said(folder, rows):
    runner = Runner(JOB, 1, folder / "job")
    (folder / "job" / "said-0").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return runner


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_found(tmp_path, name):
    rows, message = WRONG[name]
    with pytest.raises(Failure, match=message):
        runner_that_said(tmp_path, rows).check_end([1.0])


def test_what_came_after_the_checkpoint_does_not_count(tmp_path):
    rows = [*steps(1, 2, 3), RESTORED, *steps(3, 4), RESULT]
    runner_that_said(tmp_path, rows).check_end([1.0])
