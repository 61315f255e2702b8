"""Programs whose replicas give the numbers of one."""

import copy

import torch
from torch import nn

import torchstrategy as ts

NAMES = ["accumulation", "gan", "lstm", "lora", "ema", "contrastive"]
F64 = torch.float64


def batches():
    generator = torch.Generator().manual_seed(2)
    return [
        (torch.randn(size, 3, 4, generator=generator, dtype=F64), torch.randn(size, 4, generator=generator, dtype=F64))
        for size in (4, 4, 4, 3)
    ]


def build(strategy, name="accumulation"):
    return globals()[f"_{name}"](strategy)


def _average(losses):
    return ts.nn.compute_average_loss(losses, global_batch_size="actual")


def _accumulation(strategy):
    model = nn.Linear(4, 2).to(F64)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    number = 0

    def replica_step(batch, *, updates):
        x, _ = batch
        loss = _average(model(x[:, 0]).square().sum(1)) / 2
        loss.backward()
        if updates:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    def step(batch):
        nonlocal number
        number += 1
        return strategy.reduce("sum", strategy.run(replica_step, (batch,), {"updates": number % 2 == 0}), axis=None)

    return {"step": step, "model": model, "optimizer": optimizer}


def _gan(strategy):
    generator = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4)).to(F64)
    critic = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).to(F64)
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=0.01)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=0.01)
    softplus = nn.functional.softplus

    def replica_step(batch):
        x, noise = batch
        fake = generator(noise)
        critic_optimizer.zero_grad()
        _average((softplus(-critic(x[:, 0])) + softplus(critic(fake.detach()))).squeeze(1)).backward()
        critic_optimizer.step()
        generator_optimizer.zero_grad()
        _average(softplus(-critic(fake)).squeeze(1)).backward()
        generator_optimizer.step()

    return {
        "step": lambda batch: strategy.run(replica_step, args=(batch,)),
        "generator": generator,
        "critic": critic,
        "generator_optimizer": generator_optimizer,
        "critic_optimizer": critic_optimizer,
    }


def _lstm(strategy):
    model = nn.LSTM(4, 3, batch_first=True).to(F64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    carried, number = None, 0

    def replica_step(batch, state):
        x, _ = batch
        optimizer.zero_grad()
        out, state = model(x, state)
        loss = _average(out.square().mean((1, 2)))
        loss.backward()
        optimizer.step()
        return loss.detach(), tuple(part.detach() for part in state)

    def step(batch):
        nonlocal carried, number
        number += 1
        if number == 4:
            carried = None  # the rows of the short batch are other sequences
        loss, carried = strategy.run(replica_step, args=(batch, carried))
        return strategy.reduce("sum", loss, axis=None)

    return {"step": step, "model": model, "optimizer": optimizer}


class _Lora(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, base.in_features, dtype=F64) / 3)
        self.up = nn.Parameter(torch.zeros(base.out_features, 2, dtype=F64))

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T


def _lora(strategy):
    model = _Lora(nn.Linear(4, 4).to(F64))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)

    def replica_step(batch):
        x, y = batch
        optimizer.zero_grad()
        _average((model(x[:, 0]) - y).square().sum(1)).backward()
        optimizer.step()

    return {"step": lambda b: strategy.run(replica_step, args=(b,)), "model": model, "optimizer": optimizer}


def _ema(strategy):
    model = nn.Linear(4, 4).to(F64)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def replica_step(batch):
        x, y = batch
        optimizer.zero_grad()
        _average((model(x[:, 0]) - y).square().sum(1)).backward()
        optimizer.step()
        with torch.no_grad():
            for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(p, 0.1)

    return {
        "step": lambda batch: strategy.run(replica_step, args=(batch,)),
        "model": model,
        "average": average,
        "optimizer": optimizer,
    }


def _contrastive(strategy):
    model = nn.Linear(4, 3).to(F64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def replica_step(batch):
        x, _ = batch
        optimizer.zero_grad()
        own, other = (nn.functional.normalize(model(x[:, k]), dim=1) for k in (0, 1))
        context = ts.get_replica_context()
        everyone = context.all_gather(other, axis=0)
        sizes = context.all_gather(torch.tensor([len(x)]), axis=0)
        first = int(sizes[: context.replica_id_in_sync_group].sum())
        target = first + torch.arange(len(x))
        losses = nn.functional.cross_entropy(own @ everyone.T / 0.1, target, reduction="none")
        _average(losses).backward()
        optimizer.step()

    return {"step": lambda b: strategy.run(replica_step, args=(b,)), "model": model, "optimizer": optimizer}
