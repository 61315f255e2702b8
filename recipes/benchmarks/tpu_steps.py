"""What `TPUStrategy` costs over data parallelism that is written by hand for torch_xla.

Each side is a process with so many devices, and all take turns block by block, so that a slow moment of the machine
meets all of them. A block ends when its last loss is there.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import checks
import hydra  # pip install hydra-core
import numpy as np
import profiles
from comparisons import bootstrap_median_ratio
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from peers import Peer

MODELS = ("conv_net", "transformer")
RECORDED = ("loop", "fit")  # where profile=true asks for it
TITLES = {"plain": "torch_xla by hand", "loop": "TPUStrategy, loop", "fit": "TPUStrategy, fit"}
Start = dict[str, dict[str, Any]]


@hydra.main(config_path="../../conf/benchmarks", config_name="tpu_steps", version_base="1.3")
def main(config: DictConfig) -> None:
    """Time everything, print a table and write all figures to results.json."""
    options = OmegaConf.to_container(config)
    check(options)
    run_path = Path(HydraConfig.get().runtime.output_dir).absolute()
    if config.quick:
        options |= {"starts": 1, "pairs": 3}
    results: dict[str, Any] = {"options": options, "load_before": os.getloadavg()[0], "starts": {}}
    print(
        f"Blocks of {options['steps']} steps in turns, {options['pairs']} of each side in each of {options['starts']} "
        f"starts, {options['batch_size']} examples for each replica; other programs' load before: "
        f"{results['load_before']:.1f} of {os.cpu_count()} cores"
    )
    columns = ("ms/step", "10 %", "90 %", "Python", "first", "programs", "over it")
    print(f"{'':44}{''.join(f'{column:>9}' for column in columns)}  95 % interval")
    for model in config.models:
        for devices in config.devices:
            case = {**options, "model": model, "devices": devices}
            title = f"{model}, {'all' if devices is None else devices} device{'s' * (devices != 1)}"
            trace_path = profiles.case_path(run_path, title) if options["profile"] else None
            starts = [time_sides(case, run_path, trace_path)]  # traces of the first one are enough
            starts += [time_sides(case, run_path) for _ in range(1, options["starts"])]
            results["starts"][title] = starts
            print_case(title, starts, options["steps"])
            if trace_path is not None:
                profiles.tell_of_traces(trace_path)
    print("Python: processor time of the thread that traces, ms/step. first: seconds of the first block, in which the")
    print("programs are compiled. over it: time over that of torch_xla by hand, median of the blocks of the same turn.")
    (run_path / "results.json").write_text(json.dumps(results, indent=1))
    print(f"Wrote {run_path / 'results.json'}")


def check(options: dict[str, Any]) -> None:
    """Refuse options that are wrong.

    Raises:
        ValueError: one is.
    """
    checks.choices(options, "models", MODELS)
    checks.integers(options, "starts", "pairs", "steps", "batch_size")
    checks.flags(options, "quick")
    checks.profile(options)
    if options["devices"] != [None]:
        checks.lists_of_integers(options, "devices")
    needed = sum(options["profile_steps"].values())
    if options["profile"] and options["steps"] < needed:
        raise ValueError(
            f"With profile=true a block is recorded: steps must be at least profile_steps.skip and record together, "
            f"{needed}. Received: {options['steps']}"
        )


def time_sides(options: dict[str, Any], folder: Path, trace_path: Path | None = None) -> Start:
    """Return what each side tells of its blocks: the first one apart, as all programs are compiled in it.

    Args:
        options: of the recipe, with one model and number of devices.
        folder: for what the sides print.
        trace_path: for traces of the strategy's sides, which are recorded after all blocks; ``None`` means none.
    """
    with ExitStack() as stack:
        peers = {
            side: stack.enter_context(
                Peer(sys.executable, "tpu_times.py", {**options, "threads": 1, "side": side}, folder / f"{side}.log")
            )
            for side in TITLES
        }
        found: Start = {side: {"version": peer.read(), "first": peer.ask()} for side, peer in peers.items()}
        blocks: dict[str, list[dict[str, float]]] = {side: [] for side in peers}
        for pair in range(options["pairs"]):
            for side in peers if pair % 2 else reversed(peers):
                blocks[side].append(peers[side].ask())
        if trace_path is not None:
            for side in RECORDED:
                peers[side].ask({"trace": str(trace_path)})
    for side, own in blocks.items():
        found[side] |= {name: [block[name] for block in own] for name in own[0]}
    return found


def print_case(title: str, starts: list[Start], num_steps: int) -> None:
    """Print the lines of one model with one number of devices."""
    for side, name in TITLES.items():
        milliseconds = [1000 * s / num_steps for start in starts for s in start[side]["seconds"]]
        python = np.median([1000 * s / num_steps for start in starts for s in start[side]["python_seconds"]])
        first = np.median([start[side]["first"]["seconds"] for start in starts])
        programs = {start[side]["first"]["compilations"] + sum(start[side]["compilations"]) for start in starts}
        cells = [f"{value:9.2f}" for value in (*np.percentile(milliseconds, (50, 10, 90)), python, first)]
        comparison = ""
        if side != "plain":
            ratio = bootstrap_median_ratio(*(_all_seconds(starts, each) for each in (side, "plain")))
            comparison = f"{ratio['median']:9.2f}  {ratio['low']:.2f} to {ratio['high']:.2f}"
        print(f"{f'{title}: {name}':44}{''.join(cells)}{'/'.join(map(str, sorted(programs))):>9}{comparison}")
    losses = ", ".join(f"{name} {starts[0][side]['loss'][-1]:.4f}" for side, name in TITLES.items())
    print(f"{'':4}Loss at the end: {losses}; {starts[0]['plain']['version']}")


def _all_seconds(starts: list[Start], side: str) -> list[float]:
    return [seconds for start in starts for seconds in start[side]["seconds"]]


if __name__ == "__main__":
    main()
