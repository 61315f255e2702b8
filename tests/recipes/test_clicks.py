"""The made-up clicks: their shape is that of click logs, and what is planted in them can be learnt."""

import clicks
import numpy as np
import pytest
import torch
from torchmetrics.functional.classification import binary_auroc

ARGUMENTS = {"num_rows": 5000, "num_train": 20_000, "num_test": 5000, "seed": 3}


@pytest.fixture(scope="module")
def data():
    return clicks.load_clicks(**ARGUMENTS)


def test_examples_have_the_shapes_of_the_model(data):
    for part, number in zip(data, (20_000, 5000), strict=True):
        ids, features, labels = part.tensors
        assert ids.shape == (number, 2)
        assert ids.dtype == torch.int64
        assert features.shape == (number, clicks.NUM_FEATURES)
        assert features.dtype == labels.dtype == torch.float32
        assert ids[:, 0].min() >= 0
        assert ids[:, 0].max() < 3000 <= ids[:, 1].min()
        assert ids[:, 1].max() < 5000
        assert set(labels.tolist()) == {0.0, 1.0}
        assert 0.1 < labels.mean() < 0.25, "few impressions are clicked"
        model = clicks.ClickModel(5000, 4, 8)
        assert model(ids[:7], features[:7]).shape == (7,)


def test_the_seed_decides(data):
    again = clicks.load_clicks(**ARGUMENTS)
    other = clicks.load_clicks(**{**ARGUMENTS, "seed": 4})
    for first, second, third in zip(data, again, other, strict=True):
        assert all(torch.equal(*pair) for pair in zip(first.tensors, second.tensors, strict=True))
        assert not torch.equal(first.tensors[0], third.tensors[0])
    assert not torch.equal(data[0].tensors[0][:5000], data[1].tensors[0]), "the tests are no training examples"


def test_planted_odds_predict_clicks(data):
    ids, features, labels = data[1].tensors
    odds = torch.as_tensor(clicks.World(5000, 3).logits(ids.numpy(), features.numpy()))
    assert binary_auroc(odds.sigmoid(), labels.int()) > 0.83
    assert abs(odds.sigmoid().mean() - labels.mean()) < 0.01


@pytest.mark.parametrize("exponent", [0.6, 1.05])
def test_frequencies_follow_a_power_law(exponent):
    size = 1000
    drawn = clicks.power_law(1_000_000, size, exponent, np.random.default_rng(0))
    assert drawn.min() == 0
    assert drawn.max() == size - 1
    shares = np.sort(np.bincount(drawn, minlength=size))[::-1] / len(drawn)
    ranks = np.arange(10, 500)
    slope = np.polyfit(np.log(ranks), np.log(shares[ranks - 1]), 1)[0]
    assert slope == pytest.approx(-exponent, abs=0.06)
    often = np.argsort(np.bincount(drawn, minlength=size))[-20:]
    assert often.max() - often.min() > size / 2, "they are spread over all ids"


@pytest.mark.parametrize("size", [1, 2, 3, 600, 997])
def test_every_id_can_be_drawn(size):
    drawn = clicks.power_law(200 * size, size, 0.6, np.random.default_rng(0))
    assert set(drawn.tolist()) == set(range(size))


def test_sparse_gradients_hold_the_rows_of_the_batch():
    model = clicks.ClickModel(100, 4, 8)
    ids = torch.tensor([[3, 70], [3, 90]])
    model(ids, torch.zeros(2, clicks.NUM_FEATURES)).sum().backward()
    gradient = model.embedding.weight.grad.coalesce()
    assert gradient.indices().tolist() == [[3, 70, 90]]


def test_too_few_rows():
    with pytest.raises(ValueError, match=r"num_rows must be at least 5.*Received: 4"):
        clicks.load_clicks(4, 10, 10, seed=0)
