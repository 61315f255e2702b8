"""``Server``: one task of a cluster, which serves a coordinator that knows its address, or until nobody needs it."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

from torchstrategy.base.log import logger, show_info
from torchstrategy.cluster_resolver.cluster_spec import ClusterSpec
from torchstrategy.ps.links import grace_seconds
from torchstrategy.ps.server.definition import PROTOCOL, ServerDef, make_server_def
from torchstrategy.ps.server.worker_service import WorkerBench, WorkerService
from torchstrategy.ps.service import ParameterService
from torchstrategy.ps.shard import Shard
from torchstrategy.ps.transport.limits import Limits
from torchstrategy.ps.transport.listener import Listener

__all__ = ["Server", "serve_until_chief_ends"]

_POLL_S = 0.1
_SECONDS_BETWEEN_LINES = 30.0


def serve_until_chief_ends(cluster: Any, task_index: int, *, linger_seconds: float = 120.0) -> None:
    """Serve as a parameter server of tasks that share variables without a coordinator.

    Returns when the chief and all workers have said that they have finished. A chief that was killed has not said it,
    so its successor is waited for; a worker that was lost is waited for during the grace time
    (``TORCHSTRATEGY_PS_GRACE_S``), in which it may come back.

    Args:
        cluster: the cluster, as for ``ts.Server``.
        task_index: this task's index in the job ``ps``.
        linger_seconds: how long to wait, after the chief's end, for a worker that never came.

    Raises:
        OSError: the task's address is in use, or not one of this host.
        ValueError: the address can be reached from other hosts and no secret is configured; or the environment's grace
            time is no number.
    """
    grace_s = grace_seconds()
    spec = ClusterSpec(cluster)
    workers = [f"/job:worker/task:{index}" for index in spec.task_indices("worker")] if "worker" in spec.jobs else []
    server = Server(spec, "ps", task_index)
    try:
        service = server._service
        if not isinstance(service, ParameterService):
            raise TypeError("Task 'ps' must be a parameter server.")
        next_line = time.monotonic() + _SECONDS_BETWEEN_LINES
        while (missing := service.training.waits_for(workers, linger_seconds, grace_s)) != []:
            if missing and time.monotonic() > next_line:
                logger.info("The chief has finished. Waiting for %s", ", ".join(missing))
                next_line = time.monotonic() + _SECONDS_BETWEEN_LINES
            time.sleep(_POLL_S)
    finally:
        server.stop()


_SETTINGS: Mapping[str, type] = {
    "encrypt_tensors": bool,
    "num_tensor_threads": int,
    "checkpoint_dir": str,
    "save_checkpoints_secs": float,
}
_SAVE_S = 60.0
_KINDS = {bool: "a bool", int: "a positive integer", float: "a positive number", str: "a path"}
_WAKE_UP_S = 1.0


class Server:
    """A worker or parameter server of a cluster, for the coordinator of a ``ParameterServerStrategy``.

    The task ``ps`` holds variables and updates them; all others run functions. A server knows nothing of the user's
    program, and serves one coordinator after another: when a newer one comes, all that was the older one's is dropped.
    It listens at its address in the cluster, on threads of its own, until ``stop`` or the end of the process.

    Whoever knows the cluster's secret can run code in a worker; see SECURITY.md. Without a configured secret only
    addresses of this host are served.

    Args:
        server_or_cluster_def: the cluster: a ``ts.train.ClusterSpec``, or a dictionary that one can be made of. Or a
            ``ts.train.ServerDef``, which says all the rest, too.
        job_name: this server's job; needed if the cluster has several.
        task_index: its index there; needed if the job has several tasks.
        protocol: ``"zmq"``. Programs for tf say ``"grpc"``, which means the same here.
        config: settings: ``encrypt_tensors``, whether tensors are encrypted between hosts, by default true;
            ``num_tensor_threads``, how many requests for variables are worked on at once, by default 4;
            ``checkpoint_dir``, where each parameter server saves itself, in a folder of its own, so that a process
            that is started in its place goes on from there while the job waits; and ``save_checkpoints_secs``, how
            often, by default 60. It is also saved when it is stopped.
        start: whether to serve at once.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: job or index can't be found out, the address is malformed, a setting is unknown or has a wrong
            value, or the address can be reached from other hosts and no secret is configured.
        InternalError: the cluster has no such task.
        NotFoundError: there is no such protocol.
        ImportError: pyzmq or cloudpickle is not installed.
        OSError: the address is in use, or not one of this host, or the ``checkpoint_dir`` can't be written.
        DataLossError: there are checkpoints of this parameter server, but none is whole.

    Example:
        >>> server = ts.Server({"worker": ["localhost:0"]})
        >>> server.server_def.job_name, server.server_def.task_index, server.target.partition("://")[0]
        ('worker', 0, 'zmq')
        >>> server.stop()
        True
    """

    def __init__(
        self,
        server_or_cluster_def: Any,
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        config: Mapping[str, Any] | None = None,
        start: bool = True,  # noqa: FBT001, FBT002 - tf's signature
    ) -> None:
        self._server_def = make_server_def(server_or_cluster_def, job_name, task_index, protocol, config)
        settings = _checked_settings(self._server_def.default_session_config)
        limits = Limits.from_environment()
        self._service = self._make_service(limits)
        directory, every_s = settings.pop("checkpoint_dir", None), settings.pop("save_checkpoints_secs", _SAVE_S)
        self._listener = Listener(self._server_def.address, self._service, limits=limits, **settings)
        self._ended = threading.Event()
        self._shard = self._make_shard(directory, every_s)
        self._finalizer = weakref.finalize(self, _stop, self._listener, self._service, self._shard, self._ended)
        self._is_started = False
        if start:
            self.start()

    def start(self) -> None:
        """Begin to serve; nothing happens if it does.

        Raises:
            OSError: the address is in use, or not one of this host.
            RuntimeError: the server was stopped.
        """
        if not self._finalizer.alive:
            raise RuntimeError("The server was stopped. Make a new one.")
        if self._is_started:
            return
        show_info()
        self._listener.open()  # who does not get the address must not take the place of who has it
        try:
            if self._shard is not None:
                self._shard.start()
        except BaseException:
            self._listener.stop()
            raise
        self._listener.start()
        self._is_started = True
        logger.info("Started server with target: %s (%s)", self.target, self._name)

    def join(self) -> None:
        """Wait until another thread calls ``stop``, or a signal's handler raises an exception, as Ctrl-C does.

        Raises:
            FailedPreconditionError: another process has taken this server's place, and saved to its
                ``checkpoint_dir``.
        """
        # A thread that starts others may take the signal from this one, whose endless wait would not notice.
        while not self._ended.wait(_WAKE_UP_S):
            pass
        if self._shard is not None and self._shard.failure is not None:
            raise self._shard.failure

    def stop(self) -> bool:
        """Disconnect everyone and give the address free.

        Returns:
            Whether nothing of the server runs any more. A coordinator's function that does not end is left in a daemon
            thread, in which the interpreter may abort at its exit; ``os._exit`` avoids that.
        """
        return self._finalizer() is not False

    @property
    def target(self) -> str:
        """The protocol and the address that it listens at; a port 0 becomes the real one when it has started."""
        return f"{PROTOCOL}://{self._listener.address}"

    @property
    def server_def(self) -> ServerDef:
        """The cluster, and which of its tasks the server is."""
        return self._server_def

    @staticmethod
    def create_local_server(
        config: Mapping[str, Any] | None = None,
        start: bool = True,  # noqa: FBT001, FBT002 - tf's signature
    ) -> Server:
        """Return a server that is a cluster of its own, of job ``localhost``, at a free port of this host.

        Args:
            config: its settings.
            start: whether to serve at once.

        Example:
            >>> server = ts.Server.create_local_server()
            >>> server.target.startswith("zmq://localhost:")
            True
            >>> server.stop()
            True
        """
        return Server({"localhost": ["localhost:0"]}, protocol=PROTOCOL, config=config, start=start)

    def __repr__(self) -> str:
        return f"<ts.Server {self._name} at {self.target}>"

    @property
    def _name(self) -> str:
        return f"/job:{self._server_def.job_name}/task:{self._server_def.task_index}"

    def _make_service(self, limits: Limits) -> ParameterService | WorkerService:
        if self._server_def.job_name == "ps":
            return ParameterService()
        index = self._server_def.task_index
        return WorkerService(self._name, index, lambda: WorkerBench(index), limits)

    def _make_shard(self, directory: str | None, every_s: float) -> Shard | None:
        if directory is None or not isinstance(self._service, ParameterService):
            return None
        listener, ended = self._listener, self._ended

        def replaced() -> None:
            listener.stop()
            ended.set()

        return Shard(
            self._service,
            os.path.join(directory, f"ps-{self._server_def.task_index}"),
            task=self._name,
            incarnation=listener.incarnation,
            secret=listener.secret,
            every_s=every_s,
            replaced=replaced,
        )


def _stop(
    listener: Listener, service: ParameterService | WorkerService, shard: Shard | None, ended: threading.Event
) -> bool:
    listener.stop()
    has_ended = service.close() if isinstance(service, WorkerService) else True
    if shard is not None:
        shard.close()
    ended.set()
    return has_ended


def _checked_settings(config: Any) -> dict[str, Any]:
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        raise TypeError(f"config must be a dictionary of settings: {sorted(_SETTINGS)}. Received: {config!r}")
    for name, value in config.items():
        if name not in _SETTINGS:
            raise ValueError(f"The settings of a server are {sorted(_SETTINGS)}. Received: {name!r}")
        kind = _SETTINGS[name]
        is_right = type(value) is kind or (kind is float and type(value) is int) or (kind is str and _is_path(value))
        if not is_right or value == "" or (kind in (int, float) and not 0 < value < float("inf")):
            error = ValueError if is_right else TypeError
            raise error(f"The setting {name!r} must be {_KINDS[kind]}. Received: {value!r}")
    if "save_checkpoints_secs" in config and "checkpoint_dir" not in config:
        raise ValueError("The setting 'save_checkpoints_secs' is for servers that have a 'checkpoint_dir'.")
    return {name: os.fspath(value) if _SETTINGS[name] is str else value for name, value in config.items()}


def _is_path(value: Any) -> bool:
    return isinstance(value, os.PathLike)
