"""Draw picture.svg, which the README shows: losses that this program trains, and the steps of docs/performance.md."""

import re
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

import torchstrategy as ts

FOLDER = Path(__file__).parent
PICTURE = FOLDER / "picture.svg"
IMAGES = FOLDER.parent / "recipes" / "data" / "fashion_mnist_slice.npz"
PEERS = ("DDP", "Fabric", "Accelerate")
COLOURS = ("tab:blue", "0.5", "0.65", "0.8")
STEPS = 40


def losses(num_replicas: int) -> list[float]:
    """Train the tutorial's conv net in float64 with batches of 100, and return the loss of each step."""
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    strategy = ts.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    with strategy.scope():
        model = nn.Sequential(
            nn.Conv2d(1, 32, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.MaxPool2d(2), nn.ReLU(),
            nn.Flatten(), nn.Linear(1600, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        each = nn.functional.cross_entropy(model(images), labels, reduction="none")
        loss = ts.nn.compute_average_loss(each, global_batch_size="actual")
        loss.backward()
        optimizer.step()
        return loss.detach()

    with np.load(IMAGES) as data:
        images = torch.as_tensor(data["train_images"][: 100 * STEPS]).double().unsqueeze(1) / 255
        labels = torch.as_tensor(data["train_labels"][: 100 * STEPS]).long()
    batches = strategy.experimental_distribute_dataset((images, labels), batch_size=100)
    return [float(strategy.reduce("SUM", strategy.run(step, args=batch))) for batch in batches]


def throughputs() -> dict[str, dict[str, float]]:
    """Return for each model of docs/performance.md the examples a second of each way over those of DDP."""
    found = {}
    for name, table in re.findall(
        r"^\| (\w+), ms a step .*?$\n(.*?)\n\n", (FOLDER / "performance.md").read_text(), re.M | re.S
    ):
        rows = {
            cells[1].removesuffix(", 2 processes"): cells
            for line in table.splitlines()
            if (cells := re.split(r" *\| *", line))
        }
        over = {peer: float(rows[peer][6].split()[0]) for peer in PEERS}  # ours / it, in time, tuned
        found[name] = {"torchstrategy": 1 / over["DDP"], **{peer: over[peer] / over["DDP"] for peer in PEERS}}
    return found


def main() -> None:
    """Write the picture."""
    mpl.rcParams |= {"svg.fonttype": "none", "svg.hashsalt": "torchstrategy", "font.size": 10}
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
    curves = {number: losses(number) for number in (1, 2, 4)}
    for (number, curve), width in zip(curves.items(), (7, 3.5, 1.2), strict=True):
        left.plot(range(1, STEPS + 1), curve, linewidth=width, label=f"{number} replica{'s' * (number > 1)}")
    apart = max(abs(a - b) for number in (2, 4) for a, b in zip(curves[1], curves[number], strict=True))
    left.set(title=f"The loss, in float64: they differ by at most {apart:.0e}", xlabel="step", ylabel="loss")
    left.legend(frameon=False)
    models = throughputs()
    ways = ["torchstrategy", *PEERS]
    for i, way in enumerate(ways):
        heights = [models[name][way] for name in models]
        bars = right.bar(np.arange(len(models)) + 0.2 * (i - 1.5), heights, 0.19, label=way, color=COLOURS[i])
        if not i:
            right.bar_label(bars, fmt="%.2f", fontsize=8)
    right.set(title="Examples a second, two processes, DDP = 1", ylim=(0, 2.1))
    right.set_xticks(range(len(models)), [name.replace("_", "\n") for name in models])
    right.legend(frameon=False, ncols=2)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(PICTURE, metadata={"Date": None, "Creator": None})


if __name__ == "__main__":
    main()
