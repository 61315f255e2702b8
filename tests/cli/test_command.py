import importlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from torchstrategy.base import __version__
from torchstrategy.cli import main

ROOT = Path(__file__).parents[2]


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"torchstrategy {__version__}\n"


def test_a_command_is_needed(capsys):
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert "{doctor,launch," in capsys.readouterr().err


def test_the_installed_command():
    (target,) = re.findall(r'^torchstrategy = "([\w.:]+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    module, _, name = target.partition(":")
    assert getattr(importlib.import_module(module), name) is main


@pytest.mark.parametrize("command", ["doctor", "launch", "server", "keys"])
def test_the_reference_lists_all_options(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    options = {
        option
        for option in re.findall(r"--[a-z-]+\b", capsys.readouterr().out.partition("examples:")[0])
        if option != "--help"
    }
    page = (ROOT / "docs/api/command_line.md").read_text(encoding="utf-8")
    section = page.partition(f"## torchstrategy {command}")[2].partition("\n## ")[0]
    assert options - set(re.findall(r"`(--[a-z-]+)", section)) == set()


@pytest.mark.end_to_end
@pytest.mark.parametrize("command", [[], ["doctor"], ["launch"], ["verify"], ["server"], ["keys"]])
def test_help_is_there_before_torch_would_be_and_has_examples(command):
    done = subprocess.run(
        [sys.executable, "-m", "torchstrategy", *command, "--help"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env={**os.environ, "PYTHONPROFILEIMPORTTIME": "1"},
    )
    imported = [line.rpartition("|")[2].strip() for line in done.stderr.splitlines()]
    assert "torchstrategy.cli" in imported
    assert "torch" not in imported
    assert not command or f"torchstrategy {command[0]}" in done.stdout.partition("examples:\n")[2]


def test_nproc_is_short_for_nproc_per_node(tmp_path, capsys):
    program = tmp_path / "program.py"
    program.write_text("")
    assert main(["launch", "--nproc", "2", "--dry-run", str(program)]) == 0
    assert capsys.readouterr().out.startswith("2 worker(s) on this host")


@pytest.mark.parametrize(
    ("arguments", "usage", "message"),
    [
        (["doctor", "train.py"], "torchstrategy doctor [-h]", "unrecognized arguments: train.py"),
        (["doctor", "--foo"], "torchstrategy doctor [-h]", "unrecognized arguments: --foo"),
        (["launch"], "torchstrategy launch [-h]", "arguments are required: program\n"),
        (["verify"], "torchstrategy verify [-h]", "arguments are required: program\n"),
    ],
)
def test_wrong_arguments_are_answered_by_the_command(arguments, usage, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    said = capsys.readouterr().err
    assert said.startswith(f"usage: {usage}")
    assert message in said


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("la", ["launch"]),
        ("launch --nproc", ["--nproc-per-node", "--nproc"]),
        ("doctor --jo", ["--job", "--join"]),
        ("launch tra", []),  # bash completes file names
        ("--ver", ["--version"]),
        ("completion z", ["zsh"]),
    ],
)
def test_bash_completes(line, expected, capsys):
    assert main(["completion", "bash"]) == 0
    words = ["torchstrategy", *line.split()]
    state = f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}"
    ask = f"{state}; _torchstrategy; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    script = f"{capsys.readouterr().out}complete -p torchstrategy >&2 || exit 1\n{ask}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == expected


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_the_same_words(shell, capsys):
    assert main(["completion", shell]) == 0
    text = capsys.readouterr().out
    assert "--per-replica-batch" in text
    assert ("bashcompinit" in text) == (shell == "zsh")
