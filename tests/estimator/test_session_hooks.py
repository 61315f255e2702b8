import pytest
import torch

import torchstrategy as ts
from tests.estimator.hook_programs import Recorder, batches, make_estimator
from torchstrategy.estimator.session_hooks import HookCalls
from torchstrategy.estimator.warm_start import make_global_step


def test_hooks_are_called_in_the_order_given(tmp_path):
    events = []
    hooks = [Recorder(name="a.", events=events), Recorder(name="b.", events=events)]
    make_estimator(tmp_path).train(lambda: batches(), steps=1, hooks=hooks)
    assert events == [f"{name}.{event}" for event in ("begin", "create", "before", "after", "end") for name in "ab"]


def test_fetches_are_those_of_the_step(tmp_path):
    hook = Recorder(
        {"step": "global_step", "values": ["loss", "w"], "doubled": lambda session: 2 * session.global_step}
    )
    make_estimator(tmp_path).train(lambda: batches(), steps=2, hooks=[hook])
    first, second = hook.results
    assert (first["step"], second["step"]) == (0, 1)  # as it was before the step
    assert (first["doubled"], second["doubled"]) == (2, 4)  # of now
    loss, w = first["values"]
    assert loss == pytest.approx(5.0)  # (1 + 9) / 2
    torch.testing.assert_close(w, torch.tensor(0.03))  # after the step: 0.01 * mean(2 * (0 * 1 + 1 * 3))


def test_outputs_are_those_of_the_first_replica(tmp_path):
    hook = Recorder("outputs")
    estimator = make_estimator(tmp_path, train_distribute=ts.MirroredStrategy(["cpu:0", "cpu:1"]))
    estimator.train(lambda: batches(), steps=1, hooks=[hook])
    assert [tuple(result.shape) for result in hook.results] == [(2,)]
    assert not hook.results[0].requires_grad


def test_a_fetch_of_an_unknown_name_says_which_there_are(tmp_path):
    with pytest.raises(KeyError, match=r"'weight'.*w, b"):
        make_estimator(tmp_path).train(lambda: batches(), steps=1, hooks=[Recorder("weight")])


@pytest.mark.parametrize("num_replicas", [1, 2])
def test_variables_can_be_fetched_themselves(tmp_path, num_replicas):
    class Watch(Recorder):
        def begin(self):
            self.step = ts.compat.v1.train.get_global_step()

        def after_create_session(self, session, coord):
            self.fetches = [self.step, session.module.w]

        def end(self, session):
            assert ts.compat.v1.train.get_global_step() is self.step
            self.last = session.fetch(self.fetches)

    strategy = ts.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)]) if num_replicas > 1 else None
    hook, by_name = Watch(), Recorder(["global_step", "w"])
    make_estimator(tmp_path, train_distribute=strategy).train(lambda: batches(), steps=2, hooks=[hook, by_name])
    assert hook.results == by_name.results
    assert [step for step, _ in hook.results] == [0, 1]
    assert hook.last == [2, hook.results[-1][1]]
    assert ts.compat.v1.train.get_global_step() is None


def test_a_tensor_that_never_changes_is_no_fetch(tmp_path):
    with pytest.raises(ValueError, match=r"must be a parameter or a buffer of the module"):
        make_estimator(tmp_path).train(lambda: batches(), hooks=[Recorder(torch.tensor(1.0))])


def test_one_hook_is_no_list(tmp_path):
    with pytest.raises(TypeError, match=r"hooks must be a list: \[Recorder"):
        make_estimator(tmp_path).train(lambda: batches(), hooks=Recorder())


def test_session_fetch_gives_the_present_step(tmp_path):
    class AtEnd(ts.estimator.SessionRunHook):
        def end(self, session):
            self.step = session.fetch(["global_step"])

    hook = AtEnd()
    make_estimator(tmp_path).train(lambda: batches(), steps=3, hooks=[hook])
    assert hook.step == [3]


def test_a_hook_ends_the_training(tmp_path):
    class Stop(ts.estimator.SessionRunHook):
        def before_run(self, run_context):
            assert not run_context.stop_requested
            return ts.estimator.SessionRunArgs("global_step")

        def after_run(self, run_context, run_values):
            if run_values.results >= 2:
                run_context.request_stop()
                assert run_context.stop_requested
                assert run_context.session.should_stop()

    estimator = make_estimator(tmp_path)
    estimator.train(lambda: batches(number=8), hooks=[Stop()])
    assert estimator.get_variable_value("global_step") == 3


def test_an_exception_of_a_hook_ends_the_training_without_end(tmp_path):
    class Fail(Recorder):
        def after_run(self, run_context, run_values):
            raise RuntimeError("on purpose")

    first, hook = Recorder(), Fail()
    with pytest.raises(RuntimeError, match="on purpose"):
        make_estimator(tmp_path).train(lambda: batches(), hooks=[first, hook])
    assert "end" not in first.events
    assert [path.name for path in tmp_path.glob("model.ckpt-*")] == ["model.ckpt-0.pt"]


def test_hooks_release_whatever_ends_the_loop():
    released = []

    class Holder(ts.estimator.SessionRunHook):
        def __init__(self, name):
            self.name = name

        def _release(self):
            released.append(self.name)
            raise RuntimeError(self.name)

    with pytest.raises(RuntimeError), HookCalls([Holder("a"), Holder("b")], make_global_step()):
        pass
    assert sorted(released) == ["a", "b"]


def test_before_run_must_return_args(tmp_path):
    class Wrong(ts.estimator.SessionRunHook):
        def before_run(self, run_context):
            return "loss"

    with pytest.raises(TypeError, match=r"Wrong.before_run must return SessionRunArgs or None"):
        make_estimator(tmp_path).train(lambda: batches(), hooks=[Wrong()])


def test_fetches_are_names_tensors_and_functions():
    with pytest.raises(TypeError, match="name"):
        ts.estimator.SessionRunArgs({"loss": 1.0})
    with pytest.raises(ValueError, match="feed_dict"):
        ts.estimator.SessionRunArgs("loss", feed_dict={"x": 1})
    assert ts.estimator.SessionRunArgs(None).fetches is None


def test_evaluate_and_predict_call_hooks(tmp_path):
    estimator = make_estimator(tmp_path)
    evaluated, predicted = Recorder("loss"), Recorder("outputs")
    estimator.evaluate(lambda: batches(), steps=2, hooks=[evaluated])
    assert evaluated.results == pytest.approx([5.0, 37.0])
    assert evaluated.events[-1] == "end"
    assert len(list(estimator.predict(lambda: batches(), hooks=[predicted]))) == 8
    assert [tuple(result.shape) for result in predicted.results] == [(2,)] * 4
