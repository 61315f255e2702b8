"""A parameter server that ends when nobody needs it any more."""

from __future__ import annotations

import time
from typing import Any

from torchstrategy.base.log import logger
from torchstrategy.cluster_resolver.cluster_spec import ClusterSpec
from torchstrategy.ps.server.server import Server
from torchstrategy.ps.service import ParameterService

__all__ = ["serve_until_chief_ends"]

_POLL_S = 0.1
_SECONDS_BETWEEN_LINES = 30.0


def serve_until_chief_ends(cluster: Any, task_index: int, *, linger_seconds: float = 120.0) -> None:
    """Serve as a parameter server of tasks that share variables without a coordinator.

    Returns when the chief has said that it has finished, and all workers have disconnected. A chief that was killed has
    not said it, so its successor is waited for.

    Args:
        cluster: the cluster, as for ``ts.Server``.
        task_index: this task's index in the job ``ps``.
        linger_seconds: how long to wait, after the chief's end, for a worker that never came.

    Raises:
        OSError: the task's address is in use, or not one of this host.
        ValueError: the address can be reached from other hosts and no secret is configured.
    """
    spec = ClusterSpec(cluster)
    workers = [f"/job:worker/task:{index}" for index in spec.task_indices("worker")] if "worker" in spec.jobs else []
    server = Server(spec, "ps", task_index)
    try:
        service = server._service
        if not isinstance(service, ParameterService):
            raise TypeError("Task 'ps' must be a parameter server.")
        next_line = time.monotonic() + _SECONDS_BETWEEN_LINES
        while (missing := service.training.waits_for(workers, linger_seconds)) != []:
            if missing and time.monotonic() > next_line:
                logger.info("The chief has finished. Waiting for %s", ", ".join(missing))
                next_line = time.monotonic() + _SECONDS_BETWEEN_LINES
            time.sleep(_POLL_S)
    finally:
        server.stop()
