"""What overlap and compression of gradients buy on a slow network, next to DDP, Fabric and Accelerate.

The network is made for the run: hosts in network namespaces of this machine, with links of limited rate and delay. All
ways to train take turns inside the same processes, one on each host. A model of the step time is fitted to what was
measured on some of the links, and compared with the others.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import checks
import hydra  # pip install hydra-core
import numpy as np
import profiles
from hydra.core.hydra_config import HydraConfig
from network_model import Costs, fit
from network_report import hosts_table, model_table, steps_table
from network_steps import WAYS
from omegaconf import DictConfig, OmegaConf
from peers import Peer
from slow_network import MOST_HOSTS, Link, SlowNetwork
from training_steps import ALONE, OURS, PACKAGES

FAST = Link(mbit=10_000, delay_ms=0)  # while models are made
MORE_HOSTS = [2, 4, 8, 16, 32]  # for which the model predicts
Figures = dict[str, list[float]]


@hydra.main(config_path="../../conf/benchmarks", config_name="network", version_base="1.3")
def main(config: DictConfig) -> None:
    """Time every way over every link; print the tables, and write them and all figures into the run's folder."""
    options = OmegaConf.to_container(config, resolve=True)
    links, ways = check(options)
    folder = Path(HydraConfig.get().runtime.output_dir).absolute()
    results: dict[str, Any] = {"options": options, "links": []}
    tables = [f"{options['hosts']} hosts of one replica each"]
    medians = {}
    print(tables[0])
    with started(options, folder) as (network, peers):
        first = [peer.read() for peer in peers]
        for peer in peers:
            peer.read()  # what `serve` begins with
        for way in ways:
            train_block(peers, way, 1)
        for link in links:
            network.change(link)
            times, sent = time_ways(network, peers, ways, options)
            medians[link] = {way: float(np.median(times[way])) for way in ways}
            results["links"].append({"link": asdict(link), "step_s": times, "sent_bytes": sent})
            tables.append(steps_table(link, times, sent))
            print(f"\n{tables[-1]}", flush=True)
            write(folder, results, tables)
        if options["profile"]:  # apart from what is timed
            network.change(links[0])
            for way in of_ours(ways):
                trace(peers, way, links[0], folder)
    if options["fitted_links"] <= len(links):
        results["compute_s"] = compute = {
            part: [seconds for one in first for seconds in one["compute"][part]] for part in first[0]["compute"]
        }
        alone = Costs(**{part: float(np.median(seconds)) for part, seconds in compute.items()})
        results["model"], model_tables = fit_and_predict(alone, first[0]["shapes"], medians, options)
        tables += model_tables
        print("\n" + "\n\n".join(model_tables))
        write(folder, results, tables)
    else:
        print(
            f"\nNo model of the step time: it is fitted to the first fitted_links={options['fitted_links']} links. "
            "There was 1."
        )
    print(f"\nWrote results.json and tables.md in {folder}")


def write(folder: Path, results: dict[str, Any], tables: Sequence[str]) -> None:
    """Write what has been measured so far."""
    (folder / "results.json").write_text(json.dumps(results, indent=1))
    (folder / "tables.md").write_text("\n\n".join(tables) + "\n")


def check(options: dict[str, Any]) -> tuple[list[Link], list[str]]:
    """Return the links and the ways to compare: those that are asked for and one replica alone, as far as installed.

    Raises:
        ValueError: an option is wrong.
    """
    checks.integers(options, "hosts", least=2, most=MOST_HOSTS)
    checks.integers(options, "threads", "batch_size", "rounds", "steps", "compute_steps")
    checks.integers(options, "fitted_links", least=2)
    checks.profile(options)
    links = make_links(options["links"])
    if 1 < len(links) < options["fitted_links"]:
        raise ValueError(
            f"fitted_links must be from 2 to the number of links, {len(links)}. Received: {options['fitted_links']}"
        )
    if options["ways"] is not None:
        checks.choices(options, "ways", WAYS)
    missing = {way for way, package in PACKAGES.items() if importlib.util.find_spec(package) is None}
    ways = [way for way in dict.fromkeys([ALONE, *(options["ways"] or WAYS)]) if way not in missing]
    if options["profile"] and not of_ours(ways):
        raise ValueError(f"profile=true records this library's ways: add one to ways, of {of_ours(WAYS)}.")
    return links, ways


def make_links(given: Any) -> list[Link]:
    """Return the links of the configuration.

    Raises:
        ValueError: they are not described as they should be, or one is there twice.
    """
    names = [field.name for field in fields(Link)]
    if not isinstance(given, list) or not given or any(not isinstance(link, dict) for link in given):
        raise ValueError(f"links must be a list such as [{{mbit: 200, delay_ms: 5}}]. Received: {given!r}")
    for link in given:
        if set(link) != set(names):
            raise ValueError(f"Each of links has {' and '.join(names)}, no more and no less. Received: {link}")
    links = [Link(**link) for link in given]
    if len(set(links)) < len(links):
        raise ValueError(f"links must differ from one another. Received: {', '.join(map(str, links))}")
    return links


def of_ours(ways: Iterable[str]) -> list[str]:
    """Return those of some ways that are this library's."""
    return [way for way in ways if way.startswith(OURS)]


@contextlib.contextmanager
def started(options: dict[str, Any], folder: Path) -> Iterator[tuple[SlowNetwork, list[Peer]]]:
    """Make the network, and start a process on each of its hosts; both end with the block."""
    work = {"model": options["model"], "optimizer": options["optimizer"], "channels_last": False}
    work |= {name: options[name] for name in ("batch_size", "threads", "compute_steps")}
    work |= {"num_replicas": options["hosts"], "profile_steps": options["profile_steps"]}
    with contextlib.ExitStack() as stack:
        network = stack.enter_context(SlowNetwork(options["hosts"], FAST))
        peers = []
        for host in range(options["hosts"]):
            log_path = folder / f"host_{host}.log"
            environ, prefix = network.environ(host), network.command(host)
            peers.append(stack.enter_context(Peer(sys.executable, "network_steps.py", work, log_path, environ, prefix)))
        yield network, peers


def time_ways(
    network: SlowNetwork, peers: Sequence[Peer], ways: Sequence[str], options: dict[str, Any]
) -> tuple[Figures, Figures]:
    """Return, by way, the seconds of a step and the bytes that a host sends in it, for each block."""
    times: Figures = {way: [] for way in ways}
    sent: Figures = {way: [] for way in ways}
    for number in range(options["rounds"]):
        for way in ways if number % 2 else reversed(ways):
            num_bytes = network.num_bytes
            times[way].append(train_block(peers, way, options["steps"]))
            num_steps = options["steps"] + 1  # one is not timed
            sent[way].append((network.num_bytes - num_bytes) / options["hosts"] / num_steps)
    return times, sent


def train_block(peers: Sequence[Peer], way: str, num_steps: int) -> float:
    """Train a block of steps on all hosts; return the seconds of a step on the slowest."""
    for peer in peers:
        peer.send({"way": way, "steps": num_steps})
    return max(peer.read()["seconds"] for peer in peers) / num_steps


def trace(peers: Sequence[Peer], way: str, link: Link, folder: Path) -> None:
    """Let all hosts record some steps of a way; print a table of their traces."""
    path = profiles.case_path(folder, way)
    for peer in peers:
        peer.send({"way": way, "trace": str(path)})
    for peer in peers:
        peer.read()
    print(f"\n{way}, {link}")
    profiles.tell_of_traces(path)


def fit_and_predict(
    alone: Costs, shapes: list[list[int]], medians: dict[Link, dict[str, float]], options: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Fit the model to the first links; return it, and tables of what it predicts for all of them."""
    num_hosts, num_fitted = options["hosts"], options["fitted_links"]
    links = list(medians)
    ways = [way for way in medians[links[0]] if way != ALONE]
    paces = {link: medians[link][ALONE] / alone.compute for link in links}
    traffic = {way: WAYS[way].traffic for way in ways}
    costs = fit(alone, traffic, shapes, num_hosts, {link: medians[link] for link in links[:num_fitted]}, paces)
    predicted = {
        link: {way: costs.step(way, traffic[way], shapes, num_hosts, link, paces[link]) for way in ways}
        for link in links
    }
    tables = [model_table(costs, medians, predicted, num_fitted)]
    for way in [way for way in (OURS, "ours, bf16") if way in ways]:
        more = {
            n: {link: costs.step(way, traffic[way], shapes, n, link, paces[link]) for link in links} for n in MORE_HOSTS
        }
        tables.append(hosts_table(way, more))
    return asdict(costs), tables


if __name__ == "__main__":
    main()
