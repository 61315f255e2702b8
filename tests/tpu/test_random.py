"""Random numbers on the device differ between replicas, repeat from a seed, and don't compile anew."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.tpu.test_region import enter, traced, values

DRAWS = {
    "dropout": lambda x: F.dropout(torch.ones_like(x)),
    "rand": lambda x: torch.rand(8, 8, device=x.device),
    "randn_like": torch.randn_like,
    "randint": lambda x: torch.randint(0, 1000, (64,), device=x.device).float(),
    "randperm": lambda x: torch.randperm(64, device=x.device).float(),
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "uniform_": lambda x: torch.empty_like(x).uniform_(2, 3),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "bernoulli": lambda x: torch.bernoulli(torch.full_like(x, 0.5)),
    "normal": lambda x: torch.normal(x, 2.0),
    "multinomial": lambda x: torch.multinomial(torch.ones_like(x), 3).float(),
    "rrelu": lambda x: F.rrelu(-torch.ones_like(x), training=True),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5),
}


def draw(runtime, function, size=8):
    with traced(runtime) as region:
        return values(region, function(enter(region, torch.ones(4, size, size))))


@pytest.mark.parametrize("name", DRAWS)
def test_draws_differ_between_replicas_and_repeat_from_a_seed(runtime, name):
    torch.manual_seed(1)
    first, second = draw(runtime, DRAWS[name]), draw(runtime, DRAWS[name])
    torch.manual_seed(1)
    again = draw(runtime, DRAWS[name])
    assert torch.equal(first, again)
    assert not torch.equal(first, second)
    assert len({tuple(row.flatten().tolist()) for row in first}) == 4


def test_steps_with_dropout_compile_once(runtime):
    draw(runtime, DRAWS["dropout"])
    before = runtime.num_compilations()
    for _ in range(3):
        draw(runtime, DRAWS["dropout"])
    assert runtime.num_compilations() == before


def test_the_state_of_the_hosts_generator_is_enough_to_go_on(runtime):
    draw(runtime, DRAWS["rand"])
    state = torch.get_rng_state()
    expected = draw(runtime, DRAWS["rand"])
    torch.set_rng_state(state)
    assert torch.equal(draw(runtime, DRAWS["rand"]), expected)


def test_dropout_keeps_its_share_and_its_mask_for_the_gradient(runtime):
    torch.manual_seed(0)
    with traced(runtime) as region:
        x = enter(region, torch.ones(4, 64, 64)).requires_grad_()
        y = F.dropout(x, 0.25)
        y.sum().backward()
        result, gradient = values(region, y, x.grad)
    assert torch.equal(result, gradient)
    assert result.unique().tolist() == [0.0, pytest.approx(4 / 3)]
    for row in result:  # 4096 draws: a standard deviation is 0.0068
        assert (row == 0).float().mean().item() == pytest.approx(0.25, abs=0.03)


def test_the_generator_argument_is_refused(runtime):
    tensor = torch.empty(3, device=runtime.device)
    with traced(runtime), pytest.raises(RuntimeError, match="generator"):
        tensor.normal_(generator=torch.Generator())


def test_the_hosts_random_numbers_are_left_alone(runtime):
    torch.manual_seed(2)
    expected = nn.Linear(3, 3).weight
    torch.manual_seed(2)
    with traced(runtime):
        found = nn.Linear(3, 3).weight
    assert torch.equal(expected, found)


@pytest.mark.parametrize("draws_before", [True, False])
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpointed_function_draws_the_same_again(runtime, use_reentrant, draws_before):
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Dropout(0.2), nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.4)).to(runtime.device)

    def train(call):
        torch.manual_seed(1)
        layer.zero_grad()
        with traced(runtime) as region:
            x = enter(region, torch.arange(256.0).reshape(4, 8, 8).sin()).requires_grad_()
            y = call(F.dropout(x, 0.1) if draws_before else x * 2)
            y = F.dropout(call(y), 0.5)
            y.square().sum().backward()
            after = F.dropout(torch.ones_like(y))
            return values(region, y, x.grad, layer[1].weight.grad, after)

    def checkpointed(x):
        return checkpoint(layer, x, use_reentrant=use_reentrant)

    expected = train(layer)
    before = runtime.num_compilations()
    torch.testing.assert_close(train(checkpointed), expected, rtol=1e-5, atol=1e-5)
    train(checkpointed)
    assert runtime.num_compilations() <= before + 1


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpointed_function_draws_the_same_on_the_host(runtime, use_reentrant):
    torch.manual_seed(0)
    after = []
    for _ in range(2):
        with traced(runtime) as region:
            x = enter(region, torch.ones(4, 8, 8)).requires_grad_()
            y = checkpoint(lambda x: F.dropout(x) * torch.rand(()), x, use_reentrant=use_reentrant)
            y.sum().backward()
            result, gradient = values(region, y, x.grad)
        assert torch.equal(result, gradient)
        after.append(result)
    assert not torch.equal(after[0] > 0, after[1] > 0)
