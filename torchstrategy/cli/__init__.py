"""The command line: which command, and how errors of the user are shown."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from torchstrategy.base.version import __version__
from torchstrategy.cli import doctor, keys, launch, serve, verify

__all__ = ["main"]

_COMMANDS = (
    (doctor, "doctor", "say what a job would see here, and what is wrong with it"),
    (launch, "launch", "start a program in several processes"),
    (verify, "verify", "say whether a program gives the numbers of one replica with several, and why not"),
    (serve, "server", "be one worker or parameter server of a cluster"),
    (keys, "keys", "make a secret that lets the processes of one cluster connect"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the ``torchstrategy`` command.

    Args:
        arguments: what stands after the command's name; ``None`` means ``sys.argv``'s.

    Returns:
        The exit status.
    """
    parser = argparse.ArgumentParser(prog="torchstrategy", description="Distributed training with torchstrategy.")
    parser.add_argument("--version", action="version", version=f"torchstrategy {__version__}")
    commands = parser.add_subparsers(
        title="commands", required=True, metavar=f"{{{','.join(name for _, name, _ in _COMMANDS)}}}"
    )
    for module, name, text in _COMMANDS:
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except ValueError as error:
        sys.stderr.write(f"torchstrategy: {error}\n")
        return 2
