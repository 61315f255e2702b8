"""What ``compile(optimizer=...)`` takes, and that names have Keras' hyper-parameters."""

import functools
import re

import pytest
import torch
from torch import nn

import torchstrategy as ts
from torchstrategy.optimizers.by_name import get, make_optimizer


def parameters():
    return [nn.Parameter(torch.tensor([1.0, -2.0]))]


@pytest.mark.parametrize(
    ("name", "cls", "expected"),
    [
        ("sgd", torch.optim.SGD, {"lr": 0.01, "momentum": 0, "weight_decay": 0, "nesterov": False}),
        ("adam", torch.optim.Adam, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-7, "amsgrad": False}),
        ("AdamW", torch.optim.AdamW, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-7, "weight_decay": 4e-3}),
        ("RMSprop", torch.optim.RMSprop, {"lr": 1e-3, "alpha": 0.9, "eps": 1e-7, "momentum": 0, "centered": False}),
        ("adagrad", torch.optim.Adagrad, {"lr": 1e-3, "eps": 1e-7, "initial_accumulator_value": 0.1, "lr_decay": 0}),
        ("Adadelta", torch.optim.Adadelta, {"lr": 1e-3, "rho": 0.95, "eps": 1e-7}),
        ("adamax", torch.optim.Adamax, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-7}),
        ("nadam", torch.optim.NAdam, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-7}),
        ("Adafactor", torch.optim.Adafactor, {"lr": 1e-3, "beta2_decay": -0.8, "d": 1.0}),
    ],
)
def test_names_are_keras(name, cls, expected):
    optimizer = make_optimizer(name, parameters())
    assert type(optimizer) is cls
    assert {key: optimizer.defaults[key] for key in expected} == expected


#: Three steps of Keras 3.15 from [1, -2] with the gradients [0.5, -1], [0.25, 1] and [1, 0], each times the step.
KERAS = {
    "sgd": [0.9600000381469727, -2.009999990463257],
    "adam": [0.9972010254859924, -1.9996490478515625],
    "adamw": [0.9971890449523926, -1.9996250867843628],
    "rmsprop": [0.9914538264274597, -1.99969482421875],
    "adagrad": [0.9975411295890808, -1.9999321699142456],
    "adadelta": [0.9999947547912598, -2.000000476837158],
    "adamax": [0.9975258708000183, -1.9994722604751587],
    "nadam": [0.9970970749855042, -1.9998611211776733],
    "adafactor": [0.9947622418403625, -2.0001418590545654],
}


@pytest.mark.parametrize("name", KERAS)
def test_steps_are_keras(name):
    (parameter,) = parameters()
    optimizer = make_optimizer(name, [parameter])
    for step, gradient in enumerate([[0.5, -1.0], [0.25, 1.0], [1.0, 0.0]], 1):
        parameter.grad = torch.tensor(gradient) * step
        optimizer.step()
    torch.testing.assert_close(parameter.detach().double(), torch.tensor(KERAS[name]).double(), rtol=0, atol=2e-7)


@pytest.mark.parametrize(
    "spec",
    [
        torch.optim.SGD,
        functools.partial(torch.optim.SGD, lr=0.25),
        lambda params: torch.optim.SGD(params, lr=0.25),
        get("sgd", lr=0.25),
        get(torch.optim.SGD, lr=0.25),
    ],
)
def test_classes_and_functions(spec):
    own = parameters()
    optimizer = make_optimizer(spec, iter(own))
    assert type(optimizer) is torch.optim.SGD
    assert optimizer.param_groups[0]["params"][0] is own[0]
    assert optimizer.defaults["lr"] == (0.25 if spec is not torch.optim.SGD else torch.optim.SGD(own).defaults["lr"])


def test_an_optimizer_is_taken_as_it_is():
    own = parameters()
    optimizer = torch.optim.Adam(own)
    assert make_optimizer(optimizer, own + parameters()) is optimizer


def test_one_made_in_the_scope_belongs_to_the_strategy():
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        layer = nn.Linear(1, 1, bias=False)
        optimizer = make_optimizer("sgd", layer.parameters())
    before = layer.weight.detach().clone()

    def step():
        layer(torch.ones(1, 1)).sum().backward()
        optimizer.step()

    strategy.run(step)
    torch.testing.assert_close(layer.weight.detach(), before - 0.02)


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ("adamm", ValueError, "optimizer='adamm' is not known. Did you mean .*'adam'"),
        ("lion", ValueError, "optimizer='lion' is not known.*optimizer=functools.partial"),
        (None, TypeError, "optimizer= must be a name, a torch optimizer.*Received: None"),
        (0.1, TypeError, "Received: 0.1 of type float"),
        (lambda params: list(params), TypeError, "must return a torch.optim.Optimizer when"),
        (torch.optim.Adam(parameters()), ValueError, "is an Adam that trains none of the model's parameters"),
        (torch.optim.SGD(parameters()), ValueError, "is a SGD that trains none"),
    ],
)
def test_what_is_refused(spec, error, message):
    with pytest.raises(error, match=message):
        make_optimizer(spec, parameters())


def test_a_model_without_parameters():
    with pytest.raises(ValueError, match="optimizer='sgd' has nothing to train: the model has no parameters"):
        make_optimizer("sgd", [])


def test_get_takes_no_optimizer():
    with pytest.raises(TypeError, match="get takes the name of an optimizer"):
        get(torch.optim.Adam(parameters()))


@pytest.mark.parametrize(
    ("name", "argument", "message"),
    [
        ("adam", "learning_rate", "torch's Adam ('adam') has no argument 'learning_rate'. It is `lr`."),
        ("sgd", "clipnorm", "no argument 'clipnorm'. To clip, override `clip_gradients`"),
        ("sgd", "speed", "torch's SGD ('sgd') has no argument 'speed'. It has lr, momentum,"),
    ],
)
def test_arguments_of_keras(name, argument, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        get(name, **{argument: 0.1})
