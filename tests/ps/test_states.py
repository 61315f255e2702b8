"""Every change of a state is one of a table, and a change that is not in it is an error."""

import itertools

import pytest

from torchstrategy.ps.states import PeerState, WorkerState, follow


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (
            PeerState,
            {"CONNECTING": "READY REFUSED CLOSED", "READY": "LOST REFUSED CLOSED", "LOST": "READY REFUSED CLOSED"}
            | {"REFUSED": "CLOSED", "CLOSED": ""},
        ),
        (
            WorkerState,
            {
                "AWAITED": "PREPARING REFUSED",
                "PREPARING": "PREPARING READY LOST REFUSED",
                "READY": "PREPARING LOST REFUSED",
            }
            | {"LOST": "PREPARING REFUSED", "REFUSED": "PREPARING REFUSED"},
        ),
    ],
)
def test_what_follows(states, expected):
    for first, second in itertools.product(states, states):
        if second.name in expected[first.name].split():
            assert follow(first, second) is second
        else:
            with pytest.raises(RuntimeError, match=f"{states.__name__} {first.name} can't become {second.name}"):
                follow(first, second)
