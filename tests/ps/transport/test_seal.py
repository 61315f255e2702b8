import pytest

from torchstrategy.ps.transport.limits import Limits
from torchstrategy.ps.transport.messages import MessageError
from torchstrategy.ps.transport.secret import Seal, derive, proof

KEY = bytes(range(32))


def test_messages_in_order():
    sender, receiver = Seal(KEY), Seal(KEY)
    for header, num_bytes in ((b"first", 10), (b"second", 0), (b"", 7)):
        prefix = sender.close(header, num_bytes)
        assert len(prefix) == Seal.num_bytes
        assert receiver.sizes(prefix, Limits()) == (len(header), num_bytes)
        receiver.open(prefix, header)


def test_what_is_refused():
    sender, receiver = Seal(KEY), Seal(KEY)
    first, second = sender.close(b"first", 0), sender.close(b"second", 0)
    with pytest.raises(MessageError, match="did not send"):
        receiver.open(first, b"other")
    with pytest.raises(MessageError, match="did not send"):
        Seal(bytes(32)).open(first, b"first")
    receiver.open(second, b"second")
    for prefix, header in ((second, b"second"), (first, b"first")):
        with pytest.raises(MessageError, match="again, after message 2: a replay"):
            receiver.open(prefix, header)


@pytest.mark.parametrize("bit", range(8 * Seal.num_bytes))
def test_every_bit_counts(bit):
    prefix = bytearray(Seal(KEY).close(b"header", 100))
    prefix[bit // 8] ^= 1 << bit % 8
    with pytest.raises(MessageError):
        Seal(KEY).open(prefix, b"header")


def test_sizes_are_limited():
    prefix = Seal(KEY).close(b"header", 100)
    assert Seal(KEY).sizes(prefix, Limits(max_header_bytes=6, max_message_bytes=100)) == (6, 100)
    for limits in (Limits(max_header_bytes=5), Limits(max_message_bytes=99)):
        with pytest.raises(MessageError, match="allowed"):
            Seal(KEY).sizes(prefix, limits)
    with pytest.raises(MessageError, match="truncated"):
        Seal(KEY).sizes(prefix[:-1], Limits())


def test_derived_keys_are_unrelated():
    keys = {derive(KEY, "a"), derive(KEY, "b"), derive(KEY, "a", b"x"), derive(bytes(32), "a"), proof(KEY, "a")}
    assert len(keys) == 5
    assert derive(KEY, "a", b"x") == derive(KEY, "a", b"x")
