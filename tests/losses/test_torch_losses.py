"""The warning for torch losses that average over a replica's share."""

import copy
import io
import pickle
import sys
import warnings

import pytest
import torch
from torch import nn

import torchstrategy as ts
from tests.programs import cpu_devices, strategy_for
from torchstrategy import log

X = torch.zeros(4, 2)
Y = torch.tensor([0, 1, 0, 1])


@pytest.fixture(autouse=True)
def _nothing_said(monkeypatch):
    monkeypatch.setattr(log, "_said", set())


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.loss = nn.CrossEntropyLoss()

    def forward(self, x, y):
        return self.loss(self.layer(x), y)


def warnings_of(devices, make, num_runs=3):
    """Make something in a scope, call it in several runs, and return the warnings and their files."""
    log._said.clear()
    strategy = strategy_for(devices)
    with strategy.scope():
        made = make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(num_runs):
            strategy.run(lambda x, y: made(x, y), args=(X, Y))
    # Sockets of earlier strategies may be collected meanwhile, which warns too.
    return [(str(warning.message), warning.filename) for warning in caught if warning.category is UserWarning]


@pytest.mark.parametrize("make", [nn.CrossEntropyLoss, WithLoss])
def test_a_mean_warns_once(make):
    ((message, filename),) = warnings_of(cpu_devices(2), make)
    assert message.startswith("CrossEntropyLoss(reduction='mean') averages over this replica's share")
    assert "CrossEntropyLoss(reduction='none')" in message
    assert 'compute_average_loss(per_example_loss, global_batch_size="actual")' in message
    assert filename == __file__


def test_a_mean_warns_on_two_processes(process_pool):
    for caught in process_pool(2).run(warnings_of, None, nn.CrossEntropyLoss):
        ((message, _),) = caught
        assert "averages over this replica's share" in message


def make_sum():
    return nn.CrossEntropyLoss(reduction="sum")


def make_none():
    return nn.CrossEntropyLoss(reduction="none")


def test_what_does_not_warn(process_pool):
    assert warnings_of(cpu_devices(1), nn.CrossEntropyLoss) == []
    assert warnings_of([], nn.CrossEntropyLoss) == []
    for make in (make_sum, make_none):
        assert warnings_of(cpu_devices(2), make) == []
        assert process_pool(2).run(warnings_of, None, make) == [[], []]


def test_no_warning_outside_run_and_none_for_a_changed_reduction():
    strategy = ts.MirroredStrategy(cpu_devices(2))
    with strategy.scope():
        loss = nn.CrossEntropyLoss()
    strategy.run(lambda: None)
    assert loss(X, Y).item() == pytest.approx(0.6931, abs=1e-4)
    loss.reduction = "none"
    strategy.run(lambda: loss(X, Y))
    loss.reduction = "mean"
    with pytest.warns(UserWarning, match="averages over this replica's share"):
        strategy.run(lambda: loss(X, Y))


def test_a_copy_on_one_replica_does_not_warn():
    strategy = ts.MirroredStrategy(cpu_devices(2))
    with strategy.scope():
        loss = nn.CrossEntropyLoss()
    strategy.run(lambda: None)
    again = copy.deepcopy(loss)
    ts.MirroredStrategy(cpu_devices(1)).run(lambda: again(X, Y))
    with pytest.warns(UserWarning, match="averages over this replica's share"):
        strategy.run(lambda: again(X, Y))


def test_hooks_of_the_user_stay():
    calls = []
    strategy = ts.MirroredStrategy(cpu_devices(2))
    with strategy.scope():
        loss = nn.MSELoss()
    handle = loss.register_forward_pre_hook(lambda module, args: calls.append(1))
    with pytest.warns(UserWarning, match="MSELoss"):
        strategy.run(lambda: loss(X, X))
    assert calls == [1, 1]
    handle.remove()
    log._said.clear()
    with pytest.warns(UserWarning, match="MSELoss"):
        strategy.run(lambda: loss(X, X))
    assert calls == [1, 1]


def copied_and_saved(devices):
    strategy = strategy_for(devices)
    with strategy.scope():
        model = WithLoss()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        strategy.run(lambda: model(X, Y))
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        copies = [pickle.loads(pickle.dumps(model)), copy.deepcopy(model), torch.load(buffer, weights_only=False)]
        same = [float(c(X, Y).detach() - model(X, Y).detach()) == 0.0 for c in copies]
    return same, [type(c.loss) is nn.CrossEntropyLoss for c in copies], sorted(model.state_dict())


def test_copies_and_pickles(process_pool):
    expected = ([True] * 3, [True] * 3, ["layer.bias", "layer.weight"])
    assert copied_and_saved(cpu_devices(2)) == expected
    assert process_pool(2).run(copied_and_saved, None) == [expected] * 2


def test_under_torch_compile():
    strategy = ts.MirroredStrategy(cpu_devices(2))
    with strategy.scope():
        model = torch.compile(WithLoss(), backend="eager", fullgraph=True)
    results = strategy.experimental_local_results(strategy.run(lambda: model(X, Y).detach()))
    assert len(results) == 2


# functions, and modules made outside the scope: seen in the first run


def forget_compiled():
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    if dynamo is not None:
        dynamo.cached_backends.clear()


def functional_warnings(devices, call, num_runs=2):
    """Call a loss function of the logits in several runs; return the warnings and their files."""
    log._said.clear()
    forget_compiled()
    strategy = strategy_for(devices)
    with strategy.scope():
        model = nn.Linear(2, 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(num_runs):
            strategy.run(lambda x, y: call(model(x), y).detach(), args=(X, Y))
    return [(str(warning.message), warning.filename) for warning in caught if warning.category is UserWarning]


def mean_function(logits, labels):
    return nn.functional.cross_entropy(logits, labels)


def mean_squares(logits, labels):
    return nn.functional.mse_loss(logits, torch.ones_like(logits), reduction="mean")


def module_made_outside(logits, labels):
    return MADE_OUTSIDE(logits, labels)


MADE_OUTSIDE = nn.CrossEntropyLoss()


@pytest.mark.parametrize(
    ("call", "name"),
    [(mean_function, "cross_entropy"), (mean_squares, "mse_loss"), (module_made_outside, "cross_entropy")],
)
def test_a_mean_by_a_function_warns_once(call, name, process_pool):
    ((message, filename),) = functional_warnings(cpu_devices(2), call)
    assert message.startswith(f"{name} with reduction='mean' averages over this replica's share")
    assert filename == __file__
    for caught in process_pool(2).run(functional_warnings, None, call):
        assert [text for text, _ in caught] == [message]


def not_differentiated(logits, labels):
    return nn.functional.cross_entropy(logits.detach(), labels)


def per_example(logits, labels):
    return nn.functional.cross_entropy(logits, labels, reduction="none")


@pytest.mark.parametrize("call", [not_differentiated, per_example])
def test_functions_that_do_not_warn(call):
    assert functional_warnings(cpu_devices(2), call) == []
    assert functional_warnings([], mean_function) == functional_warnings(cpu_devices(1), mean_function) == []


def test_nothing_is_watched_where_models_are_compiled():
    strategy = ts.MirroredStrategy(cpu_devices(2))
    log._said.clear()
    forget_compiled()
    with strategy.scope():
        model = nn.Linear(2, 2)
        compiled = torch.compile(model, backend="eager")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*averages over")
        strategy.run(lambda: nn.functional.cross_entropy(compiled(X), Y).detach())


def test_a_run_inside_a_run_of_the_first(process_pool):
    forget_compiled()
    strategy = ts.MirroredStrategy(cpu_devices(2))
    inner = lambda s: s.reduce("SUM", s.run(lambda: torch.ones(())))  # noqa: E731
    result = strategy.run(lambda: ts.get_replica_context().merge_call(inner))
    assert float(result) == 2.0
