"""The made-up clicks: their shape is that of click logs, and what is planted in them can be learnt."""

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics.functional.classification import binary_auroc

import torchstrategy as ts
from tests.ps import click_logs

ARGUMENTS = {"num_rows": 5000, "num_train": 20_000, "num_test": 5000, "seed": 3}


@pytest.fixture(scope="module")
def data():
    return click_logs.load_clicks(**ARGUMENTS)


def test_examples_have_the_shapes_of_the_model(data):
    for part, number in zip(data, (20_000, 5000), strict=True):
        ids, features, labels = part.tensors
        assert ids.shape == (number, 2)
        assert ids.dtype == torch.int64
        assert features.shape == (number, click_logs.NUM_FEATURES)
        assert features.dtype == labels.dtype == torch.float32
        assert ids[:, 0].min() >= 0
        assert ids[:, 0].max() < 3000 <= ids[:, 1].min()
        assert ids[:, 1].max() < 5000
        assert set(labels.tolist()) == {0.0, 1.0}
        assert 0.1 < labels.mean() < 0.25, "few impressions are clicked"
        model = click_logs.ClickModel(5000, 4, 8)
        assert model(ids[:7], features[:7]).shape == (7,)


def test_the_seed_decides(data):
    again = click_logs.load_clicks(**ARGUMENTS)
    other = click_logs.load_clicks(**{**ARGUMENTS, "seed": 4})
    for first, second, third in zip(data, again, other, strict=True):
        assert all(torch.equal(*pair) for pair in zip(first.tensors, second.tensors, strict=True))
        assert not torch.equal(first.tensors[0], third.tensors[0])
    assert not torch.equal(data[0].tensors[0][:5000], data[1].tensors[0]), "the tests are no training examples"


def test_planted_odds_predict_clicks(data):
    ids, features, labels = data[1].tensors
    odds = torch.as_tensor(click_logs.World(5000, 3).logits(ids.numpy(), features.numpy()))
    assert binary_auroc(odds.sigmoid(), labels.int()) > 0.83
    assert abs(odds.sigmoid().mean() - labels.mean()) < 0.01


@pytest.mark.parametrize("exponent", [0.6, 1.05])
def test_frequencies_follow_a_power_law(exponent):
    size = 1000
    drawn = click_logs.power_law(1_000_000, size, exponent, np.random.default_rng(0))
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
    drawn = click_logs.power_law(200 * size, size, 0.6, np.random.default_rng(0))
    assert set(drawn.tolist()) == set(range(size))


def test_sparse_gradients_hold_the_rows_of_the_batch():
    model = click_logs.ClickModel(100, 4, 8)
    ids = torch.tensor([[3, 70], [3, 90]])
    model(ids, torch.zeros(2, click_logs.NUM_FEATURES)).sum().backward()
    gradient = model.embedding.weight.grad.coalesce()
    assert gradient.indices().tolist() == [[3, 70, 90]]


def test_too_few_rows():
    with pytest.raises(ValueError, match=r"num_rows must be at least 5.*Received: 4"):
        click_logs.load_clicks(4, 10, 10, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_clicks_are_predicted_as_well_as_by_one_process():
    """Two workers learn from a table that is cut into parts; its gradients hold the rows of a batch."""
    train_data, test_data = click_logs.load_clicks(**ARGUMENTS)
    alone = Learner()
    for batch in torch.utils.data.DataLoader(train_data, 256, shuffle=True, drop_last=True):
        alone.train_step(iter([batch]))
    partitioner = ts.experimental.partitioners.MinSizePartitioner(min_shard_bytes=1000, max_shards=2)
    with ts.testing.LocalCluster(num_workers=2, num_ps=2) as cluster:
        strategy = ts.ParameterServerStrategy(cluster.resolver(), partitioner, placement="by_size", max_staleness=2)
        coordinator = ts.coordinator.ClusterCoordinator(strategy)
        with strategy.scope():
            learner = Learner()

        def make_batches():
            worker = ts.coordinator.experimental_get_current_worker_index()
            share = ts.data.Dataset.from_tensor_slices(train_data.tensors).shard(2, worker)
            return share.shuffle(len(train_data), seed=1).batch(256).repeat()

        batches = iter(coordinator.create_per_worker_dataset(make_batches))
        for _ in range(len(train_data) // 256):
            coordinator.schedule(learner.train_step, args=(batches,))
        coordinator.join()
        found = learner.auc(test_data)
        strategy.close()
    assert found > 0.6
    assert found == pytest.approx(alone.auc(test_data), abs=0.02)


class Learner:
    """The model with an optimizer for its table and one for the rest."""

    def __init__(self):
        torch.manual_seed(1)
        self.model = click_logs.ClickModel(ARGUMENTS["num_rows"], 16, 64)
        self.optimizers = [
            torch.optim.Adam(self.model.dense.parameters(), lr=0.002),
            torch.optim.SparseAdam(self.model.embedding.parameters(), lr=0.003),
        ]

    def train_step(self, batches):
        ids, features, labels = next(batches)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(self.model(ids, features), labels).backward()
        for optimizer in self.optimizers:
            optimizer.step()

    @torch.no_grad()
    def auc(self, data):
        ids, features, labels = data.tensors
        return float(binary_auroc(self.model(ids, features).sigmoid(), labels.int()))
