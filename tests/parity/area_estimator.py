"""tf.estimator's measured cases that run in one process: a function for each family of ids."""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import torchstrategy as ts
from tests.parity.estimator import (
    Recorder,
    batches,
    checkpoints,
    est,
    line_model_fn,
    plain,
    seed_input_fn,
    variables,
)

Case = dict[str, Any]
PARAMS = {"lr": 0.1}
_families: list[tuple[re.Pattern[str], Callable[..., Any]]] = []


def family(pattern: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the function for the cases whose area and id match; groups are its last arguments."""

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        _families.append((re.compile(pattern), fn))
        return fn

    return register


def run_case(case: Case, folder: Path, monkeypatch: Any) -> Any:
    """Return the result of a case in the form of the figures."""
    fn, groups = family_of(case)
    given = {"case": case, "folder": str(folder / "model"), "monkeypatch": monkeypatch}
    return plain(fn(*groups, **{name: given[name] for name in given if name in inspect.signature(fn).parameters}))


def family_of(case: Case) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    name = f"{case['area']}/{case['id']}"
    found = [(fn, match.groups()) for pattern, fn in _families if (match := pattern.fullmatch(name))]
    if len(found) != 1:
        raise LookupError(f"{name} has {len(found)} families")
    return found[0]


def _mirrored() -> Any:
    return ts.MirroredStrategy(["cpu:0", "cpu:1"])


def _estimator(folder: str, model_fn: Any = None, **config: Any) -> Any:
    return est.Estimator(model_fn or line_model_fn(), folder, est.RunConfig(**config))


def _linear(folder: str, optimizer: Any = "SGD", config: Any = None, **kwargs: Any) -> Any:
    columns = [ts.feature_column.numeric_column("feats")]
    optimizer = {} if optimizer is None else {"optimizer": optimizer}
    return est.LinearRegressor(columns, model_dir=folder, config=config, **optimizer, **kwargs)


def _rows(x: Any, y: Any) -> Callable[[], Any]:
    data = ({"feats": torch.tensor(x)}, torch.tensor(y))
    return lambda: ts.data.Dataset.from_tensor_slices(data).repeat().batch(len(x))


def _report(estimator: Any, input_fn: Any, eval_fn: Any, steps: int = 10, predict: bool = True) -> dict[str, Any]:
    recorder = Recorder()
    estimator.train(input_fn, steps=steps, hooks=[recorder])
    report = {"losses": recorder.losses, "avg": [], "evaluate": estimator.evaluate(eval_fn, steps=1)}
    report["vars"] = variables(estimator)
    if predict:
        two = ts.data.Dataset.from_tensor_slices({"feats": torch.tensor([1.0, 2.0])}).batch(2)
        report["predict"] = list(estimator.predict(lambda: two))
    return report


# ---- EstimatorSpec, RunConfig, TrainSpec and EvalSpec


@family(r"EstimatorSpec/spec\.modes")
def modes() -> Any:
    return {name: getattr(est.ModeKeys, name) for name in ("TRAIN", "EVAL", "PREDICT")}


@family(r"EstimatorSpec/spec\.(?!modes).*")
def spec(case: Case) -> Any:
    """What TF's figures make by a lambda is a function here, too; an optimizer for ``train_op``."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    made = {"loss": torch.nn.functional.mse_loss, "train_op": optimizer, "predictions": lambda outputs: outputs}
    arguments = {name: made[name] if value == "<lambda>" else value for name, value in case["inputs"].items()}
    return [name for name, value in est.EstimatorSpec(**arguments)._asdict().items() if value]


@family(r"RunConfig/rc\.defaults")
def config_defaults(case: Case) -> Any:
    config = est.RunConfig()
    return {name: getattr(config, name) for name in case["expected"]["output"]}


@family(r"RunConfig/rc\.replace_not_allowed")
def config_replace() -> Any:
    return est.RunConfig().replace(task_type="worker")


@family(r"RunConfig/rc\.(?!env|defaults|replace).*")
def config_of_arguments(case: Case) -> Any:
    config = est.RunConfig(**case["inputs"])
    return [config.save_checkpoints_steps, config.save_checkpoints_secs, config.keep_checkpoint_max, config.model_dir]


@family(r"RunConfig/rc\.env\..*")
def config_of_environment(case: Case, monkeypatch: Any) -> Any:
    tf_config = case["inputs"]["TF_CONFIG"]
    monkeypatch.setenv("TF_CONFIG", tf_config if isinstance(tf_config, str) else json.dumps(tf_config))
    config = est.RunConfig()
    values = {name: getattr(config, name) for name in case["inputs"]["read"].strip("[]").split(",")}
    return [value.as_dict() if name == "cluster_spec" else value for name, value in values.items()]


@family(r"TrainEvalSpec/ts\.signature")
def spec_signatures() -> Any:
    def text(cls: Any) -> str:
        parameters = inspect.signature(cls.__new__).parameters.values()
        return f"({', '.join(str(parameter.replace(annotation=parameter.empty)) for parameter in parameters)})"

    return [text(est.TrainSpec), text(est.EvalSpec)]


@family(r"TrainEvalSpec/ts\.defaults")
def spec_defaults(case: Case) -> Any:
    made = est.TrainSpec(seed_input_fn)
    return {name: repr(getattr(made, name)) for name in case["expected"]["output"]}


@family(r"TrainEvalSpec/tes\.(.*)")
def spec_arguments(name: str) -> Any:
    made = {
        "ts_max0": lambda: est.TrainSpec(seed_input_fn, max_steps=0),
        "es_none": lambda: est.EvalSpec(seed_input_fn, steps=None).steps,
        "es_delay": lambda: est.EvalSpec(seed_input_fn, start_delay_secs=-1),
        "es_exporter": lambda: est.EvalSpec(seed_input_fn, exporters=[1]),
    }
    return made[name]()


# ---- train, evaluate, predict


@family(r"train/seed\.custom_linear_sgd02")
def seed_with_own_model(folder: str) -> Any:
    recorder = Recorder()
    estimator = _estimator(folder)
    estimator.train(seed_input_fn, steps=10, hooks=[recorder])
    return [variables(estimator, ("b", "global_step", "w")), recorder.losses]


@family(r"train/(steps_and_max|steps0)")
def wrong_steps(name: str, folder: str) -> Any:
    steps = {"steps_and_max": {"steps": 1, "max_steps": 1}, "steps0": {"steps": 0}}
    return _estimator(folder).train(seed_input_fn, **steps[name])


@family(r"train/exhaust")
def exhaust(folder: str) -> Any:
    estimator = _estimator(folder)
    estimator.train(lambda: batches(6), steps=10)
    return estimator.get_variable_value("global_step")


@family(r"train/train_returns_self")
def returns_self(folder: str) -> Any:
    estimator = _estimator(folder)
    return estimator.train(seed_input_fn, steps=1) is estimator


@family(r"train/resume")
def resume(folder: str) -> Any:
    _estimator(folder).train(seed_input_fn, steps=3)
    estimator = _estimator(folder).train(seed_input_fn, steps=2)
    step = estimator.get_variable_value("global_step")
    return [step, Path(estimator.latest_checkpoint()).name, checkpoints(folder)]


@family(r"train/ckpt_steps2")
def saves_every_two_steps(folder: str) -> Any:
    _estimator(folder, save_checkpoints_steps=2).train(seed_input_fn, steps=5)
    return checkpoints(folder)


@family(r"train/hooks_order")
def hooks_order(folder: str) -> Any:
    recorder = Recorder()
    _estimator(folder).train(seed_input_fn, steps=3, hooks=[recorder])
    return [recorder.fetched, recorder.events]


@family(r"train/evaluate_dict")
def evaluate_dict(folder: str) -> Any:
    return _estimator(folder).train(seed_input_fn, steps=4).evaluate(seed_input_fn, steps=1)


@family(r"train/evaluate_name_dir")
def evaluate_name(folder: str) -> Any:
    estimator = _estimator(folder).train(seed_input_fn, steps=1)
    found = estimator.evaluate(seed_input_fn, steps=1, name="foo")
    return [sorted(found), sorted(path.name for path in Path(folder).iterdir() if path.is_dir())]


@family(r"train/predict_(generator|batches|badkeys)")
def predict(name: str, folder: str) -> Any:
    data = torch.tensor([1.0, 2.0])
    estimator = _estimator(folder).train(seed_input_fn, steps=5 if name == "generator" else 1)
    options = {"generator": {}, "batches": {"yield_single_examples": False}, "badkeys": {"predict_keys": ["zz"]}}
    generator = estimator.predict(lambda: [data], **options[name])
    found = list(generator)
    return [type(generator).__name__, found] if name == "generator" else found


@family(r"train/dir_conflict")
def directories_differ(folder: str) -> Any:
    return est.Estimator(line_model_fn(), folder, est.RunConfig(model_dir=f"{folder}_other"))


@family(r"train/params_copied")
def params_copied(folder: str) -> Any:
    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        return line_model_fn()(features, labels, mode)

    params = dict(PARAMS)
    estimator = est.Estimator(model_fn, folder, params=params)
    return [estimator.params == params, estimator.params is params]


# ---- input_fn and model_fn


@family(r"input_fn/input_fn\.sig\((.*)\)")
def input_fn_signature(signature: str, folder: str) -> Any:
    seen: dict[str, Any] = {}

    def model_fn(features: Any, labels: Any, mode: str, params: Any) -> Any:
        return line_model_fn()(features, labels, mode)

    names: dict[str, Any] = {"seen": seen, "data": seed_input_fn}
    exec(f"def input_fn({signature}):\n    seen.update(locals())\n    return data()", names)
    est.Estimator(model_fn, folder, params=PARAMS).train(names["input_fn"], steps=1)
    return {name: repr("RunConfig" if isinstance(value, est.RunConfig) else value) for name, value in seen.items()}


@family(r"input_fn/input_fn\.ret\.(.*)")
def input_fn_returns(name: str, folder: str) -> Any:
    one, three = np.ones(2, np.float32), torch.ones(2)
    made = {
        "tuple3_ds": lambda: ts.data.Dataset.from_tensors((three, three, three)).repeat(),
        "numpy": lambda: (one, one),
    }
    estimator = _estimator(folder).train(made[name], steps=2)
    return estimator.get_variable_value("global_step")


@family(r"model_fn/model_fn\.sig\((.*)\)")
def model_fn_signature(signature: str, case: Case, folder: str) -> Any:
    def made(features: Any = None, labels: Any = None, mode: str = "train", **_: Any) -> Any:
        return line_model_fn()(features, labels, mode)

    names: dict[str, Any] = {"made": made}
    exec(f"def model_fn({signature}):\n    return made(**locals())", names)
    estimator = est.Estimator(names["model_fn"], folder, params=case["inputs"]["params"])
    return estimator.train(seed_input_fn, steps=1).get_variable_value("global_step")


@family(r"model_fn/model_fn\.(params_without_arg|wrong_return)")
def wrong_model_fn(name: str, folder: str) -> Any:
    model_fn = line_model_fn() if name == "params_without_arg" else lambda features, labels, mode: (features, labels)
    params = PARAMS if name == "params_without_arg" else None
    return est.Estimator(model_fn, folder, params=params).train(seed_input_fn, steps=1)


# ---- canned estimators


@family(r"canned/LinearRegressor\.(default_opt|var_data)")
def linear_regressor(name: str, folder: str) -> Any:
    if name == "default_opt":
        return _report(_linear(folder, None), seed_input_fn, seed_input_fn)
    data = _rows([0.0, 1.0, 2.0, 3.0], [1.0, 3.0, 5.0, 7.0])
    return _report(_linear(folder), data, data)


@family(r"canned/LinearClassifier\.3class")
def linear_classifier(folder: str) -> Any:
    columns = [ts.feature_column.numeric_column("feats")]
    estimator = est.LinearClassifier(columns, folder, n_classes=3, optimizer="SGD")
    data = _rows([-1.0, 0.0, 2.0], [0, 1, 2])
    return _report(estimator, data, data, steps=3)


@family(r"canned/DNNClassifier\.SGD")
def dnn_classifier(folder: str) -> Any:
    columns = [ts.feature_column.numeric_column("feats")]
    estimator = est.DNNClassifier([3], columns, folder, optimizer="SGD")
    data = _rows([-1.0, 0.0, 2.0], [0, 1, 1])
    report = _report(estimator, data, data)
    report["losses"], report["avg"] = len(report["losses"]), None
    report["evaluate"] = sorted(report["evaluate"])
    report["vars"] = {name: list(np.shape(value)) for name, value in report["vars"].items()}
    report["predict"] = [sorted(prediction) for prediction in report["predict"]]
    return report


@family(r"canned/DNNClassifier\.bad_n_classes")
def one_class(folder: str) -> Any:
    return est.DNNClassifier([3], [ts.feature_column.numeric_column("feats")], folder, n_classes=1)


@family(r"canned/Linear\.missing_feature")
def missing_feature(folder: str) -> Any:
    return _linear(folder).train(lambda: [({"other": torch.ones(2)}, torch.ones(2))], steps=1)


# ---- strategies, train_and_evaluate, hooks


@family(r"distribute/mirrored\.seed\.train_eval")
def mirrored_seed(folder: str) -> Any:
    config = est.RunConfig(train_distribute=_mirrored(), eval_distribute=_mirrored())
    return _report(_linear(folder, config=config), seed_input_fn, seed_input_fn, predict=False)


@family(r"distribute/batch_semantics\.(mean|sum)\.(mirrored2|single)")
def batch_semantics(reduction: str, where: str, folder: str) -> Any:
    recorder = Recorder()
    strategy = _mirrored() if where == "mirrored2" else None
    estimator = _estimator(folder, line_model_fn(0.01, reduction), train_distribute=strategy)
    estimator.train(batches, steps=2, hooks=[recorder])
    return [recorder.losses, variables(estimator, ("b", "global_step", "w"))]


@family(r"distribute/mirrored\.(exhaust_odd3?)")
def mirrored_exhaust(name: str, folder: str) -> Any:
    recorder = Recorder()
    estimator = _estimator(folder, line_model_fn(0.01), train_distribute=_mirrored())
    estimator.train(functools.partial(batches, 8 if name == "exhaust_odd" else 6), steps=10, hooks=[recorder])
    step = estimator.get_variable_value("global_step")
    return step if name == "exhaust_odd" else [step, recorder.losses]


@family(r"distribute/(single|mirrored)\.eval")
def evaluate_untrained(where: str, folder: str) -> Any:
    strategy = None if where == "single" else _mirrored()
    return _estimator(folder, eval_distribute=strategy).evaluate(batches)


@family(r"train_and_evaluate/tae\.(local|second_call_at_max)")
def local_train_and_evaluate(name: str, folder: str) -> Any:
    estimator = _estimator(folder, save_checkpoints_steps=5)
    evaluated: list[int] = []

    class Evaluations(est.SessionRunHook):
        def end(self, session: Any) -> None:
            evaluated.append(session.global_step)

    train = est.TrainSpec(seed_input_fn, max_steps=10)
    evaluation = est.EvalSpec(seed_input_fn, steps=1, start_delay_secs=0, throttle_secs=0, hooks=[Evaluations()])
    result = est.train_and_evaluate(estimator, train, evaluation)
    if name == "second_call_at_max":
        return repr(est.train_and_evaluate(estimator, train, evaluation))
    return [type(result).__name__, *result, checkpoints(folder), evaluated]


@family(r"train_and_evaluate/tae\.(badest|evaluator_id1|cluster_only_workers_no_chief|local_task_index1)")
def wrong_train_and_evaluate(name: str, folder: str, monkeypatch: Any) -> Any:
    two = ["h1:1", "h2:1"]
    tf_configs = {
        "evaluator_id1": {"cluster": {"chief": ["h0:1"]}, "task": {"type": "evaluator", "index": 1}},
        "cluster_only_workers_no_chief": {"cluster": {"worker": two}, "task": {"type": "worker", "index": 0}},
        "local_task_index1": {"task": {"type": "worker", "index": 1}},
    }
    if name in tf_configs:
        monkeypatch.setenv("TF_CONFIG", json.dumps(tf_configs[name]))
    estimator = 5 if name == "badest" else _estimator(folder)
    return est.train_and_evaluate(estimator, est.TrainSpec(seed_input_fn, max_steps=1), est.EvalSpec(seed_input_fn))


@family(r"train_and_evaluate/export_signatures")
def export_signatures(folder: str) -> Any:
    estimator = _linear(folder).train(seed_input_fn, steps=1)
    receiver = est.export.build_raw_serving_input_receiver_fn({"feats": torch.ones(1, 1)})
    return sorted(est.export.load(estimator.export_saved_model(f"{folder}_export", receiver)).signatures)


class _Stop(est.SessionRunHook):
    def before_run(self, run_context: Any) -> Any:
        return est.SessionRunArgs("global_step")

    def after_run(self, run_context: Any, run_values: Any) -> None:
        if run_values.results >= 2:
            run_context.request_stop()


class _Fail(est.SessionRunHook):
    def after_run(self, run_context: Any, run_values: Any) -> None:
        raise RuntimeError("of the hook")


@family(r"hooks/hooks\.request_stop")
def request_stop(folder: str) -> Any:
    return _estimator(folder).train(seed_input_fn, steps=10, hooks=[_Stop()]).get_variable_value("global_step")


@family(r"hooks/hooks\.stop_at_step(_none)?")
def stop_at_step(none: str | None, folder: str) -> Any:
    if none:
        return est.StopAtStepHook()
    estimator, found = _estimator(folder), []
    for arguments in ({"num_steps": 3}, {"num_steps": 3}, {"last_step": 8}):
        estimator.train(seed_input_fn, hooks=[est.StopAtStepHook(**arguments)])
        found.append(estimator.get_variable_value("global_step"))
    return found


@family(r"hooks/hooks\.nan_default")
def nan_loss(folder: str) -> Any:
    return _estimator(folder, line_model_fn(1e20)).train(seed_input_fn, steps=10)


@family(r"hooks/hooks\.exception_propagates")
def hook_fails(folder: str) -> Any:
    try:
        _estimator(folder).train(seed_input_fn, steps=3, hooks=[_Fail()])
    except RuntimeError as error:
        return [type(error).__name__, checkpoints(folder)]
    return None


def cluster_of(case: Case) -> str:
    """Return which of the figures' clusters a case of area ``cluster`` was measured in."""
    return str(case["id"].split(".")[2])


def names_of(cases: list[Case]) -> dict[str, list[Case]]:
    ordered = sorted(cases, key=cluster_of)
    return {name: list(group) for name, group in itertools.groupby(ordered, cluster_of)}
