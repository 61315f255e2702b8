"""A short campaign keeps all promises, and a campaign shows which run did not."""

import collections
import re

import pytest

from tests.soak import __main__ as soak
from tests.soak import workers
from tests.soak.attempts import Failure, Runner, Times
from tests.soak.jobs import Job, Plan


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_thirty_faults(capsys):
    status = soak.main(["--faults", "30", "--seed", "1"])
    told = capsys.readouterr().out
    assert status == 0, told
    assert int(re.findall(r"(\d+) faults in", told)[-1]) >= 30


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["exit", "kill"])
def test_an_end_for_which_nothing_was_planned_is_found(tmp_path, monkeypatch, kind):
    runner = Runner(Job("loop", 4), 2, tmp_path / "job")
    monkeypatch.setattr(runner, "ends", lambda plan: plan.kind != kind)
    with pytest.raises(Failure, match="nothing had happened that ends it"):
        runner.attempt(Plan(kind, 1, 2, "before"))


class Wrong:
    def __init__(self, folder, seed, heartbeat_s):
        self.seed, self.times = seed, []
        self.num_struck = collections.Counter(kill=1)

    def run(self):
        if self.seed % 2:
            raise Failure("other weights")


def test_failed_runs_are_shown_with_their_seed(monkeypatch, capsys):
    monkeypatch.setattr(workers, "Run", Wrong)
    monkeypatch.setattr(soak, "SERVERS", 0.0)
    assert soak.main(["--faults", "4", "--seed", "10"]) == 1
    told = capsys.readouterr().out
    assert "FAILED --only 11: Failure: other weights" in told
    assert "seeds 10 to 13" in told
    assert "failed: [11, 13]" in told
    assert soak.main(["--only", "12"]) == 0
    assert "seeds 12 to 12" in capsys.readouterr().out


def test_table():
    times = [Times("kill", 0.05, 2.0), Times("kill", 0.2, None), Times("stop", 2.5, 40.0)]
    told = list(soak.table(times, collections.Counter(kill=2, stop=1, slow=1)))
    assert told[2] == "| kill | 2 | noticed | 1 | 1 |  |  |  |  |  | 0.20 s |"
    assert told[3] == "|  |  | a step again |  |  |  | 1 |  |  |  | 2.00 s |"
    assert told[4].startswith("| slow | 1 | |")
    assert told[6] == "|  |  | a step again |  |  |  |  |  |  | 1 | 40.00 s |"
