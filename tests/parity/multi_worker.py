"""What a task of a cluster runs for tf.distribute's measured cases of MultiWorkerMirroredStrategy."""

from __future__ import annotations

import functools
import gc
import inspect
import json
import os
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import torchstrategy as ts
from tests.clusters import as_task, task_of_rank
from tests.programs import cpu_devices

Case = dict[str, Any]
AGGREGATIONS = {"ONLY_FIRST": "ONLY_FIRST_REPLICA"}
NUM_STEPS = 10
CHIEFS_SEED = 100

_families: list[tuple[re.Pattern[str], Callable[..., Any]]] = []


def run_cases(cases: list[Case], cluster: dict[str, list[str]], num_local: int, folder: str) -> dict[str, Any]:
    """Return what this task's replicas get in each case, in the form of the figures, by id."""
    gc.freeze()  # a first run of new variables collects garbage: not through all that was ever imported
    try:
        with as_task(cluster, *task_of_rank(cluster, int(os.environ["RANK"]))):
            strategy = ts.MultiWorkerMirroredStrategy(devices=cpu_devices(num_local))
            return {case["id"]: run_case(strategy, case, folder) for case in cases}
    finally:
        gc.unfreeze()


def run_case(strategy: Any, case: Case, folder: str = "") -> Any:
    """Run one case with a strategy; an exception becomes the names of its classes."""
    fn, groups = family_of(case["id"])
    try:
        more = {"folder": Path(folder)} if "folder" in inspect.signature(fn).parameters else {}
        return fn(strategy, *groups, **more)
    except Exception as error:  # noqa: BLE001 - the figures hold exceptions of any type
        return raised(error)


def raised(error: Exception) -> dict[str, Any]:
    return {"exception": [cls.__name__ for cls in type(error).__mro__], "message": str(error)}


def family_of(case_id: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the function for a case, and what its pattern found in the id."""
    name = re.sub(r"^(train\.)?(\d?w\dd|chief2w1d|single)\.(k2\.)?", r"\1", case_id)
    found = [(fn, match.groups()) for pattern, fn in _families if (match := pattern.fullmatch(name))]
    if len(found) != 1:
        raise LookupError(f"{case_id} has {len(found)} families")
    return found[0]


def _family(pattern: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        _families.append((re.compile(pattern), fn))
        return fn

    return register


def _replica_id() -> int:
    return ts.get_replica_context().replica_id_in_sync_group


def _id_in_cluster(s: Any) -> int:
    return s.workers.rank


def _own(s: Any, value: Any) -> list[Any]:
    """Return the local values as numbers."""
    return [plain(part) for part in s.experimental_local_results(value)]


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().tolist()
    if isinstance(value, (list, tuple)):
        return [plain(part) for part in value]
    return value


def _per_replica(s: Any, kind: str = "number") -> Any:
    """One value for each replica r."""
    makers = {
        "number": lambda r: torch.tensor(r + 1.0),
        "int": lambda r: torch.tensor(r + 1),
        "pair": lambda r: torch.tensor([r + 1.0, 10 * (r + 1.0)]),
        "uneven": lambda r: torch.arange(r + 1),
        "uneven floats": lambda r: torch.arange(r + 1.0),
        "column": lambda r: torch.tensor([[r + 1.0], [10 * (r + 1.0)]]),
        "wide": lambda r: torch.full((2, r + 1), r + 1.0),
    }
    return s.run(lambda: makers[kind](_replica_id()))


@_family("info")
def attributes(s):
    resolver = s.cluster_resolver
    return {
        "num_replicas_in_sync": s.num_replicas_in_sync,
        "id_in_cluster": _id_in_cluster(s),
        "is_chief": s.is_chief,
        "should_checkpoint": s.extended.should_checkpoint,
        "should_save_summary": s.extended.should_save_summary,
        "between_graph": s.extended.experimental_between_graph,
        "should_init": s.extended.experimental_should_init,
        "worker_devices": list(s.extended.worker_devices),
        "parameter_devices": list(s.extended.parameter_devices),
        "resolver": type(resolver).__name__,
        "task_type": resolver.task_type,
        "task_id": resolver.task_id,
    }


@_family(r"run\.(fn\.)?replica_id")
def run_replica_id(s, in_function):
    def fn():
        return torch.tensor(_replica_id())

    if in_function:
        return _own(s, ts.function(lambda: s.run(fn))())
    return _own(s, s.run(fn))


@_family(r"run\.num_replicas")
def run_num_replicas(s):
    # A value that is the same object on all replicas stays plain, here as in TF.
    return _own(s, s.run(lambda: ts.get_replica_context().num_replicas_in_sync))[:1]


@_family(r"reduce\.(sum|mean)(\.fnctx)?")
def reduce(s, op, in_function):
    def whole():
        return s.reduce(op.upper(), _per_replica(s), axis=None)

    return plain(ts.function(whole)() if in_function else whole())


@_family(r"reduce\.scalar_py(_mean)?")
def reduce_number(s, mean):
    return plain(s.reduce("MEAN" if mean else "SUM", 1.0, axis=None))


@_family(r"reduce\.tensor(_mean)?")
def reduce_plain_tensor(s, mean):
    return plain(s.reduce("MEAN" if mean else "SUM", torch.tensor([1.0, 2.0]), axis=None))


@_family(r"reduce\.axis0\.(sum|mean)(\.uneven)?")
def reduce_over_axis(s, op, uneven):
    return plain(s.reduce(op.upper(), _per_replica(s, "uneven floats" if uneven else "pair"), axis=0))


@_family(r"reduce\.nested")
def reduce_nested(s):
    x = _per_replica(s)
    return {key: plain(value) for key, value in s.reduce("SUM", {"a": x, "b": x}, axis=None).items()}


@_family(r"reduce\.int")
def reduce_integers(s):
    return plain(s.reduce("MEAN", _per_replica(s, "int"), axis=None))


@_family(r"reduce\.badop")
def reduce_by_unknown(s):
    return plain(s.reduce("MAX", _per_replica(s), axis=None))


@_family(r"gather\.(axis0|2d\.axis1|2d\.axis0|scalar)(\.uneven)?")
def gather(s, kind, uneven):
    values = {"axis0": "pair", "2d.axis1": "column", "2d.axis0": "column", "scalar": "number"}[kind]
    if uneven:
        values = {"axis0": "uneven", "2d.axis1": "wide"}[kind]
    return plain(s.gather(_per_replica(s, values), axis=1 if kind.endswith("axis1") else 0))


@_family(r"all_reduce\.(SUM|MEAN)")
def all_reduce(s, op):
    return _own(s, s.run(lambda: ts.get_replica_context().all_reduce(op, torch.tensor(_replica_id() + 1.0))))


@_family(r"all_reduce\.nested")
def all_reduce_nested(s):
    def fn():
        x = torch.tensor(_replica_id() + 1.0)
        return ts.get_replica_context().all_reduce("SUM", {"a": x, "b": 2 * x})

    return [{key: plain(value) for key, value in own.items()} for own in s.experimental_local_results(s.run(fn))]


@_family(r"all_gather\.(uneven|scalar)")
def all_gather(s, kind):
    def fn():
        value = torch.arange(_replica_id() + 1) if kind == "uneven" else torch.tensor(1.0)
        return ts.get_replica_context().all_gather(value, axis=0)

    return _own(s, s.run(fn))


@_family(r"values_from_fn(_scalar)?")
def values_from_function(s, scalar):
    def value_fn(context):
        i = context.replica_id_in_sync_group
        return torch.tensor(float(i)) if scalar else torch.tensor([i, context.num_replicas_in_sync])

    return _own(s, s.experimental_distribute_values_from_function(value_fn))


@_family("merge_call")
def merge_call(s):
    def merge(strategy, value):
        return strategy.extended.reduce_to("SUM", value, destinations=value)

    return _own(s, s.run(lambda: ts.get_replica_context().merge_call(merge, args=(torch.tensor(_replica_id() + 1.0),))))


@_family(r"exc_in_run")
def failing_function(s):
    return s.run(lambda: 1 // 0)


@_family(r"end")
def still_working(s):
    return plain(s.reduce("SUM", 1.0, axis=None))


@_family(r"var\.(assign|assign_add)\.(SUM|MEAN|ONLY_FIRST|NONE)")
def assign_in_run(s, method, aggregation):
    with s.scope():
        variable = ts.Variable(10.0, aggregation=ts.VariableAggregation[AGGREGATIONS.get(aggregation, aggregation)])
    s.run(lambda: getattr(variable, method)(torch.tensor(_replica_id() + 1.0)))
    return _own(s, variable)


@_family(r"var\.init_broadcast")
def initial_value(s):
    with s.scope():
        variable = ts.Variable(10.0 * (_id_in_cluster(s) + 1))
    return _own(s, variable)


@_family(r"var\.init_read")
def initial_value_outside_run(s):
    with s.scope():
        variable = ts.Variable(10.0 * (_id_in_cluster(s) + 1))
    return plain(variable.read_value())


@_family(r"var\.(int|bool)_init")
def initial_value_of_dtype(s, dtype):
    with s.scope():
        variable = ts.Variable(_id_in_cluster(s) + 3 if dtype == "int" else _id_in_cluster(s) == 0)
    return _own(s, variable)


@_family(r"var\.random_same_as_chief")
def random_initial_value(s):
    torch.manual_seed(CHIEFS_SEED + _id_in_cluster(s))
    with s.scope():
        variable = ts.Variable(lambda: torch.randn(2))
    return plain(s.gather(s.run(lambda: variable.read_value()), axis=0))


@_family(r"var\.cross_assign_(same|worker_dependent)")
def assign_outside_run(s, kind):
    with s.scope():
        variable = ts.Variable(10.0)
        variable.assign(5.0 if kind == "same" else 5.0 + _id_in_cluster(s))
    return _own(s, variable)


@_family(r"onread\.(SUM|MEAN|ONLY_FIRST)\.(init_local|init_read|after_add|cross_assign12)")
def on_read(s, aggregation, what):
    with s.scope():
        variable = ts.Variable(
            10.0 * (_id_in_cluster(s) + 1),
            synchronization=ts.VariableSynchronization.ON_READ,
            aggregation=ts.VariableAggregation[AGGREGATIONS.get(aggregation, aggregation)],
        )
        if what == "init_read":
            return plain(variable.read_value())
    if what == "init_local":
        return _own(s, variable)
    if what == "after_add":
        s.run(lambda: variable.assign_add(torch.tensor(_replica_id() + 1.0)))
    else:
        variable.assign(12.0)
    return [_own(s, variable), plain(variable.read_value())]


@_family(r"checkpoint\.all_workers_save")
def every_process_saves(s, folder):
    own = folder / f"{s.num_replicas_in_sync}" / ("d" if s.is_chief else f"d_tmp{_id_in_cluster(s)}")
    with s.scope():
        z = ts.Variable(_id_in_cluster(s) + 1.0)
        o = ts.Variable(0.0, synchronization=ts.VariableSynchronization.ON_READ, aggregation=ts.VariableAggregation.SUM)
        checkpoint = ts.train.Checkpoint(z=z, o=o)
    s.run(lambda: o.assign_add(torch.tensor(_replica_id() + 1.0)))
    path = checkpoint.save(own / "ckpt")
    s.run(lambda: o.assign_add(torch.tensor(_replica_id() + 1.0)))
    z.assign(99.0)
    reader = ts.train.load_checkpoint(path)
    checkpoint.restore(path).assert_consumed()
    return {
        "vars": {name: float(reader.get_tensor(name)) for name in ("z", "o")},
        "z": _own(s, z),
        "o": _own(s, o),
        "o_read": plain(o.read_value()),
    }


@_family(r"train\.loop\.G(\d)\.(global|mean|auto|actual)(?:\.partial|\.n(\d))?")
def training_loop(s, batch_size, kind, num_rows):
    """10 steps of y = xw + b on 3x + 1, with the loss divided in one of several ways."""
    n, size = int(num_rows or 12), int(batch_size)
    x = torch.arange(n).reshape(n, 1) / 12
    with s.scope():
        model = torch.nn.Linear(1, 1)
        torch.nn.init.zeros_(model.weight)
        torch.nn.init.zeros_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = ts.data.Dataset.from_tensor_slices((x, 3 * x + 1)).batch(size).repeat()
    batches = iter(s.experimental_distribute_dataset(dataset))

    def step(x, y):
        optimizer.zero_grad()
        squared = (model(x) - y).square().sum(dim=1)
        if kind == "mean":
            loss = squared.mean()
        elif kind == "global":
            loss = squared.sum() / size
        else:
            loss = ts.nn.compute_average_loss(squared, global_batch_size="actual" if kind == "actual" else None)
        loss.backward()
        optimizer.step()
        return loss.detach()

    losses = []
    for _ in range(NUM_STEPS):
        per_replica = s.run(step, args=next(batches))
        losses.append([float(s.reduce(op, per_replica, axis=None)) for op in ("SUM", "MEAN")])
    return {"loss_sum_mean": losses, "w": model.weight.item(), "b": model.bias.item()}


@_family(r"train\.fit\.(numpy\.)?G(\d)(\.adam|\.partial)?")
def fit(s, numpy, batch_size, more):
    """Keras' loop on the same rows; like there, the layer is a kernel of one number and a bias."""
    rate = 0.1
    with s.scope():
        layer = torch.nn.Linear(1, 1)
        torch.nn.init.zeros_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
        model = ts.Model(layer)
        cls = torch.optim.Adam if more == ".adam" else torch.optim.SGD
        settings = {"eps": 1e-7} if more == ".adam" else {}
        model.compile(functools.partial(cls, lr=rate, **settings), "mse", metrics=["mae"])
    x = torch.arange(12.0).reshape(12, 1) / 12
    y = 3 * x + 1
    data = ts.data.Dataset.from_tensor_slices((x, y)).batch(int(batch_size))
    given = {"x": x, "y": y, "batch_size": int(batch_size), "shuffle": False} if numpy else {"x": data}
    history = model.fit(**given, epochs=3, verbose=0).history
    return {
        "history": {name: [float(value) for value in values] for name, values in history.items()},
        "weights": [layer.weight.tolist(), layer.bias.tolist()],
        "evaluate": [float(value) for value in model.evaluate(data, verbose=0)],
        "predict": model.predict(x, batch_size=int(batch_size), verbose=0).flatten().tolist(),
    }


def make_in_one_process(case: Case) -> Any:
    """Construct the strategy as a process of its own would; the environment is set by the caller."""
    mode = case["inputs"]["mode"]
    try:
        if mode == "after_op":
            torch.ones(2) + 1
        if mode == "badopts":
            strategy = ts.MultiWorkerMirroredStrategy(communication_options="NCCL")
        elif mode == "exp_enum":
            strategy = ts.experimental.MultiWorkerMirroredStrategy(ts.experimental.CollectiveCommunication.RING)
        else:
            strategy = ts.MultiWorkerMirroredStrategy()
    except Exception as error:  # noqa: BLE001 - the figures hold exceptions of any type
        return raised(error)
    resolver = strategy.cluster_resolver
    return {
        "output": {
            "num_replicas": strategy.num_replicas_in_sync,
            "worker_devices": list(strategy.extended.worker_devices),
            "id": 0 if strategy.workers is None else strategy.workers.rank,
            "is_chief": strategy.is_chief,
            "num_workers": 1 if strategy.workers is None else strategy.workers.size,
            "task": [resolver.task_type, resolver.task_id],
            "resolver": type(resolver).__name__,
            "reduce": plain(strategy.reduce("SUM", 1.0, axis=None)),
            "isinstance_exp": isinstance(strategy, ts.experimental.MultiWorkerMirroredStrategy),
            "isinstance_mirrored": isinstance(strategy, ts.MirroredStrategy),
        }
    }


def lose_a_worker(cluster: dict[str, list[str]], how: str, timeout_s: float, folder: str) -> None:
    """Run 8 steps, of which worker 1 makes 3; write what happened to a file, because this process may be gone."""
    rank = int(os.environ["RANK"])
    options = ts.experimental.CommunicationOptions(timeout_seconds=timeout_s if how.startswith("hang") else None)
    with as_task(cluster, *task_of_rank(cluster, rank)):
        strategy = ts.MultiWorkerMirroredStrategy(communication_options=options, devices=["cpu:0"])
    with strategy.scope():
        variable = ts.Variable(0.0)

    def step() -> None:
        total = ts.get_replica_context().all_reduce("SUM", torch.tensor(1.0))
        variable.assign_add(total)

    seen: dict[str, Any] = {"steps": []}
    path = Path(folder, f"worker{rank}.json")
    for number in range(8):
        path.write_text(json.dumps(seen))
        if rank == 1 and number == 3:
            _leave(how, timeout_s)
            return
        try:
            strategy.run(step)
        except Exception as error:  # noqa: BLE001 - the figures hold exceptions of any type
            seen["died"] = {"at_step": number, **raised(error)}
            try:
                strategy.run(step)
            except Exception as again:  # noqa: BLE001
                seen["retry"] = raised(again)
            path.write_text(json.dumps(seen))
            return
        seen["steps"].append(float(variable))


def _leave(how: str, timeout_s: float) -> None:
    if how.startswith("exit"):
        os._exit(3)
    if how == "raise":
        raise RuntimeError("no more")
    if how == "clean_exit":
        sys.exit(0)
    time.sleep(1.5 * timeout_s)  # alive, but silent
