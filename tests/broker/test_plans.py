"""Plans, stored pages and stored bytes over HTTP: what they say, what they keep to themselves, and what they refuse."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from forebay.settings import Settings
from forebay.wire.answers import decode_page_frames
from tests.support.brokers import RunningBroker, running_broker, server_settings

PLAN = "/v1/topics/shop/orders/plan"
STORED = "/v1/topics/shop/orders/stored"
OBJECT = "/v1/topics/shop/orders/object"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[RunningBroker]:
    with running_broker(tmp_path / "data") as broker:
        yield broker


@pytest.fixture
def client(broker: RunningBroker) -> Iterator[httpx.Client]:
    with broker.client() as client:
        for name in ("orders", "others"):
            assert client.put(f"/v1/topics/shop/{name}").status_code == 201
        yield client


def add(client: httpx.Client, *values: str, topic: str = "orders") -> None:
    body = [{"value": value} for value in values]
    assert client.post(f"/v1/topics/shop/{topic}/records", json=body).status_code == 200


def planned(client: httpx.Client, **query: str) -> dict[str, Any]:
    answer = client.get(PLAN, params=query)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def segment(client: httpx.Client, topic: str = "orders") -> dict[str, str]:
    """Where a segment of history is asked for."""
    add(client, "a", "b", topic=topic)
    assert client.post(f"/v1/topics/shop/{topic}/export").status_code == 200
    plan = client.get(f"/v1/topics/shop/{topic}/plan").json()
    descriptor = plan["partitions"][0]["history"][0][3]
    names = {"store": descriptor["store"], "key": descriptor["object_key"], "topic_id": descriptor["topic_id"]}
    return {**names, "partition": "0", "start": "0", "stop": str(descriptor["bytes"])}


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def test_a_plan_says_where_records_lie_and_sends_history_once(client: httpx.Client) -> None:
    where = segment(client)
    add(client, "c")

    plan = planned(client)

    (partition,) = plan["partitions"]
    assert [piece[:2] for piece in partition["history"]] == [[0, 2]]
    assert [piece[:2] for piece in partition["log"]] == [[2, 3]]
    assert (partition["earliest"], partition["next"], plan["store"]) == (0, 3, None)
    add(client, "d")
    assert client.delete("/v1/topics/shop/orders/records", params={"start": 0, "stop": 1}).json() == {"records": 1}
    again = planned(client, known=plan["edition"])
    assert again["edition"] == plan["edition"]
    assert "history" not in again["partitions"][0]
    assert (again["partitions"][0]["next"], len(again["partitions"][0]["deleted"])) == (4, 1)
    assert client.post("/v1/topics/shop/orders/export").status_code == 200
    later = planned(client, known=plan["edition"])
    assert later["edition"] != plan["edition"]
    assert [piece[:2] for piece in later["partitions"][0]["history"]] == [[0, 2], [2, 4]]
    assert where["key"] == later["partitions"][0]["history"][0][3]["object_key"]


def test_stored_pages_have_what_was_deleted_since(client: httpx.Client) -> None:
    add(client, "a", "b", "c")
    topic_id = planned(client)["topic"]["topic_id"]
    client.delete("/v1/topics/shop/orders/records", params={"start": 1, "stop": 2})

    page = decode_page_frames(client.get(STORED, params={"start": 0, "topic_id": topic_id}).content)

    assert [record.value for batch in page.batches for record in batch.records(0)] == [b"a", b"b", b"c"]
    end = decode_page_frames(client.get(STORED, params={"start": 3, "topic_id": topic_id}).content)
    assert (end.marks.next, end.marks.head, list(end.batches)) == (3, 3, [])


def test_a_segment_is_given_byte_by_byte(client: httpx.Client) -> None:
    where = segment(client)

    whole = client.get(OBJECT, params=where).content

    assert len(whole) == int(where["stop"])
    assert client.get(OBJECT, params={**where, "start": "10", "stop": "20"}).content == whole[10:20]
    assert client.get(OBJECT, params={**where, "stop": str(10**12)}).content == whole
    assert client.get(OBJECT, params={**where, "start": str(10**12), "stop": str(10**12 + 5)}).content == b""


def test_nothing_of_another_topic_and_no_other_file_is_given(client: httpx.Client) -> None:
    where, other = segment(client), segment(client, "others")
    shard = where["key"].partition("/")[0]

    assert code(client.get(OBJECT, params={**where, "key": other["key"]})) == (403, "forbidden")
    for key in (
        f"{shard}/../../forebay.json",
        "../forebay.json",
        f"{shard}//x",
        f"/{shard}/x",
        f"{shard}/.x",
        shard,
        "",
    ):
        assert client.get(OBJECT, params={**where, "key": key}).status_code in (400, 403), key
    gone = f"{shard}/00000000000000000999-00000001.seg"
    assert code(client.get(OBJECT, params={**where, "key": gone})) == (409, "conflict")
    assert code(client.get(OBJECT, params={**where, "store": "s3:elsewhere"})) == (409, "conflict")
    assert code(client.get(OBJECT, params={**where, "partition": "1"})) == (400, "invalid")
    assert code(client.get(OBJECT, params={**where, "start": "9", "stop": "3"})) == (400, "invalid")
    beyond = {"start": str(2**63), "stop": str(2**63 + 5)}
    assert code(client.get(OBJECT, params={**where, **beyond})) == (400, "invalid")
    stored = {"topic_id": where["topic_id"], "start": str(2**63)}
    assert code(client.get(STORED, params=stored)) == (400, "invalid")
    assert code(client.get(OBJECT, params={**where, "topic_id": other["topic_id"]})) == (409, "conflict")
    assert code(client.get(STORED, params={"start": 0, "topic_id": other["topic_id"]})) == (409, "conflict")
    assert code(client.get("/v1/topics/shop/none/plan")) == (404, "unknown_topic")


def test_of_the_files_of_a_shard_only_those_of_history_are_given(
    broker: RunningBroker, client: httpx.Client, tmp_path: Path
) -> None:
    """Every file of the directory was given once: the log that grows, marks, and what recovery had put aside."""
    where = segment(client)
    add(client, "not sealed")
    shard = where["key"].partition("/")[0]
    directory = tmp_path / "data" / "shards" / shard
    (directory / "aside").mkdir()
    (directory / "aside" / "00000000000000000000-00000001.seg").write_bytes(b"put aside")
    names = {str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file()}
    growing = sorted(name for name in names if name.endswith(".seg") and "/" not in name)[-1]
    history = {where["key"].partition("/")[2], where["key"].partition("/")[2].replace(".seg", ".idx")}
    assert growing not in history and history < names, names

    given = {
        name for name in names if client.get(OBJECT, params={**where, "key": f"{shard}/{name}"}).status_code == 200
    }

    assert given == history
    assert client.post("/v1/topics/shop/orders/export").status_code == 200
    assert client.get(OBJECT, params={**where, "key": f"{shard}/{growing}"}).status_code == 200, "it is history by now"
    assert code(client.get(OBJECT, params={**where, "key": f"{shard}/{'0' * 64}.manifest"})) == (403, "forbidden")
    for name in ("loads/one/t-0.seg", "compacted/0-t.parquet", "compacted/0-t.idx", "1-0.idx"):
        loads = {"store": where["store"].replace("local:", "loads:"), "key": f"{shard}/{name}"}
        assert code(client.get(OBJECT, params={**where, **loads})) == (409, "conflict"), "it may be, and is not there"
    elsewhere = {"store": where["store"].replace("local:", "loads:"), "key": f"{shard}/{'0' * 64}.manifest"}
    assert code(client.get(OBJECT, params={**where, **elsewhere})) == (403, "forbidden")


def test_a_topic_that_only_its_owner_reads_has_no_plan(client: httpx.Client) -> None:
    assert client.put("/v1/topics/shop/brief", json={"durability": "ephemeral"}).status_code == 201

    assert code(client.get("/v1/topics/shop/brief/plan")) == (422, "unsupported")


def test_a_broker_in_memory_has_no_plans() -> None:
    with running_broker(":memory:") as broker, broker.client() as client:
        client.put("/v1/topics/shop/orders")
        assert code(client.get(PLAN)) == (422, "unsupported")


def test_a_shared_store_is_named_without_its_credentials(tmp_path: Path) -> None:
    tree = {
        "server": {"port": 0},
        "storage": {"mode": "shared_fs"},
        "store": {"root": str(tmp_path / "store")},
    }
    settings = Settings.load(None, tree, environment={})
    with running_broker(tmp_path / "data", settings) as broker, broker.client() as client:
        client.put("/v1/topics/shop/orders")
        store = planned(client)["store"]
        target = client.get("/v1/topics/shop/orders/loads/one/target").json()
    expected = {"name": "directory", "mode": "shared_fs", "backend": "directory", "root": str(tmp_path / "store")}
    assert store == target["place"] == {**expected, "options": {}}


def test_what_may_be_secret_of_a_store_is_not_said() -> None:
    from forebay.places import shared_place  # noqa: PLC0415

    options = {
        "endpoint": "https://s3.example",
        "region": "eu",
        "access_key_id": "id",
        "secret_access_key": "hush",
        "base_url": "https://me:hush@s3.example",
        "proxy_url": "http://me:hush@proxy",
    }
    tree = {"storage": {"mode": "object_store"}, "store": {"root": "s3://bucket/x", "options": options}}

    place = shared_place(Settings.load(None, tree, environment={}), "s3:bucket/x")

    assert place is not None
    assert place.options == {"endpoint": "https://s3.example", "region": "eu"}
    assert shared_place(server_settings(), "") is None
