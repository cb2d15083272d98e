"""Look-ups and deletes treat damage as reading does: what they cannot see they name, and never step over in silence."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from forebay import DataLoss, aio
from forebay.records import Gap, Reason
from forebay.settings import Settings
from forebay.storage import Storage, Topic
from tests.storage.rig import QUICK, values

NAME: Final = "shop/orders"
OLD: Final = b"old of the key " + b"." * 100
NEW: Final = b"new of the key " + b"." * 90_000
"""So long that a place in its first third is in no sample that the name of an object's content is made of."""
OTHER: Final = b"of another key " + b"." * 100


def _settings(tmp_path: Path, mode: str = "shared_fs") -> Settings:
    shared: dict[str, dict[str, object]] = {"storage": {"mode": mode}, "metadata": {"path": f"{tmp_path}/m.sqlite"}}
    if mode == "shared_fs":
        shared |= {"store": {"root": f"{tmp_path}/history"}, "export": {"at_close_seconds_max": 0}}
    return Settings.load(overrides={**QUICK, **shared})


def _flip(file: Path, place: int) -> None:
    """Change one byte, as rot does: the time of the last change stays."""
    before = file.stat()
    with file.open("r+b") as opened:
        opened.seek(place)
        byte = opened.read(1)[0]
        opened.seek(place)
        opened.write(bytes([byte ^ 1]))
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def _place(file: Path, value: bytes) -> int:
    return file.read_bytes().index(value) + len(value) // 3


def _fill(topic: Topic) -> None:
    """Three appends in two files, the newest of the key in the second."""
    topic.append(OLD, key=b"k", tag="t")
    topic.rotate()
    topic.append(NEW, key=b"k", tag="t")
    topic.append(OTHER, key=b"other", tag="u")


class Damaged:
    """A topic of which the newest record of a key is damaged somewhere, and how to make that good."""

    def __init__(self, tmp_path: Path, where: str) -> None:
        self.root = tmp_path
        self.where = where
        self.settings = _settings(tmp_path)
        with Storage.open(tmp_path / "a", self.settings) as log:
            topic = log.create_topic(NAME, durability="fsync")
            _fill(topic)
            if where == "object":
                log.seal_topic(NAME)
        pattern = "history/**/*.seg" if where == "object" else "a/shards/*/*.seg"
        self.file = next(file for file in sorted(tmp_path.glob(pattern)) if NEW in file.read_bytes())
        self.place = _place(self.file, NEW)
        _flip(self.file, self.place)

    def open(self) -> Storage:
        return Storage.open(self.root / ("b" if self.where == "object" else "a"), self.settings)

    def restore(self) -> None:
        """Put the byte right, whatever was appended meanwhile."""
        _flip(self.file, self.place)


@pytest.fixture(params=["file", "object"])
def damaged(request: pytest.FixtureRequest, tmp_path: Path) -> Damaged:
    return Damaged(tmp_path, request.param)


LOOKUPS: Final[dict[str, Callable[[Topic], list[bytes | None]]]] = {
    "newest": lambda topic: values(topic.read_by_key(b"k")),
    "by key": lambda topic: values(topic.read_by_key(b"k", history=True)),
    "by tag": lambda topic: values(topic.read_by_tag("t")),
}


@pytest.mark.parametrize("look_up", LOOKUPS.values(), ids=LOOKUPS)
def test_a_damaged_match_is_data_loss(damaged: Damaged, look_up: Callable[[Topic], list[bytes | None]]) -> None:
    with damaged.open() as log:
        for _ in range(2):
            with pytest.raises(DataLoss, match=r"shop/orders\[0\]: offsets \[1, 2\) damaged cannot be read"):
                look_up(log.topic(NAME))


def test_on_gap_learns_of_it_and_the_look_up_goes_on(damaged: Damaged) -> None:
    heard: list[tuple[int, Gap]] = []
    gap = (0, Gap(1, 2, Reason.DAMAGED))
    with damaged.open() as log:
        topic = log.topic(NAME)

        newest = values(topic.read_by_key(b"k", on_gap=lambda *reported: heard.append(reported)))
        assert (newest, heard) == ([OLD], [gap])
        history = values(topic.read_by_key(b"k", history=True, on_gap=lambda *reported: heard.append(reported)))
        assert (history, heard) == ([OLD], [gap] * 2)
        tagged = values(topic.read_by_tag("t", on_gap=lambda *reported: heard.append(reported)))
        assert (tagged, heard) == ([OLD], [gap] * 3)


def test_after_the_error_a_stream_goes_on_behind_it(damaged: Damaged) -> None:
    with damaged.open() as log:
        stream = log.topic(NAME).read_by_key(b"k")
        with pytest.raises(DataLoss):
            next(stream)

        assert values(stream) == [OLD]


def test_what_is_newer_than_the_damage_is_the_answer(damaged: Damaged) -> None:
    with damaged.open() as log:
        topic = log.topic(NAME)
        topic.append(b"newest", key=b"k")

        assert values(topic.read_by_key(b"k")) == [b"newest"]


def test_a_delete_that_cannot_see_a_range_is_refused_and_holds_once_it_can(damaged: Damaged) -> None:
    with damaged.open() as log:
        topic = log.topic(NAME)
        with pytest.raises(DataLoss, match=r"offsets \[1, 2\) are damaged .* nothing is deleted"):
            topic.delete_by_key(b"k")
        with pytest.raises(DataLoss, match=r"offsets \[1, 2\) are damaged .* nothing is deleted"):
            topic.delete_by_tag("t")
        assert values(topic.read(0, stop=1)) == [OLD]
    damaged.restore()

    with damaged.open() as log:
        topic = log.topic(NAME)
        assert values(topic.read_by_key(b"k")) == [NEW]
        assert topic.delete_by_key(b"k") == 2
        assert values(topic.read(0)) == [OTHER]


def test_a_delete_by_offset_holds_for_damaged_records(damaged: Damaged) -> None:
    """It is the way on after a refusal, so the records must stay away when their bytes are restored."""
    with damaged.open() as log:
        topic = log.topic(NAME)
        topic.delete_by_offset(1, 2)
        assert topic.delete_by_key(b"k") == 1
        assert values(topic.read_by_key(b"k")) == []
    damaged.restore()

    with damaged.open() as log:
        topic = log.topic(NAME)
        assert values(topic.read_by_key(b"k", history=True)) == []
        assert values(topic.read(0)) == [OTHER]


def test_damage_under_an_open_log_is_seen_and_so_is_its_end(tmp_path: Path) -> None:
    with Storage.open(tmp_path / "a", _settings(tmp_path)) as log:
        _fill(log.create_topic(NAME, durability="fsync"))
    with Storage.open(tmp_path / "a", _settings(tmp_path)) as log:
        topic = log.topic(NAME)
        newest = sorted((tmp_path / "a").glob("shards/*/*.seg"))[-1]
        place = _place(newest, NEW)
        _flip(newest, place)
        with pytest.raises(DataLoss):
            values(topic.read_by_key(b"k"))

        _flip(newest, place)

        assert values(topic.read_by_key(b"k")) == [NEW]
        assert values(topic.read_by_tag("t")) == [OLD, NEW]


def test_what_memory_holds_is_found(tmp_path: Path) -> None:
    with Storage.open(tmp_path / "a", _settings(tmp_path)) as log:
        topic = log.create_topic(NAME, durability="fsync")
        _fill(topic)
        topic.append(b"no key")
        topic.append(b"empty key", key=b"")
        newest = sorted((tmp_path / "a").glob("shards/*/*.seg"))[-1]
        _flip(newest, _place(newest, NEW))

        assert values(topic.read_by_key(b"k")) == [NEW]
        assert values(topic.read_by_key(b"k", history=True)) == [OLD, NEW]
        assert values(topic.read_by_key(b"", history=True)) == [b"empty key"]
        assert topic.delete_by_key(b"k") == 2


def test_accepted_damage_is_named_by_the_next_owner(tmp_path: Path) -> None:
    damaged = Damaged(tmp_path, "file")
    with damaged.open() as log:
        log.seal_topic(NAME, accept_damage=True)
    with Storage.open(tmp_path / "b", damaged.settings) as log:
        topic = log.topic(NAME)
        with pytest.raises(DataLoss, match=r"offsets \[1, 2\)"):
            values(topic.read_by_key(b"k"))
        with pytest.raises(DataLoss, match="nothing is deleted"):
            topic.delete_by_key(b"unknown")
        assert topic.append(NEW, key=b"k") == 3
        assert values(topic.read_by_key(b"k")) == [NEW]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with Storage.open(tmp_path / "a", _settings(tmp_path, "local")) as log:
        topic = log.create_topic(NAME, durability="fsync")
        _fill(topic)
        topic.rotate()
        topic.append(OTHER, key=b"other")
    middle = sorted((tmp_path / "a").glob("shards/*/*.seg"))[1]
    sound = middle.read_bytes()
    middle.write_bytes(b"\xff" * 64 + sound[64:])
    middle.with_suffix(".idx").unlink(missing_ok=True)

    with Storage.open(tmp_path / "a", _settings(tmp_path, "local")) as log:
        topic = log.topic(NAME)
        with pytest.raises(DataLoss, match=r"offsets \[1, 3\)"):
            values(topic.read_by_key(b"k"))
        with pytest.raises(DataLoss, match="nothing is deleted"):
            topic.delete_by_tag("t")


def test_a_second_process_gets_it_too(tmp_path: Path) -> None:
    damaged = Damaged(tmp_path, "file")
    with (
        Storage.open(tmp_path / "a", damaged.settings, read_only=True) as log,
        pytest.raises(DataLoss, match=r"offsets \[1, 2\)"),
    ):
        values(log.topic(NAME).read_by_key(b"k"))


def test_the_same_in_asyncio(tmp_path: Path) -> None:
    damaged = Damaged(tmp_path, "file")

    async def look() -> tuple[list[bytes | None], list[Gap]]:
        heard: list[Gap] = []
        async with aio.open(tmp_path / "a", damaged.settings) as log:
            topic = await log.topic(NAME)
            found = [record.value async for record in topic.read_by_key(b"k", on_gap=lambda _, gap: heard.append(gap))]
            found += [record.value async for record in topic.read_by_tag("t", on_gap=lambda _, gap: heard.append(gap))]
        return found, heard

    assert asyncio.run(look()) == ([OLD, OLD], [Gap(1, 2, Reason.DAMAGED)] * 2)


@pytest.mark.parametrize("where", ["file", "accepted", "read only"])
def test_a_time_in_a_damaged_range_leads_to_it(tmp_path: Path, where: str) -> None:
    """The first record at or after the time may have stood there: a reader that begins there gets the gap."""
    settings = _settings(tmp_path)
    with Storage.open(tmp_path / "a", settings) as log:
        topic = log.create_topic(NAME, durability="fsync")
        for number in range(5):
            value = NEW if number in (2, 4) else OTHER
            topic.append_many([value] * 2, timestamps=[1_000 * number] * 2)
    (file,) = (tmp_path / "a").glob("shards/*/*.seg")
    _flip(file, _place(file, NEW))
    _flip(file, file.read_bytes().rindex(NEW) + 1_000)
    if where == "accepted":
        with Storage.open(tmp_path / "a", settings) as log:
            log.seal_topic(NAME, accept_damage=True)

    name = "b" if where == "accepted" else "a"
    with Storage.open(tmp_path / name, settings, read_only=where == "read only") as log:
        topic = log.topic(NAME)
        for _ in range(2):
            assert [topic.offset_at_time(time) for time in (0, 1_000, 1_001, 2_000, 3_000)] == [0, 2, 4, 4, 4]
            assert topic.offset_at_time(4_000) == topic.offset_at_time(9_000) == 8
        with pytest.raises(DataLoss, match=r"offsets \[4, 6\)"):
            next(topic.read(topic.offset_at_time(2_000) or 0))
        if where == "file":
            topic.delete_by_offset(4, 6)
            assert [topic.offset_at_time(time) for time in (1_001, 2_000, 3_000, 4_000)] == [6, 6, 6, 8]
