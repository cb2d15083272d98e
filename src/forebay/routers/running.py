"""Runs the routers of a log: one thread with an event loop, one task for each partition of a source.

A router that fails keeps no other waiting: its task waits and tries again. A call that hangs holds one of a few
threads.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from forebay.aio.workers import Workers, wake_loop
from forebay.errors import Closed, Corrupt, ForebayError, UnknownTopic, UnsupportedFormat
from forebay.locks import Rank, RankedLock
from forebay.routers.book import OrphanCursors, RouterBook
from forebay.routers.mover import Mover, MoverCounts
from forebay.routing import RouterSource, RouterSpec
from forebay.storage import Storage, Topic
from forebay.workers import STOP_SECONDS

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 1.0
"""So often the definitions of routers are read again, for changes by other processes."""
PAUSE_SECONDS: Final = 0.5
PAUSE_SECONDS_MAX: Final = 15.0
"""How long a router that failed waits before it tries again: twice as long each time, up to this."""

END_LOOK_SECONDS: Final = 0.01
"""So often a thread that waits for the end of a router looks."""

MovedPart: TypeAlias = tuple[str, str, int]
"""The id of a router, a topic that it reads, and a partition of that."""


@dataclass(slots=True)
class MovedState:
    """How one partition of a router's source fares."""

    counts: MoverCounts = field(default_factory=MoverCounts)
    failure: str | None = None
    """What keeps it from moving on, while that is so."""
    mover: Mover | None = None
    """What moves it now, or moved it last."""
    is_moving: bool = False
    """Whether a task moves it, or waits to try again."""


class _LoopSignals:
    """What other threads say to the loop that moves records. Also before it runs, and after it has ended."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.changed = asyncio.Event()
        self.stopped = asyncio.Event()

    def look(self) -> None:
        """A definition has changed."""
        wake_loop(self.loop, self.changed.set)

    def stop(self) -> None:
        """Nothing is to be moved any more."""
        wake_loop(self.loop, self._end)

    def _end(self) -> None:
        self.stopped.set()
        self.changed.set()


class RouterRunner:
    """Moves the records of all routers of a log from `start` to `stop`. Safe for concurrent use."""

    def __init__(self, log: Storage, book: RouterBook, orphans: OrphanCursors) -> None:
        self._log = log
        self._book = book
        self._orphans = orphans
        self._states: dict[MovedPart, MovedState] = {}
        """Changed in the loop's thread alone, entry by entry; other threads copy it."""
        self._changing = RankedLock(Rank.LEAF, "routers.runner")
        self._running: tuple[threading.Thread, _LoopSignals] | None = None
        """The thread that moves records, and what it listens to."""

    def start(self) -> None:
        """Begin to move records, in a thread; fine if it has begun."""
        with self._changing:
            if self._running is not None:
                return
            signals = _LoopSignals(asyncio.new_event_loop())
            thread = threading.Thread(target=self._run, args=[signals], name="forebay-routers", daemon=True)
            self._running = thread, signals
            thread.start()

    def stop(self) -> None:
        """Move nothing more, on return; what is on its way to a destination may still arrive, once."""
        with self._changing:
            running, self._running = self._running, None
        if running is not None:
            thread, signals = running
            signals.stop()
            thread.join(STOP_SECONDS)

    def look_soon(self) -> None:
        """Have the definitions read again now: one has changed."""
        running = self._running
        if running is not None:
            running[1].look()

    def states(self, router: RouterSpec) -> dict[tuple[str, int], MovedState] | None:
        """By topic and partition, how what the router reads fares; `None` while nothing is moved here."""
        if self._running is None:
            return None
        found = self._states.copy()
        return {(topic, number): state for (owner, topic, number), state in found.items() if owner == router.router_id}

    def wait_for_end(self, router: RouterSpec) -> None:
        """Return once nothing of a deleted router is moved here; after a while in any case."""
        waiting = threading.Event()
        for _ in range(int(STOP_SECONDS / END_LOOK_SECONDS)):
            if not any(state.is_moving for state in (self.states(router) or {}).values()):
                return
            waiting.wait(END_LOOK_SECONDS)

    def _run(self, signals: _LoopSignals) -> None:
        """The thread: an event loop until `stop`. It holds no lock."""
        try:
            with asyncio.Runner(loop_factory=lambda: signals.loop) as runner:
                runner.run(self._move_all(signals))
        except Exception:
            logger.exception("routers do not run any more: open the log again")

    async def _move_all(self, signals: _LoopSignals) -> None:
        reads_waiting_max = self._log.settings.server.reads_waiting_per_principal_max
        workers = Workers(reads_waiting_max=reads_waiting_max, commits_each_turn=False, room_s=0.0)
        tasks: dict[MovedPart, asyncio.Task[None]] = {}
        try:
            while not signals.stopped.is_set():
                signals.changed.clear()
                try:
                    await self._follow_definitions(workers, tasks)
                    await workers.run(self._orphans.look)
                except Closed:
                    break
                except ForebayError as error:
                    logger.warning("the definitions of routers cannot be read; those known last go on: %s", error)
                with suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_SECONDS):
                        await signals.changed.wait()
        finally:
            await _end(tasks.values())
            workers.end()

    async def _follow_definitions(self, workers: Workers, tasks: dict[MovedPart, asyncio.Task[None]]) -> None:
        """Start what is to be moved and is not, and end what is not to be moved any more."""
        routers = {router.router_id: router for router in await workers.run(self._book.all)}
        wanted: dict[MovedPart, tuple[RouterSpec, RouterSource]] = {}
        for router in routers.values():
            for source in () if router.is_paused else router.sources:
                for partition in range(await workers.run(self._partitions, source)):
                    wanted[router.router_id, source.topic, partition] = router, source
        ended = [part for part in tasks if part not in wanted]
        await _end([tasks.pop(part) for part in ended])
        for part in [part for part in self._states if part[0] not in routers]:
            del self._states[part]
        for part, (router, source) in wanted.items():
            state = self._states.setdefault(part, MovedState())
            if state.mover is not None:
                state.mover.adopt(router)
            if part not in tasks:
                tasks[part] = asyncio.create_task(self._keep_moving(router, source, part[2], state, workers))

    def _partitions(self, source: RouterSource) -> int:
        """How many partitions a source has; one if it is gone or cannot be read, whose task finds that out."""
        try:
            return self._log.topic(source.topic).partitions
        except (UnknownTopic, Corrupt, UnsupportedFormat):
            return 1

    async def _keep_moving(
        self, router: RouterSpec, source: RouterSource, partition: int, state: MovedState, workers: Workers
    ) -> None:
        """Move one partition until a topic is gone, or the task is cancelled."""
        state.is_moving = True
        try:
            await self._move_again(router, source, partition, state, workers)
        finally:
            state.is_moving = False

    async def _move_again(
        self, router: RouterSpec, source: RouterSource, partition: int, state: MovedState, workers: Workers
    ) -> None:
        """Move one partition; after an error again from where it is known to be. Ends when a topic is gone."""
        pause, said = PAUSE_SECONDS, ""
        while True:
            routed = state.counts.routed
            try:
                topics = await workers.run(self._topics, router, source)
                if topics is None:
                    return
                state.mover = Mover(
                    state.mover.router if state.mover is not None else router,
                    *topics,
                    partition,
                    book=self._book,
                    workers=workers,
                    settings=self._log.settings,
                    counts=state.counts,
                )
                state.failure = None
                await state.mover.run()
            except Closed:
                # The log is being closed, or the shard was opened again: the next round finds out which.
                state.failure = None
            except ForebayError as error:
                if str(error) != said or routed != state.counts.routed:
                    logger.warning("router %s waits at %s[%d]: %s", router.name, source.topic, partition, error)
                state.failure = said = str(error)
            except Exception as error:
                logger.exception("router %s waits at %s[%d]", router.name, source.topic, partition)
                state.failure = f"{type(error).__name__}: {error}"
            pause = PAUSE_SECONDS if routed != state.counts.routed else min(2 * pause, PAUSE_SECONDS_MAX)
            await asyncio.sleep(pause)

    def _topics(self, router: RouterSpec, source: RouterSource) -> tuple[Topic, Topic] | None:
        """Source and destination; `None` if one of them is gone, also where another topic has its name now."""
        found = self._topic(source.topic, source.topic_id), self._topic(router.destination, router.destination_id)
        if found[0] is not None and found[1] is not None:
            return found[0], found[1]
        gone = source.topic if found[0] is None else router.destination
        logger.warning(
            "router %s stops: topic %s was deleted; delete the router, or create it again", router.name, gone
        )
        return None

    def _topic(self, name: str, topic_id: str) -> Topic | None:
        try:
            topic = self._log.topic(name)
        except UnknownTopic:
            return None
        return topic if topic.spec.topic_id == topic_id else None


async def _end(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel tasks and wait until they have ended; one that had failed before is logged."""
    ending = list(tasks)
    for task in ending:
        task.cancel()
    for outcome in await asyncio.gather(*ending, return_exceptions=True):
        if isinstance(outcome, Exception):
            logger.error("a router ended by an error that is not ours: please report it", exc_info=outcome)
