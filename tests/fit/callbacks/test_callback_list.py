import functools

import pytest
import torch

from tests.fit.callbacks.loops import Model, fit
from torchstrategy.callbacks import (
    Callback,
    CallbackList,
    EarlyStopping,
    History,
    LambdaCallback,
    ProgbarLogger,
    TorchLRScheduler,
)
from torchstrategy.fit.callbacks.callback import HOOKS


class Recorder(Callback):
    """Notes every call."""

    def __init__(self):
        self.calls = []  # without the base class's constructor, as users may forget it


def _recording(hook):
    def call(self, *args):
        self.calls.append((hook, *args))

    return call


for _hook in HOOKS:
    if _hook not in ("on_batch_begin", "on_batch_end"):
        setattr(Recorder, _hook, _recording(_hook))


def test_every_hook_reaches_every_callback_in_order():
    order = []
    first, second = (LambdaCallback(**{hook: lambda *a, i=i: order.append(i) for hook in HOOKS}) for i in (1, 2))
    callbacks = CallbackList([first, [second]])
    hooks = [hook for hook in HOOKS if hook not in ("on_batch_begin", "on_batch_end")]
    for hook in hooks:
        order.clear()
        at = (
            ()
            if hook.endswith(("train_begin", "train_end", "test_begin", "test_end", "predict_begin", "predict_end"))
            else (3,)
        )
        getattr(callbacks, hook)(*at, {"loss": 1.0})
        assert order == [1, 2], hook


def test_arguments_arrive():
    recorder = Recorder()
    model = Model()
    every, _ = fit(recorder, [{"loss": 2.0}], model=model, steps=1)
    assert recorder.model is model
    assert recorder.params == {"verbose": 0, "epochs": 1, "steps": 1}
    assert recorder.calls == [
        ("on_train_begin", {}),
        ("on_epoch_begin", 0, {}),
        ("on_train_batch_begin", 0, {}),
        ("on_train_batch_end", 0, {"loss": 2.0}),
        ("on_epoch_end", 0, {"loss": 2.0}),
        ("on_train_end", {"loss": 2.0}),
    ]
    assert every.callbacks[0] is recorder


def test_hooks_that_nobody_overrides_are_not_called():
    callbacks = CallbackList([Callback(), LambdaCallback(on_epoch_end=print)], add_history=False)
    assert callbacks.wants("on_epoch_end")
    assert [hook for hook in HOOKS if callbacks.wants(hook)] == ["on_epoch_end"]
    assert not CallbackList(None, verbose=1, add_history=False).wants("on_train_batch_begin")
    assert CallbackList(None, verbose=1, add_history=False).wants("on_train_batch_end")


def test_aliases_of_batch_hooks():
    calls = []

    class Both(Callback):
        def on_batch_begin(self, batch, logs=None):
            calls.append(("begin", batch))

        def on_train_batch_end(self, batch, logs=None):
            calls.append(("end", batch))
            super().on_train_batch_end(batch, logs)

        def on_batch_end(self, batch, logs=None):
            calls.append(("alias", batch))

    callbacks = CallbackList(Both())
    assert callbacks.wants("on_train_batch_begin")
    callbacks.on_train_batch_begin(0)
    callbacks.on_train_batch_end(0)
    callbacks.on_batch_begin(1)
    callbacks.on_test_batch_begin(2)
    assert calls == [("begin", 0), ("end", 0), ("alias", 0), ("begin", 1)]


def test_logs_that_a_callback_adds_reach_those_after_it():
    add = LambdaCallback(on_epoch_end=lambda epoch, logs: logs.update(extra=epoch))
    every, _ = fit([add], [{"loss": 1.0}, {"loss": 0.5}])
    assert every.history.history == {"loss": [1.0, 0.5], "extra": [0, 1]}
    assert every.history.epoch == [0, 1]


def test_what_is_added():
    plain = CallbackList(None, verbose=1)
    assert [type(callback) for callback in plain.callbacks] == [History, ProgbarLogger]
    history, bar = History(), ProgbarLogger()
    given = CallbackList([bar, history], verbose=1)
    assert given.callbacks == [bar, history]
    assert given.history is history
    none = CallbackList(None, add_history=False)
    assert none.callbacks == []
    assert none.history is None


def test_savers_of_states_come_last():
    class Saver(Callback):
        runs_last = True

    saver, other = Saver(), Callback()
    assert [type(c) for c in CallbackList([saver, other], verbose=1).callbacks] == [
        Callback,
        History,
        ProgbarLogger,
        Saver,
    ]


def test_log_interval_is_the_least():
    often, seldom, never = LambdaCallback(), LambdaCallback(), LambdaCallback()
    often.log_interval, seldom.log_interval = 5, 50
    assert CallbackList([seldom, often, never]).log_interval == 5
    assert CallbackList([never]).log_interval is None


def test_torch_schedulers_are_callbacks():
    model = Model()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(model.optimizer, 0.5)
    callbacks = CallbackList([scheduler], model)
    assert isinstance(callbacks.callbacks[0], TorchLRScheduler)
    assert callbacks.callbacks[0].scheduler is scheduler


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (EarlyStopping, r"the class EarlyStopping itself: call it"),
        (lambda epoch: None, r"the function '<lambda>'.*LambdaCallback\(on_epoch_end"),
        (functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1), r"TorchLRScheduler\(function\)"),
        (torch.nn.Flatten(), r"Received Flatten\(.*Derive its class"),
        (3, r"Received 3 of builtins.int. Derive"),
        ("early_stopping", r"'early_stopping' of builtins.str"),
    ],
)
def test_what_is_no_callback_is_refused(given, message):
    with pytest.raises(TypeError, match=message):
        CallbackList([given])


def test_names_that_look_like_hooks_warn():
    class Mistaken(Callback):
        def on_epoch_finish(self, epoch, logs=None):
            pass

        def on_validation_start(self):
            pass

        def on_button_pressed(self):
            pass

    with pytest.warns(UserWarning, match="is never called") as caught:
        CallbackList(Mistaken())
    messages = sorted(str(warning.message) for warning in caught)
    assert len(messages) == 2
    assert "Mistaken.on_epoch_finish is never called" in messages[0]
    assert "Did you mean on_epoch_end?" in messages[0]
    assert "Did you mean on_test_begin?" in messages[1]


def test_states_go_to_the_callbacks_of_the_same_class():
    def make(waits):
        stops = [EarlyStopping("loss", patience=9) for _ in waits]
        for stop, wait in zip(stops, waits, strict=True):
            stop.wait = wait
        return CallbackList([*stops, Callback()], Model())

    saved = make([3, 4]).state_dict()
    assert sorted(saved) == ["EarlyStopping", "EarlyStopping_2", "History"]
    other = CallbackList([LambdaCallback(), *make([0, 0]).callbacks[:2]], Model())
    other.load_state_dict(saved)
    assert [callback.wait for callback in other.callbacks if isinstance(callback, EarlyStopping)] == [3, 4]


def test_a_state_without_its_callback_is_told(caplog):
    CallbackList(None, Model()).load_state_dict({"EarlyStopping": {"wait": 1}})
    assert "EarlyStopping is not used" in caplog.text


def test_a_list_can_be_given_as_callbacks():
    recorder = Recorder()
    inner = CallbackList([recorder])
    outer = CallbackList(inner)
    assert outer.callbacks == inner.callbacks
