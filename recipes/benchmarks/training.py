"""Training steps of four models in every way there is here, and what strategies and collectives cost.

All ways take turns block by block in one run, so that a slow moment of the machine meets all of them: DDP, Fabric,
Accelerate and this library inside the same processes, the others in processes that wait meanwhile.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import logging
import math
import os
import sys
import time
import timeit
from collections.abc import Callable, Collection, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import checks
import hydra  # pip install hydra-core
import profiles
import torch
from collective_times import price_of_records, time_collectives
from hydra.core.hydra_config import HydraConfig
from limits import time_copy, time_there_and_back
from omegaconf import DictConfig, OmegaConf
from peers import Group, launch
from step_times import make_work
from tqdm import tqdm
from training_report import PARTS, TENSORFLOW, draw
from training_steps import ALONE, CONCURRENT, OURS, PACKAGES, PEERS, PLAIN, TURNS, ours

import torchstrategy as ts

CONF = Path(__file__).parents[2] / "conf" / "benchmarks"
SETTING = {"channels_last", "models", "optimizer", "environ"}  # what one of them has
Options = dict[str, Any]
Times = dict[str, list[float]]


@hydra.main(config_path="../../conf/benchmarks", config_name="training", version_base="1.3")
def main(config: DictConfig) -> None:
    """Time every part, print its tables, and write them to tables.md and all figures to results.json."""
    options = check(OmegaConf.to_container(config, resolve=True))
    logging.disable(logging.INFO)
    folder = Path(HydraConfig.get().runtime.output_dir)
    results = {"options": options, "versions": versions(options, folder), "load_before": os.getloadavg()[0]}
    tables = [headline(results)]
    print(tables[0])
    if config.profile:
        trace(options, folder)
    for part in options["parts"]:
        results[part] = TIMERS[part](options, folder)
        tables.append(PARTS[part](results))
        print(f"\n{tables[-1]}")
        # After each part, so that what was measured is there if a later one is interrupted.
        (folder / "results.json").write_text(json.dumps(results, indent=1))
        (folder / "tables.md").write_text("\n\n".join(tables) + "\n")
    draw(results).savefig(folder / "benchmark.png")
    print(f"\nWrote results.json, tables.md and benchmark.png in {folder}")


def check(options: Options) -> Options:
    """Return the options with the models' descriptions in place of their names.

    Raises:
        ValueError: one is wrong, or TensorFlow's side does not have the optimizer.
    """
    known = sorted(path.stem for path in (CONF / "model").glob("*.yaml"))
    checks.choices(options, "parts", TIMERS)
    checks.choices(options, "models", known)
    checks.choice(options, "scaling.model", known)
    checks.integers(options, "replicas", "threads", "batch_size", "starts", "pairs", "fewest_steps")
    checks.integers(options, "run.calls", "run.steps", "collectives.floats_of_a_size", "collectives.fewest")
    checks.integers(options, "collectives.most", "collectives.largest_message")
    checks.positive_numbers(options, "block_s")
    checks.lists_of_integers(options, "scaling.replicas", "collectives.sizes")
    checks.lists_of_integers(options, "collectives.processes", least=2)
    checks.profile(options)
    for name, setting in {"default": None, **options["settings"]}.items():
        if not isinstance(setting, dict) or set(setting) != SETTING:
            raise ValueError(
                f"settings must have `default`, which all parts use, and each of them {sorted(SETTING)}. Received: "
                f"{name}: {setting!r}"
            )
    if options["tensorflow"] and options["optimizer"]["_target_"] != "torch.optim.Adam":
        raise ValueError("With tensorflow=... the optimizer must be adam, because TensorFlow's side has no other one.")
    names = dict.fromkeys([*options["models"], options["scaling"]["model"]])
    described = {name: OmegaConf.to_container(OmegaConf.load(CONF / "model" / f"{name}.yaml")) for name in names}
    return {**options, "described": described}


def versions(options: Options, folder: Path) -> dict[str, str]:
    """Return the versions of the packages that are compared."""
    found = {}
    for package in ("torchstrategy", "torch", *PACKAGES.values()):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if options["tensorflow"]:  # which must start now rather than after minutes
        host = next(host for host in hosts(options, 1) if host.ways == [TENSORFLOW])
        with open_group(host, case_of(options, options["scaling"]["model"], 1), folder, "start") as group:
            found["tensorflow"] = group.read()[0]["version"]
    return found


def headline(results: dict[str, Any]) -> str:
    """Return what was run where, in a sentence or two."""
    options = results["options"]
    packages = ", ".join(f"{package} {version}" for package, version in results["versions"].items())
    return (
        f"{os.cpu_count()} cores, other programs' load before: {results['load_before']:.1f}; {packages}. "
        f"Replicas: {options['replicas']}, each with {options['batch_size']} examples, threads: {options['threads']}. "
        f"Starts of all processes: {options['starts']}; blocks of each way in each start, in turns: {options['pairs']}."
    )


class Host(NamedTuple):
    """Processes that train in some ways."""

    ways: list[str]
    num_processes: int
    threads: int  #: of each process
    python: str = sys.executable
    program: str = "step_times.py"


def hosts(options: Options, num_replicas: int) -> list[Host]:
    """Return the hosts of all ways that this machine has; each has a thread budget in proportion to its replicas."""
    peers = [way for way in PEERS if way not in PACKAGES or importlib.util.find_spec(PACKAGES[way])]
    threads = options["threads"]
    found = [Host([*peers, OURS], num_replicas, threads)]
    found += [Host([way], 1, num_replicas * threads) for way in (PLAIN, CONCURRENT, TURNS)]
    found.append(Host([ALONE], 1, threads))
    if options["tensorflow"]:
        tensorflow = options["tensorflow"], "tensorflow_mirrored.py"
        found.append(Host([TENSORFLOW], 1, num_replicas * threads, *tensorflow))
    return found


def case_of(options: Options, model: str, num_replicas: int, setting: str = "default") -> Options:
    """Return what a host's processes are told to do."""
    chosen = options["settings"][setting]
    return {
        "model": {**options["described"][model], **chosen["models"].get(model, {})},
        "optimizer": {**options["optimizer"], **chosen["optimizer"]},
        "channels_last": chosen["channels_last"],
        "environ": chosen["environ"],
        "num_replicas": num_replicas,
        "batch_size": options["batch_size"],
    }


def open_group(host: Host, case: Options, folder: Path, name: str) -> Group:
    """Start a host's processes."""
    log_path = folder / "logs" / f"{name}, {host.ways[-1]}.log"
    log_path.parent.mkdir(exist_ok=True)
    options = {**case, "threads": host.threads}
    return Group(host.python, host.program, options, log_path, host.num_processes, case["environ"])


def time_steps(options: Options, folder: Path) -> dict[str, dict[str, Times]]:
    """Return, by model and setting, the seconds of a step in each block of each way."""
    replicas, settings = options["replicas"], options["settings"]
    return {
        model: {setting: time_ways(options, folder, model, replicas, setting) for setting in settings}
        for model in options["models"]
    }


def time_scaling(options: Options, folder: Path) -> dict[str, Times]:
    """Return the same by the number of replicas, each with a batch as large as before."""
    model = options["scaling"]["model"]
    left_out = {*PACKAGES, "DDP, gradients as views", ALONE}
    return {str(n): time_ways(options, folder, model, n, left_out=left_out) for n in options["scaling"]["replicas"]}


def time_ways(
    options: Options,
    folder: Path,
    model: str,
    num_replicas: int,
    setting: str = "default",
    left_out: Collection[str] = (),
) -> Times:
    """Return the seconds of a step in each block of each way but those that are left out."""
    case = case_of(options, model, num_replicas, setting)
    times: Times = {}
    for start in each_start(options, f"{model}, {num_replicas} replicas, {setting}"):
        name = f"{model}, {num_replicas} replicas, {setting}, start {start}"
        with ExitStack() as stack:
            turns: dict[str, Group] = {}
            for host in hosts(options, num_replicas):
                if ways := [way for way in host.ways if way not in left_out]:
                    group = stack.enter_context(open_group(host, case, folder, name))
                    group.read()
                    turns |= dict.fromkeys(ways, group)
            for way, seconds in take_turns(turns, options, reverse=start % 2 == 1).items():
                times.setdefault(way, []).extend(seconds)
    return times


def each_start(options: Options, what: str) -> Iterable[int]:
    """Return the numbers of the starts, with a progress bar where there is a terminal."""
    return tqdm(range(options["starts"]), what, leave=False, disable=None, unit="start")


def take_turns(turns: dict[str, Group], options: Options, *, reverse: bool) -> Times:
    """Return the seconds of a step in each block.

    Args:
        turns: the processes of each way.
        options: of the run.
        reverse: build the ways in the opposite order. Where in memory one lies is worth some percent.
    """
    times: Times = {way: [] for way in turns}
    parameters = {way: ask(turns[way], way, 1)["parameters"] for way in (reversed(turns) if reverse else turns)}
    if len(set(parameters.values())) > 1:
        raise RuntimeError(f"The ways train models of different size: {parameters}")
    num_steps = max(options["fewest_steps"], math.ceil(options["block_s"] / ask(turns[PLAIN], PLAIN, 1)["seconds"]))
    for pair in range(options["pairs"]):
        for way in turns if pair % 2 else reversed(turns):
            times[way].append(ask(turns[way], way, num_steps)["seconds"] / num_steps)
    return times


def ask(group: Group, way: str, steps: int) -> dict[str, Any]:
    """Let all processes of a group train a block; return the seconds of the slowest and their memory together."""
    answers = group.ask({"way": way, "steps": steps})
    return {
        "seconds": max(answer["seconds"] for answer in answers),
        "peak": sum(answer["peak"] for answer in answers),
        "held": sum(answer["held"] for answer in answers),
        "parameters": answers[0]["parameters"],
    }


def time_starts(options: Options, folder: Path) -> dict[str, dict[str, list[dict[str, float]]]]:
    """Return, by model and way, what each start of processes that have nothing else to do took of time and memory."""
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for model in options["models"]:
        case = case_of(options, model, options["replicas"])
        found[model] = {}
        for start in each_start(options, f"{model}, first steps"):
            for host in hosts(options, options["replicas"]):
                for way in host.ways:
                    figures = time_start(host._replace(ways=[way]), case, folder, f"{model}, start {start}")
                    found[model].setdefault(way, []).append(figures)
    return found


def time_start(host: Host, case: Options, folder: Path, name: str) -> dict[str, float]:
    """Start a host; return seconds to its first step and its processes' bytes, at their peaks and after some steps."""
    (way,) = host.ways
    started = time.perf_counter()
    with open_group(host, case, folder, name) as group:
        group.read()
        built = ask(group, way, 1)["seconds"]
        seconds = time.perf_counter() - started
        later = ask(group, way, 5)
    return {"seconds": seconds, "built": built, "peak": later["peak"], "held": later["held"]}


def time_run(options: Options, folder: Path) -> dict[str, Any]:
    """Return the seconds that `run` of an empty function costs, and what the records before sums of gradients do."""
    del folder
    devices = [f"cpu:{i}" for i in range(options["replicas"])]
    strategies = {"the default strategy": ts.get_strategy(), "replicas in turns": ts.MirroredStrategy(devices)}
    strategies["concurrent replicas"] = ts.MirroredStrategy(devices, concurrent=True)
    costs = {name: cost_of_run(strategy, options["run"]["calls"]) for name, strategy in strategies.items()}
    how = {"steps": options["run"]["steps"], "threads": options["threads"]}
    case = how | case_of(options, options["scaling"]["model"], options["replicas"])
    return {"costs": costs, "records": launch(options["replicas"], price_of_records, case)}


def cost_of_run(strategy: ts.Strategy, num_calls: int) -> float:
    """Return the seconds that ``strategy.run`` of an empty function costs over calling it."""

    def empty() -> None:
        return None

    with_run = min(timeit.repeat(lambda: strategy.run(empty), number=num_calls))  # the least of five
    return (with_run - min(timeit.repeat(lambda: empty(), number=num_calls))) / num_calls


def time_all_collectives(options: Options, folder: Path) -> dict[str, Any]:
    """Return the seconds of all-reduces by number of processes, way and size, and of what they can't go below."""
    del folder
    numbers = options["collectives"]["processes"]
    found = {str(n): launch(n, time_collectives, options["collectives"]) for n in numbers}
    largest = max(options["collectives"]["sizes"])
    (there_and_back,) = time_there_and_back([4 * largest])
    return {"largest": largest, "copy_ms": time_copy(largest), "there_and_back_ms": there_and_back, "processes": found}


def trace(options: Options, folder: Path) -> None:
    """Record some steps of ours in processes, apart from all that is timed."""
    for model in options["models"]:
        case = {**case_of(options, model, options["replicas"]), "threads": options["threads"]}
        case |= {"profile_steps": options["profile_steps"], "folder": str(folder / model)}
        print(f"\n{model}, {OURS}, {options['replicas']} processes")
        launch(options["replicas"], trace_in_worker, case)


def trace_in_worker(case: Options) -> None:
    """Train under a profiler in one of some processes."""
    logging.disable(logging.INFO)
    torch.set_num_threads(case["threads"])
    strategy = ts.MirroredStrategy(["cpu:0"])
    step = ours(make_work(case), strategy).step
    profiles.record_calls(step, case["profile_steps"], Path(case["folder"]), strategy)


TIMERS: dict[str, Callable[[Options, Path], Any]] = {
    "steps": time_steps,
    "starts": time_starts,
    "scaling": time_scaling,
    "run": time_run,
    "collectives": time_all_collectives,
}

if __name__ == "__main__":
    main()
