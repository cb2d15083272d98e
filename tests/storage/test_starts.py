"""Where a stream may start: up to the end of a partition. A caller's number behind it is refused by name."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import forebay
import forebay.aio
from forebay import EARLIEST, LATEST, Invalid, Position, Storage, Topic
from forebay.progress import Progress, ReaderName
from forebay.testing.inside import inside
from tests.cli.rig import Shell
from tests.looking import EXPORTED, TOPIC, begin_owner, end_owner, settings_of
from tests.storage.rig import QUICK, values

STARTS: dict[str, Callable[[Topic, int], object]] = {
    "read": lambda topic, start: list(topic.read(start)),
    "read a position": lambda topic, start: list(topic.read(Position.at_offset(start))),
    "read by partition": lambda topic, start: list(topic.read({0: start})),
    "read up to a stop": lambda topic, start: list(topic.read(start, stop=start + 1)),
    "read_arrow": lambda topic, start: list(topic.read_arrow(start)),
    "follow": lambda topic, start: list(topic.follow(start, timeout=0)),
    "reader": lambda topic, start: list(topic.reader("new").read(start=Position.at_offset(start))),
}


@pytest.fixture(params=["segment", "rocksdb", "memory"])
def topic(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Topic]:
    with forebay.open(tmp_path / "log", QUICK) as log:
        topic = log.create_topic("t", engine=request.param)
        topic.append_many([b"%d" % number for number in range(5)])
        yield topic


@pytest.mark.parametrize("start", STARTS)
def test_a_start_behind_the_end_is_refused_and_names_the_end(topic: Topic, start: str) -> None:
    """Seen from outside: a read gave nothing, and a follower waited for ever."""
    for offset in (6, 100):
        with pytest.raises(Invalid, match=f"ends at offset 5, and start is {offset}"):
            STARTS[start](topic, offset)

    assert not STARTS[start](topic, 5)
    topic.append(b"5")
    assert STARTS[start](topic, 5)
    topic.delete_before(6)
    assert not STARTS[start](topic, 6)
    with pytest.raises(Invalid, match="ends at offset 6"):
        STARTS[start](topic, 7)


def test_the_latest_and_the_end_itself_are_fine(topic: Topic) -> None:
    assert list(topic.read(LATEST)) == list(topic.follow(LATEST, timeout=0)) == []
    follower = topic.follow(5, timeout=60)
    topic.append(b"new")
    assert next(follower).value == b"new"
    assert values(topic.read({0: EARLIEST}))[-1] == b"new"


def test_the_same_holds_in_an_event_loop_and_on_the_command_line(tmp_path: Path) -> None:
    async def main() -> None:
        async with forebay.aio.open(tmp_path / "log", QUICK) as log:
            topic = await log.create_topic("t")
            await topic.append_many([b"v"] * 5)
            for stream in (topic.read(100), topic.follow(100, timeout=0)):
                with pytest.raises(Invalid, match="ends at offset 5"):
                    await anext(stream)

    asyncio.run(main())

    shell = Shell(tmp_path / "log")
    for words in (["--from", "100"], ["--from", "6", "--follow", "--timeout", "0"]):
        outcome = shell.run("consume", "t", *words)
        assert outcome.code == 2
        assert "ends at offset 5" in outcome.err
    assert shell.ok("consume", "t", "--from", "5").out == ""


def test_beside_the_owner_the_end_is_what_it_has_published(tmp_path: Path) -> None:
    with forebay.open(tmp_path / "log", QUICK) as log, forebay.open(tmp_path / "log", QUICK, read_only=True) as beside:
        topic = log.create_topic("t")
        topic.append_many([b"v"] * 5)
        seen = beside.topic("t")
        with pytest.raises(Invalid, match="ends at offset 5"):
            seen.read(6)
        assert list(seen.read(5)) == []


@pytest.mark.slow
def test_elsewhere_a_start_may_lie_in_what_is_not_exported_yet(tmp_path: Path) -> None:
    """The end of such a partition is known to its holder alone; what was never reserved cannot be meant."""
    end_owner(begin_owner(tmp_path, "die"))
    with forebay.open(tmp_path / "b", settings_of(tmp_path)) as log:
        topic = log.topic(TOPIC)
        follower = topic.follow(EXPORTED + 1, timeout=60)
        with pytest.raises(Invalid, match="ends at offset"):
            topic.follow(1_000_000)
        with forebay.open(tmp_path / "a", settings_of(tmp_path)) as owner:
            owner.export_topic(TOPIC)
            assert next(follower).offset == EXPORTED + 1


def test_a_stored_place_behind_the_end_waits_there_and_never_goes_back(tmp_path: Path) -> None:
    """As where a reader looks from another directory, or a topic was restored from an older backup."""
    with forebay.open(tmp_path / "log", QUICK) as log:
        topic = log.create_topic("t")
        topic.append_many([b"v"] * 5)
        _store(log, topic, 7)
        reader = topic.reader("r")

        assert list(reader.read()) == list(reader.follow(timeout=0)) == []
        assert reader.offset() == 7
        topic.append_many([b"5", b"6", b"7"])
        assert values(reader.read()) == [b"7"]
        assert reader.ack_up_to(3) == 7


def _store(log: Storage, topic: Topic, offset: int) -> None:
    name = ReaderName(topic.spec.namespace, topic.spec.topic, "r")
    inside(log).progress.ack_up_to(name, {0: Progress(offset=offset, incarnation=topic.spec.topic_id)})
