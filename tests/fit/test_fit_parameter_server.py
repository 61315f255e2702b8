"""``fit`` and its kin of models on parameter servers: the same numbers as one replica, whoever computes them."""

import functools
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import torchstrategy as ts

NUM_EXAMPLES = 50


@pytest.fixture(autouse=True)
def _doubles():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def cluster(local_cluster):
    return local_cluster(2, 2)


@pytest.fixture
def make_strategy(cluster):
    made = []

    def make(max_staleness=0):
        made.append(ts.ParameterServerStrategy(cluster.resolver(), max_staleness=max_staleness))
        return made[-1]

    yield make
    for strategy in made:
        strategy.close()


@pytest.fixture
def in_order(make_strategy):
    """One step at a time: what one replica does."""
    return make_strategy(max_staleness=0)


@pytest.fixture
def strategy(make_strategy):
    """Two workers that don't wait for each other."""
    return make_strategy(max_staleness=None)


def arrays():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(NUM_EXAMPLES, 3, generator=generator)
    return x, x.sum(1, keepdim=True).tanh()


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))


def make_pair(strategy, make=lambda: ts.Model(make_net()), **options):
    """Return a model on parameter servers and one without a strategy, alike."""
    options = {"optimizer": "adam", "loss": "mse", "metrics": ["mae"], **options}
    with strategy.scope():
        served = make()
        served.compile(**options)
    plain = make()
    plain.compile(**options)
    return served, plain


def call_both(models, method, *args, **kwargs):
    results = []
    for model in models:
        torch.manual_seed(1)
        made = {name: value() if isinstance(value, functools.partial) else value for name, value in kwargs.items()}
        results.append(getattr(model, method)(*args, verbose=0, **made))
    return results


def assert_same_history(ours, expected):
    assert ours.history.keys() == expected.history.keys()
    for name, values in expected.history.items():
        np.testing.assert_allclose(ours.history[name], values, rtol=0, atol=1e-12, err_msg=name)


def assert_same_weights(ours, expected):
    for (name, value), other in zip(ours.state_dict().items(), expected.state_dict().values(), strict=True):
        torch.testing.assert_close(value.detach(), other.detach(), rtol=0, atol=1e-12, msg=name)


WEIGHTS = torch.rand(NUM_EXAMPLES, generator=torch.Generator().manual_seed(1))


@pytest.mark.end_to_end
@pytest.mark.parametrize(
    ("compiled", "arguments"),
    [
        ({}, {"validation_split": 0.3}),
        ({"weighted_metrics": ["mse"], "steps_per_execution": 3}, {"sample_weight": WEIGHTS}),
        ({"loss": nn.HuberLoss(), "optimizer": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)}, {}),
        ({"metrics": [ts.metrics.MeanSquaredError(name="own")]}, {"steps_per_epoch": 4}),
    ],
    ids=["split", "weights", "torch", "steps"],
)
def test_history_equals_that_of_one_replica(in_order, compiled, arguments):
    models = make_pair(in_order, **compiled)
    x, y = arrays()
    assert_same_history(*call_both(models, "fit", x, y, batch_size=8, epochs=3, **arguments))
    assert_same_weights(*models)
    assert models[0].iterations == models[1].iterations


def test_labels_are_classes(in_order):
    def make():
        torch.manual_seed(0)
        return ts.Model(nn.Linear(3, 3))

    models = make_pair(
        in_order, make, loss=ts.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
    )
    x, _ = arrays()
    y = x.argmax(1)
    arguments = {"batch_size": 8, "epochs": 2, "class_weight": {0: 2.0, 2: 0.5}, "validation_data": (x[:9], y[:9])}
    assert_same_history(*call_both(models, "fit", x, y, **arguments))
    ours, expected = call_both(models, "evaluate", x, y, batch_size=13, return_dict=True)
    assert ours == pytest.approx(expected, rel=0, abs=1e-12)


@pytest.mark.parametrize("kind", ["loader", "map-style", "pipeline", "generator", "dict"])
def test_kinds_of_data(in_order, kind):
    x, y = arrays()

    class Named(ts.Model):
        def __init__(self):
            super().__init__()
            self.net = make_net()

        def forward(self, x):
            return self.net(x["x"] if isinstance(x, dict) else x)

    kinds = {
        "loader": lambda: DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True),
        "map-style": lambda: TensorDataset(x, y),
        "pipeline": lambda: ts.data.Dataset.from_tensor_slices((x, y)).shuffle(50, seed=3).batch(6),
        "generator": lambda: ((x[i : i + 9], y[i : i + 9]) for i in range(0, NUM_EXAMPLES, 9)),
        "dict": lambda: DataLoader([({"x": own}, label) for own, label in zip(x, y, strict=True)], batch_size=8),
    }
    models = make_pair(in_order, Named)
    epochs = 1 if kind == "generator" else 2
    assert_same_history(*call_both(models, "fit", x=functools.partial(kinds[kind]), epochs=epochs))


def test_a_forward_with_keras_argument_gets_the_mode(in_order):
    class Halved(ts.Model):
        def __init__(self):
            super().__init__()
            self.net = make_net()

        def forward(self, x, training=False):
            return self.net(x) * (0.5 if training else 1.0)

    x, y = arrays()
    models = make_pair(in_order, Halved)
    assert_same_history(*call_both(models, "fit", x, y, batch_size=8, validation_data=(x, y)))


def test_several_outputs(in_order):
    class Two(ts.Model):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(3, 1), nn.Linear(3, 2)

        def forward(self, x):
            return self.a(x), self.b(x)

    models = make_pair(in_order, Two, loss="mse", loss_weights=[1.0, 0.5], metrics=[["mae"], ["mse"]])
    x, y = arrays()
    first, second = models[0].predict(x, verbose=0)
    assert (first.shape, second.shape) == ((50, 1), (50, 2))
    ours, expected = call_both(models, "fit", x, (y, x[:, :2]), epochs=2, batch_size=8)
    assert len(expected.history) == 5
    assert_same_history(ours, expected)


class Custom(ts.Model):
    """Has metrics and steps of its own."""

    def __init__(self):
        super().__init__()
        self.net = make_net()
        self.error = ts.metrics.Mean(name="error")

    def forward(self, x):
        return self.net(x)

    def train_step(self, data):
        x, y = data
        errors = (self(x) - y).square().mean(1)
        loss = ts.nn.compute_average_loss(errors, global_batch_size="actual")
        self.minimize(loss)
        self.error.update_state(errors)
        return {"mean": self.error, "largest": errors.max()}

    def test_step(self, data):
        x, y = data
        self.error.update_state((self(x) - y).square().mean(1))
        return {"error": self.error}

    def clip_gradients(self):
        torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm=0.1)


def test_steps_and_metrics_of_the_users(in_order):
    models = make_pair(in_order, Custom, loss=None, metrics=None)
    x, y = arrays()
    ours, expected = call_both(models, "fit", x, y, batch_size=8, epochs=2, validation_data=(x[:9], y[:9]))
    assert expected.history.keys() >= {"mean", "largest", "val_error"}
    assert_same_history(ours, expected)
    assert_same_weights(*models)


class TwoOptimizers(ts.Model):
    """Has optimizers as attributes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 2), nn.Linear(2, 1)
        self.optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in (self.first, self.second)]
        self.loss_mean = ts.metrics.Mean(name="loss")

    def train_step(self, data):
        x, y = data
        loss = (self.second(self.first(x)) - y).square().mean()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self.loss_mean.update_state(loss.detach(), len(x))
        return {"loss": self.loss_mean}


def test_optimizers_of_the_users(in_order):
    models = make_pair(in_order, TwoOptimizers, optimizer=None, loss=None, metrics=None)
    x, y = arrays()
    assert_same_history(*call_both(models, "fit", x, y, batch_size=8, epochs=2))
    assert_same_weights(*models)


@pytest.mark.end_to_end
def test_training_on_two_workers(strategy):
    model, plain = make_pair(strategy, optimizer=functools.partial(torch.optim.Adam, lr=0.02))
    x, y = arrays()
    history = model.fit(x, y, batch_size=5, epochs=8, verbose=0)
    assert history.history["loss"][-1] < 0.5 * history.history["loss"][0]
    plain.load_state_dict(model.state_dict())
    expected = plain.evaluate(x, y, verbose=0, return_dict=True)
    assert model.evaluate(x, y, batch_size=3, verbose=0, return_dict=True) == pytest.approx(expected, abs=1e-12)
    np.testing.assert_allclose(model.predict(x, batch_size=4, verbose=0), plain.predict(x, verbose=0), atol=1e-12)


class Slow(ts.Model):
    """Takes its time in steps, longer for some."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 1)
        self.count = ts.metrics.Sum(name="count")

    def forward(self, x):
        time.sleep(0.01 if x[0, 0] > 0 else 0.04)
        return self.net(x)

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        self.count.update_state(torch.ones(len(x)))
        return super().compute_metrics(x, y, y_pred, sample_weight)


@pytest.fixture
def slow(strategy):
    with strategy.scope():
        model = Slow()
        model.compile("sgd", "mse")
    return model


def test_predictions_are_in_the_order_of_the_data(slow):
    x, _ = arrays()
    with torch.no_grad():
        expected = slow.net(x)
    np.testing.assert_allclose(slow.predict(x, batch_size=3, verbose=0), expected, atol=1e-12)
    np.testing.assert_allclose(slow.predict_on_batch(x[:4]), expected[:4], atol=1e-12)


class KillWorker(ts.callbacks.Callback):
    """Kills a worker in the middle of everything."""

    def __init__(self, cluster):
        super().__init__()
        self.cluster = cluster
        self.batches = []

    def on_test_batch_end(self, batch, logs=None):
        self.batches.append(batch)
        if batch == 4:
            self.cluster.kill("worker", 0)

    on_train_batch_end = on_test_batch_end


def test_each_example_counts_once_though_a_worker_is_killed(cluster, slow):
    x, y = arrays()
    slow.evaluate(x[:10], y[:10], batch_size=2, verbose=0)  # both workers are there
    killer = KillWorker(cluster)
    logs = slow.evaluate(x, y, batch_size=2, verbose=0, callbacks=[killer], return_dict=True)
    assert not cluster.is_alive("worker", 0)
    assert killer.batches == list(range(25))
    assert logs["count"] == NUM_EXAMPLES
    with torch.no_grad():
        assert logs["loss"] == pytest.approx(float((slow.net(x) - y).square().mean()), abs=1e-12)


@pytest.mark.end_to_end
def test_fit_goes_on_though_a_worker_is_killed(cluster, slow):
    x, y = arrays()
    killer = KillWorker(cluster)
    history = slow.fit(x, y, batch_size=2, epochs=2, verbose=0, callbacks=[killer])
    assert not cluster.is_alive("worker", 0)
    assert history.history["count"] == [NUM_EXAMPLES] * 2
    assert killer.batches == [*range(25)] * 2


def test_scheduled_rates_reach_the_servers(in_order):
    models = make_pair(in_order, optimizer="sgd")
    x, y = arrays()

    class EachBatch(ts.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            self.model.optimizer.param_groups[0]["lr"] *= 0.9

    callbacks = functools.partial(
        lambda: [ts.callbacks.LearningRateScheduler(lambda epoch: 0.1 / (epoch + 1)), EachBatch()]
    )
    assert_same_history(*call_both(models, "fit", x, y, batch_size=8, epochs=3, callbacks=callbacks))
    assert_same_weights(*models)


class Record(ts.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.calls = []

    def on_train_batch_begin(self, batch, logs=None):
        self.calls.append(("begin", batch))

    def on_train_batch_end(self, batch, logs=None):
        self.calls.append(("end", batch, logs["loss"]))
        if batch == 5:
            self.model.stop_training = True

    def on_epoch_end(self, epoch, logs=None):
        self.calls.append(("epoch", epoch, logs["loss"]))


def test_callbacks_in_order_and_a_stop_in_the_middle(in_order):
    models = make_pair(in_order, steps_per_execution=2)
    x, y = arrays()
    records = [Record(), Record()]
    for model, record in zip(models, records, strict=True):
        model.fit(x, y, batch_size=5, epochs=3, shuffle=False, verbose=0, callbacks=[record])
    names = [call[:2] for call in records[1].calls]
    assert names == [("begin", 0), ("end", 1), ("begin", 2), ("end", 3), ("begin", 4), ("end", 5), ("epoch", 0)]
    assert [call[:2] for call in records[0].calls] == names
    losses = [[call[2] for call in record.calls if call[0] != "begin"] for record in records]
    np.testing.assert_allclose(losses[0], losses[1], rtol=0, atol=1e-12)


def test_a_stop_with_steps_under_way(strategy):
    model, _ = make_pair(strategy)
    x, y = (part.repeat(2, 1) for part in arrays())
    record = Record()
    history = model.fit(x, y, batch_size=2, epochs=3, verbose=0, callbacks=[record])
    ends = [call[1] for call in record.calls if call[0] == "end"]
    assert len(history.epoch) == 1
    assert ends == list(range(len(ends)))
    assert 6 <= len(ends) < 20  # those that were scheduled are waited for


def test_early_stopping_and_single_batches(in_order):
    models = make_pair(in_order)
    x, y = arrays()
    stop = functools.partial(lambda: [ts.callbacks.EarlyStopping("loss", min_delta=10.0)])
    assert_same_history(*call_both(models, "fit", x, y, epochs=5, callbacks=stop))
    for model in models:
        model.reset_metrics()
    for _ in range(2):
        ours, expected = (model.train_on_batch(x[:7], y[:7]) for model in models)
        assert ours == pytest.approx(expected, abs=1e-12)
    ours, expected = (model.test_on_batch(x[:7], y[:7], return_dict=True) for model in models)
    assert ours == pytest.approx(expected, abs=1e-12)


def make_dataset(context):
    assert (context.num_input_pipelines, context.num_replicas_in_sync) == (1, 1)
    x, y = arrays()
    return ts.data.Dataset.from_tensor_slices((x, y)).shuffle(50).repeat().batch(10)


@pytest.mark.slow
def test_dataset_creator(strategy):
    model, _ = make_pair(strategy, optimizer=functools.partial(torch.optim.Adam, lr=0.02))
    creator = ts.utils.DatasetCreator(make_dataset)
    with pytest.raises(ValueError, match=r"fit\(x=...\) is a DatasetCreator, .* Pass steps_per_epoch="):
        model.fit(creator, verbose=0)
    with pytest.raises(ValueError, match="evaluate and predict have steps="):
        model.evaluate(creator, verbose=0)
    with pytest.raises(ValueError, match=r"fit\(batch_size=...\) is for arrays"):
        model.fit(creator, batch_size=3, steps_per_epoch=3, verbose=0)
    history = model.fit(creator, epochs=6, steps_per_epoch=10, validation_data=creator, validation_steps=2, verbose=0)
    assert history.history["val_loss"][-1] < 0.5 * history.history["val_loss"][0]
    assert model.evaluate(creator, steps=5, verbose=0)[0] < history.history["val_loss"][0]
    assert model.predict(creator, steps=3, verbose=0).shape == (30, 1)


def test_a_per_worker_dataset_is_refused(in_order):
    model, _ = make_pair(in_order)
    dataset = ts.coordinator.ClusterCoordinator(in_order).create_per_worker_dataset(lambda: [arrays()])
    with pytest.raises(TypeError, match=r"fit\(x=...\) is a PerWorkerDataset. .* ts.utils.DatasetCreator"):
        model.fit(dataset, steps_per_epoch=1, verbose=0)


def test_a_dataset_of_a_worker_that_ends(in_order):
    model, _ = make_pair(in_order)
    creator = ts.utils.DatasetCreator(lambda _: ts.data.Dataset.from_tensor_slices(arrays()).batch(25))
    with pytest.raises(ValueError, match=r"has ended, .* dataset.repeat\(\)"):
        model.fit(creator, steps_per_epoch=7, verbose=0)
    model.fit(*arrays(), verbose=0)  # the next one is not harmed


class Failing(ts.Model):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 1)

    def forward(self, x):
        if x[0, 0] > 5:
            raise KeyError("the seventh seal")
        return self.net(x)


def test_errors_of_steps_are_those_of_the_program(strategy):
    with strategy.scope():
        model = Failing()
        model.compile("sgd", "mse")
    x, y = arrays()
    x[30] = 7
    with pytest.raises(KeyError, match="the seventh seal"):
        model.fit(x, y, batch_size=1, shuffle=False, verbose=0)
    x[30] = 0
    assert len(model.fit(x, y, verbose=0).epoch) == 1
    with pytest.raises(ts.errors.InvalidArgumentError, match=r"fit\(x=...\): the model 'failing' failed on its first"):
        model.fit(x[:, :2], y, verbose=0)


@pytest.mark.parametrize(
    "options", [{"gradient_accumulation_steps": 2}, {"jit_compile": True}, {"amp": "fp16"}], ids=lambda o: next(iter(o))
)
def test_what_is_not_possible_is_refused(in_order, options):
    with in_order.scope():
        model = ts.Model(nn.Linear(1, 1))
    name, value = next(iter(options.items()))
    with pytest.raises(ValueError, match=rf"compile\({name}={value!r}\) is not possible .* parameter servers: "):
        model.compile("sgd", "mse", **options)


def test_saving_and_loading(in_order, tmp_path):
    model, _ = make_pair(in_order)
    x, y = arrays()
    best = ts.callbacks.EarlyStopping("loss", min_delta=10.0, restore_best_weights=True)
    keep = ts.callbacks.ModelCheckpoint(tmp_path / "{epoch}.pt", save_weights_only=True)
    model.fit(x, y, epochs=3, verbose=0, callbacks=[best, keep])
    expected = model.evaluate(x, y, verbose=0)
    model.save(tmp_path / "model.tsm")
    plain = ts.models.load_model(tmp_path / "model.tsm", trust=True)
    assert plain.evaluate(x, y, verbose=0) == pytest.approx(expected, abs=1e-12)
    plain.load_weights(tmp_path / "1.pt")  # the best
    assert plain.evaluate(x, y, verbose=0) == pytest.approx(expected, abs=1e-12)
    with in_order.scope():
        again = ts.models.load_model(tmp_path / "model.tsm", trust=True)
    assert again.evaluate(x, y, verbose=0) == pytest.approx(expected, abs=1e-12)
    assert_same_history(again.fit(x, y, shuffle=False, verbose=0), plain.fit(x, y, shuffle=False, verbose=0))


def test_everything_inside_the_scope(in_order):
    x, y = arrays()
    with in_order.scope():
        model = ts.Model(make_net())
        model.compile("adam", "mse")
        history = model.fit(x, y, epochs=2, verbose=0, validation_data=(x, y))
        assert model.evaluate(x, y, verbose=0) == history.history["val_loss"][1]
        assert model.predict(x, verbose=0).shape == (50, 1)


def test_a_model_that_was_compiled_again(in_order):
    model, plain = make_pair(in_order)
    x, y = arrays()
    call_both((model, plain), "fit", x, y)
    for each in (model, plain):
        each.compile("sgd", "mae", metrics=["mse"])
    assert_same_history(*call_both((model, plain), "fit", x, y))


def test_the_model_is_sent_once(in_order, monkeypatch):
    model, _ = make_pair(in_order)
    x, y = arrays()
    model.fit(x, y, verbose=0, validation_data=(x, y))
    made = []
    define = type(in_order.shipper)._define
    monkeypatch.setattr(type(in_order.shipper), "_define", lambda *args: made.append(args[3]) or define(*args))
    model.fit(x, y, epochs=2, verbose=0, validation_data=(x, y))
    model.train_on_batch(x, y)
    assert made == []


def test_frozen_parts_and_batches_of_one(strategy):
    with strategy.scope():
        torch.manual_seed(0)
        backbone = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        backbone.requires_grad_(False).eval()
        model = ts.Model(nn.Sequential(backbone, nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
        model.compile("sgd", "mse")
    x, y = arrays()
    model.fit(x[:9], y[:9], batch_size=4, verbose=0)  # batches of 4, 4 and 1
    assert [module.training for module in model.module] == [False, True, True, True]
    assert backbone[1].running_mean.tolist() == [0.0] * 4
    assert model.module[2].running_mean.abs().min() > 0
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())


def test_steps_without_a_batch_size_and_no_reduction(in_order):
    x, y = arrays()
    histories = []
    for given in (ts.get_strategy(), in_order):
        with given.scope():
            torch.manual_seed(0)
            model = ts.Model(nn.Linear(3, 1))
            optimizer = functools.partial(torch.optim.SGD, lr=0.01)
            model.compile(optimizer, ts.losses.MeanSquaredError(reduction=None))
        history = model.fit(x, y, steps_per_epoch=4, epochs=2, shuffle=False, verbose=0).history
        histories.append([*history["loss"], model.evaluate(x, y, steps=3, verbose=0)])
    assert histories[0] == pytest.approx(histories[1], abs=1e-12)


class PlainMean(ts.metrics.Metric):
    """Adds up in a Python number, which stays on the worker."""

    def __init__(self):
        super().__init__()
        self.total = 0.0

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total += float((y_true - y_pred).abs().sum())

    def result(self):
        return self.total


def test_numbers_in_plain_attributes_of_a_metric_are_warned_of(in_order):
    x, y = arrays()
    with in_order.scope():
        model = ts.Model(nn.Linear(3, 1))
        model.compile("sgd", "mse", metrics=[PlainMean()])
    with pytest.warns(UserWarning, match="The metric PlainMean keeps 'total' in plain attributes"):
        model.evaluate(x, y, verbose=0)
