"""What several processes of one recipe agree on before it begins: when the job started, and that they know each other.

Importing it gives the configuration files ``${start_time:}``, from which the run directory takes its name.
"""

from __future__ import annotations

import functools
import os
from datetime import datetime

from omegaconf import OmegaConf
from torch.distributed import TCPStore


def world_size() -> int:
    """Return the number of processes that the launcher announced in ``WORLD_SIZE``."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_num_replicas(num_replicas: int) -> None:
    """Refuse to train independent copies in silence.

    Args:
        num_replicas: replicas in sync of the strategy that was chosen.

    Raises:
        ValueError: there are more processes than replicas in sync.
    """
    if num_replicas < world_size():
        raise ValueError(
            f"There are WORLD_SIZE={world_size()} processes, but the strategy keeps only {num_replicas} replica(s) in "
            "sync: each process would train a model of its own. Choose strategy=mirrored, or run one process."
        )


@functools.cache
def start_time() -> str:
    """Return the chief's time of start: the same text in all processes, so that they share one run directory.

    Raises:
        RuntimeError: there are several processes, but not torchrun's store to agree through.
    """
    now = datetime.now().strftime("%Y-%m-%d_%H-%M-%S_%f")
    if world_size() == 1:
        return now
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        raise RuntimeError(
            f"There are WORLD_SIZE={world_size()} processes, but torchrun did not start them, so they can't agree on "
            "a run directory. Use torchrun, or pass the same hydra.run.dir=FOLDER to each of them."
        )
    store = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    if os.environ["RANK"] == "0":
        store.set("recipes/start_time", now)
    return str(store.get("recipes/start_time").decode())  # waits for the chief


OmegaConf.register_new_resolver("start_time", start_time, replace=True)
