"""``torchstrategy server``: one worker or parameter server of a cluster, until it is told to end."""

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

__all__ = ["add_arguments", "run"]

_NO_CLUSTER = (
    "There is no cluster to be a server of. Set TF_CONFIG, or give the cluster: --ps=host1:2222 "
    "--worker=host2:2222,host3:2222 --job=worker --task=0"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``torchstrategy server``.

    Args:
        parser: gets them.
    """
    parser.add_argument("--job", metavar="NAME", help="ps or worker; by default that of TF_CONFIG")
    parser.add_argument("--task", type=int, metavar="INDEX", help="which task of the job; by default that of TF_CONFIG")
    text = "all jobs and their tasks' addresses; by default those of TF_CONFIG"
    parser.add_argument("--cluster", metavar="JSON", type=_jobs, help=text)
    for job, text in (("ps", "parameter servers"), ("worker", "workers")):
        text = f"addresses of the {text}, in place of --cluster"
        parser.add_argument(f"--{job}", metavar="HOST:PORT,...", type=_addresses, help=text)
    text = "send tensors to other hosts as they are, faster; who is on the way can read and change them"
    parser.add_argument("--no-encrypt-tensors", dest="encrypt_tensors", action="store_false", help=text)
    text = "a parameter server saves itself there, and goes on from there when it is started again; one for all tasks"
    parser.add_argument("--checkpoint-dir", metavar="DIR", help=text)
    text = "how often it does, in seconds; by default 60"
    parser.add_argument("--save-checkpoints-secs", type=float, metavar="S", help=text)


def run(options: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C.

    Args:
        options: what ``add_arguments`` declares.

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


def _jobs(text: str) -> dict[str, list[str]]:
    example = 'expected JSON such as {"ps": ["host1:2222"], "worker": ["host2:2222"]}'
    try:
        cluster = ClusterSpec(json.loads(text))
    except (ValueError, TypeError) as error:
        raise argparse.ArgumentTypeError(f"{example}: {error}") from None
    if not cluster:
        raise argparse.ArgumentTypeError(f"{example}. Received: {text}")
    return cluster.as_dict()  # type: ignore[return-value]


def _addresses(text: str) -> list[str]:
    return [address for part in text.split(",") if (address := part.strip())]
