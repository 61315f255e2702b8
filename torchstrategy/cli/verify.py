"""``torchstrategy verify``: whether an unchanged program gives the numbers of one replica with several."""

from __future__ import annotations

import argparse
import signal
import sys

from torchstrategy.testing.verification.script import ScriptError, verify_script

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``torchstrategy verify``.

    Args:
        parser: gets them.
    """
    text = "with how many replicas it is run; default 2"
    parser.add_argument("--replicas", metavar="N", type=int, default=2, help=text)
    text = "how many optimizer steps are compared at most; default 100"
    parser.add_argument("--steps", metavar="K", type=int, default=100, help=text)
    text = "seconds that each run may take; default 600"
    parser.add_argument("--timeout", metavar="SECONDS", type=float, default=600.0, help=text)
    text = "the batch size is meant for each replica: a global batch that grows is no deviation"
    parser.add_argument("--per-replica-batch", action="store_true", help=text)
    parser.add_argument("--no-dropout", action="store_true", help="leave dropout out, so that numbers can be compared")
    text = "have data loaders deliver examples in order, so that each step has the same ones"
    parser.add_argument("--no-shuffle", action="store_true", help=text)
    parser.add_argument("program", help="a Python file")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the program's own")


def run(options: argparse.Namespace) -> int:
    """Run the program with one replica and with several, and print the report.

    Args:
        options: what ``add_arguments`` declares.

    Returns:
        0 if all numbers are those of one replica, 1 if not, 2 if that can't be said, 130 after Ctrl-C.
    """
    if options.steps < 1 or options.timeout <= 0:
        raise ValueError("--steps and --timeout must be positive.")
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # the program's processes end with this one
    try:
        report = verify_script(
            options.program,
            options.arguments,
            replicas=options.replicas,
            steps=options.steps,
            timeout_s=options.timeout,
            per_replica_batch=options.per_replica_batch,
            without=[*["dropout"] * options.no_dropout, *["shuffling"] * options.no_shuffle],
        )
    except ScriptError as error:
        sys.stderr.write(f"torchstrategy verify: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("torchstrategy verify: interrupted; the program's processes have ended.\n")
        return 130
    finally:
        signal.signal(signal.SIGTERM, before)
    sys.stdout.write(f"{report}\n")
    return 0 if report.ok else 2 if report.is_undecided else 1
