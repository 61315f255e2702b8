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


def test_what_is_not_torchs_own_is_tried_out_on_a_copy():
    for by_view in (True, False):
        model = Viewing(by_view=by_view)
        assert "no example=" in ts.utils.tune(model)
        assert model.conv.weight.is_contiguous(memory_format=torch.contiguous_format)
        line = ts.utils.tune(model, example=images())
        assert model.conv.weight.is_contiguous(memory_format=LAST) is not by_view
        assert ("the model fails: RuntimeError: view size" in line) is by_view
        assert model.num_calls == 0
        assert model(images()).shape == (4, 5)


class View(nn.Module):
    def forward(self, x):
        return x.view(len(x), -1)


class Standardized(nn.Conv2d):
    def forward(self, x):
        flat = self.weight.view(len(self.weight), -1)
        return self._conv_forward(x, (flat - flat.mean(1, keepdim=True)).view_as(self.weight), self.bias)


def hooked():
    convolution = nn.Conv2d(3, 4, 3)
    convolution.register_forward_hook(lambda module, args, output: output.view(len(output), -1))
    return nn.Sequential(convolution, nn.Linear(64, 2))


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Conv2d(3, 4, 3), View(), nn.Linear(64, 2)),
        lambda: nn.Sequential(Standardized(3, 4, 3), nn.Flatten(), nn.Linear(64, 2)),
        hooked,
    ],
    ids=["a module beside it", "a convolution of the program's", "a hook"],
)
def test_what_views_beside_a_convolution_is_found(make):
    for example in (None, images()):
        model = make()
        assert "left as they are" in ts.utils.tune(model, example=example)
        assert model(images()).shape == (4, 2)


def test_a_parametrization_is_not_computed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 8, 3)), nn.Flatten())
    before = copy.deepcopy(model.state_dict())
    assert "convolution" not in ts.utils.tune(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def compared(change, *, count=1, make=own_net, tune_at=0, to_none=True):
    """Return the weights of tuned and plain training in which the program changes something before each step."""
    found = []
    for is_tuned in (True, False):
        strategy = ts.MirroredStrategy(cpu_devices(count))
        with strategy.scope():
            model = make()
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-3)

        def step(x, number, model=model, optimizer=optimizer):
            optimizer.zero_grad(set_to_none=to_none)
            ts.nn.compute_average_loss(model(x).square().flatten(1).sum(1), global_batch_size="actual").backward()
            change.in_run(model, optimizer, number)
            optimizer.step()

        for number, batch in enumerate(strategy.experimental_distribute_dataset(images(16), batch_size=4)):
            if number == tune_at and is_tuned:
                ts.utils.tune(model, optimizer)
            change.outside(model, optimizer, number)
            strategy.run(step, args=(batch, number))
        values = strategy.run(lambda model=model: [parameter.detach().clone() for parameter in model.parameters()])
        found.append([value for column in values for value in strategy.experimental_local_results(column)])
    return found


class Change:
    def in_run(self, model, optimizer, number):
        """Change nothing."""

    def outside(self, model, optimizer, number):
        """Change nothing."""


class Assigned(Change):
    def in_run(self, model, optimizer, number):
        for parameter in model.parameters():
            parameter.grad = torch.full((), 0.5).expand(parameter.shape)


class Turned(Change):
    def outside(self, model, optimizer, number):
        if number == 2:
            model.to(memory_format=torch.contiguous_format)


class Loaded(Change):
    def outside(self, model, optimizer, number):
        if number == 2:
            state = copy.deepcopy(optimizer.state_dict())
            for values in state["state"].values():
                values.update({name: value.contiguous() for name, value in values.items()})
            optimizer.load_state_dict(state)


class Vector(Change):
    def outside(self, model, optimizer, number):
        if number == 2:
            flat = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]) * 0.9
            nn.utils.vector_to_parameters(flat, model.parameters())


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize(
    ("change", "options"),
    [
        (Assigned(), {}),
        (Turned(), {}),
        (Loaded(), {}),
        (Vector(), {}),
        (Change(), {"tune_at": 2, "to_none": False}),
        (Assigned(), {"tune_at": 2}),
    ],
    ids=["assigned", "turned back", "loaded", "from a vector", "kept gradients", "assigned, tuned later"],
)
def test_fused_steps_find_all_in_one_memory_format(change, options, count):
    for tuned, plain in zip(*compared(change, count=count, **options), strict=True):
        torch.testing.assert_close(tuned, plain, rtol=1e-4, atol=1e-5)


def test_a_parameter_with_gaps_is_not_fused():
    memory = torch.zeros(2, 8)
    model = nn.Linear(4, 2)
    model.weight = nn.Parameter(memory[:, :4])
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    assert "fused" not in ts.utils.tune(model, optimizer)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert memory[:, 4:].eq(0).all()
    assert memory[:, :4].ne(0).all()


def test_other_optimizers_of_a_turned_weight_are_aligned():
    model = own_net()
    other = torch.optim.Adam(model.parameters(), fused=True)
    model(images()).square().sum().backward()
    other.step()
    ts.utils.tune(model)
    assert is_aligned(other)
    other.load_state_dict(other.state_dict())
    model(images()).square().sum().backward()
    other.step()
    assert is_aligned(other)


class Counting(torch.optim.SGD):
    """Keeps something beside what belongs to parameters."""

    def step(self, closure=None):
        self.state["count"] = self.state.get("count", 0) + 1
        return super().step(closure)


def test_other_state_than_parameters_is_restored(tmp_path):
    model = nn.Linear(2, 1)
    optimizer = Counting(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    checkpoint = ts.train.Checkpoint(model=model, optimizer=optimizer)
    path = checkpoint.save(tmp_path / "ckpt")
    optimizer.step()
    checkpoint.restore(path)
    assert optimizer.state["count"] == 1
    ts.utils.tune(model, optimizer)


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
        assert caplog.text.count("Tuned for cpu: freed memory is kept; Adam is fused.") == is_tuned
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
