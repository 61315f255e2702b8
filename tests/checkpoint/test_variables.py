"""Variables in checkpoints: mirrored ones are stored once, those that are aggregated when read as the aggregate."""

import pytest
import torch
from torch import nn

import torchstrategy as ts

ON_READ = ts.VariableSynchronization.ON_READ
SUM, MEAN, ONLY_FIRST, NONE = (ts.VariableAggregation[name] for name in ("SUM", "MEAN", "ONLY_FIRST_REPLICA", "NONE"))


@pytest.fixture
def prefix(tmp_path):
    return str(tmp_path / "ck")


def mirrored(num_replicas):
    return ts.MirroredStrategy(devices=[f"cpu:{i}" for i in range(num_replicas)])


def variable(strategy, value, **options):
    with strategy.scope():
        return ts.Variable(value, **options)


def local_values(strategy, value):
    return [v.tolist() for v in strategy.experimental_local_results(value)]


def replica_id():
    return ts.get_replica_context().replica_id_in_sync_group


def test_mirrored(prefix):
    strategy = mirrored(2)
    ts.train.Checkpoint(v=variable(strategy, [1.0, 2.0])).write(prefix)
    assert torch.equal(ts.train.load_variable(prefix, "v"), torch.tensor([1.0, 2.0]))
    fresh = variable(strategy, [0.0, 0.0])
    ts.train.Checkpoint(v=fresh).read(prefix).assert_consumed()
    assert local_values(strategy, fresh) == [[1.0, 2.0]] * 2


def test_a_variable_becomes_a_tensor_and_back(prefix):
    strategy = mirrored(2)
    ts.train.Checkpoint(v=variable(strategy, 3.0)).write(prefix)
    tensor = torch.tensor(0.0)
    ts.train.Checkpoint(v=tensor).read(prefix).assert_consumed()
    assert tensor.item() == 3.0
    ts.train.Checkpoint(v=tensor + 1).write(prefix)
    fresh = variable(strategy, 0.0)
    ts.train.Checkpoint(v=fresh).read(prefix).assert_consumed()
    assert local_values(strategy, fresh) == [4.0, 4.0]


@pytest.mark.parametrize(
    ("aggregation", "stored", "restored"), [(SUM, 6.0, 2.0), (MEAN, 2.0, 2.0), (ONLY_FIRST, 1.0, 1.0)]
)
def test_aggregated_when_read(prefix, aggregation, stored, restored):
    strategy = mirrored(3)
    options = {"synchronization": ON_READ, "aggregation": aggregation}
    saved, fresh = (variable(strategy, 0.0, **options) for _ in range(2))
    strategy.run(lambda: saved.assign(torch.tensor(replica_id() + 1.0)))
    ts.train.Checkpoint(v=saved).write(prefix)
    assert ts.train.load_variable(prefix, "v").item() == stored
    ts.train.Checkpoint(v=fresh).read(prefix).assert_consumed()
    assert local_values(strategy, fresh) == [restored] * 3
    assert fresh.read_value().item() == stored
    assert local_values(strategy, saved) == [1.0, 2.0, 3.0]  # saving changes nothing


@pytest.mark.parametrize("total", [-7, -3, 0, 1, 2, 3, 11])
def test_a_sum_of_integers_is_kept(prefix, total):
    strategy = mirrored(3)
    options = {"synchronization": ON_READ, "aggregation": SUM}
    ts.train.Checkpoint(v=torch.tensor([total, 4])).write(prefix)
    fresh = variable(strategy, [0, 0], **options)
    ts.train.Checkpoint(v=fresh).read(prefix).assert_consumed()
    assert fresh.read_value().tolist() == [total, 4]
    parts = [part[0] for part in local_values(strategy, fresh)]
    assert max(parts) - min(parts) <= 1
    strategy.run(lambda: fresh.assign_add(torch.tensor([1, 1])))
    assert fresh.read_value().tolist() == [total + 3, 7]


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_without_aggregation(prefix, num_replicas):
    strategy = mirrored(num_replicas)
    value = variable(strategy, 1.0, synchronization=ON_READ, aggregation=NONE)
    with pytest.raises(ValueError, match="ON_READ without aggregation"):
        ts.train.Checkpoint(v=value).write(prefix)
    ts.train.Checkpoint(v=torch.tensor(2.0), w=torch.tensor(2.0)).write(prefix)
    other = torch.tensor(0.0)
    with pytest.raises(ValueError, match="v is an ON_READ variable without aggregation"):
        ts.train.Checkpoint(w=other, v=value).read(prefix)
    assert other.item() == 0.0


@pytest.mark.parametrize("strategy", [ts.get_strategy(), ts.OneDeviceStrategy("cpu:0")], ids=["default", "one_device"])
def test_without_copies(prefix, strategy):
    value = variable(strategy, 1.0, synchronization=ON_READ, aggregation=NONE)
    ts.train.Checkpoint(v=value).write(prefix)
    value.assign(5.0)
    ts.train.Checkpoint(v=value).read(prefix).assert_consumed()
    assert value.item() == 1.0


def test_shape_and_dtype(prefix):
    strategy = mirrored(2)
    ts.train.Checkpoint(v=variable(strategy, [1.0, 2.0])).write(prefix)
    with pytest.raises(ValueError, match=r"v has shape \(\), but the checkpoint's value has shape \(2,\)"):
        ts.train.Checkpoint(v=variable(strategy, 1.0, synchronization=ON_READ, aggregation=SUM)).read(prefix)
    with pytest.raises(ts.errors.InvalidArgumentError, match=r"v has dtype torch\.int64"):
        ts.train.Checkpoint(v=variable(strategy, [1, 2])).read(prefix)


class Counting(nn.Module):
    """Has variables as a parameter, as a buffer and as a plain attribute."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.scale = ts.Variable(1.0, aggregation=ts.VariableAggregation.MEAN)
        self.register_buffer("seen", ts.Variable(0, synchronization=ON_READ, aggregation=SUM))
        self.largest = ts.Variable(0.0, synchronization=ON_READ, aggregation=MEAN)

    def forward(self, x):
        self.seen.assign_add(torch.tensor(len(x)))
        self.largest.assign(torch.tensor(replica_id() + 1.0))
        return self.linear(x) * self.scale


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 1)
        self.scale = nn.Parameter(torch.tensor(0.0))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("largest", torch.tensor(0.0))


def counting(strategy, *, has_run):
    with strategy.scope():
        model = nn.Sequential(Counting())
    if has_run:
        strategy.run(lambda: model(torch.ones(replica_id() + 2, 1)))
    return model


@pytest.mark.parametrize("has_run", [False, True])
def test_variables_of_modules(prefix, has_run):
    strategy = mirrored(3)
    saved = counting(strategy, has_run=True)
    saved[0].scale.assign(5.0)
    ts.train.Checkpoint(model=saved).write(prefix)
    assert ts.train.load_variable(prefix, "model.0.seen").item() == 2 + 3 + 4
    assert ts.train.load_variable(prefix, "model.0.largest").item() == 2.0
    assert ts.train.load_variable(prefix, "model.0.scale").item() == 5.0

    fresh = counting(strategy, has_run=has_run)
    status = ts.train.Checkpoint(model=fresh).read(prefix)
    assert len(status.assert_consumed().matched) == 5
    assert fresh[0].seen.read_value().item() == 9
    assert local_values(strategy, fresh[0].largest) == [2.0] * 3
    assert local_values(strategy, fresh[0].scale) == [5.0] * 3
    assert torch.equal(fresh[0].linear.weight, saved[0].linear.weight)
    strategy.run(lambda: fresh(torch.ones(1, 1)))
    assert fresh[0].seen.read_value().item() == 12

    plain = nn.Sequential(Plain())
    ts.train.Checkpoint(model=plain).read(prefix).assert_consumed()
    assert plain[0].seen.item() == 9
    assert plain[0].largest.item() == 2.0
    ts.train.Checkpoint(model=plain).write(prefix)
    ts.train.Checkpoint(model=fresh).read(prefix).assert_consumed()
    assert fresh[0].seen.read_value().item() == 9


def test_variables_of_modules_that_do_not_fit(prefix):
    ts.train.Checkpoint(model=nn.Sequential(Plain())).write(prefix)
    strategy = mirrored(2)
    fresh = counting(strategy, has_run=True)
    with strategy.scope():
        fresh[0].largest = ts.Variable([0.0, 0.0], synchronization=ON_READ, aggregation=MEAN)
    weight = fresh[0].linear.weight.detach().clone()
    with pytest.raises(ValueError, match=r"model\.0\.largest has shape \(2,\)"):
        ts.train.Checkpoint(model=fresh).read(prefix)
    assert torch.equal(fresh[0].linear.weight, weight)


def test_attached_later(prefix):
    strategy = mirrored(2)
    ts.train.Checkpoint(v=torch.tensor(5), model=nn.Sequential(Plain())).write(prefix)
    checkpoint = ts.train.Checkpoint()
    status = checkpoint.read(prefix)
    checkpoint.v = variable(strategy, 0, synchronization=ON_READ, aggregation=SUM)
    assert local_values(strategy, checkpoint.v) == [3, 2]
    checkpoint.model = counting(strategy, has_run=True)
    assert local_values(strategy, checkpoint.model[0].seen) == [0, 0]
    status.assert_consumed()
