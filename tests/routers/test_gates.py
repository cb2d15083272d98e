"""Something ends, or changes, while a router is held inside one of its steps: each record still goes where it must.

A gate holds the router inside a step. Meanwhile another process alters, pauses, deletes or replaces what the step was
begun for, and more records are appended. What is appended after the change is judged by it, without exception.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pytest

import forebay
from forebay.aio.topic import AsyncTopic
from forebay.records import EARLIEST, LATEST
from forebay.routers import Routers
from forebay.routers import mover as moving
from forebay.routers.book import RouterBook
from forebay.routers.mover import Mover
from forebay.storage import Storage, Topic
from forebay.storage.cursors import Reader
from forebay.testing.inside import inside
from tests.ledger import Ledger
from tests.support.gates import HeldStep, StepGate
from tests.support.soak import sampled
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.slow


STEPS: Final = [
    HeldStep(owner, name, when)
    for owner, name in [
        (moving, "poll"),
        (RouterBook, "current"),
        (Mover, "append_part"),
        (Mover, "note_cursor"),
        (Mover, "_switch"),
        (AsyncTopic, "flush"),
        (Reader, "progress"),
        (Reader, "ack_up_to"),
    ]
    for when in ("before", "after")
]


@dataclass
class Play:
    """One router from `a` to `b` that takes records with tag `x`, in a log that another process uses as well."""

    log: Storage
    routers: Routers
    source: Topic
    target: Topic
    gate: StepGate
    number: int = 0

    @property
    def other(self) -> Routers:
        """The routers as a process sees them that runs none."""
        return Routers(self.log)

    def append(self) -> None:
        """One record that the first rule leaves out, and one that it takes: once that arrived, both were judged."""
        for tag in "yx":
            self.source.append(b"%s%d" % (tag.encode(), self.number), tag=tag)
        self.number += 1

    def seen(self) -> Counter[str]:
        return Counter((record.value or b"").decode() for record in self.target.read())

    def wait_for(self, *values: str) -> None:
        until(lambda: set(values) <= self.seen().keys())

    def stopped(self) -> None:
        until(lambda: not self.routers.moving("r"))


def _is_fine(seen: Counter[str], always: str, *, perhaps: str = "") -> None:
    """`always` are there, each once; of `perhaps` any, each once; nothing else."""
    assert set(always.split()) <= seen.keys(), f"missing: {set(always.split()) - seen.keys()}"
    assert seen.keys() <= {*always.split(), *perhaps.split()}, f"not wanted: {seen}"
    assert set(seen.values()) == {1}, f"doubled: {seen}"


def _alter(play: Play) -> Iterator[None]:
    play.other.alter("r", tags=["y"])
    yield
    play.append()
    play.wait_for("y2", "y3")
    _is_fine(play.seen(), "x0 y2 y3", perhaps="x1 y1")
    assert not {"x1", "y1"} <= play.seen().keys(), "a record went by the old rule behind one that went by the new"


def _alter_twice(play: Play) -> Iterator[None]:
    play.other.alter("r", tags=["z"])
    play.other.alter("r", tags=["y"])
    yield
    play.append()
    play.wait_for("y2", "y3")
    _is_fine(play.seen(), "x0 y2 y3", perhaps="x1 y1")


def _pause(play: Play) -> Iterator[None]:
    play.other.pause("r")
    yield
    play.stopped()
    _is_fine(play.seen(), "x0", perhaps="x1")
    play.other.resume("r")
    play.append()
    play.wait_for("x3")
    _is_fine(play.seen(), "x0 x1 x2 x3")


def _pause_and_resume(play: Play) -> Iterator[None]:
    play.other.pause("r")
    play.other.resume("r")
    yield
    play.append()
    play.wait_for("x3")
    _is_fine(play.seen(), "x0 x1 x2 x3")


def _delete(play: Play) -> Iterator[None]:
    play.other.delete("r")
    yield
    until(lambda: not play.other.all())
    play.append()
    # A router that is created later, and routed by the same thread, shows that nothing more comes of the deleted one.
    play.other.create("z", sources=["a"], destination="b", tags=["y"])
    play.append()
    play.wait_for("y4")
    _is_fine(play.seen(), "x0 y4", perhaps="x1")


def _delete_and_create(play: Play) -> Iterator[None]:
    play.other.delete("r")
    play.other.create("r", sources=["a"], destination="b", tags=["y"], start=LATEST)
    yield
    play.append()
    play.wait_for("y2", "y3")
    _is_fine(play.seen(), "x0 y2 y3", perhaps="x1")


def _replace_source(play: Play) -> Iterator[None]:
    play.log.delete_topic("a")
    play.source = play.log.create_topic("a")
    yield
    play.stopped()
    _is_fine(play.seen(), "x0", perhaps="x1")


def _replace_destination(play: Play) -> Iterator[None]:
    play.log.delete_topic("b")
    play.target = play.log.create_topic("b")
    yield
    play.stopped()
    assert not play.seen()


def _all_of(play: Play) -> Iterator[None]:
    yield
    play.append()
    play.wait_for("x1", "x2", "x3")
    _is_fine(play.seen(), "x0 x1 x2 x3")


def _add_to_source(play: Play) -> Iterator[None]:
    play.log.alter_topic("a", partitions=3)
    yield from _all_of(play)


def _add_to_destination(play: Play) -> Iterator[None]:
    play.log.alter_topic("b", partitions=3)
    yield from _all_of(play)


def _stop_and_start(play: Play) -> Iterator[None]:
    play.routers.stop()
    play.routers.start()
    yield from _all_of(play)


def _lose_source(play: Play) -> Iterator[None]:
    _lose(play.source)
    yield from _all_of(play)


def _lose_destination(play: Play) -> Iterator[None]:
    _lose(play.target)
    yield from _all_of(play)


def _lose(topic: Topic) -> None:
    """The owner's lease has ended; the next append opens the shard again, in another epoch."""
    wal = inside(topic).segment().wal
    wal.fence("the lease has ended")
    until(lambda: wal.closed)


EVENTS: Final = [
    _alter,
    _alter_twice,
    _pause,
    _pause_and_resume,
    _delete,
    _delete_and_create,
    _replace_source,
    _replace_destination,
    _add_to_source,
    _add_to_destination,
    _stop_and_start,
    _lose_source,
    _lose_destination,
]


@contextmanager
def _playing(path: Path, step: HeldStep, patched: pytest.MonkeyPatch) -> Iterator[Play]:
    """A router that is held inside the step, with records on their way that it has not routed yet."""
    gate = StepGate()
    step.guard(patched, gate)
    with forebay.open(path) as log:
        source, target = log.create_topic("a"), log.create_topic("b")
        routers = Routers(log)
        with routers.running():
            play = Play(log, routers, source, target, gate)
            try:
                routers.create("r", sources=["a"], destination="b", tags=["x"], start=EARLIEST)
                play.append()
                play.wait_for("x0")
                if step.name == "progress":
                    routers.stop()
                gate.armed.set()
                if step.name in ("_switch", "flush"):
                    routers.alter("r", tags=["x", "other"])
                play.append()
                routers.start()
                assert gate.reached.wait(PATIENCE)
                yield play
            finally:
                gate.released.set()


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.__name__.strip("_"))
def test_what_changes_inside_a_step_of_a_router_holds_for_the_records_after_it(
    event: Callable[[Play], Iterator[None]], tmp_path: Path, ledger: Ledger
) -> None:
    for number, step in enumerate(sampled(STEPS, one_in=3, seed=event.__name__)):
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(moving, "WAIT_SECONDS", 0.05)
            patched.setattr(moving, "HOLD_SECONDS", 0.02)
            patched.setattr("forebay.routers.running.LOOK_SECONDS", 0.1)
            patched.setattr("forebay.routers.running.PAUSE_SECONDS", 0.02)
            with _playing(tmp_path / str(number), step, patched) as play:
                rest = event(play)
                next(rest)
                play.append()
                play.gate.released.set()
                assert next(rest, None) is None, f"{step}, then {event.__name__}"
        ledger.count("changes inside a step of a router", event=event.__name__.strip("_"), step=str(step))
