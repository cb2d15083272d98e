"""A producer: many single records to one topic, sent together, several requests at a time. For one event loop."""

from __future__ import annotations

import asyncio
from functools import partial
from types import TracebackType
from typing import Final, Self

from forebay.arguments import checked_seconds
from forebay.client.appends import Appends, AsyncRemoteAck, SendQueue, one_record
from forebay.clock import Clock
from forebay.errors import Closed, Invalid
from forebay.partitioning import check_partition, partition_of_key
from forebay.records import HeadersLike

LINGER_MS: Final = 5
BATCH_RECORDS: Final = 10_000
BATCH_BYTES: Final = 1024 * 1024
IN_FLIGHT: Final = 4
IN_FLIGHT_BYTES: Final = 64 * 1024 * 1024
HELD_BYTES: Final = 1280
"""What a record without an outcome takes in memory beside its key and value, about: its columns, future and ack."""


class AsyncRemoteProducer:
    """Gathers records and sends them in batches. Made by `AsyncRemoteTopic.producer`.

    A batch is sent `linger_ms` after its first record, or when it has `batch_records` or `batch_bytes`. Records of one
    partition are sent one request after the other, and so stored in the order in which they were given; up to
    `in_flight` partitions at a time. Records without an outcome take about `in_flight_bytes` of memory at most: beyond
    that `append_nowait` waits. Every batch is stored once, however often it has to be sent. A batch that fails fails
    its records alone: those behind it are sent all the same.
    """

    def __init__(
        self,
        appends: Appends,
        partitions: int,
        clock: Clock,
        *,
        linger_ms: float,
        batch_records: int,
        batch_bytes: int,
        in_flight: int,
        in_flight_bytes: int,
    ) -> None:
        checked_seconds("linger_ms", linger_ms)
        if batch_records < 1 or batch_bytes < 1 or in_flight < 1 or in_flight_bytes < 1:
            raise Invalid(
                f"batch_records is {batch_records}, batch_bytes {batch_bytes}, in_flight {in_flight} and "
                f"in_flight_bytes {in_flight_bytes}: each is at least 1"
            )
        self._appends = appends
        self._partitions = partitions
        may_send = asyncio.Semaphore(in_flight)
        self._queues = [
            SendQueue(
                appends.send,
                clock,
                lambda: partitions,
                linger_s=linger_ms / 1000,
                batch_records=batch_records,
                batch_bytes=batch_bytes,
                in_flight=may_send,
            )
            for _ in range(partitions)
        ]
        self._batch_records = batch_records
        self._keyless = 0
        """Where records without a key go until their batch is full."""
        self._bytes = 0
        """What records without an outcome take in memory."""
        self._bytes_max = in_flight_bytes
        self._has_room = asyncio.Event()
        self._is_closed = False

    async def append_nowait(
        self,
        value: bytes | None,
        *,
        key: bytes | None = None,
        tag: str | None = None,
        headers: HeadersLike | None = None,
        timestamp: int | None = None,
        partition: int | None = None,
    ) -> AsyncRemoteAck:
        """Queue one record; its acknowledgement comes later. Waits only while too much is queued already."""
        records = one_record(value, key, tag, headers, timestamp, partition, None, None, None)
        if partition is None and key is None:
            place = self._place_of_keyless()
            records = records._replace(partition=place)
        else:
            # The broker decides where a key goes. This is only so that records of one partition stay in order.
            place = partition_of_key(key, self._partitions) if partition is None and key is not None else partition or 0
        check_partition(place, self._partitions)
        while self._bytes >= self._bytes_max and not self._is_closed:
            self._has_room.clear()
            await self._has_room.wait()
        if self._is_closed:
            raise Closed("this producer is closed")
        self._bytes += records.bytes + HELD_BYTES
        answered = self._queues[place].put(records)
        answered.add_done_callback(partial(self._note_outcome, records.bytes + HELD_BYTES))
        return AsyncRemoteAck(answered)

    async def flush(self) -> None:
        """Return when every record that was queued has its outcome; each ack says which."""
        await asyncio.gather(*(queue.drain() for queue in self._queues))

    async def close(self) -> None:
        """Send what is queued, and take no more. Harmless when repeated."""
        self._is_closed = True
        self._has_room.set()
        await self.flush()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _place_of_keyless(self) -> int:
        waiting = len(self._queues[self._keyless])
        if not waiting or waiting >= self._batch_records:
            self._keyless = self._appends.next_turn() % self._partitions
        return self._keyless

    def _note_outcome(self, size: int, _: object) -> None:
        self._bytes -= size
        self._has_room.set()
