"""A signal in an Estimator's training: all save at one step and end; the next start goes on."""

import os
import signal

import pytest
import torch

import torchstrategy as ts


def model_fn(features, labels, mode):
    module = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return ts.estimator.EstimatorSpec(mode, module=module, loss=torch.nn.functional.mse_loss, train_op=optimizer)


class Notify(ts.estimator.SessionRunHook):
    def __init__(self, step, rank, number):
        self.step, self.rank, self.number = step, rank, number

    def before_run(self, run_context):
        workers = run_context.session.strategy.workers
        rank = 0 if workers is None else workers.rank
        if (run_context.session.global_step, rank) == (self.step, self.rank):
            os.kill(os.getpid(), self.number)


def train(folder, step=None, rank=0, number=signal.SIGTERM):
    """Return how the training ended, the step that was saved, and whether the handlers are as they were."""
    before = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1)]
    strategy = ts.MultiWorkerMirroredStrategy() if "TF_CONFIG" in os.environ or "RANK" in os.environ else None
    config = ts.estimator.RunConfig(train_distribute=strategy, save_checkpoints_steps=1000)
    estimator = ts.estimator.Estimator(model_fn, folder, config)
    data = [(torch.ones(2, 1), torch.ones(2, 1))] * 20
    code = None
    try:
        estimator.train(lambda: data, hooks=[Notify(step, rank, number), ts.estimator.PreemptionHook()], max_steps=20)
    except SystemExit as error:
        code = error.code
    saved = int(estimator.get_variable_value("global_step"))
    return code, saved, before == [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGUSR1)]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_saves_and_goes_on(tmp_path, number):
    assert train(str(tmp_path), 7, number=number) == (143, 8, True)
    assert train(str(tmp_path)) == (None, 20, True)


def test_one_rank_of_two(process_pool, tmp_path):
    first, second = process_pool(2).run(train, str(tmp_path), 7, 1)
    assert first == second
    code, saved, is_given_back = first
    assert (code, is_given_back) == (143, True)
    assert 8 <= saved <= 20
    assert process_pool(2).run(train, str(tmp_path)) == [(None, 20, True)] * 2
