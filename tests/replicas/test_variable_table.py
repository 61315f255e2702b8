"""Every combination of modes, method, place and number of replicas against the rules of tf, written down once more."""

import itertools

import pytest

import torchstrategy as ts
from tests.programs import cpu_devices
from tests.replicas.variable_programs import own_number

START, ASSIGNED = 2.0, 6.0
METHODS = {"assign": lambda old, x: x, "assign_add": lambda old, x: old + x, "assign_sub": lambda old, x: old - x}
PLACES = {
    "tensor in run": lambda s, update: s.run(lambda: update(own_number())),
    "number in run": lambda s, update: s.run(lambda: update(float(own_number()))),
    "same number in run": lambda s, update: s.run(lambda: update(ASSIGNED)),
    "in scope": lambda s, update: _in_scope(s, update),
    "outside": lambda s, update: update(ASSIGNED),
}


def _in_scope(strategy, update):
    with strategy.scope():
        update(ASSIGNED)


def expected_copies(synchronization, aggregation, method, place, count):
    """Return what the replicas' copies are afterwards, or the exception."""
    update, on_read = METHODS[method], synchronization == "ON_READ"
    own = [ASSIGNED] * count if place == "same number in run" else [float(i + 1) for i in range(count)]
    if synchronization == "NONE":
        return ValueError
    if place in ("in scope", "outside"):
        if on_read and aggregation == "NONE":
            return ValueError
        if on_read and aggregation == "SUM":
            return [ASSIGNED / count] * count if method == "assign" else ValueError
        own = [ASSIGNED] * count
    elif not on_read and aggregation in ("SUM", "MEAN") and count > 1:
        if place == "number in run" or (place == "same number in run" and aggregation == "SUM"):
            return ValueError
        own = [sum(own) / (1 if aggregation == "SUM" else count)] * count
    elif not on_read and aggregation == "ONLY_FIRST_REPLICA":
        own = own[:1] * count
    return [update(START, value) for value in own]


def expected_read(synchronization, aggregation, copies):
    """Return what the variable reads as in cross-replica context, or the exception."""
    if synchronization != "ON_READ" or aggregation == "ONLY_FIRST_REPLICA":
        return copies[0]
    return {"NONE": ValueError, "SUM": sum(copies), "MEAN": sum(copies) / len(copies)}[aggregation]


@pytest.mark.filterwarnings("ignore:Variable .* is read outside `run`")
@pytest.mark.parametrize("count", [1, 2, 3])
def test_mirrored_strategy(count):
    strategy = ts.MirroredStrategy(cpu_devices(count))
    for modes in itertools.product(ts.VariableSynchronization, ts.VariableAggregation):
        names = [mode.name for mode in modes]
        for method, place in itertools.product(METHODS, PLACES):
            expected = expected_copies(*names, method, place, count)
            copies, read = outcome(strategy, modes, method, place)
            assert copies == expected, (names, method, place)
            if expected is not ValueError:
                assert read == expected_read(*names, expected), (names, method, place)


@pytest.mark.parametrize("make", [ts.get_strategy, lambda: ts.OneDeviceStrategy("cpu:0")], ids=["default", "one"])
def test_one_value(make):
    strategy = make()
    for modes in itertools.product(ts.VariableSynchronization, ts.VariableAggregation):
        for method, place in itertools.product(METHODS, PLACES):
            value = METHODS[method](START, 1.0 if place in ("tensor in run", "number in run") else ASSIGNED)
            assert outcome(strategy, modes, method, place) == ([value], value), (modes, method, place)


def outcome(strategy, modes, method, place):
    """Return the copies and what is read outside run; exceptions by their class."""
    try:
        with strategy.scope():
            variable = ts.Variable(START, synchronization=modes[0], aggregation=modes[1])
        PLACES[place](strategy, getattr(variable, method))
    except ValueError:
        return ValueError, None
    copies = [float(copy) for copy in strategy.experimental_local_results(variable)]
    try:
        return copies, variable.read_value().item()
    except ValueError:
        return copies, ValueError
