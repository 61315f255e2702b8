"""The sum of the replicas' shares is the loss of one replica, for every split, weights and reduction."""

import functools
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import torchstrategy as ts
from torchstrategy import losses
from torchstrategy.base import log
from torchstrategy.base.values import mark_windows
from torchstrategy.fit import steps
from torchstrategy.fit.compiled_loss import CompiledLoss
from torchstrategy.fit.compiled_metrics import CompiledMetrics
from torchstrategy.fit.label_divisors import sum_over_replicas

NUM_EXAMPLES = 10
CLASSES = 3
CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)


def cpus(count):
    return [f"cpu:{i}" for i in range(count)]


def make_layer(num_outputs):
    layer = nn.Linear(2, num_outputs, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(-1.0, 1.0, 2 * num_outputs).reshape(num_outputs, 2))
        layer.bias.copy_(torch.linspace(0.5, -0.2, num_outputs))
    return layer


def inputs():
    return torch.sin(torch.arange(2.0 * NUM_EXAMPLES, dtype=torch.float64)).reshape(NUM_EXAMPLES, 2)


def class_ids():
    return torch.tensor([0, 1, 2, 1, 0, 2, 2, 1, 0, 1])


def values(num_outputs):
    return torch.cos(torch.arange(float(NUM_EXAMPLES * num_outputs), dtype=torch.float64)).reshape(NUM_EXAMPLES, -1)


def weights(*shape):
    count = NUM_EXAMPLES
    for size in shape:
        count *= size
    return (torch.arange(count, dtype=torch.float64) % 4 + 0.5).reshape(NUM_EXAMPLES, *shape)


def is_lambda(loss):
    """Say whether a loss is yet to be made, in the scope."""
    return getattr(loss, "__name__", "") == "<lambda>"


def on_replicas(num_replicas, loss, num_outputs, tensors, batch_size, activation=None):
    """Return for each batch the sums over replicas of the shares of the loss and of its gradients."""
    strategy = ts.MirroredStrategy(cpus(num_replicas))
    with strategy.scope():
        layer, compiled = make_layer(num_outputs), CompiledLoss(loss() if is_lambda(loss) else loss)

    def step(x, y, weight=None):
        y_pred = layer(x) if activation is None else activation(layer(x))
        share = compiled(y, y_pred, weight)
        return share, torch.autograd.grad(share, list(layer.parameters()))

    dataset = strategy.experimental_distribute_dataset(DataLoader(TensorDataset(*tensors), batch_size))
    found = []
    for batch in dataset:
        share, gradients = strategy.run(step, args=tuple(batch))
        found.append([strategy.reduce("sum", value, axis=None) for value in (share, *gradients)])
    return found


def in_plain_torch(reference, num_outputs, tensors, batch_size, activation=None):
    layer = make_layer(num_outputs)
    found = []
    for batch in DataLoader(TensorDataset(*tensors), batch_size):
        y_pred = layer(batch[0]) if activation is None else activation(layer(batch[0]))
        loss = reference(y_pred, *batch[1:])
        found.append([loss.detach(), *torch.autograd.grad(loss, list(layer.parameters()))])
    return found


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for own, other in zip(found, expected, strict=True):
        for value, wanted in zip(own, other, strict=True):
            assert value.dtype == torch.float64
            torch.testing.assert_close(value, wanted, rtol=1e-12, atol=1e-12)


def weighted_mean(per_example, weight):
    return (per_example * weight.reshape(len(weight), *[1] * (per_example.ndim - 1))).sum() / per_example.numel()


TORCH_LOSSES = {
    "mse": (lambda: nn.MSELoss(), 2, values(2), F.mse_loss),
    "mse function": (F.mse_loss, 2, values(2), F.mse_loss),
    "l1 sum": (lambda: nn.L1Loss(reduction="sum"), 2, values(2), functools.partial(F.l1_loss, reduction="sum")),
    "huber": (functools.partial(F.huber_loss, delta=0.3), 2, values(2), functools.partial(F.huber_loss, delta=0.3)),
    "cross entropy": (lambda: nn.CrossEntropyLoss(), CLASSES, class_ids(), F.cross_entropy),
    "class weights": (
        lambda: nn.CrossEntropyLoss(weight=CLASS_WEIGHTS),
        CLASSES,
        class_ids(),
        functools.partial(F.cross_entropy, weight=CLASS_WEIGHTS),
    ),
    "ignored labels": (
        lambda: nn.CrossEntropyLoss(ignore_index=0),
        CLASSES,
        class_ids(),
        functools.partial(F.cross_entropy, ignore_index=0),
    ),
    "all of it": (
        functools.partial(F.cross_entropy, weight=CLASS_WEIGHTS, ignore_index=2, label_smoothing=0.1),
        CLASSES,
        class_ids(),
        functools.partial(F.cross_entropy, weight=CLASS_WEIGHTS, ignore_index=2, label_smoothing=0.1),
    ),
    "soft labels": (
        lambda: nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, label_smoothing=0.2),
        CLASSES,
        values(3).softmax(1),
        functools.partial(F.cross_entropy, weight=CLASS_WEIGHTS, label_smoothing=0.2),
    ),
    "bce with logits": (
        lambda: nn.BCEWithLogitsLoss(pos_weight=torch.tensor([2.0, 3.0], dtype=torch.float64)),
        2,
        (values(2) > 0).double(),
        functools.partial(
            F.binary_cross_entropy_with_logits, pos_weight=torch.tensor([2.0, 3.0], dtype=torch.float64)
        ),
    ),
    "multi margin": (lambda: nn.MultiMarginLoss(weight=CLASS_WEIGHTS), CLASSES, class_ids(),
                     functools.partial(F.multi_margin_loss, weight=CLASS_WEIGHTS)),
    "multilabel soft margin": (
        lambda: nn.MultiLabelSoftMarginLoss(), 2, (values(2) > 0).double(), F.multilabel_soft_margin_loss
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TORCH_LOSSES)
@pytest.mark.parametrize(("num_replicas", "batch_size"), [(1, 4), (2, 3), (3, 4), (4, 5)])
def test_a_torch_loss_is_torchs_own_mean(name, num_replicas, batch_size):
    loss, num_outputs, labels, reference = TORCH_LOSSES[name]
    tensors = (inputs(), labels)
    found = on_replicas(num_replicas, loss, num_outputs, tensors, batch_size)
    assert_equal(found, in_plain_torch(reference, num_outputs, tensors, batch_size))


def test_kl_divergence_of_batches():
    labels = values(3).softmax(1)
    log_softmax = functools.partial(F.log_softmax, dim=1)
    loss = nn.KLDivLoss(reduction="batchmean")
    found = on_replicas(3, loss, 3, (inputs(), labels), 4, log_softmax)
    reference = functools.partial(F.kl_div, reduction="batchmean")
    assert_equal(found, in_plain_torch(reference, 3, (inputs(), labels), 4, log_softmax))


@pytest.mark.parametrize("shape", [(), (1,), (2,)])
@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_sample_weights_of_elements(shape, num_replicas):
    tensors = (inputs(), values(2), weights(*shape))
    found = on_replicas(num_replicas, nn.MSELoss(), 2, tensors, 3)

    def reference(y_pred, y, weight):
        return (F.mse_loss(y_pred, y, reduction="none") * weight.reshape(len(weight), -1)).mean()

    assert_equal(found, in_plain_torch(reference, 2, tensors, 3))


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_sample_weights_with_class_weights_and_ignored_labels(num_replicas):
    tensors = (inputs(), class_ids(), weights())
    loss = nn.CrossEntropyLoss(weight=CLASS_WEIGHTS, ignore_index=0)
    found = on_replicas(num_replicas, loss, CLASSES, tensors, 4)

    def reference(y_pred, y, weight):
        each = F.cross_entropy(y_pred, y, weight=CLASS_WEIGHTS, ignore_index=0, reduction="none")
        return (each * weight).sum() / CLASS_WEIGHTS[y[y != 0]].sum()

    assert_equal(found, in_plain_torch(reference, CLASSES, tensors, 4))


def sequences(y_pred):
    """Make 3 steps of 2 values or classes of 6 outputs."""
    return y_pred.reshape(len(y_pred), 3, 2)


@pytest.mark.parametrize("shape", [None, (), (1,), (3,), (3, 1)])
@pytest.mark.parametrize("num_replicas", [1, 2, 4])
def test_losses_of_sequences_average_over_all_elements(shape, num_replicas):
    labels = torch.arange(NUM_EXAMPLES * 3).reshape(NUM_EXAMPLES, 3) % 2
    tensors = (inputs(), labels) if shape is None else (inputs(), labels, weights(*shape))
    loss = losses.SparseCategoricalCrossentropy(from_logits=True)
    found = on_replicas(num_replicas, loss, 6, tensors, 3, sequences)

    def reference(y_pred, y, weight=None):
        each = F.cross_entropy(y_pred.movedim(-1, 1), y, reduction="none")
        return (each if weight is None else each * weight.reshape(len(weight), -1)).mean()

    assert_equal(found, in_plain_torch(reference, 6, tensors, 3, sequences))


@pytest.mark.parametrize("reduction", ["auto", "sum_over_batch_size", "mean", "none", "sum", "mean_with_sample_weight"])
@pytest.mark.parametrize("has_weights", [False, True])
@pytest.mark.parametrize("num_replicas", [1, 4])
def test_reductions(reduction, has_weights, num_replicas):
    tensors = (inputs(), values(2)) + ((weights(),) if has_weights else ())
    loss = losses.MeanSquaredError(reduction=reduction)
    found = on_replicas(num_replicas, loss, 2, tensors, 4)

    def reference(y_pred, y, weight=None):
        each = (y_pred - y).square().mean(-1)
        total = each.sum() if weight is None else (each * weight).sum()
        if reduction == "sum":
            return total
        if reduction == "none":  # the value is the mean's, the gradient the sum's
            return total + (total / len(y) - total).detach()
        is_by_weight = reduction == "mean_with_sample_weight" and weight is not None
        return total / (weight.sum() if is_by_weight else len(y))

    assert_equal(found, in_plain_torch(reference, 2, tensors, 4))


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_no_reduction_with_several_elements_and_ignored_classes(num_replicas):
    tensors = (inputs(), class_ids().reshape(-1, 1).expand(-1, 3).contiguous())
    loss = losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=1, reduction="none")

    def rows(y_pred):  # [batch, elements, classes]
        return y_pred.unflatten(1, (3, CLASSES))

    def reference(y_pred, y):
        total = F.cross_entropy(y_pred.flatten(0, 1), y.flatten(), reduction="none", ignore_index=1).sum()
        return total + (total / y.numel() - total).detach()  # as Keras: ignored elements are 0, and count

    found = on_replicas(num_replicas, loss, 3 * CLASSES, tensors, 4, rows)
    assert_equal(found, in_plain_torch(reference, 3 * CLASSES, tensors, 4, rows))


@pytest.mark.parametrize("reduction", ["mean", "mean_with_sample_weight"])
@pytest.mark.parametrize("has_weights", [False, True])
def test_ignored_classes(reduction, has_weights):
    tensors = (inputs(), class_ids()) + ((weights(),) if has_weights else ())
    loss = losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=1, reduction=reduction)
    found = on_replicas(3, loss, CLASSES, tensors, 4)

    def reference(y_pred, y, weight=None):
        weight = torch.ones(len(y), dtype=y_pred.dtype) if weight is None else weight
        counts = (y != 1).to(y_pred.dtype)
        total = (F.cross_entropy(y_pred, y, reduction="none") * weight * counts).sum()
        return total / (weight * counts if reduction == "mean_with_sample_weight" else counts).sum()

    assert_equal(found, in_plain_torch(reference, CLASSES, tensors, 4))


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss, functools.partial(functools.partial, F.cross_entropy)])
def test_class_weights_follow_the_predictions_to_their_device(loss):
    part = CompiledLoss(loss(weight=torch.ones(3)))
    assert (
        part(torch.zeros(2, dtype=torch.int64, device="meta"), torch.zeros(2, 3, device="meta")).device.type == "meta"
    )


def test_labels_that_are_all_ignored_give_zero():
    compiled = CompiledLoss(nn.CrossEntropyLoss(ignore_index=1))
    y_pred = torch.zeros(2, 3, requires_grad=True)
    loss = compiled(torch.tensor([1, 1]), y_pred)
    loss.backward()
    assert loss.item() == 0
    assert y_pred.grad.abs().sum() == 0


def per_example(y_true, y_pred):
    return (y_true - y_pred).abs().sum(-1)


@pytest.mark.parametrize("num_replicas", [1, 2, 3])
@pytest.mark.parametrize(
    ("loss", "reference"),
    [
        (per_example, lambda y_pred, y: (y - y_pred).abs().sum(-1).mean()),
        ("mse", F.mse_loss),
        ("MeanSquaredError", F.mse_loss),
        (losses.mean_absolute_error, F.l1_loss),
        (
            functools.partial(losses.huber, delta=0.3),
            lambda y_pred, y: F.huber_loss(y_pred, y, delta=0.3),
        ),
        (losses.MeanSquaredError, F.mse_loss),
        (nn.MSELoss, F.mse_loss),
    ],
)
def test_functions_names_and_classes(num_replicas, loss, reference):
    tensors = (inputs(), values(2))
    found = on_replicas(num_replicas, loss, 2, tensors, 4)
    assert_equal(found, in_plain_torch(reference, 2, tensors, 4))


class Smooth(nn.Module):
    """A loss of the user's with torch's argument ``reduction``."""

    def __init__(self, reduction):
        super().__init__()
        self.reduction = reduction

    def forward(self, y_pred, y):
        each = (y_pred - y).square().sum(-1)
        return {"none": each, "mean": each.mean(), "sum": each.sum()}[self.reduction]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_module_of_ones_own(reduction):
    loss = Smooth(reduction)
    found = on_replicas(3, loss, 2, (inputs(), values(2)), 4)
    reference = {"none": Smooth("mean")}.get(reduction, loss)
    assert_equal(found, in_plain_torch(reference, 2, (inputs(), values(2)), 4))
    assert loss.reduction == reduction


@pytest.mark.parametrize(("y_shape", "y_pred_shape"), [((4,), (4,)), ((4,), (4, 1)), ((4, 1), (4,)), ((4, 1), (4, 1))])
def test_labels_of_one_dimension_are_examples(y_shape, y_pred_shape):
    y, y_pred = torch.arange(4.0).reshape(y_shape), torch.ones(y_pred_shape)
    weight = torch.tensor([1.0, 0.0, 0.0, 2.0])
    assert CompiledLoss("mse")(y, y_pred).item() == pytest.approx(1.5)
    assert CompiledLoss("mse")(y, y_pred, weight).item() == pytest.approx(2.25)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("loss", ["mse", nn.MSELoss(), F.mse_loss, lambda y, y_pred: (y - y_pred).square()])
def test_halves_become_float32(dtype, loss):
    y_pred = torch.full((1000, 1), 300.0, dtype=dtype, requires_grad=True)
    result = CompiledLoss(loss)(torch.zeros(1000, 1, dtype=dtype), y_pred)
    result.backward()
    assert result.dtype == torch.float32
    assert result.item() == pytest.approx(float(y_pred[0, 0].detach()) ** 2)  # float16 ends at 65504
    assert y_pred.grad.dtype == dtype


def test_crossentropy_is_chosen_by_shapes():
    probabilities = torch.tensor([[0.25, 0.75], [0.5, 0.5]])
    compiled = CompiledLoss("crossentropy")
    expected = (torch.tensor([0.75, 0.5]).log().neg()).mean()
    torch.testing.assert_close(compiled(torch.tensor([1, 0]), probabilities), expected)
    torch.testing.assert_close(compiled(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), probabilities), expected)
    torch.testing.assert_close(compiled(torch.tensor([1, 0]), torch.tensor([[0.75], [0.5]])), expected)


def test_no_loss():
    compiled = CompiledLoss(None)
    assert compiled.is_empty
    assert compiled(None, torch.ones(2, 1)).item() == 0
    assert compiled.divisors.local(None) is None
    assert compiled.metrics == []
    assert not CompiledLoss([None, "mse"]).is_empty


def test_divisors_of_several_batches():
    """The trainer may sum divisors itself, over the batches of an optimizer step."""
    loss = nn.CrossEntropyLoss(weight=CLASS_WEIGHTS)
    strategy = ts.MirroredStrategy(cpus(2))
    with strategy.scope():
        compiled = CompiledLoss(loss)
    batches = list(strategy.experimental_distribute_dataset(
        DataLoader(TensorDataset(values(3), class_ids()), 5)
    ))  # fmt: skip
    local = [strategy.run(lambda y_pred, y: compiled.divisors.local(y), args=tuple(batch)) for batch in batches]
    total = sum(strategy.reduce("sum", value, axis=None) for value in local)
    assert total.shape == (1,)
    assert total.dtype == torch.float64

    def step(y_pred, y):
        with compiled.divisors.using(total):
            return compiled(y, y_pred)

    shares = [strategy.reduce("sum", strategy.run(step, args=tuple(batch)), axis=None) for batch in batches]
    torch.testing.assert_close(sum(shares), F.cross_entropy(values(3), class_ids(), CLASS_WEIGHTS), rtol=1e-12, atol=0)
    assert CompiledLoss("mse").divisors.local(values(1)) is None
    assert CompiledLoss(loss).divisors.local(values(3).softmax(1)) is None  # probabilities are counted by examples


@pytest.mark.parametrize("num_replicas", [1, 3])
@pytest.mark.parametrize(
    ("loss", "labels", "reference"),
    [
        ("mse", values(3), F.mse_loss),
        (
            nn.CrossEntropyLoss(weight=CLASS_WEIGHTS),
            class_ids(),
            functools.partial(F.cross_entropy, weight=CLASS_WEIGHTS),
        ),
        (nn.L1Loss(reduction="sum"), values(3), functools.partial(F.l1_loss, reduction="sum")),
    ],
)
def test_batches_of_one_optimizer_step(num_replicas, loss, labels, reference):
    """Their losses add up to that of all of their examples, also if the batches have different sizes."""
    strategy = ts.MirroredStrategy(cpus(num_replicas))
    with strategy.scope():
        layer, compiled = make_layer(3), CompiledLoss([loss, loss])
    batches = list(strategy.experimental_distribute_dataset(DataLoader(TensorDataset(inputs(), labels), 4)))
    mark_windows([batches])

    def divide(_, parts):
        local = [compiled.divisors.local([y, y]) for _, y in parts]
        return compiled.divisors.using(sum_over_replicas(None if local[0] is None else torch.stack(local).sum(0)))

    def all_of_them(*window):
        for parameter in layer.parameters():
            parameter.grad = None
        shares = []

        def step(batch):
            y_pred = layer(batch[0])
            shares.append(compiled([batch[1]] * 2, [y_pred] * 2))
            shares[-1].backward()

        steps.run_windows([window], step, None, divide, steps.StepState())
        return torch.stack(shares).sum(), [parameter.grad for parameter in layer.parameters()]

    loss, gradients = strategy.run(all_of_them, args=tuple(batches))
    y_pred = make_layer(3)(inputs())
    expected = 2 * reference(y_pred, labels)
    torch.testing.assert_close(strategy.reduce("sum", loss, axis=None).detach(), expected.detach(), rtol=1e-12, atol=0)
    twin = make_layer(3)
    for own, wanted in zip(
        gradients, torch.autograd.grad(2 * reference(twin(inputs()), labels), list(twin.parameters())), strict=True
    ):
        torch.testing.assert_close(strategy.reduce("sum", own, axis=None), wanted, rtol=1e-12, atol=1e-12)
    assert compiled.metrics[0].result().item() == pytest.approx(expected.item() / 2)


def train_in_parts():
    """Return the loss and the mean of each output over an epoch of 7 examples, with trackers made on the way."""
    strategy = ts.MultiWorkerMirroredStrategy()
    metric = ts.metrics.MeanAbsoluteError()
    with strategy.scope():
        layer = nn.Linear(2, 3, dtype=torch.float64)
        with torch.no_grad():
            layer.weight.copy_(make_layer(3).weight)
            layer.bias.copy_(make_layer(3).bias)
        compiled = CompiledLoss(nn.CrossEntropyLoss(weight=CLASS_WEIGHTS))
        metrics = CompiledMetrics([["accuracy"], [metric]])

    def step(x, y):
        y_pred = [layer(x), 2 * layer(x)]
        metrics.update_state([y, F.one_hot(y, 3)], y_pred)
        return compiled([y, y], y_pred)

    dataset = strategy.experimental_distribute_dataset((inputs()[:7], class_ids()[:7]), batch_size=4)
    found = [float(strategy.reduce("sum", strategy.run(step, args=batch), axis=None)) for batch in dataset]
    found += [float(tracker.result()) for tracker in compiled.metrics]
    return found + [float(value.result()) for value in metrics.named().values()]


def means_after_one_batch():
    strategy = ts.MultiWorkerMirroredStrategy()
    with strategy.scope():
        compiled = CompiledLoss("mse")
    return trackers_after_one_batch(strategy, compiled)


def trackers_after_one_batch(strategy, compiled):
    def step(y, y_pred):
        compiled([y, y], [y_pred, 2 * y_pred])

    (batch,) = strategy.experimental_distribute_dataset((values(1)[:3], values(1)[3:6]), batch_size=3)
    strategy.run(step, args=batch)
    return [float(tracker.result()) for tracker in compiled.metrics]


def test_trackers_that_were_made_in_the_first_step_can_be_read_at_once(process_pool):
    y, y_pred = values(1)[:3], values(1)[3:6]
    expected = [F.mse_loss(y_pred, y).item(), F.mse_loss(2 * y_pred, y).item()]
    strategy = ts.MirroredStrategy(cpus(2))
    with strategy.scope():
        compiled = CompiledLoss("mse")
    assert trackers_after_one_batch(strategy, compiled) == pytest.approx(expected)
    assert process_pool(2).run(means_after_one_batch) == [pytest.approx(expected)] * 2


def test_two_processes(process_pool):
    layer, x, y = make_layer(3), inputs()[:7], class_ids()[:7]
    y_pred = layer(x).detach()
    losses_of = [[F.cross_entropy(scale * y_pred[rows], y[rows], CLASS_WEIGHTS) for rows in (slice(4), slice(4, 7))]
                 for scale in (1, 2)]  # fmt: skip
    expected = [losses_of[0][i] + losses_of[1][i] for i in range(2)]
    expected += [(4 * own[0] + 3 * own[1]) / 7 for own in losses_of]
    expected += [(y_pred.argmax(1) == y).double().mean(), F.l1_loss(2 * y_pred, F.one_hot(y, 3).double())]
    for found in process_pool(2).run(train_in_parts):
        assert found == pytest.approx([value.item() for value in expected], rel=1e-6)


@pytest.mark.parametrize(
    ("loss", "is_needed"),
    [
        (nn.CrossEntropyLoss(), False),
        (functools.partial(F.cross_entropy, ignore_index=7), False),
        (losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=7), False),
        (nn.CrossEntropyLoss(ignore_index=0), True),
        (nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), True),
        (losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=0), True),
        (losses.SparseCategoricalCrossentropy(True, 7, reduction="mean_with_sample_weight"), True),
    ],
)
def test_labels_all_of_which_are_known_to_count(loss, is_needed):
    compiled = CompiledLoss(loss)
    y_pred, y = values(3), class_ids()
    expected = compiled(y, y_pred)
    assert compiled.divisors.local(y) is not None
    with compiled.divisors.knowing(y.numpy()):
        assert (compiled.divisors.local(y) is not None) == is_needed
        torch.testing.assert_close(compiled(y, y_pred), expected, rtol=1e-12, atol=0)
        with compiled.divisors.knowing(None):  # such as validation data of a loader
            assert compiled.divisors.local(y) is not None
        assert (compiled.divisors.local(y) is not None) == is_needed
        assert pickle.loads(pickle.dumps(compiled)).divisors.local(y) is not None  # another process has other data
    assert compiled.divisors.local(y) is not None


def test_labels_of_several_outputs_that_are_known_to_count():
    compiled = CompiledLoss({"a": nn.CrossEntropyLoss(ignore_index=0), "b": nn.CrossEntropyLoss(), "c": "mse"})
    y = {"c": values(3), "b": class_ids(), "a": class_ids()}
    y_pred = {key: values(3) for key in "abc"}
    expected = compiled(y, y_pred)
    assert len(compiled.divisors.local(y)) == 2
    with compiled.divisors.knowing(y):
        (divisor,) = compiled.divisors.local(y)
        assert divisor == (class_ids() != 0).sum()
        torch.testing.assert_close(compiled(y, y_pred), expected, rtol=1e-12, atol=0)
        with compiled.divisors.using(compiled.divisors.local(y)):
            torch.testing.assert_close(compiled(y, y_pred), expected, rtol=1e-12, atol=0)


def test_known_labels_need_no_communication():
    strategy = ts.MirroredStrategy(cpus(2))
    with strategy.scope():
        compiled = CompiledLoss(nn.CrossEntropyLoss())
    (batch,) = strategy.experimental_distribute_dataset((values(3), class_ids()), batch_size=NUM_EXAMPLES)

    def on_one_replica_only(y_pred, y):
        return compiled(y, y_pred) if ts.get_replica_context().replica_id_in_sync_group == 0 else None

    with compiled.divisors.knowing(class_ids()):
        share, _ = strategy.experimental_local_results(strategy.run(on_one_replica_only, args=batch))
    torch.testing.assert_close(share, F.cross_entropy(values(3)[:5], class_ids()[:5]) / 2)
    with pytest.raises((RuntimeError, ValueError), match="all_reduce"):
        strategy.run(on_one_replica_only, args=batch)


def test_a_batch_of_unknown_size_is_refused():
    strategy = ts.MirroredStrategy(cpus(2))
    with strategy.scope():
        compiled = CompiledLoss("mse")
    with pytest.raises(RuntimeError, match="actual batch size is not known"):
        strategy.run(compiled, args=(torch.ones(2, 1), torch.ones(2, 1)))


def test_arguments_are_kept_and_pickled():
    compiled = CompiledLoss(["mse", nn.CrossEntropyLoss()], [1.0, 2.0])
    assert compiled.loss[0] == "mse"
    assert compiled.loss_weights == [1.0, 2.0]
    y_pred = [torch.ones(2, 1), torch.zeros(2, 3)]
    y = [torch.zeros(2, 1), torch.tensor([0, 1])]
    expected = compiled(y, y_pred)
    copy = pickle.loads(pickle.dumps(compiled))
    assert copy(y, y_pred) == expected
    assert [metric.name for metric in copy.metrics] == ["output_0_loss", "output_1_loss"]


# Several outputs


@pytest.mark.parametrize("num_replicas", [1, 3])
@pytest.mark.parametrize("structure", ["dict", "list", "tuple"])
@pytest.mark.parametrize("is_one_for_all", [False, True])
def test_several_outputs(num_replicas, structure, is_one_for_all):
    strategy = ts.MirroredStrategy(cpus(num_replicas))
    keys = ["big", "a"] if structure == "dict" else ["output_0", "output_1"]
    pack = {
        "dict": lambda *parts: dict(zip(keys, parts, strict=True)),
        "list": lambda *x: list(x),
        "tuple": lambda *x: x,
    }
    pack = pack[structure]
    loss = "mse" if is_one_for_all else pack("mse", nn.L1Loss())
    with strategy.scope():
        compiled = CompiledLoss(loss, pack(2.0, 0.5))
    tensors = [values(2), values(2) * 2, values(1), values(1) + 3]

    def step(y0, p0, y1, p1):
        return compiled(pack(y0, y1), pack(p0, p1))

    total, count = 0.0, 0
    dataset = strategy.experimental_distribute_dataset(DataLoader(TensorDataset(*tensors), 4))
    for batch, (y0, p0, y1, p1) in zip(dataset, DataLoader(TensorDataset(*tensors), 4), strict=True):
        found = strategy.reduce("sum", strategy.run(step, args=tuple(batch)), axis=None)
        second = F.mse_loss(p1, y1) if is_one_for_all else F.l1_loss(p1, y1)
        torch.testing.assert_close(found, 2 * F.mse_loss(p0, y0) + 0.5 * second, rtol=1e-12, atol=1e-12)
        total, count = total + second * len(y0), count + len(y0)
    # Each output's mean over examples, without its weight.
    assert [metric.name for metric in compiled.metrics] == [f"{key}_loss" for key in keys]
    assert compiled.metrics[1].result().item() == pytest.approx((total / count).item())
    assert compiled.metrics[0].result().item() == pytest.approx(F.mse_loss(tensors[1], tensors[0]).item())


def test_divisors_of_several_outputs_by_name():
    """Labels in another order than the outputs get their own divisors."""
    y_pred = {"b": values(3), "a": values(3) * 2}
    y = {"a": class_ids(), "b": (class_ids() + 1) % 3}
    compiled = CompiledLoss({"a": nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), "b": nn.CrossEntropyLoss(ignore_index=0)})
    expected = F.cross_entropy(y_pred["a"], y["a"], CLASS_WEIGHTS) + F.cross_entropy(
        y_pred["b"], y["b"], ignore_index=0
    )
    torch.testing.assert_close(compiled(y, y_pred), expected)
    with compiled.divisors.using(compiled.divisors.local(y)):
        torch.testing.assert_close(compiled(y, y_pred), expected)


def test_an_output_with_other_rows_than_examples():
    strategy = ts.MirroredStrategy(cpus(2))
    with strategy.scope():
        compiled = CompiledLoss(["mse", "mse"])
    (batch,) = strategy.experimental_distribute_dataset(values(1)[:4], batch_size=4)
    with pytest.raises(ValueError, match="this replica's share of the batch is 2 examples"):
        strategy.run(lambda y: compiled([y, y.repeat(3, 1)], [y, y.repeat(3, 1)]), args=(batch,))


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "none"])
def test_outputs_with_different_numbers_of_rows(reduction):
    """Each is divided by its own, whatever came before it."""
    sizes = (4, 8, 4)
    y = [torch.zeros(size, 1) for size in sizes]
    y_pred = [torch.full((size, 1), float(i + 1), requires_grad=True) for i, size in enumerate(sizes)]
    compiled = CompiledLoss([losses.MeanSquaredError(reduction=reduction)] * 3)
    with ts.get_strategy().scope():
        if reduction == "none":
            with pytest.raises(ts.errors.InvalidArgumentError, match="different numbers"):
                compiled(y, y_pred)
            return
        assert compiled(y, y_pred).item() == 1 + 4 + 9
    assert compiled(y, y_pred, alone=True).item() == 1 + 4 + 9
    assert [metric.result().item() for metric in compiled.metrics] == [1, 4, 9]


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_an_output_with_other_rows_whose_labels_say_the_divisor(num_replicas):
    """Neither it nor the outputs after it are counted wrong: not in the loss, the gradients, or the logs."""
    strategy = ts.MirroredStrategy(cpus(num_replicas))
    with strategy.scope():
        layer = make_layer(CLASSES)
        compiled = CompiledLoss(["mse", nn.CrossEntropyLoss(weight=CLASS_WEIGHTS), nn.L1Loss()])
    dataset = strategy.experimental_distribute_dataset(DataLoader(TensorDataset(inputs(), class_ids()), 4))

    def outputs(x, y):
        logits = layer(x)
        twice = torch.cat([logits, 2 * logits])  # rows that are no examples
        return [torch.zeros_like(logits), torch.cat([y, y]), torch.zeros_like(logits)], [logits, twice, logits]

    def step(x, y):
        share = compiled(*outputs(x, y))
        return share, torch.autograd.grad(share, list(layer.parameters()))

    means, count = torch.zeros(3, dtype=torch.float64), 0
    for batch, x, y in zip(dataset, inputs().split(4), class_ids().split(4), strict=True):
        share, gradients = strategy.run(step, args=tuple(batch))
        labels, predictions = outputs(x, y)
        parts = [
            F.mse_loss(predictions[0], labels[0]),
            F.cross_entropy(predictions[1], labels[1], CLASS_WEIGHTS),
            F.l1_loss(predictions[2], labels[2]),
        ]
        torch.testing.assert_close(strategy.reduce("sum", share, axis=None), sum(parts))
        for found, wanted in zip(gradients, torch.autograd.grad(sum(parts), list(layer.parameters())), strict=True):
            torch.testing.assert_close(strategy.reduce("sum", found, axis=None), wanted)
        means += torch.stack(parts).detach() * len(x)
        count += len(x)
    for metric, mean in zip(compiled.metrics, means / count, strict=True):
        torch.testing.assert_close(metric.result().double(), mean, check_dtype=False)


def test_without_a_batch_nobody_knows_how_the_logs_should_count():
    strategy = ts.MirroredStrategy(cpus(2))
    with strategy.scope():
        compiled = CompiledLoss([losses.MeanSquaredError(reduction="sum")] * 2)
    y = [torch.zeros(2, 1)] * 2
    with pytest.raises(RuntimeError, match="batch size is not known"):
        strategy.run(lambda: compiled(y, y))


def test_weights_of_several_outputs():
    y, y_pred = [torch.zeros(2, 1)] * 2, [torch.ones(2, 1), torch.full((2, 1), 2.0)]
    compiled = CompiledLoss("mse")
    weight = torch.tensor([1.0, 3.0])
    assert compiled(y, y_pred, weight).item() == 2 + 8
    assert compiled(y, y_pred, [weight, None]).item() == 2 + 4
    assert CompiledLoss("mse", 3.0)(y, y_pred).item() == 3 * (1 + 4)


def test_an_output_without_a_loss():
    compiled = CompiledLoss({"a": "mse", "b": None})
    y_pred = {"a": torch.ones(2, 1), "b": torch.ones(2, 5)}
    assert compiled({"a": torch.zeros(2, 1)}, y_pred).item() == 1
    assert compiled.metrics == []


@pytest.mark.parametrize(
    ("loss", "loss_weights", "y", "y_pred", "message"),
    [
        ({"a": "mse"}, None, {"a": 0, "b": 0}, {"a": 0, "b": 0}, r"loss= .*Missing: 'b'.* loss=\{'b': None"),
        ({"a": "mse", "c": "mse"}, None, {"a": 0}, {"a": 0}, r"loss= .*\['a'\].*Not an output: 'c'"),
        (["mse", "mse"], None, {"a": 0, "b": 0}, {"a": 0, "b": 0}, r"Give a dict: loss=\{'a'"),
        (["mse"], None, [0, 0], [0, 0], "loss= is a list of 1, but the number of the model's outputs is 2"),
        (["mse", "mae"], None, 0, 0, "loss= is a list of 2"),
        ("mse", {"a": 1.0}, {"a": 0, "b": 0}, {"a": 0, "b": 0}, "loss_weights= .*Missing: 'b'"),
        ("mse", None, {"a": 0}, {"a": 0, "b": 0}, "y must have a part for each .*Missing: 'b'"),
        ("mse", None, {"a": 0, "b": 0, "c": 0}, {"a": 0, "b": 0}, "y must .*Not an output: 'c'"),
        ("mse", None, [0], [0, 0], "y must .*Missing: 1"),
        ("mse", None, [0, 0], {"a": 0, "b": 0}, r"y must have the structure .*keys \['a', 'b'\]"),
        ("mse", None, 0, {"a": 0, "b": 0}, "y must have the structure"),
        ("mse", None, None, 0, r"has no labels \(y is None\)"),
        ("mse", None, {"a": 0, "b": None}, {"a": 0, "b": 0}, "output 'b' has a loss, but its labels in y are None"),
        ({"a": "mse"}, None, 0, [0, 0], "loss= must have a key for each output"),
    ],
)
def test_outputs_that_do_not_fit(loss, loss_weights, y, y_pred, message):
    def fill(value):
        if isinstance(value, dict):
            return {key: fill(part) for key, part in value.items()}
        return [fill(part) for part in value] if isinstance(value, list) else torch.zeros(2, 1) if value == 0 else value

    with pytest.raises(ValueError, match=message):
        CompiledLoss(loss, loss_weights)(fill(y), fill(y_pred))


def test_outputs_that_are_no_tensors():
    with pytest.raises(ts.errors.InvalidArgumentError, match="A model must return a tensor, or a list"):
        CompiledLoss("mse")(torch.zeros(1), "text")


def test_outputs_that_change():
    compiled = CompiledLoss("mse")
    compiled(torch.zeros(1, 1), torch.zeros(1, 1))
    with pytest.raises(ValueError, match="outputs have changed"):
        compiled([torch.zeros(1, 1)] * 2, [torch.zeros(1, 1)] * 2)


def test_building_in_the_scope():
    strategy = ts.MirroredStrategy(cpus(2))
    with strategy.scope():
        compiled = CompiledLoss("mse")
        compiled.build([torch.zeros(1, 1)] * 2)
        made = compiled.metrics
        compiled.build([torch.zeros(1, 1)] * 2)
    assert [metric.name for metric in made] == ["output_0_loss", "output_1_loss"]
    assert compiled.metrics[0] is made[0]


# What compile refuses


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        ("msee", ValueError, "loss='msee' is not known. Did you mean 'mse'"),
        (3, TypeError, "loss= must be a name or callable. Received: 3"),
        (nn.CTCLoss(), ValueError, "takes the lengths .*Write a function f"),
        (nn.TripletMarginLoss(), ValueError, "takes three predictions"),
        (F.gaussian_nll_loss, ValueError, "takes variances as well"),
        (F.softmax, ValueError, "this function of torch.nn.functional is no loss"),
        (functools.partial(F.mse_loss, size_average=True), ValueError, "bind keyword arguments only"),
        (functools.partial(F.mse_loss, reduction="average"), ValueError, "reduction='average', which compile can't"),
        (nn.BCELoss(weight=torch.ones(4, 1)), ValueError, "can't be split over replicas.*sample_weight"),
        (Smooth("product"), ValueError, "reduction='product'"),
    ],
)
def test_losses_that_are_refused(loss, error, message):
    with pytest.raises(error, match=message):
        CompiledLoss(loss)


@pytest.mark.parametrize("weight", ["1", True, {"a": None}])
def test_loss_weights_must_be_numbers(weight):
    with pytest.raises(TypeError, match="loss_weights= must be a number"):
        CompiledLoss("mse", weight)


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("loss", [lambda y, y_pred: F.mse_loss(y_pred, y), lambda y, y_pred: (y - y_pred).mean()])
@pytest.mark.filterwarnings("ignore:mse_loss with reduction:UserWarning")
def test_a_function_that_returns_one_number_is_refused(num_replicas, loss):
    with pytest.raises(ts.errors.InvalidArgumentError, match=r"returned one number for the batch.*reduction='none'"):
        on_replicas(num_replicas, lambda: loss, 1, (inputs(), values(1)), 4)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda y, y_pred: (y - y_pred).square(), "shapes were broadcast against each other"),
        (lambda y, y_pred: y_pred[:1], r"returned losses of shape \(1, 1\) for 4 examples"),
        (lambda y, y_pred: 3.0, "must return a tensor"),
        (nn.MSELoss(), r"torch would broadcast them. Received: y \(4,\), y_pred \(4, 1\). Write y.unsqueeze\(-1\)"),
        (F.l1_loss, r"y \(4,\), y_pred \(4, 1\)"),
    ],
)
def test_losses_that_do_not_fit_the_examples(loss, message):
    with pytest.raises((ValueError, TypeError), match=message):
        CompiledLoss(loss)(torch.zeros(4), torch.zeros(4, 1))


def test_a_function_with_torchs_order(monkeypatch, caplog):
    monkeypatch.setattr(log, "_said", set())
    monkeypatch.setattr(log.logger, "propagate", True)

    def crossentropy(pred, true):
        return F.cross_entropy(pred, true, reduction="none")

    loss = CompiledLoss(crossentropy)
    called = "loss=crossentropy is called as crossentropy(y_true, y_pred), as in tf: labels come first."
    assert f"{called} Its parameters are (pred, true): exchange them." in caplog.text
    with pytest.raises(RuntimeError) as caught:
        loss(torch.zeros(4, dtype=torch.long), torch.zeros(4, 3))
    assert called in caught.value.__notes__
    caplog.clear()
    CompiledLoss(per_example), CompiledLoss(lambda label, output: output), CompiledLoss(max)
    assert "exchange" not in caplog.text


class Heads(nn.Module):
    """Outputs in a dict or a list."""

    def __init__(self, form):
        super().__init__()
        self.a, self.b, self.form = nn.Linear(2, 1), nn.Linear(2, 2), form

    def forward(self, x):
        return FORMS[self.form](self.a(x), self.b(x))


FORMS = {"list": lambda a, b: [a, b], "dict": lambda a, b: {"a": a, "b": b}}


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("part", ["loss", "loss_weights", "metrics", "y", "sample_weight"])
@pytest.mark.parametrize(("outputs", "given"), [("dict", "list"), ("list", "dict")])
def test_lists_and_dicts_do_not_mix(num_replicas, part, outputs, given):
    forms = {name: FORMS[given if name == part else outputs] for name in ("loss", "loss_weights", "metrics", "y")}
    weight = FORMS[given if part == "sample_weight" else outputs](torch.ones(6), torch.ones(6))
    loss = losses.MeanSquaredError(reduction="mean_with_sample_weight")
    strategy = ts.MirroredStrategy(cpus(num_replicas))
    with strategy.scope():
        model = ts.Model(Heads(outputs))
        model.compile(
            "sgd", forms["loss"](loss, "mse"), forms["loss_weights"](1.0, 2.0), forms["metrics"](["mae"], ["mae"])
        )
    y = forms["y"](torch.ones(6, 1), torch.ones(6, 2))
    with pytest.raises((ValueError, ts.errors.InvalidArgumentError), match=rf"^{part}\b.*(dict|list|key|structure)"):
        model.fit(torch.ones(6, 2), y, sample_weight=weight, batch_size=4, verbose=0)


@pytest.mark.parametrize("num_replicas", [1, 3])
def test_no_reduction_of_several_outputs(num_replicas):
    """Keras adds the outputs' vectors, to which a number is broadcast: the sum is that of all elements."""
    strategy = ts.MirroredStrategy(cpus(num_replicas))
    with strategy.scope():
        torch.manual_seed(0)
        model = ts.Model(Heads("dict")).double()
        unreduced = losses.MeanSquaredError(reduction="none")
        model.compile(functools.partial(torch.optim.SGD, lr=0.01), {"a": unreduced, "b": "mse"}, {"a": 1.0, "b": 0.5})
    torch.manual_seed(0)
    heads = Heads("list").double()
    x, a, b = inputs()[:5], values(1)[:5], values(2)[:5]
    found = model.fit(x, {"a": a, "b": b}, batch_size=5, verbose=0).history
    y_a, y_b = heads(x)
    each = (y_a - a).square().mean(-1) + 0.5 * (y_b - b).square().mean()
    each.sum().backward()
    assert found["loss"] == [pytest.approx(each.mean().item(), rel=1e-12)]
    for own, other in zip(model.module.parameters(), heads.parameters(), strict=True):
        torch.testing.assert_close(own, other - 0.01 * other.grad, rtol=0, atol=1e-12)


def test_no_reduction_goes_without_losses_of_layers():
    model = ts.Model(nn.Linear(2, 1))
    ts.regularize(model.module, "weight", ts.regularizers.L2(0.1))
    model.compile("sgd", losses.MeanSquaredError(reduction=None))
    with pytest.raises(ValueError, match=r"^fit: a loss with reduction='none'.*reduction='sum'"):
        model.fit(torch.ones(4, 2), torch.ones(4, 1), verbose=0)


def test_no_reduction_with_accumulation():
    x, y = inputs()[:7], values(1)[:7]
    weights = []
    for options, batch_size in (({"gradient_accumulation_steps": 3}, 3), ({}, 7)):
        with ts.MirroredStrategy(cpus(2)).scope():
            torch.manual_seed(0)
            model = ts.Model(nn.Linear(2, 1).double())
            loss = losses.MeanSquaredError(reduction=None)
            model.compile(functools.partial(torch.optim.SGD, lr=0.01), loss, **options)
        history = model.fit(x, y, batch_size=batch_size, shuffle=False, verbose=0).history
        weights.append([model.module.weight.detach().clone(), history["loss"][0]])
    torch.testing.assert_close(*(row[0] for row in weights), rtol=0, atol=1e-12)
    assert weights[0][1] == pytest.approx(weights[1][1], rel=1e-12)


@pytest.mark.parametrize("loss", ["dice", ts.losses.Tversky(0.3, 0.9), "binary_focal_crossentropy"])
def test_losses_and_metrics_for_rare_classes_in_fit(loss):
    torch.manual_seed(50)
    x, y = torch.randn(7, 4, dtype=torch.float64), torch.randint(2, (7, 3)).double()
    start = torch.nn.Linear(4, 3, dtype=torch.float64).state_dict()

    def fit(num_replicas):
        with ts.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)]).scope():
            model = ts.Model(torch.nn.Sequential(torch.nn.Linear(4, 3, dtype=torch.float64), torch.nn.Sigmoid()))
            model.module[0].load_state_dict(start)
            model.compile("sgd", loss, metrics=["f1_score", "r2_score", "binary_io_u"])
        return model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history

    one, three = fit(1), fit(3)  # shares of 2 2 0 and 1 1 1
    assert list(one) == ["loss", "f1_score", "r2_score", "binary_io_u"]
    for name, values in one.items():
        for expected, value in zip(values, three[name], strict=True):
            assert value == pytest.approx(expected, rel=1e-9), name
