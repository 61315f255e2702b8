"""Trainings whose processes step together while their hooks want different things."""

import contextlib
from unittest import mock

import torchstrategy as ts
from tests.estimator.hook_programs import Recorder, batches, make_estimator, model_fn
from tests.programs import cpu_devices


class StopOnRank(ts.estimator.SessionRunHook):
    """Asks for the end on one rank only, before or after a step."""

    def __init__(self, rank, step, *, early):
        self.rank, self.step, self.early = rank, step, early

    def _wish(self, run_context, step):
        if run_context.session.strategy.workers.rank == self.rank and step == self.step:
            run_context.request_stop()

    def before_run(self, run_context):
        if self.early:
            self._wish(run_context, run_context.session.global_step + 1)

    def after_run(self, run_context, run_values):
        if not self.early:
            self._wish(run_context, run_context.session.global_step)


class StopListener(ts.estimator.CheckpointSaverListener):
    def after_save(self, session, global_step_value):
        return global_step_value == 4


class FailAt(ts.estimator.SessionRunHook):
    """Stands for the end of the whole job in the middle of a training."""

    def __init__(self, step):
        self.step = step

    def after_run(self, run_context, run_values):
        if run_context.session.global_step == self.step:
            raise InterruptedError


def _train(folder, num_local, hooks=(), listeners=(), input_fn=None, **config):
    """Train on all ranks; return the global step at the end, the steps' losses, and the weight."""
    strategy = ts.MirroredStrategy(cpu_devices(num_local))
    estimator = make_estimator(folder, train_distribute=strategy, **config)
    hooks = [hook(estimator) if isinstance(hook, type) else hook for hook in hooks]
    recorder = Recorder({"step": "global_step", "loss": "loss", "w": "w"})
    data = batches(number=10 * num_local, size=1)
    with contextlib.suppress(InterruptedError):
        estimator.train(input_fn or (lambda: data), hooks=[recorder, *hooks], saving_listeners=listeners)
    last = recorder.results[-1]
    return last["step"] + 1, [result["loss"] for result in recorder.results], last["w"].item()


def stop_on(folder, num_local, rank, early):
    return _train(folder, num_local, [StopOnRank(rank, 3, early=early)])


def stop_at_step(folder, num_local):
    return _train(folder, num_local, [ts.estimator.StopAtStepHook(last_step=4)])


def stop_by_listener(folder, num_local):
    return _train(folder, num_local, listeners=[StopListener()], save_checkpoints_steps=2)


def stop_early(folder, num_local):
    """Train with a function that says other things on other ranks."""
    calls = []

    def should_stop(rank):
        calls.append(rank)
        return rank == 1 or len(calls) == 2

    class Early(ts.estimator.SessionRunHook):
        def __new__(cls, estimator):
            rank = estimator.config.train_distribute.workers.rank
            return ts.estimator.experimental.make_early_stopping_hook(
                estimator, lambda: should_stop(rank), run_every_secs=None, run_every_steps=4
            )

    return (*_train(folder, num_local, [Early]), calls)


def save_by_unlike_clocks(folder, num_local):
    """Train with a clock that runs on the chief only."""
    now = [0.0]

    class Clock(ts.estimator.SessionRunHook):
        def before_run(self, run_context):
            now[0] += 4.0 * run_context.session.is_chief

    with mock.patch("torchstrategy.estimator.saver_hook.time.monotonic", side_effect=lambda: now[0]):
        return _train(folder, num_local, [Clock()], save_checkpoints_secs=10)


def keep_position(folder, num_local, fail_at):
    """Train, each process with data of its own, and go on after a break."""

    def input_fn(input_context):
        start = 100 * input_context.input_pipeline_id
        data = ts.data.Dataset.range(start, start + 16).shuffle(16, seed=7)
        return data.map(lambda i: ({"x": i / 100}, i / 50 + 1)).batch(2)

    hooks = [ts.estimator.CheckpointInputPipelineHook, FailAt(fail_at)]
    return _train(folder, num_local, hooks, input_fn=input_fn, save_checkpoints_steps=2)


def diverge(folder, num_local):
    """Train until the loss is no number; return whether that is what this rank says."""
    estimator = make_estimator(folder, lr=1e30, train_distribute=ts.MirroredStrategy(cpu_devices(num_local)))
    data = batches(start=1, number=10 * num_local)
    try:
        estimator.train(lambda: data)
    except ts.estimator.NanLossDuringTrainingError:
        return True
    return False


def fail_on_rank(folder, num_local, rank):
    """Train with a hook that fails on one rank only."""

    class Fail(ts.estimator.SessionRunHook):
        def after_run(self, run_context, run_values):
            if run_context.session.global_step == 2 and run_context.session.strategy.workers.rank == rank:
                raise ArithmeticError("on purpose")

    return _train(folder, num_local, [Fail()])


def save_by_a_hook_of_the_chief(folder, num_local):
    """Train with a model that brings the hook that saves; return the global step and where its listener was called."""
    strategy = ts.MirroredStrategy(cpu_devices(num_local))
    calls = []

    class Note(ts.estimator.CheckpointSaverListener):
        def after_save(self, session, global_step_value):
            calls.append(global_step_value)

    def model_fn_that_saves(features, labels, mode, params):
        saver = ts.estimator.CheckpointSaverHook(str(folder), save_steps=2, listeners=[Note()])
        return model_fn(features, labels, mode, params)._replace(training_chief_hooks=[saver])

    config = ts.estimator.RunConfig(train_distribute=strategy)
    estimator = ts.estimator.Estimator(model_fn_that_saves, str(folder), config, {})
    estimator.train(lambda: batches(number=5 * num_local))
    return int(estimator.get_variable_value("global_step")), calls


def stop_at_once(folder, num_local):
    """Let one rank ask for the end before the first step."""

    class Stop(ts.estimator.SessionRunHook):
        def after_create_session(self, session, coord):
            if session.strategy.workers.rank == 1:
                coord.request_stop()

    estimator = make_estimator(folder, train_distribute=ts.MirroredStrategy(cpu_devices(num_local)))
    estimator.train(lambda: batches(), hooks=[Stop()])
    return int(estimator.get_variable_value("global_step"))
