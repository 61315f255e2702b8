import math
import types

import pytest
import torchmetrics

from torchstrategy.fit.callbacks.stopping import Goal, check_mode, find_goal, read_monitored


def goal(monitor, mode="auto", metrics=(), names=None):
    model = types.SimpleNamespace(metrics=metrics, metrics_names=names)
    return find_goal(monitor, mode, model, "EarlyStopping")


@pytest.mark.parametrize(
    ("monitor", "larger"),
    [
        ("loss", False),
        ("val_loss", False),
        ("val_head_loss", False),
        ("mse", False),
        ("val_mean_absolute_error", False),
        ("false_positives", False),
        ("accuracy", True),
        ("val_sparse_categorical_accuracy", True),
        ("val_auc", True),
        ("mean_io_u", True),
        ("precision", True),
    ],
)
def test_auto_knows_names(monitor, larger):
    assert goal(monitor).larger is larger


def test_auto_asks_the_metric_first():
    class Speed:
        name = "accuracy_time"
        higher_is_better = False

    assert goal("val_accuracy_time", metrics=[Speed()]).larger is False
    metric = torchmetrics.ExplainedVariance()
    assert goal("val_mine", metrics=[metric], names=["mine"]).larger is True


def test_auto_that_cannot_tell():
    with pytest.raises(ValueError, match=r"monitor='val_mine'.*Pass mode='max' or mode='min'"):
        goal("val_mine")
    assert goal("val_mine", "max").larger
    assert not goal("accuracy", "min").larger


def test_mode_is_checked():
    assert check_mode("max", "ModelCheckpoint") == "max"
    with pytest.raises(ValueError, match=r"ModelCheckpoint\(mode=...\) must be .*Received: 'maximum'"):
        check_mode("maximum", "ModelCheckpoint")


def test_improvements():
    smaller, larger = Goal(larger=False, min_delta=0.1), Goal(larger=True, min_delta=0.1)
    assert smaller.is_better(0.85, 1.0)
    assert not smaller.is_better(0.95, 1.0)
    assert larger.is_better(1.15, 1.0)
    assert not larger.is_better(1.05, 1.0)
    for one in (smaller, larger):
        assert one.is_better(5.0, one.worst)
        assert not one.is_better(math.nan, one.worst)
    assert not Goal(larger=True).is_better(1.0, 1.0)


def test_a_name_that_is_not_in_the_logs_warns_once():
    assert read_monitored({"acc": 1}, "acc", "EarlyStopping") == 1.0
    logs = {"loss": 1.0, "acc": 1.0}
    with pytest.warns(UserWarning, match=r"'val_acc_1', which is not in the logs.* have: acc, loss. Pass validation"):
        assert read_monitored(logs, "val_acc_1", "EarlyStopping") is None
    assert read_monitored(logs, "val_acc_1", "EarlyStopping") is None  # a warning would be an error
    with pytest.warns(UserWarning, match="have: nothing"):
        read_monitored(None, "x", "EarlyStopping")
