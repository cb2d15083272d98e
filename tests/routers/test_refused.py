"""Records that a destination can never hold: a router skips them, or stops at them, as it is asked to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

import forebay
from forebay.errors import Invalid
from forebay.partitioning import partition_of_key
from forebay.records import EARLIEST
from forebay.routers import Routers, RouterState
from forebay.routers import mover as moving
from forebay.routers.book import RouterBook
from forebay.routers.mover import Mover
from forebay.storage import Storage, Topic
from tests.support.gates import HeldStep, StepGate
from tests.support.waiting import PATIENCE, until

ROOM: Final = 60_000
"""What the destination holds: its engine is `memory`."""
LARGE: Final = b"L" * (2 * ROOM)
STEPS: Final = [
    HeldStep(owner, name, when)
    for owner, name in [(moving, "poll"), (RouterBook, "current"), (Mover, "append_part"), (Mover, "note_cursor")]
    for when in ("before", "after")
]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "WAIT_SECONDS", 0.05)
    monkeypatch.setattr(moving, "CURSOR_SECONDS", 0.05)
    for name, seconds in (("LOOK_SECONDS", 0.1), ("PAUSE_SECONDS", 0.02), ("PAUSE_SECONDS_MAX", 0.1)):
        monkeypatch.setattr(f"forebay.routers.running.{name}", seconds)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Storage, Topic, Topic]]:
    with forebay.open(path, {"memory": {"bytes_max": ROOM}}) as log:
        source = log.create_topic("a", exist_ok=True)
        yield log, source, log.create_topic("b", engine="memory", exist_ok=True)


def _seen(target: Topic) -> list[bytes]:
    return [record.value or b"" for record in target.read()]


def _failure(routers: Routers) -> str:
    """What the router waits for in the first partition of its source; empty between two attempts."""
    return routers.status("r").failures.get("default/a[0]", "")


def _create(routers: Routers, **rule: Any) -> None:
    routers.create("r", sources=["a"], destination="b", start=EARLIEST, **rule)


def test_a_record_that_is_skipped_is_counted_and_those_behind_it_arrive(tmp_path: Path) -> None:
    with _opened(tmp_path) as (log, source, target):
        routers = Routers(log)
        _create(routers)
        source.append_many([b"0", LARGE, b"1", LARGE, LARGE, b"2"])
        with routers.running():
            until(lambda: len(_seen(target)) == 3)

            assert _seen(target) == [b"0", b"1", b"2"]
            until(lambda: routers.status("r").lost == {"too_large": 3})
            assert (routers.status("r").routed, routers.status("r").state) == (3, RouterState.RUNNING)


def test_records_that_fit_alone_and_not_together_arrive_all(tmp_path: Path) -> None:
    with _opened(tmp_path) as (log, source, target):
        routers = Routers(log)
        _create(routers)
        source.append_many([b"%d" % number * 1_000 for number in range(9)] * 30)
        with routers.running():
            until(lambda: target.offsets().next == 270)
            until(lambda: routers.status("r").routed == 270)

            assert routers.status("r").lost == {}


def test_a_router_that_is_to_stop_waits_at_the_record_until_it_is_altered(tmp_path: Path) -> None:
    with _opened(tmp_path) as (log, source, target):
        log.alter_topic("a", partitions=2)
        routers = Routers(log)
        _create(routers, on_refused="stop")
        source.append_many([b"0", LARGE, b"1"], partition=0)
        source.append(b"other", partition=1)
        with routers.running():
            until(lambda: sorted(_seen(target)) == [b"0", b"other"])
            until(lambda: "offset 1 of default/a[0]" in _failure(routers) and "on_refused" in _failure(routers))
            until(lambda: routers.status("r").state is RouterState.FAILING)
            assert routers.status("r").lost == {}

            routers.alter("r", on_refused="skip")
            until(lambda: b"1" in _seen(target))
            until(lambda: routers.status("r").lost == {"too_large": 1})
            assert sorted(_seen(target)) == [b"0", b"1", b"other"]
            assert routers.status("r").state is RouterState.RUNNING


def test_a_router_that_stops_lets_nothing_overtake_what_it_can_see_beforehand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.routers.rules.COPIED_HEADERS_MAX", 2)
    with forebay.open(tmp_path) as log:
        source, target = log.create_topic("a"), log.create_topic("b", partitions=8)
        routers = Routers(log)
        _create(routers, on_refused="stop", set_headers={"x": b"", "y": b""})
        source.append(b"0", key=b"0")
        source.append(b"1", key=b"1", headers={"z": b""})
        source.append_many([b"2"] * 20, keys=[b"%d" % number for number in range(20)])
        with routers.running():
            until(lambda: _failure(routers))
            assert _seen(target) == [b"0"]

            # The rule that holds from here on makes a record that fits.
            routers.alter("r", on_refused="stop")
            until(lambda: len(_seen(target)) == 22)
        assert sorted(_seen(target)) == [b"0", b"1"] + [b"2"] * 20


def test_the_newest_rule_decides_also_where_other_records_have_overtaken_the_one_that_is_refused(
    tmp_path: Path,
) -> None:
    """What arrived behind it goes by the old rule when it is routed again, and the record itself with it."""
    with _opened(tmp_path) as (log, source, target):
        log.alter_topic("b", partitions=8)
        routers = Routers(log)
        _create(routers, on_refused="stop")
        source.append_many([LARGE, *[b"1"] * 20], keys=[b"%d" % number for number in range(21)])
        behind = {place for place in range(8) if place != partition_of_key(b"0", 8)}
        with routers.running():
            until(lambda: all(target.offsets(place).next for place in behind))
            until(lambda: "offset 0 of default/a[0]" in _failure(routers))

            routers.alter("r", on_refused="skip")
            until(lambda: len(_seen(target)) == 20)
            until(lambda: routers.status("r").lost == {"too_large": 1})
        assert _seen(target) == [b"1"] * 20


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS, ids=str)
@pytest.mark.parametrize("wanted", ["skip", "stop"])
def test_what_a_router_does_is_altered_inside_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: HeldStep, wanted: str
) -> None:
    """A record that is appended after the alteration is treated as that says, whatever the router was about to do."""
    gate = StepGate()
    step.guard(monkeypatch, gate)
    with _opened(tmp_path) as (log, source, target):
        routers = Routers(log)
        try:
            _create(routers, on_refused="stop" if wanted == "skip" else "skip")
            with routers.running():
                source.append(b"0")
                until(lambda: _seen(target) == [b"0"])
                gate.armed.set()
                source.append(b"1")
                assert gate.reached.wait(PATIENCE)
                Routers(log).alter("r", on_refused=wanted)
                source.append_many([LARGE, b"2"])
                gate.released.set()

                if wanted == "skip":
                    until(lambda: _seen(target) == [b"0", b"1", b"2"])
                    until(lambda: routers.status("r").lost == {"too_large": 1})
                else:
                    until(lambda: "offset 2 of default/a[0]" in _failure(routers))
                    assert (_seen(target), routers.status("r").lost) == ([b"0", b"1"], {})
        finally:
            gate.released.set()


def test_a_crash_behind_the_append_and_before_the_cursor_doubles_nothing_and_skips_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The destination keeps its records here: it is too many headers that it refuses."""
    monkeypatch.setattr("forebay.routers.rules.COPIED_HEADERS_MAX", 1)

    async def crashed(mover: Mover, way: object) -> None:
        del mover, way

    def routed(log: Storage, count: int) -> list[bytes]:
        target = log.topic("b")
        with Routers(log).running():
            until(lambda: len(_seen(target)) >= count)
        return _seen(target)

    with forebay.open(tmp_path) as log, monkeypatch.context() as crashing:
        crashing.setattr(Mover, "note_cursor", crashed)
        source = log.create_topic("a", durability="fsync")
        log.create_topic("b", durability="fsync")
        _create(Routers(log))
        for number in range(6):
            source.append(b"%d" % number, headers=[("h", b"")] * (number % 3))
        assert routed(log, 4) == [b"0", b"1", b"3", b"4"]

    with forebay.open(tmp_path) as log:
        log.topic("a").append(b"6")
        assert routed(log, 5) == [b"0", b"1", b"3", b"4", b"6"]


def test_another_word_is_refused_and_says_which_there_are(tmp_path: Path) -> None:
    with _opened(tmp_path) as (log, _, _), pytest.raises(Invalid, match="on_refused is 'wait'; use skip or stop"):
        _create(Routers(log), on_refused="wait")
