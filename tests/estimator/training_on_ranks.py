"""Trainings and evaluations of several processes that step together."""

from unittest import mock

import torch

import torchstrategy as ts
from tests.estimator.hook_programs import Line, Recorder, batches, make_estimator
from tests.programs import cpu_devices
from torchstrategy.estimator import training


def _rank(strategy):
    return 0 if strategy.workers is None else strategy.workers.rank


def train(folder, num_local, lengths=None):
    """Train on the batches in the order in which the replicas of one process would take them.

    Args:
        folder: the model_dir.
        num_local: replicas in each process.
        lengths: how many batches each process has; ``None`` divides 12.
    """
    strategy = ts.MirroredStrategy(cpu_devices(num_local))
    contexts = []

    def input_fn(input_context):
        contexts.append([input_context.num_input_pipelines, input_context.input_pipeline_id])
        number = strategy.num_replicas_in_sync
        own = set(strategy.placement.local_replica_ids)
        found = [batch for i, batch in enumerate(batches(number=12)) if i % number in own]
        return found if lengths is None else found[: lengths[_rank(strategy)]]

    recorder = Recorder("loss")
    estimator = make_estimator(folder, lr=0.001, train_distribute=strategy, save_checkpoints_steps=2)
    estimator.train(input_fn, hooks=[recorder], steps=2)
    make_estimator(folder, lr=0.001, train_distribute=strategy).train(input_fn, hooks=[recorder], max_steps=3)
    values = [float(estimator.get_variable_value(name)) for name in ("w", "b", "global_step")]
    return recorder.results, values, contexts


def evaluate(folder, num_local, lengths):
    """Evaluate initial values where processes have different numbers of batches; return what each process gets."""
    strategy = ts.MirroredStrategy(cpu_devices(num_local))

    def model_fn(features, labels, mode):
        return ts.estimator.EstimatorSpec(
            mode,
            module=Line(),
            loss=torch.nn.functional.mse_loss,
            eval_metric_ops={"mae": ts.metrics.MeanAbsoluteError()},
        )

    def input_fn(input_context):
        start = sum(lengths[: input_context.input_pipeline_id])
        return batches(start=2 * start, number=lengths[input_context.input_pipeline_id])

    config = ts.estimator.RunConfig(eval_distribute=strategy)
    return ts.estimator.Estimator(model_fn, str(folder), config).evaluate(input_fn)


def fail_on_one_rank(folder, where):
    """Train while one process fails; return what each of them raises."""
    strategy = ts.MirroredStrategy()
    is_bad = _rank(strategy) == 1

    def model_fn(features, labels, mode):
        if is_bad and where == "model_fn":
            raise KeyError("the model")
        module = Line()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        return ts.estimator.EstimatorSpec(mode, module=module, loss=torch.nn.functional.mse_loss, train_op=optimizer)

    class Fail(ts.estimator.SessionRunHook):
        def after_run(self, run_context, run_values):
            if is_bad and where == "hook":
                raise KeyError("the hook")

    config = ts.estimator.RunConfig(train_distribute=strategy)
    try:
        ts.estimator.Estimator(model_fn, str(folder), config).train(lambda: batches(), hooks=[Fail()])
    except (KeyError, RuntimeError) as error:
        return type(error).__name__
    return None


def diverge_and_train_again(folder):
    """Fail on all ranks at the same step, and train another model then."""
    strategy = ts.MirroredStrategy()
    try:
        make_estimator(folder / "first", lr=float("nan"), train_distribute=strategy).train(lambda: batches())
    except ts.estimator.NanLossDuringTrainingError as error:
        first = type(error).__name__
    second = make_estimator(folder / "second", train_distribute=strategy).train(lambda: batches(), steps=2)
    return first, int(second.get_variable_value("global_step"))


def skip(folder):
    """Train to a step and, where only the chief sees the checkpoint of it, to the same again."""
    strategy = ts.MirroredStrategy()
    make_estimator(folder, train_distribute=strategy).train(lambda: batches(), max_steps=2)
    calls = []

    def input_fn():
        calls.append(1)
        return batches()

    with mock.patch.object(training, "_paths") as paths:
        paths.return_value = [str(folder / "model.ckpt-2")] if _rank(strategy) == 0 else []
        make_estimator(folder, train_distribute=strategy).train(input_fn, max_steps=2)
    return len(calls)


def cancel(folder):
    """Train with a loss that is infinite on both ranks, with opposite signs; return what each raises."""
    strategy = ts.MirroredStrategy()
    sign = 1 - 2 * _rank(strategy)

    def model_fn(features, labels, mode):
        module = Line()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)

        def loss(outputs, labels):
            return outputs.sum() + sign * float("inf")

        return ts.estimator.EstimatorSpec(mode, module=module, loss=loss, train_op=optimizer)

    config = ts.estimator.RunConfig(train_distribute=strategy)
    try:
        ts.estimator.Estimator(model_fn, str(folder), config).train(lambda: batches())
    except (ts.estimator.NanLossDuringTrainingError, ValueError) as error:
        return type(error).__name__
    return None


def train_and_evaluate_together(folder):
    """Give the strategy of all processes to evaluations that the chief would make alone."""
    strategy = ts.MirroredStrategy()
    estimator = make_estimator(folder, train_distribute=strategy, eval_distribute=strategy)
    train_spec = ts.estimator.TrainSpec(lambda: batches(), max_steps=2)
    try:
        ts.estimator.train_and_evaluate(estimator, train_spec, ts.estimator.EvalSpec(lambda: batches()))
    except ValueError as error:
        return str(error)
    return None
