"""Writing through a broker: rows are staged there where tasks do not reach the store, and loads are offered, watched
and given up over HTTP.

Each call may be repeated, so a broker that is killed and comes back at any point leaves a load that is over, that it
finishes by itself, or that was never offered. Knows nothing of Spark.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from forebay.errors import Conflict, Indeterminate, Unavailable, UnknownTopic
from forebay.loads.prepare import Sink, prepared_of, segment_of
from forebay.spark.place.broker import BrokerPlace
from forebay.spark.place.location import Location
from forebay.spark.writing.staging import StagedSegment, Task
from forebay.topics import Engine, TopicName, TopicSpec

if TYPE_CHECKING:
    from forebay.bulk import BulkLoad, LoadSegment
    from forebay.client.blocking import RemoteLoads
    from forebay.spark.writing.delivery import TaskResult
    from forebay.spark.writing.options import Target

logger = logging.getLogger(__name__)

SLACK_SECONDS = 60.0
"""A broker that finds the load this long after the driver should have ended the wait gives it up."""
WAIT_SECONDS = 5.0
"""How long one wait for a load is; then it is attached once more."""


@contextlib.contextmanager
def broker_loads(location: Location, topic: TopicName) -> Iterator[tuple[BrokerPlace, RemoteLoads]]:
    """The broker of the location, and loads into a topic of it, until the block ends."""
    with contextlib.closing(BrokerPlace(location)) as place:
        link = place.link
        from forebay.client.blocking import RemoteLoads
        from forebay.client.loads import AsyncRemoteLoads

        yield place, RemoteLoads(AsyncRemoteLoads(link.transport, topic, link.clock), link.loop)


def look_at_broker(location: Location, topic: TopicName, run: str) -> tuple[Location, TopicSpec]:
    """The topic, and the location with the store that its segments go into, if tasks reach that by themselves."""
    with broker_loads(location, topic) as (place, loads):
        spec = place.spec(topic)
        if spec.engine is not Engine.SEGMENT:
            return location, spec
        return location.with_store(loads.target(f"spark-{run}").place), spec


class BrokerStaging:
    """Has the broker write the rows of a task as segments. For one thread; `close` it."""

    def __init__(self, target: Target, task: Task) -> None:
        self._held = contextlib.ExitStack()
        self._task = task
        _, self._loads = self._held.enter_context(broker_loads(target.location, target.spec.name))

    def write(self, partition: int, rows: Sequence[pa.RecordBatch]) -> list[StagedSegment]:
        """Rows of one partition, at least one, in their order."""
        (joined,) = pa.Table.from_batches(rows).combine_chunks().to_batches()
        if "partition" in joined.schema.names:
            joined = joined.drop_columns(["partition"])
        staged = self._loads.stage(self._task.load_id, joined, partition)
        return [StagedSegment(partition, prepared_of(segment)) for segment in staged]

    def close(self) -> None:
        """Close the connection."""
        self._held.close()


def deliver_by_broker(target: Target, load_id: str, results: Sequence[TaskResult], sink: Sink | None) -> None:
    """On return all that was staged is in the topic; see `delivery.deliver`."""
    ordered = sorted(results, key=lambda result: result.number)
    segments = [segment_of(one.partition, one.segment) for result in ordered for one in result.staged]
    if sink is None and not segments:
        return
    with broker_loads(target.location, target.spec.name) as (place, loads):
        _BrokerDelivery(target, place, loads).run(load_id, segments, sink)


def give_up_by_broker(target: Target, load_id: str) -> None:
    """Nothing of the load will ever be in the topic, if it is not already. What was staged goes by itself."""
    with broker_loads(target.location, target.spec.name) as (_, loads), contextlib.suppress(Conflict, UnknownTopic):
        # Also if it was not offered: an offer whose answer was lost may be on its way.
        loads.abandon(load_id)


class _BrokerDelivery:
    """One load on its way into the topic of a broker."""

    def __init__(self, target: Target, place: BrokerPlace, loads: RemoteLoads) -> None:
        self._target = target
        self._place = place
        self._loads = loads
        self._clock = place.clock
        self._deadline = self._clock.monotonic() + target.attach_seconds
        self._reason = "no owner has looked at it"

    def run(self, load_id: str, segments: Sequence[LoadSegment], sink: Sink | None) -> None:
        from forebay.bulk import LoadBatch

        batch = None if sink is None else LoadBatch(query_id=sink.query_id, batch_id=sink.batch_id)
        self._check_topic()
        while True:
            standing = self._loads.offer(
                load_id,
                segments,
                timeout=self._target.attach_seconds + SLACK_SECONDS,
                generation=self._target.spec.generation,
                batch=batch,
            )
            is_own = standing is not None and standing.load_id == load_id
            if standing is None or self._is_committed(standing, is_own=is_own):
                break
            # An earlier attempt at the batch was given up: ours is next.
        if not is_own and sink is not None:
            logger.info("%s: batch %d of query %s was there already", self._name, sink.batch_id, sink.query_id)

    @property
    def _name(self) -> str:
        return str(self._target.spec.name)

    def _check_topic(self) -> None:
        """`UnknownTopic` if the topic is gone, or another has its name. Who added partitions, the offer finds out."""
        found = self._place.spec(self._target.spec.name)
        if found.topic_id != self._target.spec.topic_id:
            raise UnknownTopic(
                f"topic {self._name} was deleted while it was being written to: nothing was added", topic=self._name
            )

    def _is_committed(self, load: BulkLoad, *, is_own: bool) -> bool:
        """Wait until the load is over: true if it is committed. One of our own that is not raises."""
        load_id = load.load_id
        while not load.is_over:
            if self._clock.monotonic() >= self._deadline:
                self._end(load_id)
            try:
                load = self._loads.attach(load_id)
                self._reason = next(iter(load.waiting.values()), self._reason)
                left = max(0.0, self._deadline - self._clock.monotonic())
                load = load if load.is_over else self._loads.wait(load_id, min(WAIT_SECONDS, left))
            except (Unavailable, Indeterminate) as error:
                # It is repeated: the broker may be starting again.
                self._reason = str(error)
        if load.status == "committed":
            return True
        if is_own:
            raise Unavailable(f"load {load_id} into {self._name} was given up: nothing was added; write again")
        return False

    def _end(self, load_id: str) -> None:
        """The wait is over: give the load up, which raises; on return it was committed just then."""
        seconds = f"{self._target.attach_seconds:.0f} s"
        try:
            self._loads.abandon(load_id)
        except Conflict:
            return
        except (Unavailable, Indeterminate) as error:
            raise Indeterminate(
                f"load {load_id} into {self._name} was not attached within {seconds}, and whether it is given up is "
                f"not known ({error}): it may be attached for {SLACK_SECONDS:.0f} s more, all of it or nothing"
            ) from error
        raise Unavailable(
            f"load {load_id} into {self._name} was not attached within {seconds}: {self._reason}; nothing was added. "
            'Start the broker that has the partition, or raise the option "attachTimeout"'
        )
