"""Area 8: Keras' fit, evaluate and predict on a linear model."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import numpy as np
import torch
from torch import nn

import torchstrategy as ts
from tests.parity import keras_fit
from tests.parity.driver import Case, family, normalise
from tests.parity.keras_fit import Program, Reference

fit_family = functools.partial(family, 8)

X, Y, SAMPLE_WEIGHT = (values.astype(np.float32) for values in (keras_fit.X, keras_fit.Y, keras_fit.SAMPLE_WEIGHT))
LABELS = keras_fit.LABELS

# What a word in a case's id says of its program. "fit_class_b3" is a classification in batches of 3.
WORDS: dict[str, dict[str, Any]] = {
    "np": {},
    "ds": {"reads": "dataset"},
    "dist": {"reads": "distributed"},
    "fn": {"reads": "from_function"},
    "adam": {"optimizer": "adam"},
    "l2": {"l2": 0.1},
    "class": {"is_class": True},
    "sw": {"has_sample_weight": True},
    "class_weight": {"is_class": True, "has_class_weight": True},
    "class_sw_cw": {"is_class": True, "has_class_weight": True, "has_sample_weight": True},
    "val_split": {"validation": "split"},
    "val_data": {"validation": "data"},
    "val_data_sw": {"validation": "data_sw"},
    "steps": {"reads": "dataset", "steps_per_epoch": 2},
    "spe": {"steps_per_execution": 2},
    "no_bs": {"batch_size": None},
    "loss_sum": {"reduction": "sum"},
    "loss_none": {"reduction": "none"},
    "loss_mws": {"reduction": "mean_with_sample_weight", "has_sample_weight": True},
}


def program_of(case: Case) -> Program:
    """Return the program of a case, from the words in its id and the batch size in its text."""
    words = case.name.removesuffix(".patched").split(".", 1)[1].partition("_")[2]
    settings: dict[str, Any] = {}
    if found := re.search(r"batch(?:_size=| )(\d+)", case.inputs):
        settings["batch_size"] = int(found[1])
    while words:
        known = max((w for w in WORDS if re.match(rf"{w}(_|$)", words)), key=len, default="")
        size = re.match(r"b(\d+)(_|$)", words)
        if not known and not size:
            raise LookupError(f"{case.id}: nothing is known about {words!r}")
        settings.update(WORDS[known] if known else {"batch_size": int(size[1])})
        words = words[len(known) if known else size.end(1) :].removeprefix("_")
    return Program(**settings)


def one_replica(case: Case, cases: dict[str, Case]) -> Any:
    """Return what a case must give: what Keras measured without a strategy, else what the reference computes."""
    name = case.name.removesuffix(".patched")
    if "raises" in case.expected and case.expected["raises"] != "InvalidArgumentError":
        return case.expected
    for host in ("none", "n1"):
        if f"{name}.{host}" in cases:
            return cases[f"{name}.{host}"].expected
    reference = Reference(program_of(case))
    return normalise(reference.evaluate() if name.startswith("8.evaluate") else reference.fit())


def make_model(strategy: Any, program: Program) -> Any:
    with strategy.scope():
        layer = nn.Linear(3, 3 if program.is_class else 1)
        model = ts.Model(nn.Sequential(layer, nn.Softmax(-1)) if program.is_class else nn.Sequential(layer))
        start = Reference(program)
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(start.kernel.T))
            layer.bias.copy_(torch.from_numpy(start.bias))
        if program.l2:
            ts.regularize(layer, "weight", ts.regularizers.L2(program.l2))
    return model


def compile_model(model: Any, program: Program) -> Any:
    if program.is_class:
        loss, metric = "sparse_categorical_crossentropy", "accuracy"
    else:
        loss, metric = "mse", "mae"
        if program.reduction:
            loss = ts.losses.MeanSquaredError(reduction=program.reduction)
    optimizer = torch.optim.Adam if program.optimizer == "adam" else torch.optim.SGD
    model.compile(
        optimizer=functools.partial(optimizer, lr=program.rate),
        loss=loss,
        metrics=[metric],
        weighted_metrics=[metric] if program.has_sample_weight else None,
        steps_per_execution=program.steps_per_execution,
    )
    return model


def data_of(strategy: Any, program: Program) -> dict[str, Any]:
    """Return the arguments of ``fit`` and ``evaluate`` that are about data."""
    parts = (X, LABELS if program.is_class else Y)
    sample_weight = SAMPLE_WEIGHT if program.has_sample_weight else None
    if program.reads == "arrays":
        return {"x": parts[0], "y": parts[1], "sample_weight": sample_weight, "batch_size": program.batch_size}
    examples = ts.data.Dataset.from_tensor_slices(parts if sample_weight is None else (*parts, sample_weight))
    if program.reads == "from_function":  # a worker's batches go to its replicas in turn
        size = program.batch_size
        return {"x": ts.utils.DatasetCreator(lambda own: examples.batch(own.get_per_replica_batch_size(size)))}
    dataset = examples.batch(program.batch_size)
    if program.steps_per_epoch:
        dataset = dataset.repeat()
    if program.reads == "distributed":
        dataset = strategy.experimental_distribute_dataset(dataset)
    return {"x": dataset}


def run_program(strategy: Any, program: Program) -> dict[str, Any]:
    return train(built_and_compiled(strategy, program), strategy, program)


def train(model: Any, strategy: Any, program: Program) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if program.validation == "split":
        settings["validation_split"] = 0.3
    elif program.validation:
        weights = (SAMPLE_WEIGHT[:3],) if program.validation == "data_sw" else ()
        settings["validation_data"] = (X[:3], Y[:3], *weights)
    if program.has_class_weight:
        settings["class_weight"] = keras_fit.CLASS_WEIGHT
    history = model.fit(
        **data_of(strategy, program),
        **settings,
        epochs=program.epochs,
        steps_per_epoch=program.steps_per_epoch,
        shuffle=False,
        verbose=0,
    )
    return {"history": dict(sorted(history.history.items())), "weights": weights_of(model)}


def weights_of(model: Any) -> list[Any]:
    layer = model.module[0]
    return [layer.weight.detach().T.tolist(), layer.bias.tolist()]


def built_and_compiled(strategy: Any, program: Program) -> Any:
    model = make_model(strategy, program)
    with strategy.scope():
        return compile_model(model, program)


@fit_family(r"fit_(?!in_scope).*")
def fit(s, case):
    return run_program(s, program_of(case))


@fit_family(r"evaluate(?:_.*)?(?:\.patched)?")
def evaluate(s, case):
    program = program_of(case)
    result = built_and_compiled(s, program).evaluate(**data_of(s, program), return_dict=True, verbose=0)
    return dict(sorted(result.items()))


@fit_family(r"predict_(np|ds|1|b\d+)(?:_b\d+)?(?:\.patched)?")
def predict(s, case):
    program = Program() if case.groups[0] == "1" else program_of(case)
    model = built_and_compiled(s, program)
    if case.groups[0] == "1":
        return model.predict(X[:1], verbose=0)
    data = data_of(s, dataclasses.replace(program, has_sample_weight=False))
    return model.predict(data["x"], batch_size=data.get("batch_size"), verbose=0)


@fit_family(r"(train|test)_on_batch")
def on_batch(s, case):
    model = built_and_compiled(s, Program())
    result = getattr(model, f"{case.groups[0]}_on_batch")(X[:4], Y[:4])
    return result, weights_of(model)


@fit_family()
def compile_outside(s, case):
    return train(compile_model(make_model(s, Program()), Program()), s, Program())


@fit_family()
def built_outside(s, case):
    model = make_model(ts.get_strategy(), Program())
    with s.scope():
        compile_model(model, Program())


@fit_family()
def fit_in_scope(s, case):
    with s.scope():
        return train(compile_model(make_model(s, Program()), Program()), s, Program())
