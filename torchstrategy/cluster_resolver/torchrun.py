"""The environment variables that ``torchrun`` sets, read once and checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torchstrategy.log import warn_once

__all__ = ["TorchrunEnvironment", "is_one_of_several", "warn_of_independent_copies"]

_REQUIRED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class TorchrunEnvironment:
    """What ``torchrun`` says about this process.

    Args:
        rank: id of the process in the job.
        world_size: processes in the job.
        local_rank: id of the process on its host.
        local_world_size: processes on this host.
        master_addr: host of the job's store.
        master_port: port of the job's store.
        agent_store: the launcher itself hosts the store.
        restart_count: how often the launcher has restarted the job.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    agent_store: bool = False
    restart_count: int = 0

    @classmethod
    def detect(cls, environ: Mapping[str, str]) -> TorchrunEnvironment | None:
        """Return the environment of a job of several processes, or ``None`` outside one.

        Args:
            environ: the environment variables.

        Returns:
            The parsed variables; ``None`` if ``WORLD_SIZE`` is unset or 1.

        Raises:
            RuntimeError: ``WORLD_SIZE`` is above 1, but another variable is missing or not an integer.

        Example:
            >>> from torchstrategy.cluster_resolver.torchrun import TorchrunEnvironment
            >>> TorchrunEnvironment.detect({}) is None
            True
        """
        if not is_one_of_several(environ):
            return None
        missing = [name for name in _REQUIRED if not environ.get(name)]
        if missing:
            raise RuntimeError(
                f"WORLD_SIZE={environ['WORLD_SIZE']} says that this process is one of several, but "
                f"{', '.join(missing)} not set. Start the program with `torchrun --nproc-per-node=N program.py`, or "
                "unset WORLD_SIZE to run it alone."
            )
        numbers = {}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
            try:
                numbers[name] = int(environ[name])
            except ValueError:
                raise RuntimeError(f"{name} must be an integer. Received: {environ[name]!r}") from None
        return cls(
            rank=numbers["RANK"],
            world_size=numbers["WORLD_SIZE"],
            local_rank=numbers["LOCAL_RANK"],
            local_world_size=numbers["LOCAL_WORLD_SIZE"],
            master_addr=environ["MASTER_ADDR"],
            master_port=numbers["MASTER_PORT"],
            agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            restart_count=int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
        )


def is_one_of_several(environ: Mapping[str, str]) -> bool:
    """Say whether ``WORLD_SIZE`` tells this process that there are others.

    Args:
        environ: the environment variables.
    """
    return environ.get("WORLD_SIZE", "1").strip() not in ("", "1")


def warn_of_independent_copies(strategy_name: str) -> None:
    """Warn, once, that a strategy without other processes runs in one of several.

    Args:
        strategy_name: the strategy's class.
    """
    warn_once(
        f"{strategy_name} trains alone, but WORLD_SIZE says that this process is one of several: each of them trains "
        "an independent copy. Use ts.MirroredStrategy() to train one model together."
    )
