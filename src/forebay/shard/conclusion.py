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

from forebay.catalog import read_state
from forebay.clock import Clock
from forebay.errors import Corrupt, ForebayError
from forebay.format.descriptor import Phase
from forebay.format.value import encode_value
from forebay.metadata import Compare, MetadataStore, Operation, Put, RevisionIs
from forebay.shard.handover import seal_files
from forebay.shard.ownership import BATCH_SHARDS
from forebay.shard.segment import SegmentShard

logger = logging.getLogger(__name__)

ATTEMPTS = 4
"""How often the reservation of one shard is ended, while its state keeps changing."""


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
        _end_together(store, ended[first : first + BATCH_SHARDS], ATTEMPTS)


def _end_together(store: MetadataStore, shards: Sequence[Ended], attempts: int) -> None:
    """In one transaction; where a state has changed meanwhile, each half by itself, and a single one once more."""
    compares: list[Compare] = []
    puts: list[Operation] = []
    for shard in shards:
        stored = read_state(store, shard.key)
        if stored is None or stored.state.epoch != shard.epoch or stored.state.phase is not Phase.OPEN:
            continue
        state = msgspec.structs.replace(stored.state, owner=None, reserved_end=shard.next_offset)
        compares.append(RevisionIs(shard.key, stored.revision))
        puts.append(Put(shard.key, encode_value(state, unknown=stored.unknown)))
    if not puts or store.transaction(compares, puts).succeeded:
        return
    if len(shards) > 1:
        half = len(shards) // 2
        _end_together(store, shards[:half], attempts)
        _end_together(store, shards[half:], attempts)
    elif attempts > 1:
        _end_together(store, shards, attempts - 1)
    else:
        logger.warning(
            "%s changed %d times while its reservation was being ended: what was reserved beyond offset %d stays so, "
            "and is skipped if another directory goes on",
            shards[0].key,
            ATTEMPTS,
            shards[0].next_offset,
        )
