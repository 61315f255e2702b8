import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.clusters import free_ports
from torchstrategy.cli import main, worker_main

ENVIRONMENT = """
import json, os, pathlib, sys
NAMES = "RANK", "LOCAL_RANK", "WORLD_SIZE", "TF_CONFIG", "TORCHELASTIC_RESTART_COUNT", "OMP_NUM_THREADS"
seen = {name: os.environ.get(name) for name in NAMES}
seen |= {"argv": sys.argv, "path": sys.path[0], "name": __name__, "pid": os.getpid(), "torch": "torch" in sys.modules}
RANK, ATTEMPT = seen["RANK"], seen["TORCHELASTIC_RESTART_COUNT"]
"""


class Launched:
    """``torchstrategy launch`` in a process of its own, in a folder where the programs leave files."""

    def __init__(self, folder, *arguments, **environment):
        clean = {name: value for name, value in os.environ.items() if name not in ("TF_CONFIG", "OMP_NUM_THREADS")}
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", "torchstrategy", "launch", *arguments],
            cwd=folder,
            env={**clean, "PYTHONPATH": str(Path(__file__).parents[2]), **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self):
        """Wait for the end; return the exit status and what it said."""
        try:
            out, err = self.process.communicate(timeout=60)
        finally:
            self.process.kill()
        return self.process.returncode, out, err

    def wait_for(self, *names):
        deadline = time.monotonic() + 60
        while not all((self.folder / name).exists() for name in names):
            assert self.process.poll() is None, self.finish()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return [json.loads((self.folder / name).read_text()) for name in names]


def write(path, code):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(ENVIRONMENT + code)


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def wait_until_gone(pids):
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, "left running"
        time.sleep(0.05)


def leave(name="f'{RANK}.{ATTEMPT}'"):
    # The rename makes that a reader sees the whole file or none.
    return f"""
path = pathlib.Path({name})
pathlib.Path(f"{{path}}.part").write_text(json.dumps(seen))
os.rename(f"{{path}}.part", path)
"""


@pytest.mark.end_to_end
def test_two_workers(tmp_path):
    # A spawned process imports the program again, which works only if python knows where it is.
    program = f"""
import multiprocessing
def double(x):
    return 2 * x
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        seen["doubled"] = pool.map(double, [1, 2])
    {leave().replace(chr(10), chr(10) + "    ")}
"""
    write(tmp_path / "folder" / "program.py", program)
    arguments = ["--flag", "${local_rank}", "a$$b", "-m"]
    launched = Launched(tmp_path, "--nproc-per-node=2", "folder/program.py", *arguments)
    status, out, err = launched.finish()
    assert (status, out, err) == (0, "", "")
    seen = [json.loads((tmp_path / f"{rank}.0").read_text()) for rank in range(2)]
    clusters = [json.loads(one["TF_CONFIG"]) for one in seen]
    assert clusters[0]["cluster"] == clusters[1]["cluster"]
    assert len(set(clusters[0]["cluster"]["worker"])) == 2
    for rank, one in enumerate(seen):
        assert (one["RANK"], one["LOCAL_RANK"], one["WORLD_SIZE"]) == (str(rank), str(rank), "2")
        assert clusters[rank]["task"] == {"type": "worker", "index": rank}
        assert one["argv"] == ["folder/program.py", *arguments]
        assert one["path"] == str(tmp_path / "folder")
        assert one["name"] == "__main__"
        assert one["doubled"] == [2, 4]
        assert not one["torch"]  # a program may still set what torch reads when it is imported
        assert int(one["OMP_NUM_THREADS"]) >= 1


@pytest.mark.slow
def test_strategies_join_the_workers(tmp_path):
    program = """
import torch
import torchstrategy as ts
for strategy in (ts.MirroredStrategy(), ts.MultiWorkerMirroredStrategy()):
    def step():
        context = ts.get_replica_context()
        return context.all_reduce("SUM", torch.tensor(1.0 + context.replica_id_in_sync_group)).item()
    kind = type(strategy).__name__
    seen[kind] = strategy.run(step), strategy.num_replicas_in_sync
"""
    write(tmp_path / "program.py", program + leave())
    launched = Launched(tmp_path, "--nproc-per-node=2", "program.py", CUDA_VISIBLE_DEVICES="")
    status, _, err = launched.finish()
    assert status == 0, err
    for rank in range(2):
        seen = json.loads((tmp_path / f"{rank}.0").read_text())
        assert seen["MirroredStrategy"] == seen["MultiWorkerMirroredStrategy"] == [3.0, 2]


@pytest.mark.slow
def test_restart_and_failure(tmp_path):
    program = """
import time
if RANK == "1" and ATTEMPT == "0":
    def step():
        raise ValueError("boom")
    while not os.path.exists("0.0"):
        time.sleep(0.01)
    step()
if RANK == "1" and ATTEMPT == "1":
    sys.exit(3)
time.sleep(60)
"""
    write(tmp_path / "program.py", leave() + program)
    status, _, err = Launched(tmp_path, "--nproc-per-node=2", "--max-restarts=1", "program.py").finish()
    assert status == 3
    seen = [json.loads((tmp_path / name).read_text()) for name in ("0.0", "1.0", "0.1", "1.1")]
    clusters = [json.loads(one["TF_CONFIG"])["cluster"]["worker"] for one in seen]
    assert clusters[0] == clusters[1] != clusters[2] == clusters[3]
    lines = err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].startswith('  File "program.py"')  # nothing of the launcher
    again = "torchstrategy launch: starting the workers again (restart 1): "
    reasons = [line.removeprefix(again) for line in lines if line.startswith(again)]
    assert [reason.rpartition(":")[0] for reason in reasons] == ["rank 1 failed: ValueError: boom at program.py"]
    assert lines[-1].startswith("torchstrategy launch: rank 1 failed on ")
    assert lines[-1].endswith("exit status 3")
    wait_until_gone([one["pid"] for one in seen])


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGKILL]
)
def test_nothing_is_left_running(tmp_path, number):
    write(tmp_path / "package" / "program.py", leave() + "import time\ntime.sleep(60)\n")
    launched = Launched(tmp_path, "--nproc-per-node=2", "-m", "package.program", "argument")
    seen = launched.wait_for("0.0", "1.0")
    assert [one["argv"][1:] for one in seen] == [["argument"]] * 2
    assert [one["path"] for one in seen] == [str(tmp_path)] * 2
    assert all(is_running(one["pid"]) for one in seen)
    launched.process.send_signal(number)
    status, _, err = launched.finish()
    wait_until_gone([one["pid"] for one in seen])
    if number == signal.SIGKILL:
        assert status == -signal.SIGKILL
    else:
        assert status == 128 + number
        assert err.endswith(f"torchstrategy launch: {number.name} received: the workers have ended.\n")
        assert err.count("KeyboardInterrupt") == (2 if number == signal.SIGINT else 0)


@pytest.mark.slow
def test_two_hosts_agree_on_restarts(tmp_path):
    program = """
import time
if ATTEMPT == "0":
    while not all(os.path.exists(f"{rank}.0") for rank in range(3)):
        time.sleep(0.01)
    if RANK == "1":
        raise ValueError("boom")
    time.sleep(60)
"""
    write(tmp_path / "program.py", leave() + program)
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_ports(1)[0]}"
    hosts = [
        Launched(tmp_path, f"--nproc-per-node={size}", "--nnodes=2", "--max-restarts=1", endpoint, "program.py")
        for size in (1, 2)
    ]
    ends = [host.finish() for host in hosts]
    assert [status for status, *_ in ends] == [0, 0], ends
    assert sorted("another host" in err for *_, err in ends) == [False, True]
    for attempt in range(2):
        seen = [json.loads((tmp_path / f"{rank}.{attempt}").read_text()) for rank in range(3)]
        clusters = [json.loads(one["TF_CONFIG"])["cluster"]["worker"] for one in seen]
        assert clusters[0] == clusters[1] == clusters[2]
        assert len(set(clusters[0])) == 3
        assert [json.loads(one["TF_CONFIG"])["task"]["index"] for one in seen] == [0, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["0", "1"])
def test_a_worker_that_never_joins_is_told_to_the_other_host(tmp_path, victim):
    program = f"""
if RANK == "{victim}":
    import time
    while not os.path.exists("waits"):
        time.sleep(0.01)
    os._exit(7)
import torchstrategy as ts
from torchstrategy.collectives import rounds
look = rounds._look_who_is_gone
def first_look(*args):
    pathlib.Path("waits").touch()
    look(*args)
rounds._look_who_is_gone = first_look
ts.MultiWorkerMirroredStrategy(devices=["cpu:0"])
"""
    write(tmp_path / "program.py", program)
    endpoint = f"--rdzv-endpoint=127.0.0.1:{free_ports(1)[0]}"
    hosts = [Launched(tmp_path, "--nproc-per-node=1", "--nnodes=2", endpoint, "program.py") for _ in range(2)]
    ends = sorted(host.finish() for host in hosts)
    assert [status for status, *_ in ends] == [1, 7], ends
    assert f"Rank {victim} has ended before the job had started: exit status 7 (process " in ends[0][2]
    assert f"torchstrategy launch: rank {1 - int(victim)} failed on " in ends[0][2]


def test_dry_run(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert main(["launch", "--nproc-per-node", "2", "--dry-run", "-m", "some.module", "--x", "1"]) == 0
    out = capsys.readouterr().out
    assert "worker 1:\n    RANK=1\n    LOCAL_RANK=1\n    WORLD_SIZE=2\n" in out
    assert '"task": {"type": "worker", "index": 1}' in out
    assert "OMP_NUM_THREADS=3" in out
    assert out.endswith("each runs: python -u -m some.module --x 1\n")


def test_dry_run_of_several_hosts(tmp_path, capsys):
    program = tmp_path / "program.py"
    program.touch()
    arguments = ["--nproc_per_node=1", "--nnodes=2:4", "--rdzv-endpoint=127.0.0.1:29400", "--dry-run", "--run-path"]
    assert main(["launch", *arguments, str(program)]) == 0
    out = capsys.readouterr().out
    assert "2 to 4 host(s)" in out
    assert "TF_CONFIG=<chosen at the start>" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no_such_file.py"], "There is no file 'no_such_file.py'"),
        (["--nnodes=2", __file__], "--rdzv-endpoint=HOST:PORT"),
        (["--rdzv-endpoint=no-such-host.invalid:1", __file__], "does not resolve"),
        (["--rdzv-endpoint=host:port", __file__], "port number"),
    ],
)
def test_what_can_not_start(arguments, message, capsys):
    assert main(["launch", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_module_is_thought_of_unless_the_name_is_a_files(capsys):
    for program, is_hinted in (("nowhere.py", False), ("package.train", True)):
        assert main(["launch", program]) == 2
        assert ("Did you mean `-m" in capsys.readouterr().err) is is_hinted


@pytest.mark.parametrize(
    ("arguments", "late"),
    [
        (["--epochs", "3", "--nproc-per-node=2"], "--nproc-per-node=2"),
        (["--max_restarts", "1"], "--max_restarts"),
        (["--verbose", "nnodes"], None),
    ],
)
def test_an_option_after_the_program_is_hinted_at(arguments, late, capsys):
    assert main(["launch", "--nproc=1", "--dry-run", __file__, *arguments]) == 0
    said = capsys.readouterr().err
    assert said == "" if late is None else said.startswith(f"torchstrategy launch: {late} stands after {__file__}")


def test_workers_write_whole_lines(tmp_path, monkeypatch):
    class Writes(io.RawIOBase):
        def writable(self):
            return True

        def write(self, data):
            written.append(bytes(data))
            return len(data)

    written = []
    write(tmp_path / "program.py", "")
    (tmp_path / "program.py").write_text("print('worker', 1, [2, 3])\nprint('end', end='', flush=True)\n")
    monkeypatch.setattr(worker_main, "_end_with", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["worker_main.py", "0", "--", str(tmp_path / "program.py")])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(Writes(), write_through=True))  # as with python -u
    worker_main.main()
    assert written == [b"worker 1 [2, 3]\n", b"end"]


def test_the_exit_that_ends_a_worker_is_noted(tmp_path, monkeypatch):
    """For what the library does at the end, which Python does not tell why a program exits."""
    (tmp_path / "program.py").write_text("raise SystemExit(3)\n")
    monkeypatch.setattr(worker_main, "_end_with", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["worker_main.py", "0", "--", str(tmp_path / "program.py")])
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "last_value", None, raising=False)
    with pytest.raises(SystemExit) as caught:
        worker_main.main()
    assert sys.last_value is caught.value


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--nproc-per-node=0", "at least 1 worker"),
        ("--nproc-per-node=many", "a number, gpu, cpu or auto"),
        ("--nnodes=3:2", "1 <= MIN <= MAX"),
        ("--nnodes=1:2:3", "N or MIN:MAX"),
        ("--max-restarts=-1", "not negative"),
        ("--rdzv-conf=join_timeout", "NAME=VALUE"),
    ],
)
def test_wrong_options(option, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["launch", option, __file__])
    assert message in capsys.readouterr().err
