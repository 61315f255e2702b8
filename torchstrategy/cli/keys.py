"""``torchstrategy keys``: a secret that lets the processes of one cluster connect."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from torchstrategy.ps.transport.secret import FILE_VARIABLE, VARIABLE, Secret, find_secret, make_secret

__all__ = ["add_arguments", "run"]

_HOW_TO_USE = f"""\
Give it to the coordinator, every worker and every ps of one cluster, and to nobody else: who has it can run code on
all of them. Either way will do:
  {VARIABLE}=<the secret>
  {FILE_VARIABLE}=<a file with it, that only the user can read>
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``torchstrategy keys``.

    Args:
        parser: gets them.
    """
    what = parser.add_mutually_exclusive_group()
    text = "write it to a new file, which only this user can read, instead of stdout"
    what.add_argument("--output", metavar="FILE", type=Path, help=text)
    text = "make none, but say where this shell's processes would take theirs from, and whether it is a good one"
    what.add_argument("--check", action="store_true", help=text)


def run(options: argparse.Namespace) -> int:
    """Make a secret, or look at the one there is.

    Args:
        options: what ``add_arguments`` declares.

    Returns:
        0, or 1 if the file can't be written.

    Raises:
        ValueError: with ``--check``, there is no secret for other hosts, or it is no good one.
    """
    if options.check:
        return _check(find_secret(is_loopback=False))
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


def _check(secret: Secret) -> int:
    # Hosts can be compared by it, and the secret is not in it: it is derived like the keys.
    sys.stdout.write(f"The secret is taken from {secret.source}; its fingerprint is {secret.fingerprint}.\n")
    return 0
