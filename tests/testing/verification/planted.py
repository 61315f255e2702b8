"""Programs with one planted mistake each, and right ones."""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd import backward

import torchstrategy as ts

CAUSES = {
    "not divided": "loss not divided",
    "divided twice": "loss divided twice",
    "constant divisor": "constant divisor on a short batch",
    "clipped": "clipped before the sum",
    "regularizer": "regularizer not shared",
    "metric": "metric not merged",
    "seen twice": "example seen twice",
    "never seen": "example never seen",
    "buffer": "buffer not synchronised",
    "random": "equal random streams",
    "not summed": "parameter not summed",
    "one rank": "weights loaded on one replica only",
    "rate": "other hyper-parameters",
}


class WithStatistics(nn.Module):
    """A network that keeps what its inputs were like in a buffer."""

    def __init__(self, inner, *, counts):
        super().__init__()
        self.inner = inner
        self.counts = counts
        self.register_buffer("level", torch.zeros(()))

    def forward(self, x):
        if self.counts:
            self.level += x.mean()
        return self.inner(x)


class Transformer(nn.Module):
    """One layer over four tokens."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.layer(self.embed(x)).mean(1))


def make_network(kind):
    if kind == "mlp":
        return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    if kind == "conv":
        return nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(32, 2))
    return Transformer()


def make_batches(kind, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    shape = {"mlp": (6,), "conv": (1, 4, 4), "transformer": (4, 3)}[kind]
    sizes = (6, 6, 3)
    return [(torch.randn(size, *shape, generator=generator, dtype=dtype), torch.arange(size) % 2) for size in sizes]


def build(strategy, kind="mlp", mistake=None, dtype=torch.float64):  # noqa: C901 - all mistakes
    """One program for all mistakes."""
    model = WithStatistics(make_network(kind), counts=mistake == "buffer").to(dtype)
    own = nn.Parameter(torch.ones(2, dtype=dtype))
    model.register_parameter("own", own)
    model.drop = nn.Dropout(0.5)
    trained = [p for p in model.parameters() if p is not own or mistake != "not summed"]
    optimizer = torch.optim.SGD(trained, lr=0.05 * (strategy.num_replicas_in_sync if mistake == "rate" else 1))
    accuracy = ts.metrics.SparseCategoricalAccuracy(name="accuracy")
    shown = []

    def replica_step(batch):  # noqa: C901
        x, y = batch
        context = ts.get_replica_context()
        number = context.num_replicas_in_sync
        if mistake == "one rank" and len(shown) == 1 and context.replica_id_in_sync_group == 0 and number > 1:
            with torch.no_grad():
                model.own.add_(1.0)
        if mistake == "never seen" and len(x) > 1 and context.replica_id_in_sync_group == number - 1 and number > 1:
            x, y = x[:-1], y[:-1]
        optimizer.zero_grad()
        logits = model(x) * model.own
        if mistake == "random":
            torch.manual_seed(3)
            logits = logits + torch.randn_like(logits)
        losses = nn.functional.cross_entropy(logits, y, reduction="none")
        if mistake == "not divided":
            loss = losses.mean()
        elif mistake == "divided twice":
            loss = ts.nn.compute_average_loss(losses, global_batch_size="actual") / number
        elif mistake == "constant divisor":
            loss = losses.sum() / 6
        elif mistake == "never seen":
            loss = losses.sum() / context.all_reduce("sum", torch.tensor(len(x)))
        elif mistake == "seen twice":
            loss = losses.sum() / (len(x) * number)
        else:
            loss = ts.nn.compute_average_loss(losses, global_batch_size="actual")
        if mistake == "regularizer":
            loss = loss + 0.1 * sum(p.square().sum() for p in model.parameters())
        if kind == "mlp":
            backward(loss)
        else:
            loss.backward()
        if mistake == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        if mistake == "not summed":
            with torch.no_grad():
                model.own -= 0.05 * model.own.grad
                model.own.grad = None
        accuracy.update_state(y, logits)
        return losses.detach().sum()

    def step(batch):
        if mistake == "seen twice":
            batch = tuple(strategy.gather(part, axis=0) for part in batch)
        losses = strategy.run(replica_step, args=(batch,))
        shown.append(float(strategy.experimental_local_results(losses)[0]))
        return strategy.reduce("sum", losses, axis=None)

    metric = (lambda: shown[-1]) if mistake == "metric" else accuracy
    return {"step": step, "model": model, "optimizer": optimizer, "metric": metric}
