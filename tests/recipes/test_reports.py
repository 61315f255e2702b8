import reports
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

EPOCHS = [
    {"train_loss": 1.5, "train_accuracy": 0.5, "test_loss": 1.2, "test_accuracy": 0.625},
    {"train_loss": 1.0, "train_accuracy": 0.75, "test_loss": 1.1, "test_accuracy": 0.6875},
]


def test_chief_reports(tmp_path, capsys):
    with reports.Report(tmp_path, "title", is_chief=True) as report:
        assert list(report.progress(range(3), epoch=1, total=3)) == [0, 1, 2]
        for figures in EPOCHS:
            report.add_epoch(**figures)
    report.save_learning_curve()
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "Epoch 2, Loss: 1.0000, Accuracy: 75.00, Test Loss: 1.1000, Test Accuracy: 68.75"
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == {"loss/train", "loss/test", "accuracy/train", "accuracy/test"}
    assert [(event.step, event.value) for event in events.Scalars("accuracy/test")] == [(1, 0.625), (2, 0.6875)]
    assert (tmp_path / "learning_curve.png").read_bytes().startswith(b"\x89PNG")


def test_other_ranks_are_silent(tmp_path, capfd):
    with reports.Report(tmp_path, "title", is_chief=False) as report:
        assert list(report.progress(range(3), epoch=1, total=3)) == [0, 1, 2]
        report.add_epoch(**EPOCHS[0])
        report.say("message")
    report.save_learning_curve()
    assert capfd.readouterr() == ("", "")
    assert not list(tmp_path.iterdir())


def test_learning_curve_shows_every_epoch():
    loss, accuracy = reports.draw_learning_curve(EPOCHS, "title").axes
    assert [list(line.get_ydata()) for line in loss.lines] == [[1.5, 1.0], [1.2, 1.1]]
    assert [list(line.get_ydata()) for line in accuracy.lines] == [[0.5, 0.75], [0.625, 0.6875]]
    assert list(loss.lines[0].get_xdata()) == [1, 2]
