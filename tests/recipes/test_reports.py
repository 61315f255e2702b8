import pytest
import reports
import torch
from matplotlib.image import imread
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
        report.save_images("images.png", torch.rand(2, 1, 3, 4))
    report.save_learning_curve()
    assert capfd.readouterr() == ("", "")
    assert not list(tmp_path.iterdir())


def test_learning_curve_shows_every_epoch():
    loss, accuracy = reports.draw_learning_curve(EPOCHS, "title").axes
    assert [list(line.get_ydata()) for line in loss.lines] == [[1.5, 1.0], [1.2, 1.1]]
    assert [list(line.get_ydata()) for line in accuracy.lines] == [[0.5, 0.75], [0.625, 0.6875]]
    assert list(loss.lines[0].get_xdata()) == [1, 2]


def test_figures_of_other_parts(tmp_path, capsys):
    with reports.Report(tmp_path, "title", is_chief=True) as report:
        report.add_epoch(generator_loss=0.5, discriminator_loss=0.25)
    assert capsys.readouterr().out == "Epoch 1, Generator Loss: 0.5000, Discriminator Loss: 0.2500\n"
    assert set(EventAccumulator(str(tmp_path)).Reload().Tags()["scalars"]) == {"loss/generator", "loss/discriminator"}
    (axes,) = reports.draw_learning_curve(report.epochs, "title").axes
    assert [line.get_label() for line in axes.lines] == ["generator", "discriminator"]
    assert [list(line.get_ydata()) for line in axes.lines] == [[0.5], [0.25]]


@pytest.mark.parametrize("number", [1, 10, 12])
def test_images(tmp_path, number):
    """Rows of ten; each image has a white border one pixel wide, and what is missing in the last row is white."""
    images = torch.rand(number, 1, 3, 4)
    with reports.Report(tmp_path, "title", is_chief=True) as report:
        report.save_images("images.png", images)
    picture = torch.tensor(imread(tmp_path / "images.png"))[..., 0]
    num_rows = (number + 9) // 10
    assert picture.shape == (num_rows * 5, 10 * 6)
    for i in range(10 * num_rows):
        tile = picture[i // 10 * 5 :, i % 10 * 6 :][:5, :6]
        expected = torch.ones(5, 6)
        if i < number:
            expected[1:4, 1:5] = images[i, 0]
        torch.testing.assert_close(tile, expected, rtol=0, atol=0.01)
