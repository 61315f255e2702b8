"""Training steps that treat gradients in unusual ways. Replica i brings ``i + 1`` times the gradient 1, or 1 each.

Each has a net of one weight, which begins at 0, an optimizer with a rate of 1, and the number of the run.
"""

import dataclasses
import warnings
from unittest import mock

import torch

import torchstrategy as ts

NUM_RUNS = 5
#: Programs whose weight must be that of one replica which brings all that the replicas bring.
RIGHT = {}
#: Programs that must be refused, by a part of the message; with equal gradients on all replicas only if so marked.
REFUSED = {}


def right(step):
    RIGHT[step.__name__] = step
    return step


def refused(message, *, if_equal=False):
    def note(step):
        REFUSED[step.__name__] = (step, message, if_equal)
        return step

    return note


def train(devices, step, *, is_equal):
    """Return the weight after ``NUM_RUNS`` runs, on each local replica."""
    strategy = ts.MirroredStrategy(devices)
    total = 2.0 if is_equal else 3.0
    with strategy.scope():
        model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
        torch.nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def loss():
        context = ts.get_replica_context()
        own = 1.0 if is_equal else context.replica_id_in_sync_group + 1.0
        factor = total if context.num_replicas_in_sync == 1 else own
        return factor * model(torch.ones(1, 1, dtype=torch.float64)).sum()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Using backward\\(\\) with create_graph")
        warnings.filterwarnings("ignore", message="A gradient was changed in place between")
        for run in range(NUM_RUNS):
            strategy.run(step, args=(model, optimizer, loss, run))
    weights = strategy.run(lambda: model.weight.detach().clone())
    return [weight.item() for weight in strategy.experimental_local_results(weights)]


def answer(devices, name, *, is_equal):
    """Return the weights, or the error's text."""
    step = RIGHT[name] if name in RIGHT else REFUSED[name][0]
    try:
        return train(devices, step, is_equal=is_equal)
    except RuntimeError as error:
        return str(error)


def answers(devices):
    """Return the answers of all programs."""
    return {
        (name, is_equal): answer(devices, name, is_equal=is_equal)
        for name in [*RIGHT, *REFUSED]
        for is_equal in (False, True)
    }


def sum_now(optimizer, **options):
    ts.get_replica_context().sum_gradients(optimizer, **options)


def assign(model, loss):
    (model.weight.grad,) = torch.autograd.grad(loss(), model.weight)


def write(model, loss, *, past_the_counter):
    """Write a gradient into the tensor that is there."""
    (gradient,) = torch.autograd.grad(loss(), model.weight)
    if model.weight.grad is None:
        model.weight.grad = torch.zeros_like(model.weight)
    (model.weight.grad.data if past_the_counter else model.weight.grad).copy_(gradient)


@right
def plain(model, optimizer, loss, run):
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()


@right
def cleared_in_place_by_the_optimizer(model, optimizer, loss, run):
    optimizer.zero_grad(set_to_none=False)
    loss().backward()
    optimizer.step()


@right
def cleared_in_place_by_the_model(model, optimizer, loss, run):
    model.zero_grad(set_to_none=False)
    loss().backward()
    optimizer.step()


@right
def cleared_past_the_counter(model, optimizer, loss, run):
    if model.weight.grad is not None:
        model.weight.grad.data.zero_()
    loss().backward()
    optimizer.step()


@right
def cleared_by_a_new_tensor_of_zeros(model, optimizer, loss, run):
    model.weight.grad = torch.zeros_like(model.weight)
    loss().backward()
    optimizer.step()


@right
def accumulated_over_backward_passes(model, optimizer, loss, run):
    optimizer.zero_grad()
    loss().backward()
    loss().backward()
    optimizer.step()


@right
def accumulated_over_runs(model, optimizer, loss, run):
    loss().backward()
    if run % 2:
        optimizer.step()
        optimizer.zero_grad()


@right
def two_steps_on_one_gradient(model, optimizer, loss, run):
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()
    optimizer.step()


@right
def summed_and_clipped_in_place(model, optimizer, loss, run):
    optimizer.zero_grad()
    loss().backward()
    sum_now(optimizer)
    torch.nn.utils.clip_grad_value_(model.parameters(), 1.5)
    optimizer.step()


@right
def summed_and_replaced(model, optimizer, loss, run):
    optimizer.zero_grad()
    loss().backward()
    sum_now(optimizer)
    model.weight.grad = model.weight.grad * 0.5
    optimizer.step()


@right
def summed_twice(model, optimizer, loss, run):
    optimizer.zero_grad()
    loss().backward()
    sum_now(optimizer)
    sum_now(optimizer)
    optimizer.step()


@right
def summed_again_after_a_step_and_halved(model, optimizer, loss, run):
    """As two optimizers of one parameter that each clip its gradient."""
    optimizer.zero_grad()
    loss().backward()
    for _ in range(2):
        sum_now(optimizer)
        model.weight.grad.mul_(0.5)
        optimizer.step()


@right
def two_steps_on_one_gradient_at_last(model, optimizer, loss, run):
    """As a second optimizer of the same parameter that begins when the first one's sums leave no fingerprints."""
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()
    if run == NUM_RUNS - 1:
        optimizer.step()


@right
def zeros_that_are_written_where_another_replica_has_new_gradients(model, optimizer, loss, run):
    if model.weight.grad is None:
        model.weight.grad = torch.zeros_like(model.weight)
    model.weight.grad.zero_()
    context = ts.get_replica_context()
    (gradient,) = torch.autograd.grad(loss(), model.weight)
    total = context.all_reduce("sum", gradient)
    if run % 2 and context.replica_id_in_sync_group == context.num_replicas_in_sync - 1:
        model.weight.grad = model.weight.grad + total
    optimizer.step()


@right
def summed_in_one_run_and_used_in_the_next(model, optimizer, loss, run):
    if run % 2 == 0:
        optimizer.zero_grad()
        loss().backward()
        sum_now(optimizer)
    else:
        optimizer.step()


@right
def summed_in_one_run_and_clipped_in_the_next(model, optimizer, loss, run):
    if run % 2 == 0:
        optimizer.zero_grad()
        loss().backward()
        sum_now(optimizer)
    else:
        torch.nn.utils.clip_grad_value_(model.parameters(), 1.5)
        optimizer.step()


@right
def summed_in_one_run_and_replaced_in_the_next(model, optimizer, loss, run):
    if run % 2 == 0:
        optimizer.zero_grad()
        loss().backward()
        sum_now(optimizer)
    else:
        model.weight.grad = model.weight.grad * 0.5
        optimizer.step()


@right
def skipped_then_cleared_by_the_model(model, optimizer, loss, run):
    model.zero_grad()
    assign(model, loss)
    sum_now(optimizer)
    if run != 1:
        optimizer.step()


@right
def skipped_then_cleared_in_place(model, optimizer, loss, run):
    model.zero_grad(set_to_none=False)
    loss().backward()
    sum_now(optimizer)
    if run != 1:
        optimizer.step()


@right
def skipped_then_cleared_by_hand_before_backward(model, optimizer, loss, run):
    model.weight.grad = None
    loss().backward()
    sum_now(optimizer)
    if run != 1:
        optimizer.step()


@right
def skipped_by_a_scaler(model, optimizer, loss, run):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer.zero_grad()
    loss_now = loss() * (float("inf") if run == 1 else 1.0)
    scaler.scale(loss_now).backward()
    scaler.step(optimizer)
    scaler.update()


@right
def assigned(model, optimizer, loss, run):
    assign(model, loss)
    optimizer.step()


@right
def written_in_place(model, optimizer, loss, run):
    write(model, loss, past_the_counter=False)
    optimizer.step()


@right
def written_past_the_counter_and_said_so(model, optimizer, loss, run):
    write(model, loss, past_the_counter=True)
    sum_now(optimizer, fresh=True)
    optimizer.step()


@right
def summed_by_hand(model, optimizer, loss, run):
    optimizer.zero_grad()
    loss().backward()
    context = ts.get_replica_context()
    model.weight.grad = context.all_reduce("sum", model.weight.grad)
    context.mark_summed(optimizer)
    optimizer.step()


def _all_reduced(grad):
    return ts.get_replica_context().all_reduce("mean", grad)


OWN_SUM = "the same on all replicas, and it has called `all_reduce`"


@refused(OWN_SUM)
def summed_by_hand_and_not_said_so(model, optimizer, loss, run):
    optimizer.zero_grad()
    loss().backward()
    model.weight.grad = _all_reduced(model.weight.grad)
    optimizer.step()


@refused(OWN_SUM)
def summed_by_hand_in_place(model, optimizer, loss, run):
    optimizer.zero_grad()
    loss().backward()
    model.weight.grad.copy_(_all_reduced(torch.cat([model.weight.grad])))
    optimizer.step()


@refused(OWN_SUM)
def computed_and_summed_by_hand(model, optimizer, loss, run):
    (model.weight.grad,) = map(_all_reduced, torch.autograd.grad(loss(), model.weight))
    optimizer.step()


@right
def replaced_and_a_loss_reduced(model, optimizer, loss, run):
    optimizer.zero_grad()
    loss().backward()
    _all_reduced(torch.ones(()))
    if ts.get_replica_context().replica_id_in_sync_group == 0:
        model.weight.grad = model.weight.grad.clone()
    optimizer.step()


@right
def replaced_after_the_sum_and_a_loss_reduced(model, optimizer, loss, run):
    optimizer.zero_grad()
    loss().backward()
    sum_now(optimizer)
    _all_reduced(torch.ones(()))
    model.weight.grad = model.weight.grad.clone()
    optimizer.step()


@right
def computed_with_a_graph(model, optimizer, loss, run):
    optimizer.zero_grad()
    loss().backward(create_graph=True)
    optimizer.step()
    model.weight.grad = None


@right
def called_through_autograd(model, optimizer, loss, run):
    optimizer.zero_grad()
    torch.autograd.backward([loss(), loss()])
    optimizer.step()


@right
def a_closure(model, optimizer, loss, run):
    def closure():
        optimizer.zero_grad()
        result = loss()
        result.backward()
        return result

    optimizer.step(closure)


@refused("sum_gradients\\(optimizer, fresh=True\\).*mark_summed\\(optimizer\\)", if_equal=True)
def written_past_the_counter(model, optimizer, loss, run):
    write(model, loss, past_the_counter=True)
    optimizer.step()


@refused("sum_gradients\\(optimizer, fresh=True\\).*mark_summed\\(optimizer\\)")
def a_second_step_on_a_part_of_the_gradient(model, optimizer, loss, run):
    optimizer.zero_grad()
    loss().backward()
    optimizer.step()
    model.weight.grad.mul_(0.5)
    optimizer.step()


@refused("sum_gradients\\(optimizer, fresh=True\\).*mark_summed\\(optimizer\\)")
def replaced_after_the_sum_when_others_were_computed(model, optimizer, loss, run):
    optimizer.zero_grad()
    loss().backward()
    sum_now(optimizer)
    torch.autograd.grad(loss(), model.weight)
    model.weight.grad = model.weight.grad * 0.5
    optimizer.step()


@refused("between a step and the next backward")
def not_cleared(model, optimizer, loss, run):
    loss().backward()
    optimizer.step()


@refused("between a step and the next backward")
def not_cleared_with_a_graph(model, optimizer, loss, run):
    loss().backward(create_graph=True)
    optimizer.step()


@refused("between a step and the next backward")
def halved_instead_of_cleared(model, optimizer, loss, run):
    if model.weight.grad is not None:
        model.weight.grad.mul_(0.5)
    loss().backward()
    optimizer.step()


@refused("between a step and the next backward")
def halved_past_the_counter_instead_of_cleared(model, optimizer, loss, run):
    if model.weight.grad is not None:
        model.weight.grad.data.mul_(0.5)
    loss().backward()
    optimizer.step()


@refused("already the sum over replicas")
def added_to_a_sum(model, optimizer, loss, run):
    optimizer.zero_grad()
    loss().backward()
    sum_now(optimizer)
    loss().backward()
    optimizer.step()


@refused("made from a sum")
def added_to_what_was_made_of_a_sum(model, optimizer, loss, run):
    optimizer.zero_grad()
    loss().backward()
    sum_now(optimizer)
    model.weight.grad = model.weight.grad * 0.5
    loss().backward()
    optimizer.step()


def captures_a_step():
    """Step on what is said to be a GPU, while torch says that a graph is being captured."""
    strategy = ts.MirroredStrategy()
    with strategy.scope():
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step():
        model(torch.ones(1, 2)).sum().backward()
        gpu = dataclasses.replace(strategy.placement, devices=(torch.device("cuda", 0),))
        with (
            mock.patch.object(strategy.gradients.summer, "_placement", gpu),
            mock.patch("torch.cuda.is_initialized", return_value=True),
            mock.patch("torch.cuda.is_current_stream_capturing", return_value=True),
        ):
            optimizer.step()

    try:
        strategy.run(step)
    except RuntimeError as error:
        return str(error)
    return ""


def passes_outside_run(devices, look):
    """Return what is said of a gradient from outside ``run``, after a strategy has looked at its parameters."""
    strategy = ts.MirroredStrategy(devices)
    with strategy.scope():
        model = torch.nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    strategy.check_sync() if look == "check_sync" else strategy.run(lambda: None)
    model(torch.ones(1, 1)).sum().backward()
    assert not strategy.gradients.ledger._reached
    try:
        strategy.run(optimizer.step)
    except RuntimeError as error:
        return str(error)
    return "nothing"


@refused("parameter 0 .*and others have not.* clear gradients by `optimizer.zero_grad")
def a_sum_cleared_in_place_where_another_replica_has_assigned(model, optimizer, loss, run):
    optimizer.zero_grad()
    loss().backward()
    sum_now(optimizer)
    model.weight.grad.zero_()
    context = ts.get_replica_context()
    if context.replica_id_in_sync_group == context.num_replicas_in_sync - 1:
        assign(model, loss)
    optimizer.step()
