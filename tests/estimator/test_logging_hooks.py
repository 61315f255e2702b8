import logging
import math
import re

import pytest
import torch

import torchstrategy as ts
from tests.estimator.hook_programs import Recorder, batches, make_estimator
from torchstrategy.estimator.eval_metrics import read_eval_metrics


@pytest.fixture
def lines(caplog):
    """Return the INFO lines so far, without their durations."""
    caplog.set_level(logging.INFO, "torchstrategy")
    return lambda: [re.sub(r" \(\d+\.\d{3} sec\)", " (s)", record.getMessage()) for record in caplog.records]


def test_values_are_logged_every_so_many_steps(tmp_path, lines):
    hook = ts.estimator.LoggingTensorHook({"step": "global_step", "w": "w"}, every_n_iter=2)
    make_estimator(tmp_path).train(lambda: batches(number=5), hooks=[hook])
    found = [line for line in lines() if re.match(r"step = \d+, w = ", line)]
    assert [line.split(",")[0] for line in found] == ["step = 0", "step = 2", "step = 4"]
    assert [line.endswith("(s)") for line in found] == [False, True, True]
    assert found[0] == "step = 0, w = 0.03"


def test_values_by_name_are_in_the_order_of_their_names(tmp_path, lines):
    hook = ts.estimator.LoggingTensorHook({"z": "global_step", "a": "loss"}, every_n_iter=10)
    make_estimator(tmp_path).train(lambda: batches(number=1), hooks=[hook])
    assert "a = 5.0, z = 0" in lines()


def test_the_estimator_logs_the_loss_as_tf_does(tmp_path, lines):
    make_estimator(tmp_path, log_step_count_steps=2).train(lambda: batches(number=4))
    assert "loss = 5.0, step = 0" in lines()
    assert any(re.match(r"loss = [\d.]+, step = 2 \(s\)", line) for line in lines())
    assert sum(line.startswith("global_step/sec: ") for line in lines()) == 1


def test_values_at_the_end(tmp_path, lines):
    hook = ts.estimator.LoggingTensorHook(["global_step", "b"], at_end=True)
    make_estimator(tmp_path).train(lambda: batches(number=3), hooks=[hook])
    assert [line.split(", ")[0] for line in lines() if ", b = " in line] == ["global_step = 3"]


def test_a_formatter_makes_the_line(tmp_path, lines):
    hook = ts.estimator.LoggingTensorHook(
        {"loss": "loss"}, every_n_secs=1000, formatter=lambda values: f"<{values['loss']:.1f}>"
    )
    make_estimator(tmp_path).train(lambda: batches(number=3), hooks=[hook])
    assert [line for line in lines() if line.startswith("<")] == ["<5.0>"]


def test_nothing_is_fetched_between_two_lines(tmp_path):
    fetched = []
    hook = ts.estimator.LoggingTensorHook({"x": lambda session: fetched.append(session.global_step)}, every_n_iter=3)
    make_estimator(tmp_path).train(lambda: batches(number=5), hooks=[hook])
    assert fetched == [1, 4]


def test_functions_are_shown_under_their_names(tmp_path, lines):
    def double_step(session):
        return 2 * session.global_step

    hook = ts.estimator.LoggingTensorHook([double_step], every_n_iter=10)
    make_estimator(tmp_path).train(lambda: batches(number=1), hooks=[hook])
    assert "double_step = 2" in lines()


@pytest.mark.parametrize(
    "arguments", [{}, {"every_n_iter": 1, "every_n_secs": 1}, {"every_n_iter": 0}, {"every_n_iter": -1}]
)
def test_logging_needs_one_interval(arguments):
    with pytest.raises(ValueError, match="every_n_iter"):
        ts.estimator.LoggingTensorHook(["loss"], **arguments)


def test_numbers_are_no_fetches():
    with pytest.raises(TypeError, match="must be a name"):
        ts.estimator.LoggingTensorHook([1.0], every_n_iter=1)


def test_variables_are_shown_under_their_names(tmp_path, lines):
    class Hook(ts.estimator.LoggingTensorHook):
        def __init__(self):
            pass

        def begin(self):
            super().__init__([ts.compat.v1.train.get_global_step()], every_n_iter=1)
            super().begin()

    make_estimator(tmp_path).train(lambda: batches(number=2), hooks=[Hook()])
    assert "global_step:0 = 0" in lines()


def test_steps_in_a_second(tmp_path, lines, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("torchstrategy.estimator.saver_hook.time.monotonic", lambda: now[0])
    writer = ts.summary.create_file_writer(tmp_path / "rates")

    class Clock(Recorder):
        def before_run(self, run_context):
            now[0] += 0.5

    hooks = [Clock(), ts.estimator.StepCounterHook(every_n_steps=2, summary_writer=writer)]
    make_estimator(tmp_path, log_step_count_steps=None).train(lambda: batches(number=6), hooks=hooks)
    writer.close()
    assert [line for line in lines() if "sec:" in line] == ["global_step/sec: 2"] * 2
    rates = read_summaries(tmp_path / "rates")
    assert rates == {"global_step/sec": [(3, 2.0), (5, 2.0)]}


@pytest.mark.parametrize("arguments", [{"every_n_steps": None}, {"every_n_secs": 1}])
def test_rates_need_one_interval(arguments):
    with pytest.raises(ValueError, match="every_n_steps"):
        ts.estimator.StepCounterHook(**arguments)


def test_summaries_of_some_steps(tmp_path):
    pytest.importorskip("tensorboard")
    hook = ts.estimator.SummarySaverHook(
        save_steps=3, output_dir=tmp_path / "own", summary_op={"mean/loss": "loss", "w": "w"}
    )
    make_estimator(tmp_path, save_summary_steps=2).train(lambda: batches(number=6), hooks=[hook])
    own = read_summaries(tmp_path / "own")
    assert [step for step, _ in own["mean/loss"]] == [1, 4]
    assert own["mean/loss"][0][1] == 5.0  # the loss of the step that leads to 1
    assert own["w"][0][1] == pytest.approx(0.03)
    assert [step for step, _ in read_summaries(tmp_path)["loss"]] == [1, 3, 5]
    assert not ts.summary.should_record_summaries()


def test_what_a_step_writes_goes_to_the_same_file(tmp_path):
    pytest.importorskip("tensorboard")

    def model_fn(features, labels, mode):
        module = torch.nn.Linear(1, 1)

        def loss(outputs, labels):
            ts.summary.scalar("largest", outputs.max())
            return torch.mean((outputs - labels) ** 2)

        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        return ts.estimator.EstimatorSpec(mode, module=module, loss=loss, train_op=optimizer)

    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    config = ts.estimator.RunConfig(save_summary_steps=2, log_step_count_steps=2, train_distribute=strategy)
    estimator = ts.estimator.Estimator(model_fn, str(tmp_path), config)
    estimator.train(lambda: (torch.ones(2, 1), torch.ones(2, 1)), steps=4)
    found = read_summaries(tmp_path)
    assert [step for step, _ in found["largest"]] == [1, 3]  # once for all replicas
    assert [step for step, _ in found["global_step/sec"]] == [3]
    assert len(list(tmp_path.glob("events.*"))) == 1
    assert not ts.summary.should_record_summaries()


def test_what_a_killed_training_wrote_beyond_its_checkpoint_is_forgotten(tmp_path):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")

    class Fail(ts.estimator.SessionRunHook):
        def after_run(self, run_context, run_values):
            if run_context.session.global_step == 3:
                raise RuntimeError("on purpose")

    estimator = make_estimator(tmp_path, save_summary_steps=1, save_checkpoints_steps=2)
    with pytest.raises(RuntimeError, match="on purpose"):
        estimator.train(lambda: batches(), hooks=[Fail()])
    before = set(tmp_path.glob("events.*"))
    estimator.train(lambda: batches(), max_steps=4)
    (file,) = set(tmp_path.glob("events.*")) - before
    events = list(loader.EventFileLoader(str(file)).Load())
    starts = [(i, event.step) for i, event in enumerate(events) if event.HasField("session_log")]
    assert starts == [(1, 3)]  # after the version, before all summaries
    assert [event.step for event in events if event.HasField("summary")] == [3, 4]


def test_an_exception_does_not_leave_a_default_writer(tmp_path):
    pytest.importorskip("tensorboard")

    class Fail(ts.estimator.SessionRunHook):
        def before_run(self, run_context):
            raise RuntimeError("on purpose")

    hooks = [ts.estimator.SummarySaverHook(save_steps=1, output_dir=tmp_path / "own"), Fail()]
    with pytest.raises(RuntimeError, match="on purpose"):
        make_estimator(tmp_path).train(lambda: batches(), hooks=hooks)
    assert not ts.summary.should_record_summaries()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"output_dir": "x"}, "every_secs"),
        ({"output_dir": "x", "save_steps": 1, "save_secs": 1}, "every_secs"),
        ({"save_steps": 1}, "output_dir"),
        ({"save_steps": 1, "output_dir": "x", "scaffold": object()}, "scaffold"),
    ],
)
def test_summaries_need_an_interval_and_a_folder(arguments, message):
    with pytest.raises(ValueError, match=message):
        ts.estimator.SummarySaverHook(**arguments)


def test_without_tensorboard_there_are_no_summaries(tmp_path, monkeypatch, lines):
    def missing():
        raise ImportError("no tensorboard")

    monkeypatch.setattr("torchstrategy.summary.writer.import_tensorboard", missing)
    monkeypatch.setattr("torchstrategy.base.log._said", set())
    make_estimator(tmp_path, save_summary_steps=1).train(lambda: batches(number=2))
    assert not list(tmp_path.glob("events.*"))
    assert "No summaries are written, because TensorBoard is not installed." in lines()


def test_profiles_of_single_steps(tmp_path):
    hook = ts.estimator.ProfilerHook(save_steps=2, output_dir=tmp_path / "profiles")
    make_estimator(tmp_path).train(lambda: batches(number=5), hooks=[hook])
    assert sorted(path.name for path in (tmp_path / "profiles").iterdir()) == ["timeline-3.json", "timeline-5.json"]
    assert "aten::" in (tmp_path / "profiles" / "timeline-3.json").read_text()


def read_summaries(folder):
    """Return the steps and values of each scalar in a folder's event files."""
    found = {}
    for step, values in read_eval_metrics(folder).items():
        for tag, value in values.items():
            assert math.isfinite(value)
            found.setdefault(tag, []).append((step, value))
    return found
