"""What would end the process, or give wrong numbers, while a function is traced for all replicas, and is refused."""

import importlib
import logging

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torch.optim.swa_utils import get_swa_multi_avg_fn

from tests.tpu.test_region import ROWS, enter, traced

HOST = "there are no numbers yet"
SHAPE = "depends on a tensor's values"

# Measured without the refusal (torch_xla 2.9): every copy of a local value to the host, also by an operation that
# torch_xla computes there, ends the process (HloSharding: "Check failed: !IsManual()").
REFUSED = {
    "item": (lambda x: x.sum().item(), HOST),
    "if": (lambda x: 1 if x.sum() > 0 else 2, HOST),
    "float": (lambda x: float(x[0]), HOST),
    "format": (lambda x: f"{x.sum():.2f}", HOST),
    "tolist": (lambda x: x.tolist(), HOST),
    "cpu": (lambda x: x.cpu(), HOST),
    "copy": (lambda x: torch.zeros(3).copy_(x), HOST),
    "print": (lambda x: repr(x), "Printing"),
    "equal": (lambda x: torch.equal(x, x), HOST),
    "allclose": (lambda x: torch.allclose(x, x), HOST),
    "nonzero": (lambda x: x.nonzero(), SHAPE),
    "where": (lambda x: torch.where(x > 0), SHAPE),
    "mask": (lambda x: x[x > 0], SHAPE),
    "masked_select": (lambda x: x.masked_select(x > 0), SHAPE),
    "unique": (lambda x: x.unique(), SHAPE),
    "repeats": (lambda x: torch.repeat_interleave(x, (x > 0).long()), SHAPE),
    "median": (lambda x: x.median(), "no implementation"),
    "lgamma": (lambda x: x.lgamma(), "no implementation"),
    "histogram": (lambda x: torch.histc(x, 3), "no implementation"),
    "packing": (lambda x: pack_padded_sequence(x[:, None, None], torch.ones(3, device="cpu")), "no implementation"),
    "scatter": (lambda x: x.scatter(0, x.argsort(), x, reduce="multiply"), "no implementation"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_reading_values_is_refused(runtime, name):
    function, reason = REFUSED[name]
    with traced(runtime) as region:
        x = enter(region, ROWS)
        with pytest.raises(RuntimeError, match=reason) as raised:
            function(x)
    assert "test_traps.py:" in str(raised.value)


def lbfgs(x):
    parameter = torch.zeros(3, device=x.device, requires_grad=True)
    optimizer = torch.optim.LBFGS([parameter])

    def closure():
        optimizer.zero_grad()
        loss = (parameter * x).sum()
        loss.backward()
        return loss

    optimizer.step(closure)


def step_of(make_optimizer):
    def step(x):
        parameter = torch.zeros(3, device=x.device, requires_grad=True)
        parameter.grad = torch.ones_like(parameter)
        make_optimizer([parameter]).step()

    return step


def scaler(x):
    optimizer = torch.optim.SGD([torch.zeros(3, device=x.device, requires_grad=True)], 0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale((optimizer.param_groups[0]["params"][0] * x).sum()).backward()
    scaler.step(optimizer)


def mean_of_all(x):
    get_swa_multi_avg_fn()([torch.zeros(3, device=x.device)], [x], torch.ones((), device=x.device))


def log_a_number(x):
    logging.LogRecord("tests", 20, __file__, 1, "%.1f", (x.sum(),), None).getMessage()


OF_THEIR_OWN = {
    "lbfgs": (lbfgs, "`LBFGS`, which decides .* Train with another optimizer here"),
    "asgd": (step_of(torch.optim.ASGD), r"`ASGD`, which .* Train with another optimizer here: SGD, and `AveragedModel"),
    "adafactor": (step_of(torch.optim.Adafactor), "`Adafactor`, whose steps .* another optimizer here, such as Adam"),
    "scaler": (scaler, "`GradScaler`, which leaves out steps .* leave the scaler out, or make it with `enabled=False`"),
    "mean": (mean_of_all, r"`get_swa_multi_avg_fn`, reads the number .* `AveragedModel\(model\)` takes the same mean"),
    "log": (log_a_number, "A logger with a format for numbers, such as `%f`, reads .* log it outside"),
    "cond": (
        lambda x: torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,)),
        r"`torch.cond` was called inside `run` .* choose by `torch.where\(condition, a, b\)`",
    ),
    "bag": (
        lambda x: nn.EmbeddingBag(4, 2, sparse=True, device=x.device)(x.long()[None]),
        "`EmbeddingBag` .* and `sparse=True` .* XLA no sparse gradients. Use `nn.Embedding`",
    ),
    "dense bag": (
        lambda x: nn.EmbeddingBag(4, 2, device=x.device)(x.long()[None]),
        "`EmbeddingBag` with a table on the device at .* torch_xla has no implementation of it. Use `nn.Embedding`",
    ),
}


@pytest.mark.parametrize("name", OF_THEIR_OWN)
def test_what_can_not_work_is_called_by_its_name(runtime, name):
    function, message = OF_THEIR_OWN[name]
    with traced(runtime) as region:
        x = enter(region, ROWS)
        with pytest.raises(RuntimeError, match=message) as raised:
            function(x)
    assert "test_traps.py:" in str(raised.value)


@pytest.mark.parametrize("function", [nn.Linear(3, 2, device="cpu"), lambda x: torch.cat([x, ROWS[0].cpu()])])
def test_a_tensor_of_the_host_is_called_so(runtime, function):
    with pytest.raises(RuntimeError, match=r"on the host beside .* Make modules in `strategy.scope\(\)`"):  # noqa: SIM117
        with traced(runtime) as region:
            function(enter(region, ROWS))


def test_a_log_shows_what_a_tensor_is(runtime, caplog):
    with traced(runtime) as region, caplog.at_level(logging.INFO):
        total = enter(region, ROWS).sum()
        logging.getLogger("tests").info("loss %s", total)
    assert "loss <a tensor of shape () from aten.sum at test_traps.py:" in caplog.text
    assert "torch.float32: no number inside `run`>" in caplog.text


@pytest.mark.parametrize("name", ["item", "cpu", "print", "mask"])
def test_reading_shared_values_is_refused(runtime, name):
    """Without the refusal it works, but waits for the device in the middle of every step."""
    function, reason = REFUSED[name]
    shared = torch.ones(3, device=runtime.device)
    with traced(runtime), pytest.raises(RuntimeError, match=reason):
        function(shared)


@pytest.mark.parametrize("name", ["torch_xla.sync", "torch_xla.core.xla_model.mark_step"])
def test_cutting_the_step_is_refused(runtime, name):
    """Without the refusal it works, but half of the step runs alone."""
    module, _, function = name.rpartition(".")
    with traced(runtime):
        cut = getattr(importlib.import_module(module), function)
        with pytest.raises(RuntimeError, match="half of a step"):
            cut()


@pytest.mark.parametrize("name", ["all_reduce", "all_gather", "reduce_scatter", "collective_permute", "all_to_all"])
def test_torch_xlas_collectives_are_refused(runtime, name):
    """Without the refusal `all_reduce` and `all_gather` return their input; `collective_permute` ends the process."""
    from torch_xla.core import xla_model

    with traced(runtime) as region:
        x = enter(region, ROWS)
        with pytest.raises(RuntimeError, match=r"get_replica_context\(\)\.all_reduce"):
            getattr(xla_model, name)("sum", x)


def test_sparse_gradients_are_refused(runtime):
    embedding = nn.Embedding(5, 3, sparse=True).to(runtime.device)
    with traced(runtime) as region:
        x = enter(region, ROWS).long() % 5
        with pytest.raises(RuntimeError, match="sparse=False"):
            embedding(x)


def test_the_host_keeps_working_in_a_region(runtime):
    with traced(runtime):
        x = torch.tensor([3.0, 1.0, 2.0])
        assert x.sum().item() == 6
        assert x[x > 1].tolist() == [3, 2]
        assert x.median() == 2
        assert "3." in repr(x)
