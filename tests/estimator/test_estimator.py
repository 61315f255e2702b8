"""What an Estimator is made of, and what it says of its checkpoints."""

import os

import numpy as np
import pytest
import torch

import torchstrategy as ts
from tests.estimator.hook_programs import batches, make_estimator, model_fn


def test_a_model_dir_may_come_from_either_place(tmp_path):
    config = ts.estimator.RunConfig(model_dir=str(tmp_path))
    assert ts.estimator.Estimator(model_fn, config=config, params={"lr": 1}).model_dir == str(tmp_path)
    assert ts.estimator.Estimator(model_fn, tmp_path, config, params={"lr": 1}).model_dir == str(tmp_path)
    estimator = ts.estimator.Estimator(model_fn, tmp_path, params={"lr": 1})
    assert estimator.config.model_dir == str(tmp_path)


def test_two_model_dirs_are_refused(tmp_path):
    config = ts.estimator.RunConfig(model_dir=str(tmp_path / "a"))
    with pytest.raises(ValueError, match="with different values"):
        ts.estimator.Estimator(model_fn, str(tmp_path / "b"), config, params={"lr": 1})


def test_a_file_is_no_model_dir(tmp_path):
    file = tmp_path / "model"
    file.touch()
    with pytest.raises(NotADirectoryError, match="model_dir is a file"):
        ts.estimator.Estimator(model_fn, file, params={"lr": 1})


def test_without_a_model_dir_there_is_a_temporary_one(caplog):
    estimator = ts.estimator.Estimator(model_fn, params={"lr": 1})
    assert os.path.isdir(estimator.model_dir)
    assert f"Using temporary folder as model directory: {estimator.model_dir}" in caplog.text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model_fn": None}, "model_fn must be provided to Estimator."),
        ({"model_fn": model_fn, "config": {"model_dir": "x"}}, "config must be an instance of `RunConfig`"),
        ({"model_fn": model_fn, "params": {}, "warm_start_from": 5}, "warm_start_from can only be"),
        ({"model_fn": lambda features: 0, "params": {"lr": 1}}, "does not include params argument"),
    ],
)
def test_wrong_arguments_are_refused(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        ts.estimator.Estimator(model_dir=str(tmp_path), **arguments)


def test_params_and_config_are_copies(tmp_path):
    params = {"lr": [0.1]}
    estimator = ts.estimator.Estimator(model_fn, str(tmp_path), params=params)
    params["lr"].append(1)
    estimator.params["lr"].append(2)
    assert estimator.params == {"lr": [0.1]}
    assert estimator.config is not estimator.config


def test_functions_of_the_program_can_not_change_the_params(tmp_path):
    def changing_model_fn(features, labels, mode, params):
        spec = model_fn(features, labels, mode, params)
        params["lr"] = 100.0
        return spec

    def input_fn(params):
        params["lr"] = 100.0
        return batches()

    estimator = ts.estimator.Estimator(changing_model_fn, str(tmp_path), params={"lr": 0.01})
    estimator.train(input_fn)
    assert estimator.params == {"lr": 0.01}


def test_members_can_not_be_overridden(tmp_path):
    class Wrong(ts.estimator.Estimator):
        def train(self, input_fn):
            return self

    class Right(ts.estimator.Estimator):
        def further(self):
            return 1

    with pytest.raises(ValueError, match=r"Wrong does override \['train'\]"):
        Wrong(model_fn, str(tmp_path), params={"lr": 1})
    assert Right(model_fn, str(tmp_path), params={"lr": 1}).further() == 1


def test_the_model_fn_can_be_called(tmp_path):
    estimator = make_estimator(tmp_path, lr=0.5)
    features, labels = batches()[0]
    spec = estimator.model_fn(features, labels, ts.estimator.ModeKeys.TRAIN, estimator.config)
    assert spec.train_op.param_groups[0]["lr"] == 0.5


def test_eval_dirs(tmp_path):
    estimator = make_estimator(tmp_path)
    assert estimator.eval_dir() == str(tmp_path / "eval")
    assert estimator.eval_dir("test") == str(tmp_path / "eval_test")


def test_variables_are_known_by_name(tmp_path):
    def adam_model_fn(features, labels, mode):
        module = torch.nn.Sequential(torch.nn.Linear(1, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
        first = torch.optim.Adam(module[0].parameters())
        second = torch.optim.SGD([*module[1].parameters(), *module[2].parameters()], lr=0.1, momentum=0.9)
        loss = torch.nn.functional.mse_loss
        return ts.estimator.EstimatorSpec(mode, module=module, loss=loss, train_op=[first, second])

    estimator = ts.estimator.Estimator(adam_model_fn, str(tmp_path))
    with pytest.raises(ValueError, match="Could not find trained model at"):
        estimator.get_variable_names()
    estimator.train(lambda: [(torch.randn(4, 1), torch.randn(4, 1))] * 2)
    names = estimator.get_variable_names()
    assert names == sorted(names)
    assert {"0.weight", "1.running_mean", "2.bias", "global_step", "optimizer/0.bias/exp_avg"} < set(names)
    assert "optimizer_1/2.weight/momentum_buffer" in names
    assert all(name.split("/")[0] in {"optimizer", "optimizer_1"} for name in names if "/" in name)
    value = estimator.get_variable_value("optimizer/0.weight/exp_avg_sq")
    assert isinstance(value, np.ndarray)
    assert value.shape == (2, 1)
    assert estimator.get_variable_value("global_step") == 2
    with pytest.raises(ts.errors.NotFoundError, match=r"Key 3\.bias not found in checkpoint"):
        estimator.get_variable_value("3.bias")


@pytest.mark.parametrize("strategy", [None, ["cpu:0", "cpu:1"]])
def test_a_compiled_module_has_the_names_of_the_plain_one(tmp_path, strategy):
    def estimator_of(folder, compiled, warm_start_from=None):
        def model_fn(features, labels, mode):
            module = torch.nn.Linear(1, 1)
            module = torch.compile(module, backend="eager") if compiled else module
            optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
            loss = torch.nn.functional.mse_loss
            return ts.estimator.EstimatorSpec(mode, module=module, loss=loss, train_op=optimizer)

        config = ts.estimator.RunConfig(train_distribute=strategy and ts.MirroredStrategy(strategy))
        return ts.estimator.Estimator(model_fn, str(tmp_path / folder), config, warm_start_from=warm_start_from)

    data = [(torch.ones(1, 1), torch.ones(1, 1))] * 2
    first = estimator_of("first", compiled=True).train(lambda: data)
    names = ["bias", "global_step", "optimizer/bias/momentum_buffer", "optimizer/weight/momentum_buffer", "weight"]
    assert first.get_variable_names() == names
    estimator_of("first", compiled=False).train(lambda: data)
    second = estimator_of("second", compiled=True, warm_start_from=first.model_dir).train(lambda: data)
    assert second.get_variable_names() == names


def test_a_damaged_checkpoint_is_passed_over(tmp_path, caplog):
    estimator = make_estimator(tmp_path).train(lambda: batches())
    damaged = tmp_path / "model.ckpt-4.pt"
    damaged.write_bytes(damaged.read_bytes()[:500])
    assert estimator.train(lambda: batches()).get_variable_value("global_step") == 4  # from that of step 0
    assert "ckpt-4.pt is damaged" in caplog.text
    assert "Going on from the checkpoint before it" in caplog.text
    damaged.write_bytes(damaged.read_bytes()[:500])
    assert estimator.train(lambda: batches(), max_steps=4).get_variable_value("global_step") == 4  # not skipped
    for path in tmp_path.glob("*.pt"):
        path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(ts.errors.DataLossError, match="is damaged"):
        estimator.train(lambda: batches())


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    make_estimator(tmp_path).train(lambda: batches())

    def other_model_fn(features, labels, mode):
        module = torch.nn.Linear(1, 1)
        loss = torch.nn.functional.mse_loss
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        return ts.estimator.EstimatorSpec(mode, module=module, loss=loss, train_op=optimizer)

    other = ts.estimator.Estimator(other_model_fn, str(tmp_path))
    message = "The checkpoint is of another model than model_fn makes"
    with pytest.raises(ts.errors.NotFoundError, match=message):
        other.evaluate(lambda: [(torch.ones(1, 1), torch.ones(1, 1))])
    with pytest.raises(ValueError, match=message):
        other.train(lambda: [(torch.ones(1, 1), torch.ones(1, 1))])
