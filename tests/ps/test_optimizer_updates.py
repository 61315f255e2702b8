"""Optimizers on parameter servers against plain ones that are fed the same gradients in the same order."""

import pickle
import threading

import pytest
import torch
from torch.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
    SparseAdam,
)

from tests.ps.local_channels import connect, make_servers
from torchstrategy.errors import InvalidArgumentError, NotFoundError, UnimplementedError
from torchstrategy.optimizers.ftrl import Ftrl
from torchstrategy.ps.layout import Placer
from torchstrategy.ps.optimizer_updates import attributes_of
from torchstrategy.ps.partitioning import FixedShardsPartitioner

SHAPES = [(7, 4), (5,), (), (2, 3, 2), (0, 3)]


class Decayed(Optimizer):
    """As users write them: state of its own, an attribute of its constructor, and a count in the group."""

    def __init__(self, params, lr=0.1, power=0.5):
        super().__init__(params, {"lr": lr})
        self.power = power

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["sum"] = state.get("sum", torch.zeros_like(p)) + p.grad
                    state["name"] = "x"
                    p.sub_(state["sum"], alpha=group["lr"] / group["count"] ** self.power)


class Counted(Decayed):
    """The count is a hyper-parameter from the beginning, which programs send with each step."""

    def __init__(self, params):
        Optimizer.__init__(self, params, {"lr": 0.1, "count": 0})
        self.power = 0.5


class NormOfRows(Decayed):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / (1 + p.grad.norm()), alpha=group["lr"])


class NormOfAll(Decayed):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            grads = [p.grad for p in group["params"] if p.grad is not None]
            norm = torch.nn.utils.get_total_norm(grads)
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad / (1 + norm), alpha=group["lr"])


class ByChance(Decayed):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn_like(p), alpha=group["lr"])


class NeedsClosure(Decayed):
    def step(self, closure):
        raise AssertionError


class Broken(Decayed):
    def step(self, closure=None):
        raise RuntimeError("no such kernel")


class Rig:
    """A plain optimizer of some parameters, and its counterpart on parameter servers."""

    def __init__(self, make, shapes=SHAPES, num_shards=1, num_ps=2, dtype=torch.float64, groups=None):
        generator = torch.Generator().manual_seed(1)
        self.generator, self.dtype = generator, dtype
        self.services, self.client = make_servers(num_ps)
        placer = Placer(num_ps, FixedShardsPartitioner(num_shards))
        self.params = [torch.nn.Parameter(torch.randn(s, generator=generator, dtype=dtype)) for s in shapes]
        self.specs = [placer.place(i, f"v{i}", s, dtype, True) for i, s in enumerate(shapes)]
        for spec, parameter in zip(self.specs, self.params, strict=True):
            self.client.create(spec, parameter.detach())
        groups = groups or [{"params": list(range(len(shapes)))}]
        self.plain = make([{**group, "params": [self.params[i] for i in group["params"]]} for group in groups])
        self.ids = [group["params"] for group in groups]
        self.define(7)

    def define(self, number, client=None):
        groups = [
            {**{name: value for name, value in group.items() if name != "params"}, "params": ids}
            for group, ids in zip(self.plain.param_groups, self.ids, strict=True)
        ]
        fields = {"class": type(self.plain), "defaults": self.plain.defaults, "groups": groups}
        fields["attributes"] = attributes_of(self.plain)
        (client or self.client).define_optimizer(number, pickle.dumps(fields), self.specs)

    def random(self, index):
        return torch.randn(self.params[index].shape, generator=self.generator, dtype=self.dtype)

    def step(self, gradients, number=7):
        for index, parameter in enumerate(self.params):
            parameter.grad = gradients[index].clone() if index in gradients else None
        self.plain.step()
        return self.client.push(number, gradients)

    def difference(self):
        pulled = self.client.pull(self.specs, {})
        return max(
            float((pulled[i][1] - p.detach()).abs().max()) if p.numel() else 0.0 for i, p in enumerate(self.params)
        )

    def check_states(self, tolerance=1e-12):
        for spec, parameter in zip(self.specs, self.params, strict=True):
            state, expected = self.client.optimizer_state(7, spec), self.plain.state.get(parameter, {})
            assert state.keys() == expected.keys()
            for name, value in expected.items():
                if isinstance(value, torch.Tensor):
                    torch.testing.assert_close(state[name], value.to_dense(), rtol=tolerance, atol=tolerance)
                else:
                    assert state[name] == value
                    assert type(state[name]) is type(value)


OPTIMIZERS = {
    "SGD": lambda p: SGD(p, 0.1),
    "SGD momentum": lambda p: SGD(p, 0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "SGD nesterov": lambda p: SGD(p, 0.1, momentum=0.9, nesterov=True, maximize=True),
    "SGD foreach": lambda p: SGD(p, 0.1, momentum=0.9, foreach=True),
    "SGD fused": lambda p: SGD(p, 0.1, momentum=0.9, fused=True),
    "Adam": lambda p: Adam(p, 0.1),
    "Adam amsgrad": lambda p: Adam(p, 0.1, amsgrad=True, weight_decay=0.1),
    "Adam tensor lr": lambda p: Adam(p, torch.tensor(0.1)),
    "AdamW": lambda p: AdamW(p, 0.1),
    "AdamW fused": lambda p: AdamW(p, 0.1, fused=True),
    "AdamW foreach": lambda p: AdamW(p, 0.1, foreach=True),
    "Adagrad": lambda p: Adagrad(p, 0.1, lr_decay=0.1, initial_accumulator_value=0.3),
    "RMSprop": lambda p: RMSprop(p, 0.1, momentum=0.5, centered=True),
    "Adadelta": lambda p: Adadelta(p, 0.1),
    "NAdam": lambda p: NAdam(p, 0.1),
    "RAdam": lambda p: RAdam(p, 0.1),
    "Adamax": lambda p: Adamax(p, 0.1),
    "ASGD": lambda p: ASGD(p, 0.1),
    "Rprop": lambda p: Rprop(p, 0.1),
    "Ftrl": lambda p: Ftrl(p, 0.1, l1_regularization_strength=0.2, beta=0.5),
    "a user's": lambda p: Decayed(p, 0.1, power=0.7),
}


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_numbers_are_those_of_the_plain_optimizer(name, num_shards):
    groups = [{"params": [0, 1, 4]}, {"params": []}, {"params": [2, 3], "lr": 0.03}]
    rig = Rig(OPTIMIZERS[name], num_shards=num_shards, groups=groups)
    for indices in ([0, 1, 2, 3, 4], [1, 3], [2], [0, 1, 2, 3, 4], [0]):
        rig.step({index: rig.random(index) for index in indices})
    assert rig.difference() <= 1e-12
    rig.check_states()


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("make", [lambda p: Adafactor(p), lambda p: Muon(p), lambda p: NormOfRows(p)])
def test_rows_that_are_coupled_need_whole_variables(make, num_shards):
    if num_shards == 1:
        rig = Rig(make, [(6, 4), (3, 2)])
        for _ in range(3):
            rig.step({index: rig.random(index) for index in (0, 1)})
        assert rig.difference() <= 1e-12
        rig.check_states()
    else:
        with pytest.raises(UnimplementedError, match=r"what it knows of other rows.*no variable_partitioner"):
            Rig(make, [(6, 4), (3, 2)], num_shards)


def test_what_is_whole_elsewhere_does_not_matter():
    """Coupled rows are refused only where one of the optimizer's own variables is cut."""
    rig = Rig(lambda p: Adam(p), [(1, 4), (6, 4)], num_shards=3, groups=[{"params": [0, 1]}])
    assert rig.specs[1].is_sharded
    assert not rig.specs[0].is_sharded
    rig.plain, rig.ids = NormOfRows([rig.params[0]]), [[0]]
    rig.define(8)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: LBFGS([q for group in p for q in group["params"]]), "LBFGS needs a closure"),
        (lambda p: NeedsClosure(p), "NeedsClosure needs a closure"),
        (lambda p: NormOfAll(p), "NormOfAll updates one parameter by what it knows of others"),
        (lambda p: ByChance(p), "ByChance updates one parameter .*or by chance"),
        (lambda p: Broken(p), "Broken, as it is set, can't make a step .*: no such kernel"),
    ],
)
def test_optimizers_that_can_not_run_there_are_refused(make, message):
    with pytest.raises(UnimplementedError, match=message):
        Rig(make, [(4, 2)])


def test_a_refused_definition_leaves_nothing():
    rig = Rig(lambda p: SGD(p, 0.1), [(4, 2)])
    rig.plain = ByChance(rig.params)
    with pytest.raises(UnimplementedError):
        rig.define(8)
    with pytest.raises(NotFoundError, match="no optimizer 8"):
        rig.client.push(8, {0: rig.random(0)})
    rig.plain = SGD(rig.params, 0.5)
    with pytest.raises(ValueError, match="an optimizer 7 already"):
        rig.define(7)
    rig.plain = SGD(rig.params, 0.1)
    rig.step({0: rig.random(0)})
    assert rig.difference() == 0


def test_trials_leave_the_random_numbers_of_the_process_alone():
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    Rig(lambda p: NormOfRows(p), [(4, 2)])
    assert torch.equal(torch.rand(1), expected)


def test_attributes_with_parameters_are_refused():
    class Wrapper(Decayed):
        def __init__(self, params):
            super().__init__(params)
            self.inner = [SGD(self.param_groups, 0.1)]

    with pytest.raises(UnimplementedError, match="attribute 'inner' holds parameters or another optimizer"):
        attributes_of(Wrapper([torch.nn.Parameter(torch.zeros(1))]))


def test_attributes_of_torchs_optimizers_and_schedulers_are_not_sent():
    optimizer = AdamW([torch.nn.Parameter(torch.zeros(1))])
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.register_step_pre_hook(print)
    assert attributes_of(optimizer) == {}
    assert attributes_of(Decayed([torch.nn.Parameter(torch.zeros(1))], power=2)) == {"power": 2}


SPARSE = {
    "SGD": lambda p: SGD(p, 0.1),
    "SGD fused": lambda p: SGD(p, 0.1, fused=True),
    "SGD momentum": lambda p: SGD(p, 0.1, momentum=0.9),
    "SparseAdam": lambda p: SparseAdam(p, 0.1),
    "Adagrad": lambda p: Adagrad(p, 0.1),
    "Ftrl": lambda p: Ftrl(p, 0.1),
}


def sparse(rows, values, num_rows):
    return torch.sparse_coo_tensor(
        torch.tensor([rows], dtype=torch.int64), values, (num_rows, *values.shape[1:]), check_invariants=True
    )


@pytest.mark.parametrize("num_shards", [1, 4])
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_gradients(name, num_shards):
    if name == "SGD fused":  # the plain one refuses them, the servers need not
        plain = SPARSE["SGD"]
        rig = Rig(SPARSE[name], [(9, 4)], num_shards)
        rig.plain = plain(rig.params)
    else:
        rig = Rig(SPARSE[name], [(9, 4)], num_shards)
    for rows in ([0, 8, 0, 1], [7, 7, 2, 2], [], [1, 2, 0, 8], [4]):  # unsorted, repeated, none, of some parts only
        values = torch.randn(len(rows), 4, generator=rig.generator, dtype=torch.float64)
        rig.step({0: sparse(rows, values, 9)})
    assert rig.difference() <= 1e-12
    if name != "SGD fused":
        rig.check_states()


@pytest.mark.parametrize("num_shards", [1, 3])
def test_dense_and_sparse_gradients_in_one_optimizer(num_shards):
    rig = Rig(lambda p: Adagrad(p, 0.1), [(9, 4), (4, 3)], num_shards)
    for rows in ([0, 8], [3, 1, 1]):
        values = torch.randn(len(rows), 4, generator=rig.generator, dtype=torch.float64)
        rig.step({0: sparse(rows, values, 9), 1: rig.random(1)})
    assert rig.difference() <= 1e-12
    rig.check_states()


def test_one_dimensional_tables():
    rig = Rig(lambda p: SparseAdam(p, 0.1), [(9,)], num_shards=2)
    rig.step({0: sparse([8, 1], torch.randn(2, dtype=torch.float64), 9)})
    assert rig.difference() <= 1e-12


@pytest.mark.parametrize(
    "make", [lambda p: Adam(p), lambda p: RMSprop(p), lambda p: SGD(p, 0.1, weight_decay=0.1), lambda p: Decayed(p)]
)
def test_dense_optimizers_say_what_to_choose_for_sparse_gradients(make):
    rig = Rig(make, [(3, 2), (9, 4)], num_ps=1)
    gradients = {0: rig.random(0), 1: sparse([1], torch.ones(1, 4, dtype=torch.float64), 9)}
    if isinstance(rig.plain, Decayed):  # adds to its dense sum: takes them
        rig.step(gradients)
        assert rig.difference() <= 1e-12
        return
    with pytest.raises(InvalidArgumentError, match=r"'v1'.*choose SparseAdam or Adagrad"):
        rig.client.push(7, {0: rig.random(0), **gradients})
    assert rig.difference() == 0
    assert rig.client.optimizer_state(7, rig.specs[1]) == {}


def test_sparse_adam_says_what_to_choose_for_dense_gradients():
    rig = Rig(lambda p: SparseAdam(p), [(3, 2)])
    with pytest.raises(InvalidArgumentError, match=r"SparseAdam does not take dense gradients .*'v0'.*Choose Adam"):
        rig.client.push(7, {0: rig.random(0)})
    assert rig.difference() == 0


def test_what_steps_change_in_a_group_goes_on():
    rig = Rig(Counted)
    given = {"lr": 0.1, "count": 0}  # what the program has, whose optimizer does not step
    for lr in (0.1, 0.1, 0.05, 0.1):
        rig.plain.param_groups[0]["lr"] = given["lr"] = lr
        gradients = {index: rig.random(index) for index in range(len(SHAPES))}
        for index, parameter in enumerate(rig.params):
            parameter.grad = gradients[index].clone()
        rig.plain.step()
        rig.client.push(7, gradients, [given])
    assert rig.difference() <= 1e-12
    rig.client.set_hyper(7, [{"lr": 0.1, "count": 30}])
    rig.plain.param_groups[0]["count"] = 30
    rig.step({0: rig.random(0)})
    assert rig.difference() <= 1e-12


def test_changed_hyper_parameters():
    rig = Rig(lambda p: SGD(p, 0.1), [(3, 2), (4,)], 2, groups=[{"params": [0]}, {"params": [1], "lr": 0.5}])
    rig.step({0: rig.random(0), 1: rig.random(1)})
    for group, lr in zip(rig.plain.param_groups, (0.01, 0.7), strict=True):
        group["lr"] = lr
    rig.client.set_hyper(7, [{"lr": 0.01, "params": "no"}, {"lr": 0.7}])
    rig.step({0: rig.random(0), 1: rig.random(1)})
    assert rig.difference() <= 1e-15
    with pytest.raises(ValueError, match=r"2 groups of parameters. Received: 1"):
        rig.client.set_hyper(7, [{"lr": 9.0}])
    with pytest.raises(NotFoundError, match="no optimizer 3"):
        rig.client.set_hyper(3, [])
    rig.client.set_hyper(7, [{"weight_decay": 0.1}, {}])  # what it takes may change, too
    gradient = sparse([1], torch.ones(1, 2, dtype=torch.float64), 3)
    with pytest.raises(InvalidArgumentError, match="does not take sparse gradients"):
        rig.client.push(7, {0: gradient})


def bad_gradients():
    dense = torch.ones(9, 4, dtype=torch.float64)
    row = torch.ones(1, 4, dtype=torch.float64)
    return {
        "shape": (dense[:3], InvalidArgumentError, "'v0.grad' takes values of shape"),
        "dtype": (dense.float(), InvalidArgumentError, "torch.float64. Received.*float32"),
        "sparse shape": (sparse([1], row, 8), InvalidArgumentError, "'v0.grad' must be sparse along its rows"),
        "sparse dtype": (sparse([1], row.float(), 9), InvalidArgumentError, "'v0.grad' must be.*float32"),
        "sparse in two": (dense.to_sparse(), InvalidArgumentError, "2 sparse dimensions"),
    }


@pytest.mark.parametrize("case", bad_gradients())
def test_gradients_that_do_not_fit(case):
    gradient, kind, message = bad_gradients()[case]
    rig = Rig(lambda p: SGD(p, 0.1), [(9, 4), (2,)], 2)
    with pytest.raises(kind, match=message):
        rig.client.push(7, {1: rig.random(1), 0: gradient})
    assert rig.difference() == 0


def test_only_trainable_variables_of_the_optimizer_get_gradients():
    rig = Rig(lambda p: SGD(p, 0.1), [(9, 4), (2,)], num_ps=1, groups=[{"params": [0]}])
    with pytest.raises(NotFoundError, match="SGD has no part 0 of a variable 1"):
        rig.client.push(7, {0: rig.random(0), 1: rig.random(1)})
    with pytest.raises(KeyError, match="5"):
        rig.client.push(7, {5: rig.random(0)})
    assert rig.difference() == 0
    fixed = Placer(1).place(9, "fixed", (2,), torch.float64, False)
    rig.client.create(fixed, torch.zeros(2, dtype=torch.float64))
    rig.specs[1], rig.ids = fixed, [[9]]
    rig.define(8)
    with pytest.raises(InvalidArgumentError, match="'fixed' is not trainable"):
        rig.client.push(8, {9: torch.ones(2, dtype=torch.float64)})


@pytest.mark.parametrize("name", ["Adam amsgrad", "SGD momentum", "Adagrad", "ASGD", "Adadelta"])
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (4, 2), (2, None)])
def test_state_moves_to_another_number_of_shards_and_to_a_plain_optimizer(name, before, after):
    rig = Rig(OPTIMIZERS[name], [(7, 4), ()], before)
    for _ in range(3):
        rig.step({0: rig.random(0), 1: rig.random(1)})
    states = [rig.client.optimizer_state(7, spec) for spec in rig.specs]
    values = [rig.client.pull([spec], {})[spec.id][1] for spec in rig.specs]
    gradients = {0: rig.random(0), 1: rig.random(1)}
    rig.step(gradients)
    if after is None:
        params = [torch.nn.Parameter(value.clone()) for value in values]
        plain = OPTIMIZERS[name](params)
        packed = {"state": dict(enumerate(states)), "param_groups": plain.state_dict()["param_groups"]}
        plain.load_state_dict(packed)
        for index, parameter in enumerate(params):
            parameter.grad = gradients[index]
        plain.step()
        found = [parameter.detach() for parameter in params]
    else:
        other = Rig(OPTIMIZERS[name], [(7, 4), ()], after, num_ps=3)
        for spec, value, state in zip(other.specs, values, states, strict=True):
            other.client.update(spec, "assign", value)
            other.client.load_optimizer_state(7, spec, state)
        other.client.push(7, gradients)
        found = [other.client.pull([spec], {})[spec.id][1] for spec in other.specs]
    for value, parameter in zip(found, rig.params, strict=True):
        torch.testing.assert_close(value, parameter.detach(), rtol=1e-12, atol=1e-12)


def test_empty_state_begins_anew():
    rig = Rig(lambda p: Adagrad(p, 0.1, initial_accumulator_value=0.5), [(4, 2)], 2)
    before = rig.client.optimizer_state(7, rig.specs[0])
    rig.client.push(7, {0: rig.random(0)})
    rig.client.load_optimizer_state(7, rig.specs[0], {})
    after = rig.client.optimizer_state(7, rig.specs[0])
    assert torch.equal(before["sum"], after["sum"])
    assert after["step"] == 0


def test_state_that_was_sent_is_not_shared():
    rig = Rig(lambda p: SGD(p, 0.1, momentum=0.9), [(4, 2)])
    rig.step({0: rig.random(0)})
    state = rig.client.optimizer_state(7, rig.specs[0])
    kept = state["momentum_buffer"].clone()
    rig.client.push(7, {0: rig.random(0)})
    assert torch.equal(state["momentum_buffer"], kept)


def test_state_that_does_not_fit():
    rig = Rig(lambda p: SGD(p, 0.1, momentum=0.9), [(4, 2)], 2)
    with pytest.raises(InvalidArgumentError, match="'momentum_buffer' of variable 'v0' has 3 rows instead of 4"):
        rig.client.load_optimizer_state(7, rig.specs[0], {"momentum_buffer": torch.zeros(3, 2)})
    with pytest.raises(TypeError, match="state 'x' of an optimizer is a list"):
        rig.client.load_optimizer_state(7, rig.specs[0], {"x": [1]})
    other = Placer(2).place(9, "other", (2,), torch.float64, True)
    with pytest.raises(NotFoundError, match="no part 0 of a variable 9"):
        rig.client.optimizer_state(7, other)
    assert rig.client.optimizer_state(7, rig.specs[0]) == {}


def test_a_part_without_state_counts_as_zeros():
    rig = Rig(lambda p: Adam(p), [(4, 2)], 2)
    for service in rig.services[:1]:  # the other server died before it got its part of the push, say
        optimizer = service.held.optimizers[7]
        ((key, part),) = optimizer._parts.items()
        optimizer.load_state(key, {"step": torch.tensor(2.0), "exp_avg": torch.ones_like(part.parameter)})
    state = rig.client.optimizer_state(7, rig.specs[0])
    assert state["exp_avg"].tolist() == [[1, 1], [1, 1], [0, 0], [0, 0]]
    assert state["step"] == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.complex64], ids=str)
@pytest.mark.parametrize("make", [lambda p: SGD(p, 0.1, momentum=0.9), lambda p: AdamW(p, 0.1)])
def test_other_dtypes(make, dtype):
    rig = Rig(make, [(7, 4)], 2, dtype=dtype)
    for _ in range(3):
        rig.step({0: rig.random(0)})
    assert rig.difference() <= (1e-2 if dtype.itemsize == 2 else 1e-6)


@pytest.mark.slow
def test_pushes_of_several_workers_at_once():
    """Integers in float64, so that the order of the pushes does not matter."""
    num_workers, num_pushes = 4, 40
    rig = Rig(lambda p: SGD(p, 1.0), [(50, 4), (50, 4), (7,)], num_shards=3, num_ps=2)
    start = [rig.client.pull([spec], {})[spec.id][1].round() for spec in rig.specs]
    for spec, value in zip(rig.specs, start, strict=True):
        rig.client.update(spec, "assign", value)
    failures = []

    def work(rank):
        try:
            client = connect(rig.services)
            client.know(rig.specs)
            for _ in range(num_pushes):
                gradients = {0: torch.ones(50, 4, dtype=torch.float64), 2: torch.ones(7, dtype=torch.float64)}
                if rank % 2:
                    gradients[1] = sparse([rank], torch.ones(1, 4, dtype=torch.float64), 50)
                client.push(7, gradients)
                client.pull(rig.specs, {})
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(num_workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    pulled = rig.client.pull(rig.specs, {})
    total = num_workers * num_pushes
    assert torch.equal(pulled[0][1], start[0] - total)
    assert torch.equal(pulled[2][1], start[2] - total)
    expected = start[1].clone()
    expected[[1, 3]] -= num_pushes
    assert torch.equal(pulled[1][1], expected)


@pytest.mark.parametrize("make", [lambda p: Adam(p), lambda p: Decayed(p)])
def test_a_step_takes_the_parts_it_touches_and_no_others(make):
    rig = Rig(make, [(4, 2), (4, 2)], num_ps=1)
    held = rig.services[0].held
    client = connect(rig.services)
    client.know(rig.specs)
    with held.store.parts_of(0)[0][1].lock:  # someone is busy with variable 0
        other = threading.Thread(target=client.push, args=(7, {1: rig.random(1)}))
        other.start()
        other.join(30)
        assert not other.is_alive()


def test_gradients_are_let_go_of():
    rig = Rig(lambda p: AdamW(p), [(40, 2)], 2)
    for _ in range(3):
        rig.step({0: rig.random(0)})
    for service in rig.services:
        assert all(part.parameter.grad is None for part in service.held.optimizers[7]._parts.values())


def test_a_step_that_fails_lets_go_too():
    rig = Rig(lambda p: Decayed(p), [(4, 2)], num_ps=1)
    optimizer = rig.services[0].held.optimizers[7]
    optimizer._optimizer.param_groups[0]["lr"] = "fast"
    with pytest.raises(TypeError):
        rig.client.push(7, {0: rig.random(0)})
    ((_, part),) = optimizer._parts.items()
    assert part.parameter.grad is None
    assert not part.lock.locked()
    optimizer._optimizer.param_groups[0]["lr"] = 0.1
    rig.client.push(7, {0: rig.random(0)})


def test_large_parts_are_stepped_one_after_another():
    """In batches, so that a pull need not wait for the whole model's update; the numbers are the same."""
    rig = Rig(lambda p: AdamW(p), [(400_000, 4), (300_000, 3), (3,), (1_000_000,)], num_ps=1)
    rig.step({index: rig.random(index) for index in range(4)})
    assert rig.difference() <= 1e-12
