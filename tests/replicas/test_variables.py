"""Variables: the rules of assigning and reading are in tests/parity/area_variables.py; here is what torch adds."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch import nn

import torchstrategy as ts
from tests.programs import cpu_devices
from tests.replicas.variable_programs import (
    FIRST,
    MEAN,
    NO_AGGREGATION,
    ON_READ,
    ON_WRITE,
    SUM,
    Scale,
    assigned,
    filled_by_its_layer,
    initial_values,
    own_number,
    train,
)


@pytest.fixture(params=[1, 2, 3])
def strategy(request):
    return ts.MirroredStrategy(cpu_devices(request.param))


@pytest.fixture
def pair():
    return ts.MirroredStrategy(cpu_devices(2))


def make(strategy, *args, **kwargs):
    with strategy.scope():
        return ts.Variable(*args, **kwargs)


def local(strategy, variable):
    return [value.tolist() for value in strategy.experimental_local_results(variable)]


# N replicas = 1 replica


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_training_equals_one_replica(count, optimizer):
    one, many = train([], optimizer), train(cpu_devices(count), optimizer)
    for name, value in one.items():
        np.testing.assert_allclose(many[name], value, atol=1e-10, err_msg=name)
    assert many["1.examples"] == 22.0  # every example was counted once


def test_training_in_two_processes(process_pool):
    one = train([])
    for devices in (None, cpu_devices(2)):
        for many in process_pool(2).run(train, devices):
            for name, value in one.items():
                np.testing.assert_allclose(many[name], value, atol=1e-10, err_msg=name)


@pytest.mark.slow
def test_compiled_module_with_variables():
    one = train([])
    for devices in ([], cpu_devices(2)):
        many = train(devices, compiled=True)
        for name in ("0.weight", "1.scale", "2.bias", "offset"):
            np.testing.assert_allclose(many[name], one[name], atol=1e-10, err_msg=name)


@pytest.mark.filterwarnings("ignore:Variable .* is read outside `run`")
@pytest.mark.parametrize("method", ["assign", "assign_add", "assign_sub"])
@pytest.mark.parametrize(
    ("synchronization", "aggregation"),
    [(ON_WRITE, SUM), (ON_WRITE, MEAN), (ON_WRITE, FIRST), (ON_WRITE, NO_AGGREGATION), (ON_READ, SUM), (ON_READ, MEAN),
     (ON_READ, FIRST)],
)  # fmt: skip
def test_processes_do_what_replicas_in_one_process_do(synchronization, aggregation, method, process_pool):
    values, read = assigned(cpu_devices(2), synchronization, aggregation, method)
    results = process_pool(2).run(assigned, None, synchronization, aggregation, method)
    assert [own for own, _ in results] == [[value] for value in values]
    if not (synchronization is ON_WRITE and aggregation is NO_AGGREGATION):  # each process reads its own copy then
        assert [seen for _, seen in results] == [read, read]


def test_copies_that_differ_are_told_of_when_they_are_read_as_one():
    strategy = ts.MirroredStrategy(cpu_devices(2))
    with strategy.scope():
        v = ts.Variable(0.0)
    strategy.run(lambda: v.assign_add(5.0))  # alike on all replicas
    assert float(v) == 5.0
    strategy.run(lambda: v.assign_add(float(ts.get_replica_context().replica_id_in_sync_group)))
    assert [float(own) for own in strategy.experimental_local_results(v)] == [5.0, 6.0]
    with pytest.warns(
        UserWarning, match=r"'Variable:0' is read outside `run`.*aggregation=ts.VariableAggregation"
    ) as told:
        assert v.numpy() == 5.0
    assert told[0].filename == __file__
    assert float(v) == 5.0  # it is said once
    v.assign(1.0)
    assert v.numpy() == 1.0


def test_processes_take_the_chiefs_initial_value(process_pool):
    assert process_pool(2).run(initial_values, None) == [(22.0, [2.0])] * 2
    assert process_pool(2).run(initial_values, cpu_devices(2)) == [(44.0, [2.0, 2.0])] * 2
    for devices in (None, cpu_devices(2)):
        first, second = process_pool(2).run(filled_by_its_layer, devices)
        assert first == second
        assert first[0] == [0.0] * 3 != first[1]


# a tensor


def test_variable_is_a_tensor_in_both_contexts(strategy):
    variable = make(strategy, [1.0, 2.0])
    weights = torch.eye(2)

    def fn():
        assert variable.shape == (2,)
        assert len(variable) == 2
        return weights @ variable + variable.exp().log(), variable[1].item(), variable.sum().item()

    for result in strategy.experimental_local_results(strategy.run(fn)):
        torch.testing.assert_close(result[0].detach(), torch.tensor([2.0, 4.0]))
        assert result[1:] == (2.0, 3.0)
    torch.testing.assert_close((weights @ variable).detach(), torch.tensor([1.0, 2.0]))
    assert isinstance(variable, nn.Parameter)
    assert type(variable * 2) is torch.Tensor
    assert variable.numpy().tolist() == [1.0, 2.0]


def test_gradient_belongs_to_the_replica(pair):
    variable = make(pair, 3.0)

    def fn():
        (variable * variable * own_number()).backward()
        return variable.grad.clone()

    assert [float(g) for g in pair.experimental_local_results(pair.run(fn))] == [6.0, 12.0]


def test_gradient_through_all_reduce(strategy):
    variable = make(strategy, 3.0)
    number = strategy.num_replicas_in_sync

    def fn():
        ts.get_replica_context().all_reduce("SUM", variable).backward()
        return variable.grad.clone()

    assert [float(g) for g in strategy.experimental_local_results(strategy.run(fn))] == [number] * number


def test_not_trainable_is_no_parameter(pair):
    variable = make(pair, 1.0, trainable=False)
    assert not isinstance(variable, nn.Parameter)
    assert not variable.requires_grad
    assert not make(pair, 1.0, synchronization=ON_READ).trainable
    assert make(pair, 1).trainable  # as tf says it; torch can't differentiate by integers
    assert not make(pair, 1).requires_grad


def test_torch_changes_every_copy_outside_run(pair):
    variable = make(pair, torch.zeros(2, 2))
    with torch.no_grad():
        variable += 1
        variable.mul_(3)
        variable[0, 0] = 7.0
    assert local(pair, variable) == [[[7.0, 3.0], [3.0, 3.0]]] * 2
    nn.init.normal_(variable)
    first, second = local(pair, variable)
    assert first == second
    variable.requires_grad_(False)
    assert not any(copy.requires_grad for copy in variable.copies)
    variable.data = torch.ones(1)
    assert local(pair, variable) == [[1.0], [1.0]]


def test_torch_changes_the_own_copy_in_run(pair):
    variable = make(pair, 0.0, trainable=False)

    def fn():
        assert variable.fill_(own_number().item()) is variable

    pair.run(fn)
    assert local(pair, variable) == [1.0, 2.0]


def test_hook_on_every_copy(pair):
    variable = make(pair, 1.0)
    seen = []
    variable.register_hook(lambda grad: seen.append(float(grad)))
    pair.run(lambda: (variable * own_number()).backward())
    assert seen == [1.0, 2.0]


def test_gradient_made_outside_run_is_refused(pair):
    variable = make(pair, 1.0)
    pair.run(lambda: None)
    (variable * 2).backward()
    with pytest.raises(RuntimeError, match="changed outside `run`"):
        pair.run(lambda: None)
    variable.grad = None
    pair.run(lambda: None)


def test_functions_on_lists_and_views_reach_every_copy(pair):
    first, second = make(pair, torch.zeros(2)), make(pair, torch.zeros(2))
    with torch.no_grad():
        torch._foreach_add_([first, second], 1.0)
        first.view(-1)[0] = 5.0  # seen at the next use
    pair.run(lambda: None)
    assert local(pair, first) == [[5.0, 1.0]] * 2
    assert local(pair, second) == [[1.0, 1.0]] * 2


def test_copies_that_were_written_one_by_one_stay_different(pair):
    variable = make(pair, 1.0)
    pair.extended.update(variable, lambda copy, x: copy.assign(x), args=(pair.run(own_number),))
    pair.experimental_local_results(variable)[1].assign_add(5.0)
    pair.run(lambda: None)
    assert local(pair, variable) == [1.0, 7.0]


def test_hook_is_removed_from_every_copy(pair):
    variable = make(pair, 1.0)
    seen = []
    handle = variable.register_hook(lambda grad: seen.append(float(grad)))
    handle.remove()
    pair.run(lambda: (variable * own_number()).backward())
    assert seen == []


def test_custom_autograd_function_must_get_the_copy(pair):
    variable = make(pair, 3.0)

    def gradient(argument):
        (_Square.apply(argument()) * own_number()).backward()
        return variable.grad.clone()

    assert local(pair, pair.run(gradient, args=(lambda: variable.view_as(variable),))) == [6.0, 12.0]
    with pytest.raises(RuntimeError, match="view_as"):
        pair.run(gradient, args=(lambda: variable,))


def test_variable_made_in_inference_mode_can_be_trained(pair):
    with torch.inference_mode():
        variable = make(pair, 1.0)
    pair.run(lambda: (variable * 2).backward())
    variable.assign(2.0)
    assert local(pair, variable) == [2.0, 2.0]


def test_assigning_the_value_of_an_on_read_variable_in_run(pair):
    source = make(pair, 0.0, synchronization=ON_READ, aggregation=SUM)
    total = make(pair, 0.0, aggregation=SUM)

    def fn():
        source.assign(own_number())
        total.assign(source)

    pair.run(fn)
    assert local(pair, total) == [3.0, 3.0]


# in modules and optimizers


def test_module_attribute_is_the_variable(pair):
    with pair.scope():
        layer = Scale(torch.float32)
    scale = layer.scale
    pair.run(lambda: layer(torch.ones(1, 3)).detach())
    assert layer.scale is scale
    assert dict(layer.named_parameters())["scale"] is scale
    layer.scale.assign([1.0, 2.0, 3.0])
    assert local(pair, pair.run(lambda: layer.scale * 2)) == [[2.0, 4.0, 6.0]] * 2
    assert int(layer.calls) == 1


def test_variable_assigned_to_a_module_after_the_first_run(pair):
    with pair.scope():
        linear = nn.Linear(2, 2, bias=False)
    pair.run(lambda: linear(torch.ones(1, 2)).detach())
    variable = make(pair, torch.eye(2))
    linear.weight = variable
    with pair.scope():
        optimizer = torch.optim.SGD(linear.parameters(), lr=1.0)

    def fn():
        optimizer.zero_grad()
        (linear(torch.ones(1, 2)).sum() * own_number()).backward()
        optimizer.step()

    pair.run(fn)
    assert linear.weight is variable
    assert local(pair, variable) == [[[-2.0, -3.0], [-3.0, -2.0]]] * 2


def test_tied_variable(pair):
    with pair.scope():
        variable = ts.Variable(torch.ones(1, 1))
        first, second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        first.weight = second.weight = variable
        optimizer = torch.optim.SGD(nn.ModuleList([first, second]).parameters(), lr=0.1)

    def fn():
        optimizer.zero_grad()
        second(first(own_number().reshape(1, 1))).sum().backward()  # w * w * x
        optimizer.step()

    pair.run(fn)
    np.testing.assert_allclose(local(pair, variable), [[[0.4]]] * 2, atol=1e-6)
    assert len(optimizer.param_groups[0]["params"]) == 1


def test_averaged_model_has_variables_of_its_own(pair):
    with pair.scope():
        layer = Scale(torch.float32)
        average = torch.optim.swa_utils.AveragedModel(layer)
    assert isinstance(average.module.scale, ts.MirroredVariable)
    assert average.module.scale is not layer.scale
    layer.scale.assign([4.0, 4.0, 4.0])
    pair.run(lambda: average.update_parameters(layer))
    assert local(pair, average.module.scale) == [[4.0] * 3] * 2


def test_averaged_model_of_a_model_that_has_run(pair):
    with pair.scope():
        layer = Scale(torch.float32)
    pair.run(lambda: layer(torch.ones(2, 3)).detach())
    with pair.scope():
        average = torch.optim.swa_utils.AveragedModel(layer)
    assert isinstance(average.module.scale, ts.MirroredVariable)
    assert isinstance(average.module.examples, ts.SyncOnReadVariable)
    pair.run(lambda: average(torch.ones(1, 3)).detach())
    assert (float(average.module.examples), float(layer.examples)) == (6.0, 4.0)
    assert float(_saved(layer).examples) == 4.0


def test_copy_of_a_module_in_run_belongs_to_the_replica(pair):
    with pair.scope():
        layer = Scale(torch.float32)

    def fn():
        own = copy.deepcopy(layer)
        own.scale.assign(torch.ones(3) * own_number())
        return own.scale.detach().sum()

    assert local(pair, pair.run(fn)) == [3.0, 6.0]
    assert local(pair, layer.scale) == [[0.5] * 3] * 2


def test_model_called_outside_run_writes_every_copy(pair):
    with pair.scope():
        layer = Scale(torch.float32)
    pair.run(lambda: layer(torch.ones(2, 3)).detach())
    with pytest.raises(ValueError, match="assign_add"):  # of the ON_READ sum, as of any in cross-replica context
        layer(torch.ones(2, 3))
    assert local(pair, layer.calls) == [2, 2]


def test_on_read_buffer_in_a_state_dict(pair):
    with pair.scope():
        layer = Scale(torch.float32)
    pair.run(lambda: layer(torch.ones(2, 3)).detach())
    state = layer.state_dict()
    assert float(state["examples"]) == 4.0
    layer.examples.assign(0.0)
    layer.load_state_dict(state)
    assert local(pair, layer.examples) == [2.0, 2.0]


def test_optimizer_refuses_on_read(pair):
    with pair.scope():
        variable = ts.Variable(1.0, trainable=True, synchronization=ON_READ, aggregation=SUM)
        optimizer = torch.optim.SGD([variable], lr=0.1)

    def fn():
        (variable * 2).backward()
        optimizer.step()

    with pytest.raises(RuntimeError, match="ON_READ"):
        pair.run(fn)


# copies and files


def test_pickle_and_torch_save_give_plain_variables(pair):
    variable = make(pair, [1.0, 2.0], name="w")
    for copied in (pickle.loads(pickle.dumps(variable)), _saved(variable)):
        assert type(copied) is ts.Variable
        assert copied.tolist() == [1.0, 2.0]
        assert copied.name == "w:0"
    with pair.scope():
        layer = Scale(torch.float32)
    pair.run(lambda: None)
    assert type(_saved(layer).scale) is ts.Variable
    assert _saved(variable, weights_only=True).tolist() == [1.0, 2.0]


def test_deepcopy_is_a_variable_of_the_same_kind(pair):
    variable = make(pair, 1.0, synchronization=ON_READ, aggregation=SUM)
    pair.run(lambda: variable.assign(own_number()))
    copied = copy.deepcopy(variable)
    pair.run(lambda: copied.assign_add(1.0))
    assert local(pair, variable) == [1.0, 2.0]
    assert local(pair, copied) == [2.0, 3.0]


# errors


@pytest.mark.parametrize("value", [[1.0, 2.0], "text", 1j])
def test_value_that_does_not_fit(pair, value):
    variable = make(pair, 1.0, aggregation=SUM)
    with pytest.raises(ValueError, match="Variable"):
        variable.assign(value)
    assert local(pair, variable) == [1.0, 1.0]


def test_replicas_that_assign_differently(pair):
    variable = make(pair, 1.0, aggregation=SUM)

    def fn():
        if ts.get_replica_context().replica_id_in_sync_group == 0:
            variable.assign(torch.tensor(1.0))

    with pytest.raises(RuntimeError, match="assign of variable"):
        pair.run(fn)


def test_per_replica_value_outside_run(pair):
    variable = make(pair, 1.0, aggregation=SUM)
    with pytest.raises(ValueError, match="Reduce it first"):
        variable.assign(pair.run(own_number))


def test_on_read_is_not_changed_in_place_outside_run(pair):
    variable = make(pair, 1.0, synchronization=ON_READ, aggregation=SUM)
    with pytest.raises(RuntimeError, match="assign"):
        variable.add_(1.0)
    assert local(pair, variable) == [1.0, 1.0]


def test_classes_are_made_by_variable():
    with pytest.raises(TypeError, match=r"ts\.Variable"):
        ts.MirroredVariable(1.0)
    with pytest.raises(TypeError, match="initial value"):
        ts.Variable("text")


def test_a_tensor_is_not_replicated(pair):
    with pytest.raises(TypeError, match=r"ts\.Variable"):
        pair.replicate(torch.ones(1))


def test_variable_without_aggregation_may_differ_until_it_is_assigned_outside(pair):
    variable = make(pair, 1.0)
    pair.run(lambda: variable.assign(own_number()))
    assert local(pair, variable) == [1.0, 2.0]
    assert all(copy.diverges for copy in variable.copies)
    variable.assign(5.0)
    assert local(pair, variable) == [5.0, 5.0]
    assert not any(copy.diverges for copy in variable.copies)


def test_divergence_of_a_trained_variable_is_found(pair):
    variable = make(pair, 1.0)

    def fn():
        with torch.no_grad():
            variable.add_(own_number())

    with pytest.raises(ts.errors.DivergenceError, match="Variable"):
        pair.run(fn)


def test_foreign_replicas_do_not_assign(pair):
    variable = make(pair, 1.0)
    with pytest.raises(RuntimeError, match="belongs to"):
        ts.MirroredStrategy(cpu_devices(2)).run(lambda: variable.assign_add(1.0))
    assert local(pair, variable) == [1.0, 1.0]


def _saved(obj, *, weights_only=False):
    file = io.BytesIO()
    torch.save(obj, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


@pytest.mark.parametrize("way", ["data", "storage"])
@pytest.mark.parametrize("when", ["taken before a run", "taken anew"])
def test_memory_that_is_handed_out_may_be_written_to(way, when):
    strategy = ts.MirroredStrategy(cpu_devices(2))
    with strategy.scope():
        variable = ts.Variable(torch.zeros(3), trainable=False, aggregation=ts.VariableAggregation.SUM)

    def memory():
        if way == "storage":
            return torch.empty(0).set_(variable.untyped_storage()).data
        return variable.data

    def seen():
        values = strategy.run(lambda: variable * 1)
        return [value.tolist() for value in strategy.experimental_local_results(values)]

    held = memory()
    assert seen() == [[0.0] * 3] * 2
    for number in (1.0, 2.0):
        taken = held if when == "taken before a run" else memory()
        taken[:] = number
        assert seen() == [[number] * 3] * 2
        strategy.run(lambda: variable.assign_add(torch.ones(3)))
        assert seen() == [[number + 2] * 3] * 2
