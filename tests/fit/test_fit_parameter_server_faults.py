"""A ``fit`` on parameter servers that was interrupted, and goes on from its backup."""

import os
import signal

import numpy as np
import pytest
import torch
from torch import nn

import torchstrategy as ts


@pytest.fixture(autouse=True)
def _doubles():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def cluster(local_cluster):
    return local_cluster(2, 2)


class At(ts.callbacks.Callback):
    """Does something after a batch."""

    def __init__(self, epoch, batch, do):
        super().__init__()
        self.place, self.do = (epoch, batch), do

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch

    def on_train_batch_end(self, batch, logs=None):
        if (self.epoch, batch) == self.place:
            self.do()


def arrays():
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    return x, x.sum(1, keepdim=True).tanh()


def fit(strategy, folder, *callbacks, save_freq, batch_size=8, **options):
    """Be the program: train, and go on with what is in the folder."""
    torch.manual_seed(0)
    with strategy.scope():
        model = ts.Model(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
        model.compile("adam", "mse", metrics=["mae"])
    backup = ts.callbacks.BackupAndRestore(folder / "backup", save_freq=save_freq, **options)
    x, y = arrays()
    validation = (x[:9], y[:9])
    callbacks = [*callbacks, backup]
    history = model.fit(
        x, y, batch_size=batch_size, epochs=4, verbose=0, validation_data=validation, callbacks=callbacks
    )
    return history.history, {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same(ours, expected):
    assert ours[0].keys() == expected[0].keys()
    for name, values in expected[0].items():
        np.testing.assert_allclose(ours[0][name], values, rtol=0, atol=1e-12, err_msg=name)
    for name, value in expected[1].items():
        torch.testing.assert_close(ours[1][name], value, rtol=0, atol=1e-12, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize("save_freq", ["epoch", 3])
def test_a_rerun_goes_on_after_a_parameter_server_was_lost(cluster, tmp_path, save_freq):
    expected = fit(ts.get_strategy(), tmp_path / "unbroken", save_freq=save_freq)
    strategy = ts.ParameterServerStrategy(cluster.resolver(), max_staleness=0)
    with pytest.raises(ts.errors.UnavailableError, match="/job:ps/task:1"):
        fit(strategy, tmp_path, At(2, 4, lambda: cluster.kill("ps", 1)), save_freq=save_freq)
    strategy.close()
    cluster.start()
    strategy = ts.ParameterServerStrategy(cluster.resolver(), max_staleness=0)
    epochs = []
    note = ts.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, _: epochs.append(epoch))
    ours = fit(strategy, tmp_path, note, save_freq=save_freq)
    strategy.close()
    assert epochs == [2, 3]
    assert_same(ours, expected)


@pytest.mark.slow
@pytest.mark.parametrize(("batch_size", "num_batches"), [(8, 7), (2, 25)], ids=["all scheduled", "more to come"])
def test_a_run_with_steps_under_way_is_saved_when_they_have_ended(cluster, tmp_path, batch_size, num_batches):
    strategy = ts.ParameterServerStrategy(cluster.resolver())
    preempt = At(1, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit):
        fit(strategy, tmp_path, preempt, batch_size=batch_size, save_freq="epoch", save_before_preemption=True)
    strategy.close()
    seen = []

    class Seen(ts.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            seen.append((self.epoch, batch))

    strategy = ts.ParameterServerStrategy(cluster.resolver())
    history, _ = fit(strategy, tmp_path, Seen(), batch_size=batch_size, save_freq="epoch")
    strategy.close()
    assert (seen[0] == (2, 0)) if num_batches == 7 else ((1, 4) <= seen[0] <= (1, 20))
    assert seen == [(epoch, batch) for epoch in range(4) for batch in range(num_batches) if (epoch, batch) >= seen[0]]
    assert len(history["loss"]) == 4
