"""I30: a small frame that would unpack beyond every limit is refused by each part that reads frames."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import forebay
from forebay.errors import Corrupt
from forebay.format.frame.batch import decode
from forebay.topics import Durability
from tests.format.samples import SALT_CRC, head_of
from tests.wal.bombs import READERS, bomb, mined, stays_packed

FIELDS = {"salt_crc": SALT_CRC, "base": 1, "epoch": 1, "durable": 0, "appended_at": 0, "runs": ()}


def test_an_honest_bomb_is_refused_by_the_size_it_unpacks_to() -> None:
    frame = bomb(**FIELDS)

    with pytest.raises(Corrupt, match="claims [0-9]+ stored and [0-9]+ raw bytes"):
        decode(frame, 0, head_of(frame))


def test_frames_are_unpacked_in_one_place_only() -> None:
    """A second one would need the limit, and these tests, too. Bodies of HTTP have a place and limits of their own."""
    package = Path(forebay.__file__).parent
    libraries = re.compile(r"\b(ZstdDecompressor|decompressobj|import (gzip|lz4|bz2|lzma|snappy))\b")

    unpacking = {
        str(path.relative_to(package)) for path in package.rglob("*.py") if libraries.search(path.read_text("utf-8"))
    } - {"testing/checks/conformance.py"}  # it packs bodies that a broker has to refuse

    assert unpacking == {"format/frame/batch.py", "wire/compression.py"}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("durability", [Durability.FSYNC, Durability.DISK])
@pytest.mark.proves("I30")
def test_no_reader_unpacks_a_bomb(durability: Durability, reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = mined(durability, monkeypatch)

    assert list(stays_packed(rig, READERS[reader])) == []
