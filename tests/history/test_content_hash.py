"""The content hash of a segment is taken once, while it is sealed; a flipped byte is found at every later step."""

from __future__ import annotations

from pathlib import Path

import pytest

from forebay.disk import File
from forebay.errors import Corrupt, DataLoss
from forebay.format.checksum import ContentHash
from forebay.records import Bytes
from forebay.wal import sealing
from forebay.wal.files import SealedFile
from tests.support.environments.directories import TOPIC, shared_fs
from tests.support.environments.shard import DIRECTORY, ShardEnvironment, expected, history_of, stream

RECORDS = 40


class Counted:
    """Counts the bytes that go through content hashes."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.bytes = 0
        update = ContentHash.update

        def counting(digest: ContentHash, part: Bytes) -> None:
            self.bytes += memoryview(part).nbytes
            update(digest, part)

        patch.setattr(ContentHash, "update", counting)


def sealed_environment() -> tuple[ShardEnvironment, File]:
    """A shard with one sealed file, and that file."""
    environment = ShardEnvironment()
    environment.append(RECORDS)
    environment.seal()
    return environment, environment.disk.open(environment.shard.wal.files.all[0].path, writable=True)


def flip(file: File, place: int) -> None:
    """Change one bit of a byte."""
    (byte,) = file.read_at(1, place)
    file.write_at(bytes([byte ^ (1 << (place % 8))]), place)


def test_every_byte_of_a_segment_is_hashed_once_from_sealing_to_history(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = Counted(monkeypatch)
    environment, file = sealed_environment()
    assert hashed.bytes == file.size()

    environment.export()

    assert hashed.bytes == file.size()
    (piece,) = environment.catalog().descriptors()
    content = environment.store.get_range(piece.object_key, 0, piece.bytes)
    digest = ContentHash()
    digest.update(content)
    assert digest.digest().hex() == piece.content_hash and content == file.read_at(file.size(), 0)


def test_a_topic_that_moves_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = shared_fs(tmp_path)
    with environment.open("one") as here, environment.open("two") as there:
        topic = here.create_topic(TOPIC)
        for first in range(0, 300, 100):
            topic.append_many([b"value %d" % number for number in range(first, first + 100)])
        hashed = Counted(monkeypatch)

        here.seal_topic(TOPIC)
        moved = there.topic(TOPIC)
        assert moved.append(b"first elsewhere") == 300

        sizes = [path.stat().st_size for path in tmp_path.glob("store/**/*.seg")]
        assert sizes and hashed.bytes == sum(sizes)
        values = [record.value for record in moved.read()]
        assert values == [*(b"value %d" % number for number in range(300)), b"first elsewhere"]


def test_a_byte_that_flips_between_sealing_and_export_is_found_wherever_it_lies() -> None:
    environment, file = sealed_environment()
    for place in range(0, file.size(), 61):
        flip(file, place)
        with pytest.raises(DataLoss, match="not exported"):
            environment.export()
        flip(file, place)

    assert list(environment.store.list()) == [] and environment.catalog().frontier().next == 0
    environment.export()
    with history_of(environment) as history:
        assert stream(history) == expected(0, RECORDS)


def test_a_byte_that_flips_while_a_file_is_sealed_is_found_by_its_export(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums are of the bytes that were checked, not of another read of them."""
    environment = ShardEnvironment()
    environment.append(RECORDS)
    environment.shard.rotate()
    (log,) = environment.shard.upkeep.rotated()
    read_at = log.file.read_at
    flipped: list[int] = []

    def read_then_flip(length: int, position: int) -> bytes:
        data = read_at(length, position)
        if position + len(data) == log.limit and not flipped:
            flipped.append(log.limit // 2)
            flip(environment.disk.open(log.path, writable=True), log.limit // 2)
        return data

    monkeypatch.setattr(log.file, "read_at", read_then_flip)
    environment.shard.upkeep.seal_rotated()

    assert flipped and not environment.shard.upkeep.rotated()
    with pytest.raises(DataLoss, match="not exported"):
        environment.export()
    assert list(environment.store.list()) == []


def test_a_byte_that_flipped_before_is_not_sealed() -> None:
    environment = ShardEnvironment()
    environment.append(RECORDS)
    environment.shard.rotate()
    environment.shard.wal.tail.cache.clear()
    (path,) = [
        f"{DIRECTORY}/{name}" for name in environment.disk.list_directory(DIRECTORY) if name.startswith("0" * 20)
    ]
    file = environment.disk.open(path, writable=True)
    flip(file, file.size() - 10)

    environment.shard.upkeep.seal_rotated()

    assert environment.shard.upkeep.stopped is not None and environment.export() == 0


def test_a_byte_that_flips_in_the_store_is_not_served_nor_taken_for_the_object() -> None:
    environment, file = sealed_environment()
    environment.export()
    (piece,) = environment.catalog().descriptors()
    stored = environment.disk.open(f"/store/{piece.object_key}", writable=True)
    flip(stored, stored.size() - 30)
    (sealed, _) = environment.shard.wal.files.all
    assert isinstance(sealed, SealedFile)

    with history_of(environment) as history, pytest.raises(Corrupt, match="is not the object it was"):
        stream(history)
    # What an attempt that was cut short may have left is compared by hash, and stored again.
    environment.exporter().place(environment.store, piece.object_key, sealed, sealed.footer)
    assert environment.store.get_range(piece.object_key, 0, piece.bytes) == file.read_at(file.size(), 0)


def test_a_file_that_is_cut_short_while_it_is_sealed_is_not_sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = ShardEnvironment()
    environment.append(RECORDS)
    environment.shard.rotate()
    (log,) = environment.shard.upkeep.rotated()
    whole = log.file.read_at

    def short(length: int, position: int) -> bytes:
        return whole(min(length, max(0, log.limit - 8 - position)), position)

    monkeypatch.setattr(log.file, "read_at", short)

    with pytest.raises(Corrupt, match="should have|is damaged"):
        sealing.Sealer(environment.disk, environment.shard.wal.settings, None).seal(log, lambda gap: True)
