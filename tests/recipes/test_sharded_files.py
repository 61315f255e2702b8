"""The recipe's shards in every format, and a run that ends within an epoch and goes on with other replicas."""

import re
import sys
from pathlib import Path

import pytest
import sharded_files
import shards
import torch
from omegaconf import OmegaConf

import torchstrategy as ts
from tests import warm

RECIPE = Path(__file__).parents[2] / "recipes" / "sharded_files.py"
SMALL = ["global_batch_size=500", "shuffle_buffer=100", "save_every=3", "epochs=1"]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node=2"]
SUMMARY = re.compile(
    r"^Epoch (?P<epoch>\d), Loss: [\d.]+, Accuracy: (?P<accuracy>[\d.]+); (?P<seen>\d+) examples were seen in "
    r"(?P<starts>\d) start\(s\): (?P<never>\d+) of (?P<total>\d+) never, (?P<repeated>\d+) more than once$",
    re.MULTILINE,
)
EXACTLY_ONCE = {"seen": "6000", "never": "0", "total": "6000", "repeated": "0"}


def start(folder, *arguments):
    process = warm.run([sys.executable, *arguments], folder)
    assert process.returncode == 0, process.stderr
    return process.stdout


def summaries(output):
    return [match.groupdict() for match in SUMMARY.finditer(output)]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_processes_are_stopped_and_three_replicas_of_one_go_on(tmp_path):
    first = start(tmp_path, *TORCHRUN, str(RECIPE), *SMALL, "stop_at_step=5")
    assert "FILE: asked for; of 8 files each process reads its own (process 0: 4, process 1: 4)" in first
    assert first.count("Stopped after step 5. Start again to go on from the last checkpoint.") == 1
    assert not summaries(first)

    second = start(tmp_path, str(RECIPE), *SMALL, "strategy.devices=[cpu:0,cpu:1,cpu:2]")
    assert "Going on with epoch 1 after step 3: 1500 of 6000 examples were seen." in second
    (summary,) = summaries(second)
    assert summary.items() >= {**EXACTLY_ONCE, "epoch": "1", "starts": "2"}.items()


@pytest.mark.slow
def test_a_run_that_is_stopped_again_and_again(tmp_path):
    """Three replicas of one process, two processes twice, one: every example once in each epoch."""
    start(tmp_path, str(RECIPE), *SMALL, "strategy.devices=[cpu:0,cpu:1,cpu:2]", "stop_at_step=4")
    second = start(tmp_path, *TORCHRUN, str(RECIPE), *SMALL, "stop_at_step=8")  # one reads on, the other has no files
    assert "Going on with epoch 1 after step 3: 1500 of 6000 examples were seen." in second
    third = start(tmp_path, *TORCHRUN, str(RECIPE), *SMALL)
    (summary,) = summaries(third)
    assert summary.items() >= {**EXACTLY_ONCE, "epoch": "1", "starts": "3"}.items()
    fourth = start(tmp_path, str(RECIPE), *SMALL, "epochs=2")
    assert re.search(r"Going on with epoch 2 after step \d+: 0 of 6000 examples were seen\.", fourth)
    (summary,) = summaries(fourth)
    assert summary.items() >= {**EXACTLY_ONCE, "epoch": "2", "starts": "1"}.items()
    assert float(summary["accuracy"]) > 50


@pytest.mark.slow
def test_every_format_gives_the_same_training(tmp_path):
    """The formats hold the same examples in the same order, so one process sees the same batches."""
    outputs = [start(tmp_path, str(RECIPE), *SMALL, f"format={name}", f"folder={name}") for name in shards.FORMATS]
    first, *others = map(summaries, outputs)
    assert first[0].items() >= {**EXACTLY_ONCE, "starts": "1"}.items()
    assert others == [first] * 3


def test_an_unknown_format_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"format must be one of npz, idx, parquet, tar\. Received: hdf5"):
        sharded_files.make_dataset(OmegaConf.create({"format": "hdf5"}), tmp_path)


@pytest.mark.parametrize("name", shards.FORMATS)
def test_shards_hold_every_example_once(tmp_path, name):
    form = shards.FORMATS[name]
    images = torch.randint(0, 256, (11, 1, 28, 28), generator=torch.Generator().manual_seed(0)) / 255
    labels = torch.arange(11) % 10
    files = shards.make_files(tmp_path / "data" / name, form, 3, images, labels)
    assert len(files) == 3
    dataset = ts.data.Dataset.from_files(files, form.reader).map(form.to_tuple)
    found = {int(number): (image, int(label)) for image, label, number in dataset}
    assert sum(1 for _ in dataset) == len(found) == 11
    for number, (image, label) in found.items():
        assert label == labels[number]
        assert torch.equal(image.unsqueeze(0) / 255, images[number])


def test_shards_are_written_once(tmp_path):
    form = shards.FORMATS["npz"]
    images, labels = torch.zeros(4, 1, 28, 28), torch.zeros(4, dtype=torch.int64)
    (file, _) = shards.make_files(tmp_path / "data", form, 2, images, labels)
    written = file.stat().st_mtime_ns
    assert shards.make_files(tmp_path / "data", form, 2, images, labels)[0].stat().st_mtime_ns == written
