import pytest

import torchstrategy as ts
from torchstrategy import options


def test_reduce_op():
    assert ts.ReduceOp.parse("Mean") is ts.ReduceOp.MEAN
    assert ts.ReduceOp.parse(ts.ReduceOp.SUM) is ts.ReduceOp.SUM
    with pytest.raises(ValueError, match="'MAX' is not a valid ReduceOp"):
        ts.ReduceOp.parse("MAX")
    with pytest.raises(TypeError, match="ReduceOp or a string"):
        ts.ReduceOp.parse(None)


Options = ts.experimental.CommunicationOptions
Implementation = ts.experimental.CommunicationImplementation


def test_communication_options():
    assert Options() == Options(0, None, Implementation.AUTO)
    assert Options().bucket_bytes == 32 << 20
    assert Options(bytes_per_pack=5).bucket_bytes == 5
    assert hash(Options(implementation="nccl")) == hash(Options(implementation=Implementation.NCCL))
    with pytest.raises(ValueError, match=r"bytes_per_pack must be 0 or positive. Received: -1"):
        Options(bytes_per_pack=-1)


@pytest.mark.parametrize("name", ["ring", "RING", "Ring", Implementation.RING])
def test_implementation_in_any_letter_case(name):
    assert Options(implementation=name).implementation is Implementation.RING


@pytest.mark.parametrize("name", ["MPI", "", None, 1, ts.ReduceOp.SUM])
def test_unknown_implementations(name):
    with pytest.raises(ValueError, match=r"one of AUTO, RING, NCCL.*register_communication.*Received"):
        Options(implementation=name)


def test_registered_implementations(monkeypatch):
    monkeypatch.setattr(options, "_registered_implementations", set())
    assert options.register_implementation_name("MyMPI") == "mympi"
    assert Options(implementation="MYMPI").implementation == "mympi"
    assert Options(implementation="mympi").merge(Options(3)) == Options(3, implementation="mympi")
    with pytest.raises(ValueError, match="one of AUTO, RING, NCCL, mympi, in any letter case"):
        Options(implementation="other")
    for name in ("ring", "Auto", " "):
        with pytest.raises(ValueError, match="must be another than AUTO, RING and NCCL"):
            options.register_implementation_name(name)
    with pytest.raises(TypeError, match="must be a string"):
        options.register_implementation_name(Implementation.RING)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bytes_per_pack": "1"}, "bytes_per_pack must be an integer. Received: '1'"),
        ({"bytes_per_pack": 0.5}, "bytes_per_pack must be an integer. Received: 0.5"),
        ({"timeout_seconds": "5"}, "timeout_seconds must be a number of seconds or None. Received: '5'"),
    ],
)
def test_a_size_or_a_timeout_of_a_wrong_type_is_refused(arguments, message):
    with pytest.raises(TypeError, match=message):
        Options(**arguments)


@pytest.mark.parametrize(("timeout", "deadline"), [(None, None), (0, None), (-1, None), (0.5, 0.5)])
def test_a_timeout_that_is_not_positive_means_the_default(timeout, deadline):
    assert Options(timeout_seconds=timeout).timeout_seconds == timeout
    assert Options(timeout_seconds=timeout).deadline_seconds == deadline


@pytest.mark.parametrize(
    ("first", "second", "merged"),
    [
        (Options(1, 2.0, "NCCL"), Options(3, 4.0, "RING"), Options(3, 4.0, "RING")),
        (Options(1, 2.0, "NCCL"), Options(), Options(1, 2.0, "NCCL")),
        (Options(), Options(1, 2.0, "NCCL"), Options(1, 2.0, "NCCL")),
        (Options(1), Options(timeout_seconds=0), Options(1, 0)),
    ],
)
def test_merge(first, second, merged):
    assert first.merge(second) == merged


def test_older_names():
    assert ts.experimental.CollectiveCommunication is Implementation
    assert ts.experimental.CollectiveHints(5, 1.0) == Options(bytes_per_pack=5, timeout_seconds=1.0)
    assert ts.experimental.CollectiveHints() == Options()


def test_input_options():
    assert ts.InputOptions().experimental_fetch_to_device is True
    with pytest.raises(ValueError, match="buffer_size"):
        ts.InputOptions(experimental_per_replica_buffer_size=0)
