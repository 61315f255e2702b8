"""What `fit` does with layers that the program has put into evaluation mode."""

import functools

import pytest
import torch
from torch import nn

import torchstrategy as ts
from torchstrategy.base import log

STRATEGIES = {
    "default": ts.get_strategy,
    "mirrored": lambda: ts.MirroredStrategy(["cpu:0", "cpu:1"]),
    "central": lambda: ts.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"]),
}


def data():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(8, 3, generator=generator), torch.randn(8, 1, generator=generator)


class Noted(nn.Module):
    """Notes the mode that it is called in."""

    def __init__(self):
        super().__init__()
        self.modes = set()

    def forward(self, x):
        self.modes.add(self.training)
        return x


def backbone():
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(Noted(), nn.Dropout(0.5)))


def frozen(module, mode=False):
    return module.requires_grad_(False).train(mode)


@pytest.fixture(params=STRATEGIES)
def make(request):
    def make(*layers):
        with STRATEGIES[request.param]().scope():
            model = ts.Model(nn.Sequential(*(layer() for layer in layers), nn.Linear(4, 1)))
            model.compile(functools.partial(torch.optim.SGD, lr=0.01), "mse")
        return model

    return make


def modes(model):
    return [module.training for module in model.modules()]


@pytest.mark.parametrize("method", ["fit", "train_on_batch"])
def test_a_frozen_part_in_evaluation_mode_stays_in_it(make, method):
    model = make(backbone)
    frozen(model.module[0])
    mean = model.module[0][1].running_mean.clone()
    getattr(model, method)(*data(), **({"verbose": 0, "validation_data": data()} if method == "fit" else {}))
    assert not any(modes(model.module[0]))
    assert model.training
    assert model.module[1].training
    assert model.module[0][1].running_mean.equal(mean)
    assert model.module[0][2][0].modes == {False}
    assert model.module[0][1].num_batches_tracked == 0


def test_it_stays_so_in_the_copies_of_later_trainings(make):
    model = make(backbone)
    x, y = data()
    model.fit(x, y, verbose=0)
    tracked = int(model.module[0][1].num_batches_tracked)
    frozen(model.module[0])
    mean = model.module[0][1].running_mean.clone()
    model.fit(x, y, epochs=2, verbose=0)
    assert int(model.module[0][1].num_batches_tracked) == tracked > 0
    assert model.module[0][1].running_mean.equal(mean)
    model.module[0].train()
    model.fit(x, y, verbose=0)
    assert int(model.module[0][1].num_batches_tracked) > tracked


def test_a_frozen_batch_norm_in_a_part_that_is_trained(make):
    model = make(backbone)
    frozen(model.module[0][1])
    model.fit(*data(), verbose=0)
    assert modes(model.module[0]) == [True, True, False, True, True, True]


def test_a_dropout_that_was_turned_off_alone_stays_off(make):
    model = make(backbone)
    model.module[0][2][1].eval()
    model.fit(*data(), verbose=0)
    assert modes(model.module[0]) == [True, True, True, True, True, False]


@pytest.mark.parametrize("part", ["model", "module", "backbone"])
def test_what_is_trained_is_put_into_training_mode(make, part):
    model = make(backbone)
    {"model": model, "module": model.module, "backbone": model.module[0]}[part].eval()
    model.fit(*data(), verbose=0)
    assert all(modes(model))


def test_a_frozen_part_in_training_mode_stays_in_it(make):
    model = make(backbone)
    frozen(model.module[0], mode=True)
    model.fit(*data(), verbose=0)
    assert all(modes(model))
    assert model.module[0][1].num_batches_tracked > 0


class OwnTrain(nn.Sequential):
    """Decides its parts' modes by itself, as many detectors do."""

    def train(self, mode=True):
        super().train(mode)
        self[1].eval()
        return self


def test_modes_that_a_module_chooses_are_its_own(make):
    model = make(lambda: OwnTrain(*backbone()))
    model.fit(*data(), verbose=0)
    assert not model.module[0][1].training
    assert model.module[0].training


def test_the_mode_is_saved(make, tmp_path):
    model = make(backbone)
    frozen(model.module[0])
    model.fit(*data(), verbose=0)
    model.save(tmp_path / "model")
    (path,) = tmp_path.glob("model*")
    loaded = ts.models.load_model(path, trust=True)
    assert modes(loaded) == modes(model)
    assert not any(p.requires_grad for p in loaded.module[0].parameters())
    loaded.fit(*data(), verbose=0)
    assert modes(loaded) == modes(model)
    assert loaded.module[0][1].num_batches_tracked == 0


class Halved(nn.Module):
    """Ported from Keras with its argument: a dropout of a kind, which a test can foresee."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 1)
        nn.init.constant_(self.layer.weight, 0.5)

    def forward(self, x, training=False):
        return self.layer(x) * (0.5 if training else 1.0)


class HalvedModel(ts.Model):
    def __init__(self):
        super().__init__()
        self.inner = Halved()

    @torch.autocast("cpu", enabled=False)
    def forward(self, x, *, training):
        return self.inner(x, training)


class OwnStep(HalvedModel):
    def train_step(self, data):
        x, y = data
        assert self(x, training=False).equal(self.inner(x))
        self.minimize(self.compute_loss(x, y, self(x)))


@pytest.fixture(params=STRATEGIES)
def make_halved(request):
    def make(model):
        with STRATEGIES[request.param]().scope():
            model = model()
            model.compile(functools.partial(torch.optim.SGD, lr=0.1), "mse")
        return model

    return make


@pytest.mark.parametrize("model", [lambda: ts.Model(Halved()), HalvedModel, OwnStep])
def test_a_forward_with_keras_argument_gets_the_mode(make_halved, model):
    x, y = data()
    model = make_halved(model)
    net = Halved()
    net.load_state_dict({name.split(".", 1)[1]: value for name, value in model.state_dict().items()})
    loss = nn.functional.mse_loss(net(x, training=True), y)
    loss.backward()
    history = model.fit(x, y, batch_size=8, validation_data=(x, y), verbose=0).history
    with torch.no_grad():
        for parameter in net.parameters():
            parameter -= 0.1 * parameter.grad
    assert history["loss"] == [pytest.approx(loss.item(), rel=1e-6)]
    expected = net(x, training=False)
    assert history["val_loss"] == [pytest.approx(nn.functional.mse_loss(expected, y).item(), rel=1e-6)]
    torch.testing.assert_close(torch.as_tensor(model.predict(x, verbose=0)), expected)
    torch.testing.assert_close(model(x, training=False), expected)


def test_keras_way_to_freeze_is_not_read(make, caplog, monkeypatch):
    monkeypatch.setattr(log, "_said", set())
    monkeypatch.setattr(log.logger, "propagate", True)
    model = make(lambda: nn.Linear(3, 4), lambda: nn.Linear(4, 4))
    model.module[0].trainable = False
    model.module[1].requires_grad_(False).trainable = False
    model.fit(*data(), verbose=0)
    model.fit(*data(), verbose=0)
    said = [record.message for record in caplog.records if "`trainable`" in record.message]
    assert said == [message for message in said if message.startswith("fit: `trainable` of module.0 is False")]
    assert len(said) == 1


@pytest.mark.parametrize("model", [lambda: ts.Model(nn.Sequential(Halved())), HalvedModel])
def test_modules_that_do_not_get_the_mode_are_named(make_halved, model, caplog, monkeypatch):
    monkeypatch.setattr(log, "_said", set())
    monkeypatch.setattr(log.logger, "propagate", True)
    x, y = data()
    model = make_halved(model)
    model.evaluate(x, y, verbose=0)
    assert "Halved" not in caplog.text  # the default is right
    model.fit(x, y, batch_size=4, verbose=0)
    is_left_out = not isinstance(model, HalvedModel)
    said = [record.message for record in caplog.records if "Halved.forward was called without" in record.message]
    assert len(said) == is_left_out
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_who_calls_a_model_outside_a_step_says_the_mode():
    x, _ = data()
    model = ts.Model(Halved())
    assert model(x).equal(2 * model(x, training=True))


def test_a_model_without_the_argument_says_what_to_call(make):
    x, _ = data()
    model = make(lambda: nn.Linear(3, 4))
    with pytest.raises(TypeError, match=r"Sequential.forward has no parameter 'training'.*`model.eval\(\)` before"):
        model(x, training=False)
    with pytest.raises(TypeError, match=r"Linear.forward has no parameter 'scale', with which it was called. Leave"):
        ts.Model(nn.Linear(3, 1))(x, scale=2)


def test_a_step_that_passes_an_argument_which_forward_lacks():
    class Passing(ts.Model):
        def train_step(self, data):
            return self(data[0], training=True)

    model = Passing(nn.Linear(3, 1))
    model.compile("sgd", "mse")
    with pytest.raises(TypeError, match=r"^Linear.forward has no parameter 'training'"):
        model.fit(*data(), verbose=0)
