"""What once went wrong in ``fit`` and its kin."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchstrategy as ts
from torchstrategy.fit.trainer import trainer_of


@pytest.fixture(params=["default", "two"])
def strategy(request):
    return ts.get_strategy() if request.param == "default" else ts.MirroredStrategy(["cpu:0", "cpu:1"])


def data(num=10):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num, 3, generator=generator), torch.randn(num, 1, generator=generator)


def made(strategy, cls=ts.Model, **arguments):
    with strategy.scope():
        torch.manual_seed(0)
        model = cls(nn.Linear(3, 1))
    model.compile(**{"optimizer": "sgd", "loss": "mse", **arguments})
    return model


class Returning(ts.Model):
    """Returns something besides the metrics."""

    value: object = None

    def train_step(self, data):
        super().train_step(data)
        return {"it": self.value}


def test_a_step_returns_one_number_on_all_replicas(strategy):
    model = made(strategy, Returning)
    model.value = 0.5
    assert model.fit(*data(), batch_size=3, verbose=0).history["it"] == [0.5]


def test_a_step_that_returns_no_number_is_told_so(strategy):
    model = made(strategy, Returning)
    model.value = "ten"
    with pytest.raises(TypeError, match=r"metrics and numbers by name.*'it': 'ten'"):
        model.fit(*data(), verbose=0)


@pytest.mark.parametrize("changed", [lambda y: y[::-1], lambda y: y.astype(">f4")], ids=["strides", "byte_order"])
def test_labels_that_torch_can_not_share(strategy, changed):
    x, y = (part.numpy() for part in data())
    expected = made(strategy).fit(x, np.ascontiguousarray(changed(y)).astype("f4"), shuffle=False, verbose=0)
    history = made(strategy).fit(x, changed(y), shuffle=False, verbose=0)
    assert history.history == expected.history


@pytest.mark.parametrize("method", ["compile", "fit"])
def test_callbacks_do_not_begin_anew_in_the_middle(strategy, method):
    class Again(ts.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 1:
                self.model.compile("sgd", "mse") if method == "compile" else self.model.fit(*data(), verbose=0)

    model = made(strategy)
    with pytest.raises(RuntimeError, match=rf"{method} was called while a fit of the same model is running"):
        model.fit(*data(), epochs=2, callbacks=[Again()], verbose=0)
    model.compile("sgd", "mse")
    assert len(model.fit(*data(), epochs=2, verbose=0).history["loss"]) == 2


class Interrupted(Exception):
    pass


class Interrupt(ts.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise Interrupted


def test_a_rerun_goes_on_where_the_data_ended_with_an_epoch(strategy, tmp_path):
    def trained(name, *callbacks):
        torch.manual_seed(5)
        callbacks = [ts.callbacks.BackupAndRestore(tmp_path / name), *callbacks]
        history = made(strategy).fit(*data(), batch_size=2, steps_per_epoch=5, epochs=4, callbacks=callbacks, verbose=0)
        return history.history

    expected = trained("unbroken")
    with pytest.raises(Interrupted):
        trained("broken", Interrupt())
    assert trained("broken") == expected


def test_mixed_precision_is_that_of_the_device_where_the_model_is():
    model = ts.Model(nn.Linear(3, 1, device="meta"))
    assert trainer_of(model).device_of(model).type == "meta"
    assert trainer_of(made(ts.OneDeviceStrategy("cpu:0"))).device_of(model).type == "cpu"


def test_an_optimizer_with_a_closure_is_refused(strategy):
    with pytest.raises(TypeError, match="LBFGS, whose step"):
        made(strategy, optimizer=torch.optim.LBFGS).fit(*data(), verbose=0)


def labels(ignored):
    x, _ = data()
    y = torch.arange(10) % 3
    return x, torch.where(torch.arange(10) < ignored, -100, y)


def classifier(strategy, cls=ts.Model):
    with strategy.scope():
        torch.manual_seed(0)
        model = cls(nn.Linear(3, 3))
    model.compile("sgd", nn.CrossEntropyLoss())
    return model


class Masking(ts.Model):
    """Ignores labels by itself, as models of masked words do."""

    def train_step(self, data):
        x, y = data
        return super().train_step((x, torch.where(x[:, 0] > 0, y, -100)))


def test_a_step_may_ignore_labels(strategy):
    x, y = labels(0)
    model = classifier(strategy, Masking)
    expected = nn.functional.cross_entropy(model(x), torch.where(x[:, 0] > 0, y, -100)).item()
    assert model.fit(x, y, verbose=0).history["loss"] == pytest.approx([expected], rel=1e-5)


def test_an_evaluation_in_the_middle_of_fit_knows_nothing_of_its_labels(strategy):
    loader = DataLoader(TensorDataset(*labels(5)), 10)
    seen = []

    class Evaluate(ts.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append(self.model.evaluate(loader, verbose=0))

    model = classifier(strategy)
    model.fit(*labels(0), verbose=0, callbacks=[Evaluate()])
    assert seen == [pytest.approx(model.evaluate(loader, verbose=0), rel=1e-6)]


def test_a_batch_in_the_middle_of_fit_has_labels_of_its_own(strategy):
    x, y = labels(5)
    seen = []

    class Test(ts.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.reset_metrics()
            seen.append(self.model.test_on_batch(x, y))

        def on_train_batch_end(self, batch, logs=None):
            self.on_epoch_end(0)

    model = classifier(strategy)
    model.fit(*labels(0), verbose=0, callbacks=[Test()])
    assert seen == [pytest.approx(nn.functional.cross_entropy(model(x), y).item(), rel=1e-5)] * 2


def test_logs_that_are_kept_unread_are_not_those_of_a_later_batch(strategy):
    class Keep(ts.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            (unread if batch else read).append(logs)
            assert batch or logs["loss"] > 0

    unread, read = [], []
    made(strategy).fit(*data(), batch_size=5, verbose=0, callbacks=[Keep()])
    assert read[0]["loss"] > 0
    with pytest.raises(RuntimeError, match="kept unread"):
        dict(unread[0])


class InterruptValidation(ts.callbacks.Callback):
    def on_test_begin(self, logs=None):
        raise Interrupted


@pytest.mark.parametrize("steps_per_epoch", [None, 5])
def test_a_rerun_knows_that_the_data_of_the_epoch_has_ended(strategy, tmp_path, steps_per_epoch):
    x, y = data()

    def batches():
        for i in range(0, 10, 3):
            yield x[i : i + 3], y[i : i + 3]

    def trained(name, *callbacks):
        callbacks = [ts.callbacks.BackupAndRestore(tmp_path / name, save_freq=1), *callbacks]
        arguments = {"steps_per_epoch": steps_per_epoch, "epochs": 2, "validation_data": (x, y), "verbose": 0}
        dataset = ts.data.Dataset.from_generator(batches)
        return made(strategy, steps_per_execution=3).fit(dataset, callbacks=callbacks, **arguments).history

    expected = trained("unbroken")
    with pytest.raises(Interrupted):
        trained("broken", InterruptValidation())
    assert trained("broken") == expected


class OwnLoss(ts.Model):
    """Its loss is its own, and without Keras' ``training``."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
        return ts.nn.compute_average_loss((y - y_pred).square().sum(1), global_batch_size="actual")


class OwnTracker(OwnLoss):
    """A step as Keras' guides have it."""

    def __init__(self, *args):
        super().__init__(*args)
        self.tracker = ts.metrics.Mean(name="tracker")

    def train_step(self, data):
        x, y = data
        loss = self.compute_loss(y=y, y_pred=self(x))
        self.minimize(loss)
        self.tracker.update_state(loss)
        return {"tracker": self.tracker.result()}


def test_a_loss_of_the_models_own_is_evaluated(strategy):
    x, y = data()
    expected = made(strategy).evaluate(x, y, batch_size=4, verbose=0)
    assert made(strategy, OwnLoss, loss=None).evaluate(x, y, batch_size=4, verbose=0) == pytest.approx(expected)
    assert made(strategy, OwnLoss).evaluate(x, y, batch_size=4, verbose=0) == pytest.approx(expected)


def test_a_mean_of_replicas_parts_of_a_loss_is_warned_of():
    x, y = data()
    made(ts.get_strategy(), OwnTracker).fit(x, y, verbose=0)
    model = made(ts.MirroredStrategy(["cpu:0", "cpu:1"]), OwnTracker)
    with pytest.warns(UserWarning, match=r"The Mean 'tracker' was given a replica's part .* self.track_loss\(loss\)"):
        model.fit(x, y, verbose=0)


class Activity(nn.Module):
    def forward(self, x):
        ts.add_loss(0.1 * x.square().mean())
        return x


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("number", [2, 3])
def test_added_losses_count_by_examples(number, steps):
    def train(strategy):
        with strategy.scope():
            torch.manual_seed(0)
            model = ts.Model(
                nn.Sequential(ts.regularize(nn.Linear(3, 1), "weight", ts.regularizers.L2(0.1)), Activity())
            )
        model.compile("sgd", "mse", gradient_accumulation_steps=steps)
        history = model.fit(*data(11), batch_size=4, epochs=2, shuffle=False, verbose=0).history["loss"]  # 4, 4 and 3
        return [*history, *model.get_parameter("module.0.weight").flatten().tolist()]

    expected = train(ts.get_strategy())
    assert train(ts.MirroredStrategy([f"cpu:{i}" for i in range(number)])) == pytest.approx(expected, rel=1e-5)


class Unused(ts.Model):
    """Has a metric with the loss's name, as for a ``train_step`` that only subclasses have."""

    def __init__(self, *args):
        super().__init__(*args)
        self.tracker = ts.metrics.Mean(name="loss")


class UsedInTraining(Unused):
    def train_step(self, data):
        self.tracker.update_state(data[1].square())
        return super().train_step(data)


def test_a_metric_called_loss_hides_the_loss_only_where_it_is_updated(strategy):
    x, y = data()
    arguments = {"epochs": 2, "shuffle": False, "validation_data": (x, y), "verbose": 0}
    expected = made(strategy).fit(x, y, **arguments).history
    assert made(strategy, Unused).fit(x, y, **arguments).history == expected
    model = made(strategy, UsedInTraining)
    history = model.fit(x, y, **arguments).history
    assert history == {"loss": [pytest.approx(float(y.square().mean()))] * 2, "val_loss": expected["val_loss"]}
    assert model.evaluate(x, y, verbose=0) == expected["val_loss"][-1]
