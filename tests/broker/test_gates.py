"""Something ends while a watch or a long poll over HTTP is held inside a read: its client misses nothing and is told.

As `tests/live/test_gates.py`, through a broker: what was deleted meanwhile is not shown, nothing is skipped or shown
twice, a client that has gone goes on where it was, and the quota of a request is given back although its read hangs.
"""

from __future__ import annotations

import http.client
import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from itertools import product
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

import msgspec
import pytest

from forebay.shard import SegmentShard
from forebay.shard.tiers import Tiers
from forebay.storage import Topic
from forebay.wire.answers import decode_page_json
from forebay.wire.errors import decode_error
from forebay.wire.events import ERROR_EVENT, EventDecoder
from tests.ledger import Ledger
from tests.live.test_gates import (
    BEGIN,
    FIRST,
    READ,
    SHARED,
    WHEN,
    Event,
    Follower,
    FollowStep,
    Got,
    Play,
    add_partition,
    create_again,
    delete_before,
    delete_record,
    delete_topic,
    lose_shard,
    lose_shard_and_delete_record,
    lose_shard_twice,
    nothing,
)
from tests.support.brokers import RunningBroker, running_broker, server_settings
from tests.support.gates import StepGate
from tests.support.soak import sampled
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.slow

_NUMBERS = itertools.count()


class HttpFollower(Follower, ABC):
    """Reads a topic through a broker, on one connection after the other."""

    def __init__(self, topic: Topic, broker: RunningBroker) -> None:
        super().__init__(topic)
        self.broker = broker
        self.where = urlsplit(broker.url)
        self.connection: http.client.HTTPConnection | None = None
        self.is_back = threading.Event()
        self.is_back.set()
        self.begin()

    def read(self) -> None:
        while not self.stopped.is_set():
            assert self.is_back.wait(PATIENCE)
            assert self.where.hostname is not None
            self.connection = http.client.HTTPConnection(self.where.hostname, self.where.port, timeout=PATIENCE)
            with closing(self.connection), suppress(OSError, http.client.HTTPException):  # the connection was cut
                self.ask(self.connection)

    @abstractmethod
    def begin(self) -> None:
        """What comes before the first question."""

    @abstractmethod
    def ask(self, connection: http.client.HTTPConnection) -> None:
        """Take what there is, and what comes, until the connection is cut."""

    def get(
        self, connection: http.client.HTTPConnection, path: str, query: dict[str, object], **headers: str
    ) -> http.client.HTTPResponse:
        connection.request("GET", f"{path}?{urlencode(query)}", headers=headers)
        answer = connection.getresponse()
        if answer.status != http.HTTPStatus.OK:
            raise decode_error(answer.status, answer.read())
        return answer

    def cancel(self) -> None:
        """The client goes away; it comes back on another connection."""
        if self.connection is not None and self.connection.sock is not None:
            with suppress(OSError):
                self.connection.sock.shutdown(2)

    def stop(self) -> None:
        super().stop()
        self.cancel()

    def under_way(self) -> int:
        """Requests and streams that the broker counts."""
        counts = self.broker.process.broker.quota_counts()
        return counts.requests + counts.streams


class HttpWatch(HttpFollower):
    """A watch, resumed by the id of its last event."""

    def begin(self) -> None:
        self.last = ""

    def ask(self, connection: http.client.HTTPConnection) -> None:
        decoder = EventDecoder(event_id=self.last)
        headers = {"Last-Event-ID": self.last} if self.last else {}
        query: dict[str, object] = {"topic": self.topic.name, "start": "earliest"}
        answer = self.get(connection, "/v1/watch", query, **headers)
        while chunk := answer.read1():
            for event in decoder.feed(chunk):
                if event.event == ERROR_EVENT:
                    raise decode_error(500, event.text)
                item = msgspec.json.decode(event.text)
                if "gap" not in item:
                    self.got.append(Got(item["partition"], item["offset"], item["value"].encode()))
            self.last = decoder.event_id


class HttpPoll(HttpFollower):
    """Long polls, one after the other, of each partition in turn."""

    def begin(self) -> None:
        self.nexts: dict[int, int] = {}

    def ask(self, connection: http.client.HTTPConnection) -> None:
        while not self.stopped.is_set():
            for partition in range(self.topic.partitions):
                wait_ms = 50 if self.topic.partitions > 1 else 30_000
                start = self.nexts.get(partition, 0)
                query: dict[str, object] = {"partition": partition, "start": start, "wait_ms": wait_ms}
                answer = self.get(connection, f"/v1/topics/{self.topic.name}/records", query)
                page = decode_page_json(answer.read())
                self.take(page.records)
                self.nexts[partition] = page.next


PAGE: Final = [FollowStep(Topic, "batch_page", when) for when in WHEN]
START: Final = "at the start"
END: Final = "where it has caught up"
WAIT: Final = "where it begins to wait"
STEPS: Final[dict[type[HttpFollower], list[tuple[FollowStep, str]]]] = {
    HttpWatch: [*product([*READ, *SHARED], [START, END]), *product(BEGIN, [START])],
    HttpPoll: [*product([*READ, *PAGE], [START, END]), *product(SHARED, [END]), *product(BEGIN, [WAIT])],
}
"""The steps of each, and where in the topic it is held there."""


def client_goes(play: Play) -> Iterator[None]:
    """The broker gives back what it counts for the client, although the read hangs; the next one misses nothing."""
    follower = play.follower
    assert isinstance(follower, HttpFollower)
    follower.is_back.clear()
    follower.cancel()
    until(lambda: follower.under_way() == 0)
    follower.is_back.set()
    yield
    play.gets_all()


EVENTS: Final[list[Event]] = [
    nothing,
    delete_topic,
    create_again,
    delete_record,
    delete_before,
    add_partition,
    lose_shard,
    lose_shard_and_delete_record,
    lose_shard_twice,
    client_goes,
]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    settings = server_settings(heartbeat_interval_ms=100)
    with running_broker(tmp_path_factory.mktemp("broker") / "data", settings) as broker:
        yield broker


def _is_waited_for(topic: Topic) -> bool:
    shard = topic.shard_if_open(0)
    return shard is not None and bool(shard.wakers)


@contextmanager
def playing(
    broker: RunningBroker, face: type[HttpFollower], step: FollowStep, place: str, patched: pytest.MonkeyPatch
) -> Iterator[Play]:
    """A client that is held inside the step at this place, with records on their way."""
    # Every page is read by a thread, as where memory has none.
    patched.setattr(SegmentShard, "read_cached", lambda *_: None)
    patched.setattr("forebay.live.feeds.LOOK_SECONDS", 0.05)
    gate, log = StepGate(), broker.log()
    topic = log.create_topic(f"gates/t{next(_NUMBERS)}")
    follower = face(topic, broker)
    play = Play(log, topic, follower, gate)
    if place != START:
        # What is read goes by what ended before, too.
        topic.append(b"deleted")
        topic.delete_by_offset(0, 1)
        play.first = 1
    play.append(FIRST)
    step.guard(patched, gate)
    with ThreadPoolExecutor(1) as threads:
        if place != END:
            gate.armed.set()
        running = threads.submit(follower.run)
        try:
            if place == END:
                until(lambda: len(follower.got) == FIRST and _is_waited_for(topic))
                gate.armed.set()
                play.append(FIRST)
            assert gate.reached.wait(PATIENCE)
            if place == WAIT:
                play.append(FIRST)
            yield play
        finally:
            gate.released.set()
            follower.stop()
            running.result(PATIENCE)
    until(lambda: follower.under_way() == 0)


@pytest.mark.parametrize(
    ("face", "event"),
    # A poll names its topic, and goes on in another that has the name by then.
    [(face, event) for face in STEPS for event in EVENTS if (face, event) != (HttpPoll, create_again)],
    ids=lambda each: each.__name__,
)
def test_a_client_that_is_held_inside_a_read_gets_what_is_left_once_or_is_told(
    face: type[HttpFollower], event: Event, broker: RunningBroker, ledger: Ledger
) -> None:
    for step, place in sampled(STEPS[face], one_in=2, seed=f"{face.__name__} {event.__name__}"):
        with pytest.MonkeyPatch.context() as patched, playing(broker, face, step, place, patched) as play:
            rest = event(play)
            next(rest)
            play.gate.released.set()
            assert next(rest, None) is None, f"{face.__name__} {step} {place}, then {event.__name__}"
        ledger.count("ends inside a read for a client", event=event.__name__, step=str(step))


def test_a_long_poll_is_answered_in_its_time_although_reads_hang(
    broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SegmentShard, "read_cached", lambda *_: None)
    monkeypatch.setattr("forebay.broker.records.LATE_SECONDS", 0.05)
    read, hangs, released = Tiers.read, threading.Event(), threading.Event()

    def hang(*arguments: Any, **options: Any) -> Any:
        assert not hangs.is_set() or released.wait(PATIENCE)
        return read(*arguments, **options)

    monkeypatch.setattr(Tiers, "read", hang)
    topic = broker.log().create_topic(f"gates/t{next(_NUMBERS)}")
    topic.append(b"old")
    path = f"/v1/topics/{topic.name}/records"
    with broker.client() as client, ThreadPoolExecutor(1) as threads:
        polling = threads.submit(client.get, path, params={"start": "1", "wait_ms": 1_000})
        until(lambda: _is_waited_for(topic))
        hangs.set()
        try:
            topic.append(b"new")
            page = polling.result(PATIENCE).json()
        finally:
            released.set()
        assert (page["records"], page["next"], page["head"]) == ([], 1, 1)
        assert [item["value"] for item in client.get(path, params={"start": "1"}).json()["records"]] == ["new"]
