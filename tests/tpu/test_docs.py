"""What the documentation and the docstrings of TPUs show, on 4 virtual devices; each in a process of its own."""

import contextlib
import doctest
import importlib
import io
import os

import pytest
import torch

import torchstrategy as ts
from tests.test_docs import FENCE, ROOT, run_page
from tests.test_tutorials import check_outputs, run_notebook

PAGE = ROOT / "docs" / "tpu.md"
NOTEBOOK = ROOT / "docs" / "tutorials" / "tpu.ipynb"
MARK = "tests/tpu/test_docs.py"


def run_examples(module):
    result = doctest.testmod(importlib.import_module(module), extraglobs={"ts": ts, "torch": torch})
    if result.failed:
        raise AssertionError(f"{result.failed} of {result.attempted} examples failed")
    return result.attempted


def run_text(text, folder):
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()):
        run_page(text, str(PAGE))


def blocks_for_tpus():
    """Return the page's blocks that are left to this file, each on its own line."""
    text = PAGE.read_text(encoding="utf-8")
    found = [match for match in FENCE.finditer(text) if MARK in (match["skip"] or "")]
    lines = [""] * text.count("\n")
    for match in found:
        fenced = match.group().removeprefix(match["skip"]).split("\n")
        start = text[: match.start()].count("\n") + 1
        lines[start : start + len(fenced)] = fenced
    return len(found), "\n".join(lines) + "\n"


@pytest.mark.parametrize("module", ["torchstrategy.tpu.experimental", "torchstrategy.tpu.tpu_strategy"])
def test_examples(xla_process, module):
    assert xla_process(4, fresh=True).run(run_examples, module) > 0


def test_page(xla_process, tmp_path):
    number, text = blocks_for_tpus()
    assert number >= 3
    xla_process(4, fresh=True).run(run_text, text, str(tmp_path))


def test_notebook(xla_process, tmp_path):
    check_outputs(NOTEBOOK, xla_process(2, fresh=True).run(run_notebook, NOTEBOOK, {}, tmp_path))
