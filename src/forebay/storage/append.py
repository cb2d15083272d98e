"""How records get into the shards of a topic: partition by partition, patiently, all or none in each.

Input is checked before it comes here, apart from sizes. Knows shards, nothing of engines or disks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from forebay.appends.queue import Producing, QueuedRecord, QueueFull, record_bytes
from forebay.appends.ticket import Ticket
from forebay.clock import Clock
from forebay.engines import OwnedShard
from forebay.errors import Closed, ForebayError, Indeterminate, Invalid, Unavailable
from forebay.format.columns.rows import ColumnBytes, Columns, encode_columns
from forebay.format.frame.batch import encode_arrow
from forebay.partitioning import Partitioner
from forebay.settings import WalSettings
from forebay.storage.arguments import rows_by_partition

if TYPE_CHECKING:
    import pyarrow as pa

FRAME_ROOM = 1024
"""What a frame needs beside its columns: head, runs, padding."""
PLACES_MAX = 20
"""How many ranges of offsets a message names."""


class Staged(NamedTuple):
    """The records of one partition, queued together."""

    partition: int
    shard: OwnedShard
    ticket: Ticket
    records: int


class Failed(NamedTuple):
    """A partition whose records were not appended."""

    partition: int
    error: ForebayError


class Held(NamedTuple):
    """Records that are in."""

    partition: int
    offsets: range


class Appender:
    """Appends to the shards of one topic."""

    def __init__(self, name: str, settings: WalSettings, clock: Clock, shard: Callable[[int], OwnedShard]) -> None:
        self._name = name
        self._settings = settings
        self._clock = clock
        self._shard = shard
        self._bytes_max = settings.frame_bytes_max - FRAME_ROOM

    def one(self, partition: int, entry: QueuedRecord) -> int:
        """Append a record; its offset once its durability class holds."""
        shard = self._shard(partition)
        size = record_bytes(*entry[:4])
        if size > self._bytes_max:
            self.checked_size(size)
        try:
            shard.stage_one(entry, size)
        except (QueueFull, Closed) as refused:
            shard = self._patiently(partition, shard, lambda shard: shard.stage_one(entry, size), refused)
        return shard.acknowledge(entry.ticket)

    def one_soon(self, partition: int, entry: QueuedRecord) -> OwnedShard:
        """Queue a record; `Unavailable` at once if there is no room."""
        shard = self._shard(partition)
        size = record_bytes(*entry[:4])
        if size > self._bytes_max:
            self.checked_size(size)
        try:
            shard.stage_one(entry, size)
        except Closed as ended:
            shard = self._next_after(partition, shard, ended)
            shard.stage_one(entry, size)
        return shard

    def one_in(self, shard: OwnedShard, entry: QueuedRecord) -> bool:
        """Queue a record in this shard; false if the shard is closed. `Unavailable` at once if there is no room."""
        size = record_bytes(*entry[:4])
        if size > self._bytes_max:
            self.checked_size(size)
        try:
            shard.stage_one(entry, size)
        except Closed:
            return False
        return True

    def _next_after(self, partition: int, shard: OwnedShard, ended: Closed) -> OwnedShard:
        """The shard as it is open now, where one was let go of before it was used; raises why, if it has moved."""
        found = self._shard(partition)
        if found is shard:
            raise ended
        return found

    def together(self, partition: int, columns: Columns, producing: Producing | None, *, atomic: bool) -> Sequence[int]:
        """Append records to one partition."""
        encoded = encode_columns(columns)
        if atomic or encoded.size + FRAME_ROOM <= self._settings.frame_bytes_max:
            return self._settled([self._stage(partition, encoded, producing)])[0]
        # Every piece is checked before the first is appended.
        pieces = [(partition, piece) for piece in self._split(columns, encoded)]
        return [offset for held in self._in_turn(pieces, producing) for offset in held.offsets]

    def _in_turn(self, pieces: Sequence[tuple[int, Columns]], producing: Producing | None) -> list[Held]:
        """Append the pieces one after the other. Once the first is in, a refusal no longer means nothing was done."""
        if producing is not None and len(pieces) > 1:
            raise Invalid("atomic=False may split the append, but a producer's sequence names exactly one")
        held: list[Held] = []
        for partition, piece in pieces:
            try:
                found = self._settled([self._stage(partition, encode_columns(piece), producing)])
            except ForebayError as error:
                if held:
                    raise self._mixed(held, [Failed(partition, error)]) from error
                raise
            held.append(Held(partition, found[0]))
        return held

    def _split(self, columns: Columns, encoded: ColumnBytes) -> list[Columns]:
        """The columns in pieces that fit into a frame each."""
        if encoded.size + FRAME_ROOM <= self._settings.frame_bytes_max:
            return [columns]
        if encoded.count == 1:
            self.checked_size(encoded.size)
        half = encoded.count // 2
        halves = (_picked(columns, range(half)), _picked(columns, range(half, encoded.count)))
        return [piece for part in halves for piece in self._split(part, encode_columns(part))]

    def scattered(
        self, chosen: Sequence[int], columns: Columns, producing: Producing | None, *, atomic: bool
    ) -> Sequence[int]:
        """Append records to the partition named for each; all are staged before the first is waited for."""
        rows: dict[int, list[int]] = {}
        for row, number in enumerate(chosen):
            rows.setdefault(number, []).append(row)
        _refuse_scattered_producer(producing, len(rows))
        parts = {number: _picked(columns, places) for number, places in rows.items()}
        offsets = [0] * len(chosen)
        encoded = {number: encode_columns(part) for number, part in parts.items()}
        if not atomic:
            pieces = [(number, piece) for number, part in parts.items() for piece in self._split(part, encoded[number])]
            held = self._in_turn(pieces, producing)
            for number, places in rows.items():
                _place(
                    offsets, places, [offset for piece in held if piece.partition == number for offset in piece.offsets]
                )
            return offsets
        for part in encoded.values():
            self.checked_size(part.size)
        settled = self._all_settled(list(encoded.items()), producing)
        for number, found in zip(encoded, settled, strict=True):
            _place(offsets, rows[number], found)
        return offsets

    def arrow(
        self, batch: pa.RecordBatch, partitioner: Partitioner, partition: int | None, producing: Producing | None
    ) -> Sequence[int]:
        """Append the rows of a record batch."""
        pieces = rows_by_partition(batch, partitioner, partition, producing.producer if producing else 0)
        _refuse_scattered_producer(producing, len(pieces))
        now = self._clock.now_ms()
        encoded = [(piece.partition, encode_arrow(piece.batch, now)) for piece in pieces]
        for _, columns in encoded:
            self.checked_size(columns.size)
        offsets = np.zeros(batch.num_rows, np.int64)
        for piece, settled in zip(pieces, self._all_settled(encoded, producing), strict=True):
            offsets[piece.rows] = np.arange(settled.start, settled.stop)
        found: list[int] = offsets.tolist()
        return found

    def _all_settled(self, parts: Sequence[tuple[int, ColumnBytes]], producing: Producing | None) -> list[range]:
        """Stage every partition's records, then wait for all."""
        staged: list[Staged] = []
        for number, columns in parts:
            try:
                staged.append(self._stage(number, columns, producing))
            except ForebayError as error:
                if staged:
                    self._settled(staged, Failed(number, error))
                raise
        return self._settled(staged)

    def _settled(self, staged: Sequence[Staged], refused: Failed | None = None) -> list[range]:
        """The offsets of what was staged. Where some partitions hold and others failed the outcome is mixed."""
        held: list[Held] = []
        failed = [refused] if refused is not None else []
        for partition, shard, ticket, count in staged:
            try:
                first = shard.acknowledge(ticket)
                held.append(Held(partition, range(first, first + count)))
            except ForebayError as error:
                failed.append(Failed(partition, error))
        if failed and held:
            raise self._mixed(held, failed) from failed[0].error
        if failed:
            raise failed[0].error
        return [found.offsets for found in held]

    def _mixed(self, held: Sequence[Held], failed: Sequence[Failed]) -> Indeterminate:
        """What is in, where, and why the rest is not."""
        count = sum(len(found.offsets) for found in held)
        rest = "in doubt" if any(isinstance(failure.error, Indeterminate) for failure in failed) else "not"
        return Indeterminate(
            f"{self._name}: {count} records are appended ({_places(held)}), the rest is {rest} "
            f"(partition {failed[0].partition}: {failed[0].error}): repeat only what is missing"
        )

    def checked_size(self, size: int) -> int:
        """The size, or `Invalid` if no frame can hold it."""
        if size + FRAME_ROOM > self._settings.frame_bytes_max:
            raise Invalid(
                f"{size} bytes in one append to {self._name}; the limit is wal.frame_bytes_max "
                f"({self._settings.frame_bytes_max}): send less at once, or raise the setting"
            )
        return size

    def _stage(self, partition: int, columns: ColumnBytes, producing: Producing | None) -> Staged:
        self.checked_size(columns.size)
        shard = self._shard(partition)
        ticket = Ticket()
        try:
            shard.stage_many(columns, producing, ticket)
        except (QueueFull, Closed) as refused:
            shard = self._patiently(
                partition, shard, lambda shard: shard.stage_many(columns, producing, ticket), refused
            )
        return Staged(partition, shard, ticket, columns.count)

    def _patiently(
        self, partition: int, shard: OwnedShard, stage: Callable[[OwnedShard], Ticket], refused: QueueFull | Closed
    ) -> OwnedShard:
        """Stage again after `shard` refused, until the time limit; the shard that took it.

        While the queue is full this thread helps to write it. Where the shard has ended, the one that is open now
        is tried; it may be full, too.
        """
        deadline = self._clock.monotonic() + self._settings.append_timeout_ms / 1000
        is_second = False
        while True:
            if isinstance(refused, Closed):
                if is_second and self._clock.monotonic() >= deadline:
                    raise refused
                shard = self._next_after(partition, shard, refused)
            elif (left := deadline - self._clock.monotonic()) > 0:
                shard.commit_within(left)
            else:
                waited = self._settings.append_timeout_ms
                raise Unavailable(f"{self._name}: waited {waited} ms (wal.append_timeout_ms): {refused}") from refused
            is_second = True
            try:
                stage(shard)
            except (QueueFull, Closed) as again:
                refused = again
            else:
                return shard


def _refuse_scattered_producer(producing: Producing | None, partitions: int) -> None:
    if producing is not None and partitions > 1:
        raise Invalid(
            f"the records fall into {partitions} partitions, but a producer's sequence counts in one: "
            "append each partition's records by themselves"
        )


def _picked(columns: Columns, rows: Sequence[int]) -> Columns:
    """Some rows of the columns."""
    return Columns(
        values=[columns.values[row] for row in rows],
        timestamps=[int(columns.timestamps[row]) for row in rows],
        keys=None if columns.keys is None else [columns.keys[row] for row in rows],
        tags=None if columns.tags is None else [columns.tags[row] for row in rows],
        headers=None if columns.headers is None else [columns.headers[row] for row in rows],
    )


def _places(held: Sequence[Held]) -> str:
    """Which offsets of which partitions, neighbours together."""
    merged: list[Held] = []
    for found in held:
        if merged and merged[-1].partition == found.partition and merged[-1].offsets.stop == found.offsets.start:
            merged[-1] = Held(found.partition, range(merged[-1].offsets.start, found.offsets.stop))
        else:
            merged.append(found)
    named = [f"partition {partition}: offsets {offsets.start} to {offsets.stop - 1}" for partition, offsets in merged]
    more = f" and {len(named) - PLACES_MAX} more" if len(named) > PLACES_MAX else ""
    return ", ".join(named[:PLACES_MAX]) + more


def _place(offsets: list[int], places: Sequence[int], found: Sequence[int]) -> None:
    for place, offset in zip(places, found, strict=True):
        offsets[place] = offset
