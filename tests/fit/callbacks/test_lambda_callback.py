import pytest

from tests.fit.callbacks.loops import fit
from torchstrategy.callbacks import LambdaCallback


def test_functions_are_called():
    calls = []
    callback = LambdaCallback(
        lambda epoch, logs: calls.append(("begin", epoch)),
        lambda epoch, logs: calls.append(("end", epoch, logs["loss"])),
        on_train_begin=lambda logs: calls.append("train"),
        on_train_batch_end=lambda batch, logs: calls.append(batch),
        on_test_end=lambda logs: calls.append("never"),
    )
    fit(callback, [{"loss": 1.0}], steps=2)
    assert calls == ["train", ("begin", 0), 0, 1, ("end", 0, 1.0)]


def test_alias_of_batch_hooks():
    calls = []
    fit(LambdaCallback(on_batch_end=lambda batch, logs: calls.append(batch)), [{}], steps=2)
    assert calls == [0, 1]


def test_wrong_names_and_values_are_refused():
    with pytest.raises(TypeError, match=r"'on_epoch_finished', which is no hook. Did you mean 'on_epoch_end'"):
        LambdaCallback(on_epoch_finished=print)
    with pytest.raises(TypeError, match=r"The hooks are: on_train_begin"):
        LambdaCallback(epochs=print)
    with pytest.raises(TypeError, match=r"on_epoch_end=...\) must be a function. Received: 3"):
        LambdaCallback(on_epoch_end=3)
