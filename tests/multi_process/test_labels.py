import re

import pytest

from tests.multi_process import label_programs

NUM_BYTES = 4 * label_programs.NUM_WEIGHTS


@pytest.fixture(scope="module")
def labels(process_pool):
    return process_pool(2).run(label_programs.labels_of_collectives)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("program", "operation", "is_large"),
    [
        ("step", "the sum of gradients", True),
        ("small", "all_reduce(SUM)", False),  # travels with the record
        ("large", "all_reduce(SUM)", True),
        ("gather", "all_gather(axis=0)", True),
    ],
)
def test_a_collective_says_its_operation_size_and_way_and_for_whom_it_waits(labels, rank, program, operation, is_large):
    """Waiting until all ranks are there is apart from moving the data, within which ranks may wait again."""
    outer = [f"replica {rank}", f"merge {operation}"]
    inner = [
        [re.sub(r"\d+ bytes in", "N bytes in", name) for name in chain[2:]]
        for chain in labels[rank][program]
        if chain[:2] == outer and len(chain) > 2 and "(sizes)" not in chain[2]
    ]
    record = f"wait {operation} N bytes in a message"
    moves = [f"move {operation} {NUM_BYTES} bytes by shared memory"] if is_large else []
    assert [chain[0] for chain in inner if len(chain) == 1] == [record, *moves]
    assert [record, f"wait for rank {1 - rank}"] in inner
    # Not where the other rank's part was there already.
    waits = [chain for chain in inner if chain[-1] == f"wait for process {1 - rank} of this host"]
    assert all(chain[0] in moves for chain in waits)
