"""What a beginner gets wrong: the message names the argument and says what to do, with any number of replicas."""

import logging

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import torchstrategy as ts
from torchstrategy.base import log

generator = torch.Generator().manual_seed(0)
X = torch.randn(12, 4, generator=generator)
Y = torch.arange(12) % 3
VALUES = torch.randn(12, 1, generator=generator)
LOADER = DataLoader(TensorDataset(X, Y), batch_size=4)


@pytest.fixture(params=[None, ["cpu:0", "cpu:1"]], ids=["default", "two"])
def strategy(request):
    return ts.get_strategy() if request.param is None else ts.MirroredStrategy(request.param)


def classifier():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def made(strategy, module=None, **options):
    with strategy.scope():
        model = ts.Model(classifier() if module is None else module)
    model.compile(**{"optimizer": "sgd", "loss": nn.CrossEntropyLoss(), **options})
    return model


def fitting(x=X, y=Y, module=None, compiled=None, **arguments):
    """Return what calls ``fit`` with a mistake."""

    def call(strategy):
        model = made(strategy, None if module is None else module(), **(compiled or {}))
        model.fit(x, y, **{"batch_size": 4, "verbose": 0, **arguments})

    return call


def probabilities(outputs=3):
    return lambda: nn.Sequential(nn.Linear(4, outputs), nn.Sigmoid() if outputs == 1 else nn.Softmax(-1))


def one_output():
    layer = nn.Linear(4, 1)
    nn.init.constant_(layer.bias, -9.0)
    return layer


class Squeezing(nn.Module):
    """Drops the batch's axis, too, where a share is one example."""

    def __init__(self, outputs=1):
        super().__init__()
        self.layer = nn.Linear(4, outputs)

    def forward(self, x):
        return self.layer(x).squeeze()


def predicting(module, num_examples):
    def call(strategy):
        made(strategy, module()).predict(X[:num_examples], batch_size=4, verbose=0)

    return call


def evaluating_by_metric(num_examples):
    def call(strategy):
        model = made(strategy, Squeezing(), loss=None, metrics=["mae"])
        model.evaluate(X[:num_examples], VALUES[:num_examples, 0], batch_size=4, verbose=0)

    return call


def not_compiled(method):
    def call(strategy):
        with strategy.scope():
            getattr(ts.Model(classifier()), method)(X, Y)

    return call


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(4, 1)

    def forward(self, x):
        return {"left": self.left(x), "right": self.right(x)}


class NoForward(ts.Model):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def call(self, x):
        return self.layer(x)


class NoSuper(ts.Model):
    def __init__(self):
        pass


class ReturnsLoss(ts.Model):
    def train_step(self, data):
        x, y = data
        loss = self.compute_loss(x, y, self(x))
        self.minimize(loss)
        return loss


class CutsTheGraph(ts.Model):
    def forward(self, x):
        return self.module(x).detach()


def fitting_model(kind, *args):
    def call(strategy):
        with strategy.scope():
            model = kind(*[make() for make in args])
        model.compile("sgd", nn.CrossEntropyLoss())
        model.fit(X, Y, batch_size=4, verbose=0)

    return call


def in_run(method):
    def call(strategy):
        model = made(strategy)
        strategy.run(lambda: getattr(model, method)(X, Y))

    return call


def predicting_one_example(strategy):
    # Without an axis of the batch, torch's layers take it for one example, and predict for four ones.
    with ts.OneDeviceStrategy("cpu:0").scope():
        model = ts.Model(classifier())
    model.predict(X[0], verbose=0)


def in_the_scope_of_another(strategy):
    model = made(strategy)
    with ts.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model.fit(X, Y, verbose=0)


def compiled_in_the_scope_of_another(strategy):
    with strategy.scope():
        model = ts.Model(classifier())
    with ts.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model.compile("sgd", "mse")


def replacing_a_layer_afterwards(strategy):
    model = made(strategy)
    model.module[2] = nn.Linear(8, 5)
    model.fit(X, Y, verbose=0)


def freezing_everything(strategy):
    model = made(strategy)
    model.requires_grad_(False)
    model.fit(X, Y, verbose=0)


def with_the_optimizer_of_another_model(strategy):
    made(strategy, optimizer=torch.optim.SGD(classifier().parameters(), lr=0.1))


# What is done wrong -> what the message must hold.
MISTAKES = {
    # shapes
    "features": (fitting(torch.randn(12, 5)), ["fit(x=...)", "float32[", "5]", "change x"]),
    "lengths": (fitting(y=Y[:9]), ["fit(x=...) has 12", "fit(y=...) has 9"]),
    "lengths of weights": (fitting(sample_weight=torch.ones(11)), ["fit(sample_weight=...) has 11"]),
    "lengths of inputs": (fitting([X, X[:5]]), ["fit(x=...)[1] has 5"]),
    "lengths of validation": (fitting(validation_data=(X, Y[:3])), ["fit(validation_data=...)[1] has 3"]),
    "no examples": (fitting(X[:0], Y[:0]), ["fit(x=...) has no examples"]),
    "column of class ids": (fitting(y=Y[:, None]), ["CrossEntropyLoss", "y.squeeze(-1)"]),
    "row of values": (
        fitting(y=VALUES[:, 0], module=one_output, compiled={"loss": nn.MSELoss()}),
        ["MSELoss", "y.unsqueeze(-1)"],
    ),
    "row of values for a function": (
        fitting(y=VALUES[:, 0], module=one_output, compiled={"loss": lambda true, pred: (true - pred) ** 2}),
        ["broadcast", "y.unsqueeze(-1)"],
    ),
    "one example squeezed": (
        fitting(X[:9], VALUES[:9, 0], module=Squeezing, compiled={"loss": "mse"}, shuffle=False),
        ["An output of the model is a scalar", "squeeze(-1)"],
    ),
    "one example squeezed for a metric": (
        evaluating_by_metric(9),
        ["An output of the model is a scalar", "squeeze(-1)"],
    ),
    "one prediction squeezed": (predicting(Squeezing, 9), ["predict(x=...)", "returned () for", "squeeze(-1)"]),
    "one row of predictions squeezed": (
        predicting(lambda: Squeezing(3), 9),
        ["predict(x=...)", "returned (3,) for a batch of 1", "squeeze(-1)"],
    ),
    "no class for a label": (fitting(y=Y + 5, batch_size=12), ["class ids from 0 to 2", "in y"]),
    "negative label": (fitting(y=Y - 1, batch_size=12), ["class ids from 0 to 2", "-1 in y"]),
    "class ids for one-hot": (
        fitting(module=probabilities(), compiled={"loss": "categorical_crossentropy"}),
        ["same shape", "sparse_categorical_crossentropy"],
    ),
    "one-hot for class ids": (
        fitting(
            y=F.one_hot(Y, 3).float(), module=probabilities(), compiled={"loss": "sparse_categorical_crossentropy"}
        ),
        ["class ids", "One-hot labels are for CategoricalCrossentropy"],
    ),
    # dtypes
    "float class ids": (fitting(y=Y.float()), ["CrossEntropyLoss", "y.long()"]),
    "strings": (fitting(y=np.array(["a"] * 12)), ["fit(y=...)", "numeric dtype"]),
    "objects": (fitting(y=np.array([None] * 12)), ["fit(y=...)", "numeric dtype"]),
    "bytes of images": (
        fitting(torch.zeros(12, 4, dtype=torch.uint8)),
        ["fit(x=...)", "parameters are float32, and x is uint8", "x.float() / 255"],
    ),
    "integers": (fitting(X.long()), ["fit(x=...)", "x is int64", "x.to(torch.float32)"]),
    "double": (fitting(X.double()), ["fit(x=...)", "x is float64", "x.to(torch.float32)"]),
    "lists": (fitting(X.tolist(), Y.tolist()), ["fit(x=...)", "numpy.array(...)"]),
    "a file's name": (fitting("data.csv"), ["fit(x=...) is a str"]),
    "one example": (predicting_one_example, ["predict(x=...)", "(3,)", "4 examples", "x[None]"]),
    # losses, metrics, optimizers
    "loss's name": (
        fitting(compiled={"loss": "sparse_categorical_cross_entropy"}),
        ["loss='sparse_categorical_cross_entropy'", "'sparse_categorical_crossentropy'"],
    ),
    "metric's name": (fitting(compiled={"metrics": ["acuracy"]}), ["metrics='acuracy'", "'accuracy'"]),
    "optimizer's name": (fitting(compiled={"optimizer": "admm"}), ["optimizer='admm'", "'adam'"]),
    "no loss": (fitting(compiled={"loss": None}), ["pass loss= to compile()"]),
    "logits for crossentropy": (
        fitting(compiled={"loss": "sparse_categorical_crossentropy"}),
        ["takes probabilities", "from_logits=True"],
    ),
    "logits for binary": (
        fitting(y=(VALUES > 0).float(), module=one_output, compiled={"loss": "binary_crossentropy"}),
        ["takes probabilities", "from_logits=True"],
    ),
    "one loss for a batch": (
        fitting(compiled={"loss": lambda true, pred: (pred.mean(1) - true).square().mean()}),
        ["loss=<lambda>", "one loss for each example"],
    ),
    "another model's optimizer": (with_the_optimizer_of_another_model, ["optimizer=", "model.parameters()"]),
    "no such output": (
        fitting(y={"left": Y, "right": VALUES}, module=TwoOutputs, compiled={"loss": {"left": "mse", "write": "mse"}}),
        ["loss=", "Missing: 'right'", "Not an output: 'write'"],
    ),
    # arguments
    "nothing": (fitting(None, None), ["fit(x=...) is missing"]),
    "no labels": (fitting(y=None), ["fit(y=...)", "needs labels"]),
    "no labels to validate with": (fitting(validation_data=X), ["needs labels", "fit(validation_data=...)"]),
    "batch size 0": (fitting(batch_size=0), ["fit(batch_size=...)", "positive"]),
    "fraction of an epoch": (fitting(epochs=1.5), ["fit(epochs=...)", "positive integer"]),
    "no epochs": (fitting(epochs=0), ["fit(epochs=...)", "positive integer"]),
    "all for validation": (fitting(validation_split=1.5), ["fit(validation_split=...)"]),
    "part of a loader": (
        fitting(LOADER, None, batch_size=None, validation_split=0.5),
        ["fit(validation_split=...)", "validation_data"],
    ),
    "loader and labels": (fitting(LOADER, Y, batch_size=None), ["fit(y=...)", "DataLoader", "leave"]),
    "loader and batch size": (fitting(LOADER, None), ["fit(batch_size=...)", "DataLoader"]),
    "function that makes data": (fitting(lambda: iter(LOADER), None, batch_size=None), ["fit(x=...) is a function"]),
    "generator for two epochs": (
        fitting((batch for batch in LOADER), None, batch_size=None, epochs=2),
        ["fit(x=...)", "steps_per_epoch"],
    ),
    "list of class weights": (fitting(class_weight=[1, 2, 3]), ["fit(class_weight=...)", "dict(enumerate(weights))"]),
    "both weights": (
        fitting(class_weight={0: 1.0}, sample_weight=torch.ones(12)),
        ["class_weight", "sample_weight", "one of them"],
    ),
    "class of a callback": (
        fitting(callbacks=[ts.callbacks.TerminateOnNaN]),
        ["callbacks", "class TerminateOnNaN itself"],
    ),
    "function as callback": (fitting(callbacks=[print]), ["callbacks", "LambdaCallback"]),
    # order and place of calls
    "fit before compile": (not_compiled("fit"), ["model.compile(", "before model.fit()"]),
    "evaluate before compile": (not_compiled("evaluate"), ["model.compile(", "before model.evaluate()"]),
    "train_on_batch before compile": (not_compiled("train_on_batch"), ["before model.train_on_batch()"]),
    "fit in run": (in_run("fit"), ["outside of strategy.run"]),
    "evaluate in run": (in_run("evaluate"), ["outside of strategy.run"]),
    "another scope": (in_the_scope_of_another, ["scope of a MirroredStrategy", "leave the scope"]),
    "compile in another scope": (compiled_in_the_scope_of_another, ["compile()", "inside `with strategy.scope():`"]),
    "new layer": (replacing_a_layer_afterwards, ["replaced after compile()", "compile() again"]),
    "all frozen": (freezing_everything, ["frozen", "requires_grad=False"]),
    # subclasses
    "no module": (lambda strategy: ts.Model([nn.Linear(4, 3)]), ["ts.Model(torch.nn.Sequential(...))"]),
    "no forward": (fitting_model(NoForward), ["NoForward defines `call`, as in Keras: name it `forward`."]),
    "no super().__init__()": (fitting_model(NoSuper), ["super().__init__()", "NoSuper"]),
    "a loss returned": (fitting_model(ReturnsLoss, classifier), ["step must return a dict", "self.minimize(loss)"]),
    "detached": (fitting_model(CutsTheGraph, classifier), ["does not depend", "detach()"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_message_names_what_is_wrong_and_what_to_do(name, strategy):
    make_it, expected = MISTAKES[name]
    with pytest.raises((ValueError, TypeError, RuntimeError, NotImplementedError)) as caught:
        make_it(strategy)
    message = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    for part in expected:
        assert part in message


def test_a_loss_that_becomes_nan_is_said_once(strategy, caplog, monkeypatch):
    monkeypatch.setattr(log.logger, "propagate", True)
    x = X.clone()
    x[3, 2] = float("nan")
    with caplog.at_level(logging.WARNING):
        history = made(strategy).fit(x, Y, batch_size=4, epochs=3, verbose=0)
    assert np.isnan(history.history["loss"]).all()
    (record,) = [record for record in caplog.records if "nan" in record.getMessage()]
    for part in ("loss of epoch 1 is nan", "learning rate", "x and y", "TerminateOnNaN"):
        assert part in record.getMessage()


def test_a_mistake_leaves_the_model_usable(strategy):
    model = made(strategy)
    with pytest.raises(ValueError, match="has 12"):
        model.fit(X, Y[:5], verbose=0)
    with pytest.raises(ValueError, match="forward was given"):
        model.fit(torch.randn(12, 5), Y, verbose=0)
    assert len(model.fit(X, Y, epochs=2, verbose=0).history["loss"]) == 2
