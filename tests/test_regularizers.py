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
        (ts.regularizers.L1(None), 0.06),  # Keras' treatment of None
        (ts.regularizers.L2(None), 0.14),
        (ts.regularizers.L1L2(None, 0.25), 3.5),
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


@pytest.mark.parametrize("factor", [-0.1, float("nan"), float("inf"), "0.1", True, X])
def test_bad_factors(factor):
    for name in ("L1", "L2", "L1L2", "OrthogonalRegularizer"):
        with pytest.raises(ValueError, match="must be a finite number that is not negative"):
            getattr(ts.regularizers, name)(factor)


#: What Keras 3.15 computes of the first so many rows.
ROWS = torch.tensor([[1.0, -2.0, 0.5], [0.0, 3.0, 1.0], [2.0, 0.25, -1.0], [0.0, 0.0, 0.0]])
ORTHOGONAL = [((), 4, 0.00164697), ((0.5, "rows"), 4, 0.08234832), ((0.5, "columns"), 4, 0.15927003)]


@pytest.mark.parametrize(("arguments", "num_rows", "expected"), ORTHOGONAL)
def test_orthogonal(arguments, num_rows, expected):
    for make in (ts.regularizers.OrthogonalRegularizer, ts.regularizers.orthogonal_regularizer):
        assert make(*arguments)(ROWS[:num_rows]).item() == pytest.approx(expected, rel=1e-5)


def test_orthogonal_of_one_row_is_zero():
    x = ROWS[:1].clone().requires_grad_()
    penalty = ts.regularizers.OrthogonalRegularizer()(x)
    penalty.backward()
    assert penalty.item() == 0.0  # Keras gives nan
    assert x.grad.count_nonzero() == 0


def test_what_orthogonal_refuses():
    with pytest.raises(ValueError, match=r"mode must be .rows. or .columns.\. Received: .row."):
        ts.regularizers.OrthogonalRegularizer(mode="row")
    with pytest.raises(ValueError, match=r"needs a matrix. Received a parameter of shape \(3,\)"):
        ts.regularizers.OrthogonalRegularizer()(ROWS[0])


def test_configs():
    configs = {
        ts.regularizers.L1(0.5): {"l1": 0.5},
        ts.regularizers.L1L2(l2=0.5): {"l1": 0.0, "l2": 0.5},
        ts.regularizers.OrthogonalRegularizer(mode="columns"): {"factor": 0.01, "mode": "columns"},
    }
    for regularizer, config in configs.items():
        assert regularizer.get_config() == config
        assert repr(type(regularizer).from_config(config)) == repr(regularizer)


class Forgetful(ts.regularizers.Regularizer):
    def __init__(self, factor):
        self.times = factor


def test_a_config_that_an_object_does_not_keep():
    with pytest.raises(NotImplementedError, match="Forgetful does not keep its argument 'factor' as an attribute"):
        Forgetful(1.0).get_config()


def test_repr():
    made = [ts.regularizers.L1(0.1), ts.regularizers.L2(0.1), ts.regularizers.L1L2(l2=0.1)]
    assert repr(made) == "[L1(l1=0.1), L2(l2=0.1), L1L2(l1=0.0, l2=0.1)]"


def test_base_class():
    with pytest.raises(NotImplementedError, match="Regularizer must define __call__"):
        ts.regularizers.Regularizer()(X)
