"""The suite notices broken numbers: where a copy of the library is broken on purpose, tests of ``make test`` fail."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


class Mutation(NamedTuple):
    """A change of one file: a piece of it, which is there once, and what stands there instead."""

    file: str
    old: str
    new: str
    tests: tuple[str, ...] = ("tests/test_bare_interpreter.py",)


MUTATIONS = {
    "the first replicas get one example less": Mutation(
        "data/split.py",
        "chunk = -(-num_examples // num_replicas)",
        "chunk = max(1, num_examples // num_replicas)",
        ("tests/data/test_split.py", "tests/test_bare_interpreter.py"),
    ),
    "shares go to replicas in reverse order": Mutation(
        "data/batch.py",
        "columns.append(tuple([_cut(leaf, *bounds[i]) for i in placement.local_replica_ids]))",
        "columns.append(tuple([_cut(leaf, *bounds[i]) for i in placement.local_replica_ids][::-1]))",
        ("tests/data/test_batch.py",),
    ),
    "dense gradients are not summed at the step": Mutation(
        "gradients/summer.py",
        "self._sum_dense(parts, [k for k in _positions(todo & dense) if k not in taken], looks)",
        "self._sum_dense(parts, [], looks)",
    ),
    "FSDP2 averages gradients": Mutation(
        "replicas/dtensors.py",
        "module.set_gradient_divide_factor(1.0)",
        "pass",
        ("tests/replicas/test_right_programs.py",),
    ),
    "a step uses a sum twice": Mutation(
        "gradients/ledger.py", "self._note(parameters, State.SUMMED, run)", "pass", ("tests/gradients/test_ledger.py",)
    ),
    "reduce keeps one replica's graph": Mutation(
        "strategies/replica_values.py",
        "return leaf.detach() if is_computed else leaf",
        "return leaf",
        ("tests/strategies/test_replica_values.py",),
    ),
    "a sum of torch's losses over its size counts as meant": Mutation(
        "gradients/mean_losses.py",
        "_MEAN, _SUM = 1, 2",
        "_MEAN, _SUM = 1, 3",
        ("tests/gradients/test_mean_losses.py",),
    ),
    "gather reverses the replicas of a process": Mutation(
        "collectives/reductions.py",
        "torch.cat([tensor.to(first.device) for tensor in tensors], axis)",
        "torch.cat([tensor.to(first.device) for tensor in tensors[::-1]], axis)",
    ),
    "gather reverses the processes": Mutation(
        "collectives/reductions.py",
        "return torch.cat(parts, axis)",
        "return torch.cat(parts[::-1], axis)",
        ("tests/strategies/test_multi_worker.py",),
    ),
    "MEAN is a sum": Mutation("collectives/reductions.py", "return total / count", "return total"),
    "the divisor of a loss leaves the other replicas out": Mutation(
        "nn.py",
        "return num_losses * _num_replicas()",
        "return num_losses",
        ("tests/test_nn.py",),
    ),
    "the divisor of a loss is a share's": Mutation(
        "nn.py", "return _actual_batch_size(loss)", "return loss.shape[0]", ("tests/test_nn.py",)
    ),
    "a forward with Keras' argument keeps its default": Mutation(
        "fit/calling.py",
        'return {**kwargs, "training": module.training} if is_named and not is_given else kwargs',
        "return kwargs",
        ("tests/fit/test_modes.py",),
    ),
    "a registry waits for an import": Mutation(
        "replicas/adapters.py", '    "torchmetrics.metric.Metric": "torchstrategy.metrics.sync",\n', ""
    ),
    "a write past the version counter is not looked for": Mutation(
        "replicas/edits.py", "self._follow(found)", "pass", ("tests/test_bare_interpreter.py",)
    ),
}


def run_tests(tree, tests):
    environ = {**os.environ, "PYTHONPATH": str(tree)}
    # without the options of this run, of which xdist's come by the environment too
    environ = {name: value for name, value in environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests]
    return subprocess.run(
        [*command, "-m", "not slow"], cwd=tree, env=environ, capture_output=True, text=True, timeout=600
    )


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the library and its tests."""
    copied = tmp_path_factory.mktemp("mutated")
    for name in ("torchstrategy", "tests", "recipes", "conf", "docs"):
        shutil.copytree(ROOT / name, copied / name, ignore=shutil.ignore_patterns("__pycache__", "_build"))
    for name in ("conftest.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, copied)
    return copied


def test_the_copy_passes(tree):
    tests = sorted({test for mutation in MUTATIONS.values() for test in mutation.tests})
    done = run_tests(tree, tests)
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_library_fails(tree, name):
    mutation = MUTATIONS[name]
    path = tree / "torchstrategy" / mutation.file
    text = path.read_text(encoding="utf-8")
    assert text.count(mutation.old) == 1, f"{mutation.file} has changed: name the new place of {mutation.old!r}"
    path.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
    try:
        done = run_tests(tree, mutation.tests)
    finally:
        path.write_text(text, encoding="utf-8")
    assert done.returncode == 1, f"The tests passed, or did not run:\n{done.stdout[-3000:]}{done.stderr[-2000:]}"
    assert " failed" in done.stdout.splitlines()[-1]
    assert "SyntaxError" not in done.stdout
