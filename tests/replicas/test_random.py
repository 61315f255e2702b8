"""One stream of random numbers for each replica."""

import pytest
import torch
from torch import nn

import torchstrategy as ts
from torchstrategy.replicas import random
from torchstrategy.replicas.random import RandomStreams, derive_seed


@pytest.fixture(params=[(2, False), (3, False), (2, True), (3, True)], ids=["2", "3", "2-at-once", "3-at-once"])
def strategy(request):
    count, concurrent = request.param
    return ts.MirroredStrategy([f"cpu:{i}" for i in range(count)], concurrent=concurrent)


def on_replicas(strategy, fn):
    results = strategy.experimental_local_results(strategy.run(fn))
    return results if len(results) > 1 else results * strategy.num_replicas_in_sync


def draws(strategy, count=3):
    return torch.stack([torch.stack(on_replicas(strategy, lambda: torch.rand(2))) for _ in range(count)])


def test_seed_reproduces_all_streams(strategy):
    torch.manual_seed(5)
    first = draws(strategy)
    torch.manual_seed(5)
    torch.testing.assert_close(draws(strategy), first, rtol=0, atol=0)
    torch.manual_seed(6)
    assert not torch.equal(draws(strategy), first)


def test_seed_reproduces_another_strategy_too(strategy):
    torch.manual_seed(5)
    first = draws(strategy)
    other = ts.MirroredStrategy(list(strategy.placement.devices))
    torch.manual_seed(5)
    torch.testing.assert_close(draws(other), first, rtol=0, atol=0)


def test_replicas_and_runs_draw_different_numbers(strategy):
    torch.manual_seed(5)
    rows = draws(strategy, 4).flatten(0, 1)
    assert len({tuple(row.tolist()) for row in rows}) == len(rows)


def test_replica_0_draws_from_the_programs_stream(strategy):
    torch.manual_seed(5)
    expected = [torch.rand(2) for _ in range(4)]
    torch.manual_seed(5)
    found = [torch.rand(2), on_replicas(strategy, lambda: torch.rand(2))[0], torch.rand(2)]
    found.append(on_replicas(strategy, lambda: torch.rand(2))[0])
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_streams_go_on_across_merge_points(strategy):
    def fn(merge):
        first = torch.rand(2)
        if merge:
            ts.get_replica_context().all_reduce("sum", torch.ones(1))
        return torch.cat([first, torch.rand(2)])

    torch.manual_seed(5)
    plain = on_replicas(strategy, lambda: fn(False))
    torch.manual_seed(5)
    torch.testing.assert_close(on_replicas(strategy, lambda: fn(True)), plain, rtol=0, atol=0)


def test_only_a_later_replica_draws(strategy):
    last = strategy.num_replicas_in_sync - 1

    def fn():
        mine = ts.get_replica_context().replica_id_in_sync_group == last
        return torch.rand(2) if mine else torch.zeros(2)

    torch.manual_seed(5)
    first = [on_replicas(strategy, fn)[last] for _ in range(3)]
    assert len({tuple(x.tolist()) for x in first}) == 3
    torch.manual_seed(5)
    torch.testing.assert_close([on_replicas(strategy, fn)[last] for _ in range(3)], first, rtol=0, atol=0)


def test_a_run_that_draws_nothing_moves_nothing(strategy):
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    strategy.run(lambda: None)
    torch.testing.assert_close(torch.rand(2), expected, rtol=0, atol=0)


def test_seeding_inside_holds_for_the_replica(strategy):
    def fn():
        torch.manual_seed(11)
        return torch.rand(2)

    rows = on_replicas(strategy, fn)
    for row in rows[1:]:
        torch.testing.assert_close(row, rows[0], rtol=0, atol=0)


def test_failed_run_gives_the_generator_back(strategy):
    torch.manual_seed(5)
    torch.rand(2)
    expected = torch.rand(2)
    torch.manual_seed(5)

    def fn():
        torch.rand(2)
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        strategy.run(fn)
    torch.testing.assert_close(torch.rand(2), expected, rtol=0, atol=0)


def test_dropout_masks_differ_between_replicas(strategy):
    with strategy.scope():
        model = nn.Dropout(0.5)
    torch.manual_seed(5)
    masks = on_replicas(strategy, lambda: model(torch.ones(64)))
    assert len({tuple(mask.tolist()) for mask in masks}) == len(masks)
    torch.manual_seed(5)
    torch.testing.assert_close(on_replicas(strategy, lambda: model(torch.ones(64))), masks)


def test_fork_rng_and_checkpointed_state_inside(strategy):
    def fn():
        state = torch.get_rng_state()
        first = torch.rand(2)
        torch.set_rng_state(state)
        with torch.random.fork_rng(devices=[]):
            torch.rand(5)
        return first, torch.rand(2)

    for first, second in on_replicas(strategy, fn):
        torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_state_restored_outside_restores_the_streams(strategy):
    torch.manual_seed(5)
    draws(strategy, 1)
    state = torch.get_rng_state()
    torch.manual_seed(9)
    torch.set_rng_state(state)
    first = draws(strategy, 2)
    torch.manual_seed(1)
    torch.set_rng_state(state)
    torch.testing.assert_close(draws(strategy, 2)[:, :1], first[:, :1], rtol=0, atol=0)


@pytest.mark.parametrize("concurrent", [False, True])
def test_merge_functions_draw_from_the_programs_stream(concurrent):
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"], concurrent=concurrent)

    def merge(current):
        first = torch.rand(1)
        inner = current.run(lambda: torch.rand(1))
        return torch.cat([first, *current.experimental_local_results(inner), torch.rand(1)])

    def fn():
        before = torch.rand(1)
        return torch.cat([before, ts.get_replica_context().merge_call(merge), torch.rand(1)])

    torch.manual_seed(5)
    expected = torch.rand(6)
    torch.manual_seed(5)
    first, second = (value.tolist() for value in strategy.run(fn).values)
    assert [first[i] for i in (0, 1, 2, 4, 5)] == expected[:5].tolist()
    assert second[1:5] == first[1:5]
    assert torch.rand(1) == expected[5]
    assert len({*first, *second}) == 8


def test_derived_seeds():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    seeds = {derive_seed(state, i) for i in range(100)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_streams_need_a_beginning():
    with pytest.raises(RuntimeError, match="begin"):
        RandomStreams([0, 1], [torch.device("cpu")] * 2).enter(0)


def test_accelerators_get_seeds_of_their_own(monkeypatch):
    generators = [torch.Generator().manual_seed(5) for _ in range(3)]
    monkeypatch.setattr(random, "_default_generator", lambda device: generators[device.index])
    streams = RandomStreams([0, 1, 2], [torch.device("cuda", i) for i in range(3)])

    def draw():
        streams.seed_accelerators()
        return [torch.rand(2, generator=generator) for generator in generators]

    first, second = draw(), draw()
    torch.testing.assert_close(first[0], torch.rand(2, generator=torch.Generator().manual_seed(5)))
    rows = {tuple(row.tolist()) for row in (*first, *second)}
    assert len(rows) == 6
    for generator in generators:
        generator.manual_seed(5)
    torch.testing.assert_close([draw(), draw()], [first, second], rtol=0, atol=0)
