import math

import pytest
import torch

import torchstrategy as ts
from tests.fit.callbacks.loops import Model, fit
from torchstrategy.callbacks import EarlyStopping, LambdaCallback, TerminateOnNaN


def losses(*values, name="val_loss"):
    return [{name: value} for value in values]


def epochs_trained(callback, values, **kwargs):
    return len(fit(callback, values, **kwargs)[1])


@pytest.mark.parametrize(
    ("arguments", "values", "epochs"),
    [
        ({}, (3, 2, 1, 1, 0), 4),
        ({"patience": 2}, (3, 2, 2, 2, 0), 4),
        ({"patience": 2}, (3, 2, 2, 1, 1, 1, 0), 6),
        ({"patience": 1, "min_delta": 0.5}, (3, 2.8, 2), 2),
        ({"patience": 1, "min_delta": -0.5}, (3, 2.8, 2), 2),
        ({"patience": 2, "baseline": 1.0}, (3, 3, 0), 2),
        ({"patience": 2, "baseline": 1.0}, (3, 2, 1.5, 1.5, 0), 4),
        ({"patience": 2, "baseline": 1.0}, (3, 0.5, 0.6, 0.6, 0), 4),
        ({"start_from_epoch": 3}, (1, 2, 3, 4, 5, 6), 5),
        ({"mode": "max"}, (1, 2, 3, 3, 9), 4),
        ({"mode": "min"}, (1, 2, 3), 2),
        ({}, (math.nan, math.nan, 1), 2),
    ],
)
def test_when_the_training_ends(arguments, values, epochs):
    stop = EarlyStopping(**arguments)
    assert epochs_trained(stop, losses(*values)) == epochs
    assert stop.stopped_epoch == epochs - 1


def test_larger_accuracies_are_better():
    assert epochs_trained(EarlyStopping("val_accuracy"), losses(0.1, 0.2, 0.3, 0.3, name="val_accuracy") * 2) == 4


def test_used_again_it_starts_anew():
    stop = EarlyStopping(patience=1)
    assert epochs_trained(stop, losses(1, 2, 3)) == 2
    assert epochs_trained(stop, losses(9, 8, 7)) == 3
    assert stop.stopped_epoch == 0
    assert (stop.best, stop.best_epoch) == (7.0, 2)


def weigh(epoch, model):
    torch.nn.init.constant_(model.weight, float(epoch))


def test_best_weights_come_back():
    model = Model()
    stop = EarlyStopping(patience=2, restore_best_weights=True)
    assert epochs_trained(stop, losses(3, 1, 2, 2), model=model, before_epoch=weigh) == 4
    assert model.weight.item() == 1.0
    assert stop.best_epoch == 1


def test_best_weights_come_back_after_the_last_epoch_too():
    model = Model()
    fit(EarlyStopping(patience=9, restore_best_weights=True), losses(3, 1, 2), model=model, before_epoch=weigh)
    assert model.weight.item() == 1.0


def test_best_weights_are_a_copy_of_the_first_epoch_if_all_are_nan():
    model = Model()
    fit(EarlyStopping(restore_best_weights=True), losses(math.nan, math.nan), model=model, before_epoch=weigh)
    assert model.weight.item() == 0.0


def test_weights_stay_without_the_option():
    model = Model()
    fit(EarlyStopping(), losses(1, 2, 3), model=model, before_epoch=weigh)
    assert model.weight.item() == 1.0


@pytest.mark.parametrize("saved_after", [1, 2, 3, 4])
def test_a_restored_training_goes_on_as_the_unbroken_one(saved_after):
    values = losses(3, 1, 2, 2, 2, 0)
    unbroken = EarlyStopping(patience=3, restore_best_weights=True)
    model = Model()
    assert epochs_trained(unbroken, values, model=model, before_epoch=weigh) == 5

    first, other = EarlyStopping(patience=3, restore_best_weights=True), Model()
    state = fit(first, values[:saved_after], model=other, before_epoch=weigh)[0].state_dict()
    rest = EarlyStopping(patience=3, restore_best_weights=True)
    rest_values = values[saved_after:]
    trained = epochs_trained(rest, rest_values, model=other, state=state, initial_epoch=saved_after, before_epoch=weigh)
    assert saved_after + trained == 5
    assert other.weight.item() == model.weight.item() == 1.0
    assert rest.state_dict()["wait"] == unbroken.state_dict()["wait"]


def test_a_restored_training_that_had_ended_stays_ended():
    every, _ = fit(EarlyStopping(), losses(1, 2))
    assert epochs_trained(EarlyStopping(), losses(0), state=every.state_dict(), initial_epoch=2) == 0


def test_an_absent_name_warns_and_does_not_end():
    with pytest.warns(UserWarning, match=r"EarlyStopping monitors 'val_loss'.*have: loss, mae"):
        assert epochs_trained(EarlyStopping(), [{"loss": 1.0, "mae": 2.0}] * 3) == 3


def test_lines(capsys):
    stop = EarlyStopping(verbose=1, restore_best_weights=True)
    fit(stop, losses(1, 2))
    assert capsys.readouterr().out == (
        "Epoch 2: val_loss has stopped improving, the training ends.\n"
        "The weights are those of the end of the best epoch, 1.\n"
    )
    fit(stop, losses(1, 2), model=Model(is_chief=False))
    assert capsys.readouterr().out == ""


def test_wrong_mode():
    with pytest.raises(ValueError, match=r"EarlyStopping\(mode=...\)"):
        EarlyStopping(mode="least")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_ends_the_training(value, capsys):
    batches = []
    count = LambdaCallback(on_train_batch_end=lambda batch, logs: batches.append(batch))
    assert epochs_trained([TerminateOnNaN(), count], [{"loss": 1.0}, {"loss": value}, {"loss": 1.0}], steps=3) == 2
    assert batches == [0, 1, 2, 0]
    assert capsys.readouterr().out == f"Batch 0: the loss is {value}, the training ends.\n"


def test_nan_is_found_at_the_end_of_an_epoch_at_the_latest(capsys):
    class Last(LambdaCallback):
        pass

    stop = TerminateOnNaN(log_interval=100)
    assert stop.log_interval == 100
    late = LambdaCallback(on_epoch_end=lambda epoch, logs: None)
    model = Model(is_chief=False)
    assert epochs_trained([stop, late], [{"loss": math.nan}, {}], model=model) == 1
    assert capsys.readouterr().out == ""


def test_logs_are_read_at_the_interval_only():
    reads = []

    class Logs(dict):
        def get(self, name, default=None):
            reads.append(name)
            return 1.0

    stop = TerminateOnNaN(log_interval=3)
    stop.set_model(Model())
    stop.on_epoch_begin(0)
    for batch in range(7):
        stop.on_train_batch_end(batch, Logs(loss=1.0))
    assert len(reads) == 3
    with pytest.raises(ValueError, match="log_interval"):
        TerminateOnNaN(log_interval=0)
    with pytest.raises(TypeError, match=r"raise_error=\.\.\.\) must be a bool. Received: 10\. .* log_interval="):
        TerminateOnNaN(10)


def test_nan_can_be_an_error(capsys):
    seen = []
    count = LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
    with pytest.raises(RuntimeError, match="TerminateOnNaN: Batch 0: the loss is nan"):
        fit([count, TerminateOnNaN(raise_error=True)], losses(1.0, math.nan, 1.0, name="loss"), steps=3)
    assert seen == [0, 1, 2, 0]
    late = TerminateOnNaN(True)
    late.set_model(Model())
    with pytest.raises(RuntimeError, match="Epoch 1: the loss is inf"):
        late.on_epoch_end(0, {"loss": math.inf})
    assert capsys.readouterr().out == ""


def rank_that_sees_an_error():
    strategy = ts.MirroredStrategy()
    with strategy.scope():
        model = ts.Model(torch.nn.Linear(1, 1))
        model.compile("sgd", "mse")
    x = torch.ones(8, 1)
    x[5] = math.nan  # of one rank's share of the second batch
    stop, batches = TerminateOnNaN(raise_error=True), []
    count = LambdaCallback(on_train_batch_end=lambda batch, logs: batches.append(batch))
    with pytest.raises(RuntimeError) as error:
        model.fit(x, x, batch_size=4, epochs=3, shuffle=False, callbacks=[count, stop], verbose=0)
    return batches, str(error.value)


def test_nan_is_the_same_error_on_all_ranks(process_pool):
    assert process_pool(2).run(rank_that_sees_an_error) == [([0, 1], "TerminateOnNaN: Batch 1: the loss is nan.")] * 2


def test_no_loss_is_no_nan():
    assert epochs_trained(TerminateOnNaN(), [{"accuracy": 1.0}] * 2) == 2
