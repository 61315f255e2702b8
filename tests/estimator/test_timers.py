import pytest

import torchstrategy as ts
from torchstrategy.estimator import saver_hook


def test_steps():
    timer = ts.estimator.SecondOrStepTimer(every_steps=3)
    assert timer.last_triggered_step() is None
    assert timer.should_trigger_for_step(7)
    assert timer.update_last_triggered_step(7) == (None, None)
    assert [step for step in range(7, 12) if timer.should_trigger_for_step(step)] == [10, 11]
    elapsed_s, elapsed_steps = timer.update_last_triggered_step(11)
    assert elapsed_steps == 4
    assert elapsed_s >= 0
    timer.reset()
    assert timer.should_trigger_for_step(11)


def test_seconds(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(saver_hook.time, "monotonic", lambda: now[0])
    timer = ts.estimator.SecondOrStepTimer(every_secs=10)
    timer.update_last_triggered_step(1)
    now[0] = 109.0
    assert not timer.should_trigger_for_step(2)
    now[0] = 110.0
    assert timer.should_trigger_for_step(2)
    assert not timer.should_trigger_for_step(1)  # never twice for a step
    assert timer.update_last_triggered_step(2) == (10.0, 1)


@pytest.mark.parametrize("value", [-1, float("nan"), "3"])
def test_what_is_no_interval_is_refused(value):
    for name in ("every_secs", "every_steps"):
        with pytest.raises(ValueError, match=f"{name} must be a number that is not negative. Received: {value!r}"):
            ts.estimator.SecondOrStepTimer(**{name: value})


@pytest.mark.parametrize("arguments", [{}, {"every_secs": 1, "every_steps": 1}])
def test_exactly_one_of_its_arguments(arguments):
    with pytest.raises(ValueError, match="every_secs"):
        ts.estimator.SecondOrStepTimer(**arguments)
