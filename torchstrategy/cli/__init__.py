"""The command line: the commands and their options. What a command does is imported when it is run."""

from __future__ import annotations

import argparse
import importlib
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torchstrategy.base import __version__

__all__ = ["main"]


class _Command(NamedTuple):
    name: str
    function: str  # gets the options and returns the exit status
    text: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    examples: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the ``torchstrategy`` command.

    Args:
        arguments: what stands after the command's name; ``None`` means ``sys.argv``'s.

    Returns:
        The exit status.
    """
    parser, commands = _parser()
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        commands[options.command].error(f"unrecognized arguments: {' '.join(unknown)}")
    try:
        return int(_found(options.function)(options))
    except ValueError as error:
        sys.stderr.write(f"torchstrategy: {error}\n")
        return 2


def _parser() -> tuple[argparse.ArgumentParser, dict[str, argparse.ArgumentParser]]:
    """Return the command's parser, and that of each command by name."""
    parser = argparse.ArgumentParser(prog="torchstrategy", description="Distributed training with torchstrategy.")
    parser.add_argument("--version", action="version", version=f"torchstrategy {__version__}")
    metavar = f"{{{','.join(command.name for command in _COMMANDS)}}}"
    subparsers = parser.add_subparsers(title="commands", required=True, metavar=metavar)
    for command in _COMMANDS:
        subparser = subparsers.add_parser(
            command.name,
            help=command.text,
            description=f"{command.text[0].upper()}{command.text[1:]}.",
            epilog=f"examples:\n{command.examples}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparser)
        subparser.set_defaults(command=command.name, function=command.function)
    return parser, subparsers.choices


def print_completion(options: argparse.Namespace) -> int:
    """Print what a shell reads to complete the commands and their options; else file names are completed."""
    parser, commands = _parser()
    words = {name: " ".join(_words_of(command)) for name, command in {"": parser, **commands}.items()}
    if options.shell == "fish":
        for name, text in words.items():
            condition = f"__fish_seen_subcommand_from {name}" if name else "__fish_use_subcommand"
            sys.stdout.write(f"complete -c torchstrategy -n '{condition}' -a '{text}'\n")
        return 0
    cases = "".join(f"    {name or '*'}) words='{text}';;\n" for name, text in reversed(words.items()))
    start = "autoload -U bashcompinit && bashcompinit\n" if options.shell == "zsh" else ""
    sys.stdout.write(_COMPLETION.format(start=start, cases=cases))
    return 0


def _words_of(parser: argparse.ArgumentParser) -> list[str]:
    """Return the options and what else a parser knows by name, without torchrun's other spellings."""
    return [
        name for action in parser._actions for name in action.option_strings or action.choices or () if "_" not in name
    ]


#: A program's own arguments come after its name, so files are offered everywhere but for the command itself.
_COMPLETION = """\
{start}_torchstrategy() {{
    local words
    case "$([ "$COMP_CWORD" -gt 1 ] && echo "${{COMP_WORDS[1]}}")" in
{cases}    esac
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _torchstrategy torchstrategy
"""


def _found(function: str) -> Callable[[Any], Any]:
    """Return a function, which is named by its module and name; the module is imported for that."""
    module, _, name = function.partition(":")
    found: Callable[[Any], Any] = getattr(importlib.import_module(f"torchstrategy.{module}"), name)
    return found


def _read_by(function: str) -> Callable[[str], Any]:
    """Return what reads the text of an option by a function that is imported when there is a text."""
    return lambda text: _found(function)(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise argparse.ArgumentTypeError(f"expected a number of seconds above 0. Received: {text}")
    return value


def _doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--quick", action="store_true", help="start no processes, so no collectives")
    text = "ask the jobs that run on this host where all their ranks are; their stacks are written to a file"
    kind.add_argument("--job", action="store_true", help=text)
    kind.add_argument("--join", action="store_true", help="a collective with all ranks of the job that runs this")
    parser.add_argument(
        "--timeout", type=_seconds, default=60.0, metavar="SECONDS", help="for each collective, default 60"
    )


def _launch(parser: argparse.ArgumentParser) -> None:
    def option(name: str, metavar: str, read: Callable[[str], Any], default: str | None, text: str) -> None:
        dest = name[2:].replace("-", "_")
        names = dict.fromkeys([name, f"--{dest}"])  # torchrun takes both
        if dest == "nproc_per_node":
            names["--nproc"] = None  # which would be the beginning of two
        parser.add_argument(*names, dest=dest, metavar=metavar, type=read, default=default, help=text)

    num_workers, num_hosts = _read_by("cli.launch:num_workers"), _read_by("cli.launch:num_hosts")
    text = "workers on this host: a number, gpu, cpu, or auto, the default: one for each GPU, else for each core"
    option("--nproc-per-node", "N", num_workers, "auto", text)
    option("--nnodes", "MIN[:MAX]", num_hosts, "1", "hosts, each of which runs this command; default 1")
    option("--rdzv-endpoint", "HOST:PORT", str, None, "where launchers meet, on one host (port 29400)")
    option("--rdzv-id", "NAME", str, "torchstrategy", "name of the job, the same on all hosts")
    text = "settings of torch's rendezvous, such as join_timeout=60"
    option("--rdzv-conf", "K=V,...", _settings, "", text)
    option("--local-addr", "HOST", str, None, "this host, as the others reach it; found out by default")
    option("--max-restarts", "R", _not_negative, "0", "how often failed workers are started again; default 0")
    parser.add_argument("--dry-run", action="store_true", help="print what each worker would get, and start nothing")
    parser.add_argument("--verbose", action="store_true", help="show torch's messages about its launcher")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("-m", "--module", action="store_true", help="the program is a module, as in python -m")
    kind.add_argument("--run-path", action="store_true", help="the program is a file, which is the default")
    _program(parser, "a Python file, or with -m a module")


def _program(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("program", help=text)
    rest = parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the program's own, after its name")
    rest.required = False  # a message about the program would name it, too


def _settings(text: str) -> dict[str, str]:
    pairs = [part.partition("=") for part in text.split(",") if part]
    if not all(name.strip() and value for name, _, value in pairs):
        raise argparse.ArgumentTypeError(f"expected NAME=VALUE,NAME=VALUE. Received: {text}")
    return {name.strip(): value.strip() for name, _, value in pairs}


def _not_negative(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"expected a number that is not negative. Received: {text}")
    return int(text)


def _verify(parser: argparse.ArgumentParser) -> None:
    text = "with how many replicas it is run; default 2"
    parser.add_argument("--replicas", metavar="N", type=int, default=2, help=text)
    text = "how many optimizer steps are compared at most; default 100"
    parser.add_argument("--steps", metavar="K", type=int, default=100, help=text)
    text = "seconds that each run may take; default 600"
    parser.add_argument("--timeout", metavar="SECONDS", type=_seconds, default=600.0, help=text)
    text = "the batch size is meant for each replica: a global batch that grows is no deviation"
    parser.add_argument("--per-replica-batch", action="store_true", help=text)
    parser.add_argument("--no-dropout", action="store_true", help="leave dropout out, so that numbers can be compared")
    text = "have data loaders deliver examples in order, so that each step has the same ones"
    parser.add_argument("--no-shuffle", action="store_true", help=text)
    text = "a Python file. It runs several times; files that it writes, but not its child processes, are put back"
    _program(parser, text)


def _server(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--job", metavar="NAME", help="ps or worker; by default that of TF_CONFIG")
    parser.add_argument("--task", type=int, metavar="INDEX", help="which task of the job; by default that of TF_CONFIG")
    text = "all jobs and their tasks' addresses; by default those of TF_CONFIG"
    parser.add_argument("--cluster", metavar="JSON", type=_read_by("cli.serve:jobs"), help=text)
    for job, text in (("ps", "parameter servers"), ("worker", "workers")):
        text = f"addresses of the {text}, in place of --cluster"
        parser.add_argument(f"--{job}", metavar="HOST:PORT,...", type=_addresses, help=text)
    text = "send tensors to other hosts as they are, faster; who is on the way can read and change them"
    parser.add_argument("--no-encrypt-tensors", dest="encrypt_tensors", action="store_false", help=text)
    text = "a parameter server saves itself there, and goes on from there when it is started again; one for all tasks"
    parser.add_argument("--checkpoint-dir", metavar="DIR", help=text)
    text = "how often it does, in seconds; by default 60"
    parser.add_argument("--save-checkpoints-secs", type=float, metavar="S", help=text)


def _addresses(text: str) -> list[str]:
    return [address for part in text.split(",") if (address := part.strip())]


def _keys(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    text = "write it to a new file, which only this user can read, instead of stdout"
    what.add_argument("--output", metavar="FILE", type=Path, help=text)
    text = "make none, but say where this shell's processes would take theirs from, and whether it is a good one"
    what.add_argument("--check", action="store_true", help=text)


def _completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=["bash", "zsh", "fish"], help="the shell that reads it")


_COMMANDS = (
    _Command(
        "doctor",
        "cli.doctor:run",
        "say what a job would see here, and what is wrong with it",
        _doctor,
        """\
  torchstrategy doctor
  torchrun --nproc-per-node=4 -m torchstrategy doctor --join
  torchstrategy doctor --job""",
    ),
    _Command(
        "launch",
        "cli.launch:run",
        "start a program in several processes",
        _launch,
        """\
  torchstrategy launch --nproc-per-node=4 train.py --epochs=3
  torchstrategy launch --nnodes=2 --rdzv-endpoint=host1:29400 train.py   # on each of two hosts
  torchstrategy launch --nproc-per-node=2 --dry-run -m package.train""",
    ),
    _Command(
        "verify",
        "testing.verification.script:run",
        "say whether a program gives the numbers of one replica with several, and why not",
        _verify,
        """\
  torchstrategy verify train.py --epochs=1
  torchstrategy verify --replicas=4 --no-dropout --no-shuffle train.py""",
    ),
    _Command(
        "server",
        "cli.serve:run",
        "be one worker or parameter server of a cluster",
        _server,
        """\
  torchstrategy server     # the task that TF_CONFIG says
  torchstrategy server --ps=host1:2222 --worker=host2:2222,host3:2222 --job=worker --task=0""",
    ),
    _Command(
        "keys",
        "cli.serve:make_keys",
        "make a secret that lets the processes of one cluster connect",
        _keys,
        """\
  export TORCHSTRATEGY_SECRET=$(torchstrategy keys)
  torchstrategy keys --output secret && export TORCHSTRATEGY_SECRET_FILE=$PWD/secret""",
    ),
    _Command(
        "completion",
        "cli:print_completion",
        "print what lets a shell complete the commands and their options",
        _completion,
        """\
  eval "$(torchstrategy completion bash)"         # in ~/.bashrc; zsh in ~/.zshrc
  torchstrategy completion fish | source          # in ~/.config/fish/config.fish""",
    ),
)
