import pickle

import pytest
import torch

import torchstrategy as ts
from torchstrategy.base import options


def test_reduce_op():
    assert ts.ReduceOp.parse("Mean") is ts.ReduceOp.MEAN
    assert ts.ReduceOp.parse(ts.ReduceOp.SUM) is ts.ReduceOp.SUM
    with pytest.raises(ValueError, match="'MAX' is not a valid ReduceOp"):
        ts.ReduceOp.parse("MAX")
    with pytest.raises(TypeError, match="ReduceOp or a string"):
        ts.ReduceOp.parse(None)


@pytest.mark.parametrize(
    ("look", "kind", "message"),
    [
        (lambda: ts.ReduceOp.MAX, AttributeError, r"'MAX' is not a valid ReduceOp\. Its members are SUM, MEAN\.$"),
        (lambda: ts.ReduceOp("max"), ValueError, r"'max' is not a valid ReduceOp\. Its members are SUM, MEAN\.$"),
        (lambda: ts.experimental.CollectiveCommunication.ring, AttributeError, "Its members are AUTO, RING, NCCL"),
        (lambda: ts.experimental.CommunicationImplementation("nccl"), ValueError, "Its members are AUTO, RING, NCCL"),
        (lambda: ts.data.AutoShardPolicy.NONE, AttributeError, "Its members are OFF, AUTO, FILE, DATA, HINT"),
        (lambda: ts.losses.Reduction.none, AttributeError, "Its members are AUTO, NONE, SUM, "),
    ],
)
def test_a_choice_that_is_none_names_the_members(look, kind, message):
    with pytest.raises(kind, match=message):
        look()


def test_choices_are_enums():
    assert pickle.loads(pickle.dumps(ts.ReduceOp.SUM)) is ts.ReduceOp("SUM") is ts.ReduceOp["SUM"]
    assert not hasattr(ts.ReduceOp, "__array__")


Options = ts.experimental.CommunicationOptions
PowerSGD = ts.experimental.PowerSGD
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
        ({"overlap": 1}, "overlap must be True, False or None. Received: 1"),
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
        (Options(overlap=True), Options(overlap=False), Options(overlap=False)),
        (Options(overlap=True), Options(), Options(overlap=True)),
        (Options(gradient_compression="bf16"), Options(1), Options(1, gradient_compression="bf16")),
        (
            Options(gradient_compression="bf16"),
            Options(gradient_compression="FP16"),
            Options(gradient_compression="fp16"),
        ),
    ],
)
def test_merge(first, second, merged):
    assert first.merge(second) == merged


def test_gradient_compression():
    assert Options().gradient_compression is None
    assert Options(gradient_compression="BF16").gradient_compression == "bf16"
    assert hash(Options(gradient_compression=PowerSGD(2))) == hash(Options(gradient_compression=PowerSGD(rank=2)))
    for value in ("int8", "", 16, True, PowerSGD, torch.bfloat16):
        with pytest.raises(ValueError, match=r"must be None, 'bf16', 'fp16' or a ts\.experimental\.PowerSGD.*Received"):
            Options(gradient_compression=value)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"rank": 0}, ValueError, "rank of PowerSGD must be at least 1. Received: 0"),
        ({"rank": 1.0}, TypeError, "rank of PowerSGD must be an integer. Received: 1.0"),
        ({"rank": True}, TypeError, "rank of PowerSGD must be an integer. Received: True"),
        ({"start_after": -1}, ValueError, "start_after of PowerSGD must be at least 0. Received: -1"),
        ({"start_after": None}, TypeError, "start_after of PowerSGD must be an integer. Received: None"),
        ({"min_compression": 0.5}, ValueError, "min_compression of PowerSGD must be at least 1. Received: 0.5"),
        (
            {"min_compression": float("nan")},
            ValueError,
            "min_compression of PowerSGD must be at least 1. Received: nan",
        ),
        ({"min_compression": "2"}, TypeError, "min_compression of PowerSGD must be a number. Received: '2'"),
    ],
)
def test_power_sgd_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        PowerSGD(**arguments)


def test_older_names():
    assert ts.experimental.CollectiveCommunication is Implementation
    assert ts.experimental.CollectiveHints(5, 1.0) == Options(bytes_per_pack=5, timeout_seconds=1.0)
    assert ts.experimental.CollectiveHints() == Options()


def test_input_options():
    assert ts.InputOptions().experimental_fetch_to_device is True
    with pytest.raises(ValueError, match="buffer_size"):
        ts.InputOptions(experimental_per_replica_buffer_size=0)
