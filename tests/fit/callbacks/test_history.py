from tests.fit.callbacks.loops import fit
from torchstrategy.callbacks import History


def test_it_collects_epochs():
    every, _ = fit(None, [{"loss": 2.0, "mae": 1.0}, {"loss": 1.0, "mae": 0.5}], initial_epoch=3)
    assert every.history.epoch == [3, 4]
    assert every.history.history == {"loss": [2.0, 1.0], "mae": [1.0, 0.5]}


def test_a_restored_history_goes_on():
    before, _ = fit(None, [{"loss": 2.0}])
    state = before.state_dict()
    before.history.history["loss"].append(0.0)  # what was saved is not what goes on
    after, _ = fit(None, [{"loss": 1.0}], initial_epoch=1, state=state)
    assert after.history.epoch == [0, 1]
    assert after.history.history == {"loss": [2.0, 1.0]}


def test_a_given_history_is_used_again():
    history = History()
    fit([history], [{"loss": 2.0}])
    fit([history], [{"loss": 1.0}])
    assert history.epoch == [0]
    assert history.history == {"loss": [2.0, 1.0]}
