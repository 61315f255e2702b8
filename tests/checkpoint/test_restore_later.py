"""Values that are restored before their object exists wait for it."""

import gc
import weakref

import pytest
import torch
from torch import nn

import torchstrategy as ts
from torchstrategy.checkpoint import checkpoint as checkpoint_module
from torchstrategy.errors import InvalidArgumentError


def make_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))


@pytest.fixture
def prefix(tmp_path):
    return str(tmp_path / "ck")


@pytest.fixture
def saved(prefix):
    """A model whose parameters are those of seed 0, its trained optimizer, and two numbers."""
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.25)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    values = {"list": [torch.tensor(1.0), torch.tensor(2.0)]}
    ts.train.Checkpoint(model=model, optimizer=optimizer, values=values).save(prefix)
    return model


def assert_equal(first, second):
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_objects_are_restored_when_they_are_attached(saved, prefix):
    checkpoint = ts.train.Checkpoint()
    status = checkpoint.restore(prefix + "-1")
    assert status.assert_existing_objects_matched() is status
    with pytest.raises(ValueError, match="no object has: model, optimizer, values/list/0, values/list/1"):
        status.assert_consumed()
    with pytest.raises(ValueError, match="Nothing in the checkpoint"):
        status.assert_nontrivial_match()

    checkpoint.model = make_model(1)
    assert_equal(checkpoint.model, saved)
    assert status.assert_nontrivial_match().assert_existing_objects_matched() is status
    checkpoint.values = {"list": [torch.tensor(0.0), torch.tensor(0.0)]}
    assert [v.item() for v in checkpoint.values["list"]] == [1.0, 2.0]
    with pytest.raises(ValueError, match="no object has: optimizer"):
        status.assert_consumed()

    checkpoint.optimizer = torch.optim.Adam(checkpoint.model.parameters())
    assert checkpoint.optimizer.param_groups[0]["lr"] == 0.25
    assert len(checkpoint.optimizer.state) == 4
    assert status.assert_consumed() is status
    assert repr(status) == "CheckpointLoadStatus(matched=7, missing=0, unused=0)"


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_every_replica_gets_the_values(saved, prefix, num_replicas):
    strategy = ts.MirroredStrategy(devices=[f"cpu:{i}" for i in range(num_replicas)])
    with strategy.scope():
        model = make_model(1)
    strategy.run(lambda: model(torch.ones(1, 2)))  # the replicas' copies exist
    checkpoint = ts.train.Checkpoint()
    checkpoint.restore(prefix + "-1")
    checkpoint.model = model
    weights = strategy.experimental_local_results(strategy.run(lambda: model[0].weight.detach().clone()))
    assert len(weights) == num_replicas
    assert all(torch.equal(weight, saved[0].weight) for weight in weights)


def test_checkpoints_inside_checkpoints(prefix):
    inner = ts.train.Checkpoint(v=torch.tensor(1.0), deep=ts.train.Checkpoint(u=torch.tensor(2.0)))
    ts.train.Checkpoint(inner=inner, list=[ts.train.Checkpoint(w=torch.tensor(3.0))]).write(prefix)

    outer = ts.train.Checkpoint(inner=ts.train.Checkpoint())  # one is there at the restore, the others come later
    status = outer.read(prefix)
    outer.inner.v = torch.tensor(0.0)
    assert outer.inner.v.item() == 1.0
    outer.inner.deep = ts.train.Checkpoint()
    outer.inner.deep.u = torch.tensor(0.0)
    assert outer.inner.deep.u.item() == 2.0
    later = ts.train.Checkpoint()
    outer.list = (later,)
    with pytest.raises(ValueError, match="no object has: list/0/w"):
        status.assert_consumed()
    later.w = torch.tensor(0.0)
    assert later.w.item() == 3.0
    status.assert_consumed()


def test_only_the_first_object_of_a_name_gets_the_values(saved, prefix):
    checkpoint = ts.train.Checkpoint()
    status = checkpoint.restore(prefix + "-1")
    checkpoint.model = make_model(1)
    checkpoint.model = replaced = make_model(2)
    assert_equal(replaced, make_model(2))
    with pytest.raises(ValueError, match=r"lacks values of the objects.*model\.0\.weight"):
        status.assert_existing_objects_matched()


@pytest.mark.parametrize(
    ("value", "error", "match"),
    [
        (nn.Linear(2, 2), None, None),  # no name of it is in the checkpoint: nothing is wrong with that
        (nn.Sequential(nn.Linear(2, 5)), ValueError, r"model\.0\.weight has shape \(5, 2\)"),
        (make_model().double(), InvalidArgumentError, r"model\.0\.weight has dtype torch.float64"),
        (torch.tensor(0.0), ValueError, "model is a tensor, but the checkpoint holds a module"),
    ],
)
def test_values_that_do_not_fit(saved, prefix, value, error, match):
    checkpoint = ts.train.Checkpoint()
    status = checkpoint.restore(prefix + "-1")
    if error is None:
        checkpoint.model = value
        assert len(status.missing) == 2
        return
    with pytest.raises(error, match=match):
        checkpoint.model = value
    with pytest.raises(AttributeError):
        _ = checkpoint.model
    assert "model" in status.unused
    checkpoint.model = make_model(1)  # the values still wait
    assert_equal(checkpoint.model, saved)


def test_a_structure_is_restored_as_a_whole_or_not_at_all(saved, prefix):
    checkpoint = ts.train.Checkpoint()
    checkpoint.restore(prefix + "-1")
    values = [torch.tensor(0.0), torch.tensor([0.0])]
    with pytest.raises(ValueError, match="values/list/1 has shape"):
        checkpoint.values = {"list": values}
    assert values[0].item() == 0.0


def test_a_later_restore_replaces_what_waits(tmp_path):
    def save(name, **values):
        return ts.train.Checkpoint(**{k: torch.tensor(v) for k, v in values.items()}).write(tmp_path / name)

    first, second = save("first", v=1.0, only_first=1.0), save("second", v=2.0, only_second=2.0)
    checkpoint = ts.train.Checkpoint()
    earlier, later = checkpoint.read(first), checkpoint.read(second)
    for name in ("v", "only_first", "only_second"):
        setattr(checkpoint, name, torch.tensor(0.0))
    assert (checkpoint.v, checkpoint.only_first, checkpoint.only_second) == (2.0, 1.0, 2.0)
    with pytest.raises(ValueError, match="lacks values of the objects"):
        later.assert_existing_objects_matched()
    assert earlier.unused == ("v",)  # no object got this value
    assert earlier.matched == ("only_first",)


def test_a_nested_checkpoint_takes_the_latest_restore(tmp_path):
    inner_path = ts.train.Checkpoint(v=torch.tensor(1.0)).write(tmp_path / "inner")
    outer_path = ts.train.Checkpoint(inner=ts.train.Checkpoint(v=torch.tensor(2.0))).write(tmp_path / "outer")
    for inner_first, expected in ((True, 2.0), (False, 1.0)):
        outer = ts.train.Checkpoint(inner=ts.train.Checkpoint())
        restores = [lambda: outer.inner.read(inner_path), lambda: outer.read(outer_path)]  # noqa: B023
        for restore in restores if inner_first else reversed(restores):
            restore()
        outer.inner.v = torch.tensor(0.0)
        assert outer.inner.v.item() == expected


def test_values_are_forgotten_when_they_are_used_or_replaced(prefix, tmp_path, monkeypatch):
    read = []

    def reading(path, **options):
        content = original(path, **options)
        read.extend(weakref.ref(entry["state"]) for entry in content["objects"].values())
        return content

    original = checkpoint_module.read_checkpoint
    monkeypatch.setattr(checkpoint_module, "read_checkpoint", reading)
    ts.train.Checkpoint(now=torch.zeros(3), later=torch.zeros(3), never=torch.zeros(3)).write(prefix)
    checkpoint = ts.train.Checkpoint(now=torch.ones(3))
    status = checkpoint.read(prefix)
    gc.collect()
    now, later, never = read
    assert now() is None
    assert later() is not None
    checkpoint.later = torch.ones(3)
    gc.collect()
    assert later() is None
    for _ in range(3):
        checkpoint.read(prefix)
    gc.collect()
    assert never() is None
    assert len(checkpoint._restorations) == 1
    checkpoint.never = torch.ones(3)
    assert checkpoint._restorations == []
    assert status.unused == ("never",)


def test_what_comes_into_a_list_unnoticed(saved, prefix):
    values = {}
    checkpoint = ts.train.Checkpoint(values=values)
    status = checkpoint.restore(prefix + "-1")
    values["list"] = [torch.tensor(0.0), torch.tensor(0.0)]
    for method in (status.assert_consumed, status.assert_existing_objects_matched):
        with pytest.raises(ValueError, match=r"values for values/list/0, values/list/1, .* to the checkpoint again"):
            method()
    checkpoint.values = values
    assert values["list"][1].item() == 2.0
    status.assert_existing_objects_matched()


def test_refused_in_replica_context(saved, prefix):
    strategy = ts.MirroredStrategy(devices=["cpu:0", "cpu:1"])
    checkpoint = ts.train.Checkpoint()
    checkpoint.restore(prefix + "-1")

    def attach():
        checkpoint.model = make_model(1)

    with pytest.raises(RuntimeError, match="'model', for which restored values wait, was attached in replica context"):
        strategy.run(attach)


def test_a_checkpoint_cannot_contain_itself():
    first, second = ts.train.Checkpoint(), ts.train.Checkpoint()
    first.second = second
    for value in (first, [first], second):
        with pytest.raises(ValueError, match="can't contain itself"):
            second.first = value
    values = []
    values.append(values)
    with pytest.raises(ValueError, match="can't contain itself"):
        first.values = values


class TestLazyModules:
    @pytest.fixture
    def saved(self, prefix):
        return self.save(nn.Linear(2, 3), prefix)

    @staticmethod
    def save(model, prefix):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        ts.train.Checkpoint(model=model, optimizer=optimizer).write(prefix)
        return model

    @pytest.mark.parametrize("attached_later", [False, True])
    def test_get_their_shapes_from_the_checkpoint(self, saved, prefix, attached_later):
        model = nn.LazyLinear(3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if attached_later:
            checkpoint = ts.train.Checkpoint()
            status = checkpoint.read(prefix)
            checkpoint.optimizer = optimizer
            checkpoint.model = model
        else:
            status = ts.train.Checkpoint(model=model, optimizer=optimizer).read(prefix)
        status.assert_consumed()
        assert torch.equal(model.weight, saved.weight)
        assert torch.equal(model(torch.ones(1, 2)), saved(torch.ones(1, 2)))
        assert optimizer.state[model.weight]["momentum_buffer"].shape == (3, 2)

    def test_number_of_parameters(self, saved, prefix):
        model = nn.Sequential(nn.LazyLinear(3), nn.Linear(1, 1))
        with pytest.raises(ValueError, match="It has 4 parameters, the checkpoint's has 2"):
            ts.train.Checkpoint(optimizer=torch.optim.SGD(model.parameters(), lr=0.1)).read(prefix)

    @pytest.mark.parametrize("name", ["model", "optimizer"])
    def test_cannot_be_saved_without_shapes(self, prefix, name):
        model = nn.LazyLinear(3)
        objects = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
        with pytest.raises(ValueError, match=f"{name}.* has no shape yet.* Call the module once"):
            ts.train.Checkpoint(**{name: objects[name]}).write(prefix)


def test_an_optimizer_with_parameters_in_another_order_is_not_attached(prefix):
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([first.weight, second.weight])
    ts.train.Checkpoint(first=first, second=second, optimizer=optimizer).save(prefix)
    later = ts.train.Checkpoint()
    later.restore(prefix + "-1").expect_partial()
    later.first, later.second = first, second
    with pytest.raises(ValueError, match=r"number 0 is second\.weight, and was first\.weight"):
        later.optimizer = torch.optim.SGD([second.weight, first.weight])
