"""Times the epochs of Lightning's Trainer, for recipes/benchmarks/model_fit.py; runs where Lightning is installed."""

from __future__ import annotations

from typing import Any

import lightning
import torch
import torchmetrics
from fit_turns import Turns, make_loader, make_model, read_options
from torch import Tensor, nn


class Module(lightning.LightningModule):
    """The network with its loss and accuracy over the epoch, as Lightning's users write it."""

    def __init__(self, network: nn.Module, learning_rate: float) -> None:
        super().__init__()
        self.network = network
        self.learning_rate = learning_rate
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(10, average="micro")

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss of a batch."""
        images, labels = batch
        logits = self.network(images)
        loss = nn.functional.cross_entropy(logits, labels)
        self.accuracy(logits, labels)
        self.log("loss", loss, on_step=False, on_epoch=True)
        self.log("accuracy", self.accuracy, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer that all sides use."""
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


class Clock(lightning.Callback):
    """Begins an epoch when it is this side's turn."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns

    def on_train_epoch_start(self, trainer: lightning.Trainer, module: Module) -> None:
        """Wait for the turn."""
        del trainer, module
        self.turns.begin()

    def on_train_epoch_end(self, trainer: lightning.Trainer, module: Module) -> None:
        """Tell the time."""
        del module
        self.turns.end(float(trainer.callback_metrics["loss"]))


def main() -> None:
    """Train until the benchmark ends."""
    options: dict[str, Any] = read_options()
    turns = Turns(f"Lightning {lightning.__version__}, torch {torch.__version__}")
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=-1,
        callbacks=[Clock(turns)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(make_model(options), options["optimizer"]["lr"]), make_loader(options))


if __name__ == "__main__":
    main()
