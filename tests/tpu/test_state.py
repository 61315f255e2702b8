"""What programs do with a model between runs: read, write, copy, save; and what replicas keep to themselves."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import torchstrategy as ts
from tests.tpu.programs import batches, check_same, error_of, ids, mlp, sgd

pytestmark = pytest.mark.timeout(300)


class Trained:
    """A model with batch normalisation and an optimizer, and a step."""

    def __init__(self, strategy):
        self.strategy = strategy
        with strategy.scope():
            self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
            self.optimizer = sgd(self.model.parameters())
        self.data = list(strategy.experimental_distribute_dataset(batches(mlp, [16] * 6)))

    def step(self, x, y, *, is_last=True):
        (F.cross_entropy(self.model(x), y, reduction="sum") / 16).backward()
        if is_last:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def run(self, number, **kwargs):
        self.strategy.run(self.step, args=self.data[number], kwargs=kwargs)


def copied(strategy):
    trained = Trained(strategy)
    trained.run(0)
    twin = copy.deepcopy(trained.model).cpu()
    pickled = pickle.loads(pickle.dumps(copy.deepcopy(trained.model).cpu()))
    file = io.BytesIO()
    torch.save(trained.model.state_dict(), file)
    trained.run(1)
    return twin.state_dict(), pickled.state_dict(), len(file.getvalue()) > 100, trained.model.state_dict()


def test_copies_of_a_model_between_runs(xla_process):
    check_same(xla_process, copied)


def loaded(strategy):
    trained = Trained(strategy)
    trained.run(0)
    saved = copy.deepcopy((trained.model.state_dict(), trained.optimizer.state_dict()))
    trained.run(1)
    trained.model.load_state_dict(saved[0])
    trained.optimizer.load_state_dict(saved[1])
    trained.run(2)
    first = {name: tensor.clone() for name, tensor in trained.model.state_dict().items()}
    # values of the host, as from a file that another strategy has written
    trained.model.load_state_dict({name: torch.full_like(value, 0.5, device="cpu") for name, value in first.items()})
    trained.run(3)
    return first, trained.model.state_dict(), trained.optimizer.state_dict()["state"]


def test_load_state_dict_between_runs(xla_process):
    check_same(xla_process, loaded)


def written(strategy):
    trained = Trained(strategy)
    trained.run(0)
    with torch.no_grad():
        trained.model[0].weight.mul_(0.5)
        trained.model[2].bias.fill_(1.0)
        trained.model[1].running_mean.zero_()
    trained.optimizer.param_groups[0]["lr"] = 0.01
    trained.run(1)
    trained.run(2, is_last=False)  # each replica keeps its own gradients and statistics
    mean, gradient = trained.model[1].running_mean.clone(), trained.model[0].weight.grad.clone()
    trained.run(3, is_last=False)
    trained.model[1].running_mean.fill_(0.25)  # for all replicas
    trained.model[1].running_var.fill_(0.75)  # Mirrored takes a module's buffers as changed together
    trained.run(4)
    return mean, gradient, trained.model.state_dict()


def test_writing_between_runs(xla_process):
    check_same(xla_process, written)


def by_methods(strategy):
    """Methods that the program took in the scope, before the strategy knew of anything but the objects."""
    trained = Trained(strategy)
    with strategy.scope():
        optimizer = torch.optim.Adam(trained.model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        step, clear, schedule, forward = optimizer.step, optimizer.zero_grad, scheduler.step, trained.model.forward

    def train(x, y):
        clear()
        (F.cross_entropy(forward(x), y, reduction="sum") / 16).backward()
        step()
        schedule()

    for batch in strategy.experimental_distribute_dataset(batches(mlp, [16, 11, 16])):
        strategy.run(train, args=batch)
    return trained.model[0].weight, optimizer.param_groups[0]["lr"]


def test_methods_taken_in_the_scope(xla_process):
    check_same(xla_process, by_methods)


class Kept(nn.Module):
    """What it keeps is each replica's own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.zeros(2))
        self.attribute, self.held = torch.zeros(2), [torch.zeros(2)]

    def forward(self, x):
        self.total += x.sum()
        self.attribute = self.attribute + x.sum()
        self.held[0] = self.held[0] + x.sum()
        return self.total + 0, self.attribute + 0, self.held[0] + 0


def written_unseen(strategy):
    with strategy.scope():
        model = Kept()
    data = torch.arange(20.0).reshape(10, 2)
    (batch,) = strategy.experimental_distribute_dataset(data, batch_size=10)
    results = []
    for write in (
        lambda tensor: tensor.data.add_(7.0),
        lambda tensor: tensor.data[:1].fill_(7.0),
        lambda tensor: setattr(tensor, "data", torch.full((2,), 7.0, device=tensor.device)),
        lambda tensor: torch._foreach_add_([tensor], 7.0),
        lambda tensor: tensor.copy_(torch.tensor([1.0, 7.0])),
        lambda tensor: None,
    ):
        strategy.run(model, args=(batch,))
        for tensor in (model.total, model.attribute, model.held[0]):
            write(tensor)
        results.append(strategy.run(model, args=(batch,)))
    return results


def test_writes_that_no_version_tells_of(xla_process):
    check_same(xla_process, written_unseen)


def loaded_and_cleared(strategy):
    """Uneven shares, gradients that are set to zeros in two ways, and a state that was loaded."""
    with strategy.scope():
        model = nn.Linear(4, 3)
        optimizer = torch.optim.NAdam(model.parameters(), lr=0.1)

    def step(x, y):
        (F.cross_entropy(model(x), y, reduction="sum") / 11).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        model.bias.grad = torch.zeros_like(model.bias)

    for batch in strategy.experimental_distribute_dataset(batches(mlp, [11, 11, 16])):
        strategy.run(step, args=batch)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return model.state_dict()


def test_gradients_cleared_and_states_loaded_where_shares_are_uneven(xla_process):
    check_same(xla_process, loaded_and_cleared)


def gradients_outside(strategy):
    trained = Trained(strategy)
    trained.run(0, is_last=False)
    with torch.no_grad():
        trained.model[0].weight.grad.mul_(2)  # replica 0's, it would seem
    refused = error_of(trained.run, 1)
    trained.model.zero_grad()
    trained.run(1)
    first = {name: tensor.clone() for name, tensor in trained.model.state_dict().items()}
    trained.run(2, is_last=False)
    trained.optimizer.zero_grad()
    trained.run(3)
    trained.run(4, is_last=False)
    trained.model.zero_grad(set_to_none=False)
    trained.run(5)
    return refused, first, trained.model.state_dict()


def test_gradients_changed_between_runs(xla_process):
    check_same(xla_process, gradients_outside)


def evaluated(strategy):
    trained = Trained(strategy)

    def predict(x):
        with torch.no_grad():
            return trained.model(x)

    trained.run(0)
    trained.run(1, is_last=False)
    before = trained.model[0].weight.grad.clone()
    trained.model.eval()
    predicted = [strategy.run(predict, args=(x,)) for x, _ in trained.data[:2]]
    with torch.inference_mode():
        predicted.append(strategy.run(lambda x: trained.model(x), args=(trained.data[0][0],)))
    outside = trained.model(torch.ones(2, 4).to(trained.model[0].weight.device))
    trained.model.train()
    trained.run(2)
    return before, predicted, outside, trained.model.training, trained.model.state_dict()


def test_evaluation_between_runs(xla_process):
    check_same(xla_process, evaluated)


class Remembering(nn.Module):
    """Keeps tensors in an attribute, a list and a buffer that is replaced."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.last = torch.zeros(())
        self.history = [torch.zeros(())]
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x):
        self.last = x.detach() * 2
        self.history[0] = self.history[0] + x.detach()
        self.seen = self.seen + x.detach().reshape(1)
        return self.layer(x.reshape(1, 1))


def remembered(strategy):
    with strategy.scope():
        module = Remembering()
    outputs = [strategy.run(lambda x: (module(x), module.seen * 1, module.history[0] * 1), args=(ids(strategy),))]
    outputs.append(strategy.run(lambda: (module.last + 1, module.seen + 1, module.history[0] + 1)))
    outside = float(module.last), float(module.seen), float(module.history[0])
    outputs.append(strategy.run(lambda x: (module(x), module.seen * 1, module.history[0] * 1), args=(ids(strategy),)))
    return outputs, outside


def test_tensors_that_modules_keep(xla_process):
    check_same(xla_process, remembered)


def replaced_parameters(strategy):
    trained = Trained(strategy)
    trained.run(0)
    with strategy.scope():
        layer = nn.Linear(4, 3)
        trained.model[2] = layer
        trained.optimizer = sgd(trained.model.parameters())
    trained.run(1)
    return trained.model.state_dict()


def test_layer_replaced_between_runs(xla_process):
    check_same(xla_process, replaced_parameters)


def compiled(strategy):
    with strategy.scope():
        model = torch.compile(mlp(), backend="eager")
    return strategy.run(lambda x: model(x.expand(2, 4)), args=(ids(strategy),))


def test_compiled_module(xla_process):
    check_same(xla_process, compiled)


def two_strategies(strategy):
    other = type(strategy)() if isinstance(strategy, ts.TPUStrategy) else ts.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = nn.Linear(1, 1)

    with strategy.scope():
        errors = error_of(other.run, lambda: 1), error_of(other.scope().__enter__)
    return errors, strategy.run(lambda x: model(x.reshape(1, 1)), args=(ids(strategy),))


def test_strategies_are_not_mixed(xla_process):
    check_same(xla_process, two_strategies)
