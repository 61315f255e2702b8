import numpy as np
import pytest
import torch

from tests.fit.callbacks.loops import Model, fit
from torchstrategy.callbacks import LearningRateScheduler, ReduceLROnPlateau


def losses(*values):
    return [{"val_loss": value} for value in values]


def rates(callback, logs, **kwargs):
    return [own["learning_rate"] for own in fit(callback, logs, **kwargs)[1]]


@pytest.mark.parametrize(
    ("arguments", "values", "expected"),
    [
        ({"factor": 0.5, "patience": 2}, (3, 2, 2, 2, 2, 2), (1, 1, 1, 1, 0.5, 0.5)),
        ({"factor": 0.5, "patience": 1, "cooldown": 2}, (1, 1, 1, 1, 1, 1), (1, 1, 0.5, 0.5, 0.25, 0.25)),
        ({"factor": 0.5, "patience": 1, "min_lr": 0.3}, (1, 1, 1, 1), (1, 1, 0.5, 0.3)),
        ({"factor": 0.5, "patience": 1, "min_delta": 0.5}, (3, 2.8, 2), (1, 1, 0.5)),
        ({"factor": 0.5, "patience": 1, "min_lr": 2.0}, (1, 1, 1), (1, 1, 1)),
    ],
)
def test_plateau(arguments, values, expected):
    # The logs of an epoch hold the rate that it was trained with.
    assert rates(ReduceLROnPlateau(**arguments), losses(*values), model=Model(lr=1.0)) == pytest.approx(expected)


def test_plateau_of_the_largest():
    reduce = ReduceLROnPlateau("val_auc", factor=0.5, patience=1)
    logs = [{"val_auc": value} for value in (0.5, 0.6, 0.6, 0.6)]
    assert rates(reduce, logs, model=Model(lr=1.0)) == [1.0, 1.0, 1.0, 0.5]


def test_plateau_goes_on_after_a_restore():
    values = losses(1, 1, 1, 1, 1, 1, 1)
    arguments = {"factor": 0.5, "patience": 2, "cooldown": 1}
    unbroken = rates(ReduceLROnPlateau(**arguments), values, model=Model(lr=1.0))
    for stop in range(1, 6):
        model = Model(lr=1.0)
        every, _ = fit(ReduceLROnPlateau(**arguments), values[:stop], model=model)
        rest = ReduceLROnPlateau(**arguments)
        assert rates(rest, values[stop:], model=model, state=every.state_dict(), initial_epoch=stop) == unbroken[stop:]


def test_every_parameter_group_is_reduced():
    model = Model()
    model.optimizer = torch.optim.SGD(
        [{"params": [model.weight], "lr": 1.0}, {"params": [model.bias], "lr": torch.tensor(0.5)}]
    )
    rate = model.optimizer.param_groups[1]["lr"]
    fit(ReduceLROnPlateau(factor=0.1, patience=1, min_lr=0.08), losses(1, 1), model=model)
    assert model.optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    assert model.optimizer.param_groups[1]["lr"] is rate
    assert rate.item() == pytest.approx(0.08)


def test_plateau_says_what_it_does(capsys):
    fit(ReduceLROnPlateau(patience=1, verbose=1), losses(1, 1), model=Model(lr=1.0))
    assert capsys.readouterr().out == "Epoch 2: ReduceLROnPlateau sets the learning rate to 0.1.\n"


def test_wrong_factor():
    with pytest.raises(ValueError, match=r"factor=...\) must be from 0 to below 1. Received: 1.0"):
        ReduceLROnPlateau(factor=1.0)


def test_plateau_without_the_name():
    with pytest.warns(UserWarning, match="ReduceLROnPlateau monitors 'val_loss'"):
        assert rates(ReduceLROnPlateau(), [{"loss": 1.0}], model=Model(lr=1.0)) == [1.0]


def test_schedule_of_epoch_and_rate():
    halve = LearningRateScheduler(lambda epoch, lr: lr if epoch < 2 else lr / 2)
    assert rates(halve, [{}] * 4, model=Model(lr=1.0)) == [1.0, 1.0, 0.5, 0.25]


@pytest.mark.parametrize(
    "schedule",
    [
        lambda epoch: 1 / (epoch + 1),
        lambda epoch, lr: np.float32(1 / (epoch + 1)),
        lambda epoch, lr: torch.tensor(1 / (epoch + 1)),
        lambda epoch, lr=0.1: [1, 0.5][epoch],
    ],
)
def test_schedules_may_take_the_epoch_alone_and_return_any_number(schedule):
    assert rates(LearningRateScheduler(schedule), [{}] * 2) == [1.0, 0.5]


def test_errors_of_the_schedule_itself_are_not_hidden():
    def schedule(epoch, lr):
        raise TypeError("mine")

    with pytest.raises(TypeError, match="mine"):
        fit(LearningRateScheduler(schedule), [{}])


@pytest.mark.parametrize("result", [None, "0.1", True, [0.1]])
def test_schedules_must_return_a_number(result):
    with pytest.raises(ValueError, match=r"must return the learning rate, a number. Received"):
        fit(LearningRateScheduler(lambda epoch, lr: result), [{}])


def test_schedule_must_be_a_function():
    with pytest.raises(TypeError, match="A torch scheduler can be passed to `fit` as a callback itself"):
        LearningRateScheduler(torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.zeros(1)]), 1))


def test_an_epoch_that_goes_on_is_not_scheduled_twice():
    model = Model(lr=1.0)
    halve = LearningRateScheduler(lambda epoch, lr: lr / 2)
    every, seen = fit(halve, [{}], model=model)
    assert seen[0]["learning_rate"] == 0.5
    again = LearningRateScheduler(lambda epoch, lr: lr / 2)
    assert rates(again, [{}, {}], model=model, state=every.state_dict()) == [0.5, 0.25]
    assert rates(again, [{}], model=model) == [0.125]  # another training is another matter


def test_schedule_says_what_it_does(capsys):
    fit(LearningRateScheduler(lambda epoch, lr: lr / 2, verbose=1), [{}], model=Model(lr=1.0))
    fit(LearningRateScheduler(lambda epoch, lr: lr / 2, verbose=1), [{}], model=Model(is_chief=False))
    assert capsys.readouterr().out == "Epoch 1: LearningRateScheduler sets the learning rate to 0.5.\n"


@pytest.mark.parametrize("callback", [ReduceLROnPlateau("loss"), LearningRateScheduler(lambda epoch, lr: lr)])
def test_an_optimizer_is_needed(callback):
    model = Model()
    model.optimizer = None
    with pytest.raises(RuntimeError, match=r"compiled without an optimizer. Pass one to compile\(optimizer=...\)"):
        fit(callback, [{}], model=model)
