"""Whether a running broker keeps the contract of the HTTP API: a black-box suite, for any broker behind a URL.

    with httpx.Client(base_url="http://127.0.0.1:7878") as client:
        for done in run_checks(client):
            print(done.name, done.failure or "ok")

Every check makes topics in a namespace of its own, and removes them. It looks at answers alone: the broker may be of
another version, behind a proxy, or of another make. `forebay conformance URL` runs it from the command line.
"""

from __future__ import annotations

import base64
import gzip
import itertools
import re
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import httpx
import msgspec
import pyarrow as pa

from forebay.clock import SystemClock
from forebay.wire.answers import decode_page_frames
from forebay.wire.bodies import encode_arrow
from forebay.wire.events import EventDecoder, ServerEvent

WAIT_SECONDS: Final = 30.0
"""How long a check waits for what must come soon."""
NAMESPACE_PREFIX: Final = "conformance-"
UNAUTHENTICATED: Final = 401
PIPELINED: Final = 100
"""Requests that are sent on one connection before the first is answered."""
LARGEST_BYTES: Final = 128 * 1024 * 1024
"""No frame is larger than half of it, whatever the settings."""
ERROR_FIELDS: Final = {"code", "message", "detail"}
_RECORDS: Final[list[dict[str, Any]]] = [
    {"value": "plain", "key": "k", "tag": "eu", "headers": {"trace": "a1"}, "timestamp": 1_935_903_600_000},
    {"value": "", "timestamp": 0},
    {"value": None, "key": "gone", "timestamp": 1},
    {"value_b64": base64.b64encode(b"\x00\xff\x80").decode(), "timestamp": 2},
    {"value": 'grüße \U0001f9ca \u2028 " \\ \x00', "headers": [["h", "1"], ["h", "2"]], "timestamp": 3},
]


class Nonconforming(Exception):
    """A broker answered otherwise than the contract says."""


class CheckedPromise(NamedTuple):
    """One check and its outcome."""

    name: str
    failure: str | None
    """What the broker did instead; `None` if the promise holds."""


class ConformanceProbe:
    """Asks one broker, and makes topics that are removed in the end. For one check; safe for its threads."""

    def __init__(self, client: httpx.Client) -> None:
        self.client = client
        self.namespace = NAMESPACE_PREFIX + SystemClock().random_bytes(6).hex()
        self._numbers = itertools.count()
        self._made: list[str] = []

    def topic(self, **options: Any) -> str:
        """The address of a new topic."""
        address = f"/v1/topics/{self.namespace}/t{next(self._numbers)}"
        self._made.append(address)
        self.ask("PUT", address, status=201, json=options)
        return address

    def remove_topics(self) -> None:
        """Delete what the check has made, as far as the broker lets it."""
        for address in self._made:
            self.client.delete(address)

    def ask(self, method: str, path: str, *, status: int = 200, **request: Any) -> Any:
        """The answer to a request as JSON, which must have this status."""
        answer = self.client.request(method, path, **request)
        if answer.status_code != status:
            raise Nonconforming(f"{method} {path} answered {answer.status_code}, not {status}: {answer.text[:300]}")
        return answer.json() if answer.content else None

    def do(self, method: str, path: str, **request: Any) -> None:
        """Make a request that must go well, whatever it answers."""
        answer = self.client.request(method, path, **request)
        if not answer.is_success:
            raise Nonconforming(f"{method} {path} answered {answer.status_code}: {answer.text[:300]}")

    def refuse(self, method: str, path: str, status: int, code: str, **request: Any) -> dict[str, Any]:
        """The error of a request that must be refused like this, in the one shape."""
        body = self.ask(method, path, status=status, **request)
        error = body.get("error") if isinstance(body, dict) and body.keys() == {"error"} else None
        if not isinstance(error, dict) or error.keys() != ERROR_FIELDS or not error["message"]:
            raise Nonconforming(f"the error of {method} {path} has another shape: {body}")
        same(f"the code of the error of {method} {path}", error["code"], code)
        return error

    def append(self, topic: str, values: Sequence[str], **query: Any) -> list[dict[str, int]]:
        """The ranges that these values got."""
        ranges: list[dict[str, int]] = self.ask(
            "POST", f"{topic}/records", params=query, json=[{"value": value} for value in values]
        )["ranges"]
        return ranges

    def read(self, topic: str, **query: Any) -> list[dict[str, Any]]:
        """All items of a partition from the start on, page by page; every page begins where the last one ended."""
        found: list[dict[str, Any]] = []
        query = {"start": "0", **query}
        while True:
            page = self.ask("GET", f"{topic}/records", params=query)
            found += page["records"]
            if page["caught_up"]:
                same("next of a page that has caught up", page["next"], page["head"])
                return found
            if page["next"] <= int(query["start"]):
                raise Nonconforming(f"a page at {query['start']} that has not caught up goes on at {page['next']}")
            query["start"] = str(page["next"])

    def values(self, topic: str, **query: Any) -> list[Any]:
        """The values of a partition."""
        return [item.get("value") for item in self.read(topic, **query)]


def same(what: str, found: object, wanted: object) -> None:
    """`Nonconforming` unless the two are equal."""
    if found != wanted:
        raise Nonconforming(f"{what}: {found!r:.400}, not {wanted!r:.400}")


def run_checks(client: httpx.Client) -> Iterator[CheckedPromise]:
    """Run every check, each by itself; its outcome as soon as there is one."""
    for check in CHECKS:
        name = check.__name__.removeprefix("check_").replace("_", " ")
        probe = ConformanceProbe(client)
        failure = None
        try:
            check(probe)
        except Nonconforming as error:
            failure = str(error)
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
            # An answer that is cut, no JSON, or without a field that the contract names.
            failure = f"{type(error).__name__}: {error}"
        finally:
            probe.remove_topics()
        yield CheckedPromise(name, failure)


# Checks


def check_the_broker_is_ready(probe: ConformanceProbe) -> None:
    ready = probe.ask("GET", "/v1/ready")
    same("ready", (ready["ready"], ready["replay_progress"]), (True, 1.0))
    probe.ask("GET", "/v1/health")


def check_the_document_names_the_routes(probe: ConformanceProbe) -> None:
    paths = probe.ask("GET", "/v1/openapi.json")["paths"]
    wanted = {"/v1/topics", "/v1/topics/{namespace}/{topic}/records", "/v1/watch", "/v1/ready"}
    same("routes that the document leaves out", sorted(wanted - paths.keys()), [])


def check_the_broker_shows_its_routes_and_measures_itself(probe: ConformanceProbe) -> None:
    page = probe.client.get("/docs")
    same("the page of all routes", (page.status_code, page.headers["content-type"][:9]), (200, "text/html"))
    metrics = probe.client.get("/metrics")
    same("the status of the metrics", metrics.status_code, 200)
    same("forebay_ready among the metrics", "forebay_ready 1.0" in metrics.text.splitlines(), True)


def check_a_call_without_a_token_is_refused_where_one_is_asked_for(probe: ConformanceProbe) -> None:
    def status(path: str, token: str | None) -> int:
        request = probe.client.build_request("GET", path)
        request.headers.pop("authorization", None)
        if token is not None:
            request.headers["authorization"] = f"Bearer {token}"
        answer = probe.client.send(request)
        if answer.status_code == UNAUTHENTICATED:
            same("the code of the refusal", answer.json()["error"]["code"], "unauthenticated")
            same("what the refusal asks for", answer.headers["www-authenticate"], "Bearer")
        return answer.status_code

    same("the health of the broker, asked without a token", status("/v1/health", None), 200)
    same("whether it is ready, asked without a token", status("/v1/ready", None), 200)
    if status("/v1/topics", None) == UNAUTHENTICATED:
        for path in ("/v1/topics", "/v1/groups", "/v1/status", "/metrics", "/v1/watch?topic=a/b", "/v1/topics/a/b"):
            same(f"{path} without a token", status(path, None), UNAUTHENTICATED)
            same(f"{path} with a token that there is not", status(path, "no-such-token"), UNAUTHENTICATED)


def check_topics_are_made_changed_listed_and_deleted(probe: ConformanceProbe) -> None:
    address = probe.topic(partitions=2, cap_records=100)
    name = address.removeprefix("/v1/topics/")
    shown = probe.ask("GET", address)
    same("the topic", (shown["name"], shown["partitions"], shown["cap_records"]), (name, 2, 100))
    probe.refuse("PUT", address, 409, "conflict", json={})
    probe.refuse("PUT", address, 409, "conflict", json={"partitions": 3, "exist_ok": True})
    same("the topic, if it may exist", probe.ask("PUT", address, json={"partitions": 2, "exist_ok": True}), shown)
    same("partitions", probe.ask("PATCH", address, json={"partitions": 3})["partitions"], 3)
    others = [probe.topic().removeprefix("/v1/topics/") for _ in range(2)]
    first = probe.ask("GET", "/v1/topics", params={"prefix": probe.namespace, "limit": 2})
    rest = probe.ask("GET", "/v1/topics", params={"prefix": probe.namespace, "after": first["after"]})
    listed = [each["name"] for each in (*first["topics"], *rest["topics"])]
    same("the list of topics", listed, sorted([name, *others]))
    probe.ask("DELETE", address, status=204)
    probe.refuse("GET", address, 404, "unknown_topic")


def check_a_topic_made_again_is_empty(probe: ConformanceProbe) -> None:
    topic = probe.topic()
    probe.append(topic, ["old"])
    probe.ask("DELETE", topic, status=204)
    probe.ask("PUT", topic, status=201)
    same("records of the new topic", probe.values(topic), [])
    same("the first offset", probe.append(topic, ["new"]), [{"partition": 0, "first": 0, "count": 1}])


def check_a_request_that_means_a_deleted_topic_is_refused(probe: ConformanceProbe) -> None:
    topic = probe.topic()
    name = topic.removeprefix("/v1/topics/")
    old = probe.ask("GET", topic)["topic_id"]
    meant = {"forebay-topic-id": old}
    probe.do("POST", f"{topic}/records", json=[{"value": "old"}], headers=meant)
    probe.do("DELETE", topic)
    probe.ask("PUT", topic, status=201, json={})
    commit = {"topic": name, "offset": 1}
    for method, path, request in (
        ("POST", f"{topic}/records", {"json": [{"value": "late"}]}),
        ("GET", f"{topic}/records", {}),
        ("GET", f"{topic}/offsets", {}),
        ("PUT", f"{topic}/subscriptions/s", {"json": {}}),
        ("POST", f"/v1/groups/{probe.namespace}/commit", {"json": commit}),
    ):
        probe.refuse(method, path, 404, "unknown_topic", headers=meant, **request)
    probe.append(topic, ["new"])
    same("what the new topic has", probe.values(topic), ["new"])


def check_records_are_read_as_they_were_sent(probe: ConformanceProbe) -> None:
    topic = probe.topic()
    ranges = probe.ask("POST", f"{topic}/records", json={"records": _RECORDS})["ranges"]
    same("the ranges", ranges, [{"partition": 0, "first": 0, "count": len(_RECORDS)}])
    for offset, (found, sent) in enumerate(zip(probe.read(topic), _RECORDS, strict=True)):
        same("the offset", (found["partition"], found["offset"]), (0, offset))
        same("the record", {name: found.get(name) for name in sent}, sent)


def check_every_format_of_a_body_is_taken(probe: ConformanceProbe) -> None:
    topic = probe.topic()
    lines = b'{"value": "b"}\n{"value": "c"}\n'
    sent = [
        ("application/json", b'[{"value": "a"}]', {}),
        ("application/x-ndjson", lines, {}),
        ("application/x-ndjson", gzip.compress(lines), {"content-encoding": "gzip"}),
        ("application/octet-stream", b"raw", {}),
    ]
    for media, content, headers in sent:
        probe.ask("POST", f"{topic}/records", content=content, headers={"content-type": media, **headers})
    same("the values", probe.values(topic), ["a", "b", "c", "b", "c", "raw"])
    answer = probe.client.get(f"{topic}/records", headers={"accept": "application/x-ndjson"})
    same("lines of an answer", len(answer.content.splitlines()), 6)
    same("Forebay-Next of an answer in lines", answer.headers["forebay-next"], "6")


def check_pages_follow_each_other_without_a_gap(probe: ConformanceProbe) -> None:
    topic = probe.topic()
    values = [f"v{number}" for number in range(25)]
    for begin in range(0, 25, 5):
        probe.append(topic, values[begin : begin + 5])
    items = probe.read(topic, records_max=4)
    same("the offsets", [item["offset"] for item in items], list(range(25)))
    same("the values", [item["value"] for item in items], values)
    page = probe.ask("GET", f"{topic}/records", params={"start": "7", "records_max": 3})
    found = (page["next"], page["head"], page["earliest"], page["caught_up"], len(page["records"]))
    same("next, head, earliest, caught_up and records of a page", found, (10, 25, 0, False, 3))
    same("records at the end", probe.values(topic, start="25"), [])
    probe.refuse("GET", f"{topic}/records", 400, "offset_out_of_range", params={"start": "26"})
    offsets = probe.ask("GET", f"{topic}/offsets")["partitions"][0]
    same("the watermarks", (offsets["earliest"], offsets["next"]), (0, 25))


def check_a_key_has_one_partition(probe: ConformanceProbe) -> None:
    topic = probe.topic(partitions=3)
    records = [{"value": f"{number}", "key": f"k{number % 7}"} for number in range(70)]
    ranges = probe.ask("POST", f"{topic}/records", json=records)["ranges"]
    same("records of all ranges", sum(each["count"] for each in ranges), 70)
    places: dict[str, set[int]] = {}
    found: list[int] = []
    for partition in range(3):
        items = probe.read(topic, partition=partition)
        same("the order in a partition", items, sorted(items, key=lambda item: int(item["value"])))
        for item in items:
            places.setdefault(item["key"], set()).add(partition)
            found.append(int(item["value"]))
    same("the values of all partitions", sorted(found), list(range(70)))
    same("keys in more than one partition", [key for key, at in places.items() if len(at) > 1], [])


def check_a_repeated_append_is_stored_once(probe: ConformanceProbe) -> None:
    topic = probe.topic()
    first = probe.append(topic, ["a"], producer=7, sequence=0)
    same("the ranges of a repeat", probe.append(topic, ["a"], producer=7, sequence=0), first)
    probe.append(topic, ["b"], producer=7, sequence=1)
    error = probe.refuse(
        "POST", f"{topic}/records", 409, "conflict", json=[{"value": "z"}], params={"producer": 7, "sequence": 9}
    )
    same("the sequence that a conflict expects", error["detail"]["expected"], 2)
    headers = {"idempotency-key": "order-1"}
    sent = [probe.ask("POST", f"{topic}/records", json=[{"value": "c"}], headers=headers) for _ in range(2)]
    same("the ranges of a repeated Idempotency-Key", sent[1], sent[0])
    same("the values", probe.values(topic), ["a", "b", "c"])


def check_a_repeat_with_other_records_is_refused(probe: ConformanceProbe) -> None:
    topic = probe.topic()
    record = {"value": "a", "key": "k", "tag": "t"}
    named: tuple[dict[str, Any], ...] = (
        {"params": {"producer": 7, "sequence": 0}},
        {"headers": {"idempotency-key": f"{probe.namespace}-other"}},
    )
    for request in named:
        probe.do("POST", f"{topic}/records", json=[record], **request)
        for other in ({"value": "b"}, {"key": "K"}, {"tag": "T"}, {"tag": None}):
            sent = [{**record, **other}]
            error = probe.refuse("POST", f"{topic}/records", 409, "conflict", json=sent, **request)
            same(f"the kind of the conflict of {request}", error["detail"].get("kind"), "other_records")
        probe.refuse("POST", f"{topic}/records", 409, "conflict", json=[record, record], **request)
    same("the values", probe.values(topic), ["a", "a"])


def check_a_producer_finds_how_far_it_has_come(probe: ConformanceProbe) -> None:
    topic = probe.topic()
    same("of a new producer", probe.ask("GET", f"{topic}/sequence", params={"producer": 7})["sequence"], None)
    for sequence in range(3):
        probe.append(topic, [f"{sequence}"], producer=7, sequence=sequence)
    same("the last sequence", probe.ask("GET", f"{topic}/sequence", params={"producer": 7})["sequence"], 2)


def check_appends_at_once_get_offsets_of_their_own(probe: ConformanceProbe) -> None:
    topic = probe.topic()

    def append(caller: int) -> list[tuple[int, str]]:
        values = [f"{caller}-{number}" for number in range(20)]
        return [(probe.append(topic, [value])[0]["first"], value) for value in values]

    with ThreadPoolExecutor(8) as pool:
        given = [each for found in pool.map(append, range(8)) for each in found]
    found = [(item["offset"], item["value"]) for item in probe.read(topic)]
    same("offsets and values that were acknowledged", sorted(given), found)
    for caller in range(8):
        own = [value for _, value in found if value.startswith(f"{caller}-")]
        same(f"the order of caller {caller}", own, [f"{caller}-{number}" for number in range(20)])


def check_a_read_waits_for_records(probe: ConformanceProbe) -> None:
    topic = probe.topic()
    same("a wait in vain", probe.values(topic, wait_ms=20), [])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(probe.values, topic, start="0", wait_ms=int(WAIT_SECONDS * 1000))
        probe.append(topic, ["late"])
        same("what a read waited for", waiting.result(2 * WAIT_SECONDS), ["late"])


def check_a_stream_resumes_where_it_was_left(probe: ConformanceProbe) -> None:
    topic = probe.topic()
    name = topic.removeprefix("/v1/topics/")
    probe.append(topic, ["a", "b"])
    query = {"topic": name, "start": "earliest"}
    decoder = EventDecoder()
    same("the first events", [event_value(event) for event in _events(probe, query, decoder, 2)], ["a", "b"])
    probe.append(topic, ["c"])
    resumed = EventDecoder(decoder.event_id)
    same("events behind Last-Event-ID", [event_value(each) for each in _events(probe, query, resumed, 1)], ["c"])


def _events(probe: ConformanceProbe, query: dict[str, Any], decoder: EventDecoder, count: int) -> list[ServerEvent]:
    """The first events of a stream, and the place behind them."""
    headers = {"last-event-id": decoder.event_id} if decoder.event_id else {}
    begun = decoder.event_id
    found: list[ServerEvent] = []
    with probe.client.stream("GET", "/v1/watch", params=query, headers=headers, timeout=WAIT_SECONDS) as answer:
        same("the status of a stream", answer.status_code, 200)
        for chunk in answer.iter_raw():
            found += decoder.feed(chunk)
            if len(found) >= count and decoder.event_id not in ("", begun):
                return found
    raise Nonconforming(f"the stream ended after {len(found)} events of {count}")


def event_value(event: ServerEvent) -> str:
    """The value of the record that an event carries."""
    same("the name of an event with a record", event.event, "message")
    value: str = httpx.Response(200, content=event.text).json()["value"]
    return value


def check_groups_keep_their_place(probe: ConformanceProbe) -> None:
    topic = probe.topic()
    name = topic.removeprefix("/v1/topics/")
    probe.append(topic, list("abcde"))
    group = f"/v1/groups/{probe.namespace}"
    where: dict[str, Any] = {"topic": name, "partition": 0}
    same("the place of a new group", probe.ask("GET", f"{group}/offset", params=where)["offset"], None)
    probe.ask("POST", f"{group}/commit", json={**where, "offset": 3})
    same("the place", probe.ask("GET", f"{group}/offset", params=where)["offset"], 3)
    same("whether it is listed", probe.namespace in probe.ask("GET", "/v1/groups")["groups"], True)
    place = probe.ask("GET", group)["places"][0]
    same("offset, end and lag", (place["offset"], place["end"], place["lag"]), (3, 5, 2))
    probe.refuse("POST", f"{group}/commit", 409, "conflict", json={**where, "offset": 4, "expected": 1})
    probe.ask("POST", f"{group}/reset", json={"topic": name, "to": "earliest"})
    same("the place after a reset", probe.ask("GET", f"{group}/offset", params=where)["offset"], 0)
    probe.ask("DELETE", group, status=204)
    same("places of a deleted group", probe.ask("GET", group)["places"], [])


def check_records_are_found_by_key_tag_and_time(probe: ConformanceProbe) -> None:
    topic = probe.topic()
    records = [
        {"value": f"{number}", "key": f"k{number % 3}", "tag": f"t{number % 2}", "timestamp": 1000 * (number + 1)}
        for number in range(9)
    ]
    probe.ask("POST", f"{topic}/records", json=records)
    same("the newest of a key", probe.values(topic, key="k1"), ["7"])
    same("all of a key", probe.values(topic, key="k1", history="true"), ["1", "4", "7"])
    same("all of a tag", probe.values(topic, tag="t0"), ["0", "2", "4", "6", "8"])
    same("the offset of a time", probe.ask("GET", f"{topic}/offset", params={"at": "4500ms"})["offset"], 4)


def check_deleted_records_are_gone(probe: ConformanceProbe) -> None:
    topic = probe.topic()
    records = [{"value": f"{number}", "key": f"k{number % 3}"} for number in range(9)]
    probe.ask("POST", f"{topic}/records", json=records)
    same("deleted by key", probe.ask("DELETE", f"{topic}/records", params={"key": "k0"})["records"], 3)
    probe.ask("DELETE", f"{topic}/records", params={"before": 5})
    left = [item["value"] for item in probe.read(topic, start="5") if "value" in item]
    same("the values that are left", left, ["5", "7", "8"])


def check_a_topic_is_made_durable_and_history(probe: ConformanceProbe) -> None:
    topic = probe.topic()
    name = topic.removeprefix("/v1/topics/")
    for value in "abc":
        probe.append(topic, [value])
        probe.do("POST", f"{topic}/rotate")
    probe.do("POST", f"{topic}/flush")
    probe.do("POST", f"{topic}/export")
    history = [(each["start"], each["end"]) for each in probe.ask("GET", f"{topic}/segments")["history"]]
    same("the ends of the history", (history[0][0], history[-1][1]), (0, 3))
    same("where pieces of the history end", [end for _, end in history[:-1]], [start for start, _ in history[1:]])
    (partition,) = probe.ask("GET", f"{topic}/status")["partitions"]
    offsets = partition["offsets"]
    found = (partition["failure"], offsets["next"], offsets["durable"], offsets["exported"])
    same("failure, next, durable and exported of the partition", found, (None, 3, 3, 3))
    shown = [each["topic"] for each in probe.ask("GET", "/v1/status")["partitions"]]
    same("whether the broker shows the partition", name in shown, True)
    (shard,) = probe.ask("GET", f"{topic}/shards")["shards"]
    same("phase and exported of the partition", (shard["phase"], shard["exported"]), ("open", 3))
    used = probe.ask("GET", "/v1/usage", params={"topic": name})["usage"]
    same("whether the topic takes bytes", sum(each["bytes"] for each in used) > 0, True)
    same("the values", probe.values(topic), ["a", "b", "c"])


def check_limits_are_applied_on_demand(probe: ConformanceProbe) -> None:
    topic = probe.topic(cleanup="compact", compact_lag_ms=0)
    probe.ask("POST", f"{topic}/records", json=[{"value": f"{number}", "key": "k"} for number in range(5)])
    probe.do("POST", f"{topic}/rotate")
    probe.do("POST", f"{topic}/retain")
    same("the values that are left", [item["value"] for item in probe.read(topic) if "value" in item], ["4"])


def check_a_sealed_topic_takes_no_records_until_it_is_taken_back(probe: ConformanceProbe) -> None:
    topic = probe.topic()
    probe.append(topic, ["a"])
    probe.do("POST", f"{topic}/seal")
    refused = probe.client.post(f"{topic}/records", json=[{"value": "b"}])
    same("whether a sealed topic refuses records", refused.is_error, True)
    same("the values of a sealed topic", probe.values(topic), ["a"])
    probe.do("POST", f"{topic}/unseal")
    same("the offset behind the seal", probe.append(topic, ["c"])[0]["first"], 1)
    same("the values", probe.values(topic), ["a", "c"])


def check_a_load_comes_in_everywhere_or_nowhere(probe: ConformanceProbe) -> None:
    topic = probe.topic(partitions=2)
    # Ids of loads are those of the whole broker.
    first, second = f"{topic}/loads/{probe.namespace}-1", f"{topic}/loads/{probe.namespace}-2"
    for load, values in ((first, "ab"), (second, "cd")):
        generation = probe.ask("GET", f"{load}/target")["generation"]
        segments = [
            probe.ask(
                "POST",
                f"{load}/segments",
                status=201,
                params={"partition": partition},
                content=encode_arrow([pa.record_batch({"value": [value.encode()]})]),
                headers={"content-type": "application/vnd.apache.arrow.stream"},
            )
            for partition, value in enumerate(values)
        ]
        probe.do("PUT", load, json={"segments": segments, "generation": generation})
        if load == first:
            probe.do("POST", f"{load}/attach", params={"wait_ms": int(WAIT_SECONDS * 1000)})
        else:
            ended = probe.client.post(f"{load}/abandon")
            same("how a load is given up", ended.status_code in (200, 409), True)
    status = probe.ask("GET", first, params={"wait_ms": int(WAIT_SECONDS * 1000)})["status"]
    same("the status of a load that was attached", status, "committed")
    listed = {each["status"] for each in probe.ask("GET", f"{topic}/loads")["loads"]}
    items = [probe.read(topic, partition=partition) for partition in range(2)]
    found = [[item["value"] for item in read if "value" in item] for read in items]  # A load given up may leave a gap.
    wanted = [["a", "c"], ["b", "d"]] if listed == {"committed"} else [["a"], ["b"]]
    same("the values of both partitions", found, wanted)


def check_a_backfill_stands_for_its_rows(probe: ConformanceProbe) -> None:
    backfill = f"{probe.topic()}/backfills/old-orders"
    same("the plan of a backfill before it began", probe.ask("GET", backfill).get("plan"), None)
    plan = {"fingerprint": "of these rows", "loads": 2}
    for _ in range(2):
        begun = probe.ask("PUT", backfill, json=plan)
        same("what a backfill brings, and what the topic has of it", (begun["plan"], begun["done"]), (plan, 0))
    probe.refuse("PUT", backfill, 409, "conflict", json={**plan, "fingerprint": "of others"})
    same("how far the backfill is", probe.ask("GET", backfill), begun)


def check_a_subscription_delivers_until_records_are_acknowledged(probe: ConformanceProbe) -> None:
    topic = probe.topic(partitions=2)
    probe.append(topic, ["a", "b", "c"], partition=1)
    subscription = f"{topic}/subscriptions/billing"
    probe.refuse("GET", subscription, 404, "unknown_subscription")
    probe.ask("PUT", subscription, json={"mode": "shared", "start": "earliest", "backoff_min_ms": 0})
    probe.refuse("PUT", subscription, 409, "conflict", json={"mode": "exclusive"})
    same("the subscriptions", _names(probe, topic), ["billing"])
    consumer = f"{subscription}/consumers/one"
    probe.refuse("POST", f"{consumer}/pull", 404, "unknown_consumer")
    for _ in range(2):
        same("the consumer", probe.ask("PUT", consumer, json={"name": "n"})["consumer"], "one")
    same("the consumers", probe.ask("GET", f"{subscription}/consumers")["consumers"], ["n"])
    pull: dict[str, Any] = {"max": 2, "sequence": 1, "wait_ms": int(WAIT_SECONDS * 1000)}
    for _ in range(2):
        same("the records of a pull, and of its repeat", _pulled(probe, consumer, pull), [("a", 1), ("b", 1)])
    same("the answer to a nack", probe.ask("POST", f"{consumer}/nack", json={"offsets": {"1": [1]}})["counted"], 1)
    pull = {"ack": {"1": [0]}, "wait_ms": int(WAIT_SECONDS * 1000)}
    same("what is not acknowledged", _pulled(probe, consumer, pull), [("b", 2), ("c", 1)])
    lag = [
        (each["cursor"], each["lag"], each["held"]) for each in probe.ask("GET", f"{subscription}/lag")["partitions"]
    ]
    same("cursor, lag and held of the partitions", lag, [(0, 0, 0), (1, 2, 2)])
    same(
        "what is not done", [each["value"] for each in probe.ask("GET", f"{subscription}/peek")["records"]], ["b", "c"]
    )
    probe.refuse("DELETE", subscription, 409, "conflict")
    probe.do("DELETE", consumer)
    probe.do("DELETE", consumer)
    probe.ask("PUT", consumer)
    same("what the consumer held that left", _pulled(probe, consumer, {"max": 1}), [("b", 3)])
    acked = probe.ask("POST", f"{consumer}/ack", json={"offsets": {"1": [1]}})["counted"]
    same("the answer to an ack", (acked, _pulled(probe, consumer, {"ack": {"1": [1]}})), (1, [("c", 2)]))
    probe.do("DELETE", consumer)
    probe.do("DELETE", subscription)
    same("the subscriptions", _names(probe, topic), [])


def check_a_subscription_is_paused_moved_and_streamed(probe: ConformanceProbe) -> None:
    topic = probe.topic()
    subscription = f"{topic}/subscriptions/billing"
    made = probe.ask("PUT", subscription)
    probe.append(topic, ["a", "b"])
    consumer = f"{subscription}/consumers/one"
    same("whether it is paused", probe.ask("POST", f"{subscription}/pause")["is_paused"], True)
    probe.ask("PUT", consumer)
    same("what a paused subscription delivers", _pulled(probe, consumer, {}), [])
    probe.refuse("POST", f"{subscription}/seek", 409, "conflict", json={"to": "earliest"})
    same("whether it is paused", probe.ask("POST", f"{subscription}/resume")["is_paused"], False)
    with probe.client.stream("GET", f"{consumer}/stream") as answer:
        decoder = EventDecoder()
        texts = (event.text for chunk in answer.iter_raw() for event in decoder.feed(chunk))
        values = [msgspec.json.decode(text)["record"]["value"] for text in itertools.islice(texts, 2)]
    same("the values of the stream", values, ["a", "b"])
    same("the answer to an ack of all", probe.ask("POST", f"{consumer}/ack", json={"up_to": {"0": 1}})["counted"], 2)
    probe.do("DELETE", consumer)
    probe.do("POST", f"{subscription}/flush")
    same("where it stands", probe.ask("POST", f"{subscription}/seek", json={"to": {"0": "1"}})["offsets"], {"0": 1})
    shown = probe.ask("GET", subscription, params={"id": made["subscription_id"]})
    same("the subscription", shown, made)
    altered = probe.ask("PATCH", subscription, json={"ack_timeout_ms": 60_000})
    same("the altered subscription", altered, {**made, "ack_timeout_ms": 60_000})
    same("the subscription", probe.ask("GET", subscription), altered)
    probe.refuse("GET", subscription, 409, "conflict", params={"id": "0" * 32})


def check_a_spent_record_is_a_dead_letter_that_is_replayed_or_purged(probe: ConformanceProbe) -> None:
    topic, dead = probe.topic(), probe.topic()
    probe.append(topic, ["a", "b", "c"])
    names = [address.removeprefix("/v1/topics/") for address in (topic, dead)]
    subscription = f"{topic}/subscriptions/billing"
    options = {"start": "earliest", "deliveries_max": 1, "on_spent": "dead_letter", "dead_letter_topic": names[1]}
    probe.ask("PUT", subscription, json=options)
    consumer = f"{subscription}/consumers/one"
    probe.ask("PUT", consumer)
    same("the records", _pulled(probe, consumer, {}), [("a", 1), ("b", 1), ("c", 1)])
    same("what is left", _pulled(probe, consumer, {"ack": {"0": [2]}, "nack": {"0": [0, 1]}, "error": "no"}), [])
    found = probe.ask("GET", f"{dead}/deadletters", params={"origin": names[0], "subscription": "billing"})["letters"]
    seen = [(each["record"]["value"], each["topic"], each["attempts"], each["reason"], each["error"]) for each in found]
    same("the dead letters", seen, [(value, names[0], 1, "nack", "no") for value in "ab"])
    first, second = ({"partition": each["partition"], "offset": each["offset"]} for each in found)
    same("one of them", probe.ask("GET", f"{dead}/deadletters/letter", params=second), found[1])
    replayed = probe.ask("POST", f"{dead}/deadletters/replay", json={"places": [first]})["letters"]
    same("replayed, and what comes again", (replayed, _pulled(probe, consumer, {})), (1, [("a", 1)]))
    same("what is purged", probe.ask("POST", f"{dead}/deadletters/purge")["letters"], 1)
    same("the dead letters", probe.ask("GET", f"{dead}/deadletters")["letters"], [])


def _names(probe: ConformanceProbe, topic: str) -> list[str]:
    return [each["name"] for each in probe.ask("GET", f"{topic}/subscriptions")["subscriptions"]]


def _pulled(probe: ConformanceProbe, consumer: str, pull: dict[str, Any]) -> list[tuple[str, int]]:
    """Value and attempt of each record that a pull brings."""
    found = probe.ask("POST", f"{consumer}/pull", json=pull)["records"]
    return [(each["record"]["value"], each["attempt"]) for each in found]


def check_a_topic_is_copied_once(probe: ConformanceProbe) -> None:
    source, target = probe.topic(), probe.topic()
    probe.append(source, ["a", "b"])
    for count in (2, 0):
        copied = probe.ask("POST", f"{source}/copy", json={"target": target.removeprefix("/v1/topics/")})
        found = (copied["copied"], copied["source"], copied["target"])
        same("records copied now, in the source and in the target", found, (count, 2, 2))
    same("the values of the copy", probe.values(target), ["a", "b"])


def check_routers_move_records_until_they_are_paused(probe: ConformanceProbe) -> None:
    source, target = probe.topic(), probe.topic()
    name = f"/v1/routers/{probe.namespace}"
    names = [topic.removeprefix("/v1/topics/") for topic in (source, target)]
    put = {"sources": names[:1], "destination": names[1], "rule": {"set_headers": {"via": "r"}}}
    made = probe.ask("PUT", name, status=201, json=put)
    try:
        same("the definition of a router", (made["destination"], made["rule"]["set_headers"]), (names[1], {"via": "r"}))
        probe.append(source, ["a"])
        page = probe.ask("GET", f"{target}/records", params={"start": "0", "wait_ms": int(WAIT_SECONDS * 1000)})
        same("what a router has moved", [item["headers"] for item in page["records"]], [{"via": "r"}])
        same("whether it is paused", probe.ask("POST", f"{name}/pause")["is_paused"], wanted=True)
        same("the state of one that is paused", probe.ask("GET", name)["state"], "paused")
        same("the tags of its new rule", probe.ask("PUT", f"{name}/rule", json={"tags": ["x"]})["rule"]["tags"], ["x"])
        same("whether it is paused", probe.ask("POST", f"{name}/resume")["is_paused"], wanted=False)
        listed = probe.ask("GET", "/v1/routers", params={"limit": 10_000})["routers"]
        same("whether it is listed", probe.namespace in [item["router"]["name"] for item in listed], wanted=True)
        back = {"sources": names[1:], "destination": names[0]}
        probe.refuse("PUT", f"{name}-back", 400, "invalid", json=back)
        probe.refuse("PUT", name, 409, "conflict", json=put)
    finally:
        probe.client.delete(name)
    probe.refuse("GET", name, 404, "unknown_router")


def check_wrong_requests_are_refused_in_one_shape(probe: ConformanceProbe) -> None:
    topic = probe.topic()
    records = f"{topic}/records"
    probe.refuse("GET", "/v1/nothing", 404, "no_route")
    probe.refuse("TRACE", topic, 405, "no_method")
    probe.refuse("GET", f"/v1/topics/{probe.namespace}/unknown", 404, "unknown_topic")
    probe.refuse("GET", "/v1/topics", 400, "invalid", params={"limit": "0"})
    probe.refuse("GET", "/v1/topics", 400, "invalid", params={"unknown": "1"})
    for content in (b"{", b"NaN", b'[{"value": NaN}]', b'[{"value": "\\ud800"}]', b'[{"unknown": 1}]', b"\xff"):
        probe.refuse("POST", records, 400, "invalid", content=content)
    probe.refuse("POST", records, 400, "invalid", json=[{"value": "a"}], params={"partition": 9})
    beyond = probe.refuse("GET", records, 400, "offset_out_of_range", params={"start": "7"})["detail"]
    same("the range of offsets", (beyond["offset"], beyond["earliest"], beyond["next"]), (7, 0, 0))
    probe.refuse("GET", records, 406, "not_acceptable", headers={"accept": "text/html, application/json;q=0"})
    same("records of requests that were refused", probe.values(topic), [])


def check_an_erased_key_is_gone_and_what_remains_is_named(probe: ConformanceProbe) -> None:
    topic = probe.topic()
    records = [{"value": f"{key}{number}", "key": key} for number in range(3) for key in ("a", "b")]
    probe.do("POST", f"{topic}/records", json=records)
    erased = probe.ask("POST", f"{topic}/erase", json={"key": "a"})
    same("how many records were deleted", erased["deleted"], 3)
    same("the records of the erased key", probe.ask("GET", f"{topic}/records", params={"key": "a"})["records"], [])
    same("the values that are left", probe.values(topic), ["b0", "b1", "b2"])
    again = probe.ask("POST", f"{topic}/erase", json={"key": "a"})
    same("what a second request deletes", again["deleted"], 0)
    same("whether what remains is named again", bool(again["remains"]), bool(erased["remains"]))


def check_a_partition_that_is_served_is_not_taken_over_again(probe: ConformanceProbe) -> None:
    topic = probe.topic()
    probe.append(topic, ["a"])
    shards = probe.ask("POST", f"{topic}/take-over", json={"partition": 0})["shards"]
    same("the partitions of the topic", [shard["partition"] for shard in shards], [0])
    same("the records", probe.values(topic), ["a"])
    same("the next offset", probe.append(topic, ["b"]), [{"partition": 0, "first": 1, "count": 1}])


def check_a_key_is_found_without_its_partition(probe: ConformanceProbe) -> None:
    topic = probe.topic(partitions=4)
    keys = [f"key-{number}" for number in range(8)]
    probe.do("POST", f"{topic}/records", json=[{"value": f"of {key}", "key": key, "tag": "t"} for key in keys])

    def found() -> list[list[Any]]:
        pages = [probe.ask("GET", f"{topic}/records", params={"key": key}) for key in keys]
        return [[record["value"] for record in page["records"]] for page in pages]

    same("the records of each key", found(), [[f"of {key}"] for key in keys])
    probe.ask("PATCH", topic, json={"partitions": 8})
    same("the records of each key, once partitions were added", found(), [[f"of {key}"] for key in keys])
    probe.refuse("GET", f"{topic}/records", 400, "invalid", params={"tag": "t"})


def check_a_record_goes_to_the_partition_that_it_names(probe: ConformanceProbe) -> None:
    topic = probe.topic(partitions=4)
    records = [{"value": "a", "partition": 3}, {"value": "b", "key": "k", "partition": 1}]
    probe.do("POST", f"{topic}/records", json=records)
    same("the values by partition", [probe.values(topic, partition=n) for n in range(4)], [[], ["b"], [], ["a"]])
    probe.refuse("POST", f"{topic}/records", 400, "invalid", json=[{"value": "x", "partition": 99}])
    probe.refuse(
        "POST", f"{topic}/records", 400, "invalid", json=[{"value": "x", "partition": 1}], params={"partition": 2}
    )
    lines = '{"value": "c", "partition": 2}\n'
    headers = {"content-type": "application/x-ndjson"}
    probe.do("POST", f"{topic}/records", content=lines.encode(), headers=headers)
    same("the values of partition 2", probe.values(topic, partition=2), ["c"])


def check_a_topic_that_is_named_in_two_ways_is_watched_once(probe: ConformanceProbe) -> None:
    topic = probe.topic()
    name = topic.removeprefix("/v1/topics/")
    probe.append(topic, ["a", "b", "c"])
    query = {"topic": [name, f"/{name}"], "start": "earliest"}
    decoder, found = EventDecoder(), list[ServerEvent]()
    with probe.client.stream("GET", "/v1/watch", params=query, timeout=WAIT_SECONDS) as answer:
        for chunk in answer.iter_raw():
            found += [event for event in decoder.feed(chunk) if event.text]
            if len(found) >= 3:
                break
    same("the values that are watched", [event_value(event) for event in found], ["a", "b", "c"])


def check_a_watch_goes_on_when_one_of_its_topics_is_deleted(probe: ConformanceProbe) -> None:
    kept, gone = probe.topic(), probe.topic()
    names = [topic.removeprefix("/v1/topics/") for topic in (kept, gone)]
    decoder, found = EventDecoder(), list[ServerEvent]()
    with probe.client.stream("GET", "/v1/watch", params={"topic": names}, timeout=WAIT_SECONDS) as answer:
        for chunk in answer.iter_raw():
            if not decoder.event_id:
                probe.ask("DELETE", gone, status=204)
            found += decoder.feed(chunk)
            if [event.event for event in found] == ["error"]:
                probe.append(kept, ["a"])
            if len(found) > 1:
                break
    same("events of a watch of which a topic is deleted", [event.event for event in found], ["error", "message"])
    error = httpx.Response(200, content=found[0].text).json()["error"]
    same("the topic that was deleted", (error["code"], error["detail"]["topic"]), ("unknown_topic", names[1]))
    same("what comes behind it", event_value(found[1]), "a")
    probe.append(kept, ["b"])
    # The id is that of a place before the record: it may come once more, and none is left out.
    for listed in (names, names[:1]):
        resumed = _events(probe, {"topic": listed}, EventDecoder(decoder.event_id), len(listed))
        same("what a resumed watch goes on with", event_value(resumed[-1]) in ("a", "b"), True)
    probe.refuse("GET", "/v1/watch", 404, "unknown_topic", params={"topic": names})


def check_topics_to_watch_are_named_in_a_body_too(probe: ConformanceProbe) -> None:
    topics = [probe.topic(), probe.topic()]
    for topic in topics:
        probe.append(topic, [topic])
    watched = {"topics": [topic.removeprefix("/v1/topics/") for topic in topics], "start": "earliest"}
    decoder, found = EventDecoder(), list[ServerEvent]()
    with probe.client.stream("POST", "/v1/watch", json=watched, timeout=WAIT_SECONDS) as answer:
        same("the status of a stream", answer.status_code, 200)
        for chunk in answer.iter_raw():
            found += decoder.feed(chunk)
            if len(found) >= len(topics):
                break
    same("the values that are watched", sorted(map(event_value, found)), sorted(topics))


def check_requests_sent_without_waiting_are_all_answered(probe: ConformanceProbe) -> None:
    topic = probe.topic()
    base = probe.client.base_url
    if base.scheme != "http":
        # Through TLS the same server reads the same requests.
        return
    headers = {"host": base.netloc.decode(), "content-type": "application/octet-stream", "content-length": "1"}
    if "authorization" in probe.client.headers:
        headers["authorization"] = probe.client.headers["authorization"]
    lines = [f"POST {topic}/records HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", "x"]
    with socket.create_connection((base.host, base.port or 80), timeout=WAIT_SECONDS) as connection:
        connection.sendall("\r\n".join(lines).encode() * PIPELINED)
        answers = connection.makefile("rb")
        statuses = 0
        while statuses < PIPELINED and (line := answers.readline()):
            # Behind the body of the answer before it, which has no such text.
            statuses += b"HTTP/1.1 200" in line
    same("answers to requests that were sent at once", statuses, PIPELINED)
    same("records that they appended", len(probe.read(topic)), PIPELINED)


def check_what_no_append_may_bring_is_too_large(probe: ConformanceProbe) -> None:
    topic = probe.topic()
    size = 1024 * 1024
    while size <= LARGEST_BYTES:
        answer = probe.client.post(
            f"{topic}/records", content=bytes(size), headers={"content-type": "application/octet-stream"}
        )
        if not answer.is_success:
            error = answer.json()["error"]
            same("the refusal of a large record", (answer.status_code, error["code"]), (413, "too_large"))
            same("whether the refusal names the limit", error["detail"]["limit"] <= size, True)
            return
        size *= 2
    raise Nonconforming(f"a record of {size // 2} bytes was taken, and no limit was found")


def check_numbers_are_integers_however_they_are_written(probe: ConformanceProbe) -> None:
    topic = probe.topic()
    probe.do("POST", f"{topic}/records", content=b'[{"value": "a", "timestamp": 169073830.0, "partition": 0.0}]')
    lines = {"content-type": "application/x-ndjson"}
    probe.do("POST", f"{topic}/records", content=b'{"value": "b", "timestamp": 1.69e2}\n', headers=lines)
    same("the times of the records", [item["timestamp"] for item in probe.read(topic)], [169073830, 169])
    probe.do("PATCH", topic, content=b'{"cap_records": 100.0}')
    probe.refuse("PATCH", topic, 400, "invalid", content=b'{"cap_records": 100.5}')


def check_a_read_is_answered_as_its_caller_likes_best(probe: ConformanceProbe) -> None:
    topic = probe.topic()
    for accept, wanted in (
        ("application/json;q=0.5, application/x-ndjson;q=0.9", "application/x-ndjson"),
        ("text/html, */*;q=0.1", "application/json"),
        ("application/json;q=0, application/*", "application/x-ndjson"),
    ):
        answer = probe.client.get(f"{topic}/records", headers={"accept": accept})
        same(f"the type of an answer to {accept}", answer.headers["content-type"], wanted)


def check_a_repeat_is_known_after_partitions_were_added(probe: ConformanceProbe) -> None:
    topic = probe.topic(partitions=4)

    def send(name: str) -> Any:
        records, headers = [{"value": name, "key": name}], {"idempotency-key": f"{probe.namespace}-{name}"}
        return probe.ask("POST", f"{topic}/records", json=records, headers=headers)

    first = [send(name) for name in "abcdefgh"]
    probe.ask("PATCH", topic, json={"partitions": 8})
    same("the answers to repeats", [send(name) for name in "abcdefgh"], first)
    stored = sorted(value for number in range(8) for value in probe.values(topic, partition=number))
    same("what is stored", stored, list("abcdefgh"))


def check_lag_ends_at_what_can_be_read(probe: ConformanceProbe) -> None:
    for durability in ("disk", "memory"):
        topic = probe.topic(durability=durability)
        name = topic.removeprefix("/v1/topics/")
        probe.append(topic, ["a"] * 10)
        page = probe.ask("GET", f"{topic}/records")
        offsets = probe.ask("GET", f"{topic}/offsets")["partitions"][0]
        same(f"next of the offsets and of the page ({durability})", offsets["next"], page["next"])
        group = f"{probe.namespace}-{durability}"
        commit = {"topic": name, "offset": page["next"]}
        probe.do("POST", f"/v1/groups/{group}/commit", json=commit)
        places = probe.ask("GET", f"/v1/groups/{group}")["places"]
        same(f"the lag of a group that has read all ({durability})", [place["lag"] for place in places], [0])
        probe.do("DELETE", f"/v1/groups/{group}")


def check_the_lag_of_a_subscription_is_measured_before_a_consumer_comes(probe: ConformanceProbe) -> None:
    topic = probe.topic()
    probe.do("PUT", f"{topic}/subscriptions/s", json={"start": "earliest"})
    probe.append(topic, ["a"] * 1000)

    def total() -> float:
        lines = probe.client.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith("forebay_subscription_lag"))

    for _ in range(int(WAIT_SECONDS)):
        if total() >= 1000:
            return
        # A moment: the broker may look at cursors every few seconds only.
        probe.ask("GET", f"{topic}/records", params={"start": "latest", "wait_ms": 1000})
    raise Nonconforming(f"forebay_subscription_lag is {total()} in all, and 1000 records wait for one subscription")


def check_a_plan_leads_to_every_stored_byte(probe: ConformanceProbe) -> None:
    topic = probe.topic()
    probe.append(topic, ["a", "b"])
    probe.do("POST", f"{topic}/export")
    probe.append(topic, ["c"])
    plan = probe.ask("GET", f"{topic}/plan")
    (partition,) = plan["partitions"]
    history, log = partition["history"], partition["log"]
    same("offsets in history and in the log", ([p[:2] for p in history], [p[:2] for p in log]), ([[0, 2]], [[2, 3]]))
    again = probe.ask("GET", f"{topic}/plan", params={"known": plan["edition"]})
    same("whether history that is known is sent again", "history" in again["partitions"][0], False)
    topic_id = plan["topic"]["topic_id"]
    page = probe.client.get(f"{topic}/stored", params={"start": 2, "topic_id": topic_id})
    same("the status of a stored page", page.status_code, 200)
    same("where a stored page ends", decode_page_frames(page.content).marks.next, 3)
    descriptor = history[0][3]
    where = {"store": descriptor["store"], "key": descriptor["object_key"], "topic_id": topic_id, "partition": 0}
    read = probe.client.get(f"{topic}/object", params={**where, "start": 0, "stop": descriptor["bytes"]})
    same("the status and bytes of an object", (read.status_code, len(read.content)), (200, descriptor["bytes"]))
    probe.refuse("GET", f"{topic}/stored", 409, "conflict", params={"start": 0, "topic_id": "another"})


def check_a_parameter_that_a_route_does_not_have_is_refused(probe: ConformanceProbe) -> None:
    """Of every route of the document: a name that is misspelt must not be passed over without a word."""
    topic = probe.topic()
    probe.append(topic, ["a"])
    for path, methods in probe.ask("GET", "/v1/openapi.json")["paths"].items():
        at = path.replace("/v1/topics/{namespace}/{topic}", topic)
        for method in methods:
            filled = re.sub(r"\{\w+\}", "none", at)
            refusal = probe.refuse(method.upper(), filled, 400, "invalid", params={"is_misspelt": "1"})
            same(f"whether {method} {path} names what it refuses", "is_misspelt" in refusal["message"], True)
    same("what is left after all that was refused", probe.values(topic), ["a"])


CHECKS: Final[tuple[Callable[[ConformanceProbe], None], ...]] = (
    check_the_broker_is_ready,
    check_the_document_names_the_routes,
    check_the_broker_shows_its_routes_and_measures_itself,
    check_a_call_without_a_token_is_refused_where_one_is_asked_for,
    check_topics_are_made_changed_listed_and_deleted,
    check_a_topic_made_again_is_empty,
    check_a_request_that_means_a_deleted_topic_is_refused,
    check_records_are_read_as_they_were_sent,
    check_every_format_of_a_body_is_taken,
    check_pages_follow_each_other_without_a_gap,
    check_a_key_has_one_partition,
    check_a_repeated_append_is_stored_once,
    check_a_repeat_with_other_records_is_refused,
    check_a_producer_finds_how_far_it_has_come,
    check_appends_at_once_get_offsets_of_their_own,
    check_a_read_waits_for_records,
    check_a_stream_resumes_where_it_was_left,
    check_groups_keep_their_place,
    check_records_are_found_by_key_tag_and_time,
    check_deleted_records_are_gone,
    check_a_topic_is_made_durable_and_history,
    check_limits_are_applied_on_demand,
    check_a_sealed_topic_takes_no_records_until_it_is_taken_back,
    check_a_load_comes_in_everywhere_or_nowhere,
    check_a_backfill_stands_for_its_rows,
    check_a_subscription_delivers_until_records_are_acknowledged,
    check_a_subscription_is_paused_moved_and_streamed,
    check_a_spent_record_is_a_dead_letter_that_is_replayed_or_purged,
    check_a_topic_is_copied_once,
    check_routers_move_records_until_they_are_paused,
    check_wrong_requests_are_refused_in_one_shape,
    check_a_plan_leads_to_every_stored_byte,
    check_an_erased_key_is_gone_and_what_remains_is_named,
    check_a_partition_that_is_served_is_not_taken_over_again,
    check_a_key_is_found_without_its_partition,
    check_a_record_goes_to_the_partition_that_it_names,
    check_a_topic_that_is_named_in_two_ways_is_watched_once,
    check_a_repeat_is_known_after_partitions_were_added,
    check_lag_ends_at_what_can_be_read,
    check_the_lag_of_a_subscription_is_measured_before_a_consumer_comes,
    check_a_watch_goes_on_when_one_of_its_topics_is_deleted,
    check_topics_to_watch_are_named_in_a_body_too,
    check_requests_sent_without_waiting_are_all_answered,
    check_what_no_append_may_bring_is_too_large,
    check_numbers_are_integers_however_they_are_written,
    check_a_read_is_answered_as_its_caller_likes_best,
    check_a_parameter_that_a_route_does_not_have_is_refused,
)
"""In the order in which they run: the simple promises first."""
