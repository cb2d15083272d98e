"""The promises of a shard's log as functions: each takes what happened and says where it was broken.

Every function yields `Violation`s named by invariant; none means that the promise was kept. `check_log`
is the history checker: lost, duplicated, reordered, fabricated and skipped records all have a name here.

I1 acked `fsync` survives · I2 acked `disk` survives kill -9, power takes a suffix, errors take no `memory` ·
I3 nothing fabricated · I4 one offset, one record · I5 offsets rise in ack order, next never goes back · I6 readable is
everything but named gaps · I7 a stream is gapless and rising · I8 two reads are equal · I9 no reader saw what later
vanished · I10 refused is never visible, indeterminate at most once · I11 recovering twice is recovering once · I12
damage is reported, never served or cut · I13 no `fsync` ack before its syncs · I14 synced before renamed, directory
after · I26 same (producer, sequence), same offset · I27 bounded · I28 after an I/O error healthy, or read-only with a
reason
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from operator import itemgetter
from typing import NamedTuple

from forebay.format.frame.head import HEADER
from forebay.records import Gap, Reason
from forebay.testing.checks.history import Append, AppendAnswered, AppendOutcome, Reading, ShardEvents, Synced
from forebay.testing.simulated import trace as traces
from forebay.testing.simulated.durability import DiskState as DiskModel
from forebay.testing.simulated.durability import FileLedger, WriteStanding
from forebay.testing.simulated.trace import Trace
from forebay.topics import Durability


class Violation(NamedTuple):
    """A broken promise."""

    invariant: str
    message: str

    def __str__(self) -> str:
        return f"{self.invariant}: {self.message}"


def check_log(history: ShardEvents, reading: Reading) -> list[Violation]:
    """Every promise about records that a history and one reading can show."""
    return [
        *acked_survives(history, reading),
        *nothing_fabricated(history, reading),
        *one_record_per_offset(history, reading),
        *offsets_rise(history, reading),
        *sequences_rise(history),
        *stream_is_gapless(reading),
        *nothing_seen_vanished(history, reading),
        *refused_stays_away(history, reading),
        *repeats_agree(history),
    ]


def acked_survives(history: ShardEvents, reading: Reading) -> Iterator[Violation]:
    """I1 and I2: what was promised is there, byte for byte; a power loss takes only what lies above all that is."""
    found = dict(reading.records)
    name = "I1" if history.durability is Durability.FSYNC else "I2"
    lost: list[tuple[Append, int]] = []
    kept: dict[int, int] = {}
    for append in history.acked:
        for offset, value in append.records:
            if found.get(offset) == value:
                kept[len(append.crashes)] = max(offset, kept.get(len(append.crashes), -1))
            elif not _damaged(reading, offset):
                lost.append((append, offset))
    for append, offset in lost:
        if history.must_survive(append):
            yield Violation(name, f"acknowledged offset {offset} ({append.begun.values[0]!r}) is lost")
        elif history.durability is Durability.DISK and kept.get(len(append.crashes), -1) > offset:
            yield Violation(name, f"offset {offset} is lost though one behind it, of the same life, is not")


def no_crash_is_damage(reading: Reading) -> Iterator[Violation]:
    """I12 where nothing but stops and failures happened: a crash damages nothing that was ever called durable."""
    for gap in reading.gaps:
        if gap.reason is Reason.DAMAGED:
            yield Violation("I12", f"[{gap.start}, {gap.stop}) is called damaged, and only a crash happened")


def nothing_fabricated(history: ShardEvents, reading: Reading) -> Iterator[Violation]:
    """I3: every record that is read was appended, whole and in its place within its append."""
    known = {value: append for append in history.appends.values() for value in append.begun.values}
    for offset, value in reading.records:
        append = known.get(value) if value is not None else None
        if append is None:
            yield Violation("I3", f"offset {offset} holds {value!r}, which no caller appended")
            continue
        if append.outcome is AppendOutcome.ACKED and (offset, value) not in append.records:
            yield Violation("I4", f"{value!r} was acknowledged at {append.offset} and is read at {offset}")
    present = {value: offset for offset, value in reading.records}
    for append in history.appends.values():
        places = [present.get(value) for value in append.begun.values]
        if any(place is not None for place in places) and not _whole(places, reading):
            yield Violation("I3", f"the append of {append.begun.values[0]!r} is there in part: {places}")


def _whole(places: list[int | None], reading: Reading) -> bool:
    """Contiguous; gaps only where damage is named or the reading began later."""
    first = next(place - index for index, place in enumerate(places) if place is not None)
    for index, place in enumerate(places):
        offset = first + index
        if place != offset and not (place is None and (_damaged(reading, offset) or offset < reading.start)):
            return False
    return True


def one_record_per_offset(history: ShardEvents, reading: Reading) -> Iterator[Violation]:
    """I4: an offset once acknowledged or shown never stands for another record, and is never given out again."""
    for contradiction in history.contradictions:
        yield Violation("I4", contradiction)
    known: dict[int, bytes | None] = dict(history.seen)
    for append in history.acked:
        for offset, payload in append.records:
            if known.setdefault(offset, payload) != payload:
                yield Violation("I4", f"offset {offset} was acknowledged for {payload!r} and for {known[offset]!r}")
    for offset, value in reading.records:
        if known.get(offset, value) != value:
            yield Violation("I4", f"offset {offset} stood for {known[offset]!r} and now for {value!r}")
    highest = max(known, default=-1)
    if highest >= reading.next:
        yield Violation("I4", f"offset {highest} was used; the next append would get {reading.next}")


def offsets_rise(history: ShardEvents, reading: Reading) -> Iterator[Violation]:
    """I5: each caller's acknowledgements rise, no record is there twice, and next lies above all that is read."""
    last: dict[str, int] = {}
    originals: dict[tuple[int, int] | None, int] = {}
    for append in history.appends.values():
        originals.setdefault(append.begun.producing, append.begun.attempt)
    for append in history.acked:
        caller, producing = append.begun.caller, append.begun.producing
        if producing is not None and originals[producing] != append.begun.attempt:
            continue
        if append.offset <= last.get(caller, -1):
            yield Violation("I5", f"caller {caller!r} was given {append.offset} after {last[caller]}")
        last[caller] = append.offset + len(append.begun.values) - 1
    for value, count in Counter(value for _, value in reading.records).items():
        if count > 1:
            yield Violation("I5", f"{value!r} is there {count} times")
    if reading.next < reading.end:
        yield Violation("I5", f"the next offset {reading.next} lies below the end {reading.end}")


def sequences_rise(history: ShardEvents) -> Iterator[Violation]:
    """I5 for idempotent producers: what has a higher sequence lies behind, however often it was sent."""
    by_producer: dict[int, dict[int, Append]] = {}
    for append in history.acked:
        if append.begun.producing is not None and history.must_survive(append):
            producer, sequence = append.begun.producing
            by_producer.setdefault(producer, {}).setdefault(sequence, append)
    for producer, appends in by_producer.items():
        for (lower, first), (higher, second) in itertools.pairwise(sorted(appends.items(), key=itemgetter(0))):
            if second.offset < first.offset + len(first.begun.values):
                yield Violation(
                    "I5", f"producer {producer}: {higher} was given {second.offset}, {lower} before it {first.offset}"
                )


def stream_is_gapless(reading: Reading) -> Iterator[Violation]:
    """I6 and I7: records and named gaps follow each other without a jump, from the start to the head."""
    expected = reading.start
    for step in reading.steps:
        start, stop = (step.start, step.stop) if isinstance(step, Gap) else (step[0], step[0] + 1)
        if start != expected:
            yield Violation("I7", f"after {expected} the stream goes on at {start} without a word")
        expected = stop
    if expected != reading.end:
        yield Violation("I6", f"records and gaps end at {expected}, the head is {reading.end}")


def readings_agree(first: Reading, second: Reading) -> Iterator[Violation]:
    """I8: two readings at rest are equal."""
    if first.steps != second.steps or first.end != second.end:
        yield Violation("I8", f"two readings differ: {_difference(first, second)}")


def nothing_seen_vanished(history: ShardEvents, reading: Reading) -> Iterator[Violation]:
    """I9: what a reader of an `fsync` topic saw is still there."""
    if history.durability is not Durability.FSYNC:
        return
    found = dict(reading.records)
    for offset, value in history.seen.items():
        if offset >= reading.start and offset not in found and not _damaged(reading, offset):
            yield Violation("I9", f"a reader saw {value!r} at {offset}, and it is gone")


def refused_stays_away(history: ShardEvents, reading: Reading) -> Iterator[Violation]:
    """I10: a refused append is never visible, an indeterminate one at most once."""
    counts = Counter(value for _, value in reading.records)
    answered = [*history.acked, *history.with_outcome(AppendOutcome.INDETERMINATE)]
    again = {append.begun.producing for append in answered if append.begun.producing is not None}
    for append in history.with_outcome(AppendOutcome.REFUSED):
        if append.begun.producing in again:
            continue
        yield from (
            Violation("I10", f"{value!r} was refused and is there") for value in append.begun.values if counts[value]
        )
    for append in history.with_outcome(AppendOutcome.INDETERMINATE):
        for value in append.begun.values:
            if counts[value] > 1:
                yield Violation("I10", f"{value!r} was indeterminate and is there {counts[value]} times")


def recovery_is_stable(first: Reading, second: Reading) -> Iterator[Violation]:
    """I11: recovering once more changes nothing."""
    if first != second:
        yield Violation(
            "I11", f"a second recovery differs: {_difference(first, second)}, next {first.next} {second.next}"
        )


def damage_is_reported(history: ShardEvents, reading: Reading, durable: int) -> Iterator[Violation]:
    """I12: below a durable mark every acknowledged record is served as it was or lies in a damaged range."""
    found = dict(reading.records)
    for append in history.acked:
        for offset, value in append.records:
            if offset in found and found[offset] != value:
                yield Violation("I12", f"offset {offset} is served as {found[offset]!r}, it was {value!r}")
            if offset < durable and offset not in found and not _damaged(reading, offset):
                yield Violation("I12", f"offset {offset} had been durable and is gone without a word")


def acks_follow_syncs(trace: Trace) -> Iterator[Violation]:
    """I13: at each `fsync` acknowledgement every byte and name of a segment file was durable."""
    model = DiskModel(trace.start)
    for operation in trace.operations:
        match operation:
            case traces.Note(_, AppendAnswered(attempt, AppendOutcome.ACKED, offset)):
                named = [entry for names in model.live.values() for entry in names.items()]
                if any(model.files[inode].changes for name, inode in named if name.endswith(".seg")):
                    yield Violation(
                        "I13", f"append {attempt} at {offset} was acknowledged before its bytes were synced"
                    )
                pending = [entry for change in model.pending for entry in change.entries if entry.inode is not None]
                if any(entry.name.endswith(".seg") for entry in pending):
                    yield Violation("I13", f"append {attempt} at {offset} was acknowledged before its name was synced")
            case _:
                pass
        model.apply(operation)


def promises_follow_syncs(trace: Trace) -> Iterator[Violation]:
    """I13 for a watermark: no record below it lies in bytes of a segment file whose sync has failed.

    A later sync of the same file proves nothing: the system has reported the failure and forgotten the bytes.
    """
    model = DiskModel(trace.start)
    for operation in trace.operations:
        match operation:
            case traces.Note(_, Synced(end)):
                named = [entry for names in model.live.values() for entry in names.items() if entry[0].endswith(".seg")]
                for name, inode in named:
                    doubtful = _first_doubtful(model.files[inode])
                    if doubtful is not None and doubtful < end:
                        yield Violation(
                            "I13", f"{end} is called durable, and a sync of {name} failed from offset {doubtful} on"
                        )
            case _:
                pass
        model.apply(operation)


def _first_doubtful(file: FileLedger) -> int | None:
    """The offset of the first frame whose sync has failed; each write since the last sync begins with a whole head."""
    doubtful = (change.operation for change in file.changes if change.standing is WriteStanding.DOUBTFUL)
    first = next((operation for operation in doubtful if isinstance(operation, traces.TracedWrite)), None)
    return None if first is None else int(HEADER.unpack_from(first.data)[0])


def names_follow_bytes(trace: Trace) -> Iterator[Violation]:
    """I14: a file is synced before it gets its name, and its directory right after."""
    model = DiskModel(trace.start)
    waiting: dict[int, str] = {}
    for operation in trace.operations:
        match operation:
            case traces.Rename(inode, _, _, directory, name):
                if inode in model.files and model.files[inode].changes:
                    yield Violation("I14", f"{name} got its name before its bytes were synced")
                waiting[directory] = name
            case traces.SyncDirectory(directory):
                waiting.pop(directory, None)
            case traces.SyncFilesystem():
                waiting.clear()
            case traces.TracedWrite() | traces.Note(_, AppendAnswered()):
                for name in waiting.values():
                    yield Violation("I14", f"work went on before the name {name} was synced")
                waiting.clear()
            case _:
                pass
        model.apply(operation)


def repeats_agree(history: ShardEvents) -> Iterator[Violation]:
    """I26: all acknowledgements of one (producer, sequence) name one offset, unless a crash could take the first."""
    offsets: dict[tuple[int, int], int] = {}
    for append in history.acked:
        producing = append.begun.producing
        if producing is None or not history.must_survive(append):
            continue
        if offsets.setdefault(producing, append.offset) != append.offset:
            yield Violation("I26", f"{producing} was given {offsets[producing]} and then {append.offset}")


def bounded(measured: Mapping[str, int], limits: Mapping[str, int]) -> Iterator[Violation]:
    """I27: nothing grows beyond its limit."""
    for name, value in measured.items():
        if value > limits[name]:
            yield Violation("I27", f"{name} is {value}, above {limits[name]}")


def healthy_or_read_only(failure: str | None, *, appends_work: bool) -> Iterator[Violation]:
    """I28: after an I/O error a shard takes appends, or says why it does not."""
    if not appends_work and not failure:
        yield Violation("I28", "appends are refused without a reason")
    if appends_work and failure:
        yield Violation("I28", f"appends work, but the shard says that it is read-only: {failure}")


def names_of(violations: Iterable[Violation]) -> set[str]:
    """Which invariants were broken."""
    return {violation.invariant for violation in violations}


def _damaged(reading: Reading, offset: int) -> bool:
    return any(gap.start <= offset < gap.stop and gap.reason is Reason.DAMAGED for gap in reading.gaps)


def _difference(first: Reading, second: Reading) -> str:
    for one, other in zip(first.steps, second.steps, strict=False):
        if one != other:
            return f"{one} and {other}"
    return f"{len(first.steps)} and {len(second.steps)} steps up to {first.end} and {second.end}"
