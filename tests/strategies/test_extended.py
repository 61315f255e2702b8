"""``strategy.extended``; the measured cases of tf are in tests/parity/area_variables.py."""

import pytest
import torch

import torchstrategy as ts
from tests.programs import cpu_devices


@pytest.fixture
def pair():
    return ts.MirroredStrategy(cpu_devices(2))


def test_update_of_a_parameter(pair):
    with pair.scope():
        linear = torch.nn.Linear(1, 1)
    values = pair.experimental_distribute_values_from_function(lambda c: c.replica_id_in_sync_group + 1.0)
    seen = pair.extended.update(linear.weight, lambda copy, x: x, args=(values,), group=False)
    assert seen == (1.0, 2.0)
    pair.extended.update(linear.bias, lambda copy: copy.detach().fill_(5.0))
    assert [m.bias.item() for m in pair.experimental_local_results(linear)] == [5.0, 5.0]


def test_update_in_run_is_refused(pair):
    with pair.scope():
        variable = ts.Variable(1.0)
    with pytest.raises(RuntimeError, match="cross-replica context"):
        pair.run(lambda: pair.extended.update(variable, lambda copy: None))
    with pytest.raises(ValueError, match="was not made in the scope"):
        ts.MirroredStrategy(cpu_devices(2)).extended.update(variable, lambda copy: None)


def test_reduce_to_a_device(pair):
    value = pair.run(lambda: torch.ones(2))
    torch.testing.assert_close(pair.extended.reduce_to("SUM", value, "/cpu:0"), torch.full((2,), 2.0))


def test_created_in_scope(pair):
    with pair.scope():
        variable, linear = ts.Variable(1.0), torch.nn.Linear(1, 1)
    extended = pair.extended
    assert all(extended.variable_created_in_scope(v) for v in (variable, linear.weight))
    assert not any(extended.variable_created_in_scope(v) for v in (ts.Variable(1.0), torch.ones(1), 3))
    assert extended.worker_devices == extended.parameter_devices
    default = ts.get_strategy().extended
    assert default.variable_created_in_scope(ts.Variable(1.0))
    with pytest.raises(RuntimeError, match="default strategy"):
        default.worker_devices  # noqa: B018
