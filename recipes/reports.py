"""What the chief of a training recipe tells: messages, a progress bar, TensorBoard events and the learning curve."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

COLORS = {"train": "#7a8a99", "test": "#d1495b"}


class Report:
    """The report of one run; on other ranks than the chief every method is silent.

    Args:
        run_path: the folder of the run.
        title: the heading of the learning curve.
        is_chief: whether this process tells anything.
    """

    def __init__(self, run_path: Path, title: str, *, is_chief: bool) -> None:
        self.run_path = run_path
        self.title = title
        self.is_chief = is_chief
        self.epochs: list[dict[str, float]] = []
        self._writer = SummaryWriter(str(run_path)) if is_chief else None

    def __enter__(self) -> Report:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._writer is not None:
            self._writer.close()

    def say(self, message: str) -> None:
        """Print a line without tearing the progress bar."""
        if self.is_chief:
            tqdm.write(message)

    def progress(self, batches: Iterable[Any], epoch: int, total: int) -> Iterator[Any]:
        """Iterate over the batches of an epoch under a progress bar, where there is a terminal."""
        hidden = None if self.is_chief else True  # None hides it where stderr is no terminal
        yield from tqdm(batches, f"Epoch {epoch}", total, leave=False, disable=hidden, unit="step")

    def add_epoch(self, **figures: float) -> None:
        """Tell the figures of an epoch: losses and accuracies of the training and the test examples."""
        self.epochs.append(figures)
        if self._writer is None:
            return
        self.say(
            f"Epoch {len(self.epochs)}, Loss: {figures['train_loss']:.4f}, "
            f"Accuracy: {100 * figures['train_accuracy']:.2f}, Test Loss: {figures['test_loss']:.4f}, "
            f"Test Accuracy: {100 * figures['test_accuracy']:.2f}"
        )
        for name, value in figures.items():
            part, _, kind = name.partition("_")
            self._writer.add_scalar(f"{kind}/{part}", value, len(self.epochs))
        self._writer.flush()

    def save_learning_curve(self) -> None:
        """Draw the losses and accuracies of all epochs into ``learning_curve.png``."""
        if self.is_chief:
            draw_learning_curve(self.epochs, self.title).savefig(self.run_path / "learning_curve.png")


def draw_learning_curve(epochs: list[dict[str, float]], title: str) -> Figure:
    """Draw loss and accuracy over the epochs, each for training and test examples.

    Args:
        epochs: the figures of each epoch: ``train_loss``, ``test_loss``, ``train_accuracy`` and ``test_accuracy``.
        title: the heading.

    Returns:
        A figure of 1500 by 660 pixels.
    """
    style = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#9aa5b1"}
    with mpl.rc_context(style):
        figure = Figure(figsize=(10, 4.4), dpi=150, layout="constrained")
        figure.suptitle(title, x=0.015, ha="left", fontsize=13, fontweight="bold")
        for axes, kind in zip(figure.subplots(1, 2), ("loss", "accuracy"), strict=True):
            numbers = range(1, len(epochs) + 1)
            for part, color in COLORS.items():
                values = [epoch[f"{part}_{kind}"] for epoch in epochs]
                axes.plot(numbers, values, color=color, linewidth=2.2, marker="o", markersize=4, label=part)
            end = (len(epochs), values[-1])
            axes.annotate(f"{end[1]:.3f}", end, (8, 0), textcoords="offset points", va="center", color=color)
            axes.set_title(kind.capitalize(), loc="left", fontsize=11)
            axes.set_xlabel("epoch")
            axes.set_xlim(0.7, len(epochs) + max(0.5, 0.09 * len(epochs)))
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
            axes.tick_params(length=0)
            axes.legend(frameon=False)
    return figure
