"""The keys and values of the RocksDB engine, byte by byte: what is stored once must be read for ever."""

from __future__ import annotations

from hashlib import blake2b

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from forebay.engines.rocksdb.layout import (
    ENTRY_HEAD,
    Bounds,
    EntryKind,
    Keys,
    ShardCounters,
    appended_in,
    decode_appended,
    decode_entry,
    decode_time,
    encode_appended,
    encode_deleted,
    encode_gap,
    encode_live,
    encode_time,
    offset_in,
    with_offset,
)
from forebay.errors import Corrupt, UnsupportedFormat
from forebay.format.columns.rows import encode_row
from forebay.format.frame.batch import batch_of
from forebay.records import Reason

TOPIC_ID = "00112233445566778899aabbccddeeff"
SHARD = TOPIC_ID + "00000007"
KEYS = Keys(TOPIC_ID, 7)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (KEYS.start, SHARD),
        (KEYS.stop, TOPIC_ID + "00000008"),
        (KEYS.bounds, SHARD + "62"),
        (KEYS.counters, SHARD + "63"),
        (KEYS.entry(258), SHARD + "65" + "0000000000000102"),
        (KEYS.of_key(b""), SHARD + "6b" + "00"),
        (KEYS.of_key(b"ab"), SHARD + "6b" + "02" + "6162"),
        (KEYS.of_key(b"k" * 254), SHARD + "6b" + "fe" + "6b" * 254),
        (KEYS.of_key(b"k" * 255), SHARD + "6b" + "ff" + blake2b(b"k" * 255, digest_size=32).hexdigest()),
        (KEYS.of_tag("\N{SNOWMAN}"), SHARD + "74" + "03" + "e29883"),
        (with_offset(KEYS.of_tag("a"), 1), SHARD + "74" + "01" + "61" + "0000000000000001"),
        (KEYS.block(2, 5), SHARD + "6d" + "02" + "0000000000000005"),
        (KEYS.appended(2**64 - 1, 3), SHARD + "77" + "ffffffffffffffff" + "0000000000000003"),
    ],
)
def test_keys(key: bytes, expected: str) -> None:
    assert key.hex() == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (encode_time(-2), "fffffffffffffffe"),
        (encode_appended(3, 258), "00000003" + "0000000000000102"),
        (Bounds(3, True, 258, "ab").encode(), "01" + "00000003" + "01" + "0000000000000102" + "6162"),
        (
            ShardCounters(7, 5, 4, Reason.TTL, 1, 99, 66).encode(),
            "01" + "05" + "".join(f"{number:016x}" for number in (7, 5, 4, 1, 99, 66)),
        ),
        (
            encode_deleted(np.array([16, 300]), appended_at=-1, before=2),
            "01" + "00" + "0000" + "02000000" + "0200000000000000" + "ff" * 8 + "10000000" + "2c010000",
        ),
        (
            encode_gap(258, Reason.LOST, before=2),
            "02" + "01" + "0000" + "00000000" + "0200000000000000" + "0201000000000000",
        ),
    ],
)
def test_values(value: bytes, expected: str) -> None:
    assert value.hex() == expected


def test_what_is_stored_is_read_again() -> None:
    assert decode_time(encode_time(-(2**62))) == -(2**62)
    assert decode_appended(encode_appended(3, 258)) == (3, 258)
    assert appended_in(KEYS.appended(5, 6)) == (5, 6)
    assert offset_in(KEYS.entry(2**63 - 1)) == 2**63 - 1
    for bounds in (Bounds(), Bounds(3, True, 258, "boot \N{SNOWMAN}")):
        assert Bounds.decode(bounds.encode()) == bounds
    for counters in (ShardCounters(), ShardCounters(7, 5, 4, Reason.TTL, 1, 99, 66)):
        assert ShardCounters.decode(counters.encode()) == counters
    gap = decode_entry(5, encode_gap(2**40, Reason.LOST, before=2))
    assert (gap.base, gap.end, gap.kind, gap.reason, gap.before) == (5, 2**40, EntryKind.GAP, Reason.LOST, 2)
    gone = decode_entry(5, encode_deleted(np.array([16, 300]), appended_at=8, before=2))
    assert (gone.base, gone.end, gone.kind, gone.appended_at) == (5, 7, EntryKind.DELETED, 8)
    assert gone.sizes(0).tolist() == [16, 300]


def test_records_are_under_a_checksum_that_is_their_shards_own() -> None:
    columns = encode_row((b"value", b"key", "tag", (("h", b"1"),), 17))
    value = encode_live(columns, KEYS.salt_crc, base=9, epoch=3, appended_at=8, before=2, zstd_level=None)
    entry = decode_entry(9, value)

    assert (entry.base, entry.end, entry.kind, entry.before, entry.appended_at) == (9, 10, EntryKind.LIVE, 2, 8)
    expected = batch_of(columns, base=9, epoch=3, appended_at=8)
    assert entry.batch(KEYS.salt_crc).records(0) == expected.records(0)
    assert entry.sizes(KEYS.salt_crc).tolist() == expected.sizes().tolist()
    for place in range(ENTRY_HEAD, len(value)):
        flipped = value[:place] + bytes((value[place] ^ 1,)) + value[place + 1 :]
        with pytest.raises(Corrupt, match="from offset 9 on are damaged"):
            decode_entry(9, flipped).batch(KEYS.salt_crc)
    for other, base in ((Keys(TOPIC_ID, 8).salt_crc, 9), (KEYS.salt_crc, 10)):
        with pytest.raises(Corrupt):
            decode_entry(base, value).batch(other)


def test_a_newer_version_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedFormat, match="upgrade"):
        Bounds.decode(b"\x02" + Bounds().encode()[1:])
    with pytest.raises(UnsupportedFormat, match="upgrade"):
        ShardCounters.decode(b"\x02" + ShardCounters().encode()[1:])


@given(st.binary(max_size=300), st.binary(max_size=300), st.integers(0, 2**63 - 1))
def test_no_name_is_the_beginning_of_another(one: bytes, other: bytes, offset: int) -> None:
    if one != other:
        assert not with_offset(KEYS.of_key(one), offset).startswith(KEYS.of_key(other))


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**63 - 1))
def test_keys_are_in_the_order_of_their_offsets(one: int, other: int) -> None:
    assert (KEYS.entry(one) < KEYS.entry(other)) == (one < other)
    assert KEYS.start <= KEYS.entry(one) < KEYS.stop
    assert KEYS.entries[0] <= KEYS.entry(one) < KEYS.entries[1]


def test_the_last_partition_of_the_last_topic_ends_too() -> None:
    keys = Keys("ff" * 16, 1023)

    assert keys.start < keys.entry(2**63 - 1) < keys.stop
    assert keys.stop <= Keys("ff" * 16, 1024).start
