"""Names of tf: the table of them is true, and one that is absent says what to use."""

import csv
import inspect
import re
from pathlib import Path

import pytest
import torch

import torchstrategy as ts
from torchstrategy.base import later

TABLE = Path(later.__file__).with_name("tf_names.csv")
with TABLE.open(encoding="utf-8") as file:
    ROWS = [tuple(row.values()) for row in csv.DictReader(file)]


def find(path, value=ts, *, takes_fields=True):
    for name in path.split(".")[1:]:
        is_field = takes_fields and inspect.isclass(value) and name in inspect.signature(value).parameters
        value = None if is_field else getattr(value, name)
    return value


def test_each_name_of_tf_has_one_row_that_says_where_it_is_or_what_to_use():
    assert len({name for name, *_ in ROWS}) == len(ROWS)
    assert sum(name.startswith("tf.distribute.") for name, *_ in ROWS) >= 435
    assert sum(name.startswith("tf.compat.v1.distribute.") for name, *_ in ROWS) >= 309
    assert all(bool(here) != bool(remark) for _, here, remark in ROWS)


def test_names_that_are_here_are_found():
    for _, here, _ in ROWS:
        if here:
            find(here)


@pytest.mark.parametrize(("name", "remark"), [(name, remark) for name, here, remark in ROWS if not here])
def test_names_that_are_not_here_are_absent_and_what_to_use_is_there(name, remark):
    path = "ts." + name.removeprefix("tf.").removeprefix("distribute.").removeprefix("keras.")
    with pytest.raises(AttributeError) as absent:
        find(path, takes_fields=False)
    if inspect.ismodule(absent.value.obj) and absent.value.name == path.rpartition(".")[2]:
        assert remark in str(absent.value)
    for used in re.findall(r"`(ts\.[\w.]+)", remark):
        find(used)
    for used in re.findall(r"`(torch\.(?!utils\.)[\w.]+)", remark):
        find(used, torch)


@pytest.mark.parametrize(
    ("look", "remark"),
    [
        (lambda: ts.distribute, "'torchstrategy' has no attribute 'distribute'. Its names are in `ts` itself."),
        (lambda: ts.experimental.rpc, "Use `torch.distributed.rpc`"),
        (lambda: ts.compat.v1.distribute.get_loss_reduction, "compute_average_loss"),
        (lambda: ts.losses.mse, 'Use `MeanSquaredError` or "mse".'),
        (lambda: ts.OneDeviceStrategy("cpu:0").experimental_run_v2, "It is `run` now."),
        (lambda: ts.get_strategy().extended.read_var, "Use the variable itself"),
        (lambda: ts.data.Dataset.range(3).ragged_batch, "Use `padded_batch`."),
        (lambda: ts.data.Dataset.range(3).make_one_shot_iterator, "Use `iter(dataset)`."),
        (lambda: ts.data.Dataset.range(3).output_shapes, "Use `element_spec`."),
        (lambda: ts.data.make_initializable_iterator, "Use `iter(dataset)`: there is nothing to initialize."),
        (lambda: ts.get_strategy().num_replicas, "It is `num_replicas_in_sync`."),
        (lambda: ts.get_replica_context().replica_id, "It is `replica_id_in_sync_group`."),
        (
            lambda: ts.config.experimental,
            "`list_physical_devices` and `list_logical_devices` are in `ts.config`; memory",
        ),
        (
            lambda: ts.optimizers.SGD,
            '`ts.optimizers.get("sgd")(parameters)` has Keras\' defaults; those of `torch.',
        ),
        (lambda: ts.models.Sequential, "Use `ts.Model(torch.nn.Sequential(...))`."),
        (lambda: ts.utils.to_categorical, "Use `torch.nn.functional.one_hot`."),
        (lambda: ts.keras, "datasets torchvision's or arrays."),
        (lambda: ts.datasets, "Use torchvision's, or arrays: `ts.data.Dataset.from_tensor_slices((images, labels))`."),
        (lambda: ts.mixed_precision, 'Use `compile(amp="bf16")`'),
        (lambda: ts.experimental.MirroredStrategy, "It is `ts.MirroredStrategy`."),
        (lambda: ts.add_n, "Use `sum(tensors)`"),
        (lambda: ts.compat.v1.estimator, "It is `ts.estimator`."),
        (
            lambda: ts.estimator.inputs,
            "Return `ts.data.Dataset.from_tensor_slices((features, labels))` from `input_fn`",
        ),
        # A name of tf.compat.v1 is looked up as one of tf, and the other way round.
        (lambda: ts.compat.v1.Session, "'torchstrategy.compat.v1' has no attribute 'Session'. Nothing is deferred"),
        (lambda: ts.compat.v1.reduce_sum, "Use `torch.sum`."),
        (lambda: ts.ConfigProto, "'torchstrategy' has no attribute 'ConfigProto'. Nothing is deferred"),
        (lambda: ts.logging, 'Use `logging.getLogger("torchstrategy")`.'),
        (lambda: ts.train.AdamOptimizer, "Use `torch.optim.Adam(parameters, lr)`."),
        (
            lambda: ts.Model(torch.nn.Flatten()).trainable_variables,
            "'Model' object has no attribute 'trainable_variables'. Use `",
        ),
    ],
)
def test_an_absent_name_says_what_to_use(look, remark):
    with pytest.raises(AttributeError, match=re.escape(remark)):
        look()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            ts.experimental.ParameterServerStrategy,
            "missing a required argument: 'cluster_resolver'. A cluster",
        ),
        (lambda: ts.ParameterServerStrategy(), "`ts.compat.v1.distribute.experimental.ParameterServerStrategy()`"),
        (
            lambda: ts.MultiWorkerMirroredStrategy(communication="ring"),
            "unexpected keyword argument 'communication'. ",
        ),
        (lambda: ts.experimental.MultiWorkerMirroredStrategy(communication_options=None), "older form takes `communic"),
        (lambda: ts.data.Dataset.from_generator(list, output_types=int), "unexpected keyword argument 'output_types'"),
        (lambda: ts.data.Dataset.from_generator(list, torch.int32), "leave `output_types` and `output_shapes` out"),
    ],
)
def test_arguments_of_another_version_of_tf_say_what_to_write(call, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        call()


def test_explained_arguments_keep_the_signature():
    parameters = inspect.signature(ts.ParameterServerStrategy).parameters
    assert parameters["cluster_resolver"].default is inspect.Parameter.empty


def test_a_name_that_tf_has_not_either_is_absent_as_ever():
    with pytest.raises(AttributeError, match=r"'DefaultStrategy' object has no attribute 'nonsense'$"):
        _ = ts.get_strategy().nonsense
    with pytest.raises(AttributeError, match=r"module 'torchstrategy' has no attribute 'nonsense'$"):
        _ = ts.nonsense
    assert not hasattr(ts.get_strategy(), "__array__")


def test_what_is_public_is_completed_and_nothing_else():
    for module in (ts, ts.metrics, ts.cluster_resolver):
        assert [name for name in dir(module) if not name.startswith("__")] == sorted(
            set(module.__all__) - {"__version__"}
        )


def test_a_model_has_layers_of_the_same_names():
    with ts.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        model = ts.Model(torch.nn.Flatten())
        model.layers = torch.nn.Linear(2, 1)
        model.compile(None, "mse")
    assert model.evaluate(torch.ones(4, 1), torch.ones(4, 1), verbose=0) == 0.0
    assert isinstance(model.layers, torch.nn.Linear)
    with pytest.raises(AttributeError, match=r"Use `model.load_state_dict"):
        _ = model.set_weights
    with pytest.raises(AttributeError, match=r"'Model' object has no attribute 'nonsense'$"):
        _ = model.nonsense
