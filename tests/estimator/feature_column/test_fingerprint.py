"""Fingerprints: FarmHash's published values, and those that tf's own tests hold."""

import pytest
import torch

from torchstrategy.estimator.feature_column.fingerprint import (
    bucket_of,
    combine_fingerprints,
    fingerprint64,
    fingerprint_of,
    to_buckets,
    to_signed,
)

# Each length takes another path: 0, 1-3, 4-7, 8-16, 17-32, 33-64, and more in blocks of 64
PUBLISHED = {
    "": 0x9AE16A3B2F90404F,
    "a": 0xB3454265B6DF75E3,
    "ab": 0xAA8D6E5242ADA51E,
    "abc": 0x24A5B3A074E7F369,
    "abcd": 0x1A5502DE4A1F8101,
    "abcdefg": 0x3C40C92B1CCB7355,
    "abcdefgh": 0xFEE9D22990C82909,
    "0123456789'01234": 0x4283D4EF43627F64,
    "0123456789=012345": 0x46A7416ED4861E3B,
    "C is as portable as Stonehedge!!": 0xB944F8A16261E414,
    "Discard medicine more than two years old.": 0xE8F89AB6DF9BDD25,
    "The days of the digital watch are numbered.  -Tom Stoppard": 0x2A578B80BB82147C,
    "For every action there is an equal and opposite government program.": 0x55182F8859ECA4CE,
    "It's a tiny change to the code and not completely disgusting. - Bob Manchek": 0x38AA3175B37F305C,
    (
        "The fugacity of a constituent in a mixture of gases at a given temperature is proportional to its mole "
        "fraction.  Lewis-Randall Rule"
    ): 0x098EFF6958C5E91A,
    "Hello": 15404698994557526151,
    "World": 18308117990299812472,
}


@pytest.mark.parametrize(("text", "expected"), PUBLISHED.items(), ids=lambda value: str(len(str(value))))
def test_published_values(text, expected):
    assert fingerprint64(text.encode()) == expected
    assert fingerprint_of(text) == expected


def test_buckets_of_tf():
    assert [bucket_of(text, 10) for text in "abcd"] == [9, 2, 2, 5]
    assert [bucket_of(text, 10) for text in ("omar", "stringer", "marlo")] == [6, 4, 1]


def test_bytes_that_are_no_utf8_keep_their_fingerprint():
    assert fingerprint_of(b"\xff\x00".decode("utf-8", "surrogateescape")) == fingerprint64(b"\xff\x00")


def cross(key, *texts):
    result = torch.tensor([to_signed(key)])
    for text in texts:
        result = combine_fingerprints(result, torch.tensor([to_signed(fingerprint_of(text))]))
    return result


def test_crosses_of_tf():
    texts = "batch1-FC1-F1", "batch1-FC2-F1", "batch1-FC3-F1"
    key = 0xDECAFCAFFE
    assert cross(key, *texts).item() % 2**64 % (2**63 - 1) == 1971693436396284976
    assert cross(key + 1, *texts).item() % 2**64 % (2**63 - 1) == 4847552627144134031
    assert to_buckets(cross(key, *texts), 100).item() == 83
    assert to_buckets(cross(key + 1, *texts), 100).item() == 31


def test_buckets_of_unsigned_numbers():
    numbers = [0, 1, 2**63 - 1, 2**63, 2**64 - 1, 12345678901234567890]
    signed = torch.tensor([to_signed(number) for number in numbers])
    for num_buckets in (1, 2, 7, 10, 1 << 40):
        assert to_buckets(signed, num_buckets).tolist() == [number % num_buckets for number in numbers]
