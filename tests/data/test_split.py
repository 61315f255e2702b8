import pytest

from torchstrategy.data.split import share_bounds, share_sizes


@pytest.mark.parametrize("num_replicas", range(1, 9))
def test_every_batch_is_cut_into_chunks_of_the_rounded_up_quotient(num_replicas):
    for num_examples in range(40):
        sizes = share_sizes(num_examples, num_replicas)
        assert len(sizes) == num_replicas
        assert sum(sizes) == num_examples
        chunk = -(-num_examples // num_replicas)
        chunks = [list(range(num_examples))[i * chunk : (i + 1) * chunk] for i in range(num_replicas)]
        assert [list(range(start, stop)) for start, stop in share_bounds(sizes)] == chunks


@pytest.mark.parametrize(
    ("num_examples", "num_replicas", "sizes"),
    [
        (4, 3, (2, 2, 0)),
        (2, 4, (1, 1, 0, 0)),
        (5, 4, (2, 2, 1, 0)),
        (6, 4, (2, 2, 2, 0)),
        (3, 3, (1, 1, 1)),
        (0, 2, (0, 0)),
    ],
)
def test_sizes_measured_with_tensorflow(num_examples, num_replicas, sizes):
    assert share_sizes(num_examples, num_replicas) == sizes
