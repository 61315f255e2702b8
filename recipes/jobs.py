"""How a recipe's processes are started, and what they agree on before a strategy joins them.

``@launched`` lets a recipe start its own processes (``launcher.nproc=2``); they get the resolved configuration of the
one that started them, and its run directory. Importing this gives the configuration files ``${start_time:}``, from
which the run directory takes its name.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import checks
import torch
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import configure_log
from omegaconf import DictConfig, OmegaConf
from torch.distributed import DistError, TCPStore
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, get_error_handler
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from tqdm import tqdm

import torchstrategy as ts
from torchstrategy.cli.signals import SignalReceived, until_signal

LOCALHOST = "127.0.0.1"

# Where a launcher of hydra, such as submitit's, starts a job, the recipes' modules must be found too.
if (_folder := str(Path(__file__).parent)) not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_folder, os.environ.get("PYTHONPATH")]))


def launched(function: Callable[[DictConfig], Any]) -> Callable[[DictConfig], Any]:
    """Let ``config.launcher`` decide how many processes of this host call a recipe's function.

    With ``nproc=1`` and no restarts it is called here. Otherwise torch's elastic launcher starts processes that import
    the recipe and call the function with the same resolved configuration; what the first one returns is returned. The
    first writes to the terminal itself; of the others each line appears there with the rank before it.

    Args:
        function: the recipe's, at the top level of its file, below ``@hydra.main(...)``.
    """

    @functools.wraps(function)
    def launch(config: DictConfig) -> Any:
        nproc, max_restarts = config.launcher.nproc, config.launcher.max_restarts
        checks.integers(config, "launcher.nproc")
        checks.integers(config, "launcher.max_restarts", least=0)
        if nproc == 1 and max_restarts == 0:
            return function(config)
        job = ts.cluster_resolver.find_job()
        if job is not None and job.size > 1:
            raise ValueError(
                f"launcher.nproc={nproc} and launcher.max_restarts={max_restarts} would start processes in each of "
                f"{job.size}, because {job.source} has started several already. Leave out launcher.nproc and "
                "launcher.max_restarts here, or start one process."
            )
        config = config.copy()
        OmegaConf.resolve(config)
        recipe = Path(inspect.getfile(function)).stem
        hydra_config = OmegaConf.to_container(HydraConfig.instance().cfg)  # plain: plugins' classes can't be pickled
        return _launch(nproc, max_restarts, (recipe, function.__name__, nproc, config, hydra_config))

    return launch


def world_size() -> int:
    """Return the number of processes that torchrun, TF_CONFIG or SLURM announced."""
    job = ts.cluster_resolver.find_job()
    return 1 if job is None else job.size


def attempt() -> int:
    """Return how often the launcher has restarted the job."""
    job = ts.cluster_resolver.find_job()
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) if job is None else job.attempt


def check_strategy(strategy: ts.Strategy) -> None:
    """Refuse to train independent copies in silence.

    Args:
        strategy: the one that was chosen.

    Raises:
        ValueError: it joins fewer processes than there are, or this process is not one of those that train.
    """
    job = ts.cluster_resolver.find_job()
    if job is not None and job.task_type == "evaluator":
        raise ValueError(
            f"{job.source} says that this process is the evaluator, but the recipe trains: it would train a model of "
            "its own. Start the recipe on the chief and the workers only."
        )
    joined = 1 if strategy.workers is None else strategy.workers.size
    if joined < world_size():
        raise ValueError(
            f"There are {world_size()} processes, but {type(strategy).__name__} joins only {joined}: each process "
            "would train a model of its own. Choose strategy=multi_worker_mirrored (under torchrun on one host also "
            "strategy=mirrored), or run one process."
        )


@functools.cache
def start_time() -> str:
    """Return the chief's time of start: the same text in all processes, so that they share one run directory.

    Raises:
        RuntimeError: there are several processes, and the chief can't be reached.
    """
    now = datetime.now().strftime("%Y-%m-%d_%H-%M-%S_%f")
    job = ts.cluster_resolver.find_job()
    if job is None or job.size == 1:
        return now
    try:
        store = _job_store(job.address, job.port, job.rank == 0 and not job.hosted)
        key = "recipes/start_time"
        # A launcher's store outlives a restart: the first time of start stays.
        agreed = store.compare_set(key, "", now) if job.rank == 0 else store.get(key)  # the latter waits for the chief
    except DistError as error:
        reason = str(error).partition("\nException raised from")[0]
        raise RuntimeError(
            f"Rank {job.rank} of {job.size} can't agree with the chief at {job.address}:{job.port} on a run directory: "
            f"{reason}. Do all processes run, with the same cluster? Is the chief's port free? Passing the same "
            "hydra.run.dir=FOLDER to each of them makes this step unnecessary."
        ) from None
    return str(agreed.decode())


@functools.cache
def _job_store(address: str, port: int, is_master: bool) -> TCPStore:  # noqa: FBT001 - a key of the cache
    """Connect to the store at which the strategy meets as well; kept, because the chief's process may serve it."""
    return TCPStore(address, port, is_master=is_master, wait_for_workers=False, multi_tenant=True)


OmegaConf.register_new_resolver("start_time", start_time, use_cache=True, replace=True)


def _launch(nproc: int, max_restarts: int, task: tuple[Any, ...]) -> Any:
    """Start processes that call ``_work``, and wait for them."""
    log_path = Path(HydraConfig.get().runtime.output_dir) / "workers"
    launch = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id="job",
        rdzv_backend="c10d",
        rdzv_endpoint=f"{LOCALHOST}:0",
        local_addr=LOCALHOST,
        max_restarts=max_restarts,
        logs_specs=DefaultLogsSpecs(str(log_path), tee=dict.fromkeys(range(1, nproc), Std.ALL)),
        log_line_prefix_template="[rank ${rank}] ",
    )
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").addFilter(_one_line)
    try:
        return until_signal(lambda: elastic_launch(launch, _work)(*task)[0])
    except ChildFailedError as error:
        raise RuntimeError(_describe(error, nproc, max_restarts, log_path)) from None
    except SignalReceived as error:
        raise SystemExit(128 + error.number) from None


def _work(recipe: str, name: str, nproc: int, config: DictConfig, hydra_config: dict[str, Any]) -> Any:
    """Call a recipe's function in one of the processes that were started for it."""
    schema = OmegaConf.create({"hydra": HydraConf})
    OmegaConf.set_struct(schema.hydra, value=False)  # plugins may have added to it
    HydraConfig.instance().set_config(OmegaConf.merge(schema, hydra_config, config))
    configure_log(HydraConfig.get().job_logging, HydraConfig.get().verbose)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // nproc))
    tqdm.set_lock(threading.RLock())  # its own one is shared between processes, and stays when one is killed
    function = inspect.unwrap(getattr(importlib.import_module(recipe), name))
    try:
        return function(config)
    except Exception as error:
        # Before the other ranks hear of it and fail in turn: the first record is the cause.
        get_error_handler().record_exception(error)
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(1) from error


def _one_line(record: logging.LogRecord) -> bool:
    """Let torch's launcher say that a process failed, without where in its own code it noticed."""
    record.exc_info = None
    return True


def _describe(error: ChildFailedError, nproc: int, max_restarts: int, log_path: Path) -> str:
    """Say which process failed first, why, and where the processes' output is."""
    rank, failure = error.get_first_failure()
    attempt_path = max(log_path.glob("*/attempt_*"), key=_modified)
    records = sorted(attempt_path.glob("*/error.json"), key=_modified)
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        cause = f"it was killed by {name}" + " (by the kernel if memory ran out: see dmesg)" * (name == "SIGKILL")
    elif records:
        rank = int(records[0].parent.name)
        cause = json.loads(records[0].read_text())["message"]["message"]
    else:
        cause = f"it ended with exit status {failure.exitcode}"
    restarts = f" after {max_restarts} restart{'s' * (max_restarts > 1)}" if max_restarts else ""
    return f"Rank {rank} of {nproc} failed{restarts}: {cause}\nThe output of the ranks is in {attempt_path}"


def _modified(path: Path) -> int:
    return path.stat().st_mtime_ns
