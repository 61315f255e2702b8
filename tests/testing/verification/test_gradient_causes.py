"""Causes are told from numbers that can't be so by chance."""

import ast
from pathlib import Path

import torch

from torchstrategy.testing.verification.deviations import Step, Update, ratio
from torchstrategy.testing.verification.gradient_causes import gradient_causes

WEIGHTS = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)
RIGHT = torch.tensor([0.3, 0.1, -0.7, 0.2], dtype=torch.float64)


def kinds(final, right=RIGHT, weights=WEIGHTS, rows=(2, 2)):
    """Return the kinds for replicas that step with ``final`` where one replica steps with ``right``."""
    mine = [
        Step(num_rows=size, updates=[Update("sgd", gradients={"w": final}, before={"w": weights})]) for size in rows
    ]
    expected = Step(num_rows=4, updates=[Update("sgd", gradients={"w": right}, before={"w": weights})])
    return [kind for kind, _ in gradient_causes(mine, expected, 1e-10, {})]


def test_multiples_are_named_by_the_number_of_replicas():
    assert kinds(2 * RIGHT) == ["loss not divided"]
    assert kinds(RIGHT / 2) == ["loss divided twice"]
    assert kinds(RIGHT * 0.7) == ["loss scaled"]


def test_a_replica_without_examples_makes_its_mean_count_as_zero():
    assert kinds(RIGHT / 2, rows=(1, 0)) == ["each replica's mean weighs alike"]
    assert kinds(RIGHT / 3, rows=(1, 0, 0)) == ["each replica's mean weighs alike"]


def test_a_penalty_is_a_multiple_of_the_weights_or_of_their_signs():
    assert kinds(RIGHT + 0.2 * WEIGHTS) == ["regularizer not shared"]
    assert kinds(RIGHT + 0.2 * WEIGHTS.sign()) == ["regularizer not shared"]


def test_a_single_number_is_no_evidence_of_a_penalty_or_a_scale():
    assert kinds(RIGHT[:1] + 0.4, RIGHT[:1], WEIGHTS[:1]) == []
    assert kinds(RIGHT[:1] * 2, RIGHT[:1], WEIGHTS[:1]) == ["loss not divided"]


def test_gradients_of_weights_kind_are_not_taken_for_a_penalty():
    assert kinds(2 * WEIGHTS, WEIGHTS) == ["loss not divided"]


def test_rounding_is_no_multiple():
    noise = torch.tensor([1e-9, -3e-9, 2e-9, 1e-9], dtype=torch.float64)
    assert ratio(noise, WEIGHTS, 1e-10, scale=1.0) is None
    assert kinds(RIGHT + noise) == []


def kinds_of_shares(means, rows, times, factor=1.0):
    """Return what is said of replicas whose losses are ``times`` the means over their shares."""
    local = [times * mean for mean in means]
    final = factor * sum(local)
    right = sum(mean * row for mean, row in zip(means, rows, strict=True)) / sum(rows)
    mine = [
        Step(num_rows=row, updates=[Update("sgd", {"w": own}, {"w": final}, {"w": WEIGHTS})])
        for row, own in zip(rows, local, strict=True)
    ]
    expected = Step(num_rows=sum(rows), updates=[Update("sgd", {"w": right}, {"w": right}, {"w": WEIGHTS})])
    return list(gradient_causes(mine, expected, 1e-10, {}))


def test_means_over_uneven_shares_are_named_by_what_each_weighs():
    means, rows = [RIGHT, RIGHT.flip(0) + 0.3], (10, 9)
    alike = "each replica's mean weighs alike"
    # compute_average_loss divides by the share and by N before the sum; DDP divides by N in the sum.
    for times, factor in ((0.5, 1.0), (1.0, 0.5)):
        [(kind, text)] = kinds_of_shares(means, rows, times, factor)
        assert kind == alike
        assert "means over shares of 10, 9 examples, and each weighs 1/2" in text
        assert 'global_batch_size="actual"' in text
    with_empty = kinds_of_shares([*means, torch.zeros_like(RIGHT)], (10, 9, 0), 1 / 3)
    assert [kind for kind, _ in with_empty] == [alike]
    assert [kind for kind, _ in kinds_of_shares(means, rows, 1.0)] == ["loss not divided"]
    assert [kind for kind, _ in kinds_of_shares(means, rows, 0.25)] == ["loss divided twice"]
    [(kind, text)] = kinds_of_shares(means, rows, 3.0)
    assert kind == "loss scaled"
    assert "each weighs 3," in text
    assert "Divide sums by the size of the global batch" in text


def kinds_in(path):
    """Return the kinds of causes that a module can name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    constants = {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        first = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Cause":
            first = node.args[0]
        elif path.stem == "gradient_causes" and isinstance(getattr(node, "value", None), ast.Tuple):
            first = node.value.elts[0]
        if isinstance(first, ast.Name):
            first = ast.Constant(constants.get(first.id))
        if isinstance(first, ast.Constant) and isinstance(first.value, str):
            yield first.value


def test_the_page_explains_every_kind():
    root = Path(__file__).parents[3]
    page = (root / "docs/guide/verify.md").read_text(encoding="utf-8")
    table = page.partition("| kind | what the numbers show | remedy |")[2].partition("\n\n")[0]
    documented = {kind for row in table.splitlines()[2:] for kind in row.split("|")[1].strip().split(", ")}
    folder = root / "torchstrategy/testing/verification"
    assert documented == {kind for path in folder.glob("*.py") for kind in kinds_in(path)}
