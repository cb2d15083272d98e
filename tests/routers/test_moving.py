"""Routers that run in a log: every record that the rule takes arrives once, whatever happens between."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay.appends.producer_window import ReservedProducer
from forebay.errors import Conflict, Invalid, Unavailable, UnknownTopic
from forebay.format.metadata.keys import router_key
from forebay.metadata import Put
from forebay.progress import ReservedReader
from forebay.records import EARLIEST, LATEST
from forebay.routers import Routers, RouterState
from forebay.routers.book import CREATE_SECONDS, ORPHAN_SECONDS, RULES_MAX, OrphanCursors, RouterBook
from forebay.routers.mover import Mover
from forebay.settings import WalSettings
from forebay.storage import Storage, Topic
from forebay.storage.cursors import Reader
from forebay.testing.inside import inside
from forebay.testing.simulated.clock import ManualClock
from tests.support.waiting import until


@contextmanager
def _running(log: Storage) -> Iterator[Routers]:
    routers = Routers(log)
    with routers.running():
        yield routers


def _values(topic: Topic) -> list[bytes]:
    """What the topic has, sorted: partitions are read one after another."""
    return sorted(record.value or b"" for record in topic.read())


def _arrived(topic: Topic, count: int) -> list[bytes]:
    until(lambda: len(_values(topic)) >= count)
    return _values(topic)


def _numbers(*ranges: range) -> list[bytes]:
    return sorted(b"%04d" % number for one in ranges for number in one)


def _fill(topic: Topic, numbers: range, **options: Any) -> None:
    for number in numbers:
        topic.append(b"%04d" % number, key=b"k%d" % (number % 17), tag="even" if number % 2 == 0 else "odd", **options)


def test_records_before_and_after_the_start_arrive_with_all_their_fields(tmp_path: Path) -> None:
    with forebay.open(tmp_path) as log, _running(log) as routers:
        source = log.create_topic("shop/orders", partitions=3)
        target = log.create_topic("shop/paid", partitions=2)
        source.append(b"0", key=b"k", tag="paid", headers={"h": b"1", "x": b"2"}, timestamp=77, partition=1)
        source.append(b"1", tag="open")

        routers.create(
            "paid",
            sources=["shop/orders"],
            destination="shop/paid",
            start=EARLIEST,
            tags=["paid"],
            set_headers={"by": b"paid"},
            remove_headers=["x"],
        )
        source.append(None, key=b"", tag="paid", timestamp=78)

        assert len(_arrived(target, 2)) == 2
        found = {record.timestamp: record for record in target.read()}
        assert (found[77].key, found[77].value, found[77].tag) == (b"k", b"0", "paid")
        assert found[77].headers == (("h", b"1"), ("by", b"paid"))
        assert (found[78].key, found[78].value) == (b"", None)


def test_a_router_begins_at_the_end_if_nothing_else_is_said(tmp_path: Path) -> None:
    with forebay.open(tmp_path) as log:
        source, target = log.create_topic("a"), log.create_topic("b")
        _fill(source, range(5))
        routers = Routers(log)
        routers.create("r", sources=["a"], destination="b")
        # Before any process runs it, and after it was defined.
        _fill(source, range(5, 8))
        with routers.running():
            assert _arrived(target, 3) == _numbers(range(5, 8))


def test_order_is_kept_within_a_key(tmp_path: Path) -> None:
    with forebay.open(tmp_path) as log, _running(log) as routers:
        source, target = log.create_topic("a", partitions=4), log.create_topic("b", partitions=3)
        routers.create("r", sources=["a"], destination="b", start=EARLIEST)
        _fill(source, range(600))
        _arrived(target, 600)

        by_key: dict[bytes | None, list[bytes | None]] = {}
        for record in target.read():
            by_key.setdefault(record.key, []).append(record.value)
        assert len(by_key) == 17
        assert all(values == sorted(values, key=lambda value: value or b"") for values in by_key.values())


@pytest.mark.slow
def test_a_router_that_is_stopped_and_started_again_doubles_nothing(tmp_path: Path) -> None:
    for turn in range(4):
        with forebay.open(tmp_path) as log:
            source = log.create_topic("a", partitions=2, exist_ok=True)
            target = log.create_topic("b", partitions=3, exist_ok=True)
            routers = Routers(log)
            if turn == 0:
                routers.create("r", sources=["a"], destination="b", start=EARLIEST)
            for part in range(3):
                routers.start()
                _fill(source, range(turn * 90 + part * 30, turn * 90 + part * 30 + 30))
                if part == 1:
                    routers.stop()
            routers.start()
            assert _arrived(target, (turn + 1) * 90) == _numbers(range((turn + 1) * 90))
            routers.stop()


@pytest.mark.parametrize("durability", ["disk", "fsync", "memory"])
def test_what_arrived_is_known_to_the_destination_also_without_a_cursor(
    tmp_path: Path, durability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*arguments: object) -> None:
        """The process dies before any cursor is stored."""

    monkeypatch.setattr(Mover, "note_cursor", never)
    with forebay.open(tmp_path) as log:
        source = log.create_topic("a", partitions=2)
        target = log.create_topic("b", partitions=3, durability=durability)
        routers = Routers(log)
        routers.create("r", sources=["a"], destination="b", start=EARLIEST)
        for turn in range(3):
            with routers.running():
                _fill(source, range(turn * 40, turn * 40 + 40))
                assert _arrived(target, turn * 40 + 40) == _numbers(range(turn * 40 + 40))
        assert routers.status("r").lag == 120


@pytest.mark.slow
def test_the_cursor_waits_until_what_arrived_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole: Callable[..., Any] = Mover.note_cursor
    noted = threading.Semaphore(0)

    async def counted(mover: Mover, way: Any) -> None:
        await whole(mover, way)
        noted.release()

    monkeypatch.setattr(Mover, "note_cursor", counted)
    with forebay.open(tmp_path, {"wal": {"sync_interval_ms": 600_000}}) as log, _running(log) as routers:
        source, target = log.create_topic("a", durability="fsync"), log.create_topic("b", durability="disk")
        routers.create("r", sources=["a"], destination="b", start=EARLIEST)
        _fill(source, range(20))
        _arrived(target, 20)
        assert target.offsets().durable < 20
        while noted.acquire(blocking=False):
            pass
        for _ in range(2):
            # The second one began after the records had arrived.
            assert noted.acquire(timeout=240)
        assert routers.status("r").lag == 20, "a power loss may still take them from the destination"

        target.flush()
        until(lambda: routers.status("r").lag == 0)


def test_the_cursor_follows_into_a_destination_that_never_makes_anything_durable(tmp_path: Path) -> None:
    """What engine `memory` holds ends with the process: a router goes on behind it, and routes nothing again."""
    with forebay.open(tmp_path) as log, _running(log) as routers:
        source, target = log.create_topic("a", partitions=2), log.create_topic("b", engine="memory", partitions=2)
        routers.create("r", sources=["a"], destination="b", start=EARLIEST)
        _fill(source, range(40))
        assert _arrived(target, 40) == _numbers(range(40))

        until(lambda: routers.status("r").lag == 0)

    with forebay.open(tmp_path) as log, _running(log) as routers:
        _fill(log.topic("a"), range(40, 50))
        assert _arrived(log.topic("b"), 10) == _numbers(range(40, 50))
        until(lambda: routers.status("r").lag == 0)
        assert _values(log.topic("b")) == _numbers(range(40, 50))


def test_other_producers_between_two_records_do_not_make_the_router_forget(tmp_path: Path) -> None:
    settings = {"wal": {"producers_max": 16}}
    with forebay.open(tmp_path, settings) as log:
        source, target = log.create_topic("a"), log.create_topic("b")
        routers = Routers(log)
        routers.create("r", sources=["a"], destination="b", start=EARLIEST)
        with routers.running():
            _fill(source, range(3))
            _arrived(target, 3)
        for producer in range(1, 200):
            target.append(b"9999", producer=producer, sequence=0)
            target.append(b"9999", producer=ReservedProducer(2**63 + producer), sequence=0)
        routers_again = Routers(log)
        with routers_again.running():
            _fill(source, range(3, 6))
            found = Counter(_arrived(target, 6 + 398))
        assert found == Counter([*_numbers(range(6)), *[b"9999"] * 398])


@pytest.mark.slow
def test_partitions_that_are_added_to_either_topic_are_used(tmp_path: Path) -> None:
    with forebay.open(tmp_path) as log, _running(log) as routers:
        source, target = log.create_topic("a"), log.create_topic("b")
        routers.create("r", sources=["a"], destination="b", start=EARLIEST)
        _fill(source, range(100))
        _arrived(target, 100)

        log.alter_topic("b", partitions=4)
        log.alter_topic("a", partitions=3)
        _fill(source, range(100, 300))
        assert _arrived(target, 300) == _numbers(range(300))
        # Once the move to the new number is stored, later records are spread by it.
        until(lambda: log.topic("a").reader(routers.get("r").reader).note(0) == "1 4")
        _fill(source, range(300, 400))
        assert _arrived(target, 400) == _numbers(range(400))
        assert all(target.offsets(number).next > 0 for number in range(4))


def test_partitions_added_while_nothing_is_noted_double_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*arguments: object) -> None:
        """The process dies before any cursor is stored."""

    with forebay.open(tmp_path) as log:
        source, target = log.create_topic("a"), log.create_topic("b", partitions=2)
        routers = Routers(log)
        routers.create("r", sources=["a"], destination="b", start=EARLIEST)
        with monkeypatch.context() as patched:
            patched.setattr(Mover, "note_cursor", never)
            with routers.running():
                _fill(source, range(60))
                _arrived(target, 60)
        log.alter_topic("b", partitions=7)
        _fill(source, range(60, 90))
        with routers.running():
            assert _arrived(target, 90) == _numbers(range(90))


def test_a_new_rule_holds_from_the_next_record_on_also_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*arguments: object) -> None:
        """The process dies before any cursor is stored."""

    with forebay.open(tmp_path) as log:
        source, target = log.create_topic("a"), log.create_topic("b", partitions=3)
        routers = Routers(log)
        routers.create("r", sources=["a"], destination="b", start=EARLIEST, tags=["even"])
        with monkeypatch.context() as patched:
            patched.setattr(Mover, "note_cursor", never)
            with routers.running():
                _fill(source, range(60))
                _arrived(target, 30)
        # Everything is routed again, by the old rule up to where it had come and by the new one from there on.
        routers.alter("r", tags=["odd"], key="tag")
        _fill(source, range(60, 80))
        with routers.running():
            found = _arrived(target, 41)
        # The last that had arrived is 58; that 59 was left out is stored nowhere.
        assert found == _numbers(range(0, 60, 2), range(59, 80, 2))
        assert len(routers.get("r").rules) == 2
        # Once the switch is stored the old rule is of no use any more.
        routers.alter("r", tags=["even"])
        assert [rule.tags for rule in routers.get("r").rules] == [("odd",), ("even",)]


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_a_record_that_is_appended_after_an_alter_is_judged_by_the_new_rule(tmp_path: Path, where: str) -> None:
    with forebay.open(tmp_path) as log, _running(log) as routers:
        source, target = log.create_topic("a"), log.create_topic("b")
        routers.create("r", sources=["a"], destination="b", tags=["even"], start=EARLIEST)
        # One that runs no routers tells this runner nothing, as another process does not.
        altering = routers if where == "here" else Routers(log)
        expected: list[range] = []
        for turn in range(5):
            expected.append(range(turn * 10 + turn % 2, turn * 10 + 10, 2))
            _fill(source, range(turn * 10, turn * 10 + 10))
            assert _arrived(target, 5 * turn + 5) == _numbers(*expected)
            altering.alter("r", tags=["odd" if turn % 2 == 0 else "even"])


def _notes(reader: Reader, note: str) -> bool:
    return reader.note(0) == note


def test_a_rule_that_a_mover_is_about_to_note_is_kept_however_often_the_router_is_altered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole: Callable[..., Any] = Reader.reset
    altered: list[int] = []

    def late(reader: Reader, *arguments: Any, **options: Any) -> int:
        """The mover has chosen the rule for an added partition; the router is altered before it is noted."""
        is_late = altered == [0]
        if is_late:
            altered.append(1)
            for tag in ("a", "b", "c"):
                newest = routers.alter("r", tags=[tag])
                # The mover of the other partition needs the old rule no more.
                until(partial(_notes, source.reader(newest.reader), f"{newest.version} 1"))
        result: int = whole(reader, *arguments, **options)
        if is_late:
            altered.append(2)
            raise Unavailable("the process dies here")
        return result

    monkeypatch.setattr(Reader, "reset", late)
    monkeypatch.setattr("forebay.routers.mover.WAIT_SECONDS", 0.02)
    with forebay.open(tmp_path) as log:
        source, target = log.create_topic("a"), log.create_topic("b")
        routers = Routers(log)
        routers.create("r", sources=["a"], destination="b", start=EARLIEST)
        log.alter_topic("a", partitions=2)
        altered.append(0)
        with routers.running():
            until(lambda: altered == [0, 1, 2])
            source.append(b"x", tag="c", partition=1)
            assert _arrived(target, 1) == [b"x"]


def test_no_rule_is_kept_for_a_topic_that_has_only_the_name_of_a_source(tmp_path: Path) -> None:
    with forebay.open(tmp_path) as log:
        log.create_topic("a")
        log.create_topic("b")
        routers = Routers(log)
        routers.create("r", sources=["a"], destination="b")
        log.delete_topic("a")
        log.create_topic("a")
        for number in range(5):
            routers.alter("r", tags=[str(number)])
        assert [rule.tags for rule in routers.get("r").rules] == [("3",), ("4",)]


@pytest.mark.slow
def test_one_source_fans_out_and_many_fan_in(tmp_path: Path) -> None:
    with forebay.open(tmp_path) as log, _running(log) as routers:
        sources = [log.create_topic(name, partitions=2) for name in ("a", "b", "c")]
        even, all_of_them = log.create_topic("even"), log.create_topic("all", partitions=2)
        routers.create("in", sources=["a", "b", "c"], destination="all", start=EARLIEST)
        routers.create("out", sources=["a"], destination="even", start=EARLIEST, tags=["even"])
        for number, source in enumerate(sources):
            _fill(source, range(number * 50, number * 50 + 50))

        assert _arrived(all_of_them, 150) == _numbers(range(150))
        assert _arrived(even, 25) == _numbers(range(0, 50, 2))
        until(lambda: routers.status("out").left_out == 25)
        until(lambda: [status.lag for status in routers.statuses()] == [0, 0])
        assert routers.status("in").routed == 150


def test_a_chain_of_routers_moves_on_what_it_gets(tmp_path: Path) -> None:
    with forebay.open(tmp_path) as log, _running(log) as routers:
        source = log.create_topic("a")
        log.create_topic("b", partitions=3)
        end = log.create_topic("c")
        routers.create("first", sources=["a"], destination="b", start=EARLIEST)
        routers.create("second", sources=["b"], destination="c", start=EARLIEST, key="none")
        _fill(source, range(200))

        assert _arrived(end, 200) == _numbers(range(200))
        assert {record.key for record in end.read()} == {None}


def test_circles_are_refused_also_where_another_process_is_about_to_close_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with forebay.open(tmp_path) as log:
        for name in "abc":
            log.create_topic(name)
        routers = Routers(log)
        with pytest.raises(Invalid, match="circle"):
            routers.create("self", sources=["a"], destination="a")
        routers.create("ab", sources=["a"], destination="b")

        whole: Callable[..., Any] = RouterBook.all
        raced: list[str] = []

        def late(book: RouterBook) -> Any:
            """Another process creates a router after this one has looked at all of them."""
            found = whole(book)
            if not raced:
                raced.append("ca")
                Routers(log).create("ca", sources=["c"], destination="a")
            return found

        monkeypatch.setattr(RouterBook, "all", late)
        with pytest.raises(Invalid, match="circle: default/b → default/c → default/a → default/b"):
            routers.create("bc", sources=["b"], destination="c")
        assert [router.name for router in routers.all()] == ["ab", "ca"]


def test_pause_resume_and_delete(tmp_path: Path) -> None:
    with forebay.open(tmp_path) as log, _running(log) as routers:
        source, target = log.create_topic("a"), log.create_topic("b")
        routers.create("r", sources=["a"], destination="b", start=EARLIEST)
        _fill(source, range(10))
        _arrived(target, 10)

        assert routers.pause("r").is_paused
        assert routers.pause("r").is_paused, "a second time is fine"
        until(lambda: not routers.moving("r"))
        _fill(source, range(10, 20))
        assert routers.status("r").state is RouterState.PAUSED
        routers.resume("r")
        assert _arrived(target, 20) == _numbers(range(20))
        assert routers.status("r").state is RouterState.RUNNING

        routers.delete("r")
        with pytest.raises(Invalid, match="there is no router"):
            routers.status("r")
        with pytest.raises(Invalid, match="there is no router"):
            routers.delete("r")
        assert log.reserved_readers() == [], "its cursors are gone too"
        # A later one of the same name begins by itself.
        routers.create("r", sources=["a"], destination="b", start=LATEST)
        _fill(source, range(20, 25))
        assert _arrived(target, 25) == _numbers(range(25))


@pytest.mark.slow
@pytest.mark.parametrize("which", ["source", "destination"])
def test_a_deleted_topic_stops_its_router_with_a_named_state(tmp_path: Path, which: str) -> None:
    with forebay.open(tmp_path) as log, _running(log) as routers:
        source, target = log.create_topic("a"), log.create_topic("b")
        routers.create("r", sources=["a"], destination="b", start=EARLIEST)
        _fill(source, range(3))
        _arrived(target, 3)

        name = "a" if which == "source" else "b"
        log.delete_topic(name)
        assert routers.status("r").state == f"{which}_deleted"
        # A later topic of the name is another one: nothing goes there.
        again = log.create_topic(name)
        if which == "destination":
            _fill(source, range(3, 6))
        assert routers.status("r").state == f"{which}_deleted"
        until(lambda: not routers.moving("r"))
        assert _values(again) == []


def test_gaps_of_the_source_are_counted_and_the_router_goes_on(tmp_path: Path) -> None:
    with forebay.open(tmp_path) as log:
        source, target = log.create_topic("a", cap_records=10), log.create_topic("b")
        routers = Routers(log)
        routers.create("r", sources=["a"], destination="b", start=EARLIEST)
        _fill(source, range(40))
        inside(log).workers.limits.step()
        assert source.offsets().evict_floor == 30
        with routers.running():
            assert _arrived(target, 10) == _numbers(range(30, 40))
            until(lambda: routers.status("r").lost == {"cap": 30})


@pytest.mark.slow
def test_a_destination_that_is_full_holds_the_router_up_and_loses_nothing(tmp_path: Path) -> None:
    with forebay.open(tmp_path) as log, _running(log) as routers:
        source = log.create_topic("a")
        target = log.create_topic("b", cap_records=20, on_full="reject_new")
        other = log.create_topic("c")
        routers.create("r", sources=["a"], destination="b", start=EARLIEST)
        routers.create("free", sources=["a"], destination="c", start=EARLIEST)
        for number in range(50):
            _fill(source, range(number, number + 1))
            if number < 20:
                _arrived(target, number + 1)

        until(lambda: routers.status("r").state is RouterState.FAILING)
        assert "b[0]" in "".join(routers.status("r").failures.values())
        assert _arrived(other, 50) == _numbers(range(50)), "one router that waits holds up no other"
        log.alter_topic("b", cap_records=100)
        assert _arrived(target, 50) == _numbers(range(50))
        until(lambda: routers.status("r").state is RouterState.RUNNING)


def test_a_lost_answer_of_an_append_doubles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole: Callable[..., Any] = Mover.append_part
    lost: list[int] = []

    async def losing(mover: Mover, place: int, part: Any) -> Any:
        answer = await whole(mover, place, part)
        if not lost:
            lost.append(place)
            raise Unavailable("the answer was lost")
        return answer

    monkeypatch.setattr(Mover, "append_part", losing)
    monkeypatch.setattr("forebay.routers.running.PAUSE_SECONDS", 0.01)
    with forebay.open(tmp_path) as log, _running(log) as routers:
        source, target = log.create_topic("a"), log.create_topic("b", partitions=2)
        routers.create("r", sources=["a"], destination="b", start=EARLIEST)
        _fill(source, range(80))
        assert _arrived(target, 80) == _numbers(range(80))
        until(lambda: lost)  # the records may be seen before their answer is lost
        _fill(source, range(80, 100))
        assert _arrived(target, 100) == _numbers(range(100))


def test_wrong_definitions_are_refused_and_leave_nothing(tmp_path: Path) -> None:
    with forebay.open(tmp_path) as log:
        log.create_topic("a")
        log.create_topic("b")
        routers = Routers(log)
        for wrong, words in (
            ({"sources": [], "destination": "b"}, "1 to 100 sources"),
            ({"sources": ["a", "a"], "destination": "b"}, "twice"),
            ({"sources": "a", "destination": "b"}, "list of names"),
            ({"sources": ["a"], "destination": "b", "key": "x"}, "header:NAME"),
            ({"sources": ["a"], "destination": "b", "start": forebay.Position.at_offset(3)}, "earliest, latest"),
        ):
            with pytest.raises(Invalid, match=words):
                routers.create("r", **wrong)
        for wrong in ({"sources": ["a"], "destination": "absent"}, {"sources": ["absent"], "destination": "b"}):
            with pytest.raises(UnknownTopic):
                routers.create("r", **wrong)  # type: ignore[arg-type]
        assert routers.all() == []
        assert log.reserved_readers() == []
        routers.create("r", sources=["a"], destination="b")
        with pytest.raises(Conflict, match="exists already"):
            routers.create("r", sources=["a"], destination="b")
        assert len(log.reserved_readers()) == 1
        assert log.groups() == [], "a router is no group"


def test_a_log_that_is_opened_to_read_runs_no_routers(tmp_path: Path) -> None:
    with forebay.open(tmp_path) as log:
        log.create_topic("a")
    with forebay.open(tmp_path, read_only=True) as log, pytest.raises(Invalid, match="read-only"):
        Routers(log).start()


def _killed(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


def test_what_a_creation_that_was_killed_has_left_is_shown_by_none_and_removed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = ManualClock()
    with forebay.open(":memory:") as log:
        log.create_topic("a", partitions=2)
        log.create_topic("b")
        routers = Routers(log, clock=clock)
        alive = routers.create("alive", sources=["a"], destination="b")
        with monkeypatch.context() as killed, pytest.raises(KeyboardInterrupt):
            killed.setattr("forebay.routers.book.transact", _killed)
            routers.create("r", sources=["a"], destination="b")
        (left,) = set(log.reserved_readers()) - {alive.reader}
        assert log.groups() == []
        orphans = OrphanCursors(log, RouterBook(log, clock), clock)

        orphans.look()
        clock.advance(ORPHAN_SECONDS / 2)
        orphans.look()
        assert left in log.reserved_readers(), "it might be a creation that is under way"
        clock.advance(ORPHAN_SECONDS / 2)
        orphans.look()

        assert log.reserved_readers() == [alive.reader]
        assert log.topic("a").reader(left).offset() is None


def test_routers_that_run_remove_what_is_left_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.routers.book.ORPHAN_SECONDS", 0.0)
    monkeypatch.setattr("forebay.routers.running.LOOK_SECONDS", 0.01)
    with forebay.open(":memory:") as log:
        log.create_topic("a").reader(ReservedReader(f"router-{'0' * 16}")).reset(EARLIEST)
        with _running(log):
            until(lambda: not log.reserved_readers())


def test_no_cursor_is_removed_while_a_definition_cannot_be_read() -> None:
    clock = ManualClock()
    with forebay.open(":memory:") as log:
        log.create_topic("a")
        log.create_topic("b")
        book = RouterBook(log, clock)
        router = Routers(log, clock=clock).create("r", sources=["a"], destination="b")
        log.metadata.transaction([], [Put(router_key("r"), b"garbage")])
        orphans = OrphanCursors(log, book, clock)
        for _ in range(3):
            orphans.look()
            clock.advance(ORPHAN_SECONDS)

        assert log.reserved_readers() == [router.reader]


def test_a_creation_that_took_so_long_that_its_cursors_may_be_gone_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, reset = ManualClock(), Reader.reset

    def slow(reader: Reader, *arguments: Any, **options: Any) -> int:
        clock.advance(CREATE_SECONDS + 1)
        return reset(reader, *arguments, **options)

    with forebay.open(":memory:") as log:
        log.create_topic("a")
        log.create_topic("b")
        monkeypatch.setattr(Reader, "reset", slow)
        with pytest.raises(Unavailable, match="create it again"):
            Routers(log, clock=clock).create("r", sources=["a"], destination="b")
        assert Routers(log).all() == []


def test_a_router_that_no_process_runs_keeps_so_many_rules_and_no_more() -> None:
    """By its first rule records are routed again after a crash; so what came between is kept until it has run."""
    with forebay.open(":memory:") as log:
        source, target, routers = log.create_topic("a"), log.create_topic("b"), Routers(log)
        routers.create("r", sources=["a"], destination="b", start=EARLIEST, tags=["0"])
        for number in range(1, RULES_MAX):
            routers.alter("r", tags=[str(number)])
        with pytest.raises(Conflict, match=f"altered {RULES_MAX} times since .*: have a process run its routers"):
            routers.alter("r", tags=["one too many"])
        assert len(routers.all()[0].rules) == RULES_MAX
        routers.alter("r", tags=[str(RULES_MAX - 1)])  # as it is

        with routers.running():
            source.append(b"x", tag=str(RULES_MAX - 1))
            assert _arrived(target, 1) == [b"x"]
            until(lambda: len(routers.alter("r", tags=["again"]).rules) <= 2)


def test_the_rules_that_a_router_keeps_are_bounded_in_bytes() -> None:
    with forebay.open(":memory:") as log:
        log.create_topic("a")
        log.create_topic("b")
        routers = Routers(log)
        routers.create("r", sources=["a"], destination="b")
        with pytest.raises(Conflict, match="262144 bytes"):
            for number in range(9):
                routers.alter("r", set_headers={"x": b"%d" % number * 40_000})


def test_many_records_of_a_page_that_get_large_headers_go_in_several_appends(tmp_path: Path) -> None:
    settings = forebay.Settings(wal=WalSettings(frame_bytes_max=64 * 1024))
    with forebay.open(tmp_path, settings) as log, _running(log) as routers:
        source, target = log.create_topic("a"), log.create_topic("b")
        source.append_many([b"%04d" % number for number in range(50)])
        routers.create("r", sources=["a"], destination="b", start=EARLIEST, set_headers={"large": b"x" * 16_000})
        source.append(b"0050")

        assert _arrived(target, 51) == _numbers(range(51))
        assert routers.status("r").failures == {}
