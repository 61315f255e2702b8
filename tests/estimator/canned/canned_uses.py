"""Data and hooks for the tests of canned estimators."""

import torch

import torchstrategy as ts


class Losses(ts.estimator.SessionRunHook):
    """Keeps the losses of a training."""

    def __init__(self):
        self.values = []

    def before_run(self, run_context):
        return ts.estimator.SessionRunArgs("loss")

    def after_run(self, run_context, run_values):
        self.values.append(run_values.results)


def data(x, y, batch_size, repeat=1000):
    """Return an ``input_fn`` of one feature ``feats``."""

    def input_fn():
        features = {"feats": torch.tensor(x, dtype=torch.float32)}
        labels = torch.tensor(y)
        return ts.data.Dataset.from_tensor_slices((features, labels)).repeat(repeat).batch(batch_size)

    return input_fn


def columns():
    return [ts.feature_column.numeric_column("feats")]


def mirrored(**kwargs):
    return ts.estimator.RunConfig(train_distribute=ts.MirroredStrategy(["cpu:0", "cpu:1"]), **kwargs)


def losses_of(estimator, input_fn, steps):
    hook = Losses()
    estimator.train(input_fn, steps=steps, hooks=[hook])
    return hook.values


def variables(estimator):
    names = [name for name in estimator.get_variable_names() if not name.startswith("optimizer/")]
    return {name: estimator.get_variable_value(name) for name in names}


def read_summaries(folder):
    """Return steps and values of each scalar, and the tags of histograms, in a folder's event files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: PLC0415 - may be missing

    events = EventAccumulator(str(folder)).Reload()
    scalars = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    return scalars, set(events.Tags()["histograms"])
