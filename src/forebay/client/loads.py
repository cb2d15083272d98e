"""Bulk loads into a topic of a broker, over HTTP. The surface of `forebay.surface.awaiting.BulkLoads`.

Every call may be repeated: an offer of the same segments under the same id is one offer. For one event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from forebay.arguments import checked_arrow, checked_partition, checked_seconds
from forebay.bulk import BackfillPlan, BackfillState, BulkLoad, LoadBatch, LoadSegment, LoadTarget
from forebay.client.topics import decoded, topic_path
from forebay.client.transport import HttpCall, HttpTransport
from forebay.clock import Clock
from forebay.errors import Invalid
from forebay.surface.blocking import PAGE_LOADS
from forebay.topics import TopicName
from forebay.wire import bodies
from forebay.wire.bodies import MediaType
from forebay.wire.messages import BackfillPut, LoadList, LoadOffer, OfferedLoad

if TYPE_CHECKING:
    import pyarrow as pa

STAGED_BYTES: Final = 8 * 1024 * 1024
STAGED_RECORDS: Final = 100_000
"""What one request brings of the rows of a batch, unless one row is larger."""
WAIT_MS: Final = 10_000
"""How long one request waits for a load; then the next one asks again."""


class AsyncRemoteLoads:
    """Bulk loads into one topic on a broker. Made by `AsyncRemoteLog.loads_of`."""

    def __init__(self, transport: HttpTransport, name: TopicName, clock: Clock) -> None:
        self._transport = transport
        self._clock = clock
        self._path = f"{topic_path(name)}/loads"
        self._backfills = f"{topic_path(name)}/backfills"

    async def target(self, load_id: str) -> LoadTarget:
        """See `surface.awaiting.BulkLoads.target`."""
        call = HttpCall(method="GET", path=f"{self._path_of(load_id)}/target")
        return await self._transport.call(call, partial(decoded, LoadTarget))

    async def stage(self, load_id: str, batch: pa.RecordBatch, partition: int = 0) -> Sequence[LoadSegment]:
        """See `surface.awaiting.BulkLoads.stage`. A large batch becomes several segments.

        A repeat after a lost answer writes its rows again, as a segment that is not offered and goes by itself.
        """
        query = {"partition": str(checked_partition(partition))}
        staged: list[LoadSegment] = []
        for rows in _pieces(checked_arrow(batch)):
            call = HttpCall(
                method="POST",
                path=f"{self._path_of(load_id)}/segments",
                query=query,
                content=bodies.encode_arrow([rows]),
                media=MediaType.ARROW,
            )
            staged.append(await self._transport.call(call, partial(decoded, LoadSegment)))
        return staged

    async def offer(
        self,
        load_id: str,
        segments: Iterable[LoadSegment],
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - of the load, not of this call
        generation: int | None = None,
        batch: LoadBatch | None = None,
    ) -> BulkLoad | None:
        """See `surface.awaiting.BulkLoads.offer`."""
        message = LoadOffer(
            segments=list(segments),
            timeout_ms=None if timeout is None else round(checked_seconds("timeout", timeout) * 1000),
            generation=generation,
            batch=batch,
        )
        call = HttpCall(
            method="PUT", path=self._path_of(load_id), content=msgspec.json.encode(message), media=MediaType.JSON
        )
        return await self._transport.call(call, lambda body: decoded(OfferedLoad, body).load)

    async def get(self, load_id: str) -> BulkLoad:
        """See `surface.awaiting.BulkLoads.get`."""
        return await self._looked(load_id, 0)

    async def page(self, *, after: str | None = None, limit: int = PAGE_LOADS) -> tuple[list[BulkLoad], str | None]:
        """See `surface.awaiting.BulkLoads.page`."""
        query = {"limit": str(limit), **({} if after is None else {"after": after})}
        found = await self._transport.call(
            HttpCall(method="GET", path=self._path, query=query), partial(decoded, LoadList)
        )
        return found.loads, found.after

    async def attach(self, load_id: str) -> BulkLoad:
        """See `surface.awaiting.BulkLoads.attach`. The broker goes on with it if that takes long: see `wait`."""
        call = HttpCall(method="POST", path=f"{self._path_of(load_id)}/attach", query={"wait_ms": str(WAIT_MS)})
        return await self._transport.call(call, partial(decoded, BulkLoad))

    async def wait(self, load_id: str, timeout: float) -> BulkLoad:  # noqa: ASYNC109 - it may pass without an error
        """See `surface.awaiting.BulkLoads.wait`."""
        deadline = self._clock.monotonic() + checked_seconds("timeout", timeout)
        while True:
            left_ms = max(0, round((deadline - self._clock.monotonic()) * 1000))
            found = await self._looked(load_id, min(left_ms, WAIT_MS))
            if found.is_over or not left_ms:
                return found

    async def abandon(self, load_id: str) -> BulkLoad:
        """See `surface.awaiting.BulkLoads.abandon`."""
        call = HttpCall(method="POST", path=f"{self._path_of(load_id)}/abandon")
        return await self._transport.call(call, partial(decoded, BulkLoad))

    async def backfill(self, backfill_id: str) -> BackfillState:
        """See `surface.awaiting.BulkLoads.backfill`."""
        call = HttpCall(method="GET", path=_below(self._backfills, "backfill_id", backfill_id, 64))
        return await self._transport.call(call, partial(decoded, BackfillState))

    async def begin_backfill(self, backfill_id: str, plan: BackfillPlan) -> BackfillState:
        """See `surface.awaiting.BulkLoads.begin_backfill`."""
        path = _below(self._backfills, "backfill_id", backfill_id, 64)
        call = HttpCall(
            method="PUT",
            path=path,
            content=msgspec.json.encode(BackfillPut(fingerprint=plan.fingerprint, loads=plan.loads)),
            media=MediaType.JSON,
        )
        return await self._transport.call(call, partial(decoded, BackfillState))

    async def _looked(self, load_id: str, wait_ms: int) -> BulkLoad:
        query = {"wait_ms": str(wait_ms)} if wait_ms else {}
        call = HttpCall(method="GET", path=self._path_of(load_id), query=query)
        return await self._transport.call(call, partial(decoded, BulkLoad))

    def _path_of(self, load_id: str) -> str:
        return _below(self._path, "load_id", load_id, 128)


def _below(path: str, argument: str, name: str, length: int) -> str:
    """The address of a load or backfill; `Invalid` for a name that would be another address, or cannot be one."""
    # The broker says what else it may not be.
    if not isinstance(name, str) or not name.isascii() or set(name) & set("/?#%") or name in ("", ".", ".."):
        raise Invalid(f"{argument} is {name!a:.80}; give 1 to {length} letters, digits, dots, dashes and underscores")
    return f"{path}/{name}"


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """The rows in order, in pieces that fit into one request."""
    if batch.num_rows > 1 and (batch.nbytes > STAGED_BYTES or batch.num_rows > STAGED_RECORDS):
        half = batch.num_rows // 2
        yield from _pieces(batch.slice(0, half))
        yield from _pieces(batch.slice(half))
    elif batch.num_rows:
        yield batch
