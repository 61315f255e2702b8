"""A short campaign keeps all promises, and a campaign shows which run did not."""

import collections
import logging
import re

import pytest

import torchstrategy as ts
from tests.soak import __main__ as soak
from tests.soak import servers, workers
from tests.soak.attempts import Failure, Runner, Times
from tests.soak.jobs import Job, Plan


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_thirty_faults(capsys):
    """Of these seeds one is of servers, and in two ranks hang."""
    status = soak.main(["--faults", "30", "--seed", "16"])
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


@pytest.fixture
def runner(tmp_path):
    return Runner(Job("loop", 4), 3, tmp_path / "job")


HANG = Plan("hang", 1, 2, "before")
KILL = Plan("kill", 1, 2, "before")


@pytest.mark.parametrize(
    ("happened", "line"),
    [
        ([KILL], "Rank 2 does not answer: its process has died (its connection closed)."),
        ([HANG], "Rank 1 does not answer: stopped or cut off (no sign of life for 2 s)."),
        (
            [Plan("pause", 1, 2, "before", 0.1)],
            "x. Rank 1 does not answer: stopped or cut off (no sign of life for 2 s).",
        ),
    ],
)
def test_a_false_death_is_found(runner, happened, line):
    runner.check_lost([KILL], ["Rank 1 does not answer: its process has died (its connection closed).", "", ""])
    with pytest.raises(Failure, match=r"a false death: .* rank 2 says: .*Rank"):
        runner.check_lost(happened, ["", "", f"ERROR:torchstrategy:[rank 2] {line}"])


LATE = "the sum of gradients did not complete within 6 s. Arrived: ranks 0, 2. Not arrived: rank 1. Where each rank is:"
REPORT = (
    "No progress for 1 s: rank 0 waits in the sum of gradients (collective number 3) at jobs.py:5 (step). Arrived: "
    "ranks 0, 2. Not arrived: rank 1. rank 1 is start-up. Stacks: /x/stacks.txt (TORCHSTRATEGY_STALL_S sets after how "
    "long this is said.)"
)
STACKS = "--- rank 0: in it\n  jobs.py\n--- rank 1: start-up\n  faults.py\n--- rank 2: in it\n  jobs.py"
WRONG_STALLS = {
    "nobody says it": ("", LATE, STACKS, "nobody has said"),
    "another rank": (REPORT.replace("arrived: rank 1", "arrived: rank 2"), LATE, STACKS, "nobody has said"),
    "another operation": (REPORT.replace("the sum of gradients", "a barrier"), LATE, STACKS, "it was said of {'a barr"),
    "another place": (REPORT.replace("jobs.py", "hooks.py"), LATE, STACKS, "not called here"),
    "another rank at the deadline": (
        REPORT,
        LATE.replace("arrived: rank 1", "arrived: rank 2"),
        STACKS,
        "who was late",
    ),
    "no rank at the deadline": (REPORT, "the sum of gradients failed", STACKS, "who was late"),
    "another stack": (REPORT, LATE, STACKS.replace("faults.py", "jobs.py"), "the stack .* is missing"),
}


def test_who_does_not_go_on_is_named(runner):
    (runner.folder / "stacks.txt").write_text(STACKS)
    runner.check_stall(HANG, ["", "", REPORT], {0: LATE, 2: LATE})
    runner.check_stall(Plan("stall", 1, 2, "before", 9.0), [REPORT.replace("jobs.py:5 (step)", "jobs.py:6 (loop)")])


@pytest.mark.parametrize("name", WRONG_STALLS)
def test_a_stall_that_is_not_told_as_it_is_is_found(runner, name):
    report, error, stacks, message = WRONG_STALLS[name]
    (runner.folder / "stacks.txt").write_text(stacks)
    with pytest.raises(Failure, match=message):
        runner.check_stall(HANG, [report, "", ""], {0: LATE, 2: error})


class QuietCluster:
    tasks = (("ps", 0), ("ps", 1), ("worker", 0))

    def __init__(self):
        self.logs = dict.fromkeys(self.tasks, "before")

    def log(self, *task):
        return self.logs[task]


def test_a_false_death_among_servers_is_found():
    cluster = QuietCluster()
    losses = servers.Losses(cluster)

    def say(text, level=logging.WARNING):
        return losses.filter(logging.LogRecord("torchstrategy", level, "", 0, text, (), None))

    assert say("it has failed", logging.ERROR)
    losses.check(set())
    assert not say("/job:worker/task:0 at 127.0.0.1:5 was lost: it was silent. It may come back.")
    cluster.logs["worker", 0] += "\nLost /job:ps/task:1 at 127.0.0.1:6: its connection was closed\n"
    losses.check({("worker", 0)})
    losses.check(set())  # each is told once
    cluster.logs["worker", 0] += "Lost /job:ps/task:1 at 127.0.0.1:6: its connection was closed\n"
    with pytest.raises(Failure, match=r"a false death: .*'Lost /job:ps/task:1.*hit were \[\('ps', 0\)\]"):
        losses.check({("ps", 0)})
    say("/job:worker/task:0 at 127.0.0.1:5 was lost: it was silent. It may come back.")
    with pytest.raises(Failure, match=r"a false death: .* hit were none"):
        losses.check(set())


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_pause_after_which_a_server_is_lost_is_found(tmp_path, monkeypatch):
    """As it would be if the library had less patience than it says."""
    monkeypatch.setattr(servers, "KINDS", {"server paused": 1})
    monkeypatch.setattr(servers, "SHARE", 1.0)
    monkeypatch.setenv("TORCHSTRATEGY_HEARTBEAT_S", "1")
    with ts.testing.LocalCluster(3, 2) as cluster, pytest.raises(Failure, match="a false death"):
        servers.Run(cluster, tmp_path / "job", 0, heartbeat_s=20.0).run()


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


def test_a_campaign_that_is_cut_adds_up(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(workers, "Run", Wrong)
    monkeypatch.setattr(soak, "SERVERS", 0.0)
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    assert soak.main(["--faults", "2", "--seed", "0", "--results", first]) == 1
    assert soak.main(["--faults", "9", "--minutes", "0", "--results", first]) == 1
    assert "2 faults in 2 runs, seeds 0 to 1" in capsys.readouterr().out
    assert soak.main(["--faults", "3", "--results", first]) == 1  # goes on
    assert "3 faults in 3 runs, seeds 0 to 2" in capsys.readouterr().out
    assert soak.main(["--faults", "1", "--seed", "6", "--results", second]) == 0
    capsys.readouterr()
    assert soak.main(["--table", first, second]) == 1
    told = capsys.readouterr().out
    assert "| kill | 4 |" in told
    assert "4 faults in 4 runs, seeds 0 to 6" in told
    assert "failed: [1]" in told
    monkeypatch.setattr(Wrong, "run", lambda self: None)  # it was mended
    soak.main(["--only", "1", "--results", first])
    assert soak.main(["--table", first, second]) == 0
    with open(first, "a") as file:
        file.write('{"seed": 3')
    with pytest.raises(ValueError, match=r"first:5 is no result of a run\. Delete that line"):
        soak.main(["--table", first])


def test_table():
    times = [Times("kill", 0.05, 2.0), Times("kill", 0.2, None), Times("stop", 2.5, 40.0)]
    told = list(soak.table(times, collections.Counter(kill=2, stop=1, slow=1)))
    assert told[2] == "| kill | 2 | noticed | 1 | 1 |  |  |  |  |  | 0.20 s |"
    assert told[3] == "|  |  | a step again |  |  |  | 1 |  |  |  | 2.00 s |"
    assert told[4].startswith("| slow | 1 | |")
    assert told[6] == "|  |  | a step again |  |  |  |  |  |  | 1 | 40.00 s |"
