"""Checkpoints in a store that fsspec finds: in memory, with and without renaming, folders by ``file://``, and S3's.

The last one is a server of moto on this host; its packages and ``s3fs`` are in the extra ``tests-s3``.
"""

import os
import uuid
from typing import ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import torchstrategy as ts
from torchstrategy.errors import DataLossError, FailedPreconditionError, NotFoundError
from torchstrategy.estimator.eval_metrics import read_eval_metrics


class Renaming(MemoryFileSystem):
    """A store that shows files while they are written, so that they need another name until they are complete."""

    protocol = "renaming"
    store: ClassVar = {}
    pseudo_dirs: ClassVar = [""]


fsspec.register_implementation("renaming", Renaming, clobber=True)


@pytest.fixture(scope="module")
def s3():
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    pytest.importorskip("s3fs")
    server.start()
    host, port = server.get_host_and_port()
    settings = {"endpoint_url": f"http://{host}:{port}", "key": "nobody", "secret": "nothing"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(fsspec.config.conf, "s3", settings)
        fsspec.filesystem("s3").mkdir("bucket")
        yield "s3://bucket"
        fsspec.filesystem("s3").clear_instance_cache()
    server.stop()


@pytest.fixture(params=["memory", "renaming", "file", pytest.param("s3", marks=pytest.mark.slow)])
def folder(request, tmp_path):
    if request.param == "s3":
        return f"{request.getfixturevalue('s3')}/{uuid.uuid4().hex}/run"
    if request.param == "file":
        return f"file://{tmp_path}/run"
    return f"{request.param}://{uuid.uuid4().hex}/run"


def names(folder):
    system, place = fsspec.core.url_to_fs(folder)
    return sorted(os.path.basename(path) for path in system.ls(place, detail=False))


def start(folder):
    step = torch.tensor(0)
    return step, ts.train.CheckpointManager(ts.train.Checkpoint(step=step), folder, 2)


def test_manager(folder):
    step, manager = start(folder)
    assert manager.restore_or_initialize() is None
    for number in (1, 2, 3):
        step.fill_(number)
        manager.save()
    assert names(folder) == ["checkpoint", "ckpt-2.pt", "ckpt-3.pt"]
    assert ts.train.latest_checkpoint(folder) == f"{folder}/ckpt-3"
    assert ts.train.load_variable(folder, "step") == 3
    step, again = start(folder)
    assert again.restore_or_initialize() == f"{folder}/ckpt-3"
    assert step == 3
    assert again.save(options=ts.train.CheckpointOptions(enable_async=True)) == f"{folder}/ckpt-4"
    again.sync()
    assert names(folder) == ["checkpoint", "ckpt-3.pt", "ckpt-4.pt"]


def test_lost_and_damaged(folder):
    step, manager = start(folder)
    for number in (1, 2):
        step.fill_(number)
        manager.save()
    system, place = fsspec.core.url_to_fs(folder)
    system.rm_file(f"{place}/checkpoint")
    content = system.cat_file(f"{place}/ckpt-2.pt")
    system.pipe_file(f"{place}/ckpt-2.pt", content[:-30] + b"?" + content[-29:])
    step, again = start(folder)
    assert again.restore_or_initialize() == f"{folder}/ckpt-1"
    with pytest.raises(DataLossError, match=r"ckpt-2\.pt is damaged"):
        ts.train.Checkpoint(step=step).restore(f"{folder}/ckpt-2")
    with pytest.raises(NotFoundError, match="There is no checkpoint"):
        ts.train.Checkpoint(step=step).restore(f"{folder}/ckpt-9")


def test_one_writer(folder, monkeypatch):
    step, old = start(folder)
    old.save()
    with monkeypatch.context() as patch:
        patch.setattr("torchstrategy.checkpoint.fencing._writer", lambda: "another")
        start(folder)[1].save()
    with pytest.raises(FailedPreconditionError):
        old.save()
    assert step == 0


def test_weights_and_models(folder):
    model = ts.Model(torch.nn.Linear(2, 1))
    model.compile("sgd", "mse")
    model.save_weights(f"{folder}/weights")
    model.save(f"{folder}/model.pt")
    with pytest.raises(FileExistsError):
        model.save(f"{folder}/model.pt", overwrite=False)
    other = ts.Model(torch.nn.Linear(2, 1))
    other.load_weights(ts.train.latest_checkpoint(folder))
    assert torch.equal(other.module.weight, model.module.weight)
    loaded = ts.models.load_model(f"{folder}/model.pt", trust=True)
    assert torch.equal(loaded.module.weight, model.module.weight)


def test_a_failed_write_leaves_what_was_there(monkeypatch):
    folder = f"renaming://{uuid.uuid4().hex}/run"
    step, manager = start(folder)
    manager.save()

    def broken(*args, **kwargs):
        raise OSError("the line is cut")

    with monkeypatch.context() as patch:
        patch.setattr(Renaming, "mv", broken)
        with pytest.raises(OSError, match="the line is cut"):
            manager.save()
    assert names(folder) == ["checkpoint", "ckpt-1.pt"]
    assert manager.checkpoints == [f"{folder}/ckpt-1"]
    assert step == 0


def test_unknown_scheme():
    with pytest.raises(ValueError, match="Install what fsspec needs for this scheme"):
        ts.train.latest_checkpoint("nosuch://bucket/run")


def fit(folder, epochs, callback):
    torch.manual_seed(0)
    model = ts.Model(torch.nn.Linear(2, 1))
    model.compile("sgd", "mse")
    history = model.fit(
        torch.ones(8, 2), torch.ones(8, 1), batch_size=2, epochs=epochs, callbacks=[callback], verbose=0
    )
    return history.epoch, model.module.weight.detach().clone()


def test_fit_goes_on_from_there(folder):
    """With another object each time, as in another process."""
    fit(folder, 1, ts.experimental.ElasticTraining(folder, save_freq=3))
    went_on = fit(folder, 2, ts.experimental.ElasticTraining(folder, save_freq=3))
    assert went_on[0] == [0, 1]
    unbroken = fit(f"{folder}2", 2, ts.callbacks.BackupAndRestore(f"{folder}2", save_freq=3))
    assert torch.equal(went_on[1], unbroken[1])
    assert not ts.train.latest_checkpoint(f"{folder}2")  # it deletes its files at the end


def of_stores(*fast, marks=()):
    """Run a test with some of the stores, and where there is time with all of them."""
    stores = ("memory", "renaming", "file", "s3")
    params = [pytest.param(name, marks=marks if name in fast else pytest.mark.slow) for name in stores]
    return pytest.mark.parametrize("folder", params, indirect=True)


@of_stores("memory")
def test_summaries_there(folder, caplog, monkeypatch):
    pytest.importorskip("tensorboard")
    writer = ts.summary.create_file_writer(folder)
    for step in (1, 2):
        with writer.as_default(step):
            ts.summary.scalar("loss", step)
    assert list(read_eval_metrics(folder)) == [1]  # the second one waits, as stores can't append
    writer.flush()
    assert list(read_eval_metrics(folder)) == [1, 2]
    with writer.as_default(3):
        ts.summary.scalar("loss", 3)
    writer.close()
    assert list(read_eval_metrics(folder)) == [1, 2, 3]
    assert len(names(folder)) == 1


def test_the_loss_of_a_forgotten_writers_summaries_is_told(monkeypatch, caplog):
    pytest.importorskip("tensorboard")
    folder = f"memory://{uuid.uuid4().hex}/run"
    writer = ts.summary.create_file_writer(folder)
    with writer.as_default(1):
        ts.summary.scalar("loss", 1)

    def broken(*args, **kwargs):
        raise OSError("the line is cut")

    monkeypatch.setattr(MemoryFileSystem, "put_file", broken)
    del writer
    assert f"The last summaries could not be written to {folder}: the line is cut" in caplog.text
