"""What the driver does with the segments that tasks have staged: all of them are brought into the topic, or none.

A load is offered by one write of metadata. The owner of the partitions attaches it at its next look; where no process
does, it is done here, as an owner for a moment. Every wait has an end, and then the load has one too: it is given up,
unless it was committed just then. A crash at any point leaves a load that is over, that its owners finish, or that
no process knows. Knows nothing of Spark.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from forebay.blobs import DirectoryStore
from forebay.catalog import ShardKeys, read_state
from forebay.directory import is_owned
from forebay.errors import Conflict, ForebayError, Indeterminate, Unavailable, UnknownTopic
from forebay.format.metadata.descriptor import LoadStatus
from forebay.loads.book import LoadBook, never_offered
from forebay.loads.forget import finish_given_up
from forebay.loads.prepare import Load, LoadStore, Sink, manifest_of, ready_to_offer
from forebay.spark.place.opening import Opened, opened
from forebay.spark.writing.brokered import deliver_by_broker, give_up_by_broker
from forebay.spark.writing.options import Target
from forebay.spark.writing.staging import StagedSegment
from forebay.storage import Storage
from forebay.topics import ShardRef, TopicSpec

logger = logging.getLogger(__name__)

LOOK_SECONDS: Final = 0.05
TRY_SECONDS: Final = 1.0
TRY_SECONDS_MAX: Final = 15.0
"""How long after an attempt to attach as an owner the next one comes: longer each time."""
SLACK_MS: Final = 60_000
"""A process that finds the load this long after the driver should have ended the wait gives it up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskResult:
    """What one task has staged."""

    load_id: str
    number: int
    staged: tuple[StagedSegment, ...]


def load_store(found: Opened) -> LoadStore:
    """Where the segments of a load go, ready to take them."""
    place = found.new_objects()
    return LoadStore(place.store.open(), place.name) if isinstance(place.store, DirectoryStore) else place


def deliver(target: Target, load_id: str, results: Sequence[TaskResult], sink: Sink | None = None) -> None:
    """On return all that was staged is in the topic. With `sink`, nothing is added if the topic has that batch.

    Raises `Unavailable` if it was not attached in time, `Conflict` if the topic is not as it was when it was planned:
    nothing of it is in the topic then, except where the message says that this is not known.
    """
    if target.location.broker is not None:
        deliver_by_broker(target, load_id, results, sink)
        return
    with opened(target.location, read_only=False) as found:
        Delivery(target, found).run(load_id, results, sink)


def give_up(target: Target, load_id: str, results: Sequence[TaskResult]) -> None:
    """Nothing of it will ever be in the topic, if it is not already; what was staged is removed, now or later."""
    if target.location.broker is not None:
        give_up_by_broker(target, load_id)
        return
    with opened(target.location, read_only=False) as found:
        book = LoadBook(found.metadata, found.settings.metadata.prefix, found.clock)
        unknown_as = never_offered(target.spec, created_at=found.clock.now_ms())
        with contextlib.suppress(Conflict):
            # Written down even so: an offer whose answer was lost may be on its way.
            if not book.give_up(load_id, unknown_as=unknown_as).shards:
                drop(load_store(found), results)
            _finish(found, book, target.spec, load_id)


def drop(place: LoadStore, results: Sequence[TaskResult]) -> None:
    """Remove what was staged for a load that was never offered. What cannot be removed is swept later."""
    try:
        for staged in (one for result in results for one in result.staged):
            place.store.delete(staged.segment.object_key)
            place.store.delete(staged.segment.index_key)
    except (ForebayError, OSError) as error:
        logger.warning("what was staged and is not needed is left to be swept: %s", error)


def _finish(found: Opened, book: LoadBook, spec: TopicSpec, load_id: str) -> None:
    """Leave nothing of a load that was given up. What cannot be done now is done by the next owner of the topic."""
    try:
        finish_given_up(
            book,
            load_id,
            lambda partition: found.catalog(ShardRef(spec, partition)),
            created_at=found.clock.now_ms(),
        )
    except (ForebayError, OSError) as error:
        logger.warning("load %s was given up, and notes of it are left to be swept: %s", load_id, error)


class Delivery:
    """One load on its way into the topic."""

    def __init__(self, target: Target, found: Opened) -> None:
        self._target = target
        self._found = found
        self._clock = found.clock
        self._book = LoadBook(found.metadata, found.settings.metadata.prefix, found.clock)
        self._place = load_store(found)
        self._deadline = self._clock.monotonic() + target.attach_seconds
        self._try_at = float("-inf")
        self._pause = TRY_SECONDS
        self._reason = "no owner has looked at it"

    def run(self, load_id: str, results: Sequence[TaskResult], sink: Sink | None) -> None:
        load = self._ready(load_id, results, sink)
        if sink is None:
            if load.shards:
                self._book.offer(load_id, load)
                self.finish(load_id, is_own=True)
            return
        standing: str | None = None
        while standing != load_id:
            standing = self._book.offer_batch(load_id, load)
            if standing is None or self.finish(standing, is_own=standing == load_id):
                break
        if standing != load_id:
            # An earlier attempt of the same batch brought it: ours was never offered.
            logger.info("%s: batch %d of query %s was there already", self._name, sink.batch_id, sink.query_id)
            drop(self._place, results)

    @property
    def _name(self) -> str:
        return str(self._target.spec.name)

    def _ready(self, load_id: str, results: Sequence[TaskResult], sink: Sink | None) -> Load:
        planned = self._target.spec
        spec = self._found.definitions.current(planned)
        if spec is None:
            raise UnknownTopic(
                f"topic {self._name} was deleted while it was being written to: nothing was added", topic=self._name
            )
        if spec.generation != planned.generation:
            raise Conflict(
                f"topic {self._name} got {spec.partitions} partitions instead of {planned.partitions} while it was "
                "being written to, so that keys belong elsewhere: nothing was added; write again"
            )
        staged = [one for result in sorted(results, key=lambda result: result.number) for one in result.staged]
        now_ms = self._clock.now_ms()
        return ready_to_offer(
            self._place,
            spec,
            manifest_of(load_id, spec.topic_id, [(one.partition, one.segment) for one in staged]),
            created_at=now_ms,
            expires_at=now_ms + round(self._target.attach_seconds * 1000) + SLACK_MS,
            sink=sink,
            directory=self._found.directory.id if self._found.directory is not None else None,
        )

    def finish(self, load_id: str, *, is_own: bool) -> bool:
        """Wait until the load is over: true if it is committed. One of our own that is not raises."""
        is_late = False
        while True:
            status = self._status(load_id)
            if status is LoadStatus.COMMITTED:
                return True
            if status is LoadStatus.ABANDONED:
                _finish(self._found, self._book, self._target.spec, load_id)
                if not is_own:
                    return False
                raise Unavailable(f"load {load_id} into {self._name} was given up: nothing was added; write again")
            if is_late:
                self._end(load_id)
                continue
            self._attach(load_id)
            is_late = self._clock.monotonic() >= self._deadline
            if not is_late:
                self._clock.sleep(LOOK_SECONDS)

    def _status(self, load_id: str) -> LoadStatus:
        try:
            stored = self._book.find(load_id)
        except Unavailable as error:
            self._reason = str(error)
            return LoadStatus.OFFERED
        if stored is None:
            raise UnknownTopic(
                f"topic {self._name} was deleted while load {load_id} waited for it: nothing was added",
                topic=self._name,
            )
        return stored.load.status

    def _attach(self, load_id: str) -> None:
        """Where no process has the directory and the partitions, attach as their owner; now and then."""
        path = self._found.location.path
        if self._clock.monotonic() < self._try_at:
            return
        if path is not None and is_owned(path, self._found.disk):
            self._reason = f"the process that has {path} open did not attach it"
            return
        try:
            if not self._is_anything_free(load_id):
                return
            self._try_at = self._clock.monotonic() + self._pause
            self._pause = min(2 * self._pause, TRY_SECONDS_MAX)
            if path is not None:
                self.attach_in(path, load_id)
            else:
                # Only partitions of which nothing lies in a directory are taken here, and left so: see `Loads.attach`.
                with tempfile.TemporaryDirectory(prefix="forebay-") as made:
                    self.attach_in(f"{made}/d", load_id)
        except (Unavailable, Indeterminate) as error:
            # The next look at the load says what came of it.
            self._reason = str(error)

    def _is_anything_free(self, load_id: str) -> bool:
        """Whether a partition that the load waits for has no living owner. If it waits for none, it is committed."""
        load, attached = self._book.get(load_id).load, self._book.attached(load_id)
        missing = [shard.partition for shard in load.shards if shard.partition not in attached]
        if not missing:
            self._book.commit(load_id)
        metadata = self._found.metadata
        for partition in missing:
            keys = ShardKeys(load.namespace, load.topic, partition, self._found.settings.metadata.prefix)
            stored = read_state(metadata, keys.state)
            if stored is None or stored.state.owner is None or not metadata.session_alive(stored.state.owner):
                return True
            self._reason = f"partition {partition}: directory {stored.state.holder} has it and did not attach it"
        return False

    def attach_in(self, path: str, load_id: str) -> None:
        with Storage.open(path, self._found.settings) as log:
            progress = log.loads.attach(load_id)
        if progress.elsewhere:
            partition, reason = next(iter(progress.elsewhere.items()))
            self._reason = f"partition {partition}: {reason}"

    def _end(self, load_id: str) -> None:
        """The wait is over: give the load up, which raises; on return it was committed just then."""
        seconds = f"{self._target.attach_seconds:.0f} s"
        try:
            self._book.give_up(load_id)
        except Conflict:
            return
        except (Unavailable, Indeterminate) as error:
            raise Indeterminate(
                f"load {load_id} into {self._name} was not attached within {seconds}, and whether it is given up is "
                f"not known ({error}): it may be attached for {SLACK_MS // 1000} s more, all of it or nothing"
            ) from error
        _finish(self._found, self._book, self._target.spec, load_id)
        raise Unavailable(
            f"load {load_id} into {self._name} was not attached within {seconds}: {self._reason}; nothing was added. "
            'Open the directory that has the partition, or raise the option "attachTimeout"'
        )
