"""Kinds of models: parametrizations, tied weights, recurrent networks, sparse gradients, layers of many kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence

from tests.parity.techniques.registry import average, fit, loss_of, make_net, plain_step, program, state


@program("weight_norm", parametrizations.weight_norm)
@program("spectral_norm", parametrizations.spectral_norm)
@program("orthogonal", parametrizations.orthogonal)
@program("weight_norm, put on later", parametrizations.weight_norm, late=True)
@program("spectral_norm, put on later", parametrizations.spectral_norm, late=True)
def parametrized(strategy: Any, parametrize: Callable[[nn.Module], nn.Module], late: bool = False) -> dict[str, Any]:
    """``spectral_norm`` keeps two buffers, which every forward pass in training mode moves."""
    with strategy.scope():
        model = make_net()
        if late:
            strategy.run(lambda: None)
        parametrize(model[0])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return state(model, losses=fit(strategy, plain_step(model, optimizer)))


class Symmetric(nn.Module):
    def forward(self, matrix: Tensor) -> Tensor:
        return matrix.triu() + matrix.triu(1).T


@program("a parametrization of the user's, cached and removed")
def own_parametrization(strategy: Any) -> dict[str, Any]:
    with strategy.scope():
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        nn.utils.parametrize.register_parametrization(model[0], "weight", Symmetric())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        with nn.utils.parametrize.cached():
            loss = loss_of(model, x, y) + 0.5 * average((model(-x) + y).square().sum(1))
            loss.backward()
        optimizer.step()
        return loss.detach()

    losses = fit(strategy, step)
    assert torch.equal(model[0].weight, model[0].weight.T)
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    return state(model, losses=losses)


class Tied(nn.Module):
    """An embedding whose transpose gives the logits, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.layer = nn.Linear(4, 4)
        self.logits = nn.Linear(4, 6)
        self.logits.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.logits(self.layer(self.layer(self.embedding(ids)).tanh()))


def ids_and_labels() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(6, (11, 3), generator=generator), torch.randint(6, (11, 3), generator=generator)


def token_step(model: nn.Module, *optimizers: torch.optim.Optimizer) -> Callable[[Tensor, Tensor], Tensor]:
    def step(ids: Tensor, labels: Tensor) -> Tensor:
        losses = nn.functional.cross_entropy(model(ids).transpose(1, -1), labels, reduction="none")
        loss = average(losses.mean(1))
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    return step


@program("tied weights")
def tied(strategy: Any) -> dict[str, Any]:
    with strategy.scope():
        model = Tied().double()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = fit(strategy, token_step(model, optimizer), arrays=ids_and_labels())
    assert model.logits.weight is model.embedding.weight
    return state(model, losses=losses)


class SparseModel(nn.Module):
    def __init__(self, layer: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.embedding = layer(6, 4, sparse=True)
        self.logits = nn.Linear(4, 6)

    def forward(self, ids: Tensor) -> Tensor:
        return self.logits(self.embedding(ids))


@program("sparse gradients, SGD", lambda p: torch.optim.SGD(p, lr=0.5))
@program("sparse gradients, SparseAdam", lambda p: torch.optim.SparseAdam(p, lr=0.05))
@program("sparse gradients, Adagrad", lambda p: torch.optim.Adagrad(p, lr=0.1))
@program("sparse gradients, accumulated", lambda p: torch.optim.SGD(p, lr=0.5), twice=True)
@program("sparse gradients of bags", lambda p: torch.optim.SparseAdam(p, lr=0.05), bags=True)
def sparse(
    strategy: Any, make: Callable[[Any], torch.optim.Optimizer], twice: bool = False, bags: bool = False
) -> dict[str, Any]:
    """SparseAdam moves only the rows that the whole batch uses."""
    with strategy.scope():
        model = SparseModel(nn.EmbeddingBag if bags else nn.Embedding).double()
        sparse_optimizer = make(list(model.embedding.parameters()))
        optimizer = torch.optim.SGD(model.logits.parameters(), lr=0.1)
    step = token_step(model, sparse_optimizer, optimizer)

    def bag_step(ids: Tensor, labels: Tensor) -> Tensor:
        loss = average(nn.functional.cross_entropy(model(ids), labels[:, 0], reduction="none"))
        loss.backward()
        assert model.embedding.weight.grad.is_sparse
        for each in (sparse_optimizer, optimizer):
            each.step()
            each.zero_grad()
        return loss.detach()

    def two_backwards(ids: Tensor, labels: Tensor) -> Tensor:
        average(model(ids[:, :1]).square().sum((1, 2))).backward()
        return step(ids, labels)

    chosen = bag_step if bags else two_backwards if twice else step
    return state(model, losses=fit(strategy, chosen, arrays=ids_and_labels()))


class Recurrent(nn.Module):
    def __init__(self, cell: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.cell = cell(1, 3, batch_first=True, **options)
        self.head = nn.Linear(3 * (1 + self.cell.bidirectional), 2)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        if len(x) == 0:  # torch's recurrent layers refuse an empty batch
            return x.new_zeros(0, 2)
        sequences: Any = x[..., None]
        if lengths is not None:
            sequences = pack_padded_sequence(sequences, lengths, batch_first=True, enforce_sorted=False)
        _, hidden = self.cell(sequences)
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        return self.head(torch.cat(list(hidden[-1 - self.cell.bidirectional :]), 1))


@program("LSTM", nn.LSTM)
@program("LSTM, two layers, both ways", nn.LSTM, num_layers=2, bidirectional=True)
@program("GRU", nn.GRU)
@program("RNN", nn.RNN)
@program("LSTM, packed sequences", nn.LSTM, packed=True)
@program("GRU, packed sequences", nn.GRU, packed=True)
def recurrent(strategy: Any, cell: type[nn.RNNBase], packed: bool = False, **options: Any) -> dict[str, Any]:
    with strategy.scope():
        model = Recurrent(cell, **options).double()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

    def step(x: Tensor, y: Tensor) -> Tensor:
        lengths = 1 + (x.abs().sum(1) * 10).long() % 4 if packed else None
        optimizer.zero_grad()
        loss = average((model(x, lengths) - y).square().sum(1))
        if loss.requires_grad:  # not without examples
            loss.backward()
        optimizer.step()
        return loss.detach()

    return state(model, losses=fit(strategy, step))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(1, 4)
        self.layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(self.lift(x[..., None])).mean(1))


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 4)),
        nn.Conv1d(1, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.PReLU(),
        nn.Conv1d(4, 2, 3),
        nn.Flatten(),
        nn.LayerNorm(4),
        nn.Linear(4, 2),
    )


class Bare(nn.Module):
    """Parameters in lists and dictionaries, a scalar one, and a plain attribute that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(4, 2), torch.randn(2, 2)])
        self.named = nn.ParameterDict({"scale": torch.tensor(0.5), "unused": torch.ones(3)})
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return (x @ self.weights[0]).tanh() @ self.weights[1] * self.named["scale"] / (1 + self.calls)


@program("attention", Attention)
@program("convolutions and norms", conv_net)
@program("bare parameters", Bare)
@program("bilinear", lambda: nn.Sequential(nn.Linear(4, 4), nn.Softplus(), nn.Linear(4, 2, bias=False)))
def layers(strategy: Any, build: Callable[[], nn.Module]) -> dict[str, Any]:
    with strategy.scope():
        model = build().double()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    return state(model, losses=fit(strategy, plain_step(model, optimizer)))


@program("batch normalisation with fixed statistics")
def fixed_batch_norm(strategy: Any) -> dict[str, Any]:
    """In ``eval`` mode, as when a network is fine-tuned, every example is normalised by itself."""
    with strategy.scope():
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).double()
        model[1].running_mean.fill_(0.3)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    model[1].eval()
    return state(model, losses=fit(strategy, plain_step(model, optimizer)))


@program("complex parameters")
def complex_parameters(strategy: Any) -> dict[str, Any]:
    with strategy.scope():
        model = nn.Linear(4, 2, dtype=torch.complex128)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = average((model(x.to(torch.complex128)) - y * 1j).abs().square().sum(1))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return state(model, losses=fit(strategy, step))
