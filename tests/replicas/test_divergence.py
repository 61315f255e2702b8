"""Silent divergence between replicas is found, and the message names the tensor."""

import warnings

import pytest
import torch
from torch import nn

import torchstrategy as ts
from torchstrategy.replicas import edits


@pytest.fixture(params=[2, 3])
def strategy(request):
    return ts.MirroredStrategy([f"cpu:{i}" for i in range(request.param)], check_every=5)


def replica_id():
    return ts.get_replica_context().replica_id_in_sync_group


def make(strategy):
    with strategy.scope():
        model = nn.Sequential(nn.Linear(2, 1))
        return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_backward_into_a_captured_list_of_parameters(strategy):
    model, _ = make(strategy)
    params = list(model.parameters())
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"local replica 1 reached a parameter .*replica 0"):
            strategy.run(lambda: nn.functional.linear(torch.ones(1, 2), *params).sum().backward())
        model.zero_grad()


def test_backward_guard_holds_with_concurrent_replicas():
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"], concurrent=True)
    model, _ = make(strategy)
    params = list(model.parameters())
    with pytest.raises(RuntimeError, match="local replica 1 reached a parameter"):
        strategy.run(lambda: nn.functional.linear(torch.ones(1, 2), *params).sum().backward())


def test_writing_to_a_captured_parameter(strategy):
    model, _ = make(strategy)
    weight = model[0].weight

    def fn():
        if replica_id() == 1:
            with torch.no_grad():
                weight.add_(1)

    with pytest.raises(ts.errors.DivergenceError, match=r"replica 1 on cpu:1 changed the value of replica 0.*'weight'"):
        strategy.run(fn)


def test_writing_to_a_captured_gradient(strategy):
    model, _ = make(strategy)
    weight = model[0].weight

    def fn():
        if replica_id() == 1:
            weight.grad = torch.ones(1, 2)

    with pytest.raises(ts.errors.DivergenceError, match=r"changed the gradient of replica 0.*'weight'"):
        strategy.run(fn)


@pytest.mark.parametrize("run", [1, 2, 5, 10])
def test_parameters_that_drift_apart_are_found(strategy, run):
    model, _ = make(strategy)

    def fn(drift):
        if drift:
            with torch.no_grad():
                model[0].bias.add_(0.5 * replica_id())

    for _ in range(run - 1):
        strategy.run(fn, args=(False,))
    with pytest.raises(ts.errors.DivergenceError, match=r"parameter 'bias' .*differs between replica 0 on cpu:0 and"):
        strategy.run(fn, args=(True,))


def test_drift_past_the_version_counter_is_found(strategy):
    model, _ = make(strategy)

    def fn(drift):
        if drift:
            model[0].bias.data += 0.5 * replica_id()

    strategy.run(fn, args=(False,))
    strategy.run(fn, args=(False,))
    with pytest.raises(ts.errors.DivergenceError, match="'bias'"):  # all of so small a model is looked at in each run
        strategy.run(fn, args=(True,))


class Langevin(torch.optim.SGD):
    """Descends with noise from torch's stream, or from a seed for each step."""

    def __init__(self, params, *, seeds_each_step):
        super().__init__(params, lr=0.1)
        self.seeds_each_step = seeds_each_step
        self.num_steps = 0

    @torch.no_grad()
    def step(self):
        super().step()
        self.num_steps += 1
        generator = torch.Generator().manual_seed(self.num_steps) if self.seeds_each_step else None
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(torch.randn(parameter.shape, generator=generator))


@pytest.mark.parametrize("seeds_each_step", [True, False])
def test_optimizers_that_draw_random_numbers(strategy, seeds_each_step):
    """Replicas have streams of their own, so such an optimizer has to seed its draws, as the message says."""
    with strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = Langevin(model.parameters(), seeds_each_step=seeds_each_step)

    def fn():
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    if seeds_each_step:
        before = model.weight.detach().clone()
        strategy.run(fn)
        noise = torch.randn(1, 2, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(model.weight, before - 0.1 * strategy.num_replicas_in_sync + noise)
    else:
        with pytest.raises(ts.errors.DivergenceError, match="a generator that it seeds in each step"):
            strategy.run(fn)


@pytest.mark.parametrize(("key", "first"), [("lr", 0.1), ("weight_decay", 0.0), ("nesterov", False)])
def test_hyper_parameters_that_differ_are_found(strategy, key, first):
    model, optimizer = make(strategy)

    def fn(value):
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.param_groups[0][key] = value or [first, True, 0.5][replica_id()]

    match = rf"'{key}' is {first} on replica 0 on cpu:0 and True on replica 1 on cpu:1 in group 0 of SGD"
    with pytest.raises(ts.errors.DivergenceError, match=match):
        strategy.run(fn, args=(None,))
    for _ in range(2):
        strategy.run(fn, args=(0.25,))
    assert optimizer.param_groups[0][key] == 0.25


@pytest.mark.parametrize("other", [None, "fast"])
def test_a_number_and_none_differ(strategy, other):
    _, optimizer = make(strategy)

    def fn():
        optimizer.param_groups[0]["lr"] = [0.1, other, other][replica_id()]

    with pytest.raises(
        ts.errors.DivergenceError, match=r"'lr' is 0\.1 on replica 0 on cpu:0 and 'no number' on replica"
    ):
        strategy.run(fn)


def test_hyper_parameters_in_tensors_are_compared(strategy):
    with strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5))

    def fn(step):
        optimizer.param_groups[0]["lr"].fill_(0.25 + step * replica_id())

    strategy.run(fn, args=(0.0,))
    with pytest.raises(ts.errors.DivergenceError, match=r"'lr' is 0\.25 on replica 0 on cpu:0 and 0\.5 on replica 1"):
        strategy.run(fn, args=(0.25,))


def test_a_scheduler_that_follows_the_replicas_own_loss_is_found(strategy):
    _, optimizer = make(strategy)
    with strategy.scope():
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)

    def fn(loss):
        scheduler.step(loss + loss * replica_id())

    strategy.run(fn, args=(1.0,))
    strategy.run(fn, args=(0.0,))
    with pytest.raises(ts.errors.DivergenceError, match=r"'lr' is 0\.01"):
        strategy.run(lambda: scheduler.step(1.0 - 2.0 * (replica_id() > 0)))


def test_rounding_of_hyper_parameters_is_no_divergence(strategy):
    _, optimizer = make(strategy)

    def fn():
        optimizer.param_groups[0]["lr"] = 0.1 * (1 + 1e-7 * replica_id())
        optimizer.param_groups[0]["dampening"] = float("nan")
        optimizer.param_groups[0]["note"] = [object(), "text", None][replica_id()]
        optimizer.param_groups[0]["notes"] = [[], ["text"], None][replica_id()]

    for _ in range(2):
        strategy.run(fn)


def test_rounding_is_no_divergence(strategy):
    model, _ = make(strategy)

    def fn():
        with torch.no_grad():
            model[0].weight.mul_(1 + 1e-7 * replica_id())

    strategy.run(fn)


def test_right_programs_pass(strategy):
    model, optimizer = make(strategy)

    def step():
        optimizer.zero_grad()
        model(torch.full((1, 2), 1.0 + replica_id())).sum().backward()
        optimizer.step()

    for _ in range(12):
        strategy.run(step)


def test_check_every_is_checked():
    with pytest.raises(ValueError, match="check_every"):
        ts.MirroredStrategy(["cpu:0"], check_every=0)


def test_accumulating_into_a_sum_is_refused(strategy):
    model, optimizer = make(strategy)

    def fn():
        model(torch.ones(1, 2)).sum().backward()
        ts.get_replica_context().sum_gradients(optimizer)
        model(torch.ones(1, 2)).sum().backward()

    with pytest.raises(RuntimeError, match="already the sum over replicas"):
        strategy.run(fn)
    optimizer.zero_grad()


@pytest.mark.parametrize("end", ["zero_grad", "step", "model.zero_grad", "none"])
def test_marks_end(strategy, end):
    model, optimizer = make(strategy)

    def fn():
        model(torch.ones(1, 2)).sum().backward()
        ts.get_replica_context().sum_gradients(optimizer)
        if end == "zero_grad":
            optimizer.zero_grad(set_to_none=False)
        elif end == "model.zero_grad":
            model.zero_grad()
        elif end == "none":
            for p in model.parameters():
                p.grad = None
        else:
            optimizer.step()
            optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        return model[0].bias.grad.item()

    assert set(strategy.experimental_local_results(strategy.run(fn))) == {1.0}


def test_two_steps_on_one_backward_sum_once():
    def train(devices):
        strategy = ts.MirroredStrategy(devices)
        torch.manual_seed(0)
        with strategy.scope():
            model = nn.Linear(2, 1)
            optimizers = [torch.optim.SGD(model.parameters(), lr=lr) for lr in (0.1, 0.01)]

        def step():
            optimizers[0].zero_grad()
            ts.nn.compute_average_loss(model(torch.ones(1, 2)).sum(1)).backward()
            for optimizer in optimizers:
                optimizer.step()
            optimizers[0].step()

        for _ in range(2):
            strategy.run(step)
        return model.weight.detach()

    torch.testing.assert_close(train(["cpu:0", "cpu:1", "cpu:2"]), train(["cpu:0"]))


def test_backward_into_an_applied_sum_is_refused_at_the_next_step(strategy):
    model, optimizer = make(strategy)

    def step():
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    strategy.run(step)
    with pytest.raises(RuntimeError, match=r"optimizer.zero_grad\(\)` between a step and the next backward"):
        strategy.run(step)
    optimizer.zero_grad()
    strategy.run(step)


@pytest.mark.parametrize("clear", ["optimizer", "module", "tensor", "outside"])
def test_gradients_zeroed_in_place_after_a_step(strategy, clear):
    model, optimizer = make(strategy)
    n = strategy.num_replicas_in_sync

    def step():
        if clear == "optimizer":
            optimizer.zero_grad(set_to_none=False)
        elif clear == "module":
            model.zero_grad(set_to_none=False)
        elif clear == "tensor":
            for p in model.parameters():
                if p.grad is not None:
                    p.grad.zero_()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return model[0].bias.grad.item()

    for _ in range(3):
        assert set(strategy.experimental_local_results(strategy.run(step))) == {float(n)}
        if clear == "outside":
            optimizer.zero_grad(set_to_none=False)


def test_gradients_written_by_hand_after_a_step(strategy):
    model, optimizer = make(strategy)
    n = strategy.num_replicas_in_sync

    def step():
        grads = torch.autograd.grad(model(torch.ones(1, 2)).sum(), list(model.parameters()))
        for p, grad in zip(model.parameters(), grads, strict=True):
            if p.grad is None:
                p.grad = grad
            else:
                p.grad.copy_(grad)
        optimizer.step()
        return model[0].bias.grad.item()

    for _ in range(3):
        assert set(strategy.experimental_local_results(strategy.run(step))) == {float(n)}


def test_two_networks_that_pollute_each_others_gradients():
    """A GAN's generator loss also reaches the discriminator, whose gradients are cleared before they are used."""

    def train(devices):
        strategy = ts.MirroredStrategy(devices)
        torch.manual_seed(0)
        with strategy.scope():
            generator, discriminator = nn.Linear(2, 2).double(), nn.Linear(2, 1).double()
            optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (generator, discriminator)]
        data = strategy.experimental_distribute_dataset(torch.randn(12, 2, dtype=torch.float64), batch_size=4)

        def mean(values):
            return ts.nn.compute_average_loss(values.square().sum(1), global_batch_size="actual")

        def step(x):
            optimizers[0].zero_grad()
            mean(discriminator(generator(x)) - 1).backward()
            optimizers[0].step()
            optimizers[1].zero_grad()
            (mean(discriminator(generator(x).detach())) + mean(discriminator(x) - 1)).backward()
            optimizers[1].step()

        for batch in data:
            strategy.run(step, args=(batch,))
        return [p.detach() for net in (generator, discriminator) for p in net.parameters()]

    torch.testing.assert_close(train(["cpu:0", "cpu:1", "cpu:2"]), train(["cpu:0"]))


class Counting(torch.optim.SGD):
    """Writes to its groups in each step, as optimizers do that find their rate by themselves."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


def central(devices):
    return ts.experimental.CentralStorageStrategy(devices)


def train_counting(strategy):
    with strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = Counting(model.parameters(), lr=0.1)

    def fn():
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    for _ in range(3):
        strategy.run(fn)
    return optimizer.param_groups[0].get("k", 0)


def train_counting_in_central_storage():
    return train_counting(central(["cpu:0"]))


def test_an_optimizer_may_write_to_its_groups(strategy, process_pool):
    assert train_counting(strategy) == 3
    # Central storage steps one copy for all replicas.
    assert train_counting(central(["cpu:0", "cpu:1"])) == 3
    assert process_pool(2).run(train_counting_in_central_storage)[0] == 3


def test_embeddings_that_depend_on_a_share_are_warned_of(strategy):
    with strategy.scope():
        layers = [nn.Embedding(5, 2, max_norm=1.0), nn.EmbeddingBag(5, 2, scale_grad_by_freq=True), nn.Embedding(5, 2)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            strategy.run(lambda: None)
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == len(layers) - 1
    assert messages[0].startswith("Embedding(max_norm=1.0) changes the rows that a replica looks up")
    assert messages[1].startswith("EmbeddingBag(scale_grad_by_freq=True) divides gradients by how often")


def by_hand(model, optimizer, average, loss):
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.data -= 0.1 * gradient


def by_backward(model, optimizer, average, loss):
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad


def by_an_optimizer(model, optimizer, average, loss):
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def by_summed_gradients(model, optimizer, average, loss):
    gradients = ts.get_replica_context().all_reduce("SUM", torch.autograd.grad(loss, list(model.parameters())))
    with torch.no_grad():
        torch._foreach_sub_(list(model.parameters()), gradients, alpha=0.1)


def by_accumulation(model, optimizer, average, loss):
    loss.backward()
    with torch.no_grad():
        torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.5)


def by_an_average_alone(model, optimizer, average, loss):
    with torch.no_grad():
        torch._foreach_mul_(list(model.parameters()), 0.9)


LONE, IN_STEP = [by_hand, by_backward], [by_an_optimizer, by_summed_gradients, by_accumulation, by_an_average_alone]


def warnings_of_updates(devices=None):
    return {update.__name__: warnings_of_update(update, devices) for update in (*LONE, *IN_STEP)}


def warnings_of_update(update, devices):
    strategy = ts.MirroredStrategy(devices)
    model, optimizer = make(strategy)
    with strategy.scope():
        average = nn.Sequential(nn.Linear(2, 1))  # which requires gradients, as torch's AveragedModel does

    def step():
        update(model, optimizer, average, model(torch.full((1, 2), replica_id() + 1.0)).sum())

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(4):
            strategy.run(step)
    return [str(warning.message) for warning in caught]


def test_processes_that_update_by_their_own_gradients_are_warned_of(process_pool):
    for found in process_pool(2).run(warnings_of_updates):
        for update in LONE:
            (text,) = found.pop(update.__name__)
            assert "changed a parameter (shape (1, 2)), but has met no other process" in text
        assert found == {update.__name__: [] for update in IN_STEP}
    assert all(text == [] for text in warnings_of_updates(["cpu:0"]).values())


class Scaled(nn.Linear):
    """Has a buffer, and tensors that are plain attributes, or in one."""

    def __init__(self):
        super().__init__(2, 1)
        self.register_buffer("factor", torch.ones(()))
        self.offset = torch.zeros(())
        self.held = [torch.zeros(())]
        self.named = {"offset": torch.zeros(())}


def ends(_):
    pass


def fails(strategy):
    with pytest.raises(ZeroDivisionError):
        strategy.run(lambda: 1 / 0)


def compares(strategy):
    strategy.check_sync()


@pytest.mark.parametrize("before", [ends, fails, compares])
@pytest.mark.parametrize(
    "tensor_of",
    [
        lambda module: module.weight,
        lambda module: module.factor,
        lambda module: module.offset,
        lambda module: module.held[0],
        lambda module: module.named["offset"],
    ],
    ids=["parameter", "buffer", "attribute", "in a list", "in a dict"],
)
def test_what_is_written_past_the_version_counter_outside_run_follows(strategy, monkeypatch, before, tensor_of):
    monkeypatch.setattr(edits, "_SHARE", 0.0)  # so that nothing depends on the time
    monkeypatch.setattr(edits, "_NUM_RUNS_BETWEEN", 1000)
    with strategy.scope():
        module = Scaled()
    if before is not compares:  # which takes the module up by itself
        strategy.run(lambda: module.weight.sum().item())
    before(strategy)
    tensor_of(module).data.fill_(7.0)
    found = strategy.run(lambda: tensor_of(module).mean().item())
    assert set(strategy.experimental_local_results(found)) == {7.0}
