"""What `ts.utils.tune` sets, and that results stay what they were."""

import copy
import functools
import logging

import pytest
import torch
from torch import nn

import torchstrategy as ts
from tests.programs import cpu_devices

LAST = torch.channels_last


def own_net():
    torch.manual_seed(0)
    return nn.Sequential(
        *(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.Tanh(),
            nn.ConvTranspose2d(8, 4, 2, stride=2),
        ),
        *(nn.Flatten(), nn.Linear(4 * 12 * 12, 5)),
    )


class Viewing(nn.Module):
    """Flattens what a convolution gives in the way that `channels_last` forbids, or in the other one."""

    def __init__(self, *, by_view):
        super().__init__()
        self.conv, self.head, self.by_view, self.num_calls = nn.Conv2d(3, 8, 3), nn.Linear(8 * 16, 5), by_view, 0

    def forward(self, x):
        self.num_calls += 1
        hidden = self.conv(x)
        return self.head(hidden.view(len(x), -1) if self.by_view else hidden.flatten(1))


def images(count=4):
    return torch.randn(count, 3, 6, 6, generator=torch.Generator().manual_seed(1))


def train(devices, *, is_tuned, make_optimizer, before=0, steps=4):
    """Return the parameters of each replica after some steps, of which some come before the tuning."""
    strategy = ts.MirroredStrategy(devices)
    with strategy.scope():
        model = own_net()
        optimizer = make_optimizer(model.parameters())

    def step(x):
        optimizer.zero_grad()
        ts.nn.compute_average_loss(model(x).square().sum(1), global_batch_size="actual").backward()
        optimizer.step()

    batches = strategy.experimental_distribute_dataset(images(4 * steps), batch_size=4)
    for number, batch in enumerate(batches):
        if number == before and is_tuned:
            ts.utils.tune(model, optimizer)
        strategy.run(step, args=(batch,))
    found = strategy.run(lambda: [parameter.detach().clone() for parameter in model.parameters()])
    formats = strategy.run(lambda: [model[0].weight.is_contiguous(memory_format=LAST), is_aligned(optimizer)])
    return [strategy.experimental_local_results(values) for values in found], [
        all(strategy.experimental_local_results(values)) for values in formats
    ]


def is_aligned(optimizer):
    return all(
        value.stride() == parameter.stride()
        for parameter, state in optimizer.state.items()
        for value in state.values()
        if value.shape == parameter.shape
    )


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("cls", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("count", [1, 2])
def test_results_stay_what_they_were(count, cls, before):
    def make(parameters):
        return cls(parameters, lr=0.01, **({"momentum": 0.9} if cls is torch.optim.SGD else {"eps": 1e-3}))

    expected, _ = train(cpu_devices(count), is_tuned=False, make_optimizer=make)
    found, are_as_wanted = train(cpu_devices(count), is_tuned=True, make_optimizer=make, before=before)
    assert are_as_wanted == [True, True]
    for row, values in zip(expected, found, strict=True):
        for value in values:
            torch.testing.assert_close(value, row[0], rtol=1e-5, atol=1e-6)


def test_it_says_in_one_line_what_it_did(caplog):
    caplog.set_level(logging.INFO, "torchstrategy")
    model = own_net()
    line = ts.utils.tune(model, torch.optim.Adam(model.parameters()))
    assert line.endswith("2 convolutions in channels_last; Adam is fused.")
    assert line in caplog.text
    assert ts.utils.tune(nn.Identity()) == "Tuned for no device: nothing to do."


def test_a_forward_of_the_programs_is_tried_out_without_being_called():
    for by_view in (True, False):
        model = Viewing(by_view=by_view)
        assert "no example=" in ts.utils.tune(model)
        assert model.conv.weight.is_contiguous()
        line = ts.utils.tune(model, example=images())
        assert model.conv.weight.is_contiguous(memory_format=LAST) is not by_view
        assert ("forward fails: RuntimeError: view size" in line) is by_view
        assert model.num_calls == 0
        assert model(images()).shape == (4, 5)


def test_state_that_is_loaded_takes_the_parameters_format():
    model = own_net()
    optimizer = torch.optim.Adam(model.parameters())
    model(images()).square().sum().backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    ts.utils.tune(model, optimizer)
    ts.utils.tune(model, optimizer)
    assert len(optimizer._optimizer_load_state_dict_post_hooks) == 1
    assert is_aligned(optimizer)
    optimizer.load_state_dict(saved)
    assert is_aligned(optimizer)
    assert not saved["state"][0]["exp_avg"].is_contiguous(memory_format=LAST)


@pytest.mark.parametrize("is_tuned", [True, False])
def test_a_checkpoint_of_the_other_kind_is_restored(is_tuned, tmp_path):
    """How a step is computed belongs to the program that goes on: another device may not know the saved way."""

    def make(*, is_tuned):
        model = own_net()
        optimizer = torch.optim.Adam(model.parameters(), eps=1e-3)
        if is_tuned:
            ts.utils.tune(model, optimizer)
        return model, optimizer, ts.train.Checkpoint(model=model, optimizer=optimizer)

    def step(model, optimizer):
        optimizer.zero_grad()
        model(images()).square().sum().backward()
        optimizer.step()

    saved, saved_optimizer, checkpoint = make(is_tuned=not is_tuned)
    step(saved, saved_optimizer)
    path = checkpoint.save(tmp_path / "ckpt")
    model, optimizer, checkpoint = make(is_tuned=is_tuned)
    checkpoint.restore(path).assert_consumed()
    assert bool(optimizer.param_groups[0]["fused"]) is is_tuned
    assert is_aligned(optimizer)
    for _ in range(3):
        step(saved, saved_optimizer)
        step(model, optimizer)
    for own, other in zip(model.parameters(), saved.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options", [{"foreach": True}, {"fused": False}, {"differentiable": True}, {"capturable": True}], ids=str
)
def test_what_the_program_has_asked_for_stays(options):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters(), **options)
    assert "fused" not in ts.utils.tune(model, optimizer)
    assert optimizer.param_groups[0]["fused"] is options.get("fused")


def test_weights_that_are_computed_stay():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 8, 3)), nn.Flatten())
    assert "convolution" not in ts.utils.tune(model)
    assert model(images()).shape == (4, 128)


def test_mistakes():
    with pytest.raises(TypeError, match="takes a torch"):
        ts.utils.tune("model")
    with pytest.raises(TypeError, match="must be a torch optimizer"):
        ts.utils.tune(nn.Linear(1, 1), 0.1)
    with pytest.raises(RuntimeError, match="inside `run`"):
        ts.MirroredStrategy(cpu_devices(2)).run(lambda: ts.utils.tune(nn.Linear(1, 1)))
    with pytest.raises(TypeError, match=r"compile\(tune=...\) must be True or False"):
        ts.Model(nn.Linear(1, 1)).compile("sgd", "mse", tune="yes")


@pytest.mark.parametrize("make", [ts.experimental.CentralStorageStrategy, ts.MirroredStrategy])
def test_fit_tunes_once(make, caplog):
    caplog.set_level(logging.INFO, "torchstrategy")
    weights = []
    for is_tuned in (True, False):
        caplog.clear()
        with make(cpu_devices(2)).scope():
            model = ts.Model(own_net())
            model.compile(functools.partial(torch.optim.Adam, eps=1e-3), "mse", tune=is_tuned)
        model.evaluate(images(8), torch.zeros(8, 5), verbose=0)
        for _ in range(2):
            model.fit(images(8), torch.zeros(8, 5), batch_size=4, verbose=0, shuffle=False)
        assert caplog.text.count("2 convolutions in channels_last; Adam is fused.") == is_tuned
        weights.append([value.detach().clone() for value in model.parameters()])
    for tuned, plain in zip(*weights, strict=True):
        torch.testing.assert_close(tuned, plain, rtol=1e-5, atol=1e-6)


def test_a_model_on_parameter_servers_stays_as_it_is():
    with ts.testing.LocalCluster(num_workers=1, num_ps=1) as cluster:
        strategy = ts.ParameterServerStrategy(cluster.resolver())
        with strategy.scope():
            model = own_net()
            optimizer = torch.optim.Adam(model.parameters())
        assert ts.utils.tune(model, optimizer) == "Tuned for parameter servers: nothing to do."
        assert not optimizer.param_groups[0]["fused"]
