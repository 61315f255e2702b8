"""The recipe's command lines, each in a process of its own with a small model and few images."""

import json
import re
import subprocess

import fit
import fit_guide
import pytest
import torch

import torchstrategy as ts
from tests.recipes import layouts

RECIPE = "fit.py"
SMALL = ["model=mlp", "epochs=2", "global_batch_size=500"]  # 12 steps an epoch
SUMMARY = re.compile(
    r"^Test accuracy: (?P<accuracy>0\.\d{4}) after 2 epochs with (?P<replicas>\d) replica\(s\) in [\d.]+ s; "
    r"files: (?P<folder>.+)$",
    re.MULTILINE,
)
TESTED = re.compile(r"loss (\d\.\d{4}), accuracy ([\d.]+)$", re.MULTILINE)
EPOCH = re.compile(r"^12/12 - .* - (loss: .*)$", re.MULTILINE)  # how it is told where there is no terminal


def folder(parent, name):
    path = parent / name
    path.mkdir()
    return path


def results(path):
    return json.loads((path / "results.json").read_text())["last"]


@pytest.mark.slow
def test_every_hosting_gives_the_same_result(tmp_path):
    told = []
    for name, commands in {
        "one": layouts.alone(RECIPE, *SMALL),
        "two": layouts.alone(RECIPE, *SMALL, layouts.TWO_LOCAL),
        "processes": layouts.launcher(RECIPE, *SMALL, nproc=2),
    }.items():
        output = layouts.run_all(commands, folder(tmp_path, name))
        (summary,) = [match.groupdict() for match in SUMMARY.finditer(output)]
        assert summary["replicas"] == ("1" if name == "one" else "2")
        best, *loaded = TESTED.findall(output)
        assert len(loaded) == (1 if name == "processes" else 2)
        assert set(loaded) == {loaded[0]}
        (run_path,) = tmp_path.glob(f"{name}/outputs/fit/*")
        assert summary["folder"] == str(run_path)
        assert {"checkpoints", "history.csv", "logs", "model.pt", "results.json"} <= {
            path.name for path in run_path.iterdir()
        }
        assert len((run_path / "history.csv").read_text().splitlines()) == 3
        assert len(list(run_path.glob("logs/train/events.out.tfevents.*"))) == 1
        told.append((EPOCH.findall(output), best, loaded[0]))
    assert len(told[0][0]) == 2
    assert told[0] == told[1] == told[2]


KILLED = [*SMALL, "save_every=5", "model.dropout=0.5", "hydra.run.dir=run"]


def check_same(first, second):
    assert results(first) == results(second)
    assert (first / "history.csv").read_text() == (second / "history.csv").read_text()
    weights, expected = (ts.models.load_model(path / "model.pt").state_dict() for path in (first, second))
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


@pytest.mark.slow
def test_a_killed_run_goes_on(tmp_path):
    """The same command with the folder of the first start."""
    unbroken, broken = folder(tmp_path, "unbroken"), folder(tmp_path, "broken")
    layouts.run_all(layouts.alone(RECIPE, *KILLED, layouts.TWO_LOCAL), unbroken)
    with pytest.raises(RuntimeError, match=r"exit statuses \[-9\]"):
        layouts.run_all(layouts.alone(RECIPE, *KILLED, layouts.TWO_LOCAL, "kill.step=18"), broken)
    layouts.run_all(layouts.alone(RECIPE, *KILLED, layouts.TWO_LOCAL), broken)
    check_same(broken / "run", unbroken / "run")


@pytest.fixture(scope="module")
def unbroken_job(tmp_path_factory):
    path = tmp_path_factory.mktemp("unbroken")
    layouts.run_all(layouts.launcher(RECIPE, *KILLED, nproc=2), path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize("step", [3, 10, 18])
def test_a_restarted_job_goes_on(step, unbroken_job, tmp_path):
    """Before the first save, right after one, and in the second epoch."""
    options = ["launcher.max_restarts=1", f"kill.step={step}", "kill.rank=1"]
    layouts.run_all(layouts.launcher(RECIPE, *KILLED, *options, nproc=2), tmp_path)
    check_same(tmp_path / "run", unbroken_job / "run")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_comparison(tmp_path):
    names = ["default", "mirrored_3", "central_storage_2", "workers_2_of_2"]
    options = [*SMALL, "precision=fp64", f"compare=[{','.join(names)}]", "hydra.run.dir=run"]
    ((command, _),) = layouts.alone(RECIPE, *options)
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert process.returncode == 0, process.stderr
    found = json.loads((tmp_path / "run" / "comparison.json").read_text())
    assert list(found) == names
    assert [line["replicas"] for line in found.values()] == [1, 3, 2, 4]
    for name, line in found.items():
        assert line["difference"] < 1e-10, name
        assert line["last"] == pytest.approx(found["default"]["last"], abs=1e-10), name
    lines = [line.split()[2:6] for line in process.stdout.splitlines() if line.startswith(tuple(found))]
    assert len(lines) == 4
    assert all(line == lines[0] for line in lines), "what is printed is equal"


@pytest.mark.slow
def test_guide(tmp_path):
    output = layouts.run_all(layouts.alone(RECIPE, "guide=true"), tmp_path)
    check_guide(output, num_columns=3)


@pytest.mark.slow
def test_guide_in_two_processes(tmp_path):
    output = layouts.run_all(layouts.launcher(RECIPE, "guide=true", nproc=2), tmp_path)
    check_guide(output, num_columns=1)


def check_guide(output, num_columns):
    for i, name in enumerate(fit_guide.ROWS):
        lines = [line for line in output.splitlines() if line.startswith(f"{name} ")]
        assert len(lines) == 2
        for line, numbers in zip(lines, fit_guide.PRINTED.values(), strict=True):
            assert line.removeprefix(name).split() == [numbers[i]] * (1 + num_columns)


@pytest.mark.slow
def test_a_failed_run_is_told(tmp_path):
    with pytest.raises(RuntimeError, match=r"fit\.py .*precision=fp8.* failed:\n(.*\n)*.*precision must be one of"):
        layouts.run_all(layouts.alone(RECIPE, "compare=true", "precision=fp8"), tmp_path)


def test_learning_rates():
    table = {0: 0.1, 3: 0.01, 7: 0.001}
    assert [fit.learning_rate(table, epoch) for epoch in (0, 2, 3, 6, 7, 100)] == [0.1, 0.1, 0.01, 0.01, 0.001, 0.001]
