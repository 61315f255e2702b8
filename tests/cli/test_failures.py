import json
import os
import signal

from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from torchstrategy.cli import elastic
from torchstrategy.cli.elastic import describe, describe_restart, exit_status


def write_error(path, message, *, at_s, frames=()):
    trace = "Traceback (most recent call last):\n" + "".join(f'  File "{f}", line {n}, in {c}\n' for f, n, c in frames)
    extra = {"py_callstack": f"{trace}{message}\n", "timestamp": str(int(at_s))}
    path.write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}), encoding="utf-8")
    os.utime(path, ns=(int(at_s * 1e9), int(at_s * 1e9)))
    return str(path)


def failure(exit_code, error_file="<N/A>", pid=7):
    return ProcessFailure(local_rank=0, pid=pid, exitcode=exit_code, error_file=error_file)


def test_the_error_and_its_place_in_the_program(tmp_path):
    ours = elastic.__file__
    frames = [("train.py", 3, "<module>"), ("/x/site-packages/torch/nn.py", 9, "forward"), (ours, 1, "f")]
    path = write_error(tmp_path / "e", "ValueError: boom\nmore", at_s=1.0, frames=frames)
    lines = describe({1: failure(1, path)}).splitlines()
    assert lines[0].startswith("rank 1 failed on ")
    assert lines[0].endswith("(process 7): exit status 1")
    assert lines[1:] == ["    ValueError: boom", "    more", "    at train.py:3 in <module>"]


def test_the_first_cause_comes_first(tmp_path):
    # All in one second, and the consequence was written first: only its kind tells.
    records = {
        0: failure(3, write_error(tmp_path / "0", "ReplicaFailedError: rank 2 failed: KeyError", at_s=5.1)),
        1: failure(4, write_error(tmp_path / "1", "RuntimeError: connection closed", at_s=5.9)),
        2: failure(5, write_error(tmp_path / "2", "KeyError: 'x'", at_s=5.5)),
        3: failure(-signal.SIGTERM),
    }
    assert exit_status(records) == 5
    assert describe(records).splitlines()[1:] == [
        "    KeyError: 'x'",
        "  then rank 1: RuntimeError: connection closed",
        "  then rank 0: ReplicaFailedError: rank 2 failed: KeyError",
    ]


def test_a_killed_worker():
    records = {0: failure(-signal.SIGTERM), 1: failure(-signal.SIGKILL)}
    assert exit_status(records) == 128 + signal.SIGKILL
    text = describe(records)
    assert "rank 1 failed" in text
    assert "killed by SIGKILL" in text
    assert "memory" in text
    assert "rank 0" not in text


def test_a_worker_that_someone_terminated():
    assert "killed by SIGTERM" in describe({0: failure(-signal.SIGTERM)})
    assert "killed by signal 99" in describe({0: failure(-99)})


def test_a_status_without_an_error():
    assert describe({2: failure(3)}).endswith("(process 7): exit status 3")


def test_long_messages_are_cut(tmp_path):
    path = write_error(tmp_path / "e", "E: " + "\n".join(map(str, range(50))), at_s=1.0)
    lines = describe({0: failure(1, path)}).splitlines()
    assert lines[20:] == ["    19", "    ... 30 more lines"]


def test_why_workers_start_again(tmp_path):
    paths = {0: str(tmp_path / "0"), 1: str(tmp_path / "1")}
    assert "another host" in describe_restart(1, paths, [])
    text = describe_restart(1, paths, ["failed (exitcode: -9) local_rank: 1"])
    assert text == "starting the workers again (restart 1): a worker failed (exitcode: -9) local_rank: 1"
    write_error(tmp_path / "0", "ReplicaFailedError: Rank 1 does not answer.\n(This rank waited.)", at_s=1.0)
    assert describe_restart(1, paths, []).endswith("(restart 1): Rank 1 does not answer.")
    write_error(tmp_path / "1", "ValueError: boom", at_s=2.0, frames=[("a.py", 3, "f")])
    assert describe_restart(2, paths, []).endswith("(restart 2): rank 1 failed: ValueError: boom at a.py:3 in f")


def test_a_record_that_is_only_text(tmp_path):
    (tmp_path / "e").write_text(json.dumps({"message": "gone"}), encoding="utf-8")
    assert "    gone" in describe({0: failure(1, str(tmp_path / "e"))})
