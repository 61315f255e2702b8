"""Model.save, load_model, save_weights and load_weights: one file, read by plain torch, by any strategy, or refused."""

import functools
import importlib.util
import io
import os
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import torchstrategy as ts
from torchstrategy import errors
from torchstrategy.fit import architecture

CPUS = ["cpu:0", "cpu:1"]
X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)


class TwoHeads(ts.Model):
    """A subclass with tied weights, a buffer that is not saved, and an attribute."""

    def __init__(self, width=4):
        super().__init__()
        self.width = width
        self.body = nn.Linear(3, width)
        self.first, self.second = nn.Linear(width, 1), nn.Linear(width, 1)
        self.second.weight = self.first.weight
        self.register_buffer("offset", torch.tensor(0.5), persistent=False)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return self.first(h) + self.second(h) + self.offset


def net():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))


def strategy_for(devices):
    return ts.MirroredStrategy(devices) if devices else ts.get_strategy()


def make(devices=None, model=None, optimizer="adam", **kwargs):
    with strategy_for(devices).scope():
        torch.manual_seed(1)
        made = ts.Model(net()) if model is None else model()
        made.compile(optimizer, "mse", **kwargs)
    return made


def train(model, epochs=1):
    return model.fit(X, Y, batch_size=4, epochs=epochs, shuffle=False, verbose=0).history["loss"]


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(first, second):
    assert first.keys() == second.keys()
    for name, value in first.items():
        torch.testing.assert_close(value, second[name], rtol=0, atol=0, msg=name)


# ------------------------------------------------------------------------------------------------------ weights


@pytest.mark.parametrize("devices", [None, CPUS])
def test_weights_are_those_of_plain_torch(tmp_path, devices):
    model = make(devices)
    train(model)
    model.save_weights(tmp_path / "weights.pt")
    plain = net()
    plain.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    assert_same(plain.state_dict(), weights(model.module))
    assert os.listdir(tmp_path) == ["weights.pt"]


def test_weights_of_plain_torch_are_loaded_on_every_replica(tmp_path):
    torch.save(net().state_dict(), tmp_path / "plain.pt")
    model, single = make(CPUS), make()
    train(model)
    for each in (model, single):
        each.load_weights(tmp_path / "plain")  # the suffix may be left out
        each.compile("sgd", "mse")
    # BatchNorm's statistics are each replica's own, so only the loading is compared.
    assert_same(weights(model), weights(single))
    seen = model.distribute_strategy.run(lambda: model.module[0].weight.detach().clone())
    first, second = model.distribute_strategy.experimental_local_results(seen)
    assert torch.equal(first, second)


def test_weights_in_torchs_old_format_are_loaded_or_called_damaged(tmp_path):
    plain, path = nn.Linear(3, 1), tmp_path / "old.pth"
    torch.save(plain.state_dict(), path, _use_new_zipfile_serialization=False)
    model = ts.Model(nn.Linear(3, 1))
    model.load_weights(path)
    assert torch.equal(model.module.weight, plain.weight)
    data = path.read_bytes()
    for end in (20, 100, len(data) - 3):
        path.write_bytes(data[:end])
        with pytest.raises(errors.DataLossError, match="is damaged or not a file of weights"):
            model.load_weights(path)
    assert torch.equal(model.module.weight, plain.weight)


def test_weights_of_a_prefix_are_a_checkpoint(tmp_path):
    model = make()
    train(model)
    for number in (1, 2):
        model.save_weights(tmp_path / f"ckpt-{number}")
    assert ts.train.latest_checkpoint(tmp_path) == str(tmp_path / "ckpt-2")
    state = ts.train.get_checkpoint_state(tmp_path)
    assert state.all_model_checkpoint_paths == [str(tmp_path / f"ckpt-{number}") for number in (1, 2)]
    plain = net()
    ts.train.Checkpoint(model=plain).restore(str(tmp_path / "ckpt-1")).assert_existing_objects_matched()
    assert_same(plain.state_dict(), weights(model.module))
    other = make(CPUS)
    other.load_weights(tmp_path / "ckpt-2")
    assert_same(weights(other), weights(model))


def test_weights_of_a_checkpoint_of_the_whole_model(tmp_path):
    model = make()
    path = ts.train.Checkpoint(model=model).save(str(tmp_path / "all"))
    other = make()
    nn.init.zeros_(other.module[0].weight)
    other.load_weights(path)
    assert_same(weights(other), weights(model))


def test_misfit_names_what_differs_and_changes_nothing(tmp_path):
    torch.save({"0.weight": torch.ones(4, 3), "0.bias": torch.ones(5), "tail": torch.ones(1)}, tmp_path / "w.pt")
    model = ts.Model(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)))
    before = weights(model)
    with pytest.raises(ValueError, match=r"lacks weights of the model: 1\.weight, 1\.bias") as caught:
        model.load_weights(tmp_path / "w.pt")
    assert "the model lacks: tail" in str(caught.value)
    assert "0.bias (the model has (4,), the file (5,))" in str(caught.value)
    with pytest.raises(ValueError, match="shapes differ"):
        model.load_weights(tmp_path / "w.pt", strict=False)
    assert_same(weights(model), before)
    torch.save({"0.weight": torch.ones(4, 3), "tail": torch.ones(1)}, tmp_path / "w.pt")
    model.load_weights(tmp_path / "w.pt", strict=False)
    assert torch.equal(model.module[0].weight, torch.ones(4, 3))
    assert torch.equal(model.module[1].weight, before["module.1.weight"])


def test_precision_is_converted(tmp_path):
    torch.save(
        {"weight": torch.full((1, 1), 0.1, dtype=torch.float64), "bias": torch.zeros(1).bfloat16()}, tmp_path / "w.pt"
    )
    model = ts.Model(nn.Linear(1, 1))
    model.load_weights(tmp_path / "w.pt")
    assert model.module.weight.dtype == torch.float32
    assert model.module.weight.item() == pytest.approx(0.1)


def test_no_file_damage_and_directories(tmp_path):
    model = ts.Model(nn.Linear(1, 1))
    with pytest.raises(errors.NotFoundError, match="There is no file"):
        model.load_weights(tmp_path / "none")
    with pytest.raises(errors.NotFoundError, match="latest_checkpoint"):
        model.load_weights(tmp_path)
    (tmp_path / "bad.pt").write_bytes(b"PK nonsense")
    with pytest.raises(errors.DataLossError, match=r"is not a file of weights: torch\.save writes no file that begins"):
        model.load_weights(tmp_path / "bad.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(errors.DataLossError, match="does not hold weights by name, but a list"):
        model.load_weights(tmp_path / "list.pt")
    ts.train.Checkpoint(step=torch.tensor(1)).write(str(tmp_path / "step"))
    with pytest.raises(errors.DataLossError, match=r"without a model: it holds \['step'\]"):
        model.load_weights(tmp_path / "step")
    with pytest.raises(IsADirectoryError, match="is a directory"):
        model.save(tmp_path)


def test_overwrite(tmp_path):
    model = ts.Model(nn.Linear(1, 1))
    for path in (tmp_path / "w.pt", tmp_path / "prefix"):
        model.save_weights(path)
        with pytest.raises(FileExistsError, match="overwrite=True"):
            model.save_weights(path, overwrite=False)
        model.save_weights(path)
    model.save(tmp_path / "m.pt")
    with pytest.raises(FileExistsError, match="overwrite=True"):
        model.save(tmp_path / "m.pt", overwrite=False)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    model = ts.Model(nn.Linear(1, 1))
    model.save(tmp_path / "m.pt")
    before = (tmp_path / "m.pt").read_bytes()

    def fail(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="the disk is full"):
        model.save(tmp_path / "m.pt")
    assert (tmp_path / "m.pt").read_bytes() == before
    assert os.listdir(tmp_path) == ["m.pt"]


def test_not_in_replica_context(tmp_path):
    model = make(CPUS)
    with pytest.raises(RuntimeError, match="save_weights was called in replica context"):
        model.distribute_strategy.run(lambda: model.save_weights(tmp_path / "w.pt"))


def test_variables_that_a_state_dict_lacks_are_refused(tmp_path):
    class WithVariable(ts.Model):
        def __init__(self):
            super().__init__()
            self.count = ts.Variable(0.0, trainable=False)

    with pytest.raises(ValueError, match="The variables count are plain attributes"):
        WithVariable().save_weights(tmp_path / "w.pt")


# -------------------------------------------------------------------------------------------------- whole models


@pytest.mark.parametrize("kind", [None, TwoHeads])
@pytest.mark.parametrize(("before", "after"), [(None, None), (None, CPUS), (CPUS, None), (CPUS, CPUS)])
def test_training_goes_on_exactly(tmp_path, kind, before, after):
    model = make(before, kind, metrics=["mae"])
    if kind is None:  # whose statistics depend on how batches are split
        model.module[1].eval()
    train(model, 2)
    model.save(tmp_path / "model.pt")
    with strategy_for(after).scope() as strategy:
        loaded = ts.models.load_model(tmp_path / "model.pt", trust=True)
    assert loaded.__class__ is model.__class__
    assert loaded.distribute_strategy is strategy
    assert loaded.iterations == model.iterations == 6
    assert_same(weights(loaded), weights(model))
    for each in (loaded, model):
        each.eval()
    assert loaded.metrics_names == model.metrics_names
    if kind is TwoHeads:
        loss, expected = train(loaded, 2), train(model, 2)
        if (before is None) == (after is None):
            assert loss == expected
            assert_same(weights(loaded), weights(model))
        assert loss == pytest.approx(expected)
        assert loaded.width == 4
        assert loaded.second.weight is loaded.first.weight
        assert loaded.offset.item() == 0.5


@pytest.mark.parametrize(
    "strategy", [lambda: ts.OneDeviceStrategy("cpu:0"), lambda: ts.experimental.CentralStorageStrategy(CPUS)]
)
def test_other_strategies(tmp_path, strategy):
    model = make(model=TwoHeads)
    train(model)
    model.save(tmp_path / "model.pt")
    with strategy().scope():
        loaded = ts.models.load_model(tmp_path / "model.pt", trust=True)
    assert train(loaded, 2) == pytest.approx(train(model, 2))
    loaded.save(tmp_path / "again.pt")
    assert train(ts.models.load_model(tmp_path / "again.pt", trust=True)) == pytest.approx(train(model))


def test_parameter_servers(tmp_path, local_cluster):
    model = make(model=TwoHeads)
    train(model)
    model.save(tmp_path / "model.pt")
    strategy = ts.ParameterServerStrategy(local_cluster(2, 2).resolver())
    with strategy.scope():
        loaded = ts.models.load_model(tmp_path / "model.pt", trust=True)
    assert loaded.iterations == 3
    expected = model.evaluate(X, Y, verbose=0)
    assert loaded.evaluate(X, Y, verbose=0) == pytest.approx(expected)
    loaded.fit(X, Y, epochs=2, verbose=0)  # one batch: the order of steps is known
    loaded.save(tmp_path / "again.pt")
    loaded.save_weights(tmp_path / "weights.pt")
    loaded.save_weights(tmp_path / "ckpt-1")
    model.fit(X, Y, epochs=2, verbose=0)
    again = ts.models.load_model(tmp_path / "again.pt", trust=True)
    assert again.iterations == model.iterations == 5
    assert train(again) == pytest.approx(train(model))
    for name in ("model.pt", "weights.pt", "ckpt-1"):
        loaded.load_weights(tmp_path / name)
        again.load_weights(tmp_path / name)
        assert loaded.evaluate(X, Y, verbose=0) == pytest.approx(again.evaluate(X, Y, verbose=0))


def test_batch_normalisation_and_adam_go_on_exactly(tmp_path):
    model = make(CPUS)
    train(model, 2)
    model.save(tmp_path / "model.pt")
    with ts.MirroredStrategy(CPUS).scope():
        loaded = ts.models.load_model(tmp_path / "model.pt", trust=True)
    assert train(loaded, 2) == train(model, 2)
    assert_same(weights(loaded), weights(model))


def test_optimizer_settings_and_groups(tmp_path):
    model = ts.Model(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)))
    groups = [
        {"params": model.module[1].parameters(), "lr": 0.05},
        {"params": model.module[0].parameters(), "weight_decay": 0.1},
    ]
    model.compile(torch.optim.SGD(groups, lr=0.01, momentum=0.9), "mse")
    train(model)
    for group in model.optimizer.param_groups:
        group["lr"] /= 2  # as a schedule does
    model.save(tmp_path / "model.pt")
    loaded = ts.models.load_model(tmp_path / "model.pt", trust=True)
    assert [group["lr"] for group in loaded.optimizer.param_groups] == [0.025, 0.005]
    assert train(loaded, 2) == train(model, 2)
    assert_same(weights(loaded), weights(model))


def test_a_factory_that_is_a_lambda_needs_no_pickle(tmp_path):
    model = make(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.02))
    model.save(tmp_path / "model.pt")
    assert ts.models.load_model(tmp_path / "model.pt", trust=True).optimizer.param_groups[0]["lr"] == 0.02


class Odd(torch.optim.SGD):
    """Its constructor takes something that is no default of its groups."""

    def __init__(self, parameters, special):
        super().__init__(parameters, lr=0.1)


@pytest.mark.parametrize("devices", [None, ["cpu:0", "cpu:1"]])
def test_an_optimizer_of_this_library(tmp_path, devices):
    model = make(devices, optimizer="ftrl")
    model.save(tmp_path / "model.pt")
    assert isinstance(ts.models.load_model(tmp_path / "model.pt", trust=True).optimizer, ts.optimizers.Ftrl)


def test_an_optimizer_that_can_not_be_made_again(tmp_path):
    model = ts.Model(nn.Linear(3, 1))
    model.compile(Odd(model.parameters(), 1), "mse")
    model.save(tmp_path / "model.pt")
    with pytest.raises(TypeError, match=r"can't make the optimizer Odd.*special.*compile=False"):
        ts.models.load_model(tmp_path / "model.pt", trust=True)
    assert torch.equal(
        ts.models.load_model(tmp_path / "model.pt", compile=False, trust=True).module.weight, model.module.weight
    )


@pytest.mark.slow
def test_what_the_model_has_seen_is_known(tmp_path):
    model = make()
    train(model)
    model.save(tmp_path / "model.pt")
    loaded = ts.models.load_model(tmp_path / "model.pt", compile=False, trust=True)
    loaded.export(tmp_path / "model.pt2")
    assert torch.export.load(tmp_path / "model.pt2").module()(X).shape == (12, 1)


def test_arguments_of_compile(tmp_path):
    model = ts.Model(nn.Linear(3, 2))
    model.compile(
        functools.partial(torch.optim.SGD, lr=0.1),
        nn.CrossEntropyLoss(label_smoothing=0.1),
        metrics=["accuracy", ts.metrics.SparseTopKCategoricalAccuracy(k=1, name="top")],
        steps_per_execution=2,
        amp="bf16",
    )
    labels = (X[:, 0] > 0).long()
    expected = model.evaluate(X, labels, verbose=0, return_dict=True)
    model.save(tmp_path / "model.pt")
    with ts.MirroredStrategy(CPUS).scope():
        loaded = ts.models.load_model(tmp_path / "model.pt", trust=True)
    assert loaded.evaluate(X, labels, verbose=0, return_dict=True) == pytest.approx(expected)


def test_without_compile(tmp_path):
    model = make()
    model.save(tmp_path / "model.pt")
    loaded = ts.models.load_model(tmp_path / "model.pt", compile=False, trust=True)
    assert not loaded.compiled
    never = ts.Model(nn.Linear(1, 1))
    never.save(tmp_path / "never.pt")
    assert not ts.models.load_model(tmp_path / "never.pt", trust=True).compiled


def test_weights_of_a_whole_model_are_read_without_running_code(tmp_path):
    model = make()
    model.save(tmp_path / "model.pt")
    other = make()
    nn.init.zeros_(other.module[0].weight)
    other.load_weights(tmp_path / "model.pt")
    assert_same(weights(other), weights(model))
    assert torch.load(tmp_path / "model.pt", weights_only=True)["format"] == "torchstrategy.model"


def test_weights_are_written_once(tmp_path):
    model = ts.Model(nn.Linear(500, 500))
    model.save(tmp_path / "model.pt")
    assert (tmp_path / "model.pt").stat().st_size < 1.1 * 4 * 501 * 500


def test_a_lambda_is_named(tmp_path):
    model = ts.Model(nn.Sequential(nn.Linear(1, 1), nn.ReLU()))
    model.module[1].function = lambda x: x
    with pytest.raises(TypeError, match=r"model\.module\.1\.function can't be saved: it is a lambda"):
        model.save(tmp_path / "model.pt")
    plain = ts.Model(nn.Linear(1, 1))
    plain.compile("sgd", loss=lambda y_true, y_pred: (y_true - y_pred).square())
    with pytest.raises(TypeError, match=r"compile\['loss'\] can't be saved: it is a lambda"):
        plain.save(tmp_path / "model.pt")
    assert os.listdir(tmp_path) == []


def test_a_local_class_is_named(tmp_path):
    class Local(nn.Module):
        pass

    model = ts.Model(nn.Sequential(nn.Linear(1, 1), Local()))
    with pytest.raises(TypeError, match=r"model\.module\.1 can't be saved.*a class defined in a function"):
        model.save(tmp_path / "model.pt")


@pytest.mark.slow
def test_a_class_of_another_program_is_named(tmp_path):
    program = """
        import sys, torch
        import torchstrategy as ts

        class Net(torch.nn.Module):
            def forward(self, x):
                return x

        ts.Model(Net()).save(sys.argv[1])
        ts.models.load_model(sys.argv[1], trust=True)  # in the program that has the class
        """
    path = str(tmp_path / "model.pt")
    subprocess.run([sys.executable, "-W", "error", "-c", textwrap.dedent(program), path], check=True, timeout=60)
    with pytest.raises(ImportError, match=r"Net.*__main__.*another one now.*load_weights"):
        ts.models.load_model(path, trust=True)


def test_other_files_and_versions(tmp_path):
    model = ts.Model(nn.Linear(1, 1))
    model.save_weights(tmp_path / "w.pt")
    with pytest.raises(errors.DataLossError, match=r"w\.pt holds weights only.* by default.*model\.load_weights\."):
        ts.models.load_model(tmp_path / "w.pt", trust=True)
    (tmp_path / "w.safetensors").touch()
    with pytest.raises(errors.DataLossError, match=r"w\.safetensors holds weights only"):
        ts.models.load_model(tmp_path / "w.safetensors", trust=True)
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(errors.DataLossError, match=r"not written by Model\.save"):
        ts.models.load_model(tmp_path / "list.pt", trust=True)
    model.save(tmp_path / "m.pt")
    content = torch.load(tmp_path / "m.pt", weights_only=True)
    torch.save({**content, "version": 99}, tmp_path / "m.pt")
    with pytest.raises(errors.DataLossError, match="format version 99"):
        ts.models.load_model(tmp_path / "m.pt", trust=True)
    with pytest.raises(errors.NotFoundError):
        ts.models.load_model(tmp_path / "none.pt", trust=True)


# ---------------------------------------------------------------------------------------------- several processes


def save_and_load(folder):
    with ts.MultiWorkerMirroredStrategy().scope() as strategy:
        torch.manual_seed(strategy.workers.rank)  # the chief's weights count
        model = ts.Model(nn.Linear(3, 1))
        model.compile("adam", "mse")
    train(model)
    model.save(f"{folder}/model.pt")
    model.save_weights(f"{folder}/weights.pt")
    model.save_weights(f"{folder}/ckpt-1")
    with strategy.scope():
        loaded = ts.models.load_model(f"{folder}/model.pt", trust=True)
    losses = train(model), train(loaded)
    model.load_weights(f"{folder}/weights.pt")
    return losses, model.module.weight.tolist(), sorted(os.listdir(folder))


def refuse(folder):
    with ts.MultiWorkerMirroredStrategy().scope() as strategy:
        model = ts.Model(nn.Linear(3, 1))
    rank = strategy.workers.rank
    model.save_weights(f"{folder}/w.pt")
    reasons = []
    for attempt in (
        lambda: model.save(f"{folder}/w.pt", overwrite=False),
        lambda: model.load_weights(f"{folder}/w.pt" if rank == 0 else f"{folder}/none.pt"),
    ):
        try:
            attempt()
        except (RuntimeError, OSError) as error:
            reasons.append(f"{type(error).__name__}: {error}")
    return reasons


def test_processes_save_and_load_as_one(process_pool, tmp_path):
    first, second = process_pool(2).run(save_and_load, str(tmp_path))
    (own, loaded), values, files = first
    assert first == second
    assert own == loaded
    assert files == ["checkpoint", "ckpt-1.pt", "model.pt", "weights.pt"]
    plain = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert plain["weight"].tolist() == values
    one = ts.models.load_model(tmp_path / "model.pt", trust=True)
    assert train(one) == pytest.approx(own)


def test_processes_fail_as_one(process_pool, tmp_path):
    first, second = process_pool(2).run(refuse, str(tmp_path))
    for reasons in (first, second):
        assert "Rank 0 could not write" in reasons[0]
        assert "overwrite=True" in reasons[0]
    assert "Rank 1 could not restore" in first[1]
    assert second[1].startswith("NotFoundError")


def test_files_may_name_modules_of_the_library_as_they_were_called_before():
    unpickler = architecture._Unpickler(io.BytesIO(), [], {})
    assert unpickler.find_class("torchstrategy.training.model", "Model") is ts.Model
    assert unpickler.find_class("torchstrategy.callbacks.history", "History") is ts.callbacks.History
    assert unpickler.find_class("torchstrategy.metrics.base", "Metric") is ts.metrics.Metric
    assert unpickler.find_class("torchstrategy.metrics.mean_errors", "MeanSquaredError") is ts.metrics.MeanSquaredError
    moved = unpickler.find_class("torchstrategy.metrics.mean", "RootMeanSquaredError")
    assert moved is ts.metrics.RootMeanSquaredError
    assert unpickler.find_class("torchstrategy.metrics.mean", "Mean") is ts.metrics.Mean
    column = unpickler.find_class("torchstrategy.estimator.feature_column.crossed", "CrossedColumn")
    assert isinstance(ts.feature_column.crossed_column(["a", "b"], 3), column)
    for before, now in architecture._MOVED.items():
        assert importlib.util.find_spec(now) is not None
        assert importlib.util.find_spec(before) is None or before == "torchstrategy.callbacks"  # a public name
