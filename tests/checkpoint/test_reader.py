"""Looking into checkpoints without their objects."""

import pytest
import torch
import torchmetrics
from torch import nn

import torchstrategy as ts
from torchstrategy.errors import DataLossError, NotFoundError


@pytest.fixture
def path(tmp_path):
    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    metric = torchmetrics.SumMetric()
    metric.update(3.0)
    checkpoint = ts.train.Checkpoint(model=model, optimizer=optimizer, metric=metric, values=[torch.tensor(7)])
    return checkpoint.save(tmp_path / "ck")


def test_names_shapes_and_values(path, tmp_path):
    expected = [
        ("metric.sum_value", []),
        ("model.bias", [1]),
        ("model.weight", [1, 2]),
        ("optimizer.state.0.exp_avg", [1, 2]),
        ("optimizer.state.0.exp_avg_sq", [1, 2]),
        ("optimizer.state.0.step", []),
        ("optimizer.state.1.exp_avg", [1]),
        ("optimizer.state.1.exp_avg_sq", [1]),
        ("optimizer.state.1.step", []),
        ("save_counter", []),
        ("values/0", []),
    ]
    assert ts.train.list_variables(path) == ts.train.list_variables(tmp_path) == expected
    reader = ts.train.load_checkpoint(tmp_path)
    assert reader.get_variable_to_shape_map() == dict(expected)
    assert reader.get_variable_to_dtype_map()["values/0"] == torch.int64
    assert reader.get_tensor("metric.sum_value").item() == 3.0
    assert reader.has_tensor("model.bias")
    assert not reader.has_tensor("model")
    assert ts.train.load_variable(path, "values/0").item() == 7
    assert ts.train.load_variable(path, "save_counter").item() == 1


def test_what_a_reader_gives_away_is_a_copy(path):
    reader = ts.train.load_checkpoint(path)
    reader.get_tensor("values/0").fill_(0)
    assert reader.get_tensor("values/0").item() == 7


def test_what_is_not_there(path, tmp_path):
    with pytest.raises(NotFoundError, match=r"no tensor 'model\.wieght'. It holds: .*model\.weight"):
        ts.train.load_variable(path, "model.wieght")
    with pytest.raises(NotFoundError, match="no file"):
        ts.train.load_checkpoint(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="has no latest checkpoint"):
        ts.train.list_variables(tmp_path / "empty")
    with open(path + ".pt", "r+b") as file:
        file.truncate(100)
    with pytest.raises(DataLossError):
        ts.train.load_checkpoint(path)


def test_state_of_a_directory(tmp_path):
    assert ts.train.get_checkpoint_state(tmp_path) is None
    assert ts.train.get_checkpoint_state(tmp_path / "missing") is None
    manager = ts.train.CheckpointManager(ts.train.Checkpoint(v=torch.tensor(1)), tmp_path, max_to_keep=2)
    for _ in range(3):
        manager.save()
    state = ts.train.get_checkpoint_state(tmp_path)
    assert state.model_checkpoint_path == manager.latest_checkpoint
    assert state.all_model_checkpoint_paths == manager.checkpoints
    assert state.all_model_checkpoint_timestamps == sorted(state.all_model_checkpoint_timestamps)
    assert state.last_preserved_timestamp <= state.all_model_checkpoint_timestamps[0]
