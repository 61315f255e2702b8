import functools
import io

import pytest
import torch
from torch.optim import lr_scheduler

from tests.fit.callbacks.loops import Model, fit
from torchstrategy.callbacks import TorchLRScheduler
from torchstrategy.checkpoint.tracked import to_plain

halving = functools.partial(lr_scheduler.ExponentialLR, gamma=0.5)


def rates(callback, num_epochs, **kwargs):
    return [logs["learning_rate"] for logs in fit(callback, [{"val_loss": 1.0}] * num_epochs, **kwargs)[1]]


def test_a_scheduler_steps_once_an_epoch():
    model = Model(lr=1.0)
    assert rates([halving(model.optimizer)], 3, model=model) == [1.0, 0.5, 0.25]
    assert model.optimizer.param_groups[0]["lr"] == 0.125


def test_a_factory_is_given_the_optimizer():
    model = Model(lr=1.0)
    callback = TorchLRScheduler(halving)
    assert callback.scheduler is None
    assert rates(callback, 2, model=model) == [1.0, 0.5]
    assert callback.scheduler.optimizer is model.optimizer
    first = callback.scheduler
    assert rates(callback, 2, model=model) == [0.25, 0.125]  # it goes on with the same optimizer
    assert callback.scheduler is first
    assert rates(callback, 2, model=Model(lr=1.0)) == [1.0, 0.5]


def test_steps():
    model = Model(lr=1.0)
    assert rates(TorchLRScheduler(halving, interval="step"), 2, model=model, steps=3) == [2**-3, 2**-6]


def test_steps_are_those_of_the_optimizer():
    model = Model(lr=1.0)
    callback = TorchLRScheduler(halving, interval="step")
    callback.set_model(model)
    callback.on_train_begin()
    model.optimizer.step()
    for iterations, rate in [(0, 1.0), (1, 0.5), (1, 0.5), (4, 0.0625)]:  # accumulation, steps_per_execution
        model.iterations = iterations
        callback.on_train_batch_end(0, {})
        assert model.optimizer.param_groups[0]["lr"] == rate


def test_plateau_of_torch_is_given_the_value():
    model = Model(lr=1.0)
    plateau = lr_scheduler.ReduceLROnPlateau(model.optimizer, factor=0.5, patience=0)
    assert rates([plateau], 3, model=model) == [1.0, 1.0, 0.5]
    callback = TorchLRScheduler(functools.partial(lr_scheduler.ReduceLROnPlateau, patience=0), monitor="learning")
    with pytest.warns(UserWarning, match=r"TorchLRScheduler monitors 'learning'"):
        assert rates(callback, 2, model=Model(lr=1.0)) == [1.0, 1.0]


def test_plateau_does_not_go_by_steps():
    with pytest.raises(ValueError, match=r"does not go with ReduceLROnPlateau"):
        fit(TorchLRScheduler(lr_scheduler.ReduceLROnPlateau, interval="step"), [{}])


@pytest.mark.parametrize(
    "factory",
    [
        halving,
        functools.partial(lr_scheduler.MultiStepLR, milestones=[1, 3], gamma=0.5),
        functools.partial(lr_scheduler.OneCycleLR, max_lr=1.0, total_steps=30),
        functools.partial(lr_scheduler.LambdaLR, lr_lambda=lambda n: 1 / (n + 1)),
        lambda optimizer: lr_scheduler.SequentialLR(
            optimizer, [lr_scheduler.LinearLR(optimizer, total_iters=2), halving(optimizer)], milestones=[2]
        ),
    ],
)
@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_a_restored_scheduler_goes_on(factory, interval):
    unbroken = rates(TorchLRScheduler(factory, interval), 5, model=Model(lr=1.0))
    model = Model(lr=1.0)
    every, _ = fit(TorchLRScheduler(factory, interval), [{}] * 2, model=model)
    state, groups, iterations = every.state_dict(), model.optimizer.state_dict(), model.iterations
    buffer = io.BytesIO()
    torch.save(to_plain(state, "state"), buffer)  # as a checkpoint does
    state = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)

    other = Model(lr=1.0)
    callback = TorchLRScheduler(factory, interval)
    callback.set_model(other)
    callback.on_train_begin()
    other.optimizer.load_state_dict(groups)
    other.iterations = iterations
    callback.load_state_dict(state["TorchLRScheduler"])
    seen = []
    for epoch in range(2, 5):
        for batch in range(2):
            other.optimizer.step()
            other.iterations += 1
            callback.on_train_batch_end(batch, {})
        logs = {}
        callback.on_epoch_end(epoch, logs)
        seen.append(logs["learning_rate"])
    assert seen == pytest.approx(unbroken[2:], abs=0)


def test_the_state_of_another_class_is_refused():
    callback, _ = fit(TorchLRScheduler(halving), [{}], model=Model(lr=1.0))
    state = callback.state_dict()["TorchLRScheduler"]
    other = TorchLRScheduler(functools.partial(lr_scheduler.ConstantLR, total_iters=2))
    other.set_model(Model(lr=1.0))
    other.on_train_begin()
    with pytest.raises(ValueError, match=r"had a scheduler .*, this one has a ConstantLR\. Use the same"):
        other.load_state_dict(state)


def test_a_scheduler_of_another_optimizer_is_refused():
    scheduler = halving(Model().optimizer)
    with pytest.raises(ValueError, match=r"ExponentialLR among the callbacks is of another optimizer"):
        fit([scheduler], [{}])


def test_wrong_arguments():
    with pytest.raises(TypeError, match=r"makes one. Received: 0.1"):
        TorchLRScheduler(0.1)
    with pytest.raises(ValueError, match=r"must be 'epoch' or 'step'. Received: 'batch'"):
        TorchLRScheduler(halving, "batch")
    with pytest.raises(TypeError, match=r"must return a torch.optim.lr_scheduler.LRScheduler"):
        fit(TorchLRScheduler(lambda optimizer: optimizer), [{}])
