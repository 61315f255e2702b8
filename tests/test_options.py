import pytest

import torchstrategy as ts


def test_reduce_op():
    assert ts.ReduceOp.parse("Mean") is ts.ReduceOp.MEAN
    assert ts.ReduceOp.parse(ts.ReduceOp.SUM) is ts.ReduceOp.SUM
    with pytest.raises(ValueError, match="'MAX' is not a valid ReduceOp"):
        ts.ReduceOp.parse("MAX")
    with pytest.raises(TypeError, match="ReduceOp or a string"):
        ts.ReduceOp.parse(None)


def test_communication_options():
    options = ts.experimental.CommunicationOptions(bytes_per_pack=5)
    assert options.bucket_bytes == 5
    assert ts.experimental.CommunicationOptions().bucket_bytes == 32 << 20
    for bad in ({"bytes_per_pack": -1}, {"timeout_seconds": 0}, {"implementation": "NCCL"}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            ts.experimental.CommunicationOptions(**bad)


def test_input_options():
    assert ts.InputOptions().experimental_fetch_to_device is True
    with pytest.raises(ValueError, match="buffer_size"):
        ts.InputOptions(experimental_per_replica_buffer_size=0)
