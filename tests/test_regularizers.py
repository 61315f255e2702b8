"""The penalties themselves; tests/losses/test_layer_losses.py has what attaches them."""

import pickle

import pytest
import torch

import torchstrategy as ts

X = torch.tensor([[1.0, -2.0], [0.0, 3.0]])


@pytest.mark.parametrize(
    ("regularizer", "expected"),
    [
        (ts.regularizers.L1(0.5), 3.0),
        (ts.regularizers.L2(0.5), 7.0),
        (ts.regularizers.L1L2(l1=0.5, l2=0.25), 6.5),
        (ts.regularizers.L1L2(l1=1), 6.0),
        (ts.regularizers.L1L2(), 0.0),
        (ts.regularizers.L1(), 0.06),
        (ts.regularizers.L2(), 0.14),
        (ts.regularizers.l1(0.5), 3.0),
        (ts.regularizers.l2(0.5), 7.0),
        (ts.regularizers.l1_l2(l1=0.5, l2=0.25), 6.5),
    ],
)
def test_values(regularizer, expected):
    penalty = regularizer(X)
    assert penalty.shape == ()
    assert penalty.item() == pytest.approx(expected)
    assert pickle.loads(pickle.dumps(regularizer))(X).item() == penalty.item()


def test_gradients():
    x = X.clone().requires_grad_()
    ts.regularizers.L1L2(l1=0.5, l2=0.25)(x).backward()
    assert x.grad.tolist() == [[1.0, -1.5], [0.0, 2.0]]


def test_halves_do_not_overflow():
    assert ts.regularizers.L2(1e-4)(torch.full((100,), 300.0, dtype=torch.float16)).item() == pytest.approx(900.0)


@pytest.mark.parametrize("factor", [-0.1, float("nan"), float("inf"), "0.1", None, True, X])
def test_bad_factors(factor):
    for make in (ts.regularizers.L1, ts.regularizers.L2, ts.regularizers.L1L2):
        with pytest.raises(ValueError, match="must be a finite number that is not negative"):
            make(factor)


def test_repr():
    made = [ts.regularizers.L1(0.1), ts.regularizers.L2(0.1), ts.regularizers.L1L2(l2=0.1)]
    assert repr(made) == "[L1(l1=0.1), L2(l2=0.1), L1L2(l1=0.0, l2=0.1)]"


def test_base_class():
    with pytest.raises(NotImplementedError, match="Regularizer must define __call__"):
        ts.regularizers.Regularizer()(X)
