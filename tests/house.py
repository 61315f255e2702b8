"""Counts how the library is cut: ``python -m tests.house`` prints it, and tests/test_house.py keeps it from growing."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "torchstrategy"
SMALL, LARGE = 60, 400
#: What every package has, or tf's names demand in several places.
ANYWHERE = {"__init__", "__main__", "experimental", "train"}


def count() -> dict[str, int | list[str]]:
    """Return the counts by what is counted, and the names of what a reader would stumble over."""
    files = sorted((ROOT / PACKAGE).rglob("*.py"))
    lines = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in files}
    names = Counter(file.stem for file in files if file.stem not in ANYWHERE)
    importers = _importers([*files, *(ROOT / PACKAGE).rglob("*.pyi")])  # stubs list what lazy packages import
    own = [file for file in files if file.stem != "__init__"]
    return {
        "files": len(files),
        "lines": sum(lines.values()),
        f"files of at most {SMALL} lines": sum(lines[file] <= SMALL for file in own),
        f"files of more than {LARGE} lines": [_name(file) for file in own if lines[file] > LARGE],
        "files that one other imports": sum(len(importers[_name(file)]) == 1 for file in own),
        "file names used more than once": sorted(name for name, uses in names.items() if uses > 1),
        "modules at the top level": sorted(f.stem for f in (ROOT / PACKAGE).glob("*.py") if not f.stem.startswith("_")),
    }


def _importers(files):
    modules = {_name(file) for file in files}
    found = defaultdict(set)
    for file in files:
        for node in _statements(ast.parse(file.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                names = [name if name in modules else node.module for name in names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                found[name].add(_name(file))
    return found


def _statements(tree):
    """Yield all statements; ``ast.walk`` goes through the expressions, too, which takes as long as parsing."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            waiting += getattr(node, part, ())


def _name(file):
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def main():
    for what, found in count().items():
        print(f"{what}: {found if isinstance(found, int) else len(found)}")
        if not isinstance(found, int):
            print("   ", ", ".join(found))


if __name__ == "__main__":
    main()
