"""Damage stops the way downstream: a damaged file is not sealed, exported or handed over unless that is accepted."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay import Corrupt, DataLoss
from forebay.records import Gap, Offsets, Reason
from forebay.settings import Settings
from forebay.shard import SegmentShard
from forebay.storage import Storage, Topic
from forebay.testing.inside import InsideHistory, inside
from forebay.wal import upkeep
from forebay.wal.files import LogFile, SealedFile
from forebay.wal.sealing import Damage
from tests.storage.rig import QUICK, values
from tests.support.waiting import until

LARGE = 40_000
"""A record of this size stays in a frame of its own."""
DAMAGED = Gap(0, 3, Reason.DAMAGED)
NAME = "shop/orders"


def _settings(tmp_path: Path, **groups: dict[str, object]) -> Settings:
    shared: dict[str, dict[str, object]] = {
        "storage": {"mode": "shared_fs"},
        "store": {"root": f"{tmp_path}/history"},
        "metadata": {"path": f"{tmp_path}/m.sqlite"},
        "export": {"at_close_seconds_max": 0},
    }
    return Settings.load(overrides={**QUICK, **shared, **groups})


def _value(number: int, size: int = LARGE) -> bytes:
    return b"%06d" % number + os.urandom(size - 6)


def _written(tmp_path: Path, *, size: int = LARGE) -> tuple[Path, list[bytes]]:
    """A topic of three appends of three records in one unsealed file, closed: the file and the values."""
    found = [_value(number, size) for number in range(9)]
    with Storage.open(tmp_path / "a", _settings(tmp_path)) as log:
        topic = log.create_topic(NAME, durability="fsync")
        for first in (0, 3, 6):
            topic.append_many(found[first : first + 3])
    (file,) = (tmp_path / "a").glob("shards/*/*.seg")
    return file, found


def _flip(file: Path, *values: bytes) -> bytes:
    """Damage the frames of these values; the sound bytes."""
    sound = file.read_bytes()
    content = bytearray(sound)
    for value in values:
        content[sound.index(value[:24]) + 12] ^= 1
    file.write_bytes(content)
    return sound


def _in_place(file: Path, sound: bytes) -> None:
    file.write_bytes(sound)


def _by_rename(file: Path, sound: bytes) -> None:
    file.with_suffix(".sound").write_bytes(sound)
    file.with_suffix(".sound").replace(file)


def _shard(topic: Topic) -> SegmentShard:
    return inside(topic).segment(0)


def _read(topic: Topic) -> tuple[list[bytes | None], list[Gap]]:
    gaps: list[Gap] = []
    return values(topic.read(0, on_gap=lambda _, gap: gaps.append(gap))), gaps


def _stepped(history: InsideHistory, topic: Topic) -> Offsets:
    history.step()
    return topic.offsets()


def _note_tries(shard: SegmentShard, tries: list[LogFile], monkeypatch: pytest.MonkeyPatch) -> None:
    sealer = shard.upkeep._sealer
    plain = sealer.seal

    def seal(log: LogFile, may_lack: Callable[[Gap], bool]) -> tuple[SealedFile, list[Damage]]:
        tries.append(log)
        return plain(log, may_lack)

    monkeypatch.setattr(sealer, "seal", seal)


@pytest.mark.parametrize("size", [LARGE, 100], ids=["large frames", "small frames"])
@pytest.mark.parametrize("give", ["seal", "export"])
def test_a_damaged_file_is_not_given_away(tmp_path: Path, give: str, size: int) -> None:
    file, found = _written(tmp_path, size=size)
    _flip(file, found[1])

    with Storage.open(tmp_path / "a", _settings(tmp_path)) as log:
        topic = log.topic(NAME)
        for _ in range(2):
            with pytest.raises(DataLoss) as reported:
                log.seal_topic(NAME) if give == "seal" else log.export_topic(NAME)

            assert f"{NAME}[0]" in str(reported.value)
            assert f"{file} is damaged at byte " in str(reported.value)
            assert "offsets [0, 3)" in str(reported.value)
            assert "--accept-damage" in str(reported.value)
        assert topic.append(b"more") == 9
        assert topic.offsets().exported == 0
        assert _read(topic) == ([*found[3:], b"more"], [DAMAGED])
    assert not list((tmp_path / "history").rglob("*.seg"))


@pytest.mark.parametrize("restore", [_in_place, _by_rename])
@pytest.mark.parametrize("size", [LARGE, 100], ids=["large frames", "small frames"])
def test_the_sound_file_restored_goes_on(tmp_path: Path, restore: Callable[[Path, bytes], None], size: int) -> None:
    file, found = _written(tmp_path, size=size)
    sound = _flip(file, found[1], found[7])
    with Storage.open(tmp_path / "a", _settings(tmp_path)) as log:
        with pytest.raises(DataLoss, match=r"offsets \[0, 3\).*offsets \[6, 9\)"):
            log.seal_topic(NAME)
        restore(file, sound)

        log.seal_topic(NAME)

    with Storage.open(tmp_path / "b", _settings(tmp_path)) as log:
        assert _read(log.topic(NAME)) == (found, [])


@pytest.mark.parametrize("size", [LARGE, 100], ids=["large frames", "small frames"])
def test_accepted_damage_is_in_the_catalog_and_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, size: int
) -> None:
    file, found = _written(tmp_path, size=size)
    _flip(file, found[1])

    with Storage.open(tmp_path / "a", _settings(tmp_path)) as log:
        log.export_topic(NAME, accept_damage=True)

        assert log.topic(NAME).offsets().exported == 9
        (piece,) = _shard(log.topic(NAME)).history.catalog.descriptors()
        log.seal_topic(NAME)

    assert piece.damaged == ((0, 3),)
    (line,) = [record.message for record in caplog.records if "is sealed with damage" in record.message]
    assert f"{NAME}[0]: {file} is sealed with damage at byte " in line and "offsets [0, 3)" in line
    assert f"{NAME}[0]: offsets [0, 3) damaged are in history" in caplog.text
    with Storage.open(tmp_path / "b", _settings(tmp_path)) as log:
        assert _read(log.topic(NAME)) == (found[3:], [DAMAGED])


def test_what_memory_still_holds_is_no_loss(tmp_path: Path) -> None:
    """The owner that wrote the records has them in its tail cache: the file is written again from there."""
    found = [_value(number) for number in range(9)]
    with Storage.open(tmp_path / "a", _settings(tmp_path)) as log:
        topic = log.create_topic(NAME, durability="fsync")
        for first in (0, 3, 6):
            topic.append_many(found[first : first + 3], producer=7, sequence=first // 3)
        (file,) = (tmp_path / "a").glob("shards/*/*.seg")
        _flip(file, found[1], found[8])
        content = bytearray(file.read_bytes())
        content[20] ^= 1  # in the header, which memory holds too
        file.write_bytes(content)

        log.seal_topic(NAME)

    with Storage.open(tmp_path / "b", _settings(tmp_path)) as log:
        topic = log.topic(NAME)
        assert _read(topic) == (found, [])
        assert topic.append_many(found[6:], producer=7, sequence=2) == range(6, 9)


def test_the_background_stops_at_damage_and_goes_on_by_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upkeep, "DAMAGE_RETRY_SECONDS", 0.01)
    file, found = _written(tmp_path)
    sound = _flip(file, found[1])
    with Storage.open(tmp_path / "a", _settings(tmp_path, export={"bytes_min": 1})) as log:
        history = inside(log).workers.history.take_over()
        topic, other = log.topic(NAME), log.create_topic("shop/other")
        tries: list[LogFile] = []
        _note_tries(_shard(topic), tries, monkeypatch)
        topic.rotate()
        until(lambda: len(tries) > 6)

        assert "offsets [0, 3)" in (topic.export_failure() or "")
        assert topic.append(b"more") == 9
        assert other.append(b"0") == 0
        other.rotate()
        until(lambda: _stepped(history, other).exported == 1)
        assert topic.offsets().exported == 0
        assert _read(topic) == ([*found[3:], b"more"], [DAMAGED])
        assert caplog.text.count("no other copy has what stood there") == 1

        _by_rename(file, sound)
        until(lambda: _stepped(history, topic).exported == 9)

        assert topic.export_failure() is None
        assert _read(topic) == ([*found, b"more"], [])


def test_a_damaged_header_is_not_exported(tmp_path: Path) -> None:
    """The file is not even listed then: what is missing before the next file is found by the export."""
    file, found = _written(tmp_path)
    with Storage.open(tmp_path / "a", _settings(tmp_path)) as log:
        inside(log).workers.history.take_over()
        topic = log.topic(NAME)
        topic.rotate()
        topic.append(b"more")
    sound = file.read_bytes()
    file.write_bytes(b"\xff" + sound[1:])
    for index in file.parent.glob("*.idx"):
        index.unlink()

    with Storage.open(tmp_path / "a", _settings(tmp_path)) as log:
        with pytest.raises(DataLoss, match=r"offsets \[0, 9\) are damaged .* or missing before it"):
            log.export_topic(NAME)
        log.export_topic(NAME, accept_damage=True)
        log.seal_topic(NAME)

    with Storage.open(tmp_path / "b", _settings(tmp_path)) as log:
        assert _read(log.topic(NAME)) == ([b"more"], [Gap(0, 9, Reason.DAMAGED)])
    assert found


def test_a_file_that_lost_all_its_frames_stops_too(tmp_path: Path) -> None:
    file, found = _written(tmp_path)
    with Storage.open(tmp_path / "a", _settings(tmp_path)) as log:
        inside(log).workers.history.take_over()
        log.topic(NAME).rotate()
        log.topic(NAME).append(b"more")
    for index in file.parent.glob("*.idx"):
        index.unlink()
    _flip(file, found[1], found[4], found[7])

    with Storage.open(tmp_path / "a", _settings(tmp_path)) as log:
        with pytest.raises(DataLoss, match=r"offsets \[0, 9\)"):
            log.export_topic(NAME)
        log.topic(NAME).delete_before(9)
        log.export_topic(NAME)

        assert log.topic(NAME).offsets().exported == 10


def test_the_newest_file_with_nothing_whole_in_it_is_kept(tmp_path: Path) -> None:
    """It was taken for one without records: nothing of it was sealed, and its range became history in silence."""
    found = _value(0)
    with Storage.open(tmp_path / "a", _settings(tmp_path)) as log:
        log.create_topic(NAME, durability="fsync").append(found)
    (file,) = (tmp_path / "a").glob("shards/*/*.seg")
    sound = _flip(file, found)

    with Storage.open(tmp_path / "a", _settings(tmp_path)) as log:
        with pytest.raises(DataLoss, match=r"offsets \[0, 1\)"):
            log.seal_topic(NAME)
        assert log.topic(NAME).append(b"more") == 1
        _by_rename(file, sound)
        log.seal_topic(NAME)

    with Storage.open(tmp_path / "b", _settings(tmp_path)) as log:
        assert _read(log.topic(NAME)) == ([found, b"more"], [])


@pytest.mark.parametrize("what", ["segment", "index"])
def test_damage_after_the_seal_is_named_and_accepted_too(tmp_path: Path, what: str) -> None:
    file, found = _written(tmp_path)
    with Storage.open(tmp_path / "a", _settings(tmp_path)) as log:
        inside(log).workers.history.take_over()
        topic = log.topic(NAME)
        topic.rotate()
        topic.append(b"more")
        _shard(topic).upkeep.seal_rotated()
        if what == "segment":
            _flip(file, found[4])
        else:
            file.with_suffix(".idx").write_bytes(bytes(100))

        with pytest.raises(Corrupt) as reported:
            log.export_topic(NAME)
        log.export_topic(NAME, accept_damage=True)
        log.seal_topic(NAME)

    if what == "segment":
        assert isinstance(reported.value, DataLoss)
        assert f"{NAME}[0]: {file} is not what was sealed" in str(reported.value)
        assert "damaged at byte" in str(reported.value) and "(offsets [3, 6))" in str(reported.value)
    with Storage.open(tmp_path / "b", _settings(tmp_path)) as log:
        kept = found if what == "index" else [*found[:3], *found[6:]]
        assert _read(log.topic(NAME)) == ([*kept, b"more"], [] if what == "index" else [Gap(3, 6, Reason.DAMAGED)])


def test_the_opening_state_is_needed_too(tmp_path: Path) -> None:
    """It names the producers of the files before: without it the next owner would store their repeats again."""
    file, found = _written(tmp_path)
    with Storage.open(tmp_path / "a", _settings(tmp_path)) as log:
        log.topic(NAME).append(b"more")
        content = bytearray(file.read_bytes())
        content[100] ^= 1
        file.write_bytes(content)

        with pytest.raises(DataLoss, match=r"at byte 64 \(a frame without records\)"):
            log.seal_topic(NAME)
    assert found
