"""The two small files of a shard directory: exact bytes and verdicts."""

from __future__ import annotations

import struct
import zlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.format.files.checkpoint import Checkpoint, CheckpointFile, CleanFile, decode_checkpoint, encode_checkpoint
from forebay.format.files.live import LIVE_BYTES, Live, decode_live, encode_live
from forebay.format.frame.head import Verdict
from tests.format.samples import CHECKPOINT, LIVE

_U32 = st.integers(0, 2**32 - 1)
_U64 = st.integers(0, 2**64 - 1)


def _checkpoint(body: bytes, version: int = 1, flags: int = 0) -> bytes:
    head = struct.pack("<4sHHI", b"FBYC", version, flags, len(body))
    return head + zlib.crc32(body, zlib.crc32(head)).to_bytes(4, "little") + body


def test_checkpoint_is_exactly_these_bytes() -> None:
    body = (
        b'{"files":[[0,1,42],[42,3,153]],"durable":150,"rotated_at":1700000000000,"clean":true,"clean_position":4480}'
    )

    assert encode_checkpoint(CHECKPOINT) == _checkpoint(body)


def test_what_is_recorded_of_the_newest_file_is_exactly_these_bytes_and_older_readers_pass_over_it() -> None:
    last = CleanFile(
        start=153,
        epoch=3,
        salt=bytes(16),
        mark=b"mark",
        end=160,
        frames=2,
        control=b"frames",
        offsets=(153,),
        positions=(128,),
    )
    reported = (
        b',"last":{"start":153,"epoch":3,"salt":"AAAAAAAAAAAAAAAAAAAAAA==","mark":"bWFyaw==","end":160,"frames":2,'
        b'"control":"ZnJhbWVz","offsets":[153],"positions":[128]}}'
    )
    encoded = encode_checkpoint(msgspec.structs.replace(CHECKPOINT, last=last))

    assert encoded == _checkpoint(encode_checkpoint(CHECKPOINT)[16:-1] + reported)
    assert decode_checkpoint(encoded) == msgspec.structs.replace(CHECKPOINT, last=last)
    body = msgspec.json.decode(encoded[16:])
    known = {name: body[name] for name in msgspec.json.decode(encode_checkpoint(CHECKPOINT)[16:])}
    assert msgspec.convert(known, Checkpoint) == CHECKPOINT


@given(st.lists(st.builds(CheckpointFile, _U64, _U32, _U64), max_size=4).map(tuple), _U64, st.booleans(), _U64)
def test_checkpoint_comes_back_as_it_was(
    files: tuple[CheckpointFile, ...],
    durable: int,
    clean: bool,  # noqa: FBT001
    position: int,
) -> None:
    checkpoint = Checkpoint(files=files, durable=durable, rotated_at=-1, clean=clean, clean_position=position)

    assert decode_checkpoint(encode_checkpoint(checkpoint)) == checkpoint


@pytest.mark.parametrize(
    ("buffer", "verdict"),
    [
        (b"", Verdict.TORN),
        (bytes(100), Verdict.TORN),
        (encode_checkpoint(CHECKPOINT) + b" ", Verdict.DAMAGED),
        (b"\1" * 100, Verdict.DAMAGED),
        (_checkpoint(b"{}"), Verdict.DAMAGED),
        (_checkpoint(b"nonsense"), Verdict.DAMAGED),
        (_checkpoint(b'"\xff"'), Verdict.DAMAGED),
        (_checkpoint(b"{}", version=2), Verdict.NEWER),
        (_checkpoint(b"{}", flags=1), Verdict.NEWER),
    ],
)
def test_what_is_no_checkpoint_gets_its_verdict(buffer: bytes, verdict: Verdict) -> None:
    assert decode_checkpoint(buffer) is verdict


def _live(head: bytes) -> bytes:
    return head + zlib.crc32(head).to_bytes(4, "little")


def test_live_is_exactly_these_64_bytes() -> None:
    expected = _live(b"FBL1" + struct.pack("<IIIQQQQQI", 4, 3, 0, 42, 4416, 150, 153, 77, 0))

    assert encode_live(*LIVE) == expected
    assert len(expected) == LIVE_BYTES == 64


@given(st.builds(Live, _U32, _U32, _U64, _U64, _U64, _U64, _U64, st.booleans()))
def test_live_comes_back_as_it_was(published: Live) -> None:
    assert decode_live(encode_live(*published)) == published


@pytest.mark.parametrize(
    ("buffer", "verdict"),
    [
        (b"", Verdict.TORN),
        (bytes(64), Verdict.TORN),
        (b"\1" * 64, Verdict.DAMAGED),
        (_live(b"FBX1" + bytes(56)), Verdict.DAMAGED),
        (_live(b"FBL2" + bytes(56)), Verdict.NEWER),
        (_live(b"FBL1" + bytes(8) + b"\2" + bytes(47)), Verdict.NEWER),
    ],
)
def test_what_is_not_live_gets_its_verdict(buffer: bytes, verdict: Verdict) -> None:
    assert decode_live(buffer) is verdict
