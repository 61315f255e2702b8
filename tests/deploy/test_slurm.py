"""The batch scripts under docs/deploy/slurm, run here with a srun and a scontrol that know one host."""

import itertools
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "docs" / "deploy" / "slurm").glob("*.sbatch"))
RECIPE = [
    str(ROOT / "recipes" / "fault_tolerant.py"),
    "global_batch_size=2000",
    "epochs=1",
    "folder=run",
]
# The options before the program are all of the form --name=value.
SRUN = f"""#!{sys.executable}
import os, signal, subprocess, sys
arguments = sys.argv[1:]
while arguments[0].startswith("--"):
    arguments.pop(0)
number = int(os.environ["FAKE_TASKS"])
step = {{"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": str(number), "SLURM_STEP_TASKS_PER_NODE": str(number)}}
step |= {{"SLURM_STEP_NODELIST": "localhost", "SLURM_NODEID": "0"}}
tasks = [
    subprocess.Popen(arguments, env={{**os.environ, **step, "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)}})
    for i in range(number)
]
signal.signal(signal.SIGUSR1, lambda number, _: [task.send_signal(number) for task in tasks])
sys.exit(max(task.wait() for task in tasks))
"""
SCONTROL = """#!/bin/bash
if [ "$1 $2" = "show hostnames" ]; then echo localhost; else echo "$@" >> scontrol.log; fi
"""


def is_free(port):
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


@pytest.fixture
def job_id():
    """Return the id of a job whose port no other program uses."""
    return next(number for number in itertools.count(os.getpid(), 101) if is_free(20000 + number % 10000))


@pytest.fixture
def sbatch(tmp_path, job_id):
    """Run a script as sbatch would on the first host of a job."""
    commands = tmp_path / "commands"
    commands.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)

    def run(script, *arguments, told_after=None, **environ):
        """`told_after` is a part of a line after which the batch script gets the signal."""
        job = {"SLURM_JOB_ID": str(job_id), "SLURM_JOB_NODELIST": "localhost", "SLURM_NNODES": "1"}
        command = ["bash", str(ROOT / "docs" / "deploy" / "slurm" / script), *arguments]
        with subprocess.Popen(
            command,
            cwd=tmp_path,
            env={**os.environ, **job, "PATH": f"{commands}:{os.environ['PATH']}", "PYTHON": sys.executable, **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            before = []
            while told_after is not None and (line := process.stdout.readline()):
                before.append(line)
                if told_after in line:
                    process.send_signal(signal.SIGUSR1)
                    break
            output, errors = process.communicate(timeout=110)
        return subprocess.CompletedProcess(command, process.returncode, "".join(before) + output, errors)

    return run


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_script_is_valid(script, sbatch):
    assert subprocess.run(["bash", "-n", str(script)], check=True, capture_output=True, text=True).stderr == ""
    lines = script.read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    options = [line for line in lines if line.startswith("#SBATCH ")]
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert len(options) > 3
    assert all(lines.index(option) < first_command for option in options), "sbatch reads no options after a command"
    process = sbatch(script.name)
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr.startswith("Usage: sbatch ")


def test_all_scripts_are_found():
    assert [script.name for script in SCRIPTS] == ["launch.sbatch", "srun.sbatch"]


@pytest.mark.slow
def test_slurm_starts_the_processes(sbatch, tmp_path):
    process = sbatch("srun.sbatch", *RECIPE, FAKE_TASKS="2")
    assert process.returncode == 0, process.stderr
    assert "num_workers = 2" in process.stdout
    assert "(this is task 0 of 2 of a SLURM step)" in process.stdout
    assert process.stdout.count("Trained for 1 epochs, 3 steps.") == 1
    assert not (tmp_path / "scontrol.log").exists()


@pytest.mark.slow
def test_a_launcher_on_each_host_starts_the_processes(sbatch):
    process = sbatch("launch.sbatch", *RECIPE, FAKE_TASKS="1", NPROC="2")
    assert process.returncode == 0, process.stderr
    assert "num_workers = 2" in process.stdout
    assert "(torchrun's variables are set (RANK=0, WORLD_SIZE=2)" in process.stdout
    assert process.stdout.count("Trained for 1 epochs, 3 steps.") == 1


@pytest.mark.parametrize(("restarts", "is_queued"), [({}, True), ({"SLURM_RESTART_COUNT": "3"}, False)])
def test_a_failed_job_is_queued_again_but_not_for_ever(sbatch, job_id, tmp_path, restarts, is_queued):
    process = sbatch("srun.sbatch", "-c", "raise SystemExit(7)", FAKE_TASKS="2", **restarts)
    assert process.returncode == 7
    log = tmp_path / "scontrol.log"
    assert (log.read_text() if log.exists() else "") == (f"requeue {job_id}\n" if is_queued else "")


@pytest.mark.slow
def test_a_job_whose_time_is_over_saves_and_is_queued_again_however_often(sbatch, job_id, tmp_path):
    options = [*RECIPE, "epochs=1000", "save_every=1000000"]
    process = sbatch("srun.sbatch", *options, told_after="Epoch 1, ", FAKE_TASKS="2", SLURM_RESTART_COUNT="7")
    assert process.returncode == 143, process.stderr
    assert (tmp_path / "scontrol.log").read_text() == f"requeue {job_id}\n"
    again = sbatch("srun.sbatch", *RECIPE, FAKE_TASKS="2", SLURM_RESTART_COUNT="8")
    assert again.returncode == 0, again.stderr
    assert "Going on with epoch " in again.stdout


@pytest.mark.parametrize(("cpus", "expected"), [("8", "4"), ("1", "1")])
def test_processes_of_a_host_share_its_threads(sbatch, job_id, tmp_path, cpus, expected):
    """What is started instead of Python shows its arguments and the number of threads."""
    show = tmp_path / "show"
    show.write_text('#!/bin/bash\necho "$OMP_NUM_THREADS" "$@"\n')
    show.chmod(0o755)
    options = {"FAKE_TASKS": "1", "NPROC": "2", "OMP_NUM_THREADS": "", "PYTHON": str(show)}
    process = sbatch("launch.sbatch", "program.py", "x y", SLURM_CPUS_PER_TASK=cpus, **options)
    assert process.returncode == 0, process.stderr
    assert process.stdout.split() == [
        expected,
        *("-m", "torchstrategy", "launch", "--nnodes=1", "--nproc-per-node=2", "--max-restarts=3"),
        *(f"--rdzv-endpoint=localhost:{20000 + job_id % 10000}", f"--rdzv-id={job_id}"),
        *("program.py", "x", "y"),
    ]
