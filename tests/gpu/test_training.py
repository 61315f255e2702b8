"""On one GPU a strategy trains as plain torch does: number formats, scaled losses, memory, devices, saved state."""

import pytest
import torch
from torch import nn

import torchstrategy as ts
from tests.gpu.training import ACCELERATORS, DEVICES, make_data, make_net, skip_sparse, train
from tests.parity.random_programs import make_program
from tests.parity.random_training import default_strategy, mirrored, run_random_program
from tests.programs import assert_equal

STRATEGIES = {
    "OneDeviceStrategy": lambda device: ts.OneDeviceStrategy(device),
    "MirroredStrategy": lambda device: ts.MirroredStrategy([device]),
    "MultiWorkerMirroredStrategy": lambda device: ts.MultiWorkerMirroredStrategy(devices=[device]),
    "CentralStorageStrategy": lambda device: ts.experimental.CentralStorageStrategy([device]),
    "CentralStorageStrategy on the host": lambda device: ts.experimental.CentralStorageStrategy([device], "cpu:0"),
}
#: Operations are the same with and without a strategy; central storage takes its steps on the host.
EXACT, EXACT_FLOAT = 1e-10, 1e-5


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_trains_as_plain_torch(device, name):
    assert_equal(train(device, STRATEGIES[name](device)), train(device, None), EXACT)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("overflow", [None, 7])
def test_a_grad_scaler(device, name, overflow):
    options = {"dtype": torch.float32, "scales": True, "overflow": overflow}
    found = train(device, STRATEGIES[name](device), **options)
    assert_equal(found, train(device, None, **options), EXACT_FLOAT)
    assert (found["scales"].min() < 2.0**8) == (overflow is not None)
    assert all(value.isfinite().all() for key, value in found.items() if key != "losses")


@pytest.mark.parametrize(("autocast", "scales"), [(torch.bfloat16, False), (torch.float16, True)])
def test_mixed_precision(device, autocast, scales):
    options = {"dtype": torch.float32, "autocast": autocast, "scales": scales}
    found = train(device, ts.OneDeviceStrategy(device), **options)
    assert_equal(found, train(device, None, **options), EXACT_FLOAT)
    in_full = train(device, None, dtype=torch.float32)
    assert not torch.equal(found["losses"], in_full["losses"])
    torch.testing.assert_close(found["losses"], in_full["losses"], rtol=0.05, atol=0.05)


def test_parameters_in_bfloat16(device):
    found = train(device, ts.OneDeviceStrategy(device), dtype=torch.bfloat16)
    assert found["0.weight"].dtype is torch.bfloat16
    assert_equal(found, train(device, None, dtype=torch.bfloat16), 2**-8)


def test_what_is_made_in_a_scope_is_on_the_device(device):
    strategy = ts.OneDeviceStrategy(device)
    with strategy.scope():
        model = nn.Linear(2, 2)
        variable = ts.Variable(1.0)
        metric = ts.metrics.Mean()
    assert {tensor.device.type for tensor in (*model.parameters(), variable)} == {torch.device(device).type}
    strategy.run(lambda: metric.update_state(model(model.weight.new_ones(3, 2)).sum().detach()))
    total = sum(float(parameter.detach().sum()) for parameter in model.parameters())
    assert float(metric.result()) == pytest.approx(3 * total, rel=1e-5)
    assert float(strategy.reduce("SUM", strategy.run(lambda: variable.detach() * 3))) == 3


def test_parameters_on_the_host(device):
    """The CPU keeps parameters and momentum, whatever computes: a GPU holds copies only."""
    strategy = ts.experimental.CentralStorageStrategy([device], "cpu:0")
    with strategy.scope():
        model = make_net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    seen = []

    def step(x, y):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        seen.append((model[0].weight.device.type, loss.device.type))
        optimizer.step()
        return loss.detach()

    (inputs,) = strategy.experimental_distribute_dataset(make_data(), batch_size=23)
    before = float(strategy.run(step, args=inputs))
    assert float(strategy.run(step, args=inputs)) < before
    kind = torch.device(device).type
    assert seen == [(kind, kind)] * 2
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    assert {optimizer.state[parameter]["exp_avg"].device.type for parameter in model.parameters()} == {"cpu"}


def test_dropout_repeats_from_a_seed_and_differs_between_steps(device):
    strategy = ts.OneDeviceStrategy(device)
    x = torch.ones(1000, device=torch.device(device).type)

    def masks():
        torch.manual_seed(11)
        return [strategy.run(lambda: nn.functional.dropout(x, 0.5)) for _ in range(2)]

    first, second = masks(), masks()
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    assert not torch.equal(first[0], first[1])


def test_channels_last(device):
    strategy = ts.OneDeviceStrategy(device)
    with strategy.scope():
        model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        optimizer = torch.optim.Adam(model.parameters(), fused=True)
    images = torch.randn(4, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    (batch,) = strategy.experimental_distribute_dataset([images])

    def step(images):
        assert images.is_contiguous(memory_format=torch.channels_last)
        output = model(images)
        output.sum().backward()
        optimizer.step()
        return output.detach()

    assert strategy.run(step, args=(batch,)).is_contiguous(memory_format=torch.channels_last)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("amp", [None, "bf16", "fp16"])
def test_fit(device, amp):
    """Mixed precision on the device follows full precision on the CPU."""
    x, y = make_data(torch.float32, num_examples=40)

    def losses(strategy, amp):
        with strategy.scope():
            model = ts.Model(make_net(torch.float32))
            model.compile("sgd", "mse", amp=amp)
        return model.fit(x, y, batch_size=12, epochs=3, shuffle=False, verbose=0).history["loss"]

    tolerance = 1e-4 if amp is None else 0.03
    expected = losses(ts.OneDeviceStrategy("cpu:0"), None)
    assert losses(ts.OneDeviceStrategy(device), amp) == pytest.approx(expected, rel=tolerance)


@pytest.mark.parametrize("goes_back", [False, True])
def test_a_checkpoint_moves_between_devices(device, goes_back, tmp_path):
    places = (device, "cpu:0") if goes_back else ("cpu:0", device)

    def make(place):
        strategy = ts.OneDeviceStrategy(place)
        with strategy.scope():
            model = make_net()
            optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        x, y = (part.to(torch.device(place).type) for part in make_data())

        def step():
            optimizer.zero_grad()
            loss = (model(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return ts.train.Checkpoint(model=model, optimizer=optimizer), lambda: float(strategy.run(step))

    saved, train_saved = make(places[0])
    train_saved()
    path = saved.save(str(tmp_path / "ckpt"))
    restored, train_restored = make(places[1])
    restored.restore(path)
    assert [train_restored() for _ in range(3)] == pytest.approx([train_saved() for _ in range(3)], rel=1e-10)


@pytest.mark.parametrize("device", ACCELERATORS)
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_random_programs_give_the_cpus_numbers(seed, device):
    skip_sparse(device, make_program(seed))
    found = run_random_program(mirrored, seed, devices=[device])
    assert_equal(found, run_random_program(default_strategy, seed), 1e-8)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_a_step_never_waits_for_the_gpu():
    """With one replica nothing between two steps reads from the device: the host may run ahead."""
    strategy = ts.OneDeviceStrategy("cuda:0")
    with strategy.scope():
        model = make_net(torch.float32)
        optimizer = torch.optim.Adam(model.parameters())

    def step(x, y):
        optimizer.zero_grad()
        loss = ts.nn.compute_average_loss((model(x) - y).square().mean(1), global_batch_size="actual")
        loss.backward()
        optimizer.step()
        return loss.detach()

    inputs = list(strategy.experimental_distribute_dataset(make_data(torch.float32), batch_size=5))
    for batch in inputs:  # the first runs look for mistakes
        strategy.run(step, args=batch)
    torch.cuda.set_sync_debug_mode("error")
    try:
        losses = [strategy.run(step, args=batch) for batch in inputs]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.stack(losses).isfinite().all()


@pytest.mark.gpu
def test_a_strategy_takes_no_more_memory_than_plain_torch():
    width, batch_bytes = 2048, 64 * 2048 * 4

    def peak(strategy):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with torch.device("cuda:0") if strategy is None else strategy.scope():
            model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
            optimizer = torch.optim.Adam(model.parameters())

        def step(x):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

        batches = [torch.ones(64, width)] * 4
        if strategy is None:
            for batch in batches:
                step(batch.to("cuda:0"))
        else:
            for batch in strategy.experimental_distribute_dataset(batches):
                strategy.run(step, args=(batch,))
        return torch.cuda.max_memory_allocated() - before

    plain = peak(None)
    assert peak(ts.OneDeviceStrategy("cuda:0")) <= plain + 4 * batch_bytes  # batches travel ahead
