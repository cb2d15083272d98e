"""A disk that stops answering: its shard waits, and everything else of the broker goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from forebay import Storage
from forebay.broker.serve import ROOM_SECONDS
from forebay.settings import Settings
from forebay.testing.inside import inside
from tests.storage.rig import WatchedDisk
from tests.support.brokers import running_broker
from tests.support.waiting import PATIENCE, until

STUCK = "/v1/topics/shop/stuck"
OTHER = "/v1/topics/shop/other"


class HangingDisk(WatchedDisk):
    """The machine's disk, whose writes below a directory hang from `stop_answering` on until `go_on` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.hangs = threading.Event()
        """A write is held up."""
        self.go_on = threading.Event()

    def stop_answering(self, directory: str) -> None:
        def hang(kind: str, path: str) -> None:
            if kind == "write" and path.startswith(directory) and not self.go_on.is_set():
                self.hangs.set()
                assert self.go_on.wait(PATIENCE)

        self.meet = hang


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingDisk]:
    found = HangingDisk()
    opening = Storage.open
    monkeypatch.setattr(Storage, "open", lambda *a, **k: opening(*a, **k, disk=found))
    try:
        yield found
    finally:
        found.go_on.set()


def append(client: httpx.Client, topic: str, value: str, **query: Any) -> int:
    """Where a record is."""
    answer = client.post(f"{topic}/records", params=query, json=[{"value": value}])
    assert answer.status_code == 200, answer.text
    first: int = answer.json()["ranges"][0]["first"]
    return first


def values(client: httpx.Client, topic: str) -> list[str]:
    return [record["value"] for record in client.get(f"{topic}/records").json()["records"]]


def begin(path: Path, client: httpx.Client, disk: HangingDisk, durability: str) -> None:
    """Two topics with a record each; from now on writes of the first hang, the very next one too."""
    for topic in (STUCK, OTHER):
        assert client.put(topic, json={"durability": durability}).status_code == 201
        assert append(client, topic, "first") == 0
    topic_id = client.get(STUCK).json()["topic_id"]
    disk.stop_answering(f"{path}/shards/{topic_id}_0")


@pytest.mark.slow
@pytest.mark.parametrize("durability", ["disk", "fsync"])
def test_a_first_write_that_hangs_holds_up_its_shard_alone(tmp_path: Path, disk: HangingDisk, durability: str) -> None:
    """Before, the event loop itself wrote what asks for no sync, and hung with the write: health, reads, everything."""
    with running_broker(tmp_path / "data") as broker, ThreadPoolExecutor(4) as threads, broker.client() as client:
        begin(tmp_path / "data", client, disk, durability)
        waiting = threads.submit(append, client, STUCK, "held up", producer=7, sequence=0)
        assert disk.hangs.wait(PATIENCE)

        client.timeout = httpx.Timeout(PATIENCE / 2)
        assert client.get("/v1/health").status_code == 200
        assert client.get("/v1/ready").json()["ready"]
        assert values(client, OTHER) == ["first"]
        assert values(client, STUCK) == ["first"], "what was acknowledged before is read"
        assert [append(client, OTHER, f"v{number}") for number in range(20)] == list(range(1, 21))
        assert not waiting.done()
        with pytest.raises(httpx.ReadTimeout):
            client.post(f"{STUCK}/records", json=[{"value": "given up"}], timeout=0.2)
        later = threads.submit(append, client, STUCK, "behind it", producer=7, sequence=1)
        again = threads.submit(append, client, STUCK, "held up", producer=7, sequence=0)
        until(lambda: "forebay_http_requests_in_flight 4.0" in client.get("/metrics").text)
        disk.go_on.set()

        assert (waiting.result(), again.result()) == (1, 1), "a repeat gets the place of the first"
        behind = later.result()
        found = values(client, STUCK)
        assert found[behind] == "behind it"
        assert sorted(found) == ["behind it", "first", "given up", "held up"]
    with running_broker(tmp_path / "data") as broker, broker.client() as client:
        assert values(client, STUCK) == found
        assert len(values(client, OTHER)) == 21


@pytest.mark.slow
def test_a_broker_that_is_told_to_stop_while_a_write_hangs_stops_in_order_once_it_returns(
    tmp_path: Path, disk: HangingDisk
) -> None:
    with running_broker(tmp_path / "data") as broker, ThreadPoolExecutor(1) as threads, broker.client() as client:
        begin(tmp_path / "data", client, disk, "disk")
        waiting = threads.submit(append, client, STUCK, "held up")
        assert disk.hangs.wait(PATIENCE)
        broker.stop()
        threading.Timer(0.5, disk.go_on.set).start()

        assert waiting.result() == 1
    with running_broker(tmp_path / "data") as broker, broker.client() as client:
        assert values(client, STUCK) == ["first", "held up"]


@pytest.mark.slow
def test_a_request_waits_a_second_for_room_in_a_full_queue_and_is_then_refused(
    tmp_path: Path, disk: HangingDisk
) -> None:
    settings = Settings.load(None, {"server": {"port": 0}, "wal": {"queue_records_max": 2}}, environment={})
    with (
        running_broker(tmp_path / "data", settings) as broker,
        ThreadPoolExecutor(4) as threads,
        broker.client() as client,
    ):
        begin(tmp_path / "data", client, disk, "disk")
        try:
            under_way = [threads.submit(append, client, STUCK, "written")]
            assert disk.hangs.wait(PATIENCE)
            under_way += [threads.submit(append, client, STUCK, "queued") for _ in range(2)]
            queue = inside(broker.log().topic("shop/stuck")).wal().queue
            until(lambda: queue.next == 4)
            refused = client.post(f"{STUCK}/records", json=[{"value": "refused"}])
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "throttled")
            assert refused.headers["retry-after"] == "1"
            assert refused.elapsed.total_seconds() >= ROOM_SECONDS
            under_way.append(threads.submit(append, client, STUCK, "waited"))
            until(lambda: broker.process.broker.traffic.under_way == 4)
        finally:
            disk.go_on.set()
        assert sorted(each.result() for each in under_way) == [1, 2, 3, 4]
        assert sorted(values(client, STUCK)) == ["first", "queued", "queued", "waited", "written"]
