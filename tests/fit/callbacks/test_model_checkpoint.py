"""ModelCheckpoint: what is saved, when, and under which name."""

import os

import pytest
import torch
from torch import nn

import torchstrategy as ts
from torchstrategy.callbacks import Callback, LambdaCallback, ModelCheckpoint
from torchstrategy.fit.callbacks.model_checkpoint import FINISHED

X = torch.arange(12.0).reshape(6, 2) / 10
Y = X.sum(1, keepdim=True)


class Values(Callback):
    """Puts chosen values into the logs of epochs."""

    def __init__(self, **values):
        super().__init__()
        self.values = values

    def on_epoch_end(self, epoch, logs=None):
        for name, values in self.values.items():
            logs[name] = values[epoch]


def fit(*callbacks, epochs=3, devices=None, **kwargs):
    with (ts.MirroredStrategy(devices) if devices else ts.get_strategy()).scope():
        torch.manual_seed(0)
        model = ts.Model(nn.Linear(2, 1))
        model.compile("sgd", "mse", metrics=["mae"])
    arguments = {"batch_size": 2, "epochs": epochs, "verbose": 0, "shuffle": False, **kwargs}
    return model, model.fit(X, Y, callbacks=list(callbacks), **arguments)


def weights_in(path):
    """Return the weights of a checkpoint."""
    return ts.train.load_variable(path, "model.weight")


def test_names_are_formatted_with_the_logs(tmp_path):
    values = Values(val_loss=[0.5, 0.25, 0.125])
    fit(values, ModelCheckpoint(tmp_path / "{epoch:02d}-{val_loss:.4f}.pt"))
    assert sorted(os.listdir(tmp_path)) == ["01-0.5000.pt", "02-0.2500.pt", "03-0.1250.pt"]


def test_whole_models_are_saved_and_loaded(tmp_path):
    model, _ = fit(ModelCheckpoint(tmp_path / "model-{epoch}.pt", save_weights_only=False), devices=["cpu:0", "cpu:1"])
    loaded = ts.models.load_model(tmp_path / "model-3.pt", trust=True)
    assert loaded.iterations == model.iterations == 9
    assert torch.equal(loaded.module.weight, model.module.weight)
    assert not torch.equal(ts.models.load_model(tmp_path / "model-2.pt", trust=True).module.weight, model.module.weight)


@pytest.mark.parametrize("devices", [None, ["cpu:0", "cpu:1"]])
def test_weights_only_are_checkpoints(tmp_path, devices):
    model, _ = fit(ModelCheckpoint(tmp_path / "ckpt-{epoch}", save_weights_only=True), devices=devices)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "ckpt-1.pt", "ckpt-2.pt", "ckpt-3.pt", FINISHED]
    latest = ts.train.latest_checkpoint(tmp_path)
    assert latest == str(tmp_path / "ckpt-3")
    assert torch.equal(weights_in(latest), model.module.weight)
    assert ts.train.load_variable(latest, "iterations").item() == 9
    other, _ = fit(epochs=1)
    other.load_weights(latest)
    assert torch.equal(other.module.weight, model.module.weight)


def test_weights_only_in_a_file_of_plain_torch(tmp_path):
    model, _ = fit(ModelCheckpoint(tmp_path / "weights.pt", save_weights_only=True))
    assert torch.equal(torch.load(tmp_path / "weights.pt", weights_only=True)["weight"], model.module.weight)


def test_every_so_many_batches(tmp_path):
    """Batches are counted over the ends of epochs; there are 3 in each."""
    fit(ModelCheckpoint(tmp_path / "{epoch}-{batch}.pt", save_freq=2), epochs=3)
    assert sorted(os.listdir(tmp_path)) == ["1-2.pt", "2-1.pt", "2-3.pt", "3-2.pt"]


def test_every_so_many_batches_with_values_of_the_logs(tmp_path):
    save = ModelCheckpoint(tmp_path / "{batch}-{loss:.3f}.pt", save_freq=3)
    seen = []
    fit(LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(logs["loss"])), save, epochs=1)
    assert os.listdir(tmp_path) == [f"3-{seen[-1]:.3f}.pt"]
    assert save.log_interval == 3
    assert ModelCheckpoint(tmp_path / "{batch}.pt", save_freq=3).log_interval is None


def test_several_steps_in_one_execution(tmp_path):
    with ts.get_strategy().scope():
        model = ts.Model(nn.Linear(2, 1))
        model.compile("sgd", "mse", steps_per_execution=2)
    save = ModelCheckpoint(tmp_path / "{epoch}-{batch}.pt", save_freq=2)
    model.fit(X, Y, batch_size=2, epochs=2, callbacks=[save], verbose=0)
    assert sorted(os.listdir(tmp_path)) == ["1-2.pt", "2-2.pt"]


@pytest.mark.parametrize(
    ("arguments", "values", "saved"),
    [
        ({"monitor": "loss_of_mine", "mode": "min"}, [3.0, 4.0, 2.0], ["1", "3"]),
        ({"monitor": "score", "mode": "max"}, [3.0, 4.0, 2.0], ["1", "2"]),
        ({"monitor": "val_loss"}, [3.0, 3.0, 2.0], ["1", "3"]),
        ({"monitor": "val_accuracy"}, [0.5, 0.4, 0.6], ["1", "3"]),
        ({"monitor": "val_loss", "initial_value_threshold": 2.5}, [3.0, 2.6, 2.0], ["3"]),
        ({"monitor": "val_loss"}, [float("nan"), 1.0, float("nan")], ["2"]),
    ],
)
def test_only_the_best(tmp_path, arguments, values, saved):
    save = ModelCheckpoint(tmp_path / "{epoch}", save_best_only=True, save_weights_only=True, **arguments)
    fit(Values(**{save.monitor: values}), save)
    assert sorted(name[:-3] for name in os.listdir(tmp_path) if name.endswith(".pt")) == saved


def test_the_best_is_remembered_by_the_next_fit_and_after_an_interruption(tmp_path):
    save = ModelCheckpoint(tmp_path / "{epoch}.pt", monitor="val_loss", save_best_only=True)
    fit(Values(val_loss=[1.0]), save, epochs=1)
    fit(Values(val_loss=[2.0, 0.5]), save, epochs=2)
    assert save.best == 0.5
    other = ModelCheckpoint(tmp_path / "{epoch}.pt", monitor="val_loss", save_best_only=True)
    other.load_state_dict(save.state_dict())
    assert other.best == 0.5


def test_best_of_what_is_not_in_the_logs(tmp_path):
    with pytest.warns(UserWarning, match=r"monitors 'val_loss', which is not in the logs.*The logs have: loss, mae"):
        fit(ModelCheckpoint(tmp_path / "{epoch}.pt", save_best_only=True))
    assert len(os.listdir(tmp_path)) == 3


def test_mode_that_can_not_be_told():
    with pytest.raises(ValueError, match=r"can't tell whether .*The logs have: loss, mae; with valid"):
        fit(ModelCheckpoint("never", monitor="gizmo", save_best_only=True))
    fit(ModelCheckpoint(os.devnull + "-{epoch}", monitor="gizmo", save_freq=100))  # nothing is compared


def test_names_that_are_not_in_the_logs(tmp_path):
    with pytest.raises(ValueError, match=r"not in the logs: val_acc\. There are: epoch, loss, mae"):
        fit(ModelCheckpoint(tmp_path / "{epoch}-{val_acc:.2f}"))
    with pytest.raises(ValueError, match="not in the logs: batch"):
        fit(ModelCheckpoint(tmp_path / "{batch}"))
    for path in ("{}.pt", "{0}.pt"):
        with pytest.raises(ValueError, match=r"names in braces .*must be those of logs"):
            ModelCheckpoint(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"save_freq": 0}, "save_freq"), ({"save_freq": "batch"}, "save_freq"), ({"mode": "best"}, "mode")],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        ModelCheckpoint("path", **arguments)


def test_lines(tmp_path, capsys):
    save = ModelCheckpoint(tmp_path / "m.pt", monitor="val_loss", save_best_only=True, verbose=1)
    fit(Values(val_loss=[1.0, 0.5, 0.75]), save)
    path = tmp_path / "m.pt"
    assert capsys.readouterr().out.splitlines() == [
        "Epoch 1: val_loss improved from inf to 1.00000",
        f"Epoch 1: saving the model to {path}",
        "Epoch 2: val_loss improved from 1.00000 to 0.50000",
        f"Epoch 2: saving the model to {path}",
        "Epoch 3: val_loss did not improve from 0.50000",
    ]


def test_what_tells_evaluators_of_the_end(tmp_path):
    there = []
    look = LambdaCallback(on_epoch_end=lambda epoch, logs: there.append((tmp_path / FINISHED).exists()))
    for _ in range(2):
        fit(ModelCheckpoint(tmp_path / "ckpt-{epoch}", save_weights_only=True), look, epochs=1)
        assert (tmp_path / FINISHED).exists()
    assert there == [False, False]


def test_says_beforehand_which_batches_are_saved():
    save = ModelCheckpoint("path", save_freq=3)
    assert [batch for batch in range(5) if save.saves_after(batch)] == [2, 3, 4]
    save.load_state_dict({"best": None, "last_batch": 3, "num_batches": 2})
    assert save.saves_after(0)
    assert not ModelCheckpoint("path").saves_after(10)


def save_with_processes(folder):
    with ts.MultiWorkerMirroredStrategy().scope() as strategy:
        model = ts.Model(nn.Linear(2, 1))
        model.compile("sgd", "mse")
    best = ModelCheckpoint(f"{folder}/best.pt", monitor="loss", save_best_only=True, save_weights_only=False)
    weights = ModelCheckpoint(
        f"{folder}/weights/ckpt-{{epoch}}-{{batch}}-loss{{loss:.3f}}", save_weights_only=True, save_freq=2
    )
    model.fit(X, Y, batch_size=2, epochs=2, verbose=0, shuffle=False, callbacks=[best, weights])
    strategy.workers.exchange("wait", None)
    return model.module.weight.tolist(), sorted(os.listdir(f"{folder}/weights"))


@pytest.mark.end_to_end
def test_processes_save_as_one(process_pool, tmp_path):
    first, second = process_pool(2).run(save_with_processes, str(tmp_path))
    assert first == second
    values, names = first
    assert [name.split("-loss")[0] for name in names] == ["checkpoint", "ckpt-1-2", "ckpt-2-1", "ckpt-2-3", FINISHED]
    assert ts.models.load_model(tmp_path / "best.pt", trust=True).module.weight.tolist() == values
