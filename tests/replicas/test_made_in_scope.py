"""Whatever a scope makes is recorded, however it is made: each replica has its own."""

import copy

import pytest
import torch

import torchstrategy as ts
from tests.replicas.making_programs import CLASSES, FEATURES, WAYS, Plain


def train(num_replicas, cls, way):
    """Let a target network follow a trained one, and return what both hold."""
    strategy = ts.MirroredStrategy([f"cpu:{index}" for index in range(num_replicas)])
    with strategy.scope():
        torch.manual_seed(0)
        online = cls()
        target = way(online)
        optimizer = torch.optim.SGD([*online.parameters()], 0.1)

    def step(x):
        optimizer.zero_grad()
        loss = (online(x) - target(x) - 1).square().sum(1)
        ts.nn.compute_average_loss(loss, global_batch_size="actual").backward()
        optimizer.step()
        with torch.no_grad():
            for mine, its in zip(target.parameters(), online.parameters(), strict=True):
                mine.lerp_(its, 0.5)  # once on each replica

    data = strategy.experimental_distribute_dataset(
        torch.linspace(-1, 1, 12).double().reshape(4, FEATURES), batch_size=4
    )
    for _ in range(3):
        for x in data:
            strategy.run(step, args=(x,))
    strategy.check_sync()
    return torch.cat([p.detach().flatten() for model in (online, target) for p in model.parameters()])


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("way", WAYS)
def test_each_replica_has_its_own(cls, way):
    torch.testing.assert_close(train(3, cls, way), train(1, cls, way), rtol=0, atol=1e-12)


@pytest.mark.filterwarnings("ignore:Seems like")  # torch's, of any copied optimizer with a scheduler
def test_an_optimizer_and_its_scheduler_are_copied_too():
    found = []
    for num_replicas in (1, 2):
        strategy = ts.MirroredStrategy([f"cpu:{index}" for index in range(num_replicas)])
        with strategy.scope():
            torch.manual_seed(0)
            model = Plain()
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            other, *more = copy.deepcopy([model, optimizer, scheduler])

        def step(x, other=other, more=more):
            more[0].zero_grad()
            ts.nn.compute_average_loss(other(x).square().sum(1), global_batch_size="actual").backward()
            more[0].step()
            more[1].step()

        data = strategy.experimental_distribute_dataset(torch.ones(4, FEATURES).double(), batch_size=4)
        for _ in range(3):
            for x in data:
                strategy.run(step, args=(x,))
        found.append([*other.inner.weight.flatten().tolist(), more[0].param_groups[0]["lr"]])
        assert found[-1][-1] == 0.1 * 0.5**3
    assert found[1] == pytest.approx(found[0], abs=1e-12)


def weights_of_copies(num_replicas):
    """Train with a module and a scheduler of classes that the scope makes, which copy or construct by themselves."""
    strategy = ts.MirroredStrategy([f"cpu:{index}" for index in range(num_replicas)])
    with strategy.scope():

        class Halving(torch.optim.lr_scheduler.LRScheduler):
            def __init__(self, optimizer):
                self.optimizer = optimizer
                self.num_steps = 0

            def step(self):
                self.num_steps += 1
                self.optimizer.param_groups[0]["lr"] = 0.5**self.num_steps

        torch.manual_seed(0)
        model = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(FEATURES, 1, dtype=torch.float64))
        target = copy.deepcopy(model)
        scheduler = Halving(torch.optim.SGD(model.parameters(), 1.0))

    def step():
        scheduler.step()
        with torch.no_grad():
            for parameter in target.parameters():
                parameter.mul_(0.5)

    for _ in range(2):
        strategy.run(step)
    return [scheduler.num_steps, *torch.cat([p.detach().flatten() for p in target.parameters()]).tolist()]


def test_classes_that_are_made_in_the_scope():
    assert weights_of_copies(3) == weights_of_copies(1)


def test_classes_are_as_they_were_after_the_scope():
    before = [(cls, name, vars(cls).get(name)) for cls in (torch.nn.Module, *CLASSES) for name in METHODS]
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        CLASSES[1]()
    assert [(cls, name, vars(cls).get(name)) for cls, name, _ in before] == before


METHODS = ("__init__", "__init_subclass__", "__setstate__", "__copy__", "__deepcopy__")
