"""The checks themselves, on hand-made histories that are bad in one way each."""

from __future__ import annotations

from typing import Final

import pytest

from forebay.records import Gap, Reason
from forebay.testing.checks.history import (
    NOTE,
    AppendAnswered,
    AppendOutcome,
    Begun,
    Crashed,
    Event,
    Reading,
    ReadSeen,
    ShardEvents,
    Synced,
)
from forebay.testing.checks.invariants import (
    acks_follow_syncs,
    bounded,
    check_log,
    damage_is_reported,
    healthy_or_read_only,
    names_follow_bytes,
    names_of,
    no_crash_is_damage,
    readings_agree,
    recovery_is_stable,
)
from forebay.testing.simulated.disk import SimulatedDisk
from forebay.topics import Durability

FSYNC, DISK, MEMORY, EPHEMERAL = Durability.FSYNC, Durability.DISK, Durability.MEMORY, Durability.EPHEMERAL
ACKED, REFUSED, INDETERMINATE = AppendOutcome.ACKED, AppendOutcome.REFUSED, AppendOutcome.INDETERMINATE
THREE: Final[list[Event]] = [
    Begun(0, (b"a",)),
    AppendAnswered(0, ACKED, 0),
    Begun(1, (b"b", b"c")),
    AppendAnswered(1, ACKED, 1),
    Begun(2, (b"d",)),
    AppendAnswered(2, ACKED, 3),
]


def _reading(*steps: tuple[int, bytes] | Gap, next_offset: int | None = None, end: int | None = None) -> Reading:
    last = steps[-1] if steps else Gap(0, 0, Reason.LOST)
    stop = last.stop if isinstance(last, Gap) else last[0] + 1
    end = stop if end is None else end
    return Reading(start=0, steps=steps, end=end, next=end if next_offset is None else next_offset)


WHOLE: Final = _reading((0, b"a"), (1, b"b"), (2, b"c"), (3, b"d"))


@pytest.mark.parametrize("durability", [FSYNC, DISK, MEMORY, EPHEMERAL])
def test_a_true_history_breaks_nothing(durability: Durability) -> None:
    assert check_log(ShardEvents(durability, THREE), WHOLE) == []


BAD: Final[dict[str, tuple[Durability, list[Event], Reading, str]]] = {
    "lost": (FSYNC, THREE, _reading((0, b"a"), (1, b"b"), (2, b"c"), Gap(3, 4, Reason.LOST)), "I1"),
    "lost by a kill": (DISK, [*THREE, Crashed(power=False)], _reading((0, b"a"), next_offset=9), "I2"),
    "lost though synced": (DISK, [*THREE, Synced(4), Crashed(power=True)], _reading((0, b"a"), next_offset=9), "I2"),
    "lost in the middle": (
        DISK,
        [*THREE, Crashed(power=True)],
        _reading((0, b"a"), Gap(1, 3, Reason.LOST), (3, b"d")),
        "I2",
    ),
    "fabricated": (FSYNC, THREE, _reading(*WHOLE.records, (4, b"x")), "I3"),  # type: ignore[arg-type]
    "in part": (
        FSYNC,
        [Begun(0, (b"a", b"b")), AppendAnswered(0, INDETERMINATE)],
        _reading((0, b"a"), Gap(1, 2, Reason.LOST)),
        "I3",
    ),
    "one offset, two records": (FSYNC, [*THREE, Begun(3, (b"e",)), AppendAnswered(3, ACKED, 3)], WHOLE, "I4"),
    "given out again": (DISK, [*THREE, Crashed(power=True)], _reading((0, b"a")), "I4"),
    "seen as another": (FSYNC, [*THREE, ReadSeen(((0, b"z"),))], WHOLE, "I4"),
    "moved": (FSYNC, THREE, _reading((0, b"a"), (1, b"b"), (2, b"d"), (3, b"c")), "I4"),
    "reordered": (
        FSYNC,
        [Begun(0, (b"a",), "t"), AppendAnswered(0, ACKED, 1), Begun(1, (b"b",), "t"), AppendAnswered(1, ACKED, 0)],
        _reading((0, b"b"), (1, b"a")),
        "I5",
    ),
    "reordered by a repeat": (
        FSYNC,
        [
            Begun(0, (b"a",), "t", (1, 0)),
            AppendAnswered(0, INDETERMINATE),
            Crashed(power=False),
            Begun(1, (b"b",), "t", (1, 1)),
            AppendAnswered(1, ACKED, 0),
            Begun(2, (b"a",), "t", (1, 0)),
            AppendAnswered(2, ACKED, 1),
        ],
        _reading((0, b"b"), (1, b"a")),
        "I5",
    ),
    "duplicated by a repeat": (
        DISK,
        [
            Begun(0, (b"a",), "t", (1, 0)),
            AppendAnswered(0, INDETERMINATE),
            Crashed(power=False),
            Begun(1, (b"a",), "t", (1, 0)),
            AppendAnswered(1, ACKED, 1),
        ],
        _reading((0, b"a"), (1, b"a")),
        "I5",
    ),
    "lost while the process lives": (MEMORY, THREE, _reading((0, b"a"), next_offset=4), "I2"),
    "given out again by a class that keeps nothing": (
        EPHEMERAL,
        [*THREE, Crashed(power=False), Begun(3, (b"e",)), AppendAnswered(3, ACKED, 2)],
        _reading(Gap(0, 2, Reason.LOST), (2, b"e"), next_offset=9),
        "I4",
    ),
    "duplicated": (FSYNC, THREE, _reading(*WHOLE.records, (4, b"d")), "I5"),  # type: ignore[arg-type]
    "next goes back": (FSYNC, [], _reading(Gap(0, 4, Reason.LOST), next_offset=2), "I5"),
    "ends early": (FSYNC, [], _reading(end=3), "I6"),
    "skipped": (FSYNC, THREE, _reading((0, b"a"), (3, b"d")), "I7"),
    "seen and gone": (FSYNC, [Begun(0, (b"a",)), ReadSeen(((0, b"a"),))], _reading(next_offset=1), "I9"),
    "refused and there": (FSYNC, [Begun(0, (b"a",)), AppendAnswered(0, REFUSED)], _reading((0, b"a")), "I10"),
    "indeterminate and twice there": (
        FSYNC,
        [Begun(0, (b"a",)), AppendAnswered(0, INDETERMINATE)],
        _reading((0, b"a"), (1, b"a")),
        "I10",
    ),
    "repeat at another offset": (
        FSYNC,
        [
            Begun(0, (b"a",), "", (1, 0)),
            AppendAnswered(0, ACKED, 0),
            Begun(1, (b"a",), "", (1, 0)),
            AppendAnswered(1, ACKED, 1),
        ],
        _reading((0, b"a"), (1, b"a")),
        "I26",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_history_is_named(name: str) -> None:
    durability, events, reading, invariant = BAD[name]

    assert invariant in names_of(check_log(ShardEvents(durability, events), reading))


def test_a_suffix_that_was_never_synced_may_be_gone_after_a_power_cut() -> None:
    history = ShardEvents(DISK, [*THREE, Crashed(power=True)])

    assert check_log(history, _reading((0, b"a"), (1, b"b"), (2, b"c"), next_offset=8)) == []


@pytest.mark.parametrize("durability", [MEMORY, EPHEMERAL])
def test_a_class_in_memory_promises_nothing_across_a_crash_but_its_offsets(durability: Durability) -> None:
    history = ShardEvents(durability, [*THREE, Crashed(power=False)])

    assert check_log(history, _reading(next_offset=8)) == []
    assert names_of(check_log(history, _reading(next_offset=2))) == {"I4"}


def test_damage_must_be_reported_and_never_served() -> None:
    history = ShardEvents(FSYNC, THREE)
    reported = _reading((0, b"a"), Gap(1, 3, Reason.DAMAGED), (3, b"d"))
    cut = _reading((0, b"a"), next_offset=4)
    served = _reading((0, b"a"), (1, b"!"), (2, b"c"), (3, b"d"))

    assert check_log(history, reported) == []
    assert list(damage_is_reported(history, reported, 4)) == []
    assert names_of(damage_is_reported(history, cut, 4)) == {"I12"}
    assert names_of(damage_is_reported(history, served, 4)) == {"I12"}


def test_damage_after_a_mere_crash_is_named() -> None:
    assert names_of(no_crash_is_damage(_reading((0, b"a"), Gap(1, 3, Reason.DAMAGED), (3, b"d")))) == {"I12"}
    assert list(no_crash_is_damage(_reading((0, b"a"), Gap(1, 3, Reason.LOST), (3, b"d")))) == []


def test_two_readings_that_differ_are_named() -> None:
    assert names_of(readings_agree(WHOLE, _reading((0, b"a")))) == {"I8"}
    assert names_of(recovery_is_stable(WHOLE, _reading(*WHOLE.records, next_offset=9))) == {"I11"}  # type: ignore[arg-type]
    assert list(recovery_is_stable(WHOLE, WHOLE)) == []


def test_an_ack_before_its_sync_is_named() -> None:
    disk = SimulatedDisk(directories=["/d"])
    file = disk.create("/d/a.seg")
    disk.sync_directory("/d")
    file.write_at(b"x", 0)
    disk.note(NOTE, AppendAnswered(0, ACKED, 0))
    assert names_of(acks_follow_syncs(disk.trace)) == {"I13"}

    file.sync()
    count = len(list(acks_follow_syncs(disk.trace)))
    disk.note(NOTE, AppendAnswered(1, ACKED, 1))
    assert len(list(acks_follow_syncs(disk.trace))) == count


def test_an_ack_before_its_name_is_synced_is_named() -> None:
    disk = SimulatedDisk(directories=["/d"])
    disk.create("/d/a.seg").sync()
    disk.note(NOTE, AppendAnswered(0, ACKED, 0))

    assert names_of(acks_follow_syncs(disk.trace)) == {"I13"}


@pytest.mark.parametrize("forgotten", ["file", "directory"])
def test_a_rename_without_its_syncs_is_named(forgotten: str) -> None:
    disk = SimulatedDisk(directories=["/d"])
    file = disk.create("/d/a.tmp")
    file.write_at(b"x", 0)
    if forgotten != "file":
        file.sync()
    disk.rename("/d/a.tmp", "/d/a")
    if forgotten != "directory":
        disk.sync_directory("/d")
    disk.note(NOTE, AppendAnswered(0, ACKED, 0))

    assert names_of(names_follow_bytes(disk.trace)) == {"I14"}


def test_what_grows_beyond_its_limit_is_named() -> None:
    assert list(bounded({"queue": 3}, {"queue": 3})) == []
    assert names_of(bounded({"queue": 4}, {"queue": 3})) == {"I27"}


def test_a_shard_that_refuses_without_a_reason_is_named() -> None:
    assert list(healthy_or_read_only(None, appends_work=True)) == []
    assert list(healthy_or_read_only("EIO", appends_work=False)) == []
    assert names_of(healthy_or_read_only(None, appends_work=False)) == {"I28"}
    assert names_of(healthy_or_read_only("EIO", appends_work=True)) == {"I28"}
