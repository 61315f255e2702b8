import contextlib

import pytest
import torch
from torch.utils.data import DataLoader

import torchstrategy as ts
from tests.estimator.hook_programs import Recorder, batches, make_estimator


class Fail(ts.estimator.SessionRunHook):
    """Stands for a kill: the training ends without a checkpoint."""

    def __init__(self, step):
        self.step = step

    def after_run(self, run_context, run_values):
        if run_context.session.global_step == self.step:
            raise InterruptedError


def points(num_batches=8):
    x = torch.arange(2.0 * num_batches)
    return x / 10, x / 5 + 1


def listed():
    return batches(number=8)


def shuffled_pipeline():
    x, y = points()
    return ts.data.Dataset.from_tensor_slices(({"x": x}, y)).shuffle(16, seed=3).repeat(2).batch(2)


def shuffled_loader():
    generator = torch.Generator().manual_seed(5)
    examples = [({"x": x}, y) for x, y in zip(*points(), strict=True)]
    return DataLoader(examples, batch_size=2, shuffle=True, generator=generator)


def train(estimator, input_fn, hooks=(), **arguments):
    """Train with the position kept, and return the losses."""
    recorder = Recorder("loss")
    position = ts.estimator.CheckpointInputPipelineHook(estimator)
    with contextlib.suppress(InterruptedError):
        estimator.train(input_fn, hooks=[recorder, position, *hooks], **arguments)
    return recorder.results


@pytest.mark.parametrize("input_fn", [listed, shuffled_pipeline, shuffled_loader])
@pytest.mark.parametrize(
    ("make", "num_replicas"),
    [(None, 1), (ts.MirroredStrategy, 2), (lambda devices: ts.MultiWorkerMirroredStrategy(devices=devices), 1)],
    ids=["alone", "mirrored", "one worker"],
)
def test_a_killed_training_goes_on_with_the_next_batch(tmp_path, input_fn, make, num_replicas):
    def estimator(folder):
        strategy = None if make is None else make([f"cpu:{i}" for i in range(num_replicas)])
        return make_estimator(tmp_path / folder, save_checkpoints_steps=2, train_distribute=strategy)

    unbroken = train(estimator("unbroken"), input_fn)
    assert len(unbroken) >= 4
    first = train(estimator("broken"), input_fn, hooks=[Fail(3)])
    assert first == unbroken[:3]
    rest = train(estimator("broken"), input_fn)
    assert rest == unbroken[2:]  # from the checkpoint of step 2 on
    for name in ("w", "b"):
        assert estimator("broken").get_variable_value(name) == estimator("unbroken").get_variable_value(name)


def test_a_hook_of_the_spec_comes_before_the_first_checkpoint_too(tmp_path):
    def estimator(folder):
        plain = make_estimator(tmp_path / folder, save_checkpoints_steps=2)

        def model_fn(features, labels, mode):
            spec = plain.model_fn(features, labels, mode, plain.config)
            return spec._replace(training_hooks=[ts.estimator.CheckpointInputPipelineHook(plain)])

        return ts.estimator.Estimator(model_fn, config=plain.config)

    def losses(folder, *hooks):
        recorder = Recorder("loss")
        with contextlib.suppress(InterruptedError):
            estimator(folder).train(listed, hooks=[recorder, *hooks])
        return recorder.results

    unbroken = losses("unbroken")
    assert losses("broken", Fail(3)) == unbroken[:3]
    assert losses("broken", Fail(3)) == unbroken[2:3]  # killed before the next checkpoint
    assert losses("broken") == unbroken[2:]


def test_calls_of_train_go_on(tmp_path):
    unbroken = train(make_estimator(tmp_path / "unbroken"), listed)
    estimator = make_estimator(tmp_path / "parts")
    assert [loss for _ in range(4) for loss in train(estimator, listed, steps=2)] == unbroken


def test_the_data_begins_anew_after_its_end(tmp_path):
    estimator = make_estimator(tmp_path)
    train(estimator, listed)
    assert len(train(estimator, listed)) == 8


def test_without_the_hook_the_data_begins_anew(tmp_path):
    estimator, recorder = make_estimator(tmp_path), Recorder("outputs")
    for _ in range(2):
        estimator.train(listed, steps=1, hooks=[recorder])
    first, second = recorder.results
    b = second[0]  # the first batch has x = 0 and 1
    torch.testing.assert_close(second, torch.stack([b, b + 0.03]))
    assert first.tolist() == [0.0, 0.0]


def test_a_checkpoint_without_a_position_is_told(tmp_path, caplog):
    estimator = make_estimator(tmp_path)
    estimator.train(listed, steps=3)
    losses = train(estimator, listed)
    assert len(losses) == 8
    assert "The checkpoint of step 3 holds no position in the data" in caplog.text


def test_the_position_is_no_variable(tmp_path):
    estimator = make_estimator(tmp_path)
    train(estimator, listed, steps=3)
    assert set(estimator.get_variable_names()) == {"global_step", "w", "b"}
    assert estimator.evaluate(listed, steps=1)["global_step"] == 3
    assert len(list(estimator.predict(listed))) == 16
    estimator.train(listed, steps=1)
    assert estimator.get_variable_value("global_step") == 4


def test_other_numbers_of_replicas_take_the_position_over(tmp_path):
    def estimator(strategy=None):
        return make_estimator(tmp_path, lr=0.0, train_distribute=strategy)

    two = train(estimator(ts.MirroredStrategy(["cpu:0", "cpu:1"])), listed, steps=2)
    one = train(estimator(), listed)
    per_batch = train(make_estimator(tmp_path / "all", lr=0.0), listed)
    assert two == pytest.approx([sum(per_batch[:2]) / 2, sum(per_batch[2:4]) / 2])
    assert one == pytest.approx(per_batch[4:])


def test_wrong_arguments(tmp_path):
    with pytest.raises(TypeError, match="`estimator` must have type"):
        ts.estimator.CheckpointInputPipelineHook("estimator")
    with pytest.raises(ValueError, match="external_state_policy"):
        ts.estimator.CheckpointInputPipelineHook(make_estimator(tmp_path), "warn")


def test_asynchronous_workers_have_no_common_position(tmp_path):
    strategy = ts.compat.v1.distribute.experimental.ParameterServerStrategy()
    with pytest.raises(ValueError, match="asynchronous workers"):
        train(make_estimator(tmp_path, train_distribute=strategy), listed)


def test_other_modes_have_nothing_to_keep(tmp_path):
    estimator = make_estimator(tmp_path)
    hooks = [ts.estimator.CheckpointInputPipelineHook(estimator)]
    assert estimator.evaluate(listed, hooks=hooks)["global_step"] == 0
    assert len(list(estimator.predict(listed, hooks=hooks))) == 16
