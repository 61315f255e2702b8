"""Memory that central storage and mirrored variables take, on each compute device and on the host.

Bytes are what the kernel says after some steps of Adam: pages of a replica's own, and pages that replicas and processes
share, which are the host's.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import checks
import hydra  # pip install hydra-core
import memory
import profiles
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

import torchstrategy as ts

KINDS = {"mirrored": "MirroredStrategy", "central": "CentralStorageStrategy"}
PARTS = ("parameters", "state", "gradients")


@hydra.main(config_path="../../conf/benchmarks", config_name="central_storage", version_base="1.3")
def main(config: DictConfig) -> None:
    """Measure every case in processes of its own; print a table and write it to results.json."""
    options = OmegaConf.to_container(config)
    checks.integers(options, "width", "layers", "steps")
    checks.lists_of_integers(options, "replicas", "processes")
    checks.profile(options)
    run_path = Path(HydraConfig.get().runtime.output_dir).absolute()
    layouts = [(1, n) for n in config.replicas] + [(n, 1) for n in config.processes]
    cases = [(kind, *layout) for layout in layouts for kind in KINDS]
    results = [measure(*case, {**options, "profile": False}, run_path) for case in cases]
    floats = config.layers * (config.width**2 + config.width)
    print(f"MB after {config.steps} steps of Adam; the model has {floats:,} parameters, {floats * 4 / 1e6:.1f} MB")
    print(f"{'':24}{'':22}{'a compute device':^34}{'the host':^24}{'host, all':>10}")
    columns = (*PARTS, "parameters", "state")
    print(f"{'strategy':24}{'replicas':22}" + "".join(f"{name:>12}" for name in columns) + f"{'growth':>10}")
    for row in results:
        values = [row["device"][part] for part in PARTS] + [row["host"][part] for part in PARTS[:2]]
        numbers = "".join(f"{value / 1e6:12.1f}" for value in values)
        print(f"{KINDS[row['kind']]:24}{row['where']:22}{numbers}{row['growth'] / 1e6:10.1f}")
    if config.profile:  # apart from what is measured
        options["steps"] = sum(config.profile_steps.values())
        for case in cases:
            print(f"\n{', '.join(describe(*case))}", flush=True)
            measure(*case, options, run_path)
    path = run_path / "results.json"
    path.write_text(json.dumps(results, indent=1))
    print(f"File: {path}")


def describe(kind: str, num_processes: int, num_replicas: int) -> tuple[str, str]:
    """Return in words what a case is: the strategy, and where its replicas are."""
    where = f"{num_replicas} in one process" if num_processes == 1 else f"1 in each of {num_processes}"
    return KINDS[kind], where


def measure(
    kind: str, num_processes: int, num_replicas: int, options: dict[str, Any], run_path: Path
) -> dict[str, Any]:
    """Return one row of the table."""
    where = describe(kind, num_processes, num_replicas)
    devices = [f"{options['compute']}:{i}" for i in range(num_replicas)] if num_processes == 1 else None
    with ts.testing.ProcessPool(num_processes) as pool:
        ranks = pool.run(memory.measure, kind, devices, options, profiles.case_path(run_path, *where))
    replicas = [replica for rank in ranks for replica in rank["replicas"]]
    host = {part: replicas[0][part][1] for part in PARTS}
    if kind == "central":  # the host's optimizer is replica 0's
        host["state"] += replicas[0]["state"][0]
        replicas[0]["state"][0] = 0
    return {
        "kind": kind,
        "where": where[1],
        # The most that any replica holds.
        "device": {part: max(replica[part][0] for replica in replicas) for part in PARTS},
        "host": host,
        "growth": sum(rank["growth"] for rank in ranks),
    }


if __name__ == "__main__":
    main()
