"""Clean shutdown in the shared modes: exports the tail and gives unused offsets back.

So the next owner starts without a gap. Best effort, within a time: what is left undone is what an unclean stop would
have left, no more.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from forebay.catalog import StoredState, read_state
from forebay.catalog.transact import Done, Write, transact
from forebay.clock import Clock
from forebay.errors import Corrupt, ForebayError, Indeterminate, Unavailable
from forebay.format.descriptor import Phase
from forebay.format.value import encode_value
from forebay.metadata import MetadataStore, Put, RevisionIs
from forebay.shard.handover import seal_files
from forebay.shard.ownership import BATCH_SHARDS
from forebay.shard.segment import SegmentShard

logger = logging.getLogger(__name__)


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
                shard.archive.catch_up()
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
    usable = not wal.closed and wal.failure is None and shard.archive.error is None
    return usable and wal.writer.touched and wal.writer.next > shard.archive.exported


class Ended(NamedTuple):
    """A shard that was closed in order: the key of its state, its epoch, and where it ends."""

    key: str
    epoch: int
    next_offset: int


def end_reservations(store: MetadataStore, ended: Sequence[Ended]) -> None:
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
                _end_alone(store, shard)


def _end_alone(store: MetadataStore, shard: Ended) -> None:
    what = f"what {shard.key} has reserved beyond offset {shard.next_offset} stays so"
    try:
        transact(store, lambda: read_state(store, shard.key), lambda stored: _released(shard, stored), what=what)
    except (Unavailable, Indeterminate) as error:
        logger.warning("%s; it is skipped if another directory goes on", error)


def _released(shard: Ended, stored: StoredState | None) -> Write[None] | Done[None]:
    """The state of a shard without an owner, with nothing reserved beyond its end."""
    if stored is None or stored.state.epoch != shard.epoch or stored.state.phase is not Phase.OPEN:
        return Done(None)
    state = msgspec.structs.replace(stored.state, owner=None, reserved_end=shard.next_offset)
    put = Put(shard.key, encode_value(state, unknown=stored.unknown))
    return Write([RevisionIs(shard.key, stored.revision)], [put], None) if state != stored.state else Done(None)
