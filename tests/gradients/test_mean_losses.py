"""A loss that is a mean over a replica's share is told apart from one that is a part of the global loss."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import backward as taken_before
from torch.autograd import grad as grad_taken_before

import torchstrategy as ts
from tests.programs import cpu_devices, strategy_for

FEATURES, CLASSES = 3, 4
X = torch.linspace(-1, 1, 10 * FEATURES, dtype=torch.float64).reshape(10, FEATURES)
Y = torch.arange(10) % CLASSES


def one_hot(y):
    return F.one_hot(y, CLASSES).double()


def own_average(values, count):
    return values.sum() / count


MEANS = {
    "mse_loss": lambda z, y: F.mse_loss(z, one_hot(y)),
    "mean": lambda z, y: (z - one_hot(y)).square().mean(),
    "mean of means": lambda z, y: (z - one_hot(y)).square().mean(1).mean(),
    "l1_loss": lambda z, y: F.l1_loss(z, one_hot(y)),
    "smooth_l1_loss": lambda z, y: F.smooth_l1_loss(z, one_hot(y)),
    "huber_loss": lambda z, y: F.huber_loss(z, one_hot(y)),
    "cross_entropy": F.cross_entropy,
    "cross_entropy module": nn.CrossEntropyLoss(),
    "cross_entropy with class weights": lambda z, y: F.cross_entropy(z, y, weight=torch.arange(1.0, 5).double()),
    "cross_entropy of probabilities": lambda z, y: F.cross_entropy(z, one_hot(y)),
    "cross_entropy with label smoothing": lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1),
    "nll_loss": lambda z, y: F.nll_loss(z.log_softmax(1), y),
    "bce_with_logits": lambda z, y: F.binary_cross_entropy_with_logits(z, one_hot(y)),
    "bce": lambda z, y: F.binary_cross_entropy(z.sigmoid(), one_hot(y)),
    "kl_div, batchmean": lambda z, y: F.kl_div(z.log_softmax(1), one_hot(y) / 2 + 0.1, reduction="batchmean"),
    "multi_margin_loss": F.multi_margin_loss,
    "soft_margin_loss": lambda z, y: F.soft_margin_loss(z, one_hot(y) * 2 - 1),
    "poisson_nll_loss": lambda z, y: F.poisson_nll_loss(z, one_hot(y)),
    "a sum over the size": lambda z, y: own_average((z - one_hot(y)).square(), len(y)),
    "a sum times the inverse of the size": lambda z, y: (z - one_hot(y)).square().sum() * (1 / len(y)),
    "a sum over the number of elements": lambda z, y: own_average((z - one_hot(y)).square(), y.numel() * CLASSES),
    "cross_entropy, summed, over the size": lambda z, y: F.cross_entropy(z, y, reduction="sum") / len(y),
    "cross_entropy, summed and smoothed": lambda z, y: (
        F.cross_entropy(z, y, reduction="sum", label_smoothing=0.1) / y.numel()
    ),
    "cross_entropy of places": lambda z, y: (
        F.cross_entropy(z[:, :, None].tile(5), y[:, None].tile(5), reduction="sum") / (y.numel() * 5)
    ),
    "nll_loss, summed": lambda z, y: F.nll_loss(z.log_softmax(1), y, reduction="sum") / torch.tensor(len(y)),
    "mse_loss, summed": lambda z, y: F.mse_loss(z, one_hot(y), reduction="sum") / one_hot(y).numel(),
    "bce_with_logits, summed": lambda z, y: F.binary_cross_entropy_with_logits(z, one_hot(y), reduction="sum") / len(y),
    "sums of two losses": lambda z, y: (F.cross_entropy(z, y, reduction="sum") - 0.5 * z.square().sum()) / len(y),
    "divided before the sum": lambda z, y: (F.cross_entropy(z, y, reduction="none") / len(y)).sum(),
    "squares divided before the sum": lambda z, y: -(-(z - one_hot(y))[:, :3].square() / len(y)).sum(1).sum(),
    "a negative mean": lambda z, y: -z.log_softmax(1).gather(1, y[:, None]).mean(),
    "a root of a mean": lambda z, y: F.mse_loss(z, one_hot(y)).sqrt(),
    "a weighted sum of means": lambda z, y: 0.7 * F.mse_loss(z, one_hot(y)) + 0.1 * F.l1_loss(z, one_hot(y)),
    "a stack of means": lambda z, y: torch.stack([F.mse_loss(z, one_hot(y)), F.l1_loss(z, one_hot(y))]).sum(),
    "a list of means": lambda z, y: sum([F.mse_loss(z, one_hot(y)), F.l1_loss(z, one_hot(y))]),
    "another dtype": lambda z, y: F.mse_loss(z, one_hot(y)).float(),
    "another shape": lambda z, y: F.mse_loss(z, one_hot(y)).view(1),
    "an average of means": lambda z, y: (F.mse_loss(z, one_hot(y)) + F.l1_loss(z, one_hot(y))) / 2,
    "beside a right one": lambda z, y: right(z, y) + F.mse_loss(z, one_hot(y)),
}


def right(z, y):
    return ts.nn.compute_average_loss(F.cross_entropy(z, y, reduction="none"), global_batch_size="actual")


def all_reduced(z, y):
    context = ts.get_replica_context()
    return F.cross_entropy(z, y, reduction="sum") / context.all_reduce("SUM", torch.tensor(float(len(y))))


def share_of_the_batch(z, y):
    context = ts.get_replica_context()
    return F.cross_entropy(z, y) * (len(y) / int(context.actual_batch_size()))


RIGHT = {
    "compute_average_loss": right,
    "compute_average_loss of several outputs": lambda z, y: ts.nn.compute_average_loss(
        (z - one_hot(y)).square(), global_batch_size="actual"
    ),
    "compute_average_loss with a constant": lambda z, y: ts.nn.compute_average_loss(
        F.cross_entropy(z, y, reduction="none"), global_batch_size=10
    ),
    "scale_mean_loss": lambda z, y: ts.nn.scale_mean_loss(F.cross_entropy(z, y)),
    "scale_mean_loss by tokens": lambda z, y: ts.nn.scale_mean_loss(F.cross_entropy(z, y), weight=len(y)),
    "ts.losses": lambda z, y: ts.nn.compute_average_loss(
        ts.losses.MeanSquaredError(reduction="none")(one_hot(y), z), global_batch_size="actual"
    ),
    "a sum": lambda z, y: F.cross_entropy(z, y, reduction="sum"),
    "a sum of means of examples": lambda z, y: (z - one_hot(y)).square().mean(1).sum(),
    "over the number of replicas": lambda z, y: F.cross_entropy(z, y) / ts.get_strategy().num_replicas_in_sync,
    "over their number and that of backward passes": lambda z, y: (
        F.cross_entropy(z, y) / ts.get_strategy().num_replicas_in_sync / 4
    ),
    "times its inverse": lambda z, y: F.cross_entropy(z, y) * (1 / ts.get_strategy().num_replicas_in_sync),
    "a counted sum": all_reduced,
    "times the share": share_of_the_batch,
    "a sum over the global size": lambda z, y: F.cross_entropy(z, y, reduction="sum") / 10,
    "divided by the global size before the sum": lambda z, y: (F.cross_entropy(z, y, reduction="none") / 10).sum(),
    "half a square": lambda z, y: ((z - one_hot(y)).square() / 2).sum(),
    "means over axes, summed": lambda z, y: ((z - one_hot(y)).square() / CLASSES).sum(),
    "a sum times the inverse of the global size": lambda z, y: F.cross_entropy(z, y, reduction="sum") * 0.1,
    "divided before the mean": lambda z, y: (F.cross_entropy(z, y, reduction="none") / 2).mean(),
    "a scaled regularizer": lambda z, y: right(z, y) + ts.nn.scale_regularization_loss(z.new_ones(()) * z.sum() * 0),
}


def model_and_optimizer(strategy):
    with strategy.scope():
        model = nn.Linear(FEATURES, CLASSES, dtype=torch.float64)
        return model, torch.optim.SGD(model.parameters(), lr=0.01)


def warnings_of(devices, loss, *, num_runs=5, num_examples=10, backward=torch.Tensor.backward, prepare=None):
    """Return the warnings of a training, and the lines that they are about."""
    strategy = strategy_for(devices)
    model, optimizer = model_and_optimizer(strategy)

    def step(x, y):
        optimizer.zero_grad()
        backward(loss(model(x), y))
        if prepare is not None:
            prepare(model)
        optimizer.step()

    data = strategy.experimental_distribute_dataset((X[:num_examples], Y[:num_examples]), batch_size=10)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", message="reduction: 'mean' divides")
        for _ in range(num_runs):
            for batch in data:
                strategy.run(step, args=batch)
    return [(str(entry.message), entry.filename, entry.lineno) for entry in caught if entry.category is UserWarning]


@pytest.mark.parametrize("name", MEANS)
def test_a_mean_warns_once_and_names_the_line(name):
    ((message, file, line),) = warnings_of(cpu_devices(3), MEANS[name])
    assert "is a mean over this replica's share of the batch" in message
    assert "ts.nn.scale_mean_loss(loss)" in message
    assert file == __file__
    assert f"test_mean_losses.py:{line} (step)" in message


@pytest.mark.parametrize("name", RIGHT)
def test_a_part_of_the_global_loss_does_not(name):
    for num_examples in (10, 9, 2):  # even, uneven and empty shares
        assert warnings_of(cpu_devices(3), RIGHT[name], num_examples=num_examples) == []


def test_what_takes_the_mean_is_named():
    names = {"mse_loss": "(mse_loss)", "cross_entropy": "(nll_loss)", "mean": "(mean)", "bce": "(binary_cross_entropy)"}
    for name, text in names.items():
        ((message, *_),) = warnings_of(cpu_devices(2), MEANS[name])
        assert text in message
    ((message, *_),) = warnings_of(cpu_devices(2), MEANS["a sum over the size"])
    assert "a sum over 5, the number of its elements" in message


def test_an_average_over_backward_passes_is_none_over_replicas():
    def four_times(loss):
        for _ in range(4):
            loss.backward(retain_graph=True)

    for divisor, num_warnings in ((4, 1), (1, 1), (3, 0), (12, 0)):
        found = warnings_of(cpu_devices(3), lambda z, y, by=divisor: F.cross_entropy(z, y) / by, backward=four_times)
        assert len(found) == num_warnings
    assert warnings_of(cpu_devices(3), RIGHT["over the number of replicas"], backward=four_times) == []


def test_one_replica_does_not_warn():
    assert warnings_of(cpu_devices(1), F.cross_entropy) == []
    assert warnings_of([], F.cross_entropy) == []


def in_processes():
    wrong = [len(warnings_of(None, MEANS[name])) for name in ("mse_loss", "cross_entropy of probabilities", "mean")]
    return wrong, [warnings_of(None, RIGHT[name]) for name in ("scale_mean_loss by tokens", "compute_average_loss")]


def test_two_processes(process_pool):
    for wrong, good in process_pool(2).run(in_processes):
        assert wrong == [1, 1, 1]
        assert good == [[], []]


class Scale(nn.Module):
    """A model with a learned scale of its loss."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES, dtype=torch.float64)
        self.scale = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        return self.linear(x)


def penalty(model):
    return sum(parameter.square().sum() for parameter in model.parameters())


def only_on_the_first(model, z, y):
    first = ts.get_replica_context().replica_id_in_sync_group == 0
    return right(z, y) + 0.1 * penalty(model) if first else right(z, y)


TERMS = {
    "squares": lambda model, z, y: right(z, y) + 0.1 * penalty(model),
    "norms": lambda model, z, y: right(z, y) + 0.1 * sum(p.norm() for p in model.parameters()),
    "a stack": lambda model, z, y: right(z, y) - torch.stack([p.abs().sum() for p in model.parameters()]).sum(),
    "all in one": lambda model, z, y: right(z, y) + torch.cat([p.view(-1) for p in model.parameters()]).pow(2).sum(),
    "orthogonality": lambda model, z, y: right(z, y) + (model.linear.weight @ model.linear.weight.T).norm(),
    "a learned scale": lambda model, z, y: torch.exp(-model.scale) * right(z, y) + model.scale,
}
RIGHT_TERMS = {
    "scaled": lambda model, z, y: right(z, y) + ts.nn.scale_regularization_loss(0.1 * penalty(model)),
    "divided": lambda model, z, y: right(z, y) + penalty(model) / ts.get_strategy().num_replicas_in_sync,
    "on the first replica": only_on_the_first,
    "of the data": lambda model, z, y: right(z, y) + (model.linear.weight * X[0] * len(y)).sum(),
    "of each replica's own": lambda model, z, y: right(z, y) + float(z.detach().sum()) * penalty(model),
    "all of it": lambda model, z, y: penalty(model) + model.scale,
}


def warnings_of_term(devices, loss, *, num_runs=5):
    """Return the warnings of a training by a loss of the model, too."""
    strategy = strategy_for(devices)
    with strategy.scope():
        model = Scale()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x, y):
        optimizer.zero_grad()
        loss(model, model(x), y).backward()
        optimizer.step()

    data = strategy.experimental_distribute_dataset((X, Y), batch_size=10)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(num_runs):
            for batch in data:
                strategy.run(step, args=batch)
    return [str(entry.message) for entry in caught]


@pytest.mark.parametrize("name", TERMS)
def test_a_term_of_parameters_only_warns_once(name):
    (message,) = warnings_of_term(cpu_devices(3), TERMS[name])
    assert "test_mean_losses.py" in message
    assert "has a term of parameters only" in message
    assert "ts.nn.scale_regularization_loss" in message
    assert warnings_of_term(cpu_devices(1), TERMS[name]) == []


@pytest.mark.parametrize("name", RIGHT_TERMS)
def test_other_terms_do_not(name):
    assert warnings_of_term(cpu_devices(3), RIGHT_TERMS[name]) == []


def terms_in_processes():
    return [len(warnings_of_term(None, loss)) for loss in (TERMS["squares"], *RIGHT_TERMS.values())]


def test_terms_in_two_processes(process_pool):  # where the second one says it
    first, second = process_pool(2).run(terms_in_processes)
    assert first == [0, 0, 0, 0, 0, 0, 0]
    assert second[:4] + second[6:] == [1, 0, 0, 0, 0]


def through_autograd(loss):
    torch.autograd.backward([loss])


def with_a_factor(loss):
    loss.backward(torch.tensor(0.5, dtype=loss.dtype))


def scaled(loss):
    torch.amp.GradScaler("cpu", init_scale=65536.0).scale(loss).backward()


def by_a_name_taken_before(loss):
    taken_before(loss)


def with_ones(loss):
    loss.backward(torch.ones_like(loss))


def test_ways_to_call_backward():
    assert len(warnings_of(cpu_devices(2), F.cross_entropy, backward=by_a_name_taken_before)) == 1
    assert len(warnings_of(cpu_devices(2), F.cross_entropy, backward=with_ones)) == 1
    assert len(warnings_of(cpu_devices(2), F.cross_entropy, backward=through_autograd)) == 1
    assert warnings_of(cpu_devices(2), F.cross_entropy, backward=with_a_factor) == []
    assert len(warnings_of(cpu_devices(2), F.cross_entropy, backward=scaled)) == 1


def warnings_of_assigned(loss, assign):
    """Return the warnings of a program that computes gradients by ``torch.autograd.grad`` before each step."""
    strategy = strategy_for(cpu_devices(2))
    model, optimizer = model_and_optimizer(strategy)

    def step(x, y):
        optimizer.zero_grad()
        parameters = list(model.parameters())
        assign(parameters, grad_taken_before(loss(model(x), y), parameters), lambda: right(model(x), y))
        optimizer.step()

    data = strategy.experimental_distribute_dataset((X, Y), batch_size=10)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            for batch in data:
                strategy.run(step, args=batch)
    return [str(entry.message) for entry in caught if entry.category is UserWarning]


def assign_as_they_are(parameters, gradients, _loss):
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient


def assign_halves(parameters, gradients, _loss):
    assign_as_they_are(parameters, [gradient / 2 for gradient in gradients], None)


def only_measure(_parameters, gradients, loss):
    """As an inner step of meta-learning, or a norm for the log."""
    assert all(gradient.norm() > 0 for gradient in gradients)
    loss().backward()


def test_gradients_that_are_assigned():
    (message,) = warnings_of_assigned(F.cross_entropy, assign_as_they_are)
    assert "is a mean over this replica's share of the batch (nll_loss)" in message
    assert "test_mean_losses.py:" in message
    assert warnings_of_assigned(right, assign_as_they_are) == []
    assert warnings_of_assigned(F.cross_entropy, assign_halves) == []
    assert warnings_of_assigned(F.cross_entropy, only_measure) == []


def measure_many(parameters, gradients, loss):
    """As for a Jacobian, where one backward pass starts with many gradients."""
    total = sum(parameter.square().mean() for parameter in parameters)
    starts = torch.tensor([1.0, 2.0]).double()
    many = grad_taken_before(total, parameters, starts, is_grads_batched=True, retain_graph=True)
    torch.testing.assert_close(2 * many[0][0], many[0][1])
    torch.func.vmap(lambda start: grad_taken_before(total, parameters, start)[0])(starts)
    assign_as_they_are(parameters, [gradient / 2 for gradient in gradients], loss)


def test_batched_gradients_can_be_taken():
    assert warnings_of_assigned(F.cross_entropy, measure_many) == []


def halve(model):
    for parameter in model.parameters():
        parameter.grad.div_(2)


def replace_by_halves(model):
    for parameter in model.parameters():
        parameter.grad = parameter.grad / 2


@pytest.mark.parametrize("scale", [halve, replace_by_halves])
def test_gradients_that_are_scaled_afterwards_do_not_warn(scale):
    texts = [message for message, *_ in warnings_of(cpu_devices(2), F.cross_entropy, prepare=scale)]
    assert all("is a mean over" not in text for text in texts)


def test_each_strategy_warns():
    assert [len(warnings_of(cpu_devices(2), F.cross_entropy)) for _ in range(2)] == [1, 1]


def test_a_new_optimizer_is_looked_at_after_many_steps():
    strategy = ts.MirroredStrategy(cpu_devices(2))

    def step(model, optimizer, loss, x, y):
        optimizer.zero_grad()
        loss(model(x), y).backward()
        optimizer.step()

    data = strategy.experimental_distribute_dataset((X, Y), batch_size=10)
    first, second = model_and_optimizer(strategy), model_and_optimizer(strategy)
    for _ in range(10):
        for batch in data:
            strategy.run(step, args=(*first, right, *batch))
    (batch,) = data
    strategy.run(step, args=(*second, F.cross_entropy, *batch))
    with pytest.warns(UserWarning, match="is a mean over this replica's share"):
        strategy.run(step, args=(*second, F.cross_entropy, *batch))


class OwnLoss(nn.Module):
    """As models of Hugging Face: the loss is the mean over this call's tokens that count."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES, dtype=torch.float64)

    def forward(self, x, y):
        return F.cross_entropy(self.layer(x), y, ignore_index=-100)


def train_own_loss(devices, num_examples, *, by_tokens):
    """Train a model that returns its own mean loss; return weights and the sums of losses."""
    strategy = strategy_for(devices)
    torch.manual_seed(0)
    with strategy.scope():
        model = OwnLoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    y = torch.where(torch.arange(10) % 3 == 0, -100, Y) if by_tokens else Y

    def step(x, y):
        optimizer.zero_grad()
        loss = ts.nn.scale_mean_loss(model(x, y), weight=(y != -100).sum() if by_tokens else None)
        loss.backward()
        optimizer.step()
        return loss.detach()

    data = strategy.experimental_distribute_dataset((X[:num_examples], y[:num_examples]), batch_size=4)
    losses = [float(strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)) for batch in data]
    return model.layer.weight.detach().flatten().tolist(), losses


@pytest.mark.parametrize("by_tokens", [False, True])
@pytest.mark.parametrize("num_examples", [8, 10, 9])
def test_scale_mean_loss_is_that_of_one_replica(num_examples, by_tokens, process_pool):
    one = train_own_loss(cpu_devices(1), num_examples, by_tokens=by_tokens)
    others = [train_own_loss(cpu_devices(count), num_examples, by_tokens=by_tokens) for count in (2, 3)]
    others += process_pool(2).run(train_own_loss, None, num_examples, by_tokens=by_tokens)
    for weights, losses in others:
        assert weights == pytest.approx(one[0], rel=1e-10)
        assert losses == pytest.approx(one[1], rel=1e-10)


def test_scale_mean_loss_of_nothing_is_zero_with_a_graph():
    strategy = ts.MirroredStrategy(cpu_devices(2))
    with strategy.scope():
        model = OwnLoss()

    def step(x, y):
        ts.nn.scale_mean_loss(model(x, y)).backward()
        return model.layer.weight.grad.abs().sum()

    data = strategy.experimental_distribute_dataset((X[:1], Y[:1]), batch_size=4)
    full, empty = strategy.experimental_local_results(strategy.run(step, args=next(iter(data))))
    assert full > 0
    assert empty == 0


def test_scale_mean_loss_refuses():
    loss = torch.ones((), requires_grad=True)
    with pytest.raises(
        ValueError, match=r"must have one element, a mean\. Received shape \(2,\).*compute_average_loss"
    ):
        ts.nn.scale_mean_loss(torch.ones(2))
    with pytest.raises(TypeError, match="loss must be a tensor"):
        ts.nn.scale_mean_loss(1.0)
    with pytest.raises(TypeError, match="weight must be a number"):
        ts.nn.scale_mean_loss(loss, weight="3")
    with pytest.raises(ValueError, match="weight must be one number"):
        ts.nn.scale_mean_loss(loss, weight=torch.ones(3))
    with pytest.raises(ts.errors.InvalidArgumentError, match=r"must not be negative\. Received: -1"):
        ts.nn.scale_mean_loss(loss, weight=-1)
    strategy = ts.MirroredStrategy(cpu_devices(2))
    with strategy.scope(), pytest.raises(RuntimeError, match="in cross-replica context"):
        ts.nn.scale_mean_loss(loss)
    with pytest.raises(RuntimeError, match="The actual batch size is not known"):
        strategy.run(lambda: ts.nn.scale_mean_loss(loss))


def test_scale_mean_loss_with_one_replica():
    loss = torch.tensor(3.0)
    assert ts.nn.scale_mean_loss(loss) == 3.0
    assert ts.nn.scale_mean_loss(loss, weight=7) == 3.0
    assert ts.nn.scale_mean_loss(loss, weight=0) == 0.0


def test_a_count_of_all_replicas_is_none_of_one_that_has_the_whole_batch():
    """As in a batch of one sequence, whose tokens are all of one replica's share."""
    strategy = strategy_for(cpu_devices(2))
    model, optimizer = model_and_optimizer(strategy)

    def step(x, y):
        optimizer.zero_grad()
        losses = F.cross_entropy(model(x.flatten(0, 1)), y.flatten(), reduction="none")
        count = ts.get_replica_context().all_reduce("SUM", torch.tensor(losses.numel()))
        (losses.sum() / count).backward()
        optimizer.step()

    data = strategy.experimental_distribute_dataset((X[:6].view(1, 6, FEATURES), Y[:6].view(1, 6)), batch_size=1)
    for batch in data:
        strategy.run(step, args=batch)
