import pytest

import torchstrategy as ts
from tests.parity.estimator import line_model_fn, seed_input_fn
from torchstrategy.estimator.warm_start import as_current, make_global_step

train = ts.compat.v1.train
MIRRORED = ["cpu:0", "cpu:1"]


def test_global_step_is_one_for_each_strategy():
    strategies = [ts.MirroredStrategy(MIRRORED), ts.OneDeviceStrategy("cpu:0")]
    steps = []
    for strategy in strategies:
        with strategy.scope():
            assert train.get_global_step() is None
            steps.append(train.get_or_create_global_step())
            assert train.get_or_create_global_step() is train.get_global_step() is steps[-1]
    assert steps[0] is not steps[1]
    assert train.get_global_step() is None


def test_global_step_counts_a_loop_of_the_programs_own():
    strategy = ts.MirroredStrategy(MIRRORED)
    with strategy.scope():
        step = train.get_or_create_global_step()
        for _ in range(3):
            step.assign_add(1)
        assert int(train.get_global_step()) == 3


def test_an_estimators_global_step_comes_first():
    with ts.OneDeviceStrategy("cpu:0").scope():
        own = train.get_or_create_global_step()
        estimators = make_global_step()
        with as_current(estimators):
            assert train.get_global_step() is train.get_or_create_global_step() is estimators
        assert train.get_global_step() is own


def test_model_fn_sees_the_global_step(tmp_path):
    seen = []

    def model_fn(features, labels, mode):
        seen.append(train.get_or_create_global_step())
        return line_model_fn()(features, labels, mode)

    ts.estimator.Estimator(model_fn, tmp_path).train(seed_input_fn, steps=3)
    assert [int(step) for step in seen] == [3]


@pytest.mark.parametrize("name", [name for name in train.__all__ if not name.startswith("get_")])
def test_hooks_are_the_estimators(name):
    assert getattr(train, name) is getattr(ts.estimator, name)


def test_strategies():
    v1 = ts.compat.v1.distribute
    assert v1.MirroredStrategy is ts.MirroredStrategy
    assert v1.experimental.CentralStorageStrategy is ts.experimental.CentralStorageStrategy
    assert v1.experimental.ParameterServerStrategy is not ts.ParameterServerStrategy
