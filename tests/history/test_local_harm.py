"""A local file or its index is lost or damaged under readers: where history has the same records, they miss nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeAlias

import msgspec
import pytest

from forebay import Corrupt, Position, Storage, Topic
from forebay.format.files.segment import index_name
from forebay.settings import RuntimeSettings
from tests.ledger import Ledger
from tests.support.environments import directories
from tests.support.environments.directories import TOPIC, WAL, Environment, numbers, shard_of, told

Harm: TypeAlias = Callable[[Path], object]
FILES: Final = 4
PER_FILE: Final = 10
HARMS: Final[dict[str, Harm]] = {
    "lost": Path.unlink,
    "emptied": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "flipped at its front": lambda path: _flip(path, 3),
    "flipped at its end": lambda path: _flip(path, -3),
}


def _flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def _without_cache(environment: Environment) -> Environment:
    wal = msgspec.structs.replace(WAL, cache_bytes_max=0, sync_interval_ms=2_000)
    return environment.with_groups(wal=wal, runtime=RuntimeSettings(maintenance_interval_ms=60_000))


def _fill(log: Storage) -> Topic:
    """Sealed files, all of them history, and one record that is not."""
    topic = log.create_topic(TOPIC)
    for first in range(0, FILES * PER_FILE, PER_FILE):
        offsets = range(first, first + PER_FILE)
        topic.append_many(
            [b"%d" % n for n in offsets],
            keys=[b"key %d" % n for n in offsets],
            tags=["tag"] * PER_FILE,
            timestamps=[1000 + n for n in offsets],
        )
        log.export_topic(TOPIC)
    topic.append(b"%d" % (FILES * PER_FILE))
    return topic


def _path(topic: Topic, what: str) -> Path:
    """The second file, which no caller has read before, or its index."""
    path = shard_of(topic).wal.files.all[1].path
    return Path(index_name(path) if what == "index" else path)


def _check(topic: Topic) -> None:
    end = FILES * PER_FILE
    assert told(topic.read()) == numbers(0, end + 1)
    assert told(topic.follow(12, timeout=0)) == numbers(12, end + 1)
    assert topic.offset_at_time(1015) == 15
    assert topic.offset_at_time(1000 + end) == end
    assert told(topic.read(Position.at_time(1015))) == numbers(15, end + 1)
    assert told(topic.read_by_key(b"key 15")) == numbers(15, 16)
    assert told(topic.read_by_key(b"key 5", history=True)) == numbers(5, 6)
    assert told(topic.read_by_tag("tag")) == numbers(0, end)


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return _without_cache(directories.shared_fs(tmp_path))


@pytest.mark.parametrize("what", ["segment", "index"])
@pytest.mark.parametrize("harm", HARMS)
def test_readers_step_back_to_history(environment: Environment, harm: str, what: str, ledger: Ledger) -> None:
    with environment.open("A") as log:
        topic = _fill(log)
        HARMS[harm](_path(topic, what))

        _check(topic)
        with environment.open("A", read_only=True) as beside:
            _check(beside.topic(TOPIC))
    with environment.open("A") as log:
        _check(log.topic(TOPIC))
    ledger.count("local files harmed under readers", n=1, of=f"{what} {harm}")


def test_each_file_that_is_stepped_over_is_said_once(
    environment: Environment, caplog: pytest.LogCaptureFixture
) -> None:
    with environment.open("A") as log, caplog.at_level(logging.WARNING):
        topic = _fill(log)
        harmed = [Path(index_name(file.path)) for file in shard_of(topic).wal.files.all[:3]]
        for index in harmed:
            index.unlink()

        for _ in range(3):
            assert told(topic.read()) == numbers(0, 41)

        said = [line for line in caplog.messages if "is read from history" in line]
        assert len(said) == 3 and all(index.stem in line for index, line in zip(harmed, said, strict=True))


@pytest.mark.parametrize("what", ["segment", "index"])
def test_what_only_the_lost_file_had_is_an_error_that_says_what_to_do(tmp_path: Path, what: str) -> None:
    with _without_cache(directories.local(tmp_path)).open("A") as log:
        topic = _fill(log)
        _path(topic, what).unlink()

        with pytest.raises(Corrupt, match="is not there.*forebay verify"):
            told(topic.read())
        assert told(topic.read(20)) == numbers(20, 41)


def test_damaged_postings_are_named_with_what_to_do(environment: Environment) -> None:
    with environment.open("A") as log:
        topic = _fill(log)
        path = _path(topic, "index")
        _flip(path, path.stat().st_size // 2)

        with pytest.raises(Corrupt, match=f"the index of .*{path.stem}.*forebay repair"):
            told(topic.read_by_key(b"key 15"))
        assert told(topic.read()) == numbers(0, 41)
