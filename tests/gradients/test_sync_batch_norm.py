"""Statistics over all replicas: N replicas train like one with torch's plain batch norm."""

import copy
import functools
import pickle
import re

import pytest
import torch
from torch import nn

import torchstrategy as ts
from tests.gradients.sync_batch_norm_programs import (
    DOUBLE,
    NORMS,
    Checkpointed,
    Reentrant,
    dense_net,
    error_of_a_pass_on_one_rank,
    error_of_other_channels,
    fit,
    gradient_penalty,
    largest_difference,
    records_of_steps,
    synchronised,
    train,
    train_natively,
)
from tests.programs import cpu_devices, strategy_for

CentralStorage = ts.experimental.CentralStorageStrategy


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("net", ["dense", "conv"])
@pytest.mark.parametrize("num_replicas", [2, 3, 4])
def test_replicas_in_one_process_train_like_one(num_replicas, net, norm):
    # with 3 and 4 replicas the last batch of 2 leaves some of them without examples
    assert largest_difference(train([], net, norm), train(cpu_devices(num_replicas), net, norm)) < 1e-10


@pytest.mark.parametrize(("num_processes", "devices"), [(2, None), (3, None), (2, ["cpu:0", "cpu:1"])])
@pytest.mark.parametrize("net", ["dense", "conv"])
def test_processes_train_like_one(net, num_processes, devices, process_pool):
    expected = train([], net)
    for actual in process_pool(num_processes).run(train, devices, net):
        assert largest_difference(expected, actual) < 1e-10


@pytest.mark.parametrize("norm", list(NORMS)[1:])
def test_all_kinds_in_processes(norm, process_pool):
    expected = train([], norm=norm)
    for actual in process_pool(3).run(train, None, norm=norm):
        assert largest_difference(expected, actual) < 1e-10


@pytest.mark.parametrize("make", [functools.partial(ts.MirroredStrategy, concurrent=True), CentralStorage])
def test_other_hostings(make):
    expected = train([], "conv")
    for count in (2, 3):
        assert largest_difference(expected, train(make(cpu_devices(count)), "conv")) < 1e-10


def test_fit(process_pool):
    expected = fit([])
    for actual in [fit(cpu_devices(3)), *process_pool(2).run(fit, None)]:
        assert largest_difference(expected, actual) < 1e-10


@pytest.mark.parametrize("wrapper", [Checkpointed, Reentrant])
def test_activation_checkpointing(wrapper, process_pool):
    expected = train([], "conv", wrapper=wrapper)
    assert largest_difference(expected, train(cpu_devices(2), "conv", wrapper=wrapper)) < 1e-10
    for actual in process_pool(2).run(train, None, "conv", wrapper=wrapper):
        assert largest_difference(expected, actual) < 1e-10


def test_channels_last(process_pool):
    expected = train([], "conv")
    chosen = {"memory_format": torch.channels_last}
    assert largest_difference(expected, train(cpu_devices(2), "conv", **chosen)) < 1e-10
    for actual in process_pool(2).run(train, None, "conv", **chosen):
        assert largest_difference(expected, actual) < 1e-10


def test_layers_of_torch_do_the_same(process_pool):
    expected = train([])
    assert largest_difference(expected, train(cpu_devices(3), layer=nn.SyncBatchNorm)) < 1e-10
    for actual in process_pool(2).run(train, None, layer=nn.SyncBatchNorm):
        assert largest_difference(expected, actual) < 1e-10


def test_gradients_of_gradients(process_pool):
    expected = gradient_penalty([])
    for actual in [gradient_penalty(cpu_devices(3)), *process_pool(2).run(gradient_penalty, None)]:
        assert max(float((a - b).abs().max()) for a, b in zip(actual, expected, strict=True)) < 1e-10


def outputs_and_gradients(strategy, layer, x):
    """Call a layer once; return its outputs, the gradients of the input and the layer's state, as one replica's."""
    (batch,) = strategy.experimental_distribute_dataset(x, batch_size=len(x))
    factors = torch.linspace(-1, 1, x.numel()).reshape(x.shape).to(x.dtype)
    (parts,) = strategy.experimental_distribute_dataset(factors, batch_size=len(x))

    def step(x, factors):
        x = x.detach().requires_grad_()
        y = layer(x)
        assert y.stride() == x.stride() or y.numel() == 0
        (y * factors).sum().backward()
        return y.detach(), x.grad

    y, gradient = strategy.run(step, args=(batch, parts))
    return strategy.gather(y, axis=0), strategy.gather(gradient, axis=0), layer.state_dict()


@pytest.mark.parametrize("shape", [(5, 3), (5, 3, 4), (5, 3, 4, 2), (5, 3, 2, 2, 2)])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float16, 2e-3), (torch.bfloat16, 2e-2), (torch.float32, 2e-6), (torch.float64, 1e-12)],
)
def test_dtypes_and_shapes(shape, dtype, tolerance):
    torch.manual_seed(0)
    x = (3 + torch.randn(shape)).to(dtype)
    with (two := ts.MirroredStrategy(cpu_devices(2))).scope():
        layer = ts.nn.SyncBatchNorm(3, dtype=dtype)
    plain = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}[len(shape)](3).to(dtype)
    y, gradient, state = outputs_and_gradients(two, layer, x)
    expected_y, expected_gradient, expected_state = outputs_and_gradients(ts.get_strategy(), plain, x)
    torch.testing.assert_close(y, expected_y, atol=tolerance, rtol=0)
    torch.testing.assert_close(gradient, expected_gradient, atol=tolerance, rtol=0)
    for name, value in expected_state.items():
        torch.testing.assert_close(state[name], value, atol=tolerance, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_in_float32_layers(dtype):
    x = (3 + torch.randn(6, 3, 2, 2)).to(dtype).to(memory_format=torch.channels_last)
    with (two := ts.MirroredStrategy(cpu_devices(2))).scope():
        layer = ts.nn.SyncBatchNorm(3)
    y, gradient, state = outputs_and_gradients(two, layer, x)
    assert (y.dtype, gradient.dtype) == (dtype, dtype)
    plain = nn.BatchNorm2d(3)
    plain(x.float())
    torch.testing.assert_close(state["running_mean"], plain.running_mean, atol=1e-6, rtol=0)
    torch.testing.assert_close(state["running_var"], plain.running_var, atol=1e-6, rtol=0)


def test_a_large_mean_does_not_spoil_the_variance():
    x = (1e4 + torch.randn(64, 2)).float()
    with (two := ts.MirroredStrategy(cpu_devices(2))).scope():
        layer = ts.nn.SyncBatchNorm(2, momentum=1.0)
    _, _, state = outputs_and_gradients(two, layer, x)
    torch.testing.assert_close(state["running_var"], x.double().var(0).float(), rtol=1e-3, atol=0)


def test_evaluation_takes_the_running_statistics_and_meets_nobody():
    with (two := ts.MirroredStrategy(cpu_devices(2))).scope():
        layer = ts.nn.SyncBatchNorm(2).eval()

    def fn():
        if ts.get_replica_context().replica_id_in_sync_group == 0:
            return layer(torch.full((1, 2), 3.0))
        return torch.zeros(1, 2)

    first, _ = two.experimental_local_results(two.run(fn))
    torch.testing.assert_close(first, torch.full((1, 2), 3.0), atol=1e-4, rtol=0)


def test_outside_run_it_is_plain():
    x = torch.randn(4, 2)
    expected = nn.BatchNorm1d(2)(x)
    with ts.MirroredStrategy(cpu_devices(2)).scope():
        layer = ts.nn.SyncBatchNorm(2)
        torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(layer(x), expected)
    torch.testing.assert_close(ts.get_strategy().run(ts.nn.SyncBatchNorm(2), args=(x,)), expected)
    torch.testing.assert_close(nn.SyncBatchNorm(2)(x), expected)


def test_an_empty_batch_changes_no_running_statistics():
    with (two := ts.MirroredStrategy(cpu_devices(2))).scope():
        layer = ts.nn.SyncBatchNorm(2)
    results = two.run(lambda: layer(torch.zeros(0, 2)))
    assert [tuple(value.shape) for value in two.experimental_local_results(results)] == [(0, 2), (0, 2)]
    assert layer.running_mean.tolist() == [0, 0]
    assert layer.running_var.tolist() == [1, 1]


@pytest.mark.parametrize("shares", [(1, 0), (0, 1)])
def test_one_value_for_each_channel_is_refused(shares):
    with (two := ts.MirroredStrategy(cpu_devices(2))).scope():
        layer = ts.nn.SyncBatchNorm(2)

    def fn():
        return layer(torch.zeros(shares[ts.get_replica_context().replica_id_in_sync_group], 2))

    with pytest.raises(ValueError, match="Over all replicas there is one"):
        two.run(fn)


def test_bad_inputs_are_refused():
    with (two := ts.MirroredStrategy(cpu_devices(2))).scope():
        layer = ts.nn.SyncBatchNorm(2)
    with pytest.raises(ValueError, match="at least 2D input"):
        two.run(lambda: layer(torch.zeros(2)))
    with pytest.raises(ValueError, match="non-zero"):
        two.run(lambda: layer(torch.zeros(2, 0)))
    with pytest.raises(RuntimeError, match="SyncBatchNorm"):
        two.run(lambda: ts.get_replica_context().replica_id_in_sync_group or layer(torch.zeros(2, 2)))


def test_groups_of_processes_are_refused():
    with pytest.raises(ValueError, match="Leave process_group out"):
        ts.nn.SyncBatchNorm(2, process_group=object())
    with pytest.raises(ValueError, match="Leave process_group out"):
        ts.nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(2), object())


def test_conversion():
    model = nn.Sequential(
        nn.Linear(2, 3), nn.Sequential(nn.BatchNorm1d(3, eps=0.5, momentum=None)), nn.SyncBatchNorm(3)
    )
    model.eval()
    state = dict(model.named_parameters()) | dict(model.named_buffers())
    assert synchronised(model) is model
    assert [type(layer) for layer in (model[1][0], model[2])] == [ts.nn.SyncBatchNorm] * 2
    assert (model[1][0].eps, model[1][0].momentum, model[1][0].training) == (0.5, None, False)
    now = dict(model.named_parameters()) | dict(model.named_buffers())
    assert all(now[name] is value for name, value in state.items())
    assert type(synchronised(nn.BatchNorm3d(2))) is ts.nn.SyncBatchNorm


def test_conversion_keeps_what_hangs_on_a_layer():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    layer, seen = model[1], []
    layer.register_forward_hook(lambda *_: seen.append(layer))
    synchronised(model)(torch.randn(4, 2))
    assert model[1] is layer
    assert seen == [layer]


class NormWithActivation(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x).relu()


class SynchronisedNormWithActivation(nn.SyncBatchNorm):
    def forward(self, x):
        return super().forward(x).relu()


def test_norms_that_do_more_are_not_converted():
    """The class of the new layer would not do it."""
    for refused, match in (
        (nn.LazyBatchNorm1d(), "'1' is not initialised yet"),
        (NormWithActivation(3), "'1' is a NormWithActivation, whose own `forward` would be lost"),
        (nn.utils.parametrize.register_parametrization(nn.BatchNorm1d(3), "weight", nn.Identity()), "'1' is parametr"),
    ):
        model = nn.Sequential(nn.BatchNorm1d(3), refused)
        with pytest.raises(ValueError, match=match):
            synchronised(model)
        assert type(model[0]) is nn.BatchNorm1d
    model = synchronised(nn.Sequential(SynchronisedNormWithActivation(3)))
    assert type(model[0]) is SynchronisedNormWithActivation


def test_conversion_after_the_first_run():
    def states(devices):
        torch.manual_seed(3)
        strategy = strategy_for(devices)
        with strategy.scope():
            model = dense_net()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        (batch,) = strategy.experimental_distribute_dataset(torch.randn(5, 3, dtype=DOUBLE), batch_size=5)
        strategy.run(model.eval(), args=(batch,))
        if devices:
            model = synchronised(model)

        def step(x):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()

        for _ in range(2):
            strategy.run(step, args=(batch,))
            model.train()
        return dict(model.state_dict())

    assert largest_difference(states([]), states(cpu_devices(2))) < 1e-10


def test_classes_and_files_are_plain():
    with (two := ts.MirroredStrategy(cpu_devices(2))).scope():
        ours, theirs = ts.nn.SyncBatchNorm(2), nn.SyncBatchNorm(2)
    two.run(lambda: (ours(torch.randn(2, 2)), theirs(torch.randn(2, 2))))
    assert isinstance(ours, nn.SyncBatchNorm)
    for layer, cls in ((ours, ts.nn.SyncBatchNorm), (theirs, nn.SyncBatchNorm)):
        assert type(pickle.loads(pickle.dumps(layer))) is cls
        assert type(copy.deepcopy(layer)) is cls
        nn.BatchNorm1d(2).load_state_dict(layer.state_dict())


@pytest.mark.parametrize("devices", [None, ["cpu:0", "cpu:1"]])
def test_a_native_backend_carries_one_row_of_each_replica(devices, process_pool):
    expected = train([])
    for actual, sent in process_pool(2).run(train_natively, devices):
        assert largest_difference(expected, actual) < 1e-10
        row = 8 * len(devices or [None])  # of float64
        assert sent == [row * (2 * 4 + 1), row * 2 * 4] * (len(sent) // 2)


@pytest.mark.parametrize(("is_native", "overlap", "more"), [(False, False, 4), (True, False, 0), (True, True, 4)])
def test_no_message_comes_before_the_rows_of_a_native_backend(is_native, overlap, more, process_pool):
    """But once for each new shape, and where sums begin during ``backward``: records tell their order."""
    one, three = (process_pool(2).run(records_of_steps, is_native, overlap, number)[0] for number in (1, 3))
    assert [b - a for a, b in zip(one, three, strict=True)] == [more] * 4
    assert one[0] > one[-1]


def test_other_channels_on_a_rank_are_named(process_pool):
    for message in process_pool(2).run(error_of_other_channels):
        assert re.search(r"SyncBatchNorm, ranks \d and \d: .*\(1, \d\) torch.float32 and \(1, \d\)", message), message


@pytest.mark.parametrize(
    ("change", "theirs"),
    [
        ("left out", r"the gradient of SyncBatchNorm, float32\[1, 8\] \(4 in all\)"),
        ("another", r"SyncBatchNorm, float32\[1, 17\] \(6 in all\)"),
    ],
)
def test_passes_of_one_rank_are_named_before_its_gradients_are_applied(change, theirs, process_pool):
    mine = r"SyncBatchNorm, float32\[1, (9|17)\] \(6 in all\)"
    for message, is_as_before in process_pool(2).run(error_of_a_pass_on_one_rank, change):
        assert is_as_before
        assert re.search(
            f"different collectives before .* at .*position.*\n  rank 0: {mine}\n  rank 1: {theirs}", message
        )
