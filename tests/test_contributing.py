"""CONTRIBUTING.md tells the truth: what it names is there, and what it promises of changes and docstrings holds."""

import importlib
import inspect
import re
from pathlib import Path

import pytest

from tests.test_public_api import MODULES

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
CHANGES = [row.split("|")[1:3] for row in TEXT.splitlines() if row.startswith("| a ")]


def paths_of(text):
    return [path for path in re.findall(r"`([\w./]+)`", text) if "/" in path or path.endswith((".md", ".toml"))]


@pytest.mark.parametrize("path", sorted(set(paths_of(TEXT))))
def test_what_is_named_is_there(path):
    path = path.replace("NAME.py", "")
    assert (ROOT / path).exists()


def test_public_names_are_put_where_the_package_lists_them():
    listed = [path for path in paths_of(TEXT) if "__init__" in path]
    assert listed
    for path in listed:
        assert path.endswith(".pyi") or not (ROOT / path).with_suffix(".pyi").exists()


@pytest.mark.parametrize("target", sorted(set(re.findall(r"`make ([\w-]+)`", TEXT))))
def test_make_has_the_target(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


@pytest.mark.parametrize(("what", "where"), CHANGES, ids=[what.strip() for what, _ in CHANGES])
def test_a_change_touches_three_files_at_most(what, where):
    assert "a" in what
    alternatives = re.split(r", or a ", where)  # one way or the other, each beside the first file
    first = paths_of(alternatives[0])[:1]
    for alternative in alternatives:
        assert 1 <= len(set(first + paths_of(alternative))) <= 3


def test_the_changes_that_one_makes_are_described():
    assert [what.strip() for what, _ in CHANGES] == [
        "a cluster resolver",
        "a metric",
        "a callback",
        "a compression of gradients",
        "a request to parameter servers",
    ]


@pytest.mark.parametrize("module", MODULES)
def test_public_functions_have_an_example(module):
    found = importlib.import_module(module)
    functions = {name: getattr(found, name) for name in found.__all__ if inspect.isfunction(getattr(found, name))}
    assert [name for name, function in functions.items() if ">>>" not in (function.__doc__ or "")] == []
