"""``fit`` on every strategy that computes in step, in one process and in several, gives the numbers of one device."""

import functools

import pytest
from hypothesis import given

import torchstrategy as ts
from tests.data.profiles import thorough, unshrunk
from tests.fit.fit_programs import FitProgram, fit_on
from tests.fit.fit_uses import USES, use_on
from tests.fit.test_fit_equivalence import EXACT, assert_near, fit_programs
from tests.programs import cpu_devices

PROGRAMS = {
    "regression": FitProgram(loss="mws", weights="sample", validation_split=0.3, accumulation=2, is_regularized=True),
    "classes": FitProgram("classes", "by class", "adam", num_examples=17, batch_size=4, weights="class", shuffle=True),
    "auc": FitProgram("binary", "torch bce", "momentum", num_examples=11, batch_size=4, steps_per_execution=2),
    "two outputs": FitProgram("two", "unlike divisors", weights="sample", validation_split=0.2, shuffle=True),
    "small batches": FitProgram(num_examples=7, batch_size=2, weights="sample"),
    "torchmetrics, small batches": FitProgram("classes", "torch", num_examples=4, batch_size=1),
    "loader": FitProgram("classes", "ignoring", reads="loader", shuffle=True),
    "pipeline": FitProgram("classes", "torch", weights="sample", reads="pipeline"),
    "examples": FitProgram(reads="examples", shuffle=True, adds_loss=True),
}
IN_ONE_PROCESS = {
    "one device": "one device",
    "mirrored 1": cpu_devices(1),
    "mirrored 2": cpu_devices(2),
    "mirrored 4": cpu_devices(4),
    "concurrent replicas": "concurrent",
    "central": "central",
}
LIKE_OTHERS = ("one device", "mirrored 1", "mirrored 2")
LAYOUTS = [pytest.param(name, marks=[pytest.mark.slow] * (name in LIKE_OTHERS)) for name in IN_ONE_PROCESS]


@pytest.fixture(scope="module")
def expected():
    return {name: fit_on("default", program) for name, program in PROGRAMS.items()}


@functools.cache
def use_of_one_replica(name):
    return use_on("default", name)


@pytest.fixture(scope="module")
def workers():
    with ts.testing.ProcessPool(2, launcher="TF_CONFIG") as pool:
        yield pool


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PROGRAMS)
def test_in_one_process(name, layout, expected):
    assert_near(fit_on(IN_ONE_PROCESS[layout], PROGRAMS[name]), expected[name], EXACT)


@pytest.mark.parametrize("devices", [None, cpu_devices(2)], ids=["1 each", "2 each"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_mirrored_over_two_processes(name, devices, expected, process_pool):
    for found in process_pool(2).run(fit_on, devices, PROGRAMS[name]):
        assert_near(found, expected[name], EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("devices", ["workers 1", "workers 3"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_multi_worker(name, devices, expected, workers):
    for found in workers.run(fit_on, devices, PROGRAMS[name]):
        assert_near(found, expected[name], EXACT)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", USES)
def test_uses_in_one_process(name, layout):
    assert_near(use_on(IN_ONE_PROCESS[layout], name), use_of_one_replica(name), EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [None, cpu_devices(2)], ids=["1 each", "2 each"])
@pytest.mark.parametrize("name", USES)
def test_uses_over_two_processes(name, devices, process_pool):
    for found in process_pool(2).run(use_on, devices, name):
        assert_near(found, use_of_one_replica(name), EXACT)


@pytest.mark.slow
@pytest.mark.timeout(400)  # 60 programs in other processes, on a busy machine
@pytest.mark.parametrize("devices", [None, cpu_devices(2)], ids=["1 each", "2 each"])
def test_random_programs_over_two_processes(devices, process_pool):
    @given(program=fit_programs())
    @unshrunk(thorough(30))
    def check(program):
        one = fit_on("default", program)
        for found in process_pool(2).run(fit_on, devices, program):
            assert_near(found, one, EXACT)

    check()
