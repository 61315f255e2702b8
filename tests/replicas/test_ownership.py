"""What the program changes on its objects reaches every replica, wherever it does so, or is refused."""

import functools
import re
from pathlib import Path

import pytest
import torch

from tests.replicas.ownership import CHANGES, PLACES, train

PAGE = Path(__file__).parents[2] / "docs/guide/replicas_in_one_process.md"
#: What these do is undone by themselves, or is no change of a number.
LEAVE_ALL_AS_IT_IS = {"gradient", "groups_in_another_order", "scale_loaded", "scale_set", "state_loaded"}
CELLS = [(name, place) for name, change in CHANGES.items() for place in change.places]


@functools.cache
def unchanged():
    return train(1, lambda things: None, PLACES[1])


@functools.cache
def with_one_replica(name, place):
    return train(1, CHANGES[name].function, place)


@pytest.mark.parametrize(("name", "place"), CELLS)
def test_a_change_is_right_or_refused(name, place):
    change = CHANGES[name]
    found = train(2, change.function, place)
    if place in change.refused:
        assert isinstance(found, str), "it is right, and need not be refused"
        assert change.refused[place] in found
        return
    expected = with_one_replica(name, place)
    assert not isinstance(found, str), found
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_shows(name):
    changed = [with_one_replica(name, place) for place in CHANGES[name].places]
    assert any(not torch.equal(found, unchanged()) for found in changed) != (name in LEAVE_ALL_AS_IT_IS)


def test_the_guide_has_a_row_for_each():
    rows = re.findall(r"^\| ([a-z ]+) \| ([a-z_ ]+) \|", PAGE.read_text(encoding="utf-8"), re.M)
    assert set(rows) - {("object", "what of it")} == {change.row for change in CHANGES.values()}
