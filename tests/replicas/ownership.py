"""What a program may change of a module, a parameter, an optimizer, a scheduler and a scaler, one function for each.

``change(things, run)`` makes the change once, in the constructor, between two runs or inside one, and the training that
follows shows it: the table in docs/guide/replicas_in_one_process.md says what is
expected.
"""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import torchstrategy as ts

FEATURES = 3
INPUTS = torch.linspace(-1, 1, 8 * FEATURES, dtype=torch.float64).reshape(8, FEATURES)
#: When the change is made: in the scope, before a run, or as the first thing in it.
PLACES = ("in the scope", "outside `run`", "in `run`")
CHANGE_AT, NUM_RUNS = 3, 6

CHANGES = {}


def change(row, *, refused=None, is_for=PLACES):
    """Note a function under the row of the table that it belongs to.

    Args:
        row: the row's first two cells.
        refused: for each place at which it is refused a part of the message.
        is_for: the places at which there is such a change.
    """

    def note(function):
        CHANGES[function.__name__] = SimpleNamespace(
            function=function, row=row, refused=refused or {}, places=tuple(is_for)
        )
        return function

    return note


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(FEATURES, 2, dtype=torch.float64)
        self.second = nn.Linear(2, 1, dtype=torch.float64)
        self.register_buffer("offset", torch.zeros(1, dtype=torch.float64))
        self.scale = 1.0
        self.factors = [1.0]
        self.table = {"weight": torch.ones(1, dtype=torch.float64)}
        self.tensor = torch.ones(1, dtype=torch.float64)

    def forward(self, x):
        x = self.second(torch.tanh(self.first(x))) * self.scale * self.tensor * self.table["weight"] + self.offset
        for factor in self.factors:
            x = x * factor
        return x


def train(num_replicas, function, place):
    """Return the parameters after training, flat, or the text of an error that the library raised."""
    strategy = ts.MirroredStrategy([f"cpu:{index}" for index in range(num_replicas)])
    with strategy.scope():
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(
            [{"params": [*model.first.parameters()], "lr": 0.1}, {"params": [*model.second.parameters()], "lr": 0.2}],
            momentum=0.5,
        )
        things = SimpleNamespace(
            model=model,
            optimizer=optimizer,
            scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 5),
            scaler=torch.amp.GradScaler("cpu", init_scale=4.0),
        )
        if place == PLACES[0]:
            function(things)

    def step(x, *, changes):
        if changes:
            function(things)
        optimizer.zero_grad()
        squares = (model(x) - 1).square().sum(1)
        loss = ts.nn.compute_average_loss(squares, global_batch_size="actual")
        things.scaler.scale(loss).backward()
        things.scaler.step(optimizer)
        things.scaler.update()
        return loss.detach()

    data = strategy.experimental_distribute_dataset(INPUTS, batch_size=len(INPUTS))
    losses = []
    try:
        for run in range(NUM_RUNS):
            if place == PLACES[1] and run == CHANGE_AT:
                function(things)
            for x in data:
                result = strategy.run(step, args=(x,), kwargs={"changes": place == PLACES[2] and run == CHANGE_AT})
                losses.append(strategy.reduce("SUM", result, axis=None))
            things.scheduler.step()
        values = strategy.run(lambda: torch.cat([p.detach().flatten() for p in model.parameters()]))
    except (RuntimeError, TypeError, ValueError) as error:
        return str(error)
    own = strategy.experimental_local_results(values)
    assert all(torch.equal(value, own[0]) for value in own)
    return torch.cat([own[0], torch.stack(losses)])


# modules


@change(("module", "attributes"))
def number(things):
    things.model.scale = 0.5


@change(("module", "attributes"))
def list_in_place(things):
    things.model.factors.append(0.5)


@change(("module", "attributes"))
def attribute_that_is_new(things):
    things.model.first.note = "new"
    things.model.scale = 0.5 if things.model.first.note == "new" else 2.0


@change(("module", "attributes"))
def tensor(things):
    things.model.tensor = torch.full((1,), 0.5, dtype=torch.float64)


@change(("module", "attributes"))
def tensor_in_place(things):
    things.model.tensor.mul_(0.5)


@change(("module", "attributes"))
def tensor_in_a_dict(things):
    things.model.table["weight"] = torch.full((1,), 0.5, dtype=torch.float64)


@change(("module", "attributes"))
def forward_of_one_object(things):
    plain = type(things.model.second).forward
    inner = things.model.second
    inner.forward = lambda x: plain(inner, x) * 0.5


@change(("module", "buffers"))
def buffer(things):
    things.model.offset = torch.full((1,), 0.5, dtype=torch.float64)


@change(("module", "buffers"))
def buffer_in_place(things):
    things.model.offset.add_(0.5)


@change(("module", "registrations"))
def another_buffer(things):
    things.model.register_buffer("more", torch.ones(1))
    things.model.offset.add_(0.25 * things.model.more)


@change(("module", "registrations"), refused={"in `run`": "does not belong to this replica"})
def another_parameter(things):
    things.model.second.register_parameter("gain", nn.Parameter(torch.full((1,), 0.5, dtype=torch.float64)))
    things.optimizer.add_param_group({"params": [things.model.second.gain]})


@change(("module", "registrations"))
def another_module(things):
    things.model.second = nn.Sequential(things.model.second, nn.Tanh())


@change(("module", "modes"))
def eval_mode(things):
    things.model.eval()
    things.model.scale = 1.0 if things.model.first.training else 0.5


@change(("module", "modes"))
def frozen(things):
    things.model.first.requires_grad_(False)


@change(("module", "values"))
def loaded(things):
    state = things.model.state_dict()
    things.model.load_state_dict({name: value * 0.5 for name, value in state.items()})


@change(("module", "values"))
def applied(things):
    things.model.apply(lambda module: nn.init.constant_(module.weight, 0.1) if hasattr(module, "weight") else None)


@change(("module", "forward hooks"))
def forward_hook(things):
    things.model.second.register_forward_hook(lambda module, inputs, outputs: outputs * 0.5)


@change(("module", "forward hooks"))
def forward_hook_with_options(things):
    things.model.second.register_forward_hook(
        lambda module, inputs, kwargs, outputs: outputs * 0.5, with_kwargs=True, always_call=True, prepend=True
    )


@change(("module", "forward hooks"))
def forward_pre_hook(things):
    things.model.second.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5,))


@change(("module", "forward hooks"))
def forward_pre_hook_before_others(things):
    things.model.second.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.5,))
    things.model.second.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1.0,), prepend=True)


@change(("module", "forward hooks"))
def forward_hook_that_goes_again(things):
    things.model.second.register_forward_hook(lambda module, inputs, outputs: outputs * 0.5)
    things.model.first.register_forward_hook(lambda module, inputs, outputs: outputs * 0.5).remove()


@change(("module", "backward hooks"))
def full_backward_hook(things):
    things.model.second.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5,))


@change(("module", "backward hooks"))
def full_backward_pre_hook(things):
    things.model.second.register_full_backward_pre_hook(lambda module, outputs: (outputs[0] * 0.5,))


@change(("module", "state_dict hooks"))
def state_dict_hook(things):
    things.model.register_state_dict_post_hook(lambda module, state, prefix, metadata: state.update(extra=1))
    things.model.scale = 0.5 if "extra" in things.model.state_dict() else 1.0


@change(("module", "state_dict hooks"))
def load_state_dict_hook(things):
    things.model.register_load_state_dict_post_hook(lambda module, keys: module.factors.append(0.5))
    things.model.load_state_dict(things.model.state_dict())


@change(("module", "registrations"))
def parametrization(things):
    class Halved(nn.Module):
        def forward(self, x):
            return 0.5 * x

    parametrize.register_parametrization(things.model.second, "weight", Halved())


@change(("module", "registrations"))
def pruned(things):
    prune.l1_unstructured(things.model.second, "weight", amount=1)


@change(("module", "registrations"))
def pruning_made_permanent(things):
    prune.l1_unstructured(things.model.second, "weight", amount=1)
    prune.remove(things.model.second, "weight")


@change(("module", "registrations"))
def weight_norm_that_goes_again(things):
    parametrize.register_parametrization(things.model.second, "weight", nn.Tanh())
    parametrize.remove_parametrizations(things.model.second, "weight")


@change(
    ("module", "registrations"),
    refused={PLACES[0]: "does not belong to this replica"},  # the optimizer still has the old one's
)
def a_module_less(things):
    things.model.second = nn.Linear(2, 1, dtype=torch.float64, bias=False).requires_grad_(False)
    nn.init.constant_(things.model.second.weight, 0.3)


@change(("module", "values"))
def copied_from_another(things):
    with torch.no_grad():
        for target, source in zip(things.model.first.parameters(), [torch.ones(2, 3), torch.ones(2)], strict=True):
            target.copy_(source)


# parameters


@change(("parameter", "values"))
def value(things):
    with torch.no_grad():
        things.model.first.weight.mul_(0.5)


@change(("parameter", "values"))
def data(things):
    things.model.first.weight.data.mul_(0.5)


@change(("parameter", "values"))
def data_replaced(things):
    things.model.first.weight.data = things.model.first.weight.data * 0.5


@change(("parameter", "modes"))
def requires_grad(things):
    things.model.first.weight.requires_grad = False


@change(("parameter", "hooks"))
def tensor_hook(things):
    things.model.first.weight.register_hook(lambda gradient: gradient * 0.5)


@change(("parameter", "hooks"))
def tensor_hook_that_goes_again(things):
    things.model.first.weight.register_hook(lambda gradient: gradient * 0.5)
    things.model.second.weight.register_hook(lambda gradient: gradient * 0.5).remove()


@change(("parameter", "hooks"))
def post_accumulate_hook(things):
    def halve(parameter):
        parameter.grad = parameter.grad * 0.5

    things.model.first.weight.register_post_accumulate_grad_hook(halve)


@change(("parameter", "attributes"))
def parameter_attribute(things):
    things.model.first.weight.factor = 0.5

    def hook(module, inputs):
        return (inputs[0] * getattr(module.weight, "factor", 1.0),)

    things.model.first.register_forward_pre_hook(hook)


@change(
    ("parameter", "gradients"),
    refused={"outside `run`": "was changed outside `run`"},
    is_for=PLACES[1:],
)
def gradient(things):
    things.model.first.weight.grad = torch.ones_like(things.model.first.weight)


# optimizers


@change(("optimizer", "groups"))
def rate(things):
    things.optimizer.param_groups[0]["lr"] = 0.05


@change(("optimizer", "groups"))
def another_key(things):
    things.optimizer.param_groups[1]["note"] = [1.0]
    things.optimizer.param_groups[0]["lr"] = 0.05 * things.optimizer.param_groups[1]["note"][0]


@change(("optimizer", "groups"))
def exchanged_parameters(things):
    one, two = things.optimizer.param_groups
    one["params"], two["params"] = two["params"], one["params"]


@change(("optimizer", "groups"))
def a_parameter_moves(things):
    one, two = things.optimizer.param_groups
    two["params"].append(one["params"].pop())


@change(("optimizer", "groups"))
def a_group_less(things):
    del things.optimizer.param_groups[1]


@change(("optimizer", "groups"))
def groups_in_another_order(things):
    things.optimizer.param_groups.reverse()


@change(("optimizer", "state"))
def state_cleared(things):
    things.optimizer.state.clear()


@change(("optimizer", "state"))
def state_in_place(things):
    for entry in things.optimizer.state.values():
        if entry.get("momentum_buffer") is not None:
            entry["momentum_buffer"].zero_()


@change(("optimizer", "state"))
def state_loaded(things):
    things.optimizer.load_state_dict(things.optimizer.state_dict())


@change(("optimizer", "hooks"))
def step_pre_hook(things):
    def halve(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            group["lr"] *= 0.5

    things.optimizer.register_step_pre_hook(halve)


@change(("optimizer", "hooks"))
def step_post_hook(things):
    def halve(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            group["lr"] *= 0.5

    things.optimizer.register_step_post_hook(halve)


@change(("optimizer", "hooks"))
def optimizer_state_dict_hook(things):
    things.optimizer.register_state_dict_post_hook(lambda optimizer, state: {**state, "extra": 1})
    things.model.scale = 0.5 if "extra" in things.optimizer.state_dict() else 1.0


@change(("optimizer", "attributes"))
def default(things):
    things.optimizer.defaults["lr"] = 7.0
    things.optimizer.param_groups[0]["lr"] = things.optimizer.defaults["lr"] / 100


# schedulers and scalers


@change(("scheduler", "attributes"))
def base_rates_in_place(things):
    things.scheduler.gamma = 0.5
    things.scheduler.step_size = 2


@change(("scheduler", "attributes"))
def last_epoch(things):
    things.scheduler.last_epoch = 3


@change(("scheduler", "state"))
def scheduler_loaded(things):
    things.scheduler.load_state_dict({**things.scheduler.state_dict(), "gamma": 0.5})


@change(("scheduler", "steps"), is_for=PLACES[1:])
def scheduler_step(things):
    for _ in range(5):
        things.scheduler.step()


@change(("scaler", "state"))
def scale_loaded(things):
    things.scaler.load_state_dict({**things.scaler.state_dict(), "scale": 2.0})


@change(("scaler", "attributes"))
def scale_set(things):
    things.scaler.set_growth_factor(4.0)
    things.scaler.set_growth_interval(1)
