import json
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchstrategy.ps.transport.limits import Limits
from torchstrategy.ps.transport.messages import Message, MessageError, check_size, decode, encode

LIMITS = Limits()
DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
]


def send(message, limits=LIMITS):
    return decode([bytearray(frame) for frame in encode(message)], limits)


def same_bytes(a, b):
    return (
        a.dtype == b.dtype and a.shape == b.shape and encode(Message("a", {}, (a,))) == encode(Message("a", {}, (b,)))
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (7,), (2, 3, 4)], ids=str)
def test_any_dtype_and_shape_arrives(dtype, shape):
    tensor = torch.randint(0, 2, shape).to(dtype)
    (arrived,) = send(Message("a", {}, (tensor,))).tensors
    assert same_bytes(arrived, tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12.0).view(3, 4).T,
        torch.arange(12.0)[::3],
        torch.ones(1).expand(5, 5),
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
        torch.ones(3, requires_grad=True),
        torch.nn.Parameter(torch.ones(2, 2)),
        torch.arange(6.0).view(1, 2, 1, 3).contiguous(memory_format=torch.channels_last),
    ],
    ids=["transposed", "strided", "expanded", "conjugate", "negative", "leaf", "parameter", "channels_last"],
)
def test_any_layout_arrives(tensor):
    (arrived,) = send(Message("a", {}, (tensor,))).tensors
    torch.testing.assert_close(arrived, tensor.detach().resolve_conj(), rtol=0, atol=0)
    assert not arrived.requires_grad


def test_fields_and_blobs_arrive():
    fields = {"a": [1, 2.5, None, True, "ä\n"], "b": {"c": {}}, "nan": math.inf}
    message = send(Message("kind", fields, (torch.ones(2), torch.zeros(0)), (b"", b"raw\0", bytes(100))))
    assert (message.kind, message.fields, message.blobs) == ("kind", fields, (b"", b"raw\0", bytes(100)))


def test_encoding_copies_nothing_and_decoding_neither():
    tensor = torch.zeros(1000)
    frames = encode(Message("a", {}, (tensor,)))
    tensor[0] = 5.0
    memory = bytearray(frames[1])
    (arrived,) = decode([frames[0], memory], LIMITS).tensors
    arrived[1] = 7.0
    assert memory[:8] == bytes(torch.tensor([5.0, 7.0]).view(torch.uint8).numpy())


def test_memory_that_is_read_only_or_not_aligned_is_copied():
    header, frame = encode(Message("a", {}, (torch.arange(4.0),)))
    (read_only,) = decode([header, bytes(frame)], LIMITS).tensors
    read_only += 1
    (unaligned,) = decode([header, memoryview(bytearray(b"x" + bytes(frame)))[1:]], LIMITS).tensors
    assert unaligned.data_ptr() % 4 == 0
    assert unaligned.tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, 2).to_sparse(),
        torch.ones(3, device="meta"),
        torch.empty(3, dtype=torch.uint4),
    ],
    ids=["sparse", "meta", "less than a byte"],
)
def test_what_is_no_plain_tensor_is_refused(tensor):
    with pytest.raises(TypeError, match="can't be sent"):
        encode(Message("a", {}, (tensor,)))


@pytest.mark.parametrize("fields", [{"a": object()}, {"a": b"bytes"}, {"a": {1, 2}}, {"a": torch.ones(1)}])
def test_fields_that_json_cannot_hold_are_refused(fields):
    with pytest.raises(TypeError, match="fields of a message of kind 'a'"):
        encode(Message("a", fields))


def test_fields_in_a_circle_are_refused():
    fields = {}
    fields["self"] = fields
    with pytest.raises(TypeError, match="JSON can't hold"):
        encode(Message("a", fields))


def header(**changes):
    fields = {"kind": "a", "fields": {}, "tensors": [["float32", [2]]], "blobs": []} | changes
    return json.dumps(fields).encode()


DAMAGED = {
    "nothing": [],
    "empty header": [b"", bytes(8)],
    "no JSON": [b"\x80\x04pickle", bytes(8)],
    "no UTF-8": [b'{"kind": "\xff"}', bytes(8)],
    "a list": [b"[]", bytes(8)],
    "missing part": [b'{"kind":"a","fields":{},"tensors":[]}'],
    "another part": [header(more=1), bytes(8)],
    "kind is no text": [header(kind=1), bytes(8)],
    "kind is empty": [header(kind=""), bytes(8)],
    "kind is long": [header(kind="a" * 100), bytes(8)],
    "kind is not printable": [header(kind="a\n"), bytes(8)],
    "fields are a list": [header(fields=[]), bytes(8)],
    "tensors are an object": [header(tensors={}), bytes(8)],
    "blobs are a number": [header(blobs=3), bytes(8)],
    "blob is negative": [header(blobs=[-1]), bytes(8), b""],
    "blob is a bool": [header(blobs=[True]), bytes(8), b"x"],
    "unknown dtype": [header(tensors=[["object", [2]]]), bytes(8)],
    "dtype of torch's that is none": [header(tensors=[["load", [2]]]), bytes(8)],
    "dtype is a list": [header(tensors=[[["float32"], [2]]]), bytes(8)],
    "negative size": [header(tensors=[["float32", [-2]]]), bytes(8)],
    "two negative sizes": [header(tensors=[["float32", [-2, -1]]]), bytes(8)],
    "fractional size": [header(tensors=[["float32", [2.0]]]), bytes(8)],
    "true size": [header(tensors=[["float32", [2, True]]]), bytes(8)],
    "shape is a number": [header(tensors=[["float32", 2]]), bytes(8)],
    "no shape": [header(tensors=[["float32"]]), bytes(8)],
    "many dimensions": [header(tensors=[["float32", [2] + [1] * 100]]), bytes(8)],
    "huge tensor": [header(tensors=[["float32", [1 << 62, 1 << 62]]]), bytes(8)],
    "huge empty tensor": [header(tensors=[["float32", [0, 1 << 62, 1 << 62]]]), b""],
    "truncated frame": [header(), bytes(7)],
    "long frame": [header(), bytes(9)],
    "missing frame": [header()],
    "frame too many": [header(), bytes(8), b""],
    "long number": [b'{"kind":"a","fields":{"a":' + b"9" * 5000 + b'},"tensors":[],"blobs":[]}'],
    "deep fields": [b'{"kind":"a","fields":' + b'{"a":' * 100 + b"1" + b"}" * 100 + b',"tensors":[],"blobs":[]}'],
    "endless nesting": [b'{"kind":"a","fields":' + b"[" * 200_000],
}


@pytest.mark.parametrize("frames", DAMAGED.values(), ids=DAMAGED.keys())
def test_damage_is_refused(frames):
    with pytest.raises(MessageError):
        decode(frames, LIMITS)


def test_limits_are_kept():
    message = Message("a", {"text": "x" * 50}, (torch.zeros(100), torch.zeros(1, 1, 1)), (bytes(50),))
    frames = encode(message)
    decode(frames, LIMITS)
    for limits in (
        Limits(max_header_bytes=len(frames[0]) - 1),
        Limits(max_message_bytes=453),
        Limits(max_frames=2),
        Limits(max_tensor_dims=2),
    ):
        with pytest.raises(MessageError, match=r"at most|more than|list of sizes"):
            decode(frames, limits)
    assert send(message, Limits(max_message_bytes=454, max_frames=3, max_tensor_dims=3)).blobs == (bytes(50),)


def test_what_the_other_side_would_refuse_is_not_sent():
    frames = encode(Message("a", {}, (torch.zeros(100),)))
    check_size("a", frames, Limits(max_message_bytes=400))
    with pytest.raises(ValueError, match=r"400 bytes and .* in its fields; at most 399 and"):
        check_size("a", frames, Limits(max_message_bytes=399))
    with pytest.raises(ValueError, match="TORCHSTRATEGY_MAX_HEADER_BYTES"):
        check_size("a", frames, Limits(max_header_bytes=10))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
tensors = st.builds(
    lambda dtype, shape, step: torch.zeros([step * size for size in shape]).to(dtype)[
        (slice(None, None, step),) * len(shape)
    ],
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 3), max_size=4),
    st.integers(1, 2),
)
messages = st.builds(
    lambda kind, fields, tensors, blobs: Message(kind, fields, tuple(tensors), tuple(blobs)),
    st.from_regex(r"[a-z_]{1,20}", fullmatch=True),
    st.dictionaries(st.text(max_size=3), json_values, max_size=3),
    st.lists(tensors, max_size=3),
    st.lists(st.binary(max_size=20), max_size=2),
)


def check_roundtrip(message):
    arrived = send(message)
    assert (arrived.kind, arrived.fields, arrived.blobs) == (message.kind, message.fields, message.blobs)
    assert all(map(same_bytes, arrived.tensors, message.tensors))


def check_damaged(message, where, byte, cut):
    """Whatever is changed: an error of this one class, or a message within its limits."""
    frames = [bytearray(frame) for frame in encode(message)]
    frame = frames[where % len(frames)]
    if frame and cut is None:
        frame[where % len(frame)] = byte
    elif cut is not None:
        del frame[cut:]
    check_any(frames)


def check_any(frames):
    limits = Limits(max_message_bytes=1 << 12, max_header_bytes=1 << 12)
    try:
        message = decode(frames, limits)
    except MessageError:
        return
    assert sum(tensor.nbytes for tensor in message.tensors) <= limits.max_message_bytes
    decode(encode(message), limits)


few = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
many = settings(max_examples=1_500, deadline=None, suppress_health_check=list(HealthCheck))
damage = (messages, st.integers(0, 500), st.integers(0, 255), st.none() | st.integers(0, 50))
raw = st.lists(st.binary(max_size=60), max_size=4)
# What looks like a header from afar.
shaped = st.fixed_dictionaries(dict.fromkeys(("kind", "fields", "tensors", "blobs"), json_values))


@pytest.mark.slow
@few
@given(messages)
def test_fuzz_round_trip(message):
    check_roundtrip(message)


@few
@given(*damage)
def test_fuzz_damage(message, where, byte, cut):
    check_damaged(message, where, byte, cut)


@few
@given(raw)
def test_fuzz_garbage(frames):
    check_any(frames)


@few
@given(shaped, raw)
def test_fuzz_headers(fields, frames):
    check_any([json.dumps(fields).encode(), *frames])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_fuzz_longer():
    many(given(messages)(check_roundtrip))()
    many(given(*damage)(check_damaged))()
    many(given(raw)(check_any))()
    many(given(shaped, raw)(lambda fields, frames: check_any([json.dumps(fields).encode(), *frames])))()
