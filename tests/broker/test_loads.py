"""Bulk loads over HTTP: staged, offered, watched, attached, given up; hostile offers are refused."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pyarrow as pa
import pytest

import forebay
from forebay.clock import SystemClock
from forebay.format.columns.rows import encode_rows
from forebay.loads.prepare import LoadPlace, segment_of, write_segment
from forebay.loads.service import Loads
from forebay.settings import Settings
from forebay.wire import bodies
from tests.support.brokers import BrokerCommand, RunningBroker, running_broker, server_settings

LOAD = "/v1/topics/shop/orders/loads/one"
ARROW = {"content-type": "application/vnd.apache.arrow.stream"}


def rows(*values: bytes) -> bytes:
    batch = pa.RecordBatch.from_pydict({"value": list(values)}, schema=pa.schema([("value", pa.binary())]))
    return bodies.encode_arrow([batch])


@pytest.fixture(params=["local", "shared_fs"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    if request.param == "local":
        return server_settings(body_bytes_max=1024 * 1024)
    tree = {
        "server": {"port": 0, "body_bytes_max": 1024 * 1024},
        "storage": {"mode": "shared_fs"},
        "store": {"root": str(tmp_path / "store")},
    }
    return Settings.load(None, tree, environment={})


@pytest.fixture
def broker(tmp_path: Path, settings: Settings) -> Iterator[RunningBroker]:
    with running_broker(tmp_path / "data", settings) as broker:
        yield broker


@pytest.fixture
def client(broker: RunningBroker) -> Iterator[httpx.Client]:
    with broker.client() as client:
        assert client.put("/v1/topics/shop/orders", json={"partitions": 2}).status_code == 201
        yield client


def staged(client: httpx.Client, load: str = LOAD) -> list[dict[str, Any]]:
    segments = []
    for partition, values in ((0, (b"a", b"b")), (1, (b"c",))):
        answer = client.post(f"{load}/segments", params={"partition": partition}, content=rows(*values), headers=ARROW)
        assert answer.status_code == 201, answer.text
        segments.append(answer.json())
    return segments


def held(client: httpx.Client, partition: int) -> list[str]:
    page = client.get("/v1/topics/shop/orders/records", params={"partition": partition}).json()
    return [record["value"] for record in page["records"]]


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_a_load_comes_in_by_http(client: httpx.Client) -> None:
    target = client.get(f"{LOAD}/target").json()
    offer = {"segments": staged(client), "timeout_ms": 60_000, "generation": target["generation"]}

    offered = client.put(LOAD, json=offer).json()["load"]
    again = client.put(LOAD, json=offer).json()["load"]
    client.post(f"{LOAD}/attach", params={"wait_ms": 60_000})
    ended = client.get(LOAD, params={"wait_ms": 60_000}).json()

    assert offered["expires_at"] == again["expires_at"]
    assert ended["status"] == "committed"
    assert [(part["partition"], part["start"], part["records"]) for part in ended["parts"]] == [(0, 0, 2), (1, 0, 1)]
    assert (held(client, 0), held(client, 1)) == (["a", "b"], ["c"])
    assert client.get("/v1/topics/shop/orders/loads").json() == {"loads": [ended], "after": None}
    assert client.put(LOAD, json=offer).json()["load"]["status"] == "committed"
    assert code(client.post(f"{LOAD}/abandon")) == (409, "conflict")


def test_segments_that_the_caller_put_into_a_shared_store_are_taken(tmp_path: Path) -> None:
    store = {"storage": {"mode": "shared_fs"}, "store": {"root": str(tmp_path / "store")}}
    settings = Settings.load(None, {"server": {"port": 0}, **store}, environment={})
    with running_broker(tmp_path / "data", settings) as broker, broker.client() as client:
        client.put("/v1/topics/shop/orders", json={"partitions": 2})
        target = client.get(f"{LOAD}/target").json()
        with forebay.open(tmp_path / "elsewhere", store) as executor:
            place = LoadPlace("one", target["topic_id"], 1)
            row = encode_rows([(b"x", None, None, (), 5)])
            made = write_segment(executor.loads.store().store, place, "3-0", [row], clock=SystemClock())
        assert made is not None

        with forebay.connect(broker.url) as log:
            loads = log.loads_of("shop/orders")
            loads.offer("one", [segment_of(1, made)])
            loads.attach("one")
            ended = loads.wait("one", 60)

        assert (target["shared"], target["prefixes"][1]) == (True, place.prefix)
        assert (ended.status, held(client, 1)) == ("committed", ["x"])


def test_a_load_that_is_not_known_is_not_found(client: httpx.Client) -> None:
    for answer in (
        client.get(LOAD),
        client.get(LOAD, params={"wait_ms": 60_000}),
        client.post(f"{LOAD}/attach", params={"wait_ms": 60_000}),
    ):
        assert code(answer) == (404, "unknown_load")
    client.put("/v1/topics/shop/other")
    client.put(LOAD, json={"segments": []})
    for answer in (
        client.get("/v1/topics/shop/other/loads/one"),
        client.post("/v1/topics/shop/other/loads/one/abandon"),
        client.get("/v1/topics/shop/none/loads/one"),
    ):
        assert answer.status_code == 404
    assert client.get("/v1/topics/shop/other/loads").json()["loads"] == []


def test_a_load_is_given_up_as_often_as_it_is_asked_for(client: httpx.Client) -> None:
    segments = staged(client)

    answers = [client.post(f"{LOAD}/abandon") for _ in range(2)]

    assert [(answer.status_code, answer.json()["status"]) for answer in answers] == [(200, "abandoned")] * 2
    assert code(client.put(LOAD, json={"segments": segments})) == (409, "conflict")
    assert held(client, 0) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"object_key": "{prefix}../../x.seg"}, "is no segment of load one"),
        ({"object_key": "../../etc/passwd"}, "is no segment of load one"),
        ({"object_key": "{topic_id}_0/loads/two/x.seg"}, "is no segment of load one"),
        ({"partition": 1}, "is no segment of load one"),
        ({"partition": 2}, "partition is 2"),
        ({"records": 0}, "records"),
        ({"records": 10**30}, "body is wrong"),
        ({"bytes": None}, "bytes"),
        ({"sparse": [[5, 1]]}, "cannot be"),
        ({"content_hash": "../"}, "cannot be"),
    ],
)
def test_a_hostile_offer_is_refused(client: httpx.Client, change: dict[str, Any], said: str) -> None:
    target = client.get(f"{LOAD}/target").json()
    names = {"prefix": target["prefixes"][0], "topic_id": target["topic_id"]}
    if "object_key" in change:
        change = {"object_key": change["object_key"].format(**names)}

    refused = client.put(LOAD, json={"segments": [{**staged(client)[0], **change}]})

    assert code(refused) == (400, "invalid")
    assert said in refused.json()["error"]["message"]
    assert client.get(LOAD).status_code == 404


@pytest.mark.parametrize("name", [".hidden", "-x", "%2e%2e", "a%0ab", "x" * 200])
def test_a_hostile_id_is_refused(client: httpx.Client, name: str) -> None:
    path = f"/v1/topics/shop/orders/loads/{name}"

    for answer in (
        client.put(path, json={"segments": []}),
        client.get(f"{path}/target"),
        client.post(f"{path}/abandon"),
    ):
        assert answer.status_code in (400, 404)


def test_a_long_offer_is_taken_and_one_beyond_the_limit_is_not(client: httpx.Client) -> None:
    segment = staged(client)[0]
    key = segment["object_key"]
    many = [{**segment, "object_key": key.replace("staged", f"staged{number}")} for number in range(500)]
    body = {"segments": many}

    taken = client.put(LOAD, json=body)
    refused = client.put(f"{LOAD}-more", json={"segments": many * 10})

    assert len(taken.request.content) > 64 * 1024
    assert taken.status_code == 200, taken.text
    assert code(refused) == (413, "too_large")


def test_rows_that_are_no_arrow_stream_are_refused(client: httpx.Client) -> None:
    path = f"{LOAD}/segments"

    assert code(client.post(path, json=[{"value": "x"}])) == (400, "invalid")
    assert code(client.post(path, content=b"no stream", headers=ARROW)) == (400, "invalid")
    assert code(client.post(path, content=rows(), headers=ARROW)) == (400, "invalid")
    assert code(client.post(path, params={"partition": 9}, content=rows(b"x"), headers=ARROW)) == (400, "invalid")


def test_a_load_whose_segments_are_not_there_is_not_attached(client: httpx.Client) -> None:
    segment = staged(client)[0]
    missing = {**segment, "object_key": segment["object_key"].replace("staged", "gone")}
    client.put(LOAD, json={"segments": [missing]})

    assert code(client.post(f"{LOAD}/attach", params={"wait_ms": 60_000})) == (500, "corrupt")
    assert client.get(LOAD).json()["status"] == "offered"
    assert client.post(f"{LOAD}/abandon").json()["status"] == "abandoned"


def test_a_caller_that_goes_does_not_end_what_it_began(
    broker: RunningBroker, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, gate, calls = threading.Event(), threading.Event(), []
    attach = Loads.attach

    def slow(loads: Loads, load_id: str) -> Any:
        calls.append(load_id)
        begun.set()
        assert gate.wait(60)
        return attach(loads, load_id)

    monkeypatch.setattr(Loads, "attach", slow)
    # Only the call attaches, and not the worker of the log.
    monkeypatch.setattr(Loads, "step", lambda loads: None)
    client.put(LOAD, json={"segments": staged(client)})

    early = client.post(f"{LOAD}/attach", params={"wait_ms": 1})
    assert begun.wait(60)
    joined = client.post(f"{LOAD}/attach")
    gate.set()
    ended = client.get(LOAD, params={"wait_ms": 60_000}).json()

    assert [answer.json()["status"] for answer in (early, joined)] == ["offered", "offered"]
    assert (ended["status"], calls) == ("committed", ["one"])


def test_a_broker_that_ends_keeps_no_one_waiting(
    broker: RunningBroker, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Loads, "step", lambda loads: None)
    client.put(LOAD, json={"segments": staged(client)})
    waiting = threading.Event()
    answers: list[httpx.Response] = []
    find = broker.process.broker.service.load

    async def seen(*words: Any) -> Any:
        found = await find(*words)
        waiting.set()
        return found

    monkeypatch.setattr(broker.process.broker.service, "load", seen)
    asking = threading.Thread(target=lambda: answers.append(client.get(LOAD, params={"wait_ms": 60_000})))
    asking.start()
    assert waiting.wait(60)
    broker.stop()
    asking.join(60)

    assert answers[0].json()["status"] == "offered"


@pytest.mark.slow
def test_a_kill_between_offer_and_attach_brings_the_rows_once(tmp_path: Path) -> None:
    with BrokerCommand(tmp_path / "data") as broker:
        with broker.client() as client:
            client.put("/v1/topics/shop/orders", json={"partitions": 2})
            segments = staged(client)
            client.put(LOAD, json={"segments": segments})
        broker.end(signal.SIGKILL)
    with BrokerCommand(tmp_path / "data") as broker, broker.client() as client:
        again = client.put(LOAD, json={"segments": segments})
        ended = client.get(LOAD, params={"wait_ms": 60_000}).json()

        assert again.status_code == 200
        assert ended["status"] == "committed"
        assert (held(client, 0), held(client, 1)) == (["a", "b"], ["c"])
