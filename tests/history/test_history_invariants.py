"""The checks of history and moves themselves, on inputs that are bad in one way each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import pytest

from forebay.blobs import Stat
from forebay.format.checksum import content_hash
from forebay.format.files.segment import index_name
from forebay.format.metadata.descriptor import Cur, DescriptorKind, Phase, SegmentDescriptor, ShardState, gap_descriptor
from forebay.format.metadata.value import encode_value
from forebay.metadata import Delete, MemoryMetadata, Put, RevisionIs
from forebay.records import Gap, Reason
from forebay.testing.checks.catalogs import (
    catalog_is_contiguous,
    check_history,
    ending_of,
    from_blobs,
    from_files,
    references_are_complete,
    runs_converge,
    sweep_is_right,
)
from forebay.testing.checks.cursors import Acked, Event, Found, Handed, Reset, StoredCursor, cursors_hold
from forebay.testing.checks.invariants import names_of
from forebay.testing.checks.moves import (
    Commit,
    Handover,
    RecordingMetadata,
    commits_of,
    move_goes_on,
    nothing_of_older_epochs,
    one_epoch_at_a_time,
    replayed,
)
from forebay.testing.simulated.blobs import SimulatedBlobs
from tests.support.environments.shard import KEYS, TOPIC, ShardEnvironment

LOST = Reason.LOST


class _Exported:
    """A true history of two files, and a third that is not exported yet; everything in it may be bent."""

    def __init__(self) -> None:
        blobs = SimulatedBlobs()
        self.environment = ShardEnvironment(blobs=blobs)
        for _ in range(2):
            self.environment.append(5)
            self.environment.seal()
        self.environment.export()
        self.environment.append(5)
        self.pieces = self.environment.catalog().descriptors()
        self.frontier = 10
        self.objects = blobs.contents
        self.files = self.environment.local_files()

    def broken(self, *, floor: int = 0) -> set[str]:
        fetch = from_files({f"/{key}": content for key, content in self.objects.items()}, "")
        acked = self.environment.acked()
        return names_of(check_history(acked, self.pieces, self.frontier, fetch, self.files, floor=floor))

    def bend(self, place: int, **fields: object) -> None:
        self.pieces[place] = msgspec.structs.replace(self.pieces[place], **fields)

    def damage_object(self, place: int) -> bytes:
        key = self.pieces[place].object_key
        content = self.objects[key]
        self.objects[key] = content[:-2] + bytes([content[-2] ^ 1]) + content[-1:]
        return self.objects[key]


def test_a_true_history_breaks_nothing() -> None:
    exported = _Exported()

    assert exported.broken() == set()
    assert list(references_are_complete(exported.pieces, from_blobs(exported.environment.store))) == []


def test_local_copies_may_go_once_history_has_them() -> None:
    exported = _Exported()
    exported.files = {name: content for name, content in exported.files.items() if "000010" in name}

    assert exported.broken() == set()


def test_records_below_the_floor_need_no_copy() -> None:
    exported = _Exported()
    exported.pieces = exported.pieces[1:]
    exported.files = {name: content for name, content in exported.files.items() if "000010" in name}

    assert exported.broken(floor=5) == set()
    assert exported.broken() == {"I15", "I17"}


def _named(piece: SegmentDescriptor, start: int, end: int, reason: int = 1) -> SegmentDescriptor:
    gap = gap_descriptor(Gap(start, end, LOST), topic_id=piece.topic_id, epoch=1, created_at=0)
    return msgspec.structs.replace(gap, reason=reason)


def test_a_catalog_with_a_gap_an_overlap_or_a_disorder_is_named_i15() -> None:
    first, second = _Exported().pieces
    bad: dict[str, tuple[Sequence[SegmentDescriptor], int]] = {
        "hole": ([first, _named(first, 6, 10)], 10),
        "overlap": ([first, _named(first, 4, 10)], 10),
        "disorder": ([second, first], 10),
        "twice": ([first, second, second], 10),
        "begins late": ([second], 10),
        "ends early": ([first], 10),
        "beyond its end": ([first, second], 5),
        "nothing in it": ([first, _named(first, 5, 5), second], 10),
        "hole without a reason": ([first, _named(first, 5, 10, reason=0)], 10),
    }

    found = {name: names_of(catalog_is_contiguous(*args)) for name, args in bad.items()}

    assert found == {name: {"I15"} for name in bad}


def test_an_object_that_is_not_what_was_catalogued_is_named_i16() -> None:
    missing = _Exported()
    del missing.objects[missing.pieces[0].object_key]
    without_index = _Exported()
    del without_index.objects[index_name(without_index.pieces[0].object_key)]
    other_hash = _Exported()
    other_hash.damage_object(1)
    not_whole = _Exported()
    not_whole.bend(1, content_hash=content_hash([not_whole.damage_object(1)]).hex())
    longer = _Exported()
    longer.objects[longer.pieces[0].object_key] += b"!"
    other_range = _Exported()
    other_range.bend(0, end=4)
    other_range.bend(1, start=4, records=6)
    other_count = _Exported()
    other_count.bend(0, records=4)
    other_topic = _Exported()
    other_topic.bend(0, topic_id="ef" * 16)
    exchanged = _Exported()
    exchanged.bend(0, object_key=exchanged.pieces[1].object_key)

    bad = [missing, without_index, other_hash, not_whole, longer, other_range, other_count, other_topic, exchanged]
    assert [case.broken() for case in bad] == [{"I16"}] * len(bad)


def test_a_record_without_any_copy_is_named_i17() -> None:
    gone = _Exported()
    gone.files = {name: content for name, content in gone.files.items() if "000010" not in name}
    torn = _Exported()
    torn.files = {name: content[:-3] if "000010" in name else content for name, content in torn.files.items()}
    other = _Exported()
    other.environment.appended[12] = b"another"

    assert [gone.broken(), torn.broken(), other.broken()] == [{"I17"}] * 3


def test_a_copy_that_is_damaged_is_none() -> None:
    exported = _Exported()
    exported.damage_object(0)
    exported.files = {name: content for name, content in exported.files.items() if "000010" in name}

    assert exported.broken() == {"I16", "I17"}


def test_a_reference_to_what_is_not_complete_is_named_i18() -> None:
    exported = _Exported()
    key = exported.pieces[0].object_key
    for part in (key, index_name(key)):
        without = {f"/{name}": content for name, content in exported.objects.items() if name != part}
        half = without | {f"/{part}": exported.objects[part][:-1]}
        for files in (without, half):
            assert names_of(references_are_complete(exported.pieces, from_files(files, ""))) == {"I18"}


def test_a_sweep_that_takes_too_much_or_leaves_orphans_is_named_i18() -> None:
    named, orphan, young = (Stat(key, 1, None, None, age) for key, age in (("a", 0), ("b", 0), ("c", 50)))

    def swept(*after: Stat) -> set[str]:
        return names_of(sweep_is_right([named, orphan, young], after, {"a"}, older_than_ms=10))

    assert swept(named, young) == set()
    assert swept(young) == swept(named) == swept(named, orphan, young) == {"I18"}


def test_runs_that_end_differently_are_named_i22() -> None:
    exported = _Exported()
    state = ShardState(incarnation=TOPIC, phase=Phase.SEALED, next_offset=10)
    whole = ending_of(exported.pieces, exported.objects, state)
    later = [msgspec.structs.replace(piece, created_at=9, etag="x", epoch=3) for piece in exported.pieces]
    bad = [
        ending_of(exported.pieces[:1], exported.objects, state),
        ending_of(exported.pieces, exported.objects | {"left": b"behind"}, state),
        ending_of(exported.pieces, exported.objects, msgspec.structs.replace(state, next_offset=11)),
        ending_of(exported.pieces, exported.objects, msgspec.structs.replace(state, phase=Phase.SEALING)),
    ]

    assert list(runs_converge(whole, ending_of(later, exported.objects, state))) == []
    assert [names_of(runs_converge(whole, other)) for other in bad] == [{"I22"}] * len(bad)


def _state(epoch: int, owner: str | None = "a", *, holder_since: int = 1) -> Commit:
    return Commit(state=ShardState(incarnation=TOPIC, epoch=epoch, owner=owner, holder_since=holder_since))


def _added(start: int, end: int, *, by: int, written: int | None = None, generation: int = 0) -> Commit:
    piece = SegmentDescriptor(
        kind=DescriptorKind.FRAMES, topic_id=TOPIC, start=start, end=end, epoch=by if written is None else written
    )
    return Commit(cur=Cur(start=start, next=end, epoch=by, generation=generation), pieces=(piece,))


TRUE: Final[dict[str, list[Commit]]] = {
    "one owner after the other": [
        _state(1),
        _added(0, 5, by=1),
        _state(1, None),
        _state(2, "b", holder_since=2),
        _added(5, 9, by=2),
    ],
    "the same directory goes on with what it wrote": [_state(1), _state(2, "b"), _added(0, 5, by=2, written=1)],
    "a replacement keeps the epoch": [
        _state(1),
        _added(0, 5, by=1),
        _state(2, "b", holder_since=2),
        _added(0, 5, by=1, generation=1),
    ],
    "a topic created anew": [_state(3), Commit(state=ShardState(incarnation="cd" * 16, epoch=1))],
}
BAD: Final[dict[str, tuple[list[Commit], set[str]]]] = {
    "the state goes back": ([_state(2), _state(1)], {"I19"}),
    "two owners in one epoch": ([_state(2, "a"), _state(2, "b")], {"I19"}),
    "the catalog goes back": ([_added(0, 5, by=2), _added(5, 9, by=1)], {"I19"}),
    "an old owner adds": ([_state(1), _state(2, "b", holder_since=2), _added(0, 5, by=1)], {"I20"}),
    "an old owner's file is added": (
        [_state(1), _added(0, 5, by=1), _state(2, "b", holder_since=2), _added(5, 9, by=2, written=1)],
        {"I20"},
    ),
}


@pytest.mark.parametrize("name", TRUE)
def test_commits_in_order_break_nothing(name: str) -> None:
    assert [*one_epoch_at_a_time(TRUE[name]), *nothing_of_older_epochs(TRUE[name])] == []


@pytest.mark.parametrize("name", BAD)
def test_commits_of_an_older_epoch_are_named_i19_or_i20(name: str) -> None:
    commits, invariants = BAD[name]

    assert names_of([*one_epoch_at_a_time(commits), *nothing_of_older_epochs(commits)]) == invariants


def test_what_was_committed_is_recorded_and_nothing_else() -> None:
    reported: list[int] = []
    recording = RecordingMetadata(MemoryMetadata(), on_commit=lambda operations: reported.append(len(operations)))
    state = ShardState(incarnation=TOPIC, epoch=4)

    recording.transaction([], [Put(KEYS.state, encode_value(state)), Put("/elsewhere", b"x")])
    recording.transaction([RevisionIs(KEYS.state, 99)], [Put(KEYS.state, b"never")])
    recording.transaction([], [Delete("/elsewhere")])

    assert commits_of(KEYS, recording.committed) == [Commit(state=state)]
    assert reported == [2, 1]
    again = replayed(recording.committed)
    assert [(entry.key, entry.value) for entry in again.range("")] == [(KEYS.state, encode_value(state))]


def _left(phase: Phase, *, next_offset: int = 0, reserved_end: int = 0) -> ShardState:
    return ShardState(incarnation=TOPIC, epoch=1, phase=phase, next_offset=next_offset, reserved_end=reserved_end)


SEALED: Final = _left(Phase.SEALED, next_offset=22, reserved_end=22)
OPEN: Final = _left(Phase.OPEN, reserved_end=64)


def test_a_move_that_goes_on_where_it_must_breaks_nothing() -> None:
    good = [
        Handover(SEALED, last=22, frontier=22, began=22),
        Handover(OPEN, last=22, frontier=10, began=64, gaps=(Gap(10, 64, LOST),)),
        Handover(OPEN, last=64, frontier=64, began=64),
        Handover(_left(Phase.SEALING, reserved_end=64), last=22, frontier=22, began=64, gaps=(Gap(22, 64, LOST),)),
    ]

    assert [violation for handover in good for violation in move_goes_on(handover)] == []


def test_a_move_that_goes_on_elsewhere_is_named_i21() -> None:
    bad = [
        Handover(SEALED, last=22, frontier=22, began=64),
        Handover(SEALED, last=23, frontier=22, began=22),
        Handover(SEALED, last=22, frontier=20, began=22),
        Handover(SEALED, last=22, frontier=22, began=22, gaps=(Gap(20, 22, LOST),)),
        Handover(OPEN, last=22, frontier=10, began=22, gaps=(Gap(10, 22, LOST),)),
        Handover(OPEN, last=22, frontier=10, began=64),
        Handover(OPEN, last=22, frontier=10, began=64, gaps=(Gap(22, 64, LOST),)),
        Handover(OPEN, last=70, frontier=10, began=64, gaps=(Gap(10, 64, LOST),)),
    ]

    assert [names_of(move_goes_on(handover)) for handover in bad] == [{"I21"}] * len(bad)


ME: Final = StoredCursor("billing", 0, TOPIC)


def test_cursors_that_only_go_forward_break_nothing() -> None:
    events: list[Event] = [
        Handed(ME, 0, 14),
        Acked(ME, 9, None),
        Found(ME, 0),
        Acked(ME, 14, 14),
        Acked(ME, 9, 14),
        Found(ME, 14),
        Handed(ME, 10, 22),
        Reset(ME, 2, done=True),
        Found(ME, 2),
        Found(ME._replace(incarnation="cd" * 16), 0),
    ]

    assert list(cursors_hold(events)) == []


@pytest.mark.parametrize(
    "events",
    [
        pytest.param([Acked(ME, 14, 14), Found(ME, 9)], id="went back"),
        pytest.param([Acked(ME, 14, 14), Acked(ME, 20, 20), Acked(ME, 3, 14)], id="told an old place"),
        pytest.param([Acked(ME, 14, 9)], id="not moved"),
        pytest.param([Acked(ME, 14, 14), Found(ME, 15)], id="further than anyone asked"),
        pytest.param([Handed(ME, 0, 10), Handed(ME, 12, 20)], id="passed over"),
        pytest.param([Handed(ME, 0, 10), Acked(ME, 14, 14)], id="done without being handed out"),
        pytest.param([Acked(ME, 14, 14), Reset(ME, 2, done=False), Acked(ME, 20, 20), Found(ME, 2)], id="a late reset"),
    ],
)
def test_a_cursor_that_goes_back_or_passes_over_records_is_named_i25(events: list[Event]) -> None:
    assert names_of(cursors_hold(events)) == {"I25"}
