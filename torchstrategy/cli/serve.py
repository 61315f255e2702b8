"""``torchstrategy server``: one worker or parameter server of a cluster, until it is told to end.

And ``torchstrategy keys``: the secret by which the processes of a cluster know each other.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import sys

from torchstrategy.base.log import logger, show_info
from torchstrategy.cluster_resolver.cluster_spec import ClusterSpec
from torchstrategy.cluster_resolver.tf_config import TFConfigClusterResolver
from torchstrategy.ps.server import Server
from torchstrategy.ps.transport.secret import FILE_VARIABLE, VARIABLE, Secret, find_secret, make_secret

__all__ = ["jobs", "make_keys", "run"]

_NO_CLUSTER = (
    "There is no cluster to be a server of. Set TF_CONFIG, or give the cluster: --ps=host1:2222 "
    "--worker=host2:2222,host3:2222 --job=worker --task=0"
)

_HOW_TO_USE = f"""\
Give it to the coordinator, every worker and every ps of one cluster, and to nobody else: who has it can run code on
all of them. Either way will do:
  {VARIABLE}=<the secret>
  {FILE_VARIABLE}=<a file with it, that only the user can read>
"""


def run(options: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C.

    Args:
        options: as the command line declares them.

    Returns:
        0 after a signal, 1 if the server can't be started.

    Raises:
        ValueError: there is no cluster, or the task is none of it that has a server.
    """
    cluster, job, task = _task(options)
    if job in ("chief", "evaluator"):
        raise ValueError(f"A server is a ps or a worker; start your program itself as {job} {task}.")
    show_info()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # raises in the main thread, as Ctrl-C does
    try:
        names = ("encrypt_tensors", "checkpoint_dir", "save_checkpoints_secs")
        config = {name: value for name in names if (value := getattr(options, name)) is not None}
        server = Server(cluster, job, task, config=config)
        with contextlib.suppress(KeyboardInterrupt):
            server.join()
        logger.info("The server was told to end.")
        if not server.stop():
            logging.shutdown()
            os._exit(0)  # the interpreter would abort in the thread of the function that still runs
    except KeyboardInterrupt:  # before it has started, or a second one
        return 0
    except (OSError, RuntimeError, ImportError) as error:
        sys.stderr.write(f"torchstrategy server: {error}\n")
        return 1
    return 0


def _task(options: argparse.Namespace) -> tuple[ClusterSpec, str | None, int | None]:
    """Return the cluster and the task; what of the task is not told stays open, for the server to find out."""
    jobs = {job: addresses for job in ("ps", "worker") if (addresses := getattr(options, job))}
    if options.cluster and jobs:
        raise ValueError("Give --cluster, or --ps and --worker, not both.")
    if options.cluster or jobs:
        return ClusterSpec(options.cluster or jobs), options.job, options.task
    resolver = TFConfigClusterResolver(task_type=options.job, task_id=options.task)
    cluster = resolver.cluster_spec()
    if not cluster:
        raise ValueError(_NO_CLUSTER)
    return cluster, resolver.task_type, resolver.task_id


def jobs(text: str) -> dict[str, list[str]]:
    """Read a cluster that is given as JSON; for the option ``--cluster``."""
    example = 'expected JSON such as {"ps": ["host1:2222"], "worker": ["host2:2222"]}'
    try:
        cluster = ClusterSpec(json.loads(text))
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{example}: {error}") from None
    if not cluster:
        raise argparse.ArgumentTypeError(f"{example}. Received: {text}")
    return cluster.as_dict()  # type: ignore[return-value]


def make_keys(options: argparse.Namespace) -> int:
    """Make a secret, or look at the one there is.

    Args:
        options: as the command line declares them.

    Returns:
        0, or 1 if the file can't be written.

    Raises:
        ValueError: with ``--check``, there is no secret for other hosts, or it is no good one.
    """
    if options.check:
        return _say_which(find_secret(is_loopback=False))
    secret = make_secret()
    if options.output is None:
        sys.stdout.write(f"{secret}\n")
        sys.stderr.write(_HOW_TO_USE)
        return 0
    try:
        handle = os.open(options.output, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w") as file:
            file.write(f"{secret}\n")
    except OSError as error:
        sys.stderr.write(f"torchstrategy keys: {options.output} can't be written: {error}\n")
        return 1
    sys.stderr.write(f"Wrote a new secret to {options.output}.\n{_HOW_TO_USE}")
    return 0


def _say_which(secret: Secret) -> int:
    # Hosts can be compared by it, and the secret is not in it: it is derived like the keys.
    sys.stdout.write(f"The secret is taken from {secret.source}; its fingerprint is {secret.fingerprint}.\n")
    return 0
