"""Saving and restoring: every kind of object, every mismatch, and any strategy into any other."""

import os

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn

import torchstrategy as ts
from torchstrategy.base.log import logger
from torchstrategy.errors import DataLossError, InvalidArgumentError, NotFoundError


def mirrored(num_replicas):
    return ts.MirroredStrategy(devices=[f"cpu:{i}" for i in range(num_replicas)])


def make_model(seed=0, width=3):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, width), nn.BatchNorm1d(width), nn.Linear(width, 1))


def make_all(seed=0):
    model = make_model(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2, 3], gamma=0.5),
        "scaler": torch.amp.GradScaler("cpu", init_scale=4.0),
        "metric": ts.metrics.Mean(),
        "step": torch.tensor(0),
    }


def train(strategy, objects, num_steps=3):
    """Run the same steps with any strategy: the losses' sum over replicas is the global mean."""
    inputs = torch.linspace(-1, 1, 16).reshape(8, 2)

    def step(x):
        optimizer, scaler = objects["optimizer"], objects["scaler"]
        optimizer.zero_grad()
        losses = objects["model"].eval()(x).square().mean(1)
        objects["metric"].update_state(losses)
        scaler.scale(ts.compute_average_loss(losses, global_batch_size="actual")).backward()
        scaler.step(optimizer)
        scaler.update()

    dataset = strategy.experimental_distribute_dataset(torch.utils.data.TensorDataset(inputs), batch_size=8)
    for _ in range(num_steps):
        for (batch,) in dataset:
            strategy.run(step, args=(batch,))
        objects["scheduler"].step()
        objects["step"].add_(1)


def state_of(objects):
    optimizer = objects["optimizer"].state_dict()
    return {
        **{f"model.{k}": v.clone() for k, v in objects["model"].state_dict().items()},
        "exp_avg": optimizer["state"][0]["exp_avg"].clone(),
        "lr": torch.tensor(optimizer["param_groups"][0]["lr"]),
        "last_epoch": torch.tensor(objects["scheduler"].last_epoch),
        "metric": objects["metric"].result(),
        "step": objects["step"].clone(),
    }


def assert_same(first, second):
    assert first.keys() == second.keys()
    for key in first:
        torch.testing.assert_close(first[key], second[key], rtol=1e-5, atol=1e-6, msg=lambda m, key=key: f"{key}: {m}")


@pytest.fixture
def prefix(tmp_path):
    return str(tmp_path / "ck")


def test_numbers_and_files(prefix, tmp_path):
    value = torch.tensor(1.0)
    checkpoint = ts.train.Checkpoint(value=value)
    assert checkpoint.value is value
    assert ts.train.latest_checkpoint(tmp_path) is None
    assert checkpoint.write(prefix + "-w") == prefix + "-w"
    assert os.listdir(tmp_path) == ["ck-w.pt"]
    assert ts.train.latest_checkpoint(tmp_path) is None
    assert checkpoint.save_counter == 0
    assert [checkpoint.save(prefix), checkpoint.save(tmp_path / "ck")] == [prefix + "-1", prefix + "-2"]
    assert sorted(os.listdir(tmp_path)) == ["checkpoint", "ck-1.pt", "ck-2.pt", "ck-w.pt"]
    assert ts.train.latest_checkpoint(tmp_path) == prefix + "-2"
    assert checkpoint.save_counter == 2

    other = ts.train.Checkpoint(value=value)
    other.restore(prefix + "-1.pt")
    assert other.save_counter == 1
    assert other.save(prefix) == prefix + "-2"


def test_counter_of_what_was_written(prefix):
    value = torch.tensor(1.0)
    never_saved = ts.train.Checkpoint(value=value).write(prefix + "-w")
    saver = ts.train.Checkpoint(value=value)
    saver.save(prefix)
    saver.save(prefix)
    saved_before = saver.write(prefix + "-x")

    checkpoint = ts.train.Checkpoint(value=value)
    for path in (never_saved, saved_before, prefix + "-2"):
        checkpoint.read(path).assert_consumed()
        assert checkpoint.save_counter == 0
    checkpoint.restore(prefix + "-1").assert_consumed()
    checkpoint.restore(never_saved).assert_consumed()  # which holds no counter
    assert checkpoint.save_counter == 1
    checkpoint.restore(saved_before).assert_consumed()
    assert checkpoint.save_counter == 2
    assert checkpoint.save(prefix) == prefix + "-3"


@pytest.mark.parametrize("method", ["save", "write", "read", "restore"])
def test_options(prefix, method):
    checkpoint = ts.train.Checkpoint(value=torch.tensor(1.0))
    checkpoint.write(prefix)
    getattr(checkpoint, method)(prefix, options=None)
    with pytest.raises(ValueError, match="options must be None or ts"):
        getattr(checkpoint, method)(prefix, options={})


def test_directory_can_be_moved(tmp_path):
    (tmp_path / "old").mkdir()
    ts.train.Checkpoint(value=torch.tensor(1.0)).save(tmp_path / "old" / "ck")
    os.rename(tmp_path / "old", tmp_path / "new")
    assert ts.train.latest_checkpoint(tmp_path / "new") == str(tmp_path / "new" / "ck-1")


def test_the_file_holds_plain_data(prefix):
    ts.train.Checkpoint(**make_all()).write(prefix)
    content = torch.load(prefix + ".pt", weights_only=True)
    assert content["objects"]["model"]["kind"] == "module"


@pytest.mark.parametrize("restored_with", ["default", 1, 3])
@pytest.mark.parametrize("saved_with", ["default", 1, 2])
def test_any_strategy_into_any_other(prefix, saved_with, restored_with):
    objects = {}
    strategies = {key: ts.get_strategy() if key == "default" else mirrored(key) for key in {saved_with, restored_with}}
    with strategies[saved_with].scope():
        objects = make_all()
    train(strategies[saved_with], objects)
    path = ts.train.Checkpoint(**objects).save(prefix)
    before = state_of(objects)
    train(strategies[saved_with], objects, 2)
    after = state_of(objects)

    with strategies[restored_with].scope():
        fresh = make_all(seed=1)
    if restored_with == 3:  # restored into replicas that exist already
        train(strategies[restored_with], fresh, 1)
    ts.train.Checkpoint(**fresh).restore(path).assert_consumed()
    assert_same(state_of(fresh), before)
    train(strategies[restored_with], fresh, 2)
    assert_same(state_of(fresh), after)


def test_every_replica_is_restored(prefix):
    strategy = mirrored(2)
    with strategy.scope():
        model = make_model()
    strategy.run(lambda: model.eval())
    checkpoint = ts.train.Checkpoint(model=model)
    checkpoint.write(prefix)
    saved = model[0].weight.clone()
    with torch.no_grad():
        model[0].weight.zero_()
    checkpoint.restore(prefix)
    for weight in strategy.experimental_local_results(strategy.run(lambda: model[0].weight.clone())):
        assert torch.equal(weight, saved)


def test_nested_objects(prefix):
    def make(offset):
        inner = ts.train.Checkpoint(value=torch.tensor(1.0 + offset))
        values = {"list": [torch.tensor(2.0 + offset), (torch.tensor(3.0 + offset),)], "inner": inner}
        return ts.train.Checkpoint(nn.Linear(1, 1), values=values), values

    saved, _ = make(0)
    saved.write(prefix)
    fresh, values = make(10)
    fresh.restore(prefix).assert_consumed()
    assert [values["list"][0].item(), values["list"][1][0].item(), values["inner"].value.item()] == [2.0, 3.0, 1.0]
    assert torch.equal(saved.root.weight, fresh.root.weight)


def test_objects_added_later(prefix):
    checkpoint = ts.train.Checkpoint()
    checkpoint.value = torch.tensor(5.0)
    checkpoint.write(prefix)
    other = ts.train.Checkpoint(value=torch.tensor(0.0))
    other.restore(prefix).assert_consumed()
    assert other.value.item() == 5.0
    with pytest.raises(AttributeError, match="no object 'missing'"):
        _ = checkpoint.missing


def test_generator(prefix):
    generator = torch.Generator().manual_seed(3)
    checkpoint = ts.train.Checkpoint(generator=generator)
    checkpoint.write(prefix)
    first = torch.rand(4, generator=generator)
    checkpoint.restore(prefix)
    assert torch.equal(torch.rand(4, generator=generator), first)


def test_compiled_modules_keep_their_names(prefix):
    model = make_model()
    ts.train.Checkpoint(model=torch.compile(model, backend="eager")).write(prefix)
    fresh = make_model(seed=1)
    ts.train.Checkpoint(model=fresh).restore(prefix).assert_consumed()
    assert torch.equal(fresh[0].weight, model[0].weight)
    fresh = nn.Sequential(torch.compile(make_model(seed=2), backend="eager"))
    ts.train.Checkpoint(model=nn.Sequential(model)).write(prefix)
    ts.train.Checkpoint(model=fresh).restore(prefix).assert_consumed()
    assert torch.equal(fresh[0]._orig_mod[0].weight, model[0].weight)


def test_extra_state(prefix):
    class WithExtraState(nn.Module):
        def __init__(self, count):
            super().__init__()
            self.count = count

        def get_extra_state(self):
            return {"count": self.count}

        def set_extra_state(self, state):
            self.count = state["count"]

    ts.train.Checkpoint(model=WithExtraState(3)).write(prefix)
    fresh = WithExtraState(0)
    ts.train.Checkpoint(model=fresh).restore(prefix).assert_consumed()
    assert fresh.count == 3


def test_views_are_saved_without_their_buffer(prefix):
    ts.train.Checkpoint(value=torch.zeros(1_000_000)[:3]).write(prefix)
    assert os.path.getsize(prefix + ".pt") < 10_000


def test_metric_states_of_all_replicas(prefix):
    def make(strategy):
        with strategy.scope():
            return {"mean": ts.metrics.Mean(), "all": torchmetrics.MetricCollection([torchmetrics.CatMetric()])}

    def update(metrics):
        value = ts.get_replica_context().replica_id_in_sync_group + 1.0
        metrics["mean"].update_state(value)
        metrics["all"].update(value)

    strategy = mirrored(3)
    metrics = make(strategy)
    strategy.run(update, args=(metrics,))
    ts.train.Checkpoint(**metrics).write(prefix)
    for other in (mirrored(2), ts.get_strategy(), strategy):
        fresh = metrics if other is strategy else make(other)
        other.run(update, args=(fresh,))
        ts.train.Checkpoint(**fresh).restore(prefix).assert_consumed()
        assert fresh["mean"].result().item() == 2.0
        other.run(update, args=(fresh,))
        assert fresh["all"].compute()["CatMetric"].sort().values.tolist() == sorted(
            [1.0, 2.0, 3.0, *(i + 1.0 for i in range(other.num_replicas_in_sync))]
        )


def test_metric_states_that_one_replica_cannot_go_on_with(prefix):
    strategy = mirrored(2)
    with strategy.scope():
        metric = torchmetrics.PearsonCorrCoef()
    strategy.run(lambda: metric.update(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 3.0])))
    checkpoint = ts.train.Checkpoint(metric=metric)
    with pytest.raises(ValueError, match=r"PearsonCorrCoef.*Call compute\(\) and reset\(\) before saving"):
        checkpoint.write(prefix)
    metric.reset()
    checkpoint.write(prefix)


class TestStatus:
    @pytest.fixture
    def saved(self, prefix):
        ts.train.Checkpoint(v=torch.tensor(4.0), model=make_model()).write(prefix)
        return prefix

    def test_equal(self, saved):
        status = ts.train.Checkpoint(v=torch.tensor(0.0), model=make_model(1)).restore(saved)
        for method in (
            "assert_consumed",
            "assert_existing_objects_matched",
            "assert_nontrivial_match",
            "expect_partial",
        ):
            assert getattr(status, method)() is status

    def test_checkpoint_has_more(self, saved):
        status = ts.train.Checkpoint(v=torch.tensor(0.0)).restore(saved)
        with pytest.raises(ValueError, match="values that no object has: model"):
            status.assert_consumed()
        status.assert_existing_objects_matched()

    def test_objects_have_more(self, saved):
        v, u = torch.tensor(0.0), torch.tensor(7.0)
        status = ts.train.Checkpoint(v=v, u=u, model=make_model(1)).restore(saved)
        assert (v.item(), u.item()) == (4.0, 7.0)
        for method in (status.assert_consumed, status.assert_existing_objects_matched):
            with pytest.raises(ValueError, match="lacks values of the objects, which stay as they were: u"):
                method()
        status.assert_nontrivial_match()

    def test_modules_are_matched_value_by_value(self, saved):
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, affine=False), nn.Linear(3, 1), nn.Linear(1, 1))
        untouched = model[3].weight.clone()
        status = ts.train.Checkpoint(model=model).restore(saved)
        assert set(status.missing) == {"model.3.weight", "model.3.bias"}
        assert set(status.unused) == {"model.1.weight", "model.1.bias", "v"}
        assert torch.equal(model[3].weight, untouched)
        assert torch.equal(model[0].weight, make_model()[0].weight)

    def test_a_misspelt_name_is_named_with_what_it_might_be(self, saved, monkeypatch):
        lines = []
        monkeypatch.setattr(logger, "warning", lambda text, *args: lines.append(text % args))
        checkpoint = ts.train.Checkpoint(vv=torch.tensor(0.0), model=make_model(1))
        both = r"lacks values of the objects, which stay as they were: vv\. It holds values of v, which no object has\."
        with pytest.raises(ValueError, match=both):
            checkpoint.restore(saved).assert_consumed()
        checkpoint.restore(saved).expect_partial()
        status = checkpoint.restore(saved)
        assert lines == []
        del status
        assert len(lines) == 1
        assert "lacks values of vv, which stayed as they were. It holds values of v, which no object has." in lines[0]
        assert "call expect_partial()" in lines[0]
        ts.train.Checkpoint(v=torch.tensor(0.0)).restore(saved)  # a part of it: nothing of the program is missing
        assert len(lines) == 1

    def test_nothing_matches(self, saved, monkeypatch):
        lines = []
        monkeypatch.setattr(logger, "warning", lambda text, *args: lines.append(text % args))
        status = ts.train.Checkpoint(other=torch.tensor(0.0)).restore(saved)
        (line,) = lines
        assert line.startswith("Nothing in the checkpoint ")
        with pytest.raises(ValueError, match=r"Nothing in the checkpoint .* matches"):
            status.assert_nontrivial_match()
        status.expect_partial()

    def test_no_path(self):
        status = ts.train.Checkpoint(v=torch.tensor(0.0)).restore(None)
        assert type(status).__name__ == "InitializationOnlyStatus"
        for method in (
            status.assert_consumed,
            status.assert_existing_objects_matched,
            status.assert_nontrivial_match,
        ):
            with pytest.raises(ValueError, match="nothing was restored"):
                method()
        assert status.expect_partial() is status


class TestMismatches:
    """Each is an error that changes nothing."""

    @pytest.fixture
    def check(self, prefix):
        def check(saved, fresh, error, match):
            ts.train.Checkpoint(first=torch.tensor(1.0), obj=saved, last=torch.tensor(1.0)).write(prefix)
            first, last = torch.tensor(0.0), torch.tensor(0.0)
            with pytest.raises(error, match=match):
                ts.train.Checkpoint(first=first, obj=fresh, last=last).restore(prefix)
            assert (first.item(), last.item()) == (0.0, 0.0)

        return check

    def test_tensor_shape(self, check):
        check(torch.zeros(2), torch.zeros(3), ValueError, r"obj has shape \(3,\), .* has shape \(2,\)")

    def test_tensor_dtype(self, check):
        check(torch.tensor(1), torch.tensor(1.0), InvalidArgumentError, "dtype torch.float32, .* dtype torch.int64")

    def test_module_shape(self, check):
        check(make_model(), make_model(width=4), ValueError, r"obj\.0\.weight has shape \(4, 2\)")

    def test_kind(self, check):
        check(nn.Linear(1, 1), torch.tensor(1.0), ValueError, "obj is a tensor, but the checkpoint holds a module")

    def test_optimizer_class(self, check):
        parameters = [nn.Parameter(torch.zeros(2))]
        check(torch.optim.SGD(parameters), torch.optim.Adam(parameters), ValueError, "of class SGD, .* class Adam")

    def test_optimizer_parameters(self, check):
        one, two = [nn.Parameter(torch.zeros(2))], [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]
        other_shape = [nn.Parameter(torch.zeros(5))]
        sgd = torch.optim.SGD
        check(sgd(one), sgd(two), ValueError, "It has 2 parameters, the checkpoint's has 1")
        check(
            sgd(one), sgd(other_shape), ValueError, r"parameter 0 has shape \(5,\), the checkpoint's has shape \(2,\)"
        )
        groups = [{"params": one}, {"params": two}]
        check(sgd(one), sgd(groups), ValueError, "Parameter group 1 of obj")
        empty = [{"params": one}, {"params": []}]
        check(sgd(one), sgd(empty), ValueError, "obj has 2 parameter groups, the checkpoint's has 1: one without")

    def test_scheduler_class(self, check):
        schedulers = torch.optim.lr_scheduler
        sgd = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1)
        step, cosine = schedulers.StepLR(sgd, 2), schedulers.CosineAnnealingLR(sgd, 9)
        check(step, cosine, ValueError, "The checkpoint's obj is a StepLR, the object is a CosineAnnealingLR")
        chains = [schedulers.ChainedScheduler([part]) for part in (step, cosine)]
        check(
            *chains,
            ValueError,
            r"a ChainedScheduler\(StepLR\), the object is a ChainedScheduler\(Cosine",
        )

    @pytest.mark.parametrize("is_distributed", [True, False])
    def test_position_of_other_data(self, check, is_distributed):
        data = [ts.data.Dataset.range(8).batch(4), ts.data.Dataset.range(8).batch(2).batch(2)]
        if is_distributed:
            loader = torch.utils.data.DataLoader(list(range(8)), batch_size=4)
            data = [mirrored(2).experimental_distribute_dataset(given) for given in (data[0], loader)]
        check(*data, InvalidArgumentError, "The state (is of a dataset that was read as|belongs to another pipeline)")

    def test_metric(self, check):
        saved, fresh = torchmetrics.CatMetric(), torchmetrics.SumMetric()
        check(saved, fresh, ValueError, "has the states .*sum_value")
        matrix = torchmetrics.classification.MulticlassConfusionMatrix
        check(
            matrix(2),
            matrix(3),
            ValueError,
            r"expected a tensor of shape \(3, 3\), received a tensor of shape \(2, 2\)",
        )

    def test_files(self, prefix, tmp_path):
        value = torch.tensor(0.0)
        checkpoint = ts.train.Checkpoint(value=value)
        with pytest.raises(NotFoundError):
            checkpoint.restore(prefix)
        with pytest.raises(DataLossError, match="is a directory"):
            checkpoint.restore(tmp_path)
        path = checkpoint.save(prefix)
        value.fill_(7.0)
        os.truncate(path + ".pt", 500)
        with pytest.raises(DataLossError):
            checkpoint.restore(path)
        assert value.item() == 7.0


def test_scaler_that_was_disabled(prefix):
    ts.train.Checkpoint(scaler=torch.amp.GradScaler("cpu", enabled=False)).write(prefix)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    status = ts.train.Checkpoint(scaler=scaler).restore(prefix)
    assert scaler.get_scale() == 8.0
    assert status.missing == ("scaler",)


@pytest.mark.parametrize("value", [3, 0.5, "text", object(), [torch.tensor(1), 3], {"a": None}])
def test_what_a_checkpoint_cannot_hold(value):
    with pytest.raises(ValueError, match="A checkpoint can't hold thing"):
        ts.train.Checkpoint(thing=value)


@pytest.mark.parametrize("name", ["save", "_hidden", "save_counter"])
def test_names_that_an_object_cannot_have(name):
    with pytest.raises(ValueError, match="can't be the name"):
        ts.train.Checkpoint(**{name: torch.tensor(0)})
    with pytest.raises(ValueError, match="can't be the name"):
        setattr(ts.train.Checkpoint(), name, torch.tensor(0))


def test_repr():
    checkpoint = ts.train.Checkpoint(model=nn.Linear(1, 1), step=torch.tensor(0))
    assert repr(checkpoint) == "Checkpoint(model=Linear, step=Tensor)"


@pytest.mark.parametrize("keys", [{"a/b": torch.tensor(0)}, {1: torch.tensor(0)}])
def test_keys_that_a_dict_cannot_have(keys):
    with pytest.raises(ValueError, match="names without '/'"):
        ts.train.Checkpoint(values=keys)


def test_states_that_are_not_plain(prefix):
    class Stateful:
        def __init__(self, state):
            self.state = state

        def state_dict(self):
            return {"inner": [1, self.state]}

        def load_state_dict(self, state):
            self.state = state["inner"][1]

    with pytest.raises(TypeError, match=r"thing\['inner'\]\[1\] is a ndarray, which a checkpoint can't hold"):
        ts.train.Checkpoint(thing=Stateful(np.zeros(2))).write(prefix)
    assert not os.path.exists(prefix + ".pt")
    ts.train.Checkpoint(thing=Stateful(np.float64(2.5))).write(prefix)
    fresh = Stateful(None)
    ts.train.Checkpoint(thing=fresh).restore(prefix).assert_consumed()
    assert fresh.state == 2.5
    assert type(fresh.state) is float


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("method", ["save", "write", "read", "restore"])
def test_refused_in_replica_context(prefix, num_replicas, method):
    checkpoint = ts.train.Checkpoint(value=torch.tensor(0))
    with pytest.raises(RuntimeError, match="in replica context"):
        mirrored(num_replicas).run(lambda: getattr(checkpoint, method)(prefix))


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_parameters_in_another_order(prefix, num_replicas):
    strategy = mirrored(num_replicas)
    with strategy.scope():
        first, second = torch.nn.Linear(3, 3, bias=False), torch.nn.Linear(3, 3, bias=False)
        swapped = torch.optim.SGD([second.weight, first.weight], momentum=0.9)
        usual = torch.optim.SGD([first.weight, second.weight], momentum=0.9)
    model = torch.nn.ModuleList([first, second])
    path = ts.train.Checkpoint(model=model, optimizer=swapped).save(prefix)
    ts.train.Checkpoint(model=model, optimizer=swapped).restore(path).assert_consumed()
    with pytest.raises(ValueError, match=r"number 0 is model\.0\.weight, and was model\.1\.weight\."):
        ts.train.Checkpoint(model=model, optimizer=usual).restore(path)


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_momentum_of_sparse_gradients(prefix, num_replicas):
    strategy = mirrored(num_replicas)
    with strategy.scope():
        table = nn.Embedding(5, 2, sparse=True)
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1, momentum=0.5)

    def step():
        optimizer.zero_grad()
        table(torch.tensor([1, 3])).sum().backward()
        optimizer.step()

    def trained():
        strategy.run(step)
        return table.weight.detach().clone()

    trained()
    path = ts.train.Checkpoint(table=table, optimizer=optimizer).save(prefix)
    expected = trained()
    ts.train.Checkpoint(table=table, optimizer=optimizer).restore(path).assert_consumed()
    torch.testing.assert_close(trained(), expected)


def test_an_error_of_an_objects_own_says_which_one(prefix):
    class Stubborn(dict):
        state_dict = dict

        def load_state_dict(self, state):
            raise KeyError("no")

    path = ts.train.Checkpoint(thing=Stubborn()).save(prefix)
    with pytest.raises(KeyError) as caught:
        ts.train.Checkpoint(thing=Stubborn()).restore(path)
    assert "Raised by thing when it got its values of " in "".join(caught.value.__notes__)


def test_gradients_that_wait_for_a_step_are_told(prefix, caplog):
    strategy = mirrored(2)
    with strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters())
    checkpoint = ts.train.Checkpoint(model=model, accumulating=optimizer)

    def step(is_last):
        model(torch.ones(1, 2)).sum().backward()
        if is_last:
            optimizer.step()

    strategy.run(step, args=(True,))
    checkpoint.save(prefix)  # with gradients that were used
    strategy.run(lambda: optimizer.zero_grad())
    strategy.run(step, args=(False,))
    assert not caplog.records
    checkpoint.save(prefix)
    assert "while accumulating had gradients that no step had used" in caplog.records[-1].getMessage()


def test_a_loader_says_what_has_a_position():
    with pytest.raises(ValueError, match=r"Give it what experimental_distribute_dataset\(loader\) of a strategy"):
        ts.train.Checkpoint(data=torch.utils.data.DataLoader([1]))
