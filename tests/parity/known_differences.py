"""Measured cases in which this library differs from TF on purpose, and where ``docs/differences.md`` says why.

A test checks that each listed case really differs, so an entry that is no longer true fails.
"""

from __future__ import annotations

import re
from typing import Any

# Pattern over a case's id -> title of the entry in docs/differences.md
KNOWN_DIFFERENCES = {
    r"1\.tf_function_exc\..*": "A ts.function is not traced",
    r"2\.all_reduce_in_tf_function_in_run\.n1": "A ts.function is not traced",
    r"2\.reduce_noaxis\..*": "The axis of reduce has a default",
    r"2\.rid_type\..*": "A replica id is a Python int",
    r"2\.gather_str\..*": "There are no tensors of strings",
    r"2\.reduce_(plain_float_sum|list_floats|pr_pyfloat)\.n1": "Python numbers are not made tensors",
    r"2\.all_gather_py\..*": "Python numbers are not made tensors",
    r"2\.gather_dict\.n[234]": "gather works on structures",
    r"2\.all_reduce_None\.n\d": "A reduce op is never None",
    r"2\.merge_exc_catch\.n1": "One replica calls a merge function directly",
    r"2\.pr_bool": "A PerReplica has no truth value",
    r"3\.(public|ext)_attrs\..*": "strategy.extended is small and names of TF 1 are missing",
    r"3\.variable_created_in_other_scope\.default": "strategy.extended is small and names of TF 1 are missing",
    r"3\.deepcopy\..*": "A strategy can't be copied",
    r"3\.out_of_order\.(onedevice|central)": "Scopes are left once, the innermost one first",
    r"3\.scope_object_reuse_nested\.central": "Scopes are left once, the innermost one first",
    r"3\.exit_twice\.default": "Scopes are left once, the innermost one first",
    r"3\.(out_of_order|set_in_scope)\.default": "The default strategy's scope changes nothing",
    r"5\.from_function_b2d_len8\.n3": "No batch is dropped when data sets end",
    r"5\.from_function_notds\..*": "Any re-iterable of batches is a dataset",
    r"6\.avg_sw\[int32,sw=0\.5,.*": "Weighted integer losses are not truncated",
    r"7\.apply_outside\.n[234]": "An optimizer steps inside run",
    r"7\.var_outside_scope\.n1": "One replica may train what was made outside the scope",
    r"9\.(save|restore)_in_run\.n\d": "Checkpoints are saved and restored outside run",
}

# Cases of Keras' fit whose result depends on the number of replicas; here it is that of one replica.
ONE_REPLICA_TITLE = "fit trains like one replica"
TF_BUGS_TITLE = "Bugs of TF that are not copied"


def _tensor(*shape: int) -> dict[str, Any]:
    values: list[Any] = [] if shape[0] == 0 else [[] for _ in range(shape[0])]
    return {"kind": "Tensor", "dtype": "float32", "shape": list(shape), "value": values}


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


def _int(value: int) -> dict[str, Any]:
    return {"py": "int", "value": value}


def _on_all(num_replicas: int, value: Any) -> Any:
    return value if num_replicas == 1 else {"kind": "PerReplica", "values": [value] * num_replicas}


def _per_worker_steps(num_replicas: int) -> dict[str, Any]:
    """Three elements dealt out in turn, the last round filled up with empty parts."""
    rounds = [range(start, start + num_replicas) for start in range(0, 3, num_replicas)]
    parts = [[{"list": [_int(i)] if i < 3 else []} for i in numbers] for numbers in rounds]
    return {"list": [{"list": row} for row in parts]}
