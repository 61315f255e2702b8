"""What processes compare before they train."""

import functools
import json

import pytest
import torch
from torch import nn

import torchstrategy as ts
from torchstrategy.errors import DisagreementError
from torchstrategy.fit.arguments import FitArguments
from torchstrategy.fit.rank_comparison import check_alike, describe_argument
from torchstrategy.fit.trainer import trainer_of


class Workers:
    """One of two ranks; the first one's record is known."""

    def __init__(self, *records):
        self.records = list(records)

    def exchange(self, operation, record):
        self.records.append(json.loads(json.dumps(record)))
        return self.records


def given(**arguments):
    return FitArguments(
        **{
            "x": torch.ones(4, 1),
            "y": torch.ones(4, 1),
            "batch_size": 4,
            "epochs": 1,
            "verbose": 0,
            "callbacks": None,
            "validation_split": 0.0,
            "validation_data": None,
            "shuffle": True,
            "class_weight": None,
            "sample_weight": None,
            "initial_epoch": 0,
            "steps_per_epoch": None,
            "validation_steps": None,
            "validation_batch_size": None,
            "validation_freq": 1,
            **arguments,
        }
    )


def trainer(**options):
    model = ts.Model(nn.Linear(1, 1))
    model.compile(**{"optimizer": "sgd", "loss": "mse", **options})
    return trainer_of(model)


def compare(first, second):
    workers = Workers()
    check_alike(workers, *first)
    check_alike(workers, *second)


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("optimizer", "sgd", "adam"),
        ("optimizer", functools.partial(torch.optim.SGD, lr=0.1), functools.partial(torch.optim.SGD, lr=0.2)),
        ("loss", "mse", "mae"),
        ("loss", nn.HuberLoss(delta=1.0), nn.HuberLoss(delta=2.0)),
        ("loss", nn.BCEWithLogitsLoss(), nn.BCEWithLogitsLoss(pos_weight=torch.tensor([2.0]))),
        ("loss", ts.losses.MeanSquaredError(), ts.losses.MeanSquaredError(reduction="sum")),
        ("loss_weights", None, 2.0),
        ("metrics", ["mae"], ["mse"]),
        ("metrics", None, [ts.metrics.MeanAbsoluteError()]),
        ("weighted_metrics", None, ["mae"]),
        ("steps_per_execution", 1, 2),
        ("gradient_accumulation_steps", 1, 2),
        ("amp", None, "bf16"),
    ],
)
def test_compile(name, first, second):
    with pytest.raises(DisagreementError, match=rf"compile\({name}=\.\.\.\): rank 0: .*; rank 1: "):
        compare((trainer(**{name: first}), given()), (trainer(**{name: second}), given()))
    compare((trainer(**{name: first}), given()), (trainer(**{name: first}), given()))


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("batch_size", 4, 5),
        ("epochs", 1, 2),
        ("shuffle", True, False),
        ("class_weight", None, {0: 2.0}),
        ("class_weight", {0: 1.0}, {0: 2.0}),
        ("validation_split", 0.0, 0.5),
        ("validation_data", None, (torch.ones(1, 1), torch.ones(1, 1))),
        ("validation_freq", 1, [2, 3]),
        ("steps_per_epoch", None, 1),
        ("initial_epoch", 0, 1),
        ("callbacks", None, [ts.callbacks.ModelCheckpoint("model.pt")]),
        ("callbacks", [ts.callbacks.EarlyStopping()], []),
    ],
)
def test_fit(name, first, second):
    with pytest.raises(DisagreementError, match=rf"fit\({name}=\.\.\.\): rank 0: .*; rank 1: "):
        compare((trainer(), given(**{name: first})), (trainer(), given(**{name: second})))
    compare((trainer(), given(**{name: first})), (trainer(), given(**{name: first})))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("verbose", 2),
        ("callbacks", [ts.callbacks.LambdaCallback(), ts.callbacks.CSVLogger("log.csv"), ts.callbacks.History()]),
    ],
)
def test_what_only_shows_may_differ(name, value):
    compare((trainer(), given()), (trainer(), given(**{name: value})))


def test_optimizers_are_compared_by_their_settings():
    module = nn.Linear(1, 1)
    described = [describe_argument(torch.optim.SGD(module.parameters(), lr=rate)) for rate in (0.1, 0.1, 0.2)]
    assert described[0] == described[1]
    assert described[1] != described[2]


def test_one_process_agrees_with_itself():
    check_alike(None, trainer(), given())
