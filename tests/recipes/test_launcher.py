"""Processes that a recipe starts itself, seen with a recipe that only tells what each of them was given."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

RECIPES = Path(__file__).parents[2] / "recipes"
CONFIG = """
launcher: {nproc: 2, max_restarts: 0}
mode: tell
number: 3
time: ${start_time:}
double: ${number}${number}
folder: ${hydra:runtime.output_dir}
hydra: {run: {dir: run}, sweep: {dir: sweep, subdir: "${hydra.job.num}"}}
"""
PROBE = """
import json, logging, os, signal, sys, time
from pathlib import Path

import hydra
import jobs
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

@hydra.main(config_path=".", config_name="probe", version_base="1.3")
@jobs.launched
def main(config):
    rank, attempt = os.environ.get("RANK", "none"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "none")
    path = Path(HydraConfig.get().runtime.output_dir) / f"{rank}-{attempt}.json"
    given = {"config": OmegaConf.to_container(config), "choice": HydraConfig.get().job.name, "argv": sys.argv[1:]}
    path.write_text(json.dumps({**given, "pid": os.getpid(), "threads": torch.get_num_threads()}))
    print(f"printed by {rank}", flush=True)
    logging.getLogger("probe").info(f"logged by {rank}")
    if config.mode == "tell" or (config.mode == "fail once" and attempt != "0"):
        return rank
    if rank == "1":
        time.sleep(0.5)  # for the others to come here
        if config.mode == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if config.mode == "exit":
            sys.exit(3)
        if config.mode.startswith("fail"):
            raise ValueError("a wrong number: 17")
    print("waiting", flush=True)
    time.sleep(60)
    print("not ended", flush=True)

def interrupt(place):  # send SIGINT to this process once, where the exception that it raises gets lost
    once = [signal.SIGINT]
    def send(*_):
        if once:
            signal.raise_signal(once.pop())
    if place == "replaced":  # by an UnboundLocalError: no time has been noted yet
        from torch.distributed.elastic.metrics import api
        class Clock:
            def time(self):
                if ready():
                    send()
                return time.time()
        api.time = Clock()
    elif place == "caught":  # by logging, which prints it
        from torch.distributed.elastic.agent.server import api
        class Handler(logging.Handler):
            def emit(self, record):
                try:
                    send()
                except Exception:
                    self.handleError(record)
        log = logging.getLogger("lost")
        log.addHandler(Handler())
        api.put_metric = lambda *_: ready() and log.error("")
    elif place == "starting":  # a worker that torch does not know yet
        from multiprocessing import process
        start = process.BaseProcess.start
        process.BaseProcess.start = lambda self: (start(self), send())

def ready():
    return len(list(Path("run").glob("?-0.json"))) == 2

if __name__ == "__main__":
    interrupt(os.environ.get("PLACE"))
    main()
"""


@pytest.fixture
def start(tmp_path):
    """Start the probe in a folder of its own."""
    (tmp_path / "probe.yaml").write_text(CONFIG)
    (tmp_path / "probe.py").write_text(PROBE)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(RECIPES), *sys.path])}
    environ.pop("OMP_NUM_THREADS", None)

    def start(*options, **variables):
        command = [sys.executable, "probe.py", *options]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True, env=environ | variables, start_new_session=True
        )

    return start


def told(folder, attempt=0):
    return [json.loads((folder / f"{rank}-{attempt}.json").read_text()) for rank in range(2)]


def wait(process):
    out, err = process.communicate(timeout=100)
    return process.returncode, out, err


@pytest.mark.slow
def test_workers_get_the_resolved_configuration_and_the_run_directory(start, tmp_path):
    status, out, err = wait(start("number=4"))
    assert status == 0, err
    first, second = told(tmp_path / "run")
    assert first["config"] == second["config"]
    config = first["config"]
    assert (config["number"], config["double"], config["folder"]) == (4, "44", str(tmp_path / "run"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_.*", config["time"]), "resolved once, by the process that was started"
    assert first["choice"] == "probe"
    assert first["pid"] != second["pid"]
    assert "printed by 0\n" in out
    assert "[rank 1] printed by 1\n" in out
    (folder,) = tmp_path.glob("run/workers/*/attempt_0")
    assert (folder / "1" / "stdout.log").read_text().startswith("printed by 1\n")
    log = (tmp_path / "run" / "probe.log").read_text()
    assert "logged by 0" in log
    assert "logged by 1" in log


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_multirun_with_and_without_workers(start, tmp_path):
    """One process starts no others and has all threads; two share them."""
    status, out, err = wait(start("-m", "launcher.nproc=1,2"))
    assert status == 0, err
    assert "printed by none\n" in out
    assert [path.name for path in tmp_path.glob("sweep/0/*.json")] == ["none-none.json"]
    assert not (tmp_path / "sweep" / "0" / "workers").exists()
    alone = json.loads((tmp_path / "sweep" / "0" / "none-none.json").read_text())
    workers = told(tmp_path / "sweep" / "1")
    assert [worker["threads"] for worker in workers] == [max(1, alone["threads"] // 2)] * 2
    assert [worker["config"]["folder"] for worker in workers] == [str(tmp_path / "sweep" / "1")] * 2


@pytest.mark.slow
def test_multirun_starts_new_workers_for_each_job(start, tmp_path):
    status, _, err = wait(start("-m", "number=1,2"))
    assert status == 0, err
    jobs = [told(tmp_path / "sweep" / str(number)) for number in range(2)]
    assert [worker["config"]["number"] for job in jobs for worker in job] == [1, 1, 2, 2]
    assert [worker["config"]["folder"] for job in jobs for worker in job] == [
        str(tmp_path / "sweep" / str(number)) for number in (0, 0, 1, 1)
    ]
    assert len({worker["pid"] for job in jobs for worker in job}) == 4
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "cause"),
    [
        ("fail", "ValueError: a wrong number: 17"),
        pytest.param(
            "kill", "it was killed by SIGKILL (by the kernel if memory ran out: see dmesg)", marks=pytest.mark.slow
        ),
        pytest.param("exit", "it ended with exit status 3", marks=pytest.mark.slow),
    ],
)
def test_failure_of_a_worker(start, tmp_path, mode, cause):
    status, _, err = wait(start(f"mode={mode}"))
    assert status == 1
    (folder,) = tmp_path.glob("run/workers/*/attempt_0")
    assert f"RuntimeError: Rank 1 of 2 failed: {cause}\nThe output of the ranks is in {folder}\n" in err
    if mode == "fail":
        assert "[rank 1] ValueError: a wrong number: 17\n" in err
        assert "ValueError: a wrong number: 17" in (folder / "1" / "stderr.log").read_text()
    assert all_ended(told(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_restart_in_the_same_run_directory(start, tmp_path):
    status, _, err = wait(start("mode=fail once", "launcher.max_restarts=1"))
    assert status == 0, err
    before, after = told(tmp_path / "run", 0), told(tmp_path / "run", 1)
    assert [worker["config"] for worker in before] == [worker["config"] for worker in after]
    assert all_ended(before)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("submitit") is None, reason="needs hydra-submitit-launcher")
def test_submitit_starts_jobs_that_start_workers(start, tmp_path):
    """submitit_local is submitit_slurm without SLURM: the job is pickled, and runs in a program of submitit's."""
    status, _, err = wait(start("-m", "hydra/launcher=submitit_local", "number=1,2"))
    assert status == 0, err
    for number in (0, 1):
        configs = [worker["config"] for worker in told(tmp_path / "sweep" / str(number))]
        assert [config["number"] for config in configs] == [number + 1] * 2
        assert [config["folder"] for config in configs] == [str(tmp_path / "sweep" / str(number))] * 2


@pytest.mark.slow
def test_too_many_failures(start, tmp_path):
    status, _, err = wait(start("mode=fail", "launcher.max_restarts=1"))
    assert status == 1
    (folder,) = tmp_path.glob("run/workers/*/attempt_1")
    assert "Rank 1 of 2 failed after 1 restart: ValueError: a wrong number: 17\n" in err
    assert f"The output of the ranks is in {folder}\n" in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sent", "to_all"), [("SIGINT", True), ("SIGINT", False), ("SIGTERM", False), ("SIGKILL", False)]
)
def test_signals_end_all_workers(start, tmp_path, sent, to_all):
    """Ctrl-C goes to all processes of a terminal; a signal may also go to the one that was started."""
    process = start("mode=wait")
    waiting = [process.stdout.readline() for _ in range(6)]
    while sum("waiting" in line for line in waiting) < 2:
        waiting.append(process.stdout.readline())
    number = getattr(signal, sent)
    (os.killpg if to_all else os.kill)(process.pid, number)
    status, _, err = wait(process)
    assert status == (128 + number if sent != "SIGKILL" else -number), err
    assert all_ended(told(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "place", ["replaced", *(pytest.param(place, marks=pytest.mark.slow) for place in ("caught", "starting"))]
)
def test_a_signal_is_not_lost(start, tmp_path, place):
    """Code of torch's or Python's catches the exception that a signal raises in it, or raises another one."""
    status, out, err = wait(start("mode=wait", PLACE=place))
    assert status == 130, err
    assert "not ended" not in out
    if place != "starting":
        assert all_ended(told(tmp_path / "run"))


def all_ended(workers):
    deadline = time.monotonic() + 10
    while any(is_alive(worker["pid"]) for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(is_alive(worker["pid"]) for worker in workers)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
