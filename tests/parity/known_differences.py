"""Measured cases in which this library differs from TF on purpose, what comes instead, and where that is explained.

A test checks that each listed case gives what is written here, and that this is not what TF gave.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tests.parity.driver import Case

#: Names of TF's that are missing on purpose; those that TF has not are in tests/public_api.txt.
MISSING = {
    "colocate_vars_with",
    "configure",
    "experimental_run",
    "group",
    "make_dataset_iterator",
    "make_input_fn_iterator",
    "unwrap",
    "update_config_proto",
}
EXTENDED = [
    "batch_reduce_to",
    "experimental_between_graph",
    "experimental_should_init",
    "parameter_devices",
    "reduce_to",
    "should_checkpoint",
    "should_save_summary",
    "update",
    "variable_created_in_scope",
    "worker_devices",
]
NAMES = {"onedevice": "OneDeviceStrategy", "central": "CentralStorageStrategy", "central2": "CentralStorageStrategy"}
Expected = Callable[[Case], Any]


def _int(value: int) -> dict[str, Any]:
    return {"py": "int", "value": value}


def _float(value: float) -> dict[str, Any]:
    return {"py": "float", "value": value}


def _scalar(value: float, dtype: str = "float32") -> dict[str, Any]:
    return {"kind": "Tensor", "dtype": dtype, "shape": [], "value": value}


def _tensor(*shape: int) -> dict[str, Any]:
    values: list[Any] = [] if shape[0] == 0 else [[] for _ in range(shape[0])]
    return {"kind": "Tensor", "dtype": "float32", "shape": list(shape), "value": values}


def always(value: Any) -> Expected:
    return lambda case: value


def raises(name: str) -> Expected:
    return always({"raises": name})


def names_that_stayed(case: Case) -> Any:
    return {"list": [name for name in case.expected["list"] if name not in MISSING]}


def sum_of_replicas(case: Case) -> Any:
    return _scalar(sum(range(1, case.num_replicas + 1)))


def tensors_as_numbers(value: Any) -> Any:
    """Return TF's result with a number for each scalar tensor."""
    if isinstance(value, dict):
        is_scalar = value.get("kind") == "Tensor" and value["shape"] == []
        return _float(value["value"]) if is_scalar else {key: tensors_as_numbers(part) for key, part in value.items()}
    return [tensors_as_numbers(part) for part in value] if isinstance(value, list) else value


def number_of_one_replica(case: Case) -> Any:
    return tensors_as_numbers(case.expected)


def gathered_number(case: Case) -> Any:
    return {"raises": "TypeError"} if case.num_replicas > 1 else _float(3.0)


def gathered_ids(case: Case) -> Any:
    n = case.num_replicas
    return {"dict": {"a": {"kind": "Tensor", "dtype": "float32", "shape": [n], "value": [float(i) for i in range(n)]}}}


def _context(strategy: str, *, is_in_scope: bool) -> dict[str, Any]:
    return {
        "dict": {
            "has_strategy": is_in_scope,
            "in_cross_replica_context": is_in_scope,
            "get_strategy": strategy if is_in_scope else "DefaultStrategy",
            "get_replica_context": None if is_in_scope else "ReplicaContext",
        }
    }


def until_both_are_left(case: Case) -> Any:
    outside = _context("", is_in_scope=False)
    if case.host == "default":
        return {"tuple": [outside, outside]}
    return {"tuple": [_context(NAMES.get(case.host, "MirroredStrategy"), is_in_scope=True), outside]}


def rounds_of_rows(case: Case) -> Any:
    """Four batches of two rows, dealt out in turn; the last round is filled up with empty parts."""
    n = case.num_replicas
    rows = [{"list": [_int(i), _int(i + 1)]} for i in range(0, 8, 2)]
    rounds = [rows[start : start + n] for start in range(0, 4, n)]
    return {"list": [{"list": parts + [{"list": []}] * (n - len(parts))} for parts in rounds]}


def full_rounds_of_numbers(case: Case) -> Any:
    """The numbers 1 to 4, one for each replica in turn; numbers have no empty part to fill up a round with."""
    n = case.num_replicas
    rounds = [range(start, start + n) for start in range(1, 6 - n, n)]
    return {"list": [_values([_int(i) for i in numbers]) for numbers in rounds]}


def _values(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else {"kind": "PerReplica", "values": values}


def not_truncated(case: Case) -> Any:
    return _scalar(sum(case.inputs["value"]) * 0.5 / 3 / case.num_replicas, "float64")


# Pattern over a case's id -> title of the entry in docs/differences.md, and what comes instead of TF's result
KNOWN_DIFFERENCES: dict[str, tuple[str, Expected]] = {
    r"1\.tf_function_exc\..*": ("A ts.function is not traced", raises("KeyError")),
    r"2\.all_reduce_in_tf_function_in_run\.n1": ("A ts.function is not traced", sum_of_replicas),
    r"2\.reduce_noaxis\..*": ("The axis of reduce has a default", sum_of_replicas),
    r"2\.rid_type\.(n1|onedevice|central)": (
        "A replica id is a Python int",
        always({"tuple": ["int", _int(0)]}),
    ),
    r"2\.gather_str\.(default|n1|onedevice|central)": (
        "There are no tensors of strings",
        always({"kind": "ndarray", "dtype": "<U2", "shape": [1], "value": ["r0"]}),
    ),
    r"2\.reduce_(plain_float_sum|list_floats|pr_pyfloat)\.n1": (
        "Python numbers are not made tensors",
        number_of_one_replica,
    ),
    r"2\.all_gather_py\..*": ("Python numbers are not made tensors", gathered_number),
    r"2\.gather_dict\.n[234]": ("gather works on structures", gathered_ids),
    r"2\.all_reduce_None\.n\d": ("A reduce op is never None", raises("TypeError")),
    r"2\.merge_exc_catch\.n1": ("One replica calls a merge function directly", always("caught 0")),
    r"2\.pr_bool": ("A PerReplica has no truth value", raises("TypeError")),
    r"3\.ext_attrs\..*": ("strategy.extended is small and names of TF 1 are missing", always({"list": EXTENDED})),
    r"3\.public_attrs\..*": ("strategy.extended is small and names of TF 1 are missing", names_that_stayed),
    r"3\.variable_created_in_other_scope\.default": (
        "strategy.extended is small and names of TF 1 are missing",
        always(False),
    ),
    r"3\.deepcopy\..*": ("A strategy can't be copied", raises("TypeError")),
    r"3\.out_of_order\.(?!default).*": ("A scope object is used once", until_both_are_left),
    r"3\.scope_object_reuse_nested\..*": ("A scope object is used once", raises("RuntimeError")),
    r"3\.exit_twice\.default": ("A scope object is used once", raises("RuntimeError")),
    r"3\.out_of_order\.default": ("The default strategy's scope changes nothing", until_both_are_left),
    r"3\.set_in_scope\.default": ("The default strategy's scope changes nothing", always(None)),
    r"5\.from_function_b2d_len8\.n3": ("No batch is dropped when data sets end", rounds_of_rows),
    r"5\.from_function_notds\..*": ("Any re-iterable of batches is a dataset", full_rounds_of_numbers),
    r"6\.avg_sw\[int32,sw=0\.5,.*": ("Weighted integer losses are not truncated", not_truncated),
    r"7\.apply_outside\.n[234]": ("An optimizer steps inside run", raises("RuntimeError")),
    r"7\.var_outside_scope\.n1": ("One replica may train what was made outside the scope", always(None)),
    r"9\.(save|restore)_in_run\.n\d": ("Checkpoints are saved and restored outside run", raises("RuntimeError")),
}

# Cases of Keras' fit whose result depends on the number of replicas; here it is that of one replica.
ONE_REPLICA_TITLE = "fit trains like one replica"
TF_BUGS_TITLE = "Bugs of TF that are not copied"


def fixed_tf_bug(case: Any) -> Any:
    """Return the sensible result of a case that the figures mark as a bug of TF.

    Raises:
        LookupError: the case is not known.
    """
    n = case.num_replicas
    rules = {
        r"2\.all_reduce_empty\..*": {"dict": {}},
        r"2\.all_reduce_empty_list\..*": {"list": []},
        r"2\.(all_)?gather2d_axis1_empty_first\..*": {"raises": "InvalidArgumentError"},  # 0 and 2 rows side by side
        r"2\.gather_axis0_all_empty\..*": _tensor(0),
        r"2\.gather2d_axis0_all_empty\..*": _tensor(0, 2),
        r"2\.gather2d_axis1_all_empty\..*": _tensor(0, 2 * n),
        r"2\.all_gather_axis0_all_empty\..*": _on_all(n, _tensor(0)),
        r"2\.all_gather2d_axis0_all_empty\..*": _on_all(n, _tensor(0, 2)),
        r"2\.all_gather2d_axis1_all_empty\..*": _on_all(n, _tensor(0, 2 * n)),
        r"5\.opt_per_replica_leaks\..*": {"tuple": [_per_worker_steps(n), {"list": [_int(1)]}]},
    }
    for pattern, expected in rules.items():
        if re.fullmatch(pattern, case.id):
            return expected
    raise LookupError(f"No sensible result is known for {case.id}")


def _on_all(num_replicas: int, value: Any) -> Any:
    return value if num_replicas == 1 else {"kind": "PerReplica", "values": [value] * num_replicas}


def _per_worker_steps(num_replicas: int) -> dict[str, Any]:
    """Three elements dealt out in turn, the last round filled up with empty parts."""
    rounds = [range(start, start + num_replicas) for start in range(0, 3, num_replicas)]
    parts = [[{"list": [_int(i)] if i < 3 else []} for i in numbers] for numbers in rounds]
    return {"list": [{"list": row} for row in parts]}
