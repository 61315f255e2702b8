"""The library is not cut finer than it is, as ``python -m tests.house`` counts it; lower a limit with its number."""

import re

from tests import house


def test_counts():
    found = house.count()
    assert found["file names used more than once"] == []
    assert len(found["modules at the top level"]) <= 8, found["modules at the top level"]
    assert found["files"] <= 399
    assert found["files that one other imports"] <= 83
    assert found["files of at most 60 lines"] <= 10
    assert len(found["files of more than 400 lines"]) <= 14, found["files of more than 400 lines"]


def test_a_snapshot_of_a_dict_is_a_copy():
    """Up to Python 3.11 garbage is collected amid ``list(dict.items())``, and what is collected may change the dict."""
    for file in sorted((house.ROOT / "torchstrategy").rglob("*.py")):
        found = re.findall(r"\bin list\([\w.]+\.items\(\)\)", file.read_text(encoding="utf-8"))
        assert not found, f"{file}: {found[0]}: write `.copy().items()`, which nothing interrupts"
