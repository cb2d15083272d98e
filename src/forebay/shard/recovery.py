"""Decides where a shard goes on after a stop, and which appends its new owner must recognise as repeats.

`decide` is pure: it has the facts of the log and the recorded state, and does no I/O, so that every row of the table
can be tested by itself. The result is logged and shown. `known_in_log` and `known_in_history` read the producer window:
a new owner from the newest segment of history, the same owner from its newest log file. Where either is damaged,
appends may be missing: the window is partial then, and refuses producers that it does not know. The shard's state
remembers that, because the next log file restates the window without saying so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from forebay.appends.producer_window import ProducerWindow
from forebay.catalog import ShardCatalog
from forebay.errors import Conflict, Corrupt, DataLoss, UnknownTopic
from forebay.format.control.frames import decode_state
from forebay.format.files.segment import HEADER_BYTES
from forebay.format.frame.head import Kind
from forebay.format.metadata.descriptor import DescriptorKind, Phase, SegmentDescriptor, ShardState
from forebay.history import REPLACED
from forebay.places import Places
from forebay.records import Gap, Reason
from forebay.sealed import ByteSource, salt_crc_of
from forebay.settings import WalSettings
from forebay.topics import Durability
from forebay.wal.recovery.survey import Survey
from forebay.wal.removals import Blind
from forebay.wal.scan import note_producers, note_state
from forebay.wal.sealing import Opening
from forebay.wal.walk import ControlFrame, DataFrames, Unreadable, walk

logger = logging.getLogger(__name__)

LOOK_ATTEMPTS = 5
"""So often the newest segment is looked up again, if compaction replaces it while it is read."""


class NextSource(enum.StrEnum):
    """What the next offset follows from."""

    EMPTY = "empty"
    LOCAL = "local continuity"
    CATALOG = "catalog"
    SEALED = "sealed state"


class LogFacts(Protocol):
    """What a decision needs to know of the local log."""

    @property
    def is_empty(self) -> bool: ...

    @property
    def begins(self) -> int: ...

    @property
    def end(self) -> int: ...

    @property
    def epoch(self) -> int: ...

    @property
    def reserved_end(self) -> int: ...

    @property
    def identity(self) -> str: ...

    @property
    def is_short(self) -> bool: ...

    @property
    def clean(self) -> bool: ...

    @property
    def torn_bytes(self) -> int: ...

    @property
    def damage(self) -> list[Gap]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryDecision:
    """How a shard was opened: its next offset, why, and what was found on the way."""

    next_offset: int
    source: NextSource
    exact: bool
    """The log's end is known to the record; no gap was needed."""
    clean: bool = False
    gap: Gap | None = None
    """Offsets that may have been given out and hold no record from now on."""
    continued_at: int | None = None
    """The local log ends here, below `next_offset`: history holds what lies between."""
    set_aside: bool = False
    """The local files are not the shard's present log: they are kept apart."""
    torn_bytes: int = 0
    """Bytes behind the last whole frame, never acknowledged, set aside."""
    damage: tuple[Gap, ...] = ()
    undone: tuple[Blind, ...] = ()
    """Damaged control frames. Deletes and floor moves recorded only there are lost: those records are visible again."""

    def __str__(self) -> str:
        parts = [f"next offset {self.next_offset} by {self.source}"]
        parts.append("after a clean stop" if self.clean else "exact" if self.exact else "tail not exact")
        if self.gap is not None:
            parts.append(f"gap {self.gap}")
        if self.continued_at is not None:
            parts.append(f"local log ends at {self.continued_at}")
        if self.set_aside:
            parts.append("older local files set aside")
        if self.torn_bytes:
            parts.append(f"{self.torn_bytes} torn bytes set aside")
        parts += [f"damage {gap}" for gap in self.damage]
        parts += [f"damaged at byte {place.byte}: deletes that stood there are undone" for place in self.undone]
        return ", ".join(parts)


class Situation(NamedTuple):
    """Where a shard is being opened. `identity` names the present boot and mount, `holder` the present directory."""

    name: str
    durability: Durability
    identity: str
    holder: str
    frontier: int = 0
    """The end of catalogued history."""
    shared: bool = False
    """Offsets are reserved in the metadata store, so another directory may go on where one has died."""
    covered: int = 0
    """The end of the history that does not lie in the local files."""


def refuse_contradiction(facts: LogFacts, state: ShardState | None, name: str) -> None:
    """`Conflict` if the local log and the recorded state cannot both be right.

    Once the shard is acquired its state says no more that it was sealed, or not known: refuse before that.
    """
    if state is None and not facts.is_empty:
        raise Conflict(
            f"{name} has a local log up to {facts.end}, but the metadata store does not know the shard: "
            "restore the metadata store, or move the shard's directory away to start afresh"
        )
    if state is not None and state.phase is Phase.SEALED and facts.end > state.next_offset:
        raise Conflict(
            f"{name} was sealed at {state.next_offset} by {state.sealed_by}, but the local log goes to "
            f"{facts.end}: they contradict each other; find out which is right before you move either away"
        )


def refuse_lost_directory(state: ShardState | None, holder: str, name: str, directory: str) -> None:
    """`Conflict` if a directory that is missing had the only word on how far its holder's offsets went."""
    if state is not None and state.holder == holder and state.reserved_in_log:
        raise DataLoss(
            f"{name} has lost its directory {directory}, and with it how far its offsets went: restore it from a "
            "backup, or delete the topic and create it again",
            shard=name,
        )


def decide(facts: LogFacts, state: ShardState | None, here: Situation) -> RecoveryDecision:
    """The decision for a shard whose recorded state, before it was acquired now, is `state`."""
    refuse_contradiction(facts, state, here.name)
    if state is None:
        return RecoveryDecision(next_offset=0, source=NextSource.EMPTY, exact=True)
    if state.phase is Phase.DELETING:
        raise UnknownTopic(f"{here.name} is being deleted")
    if state.phase is Phase.SEALED:
        return _after_seal(facts, state, here)
    if not _is_mine(facts, state, here.holder):
        return _take_over(facts, state, here)
    return _without_log(state, here) if facts.is_empty else _continue_log(facts, state, here)


def with_undone(decision: RecoveryDecision, undone: tuple[Blind, ...]) -> RecoveryDecision:
    """The same decision, with the deletes that the files which are kept have lost."""
    return dataclasses.replace(decision, undone=undone) if undone and not decision.set_aside else decision


def _is_mine(facts: LogFacts, state: ShardState, holder: str) -> bool:
    """Whether no other owner can have written since the newest state frame of the local log.

    An epoch that this directory acquired without writing anything leaves no frame, so all epochs since
    `holder_since` count as its own; without a log, all of them must be.
    """
    if facts.is_empty:
        return state.holder in (None, holder)
    return facts.epoch == state.epoch or (state.holder == holder and facts.epoch >= state.holder_since)


def _after_seal(facts: LogFacts, state: ShardState, here: Situation) -> RecoveryDecision:
    """The last owner ended in order and all of it is history: go on exactly there."""
    kept = not facts.is_empty and _is_mine(facts, state, here.holder)
    return RecoveryDecision(
        next_offset=state.next_offset,
        source=NextSource.SEALED,
        exact=True,
        continued_at=facts.end if kept and facts.end < state.next_offset else None,
        set_aside=not facts.is_empty and not kept,
        damage=_damage(facts, here) if kept else (),
    )


def _take_over(facts: LogFacts, state: ShardState, here: Situation) -> RecoveryDecision:
    """Another directory wrote last and its session is gone: what it had not exported stays on its disk."""
    if state.holder == here.holder:
        # Ours since, but nothing was written yet: the files are from a time before the other's.
        return dataclasses.replace(_without_log(state, here), set_aside=not facts.is_empty)
    if not here.shared:
        raise Conflict(
            f"{here.name}: epoch {state.epoch} was held by directory {state.holder} and its records lie there: "
            "open that directory, or seal and move the topic from there"
        )
    return _behind(here.frontier, state.reserved_end, set_aside=not facts.is_empty)


def _without_log(state: ShardState, here: Situation) -> RecoveryDecision:
    if here.frontier > state.next_offset and not here.shared:
        raise DataLoss(
            f"{here.name} has history up to {here.frontier}, but its directory has no log: restore the directory; "
            "going on without it could give an offset out twice",
            shard=here.name,
        )
    if max(here.frontier, state.reserved_end) == 0:
        return RecoveryDecision(next_offset=0, source=NextSource.EMPTY, exact=True)
    return _behind(here.frontier, state.reserved_end, set_aside=False)


def _behind(frontier: int, reserved_end: int, *, set_aside: bool) -> RecoveryDecision:
    """Go on behind everything that may have been given out; what history does not have is a gap."""
    next_offset = max(frontier, reserved_end)
    gap = Gap(frontier, next_offset, Reason.LOST) if next_offset > frontier else None
    return RecoveryDecision(
        next_offset=next_offset, source=NextSource.CATALOG, exact=gap is None, gap=gap, set_aside=set_aside
    )


def _damage(facts: LogFacts, here: Situation) -> tuple[Gap, ...]:
    """What the local log has lost: ranges of it, and its front where no history covers that."""
    if facts.begins > here.covered:
        return (Gap(here.covered, facts.begins, Reason.DAMAGED), *facts.damage)
    return tuple(facts.damage)


def _continue_log(facts: LogFacts, state: ShardState, here: Situation) -> RecoveryDecision:
    same_boot = facts.identity == here.identity and not facts.is_short
    exact = here.durability.policy.exact_after(clean=facts.clean, same_boot=same_boot)
    # Where the state says how far offsets are reserved, the log may remember some that were given back since.
    in_state = here.shared and not state.reserved_in_log
    reserved_end = state.reserved_end if in_state else max(facts.reserved_end, state.reserved_end)
    if facts.end < here.frontier:
        behind = _behind(here.frontier, 0 if exact else reserved_end, set_aside=False)
        return dataclasses.replace(behind, continued_at=facts.end, damage=_damage(facts, here))
    next_offset = facts.end if exact else max(facts.end, reserved_end)
    gap = Gap(facts.end, next_offset, Reason.LOST) if next_offset > facts.end else None
    return RecoveryDecision(
        next_offset=next_offset,
        source=NextSource.LOCAL,
        exact=exact,
        clean=facts.clean,
        gap=gap,
        torn_bytes=facts.torn_bytes,
        damage=_damage(facts, here),
    )


class KnownProducers(NamedTuple):
    """The appends that are recognised as repeats; below `unknown_below` there may have been others."""

    window: ProducerWindow
    unknown_below: int


def known_in_log(facts: Survey, unknown_below: int) -> KnownProducers:
    """By the owner's newest log file. `unknown_below` is what the shard's state says."""
    window, last = facts.window, facts.last
    if window.is_partial:
        return KnownProducers(window, max(unknown_below, facts.end))
    # A file that began before the damage was found restated all that came before it, and is whole now.
    window.is_partial = last is not None and last.start >= unknown_below > 0
    return KnownProducers(window, unknown_below if window.is_partial else 0)


def known_in_history(
    catalog: ShardCatalog, places: Places, settings: WalSettings, unknown_below: int
) -> KnownProducers:
    """By history, where no local log says so: the newest segment born in the log restates what came before it."""
    frontier = catalog.frontier().next
    if frontier == 0:
        return KnownProducers(ProducerWindow(settings.producers_max, settings.producer_appends_max), 0)
    pieces = catalog.descriptors()
    newest = _newest_born(pieces)
    for _ in range(LOOK_ATTEMPTS):
        window, lost = _window_of(newest, places, settings)
        if not isinstance(lost, REPLACED):
            break
        # Compaction may have replaced the object since the look, and what it replaces is removed later.
        pieces, before = catalog.descriptors(), newest
        newest = _newest_born(pieces)
        if newest == before:
            break
    if lost is not None:
        logger.warning("%s: the appends of producers cannot be read from history: %s", catalog.keys, lost)
    end = newest.end if newest is not None else 0
    if lost is not None or any(piece.start >= end and _is_damaged(piece) for piece in pieces):
        window.lose()
        return KnownProducers(window, frontier)
    # What was exported since the damage was found has been restated from a partial window.
    window.is_partial = end > unknown_below > 0
    return KnownProducers(window, unknown_below if window.is_partial else 0)


def _newest_born(pieces: Sequence[SegmentDescriptor]) -> SegmentDescriptor | None:
    return next((piece for piece in reversed(pieces) if piece.is_born), None)


def _window_of(
    newest: SegmentDescriptor | None, places: Places, settings: WalSettings
) -> tuple[ProducerWindow, Exception | None]:
    """What the segment says of producers, and why that is not all of it, if so."""
    window = ProducerWindow(settings.producers_max, settings.producer_appends_max)
    if newest is not None and newest.producers:
        try:
            _take(window, newest, places)
        except (Corrupt, *REPLACED) as error:
            return window, error
    return window, None


def _is_damaged(piece: SegmentDescriptor) -> bool:
    return piece.gap is not None and piece.gap.reason is Reason.DAMAGED


def _take(window: ProducerWindow, newest: SegmentDescriptor, places: Places) -> None:
    """Add what the segment says; `Corrupt` if not all of it is whole."""
    if newest.kind is DescriptorKind.PARQUET:
        from forebay.columnar import ParquetSegment  # noqa: PLC0415 - it brings Arrow, which takes its time to load

        with contextlib.closing(places.segment(newest)) as segment:
            assert isinstance(segment, ParquetSegment)
            window.extend(segment.window())
        return
    with contextlib.closing(places.source(newest)) as source:
        _walk(window, newest, source)


def _walk(window: ProducerWindow, newest: SegmentDescriptor, source: ByteSource) -> None:
    salt_crc, opening = salt_crc_of(source, newest.object_key), Opening()
    for step in walk(source, salt_crc, HEADER_BYTES, newest.bytes, expected=0, end=0):
        match step:
            case DataFrames():
                for head, position in step.each():
                    note_producers(window, head, step.buffer, position)
            case ControlFrame():
                if step.head.kind == Kind.STATE:
                    state = decode_state(step.buffer, step.position, step.head)
                    opening.take(state)
                    note_state(window, state)
            case Unreadable():
                raise Corrupt(f'{newest.object_key} is damaged at byte {step.byte}: run "forebay repair"')
    if not opening.is_whole:
        raise Corrupt(f'{newest.object_key} has no whole state frame at its start: run "forebay repair"')
