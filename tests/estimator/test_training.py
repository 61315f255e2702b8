"""Estimator.train: steps, checkpoints, going on, what a step does, and each strategy's numbers."""

import gc
import logging
import weakref

import pytest
import torch

import torchstrategy as ts
from tests.estimator.hook_programs import Line, Recorder, batches, make_estimator
from torchstrategy.estimator import NanLossDuringTrainingError

TRAIN = ts.estimator.ModeKeys.TRAIN
CPUS = ["cpu:0", "cpu:1"]


def line_estimator(folder, train_op=lambda module: torch.optim.SGD(module.parameters(), lr=0.01), loss=None, **config):
    """Return an estimator of a line, with a train_op of its own."""

    def model_fn(features, labels, mode):
        module = Line()
        return ts.estimator.EstimatorSpec(
            mode,
            module=module,
            predictions=lambda outputs: outputs,
            loss=torch.nn.functional.mse_loss if loss is None else loss,
            train_op=train_op(module),
        )

    return ts.estimator.Estimator(model_fn, str(folder), ts.estimator.RunConfig(**config))


def step_of(estimator):
    return int(estimator.get_variable_value("global_step"))


def weights_of(estimator):
    return [float(estimator.get_variable_value(name)) for name in ("w", "b")]


def saved_steps(folder):
    return sorted(int(path.stem.rsplit("-", 1)[1]) for path in folder.glob("model.ckpt-*.pt"))


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO, "torchstrategy")
    return lambda: [record.getMessage() for record in caplog.records]


def test_steps_count_from_now_and_max_steps_from_the_beginning(tmp_path):
    estimator = make_estimator(tmp_path)
    data = batches(number=20)
    assert estimator.train(lambda: data, steps=2) is estimator
    estimator.train(lambda: data, steps=2)
    assert step_of(estimator) == 4
    estimator.train(lambda: data, max_steps=6)
    assert step_of(estimator) == 6


def test_a_training_that_is_done_is_skipped(tmp_path, lines):
    estimator = make_estimator(tmp_path)
    estimator.train(lambda: batches(), max_steps=2)
    estimator.train(lambda: pytest.fail("the data was read"), max_steps=2)
    assert "Skipping training since max_steps has already saved." in lines()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 1, "max_steps": 1}, "Can not provide both steps and max_steps."),
        ({"steps": 0}, "Must specify steps > 0, given: 0"),
        ({"max_steps": -1}, "Must specify max_steps > 0, given: -1"),
        ({"steps": 2.5}, r"steps must be a whole number of steps. Received: 2\.5"),
        ({"max_steps": float("nan")}, "max_steps must be a whole number of steps. Received: nan"),
        ({"steps": "5"}, "steps must be a whole number of steps. Received: '5'"),
    ],
)
def test_steps_that_make_no_sense_are_refused(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        make_estimator(tmp_path).train(lambda: batches(), **arguments)


def test_steps_may_be_written_as_a_whole_float(tmp_path):
    estimator = make_estimator(tmp_path).train(lambda: batches(), steps=2.0)
    assert estimator.get_variable_value("global_step") == 2


def test_checkpoints_are_saved_at_first_every_so_many_steps_and_at_last(tmp_path):
    estimator = make_estimator(tmp_path, save_checkpoints_steps=2, keep_checkpoint_max=None)
    estimator.train(lambda: batches(number=5))
    assert saved_steps(tmp_path) == [0, 2, 4, 5]
    assert estimator.latest_checkpoint() == str(tmp_path / "model.ckpt-5")


def test_only_the_last_checkpoints_are_kept(tmp_path):
    make_estimator(tmp_path, save_checkpoints_steps=1, keep_checkpoint_max=2).train(lambda: batches(number=5))
    assert saved_steps(tmp_path) == [4, 5]


def test_nothing_is_saved_without_a_saver(tmp_path):
    estimator = make_estimator(tmp_path, save_checkpoints_steps=None, save_checkpoints_secs=None)
    estimator.train(lambda: batches())
    assert saved_steps(tmp_path) == []
    with pytest.raises(ValueError, match="There should be a CheckpointSaverHook to use saving_listeners"):
        estimator.train(lambda: batches(), saving_listeners=[ts.estimator.CheckpointSaverListener()])


def test_a_new_estimator_goes_on_with_weights_optimizer_and_scheduler(tmp_path):
    def train_op(module):
        optimizer = torch.optim.Adam(module.parameters(), lr=0.1)
        return [optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)]

    unbroken = line_estimator(tmp_path / "unbroken", train_op)
    unbroken.train(lambda: batches(number=1) * 6)
    for _ in range(3):
        broken = line_estimator(tmp_path / "broken", train_op)
        broken.train(lambda: batches(number=1) * 6, steps=2)
    assert weights_of(broken) == weights_of(unbroken)


def test_data_begins_anew_in_each_call_and_ends_quietly(tmp_path, lines):
    estimator = make_estimator(tmp_path)
    estimator.train(lambda: batches(number=3), steps=10)
    estimator.train(lambda: batches(number=3), steps=10)
    assert step_of(estimator) == 6
    assert not [line for line in lines() if "no steps" in line]


@pytest.mark.parametrize("strategy", [None, CPUS])
def test_no_data_at_all_makes_no_steps(tmp_path, lines, strategy):
    estimator = make_estimator(tmp_path, train_distribute=strategy and ts.MirroredStrategy(strategy))
    estimator.train(lambda: [])
    assert "Training with estimator made no steps. Perhaps input is empty or misspecified." in lines()
    assert estimator.latest_checkpoint() is None


def test_too_few_batches_for_the_replicas_make_no_steps(tmp_path, lines):
    estimator = make_estimator(tmp_path, train_distribute=ts.MirroredStrategy(CPUS))
    estimator.train(lambda: batches(number=1))
    assert "Training with estimator made no steps. Perhaps input is empty or misspecified." in lines()
    assert saved_steps(tmp_path) == [0]


def test_lines_are_tfs(tmp_path, lines):
    estimator = make_estimator(tmp_path)
    estimator.train(lambda: batches(number=1))
    wanted = [
        "Calling model_fn.",
        "Done calling model_fn.",
        "Create CheckpointSaverHook.",
        f"Saving checkpoints for 0 into {tmp_path}/model.ckpt.",
        "loss = 5.0, step = 0",
        f"Saving checkpoints for 1 into {tmp_path}/model.ckpt.",
        "Loss for final step: 5.0.",
    ]
    assert [line for line in lines() if line in wanted] == wanted
    estimator.train(lambda: batches(number=1))
    assert f"Restoring parameters from {tmp_path}/model.ckpt-1" in lines()


@pytest.mark.parametrize(("reduction", "losses"), [("mean", [21.0, 124.856338]), ("sum", [42.0, 205.690796])])
def test_replicas_take_batches_of_their_own_and_average(tmp_path, reduction, losses):
    def loss(outputs, labels):
        return torch.nn.functional.mse_loss(outputs, labels, reduction=reduction)

    def trained(folder, data, loss, **config):
        estimator = line_estimator(tmp_path / folder, loss=loss, **config)
        recorder = Recorder("loss")
        estimator.train(lambda: data, hooks=[recorder])
        return recorder.results, weights_of(estimator)

    found, weights = trained("two", batches(number=4), loss, train_distribute=ts.MirroredStrategy(CPUS))
    assert found[0] == losses[0]
    assert found == pytest.approx(losses)
    factor = 1.0 if reduction == "mean" else 0.5  # the mean over replicas of sums is half of the sum of all
    one = trained("one", batches(number=2, size=4), lambda outputs, labels: factor * loss(outputs, labels))
    assert found == pytest.approx(one[0], rel=1e-6)
    assert weights == pytest.approx(one[1], rel=1e-6)


@pytest.mark.parametrize(
    "loss",
    [
        torch.nn.functional.mse_loss,
        torch.nn.MSELoss(),
        lambda outputs, labels: ts.losses.MeanSquaredError()(labels[:, None], outputs[:, None]),
    ],
)
def test_losses_may_average_over_the_replicas_batch(tmp_path, recwarn, loss):
    strategy = ts.MirroredStrategy(CPUS)
    estimator = line_estimator(tmp_path, loss=loss, train_distribute=strategy, eval_distribute=strategy)
    estimator.train(lambda: batches())
    assert weights_of(estimator) == pytest.approx([1.4240999, 0.2997])
    assert estimator.evaluate(lambda: batches())["loss"] == pytest.approx(9.117607)
    assert not [warning for warning in recwarn if "averages over this replica's share" in str(warning.message)]


@pytest.mark.parametrize("kind", ["one_device", "central_storage"])
def test_other_strategies_give_the_same_numbers(tmp_path, kind):
    if kind == "one_device":
        strategy, reference = ts.OneDeviceStrategy("cpu:0"), None
    else:
        strategy, reference = ts.experimental.CentralStorageStrategy(CPUS), ts.MirroredStrategy(CPUS)
    found = []
    for name, chosen in (("this", strategy), ("other", reference)):
        estimator = make_estimator(tmp_path / name, train_distribute=chosen)
        estimator.train(lambda: batches(number=4))
        found.append([step_of(estimator), *weights_of(estimator)])
    assert found[0] == pytest.approx(found[1], rel=1e-6)


@pytest.mark.parametrize("num_batches", [3, 5])
def test_an_incomplete_last_group_is_dropped_with_one_line(tmp_path, lines, num_batches):
    estimator = make_estimator(tmp_path, train_distribute=ts.MirroredStrategy(CPUS))
    estimator.train(lambda: batches(number=num_batches))
    assert step_of(estimator) == num_batches // 2
    assert len([line for line in lines() if "dropped" in line]) == 1


def test_input_fn_is_called_once_and_told_about_the_replicas(tmp_path):
    contexts = []

    def input_fn(input_context=None):
        contexts.append(input_context)
        return batches()

    make_estimator(tmp_path / "two", train_distribute=ts.MirroredStrategy(CPUS)).train(input_fn)
    make_estimator(tmp_path / "one").train(input_fn)
    assert contexts == [ts.InputContext(1, 0, 2), None]


def test_a_ready_batch_is_used_in_every_step(tmp_path):
    estimator = make_estimator(tmp_path)
    estimator.train(lambda: batches()[0], steps=3)
    assert step_of(estimator) == 3


def test_functions_in_train_op_are_called_at_their_place(tmp_path):
    events = []

    def train_op(module):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

        def note(name):
            events.append((name, module.w.grad is not None, float(module.w.detach()), scheduler.last_epoch))

        return [scheduler, lambda: note("before"), optimizer, lambda: note("after")]

    line_estimator(tmp_path, train_op).train(lambda: batches(start=1, number=1))
    (before, has_gradient, w_before, _), (after, _, w_after, epoch) = events
    assert (before, after, has_gradient) == ("before", "after", True)
    assert w_before == 0.0 != w_after
    assert epoch == 0  # schedulers come last


@pytest.mark.parametrize("devices", [CPUS[:1], CPUS])
def test_a_gradient_scaler_scales_the_loss_and_is_saved(tmp_path, devices):
    seen = []

    def train_op(module):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        return [scaler, lambda: seen.append(float(module.w.grad)), optimizer]

    with_scaler = line_estimator(tmp_path / "scaled", train_op, train_distribute=ts.MirroredStrategy(devices))
    with_scaler.train(lambda: batches(number=6), steps=2)
    plain = line_estimator(tmp_path / "plain", train_distribute=ts.MirroredStrategy(devices))
    plain.train(lambda: batches(number=6), steps=2)
    assert weights_of(with_scaler) == pytest.approx(weights_of(plain), rel=1e-6)
    assert abs(seen[0]) < 60  # the gradient itself, not four times it
    checkpoint = ts.train.load_checkpoint(str(tmp_path / "scaled" / "model.ckpt-2"))
    assert checkpoint is not None
    with_scaler.train(lambda: batches(number=6), steps=1)


@pytest.mark.parametrize(
    ("train_op", "error", "message"),
    [
        (lambda optimizer: [optimizer, *(torch.amp.GradScaler("cpu") for _ in range(2))], ValueError, "2 gradient sc"),
        (
            lambda optimizer: [optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)],
            TypeError,
            "ReduceLROnPlateau",
        ),
        (lambda optimizer: torch.optim.LBFGS(optimizer.param_groups[0]["params"]), TypeError, "LBFGS, whose step"),
    ],
)
def test_a_train_op_that_can_not_work_is_refused(tmp_path, train_op, error, message):
    estimator = line_estimator(tmp_path, lambda module: train_op(torch.optim.SGD(module.parameters(), lr=0.01)))
    with pytest.raises(error, match=message):
        estimator.train(lambda: batches())
    assert estimator.latest_checkpoint() is None


def test_an_optimizer_of_something_else_is_warned_of(tmp_path, caplog):
    line_estimator(tmp_path, lambda module: torch.optim.SGD(Line().parameters(), lr=0.1)).train(lambda: batches())
    assert "No optimizer in train_op has parameters of EstimatorSpec(module=)" in caplog.text
    caplog.clear()
    line_estimator(tmp_path / "own").train(lambda: batches())
    assert "No optimizer" not in caplog.text


@pytest.mark.parametrize(
    ("loss", "error", "message"),
    [
        (lambda outputs, labels: (outputs - labels) ** 2, ValueError, "must return a scalar"),
        (lambda outputs, labels: 1.0, TypeError, "must return a tensor"),
    ],
)
def test_a_loss_must_be_a_scalar_tensor(tmp_path, loss, error, message):
    with pytest.raises(error, match=message):
        line_estimator(tmp_path, loss=loss).train(lambda: batches())


def test_a_loss_of_one_element_will_do(tmp_path):
    estimator = line_estimator(tmp_path, loss=lambda outputs, labels: ((outputs - labels) ** 2).mean()[None])
    estimator.train(lambda: batches(number=1))
    assert step_of(estimator) == 1


def test_missing_labels_are_named(tmp_path):
    with pytest.raises(ValueError, match="input_fn returned features alone, without labels"):
        line_estimator(tmp_path).train(lambda: [features for features, _ in batches()])


def test_a_loss_that_is_no_number_ends_training(tmp_path):
    estimator = line_estimator(tmp_path, loss=lambda outputs, labels: outputs.mean() * float("nan"))
    with pytest.raises(NanLossDuringTrainingError):
        estimator.train(lambda: batches())
    assert saved_steps(tmp_path) == [0]


def test_an_estimator_refuses_a_foreign_scope(tmp_path):
    estimator = make_estimator(tmp_path)
    with ts.MirroredStrategy(CPUS).scope(), pytest.raises(RuntimeError, match="inside the scope of a MirroredStrategy"):
        estimator.train(lambda: batches())


def test_hooks_of_the_chief_come_first_and_the_specs_last(tmp_path):
    events = []

    def named(name):
        return Recorder(name=name + " ", events=events)

    def model_fn(features, labels, mode):
        module = Line()
        return ts.estimator.EstimatorSpec(
            mode,
            module=module,
            loss=torch.nn.functional.mse_loss,
            train_op=torch.optim.SGD(module.parameters(), lr=0.01),
            training_hooks=[named("spec")],
            training_chief_hooks=[named("chief")],
        )

    ts.estimator.Estimator(model_fn, str(tmp_path)).train(lambda: batches(number=1), hooks=[named("own")])
    for event in ("begin", "create", "before", "after", "end"):
        order = [name for name in events if name.endswith(event)]
        assert order[:3] == [f"chief {event}", f"own {event}", f"spec {event}"]


def test_the_seed_of_the_configuration_makes_trainings_equal_and_leaves_the_programs_stream(tmp_path):
    def model_fn(features, labels, mode):
        module = torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1))
        loss = torch.nn.functional.mse_loss
        optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
        return ts.estimator.EstimatorSpec(mode, module=module, loss=loss, train_op=optimizer)

    losses = []
    before = torch.get_rng_state()
    for seed, name in ((3, "a"), (3, "b"), (4, "c")):
        config = ts.estimator.RunConfig(tf_random_seed=seed)
        recorder = Recorder("loss")
        estimator = ts.estimator.Estimator(model_fn, str(tmp_path / name), config)
        estimator.train(lambda: [(torch.ones(2, 1), torch.ones(2, 1))] * 3, hooks=[recorder])
        losses.append(recorder.results)
    assert losses[0] == losses[1] != losses[2]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "strategy",
    [lambda: None, lambda: ts.MirroredStrategy(CPUS), lambda: ts.experimental.CentralStorageStrategy(CPUS)],
)
def test_models_of_past_calls_are_freed(tmp_path, strategy):
    """With the replicas' copies, which are modules, too."""
    made = []

    def model_fn(features, labels, mode):
        module = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1))
        optimizer = torch.optim.Adam(module.parameters())
        metric = ts.metrics.MeanAbsoluteError()
        made.extend(weakref.ref(part) for part in (module, module[0], module[0].weight, optimizer, metric))
        return ts.estimator.EstimatorSpec(
            mode,
            module=module,
            predictions=lambda outputs: outputs,
            loss=torch.nn.functional.mse_loss,
            train_op=optimizer,
            eval_metric_ops={"mae": metric},
        )

    def num_modules():
        gc.collect()
        return sum(issubclass(type(obj), torch.nn.Linear) for obj in gc.get_objects())

    chosen = strategy()
    config = ts.estimator.RunConfig(train_distribute=chosen, eval_distribute=chosen)
    estimator = ts.estimator.Estimator(model_fn, str(tmp_path), config)
    data = [(torch.randn(3, 1), torch.randn(3, 1))] * 4
    before = num_modules()
    for _ in range(2):
        estimator.train(lambda: data)
        estimator.evaluate(lambda: data)
        assert len(list(estimator.predict(lambda: data))) == 12
    assert num_modules() == before
    assert [reference for reference in made if reference() is not None] == []


def test_a_lazy_module_is_made_by_the_examples(tmp_path):
    def model_fn(features, labels, mode):
        module = torch.nn.LazyLinear(1)
        module(features)
        loss = torch.nn.functional.mse_loss
        return ts.estimator.EstimatorSpec(
            mode, module=module, loss=loss, train_op=torch.optim.SGD(module.parameters(), lr=0.1)
        )

    config = ts.estimator.RunConfig(train_distribute=ts.MirroredStrategy(CPUS))
    estimator = ts.estimator.Estimator(model_fn, str(tmp_path), config)
    estimator.train(lambda: [(torch.ones(2, 3), torch.ones(2, 1))] * 2)
    assert estimator.get_variable_value("weight").shape == (1, 3)
