import pytest

from torchstrategy.data.own_streams import InputContext


@pytest.mark.parametrize(
    ("size", "replicas", "expected"), [(8, 2, 4), (0, 3, 0), (-4, 2, -2), (4.0, 2, 2.0), (7, 1, 7)]
)
def test_per_replica_batch_size(size, replicas, expected):
    result = InputContext(num_replicas_in_sync=replicas).get_per_replica_batch_size(size)
    assert result == expected
    assert type(result) is type(expected)


def test_a_size_that_is_not_divisible_is_an_error():
    with pytest.raises(ValueError, match="`global_batch_size` 7 is not divisible by `num_replicas_in_sync` 2"):
        InputContext(num_replicas_in_sync=2).get_per_replica_batch_size(7)


def test_fields_and_text():
    context = InputContext(3, 2, 6)
    assert (context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync) == (3, 2, 6)
    assert str(context) == "InputContext(input pipeline id 2, total: 3)"
