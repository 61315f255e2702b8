"""Fixtures for the tests and for the library's doctests: their names, and checks that nothing is left behind."""

import importlib.util
import os
import threading
import time
from pathlib import Path

import pytest
import torch

import torchstrategy as ts
from tests import budget
from tests.accelerator import loading
from torchstrategy.base import context
from torchstrategy.testing.fixtures import local_cluster, process_pool  # noqa: F401 - fixtures

ROOT = Path(__file__).parent
#: Whose examples start the TPU system; tests/tpu/test_docs.py runs them, each in a process of its own.
TPU_DOCTESTS = {"torchstrategy/tpu/tpu_strategy.py", "torchstrategy/tpu/experimental.py"}


def pytest_configure():
    # The tests share the machine with each other and with their own worker processes.
    torch.set_num_threads(1)
    budget.watch_starts()


def pytest_collection_modifyitems(items):
    missing = {}
    if not torch.cuda.is_available():
        missing["gpu"] = "needs a GPU"
    if importlib.util.find_spec("torch_xla") is None:
        missing["tpu"] = "needs torch_xla: pip install 'torchstrategy[tpu]'"
    with_accelerator = [item for item in items if item.get_closest_marker("accelerator")]
    is_theirs = {item.path for item in items} == {item.path for item in with_accelerator}
    if with_accelerator and (reason := loading.why_not()):
        missing["accelerator"] = reason
    elif not budget.is_enforced and not is_theirs:
        missing["accelerator"] = "would change other files' tests: run `python -m tests.isolated`, or this file alone"
    for item in items:
        if isinstance(item, pytest.DoctestItem) and item.path.relative_to(ROOT).as_posix() in TPU_DOCTESTS:
            item.add_marker("tpu")
        for marker in missing.keys() & {mark.name for mark in item.iter_markers()}:
            item.add_marker(pytest.mark.skip(reason=missing[marker]))


def pytest_collection_finish(session):
    marked = [item for item in session.items if item.get_closest_marker("accelerator")]
    if any(item.get_closest_marker("skip") is None for item in marked):
        loading.load()  # before the first `backward` of any test: autograd makes its threads then, one for each device


@pytest.fixture(autouse=True, scope="session")
def _doctest_names(doctest_namespace):
    doctest_namespace.update(torch=torch, ts=ts)


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(request):
    """Fail a test that costs too much, or leaves variables, threads or a strategy; one fixture, as each costs time."""
    is_free = not budget.is_enforced or any(request.node.get_closest_marker(name) for name in budget.MARKS)
    cost = None if is_free else budget.cost()
    environment, threads = dict(os.environ), set(threading.enumerate())
    yield
    complaints = [_left_strategy(), _left_threads(threads), _left_variables(environment)]
    if cost is not None:
        complaints.append(_over_budget(cost, request.node))
    if any(complaints):
        pytest.fail("\n".join(filter(None, complaints)))


def _over_budget(before, item):
    seconds = budget.since(before)
    item.user_properties.append(("cpu_seconds", seconds))
    if seconds <= budget.LIMIT_S:
        return ""
    return (
        f"The test took {seconds:.1f} s of CPU time, more than {budget.LIMIT_S:.0f} s, where {budget.BUDGET_S} s "
        "are its budget. Make it cheaper, or mark it: `slow`, or `end_to_end` if `make test` can't do without it."
    )


def _left_variables(before):
    after = dict(os.environ)
    set_by_others = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}  # torch sets the second at an optimizer's step
    names = {n for n in before.keys() | after.keys() if before.get(n) != after.get(n)} - set_by_others
    if not names:
        return ""
    os.environ.clear()
    os.environ.update(before)
    return f"The test left changed environment variables: {sorted(names)}. Use monkeypatch.setenv."


def _left_threads(before):
    deadline = time.monotonic() + 2.0
    while (left := _living(before)) and time.monotonic() < deadline:
        left[0].join(0.05)
    if not left:
        return ""
    return f"The test left threads that keep the process alive: {[thread.name for thread in left]}"


def _left_strategy():
    left = context.current_frame()
    if left is None:
        return ""
    _leave_all_scopes()
    return f"The test left a current strategy: {left.strategy!r}. Use `with strategy.scope():`."


def _leave_all_scopes():
    # The base frame, which experimental_set_strategy makes, lies below the others and can't be popped.
    while (frame := context.current_frame()) is not None:
        try:
            context.pop_frame(frame)
        except RuntimeError:
            context.set_base_frame(None)


def _living(before):
    return [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]
