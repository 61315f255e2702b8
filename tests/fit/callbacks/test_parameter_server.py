"""Callbacks of a training on parameter servers, which takes one step at a time here."""

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import torchstrategy as ts
from tests.fit.callbacks import test_in_fit
from torchstrategy.callbacks import CSVLogger, EarlyStopping, TensorBoard


@pytest.fixture
def strategy(local_cluster):
    strategy = ts.ParameterServerStrategy(local_cluster(2, 2).resolver(), max_staleness=0)
    yield strategy
    strategy.close()


def best_weights():
    return [EarlyStopping("val_mae", min_delta=0.05, restore_best_weights=True)]


MAKERS = [best_weights, test_in_fit.plateau, test_in_fit.schedule, test_in_fit.torch_epochs, test_in_fit.torch_steps]


@pytest.mark.end_to_end
@pytest.mark.parametrize("make", MAKERS)
def test_it_trains_as_one_replica(strategy, make):
    expected = test_in_fit.train([], make(), optimizer="torch")
    model = test_in_fit.make_model(strategy, "torch")
    history, _, _ = test_in_fit.train([], make(), model=model)
    for name, values in expected[0].items():
        assert history[name] == pytest.approx(values, rel=1e-9), name
    torch.testing.assert_close(model.state_dict()["module.weight"].detach().clone(), expected[1][0])


def test_it_is_logged(strategy, tmp_path, capsys):
    model = test_in_fit.make_model(strategy)
    callbacks = [CSVLogger(tmp_path / "log.csv"), TensorBoard(tmp_path, update_freq=1, histogram_freq=1)]
    x, y = test_in_fit.data()
    history = model.fit(x, y, batch_size=4, epochs=2, verbose=2, callbacks=callbacks).history
    read = EventAccumulator(str(tmp_path / "train")).Reload()
    assert [event.value for event in read.Scalars("epoch_loss")] == pytest.approx(history["loss"])
    assert [event.step for event in read.Scalars("batch_mae")] == [1, 2, 3, 4, 5, 6]
    weight = model.state_dict()["module.weight"].detach()
    assert read.Histograms("module.weight/histogram")[-1].histogram_value.sum == pytest.approx(float(weight.sum()))
    assert "linear" in [node.op for node in read.Graph().node]
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 3
    assert capsys.readouterr().out.count("3/3 - ") == 2
