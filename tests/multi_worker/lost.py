"""What the other ranks must say about a rank that is gone."""

import re

import torchstrategy as ts

NAMED = re.compile(r"Rank (\d+)(?: \([^)]*\))? (?:failed|does not answer|has ended|has died|did not|could not)")
KINDS = (ts.errors.ReplicaFailedError, ts.errors.DeadlineExceededError)


def blamed(error):
    """Return the ranks that an error's first lines name as the culprits."""
    return {int(rank) for rank in NAMED.findall(str(error))}


def check_survivors(outcomes, lost, timeout_s=30.0):
    """Check that every other rank reports the lost one, and nobody else; return the seconds that each one took."""
    gone_at = outcomes[lost].at
    for rank, outcome in enumerate(outcomes):
        if rank != lost:
            assert isinstance(outcome.error, KINDS), f"rank {rank}: {outcome.error!r}"
            assert blamed(outcome.error) == {lost}, f"rank {rank}: {outcome.error}"
    seconds = [outcome.at - gone_at for rank, outcome in enumerate(outcomes) if rank != lost]
    assert max(seconds) < timeout_s
    return seconds
