"""Generators of threads: replicas that run at the same time draw what they draw in turns."""

import contextlib
import threading

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import torchstrategy as ts
from torchstrategy.replicas.random import own_generator


class Nothing(TorchDispatchMode):
    """A mode that changes nothing, as one that counts or logs, or as torch's own for a compiled model's first call."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def in_a_mode(fn):
    with Nothing():
        return fn()


class User:
    pass


USER = User()
ONES = torch.ones(40)
SQUARE = torch.ones(6, 6)
DRAWS = {
    "rand": lambda: torch.rand(5),
    "rand dtype": lambda: torch.rand(5, dtype=torch.float64, device="cpu"),
    "rand out": lambda: torch.rand(5, out=torch.empty(5)),
    "rand_like": lambda: torch.rand_like(ONES),
    "randn": lambda: torch.randn(2, 20),
    "randn_like": lambda: torch.randn_like(ONES),
    "randint": lambda: torch.randint(1000, (5,)),
    "randint low": lambda: torch.randint(5, 1000, (5,)),
    "randint_like": lambda: torch.randint_like(ONES, 1000),
    "randperm": lambda: torch.randperm(30),
    "normal": lambda: torch.normal(ONES, 2.0),
    "normal of tensors": lambda: torch.normal(ONES, ONES),
    "normal of numbers": lambda: torch.normal(1.0, 2.0, (5,)),
    "normal of a number and a tensor": lambda: torch.normal(1.0, ONES),
    "bernoulli": lambda: torch.bernoulli(ONES / 2),
    "bernoulli p": lambda: torch.bernoulli(ONES, 0.5),
    "multinomial": lambda: torch.multinomial(ONES, 10),
    "poisson": lambda: torch.poisson(ONES * 50),
    "binomial": lambda: torch.binomial(ONES * 50, ONES / 2),
    "uniform_": lambda: torch.empty(5).uniform_(),
    "normal_": lambda: torch.empty(5).normal_(),
    "random_": lambda: torch.empty(5).random_(),
    "random_ to": lambda: torch.empty(5).random_(1000),
    "bernoulli_": lambda: torch.empty(40).bernoulli_(0.5),
    "bernoulli_ of a tensor": lambda: torch.empty(40).bernoulli_(ONES / 2),
    "exponential_": lambda: torch.empty(5).exponential_(),
    "geometric_": lambda: torch.empty(40).geometric_(0.1),
    "cauchy_": lambda: torch.empty(5).cauchy_(),
    "log_normal_": lambda: torch.empty(5).log_normal_(),
    "init": lambda: nn.init.trunc_normal_(torch.empty(3, 3)),
    "new module": lambda: nn.Linear(3, 3).weight.detach(),
    "dropout": lambda: functional.dropout(ONES),
    "dropout2d": lambda: functional.dropout2d(torch.ones(1, 30, 2, 2)),
    "alpha_dropout": lambda: functional.alpha_dropout(ONES, training=True),
    "feature_alpha_dropout": lambda: functional.feature_alpha_dropout(torch.ones(1, 30, 2, 2), training=True),
    "native_dropout in a mode": lambda: in_a_mode(lambda: torch.native_dropout(ONES, 0.3, True)[0]),
    "native_dropout": lambda: torch.native_dropout(ONES, 0.5, True)[0],
    "rrelu": lambda: functional.rrelu(-ONES, training=True),
    "gumbel_softmax": lambda: functional.gumbel_softmax(SQUARE),
    "fractional_max_pool2d": lambda: functional.fractional_max_pool2d(
        torch.arange(144.0).view(12, 12).expand(1, 16, 12, 12), 2, output_ratio=(0.7, 0.7)
    ),
    "attention": lambda: functional.scaled_dot_product_attention(SQUARE, SQUARE, SQUARE, dropout_p=0.5),
    "svd_lowrank": lambda: torch.svd_lowrank(torch.arange(36.0).view(6, 6).sin(), q=2)[0],
    "gamma": lambda: torch.distributions.Gamma(ONES, ONES).rsample(),
    "dirichlet": lambda: torch.distributions.Dirichlet(ONES).rsample(),
}


def drawn(fn, *, concurrent):
    """Return what two replicas draw in two runs, and what the program draws then."""
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"], concurrent=concurrent)
    torch.manual_seed(5)
    return [*strategy.run(fn).values, *strategy.run(fn).values], torch.rand(2)


@pytest.mark.parametrize("name", DRAWS)
def test_replicas_at_once_draw_what_they_draw_in_turns(name):
    found, after = drawn(DRAWS[name], concurrent=True)
    expected, after_turns = drawn(DRAWS[name], concurrent=False)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(after, after_turns, rtol=0, atol=0)
    assert len({tuple(row.flatten().tolist()) for row in found}) == len(found)


def test_a_layer_that_draws_inside_torch():
    def fn():
        torch.manual_seed(3)
        lstm = nn.LSTM(4, 4, num_layers=2, dropout=0.5)
        attention = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.5, batch_first=True)
        return lstm(torch.ones(5, 2, 4))[0].detach(), attention(torch.ones(2, 5, 4)).detach()

    at_once, in_turns = (
        ts.MirroredStrategy(["cpu:0", "cpu:1"], concurrent=concurrent).run(fn) for concurrent in (True, False)
    )
    torch.testing.assert_close([v.values for v in at_once], [v.values for v in in_turns], rtol=0, atol=0)


def recompute_all():
    return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE)


@pytest.mark.parametrize(
    "options",
    [{"use_reentrant": False}, {"use_reentrant": True}, {"use_reentrant": False, "context_fn": recompute_all}],
    ids=["plain", "reentrant", "selective"],
)
def test_checkpointed_dropout_has_the_same_mask_again(options):
    dropout = nn.Dropout(0.5)

    def fn():
        x = torch.ones(64, requires_grad=True)
        y = checkpoint(dropout, x, **options)
        y.sum().backward()
        return y.detach(), x.grad

    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"], concurrent=True)
    for _ in range(20):
        outputs, gradients = strategy.run(fn)
        torch.testing.assert_close(outputs.values, gradients.values, rtol=0, atol=0)


def compiled_dropout(concurrent):
    """Return what some steps of each replica put out."""
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"], concurrent=concurrent)
    torch.manual_seed(1)
    with strategy.scope():
        model = torch.compile(nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5)))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        output = model(torch.ones(3, 4))
        output.square().mean().backward()
        optimizer.step()
        return output.detach()

    torch.manual_seed(5)
    return [value for _ in range(3) for value in strategy.run(step).values]


@pytest.mark.slow  # it compiles
@pytest.mark.timeout(300)
def test_compiled_dropout_draws_what_it_draws_in_turns(process_pool):
    # In another process, because inductor leaves threads and environment variables behind.
    pool = process_pool(1)
    (found,), (expected,) = (pool.run(compiled_dropout, concurrent, timeout_s=140) for concurrent in (True, False))
    torch.testing.assert_close(found, expected)
    assert len({tuple((output == 0).flatten().tolist()) for output in found}) == len(found)


def test_a_users_own_generator_is_used():
    def fn():
        own = torch.Generator().manual_seed(7)
        return torch.rand(3, generator=own), torch.empty(3).uniform_(generator=own), torch.randperm(9, generator=own)

    for value, expected in zip(ts.MirroredStrategy(["cpu:0", "cpu:1"], concurrent=True).run(fn), fn(), strict=True):
        torch.testing.assert_close(value.values, (expected, expected), rtol=0, atol=0)


def test_other_devices_are_left_alone():
    with own_generator(torch.Generator(), USER):
        assert torch.rand(3, device="meta").is_meta
        assert torch.empty(3, device="meta").uniform_().is_meta
        assert functional.dropout(torch.ones(3, device="meta")).is_meta


def test_each_thread_has_its_own_generator_until_the_context_ends():
    default = torch.get_rng_state()
    generators = [torch.Generator().manual_seed(i) for i in range(4)]
    expected = [torch.rand(1000, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    found = [None] * 4

    def draw(i):
        with own_generator(generators[i], USER):
            found[i] = torch.cat([torch.rand(1) for _ in range(1000)])

    threads = [threading.Thread(target=draw, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), default)


def test_contexts_nest_and_end_with_errors():
    outer, inner = (torch.Generator().manual_seed(i) for i in (1, 2))
    with own_generator(outer, USER):
        with contextlib.suppress(ValueError), own_generator(inner, USER):
            assert torch.initial_seed() == 2
            raise ValueError
        assert torch.initial_seed() == 1
        torch.testing.assert_close(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(1)))
    torch.manual_seed(3)
    torch.testing.assert_close(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(3)))
