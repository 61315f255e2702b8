"""``fit`` under N replicas gives the numbers of one, and of the same training written out in plain torch."""

import dataclasses
import math
from collections import defaultdict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.data.profiles import quick, thorough
from tests.fit.fit_programs import OPTIMIZERS, TASKS, FitProgram, fit_on
from tests.fit.plain_fit import plain_fit
from tests.programs import cpu_devices

EXACT = 1e-10  # float64
SINGLE = 1e-6  # float32


def flat(numbers, path=""):
    """Every number of a nested result, by its path."""
    if isinstance(numbers, dict):
        return {k: v for key in numbers for k, v in flat(numbers[key], f"{path}.{key}").items()}
    if isinstance(numbers, (list, tuple)):
        return {k: v for i, part in enumerate(numbers) for k, v in flat(part, f"{path}[{i}]").items()}
    return {path: numbers}


def assert_near(found, expected, tolerance, only_expected=False):
    """Compare relative to the largest number of an array, for a small one may be the difference of large ones."""
    found, expected = flat(found), flat(expected)
    assert found.keys() >= expected.keys() if only_expected else found.keys() == expected.keys()
    largest = defaultdict(lambda: 1.0)
    for path, number in expected.items():
        name = path.partition("[")[0]
        largest[name] = max(largest[name], abs(number))
    wrong = {
        path: (found[path], number)
        for path, number in expected.items()
        if not math.isclose(found[path], number, rel_tol=0.0, abs_tol=tolerance * largest[path.partition("[")[0]])
    }
    assert not wrong, f"(found, expected): {wrong}"


BASE = FitProgram()
AGAINST_PLAIN = [
    *(FitProgram(task=task, loss=loss) for task, kind in TASKS.items() for loss in kind.losses),
    *(FitProgram(task=task, loss=loss, accumulation=3) for task, kind in TASKS.items() for loss in kind.losses),
    FitProgram(weights="sample"),
    FitProgram(loss="mws", weights="sample", is_regularized=True),
    FitProgram(loss="mws", weights="sample", accumulation=2),
    FitProgram(loss="sum", weights="sample", accumulation=2),
    FitProgram("classes", "logits", weights="class", validation_split=0.3),
    FitProgram("classes", "logits", weights="sample", validation_split=0.3, accumulation=2),
    FitProgram("sequences", "mse", weights="sample", accumulation=2),
    FitProgram("sequences", "mws", weights="sample", batch_size=4),
    FitProgram("images", "torch", weights="sample"),
    FitProgram("two", "both", weights="sample", validation_split=0.2),
    FitProgram("two", "unlike divisors", weights="sample", accumulation=2),
    FitProgram(is_regularized=True, adds_loss=True, accumulation=3),
    FitProgram(optimizer="momentum", batch_size=3, is_regularized=True),
    FitProgram(optimizer="adam", batch_size=4, epochs=3),
    FitProgram(num_examples=7, batch_size=6, accumulation=2),
    FitProgram(num_examples=3, batch_size=2),
    FitProgram(steps_per_execution=2, batch_size=2, accumulation=2),
    FitProgram(steps_per_execution=5, batch_size=2),
]


@pytest.mark.parametrize("program", AGAINST_PLAIN, ids=repr)
@pytest.mark.parametrize(
    "devices",
    [pytest.param("default", id="default", marks=pytest.mark.slow), pytest.param(cpu_devices(3), id="3 replicas")],
)
def test_fit_is_the_plain_loop(program, devices):
    assert_near(fit_on(devices, program), plain_fit(program), EXACT, only_expected=True)


def fit_programs(tasks=tuple(TASKS)):
    """Any program that is defined: class weights need class labels, and a split leaves examples on both sides."""

    @st.composite
    def draw_program(draw):
        task = draw(st.sampled_from(tasks))
        weights = [None, "sample", "class"] if task == "classes" else [None, "sample"]
        reads = draw(st.sampled_from(["arrays", "arrays", "examples", "loader", "pipeline"]))
        if task == "two" and reads in ("examples", "loader"):  # a TensorDataset holds no dicts
            reads = "arrays"
        return FitProgram(
            task=task,
            loss=draw(st.sampled_from(sorted(TASKS[task].losses))),
            optimizer=draw(st.sampled_from(sorted(OPTIMIZERS))),
            num_examples=draw(st.integers(4, 20)),
            batch_size=draw(st.integers(1, 9)),
            epochs=draw(st.integers(1, 3)),
            weights=draw(st.sampled_from(weights)),
            validation_split=draw(st.sampled_from([0.0, 0.25, 0.4])) if reads == "arrays" else 0.0,
            is_regularized=draw(st.booleans()),
            adds_loss=task not in ("two", "sequences", "images") and draw(st.booleans()),
            accumulation=draw(st.integers(1, 4)),
            steps_per_execution=draw(st.integers(1, 3)),
            shuffle=draw(st.booleans()),
            reads=reads,
        )

    return draw_program()


def check(program, devices, tolerance):
    assert_near(fit_on(devices, program), fit_on("default", program), tolerance)


@pytest.mark.end_to_end
@given(program=fit_programs(), replicas=st.integers(1, 5))
@quick(15)
def test_n_replicas_are_one(program, replicas):
    check(program, cpu_devices(replicas), EXACT)


@pytest.mark.end_to_end
@given(program=fit_programs(), replicas=st.integers(1, 4))
@quick(15)
def test_random_programs_are_the_plain_loop(program, replicas):
    program = dataclasses.replace(program, shuffle=False)
    assert_near(fit_on(cpu_devices(replicas), program), plain_fit(program), EXACT, only_expected=True)


@pytest.mark.end_to_end
@given(program=fit_programs(), replicas=st.integers(1, 5))
@quick(10)
def test_n_replicas_are_one_in_single_precision(program, replicas):
    program = dataclasses.replace(program, dtype=torch.float32, optimizer="sgd", epochs=1)
    check(program, cpu_devices(replicas), SINGLE)


@pytest.mark.slow
@pytest.mark.timeout(500)  # 600 programs, on a busy machine
@given(program=fit_programs(), replicas=st.integers(1, 6))
@thorough(300)
def test_n_replicas_are_one_in_many_programs(program, replicas):
    check(program, cpu_devices(replicas), EXACT)
    if not program.shuffle:
        assert_near(fit_on("default", program), plain_fit(program), EXACT, only_expected=True)


def test_all_losses_are_tried():
    tried = {(p.task, p.loss) for p in AGAINST_PLAIN}
    assert tried == {(task, loss) for task, kind in TASKS.items() for loss in kind.losses}
