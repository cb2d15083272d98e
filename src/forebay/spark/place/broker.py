"""A location behind a broker: what is asked there, and what is read from the store of history without it.

The broker says where records lie, and gives pages of its log and bytes of objects that only it reaches. Objects in a
store that others reach are read from there, with the credentials of this process. The token is looked up in this
process when the first request is made, and stays in it. Knows nothing of Spark.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Final, TypeVar

import msgspec

from forebay.blobs import BlobMissing, BlobStore
from forebay.clock import SystemClock
from forebay.decoders import decoder
from forebay.disk import SystemDisk
from forebay.errors import Conflict, Moved, Unavailable, UnknownTopic, Unsupported
from forebay.format.control.frames import Floor, reason_of
from forebay.history import Objects
from forebay.pages import Page
from forebay.spark.place.location import Location
from forebay.spark.place.reading import topics_with_history
from forebay.topics import TopicName, TopicSpec
from forebay.views.snapshot import ScanPiece, ShardView
from forebay.wire.answers import decode_page_frames
from forebay.wire.bodies import MediaType
from forebay.wire.messages import TopicItem, TopicList
from forebay.wire.plans import HistoryPiece, PlannedPartition, TopicPlan, decode_deleted

if TYPE_CHECKING:
    from collections.abc import Callable

    from forebay.bulk import SharedStore
    from forebay.client.transport import HttpCall
    from forebay.format.metadata.descriptor import SegmentDescriptor
    from forebay.sealed import SealedSegment
    from forebay.settings import Settings

T = TypeVar("T")
S = TypeVar("S", bound=msgspec.Struct)

TIMEOUT_S: Final = 60.0
"""How long a request is tried, as while a broker starts again."""
POLL_SECONDS: Final = 0.05


class BrokerLink:
    """Requests to the broker of a location, from any thread of this process. `close` it."""

    def __init__(self, location: Location) -> None:
        assert location.broker is not None
        try:
            from forebay.client.loops import LoopThread
            from forebay.client.transport import HttpTransport
        except ModuleNotFoundError as error:
            raise Unsupported(
                f"{location} is asked over HTTP, which needs {error.name}: install forebay[client] for the driver and "
                "for the executors"
            ) from error
        self.clock = SystemClock()
        self.transport = HttpTransport(
            location.broker,
            token=location.token(),
            verify=True if location.verify is None else location.verify,
            timeout_s=TIMEOUT_S,
            clock=self.clock,
        )
        self.loop = LoopThread("forebay-spark-broker", self.transport.close)

    def get(
        self, path: str, decode: Callable[[bytes], T], *, accept: str = "application/json", **query: str | int | None
    ) -> T:
        """What `decode` makes of the answer; what is `None` is left out of the query."""
        from forebay.client.transport import HttpCall

        asked = {name: str(value) for name, value in query.items() if value is not None}
        return self._call(HttpCall(method="GET", path=path, query=asked, accept=accept), decode)

    def _call(self, call: HttpCall, decode: Callable[[bytes], T]) -> T:
        return self.loop.call(lambda: self.transport.call(call, decode))

    def close(self) -> None:
        """Close the connections."""
        self.loop.end()


class BrokerPlace:
    """A location behind a broker, seen from this process. For one thread at a time, `link` for any; `close` it."""

    def __init__(self, location: Location, topics: Mapping[str, str] | None = None) -> None:
        """`topics` are names by the ids of topics; those that are looked at need not be among them."""
        self.location = location
        self.disk = SystemDisk()
        self.clock = SystemClock()
        self._names = dict(topics or {})
        self._plans: dict[str, TopicPlan] = {}
        """The last plan of each topic with its history, by name."""
        self._opened: list[BrokerPlaces] = []
        self._link: BrokerLink | None = None
        self._linking = threading.Lock()

    directory: Final = None
    """There is none here: see `Opened.directory`."""

    @cached_property
    def settings(self) -> Settings:
        """What this process knows by itself, and where the store is if the broker has said so."""
        return self.location.settings()

    @property
    def link(self) -> BrokerLink:
        """The connection, made at the first request. For any thread: those that read ahead ask at the same time."""
        with self._linking:
            if self._link is None:
                self._link = BrokerLink(self.location)
            return self._link

    @cached_property
    def places(self) -> BrokerPlaces:
        """Where the segments of history are: in a store that is reached from here, or behind the broker."""
        places = BrokerPlaces(self)
        self._opened.append(places)
        return places

    def spec(self, name: TopicName) -> TopicSpec:
        """The definition of a topic."""
        return self.link.get(topic_path(str(name)), partial(decoded, TopicItem)).spec()

    def specs(self) -> Iterator[TopicSpec]:
        """The definitions of all topics that the token may know of."""
        after: str | None = None
        while True:
            page = self.link.get("/v1/topics", partial(decoded, TopicList), after=after)
            yield from (item.spec() for item in page.topics)
            after = page.after
            if after is None:
                return

    def topics(self, names: Sequence[str]) -> list[TopicSpec]:
        """The topics of these names, or all that have history if none is named; `UnknownTopic`, `Unsupported`."""
        return topics_with_history(names, self.specs, self.spec)

    def look(self, topic: str) -> tuple[list[ShardView], SharedStore | None]:
        """Every partition of a topic at one moment, and the store of its history."""
        before = self._plans.get(topic)
        known = None if before is None else before.edition
        plan = self.link.get(f"{topic_path(topic)}/plan", partial(decoded, TopicPlan), known=known)
        plan = _completed(plan, before)
        self._plans[topic] = plan
        self._names[plan.topic.topic_id] = topic
        return [_view(plan.topic.spec(), planned) for planned in plan.partitions], plan.store

    def view(self, topic_id: str, topic: str, partition: int) -> ShardView | None:
        """See `ReadPlace`."""
        try:
            views, _ = self.look(topic)
        except UnknownTopic:
            return None
        return next((view for view in views if (view.topic_id, view.partition) == (topic_id, partition)), None)

    def log(self, shard: str) -> BrokerLog:
        """See `ReadPlace`."""
        return BrokerLog(self, shard)

    def stored(self, shard: str) -> tuple[str, dict[str, str | int]]:
        """Where what is stored of a shard is asked for, and with which parameters."""
        topic_id, _, partition = shard.rpartition("_")
        return topic_path(self._names[topic_id]), {"partition": int(partition), "topic_id": topic_id}

    def close(self) -> None:
        """Give everything back."""
        for places in self._opened:
            places.close()
        if self._link is not None:
            self._link.close()
        self.disk.close()


class BrokerPlaces:
    """Opens segments of history, each from where it is reached. `close` it."""

    def __init__(self, place: BrokerPlace) -> None:
        self._place = place
        self.store: BlobStore | None = None
        self.store_name = ""
        self.loads_name = ""
        """Of no store here: what loads put into a data directory is read through the broker."""
        self._objects: dict[str, Objects] = {}
        location = place.location
        if location.store_name is not None:
            from forebay.places import history_store

            self.store, _ = history_store(place.settings, place.disk, place.clock)
            self.store_name = location.store_name

    def segment(self, descriptor: SegmentDescriptor) -> SealedSegment:
        """See `SegmentPlaces`."""
        name = descriptor.store
        if name not in self._objects:
            own = self.store if name == self.store_name else None
            self._objects[name] = Objects(own if own is not None else BrokerObjects(self._place, name))
        return self._objects[name].segment(descriptor)

    def close(self) -> None:
        """End the threads that read ahead, and close the store."""
        for objects in self._objects.values():
            objects.close()
        if self.store is not None:
            self.store.close()


class BrokerObjects:
    """Objects that only the broker reaches, by ranges of their bytes. For any thread."""

    def __init__(self, place: BrokerPlace, store: str) -> None:
        self._place = place
        self._store = store

    def get_range(self, key: str, start: int, stop: int, *, etag: str | None = None) -> bytes:
        """The bytes `[start, stop)` of an object, fewer at its end; `BlobMissing` if it is gone or another by now."""
        path, query = self._place.stored(key.partition("/")[0])
        found: list[bytes] = []
        at = start
        while at < stop:
            try:
                piece = self._place.link.get(
                    f"{path}/object",
                    bytes,
                    accept="application/octet-stream",
                    **query,
                    store=self._store,
                    key=key,
                    start=at,
                    stop=stop,
                    etag=etag,
                )
            except (Conflict, UnknownTopic) as error:
                raise BlobMissing(f"{key}: {error}") from error
            if not piece:
                break
            found.append(piece)
            at += len(piece)
        return found[0] if len(found) == 1 else b"".join(found)


class BrokerLog:
    """The log of a shard, read page by page from the broker as it is stored there. For one thread."""

    def __init__(self, place: BrokerPlace, shard: str) -> None:
        self.head = 0
        self._place = place
        self._path, self._query = place.stored(shard)

    def read(self, offset: int, bytes_max: int) -> Page | None:
        """See `LogTail`."""
        try:
            page = self._place.link.get(
                f"{self._path}/stored",
                decode_page_frames,
                accept=MediaType.FRAMES,
                **self._query,
                start=offset,
                bytes_max=bytes_max,
            )
        except (Conflict, Moved, UnknownTopic):
            return None
        self.head = page.marks.head
        if page.marks.next == offset < page.marks.head:
            return None
        return Page(list(page.batches), list(page.gaps), page.marks.next)

    def wait(self, offset: int, timeout: float | None) -> bool:
        """See `LogTail`."""
        clock = self._place.clock
        deadline = None if timeout is None else clock.monotonic() + timeout
        while True:
            page = self.read(offset, 1)
            if page is None or page.next > offset:
                return True
            if deadline is not None and clock.monotonic() >= deadline:
                return False
            clock.sleep(POLL_SECONDS)

    def close(self) -> None:
        """Nothing: the connection is that of the place."""


def topic_path(name: str) -> str:
    """Where the broker has a topic."""
    return f"/v1/topics/{name}"


def decoded(kind: type[S], body: bytes) -> S:
    """The message of an answer; `Unavailable` if it is none, so that it is asked for again."""
    try:
        return decoder(kind).decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Unavailable(f"the answer of the broker is no {kind.__name__}: {error}") from error


def _completed(plan: TopicPlan, before: TopicPlan | None) -> TopicPlan:
    """The plan with its history: that of the plan before, where the broker has left it out."""
    if before is None or plan.edition != before.edition:
        return plan
    whole = [
        msgspec.structs.replace(new, history=old.history)
        for new, old in zip(plan.partitions, before.partitions, strict=True)
    ]
    return msgspec.structs.replace(plan, partitions=whole)


def _view(spec: TopicSpec, planned: PlannedPartition) -> ShardView:
    history: list[HistoryPiece] = planned.history or []
    pieces = [ScanPiece(piece.start, piece.stop, piece.bytes, piece.descriptor) for piece in history]
    pieces += [ScanPiece(piece.start, piece.stop, piece.bytes) for piece in planned.log]
    reason = None if planned.reason is None else reason_of(planned.reason)
    return ShardView(
        topic=str(spec.name),
        topic_id=spec.topic_id,
        partition=planned.partition,
        is_durable=spec.durability.policy.writes_before_ack,
        epoch=planned.epoch,
        earliest=planned.earliest,
        next=planned.next,
        pieces=tuple(pieces),
        deleted=decode_deleted(planned.deleted),
        generation=planned.generation,
        floor=Floor(planned.earliest, planned.evict_floor, reason),
    )
