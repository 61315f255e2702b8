import logging
import os

import numpy as np
import pytest
import torch

import torchstrategy as ts
from torchstrategy.estimator.eval_metrics import read_eval_metrics, write_eval_metrics


def test_what_is_written_is_read(tmp_path):
    write_eval_metrics(tmp_path / "eval", 300, {"loss": 0.5, "accuracy": np.float32(0.1), "global_step": 300})
    write_eval_metrics(tmp_path / "eval", 7, {"loss": torch.tensor(2.0)})
    assert read_eval_metrics(tmp_path / "eval") == {
        7: {"loss": 2.0},
        300: {"loss": 0.5, "accuracy": float(np.float32(0.1))},
    }
    assert list(read_eval_metrics(tmp_path / "eval")) == [7, 300]
    assert read_eval_metrics(tmp_path / "nothing") == {}


def test_numbers_beyond_float32_become_infinite(tmp_path):
    write_eval_metrics(tmp_path, 1, {"loss": 1e40, "other": float("nan")})
    metrics = read_eval_metrics(tmp_path)[1]
    assert metrics["loss"] == np.inf
    assert np.isnan(metrics["other"])


def test_the_last_evaluation_of_a_step_counts(tmp_path):
    write_eval_metrics(tmp_path, 1, {"loss": 1.0})
    write_eval_metrics(tmp_path, 1, {"loss": 2.0})
    assert read_eval_metrics(tmp_path) == {1: {"loss": 2.0}}
    os.utime(min(tmp_path.iterdir()), (2e9, 2e9))  # as if it was copied
    assert read_eval_metrics(tmp_path) == {1: {"loss": 2.0}}


def test_what_is_no_number_is_left_out(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "torchstrategy"):
        write_eval_metrics(tmp_path, 1, {"loss": 1.0, "confusion": np.eye(2)})
    assert read_eval_metrics(tmp_path) == {1: {"loss": 1.0}}
    assert "Skipping summary for confusion" in caplog.text
    assert "Saving dict for global step 1: confusion = " in caplog.text


def test_tensorboard_reads_the_files(tmp_path):
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    write_eval_metrics(tmp_path, 2**40, {"loss": 0.5})
    (path,) = tmp_path.iterdir()
    first, second = loader.LegacyEventFileLoader(str(path)).Load()
    assert first.file_version == "brain.Event:2"
    assert second.step == 2**40
    assert [(value.tag, value.simple_value) for value in second.summary.value] == [("loss", 0.5)]


def test_summaries_of_tensorboard_are_read_and_a_cut_file_is_no_error(tmp_path):
    pytest.importorskip("tensorboard")
    writer = ts.summary.create_file_writer(tmp_path)
    with writer.as_default(step=3):
        ts.summary.scalar("loss", 0.25)
        ts.summary.histogram("weights", torch.ones(3))
    writer.close()
    (path,) = tmp_path.iterdir()
    assert read_eval_metrics(tmp_path) == {3: {"loss": 0.25}}
    path.write_bytes(path.read_bytes()[:-5])  # as it is while another process writes it
    assert read_eval_metrics(tmp_path) == {3: {"loss": 0.25}}
