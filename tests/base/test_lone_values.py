"""Norms of shares with one value for each channel: what Keras computes, where torch raises an error."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchstrategy as ts

LR = 0.1


def cpus(number):
    return [f"cpu:{i}" for i in range(number)]


def data(num, size=3, shape=()):
    generator = torch.Generator().manual_seed(num)
    x = torch.randn(num, size, *shape, generator=generator, dtype=torch.float64)
    return x, torch.randn(num, size, generator=generator, dtype=torch.float64)


class Functional(nn.BatchNorm1d):
    """A layer of another package, with a forward of its own."""

    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1)


LAYERS = {
    "1d": (nn.BatchNorm1d, ()),
    "1d with a length": (nn.BatchNorm1d, (1,)),
    "2d": (nn.BatchNorm2d, (1, 1)),
    "3d": (nn.BatchNorm3d, (1, 1, 1)),
    "lazy": (lambda size, **options: nn.LazyBatchNorm1d(**options), ()),
    "functional": (Functional, ()),
    "all batches alike": (functools.partial(nn.BatchNorm1d, momentum=None), ()),
}


def make_layer(name):
    layer = LAYERS[name][0](3, dtype=torch.float64)
    if name == "lazy":
        layer(torch.zeros(2, 3, dtype=torch.float64))
        layer.reset_running_stats()
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([0.5, 1.0, 2.0]))
        layer.bias.copy_(torch.tensor([0.1, -0.2, 0.3]))
    return layer


def train(devices, name, num, batch_size):
    """Return the layer's parameters and running statistics after an epoch."""
    strategy = ts.MirroredStrategy(devices)
    with strategy.scope():
        model = nn.Sequential(make_layer(name), nn.Flatten())
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)

    def step(batch):
        x, y = batch
        optimizer.zero_grad()
        loss = ts.nn.compute_average_loss((model(x) - y).square().mean(-1), global_batch_size="actual")
        loss.backward()
        optimizer.step()

    for batch in strategy.experimental_distribute_dataset(data(num, shape=LAYERS[name][1]), batch_size=batch_size):
        strategy.run(step, args=(batch,))
    return {key: value.detach().clone() for key, value in model[0].state_dict().items()}


def as_keras(name, num, batch_size, num_replicas):
    """Return the same, with shares of one example normalised by hand: mean x, variance 0."""
    layer = make_layer(name)
    x, y = data(num, shape=LAYERS[name][1])
    optimizer = torch.optim.SGD(layer.parameters(), lr=LR)
    for number, (batch_x, batch_y) in enumerate(zip(x.split(batch_size), y.split(batch_size), strict=True)):
        loss, means, variances = 0.0, [], []
        before = layer.running_mean.clone(), layer.running_var.clone()
        factor = 1 / (number + 1) if layer.momentum is None else 0.1
        size = -(-len(batch_x) // num_replicas)
        for share, labels in zip(batch_x.split(size), batch_y.split(size), strict=True):
            rows = share.flatten(1)
            mean = rows.mean(0)
            variance = rows.var(0, correction=0)
            outputs = (rows - mean) / (variance + layer.eps).sqrt() * layer.weight + layer.bias
            loss = loss + (outputs - labels).square().mean(-1).sum() / len(batch_x)
            means.append(before[0] * (1 - factor) + mean * factor)
            unbiased = rows.var(0) if len(rows) > 1 else torch.zeros(3, dtype=torch.float64)
            variances.append(before[1] * (1 - factor) + unbiased * factor)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        layer.running_mean.copy_(torch.stack(means).mean(0))
        layer.running_var.copy_(torch.stack(variances).mean(0))
    return {key: value for key, value in layer.state_dict().items() if key != "num_batches_tracked"}


def assert_equal(found, expected):
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=1e-12, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize(("num_replicas", "num", "batch_size"), [(2, 9, 6), (3, 5, 5), (2, 2, 2)])
def test_a_share_of_one_trains_as_in_keras(name, num_replicas, num, batch_size):
    found = train(cpus(num_replicas), name, num, batch_size)
    assert_equal(found, as_keras(name, num, batch_size, num_replicas))


def test_a_share_of_one_in_processes(process_pool):
    for found in process_pool(2).run(train, None, "1d", 9, 6):
        assert_equal(found, as_keras("1d", 9, 6, 2))


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_a_batch_of_one_is_torchs_error(num_replicas):
    with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
        train(cpus(num_replicas), "1d", 1, 4)


def test_outside_run_torchs_error_stays():
    ts.MirroredStrategy(cpus(2))
    for layer in (nn.BatchNorm1d(3), nn.GroupNorm(3, 3)):
        with pytest.raises(ValueError, match="Expected more than 1 value per channel"):
            layer(torch.ones(1, 3))


def in_fit(layer, num_replicas, num, batch_size, epochs=2, size=3):
    strategy = ts.MirroredStrategy(cpus(num_replicas))
    with strategy.scope():
        torch.manual_seed(0)
        model = ts.Model(nn.Sequential(layer(), nn.Linear(size, size)).double())
        model.compile(functools.partial(torch.optim.SGD, lr=LR), "mse")
    x, y = data(num, size)
    history = model.fit(x, y, batch_size, epochs=epochs, shuffle=False, verbose=0, validation_data=(x[:1], y[:1]))
    return model, history.history


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize("num", [1, 2, 5])
def test_fit_trains_on_every_batch_size(num_replicas, num):
    layer = functools.partial(nn.BatchNorm1d, 3)
    model, history = in_fit(layer, num_replicas, num, 4)
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())
    x, y = data(num)
    assert history["val_loss"][-1] == pytest.approx(F.mse_loss(model.eval()(x[:1]), y[:1]).item(), rel=1e-6)


def test_one_example_in_fit_gives_the_bias():
    model, history = in_fit(functools.partial(nn.BatchNorm1d, 3), 1, 1, 4, epochs=1)
    x, y = data(1)
    torch.manual_seed(0)
    reference = nn.Linear(3, 3).double()
    assert history["loss"][0] == pytest.approx(F.mse_loss(reference.bias[None], y).item(), rel=1e-6)
    norm = model.module[0]
    torch.testing.assert_close(norm.running_mean, 0.1 * x[0])
    torch.testing.assert_close(norm.running_var, torch.full((3,), 0.9).double())
    assert norm.num_batches_tracked == 1


def test_statistics_of_the_batch_in_evaluation():
    model, _ = in_fit(functools.partial(nn.BatchNorm1d, 3, track_running_stats=False), 2, 4, 4, epochs=1)
    expected = model.module[1](model.module[0].bias)
    torch.testing.assert_close(torch.from_numpy(model.predict(data(1)[0], verbose=0))[0], expected)


@pytest.mark.parametrize("batch_size", [2, 4])
@pytest.mark.parametrize("layer", [ts.nn.SyncBatchNorm, nn.SyncBatchNorm])
def test_synchronised_layers_in_fit_train_as_one(layer, batch_size):
    models = [in_fit(functools.partial(layer, 3), num, 5, batch_size)[0] for num in (2, 3)]
    plain = in_fit(functools.partial(nn.BatchNorm1d, 3), 1, 5, batch_size)[0]
    for model in models:
        assert_equal(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
def test_one_value_for_each_group_is_no_matter_of_the_split(num_replicas):
    model = in_fit(functools.partial(nn.GroupNorm, 3, 3), num_replicas, 5, 3)[0]
    expected = in_fit(functools.partial(nn.GroupNorm, 3, 3), 1, 5, 3)[0]
    assert_equal(model.state_dict(), expected.state_dict())
    assert model.module[0].weight.tolist() == pytest.approx([1.0, 1.0, 1.0], abs=1e-12)  # of values that are all 0
    assert model.module[0].bias.abs().min() > 0


def test_no_number_stays_to_be_seen():
    strategy = ts.MirroredStrategy(cpus(2))
    with strategy.scope():
        layer = nn.BatchNorm1d(2)
    x = torch.tensor([[1.0, 2.0], [float("nan"), 3.0]])
    (batch,) = strategy.experimental_distribute_dataset(x, batch_size=2)
    outputs = strategy.experimental_local_results(strategy.run(layer, args=(batch,)))
    assert [output.isnan().tolist() for output in outputs] == [[[False, False]], [[True, False]]]


def test_lower_precision_keeps_its_dtype():
    strategy = ts.MirroredStrategy(cpus(2))
    with strategy.scope():
        layer = nn.BatchNorm1d(2)
    (batch,) = strategy.experimental_distribute_dataset(torch.ones(2, 2, dtype=torch.bfloat16), batch_size=2)
    (first, _) = strategy.experimental_local_results(strategy.run(layer, args=(batch,)))
    assert first.dtype == torch.bfloat16


@pytest.mark.slow
def test_layers_are_compiled_and_scripted_as_before():
    ts.MirroredStrategy(cpus(2))
    model = nn.Sequential(nn.BatchNorm1d(3), nn.GroupNorm(1, 3))
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    expected = model(x)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    with pytest.warns(DeprecationWarning, match="torch.jit.script"):
        scripted = torch.jit.script(model)
    torch.testing.assert_close(scripted(x), expected)
