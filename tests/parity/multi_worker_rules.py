"""What TF's figures of MultiWorkerMirroredStrategy say in general: the result of each case for any layout.

``r`` is a replica's number among the ``n = P x d`` of P processes with d replicas each; process p has the replicas
p x d to p x d + d - 1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

VALUE_ERROR = {"exception": "ValueError"}


def results(num_processes: int, num_local: int) -> dict[str, list[Any]]:
    """Return, for each case's name, what each process gets."""
    n = num_processes * num_local
    everyone = range(n)
    local = [list(everyone)[p * num_local : (p + 1) * num_local] for p in range(num_processes)]
    number_sum = sum(r + 1.0 for r in everyone)
    uneven = [i for r in everyone for i in range(r + 1)]

    def same(value: Any) -> list[Any]:
        return [value] * num_processes

    def copies(value: Any) -> list[Any]:
        return same([value] * num_local)

    def each(fn: Callable[[int], Any]) -> list[Any]:
        return [[fn(r) for r in own] for own in local]

    wide_row = [r + 1.0 for r in everyone for _ in range(r + 1)]
    rules: dict[str, list[Any]] = {
        "run.replica_id": local,
        "run.fn.replica_id": local,
        "run.num_replicas": same([n]),
        "reduce.sum": same(number_sum),
        "reduce.sum.fnctx": same(number_sum),
        "reduce.mean": same(number_sum / n),
        "reduce.scalar_py": same(float(num_processes)),  # one value for each process
        "reduce.scalar_py_mean": same(1.0),
        "reduce.tensor": same([1.0 * num_processes, 2.0 * num_processes]),
        "reduce.tensor_mean": same([1.0, 2.0]),
        "reduce.axis0.sum": same(11 * number_sum),
        "reduce.axis0.mean": same(11 * number_sum / (2 * n)),
        "reduce.axis0.sum.uneven": same(float(sum(uneven))),
        "reduce.axis0.mean.uneven": same(sum(uneven) / len(uneven)),
        "reduce.nested": same(VALUE_ERROR),
        "reduce.int": same(number_sum / n),
        "reduce.badop": same(VALUE_ERROR),
        "gather.axis0": same([x for r in everyone for x in (r + 1.0, 10 * (r + 1.0))]),
        "gather.axis0.uneven": same(uneven),
        "gather.2d.axis0": same([[x] for r in everyone for x in (r + 1.0, 10 * (r + 1.0))]),
        "gather.2d.axis1": same([[factor * (r + 1.0) for r in everyone] for factor in (1, 10)]),
        "gather.2d.axis1.uneven": same([wide_row, wide_row]),
        "gather.scalar": same(VALUE_ERROR),
        "all_reduce.SUM": copies(number_sum),
        "all_reduce.MEAN": copies(number_sum / n),
        "all_reduce.nested": copies({"a": number_sum, "b": 2 * number_sum}),
        "all_gather.uneven": copies(uneven),
        "all_gather.scalar": same(VALUE_ERROR),
        "values_from_fn": each(lambda r: [r, n]),
        "values_from_fn_scalar": each(float),
        "merge_call": copies(number_sum),
        "exc_in_run": same({"exception": "ZeroDivisionError"}),
        "end": same(float(num_processes)),
        "var.init_broadcast": copies(10.0),
        "var.init_read": same(10.0),
        "var.int_init": copies(3),
        "var.bool_init": copies(True),
        "var.cross_assign_same": copies(5.0),
        "var.cross_assign_worker_dependent": [[5.0 + p] * num_local for p in range(num_processes)],
        "checkpoint.all_workers_save": same(
            {"vars": {"z": 1.0, "o": number_sum}, "z": [1.0] * num_local, "o": [number_sum / n] * num_local,
             "o_read": number_sum}
        ),
    }  # fmt: skip
    first = [own[0] + 1.0 for own in local]
    for method, start in (("assign", 0.0), ("assign_add", 10.0)):
        rules[f"var.{method}.SUM"] = copies(start + number_sum)
        rules[f"var.{method}.MEAN"] = copies(start + number_sum / n)
        rules[f"var.{method}.ONLY_FIRST"] = [[start + value] * num_local for value in first]
        rules[f"var.{method}.NONE"] = each(lambda r, start=start: start + r + 1.0)
    totals = {
        "SUM": (10.0 * n, 10.0 * n + number_sum, 12.0 / n),
        "MEAN": (10.0, 10.0 + number_sum / n, 12.0),
        "ONLY_FIRST": (10.0, None, 12.0),  # each process reads its own first replica
    }
    for aggregation, (at_first, after_add, share) in totals.items():
        added = each(lambda r: 11.0 + r)
        reads = [10.0 + value for value in first] if after_add is None else same(after_add)
        rules[f"onread.{aggregation}.init_local"] = copies(10.0)
        rules[f"onread.{aggregation}.init_read"] = same(at_first)
        rules[f"onread.{aggregation}.after_add"] = [list(pair) for pair in zip(added, reads, strict=True)]
        rules[f"onread.{aggregation}.cross_assign12"] = same([[share] * num_local, 12.0])
    return rules


def training(num_replicas: int, batch_size: int, kind: str, num_rows: int = 12, num_steps: int = 10) -> dict[str, Any]:
    """Return what the custom loop of the figures gives, computed with Python's numbers.

    ``y = xw + b`` learns ``3x + 1`` by SGD from zeros, on x = i/12 in batches that are cut into chunks of
    ceil(batch / replicas). A replica's loss is its sum divided by the global batch size (``global``), by the size of
    its chunk (``mean``), or by that times the number of replicas (``auto``); the gradients are summed.
    """
    rows = [i / 12 for i in range(num_rows)]
    batches = [rows[start : start + batch_size] for start in range(0, num_rows, batch_size)]
    w = b = 0.0
    losses = []
    for batch in itertools.islice(itertools.cycle(batches), num_steps):
        size = math.ceil(len(batch) / num_replicas)
        w_grad = b_grad = total = 0.0
        for replica in range(num_replicas):
            chunk = batch[replica * size : (replica + 1) * size]
            divisor = {"global": batch_size, "mean": len(chunk), "auto": len(chunk) * num_replicas}[kind]
            if not chunk:  # the mean of nothing is no number, but has no gradient; compute_average_loss gives 0
                total += math.nan if kind == "mean" else 0.0
                continue
            errors = [x * w + b - (3 * x + 1) for x in chunk]
            total += sum(error**2 for error in errors) / divisor
            w_grad += sum(2 * error * x for error, x in zip(errors, chunk, strict=True)) / divisor
            b_grad += sum(2 * error for error in errors) / divisor
        losses.append([total, total / num_replicas])
        w, b = w - 0.1 * w_grad, b - 0.1 * b_grad
    return {"loss_sum_mean": losses, "w": w, "b": b}
