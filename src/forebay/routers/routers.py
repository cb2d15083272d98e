"""Routers as a program uses them: `Routers(log)` defines them, runs them and says how they fare."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Unpack

from forebay.clock import Clock, SystemClock
from forebay.errors import Corrupt, ForebayError, Invalid, UnknownTopic, UnsupportedFormat
from forebay.records import LATEST, Position
from forebay.routers.book import OrphanCursors, RouterBook, reader_of
from forebay.routers.running import MovedState, RouterRunner
from forebay.routing import (
    TOO_LARGE,
    RouterRule,
    RouterSource,
    RouterSpec,
    RouterState,
    RouterStatus,
    RuleOptions,
    listed_names,
)
from forebay.storage import Storage
from forebay.topics import TopicName


class Routers:
    """The routers of a log: rules that move records from topics to a topic, each once. Safe for concurrent use.

    Definitions are stored for all processes. A process that calls `start` runs all of them: it should be the one that
    owns the topics.
    """

    def __init__(self, log: Storage, *, clock: Clock | None = None) -> None:
        self._log = log
        clock = clock or SystemClock()
        self._book = RouterBook(log, clock)
        self._runner = RouterRunner(log, self._book, OrphanCursors(log, self._book, clock))

    def create(
        self,
        name: str,
        *,
        sources: Iterable[str | TopicName],
        destination: str | TopicName,
        start: Position = LATEST,
        **rule: Unpack[RuleOptions],
    ) -> RouterSpec:
        """Define a router: from now on, or from `start` on, records of the sources go to the destination, each once.

        It takes a record that has one of `tags`, a key that begins with `key_prefix`, and every header of `headers`
        (with `None` any value will do); what is left out is no condition. `key` says what becomes the key: `keep`,
        `none`, `tag` or `header:NAME`. `Conflict` if there is a router of this name, `Invalid` if records could come
        back to where they came from.
        """
        made = self._book.create(name, listed_names(sources), destination, RouterRule.of(**rule), start=start)
        return self._changed(made)

    def alter(self, name: str, **rule: Unpack[RuleOptions]) -> RouterSpec:
        """Give a router a new rule, as a whole, for the records that it routes from now on."""
        return self._changed(self._book.alter(name, RouterRule.of(**rule)))

    def pause(self, name: str) -> RouterSpec:
        """Have a router wait, in every process."""
        return self._changed(self._book.pause(name))

    def resume(self, name: str) -> RouterSpec:
        """Have a router go on where it stopped."""
        return self._changed(self._book.resume(name))

    def delete(self, name: str) -> None:
        """Remove a router. What it has routed stays."""
        router = self._book.delete(name)
        self._runner.look_soon()
        if router is not None:
            # A mover that still runs would store its cursor once more.
            self._runner.wait_for_end(router)
            self._book.forget_cursors(router)

    def all(self) -> list[RouterSpec]:
        """Every router, by name."""
        return self._book.all()

    def get(self, name: str) -> RouterSpec:
        """The router of this name; `UnknownRouter` if there is none."""
        return self._book.get(name)

    def status(self, name: str) -> RouterStatus:
        """How a router fares."""
        return self._status(self.get(name))

    def statuses(self) -> list[RouterStatus]:
        """How every router fares, by name."""
        return self.statuses_of(self.all())

    def statuses_of(self, routers: Iterable[RouterSpec]) -> list[RouterStatus]:
        """How these routers fare, as they were defined when they were read."""
        return [self._status(router) for router in routers]

    def moving(self, name: str) -> list[str]:
        """The partitions, as `shop/orders[3]`, whose records this process moves now by the router."""
        states = self._runner.states(self._book.get(name)) or {}
        return [f"{topic}[{number}]" for (topic, number), state in sorted(states.items()) if state.is_moving]

    def start(self) -> None:
        """Run the routers in this process, in the background, until `stop` or the end of the log."""
        if self._log.read_only:
            raise Invalid("routers write into topics, and this log is opened read-only: open it as its owner")
        self._runner.start()

    def stop(self) -> None:
        """Run no routers any more; what they have routed stays, and `start` goes on there."""
        self._runner.stop()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run the routers until the block ends."""
        self.start()
        try:
            yield
        finally:
            self.stop()

    def _changed(self, router: RouterSpec) -> RouterSpec:
        self._runner.look_soon()
        return router

    def _status(self, router: RouterSpec) -> RouterStatus:
        states = self._runner.states(router)
        moved = list((states or {}).values())
        lost: dict[str, int] = {}
        for part in moved:
            for reason, count in part.counts.lost.copy().items():
                lost[reason.name.lower()] = lost.get(reason.name.lower(), 0) + count
            if part.counts.too_large:
                lost[TOO_LARGE] = lost.get(TOO_LARGE, 0) + part.counts.too_large
        failures = {
            f"{topic}[{number}]": part.failure
            for (topic, number), part in (states or {}).items()
            if part.failure is not None
        }
        return RouterStatus(
            router=router,
            state=self._state(router, None if states is None else moved),
            lag=self._lag(router),
            routed=sum(part.counts.routed for part in moved),
            left_out=sum(part.counts.left_out for part in moved),
            lost=lost,
            failures=failures,
        )

    def _state(self, router: RouterSpec, moved: list[MovedState] | None) -> RouterState:
        """What it does, the worst first."""
        if not self._is_there(router.destination, router.destination_id):
            return RouterState.DESTINATION_DELETED
        if not all(self._is_there(source.topic, source.topic_id) for source in router.sources):
            return RouterState.SOURCE_DELETED
        if router.is_paused:
            return RouterState.PAUSED
        if moved is None:
            return RouterState.DEFINED
        return RouterState.FAILING if any(part.failure is not None for part in moved) else RouterState.RUNNING

    def _is_there(self, name: str, topic_id: str) -> bool:
        try:
            return self._log.topic(name).spec.topic_id == topic_id
        except UnknownTopic:
            return False
        except (Corrupt, UnsupportedFormat):
            # What cannot be read was not deleted.
            return True

    def _lag(self, router: RouterSpec) -> int | None:
        try:
            return sum(self._source_lag(router, source) for source in router.sources)
        except ForebayError:
            return None

    def _source_lag(self, router: RouterSpec, source: RouterSource) -> int:
        if not self._is_there(source.topic, source.topic_id):
            return 0
        topic = self._log.topic(source.topic)
        reader = reader_of(router, topic)
        ends = {partition: topic.lag_end(partition) for partition in range(topic.partitions)}
        return sum(max(0, end - (reader.offset(partition) or 0)) for partition, end in ends.items())
