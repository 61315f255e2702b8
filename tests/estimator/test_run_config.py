import json

import pytest
import torch

import torchstrategy as ts
from tests.clusters import as_task
from torchstrategy.base.devices import Placement

est = ts.estimator
CLUSTER = {"chief": ["h0:1"], "worker": ["h1:1", "h2:1"], "ps": ["h3:1", "h4:1"], "evaluator": ["h5:1"]}
WORKERS = {"worker": ["h1:1", "h2:1"]}


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    monkeypatch.delenv("TF_CONFIG", raising=False)


@pytest.fixture
def tf_config(monkeypatch):
    def set_variable(value):
        monkeypatch.setenv("TF_CONFIG", json.dumps(value))

    return set_variable


def mirrored():
    return ts.MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.mark.parametrize(
    "arguments",
    [
        {"save_checkpoints_steps": 1, "save_checkpoints_secs": 1},
        {"save_checkpoints_steps": -1},
        {"save_checkpoints_secs": -1},
        {"save_summary_steps": -1},
        {"save_checkpoints_steps": "3"},
        {"keep_checkpoint_max": -1},
        {"keep_checkpoint_every_n_hours": 0},
        {"log_step_count_steps": 0},
        {"session_creation_timeout_secs": 0},
        {"tf_random_seed": 1.5},
        {"experimental_max_worker_delay_secs": 1.5},
        {"model_dir": ""},
        {"protocol": "carrier pigeon"},
        {"session_config": object()},
        {"device_fn": lambda op: "/cpu:0"},
        {"experimental_distribute": object()},
    ],
    ids=lambda arguments: ",".join(arguments),
)
def test_wrong_values(arguments):
    with pytest.raises(ValueError, match="|".join(arguments)):
        est.RunConfig(**arguments)


@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (3, TypeError, "TF_CONFIG must be a JSON object such as"),
        ({"cluster": CLUSTER, "task": "chief"}, TypeError, "task must be an object with type and index"),
        ({"cluster": CLUSTER, "task": {"type": "worker", "index": "x"}}, ValueError, "task.index must be an integer"),
    ],
)
def test_a_tf_config_of_another_form(tf_config, value, error, message):
    tf_config(value)
    with pytest.raises(error, match=message):
        est.RunConfig()


def test_a_tf_config_that_is_not_json(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "{chief")
    with pytest.raises(json.JSONDecodeError, match=r"TF_CONFIG is not JSON.*Write for example"):
        est.RunConfig()


def test_nothing_need_be_saved_or_logged():
    config = est.RunConfig(
        save_summary_steps=0,
        save_checkpoints_steps=None,
        save_checkpoints_secs=None,
        keep_checkpoint_max=0,
        log_step_count_steps=None,
    )
    assert (config.save_checkpoints_steps, config.save_checkpoints_secs, config.keep_checkpoint_max) == (None, None, 0)


def test_replace_is_a_copy_that_is_checked():
    config = est.RunConfig(save_checkpoints_steps=5)
    other = config.replace(save_checkpoints_secs=7, model_dir="there")
    assert (other.save_checkpoints_steps, other.save_checkpoints_secs, other.model_dir) == (None, 7, "there")
    assert (config.save_checkpoints_steps, config.save_checkpoints_secs, config.model_dir) == (5, None, None)
    assert other.replace(save_checkpoints_steps=3).save_checkpoints_secs is None
    assert config.replace(save_checkpoints_steps=None).save_checkpoints_secs is None
    for wrong in (
        {"save_checkpoints_steps": 1, "save_checkpoints_secs": 1},
        {"keep_checkpoint_max": -1},
        {"master": ""},
    ):
        with pytest.raises(ValueError, match="|".join(wrong)):
            config.replace(**wrong)


def test_a_class_of_the_programs_own_stays_one():
    class Mine(est.RunConfig):
        pass

    assert isinstance(Mine().replace(model_dir="there"), Mine)


def test_model_dir_may_be_a_path(tmp_path):
    assert est.RunConfig(model_dir=tmp_path).model_dir == str(tmp_path)
    assert est.RunConfig().replace(model_dir=tmp_path).model_dir == str(tmp_path)


def test_model_dir_of_the_environment(tf_config):
    tf_config({"model_dir": "there"})
    assert est.RunConfig().model_dir == est.RunConfig(model_dir="there").model_dir == "there"
    with pytest.raises(ValueError, match="model_dir"):
        est.RunConfig(model_dir="elsewhere")
    tf_config({"model_dir": ""})
    with pytest.raises(ValueError, match="model_dir"):
        est.RunConfig()


@pytest.mark.parametrize(
    ("task", "is_chief", "global_id", "master"),
    [
        (("chief", 0), True, 0, "grpc://h0:1"),
        (("worker", 0), False, 2, "grpc://h1:1"),  # after the chief and, by name, the evaluator
        (("worker", 1), False, 3, "grpc://h2:1"),
        (("ps", 1), False, 5, "grpc://h4:1"),
    ],
)
def test_task_of_a_cluster(tf_config, task, is_chief, global_id, master):
    tf_config({"cluster": CLUSTER, "task": {"type": task[0], "index": task[1]}})
    config = est.RunConfig()
    assert (config.task_type, config.task_id) == task
    assert (config.is_chief, config.global_id_in_cluster, config.master) == (is_chief, global_id, master)
    assert (config.num_worker_replicas, config.num_ps_replicas) == (3, 2)
    assert config.cluster_spec.as_dict() == CLUSTER


@pytest.mark.parametrize("cluster", [CLUSTER, {"chief": ["h0:1"]}])
def test_an_evaluator_sees_no_cluster(tf_config, cluster):
    tf_config({"cluster": cluster, "task": {"type": "evaluator", "index": 0}, "eval_session_master": "there"})
    config = est.RunConfig()
    assert (config.task_type, config.is_chief, config.global_id_in_cluster) == ("evaluator", False, None)
    assert (config.num_worker_replicas, config.num_ps_replicas, config.master) == (0, 0, "")
    assert not config.cluster_spec
    assert config.evaluation_master == "there"


def test_a_master_is_a_chief(tf_config):
    cluster = {"master": ["h0:1"], "worker": ["h1:1"]}
    tf_config({"cluster": cluster, "task": {"type": "master", "index": 0}})
    config = est.RunConfig()
    assert (config.is_chief, config.num_worker_replicas, config.global_id_in_cluster) == (True, 2, 0)
    tf_config({"cluster": cluster, "task": {"type": "evaluator", "index": 0}})
    with pytest.raises(ValueError, match="master"):
        est.RunConfig()
    tf_config({"cluster": {**cluster, "chief": ["h2:1"]}, "task": {"type": "master", "index": 0}})
    with pytest.raises(ValueError, match="master"):
        est.RunConfig()


@pytest.mark.parametrize(
    "value",
    [
        {"cluster": WORKERS, "task": {"type": "worker", "index": 0}},
        {"cluster": {"chief": ["h0:1", "h1:1"]}, "task": {"type": "chief", "index": 0}},
        {"cluster": CLUSTER},
        {"cluster": CLUSTER, "task": {"type": "worker"}},
        {"cluster": CLUSTER, "task": {"index": 0}},
        {"cluster": CLUSTER, "task": {"type": "worker", "index": -1}},
        {"cluster": CLUSTER, "task": {"type": "worker", "index": 2}},
        {"cluster": CLUSTER, "task": {"type": "boss", "index": 0}},
        {"cluster": CLUSTER, "task": {"type": "worker", "index": 0}, "eval_session_master": "there"},
        {"task": {"type": "chief", "index": 0}},
        {"task": {"type": "worker", "index": 1}},
    ],
)
def test_wrong_environments(tf_config, value):
    tf_config(value)
    with pytest.raises(ValueError, match=r"task|Task|node|evaluator"):
        est.RunConfig()


def test_service(tf_config):
    tf_config({"service": {"key": 1}})
    assert est.RunConfig().service == {"key": 1}
    tf_config({"service": "name"})
    with pytest.raises(TypeError, match="service"):
        est.RunConfig()


@pytest.mark.parametrize("index", [0, 1])
def test_workers_of_a_strategy_need_no_chief_and_keep_their_numbers(tf_config, index):
    strategy = mirrored()
    tf_config({"cluster": WORKERS, "task": {"type": "worker", "index": index}})
    config = est.RunConfig(train_distribute=strategy)
    assert (config.task_type, config.task_id, config.is_chief) == ("worker", index, index == 0)
    assert (config.num_worker_replicas, config.global_id_in_cluster) == (2, index)
    with pytest.raises(ValueError, match="chief"):
        config.replace(train_distribute=None)
    with pytest.raises(ValueError, match="chief"):
        est.RunConfig(eval_distribute=strategy)


def test_a_strategys_own_cluster():
    resolver = ts.cluster_resolver.SimpleClusterResolver(
        ts.train.ClusterSpec({"worker": ["h0:1"]}), task_type="worker", task_id=0
    )
    with as_task(None):
        strategy = ts.MultiWorkerMirroredStrategy(resolver, devices=["cpu:0"])
        config = est.RunConfig(train_distribute=strategy)
    assert config.cluster_spec.as_dict() == {"worker": ["h0:1"]}
    assert config.is_chief


def task_under_torchrun():
    config = est.RunConfig(train_distribute=ts.MultiWorkerMirroredStrategy(devices=["cpu:0"]))
    return config.task_type, config.task_id, config.is_chief, config.num_worker_replicas


@pytest.mark.timeout(60)
def test_torchruns_ranks_are_workers():
    with ts.testing.ProcessPool(2) as pool:
        assert pool.run(task_under_torchrun) == [("worker", 0, True, 2), ("worker", 1, False, 2)]


@pytest.mark.parametrize("name", ["train_distribute", "eval_distribute"])
def test_strategies_that_an_estimator_refuses(name):
    for cls, advice in ((ts.TPUStrategy, "fit"), (ts.ParameterServerStrategy, r"ts\.compat\.v1")):
        strategy = cls.__new__(cls)  # neither a TPU nor a cluster is at hand
        strategy.placement = Placement(1, 0, (torch.device("xla" if cls is ts.TPUStrategy else "cpu", 0),))
        with pytest.raises(ValueError, match=advice):
            est.RunConfig(**{name: strategy})
    with pytest.raises(TypeError, match=name):
        est.RunConfig(**{name: "mirrored"})


def test_repr_names_what_was_set():
    assert "keep_checkpoint_max=2" in repr(est.RunConfig(keep_checkpoint_max=2))
