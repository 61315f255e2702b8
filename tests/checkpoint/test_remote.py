"""Checkpoints and Estimators in a store that fsspec finds: in memory, with and without renaming, ``file://``, and S3's.

The last one is a server of moto on this host; its packages and ``s3fs`` are in the extra ``tests-s3``.
"""

import logging
import os
import uuid
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

import torchstrategy as ts
from tests.clusters import as_task
from tests.estimator.cluster_tasks import Tasks
from tests.estimator.lines import input_fn, make_estimator, model_fn, receiver_fn, steps_until_the_end
from torchstrategy.checkpoint.storage import local_copy
from torchstrategy.errors import DataLossError, FailedPreconditionError, NotFoundError
from torchstrategy.estimator.checkpoint_evaluator import CheckpointEvaluator, EndOfTraining
from torchstrategy.estimator.eval_metrics import read_eval_metrics

est = ts.estimator


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


@of_stores("memory", "renaming", "file")
def test_an_estimator_goes_on_there(folder, tmp_path):
    """Its numbers are those of one in a folder, also with another object each time, as in another process."""
    options = {"keep_checkpoint_max": 2, "save_summary_steps": 1}
    make_estimator(folder, **options).train(input_fn, steps=3)
    estimator = make_estimator(folder, **options).train(input_fn, max_steps=5)
    local = make_estimator(tmp_path / "local").train(input_fn, steps=3).train(input_fn, max_steps=5)
    assert estimator.latest_checkpoint() == f"{folder}/model.ckpt-5"
    assert [name for name in names(folder) if "events" not in name] == [
        "checkpoint",
        "model.ckpt-3.pt",
        "model.ckpt-5.pt",
    ]
    for name in estimator.get_variable_names():
        assert estimator.get_variable_value(name) == local.get_variable_value(name)
    assert list(read_eval_metrics(folder)) == [1, 2, 3, 4, 5]  # each training's summaries
    metrics = estimator.evaluate(input_fn, steps=2, name="test")
    assert metrics == local.evaluate(input_fn, steps=2)
    assert read_eval_metrics(f"{folder}/eval_test") == {
        5: {name: pytest.approx(metrics[name]) for name in ("loss", "mae")}
    }
    x = torch.tensor([3.0])
    assert next(estimator.predict(lambda: x)) == next(local.predict(lambda: x))


def test_an_estimator_begins_with_the_values_of_a_checkpoint_there():
    folder = f"memory://{uuid.uuid4().hex}/run"
    first = make_estimator(folder).train(input_fn, steps=1)
    est.Estimator(model_fn, f"{folder}2", warm_start_from=folder).train(input_fn, steps=1)
    assert ts.train.load_variable(f"{folder}2/model.ckpt-0", "model.w") == first.get_variable_value("w") != 0


@of_stores("memory", marks=pytest.mark.end_to_end)
def test_an_estimator_exports_there(folder):
    def run(max_steps, *exporters):
        return est.train_and_evaluate(
            make_estimator(folder),
            est.TrainSpec(input_fn, max_steps=max_steps),
            est.EvalSpec(input_fn, steps=2, throttle_secs=0, exporters=exporters),
        )

    assert run(2)[0]["global_step"] == 2
    assert run(2) == (None, None)
    system, place = fsspec.core.url_to_fs(folder)
    system.makedirs(f"{place}/export/latest/1000000000", exist_ok=True)
    system.pipe_file(f"{place}/export/latest/1000000000/model.pt2", b"old")
    latest = est.LatestExporter("latest", receiver_fn, exports_to_keep=1)
    final = est.FinalExporter("final", receiver_fn, assets_extra={"words/a.txt": __file__})
    metrics, exports = run(4, latest, final)
    assert metrics["global_step"] == 4
    assert names(f"{folder}/export") == ["final", "latest"]
    assert names(f"{folder}/export/latest") == [os.path.basename(exports[0])]
    assert names(exports[1]) == ["assets.extra", "model.pt2", "signatures.json"]
    assert names(f"{exports[1]}/assets.extra/words") == ["a.txt"]
    x = torch.tensor([3.0])
    loaded = est.export.load(exports[1]).signatures["serving_default"](x)
    assert float(loaded["y"]) == float(next(make_estimator(folder).predict(lambda: x))["y"])
    with pytest.raises(NotFoundError, match=r"Its exports are \['\d{10}'\]: load one of them"):
        est.export.load(f"{folder}/export/latest")
    best = est.BestExporter("best", receiver_fn)  # it knows those before by the files of evaluations
    path = f"{folder}/export/best"
    assert best.export(make_estimator(folder), path, f"{folder}/model.ckpt-4", {"loss": 1e9}, False) is None


def test_a_failed_export_leaves_nothing_there(monkeypatch):
    folder = f"renaming://{uuid.uuid4().hex}/run"
    estimator = make_estimator(folder).train(input_fn, steps=1)
    put = Renaming.put_file

    def broken(self, local, remote, *args, **kwargs):
        if "signatures" in remote:
            raise OSError("the line is cut")
        return put(self, local, remote, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Renaming, "put_file", broken)
        with pytest.raises(OSError, match="the line is cut"):
            estimator.export_saved_model(f"{folder}/exports", receiver_fn)
    assert not fsspec.filesystem("renaming").find(f"{folder}/exports")


@of_stores("memory")
def test_an_estimator_passes_over_a_damaged_checkpoint(folder, caplog):
    make_estimator(folder).train(input_fn, steps=4)
    system, place = fsspec.core.url_to_fs(folder)
    content = bytearray(system.cat_file(f"{place}/model.ckpt-4.pt"))
    content[len(content) // 2] ^= 1
    system.pipe_file(f"{place}/model.ckpt-4.pt", bytes(content))
    with pytest.raises(DataLossError, match=r"model\.ckpt-4\.pt is damaged"):
        make_estimator(folder).evaluate(input_fn, steps=1)
    estimator = make_estimator(folder).train(input_fn, steps=1)
    assert "model.ckpt-4.pt is damaged" in caplog.text
    assert estimator.latest_checkpoint() == f"{folder}/model.ckpt-3"


@of_stores("memory")
def test_two_trainings_in_one_directory_are_told(folder, monkeypatch):
    class Intrude(est.SessionRunHook):
        def after_run(self, run_context, run_values):
            with monkeypatch.context() as patch:
                patch.setattr("torchstrategy.checkpoint.fencing._writer", lambda: "another")
                make_estimator(folder).train(input_fn, steps=1)

    with pytest.raises(FailedPreconditionError, match=r"another has saved model\.ckpt-1 there"):
        make_estimator(folder).train(input_fn, steps=2, hooks=[Intrude()])
    assert ts.train.latest_checkpoint(folder) == f"{folder}/model.ckpt-1"


@of_stores("memory")
def test_an_evaluator_there_waits_for_the_end_of_training(folder):
    estimator = make_estimator(folder).train(input_fn, steps=2)
    EndOfTraining(folder).declare("model.ckpt-1")
    end = EndOfTraining(folder)
    assert not end.is_declared()  # that is an earlier training's
    end.clear()
    assert steps_until_the_end(estimator, end) == [2, 3, None]


def test_a_checkpoint_that_is_deleted_while_it_is_read_is_passed_over(monkeypatch, caplog):
    folder = f"memory://{uuid.uuid4().hex}/run"
    estimator = make_estimator(folder).train(input_fn, steps=1)

    def deleting(path):
        fsspec.filesystem("memory").rm_file(path)
        return local_copy(path)

    monkeypatch.setattr("torchstrategy.checkpoint.archive.local_copy", deleting)
    evaluator = CheckpointEvaluator(estimator, est.EvalSpec(input_fn, steps=1), None)
    with caplog.at_level(logging.INFO, "torchstrategy"):
        assert evaluator.evaluate().metrics is None
    assert "model.ckpt-1 was deleted before it was evaluated" in caplog.text


@pytest.mark.slow
def test_tasks_of_a_cluster_meet_there(s3, tmp_path):
    folder = f"{s3}/{uuid.uuid4().hex}"
    settings = {"model_dir": folder, "stores": {"s3": fsspec.config.conf["s3"]}, "exports": True}
    names_of_tasks = ("chief0", "worker0", "evaluator0")
    with Tasks(tmp_path, ["chief", "worker"], strategy="multi_worker", **settings) as tasks:
        tasks.start(*names_of_tasks)
        chief, worker, _ = tasks.results(*names_of_tasks)
    assert chief["variables"] == worker["variables"]
    assert list(read_eval_metrics(f"{folder}/eval"))[-1] == 4
    (export,) = names(f"{folder}/export/final")
    assert est.export.load(f"{folder}/export/final/{export}").signatures


def test_a_model_dir_that_cannot_be_meant_is_refused():
    with pytest.raises(ValueError, match="Install what fsspec needs for this scheme"):
        make_estimator("nosuch://bucket/run")
    with pytest.raises(ValueError, match="one slash after its scheme, as pathlib writes it"):
        make_estimator(Path("s3://bucket/run"))
    fsspec.filesystem("memory").pipe_file("/taken/run", b"")
    with pytest.raises(NotADirectoryError, match="model_dir is a file"):
        make_estimator("memory://taken/run")
    with as_task({"chief": ["127.0.0.1:1"]}, "evaluator"), pytest.raises(ValueError, match="this process's memory"):
        make_estimator("memory://run")


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


def test_profiles_there():
    folder = f"memory://{uuid.uuid4().hex}/run"
    hook = est.ProfilerHook(save_steps=1, output_dir=f"{folder}/profiles")
    make_estimator(folder).train(input_fn, steps=2, hooks=[hook])
    assert names(f"{folder}/profiles") == ["timeline-2.json"]
    assert b"aten::" in fsspec.filesystem("memory").cat_file(f"{folder}/profiles/timeline-2.json")
