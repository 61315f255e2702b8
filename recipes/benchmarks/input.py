"""Examples a second of torch's data loading and of ours, their memory, and how much of loading computing hides.

Each of ours is timed in turns with what it is compared to, one epoch each, inside the same processes.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import checks
import hydra  # pip install hydra-core
import matplotlib as mpl
import numpy as np
import profiles
import torch
from comparisons import COLORS, bootstrap_median_ratio
from hydra.core.hydra_config import HydraConfig
from matplotlib.figure import Figure
from matplotlib.ticker import ScalarFormatter
from omegaconf import DictConfig, OmegaConf
from peers import launch
from torch import Tensor, distributed
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import torchstrategy as ts

NUM_REPLICAS = 2
GOAL = 0.97
MEAN, STD = 0.286, 0.353  # of Fashion-MNIST's pixels


class Case(NamedTuple):
    """Ways to read the same examples.

    Args:
        name: what is read.
        torch: what torch offers for it.
        ours: the same under strategies, by the name of the way.
    """

    name: str
    torch: Iterable[Any]
    ours: dict[str, Iterable[Any]]


class Images(Dataset[tuple[Tensor, int]]):
    """Images of bytes, which are prepared when they are read."""

    def __init__(self, images: np.ndarray, labels: np.ndarray) -> None:
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return prepare(self.images[index, None]), int(self.labels[index])


class ImageFiles(IterableDataset[tuple[Tensor, int]]):
    """The images of npz files, one file after the other: how files are read without this library."""

    def __init__(self, paths: list[str]) -> None:
        self.paths = paths

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return (example for path in self.paths for example in read_images(path))


@hydra.main(config_path="../../conf/benchmarks", config_name="input", version_base="1.3")
def main(config: DictConfig) -> None:
    """Measure everything in one run; print tables, write results.json and rates.png."""
    checks.integers(config, "num_examples", "pairs", "memory_epochs", "overlap_repeats")
    checks.integers(config, "num_files", least=NUM_REPLICAS)
    checks.integers(config, "overlap_workers", least=0)
    checks.lists_of_integers(config, "batch_sizes")
    checks.lists_of_integers(config, "num_workers", least=0)
    checks.profile(config)
    run_path = Path(HydraConfig.get().runtime.output_dir).absolute()
    write_files(run_path / "files", config)
    torch.set_num_threads(1)
    rates = time_cases(make_cases(local_strategies(), run_path, config), config)
    rates |= launch(NUM_REPLICAS, time_in_worker, (run_path, config))  # every epoch waits for both
    memory = measure_memory(config)
    overlap = measure_overlap(config)

    print(f"Examples a second, {config.pairs} epochs of {config.num_examples} examples each")
    print(f"{'':74}{'torch':>9}{'ours':>9}{'ratio':>8}   95 % interval")
    for name, result in rates.items():
        ratio, figures = result["ratio"], [config.num_examples / np.median(result[side]) for side in ("torch", "ours")]
        mark = "" if ratio["median"] >= GOAL else f"  below {GOAL}"
        interval = f"{ratio['low']:.3f} to {ratio['high']:.3f}"
        print(f"{name:74}{figures[0]:9.0f}{figures[1]:9.0f}{ratio['median']:8.3f}   {interval}{mark}")
    print(f"Peak resident memory in MB while an epoch is read{'first':>20}{'last':>9}{'growth':>9}")
    for name, peaks in memory.items():
        print(f"{name:56}" + "".join(f"{mb:9.1f}" for mb in (peaks[0], peaks[-1], peaks[-1] - peaks[0])))
    print(f"ms a step{'':43}{'loading':>9}{'computing':>11}{'both':>9}{'hidden':>9}")
    for name, ms in overlap.items():
        print(f"{name:52}{ms['load']:9.2f}{ms['compute']:11.2f}{ms['both']:9.2f}{100 * hidden_part(ms):8.0f} %")
    draw_ratios(rates).savefig(run_path / "rates.png")
    results = {"epoch_s": rates, "peak_mb": memory, "step_ms": overlap}
    (run_path / "results.json").write_text(json.dumps(results, indent=1))
    if config.profile:  # apart from what is timed
        trace(local_strategies(), run_path, config)
        launch(NUM_REPLICAS, trace_in_worker, (run_path, config))
    print(f"Wrote {run_path / 'results.json'} and rates.png")


# --- what is compared


def local_strategies() -> dict[str, ts.Strategy]:
    """Return the strategies of one process: for one replica, and for two that share it."""
    return {f"{n} replica{'s' * (n > 1)}": ts.MirroredStrategy([f"cpu:{i}" for i in range(n)]) for n in (1, 2)}


def join_strategy() -> dict[str, ts.Strategy]:
    """Return the strategy of one of the processes that read together."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=timedelta(minutes=5))
    return {f"{NUM_REPLICAS} processes": ts.MirroredStrategy(["cpu:0"])}


def time_in_worker(work: tuple[Path, DictConfig]) -> dict[str, Any]:
    """Time what two processes read together, in one of those that torch's launcher started."""
    rates = time_cases(make_cases(join_strategy(), *work), work[1], wait_for_others=distributed.barrier)
    distributed.destroy_process_group()
    return rates


def trace_in_worker(work: tuple[Path, DictConfig]) -> None:
    """Record what two processes read together, in one of them."""
    trace(join_strategy(), *work)
    distributed.destroy_process_group()


def trace(strategies: dict[str, ts.Strategy], run_path: Path, config: DictConfig) -> None:
    """Record some batches of each way of ours, of the first batch size."""
    config = OmegaConf.merge(config, {"batch_sizes": config.batch_sizes[:1]})
    for case in make_cases(strategies, run_path, config):
        for way, dataset in case.ours.items():
            if strategies[way].is_chief:
                print(f"\n{case.name}, {way}", flush=True)
            epochs = itertools.chain.from_iterable(itertools.repeat(dataset))
            batches = itertools.islice(epochs, sum(config.profile_steps.values()))
            with profiles.make(config, profiles.case_path(run_path, case.name, way), strategies[way]) as profile:
                read_all(profile.steps(batches))


def make_cases(strategies: dict[str, ts.Strategy], run_path: Path, config: DictConfig) -> Iterator[Case]:
    """Build every comparison for this process and, if there are several, for its part of the work."""
    for batch_size in config.batch_sizes:
        for num_workers in config.num_workers:
            yield loader_case(strategies, batch_size, num_workers, config)
        yield array_case(strategies, batch_size, config)
        yield pipeline_case(strategies, batch_size, config)
        yield file_case(strategies, batch_size, run_path / "files")


def loader_case(strategies: dict[str, ts.Strategy], batch_size: int, num_workers: int, config: DictConfig) -> Case:
    """A shuffled loader that prepares each image."""
    data = Images(*make_arrays(config))
    options = loader_options(num_workers)
    ours = distribute(strategies, DataLoader(data, batch_size * process()[1], shuffle=True, **options))
    name = f"DataLoader, {num_workers} workers, batch {batch_size}"
    return Case(name, torch_loader(data, batch_size, shuffle=True, **options), ours)


def array_case(strategies: dict[str, ts.Strategy], batch_size: int, config: DictConfig) -> Case:
    """NumPy arrays in their order."""
    arrays = make_arrays(config)
    datasets = {
        name: strategy.experimental_distribute_dataset(arrays, batch_size=batch_size * process()[1])
        for name, strategy in strategies.items()
    }
    return Case(f"NumPy arrays, batch {batch_size}", torch_loader(tensor_dataset(arrays), batch_size), datasets)


def pipeline_case(strategies: dict[str, ts.Strategy], batch_size: int, config: DictConfig) -> Case:
    """Tensors, shuffled and batched."""
    arrays = make_arrays(config)
    pipeline = ts.data.Dataset.from_tensor_slices(arrays).shuffle(config.num_examples)
    ours = distribute(strategies, pipeline.batch(batch_size * process()[1]))
    loader = torch_loader(tensor_dataset(arrays), batch_size, shuffle=True)
    return Case(f"ts.data.Dataset, shuffled, batch {batch_size}", loader, ours)


def file_case(strategies: dict[str, ts.Strategy], batch_size: int, folder: Path) -> Case:
    """Files of images, each process its own, read one after the other."""
    paths = sorted(map(str, folder.iterdir()))
    rank, size = process()
    pipeline = ts.data.Dataset.from_files(paths, read_images).batch(batch_size * size)
    loader = DataLoader(ImageFiles(paths[rank::size]), batch_size)
    return Case(f"npz files, batch {batch_size}", loader, distribute(strategies, pipeline))


def torch_loader(data: Dataset[Any], batch_size: int, *, shuffle: bool = False, **options: Any) -> Iterable[Any]:
    """Build what a program without this library reads, of which each of several processes has a part."""
    rank, size = process()
    if size == 1:
        return DataLoader(data, batch_size, shuffle, **options)
    return DataLoader(data, batch_size, sampler=DistributedSampler(data, size, rank, shuffle=shuffle), **options)


def loader_options(num_workers: int) -> dict[str, Any]:
    """Return the options that start workers by a fork, as in torchrun's processes; in spawned ones a spawn is usual."""
    return {"num_workers": num_workers, "multiprocessing_context": "fork" if num_workers else None}


def distribute(strategies: dict[str, ts.Strategy], dataset: Any) -> dict[str, Iterable[Any]]:
    """Distribute a dataset of global batches by each strategy."""
    return {name: strategy.experimental_distribute_dataset(dataset) for name, strategy in strategies.items()}


def process() -> tuple[int, int]:
    """Return this process's rank and the number of processes."""
    return (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)


def make_arrays(config: DictConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return random images ``[examples, 28, 28]`` of bytes and their labels."""
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (config.num_examples, 28, 28), dtype=np.uint8)
    return images, random.integers(0, 10, config.num_examples)


def tensor_dataset(arrays: tuple[np.ndarray, np.ndarray]) -> TensorDataset:
    """Return the arrays as torch's dataset of their slices."""
    return TensorDataset(*map(torch.from_numpy, arrays))


def write_files(folder: Path, config: DictConfig) -> None:
    """Write the images into files of equal numbers."""
    folder.mkdir()
    parts = zip(*(np.array_split(array, config.num_files) for array in make_arrays(config)), strict=True)
    for i, (images, labels) in enumerate(parts):
        np.savez(folder / f"{i:03}.npz", images=images, labels=labels)


def read_images(path: str) -> Iterator[tuple[Tensor, int]]:
    """Yield the prepared images of one file, with their labels."""
    with np.load(path) as arrays:
        images, labels = arrays["images"], arrays["labels"]
    for image, label in zip(images, labels, strict=True):
        yield prepare(image), int(label)


def prepare(image: np.ndarray) -> Tensor:
    """Do the least that images need for training: scale to [0, 1], normalise, shift by up to 2 pixels, flip some."""
    values = (torch.from_numpy(image) / 255 - MEAN) / STD
    values = torch.nn.functional.pad(values, (2, 2, 2, 2))
    top, left, flip = torch.randint(5, (3,)).tolist()
    values = values[..., top : top + image.shape[-2], left : left + image.shape[-1]]
    return values.flip(-1) if flip > 2 else values


# --- how it is measured


def time_cases(
    cases: Iterable[Case], config: DictConfig, wait_for_others: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Return the seconds of each epoch of torch's way and of each of ours, and the ratio of their examples a second."""
    results = {}
    for case in cases:
        for way, dataset in case.ours.items():
            times: dict[str, Any] = {"torch": [], "ours": []}
            for pair in range(-1, config.pairs):  # pair -1 is the warm-up
                sides = [("torch", case.torch), ("ours", dataset)]
                for side, data in sides if pair % 2 else reversed(sides):
                    wait_for_others()
                    start = time.perf_counter()
                    read_all(data)
                    wait_for_others()
                    if pair >= 0:
                        times[side].append(time.perf_counter() - start)
            results[f"{case.name}, {way}"] = times | {"ratio": bootstrap_median_ratio(times["torch"], times["ours"])}
    return results


def read_all(data: Iterable[Any]) -> None:
    """Read one epoch and do nothing with it."""
    for _ in data:
        pass


def measure_memory(config: DictConfig) -> dict[str, list[float]]:
    """Return the peak resident memory in MB of each of several epochs, by what is read."""
    strategy = ts.MirroredStrategy(["cpu:0", "cpu:1"])
    batch_size = config.batch_sizes[0]
    arrays = make_arrays(config)
    pipeline = ts.data.Dataset.from_tensor_slices(arrays).shuffle(config.num_examples).batch(batch_size)
    sources = {
        f"DataLoader, {n} workers": DataLoader(Images(*arrays), batch_size, shuffle=True, **loader_options(n))
        for n in config.num_workers
    }
    peaks: dict[str, list[float]] = {}
    for name, data in (sources | {"ts.data.Dataset, shuffled": pipeline}).items():
        dataset = strategy.experimental_distribute_dataset(data)
        peaks[name] = [peak_memory_mb(lambda dataset=dataset: read_all(dataset)) for _ in range(config.memory_epochs)]
    return peaks


def peak_memory_mb(fn: Callable[[], object]) -> float:
    """Return the most resident memory of this process in MB while it calls a function; Linux only."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    fn()
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) / 1024


def measure_overlap(config: DictConfig) -> dict[str, dict[str, float]]:
    """Return the ms of a step that only loads, of one that only computes about as long, and of one that does both."""
    strategy = ts.MirroredStrategy(["cpu:0"])
    data = Images(*make_arrays(config))
    batch_size, num_workers = config.batch_sizes[0], config.overlap_workers
    loader = DataLoader(data, batch_size, **loader_options(num_workers), persistent_workers=num_workers > 0)
    pipeline = ts.data.Dataset.from_tensor_slices(make_arrays(config)).map(scale).batch(batch_size)
    sources = {
        f"torch, DataLoader, {num_workers} workers": loader,
        f"ours, DataLoader, {num_workers} workers": strategy.experimental_distribute_dataset(loader),
        "ours, ts.data.Dataset": strategy.experimental_distribute_dataset(pipeline),
        "ours, ts.data.Dataset, prefetch": strategy.experimental_distribute_dataset(pipeline.prefetch(2)),
    }
    num_steps = -(-config.num_examples // batch_size)
    results = {}
    for name, source in sources.items():
        load = median_s(lambda source=source: read_all(source), config) / num_steps
        matrix = torch.rand(200, 200)
        once = median_s(lambda matrix=matrix: matrix @ matrix, config)
        repeats = max(1, round(load / once))

        def compute(matrix: Tensor = matrix, repeats: int = repeats) -> None:
            for _ in range(repeats):
                matrix @ matrix

        def both(source: Iterable[Any] = source, compute: Callable[[], None] = compute) -> None:
            for _ in source:
                compute()

        seconds = {"load": load, "compute": median_s(compute, config), "both": median_s(both, config) / num_steps}
        results[name] = {key: 1e3 * value for key, value in seconds.items()}
    return results


def median_s(fn: Callable[[], object], config: DictConfig) -> float:
    """Return the median seconds of some calls after a first one."""
    fn()
    times = []
    for _ in range(config.overlap_repeats):
        start = time.perf_counter()
        fn()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def scale(image: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
    """Turn bytes into numbers in [0, 1]."""
    return image / 255, label


def hidden_part(ms: dict[str, float]) -> float:
    """Return how much of the shorter of loading and computing goes on behind the longer one; 1 is all of it."""
    return (ms["load"] + ms["compute"] - ms["both"]) / min(ms["load"], ms["compute"])


def draw_ratios(rates: dict[str, Any]) -> Figure:
    """Draw each ratio with its interval, and lines at 1 and at the goal."""
    style = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#9aa5b1"}
    with mpl.rc_context(style):
        figure = Figure(figsize=(9, 1.2 + 0.24 * len(rates)), dpi=150, layout="constrained")
        axes = figure.subplots()
        figure.suptitle("Examples a second, ours over torch's", x=0.015, ha="left", fontsize=13, fontweight="bold")
        for y, result in enumerate(rates.values()):
            ratio = result["ratio"]
            axes.plot([ratio["low"], ratio["high"]], [y, y], color=COLORS[0], linewidth=2)
            axes.plot(ratio["median"], y, "o", color=COLORS[1], markersize=5)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.axvline(1, color="#9aa5b1", linewidth=1)
        axes.axvline(GOAL, color="#9aa5b1", linewidth=1, linestyle="--")
        axes.set_yticks(range(len(rates)), list(rates))
        axes.invert_yaxis()
        axes.set_xlabel("median and 95 % interval of alternating pairs; dashed: the goal")
        axes.grid(axis="x", color="#e4e7eb", linewidth=0.8)
        axes.tick_params(length=0)
    return figure


if __name__ == "__main__":
    main()
