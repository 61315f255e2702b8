"""The rows of TPUs in the table of docs/supported.md."""

import pytest

import torchstrategy as ts
from tests import cells
from tests.test_supported import EQUAL, REFUSED, TPU_ROWS
from tests.tpu import chip_programs as chips
from tests.tpu.processes import XlaProcesses
from torchstrategy.testing import run_in_processes


def train(way, folder):
    """Train under the strategy of this process's virtual devices."""
    return cells.WAYS[way](ts.TPUStrategy(), folder)


def train_on_one(way, folder):
    """Train with one virtual device in each process."""
    return cells.WAYS[way](chips.make(), folder)


def test_the_page_says_what_is_tested():
    assert [row[4] for row in TPU_ROWS] == [(EQUAL, EQUAL, REFUSED)] * 2


@pytest.mark.parametrize("way", ["custom_loop", "fit"])
def test_four_devices_of_one_process_train_the_weights_of_one_replica(xla_process, way, tmp_path):
    expected = cells.train(way, "default", None, tmp_path)
    assert xla_process(4).run(train, way, tmp_path) == pytest.approx(expected, rel=0, abs=1e-10)


@pytest.mark.parametrize("way", ["custom_loop", "fit"])
def test_a_process_for_each_device_trains_the_weights_of_one_replica(way, tmp_path):
    XlaProcesses()
    expected = cells.train(way, "default", None, tmp_path)
    for found in run_in_processes(train_on_one, 2, way, tmp_path, timeout_s=150):
        assert found == pytest.approx(expected, rel=0, abs=1e-10)


def test_an_estimator_refuses_tpus(xla_process, tmp_path):
    with pytest.raises(Exception, match="TPUStrategy"):
        xla_process(4).run(train, "estimator", tmp_path)
