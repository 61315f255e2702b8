"""``fit``, ``evaluate`` and ``predict`` give the same numbers for every kind of data, on any number of replicas."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import torchstrategy as ts
from tests.fit.input_data import Frame

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(11, 3)).astype(np.float32)
Y = RANDOM.normal(size=(11, 1)).astype(np.float32)
TENSORS = (torch.from_numpy(X), torch.from_numpy(Y))


class Examples(Dataset):
    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index], Y[index]


def batches():
    return [(X[i : i + 4], Y[i : i + 4]) for i in range(0, 11, 4)]


def pipeline():
    return ts.data.Dataset.from_tensor_slices(TENSORS)


KINDS = {
    "numpy": lambda: {"x": X, "y": Y, "batch_size": 4},
    "float64": lambda: {"x": X.astype(np.float64), "y": Y.astype(np.float64), "batch_size": 4},
    "tensors": lambda: {"x": TENSORS[0], "y": TENSORS[1], "batch_size": 4},
    "frames": lambda: {"x": Frame(X), "y": Frame(Y), "batch_size": 4},
    "TensorDataset": lambda: {"x": TensorDataset(*TENSORS), "batch_size": 4},
    "examples": lambda: {"x": Examples(), "batch_size": 4},
    "list of examples": lambda: {"x": list(zip(X, Y, strict=True)), "batch_size": 4},
    "loader": lambda: {"x": DataLoader(Examples(), 4)},
    "pipeline": lambda: {"x": pipeline().batch(4)},
    "pipeline without batches": lambda: {"x": pipeline(), "batch_size": 4},
    "list of batches": lambda: {"x": batches()},
    "generator": lambda: {"x": iter(batches())},
}


def make_model(strategy):
    with strategy.scope():
        model = ts.Model(torch.nn.Linear(3, 1))
        torch.nn.init.constant_(model.module.weight, 0.5)
        torch.nn.init.zeros_(model.module.bias)
    model.compile("sgd", "mse", metrics=["mae"])
    return model


def numbers(strategy, make):
    model = make_model(strategy)
    history = model.fit(**make(), epochs=1, shuffle=False, verbose=0, validation_data=batches()).history
    evaluated = model.evaluate(**make(), verbose=0, return_dict=True)
    arguments = make()
    arguments.pop("y", None)
    return history, evaluated, model.predict(**arguments, verbose=0)


@pytest.fixture(scope="module")
def expected():
    return numbers(ts.get_strategy(), KINDS["numpy"])


@pytest.mark.parametrize("num_replicas", [1, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_numbers_for_every_kind(kind, num_replicas, expected):
    devices = [f"cpu:{i}" for i in range(num_replicas)]
    strategy = ts.get_strategy() if num_replicas == 1 else ts.MirroredStrategy(devices)
    history, evaluated, predictions = numbers(strategy, KINDS[kind])
    assert set(history) == {"loss", "mae", "val_loss", "val_mae"}
    for name, values in expected[0].items():
        assert history[name] == pytest.approx(values, rel=1e-5)
    assert evaluated == pytest.approx(expected[1], rel=1e-5)
    assert predictions == pytest.approx(expected[2], rel=1e-5)


def test_a_distributed_dataset():
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    dataset = strategy.experimental_distribute_dataset(DataLoader(Examples(), 4))
    history, _, predictions = numbers(strategy, lambda: {"x": dataset})
    assert history["loss"] == pytest.approx(numbers(strategy, KINDS["numpy"])[0]["loss"], rel=1e-5)
    assert predictions.shape == (11, 1)


def test_a_dataset_creator():
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    creator = ts.utils.DatasetCreator(lambda context: pipeline().batch(context.get_per_replica_batch_size(4)))
    history, _, predictions = numbers(strategy, lambda: {"x": creator})
    assert history["loss"] == pytest.approx(numbers(strategy, KINDS["numpy"])[0]["loss"], rel=1e-5)
    assert predictions.shape == (11, 1)


def test_validation_split_and_shuffling():
    """The validation data is the end of the arrays, whatever the order of the training."""
    model = make_model(ts.get_strategy())
    whole = model.fit(X, Y, batch_size=4, epochs=2, verbose=0, validation_split=0.3).history
    assert model.evaluate(X[7:], Y[7:], verbose=0)[0] == pytest.approx(whole["val_loss"][-1], rel=1e-5)


def test_class_weights_are_sample_weights():
    labels = np.arange(11) % 2
    weights = np.where(labels == 1, 3.0, 0.5)
    histories = []
    for num_replicas in (1, 2):
        for given in ({"class_weight": {0: 0.5, 1: 3.0}}, {"sample_weight": weights}):
            strategy = ts.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
            with strategy.scope():
                model = ts.Model(torch.nn.Linear(3, 2))
                torch.nn.init.constant_(model.module.weight, 0.5)
                torch.nn.init.zeros_(model.module.bias)
            model.compile("sgd", torch.nn.CrossEntropyLoss())
            histories.append(model.fit(X, labels, batch_size=4, shuffle=False, verbose=0, **given).history["loss"])
    assert all(history == pytest.approx(histories[0], rel=1e-5) for history in histories)
