"""The broker as a client sees it: topics, records, groups, errors, over real sockets."""

from __future__ import annotations

import contextlib
import gc
import gzip
import itertools
import json
import logging
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest

from forebay.broker import app, records, status
from forebay.errors import Closed, Conflict
from forebay.pages import LOOP_RECORDS_MAX
from forebay.partitioning import partition_of_key, partitions_of_key
from forebay.service.principals import Principal
from forebay.service.service import AppendRecords, Service
from forebay.settings import Settings
from forebay.shard import SegmentShard
from forebay.storage import Storage
from forebay.storage.append import Appender
from forebay.topics import TopicName
from forebay.wire import answers, bodies
from forebay.wire.bodies import MediaType
from forebay.wire.compression import ENCODINGS, compress_body, decompress_body
from forebay.wire.messages import TopicItem
from tests.support.brokers import running_broker, server_settings

_NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with running_broker(tmp_path_factory.mktemp("broker") / "data") as broker, broker.client() as client:
        yield client


@pytest.fixture
def topic(client: httpx.Client) -> str:
    """The address of a new topic with one partition."""
    return made(client)


def made(client: httpx.Client, **options: Any) -> str:
    address = f"/v1/topics/shop/t{next(_NUMBERS)}"
    answer = client.put(address, json=options)
    assert answer.status_code == 201, answer.text
    return address


def fine(answer: httpx.Response) -> Any:
    assert answer.status_code in (200, 201, 204), answer.text
    return answer.json() if answer.content else None


def refused(answer: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """The error of an answer, which has the one shape."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert body.keys() == {"error"}
    error: dict[str, Any] = body["error"]
    assert error.keys() == {"code", "message", "detail"}
    assert error["code"] == code, error
    assert error["message"]
    return error


def append(client: httpx.Client, topic: str, *values: str, **query: Any) -> list[dict[str, int]]:
    records = {"records": [{"value": value} for value in values]}
    ranges: list[dict[str, int]] = fine(client.post(f"{topic}/records", json=records, params=query))["ranges"]
    return ranges


def values_of(client: httpx.Client, topic: str, **query: Any) -> list[str]:
    page = fine(client.get(f"{topic}/records", params=query))
    return [record["value"] for record in page["records"]]


# Topics


def test_a_topic_is_created_shown_listed_altered_and_deleted(client: httpx.Client) -> None:
    address = made(client, partitions=2, durability="fsync", cap_records=100)
    name = address.removeprefix("/v1/topics/")
    shown = fine(client.get(address))
    assert (shown["name"], shown["partitions"], shown["durability"], shown["cap_records"]) == (name, 2, "fsync", 100)
    assert name in [each["name"] for each in fine(client.get("/v1/topics"))["topics"]]
    altered = fine(client.patch(address, json={"cap_records": None, "partitions": 3}))
    assert (altered["cap_records"], altered["partitions"]) == (None, 3)
    assert client.delete(address).status_code == 204
    error = refused(client.get(address), 404, "unknown_topic")
    assert error["detail"]["topic"] == name
    refused(client.post(f"{address}/records", json={"records": [{"value": "x"}]}), 404, "unknown_topic")
    refused(client.delete(address), 404, "unknown_topic")


def test_topics_are_listed_page_by_page(client: httpx.Client) -> None:
    names = sorted(f"pages/p{number:02}" for number in range(7))
    for name in names:
        fine(client.put(f"/v1/topics/{name}"))
    found: list[str] = []
    after: str | None = None
    while True:
        query: dict[str, Any] = {"prefix": "pages/", "limit": 3} | ({"after": after} if after else {})
        page = fine(client.get("/v1/topics", params=query))
        found += [each["name"] for each in page["topics"]]
        after = page.get("after")
        if after is None:
            break
    assert found == names


def test_a_long_list_is_made_by_a_thread(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "LOOP_ITEMS_MAX", 2)
    made_by: list[str] = []

    def noted(make: Callable[..., Any]) -> Callable[..., Any]:
        def note_and_make(*given: Any) -> Any:
            made_by.append(threading.current_thread().name)
            return make(*given)

        return note_and_make

    monkeypatch.setattr(status, "partition_item", noted(status.partition_item))
    monkeypatch.setattr(TopicItem, "of", noted(TopicItem.of))
    for count in (2, 3):
        topic = made(client, partitions=count)
        for partition in range(count):
            append(client, topic, "v", partition=partition)
            fine(client.put(f"/v1/topics/long{count}/t{partition}"))
        made_by.clear()
        assert len(fine(client.get(f"{topic}/status"))["partitions"]) == count
        fine(client.get("/v1/topics", params={"prefix": f"long{count}/"}))
        assert {name.startswith("forebay-broker-compute") for name in made_by} == {count > 2}
        assert len(made_by) == 2 * count


def test_a_topic_that_exists_is_a_conflict_unless_that_is_fine(client: httpx.Client, topic: str) -> None:
    refused(client.put(topic, json={"partitions": 4}), 409, "conflict")
    for same in ({}, {"partitions": 1}, {"durability": None, "cap_records": None, "cleanup": "delete"}):
        answer = client.put(topic, json={**same, "exist_ok": True})
        assert (answer.status_code, answer.json()["partitions"]) == (200, 1), same
    for other in ({"partitions": 4}, {"cap_records": 7}, {"durability": "fsync"}, {"compression": "zstd"}):
        error = refused(client.put(topic, json={**other, "exist_ok": True}), 409, "conflict")
        assert next(iter(other)) in error["message"]
    assert client.put(f"{topic}-new", json={"partitions": 4, "exist_ok": True}).status_code == 201


def test_a_topic_deleted_and_created_again_has_none_of_its_records(client: httpx.Client, topic: str) -> None:
    append(client, topic, "old")
    fine(client.delete(topic))
    fine(client.put(topic))
    assert values_of(client, topic) == []
    assert append(client, topic, "new") == [{"partition": 0, "first": 0, "count": 1}]
    assert values_of(client, topic) == ["new"]


# Append


def _arrow(values: list[str]) -> bytes:
    return bodies.encode_arrow([pa.record_batch({"value": pa.array([value.encode() for value in values])})])


@pytest.mark.parametrize(
    ("media", "body"),
    [
        (MediaType.JSON, lambda values: json.dumps({"records": [{"value": value} for value in values]}).encode()),
        (MediaType.JSON, lambda values: json.dumps([{"value": value} for value in values]).encode()),
        (MediaType.NDJSON, lambda values: b"".join(b'{"value": "%s"}\n' % value.encode() for value in values)),
        (MediaType.ARROW, _arrow),
    ],
)
@pytest.mark.parametrize("count", [1, 3, 3000])
@pytest.mark.parametrize("is_compressed", [False, True])
def test_records_are_appended_in_every_format(
    client: httpx.Client,
    topic: str,
    media: MediaType,
    body: Callable[[list[str]], bytes],
    count: int,
    *,
    is_compressed: bool,
) -> None:
    values = [f"v{number}" for number in range(count)]
    sent = body(values)
    headers = {"content-type": str(media)} | ({"content-encoding": "gzip"} if is_compressed else {})
    answer = client.post(f"{topic}/records", content=gzip.compress(sent) if is_compressed else sent, headers=headers)
    assert fine(answer) == {"ranges": [{"partition": 0, "first": 0, "count": count}]}
    assert values_of(client, topic) == values


def test_a_raw_body_is_the_value_of_one_record(client: httpx.Client, topic: str) -> None:
    query = {"key": "42", "tag": "eu", "header": ["trace=a1", "empty"], "timestamp": "1935903600000"}
    answer = client.post(
        f"{topic}/records", content=b"\x00\xff", params=query, headers={"content-type": str(MediaType.RAW)}
    )
    assert fine(answer)["ranges"][0]["count"] == 1
    (record,) = fine(client.get(f"{topic}/records"))["records"]
    assert record["value_b64"] == "AP8="
    assert (record["key"], record["tag"], record["timestamp"]) == ("42", "eu", 1935903600000)
    assert record["headers"] == {"trace": "a1", "empty": None}


def test_a_body_without_a_stated_length_is_taken(client: httpx.Client, topic: str) -> None:
    pieces = [b'{"records": [', b'{"value": "a"}', b', {"value": "b"}', b"]}"]
    assert fine(client.post(f"{topic}/records", content=iter(pieces)))["ranges"][0]["count"] == 2
    assert values_of(client, topic) == ["a", "b"]


def test_keys_decide_the_partition_and_all_ranges_are_named(client: httpx.Client) -> None:
    topic = made(client, partitions=4)
    records = [{"value": f"{number}", "key": f"k{number % 8}"} for number in range(80)]
    ranges = fine(client.post(f"{topic}/records", json=records))["ranges"]
    assert sum(each["count"] for each in ranges) == 80
    found = {number: fine(client.get(f"{topic}/records", params={"partition": number})) for number in range(4)}
    by_key = {record["key"]: number for number, page in found.items() for record in page["records"]}
    assert len(by_key) == 8
    assert sorted(int(record["value"]) for page in found.values() for record in page["records"]) == list(range(80))


PLACED: list[dict[str, Any]] = [
    {"value": "a", "partition": 3},
    {"value": "b", "key": "42", "partition": 1},
    {"value": "c", "key": "42"},
    {"value": "d", "partition": 3},
    {"value": "e", "partition": None, "key": "42"},
]
WHERE_42_IS = partition_of_key(b"42", 4)


def _arrow_of(records: list[dict[str, Any]]) -> bytes:
    columns = {
        "value": pa.array([record["value"].encode() for record in records], pa.binary()),
        "key": pa.array([record.get("key", "").encode() or None for record in records], pa.binary()),
        "partition": pa.array([record.get("partition") for record in records], pa.int32()),
    }
    return bodies.encode_arrow([pa.record_batch(columns)])


BODIES: dict[str, tuple[str, Callable[[list[dict[str, Any]]], bytes]]] = {
    "list": (MediaType.JSON, lambda records: json.dumps(records).encode()),
    "object": (MediaType.JSON, lambda records: json.dumps({"records": records}).encode()),
    "lines": (MediaType.NDJSON, lambda records: "\n".join(map(json.dumps, records)).encode()),
    "arrow": (MediaType.ARROW, _arrow_of),
}


@pytest.mark.parametrize("kind", BODIES)
def test_a_record_goes_to_the_partition_that_it_names(client: httpx.Client, kind: str) -> None:
    topic = made(client, partitions=4)
    media, encoded = BODIES[kind]

    def post(records: list[dict[str, Any]], **query: Any) -> httpx.Response:
        return client.post(f"{topic}/records", content=encoded(records), headers={"content-type": media}, params=query)

    assert {each["partition"] for each in fine(post(PLACED))["ranges"]} == {1, 3, WHERE_42_IS}
    expected: dict[int, list[str]] = {0: [], 1: [], 2: [], 3: []}
    for record in PLACED:
        expected[WHERE_42_IS if record.get("partition") is None else record["partition"]].append(record["value"])
    assert {number: values_of(client, topic, partition=number) for number in range(4)} == expected

    beyond: list[list[dict[str, Any]]] = [
        [{"value": "x", "partition": 99}],
        [{"value": "x"}, {"value": "y", "partition": 4}],
    ]
    for one in beyond:
        message = refused(post(one), 400, "invalid")["message"]
        assert f"record {len(one) - 1} names partition" in message
        assert "this topic has 0 to 3" in message
    refused(post([{"value": "x", "partition": -1}]), 400, "invalid")
    message = refused(
        post([{"value": "x", "partition": 2}, {"value": "y", "partition": 1}], partition=2), 400, "invalid"
    )
    assert "record 1 names partition 1, and the call names 2" in message["message"]
    assert {number: values_of(client, topic, partition=number) for number in range(4)} == expected
    fine(post([{"value": "z", "partition": 2}, {"value": "z"}], partition=2))
    assert values_of(client, topic, partition=2)[len(expected[2]) :] == ["z", "z"]
    assert fine(post([{"value": "one", "partition": 0}], producer=7, sequence=0))["ranges"][0]["partition"] == 0


@pytest.mark.parametrize(
    ("method", "query", "headers"),
    [
        ("GET", {"history": "true"}, {}),
        ("GET", {"history": "true", "tag": "eu"}, {}),
        ("GET", {"key": "k", "wait_ms": "5"}, {}),
        ("POST", {"previous": "4"}, {"idempotency-key": "k"}),
        ("POST", {"key": ""}, {}),
    ],
)
def test_what_would_be_left_unheeded_is_refused(
    client: httpx.Client, topic: str, method: str, query: dict[str, str], headers: dict[str, str]
) -> None:
    body = b'[{"value": "a"}]' if method == "POST" else None
    refused(client.request(method, f"{topic}/records", params=query, headers=headers, content=body), 400, "invalid")
    assert values_of(client, topic) == []


def test_a_repeated_append_of_a_producer_is_stored_once(client: httpx.Client, topic: str) -> None:
    first = append(client, topic, "a", producer=7, sequence=0)
    assert append(client, topic, "a", producer=7, sequence=0) == first
    append(client, topic, "b", producer=7, sequence=1)
    assert values_of(client, topic) == ["a", "b"]
    error = refused(
        client.post(f"{topic}/records", json=[{"value": "z"}], params={"producer": 7, "sequence": 9}), 409, "conflict"
    )
    assert error["detail"]["expected"] == 2


@pytest.mark.parametrize("producer", [7, 2**64 - 1])
def test_a_producer_learns_how_far_it_has_come(client: httpx.Client, producer: int) -> None:
    topic = made(client, partitions=2)
    where = {"producer": producer, "partition": 1}
    assert fine(client.get(f"{topic}/sequence", params=where)) == {**where, "sequence": None}
    append(client, topic, "a", producer=7, sequence=0, partition=1)
    append(client, topic, "b", producer=7, sequence=5, previous=0, partition=1)
    expected = 5 if producer == 7 else None
    assert fine(client.get(f"{topic}/sequence", params=where)) == {**where, "sequence": expected}
    assert fine(client.get(f"{topic}/sequence", params={"producer": 7}))["sequence"] is None
    refused(client.get(f"{topic}/sequence"), 400, "invalid")
    refused(client.get(f"{topic}/sequence", params={"producer": 0}), 400, "invalid")
    refused(client.get(f"{topic}/sequence", params={"producer": 7, "partition": 2}), 400, "invalid")


def test_an_idempotency_key_stands_for_one_append(client: httpx.Client, topic: str) -> None:
    def send(key: str, value: str) -> Any:
        headers = {"idempotency-key": key}
        return fine(client.post(f"{topic}/records", json=[{"value": value}], headers=headers))

    assert send("order-1", "a") == send("order-1", "a")
    send("order-2", "b")
    assert values_of(client, topic) == ["a", "b"]


@pytest.mark.parametrize(
    "request_of", [{"params": {"producer": 7, "sequence": 0}}, {"headers": {"idempotency-key": "k"}}]
)
def test_a_repeat_with_other_records_is_a_conflict_of_that_kind(
    client: httpx.Client, topic: str, request_of: dict[str, Any]
) -> None:
    bodies_of = [[{"value": "a", "tag": "t"}], [{"value": "a", "tag": "T"}], [{"value": "a", "tag": "t"}] * 2]
    first = fine(client.post(f"{topic}/records", json=bodies_of[0], **request_of))
    for other in bodies_of[1:]:
        error = refused(client.post(f"{topic}/records", json=other, **request_of), 409, "conflict")
        assert error["detail"]["kind"] == "other_records"
        assert ("Idempotency-Key" in error["message"]) == ("headers" in request_of)
    assert fine(client.post(f"{topic}/records", json=bodies_of[0], **request_of)) == first
    assert values_of(client, topic) == ["a"]


@pytest.mark.parametrize("kind", ["undecided", "too_old"])
def test_a_conflict_of_another_kind_says_what_it_is_though_a_key_was_sent(
    client: httpx.Client, topic: str, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuses(*_: object) -> Any:
        raise Conflict("damage may have taken it", kind=kind)

    monkeypatch.setattr(Service, "append", refuses)

    answer = client.post(f"{topic}/records", json=[{"value": "a"}], headers={"idempotency-key": "k"})

    error = refused(answer, 409, "conflict")
    assert (error["message"], error["detail"]["kind"]) == ("damage may have taken it", kind)


def test_each_conflict_of_a_producer_has_a_kind(client: httpx.Client, topic: str) -> None:
    def kind_of(sequence: int) -> str:
        query = {"producer": 7, "sequence": sequence}
        error = refused(client.post(f"{topic}/records", json=[{"value": "a"}], params=query), 409, "conflict")
        found: str = error["detail"]["kind"]
        return found

    assert kind_of(3) == "unknown_producer"
    for query in ({"producer": 7, "sequence": 0}, {"producer": 7, "sequence": 8, "previous": 0}):
        fine(client.post(f"{topic}/records", json=[{"value": "b"}], params=query))
    assert kind_of(12) == "out_of_order"
    assert kind_of(5) == "too_old"
    assert kind_of(8) == "other_records"


@pytest.mark.parametrize("kind", [*BODIES, "keyless"])
def test_an_idempotency_key_is_known_after_partitions_were_added_and_after_a_restart(tmp_path: Path, kind: str) -> None:
    media, encoded = BODIES.get(kind, BODIES["list"])
    calls = [[name] for name in "abcdefgh"] + [list("abc"), list("abcdefgh")]

    def send(client: httpx.Client, number: int, names: list[str]) -> Any:
        records = [{"value": name, **({} if kind == "keyless" else {"key": name})} for name in names]
        headers = {"idempotency-key": f"call-{number}", "content-type": media}
        return fine(client.post("/v1/topics/shop/t/records", content=encoded(records), headers=headers))

    def count(client: httpx.Client) -> int:
        return sum(each["next"] for each in fine(client.get("/v1/topics/shop/t/offsets"))["partitions"])

    with running_broker(tmp_path / "data") as broker, broker.client() as client:
        fine(client.put("/v1/topics/shop/t", json={"partitions": 4}))
        first = [send(client, number, names) for number, names in enumerate(calls)]
        fine(client.patch("/v1/topics/shop/t", json={"partitions": 8}))
        assert [send(client, number, names) for number, names in enumerate(calls)] == first
        assert count(client) == 19
    with running_broker(tmp_path / "data") as broker, broker.client() as client:
        assert [send(client, number, names) for number, names in enumerate(calls)] == first
        fine(client.patch("/v1/topics/shop/t", json={"partitions": 9}))
        assert [send(client, number, names) for number, names in enumerate(calls)] == first
        assert count(client) == 19
        send(client, 99, ["a"])
        assert count(client) == 20


def test_an_append_that_waits_while_partitions_are_added_and_it_is_repeated_is_stored_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first attempt has chosen its partition and is held before the queue; its repeat overtakes it."""
    held, go_on, prepare = threading.Event(), threading.Event(), Appender.prepare_many
    is_first = iter((True,))

    def hold(appender: Appender, *given: Any, **named: Any) -> Any:
        prepared = prepare(appender, *given, **named)
        if next(is_first, False):
            held.set()
            assert go_on.wait(60)
        return prepared

    key = next(
        key for key in map(str, range(99)) if partition_of_key(key.encode(), 4) != partition_of_key(key.encode(), 8)
    )

    def send(client: httpx.Client) -> httpx.Response:
        # So many that a thread prepares them, and not the event loop.
        records, headers = [{"value": "v", "key": key}] * (LOOP_RECORDS_MAX + 1), {"idempotency-key": "one"}
        return client.post("/v1/topics/shop/t/records", json=records, headers=headers)

    with running_broker(tmp_path / "data") as broker, broker.client() as client, broker.client() as other:
        fine(client.put("/v1/topics/shop/t", json={"partitions": 4}))
        monkeypatch.setattr(Appender, "prepare_many", hold)
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(send, client)
            assert held.wait(60)
            fine(other.patch("/v1/topics/shop/t", json={"partitions": 8}))
            repeated = fine(send(other))
            go_on.set()
            message = refused(first.result(60), 503, "unavailable")["message"]
        assert "send it again" in message
        assert fine(send(client)) == repeated
        offsets = fine(client.get("/v1/topics/shop/t/offsets"))["partitions"]
        assert sum(each["next"] for each in offsets) == LOOP_RECORDS_MAX + 1


# Read


def test_a_page_says_where_the_partition_stands(client: httpx.Client, topic: str) -> None:
    append(client, topic, *"abcde")
    page = fine(client.get(f"{topic}/records", params={"start": "1", "records_max": 2}))
    assert [record["value"] for record in page["records"]] == ["b", "c"]
    standing = {name: page[name] for name in ("next", "head", "earliest", "evict_floor", "caught_up")}
    assert standing == {"next": 3, "head": 5, "earliest": 0, "evict_floor": 0, "caught_up": False}
    last = fine(client.get(f"{topic}/records", params={"start": "3"}))
    assert (last["next"], last["caught_up"]) == (5, True)
    assert values_of(client, topic, start="latest") == []
    refused(client.get(f"{topic}/records", params={"start": "6"}), 400, "offset_out_of_range")


def test_every_format_holds_the_same_page(client: httpx.Client, topic: str) -> None:
    append(client, topic, *(f"v{number}" for number in range(500)))
    as_json = answers.decode_page_json(client.get(f"{topic}/records", headers={"accept": "application/json"}).content)
    lines = client.get(f"{topic}/records", headers={"accept": str(MediaType.NDJSON)})
    standing = answers.PageMarks.of_headers(lines.headers)
    assert answers.decode_page_ndjson(lines.content, standing) == as_json
    frames = client.get(f"{topic}/records", headers={"accept": str(MediaType.FRAMES)})
    assert answers.decode_page_frames(frames.content).records() == as_json
    arrow = client.get(f"{topic}/records", headers={"accept": str(MediaType.ARROW)})
    table = pa.Table.from_batches(list(pa.ipc.open_stream(arrow.content)))
    assert [value.decode() for value in table["value"].to_pylist()] == [f"v{number}" for number in range(500)]
    assert answers.PageMarks.of_headers(arrow.headers) == standing


def test_a_read_waits_for_a_first_record(client: httpx.Client, topic: str) -> None:
    append(client, topic, "before")
    found: list[list[str]] = []
    waiting = threading.Thread(target=lambda: found.append(values_of(client, topic, start="1", wait_ms=60_000)))
    waiting.start()
    assert values_of(client, topic) == ["before"]
    append(client, topic, "after")
    waiting.join(60)
    assert found == [["after"]]


def test_a_read_that_waits_in_vain_answers_with_nothing(client: httpx.Client, topic: str) -> None:
    assert values_of(client, topic, wait_ms=20) == []


def test_records_are_looked_up_by_key_tag_and_time(client: httpx.Client, topic: str) -> None:
    records = [
        {"value": f"{number}", "key": f"k{number % 3}", "tag": f"t{number % 2}", "timestamp": 1000 * (number + 1)}
        for number in range(9)
    ]
    fine(client.post(f"{topic}/records", json=records))
    assert values_of(client, topic, key="k1") == ["7"]
    assert values_of(client, topic, key="k1", history=True) == ["1", "4", "7"]
    assert values_of(client, topic, tag="t0") == ["0", "2", "4", "6", "8"]
    page = fine(client.get(f"{topic}/records", params={"tag": "t0", "records_max": 2}))
    assert [record["value"] for record in page["records"]] == ["0", "2"]
    assert values_of(client, topic, tag="t0", start=page["next"]) == ["4", "6", "8"]
    assert fine(client.get(f"{topic}/offset", params={"at": "4500ms"})) == {"partition": 0, "offset": 4}
    assert fine(client.get(f"{topic}/offset", params={"at": "99999ms"})) == {"partition": 0, "offset": None}
    assert values_of(client, topic, start="8000ms") == ["7", "8"]


def _keys_with_two_places(before: int, after: int) -> dict[str, list[int]]:
    """Each of some keys, and where it lies when a topic has grown: today's place first."""
    return {f"k{number}": partitions_of_key(f"k{number}".encode(), after, (before,)) for number in range(16)}


def test_a_key_is_looked_up_where_its_hash_puts_it_now_and_before_partitions_were_added(client: httpx.Client) -> None:
    topic = made(client, partitions=4)
    places = _keys_with_two_places(4, 8)
    fine(client.post(f"{topic}/records", json=[{"value": f"old {key}", "key": key} for key in places]))
    assert {key: values_of(client, topic, key=key) for key in places} == {key: [f"old {key}"] for key in places}

    fine(client.patch(topic, json={"partitions": 8}))
    assert {key: values_of(client, topic, key=key) for key in places} == {key: [f"old {key}"] for key in places}
    fine(client.post(f"{topic}/records", json=[{"value": f"new {key}", "key": key} for key in places]))
    assert {key: values_of(client, topic, key=key) for key in places} == {key: [f"new {key}"] for key in places}
    assert {len(found) for found in places.values()} == {1, 2}
    for key, found in places.items():
        asked = client.get(f"{topic}/records", params={"key": key, "history": True})
        if len(found) == 1:
            assert [record["value"] for record in fine(asked)["records"]] == [f"old {key}", f"new {key}"]
        else:
            message = refused(asked, 400, "invalid")["message"]
            assert f"with partition={found[1]}, partition={found[0]} " in message
            refused(client.get(f"{topic}/records", params={"key": key, "start": "0"}), 400, "invalid")
            assert values_of(client, topic, key=key, partition=found[1]) == [f"old {key}"]


def test_a_key_that_no_record_has_is_an_empty_page_of_the_partition_that_it_would_go_to(client: httpx.Client) -> None:
    topic = made(client, partitions=4)
    fine(client.post(f"{topic}/records", json=[{"value": "a"}] * 3, params={"partition": 3}))
    gone = next(key for key in map(str, range(99)) if partitions_of_key(key.encode(), 4, ()) == [3])
    page = fine(client.get(f"{topic}/records", params={"key": gone}))
    assert (page["records"], page["head"], page["caught_up"]) == ([], 3, True)


def test_a_tag_is_looked_up_in_the_partition_that_is_named_or_the_only_one(client: httpx.Client) -> None:
    topic = made(client, partitions=4)
    for partition in range(4):
        fine(
            client.post(
                f"{topic}/records", json=[{"value": f"{partition}", "tag": "eu"}], params={"partition": partition}
            )
        )
    message = refused(client.get(f"{topic}/records", params={"tag": "eu"}), 400, "invalid")["message"]
    assert "partition=0 to partition=3" in message
    assert [values_of(client, topic, tag="eu", partition=number) for number in range(4)] == [["0"], ["1"], ["2"], ["3"]]


@pytest.mark.parametrize("query", [{"tag": "eu"}, {"key": "k", "history": True}])
def test_a_look_up_that_is_continued_skips_no_record_that_is_published_meanwhile(
    client: httpx.Client, topic: str, query: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def add(value: str) -> None:
        fine(client.post(f"{topic}/records", json=[{"value": value, "key": "k", "tag": "eu"}, {"value": "other"}]))

    late = iter(["late"])
    name = "read_by_tag" if "tag" in query else "read_by_key"
    look = getattr(SegmentShard, name)

    def look_and_add(self: SegmentShard, *args: Any, **options: Any) -> Any:
        page = look(self, *args, **options)
        for value in late:
            add(value)
        return page

    monkeypatch.setattr(SegmentShard, name, look_and_add)
    add("first")
    found: list[str] = []
    page: dict[str, Any] = {"next": 0, "caught_up": False}
    while not page["caught_up"]:
        page = fine(client.get(f"{topic}/records", params={**query, "start": page["next"]}))
        found += [record["value"] for record in page["records"]]
    assert found == ["first", "late"]


def test_a_look_up_gives_no_more_bytes_at_once_than_asked_for(client: httpx.Client, topic: str) -> None:
    fine(client.post(f"{topic}/records", json=[{"value": f"{number}" * 1000, "tag": "eu"} for number in range(5)]))
    found: list[str] = []
    page: dict[str, Any] = {"next": 0, "caught_up": False}
    while not page["caught_up"]:
        page = fine(client.get(f"{topic}/records", params={"tag": "eu", "start": page["next"], "bytes_max": 2500}))
        assert len(page["records"]) < 4
        found += [record["value"][0] for record in page["records"]]
    assert found == ["0", "1", "2", "3", "4"]


def test_deleted_records_are_gone(client: httpx.Client, topic: str) -> None:
    records = [{"value": f"{number}", "key": f"k{number % 3}"} for number in range(9)]
    fine(client.post(f"{topic}/records", json=records))
    assert fine(client.delete(f"{topic}/records", params={"key": "k0"})) == {"records": 3}
    assert fine(client.delete(f"{topic}/records", params={"start": 1, "stop": 3})) == {"records": 2}
    assert values_of(client, topic) == ["4", "5", "7", "8"]
    fine(client.delete(f"{topic}/records", params={"before": 6}))
    assert values_of(client, topic) == ["7", "8"]
    refused(client.delete(f"{topic}/records"), 400, "invalid")
    refused(client.delete(f"{topic}/records", params={"key": "k", "before": 1}), 400, "invalid")


def test_limits_are_applied_on_demand(client: httpx.Client) -> None:
    topic = made(client, cleanup="compact", compact_lag_ms=0)
    fine(client.post(f"{topic}/records", json=[{"value": f"{number}", "key": "k"} for number in range(5)]))
    fine(client.post(f"{topic}/rotate"))
    removed = fine(client.post(f"{topic}/retain"))
    assert (removed["evicted"], removed["compacted"]) == (0, 4)
    assert values_of(client, topic) == ["4"]
    assert fine(client.post(f"{topic}/retain"))["compacted"] == 0


def test_watermarks_of_all_partitions(client: httpx.Client) -> None:
    topic = made(client, partitions=2)
    append(client, topic, "a", "b", partition=1)
    found = fine(client.get(f"{topic}/offsets"))["partitions"]
    assert [(each["partition"], each["next"]) for each in found] == [(0, 0), (1, 2)]


def test_the_status_of_a_topic_and_of_the_broker(client: httpx.Client, topic: str) -> None:
    append(client, topic, "a", "b")
    (partition,) = fine(client.get(f"{topic}/status"))["partitions"]
    assert partition["topic"] == topic.removeprefix("/v1/topics/")
    assert (partition["epoch"], partition["failure"], partition["offsets"]["next"]) == (1, None, 2)
    assert partition["recovery"]["summary"].startswith("next offset 0")
    whole = fine(client.get("/v1/status"))
    assert partition["topic"] in {each["topic"] for each in whole["partitions"]}
    assert "forebay-sync" in {worker["name"] for worker in whole["workers"]}


def test_the_offset_of_each_record_is_answered_where_keys_part_them(client: httpx.Client) -> None:
    topic = made(client, partitions=3)
    records = [{"value": str(number), "key": f"k{number % 5}"} for number in range(20)]
    plain = fine(client.post(f"{topic}/records", json=records))
    asked = fine(client.post(f"{topic}/records", json=records, params={"offsets": "true"}))
    assert "offsets" not in plain
    assert len(asked["offsets"]) == 20
    for number, offset in enumerate(asked["offsets"]):
        held = [
            fine(client.get(f"{topic}/records", params={"partition": each["partition"], "start": str(offset)}))
            for each in asked["ranges"]
            if each["first"] <= offset < each["first"] + each["count"]
        ]
        assert str(number) in {page["records"][0]["value"] for page in held}
    alone = fine(client.post(f"{topic}/records", json=records, params={"offsets": "true", "partition": "0"}))
    assert "offsets" not in alone


def test_the_segments_of_a_partition_are_listed_page_by_page(client: httpx.Client, topic: str) -> None:
    for number in range(5):
        append(client, topic, f"{number}a", f"{number}b")
        if number < 4:
            fine(client.post(f"{topic}/rotate"))
    fine(client.post(f"{topic}/export"))
    whole = fine(client.get(f"{topic}/segments"))
    assert (whole["partition"], whole["next"]) == (0, None)
    assert [(each["start"], each["end"]) for each in whole["history"]] == [(n, n + 2) for n in range(0, 10, 2)]
    assert {(each["kind"], each["records"], bool(each["object"])) for each in whole["history"]} == {("frames", 2, True)}
    assert [each["start"] for each in whole["local"]][:5] == [0, 2, 4, 6, 8]
    assert all(each["bytes"] > 0 for each in whole["local"])
    found: list[int] = []
    start: int | None = 0
    while start is not None:
        page = fine(client.get(f"{topic}/segments", params={"start": start, "limit": 2}))
        assert len(page["history"]) <= 2
        found += [each["start"] for each in page["history"]]
        start = page["next"]
    assert found == [0, 2, 4, 6, 8]
    refused(client.get(f"{topic}/segments", params={"partition": 1}), 400, "invalid")


# Groups


def test_a_group_commits_fetches_and_starts_again(client: httpx.Client, topic: str) -> None:
    name = topic.removeprefix("/v1/topics/")
    append(client, topic, *"abcde")
    group = f"/v1/groups/g{next(_NUMBERS)}"
    where: dict[str, Any] = {"topic": name, "partition": 0}
    assert fine(client.get(f"{group}/offset", params=where))["offset"] is None
    assert fine(client.post(f"{group}/commit", json={**where, "offset": 3, "note": "n"}))["offset"] == 3
    assert fine(client.get(f"{group}/offset", params=where)) == {**where, "offset": 3, "note": "n"}
    (place,) = fine(client.get(group))["places"]
    assert (place["offset"], place["end"], place["lag"]) == (3, 5, 2)
    assert group.rpartition("/")[2] in fine(client.get("/v1/groups"))["groups"]
    refused(client.post(f"{group}/commit", json={**where, "offset": 4, "expected": 1}), 409, "conflict")
    assert fine(client.post(f"{group}/reset", json={"topic": name, "to": "earliest"}))["offsets"] == {"0": 0}
    assert client.delete(group).status_code == 204
    assert fine(client.get(group))["places"] == []


def test_a_group_is_set_with_a_note_and_forgotten_in_one_topic(client: httpx.Client, topic: str) -> None:
    name, other = topic.removeprefix("/v1/topics/"), made(client).removeprefix("/v1/topics/")
    append(client, topic, *"ab")
    group = f"/v1/groups/g{next(_NUMBERS)}"
    fine(client.post(f"{group}/reset", json={"topic": name, "to": "latest", "note": "by hand"}))
    fine(client.post(f"{group}/reset", json={"topic": other, "to": "earliest"}))
    assert {place["topic"]: place["note"] for place in fine(client.get(group))["places"]} == {
        name: "by hand",
        other: "",
    }
    assert client.delete(group, params={"topic": name}).status_code == 204
    assert [place["topic"] for place in fine(client.get(group))["places"]] == [other]


# Errors


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "code"),
    [
        ("GET", "/nothing", None, 404, "no_route"),
        ("GET", "/v1/topics/a%2Fb/c", None, 404, "no_route"),
        ("GET", "/v1/topics//c", None, 404, "no_route"),
        ("GET", "/v1/topics/%ff/c", None, 404, "no_route"),
        ("GET", "/v1/topics/../../etc", None, 404, "no_route"),
        ("GET", "/v1/topics/a b/c", None, 400, "invalid"),
        ("POST", "/v1/topics", b"{}", 405, "no_method"),
        ("PUT", "/v1/topics/a/b", b"{", 400, "invalid"),
        ("PUT", "/v1/topics/a/b", b'{"unknown": 1}', 400, "invalid"),
        ("PUT", "/v1/topics/a/b", b'{"partitions": 0}', 400, "invalid"),
        ("PUT", "/v1/topics/a/b", b"[" * 100_000, 413, "too_large"),
        ("PUT", "/v1/topics/a/b", b"[" * 50_000, 400, "invalid"),
        ("GET", "/v1/topics?limit=0", None, 400, "invalid"),
        ("GET", "/v1/topics?limit=x", None, 400, "invalid"),
        ("GET", "/v1/topics?unknown=1", None, 400, "invalid"),
        ("GET", "/v1/topics?limit=1&limit=2", None, 400, "invalid"),
        ("GET", "/v1/topics?%ff=1", None, 400, "invalid"),
    ],
)
def test_a_wrong_request_is_a_clear_refusal(
    client: httpx.Client, method: str, path: str, content: bytes | None, status: int, code: str
) -> None:
    request = client.build_request(method, "/", content=content)
    # As it is written, without what a client would make of it.
    request.url = httpx.URL(client.base_url.copy_with(raw_path=path.encode()))
    refused(client.send(request), status, code)


def test_an_answer_names_the_methods_of_its_address(client: httpx.Client) -> None:
    assert client.post("/v1/topics").headers["allow"] == "GET"


def test_a_body_that_is_too_large_is_refused_unread(tmp_path: Path) -> None:
    settings = server_settings(body_bytes_max=2048)
    with running_broker(tmp_path / "data", settings) as broker, broker.client() as client:
        topic = made(client)
        content = json.dumps([{"value": "x" * 100}] * 100).encode()
        error = refused(client.post(f"{topic}/records", content=content), 413, "too_large")
        assert error["detail"]["limit"] == 2048
        refused(client.post(f"{topic}/records", content=iter([content])), 413, "too_large")
        bomb = gzip.compress(b" " * 1_000_000)
        assert len(bomb) < 2048
        refused(client.post(f"{topic}/records", content=bomb, headers={"content-encoding": "gzip"}), 413, "too_large")
        assert values_of(client, topic) == []


def test_the_limit_of_a_message_is_named_and_not_that_of_records(client: httpx.Client) -> None:
    error = refused(client.put("/v1/topics/a/b", content=b"[" * 100_000), 413, "too_large")
    assert error["detail"] == {"size": 100_000, "limit": 65_536}
    assert "a request without records" in error["message"]
    assert "server.body_bytes_max" not in error["message"]


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"PUT /v1/topics/a/b HTTP/1.1\r\ntransfer-encoding: chunked\r\n", b"413"),
        (b"PUT /v1/topics/a/b HTTP/1.1\r\ncontent-length: 10000000\r\n", b"413"),
        (b"POST /v1/topics/a/nothing/flush HTTP/1.1\r\ntransfer-encoding: chunked\r\n", b"404"),
        (b"POST /nothing HTTP/1.1\r\ncontent-length: 10000000\r\n", b"404"),
    ],
)
def test_a_body_that_no_route_wants_is_not_waited_for(client: httpx.Client, head: bytes, status: bytes) -> None:
    url = client.base_url
    with socket.create_connection((url.host, url.port or 0), timeout=10) as connection:
        connection.sendall(head + b"host: localhost\r\n\r\n" + b"11170\r\n" + b"x" * 70_000 + b"\r\n")
        found = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := connection.recv(65_536):
                found += piece
    assert found.startswith(b"HTTP/1.1 %s " % status)
    assert b"\r\nconnection: close\r\n" in found


def test_a_small_body_that_no_route_wants_leaves_the_connection_open(client: httpx.Client) -> None:
    url = client.base_url
    asked = b"POST /nothing HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n\r\n12345"
    with socket.create_connection((url.host, url.port or 0), timeout=10) as connection:
        for _ in range(2):
            connection.sendall(asked)
            found = connection.recv(65_536)
            assert found.startswith(b"HTTP/1.1 404 ")
            assert b"connection: close" not in found


def test_no_answer_names_a_path_of_the_server(client: httpx.Client, tmp_path_factory: pytest.TempPathFactory) -> None:
    root = str(tmp_path_factory.getbasetemp())
    texts = [client.get(path).text for path in ("/v1/health", "/v1/ready", "/v1/topics", "/v1/openapi.json")]
    assert not [text for text in texts if root in text]


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"host": "rebound.example"},
        {"host": "rebound.example:7878", "origin": "http://rebound.example:7878"},
    ],
)
def test_a_page_of_another_site_cannot_use_a_server_without_tokens(
    client: httpx.Client, topic: str, headers: dict[str, str]
) -> None:
    body = {"content": b"x", "headers": {"content-type": "text/plain", **headers}}
    refused(client.post(f"{topic}/records", **body), 403, "forbidden")  # type: ignore[arg-type]
    refused(client.get("/v1/topics", headers=headers), 403, "forbidden")
    assert values_of(client, topic) == []
    own = {"origin": str(client.base_url), "host": "localhost:7878"}
    assert client.get("/v1/topics", headers=own).status_code == 200


def test_an_answer_carries_the_request_id(client: httpx.Client) -> None:
    assert client.get("/v1/health", headers={"x-request-id": "mine-1"}).headers["forebay-request-id"] == "mine-1"
    made_up = [
        client.get("/v1/health", headers={"x-request-id": bad}).headers["forebay-request-id"] for bad in ("", "a b")
    ]
    assert len(set(made_up)) == 2
    assert "a b" not in made_up


def test_a_compressed_body_counts_with_what_it_takes_in_memory(
    client: httpx.Client, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    append = Service.append

    async def look_and_append(service: Service, who: Principal, name: TopicName, records: AppendRecords) -> object:
        counted.append(service.quotas.counts().bytes)
        return await append(service, who, name, records)

    monkeypatch.setattr(Service, "append", look_and_append)
    body = json.dumps([{"value": "x" * 1_000_000}]).encode()
    sent = gzip.compress(body)
    fine(client.post(f"{topic}/records", content=sent, headers={"content-encoding": "gzip"}))
    assert counted == [len(body)]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_compressed_body_counts_before_it_is_decompressed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    """Else as many as there are threads, and all that wait for the loop, would be in memory without being counted."""
    body = json.dumps([{"value": "x" * 1_000_000}]).encode()
    sent = compress_body(body, encoding)
    room = 3 * len(body)
    settings = server_settings(bytes_in_flight_max=room, bytes_in_flight_per_principal_max=room, body_bytes_max=room)
    counted: list[int] = []
    decompress = decompress_body
    with running_broker(tmp_path / "data", settings) as broker, broker.client() as client:
        quotas = broker.process.broker.service.quotas

        def look(*given: Any) -> bytes:
            counted.append(quotas.counts().bytes)
            return decompress(*given)

        monkeypatch.setattr(records, "decompress_body", look)
        fine(client.put("/v1/topics/shop/t"))
        headers = {"content-encoding": encoding}
        fine(client.post("/v1/topics/shop/t/records", content=sent, headers=headers))
        assert counted == [len(body)]
        larger = compress_body(json.dumps([{"value": "x" * 4_000_000}]).encode(), encoding)
        answer = client.post("/v1/topics/shop/t/records", content=larger, headers=headers)
        assert answer.status_code in (413, 429), answer.text
        assert max(counted) <= room, "no more of it is made than is counted"


def test_a_body_that_holds_more_than_it_says_is_refused(client: httpx.Client, topic: str) -> None:
    sent = gzip.compress(json.dumps([{"value": "x" * 1_000_000}]).encode())
    lying = sent[:-4] + (100).to_bytes(4, "little")
    refused(client.post(f"{topic}/records", content=lying, headers={"content-encoding": "gzip"}), 400, "invalid")


@pytest.mark.parametrize(
    ("query", "headers"),
    [
        ({"producer": 0, "sequence": 0}, {}),
        ({"producer": 2**63, "sequence": 0}, {}),
        ({"producer": 2**63 + 2**62, "sequence": 0}, {}),
        ({"producer": 2**64, "sequence": 0}, {}),
        ({"producer": 1, "sequence": 2**63}, {}),
        ({"producer": 1, "sequence": -1}, {}),
        ({"producer": 1, "sequence": 5, "previous": -2}, {}),
        ({"producer": 1, "sequence": 5, "previous": 5}, {}),
        ({"producer": 2**63 - 1}, {}),
        ({"sequence": 0}, {}),
        ({"producer": 1, "sequence": 0}, {"idempotency-key": "k"}),
        ({}, {"idempotency-key": ""}),
        ({}, {"idempotency-key": "k" * 257}),
        ({"partition": 1}, {}),
        ({"partition": 2**31}, {}),
    ],
)
def test_numbers_that_a_client_may_not_use_are_refused_and_change_nothing(
    client: httpx.Client, topic: str, query: dict[str, int], headers: dict[str, str]
) -> None:
    refused(client.post(f"{topic}/records", json=[{"value": "a"}], params=query, headers=headers), 400, "invalid")
    assert values_of(client, topic) == []
    assert fine(client.get(f"{topic}/offsets"))["partitions"][0]["next"] == 0


@pytest.mark.parametrize(
    "options", [{"partitions": 0}, {"partitions": 10**9}, {"cap_records": 0}, {"ttl_ms": -1}, {"cap_bytes": 2**70}]
)
@pytest.mark.parametrize("exist_ok", [False, True])
def test_limits_that_no_topic_may_have_are_refused_also_for_one_that_is_there(
    client: httpx.Client,
    topic: str,
    options: dict[str, int],
    exist_ok: bool,  # noqa: FBT001
) -> None:
    before = fine(client.get(topic))
    refused(client.put(topic, json={**options, "exist_ok": exist_ok}), 400, "invalid")
    refused(client.put(f"{topic}-new", json={**options, "exist_ok": exist_ok}), 400, "invalid")
    refused(client.get(f"{topic}-new"), 404, "unknown_topic")
    assert fine(client.get(topic)) == before


# Stop


@pytest.mark.slow
def test_a_stop_during_the_recovery_ends_the_broker_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    begun, closing = threading.Event(), threading.Event()
    close = Storage.close

    def recover(self: Storage, on_progress: object) -> None:
        begun.set()
        assert closing.wait(60)
        raise Closed("this log was closed under its recovery")

    def close_later(self: Storage) -> None:
        closing.set()
        close(self)

    monkeypatch.setattr(Storage, "recover", recover)
    monkeypatch.setattr(Storage, "close", close_later)
    with running_broker(tmp_path / "data", ready=False) as broker, broker.client() as client:
        assert begun.wait(60)
        refused(client.get("/v1/topics"), 503, "not_ready")
    gc.collect()
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_a_topic_is_sealed_for_another_directory_as_often_as_it_is_asked_for(tmp_path: Path) -> None:
    tree = {"server": {"port": 0}, "storage": {"mode": "shared_fs"}, "store": {"root": str(tmp_path / "store")}}
    target = "ab" * 16
    with (
        running_broker(tmp_path / "data", Settings.load(None, tree, environment={})) as broker,
        broker.client() as client,
    ):
        topic = made(client)
        append(client, topic, "one", "two")

        sealed = [fine(client.post(f"{topic}/seal", json={"target": target}))["shards"] for _ in range(2)]
        refused = [client.post(f"{topic}/{verb}").json()["error"]["code"] for verb in ("seal", "export")]
        fine(client.post(f"{topic}/unseal"))
        append(client, topic, "three")

        assert sealed[0] == sealed[1]
        assert [(shard["phase"], shard["next"], shard["exported"], shard["target"]) for shard in sealed[0]] == [
            ("sealed", 2, 2, target)
        ]
        assert refused == ["moved", "moved"]


def test_messages_are_in_the_words_of_a_request(client: httpx.Client, topic: str) -> None:
    """They spoke of options of the command line, and of arguments of Python."""
    texts = [
        refused(client.get(f"{topic}/offset", params={"at": ""}), 400, "invalid")["message"],
        refused(client.get(f"{topic}/records", params={"start": "soon"}), 400, "invalid")["message"],
        refused(client.put(topic), 409, "conflict")["message"],
    ]
    assert texts[0].startswith("at is ''")
    assert texts[1].startswith("start is 'soon'")
    assert "exist_ok" in texts[2]
    assert not any("--" in text or "()" in text or "=True" in text for text in texts)
