import importlib
import re
from pathlib import Path

import pytest

from torchstrategy.base.version import __version__
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
    options = {option for option in re.findall(r"--[a-z-]+\b", capsys.readouterr().out) if option != "--help"}
    page = (ROOT / "docs/api/command_line.md").read_text(encoding="utf-8")
    section = page.partition(f"## torchstrategy {command}")[2].partition("\n## ")[0]
    assert options - set(re.findall(r"`(--[a-z-]+)", section)) == set()
