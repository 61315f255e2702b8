"""Files of every format version are read. Those in ``samples`` were written by the releases that had the version."""

import shutil
from pathlib import Path

import pytest
import torch

import torchstrategy as ts
from torchstrategy.checkpoint import archive

SAMPLES = Path(__file__).parent / "samples"
VERSIONS = sorted(path.name for path in SAMPLES.iterdir())


def test_there_is_one_of_the_present_version():
    assert [f"v{i + 1}" for i in range(archive.VERSION)] == VERSIONS
    content = archive.read_archive(str(SAMPLES / VERSIONS[-1] / "ckpt-3.pt"), what="", remedy="")
    assert content["version"] == archive.VERSION


@pytest.mark.parametrize("has_index", [True, False])
@pytest.mark.parametrize("version", VERSIONS)
def test_checkpoints(version, has_index, tmp_path):
    folder = Path(shutil.copytree(SAMPLES / version, tmp_path / "run"))
    for name in ("model.pt", "weights.pt"):
        (folder / name).unlink()
    if not has_index:
        (folder / "checkpoint").unlink()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    step = ts.Variable(0, trainable=False)
    checkpoint = ts.train.Checkpoint(model=model, optimizer=optimizer, step=step)
    manager = ts.train.CheckpointManager(checkpoint, folder, 2)
    assert manager.restore_or_initialize() == str(folder / "ckpt-3")
    assert (int(step), int(model[1].num_batches_tracked), optimizer.param_groups[0]["lr"]) == (7, 2, 0.1)
    assert optimizer.state[model[0].weight]["momentum_buffer"].shape == (2, 2)
    assert manager.save() == str(folder / "ckpt-4")
    assert ts.train.latest_checkpoint(folder) == str(folder / "ckpt-4")


@pytest.mark.parametrize("name", ["weights.pt", "listed/weights", "weights.safetensors", "model.pt"])
@pytest.mark.parametrize("version", VERSIONS)
def test_weights(version, name):
    model = ts.Model(torch.nn.Linear(2, 1))
    model.load_weights(SAMPLES / version / name)
    assert model.predict(torch.ones(1, 2), verbose=0).tolist() == [[6.0]]


@pytest.mark.parametrize("version", VERSIONS)
def test_weights_as_a_checkpoint(version):
    module = torch.nn.Linear(2, 1)
    path = ts.train.latest_checkpoint(SAMPLES / version / "listed")
    ts.train.Checkpoint(model=module).restore(path).assert_existing_objects_matched()
    assert module.bias.tolist() == [3.0]
    assert ts.train.load_variable(path, "iterations") == 1


@pytest.mark.parametrize("version", VERSIONS)
def test_whole_models(version):
    model = ts.models.load_model(SAMPLES / version / "model.pt", trust=True)
    assert model.predict(torch.ones(1, 2), verbose=0).tolist() == [[6.0]]
    assert isinstance(model.optimizer, torch.optim.Adam)
    model.fit(torch.ones(4, 2), torch.ones(4, 1), verbose=0)
    assert model.optimizer.state_dict()["state"][0]["step"] == 2
