"""An estimator of a line, and its data: ``y = w x + b`` from zeros, with the mean squared error."""

import torch

import torchstrategy as ts
from torchstrategy.estimator.checkpoint_evaluator import CheckpointEvaluator, evaluate_continuously


class Line(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(()))
        self.b = torch.nn.Parameter(torch.zeros(()))

    def forward(self, features):
        return features * self.w + self.b


def model_fn(features, labels, mode):
    module = Line()
    return ts.estimator.EstimatorSpec(
        mode,
        predictions=lambda outputs: {"y": outputs},
        loss=torch.nn.functional.mse_loss,
        train_op=torch.optim.SGD(module.parameters(), lr=0.01),
        eval_metric_ops={"mae": ts.metrics.MeanAbsoluteError()},
        module=module,
    )


def input_fn():
    x = torch.arange(8.0)
    return ts.data.Dataset.from_tensor_slices((x, 2 * x + 1)).repeat().batch(2)


def make_estimator(model_dir, **config):
    config.setdefault("save_checkpoints_steps", 2)
    return ts.estimator.Estimator(model_fn, config=ts.estimator.RunConfig(model_dir, **config))


def receiver_fn():
    return ts.estimator.export.ServingInputReceiver(x := torch.zeros(2), x)


def train_and_evaluate_on_a_rank(model_dir):
    """Do what one of torchrun's processes does; return the result and how often this process evaluated."""
    estimator = make_estimator(model_dir, train_distribute=ts.MultiWorkerMirroredStrategy(devices=["cpu:0"]))
    calls = []

    def eval_input_fn():
        calls.append(1)
        return input_fn()

    result = ts.estimator.train_and_evaluate(
        estimator,
        ts.estimator.TrainSpec(input_fn, max_steps=4),
        ts.estimator.EvalSpec(eval_input_fn, steps=2, throttle_secs=0),
    )
    return result, len(calls)


def steps_until_the_end(estimator, end):
    """Evaluate until training has ended, which it does after one more step; return the steps that were evaluated."""
    evaluated = []

    class Evaluator(CheckpointEvaluator):
        def evaluate(self):
            made = super().evaluate()
            evaluated.append(made.metrics and made.metrics["global_step"])
            if len(evaluated) == 1:
                estimator.train(input_fn, steps=1)
                end.declare(estimator.latest_checkpoint())
            return made

    spec = ts.estimator.EvalSpec(input_fn, steps=1, start_delay_secs=0, throttle_secs=600)
    evaluate_continuously(Evaluator(estimator, spec, None), spec, end)
    return evaluated
