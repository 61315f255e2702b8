"""The recipe's command lines, each in a process of its own with a small model and few steps."""

import re
import sys
from pathlib import Path

import custom_loop
import pytest

from tests import warm
from tests.recipes import layouts

RECIPE = Path(__file__).parents[2] / "recipes" / "custom_loop.py"
SMALL = ["model=mlp", "epochs=2", "max_steps=3"]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node=2"]
SUMMARY = re.compile(
    r"^Test accuracy: (?P<accuracy>0\.\d{4}) after 2 epochs with (?P<replicas>\d) replica\(s\) in [\d.]+ s; "
    r"files: (?P<folder>.+)$",
    re.MULTILINE,
)
RESTORED = re.compile(r"^Accuracy after restoring the saved model without strategy: ([\d.]+)$", re.MULTILINE)


def folder(parent, name):
    path = parent / name
    path.mkdir()
    return path


def start(folder, *arguments):
    return warm.run([sys.executable, *arguments], folder)


def finished(process):
    assert process.returncode == 0, process.stderr
    return [match.groupdict() for match in SUMMARY.finditer(process.stdout)]


def check_files(run_path):
    """One writer of events, one picture, the checkpoint of the last epoch, and hydra's record of the configuration."""
    assert len(list(run_path.glob("events.out.tfevents.*"))) == 1
    assert (run_path / "learning_curve.png").stat().st_size > 10_000
    assert any((run_path / "checkpoints").iterdir())
    assert (run_path / ".hydra" / "config.yaml").exists()


@pytest.mark.slow
def test_every_hosting_gives_the_same_result(tmp_path):
    """The same global batches, split or not, end in the same figures; each run has one folder, however many ranks."""
    options = [*SMALL, "clip_norm=0.5", "learning_rate=sqrt"]
    one, two, torchrun = (
        start(folder(tmp_path, name), *launcher, str(RECIPE), *options, *more)
        for name, launcher, more in (
            ("one", [], ["batch_size_per_replica=90"]),
            ("two", [], ["strategy=mirrored", "strategy.devices=[cpu:0,cpu:1]", "batch_size_per_replica=45"]),
            ("torchrun", TORCHRUN, ["strategy.devices=[cpu:0]", "batch_size_per_replica=45"]),
        )
    )
    epochs = [line for line in one.stdout.splitlines() if line.startswith("Epoch")]
    assert len(epochs) == 2
    for process, name, replicas in ((one, "one", "1"), (two, "two", "2"), (torchrun, "torchrun", "2")):
        (summary,) = finished(process)
        assert summary["replicas"] == replicas
        assert [line for line in process.stdout.splitlines() if line.startswith("Epoch")] == epochs
        (restored,) = RESTORED.findall(process.stdout)
        assert float(restored) == pytest.approx(100 * float(summary["accuracy"]), abs=0.01)
        runs = list(tmp_path.glob(f"{name}/outputs/custom_loop/*"))
        assert [str(run) for run in runs] == [summary["folder"]]
        check_files(runs[0])


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_other_ways_to_start_two_processes_agree(tmp_path):
    """A cluster described by TF_CONFIG, and the recipe's own launcher; one line of the strategy says what it found."""
    options = [*SMALL, "global_batch_size=90"]
    commands = {
        "TF_CONFIG": layouts.tf_config("custom_loop.py", *options, num_workers=2, chief=True),
        "torchrun": layouts.launcher("custom_loop.py", *options, nproc=2),
    }
    epochs = []
    for source, processes in commands.items():
        output = layouts.run_all(processes, folder(tmp_path, source))
        (summary,) = [match.groupdict() for match in SUMMARY.finditer(output)]
        epochs.append([line for line in output.splitlines() if line.startswith("Epoch")])
        assert re.search(rf"MultiWorkerMirroredStrategy with cluster_spec = .*num_workers = 2, .*{source}", output)
        runs = list(tmp_path.glob(f"{source}/outputs/custom_loop/*"))
        assert [str(run) for run in runs] == [summary["folder"]], "one run directory for all processes"
        check_files(runs[0])
    assert len(epochs[0]) == 2
    assert epochs[0] == epochs[1]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_multirun(tmp_path):
    process = start(tmp_path, str(RECIPE), "-m", "strategy=default,one_device,mirrored", "precision=bf16", *SMALL)
    summaries = finished(process)
    (sweep,) = tmp_path.glob("multirun/custom_loop/*")
    assert [summary["folder"] for summary in summaries] == [str(sweep / str(number)) for number in range(3)]
    for number in range(3):
        check_files(sweep / str(number))
    assert len({summary["accuracy"] for summary in summaries}) == 1, "with one replica the strategies agree"


@pytest.mark.slow
def test_fp16_scales_the_loss(tmp_path):
    process = start(
        tmp_path,
        str(RECIPE),
        "model=mlp",
        "epochs=2",
        "max_steps=20",
        "precision=fp16",
        "strategy.devices=[cpu:0,cpu:1]",
    )
    (summary,) = finished(process)
    assert float(summary["accuracy"]) > 0.3


@pytest.mark.slow
def test_error_reaches_the_user(tmp_path):
    process = start(tmp_path, str(RECIPE), *SMALL, "learning_rate=table")
    assert process.returncode != 0
    assert re.search(r"no entry for a global batch of 64, only for 5, 10, 20\. Add one by", process.stderr)


@pytest.mark.slow
def test_independent_copies_are_refused(tmp_path):
    process = start(tmp_path, *TORCHRUN, str(RECIPE), *SMALL, "strategy=one_device")
    assert process.returncode != 0
    assert "each process would train a model of its own. Choose strategy=multi_worker_mirrored" in process.stderr
    assert not SUMMARY.search(process.stdout)


def test_unknown_precision():
    with pytest.raises(ValueError, match=r"precision must be one of fp64, fp32, bf16, fp16\. Received: fp8"):
        custom_loop.get_dtype("fp8")
