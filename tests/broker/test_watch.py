"""Live streams: many topics on one connection, resumed where the client was, ended by the broker."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from forebay.errors import Corrupt
from forebay.live import Watcher
from forebay.storage import Topic
from forebay.wire.events import EventDecoder, ServerEvent
from forebay.wire.watching import WATCHED_TOPICS_MAX
from tests.support.brokers import RunningBroker, running_broker, server_settings

_NUMBERS = itertools.count()
SECONDS = 60.0
WATCHED_NAME = 100
"""Characters of each part of a long name."""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    settings = server_settings(heartbeat_interval_ms=100)
    with running_broker(tmp_path_factory.mktemp("broker") / "data", settings) as broker:
        yield broker


@pytest.fixture
def client(broker: RunningBroker) -> Iterator[httpx.Client]:
    with broker.client() as client:
        yield client


def made(client: httpx.Client, **options: Any) -> str:
    name = f"live/t{next(_NUMBERS)}"
    assert client.put(f"/v1/topics/{name}", json=options).status_code == 201
    return name


def append(client: httpx.Client, name: str, *values: str, **query: Any) -> None:
    answer = client.post(f"/v1/topics/{name}/records", json=[{"value": value} for value in values], params=query)
    assert answer.status_code == 200, answer.text


class Events:
    """The events of one connection, as they come."""

    def __init__(self, answer: httpx.Response) -> None:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"] == "text/event-stream"
        self.decoder = EventDecoder()
        self._chunks = answer.iter_raw()
        self._waiting: list[ServerEvent] = []

    def next(self) -> ServerEvent | None:
        """The next event; `None` at the end of the stream."""
        while not self._waiting:
            chunk = next(self._chunks, None)
            if chunk is None:
                return None
            self._waiting += self.decoder.feed(chunk)
        return self._waiting.pop(0)

    def item(self) -> dict[str, Any]:
        event = self.next()
        assert event is not None
        item: dict[str, Any] = msgspec.json.decode(event.text)
        return item

    def values(self, count: int) -> list[str]:
        return [self.item()["value"] for _ in range(count)]

    def place(self) -> str:
        """The id behind everything that was read: a sign of life comes after it."""
        while not self._waiting:
            chunk = next(self._chunks)
            self._waiting += self.decoder.feed(chunk)
            if b":\n\n" in chunk:
                break
        return self.decoder.event_id


@contextmanager
def watching(client: httpx.Client, *names: str, last: str | None = None, **query: Any) -> Iterator[Events]:
    headers = {} if last is None else {"last-event-id": last}
    with client.stream("GET", "/v1/watch", params={"topic": list(names), **query}, headers=headers) as answer:
        yield Events(answer)


def test_records_of_several_topics_come_on_one_connection(client: httpx.Client) -> None:
    first, second = made(client), made(client, partitions=2)
    append(client, first, "old")
    with watching(client, first, second) as events:
        append(client, first, "a")
        item = events.item()
        assert (item["topic"], item["partition"], item["offset"], item["value"]) == (first, 0, 1, "a")
        append(client, second, "b", partition=1)
        item = events.item()
        assert (item["topic"], item["partition"], item["offset"], item["value"]) == (second, 1, 0, "b")


def test_a_topic_that_is_named_in_two_ways_is_watched_once(client: httpx.Client) -> None:
    assert client.put("/v1/topics/default/twice").status_code == 201
    with watching(client, "twice", "default/twice", "/default/twice") as events:
        append(client, "default/twice", "a")
        append(client, "default/twice", "b")
        assert events.values(2) == ["a", "b"]
        place = events.decoder.event_id
    append(client, "default/twice", "c")
    with watching(client, "default/twice", last_event_id=place) as events:
        assert events.values(1) == ["c"]


def test_a_watch_begins_at_the_earliest_record_or_at_a_time(client: httpx.Client) -> None:
    name = made(client)
    records = [{"value": f"{number}", "timestamp": 1000 * number} for number in range(1, 6)]
    assert client.post(f"/v1/topics/{name}/records", json=records).status_code == 200
    with watching(client, name, start="earliest") as events:
        assert events.values(5) == ["1", "2", "3", "4", "5"]
    with watching(client, name, start="4000ms") as events:
        assert events.values(2) == ["4", "5"]


def test_a_stream_goes_on_behind_the_last_event_and_skips_and_repeats_nothing(client: httpx.Client) -> None:
    first, second = made(client), made(client, partitions=3)
    for number in range(3):
        append(client, second, f"p{number}", partition=number)
    with watching(client, first, second, start="earliest") as events:
        assert sorted(events.values(3)) == ["p0", "p1", "p2"]
        place = events.place()
    append(client, first, "later")
    append(client, second, "more", partition=2)
    with watching(client, first, second, last=place) as events:
        assert sorted(events.values(2)) == ["later", "more"]


def test_a_topic_created_again_begins_again(client: httpx.Client) -> None:
    name = made(client)
    append(client, name, "a", "b")
    with watching(client, name, start="earliest") as events:
        events.values(2)
        place = events.place()
    assert client.delete(f"/v1/topics/{name}").status_code == 204
    assert client.put(f"/v1/topics/{name}").status_code == 201
    append(client, name, "new")
    with watching(client, name, last=place) as events:
        # A stream that goes on at the offset of the topic before would show this one alone.
        append(client, name, "newer")
        assert events.values(1) == ["new"]


def test_added_partitions_are_followed(client: httpx.Client) -> None:
    name = made(client)
    with watching(client, name) as events:
        append(client, name, "before")
        assert events.values(1) == ["before"]
        assert client.patch(f"/v1/topics/{name}", json={"partitions": 2}).status_code == 200
        append(client, name, "added", partition=1)
        assert events.values(1) == ["added"]
        place = events.place()
    append(client, name, "again", partition=1)
    with watching(client, name, last=place) as events:
        assert events.values(1) == ["again"]


def test_a_gap_is_an_event_of_its_own(client: httpx.Client) -> None:
    name = made(client, cap_records=2)
    with watching(client, name) as events:
        place = events.place()
    append(client, name, *"abcdef")
    deleted = client.delete(f"/v1/topics/{name}/records", params={"before": 4})
    assert deleted.status_code == 200
    with watching(client, name, last=place) as events:
        event = events.next()
        assert event is not None
        found = msgspec.json.decode(event.text)
        while event.event == "gap":
            event = events.next()
            assert event is not None
        assert msgspec.json.decode(event.text)["value"] in ("e", "f"), found


def test_keys_and_tags_filter_a_stream(client: httpx.Client) -> None:
    name = made(client)
    with watching(client, name, tag="eu") as by_tag, watching(client, name, key="k1") as by_key:
        records = [{"value": f"{n}", "key": f"k{n % 2}", "tag": "eu" if n % 3 == 0 else "us"} for n in range(6)]
        assert client.post(f"/v1/topics/{name}/records", json=records).status_code == 200
        assert by_tag.values(2) == ["0", "3"]
        assert by_key.values(3) == ["1", "3", "5"]


def test_a_stream_without_records_gives_signs_of_life(client: httpx.Client) -> None:
    name = made(client)
    with watching(client, name) as events:
        assert events.place()
        assert events.place()


def error_of(event: ServerEvent | None) -> dict[str, Any]:
    assert event is not None and event.event == "error", event
    error: dict[str, Any] = msgspec.json.decode(event.text)["error"]
    return error


def test_a_topic_that_is_deleted_is_told_and_the_others_go_on(client: httpx.Client) -> None:
    first, gone, last = made(client), made(client, partitions=3), made(client)
    append(client, gone, "old")
    with watching(client, first, gone, last, start="earliest") as events:
        assert events.values(1) == ["old"]
        assert client.delete(f"/v1/topics/{gone}").status_code == 204
        error = error_of(events.next())
        assert (error["code"], error["detail"]["topic"]) == ("unknown_topic", gone)
        append(client, last, "a")
        append(client, first, "b")
        assert sorted(events.values(2)) == ["a", "b"]
        place = events.place()
    append(client, first, "c")

    with watching(client, first, gone, last, last=place) as events:
        assert error_of(events.next())["detail"]["topic"] == gone
        assert events.values(1) == ["c"]
        append(client, last, "d")
        assert events.values(1) == ["d"]
        place = events.place()
    assert client.put(f"/v1/topics/{gone}").status_code == 201
    append(client, gone, "again")
    with watching(client, first, gone, last, last=place) as events:
        append(client, first, "e")
        assert sorted(events.values(2)) == ["again", "e"], "one that is created again begins again"


def test_as_many_topics_as_a_watch_may_have_are_named_in_a_body_whatever_their_names(client: httpx.Client) -> None:
    """In an address 256 names of 25 characters each were too long."""
    begin = f"{next(_NUMBERS)}/".rjust(WATCHED_NAME, "n")
    names = [f"{begin}{number:0{WATCHED_NAME}}" for number in range(WATCHED_TOPICS_MAX)]
    for name in names:
        assert client.put(f"/v1/topics/{name}", json={"engine": "memory"}).status_code == 201
    assert client.get("/v1/watch", params={"topic": names}).status_code == 414

    with client.stream("POST", "/v1/watch", json={"topics": names}) as answer:
        events = Events(answer)
        append(client, names[-1], "a")
        assert events.values(1) == ["a"]
        place = events.place()
    append(client, names[0], "b")
    with client.stream("POST", "/v1/watch", json={"topics": names, "last_event_id": place}) as answer:
        assert Events(answer).values(1) == ["b"]
    many = [*names, "one/more"]
    refused: list[dict[str, Any]] = [{"topics": []}, {}, {"topics": names[:1], "start": "5"}, {"topics": many}]
    for wrong in refused:
        assert client.post("/v1/watch", json=wrong).status_code in (400, 404)
    for name in names:
        client.delete(f"/v1/topics/{name}")


def test_a_watch_ends_with_the_last_of_its_topics(client: httpx.Client) -> None:
    names = [made(client) for _ in range(3)]
    with watching(client, *names) as events:
        place = events.place()
        for name in names:
            assert client.delete(f"/v1/topics/{name}").status_code == 204
            assert error_of(events.next())["code"] in ("unknown_topic", "closed")
        assert events.next() is None
    answer = client.get("/v1/watch", params={"topic": names, "last_event_id": place})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_topic")


def test_a_watch_over_another_list_goes_on_in_the_topics_that_both_have(client: httpx.Client) -> None:
    """Another list, or another order, was refused, and the places in all topics were lost."""
    kept, dropped, other, added = (made(client) for _ in range(4))
    for name in (kept, dropped, other, added):
        append(client, name, f"{name} before")
    with watching(client, kept, dropped, other) as events:
        place = events.place()
    for name in (kept, dropped, other, added):
        append(client, name, f"{name} after")

    for names in ((other, kept), (added, other, kept), (kept, dropped)):
        with watching(client, *names, last=place) as events:
            append(client, names[0], "new")
            known = [name for name in names if name != added]
            wanted = {f"{name} after" for name in known} | {"new"}
            assert set(events.values(len(wanted))) == wanted
    with watching(client, kept, added, last=place, start="earliest") as events:
        wanted = {f"{kept} after", f"{added} before", f"{added} after"}
        found = {item["value"] for item in (events.item() for _ in range(5)) if item["value"] != "new"}
        assert wanted <= found, "start is for topics that the place does not know"


def test_a_deleted_topic_ends_its_stream_with_the_reason(client: httpx.Client) -> None:
    name = made(client)
    append(client, name, "a")
    with watching(client, name, start="earliest") as events:
        events.values(1)
        assert client.delete(f"/v1/topics/{name}").status_code == 204
        event = events.next()
        assert event is not None
        assert event.event == "error"
        assert msgspec.json.decode(event.text)["error"]["code"] in ("unknown_topic", "closed")
        assert events.next() is None


@pytest.mark.parametrize(
    "query",
    [{}, {"topic": ["a/b"] * 3, "start": "5"}, {"topic": "nowhere/n"}, {"topic": [f"n/t{n}" for n in range(300)]}],
)
def test_what_cannot_be_watched_is_refused(client: httpx.Client, query: dict[str, Any]) -> None:
    answer = client.get("/v1/watch", params=query)
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["message"]


def test_too_many_streams_are_refused_and_room_comes_back(tmp_path: Path) -> None:
    settings = server_settings(streams_max=2, streams_per_principal_max=2, heartbeat_interval_ms=100)
    with running_broker(tmp_path / "data", settings) as broker, broker.client() as client:
        name = made(client)
        with watching(client, name) as one:
            with watching(client, name) as two:
                refused = client.get("/v1/watch", params={"topic": name})
                assert refused.status_code == 429
                assert refused.headers["retry-after"]
                append(client, name, "a")
                assert one.values(1) == two.values(1) == ["a"]
            while client.get("/v1/watch", params={"topic": name, "start": "0"}).status_code != 400:
                pass  # until the broker has seen that the second stream is over
            with watching(client, name) as again:
                append(client, name, "b")
                assert again.values(1) == ["b"]


def test_a_stopping_broker_ends_its_streams_and_a_new_one_resumes_them(tmp_path: Path) -> None:
    with running_broker(tmp_path / "data") as broker, broker.client() as client:
        name = made(client)
        append(client, name, "a")
        with watching(client, name, start="earliest") as events:
            assert events.values(1) == ["a"]
            broker.stop()
            assert events.next() is None
            place = events.decoder.event_id
    with running_broker(tmp_path / "data") as broker, broker.client() as client:
        append(client, name, "b")
        with watching(client, name, last=place) as events:
            assert events.values(1) == ["b"]


def test_a_client_that_takes_nothing_holds_up_no_other(client: httpx.Client) -> None:
    name = made(client)
    big = "x" * 100_000
    with watching(client, name) as stalled, watching(client, name) as quick:
        for _ in range(40):
            append(client, name, big)
            assert quick.values(1) == [big]
        assert stalled.values(40) == [big] * 40


def test_streams_that_end_leave_nothing_under_way(broker: RunningBroker, client: httpx.Client) -> None:
    name = made(client)
    for _ in range(3):
        with watching(client, name) as events:
            append(client, name, "a")
            events.values(1)
    done = threading.Event()

    def look() -> None:
        if broker.process.broker.service.quotas.counts().streams:
            broker.loop.call_later(0.01, look)
        else:
            done.set()

    broker.loop.call_soon_threadsafe(look)
    assert done.wait(SECONDS)


def test_a_resumed_stream_has_the_records_of_partitions_that_are_added(client: httpx.Client) -> None:
    name = made(client)
    with watching(client, name) as events:
        place = events.place()
    with watching(client, name, last=place) as events:
        append(client, name, "known")
        assert events.values(1) == ["known"]
        assert client.patch(f"/v1/topics/{name}", json={"partitions": 2}).status_code == 200
        append(client, name, "added", partition=1)
        item = events.item()
        assert (item["partition"], item["value"]) == (1, "added")


def test_records_that_a_filter_leaves_out_move_the_place(client: httpx.Client) -> None:
    name = made(client)
    with watching(client, name, start="earliest", tag="eu") as events:
        begun = events.place()
        append(client, name, "not for this client")
        while (moved := events.place()) == begun:
            pass
    with watching(client, name, last=moved) as events:
        append(client, name, "next")
        assert events.values(1) == ["next"]


def test_a_stream_that_begins_while_the_broker_ends_ends_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_broker(tmp_path / "data") as broker, broker.client() as client:
        name = made(client)
        begin = Watcher.begin

        async def begin_and_stop(watcher: Watcher[bytes]) -> None:
            await begin(watcher)
            broker.process.stop()

        monkeypatch.setattr(Watcher, "begin", begin_and_stop)
        with watching(client, name) as events:
            # In order, not by the end of the time that requests have when the broker ends.
            assert events.next() is None


def test_an_error_that_ends_a_stream_does_not_name_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_broker(tmp_path / "data") as broker, broker.client() as client:
        name = made(client)

        async def fail(watcher: Watcher[bytes], until: float) -> None:
            raise Corrupt(f"what is in {tmp_path / 'data'} cannot be read")

        monkeypatch.setattr(Watcher, "take", fail)
        with watching(client, name) as events:
            event = events.next()
            assert event is not None
            assert event.event == "error"
            assert b"cannot be read" in event.text
            assert tmp_path.name.encode() not in event.text
            assert b"data" not in event.text


@pytest.mark.slow
def test_a_watch_that_gets_more_partitions_than_one_place_carries_ends_with_the_reason(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.wire.watching.WATCHED_PARTITIONS_MAX", 2)
    name = made(client, partitions=2)
    with watching(client, name) as events:
        events.place()
        assert client.patch(f"/v1/topics/{name}", json={"partitions": 3}).status_code == 200
        event = events.next()
        assert event is not None
        error = msgspec.json.decode(event.text)["error"]
        assert (event.event, error["code"]) == ("error", "invalid")
        assert "3 partitions" in error["message"]
        assert events.next() is None


def test_a_failure_of_the_broker_ends_a_stream_with_an_event_and_a_line_in_the_log(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = made(client)

    async def fail(watcher: Watcher[bytes], until: float) -> None:
        raise RuntimeError("/a/path/of/ours is wrong")

    monkeypatch.setattr(Watcher, "take", fail)
    with watching(client, name) as events:
        event = events.next()
        assert event is not None
        assert msgspec.json.decode(event.text)["error"]["code"] == "internal"
        assert b"path" not in event.text
    assert "a live stream failed" in [record.getMessage() for record in caplog.records]


def test_a_stream_is_resumed_from_memory_whatever_the_number_of_its_partitions(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each partition was asked for by a thread, one after the other."""
    name = made(client, partitions=20)
    for number in range(20):
        append(client, name, f"p{number}", partition=number)
    with watching(client, name, start="earliest") as events:
        events.values(20)
        place = events.place()

    def ask(topic: Topic, partition: int = 0) -> None:
        raise AssertionError(f"partition {partition} was asked for")

    monkeypatch.setattr(Topic, "offsets", ask)
    with watching(client, name, last=place) as events:
        append(client, name, "next", partition=7)
        assert events.values(1) == ["next"]
