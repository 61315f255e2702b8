"""The diffs of ``docs/from_pytorch.md`` and ``from_keras.md`` are whole programs, and train what the pages say."""

import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

import torchstrategy as ts
from tests import warm

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "from_pytorch.md"


def programs(text):
    """Return for each heading with a diff its two programs."""
    found = {}
    for heading, diff in re.findall(r"^#+ ([^\n]+)$(?:(?!^#).)*?^```diff\n(.*?)^```$", text, re.M | re.S):
        lines = diff.splitlines()
        found[heading] = [
            "\n".join(line[1:] for line in lines if not line.startswith(other)) + "\n" for other in ("+", "-")
        ]
    return found


PROGRAMS = programs(PAGE.read_text())


def in_two_processes(program, folder):
    """Run a program with the data in order, and return what it prints."""
    folder.mkdir()
    path = folder / "train.py"
    path.write_text(program.replace("shuffle=True", "shuffle=False"))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", path]
    job = warm.run(command, folder)
    assert job.returncode == 0, job.stderr
    return [line for line in job.stdout.splitlines() if line.startswith("epoch")]


def numbers(lines):
    return [float(line.rpartition(" ")[2]) for line in lines]


def test_each_peer_has_a_diff():
    assert list(PROGRAMS) == ["DistributedDataParallel", "Lightning Fabric", "Hugging Face Accelerate"]
    for theirs, ours in PROGRAMS.values():
        compile(theirs, "theirs", "exec")
        compile(ours, "ours", "exec")
        assert "torchstrategy" not in theirs
        assert not re.search(r"torch\.distributed|lightning|accelerate", ours)


def test_numbers_of_lines_are_those_of_the_diffs():
    text = PAGE.read_text()
    said = [(int(a), int(b)) for a, b in re.findall(r"^(\d+) lines go, (\d+) come\.", text, re.M)]
    diffs = re.findall(r"^```diff\n(.*?)^```$", text, re.M | re.S)
    assert said == [tuple(len(re.findall(rf"^{re.escape(sign)}", diff, re.M)) for sign in "-+") for diff in diffs]


@pytest.mark.slow
def test_ddp_trains_the_same_weights(tmp_path):
    theirs, ours = PROGRAMS["DistributedDataParallel"]
    printed = [in_two_processes(theirs, tmp_path / "theirs"), in_two_processes(ours, tmp_path / "ours")]
    assert len(printed[0]) == 3
    assert numbers(printed[0]) == pytest.approx(numbers(printed[1]), abs=2e-6)
    theirs, ours = (torch.load(tmp_path / folder / "model.pt") for folder in ("theirs", "ours"))
    assert list(theirs) == list(ours)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("peer", ["Lightning Fabric", "Hugging Face Accelerate"])
def test_the_other_programs_train_the_same(peer, tmp_path):
    ours = in_two_processes(PROGRAMS[peer][1], tmp_path / "ours")
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
    (path,) = (tmp_path / "ours").glob("*.ckpt*")
    ts.train.Checkpoint(model=model).read(str(path.with_suffix(""))).expect_partial()
    reference = in_two_processes(PROGRAMS["DistributedDataParallel"][1], tmp_path / "ddp")
    assert ours == reference
    trained = torch.load(tmp_path / "ddp" / "model.pt")
    for name, value in model.state_dict().items():
        torch.testing.assert_close(trained[name], value, rtol=0, atol=0)


@pytest.mark.slow
def test_the_program_beside_that_of_keras_trains(tmp_path):
    ((theirs, ours),) = programs((ROOT / "docs" / "from_keras.md").read_text()).values()
    compile(theirs, "theirs", "exec")
    (tmp_path / "train.py").write_text(ours.replace("epochs=3", "epochs=2"))
    shutil.copy(ROOT / "recipes" / "data" / "fashion_mnist_slice.npz", tmp_path / "images.npz")
    job = warm.run([sys.executable, tmp_path / "train.py"], tmp_path)
    assert job.returncode == 0, job.stderr
    assert float(re.search(r"^test accuracy (.*)$", job.stdout, re.MULTILINE)[1]) > 0.7
    assert (tmp_path / "best.pt").exists()
