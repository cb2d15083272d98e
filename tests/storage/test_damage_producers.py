"""A window of producers that damage has made partial refuses what may be a repeat, and never stores one again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import pytest

from forebay import Conflict, DataLoss
from forebay.settings import Settings
from forebay.storage import Storage, Topic
from tests.storage.rig import QUICK, values

NAME: Final = "shop/orders"
SIZE: Final = 2_000
APPENDS: Final = 100


def _settings(tmp_path: Path) -> Settings:
    return Settings.load(
        overrides={
            **QUICK,
            "storage": {"mode": "shared_fs"},
            "store": {"root": f"{tmp_path}/history"},
            "metadata": {"path": f"{tmp_path}/m.sqlite"},
            "export": {"at_close_seconds_max": 0},
        }
    )


def _open(tmp_path: Path, name: str) -> Storage:
    return Storage.open(tmp_path / name, _settings(tmp_path))


def _produce(topic: Topic, stop: int = APPENDS) -> None:
    for sequence in range(stop):
        topic.append(b"%06d" % sequence + os.urandom(SIZE), producer=7, sequence=sequence)


def _flip(file: Path) -> None:
    """Damage a byte at a third of the file, which no sample of the content covers."""
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 1
    file.write_bytes(content)


def _exported(tmp_path: Path) -> Path:
    """A topic with one producer, sealed; its only object."""
    with _open(tmp_path, "a") as log:
        _produce(log.create_topic(NAME, durability="disk"))
        log.seal_topic(NAME)
    (found,) = (tmp_path / "history").rglob("*.seg")
    return found


def _repeat(topic: Topic, sequence: int = 0, producer: int = 7) -> int:
    return topic.append(b"again", producer=producer, sequence=sequence)


def test_a_damaged_newest_object_refuses_repeats_and_nothing_else(tmp_path: Path) -> None:
    _flip(_exported(tmp_path))

    with _open(tmp_path, "b") as log:
        topic = log.topic(NAME)
        for sequence, producer in ((0, 7), (99, 7), (100, 7), (0, 8)):
            with pytest.raises(Conflict, match="is not known, because the log or its history is damaged"):
                _repeat(topic, sequence, producer)
        assert topic.append(b"plain") == APPENDS
        assert values(topic.read(APPENDS)) == [b"plain"]
        assert topic.last_sequence(7) is None


def test_the_refusal_outlives_restarts_and_moves(tmp_path: Path) -> None:
    _flip(_exported(tmp_path))
    for number, name in enumerate(("b", "b", "c", "c")):
        with _open(tmp_path, name) as log:
            topic = log.topic(NAME)
            with pytest.raises(Conflict):
                _repeat(topic)
            assert topic.append(b"plain") == APPENDS + number
            topic.rotate()
            if number == 1:
                log.seal_topic(NAME)


def test_the_object_put_right_before_anything_is_appended_shows_again(tmp_path: Path) -> None:
    found = _exported(tmp_path)
    _flip(found)
    with _open(tmp_path, "b") as log, pytest.raises(Conflict):
        _repeat(log.topic(NAME))
    _flip(found)

    with _open(tmp_path, "b") as log:
        topic = log.topic(NAME)
        assert _repeat(topic, 0) == 0
        assert _repeat(topic, APPENDS) == APPENDS


@pytest.mark.parametrize("call", ["export", "seal"])
def test_the_operator_may_go_on(tmp_path: Path, call: str) -> None:
    _flip(_exported(tmp_path))
    with _open(tmp_path, "b") as log:
        log.topic(NAME).append(b"plain")
        if call == "export":
            log.export_topic(NAME, accept_damage=True)
            assert _repeat(log.topic(NAME), producer=8) == APPENDS + 1
        else:
            log.seal_topic(NAME, accept_damage=True)

    with _open(tmp_path, "b" if call == "export" else "c") as log:
        topic = log.topic(NAME)
        assert _repeat(topic, producer=8) == APPENDS + 1
        assert _repeat(topic, producer=9) == APPENDS + 2


def test_a_missing_newest_object_does_not_keep_the_topic_closed(tmp_path: Path) -> None:
    _exported(tmp_path).unlink()

    with _open(tmp_path, "b") as log:
        topic = log.topic(NAME)
        with pytest.raises(Conflict):
            _repeat(topic)
        assert topic.append(b"plain") == APPENDS


def test_a_damaged_log_file_refuses_repeats_until_it_is_put_right(tmp_path: Path) -> None:
    with _open(tmp_path, "a") as log:
        _produce(log.create_topic(NAME, durability="disk"), 30)
    (file,) = (tmp_path / "a").glob("shards/*/*.seg")
    _flip(file)
    # Else it would record producers, and nothing would have to be read for that.
    (file.parent / "checkpoint").unlink()
    with _open(tmp_path, "a") as log:
        topic = log.topic(NAME)
        assert _repeat(topic, 29) == 29, "known from frames behind the damage"
        with pytest.raises(Conflict, match="older than its last"):
            _repeat(topic, 0)
        with pytest.raises(Conflict, match="is not known, because"):
            _repeat(topic, producer=8)
        topic.append(b"plain")
        topic.rotate()
    _flip(file)

    with _open(tmp_path, "a") as log, pytest.raises(Conflict, match="is not known, because"):
        _repeat(log.topic(NAME), producer=8)


def test_a_log_that_was_closed_in_order_knows_its_producers_whatever_becomes_of_the_file(tmp_path: Path) -> None:
    """The checkpoint of a clean stop records them: a repeat gets its offset though its record cannot be read."""
    with _open(tmp_path, "a") as log:
        _produce(log.create_topic(NAME, durability="disk"), 30)
    (file,) = (tmp_path / "a").glob("shards/*/*.seg")
    _flip(file)

    for _ in range(2):
        with _open(tmp_path, "a") as log:
            topic = log.topic(NAME)
            assert [_repeat(topic, sequence) for sequence in range(30)] == list(range(30))
            assert topic.offsets().next == 30
            with pytest.raises(DataLoss):
                list(topic.read())
