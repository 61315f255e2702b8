import numpy as np
import pytest

from tests.fit.callbacks.loops import Model, fit
from torchstrategy.callbacks import CSVLogger

LOGS = [{"loss": 2.0, "acc": 0.5}, {"loss": 1.5, "acc": 0.625}, {"loss": 1e-7, "acc": 1.0}]
TEXT = "epoch,acc,loss\n0,0.5,2.0\n1,0.625,1.5\n2,1.0,1e-07\n"


def test_a_row_for_each_epoch(tmp_path):
    path = tmp_path / "deep" / "log.csv"
    fit(CSVLogger(path), LOGS)
    assert path.read_text() == TEXT
    assert list(path.parent.iterdir()) == [path]


def test_separator(tmp_path):
    fit(CSVLogger(f"{tmp_path}/log.csv", separator=";"), LOGS[:1])
    assert (tmp_path / "log.csv").read_text() == "epoch;acc;loss\n0;0.5;2.0\n"


def test_rows_are_there_after_each_epoch(tmp_path):
    path = tmp_path / "log.csv"
    lengths = []
    fit(CSVLogger(path), LOGS, before_epoch=lambda *_: lengths.append(len(path.read_text()) if path.exists() else 0))
    assert lengths == [0, 25, 37]


def test_an_old_file_is_replaced_or_continued(tmp_path):
    path = tmp_path / "log.csv"
    fit(CSVLogger(path), LOGS[:2])
    fit(CSVLogger(path, append=True), LOGS[2:], initial_epoch=2)
    assert path.read_text() == TEXT
    fit(CSVLogger(path), LOGS)
    assert path.read_text() == TEXT


def test_names_that_come_later_get_a_column(tmp_path):
    path = tmp_path / "log.csv"
    fit(CSVLogger(path), [{"loss": 2.0}, {"loss": 1.0, "val_loss": 3.0}, {"loss": 0.5}])
    assert path.read_text() == "epoch,loss,val_loss\n0,2.0,NA\n1,1.0,3.0\n2,0.5,NA\n"
    fit(CSVLogger(path, append=True), [{"loss": 0.25, "auc": 0.5}])
    assert path.read_text().splitlines()[0] == "epoch,loss,val_loss,auc"
    assert path.read_text().splitlines()[-1] == "0,0.25,NA,0.5"


def test_several_numbers_are_one_cell(tmp_path):
    fit(CSVLogger(tmp_path / "log.csv"), [{"recall": np.array([0.5, 1.0]), "f": np.float32(0.5), "s": np.array(2.0)}])
    assert (tmp_path / "log.csv").read_text() == 'epoch,f,recall,s\n0,0.5,"""[0.5, 1.0]""",2.0\n'


@pytest.mark.parametrize("append", [False, True])
@pytest.mark.parametrize("saved_after", [1, 2])
def test_a_restored_training_goes_on_with_its_rows(tmp_path, append, saved_after):
    path = tmp_path / "log.csv"
    before = ""
    if append:
        fit(CSVLogger(path), LOGS)
        before = TEXT
    first = CSVLogger(path, append=append)
    every, _ = fit(first, LOGS[:saved_after])
    state = every.state_dict()
    with path.open("a") as file:
        file.write("1,0.625,1.5\n2,1.")  # rows after the backup, the last one cut off
    fit(CSVLogger(path, append=append), LOGS[saved_after:], initial_epoch=saved_after, state=state)
    rows = TEXT.split("\n", 1)[1]
    assert path.read_text() == (before + rows if append else TEXT)


def test_a_restored_training_without_its_file_starts_one(tmp_path):
    path = tmp_path / "log.csv"
    every, _ = fit(CSVLogger(path), LOGS[:2])
    path.unlink()
    fit(CSVLogger(path), LOGS[2:], initial_epoch=2, state=every.state_dict())
    assert path.read_text() == "epoch,acc,loss\n2,1.0,1e-07\n"


def test_only_the_chief_writes(tmp_path):
    fit(CSVLogger(tmp_path / "log.csv"), LOGS, model=Model(is_chief=False))
    assert list(tmp_path.iterdir()) == []


def test_the_file_must_be_a_path():
    with pytest.raises(TypeError, match=r"CSVLogger\(filename=...\) must be a path. Received: 3"):
        CSVLogger(3)
