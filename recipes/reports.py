"""What the chief of a training recipe tells: messages, a progress bar, TensorBoard events, pictures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.image import imsave
from matplotlib.ticker import MaxNLocator
from torch import Tensor, nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

COLORS = ("#7a8a99", "#d1495b")
Curve = list[tuple[float, float]]


class Report:
    """The report of one run; on other ranks than the chief every method is silent.

    Args:
        run_path: the folder of the run.
        title: the heading of the learning curve.
        is_chief: whether this process tells anything.
        first_epoch: the number of the first epoch that it is told of.
    """

    def __init__(self, run_path: Path, title: str, *, is_chief: bool, first_epoch: int = 1) -> None:
        self.run_path = run_path
        self.title = title
        self.is_chief = is_chief
        self.epochs: list[dict[str, float]] = []
        self._first_epoch = first_epoch
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
        """Tell the figures of an epoch.

        Args:
            figures: named ``PART_KIND``, such as ``test_accuracy``; the kind "accuracy" is told in percent.
        """
        self.epochs.append(figures)
        if self._writer is None:
            return
        epoch = self._first_epoch + len(self.epochs) - 1
        texts = [f"Epoch {epoch}"]
        for name, value in figures.items():
            part, kind = name.split("_")
            label = name.removeprefix("train_").replace("_", " ").title().replace("Auc", "AUC")
            texts.append(f"{label}: {100 * value:.2f}" if kind == "accuracy" else f"{label}: {value:.4f}")
            self._writer.add_scalar(f"{kind}/{part}", value, epoch)
        self.say(", ".join(texts))
        self._writer.flush()

    def save_images(self, name: str, images: Tensor) -> None:
        """Save images ``[number, 1, height, width]`` in [0, 1] as one picture, in rows of ten."""
        if self._writer is None:
            return
        missing = -len(images) % 10
        rows = nn.functional.pad(images[:, 0].cpu(), (1, 1, 1, 1, 0, missing), value=1.0).unflatten(0, (-1, 10))
        grid = rows.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)
        imsave(self.run_path / name, grid.numpy(), cmap="gray", vmin=0, vmax=1)

    def save_learning_curve(self) -> None:
        """Draw the losses and accuracies of all epochs into ``learning_curve.png``."""
        if self.is_chief:
            figure = draw_learning_curve(self.epochs, self.title, self._first_epoch)
            figure.savefig(self.run_path / "learning_curve.png")


def draw_learning_curve(epochs: list[dict[str, float]], title: str, first_epoch: int = 1) -> Figure:
    """Draw the figures of all epochs, those of one kind into one diagram.

    Args:
        epochs: the figures of each epoch, as ``Report.add_epoch`` takes them.
        title: the heading.
        first_epoch: the number of the first one.

    Returns:
        A figure 660 pixels high and 750 wide for each kind.
    """
    curves: dict[str, dict[str, Curve]] = {}
    for name in epochs[-1]:
        part, kind = name.split("_")
        curves.setdefault(kind, {})[part] = [(first_epoch + i, epoch[name]) for i, epoch in enumerate(epochs)]
    figure = draw_curves(curves, title, "epoch")
    for axes in figure.axes:
        axes.set_xlim(first_epoch - 0.3, first_epoch + len(epochs) - 1 + max(0.5, 0.09 * len(epochs)))
    return figure


def draw_curves(curves: Mapping[str, Mapping[str, Curve]], title: str, x_label: str) -> Figure:
    """Draw curves, those of one kind into one diagram.

    Args:
        curves: for each kind one or two, by name.
        title: the heading.
        x_label: what the first coordinates are.

    Returns:
        A figure 660 pixels high and 750 wide for each kind.
    """
    style = {"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#9aa5b1"}
    with mpl.rc_context(style):
        figure = Figure(figsize=(5 * len(curves), 4.4), dpi=150, layout="constrained")
        figure.suptitle(title, x=0.015, ha="left", fontsize=13, fontweight="bold")
        diagrams = figure.subplots(1, len(curves), squeeze=False)[0]
        for axes, (kind, parts) in zip(diagrams, curves.items(), strict=True):
            for (part, points), color in zip(parts.items(), COLORS[-len(parts) :], strict=True):
                axes.plot(*zip(*points, strict=True), color=color, linewidth=2.2, marker="o", markersize=4, label=part)
                end = points[-1]
                axes.annotate(f"{end[1]:.3f}", end, (8, 0), textcoords="offset points", va="center", color=color)
            axes.set_title(kind.capitalize(), loc="left", fontsize=11)
            axes.set_xlabel(x_label)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
            axes.tick_params(length=0)
            axes.legend(frameon=False)
    return figure
