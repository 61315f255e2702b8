"""``torchstrategy verify`` as it is called: its exit status, what it prints, and what it leaves behind."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from torchstrategy.cli import main
from torchstrategy.testing.verification.api import Comparison
from torchstrategy.testing.verification.causes import OTHER_EXAMPLES, OWN_RANDOM, Cause
from torchstrategy.testing.verification.deviations import Deviation
from torchstrategy.testing.verification.script import ScriptReport

SCRIPTS = Path(__file__).parent / "scripts"
ROOT = Path(__file__).parents[3]


@pytest.fixture
def verify(tmp_path):
    """Return a function that calls the command in a process, and checks that no folder is left."""

    def call(*arguments, status):
        done = subprocess.run(
            [sys.executable, "-m", "torchstrategy", "verify", *map(str, arguments)],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == status, done.stdout + done.stderr
        assert list(tmp_path.glob("torchstrategy_*")) == []
        return done.stdout + done.stderr

    return call


def script(tmp_path, text):
    path = tmp_path / "train.py"
    path.write_text(text)
    return path


def causes(output):
    return re.findall(r"^  cause: ([^:]+):", output, re.M)


@pytest.mark.slow
def test_uneven_shares_of_ddp_are_named(verify):
    output = verify(SCRIPTS / "ddp_script.py", 11, "share", "every", status=1)
    assert causes(output) == ["each replica's mean weighs alike"]
    assert "shares of 2, 1 examples" in output
    assert "2 replicas in 2 processes: WRONG" in output


@pytest.mark.slow
def test_only_so_many_steps_are_made(verify):
    output = verify("--steps=2", SCRIPTS / "ddp_script.py", 100, "share", "padded", status=0)
    assert "ended after 2 steps" in output


def test_wrong_arguments(capsys):
    assert main(["verify", "nowhere.py"]) == 2
    assert "There is no file 'nowhere.py'" in capsys.readouterr().err
    assert main(["verify", "--replicas=1", str(SCRIPTS / "ddp_script.py")]) == 2
    assert "at least 2" in capsys.readouterr().err
    assert main(["verify", "--steps=0", str(SCRIPTS / "ddp_script.py")]) == 2
    assert capsys.readouterr().err == "torchstrategy verify: --steps must be at least 1. Got: 0\n"
    for command, seconds in (("verify", "nan"), ("verify", "soon"), ("doctor", "-1"), ("doctor", "0")):
        with pytest.raises(SystemExit, match="2"):
            main([command, f"--timeout={seconds}", *[str(SCRIPTS / "ddp_script.py")] * (command == "verify")])
        assert f"expected a number of seconds above 0. Received: {seconds}" in capsys.readouterr().err


def test_a_run_that_fails_is_wrong_if_a_number_differs():
    failed = Comparison("2 replicas", 1, error="RuntimeError: no")
    assert str(failed).startswith("2 replicas: FAILED\n  the program failed:")
    wrong = Comparison("2 replicas", 1, [Deviation(0, "weight", "w", 0, 1.0, 2.0, 1.0)], error="RuntimeError: no")
    assert str(wrong).startswith("2 replicas: WRONG\n  step 0: weight w")
    assert not failed.ok
    assert not wrong.ok


def test_what_an_option_leaves_out_is_told_of_it():
    def hints(kind, text):
        comparison = Comparison("2 replicas", 1, causes=[Cause(kind, 0, text)])
        return str(ScriptReport([comparison], "")).splitlines()[3:]

    text = "step 0 draws random numbers ({}); each replica draws its own. Verify without dropout"
    assert hints(OWN_RANDOM, text.format("feature_dropout")) == ["With --no-dropout the numbers can be compared."]
    assert hints(OWN_RANDOM, text.format("randn_like")) == []
    assert hints(OTHER_EXAMPLES, "...") == ["With --no-shuffle the numbers can be compared."]


@pytest.mark.slow
def test_a_failing_script(verify, tmp_path):
    output = verify(script(tmp_path, "raise LookupError('no data')"), status=2)
    assert "The script fails with one replica" in output
    assert "LookupError: no data" in output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("print('nothing')", "made no step"),
        ("import time; time.sleep(60)", "did not end within 4 s"),
        (
            "import torch\nmodel = torch.nn.Linear(2, 1)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
            "model(torch.ones(4, 2)).mean().backward()\noptimizer.step()\n",
            "it makes no strategy of torchstrategy",
        ),
        (
            "import os, torch, torch.distributed as dist\ndist.init_process_group()\n"
            "model = torch.nn.Linear(2, 1)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
            "x = torch.rand(4, 2, generator=torch.Generator().manual_seed(int.from_bytes(os.urandom(4), 'big')))\n"
            "model(x).mean().backward()\noptimizer.step()\ndist.destroy_process_group()\n",
            "Two runs with one replica differ",
        ),
    ],
)
def test_what_cannot_be_verified(text, message, verify, tmp_path):
    options = ["--timeout=4"] if "sleep" in text else []
    assert message in verify(*options, script(tmp_path, text), status=2)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all_processes(number, tmp_path):
    text = f"import os, time\nopen(r'{tmp_path}/pid', 'w').write(str(os.getpid()))\ntime.sleep(60)\n"
    command = [sys.executable, "-m", "torchstrategy", "verify", str(script(tmp_path, text))]
    before = signal.signal(number, signal.SIG_DFL)  # `nohup` has all that it starts ignore one of them
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path)})
    signal.signal(number, before)
    with process:
        deadline = time.monotonic() + 30
        while not (tmp_path / "pid").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.1)
        pid = int((tmp_path / "pid").read_text())
        process.send_signal(number)
        assert process.wait(timeout=30) == 130
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


SHUFFLED = """
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler
dist.init_process_group("gloo")
size = dist.get_world_size()
torch.manual_seed(0)
data = [torch.randn(3) for _ in range(12)]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(data, 4 // size, sampler=DistributedSampler(data) if size > 1 else None, shuffle=size == 1)
for x in loader:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("options", "status"), [([], 2), (["--no-shuffle"], 0)])
def test_another_order_leaves_open_whether_a_program_is_right(options, status, verify, tmp_path):
    output = verify(*options, script(tmp_path, SHUFFLED), status=status)
    assert ("CAN'T BE COMPARED" in output) == (status == 2)
    assert causes(output) == (["batches of other examples"] if status else [])


RESUMING = """
import os, sys, torch, torchstrategy as ts
os.chdir(os.path.dirname(__file__))
strategy = ts.MirroredStrategy()
with strategy.scope():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
checkpoint = ts.train.Checkpoint(model=model, optimizer=optimizer)
manager = ts.train.CheckpointManager(checkpoint, "ck", max_to_keep=1)
if manager.latest_checkpoint is None and not (sys.argv[1:] and int(os.environ.get("WORLD_SIZE", 1)) > 1):
    x = torch.arange(8.0).reshape(4, 2).to(torch.get_default_dtype())
    for batch in strategy.experimental_distribute_dataset(x, batch_size=2):
        def step(x):
            optimizer.zero_grad()
            ts.nn.compute_average_loss(model(x)[:, 0], global_batch_size="actual").backward()
            optimizer.step()
        strategy.run(step, args=(batch,))
    manager.save()
    if strategy.is_chief:
        torch.save(model.state_dict(), "best.pt")
print("ends")
"""


@pytest.mark.slow
def test_the_users_files_stay_and_each_run_begins_from_them(verify, tmp_path):
    folder = tmp_path / "program"
    folder.mkdir()
    program = script(folder, RESUMING)
    (folder / "best.pt").write_text("the user's")
    assert "2 replicas in 2 processes: right in all 2 steps" in verify(program, status=0)
    assert sorted(path.name for path in folder.iterdir()) == ["best.pt", "train.py"]
    assert (folder / "best.pt").read_text() == "the user's"
    output = verify(program, "only one", status=2)
    assert "made no optimizer step with 2 replicas, though it did with one" in output
    assert "    ends" in output
