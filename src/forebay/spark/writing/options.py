"""Where rows are written to: the options of a Spark write, and the topic as it is when the write is planned.

Plain values alone, for they travel to executors. Knows nothing of Spark.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from forebay.clock import Clock, SystemClock
from forebay.errors import Invalid, UnknownTopic, Unsupported
from forebay.loads.prepare import Sink
from forebay.spark.place.location import NAMES as PLACE_NAMES
from forebay.spark.place.location import Location, is_about_place
from forebay.spark.place.opening import opened
from forebay.topics import Engine, TopicName, TopicSpec, parse_compression

ATTACH_SECONDS: Final = 120.0
ATTACH_SECONDS_MAX: Final = 86_400.0
NAMES: Final = (*PLACE_NAMES, "topic", "attachTimeout", "queryId", "batchId")
_QUERY_ID: Final = re.compile(r"[0-9A-Za-z-]{1,100}")
_BATCH_ID: Final = re.compile(r"[0-9]{1,18}")
_OF_SPARK: Final = frozenset({"checkpointlocation", "queryname"})
_OTHER_WORDS: Final = {
    "topics": 'one write goes into one topic: write option("topic", …)',
    "mergeschema": "a topic has no schema to merge",
    "partitionby": 'rows go where their column "partition" or their key says',
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """What a write was asked for, checked as far as the words go."""

    location: Location
    topic: TopicName
    attach_seconds: float = ATTACH_SECONDS
    sink: Sink | None = None
    """The batch of a streaming query that a function of `foreachBatch` writes; then it is written once."""

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> WriteOptions:
        """The options of `df.write` or `df.writeStream`; `Invalid` names the one that is wrong."""
        given = {name.lower(): text for name, text in options.items()}
        _refuse_unknown(given)
        topic = given.get("topic", "")
        if not topic:
            raise Invalid('option "topic" is missing: write .option("topic", "shop/orders")')
        if "," in topic:
            raise Invalid(f'option "topic" is {topic!r:.100}: one write goes into one topic')
        return cls(
            location=Location.parse(options),
            topic=TopicName.parse(topic),
            attach_seconds=_seconds(given.get("attachtimeout", str(ATTACH_SECONDS))),
            sink=_sink(given.get("queryid", ""), given.get("batchid", "")),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A topic that is being written to, as it was when the write was planned."""

    location: Location
    spec: TopicSpec
    attach_seconds: float
    run: str
    """Of this planning alone: two that write the same rows never share an object."""
    sink: Sink | None = None
    """The batch that all of this write is, if its options say so."""

    @property
    def zstd_level(self) -> int | None:
        """As the topic's compression says."""
        return parse_compression(self.spec.compression)

    @property
    def is_staged_by_broker(self) -> bool:
        """Whether rows go to the store through the broker: tasks do not reach it."""
        return self.location.broker is not None and self.location.store_name is None

    @property
    def store_location(self) -> Location:
        """Where tasks put segments: they need the data directory only if that is where the segments go."""
        shared = self.location.settings().is_shared
        return dataclasses.replace(self.location, path=None, broker=None) if shared else self.location


def look(options: WriteOptions, clock: Clock | None = None) -> Target:
    """Find the topic; refuses one that takes no load."""
    run = (clock or SystemClock()).random_bytes(8).hex()
    try:
        location, spec = _found(options, run)
    except UnknownTopic as error:
        raise UnknownTopic(
            f"there is no topic {options.topic} in {options.location}: create it first, with "
            f'forebay.open(…).create_topic("{options.topic}", partitions=…) or "forebay topic create"'
        ) from error
    if spec.engine is not Engine.SEGMENT:
        raise Unsupported(
            f"{spec.name} lives on the {spec.engine} engine, which Spark cannot write to: append in the process that "
            'owns it, or write to a topic on engine "segment"'
        )
    return Target(location=location, spec=spec, attach_seconds=options.attach_seconds, run=run, sink=options.sink)


def _found(options: WriteOptions, run: str) -> tuple[Location, TopicSpec]:
    """The topic, and where its segments go."""
    location = options.location
    if location.broker is None:
        with opened(location) as found:
            return location, found.definitions.get(options.topic)
    from forebay.spark.writing.brokered import look_at_broker

    return look_at_broker(location, options.topic, run)


def load_id_of(target: Target, sink: Sink) -> str:
    """The load of one attempt to write a batch; attempts share all but its end."""
    batch = f"{sink.query_id}/{target.spec.topic_id}/{sink.batch_id}".encode()
    return f"sink-{hashlib.sha256(batch).hexdigest()[:32]}-{target.run}"


def _refuse_unknown(given: Mapping[str, str]) -> None:
    known = {name.lower(): name for name in NAMES}
    for name in sorted(name for name in given if not (name in known or name in _OF_SPARK or is_about_place(name))):
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
        every = f"the options are {', '.join(NAMES)}"
        way_out = _OTHER_WORDS.get(name, f"did you mean {known[near[0]]}? {every}" if near else every)
        raise Invalid(f'option "{name}" is not known to a forebay write: {way_out}')


def _sink(query_id: str, batch_id: str) -> Sink | None:
    if not query_id and not batch_id:
        return None
    if not _QUERY_ID.fullmatch(query_id) or not _BATCH_ID.fullmatch(batch_id):
        raise Invalid(
            f'option "queryId" is {query_id!r:.80} and option "batchId" {batch_id!r:.40}: give both, the id of the '
            "query and the number that foreachBatch was called with"
        )
    return Sink(query_id=query_id, batch_id=int(batch_id))


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= ATTACH_SECONDS_MAX:
        raise Invalid(f'option "attachTimeout" is {text!r:.40}: write seconds, 0 to {ATTACH_SECONDS_MAX:.0f}')
    return seconds
