"""``ts.Model``: what it is called with, what subclasses override, and what goes wrong."""

import contextlib
import copy
import functools
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import torchstrategy as ts
from torchstrategy.base import log
from torchstrategy.errors import InvalidArgumentError

TWO = ["cpu:0", "cpu:1"]
STRATEGIES = {
    "default": ts.get_strategy,
    "one_device": lambda: ts.OneDeviceStrategy("cpu:0"),
    "two": lambda: ts.MirroredStrategy(TWO),
    "three": lambda: ts.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]),
    "central": lambda: ts.experimental.CentralStorageStrategy(TWO),
}


@pytest.fixture(params=STRATEGIES)
def strategy(request):
    return STRATEGIES[request.param]()


def data(num=10, size=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num, size, generator=generator, dtype=torch.float64)
    return x, x.sum(1, keepdim=True) + 0.1 * torch.randn(num, 1, generator=generator, dtype=torch.float64)


def linear(size=3, outputs=1):
    layer = nn.Linear(size, outputs, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(-0.5, 0.5, size * outputs).reshape(outputs, size))
        layer.bias.zero_()
    return layer


def made(strategy, module=None, **options):
    options = {"optimizer": functools.partial(torch.optim.SGD, lr=0.1), "loss": "mse", **options}
    with strategy.scope():
        model = ts.Model(linear() if module is None else module())
        model.compile(**options)
    return model


@contextlib.contextmanager
def propagating():
    """Let the library's lines reach pytest, each of them anew."""
    log._said.clear()
    before, log.logger.propagate = log.logger.propagate, True
    try:
        yield
    finally:
        log.logger.propagate = before


def reference(x, y, epochs, batch_size, lr=0.1, window=1):
    """Train by hand, without the library; return the epochs' losses and the weight."""
    layer, losses = linear(), []
    for _ in range(epochs):
        total = 0.0
        for part_x, part_y in zip(x.split(batch_size * window), y.split(batch_size * window), strict=True):
            layer.zero_grad()
            loss = nn.functional.mse_loss(layer(part_x), part_y)
            loss.backward()
            total += loss.item() * len(part_x)
            with torch.no_grad():
                for parameter in layer.parameters():
                    parameter -= lr * parameter.grad
        losses.append(total / len(x))
    return losses, layer.weight.detach()


def test_fit_is_a_plain_loop(strategy):
    x, y = data()
    losses, weight = reference(x, y, 3, 4)
    model = made(strategy)
    history = model.fit(x, y, batch_size=4, epochs=3, shuffle=False, verbose=0)
    assert history.history["loss"] == pytest.approx(losses, rel=1e-6)
    torch.testing.assert_close(model.module.weight.detach(), weight, rtol=0, atol=1e-12)
    assert model.history is history
    assert model.iterations == 9


@pytest.mark.parametrize("steps_per_execution", [1, 5])
def test_a_window_of_batches_is_one_step_on_all_their_examples(strategy, steps_per_execution):
    x, y = data(11)
    _, weight = reference(x, y, 2, 2, window=3)
    model = made(strategy, gradient_accumulation_steps=3, steps_per_execution=steps_per_execution)
    model.fit(x, y, batch_size=2, epochs=2, shuffle=False, verbose=0)
    torch.testing.assert_close(model.module.weight.detach(), weight, rtol=0, atol=1e-12)
    assert model.iterations == 4


def test_regularizers_count_once_in_a_window(strategy):
    x, y = data(8)

    def regularized():
        layer = linear()
        ts.regularize(layer, "weight", ts.regularizers.L2(0.1))
        return layer

    whole = made(ts.get_strategy(), regularized)
    whole.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    parts = made(strategy, regularized, gradient_accumulation_steps=4)
    parts.fit(x, y, batch_size=2, epochs=2, shuffle=False, verbose=0)
    torch.testing.assert_close(parts.module.weight.detach(), whole.module.weight.detach(), rtol=0, atol=1e-12)
    assert parts.history.history["loss"] == pytest.approx(whole.history.history["loss"], rel=1e-6)


def test_evaluate_counts_each_example_once_and_predict_keeps_the_order(strategy):
    x, y = data(7)
    model = made(strategy, metrics=["mae"])
    expected = linear()(x).detach()
    assert model.evaluate(x, y, batch_size=3, verbose=0) == pytest.approx(
        [((expected - y) ** 2).mean().item(), (expected - y).abs().mean().item()], rel=1e-6
    )
    assert model.metrics_names == ["loss", "mae"]
    predictions = model.predict(x, batch_size=3, verbose=0)
    np.testing.assert_allclose(predictions, expected.numpy(), rtol=0, atol=1e-12)
    np.testing.assert_allclose(model.predict_on_batch(x[:2]), expected[:2].numpy(), rtol=0, atol=1e-12)


def test_batches_alone_have_numbers_of_their_own(strategy):
    x, y = data(6)
    model = made(strategy, metrics=["mae"])
    for rows in (slice(0, 4), slice(4, 6), slice(0, 6)):
        for method in (model.train_on_batch, model.test_on_batch):
            y_pred = model(x[rows])
            expected = [nn.functional.mse_loss(y_pred, y[rows]).item(), nn.functional.l1_loss(y_pred, y[rows]).item()]
            assert method(x[rows], y[rows]) == pytest.approx(expected, rel=1e-6)
    assert model.metrics[1].result() == pytest.approx(expected[1], rel=1e-6)  # until the next call


class MapStyle(torch.utils.data.Dataset):
    """Examples that are read one by one."""

    def __init__(self, *columns):
        self.columns = columns

    def __len__(self):
        return len(self.columns[0])

    def __getitem__(self, index):
        return tuple(column[index] for column in self.columns)


@pytest.mark.parametrize("num", [1, 10, 101])
@pytest.mark.parametrize("steps", [1, 3, 200])
def test_steps_without_a_batch_size_see_all_of_the_data(num, steps):
    x, y = data(num)
    model = made(ts.get_strategy())
    size = -(-num // steps)
    expected = [min(size, num - start) for start in range(0, num, size)]
    sizes = []

    class Recorder(ts.callbacks.Callback):
        def on_predict_batch_end(self, batch, logs=None):
            sizes.append(len(logs["outputs"]))

    for given in (x, torch.utils.data.TensorDataset(x, y), MapStyle(x, y)):
        sizes.clear()
        model.predict(given, steps=steps, verbose=0, callbacks=[Recorder()])
        assert sizes == expected


def test_steps_of_fit_and_its_validation_see_all_of_the_data(strategy):
    x, y = data(100)
    expected = made(strategy).fit(x, y, 10, epochs=2, shuffle=False, verbose=0, validation_data=(x, y)).history
    settings = {"steps_per_epoch": 10, "epochs": 2, "shuffle": False, "verbose": 0}
    found = made(strategy).fit(x, y, **settings, validation_data=(x, y), validation_steps=2).history
    assert {name: pytest.approx(values, rel=1e-6) for name, values in expected.items()} == found
    found = made(strategy).fit(x, y, 10, validation_data=(x, y), validation_steps=2, **settings).history
    assert found["val_loss"] != pytest.approx(expected["val_loss"], rel=1e-6)  # batch_size counts, and gives 20 of them


class Doubled(ts.Model):
    """A custom step with a metric of its own and a scalar that is none."""

    def __init__(self):
        super().__init__()
        self.layer = linear()
        self.seen = ts.metrics.Sum(name="seen")

    def forward(self, x):
        return self.layer(x)

    def train_step(self, data):
        x, y = data
        loss = 2 * self.compute_loss(x, y, self(x))
        self.track_loss(loss)
        self.minimize(loss)
        self.seen.update_state(torch.ones(len(x)))
        own = x.sum() / len(x) if len(x) else torch.tensor(torch.nan)
        return {"loss": None, "seen": self.seen.result(), "mean_x": own}


def test_a_step_of_its_own(strategy):
    x, y = data(7)
    with strategy.scope():
        model = Doubled()
        model.compile(functools.partial(torch.optim.SGD, lr=0.05), loss="mse")
    history = model.fit(x, y, batch_size=7, epochs=2, verbose=0, shuffle=False).history
    losses, weight = reference(x, y, 2, 7, lr=0.1)
    torch.testing.assert_close(model.layer.weight.detach(), weight, rtol=0, atol=1e-12)
    assert list(history) == ["loss", "seen", "mean_x"]
    assert history["loss"] == pytest.approx([2 * loss for loss in losses], rel=1e-6)
    assert history["seen"] == [7.0, 7.0]
    assert history["mean_x"] == pytest.approx([x.sum(1).mean().item()] * 2)


class Extended(ts.Model):
    """Adds to the compiled metrics; one of its own metrics is for tests only."""

    def __init__(self):
        super().__init__(linear())
        self.largest = Largest()
        self.tested = ts.metrics.Mean(name="tested")

    def compute_metrics(self, x, y, y_pred, sample_weight=None):
        results = super().compute_metrics(x, y, y_pred, sample_weight)
        self.largest.update_state(y_pred)
        if not self.training:
            self.tested.update_state(y)
        return {**results, "num": float(len(x) > -1)}


class Largest(ts.metrics.Metric):
    def __init__(self):
        super().__init__(name="largest")
        self.value = self.add_weight("value", initializer=-torch.inf, aggregation="max")

    def update_state(self, values):
        if len(values):
            self.value = torch.maximum(self.value, values.max())

    def result(self):
        return self.value


def test_metrics_are_shown_if_they_were_updated(strategy):
    x, y = data(6)
    with strategy.scope():
        model = Extended()
        model.compile(functools.partial(torch.optim.SGD, lr=0.0), loss="mse", metrics=["mae"])
    history = model.fit(x, y, batch_size=4, validation_data=(x, y), verbose=0).history
    assert list(history) == [
        "loss", "mae", "largest", "num", "val_loss", "val_mae", "val_largest", "val_tested", "val_num",
    ]  # fmt: skip
    assert history["largest"] == history["val_largest"] == pytest.approx([linear()(x).max().item()], rel=1e-6)
    assert history["num"] == [1.0]
    assert set(model.metrics_names) == {"loss", "mae", "largest", "tested"}


def test_clip_gradients_sees_the_sum_over_replicas(strategy):
    class Clipped(ts.Model):
        def clip_gradients(self):
            norms.append(nn.utils.clip_grad_norm_(self.parameters(), 0.01).item())

    norms = []
    x, y = data(6)
    with strategy.scope():
        model = Clipped(linear())
        model.compile(functools.partial(torch.optim.SGD, lr=1.0), loss="mse")
    before = model.module.weight.detach().clone()
    model.fit(x, y, batch_size=6, verbose=0)
    layer = linear()
    nn.functional.mse_loss(layer(x), y).backward()
    norm = torch.cat([p.grad.flatten() for p in layer.parameters()]).norm().item()
    assert norms == pytest.approx([norm] * strategy.num_replicas_in_sync)
    assert (model.module.weight.detach() - before).norm() <= 0.01 + 1e-9


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = linear(), linear(2)

    def forward(self, left, right):
        return {"sum": self.a(left) + self.b(right), "left": self.a(left)}


@pytest.mark.parametrize("form", [tuple, list, dict])
def test_several_inputs_and_outputs(strategy, form):
    left, y = data(5)
    right, _ = data(5, 2, seed=1)
    x = {"left": left, "right": right} if form is dict else form((left, right))
    model = made(strategy, Pair, loss={"sum": "mse", "left": "mae"}, loss_weights={"sum": 1.0, "left": 0.5})
    history = model.fit(x, {"sum": y, "left": y}, batch_size=3, epochs=2, shuffle=False, verbose=0).history
    one = made(ts.get_strategy(), Pair, loss={"sum": "mse", "left": "mae"}, loss_weights={"sum": 1.0, "left": 0.5})
    expected = one.fit(x, {"sum": y, "left": y}, batch_size=3, epochs=2, shuffle=False, verbose=0).history
    assert {"loss", "sum_loss", "left_loss"} == set(history)
    for name, values in expected.items():
        assert history[name] == pytest.approx(values, rel=1e-6)
    predictions = model.predict(x, batch_size=2, verbose=0)
    assert {name: value.shape for name, value in predictions.items()} == {"sum": (5, 1), "left": (5, 1)}


class Listed(nn.Module):
    """Takes its inputs in one argument; the other is no input."""

    def __init__(self):
        super().__init__()
        self.layer = linear()

    def forward(self, inputs, training=False):
        return self.layer(inputs[0] + inputs[1])


def test_a_tuple_for_one_argument(strategy):
    x, _ = data(5)
    model = made(strategy, Listed)
    predictions = model.predict((x, x), batch_size=2, verbose=0)
    np.testing.assert_allclose(predictions, linear()(2 * x).detach().numpy(), rtol=0, atol=1e-12)


def test_modes_of_modules_survive_evaluation(strategy):
    x, y = data(4)
    model = made(strategy, lambda: nn.Sequential(nn.Dropout(0.5), linear()))
    model.eval()
    model.evaluate(x, y, verbose=0)
    assert not model.training
    model.train()
    model.module[0].eval()
    model.predict(x, verbose=0)
    assert model.training
    assert not model.module[0].training


def test_predictions_draw_no_dropout(strategy):
    x, _ = data(4)
    model = made(strategy, lambda: nn.Sequential(linear(), nn.Dropout(0.5)))
    np.testing.assert_allclose(model.predict(x, verbose=0), linear()(x).detach().numpy(), rtol=0, atol=1e-12)


def test_lazy_layers_take_their_shapes_from_the_first_batch(strategy):
    x, y = data(7)
    torch.manual_seed(0)
    model = made(strategy, lambda: nn.LazyLinear(1, dtype=torch.float64))
    history = model.fit(x, y, batch_size=4, epochs=3, verbose=0).history
    assert model.module.weight.shape == (1, 3)
    assert history["loss"][-1] < history["loss"][0]


def test_compile_again_after_training(strategy):
    x, y = data()
    model = made(strategy)
    model.fit(x, y, verbose=0)
    model.compile(functools.partial(torch.optim.SGD, lr=0.0), loss="mae", metrics=["mse"])
    before = model.module.weight.detach().clone()
    history = model.fit(x, y, verbose=0, epochs=2).history
    torch.testing.assert_close(model.module.weight.detach(), before, rtol=0, atol=0)
    assert list(history) == ["loss", "mse"]
    assert model.iterations == 2


def test_compile_outside_the_scope(strategy):
    x, y = data()
    with strategy.scope():
        model = ts.Model(linear())
    model.compile(functools.partial(torch.optim.SGD, lr=0.1), loss="mse", metrics=["mae"])
    model.fit(x, y, batch_size=4, epochs=3, shuffle=False, verbose=0)
    torch.testing.assert_close(model.module.weight.detach(), reference(x, y, 3, 4)[1], rtol=0, atol=1e-12)
    with strategy.scope():
        assert model.evaluate(x, y, verbose=0, return_dict=True).keys() == {"loss", "mae"}
        model.fit(x, y, verbose=0)


@pytest.mark.parametrize("amp", ["bf16", "fp16"])
def test_mixed_precision(amp):
    torch.manual_seed(0)
    x = torch.randn(64, 3)
    y = x.sum(1, keepdim=True)
    with ts.MirroredStrategy(TWO).scope():
        model = ts.Model(nn.Linear(3, 1))
        model.compile(functools.partial(torch.optim.SGD, lr=0.1), loss="mse", amp=amp)
    losses = model.fit(x, y, epochs=5, verbose=0).history["loss"]
    assert losses[-1] < 0.1 * losses[0]
    assert model.module.weight.dtype == torch.float32
    assert model.predict(x[:2], verbose=0).dtype == (np.float16 if amp == "fp16" else np.float32)


def test_validation_follows_its_frequency(strategy):
    x, y = data(8)
    model = made(strategy)
    history = model.fit(x, y, epochs=4, validation_data=(x, y), validation_freq=2, verbose=0).history
    assert len(history["loss"]) == 4
    assert len(history["val_loss"]) == 2
    assert history["val_loss"][-1] == pytest.approx(model.evaluate(x, y, verbose=0), rel=1e-6)


def test_epochs_go_on_in_the_data_with_steps_per_epoch(strategy):
    x, y = data(8)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=2)
    parts, whole = made(strategy), made(strategy)
    parts.fit(loader, epochs=2, steps_per_epoch=2, verbose=0)
    whole.fit(loader, verbose=0)
    torch.testing.assert_close(parts.module.weight.detach(), whole.module.weight.detach(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("steps", "epochs"), [(4, 3), (2, 4), (3, 4)])
def test_data_begins_anew_at_its_end(strategy, steps, epochs, caplog):
    x, y = data(8)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=2)
    model = made(strategy)
    with propagating(), caplog.at_level("WARNING", logger="torchstrategy"):
        history = model.fit(loader, epochs=epochs, steps_per_epoch=steps, verbose=0)
    assert len(history.history["loss"]) == epochs
    # Of 4 batches, an epoch of 3 is followed by one of the last batch only.
    assert model.iterations == (8 if steps == 3 else steps * epochs)
    assert ("the data ended after 1 of steps_per_epoch=3 batches" in caplog.text) is (steps == 3)


def test_a_callback_stops_within_the_epoch(strategy):
    class Stop(ts.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            seen.append((batch, logs["loss"]))
            self.model.stop_training = batch == 1

    seen = []
    x, y = data(8)
    model = made(strategy)
    model.fit(x, y, batch_size=2, epochs=5, callbacks=[Stop()], verbose=0)
    assert [batch for batch, _ in seen] == [0, 1]
    assert model.iterations == 2


def test_batches_between_callbacks(strategy):
    class Note(ts.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            seen.append(("begin", batch))

        def on_train_batch_end(self, batch, logs=None):
            seen.append(("end", batch))

    seen = []
    x, y = data(7)
    made(strategy, steps_per_execution=3).fit(x, y, batch_size=1, callbacks=[Note()], verbose=0)
    assert seen == [("begin", 0), ("end", 2), ("begin", 3), ("end", 5), ("begin", 6), ("end", 6)]


def test_a_copy_of_a_model_was_never_compiled(strategy):
    x, y = data()
    model = made(strategy)
    model.fit(x, y, verbose=0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not other.compiled
        torch.testing.assert_close(other.module.weight, model.module.weight)


# ------------------------------------------------------------------------------------------------ what goes wrong


def test_not_compiled():
    with pytest.raises(RuntimeError, match=r"Call model\.compile\(.*before model\.fit"):
        ts.Model(linear()).fit(*data())
    with pytest.raises(RuntimeError, match=r"before model\.evaluate"):
        ts.Model(linear()).evaluate(*data())


def test_made_outside_compiled_inside():
    model = ts.Model(linear())
    with (
        ts.MirroredStrategy(TWO).scope(),
        pytest.raises(ValueError, match=r"'linear' was not made in the scope of the MirroredStrategy.*Make the model"),
    ):
        model.compile("sgd", "mse")
    assert not model.compiled


def test_wrong_shape_of_x(strategy):
    x, y = data(4, 5)
    with pytest.raises(InvalidArgumentError, match=r"fit\(x=\.\.\.\).*'linear'.*float64\[\d, 5\].*mat1 and mat2"):
        made(strategy).fit(x, y, verbose=0)


def test_no_labels(strategy):
    with pytest.raises(ValueError, match=r"fit\(y=\.\.\.\).*needs labels"):
        made(strategy).fit(data()[0], verbose=0)


def test_nothing_to_minimize():
    model = made(ts.get_strategy(), loss=None)
    with pytest.raises(ValueError, match="pass loss= to compile"):
        model.fit(*data(), verbose=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps_per_execution": 0}, r"compile\(steps_per_execution=...\) must be a positive integer"),
        ({"gradient_accumulation_steps": 1.5}, r"compile\(gradient_accumulation_steps=...\)"),
        ({"amp": "int8"}, r"compile\(amp=...\) must be 'bf16', 'fp16' or None"),
        ({"loss": "mean_sqared_error"}, "mean_squared_error"),
        ({"optimizer": "adamm"}, "adam"),
        ({"metrics": ["acuracy"]}, "accuracy"),
    ],
)
def test_bad_options_leave_the_model_as_it_was(options, message):
    model = made(ts.get_strategy())
    optimizer = model.optimizer
    with pytest.raises(ValueError, match=message):
        model.compile(**{"optimizer": "sgd", "loss": "mse", **options})
    assert model.optimizer is optimizer


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epochs": 0}, r"fit\(epochs=...\) must be a positive integer"),
        ({"initial_epoch": -1}, r"fit\(initial_epoch=...\)"),
        ({"validation_freq": 0, "validation_data": data()}, r"fit\(validation_freq=...\)"),
        ({"class_weight": {0: 1.0}, "sample_weight": torch.ones(10)}, "pass one of them"),
        ({"steps_per_epoch": 0}, r"fit\(steps_per_epoch=...\)"),
    ],
)
def test_bad_arguments_of_fit(arguments, message):
    with pytest.raises(ValueError, match=message):
        made(ts.get_strategy()).fit(*data(), verbose=0, **arguments)


def test_a_model_without_forward():
    with pytest.raises(NotImplementedError, match=r"must define forward\(self, x\)"):
        ts.Model()(torch.ones(1))
    with pytest.raises(TypeError, match=r"wraps a torch\.nn\.Module"):
        ts.Model(torch.ones(1))


def test_own_steps_in_a_window_must_leave_the_update_to_minimize():
    class Own(ts.Model):
        def train_step(self, data):
            x, y = data
            self.optimizer.zero_grad()
            self.compute_loss(x, y, self(x)).backward()
            self.optimizer.step()

    model = Own(linear())
    model.compile("sgd", "mse", gradient_accumulation_steps=2)
    with pytest.raises(RuntimeError, match=r"self\.minimize\(loss\)"):
        model.fit(*data(), batch_size=2, verbose=0)


def test_arguments_that_only_keras_has_say_what_to_do():
    model = ts.Model(linear())
    with pytest.raises(TypeError, match=r"^compile\(run_eagerly=...\): leave it out: steps run eagerly"):
        model.compile("sgd", "mse", run_eagerly=True)
    for method in (model.fit, model.evaluate, model.predict):
        with pytest.raises(TypeError, match=r"\(workers=...\): leave it out. A `DataLoader\(..., num_workers"):
            method(*data()[:1], workers=2)
    with pytest.raises(TypeError, match=r"^ts.Model\(inputs=...\): there is no functional API. Derive from ts.Model"):
        ts.Model(inputs=1)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'nonsense'"):
        ts.Model(nonsense=1)


class Called(ts.Model):
    def call(self, x):
        return x


def test_call_is_to_be_named_forward():
    with pytest.raises(NotImplementedError, match=r"Called defines `call`, as in Keras: name it `forward`."):
        Called()(torch.ones(2, 1))
