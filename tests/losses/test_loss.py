"""Reductions, with and without a strategy, and losses of users' own."""

import pickle

import pytest
import torch
from torch import nn

import torchstrategy as ts
from tests.programs import cpu_devices, largest_difference, strategy_for
from torchstrategy.errors import InvalidArgumentError
from torchstrategy.losses import Reduction

X, Y = torch.ones(4, 1), torch.zeros(4, 1)


def mirrored(num_replicas):
    return ts.MirroredStrategy(cpu_devices(num_replicas))


def test_reduction_equals_tfs_strings():
    assert [member.value for member in Reduction] == [
        "auto",
        "none",
        "sum",
        "sum_over_batch_size",
        "mean",
        "mean_with_sample_weight",
    ]
    assert ts.losses.MeanSquaredError(reduction="NONE").reduction is Reduction.NONE
    assert ts.losses.MeanSquaredError(reduction=None).reduction is Reduction.NONE
    assert ts.losses.MeanSquaredError().reduction == "auto"
    for bad in ("average", 3, ""):
        with pytest.raises(ValueError, match=r"not a valid reduction\. Expected one of"):
            ts.losses.MeanSquaredError(reduction=bad)


def test_configs():
    loss = ts.losses.Huber(0.5, reduction="sum", name="bend")
    assert loss.get_config() == {"delta": 0.5, "reduction": "sum", "name": "bend", "dtype": None}
    for name in set(ts.losses.__all__) - {"Loss", "Reduction"}:
        if name[0].isupper():
            config = getattr(ts.losses, name)().get_config()
            assert getattr(ts.losses, name).from_config(config).get_config() == config


def test_dtypes():
    for dtype in (torch.float64, "float64", "bfloat16"):
        loss = ts.losses.MeanSquaredError(dtype=dtype)
        assert loss(Y, X).dtype == loss.dtype == getattr(torch, str(dtype).removeprefix("torch."))
    exact = ts.losses.MeanSquaredError(dtype="float64", reduction="none")(
        torch.tensor([[0]]), torch.tensor([[2**25 + 1]])
    )
    assert exact.item() == (2**25 + 1) ** 2
    with pytest.raises(ValueError, match=r"dtype of a loss must be one of floating-point numbers\. Received: 'int32'"):
        ts.losses.Dice(dtype="int32")
    with pytest.raises(TypeError, match=r"dtype must be a torch\.dtype or its name"):
        ts.losses.Dice(dtype="none")


def test_the_first_argument_is_the_name():
    assert ts.losses.Loss("mine", "none", "float32").get_config() == {
        "name": "mine",
        "reduction": "none",
        "dtype": "float32",
    }
    for before in ("none", Reduction.SUM):
        with pytest.raises(TypeError, match=r"The first argument of a Loss is its name\. Write reduction="):
            ts.losses.Loss(before)


@pytest.mark.parametrize("reduction", ["auto", "sum_over_batch_size", "mean", "mean_with_sample_weight"])
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_means_are_refused_under_a_strategy(reduction, num_replicas):
    loss = ts.losses.MeanSquaredError(reduction=reduction)
    assert loss(Y, X).item() == 1.0
    assert ts.get_strategy().run(loss, args=(Y, X)).item() == 1.0  # the default strategy's
    strategy = mirrored(num_replicas)
    with strategy.scope(), pytest.raises(ValueError, match=r"reduction=ts\.losses\.Reduction\.NONE"):
        loss(Y, X)
    with pytest.raises(ValueError, match=r'compute_average_loss\(.*global_batch_size="actual"\)'):
        strategy.run(loss, args=(Y, X))
    with pytest.raises(ValueError, match="under a strategy"):
        ts.OneDeviceStrategy("cpu:0").run(loss, args=(Y, X))
    assert loss(Y, X).item() == 1.0


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_none_and_sum_are_allowed_under_a_strategy(num_replicas):
    strategy = mirrored(num_replicas)
    with strategy.scope():
        each = ts.losses.MeanSquaredError(reduction="none")
        total = ts.losses.MeanSquaredError(reduction="sum")
        assert each(Y, X).tolist() == [1.0] * 4
    assert strategy.reduce("sum", strategy.run(total, args=(Y, X)), axis=None).item() == 4.0 * num_replicas


@pytest.mark.parametrize("reduction", ["none", "sum"])
def test_a_mean_over_the_examples_is_refused_with_several_replicas(reduction):
    loss = ts.losses.MeanSquaredError(reduction=reduction)
    assert mirrored(1).run(loss, args=(Y[:, 0], X[:, 0])).item() == 1.0
    with pytest.raises(ValueError, match=r"Give y_true and y_pred the shape \[batch, 1\]"):
        mirrored(2).run(loss, args=(Y[:, 0], X[:, 0]))


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (2.0, [[2.0] * 3] * 2),
        ([1.0, 3.0], [[1.0] * 3, [3.0] * 3]),
        ([[1.0], [3.0]], [[1.0] * 3, [3.0] * 3]),
        ([[1.0, 2.0, 3.0]], [[1.0, 2.0, 3.0]] * 2),
        ([[[1.0], [2.0], [3.0]], [[0.0]] * 3], [[1.0, 2.0, 3.0], [0.0] * 3]),
        ([True, False], [[1.0] * 3, [0.0] * 3]),
    ],
)
def test_sample_weight_of_dense_losses(weight, expected):
    loss = ts.losses.MeanSquaredError(reduction="none")
    assert loss(torch.zeros(2, 3, 1), torch.ones(2, 3, 1), weight).tolist() == expected


@pytest.mark.parametrize("weight", [[1.0, 2.0, 3.0], [[1.0, 2.0]], [[[[1.0]]]]])
def test_sample_weight_that_does_not_fit(weight):
    with pytest.raises(InvalidArgumentError, match="one entry for each example"):
        ts.losses.MeanSquaredError(reduction="none")(torch.zeros(2, 3, 1), torch.ones(2, 3, 1), weight)


def test_a_loss_of_ones_own():
    class Quartic(ts.losses.Loss):
        def call(self, y_true, y_pred):
            return (y_true - y_pred).pow(4).mean(-1)

    assert Quartic(name="mine").name == "mine"
    assert Quartic().name == "quartic"
    assert type("MyF1Loss", (Quartic,), {})().name == "my_f1_loss"
    assert Quartic()(Y, 2 * X, sample_weight=0.5).item() == 8.0

    class Mistakes(ts.losses.Loss):
        def call(self, y_true, y_pred):
            return y_true != y_pred

    assert Mistakes(reduction="none")(torch.tensor([0, 1, 2]), torch.tensor([0, 2, 1]), 0.5).tolist() == [0.0, 0.5, 0.5]

    class Halves(ts.losses.Loss):
        def call(self, y_true, y_pred):
            return torch.full((1000,), 100.0, dtype=torch.float16)  # the sum, 1e5, is beyond float16

    assert Halves()(Y, X).item() == 100.0
    assert Halves()(Y, X).dtype == torch.float16
    with pytest.raises(NotImplementedError, match="Loss must define call"):
        ts.losses.Loss()(Y, X)


def test_a_loss_is_a_plain_object():
    loss = ts.losses.Huber(delta=0.5, reduction="none")
    assert repr(loss) == "Huber(reduction='none', name='huber_loss')"
    again = pickle.loads(pickle.dumps(loss))
    assert torch.equal(again(Y, X), loss(Y, X))
    assert again.reduction is Reduction.NONE


@pytest.mark.slow
def test_under_torch_compile():
    loss = ts.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    logits = torch.randn(3, 4, requires_grad=True)
    labels = torch.tensor([0, 3, 1])
    compiled = torch.compile(lambda x: loss(labels, x, [1.0, 2.0, 3.0]), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(logits), loss(labels, logits, [1.0, 2.0, 3.0]))


def train_dense(devices, num_examples=7, batch_size=3):
    """Train a net that labels each pixel, weighing no pixel more than another."""
    torch.manual_seed(5)
    strategy = strategy_for(devices)
    images, labels = torch.randn(num_examples, 2, 4, 5), torch.randint(3, (num_examples, 4, 5))
    with strategy.scope():
        model = nn.Conv2d(2, 3, 3, padding=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        loss_object = ts.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none", axis=1)
    dataset = strategy.experimental_distribute_dataset((images, labels), batch_size=batch_size)

    def train_step(x, y):
        optimizer.zero_grad()
        per_pixel = loss_object(y, model(x))
        assert per_pixel.shape == y.shape
        pixels = y.shape[1:].numel()
        loss = ts.nn.compute_average_loss(per_pixel / pixels, global_batch_size="actual")
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = [float(strategy.reduce("sum", strategy.run(train_step, args=batch), axis=None)) for batch in dataset]
    return [parameter.detach().flatten().tolist() for parameter in model.parameters()] + [losses]


@pytest.fixture(scope="module")
def dense_on_one():
    """The same, written with torch alone."""
    torch.manual_seed(5)
    images, labels = torch.randn(7, 2, 4, 5), torch.randint(3, (7, 4, 5))
    model = nn.Conv2d(2, 3, 3, padding=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for x, y in zip(images.split(3), labels.split(3), strict=True):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return [parameter.detach().flatten().tolist() for parameter in model.parameters()] + [losses]


@pytest.mark.parametrize("num_replicas", [0, 1, 2, 3])
def test_dense_labels_on_replicas(num_replicas, dense_on_one):
    assert largest_difference(train_dense(cpu_devices(num_replicas)), dense_on_one) < 1e-6


def test_dense_labels_on_two_processes(process_pool, dense_on_one):
    for result in process_pool(2).run(train_dense, None):
        assert largest_difference(result, dense_on_one) < 1e-6


def test_dummy_axis_of_dense_labels():
    y_true, y_pred = torch.rand(2, 3, 4), torch.rand(2, 3, 4)
    for loss in (ts.losses.MeanSquaredError(reduction="none"), ts.losses.BinaryCrossentropy(reduction="none")):
        assert loss(y_true, y_pred).shape == (2, 3)  # takes the width for the classes
        assert loss(y_true.unsqueeze(-1), y_pred.unsqueeze(-1)).shape == (2, 3, 4)
        assert loss(y_true, y_pred.unsqueeze(-1)).shape == (2, 3, 4)
