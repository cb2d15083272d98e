"""Bulk loads for asyncio, as by `forebay.TopicLoads`, in the log's few threads."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from forebay.aio.workers import LOAD, Workers
from forebay.arguments import checked_seconds
from forebay.bulk import BackfillPlan, BackfillState, BulkLoad, LoadBatch, LoadSegment, LoadTarget
from forebay.live import CallKey
from forebay.loads.topic import LISTED, LOOK_SECONDS, LOOK_SECONDS_MAX, TopicLoads

if TYPE_CHECKING:
    import pyarrow as pa


class AsyncLoads:
    """Bulk loads into one topic. Made by `AsyncLog.loads_of`."""

    def __init__(self, loads: TopicLoads, workers: Workers, key: CallKey) -> None:
        """`key` is what calls at the topic may wait for."""
        self._loads = loads
        self._workers = workers
        self._run = workers.run
        self._key = key

    async def target(self, load_id: str) -> LoadTarget:
        """See `TopicLoads.target`."""
        return await self._run(self._loads.target, load_id)

    async def stage(self, load_id: str, batch: pa.RecordBatch, partition: int = 0) -> Sequence[LoadSegment]:
        """See `TopicLoads.stage`."""
        return await self._workers.start(LOAD, self._key, partial(self._loads.stage, load_id, batch, partition))

    async def offer(
        self,
        load_id: str,
        segments: Iterable[LoadSegment],
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - of the load, not of this call
        generation: int | None = None,
        batch: LoadBatch | None = None,
    ) -> BulkLoad | None:
        """See `TopicLoads.offer`."""
        offer = partial(self._loads.offer, load_id, list(segments), timeout=timeout, generation=generation, batch=batch)
        return await self._workers.start(LOAD, self._key, offer)

    async def get(self, load_id: str) -> BulkLoad:
        """See `TopicLoads.get`."""
        return await self._run(self._loads.get, load_id)

    async def page(self, *, after: str | None = None, limit: int = LISTED) -> tuple[list[BulkLoad], str | None]:
        """See `TopicLoads.page`."""
        return await self._run(partial(self._loads.page, after=after, limit=limit))

    async def attach(self, load_id: str) -> BulkLoad:
        """See `TopicLoads.attach`. Goes on in its thread if it is cancelled."""
        return await self._workers.start(LOAD, self._key, partial(self._loads.attach, load_id))

    async def wait(self, load_id: str, timeout: float) -> BulkLoad:  # noqa: ASYNC109 - it may pass without an error
        """See `TopicLoads.wait`. Holds no thread between two looks."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + checked_seconds("timeout", timeout)
        pause = LOOK_SECONDS
        while True:
            found = await self.get(load_id)
            left = deadline - loop.time()
            if found.is_over or left <= 0:
                return found
            await asyncio.sleep(min(pause, left))
            pause = min(2 * pause, LOOK_SECONDS_MAX)

    async def abandon(self, load_id: str) -> BulkLoad:
        """See `TopicLoads.abandon`."""
        return await self._workers.run_at(self._key, self._loads.abandon, load_id)

    async def backfill(self, backfill_id: str) -> BackfillState:
        """See `TopicLoads.backfill`."""
        return await self._run(self._loads.backfill, backfill_id)

    async def begin_backfill(self, backfill_id: str, plan: BackfillPlan) -> BackfillState:
        """See `TopicLoads.begin_backfill`."""
        return await self._run(self._loads.begin_backfill, backfill_id, plan)
