"""Names of tf: the table of them is true, and one that is absent says what to use."""

import csv
import inspect
import re
from pathlib import Path

import pytest

import torchstrategy as ts
from torchstrategy.base import later

TABLE = Path(later.__file__).with_name("tf_names.csv")
with TABLE.open(encoding="utf-8") as file:
    ROWS = [tuple(row.values()) for row in csv.DictReader(file)]


def find(path):
    value = ts
    for name in path.split(".")[1:]:
        is_field = inspect.isclass(value) and name in inspect.signature(value).parameters
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
    with pytest.raises(AttributeError):
        find(path)
    for used in re.findall(r"`(ts\.[\w.]+)", remark):
        find(used)


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
    ],
)
def test_an_absent_name_says_what_to_use(look, remark):
    with pytest.raises(AttributeError, match=re.escape(remark)):
        look()


def test_a_name_that_tf_has_not_either_is_absent_as_ever():
    with pytest.raises(AttributeError, match=r"'DefaultStrategy' object has no attribute 'nonsense'$"):
        _ = ts.get_strategy().nonsense
    with pytest.raises(AttributeError, match=r"module 'torchstrategy' has no attribute 'nonsense'$"):
        _ = ts.nonsense
    assert not hasattr(ts.get_strategy(), "__array__")
