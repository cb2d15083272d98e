"""Ends a shard in order: seals it for another owner, or closes it cleanly with its tail exported.

A seal lets another owner go on exactly where this one stops. Each step may be repeated, and a process that finds a seal
half-way either repeats it or takes it back by acquiring the shard: nothing is history before it is catalogued, and
nothing is given away before all of it is history. A clean shutdown in the shared modes exports the tail and gives
unused offsets back, best effort and within a time: what is left undone is what an unclean stop would have left.
Knows one shard with its log and its history; the caller stops the workers of the shard beforehand.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from forebay.catalog import StoredState, read_state
from forebay.catalog.transact import Done, Write, transact
from forebay.clock import Clock
from forebay.errors import Corrupt, ForebayError, Indeterminate, Moved, Unavailable, Unsupported
from forebay.export import Lag
from forebay.format.metadata.descriptor import Phase, SegmentDescriptor, ShardState
from forebay.format.metadata.keys import shard_of_state
from forebay.format.metadata.value import encode_value
from forebay.history import READABLE
from forebay.metadata import MetadataStore, Put, RevisionIs
from forebay.places import is_private
from forebay.shard.context import ShardContext
from forebay.shard.directories import directory_name
from forebay.shard.ownership import BATCH_SHARDS, change_state, wanted
from forebay.shard.segment import SegmentShard

logger = logging.getLogger(__name__)

OnFile: TypeAlias = Callable[[Lag], None]
"""Called before each file with what is left to export."""


def begin_seal(shard: SegmentShard, around: ShardContext, target: str | None) -> None:
    """From here on appends are refused, here and by every process that reads the recorded state."""
    _check_target(shard, around, target)
    prefix = around.settings.metadata.prefix
    destination = "" if target is None else f" to move to {directory_name(around.metadata, prefix, target)}"

    def sealing(state: ShardState) -> ShardState:
        return msgspec.structs.replace(state, phase=Phase.SEALING, target=target)

    sealed = wanted(shard.ref, around.settings)
    change_state(around.metadata, sealed, shard.epoch, sealing, clock=around.places.clock)
    shard.wal.hold(
        Moved(f"{shard.ref} is being sealed{destination}: try again there, or here if it is not", shard=shard.ref)
    )


def finish_seal(
    shard: SegmentShard, around: ShardContext, *, clock: Clock, on_file: OnFile | None, accept_damage: bool = False
) -> ShardState:
    """Make everything history, check that it is, and give the shard up; the state on return.

    No other thread works on the shard. Raises what kept it from being sealed; the shard is then still ours. With
    `accept_damage` damaged ranges do not keep it from that.
    """
    next_offset = bring_into_history(shard, on_file, accept_damage=accept_damage)
    history = shard.history
    if around.places.store is not None:
        history.publish_local(on_file)
    check_coverage(shard, around, next_offset)

    def sealed(state: ShardState) -> ShardState:
        return msgspec.structs.replace(
            state,
            phase=Phase.SEALED,
            owner=None,
            next_offset=next_offset,
            # No offset was given out beyond: the next owner may go on exactly here.
            reserved_end=next_offset,
            sealed_by=around.holder,
            sealed_at=clock.now_ms(),
            target=state.target if around.places.store is not None else around.holder,
        )

    # Commit point: the shard has no owner, and all of it is history.
    return change_state(around.metadata, wanted(shard.ref, around.settings), shard.epoch, sealed, clock=clock)


def withdraw_target(metadata: MetadataStore, key: str, *, clock: Clock) -> None:
    """Let any directory open a sealed shard that was promised to one and is not taken there yet."""

    def freed(stored: StoredState | None) -> Write[None] | Done[None]:
        if stored is None or stored.state.phase is not Phase.SEALED or stored.state.target is None:
            return Done(None)
        put = Put(key, encode_value(msgspec.structs.replace(stored.state, target=None), unknown=stored.unknown))
        return Write([RevisionIs(key, stored.revision)], [put], None)

    what = f"{shard_of_state(key)} is still promised to a directory"
    transact(metadata, lambda: read_state(metadata, key), freed, what=what, clock=clock)


def bring_into_history(shard: SegmentShard, on_file: OnFile | None = None, *, accept_damage: bool = False) -> int:
    """Make everything that was accepted history, gaps at the end included; where the log ends.

    Appends are held, else more may have come meanwhile. Raises `DataLoss` at damage, unless `accept_damage`.
    """
    next_offset = _drained(shard, accept_damage=accept_damage)
    history = shard.history
    history.catch_up(on_file, accept_damage=accept_damage)
    _record_last_gaps(shard)
    return next_offset


def _drained(shard: SegmentShard, *, accept_damage: bool) -> int:
    """Everything accepted is in sealed files; where the log ends."""
    wal = shard.wal
    wal.flush()
    shard.rotate()
    seal_files(shard, accept_damage=accept_damage)
    return wal.writer.next


def seal_files(shard: SegmentShard, *, accept_damage: bool) -> None:
    """Seal every file that is no longer written; raises why one is not, `DataLoss` if it is damaged.

    With `accept_damage` also those that are damaged since they were sealed, with their damage named.
    """
    if accept_damage:
        shard.upkeep.unseal_damaged(shard.history.exported)
    shard.upkeep.seal_rotated(accept_damage=accept_damage)
    unsealed = [file.path for file in shard.upkeep.rotated()]
    if unsealed and shard.upkeep.stopped is not None:
        raise shard.upkeep.stopped
    if unsealed:
        raise Unavailable(f"{shard.ref}: {unsealed[0]} could not be sealed yet; see the log for why, and try again")


def _record_last_gaps(shard: SegmentShard) -> None:
    """Make the gaps behind the last record history: those that the active file begins with, or the next one will."""
    writer = shard.wal.writer
    gaps = list(writer.active.gaps) if writer.active is not None and writer.active.is_bare else []
    if writer.opening_gap is not None:
        gaps.append(writer.opening_gap)
    for gap in gaps:
        if shard.history.exported < gap.stop:
            shard.history.close_gap(gap)


def _check_target(shard: SegmentShard, around: ShardContext, target: str | None) -> None:
    if target not in (None, around.holder) and around.places.store is None:
        raise Unsupported(
            f'{shard.ref} cannot move: storage.mode is "local" and what it holds lies in this directory alone; '
            "name a directory that both see as storage.handoff_root"
        )


def check_coverage(shard: SegmentShard, around: ShardContext, end: int) -> None:
    """Every offset below `end` is in history, and the store has every object that the local files stand for."""
    pieces = shard.history.catalog.descriptors()
    covered = pieces[-1].end if pieces else 0
    if covered != end:
        raise Corrupt(f"{shard.ref}: history ends at {covered} and the log at {end}: it is not sealed; run verify")
    store = around.places.store
    if store is None:
        return
    begins = shard.wal.files.begins or 0
    for piece in pieces:
        if piece.kind in READABLE and (piece.end > begins or is_private(piece)):
            _check_object(shard, around, piece)


def _check_object(shard: SegmentShard, around: ShardContext, piece: SegmentDescriptor) -> None:
    store = around.places.store
    assert store is not None
    found = store.stat(piece.object_key) if piece.store == around.places.store_name else None
    if found is None or found.size != piece.bytes or found.etag != piece.etag:
        raise Corrupt(
            f"{shard.ref}: {piece.object_key} in {piece.store} is not what was exported: it is not sealed; "
            'run "forebay repair"'
        )


def export_tails(shards: Sequence[SegmentShard], clock: Clock, seconds_max: float) -> None:
    """Make what was appended history, shard after shard, as far as the time and the store allow."""
    pending = [shard for shard in shards if _has_tail(shard)]
    if not pending or seconds_max <= 0:
        return
    deadline = clock.monotonic() + seconds_max
    left = {shard.ref.id: shard for shard in pending}

    def work() -> None:
        for shard in pending:
            if clock.monotonic() >= deadline:
                return
            try:
                shard.rotate()
                seal_files(shard, accept_damage=False)
                shard.history.catch_up()
            except Corrupt as error:
                # Damage is this shard's alone; a store that does not answer would not answer the others either.
                logger.warning("%s: its tail is not exported: %s", shard.ref, error)
                continue
            except (ForebayError, OSError) as error:
                logger.warning("%s: its tail is not exported: %s", shard.ref, error)
                return
            except Exception:
                logger.exception("%s: its tail is not exported", shard.ref)
                return
            left.pop(shard.ref.id)

    # Beside, so that a store that hangs does not keep the log from closing.
    thread = threading.Thread(target=work, name="forebay-tails", daemon=True)
    thread.start()
    thread.join(seconds_max)
    if left:
        logger.warning("%d of %d shards are closed before their tails are exported", len(left), len(pending))


def _has_tail(shard: SegmentShard) -> bool:
    wal = shard.wal
    usable = not wal.closed and wal.failure is None and shard.history.error is None
    return usable and wal.writer.touched and wal.writer.next > shard.history.exported


class ClosedShard(NamedTuple):
    """A shard that was closed in order: the key of its state, its epoch, and where it ends."""

    key: str
    epoch: int
    next_offset: int


def end_reservations(store: MetadataStore, ended: Sequence[ClosedShard], *, clock: Clock) -> None:
    """Say that nothing was given out beyond the ends: then a gap is no larger than what was not exported."""
    for first in range(0, len(ended), BATCH_SHARDS):
        shards = ended[first : first + BATCH_SHARDS]
        wanted = [_released(shard, read_state(store, shard.key)) for shard in shards]
        writes = [write for write in wanted if isinstance(write, Write)]
        compares = [compare for write in writes for compare in write.compares]
        puts = [put for write in writes for put in write.operations]
        if puts and not store.transaction(compares, puts).succeeded:
            # One state has changed meanwhile: that must not keep the others from theirs.
            for shard in shards:
                _end_alone(store, shard, clock)


def _end_alone(store: MetadataStore, shard: ClosedShard, clock: Clock) -> None:
    what = f"what {shard.key} has reserved beyond offset {shard.next_offset} stays so"
    try:
        transact(
            store,
            lambda: read_state(store, shard.key),
            lambda stored: _released(shard, stored),
            what=what,
            clock=clock,
        )
    except (Unavailable, Indeterminate) as error:
        logger.warning("%s; it is skipped if another directory goes on", error)


def _released(shard: ClosedShard, stored: StoredState | None) -> Write[None] | Done[None]:
    """The state of a shard without an owner, with nothing reserved beyond its end."""
    if stored is None or stored.state.epoch != shard.epoch or stored.state.phase is not Phase.OPEN:
        return Done(None)
    state = msgspec.structs.replace(stored.state, owner=None, reserved_end=shard.next_offset)
    put = Put(shard.key, encode_value(state, unknown=stored.unknown))
    return Write([RevisionIs(shard.key, stored.revision)], [put], None) if state != stored.state else Done(None)
