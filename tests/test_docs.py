"""Every Python block in the README and the documentation runs, and what the pages point at exists.

The blocks of one page run in order and share their names, in an empty working folder. Lines with ``>>>`` are doctests.
A block after the comment ``<!-- not run: reason -->`` is only compiled.
"""

import ast
import contextlib
import doctest
import io
import re
from pathlib import Path

import pytest
import torch

import torchstrategy as ts

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(r"^(?P<skip><!-- not run: [^>]+ -->\n)?```(?P<language>\S*)\n(?P<code>.*?)^```$", re.M | re.S)
LINK = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)")
MAKE = re.compile(r"^(?:\$ )?make ([\w-]+)", re.MULTILINE)
RECIPE = re.compile(r"(?<!tests/)\brecipes/(?:\w+/)?\w+\.py\b")


def page_id(page):
    return page.relative_to(ROOT).as_posix()


def blocks(text):
    """Yield (line, code, whether it runs) for each Python block of a page."""
    for match in FENCE.finditer(text):
        if match["language"] in ("python", "py", "pycon"):
            yield text[: match.start("code")].count("\n") + 1, match["code"], match["skip"] is None


def run_page(text, name):
    """Run a page's Python blocks in order; the first failing one raises."""
    names = {"__name__": "__main__", "torch": torch, "ts": ts}
    for line, code, runs in blocks(text):
        if ">>> " in code:
            example = doctest.DocTestParser().get_doctest(code, names, name, name, line - 1)
            doctest.DebugRunner(optionflags=doctest.ELLIPSIS).run(example, clear_globs=False)
            names.update(example.globs)
        else:
            compiled = compile("\n" * (line - 1) + code, name, "exec")
            if runs:
                exec(compiled, names)


DEAR_PAGES = ["README.md", "docs/guide/canned_estimators.md", "docs/guide/parameter_server.md"]


@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=[pytest.mark.end_to_end] if page_id(p) in DEAR_PAGES else []) for p in PAGES],
    ids=page_id,
)
def test_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with contextlib.redirect_stdout(io.StringIO()):
        run_page(page.read_text(encoding="utf-8"), str(page))


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_page_points_at_what_exists(page):
    text = page.read_text(encoding="utf-8")
    targets = {page.parent / link for link in LINK.findall(text)} | {ROOT / recipe for recipe in RECIPE.findall(text)}
    assert [str(target) for target in sorted(targets) if not target.exists()] == []
    goals = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(MAKE.findall(text)) - goals == set()


def anchors(text):
    """Return the anchors of a page's headings, as the documentation and code hosts make them."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_page_points_at_headings_that_exist(page):
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)", page.read_text(encoding="utf-8")):
        target = page.parent / link if link else page
        assert anchor in anchors(target.read_text(encoding="utf-8")), f"{link}#{anchor}"


@pytest.mark.parametrize("devices", [None, ["cpu:0", "cpu:1"]])
def test_the_first_program_prints_what_the_readme_shows(devices, capsys):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    _, program, _ = next(blocks(text))
    assert program.count("ts.MirroredStrategy()") == 1
    exec(program.replace("ts.MirroredStrategy()", f"ts.MirroredStrategy({devices})"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert printed.startswith("epoch 0: loss ")
    shown = re.findall(r"^\$ .*\n((?:epoch .*\n)+)", text, re.MULTILINE)
    assert len(shown) == 2
    for lines in shown:
        assert [float(line.rpartition(" ")[2]) for line in lines.splitlines()] == pytest.approx(
            [float(line.rpartition(" ")[2]) for line in printed.splitlines()], abs=2e-6
        )


def test_the_picture_shows_the_figures_of_the_performance_page():
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    picture = (ROOT / "docs" / "picture.svg").read_text(encoding="utf-8")
    over_ddp = [row.split("|")[6].split()[0] for row in re.findall(r"^\| DDP, 2 processes .*", text, re.MULTILINE)[:4]]
    assert len(over_ddp) == 4
    for ratio in over_ddp:
        assert f">{1 / float(ratio):.2f}<" in picture


def test_pages_were_found():
    names = {page_id(page) for page in PAGES}
    assert {"README.md", "docs/index.md", "docs/guide/custom_loop.md"} <= names
    assert sum(len(list(blocks(page.read_text(encoding="utf-8")))) for page in PAGES) > 10


@pytest.mark.parametrize(
    "text",
    [
        "```python\nraise ValueError('wrong')\n```\n",
        "```python\nx = 1\n```\n\n```pycon\n>>> x\n2\n```\n",
        "<!-- not run: needs a GPU -->\n```python\nthis is no Python\n```\n",
    ],
)
def test_a_wrong_block_fails(text):
    with pytest.raises((ValueError, doctest.DocTestFailure, SyntaxError)):
        run_page(text, "page")


def test_a_block_that_is_not_run_is_compiled_only():
    run_page("<!-- not run: needs a GPU -->\n```python\nraise ValueError('not reached')\n```\n", "page")


def messages_of_the_library(quoted):
    """Return string literals, with ``…`` for each value put in, of the files that have all words of some quoted one."""
    words = [re.findall(r"\w+", message) for message in quoted]
    for path in (ROOT / "torchstrategy").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if not any(all(word in text for word in message) for message in words):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.JoinedStr):
                yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


@pytest.mark.end_to_end
def test_troubleshooting_quotes_real_messages():
    page = (ROOT / "docs/guide/troubleshooting.md").read_text(encoding="utf-8")
    quoted = [heading[1] for heading in re.findall(r"^### (`+) ?(.*?) ?\1$", page, re.M)]
    assert len(quoted) > 10
    messages = "\n".join(messages_of_the_library(quoted))
    assert [message for message in quoted if message not in messages] == []


def test_the_contract_names_tests_that_exist():
    """Each row of the tables of faults is held by a test."""
    page = (ROOT / "docs/guide/faults.md").read_text(encoding="utf-8").partition("\n## Many of them")[0]
    rows = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith(("| fault", "| ---"))]
    assert len(rows) > 20
    for row in rows:
        path, *names = row.rstrip(" |").rpartition("| `")[2].strip("`").split("::")
        source = (ROOT / path).read_text(encoding="utf-8")
        assert all(re.search(rf"^ *(def|class) {name}\b", source, re.MULTILINE) for name in names), row
