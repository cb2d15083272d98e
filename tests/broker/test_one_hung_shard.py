"""One hung shard, and twenty: every route answers for another topic, and what hung ends in order when the disk answers.

The routes come from the table: a new one is called here as `tests/broker/test_rights.py` calls it, or is named with the
reason why it may wait.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import pytest

import forebay
import forebay.aio
from forebay.aio.workers import READ, SHARD
from forebay.broker.routes import Route
from forebay.broker.table import ROUTES
from forebay.disk.descriptors import SystemFile
from forebay.executor import Executor
from forebay.records import EARLIEST
from tests.broker.test_rights import right_request
from tests.support.brokers import RunningBroker, running_broker, server_settings
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.slow

ANSWER_SECONDS: Final = 30.0
"""In ordinary time an answer takes some milliseconds: so long only one takes that waits for what hangs."""
ENDING: Final = ("seal_topic", "delete_topic", "delete_router", "delete_group", "delete_subscription", "unseal_topic")
"""Routes that end what others need: called last."""
QUERIES: Final[dict[str, dict[str, str]]] = {"get_usage": {"topic": "shop/orders"}}
"""`GET /v1/usage` without a topic adds up the files of every topic, the hung ones too: it waits for their disk, and no
other call waits for it."""


class HungDisk:
    """The machine's disk, where files of some topics are neither written, synced nor read until it answers again."""

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self.answers = threading.Event()
        self.hung: tuple[str, ...] = ()
        self.held: set[str] = set()
        """The topics at which a call hangs, or has hung."""
        for name in ("write_at", "sync", "read_at"):
            patched.setattr(SystemFile, name, self._hanging(getattr(SystemFile, name)))

    def _hanging(self, whole: Any) -> Any:
        def call(file: SystemFile, *given: Any, **named: Any) -> Any:
            if self.hung and not self.answers.is_set():
                for topic_id in self.hung:
                    if topic_id in file.path:
                        self.held.add(topic_id)
                        assert self.answers.wait(PATIENCE)
            return whole(file, *given, **named)

        return call


class HungCall(NamedTuple):
    """A call at a topic whose disk hangs, and the status that it ends with."""

    method: str
    path: str
    status: int
    body: str = ""


CALLS: Final = (
    HungCall("POST", "flush", 204),
    HungCall("POST", "rotate", 204),
    HungCall("DELETE", "records?before=1", 200),
    HungCall("DELETE", "records?key=none", 200),
    HungCall("POST", "export", 200),
    HungCall("POST", "retain", 200),
    HungCall("GET", "records?key=k", 200),
    HungCall("GET", "records?tag=t", 200),
)
"""What used to fill the threads for administration, for reads and for jobs: all of it touches the disk."""


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[HungDisk]:
    found = HungDisk(monkeypatch)
    yield found
    found.answers.set()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    with forebay.open(tmp_path / "data") as log:
        for name in ("shop/orders", "shop/copy"):
            log.create_topic(name).append(b"first", key=b"k")
        log.topic("shop/orders").subscribe("s", start=EARLIEST)
        log.group("billing").commit("shop/orders", 1)
        forebay.Routers(log).create("one", sources=["shop/orders"], destination="shop/copy")
    return tmp_path / "data"


def hang(
    broker: RunningBroker, client: httpx.Client, disk: HungDisk, pool: ThreadPoolExecutor, *, topics: int, each: int
) -> list[tuple[HungCall, Future[httpx.Response]]]:
    """Topics whose disk hangs from now on, with so many calls of each kind waiting at each."""
    paths = [f"/v1/topics/hung/t{number}" for number in range(topics)]
    ids = []
    for path in paths:
        assert client.put(path).status_code == 201
        assert client.post(f"{path}/records", json=[{"value": "x", "key": "k"}]).status_code == 200
        ids.append(client.get(path).json()["topic_id"])
    disk.hung = tuple(f"/{topic_id}_" for topic_id in ids)

    def begun(call: HungCall) -> list[tuple[HungCall, Future[httpx.Response]]]:
        headers = {"content-type": "application/json"}
        return [
            (call, pool.submit(client.request, call.method, f"{path}/{call.path}", content=call.body, headers=headers))
            for path in paths
        ]

    waiting = begun(HungCall("POST", "records", 200, '[{"value": "y"}]'))
    until(lambda: len(disk.held) == topics)
    for _ in range(each):
        for call in CALLS:
            waiting += begun(call)
    traffic = broker.process.broker.traffic
    until(lambda: traffic.under_way + sum(future.done() for _, future in waiting) >= len(waiting))
    return waiting


def statuses_elsewhere(client: httpx.Client) -> dict[str, int]:
    """What every route answers, for a topic whose disk is sound."""
    found = {}
    ordered: list[Route] = sorted(ROUTES, key=lambda route: ENDING.index(route.name) if route.name in ENDING else -1)
    for route in ordered:
        request = right_request(route)
        if route.name in QUERIES:
            request["params"] = QUERIES[route.name]
        with client.stream(**request, timeout=ANSWER_SECONDS) as answer:
            found[route.name] = answer.status_code
    return found


def stuck_threads(client: httpx.Client) -> int:
    """How many threads of the broker do not come back from calls."""
    [found] = [each["stuck"] for each in client.get("/v1/status").json()["workers"] if each["name"] == "forebay-aio"]
    return int(found)


def test_a_broker_that_has_no_more_threads_for_what_hangs_says_so(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running_broker(data) as broker, broker.client() as client:
        assert client.get("/v1/health").json()["status"] == "ok"
        monkeypatch.setattr(Executor, "is_degraded", property(lambda _: True))
        assert client.get("/v1/health").json()["status"] == "degraded"
        [worker] = [each for each in client.get("/v1/status").json()["workers"] if each["name"] == "forebay-aio"]
        assert "they are refused" in worker["error"]


@pytest.mark.parametrize(("topics", "each"), [(1, max(SHARD.threads, READ.threads)), (20, 1)])
def test_every_route_answers_for_another_topic_while_the_disk_of_some_hangs(
    data: Path, disk: HungDisk, topics: int, each: int
) -> None:
    settings = server_settings(heartbeat_interval_ms=100, reads_waiting_per_principal_max=1000)
    with (
        running_broker(data, settings) as broker,
        ThreadPoolExecutor(400) as pool,
        httpx.Client(base_url=broker.url, timeout=PATIENCE, limits=httpx.Limits(max_connections=None)) as client,
    ):
        try:
            waiting = hang(broker, client, disk, pool, topics=topics, each=each)
            found = statuses_elsewhere(client)
            assert found.keys() == {route.name for route in ROUTES}
            assert {name: status for name, status in found.items() if status >= 500} == {}
            until(lambda: stuck_threads(client) > 0)
            assert client.get("/v1/health").json()["status"] == "ok", "there are threads for others"
        finally:
            disk.answers.set()
        ended = Counter((call, future.result(PATIENCE).status_code) for call, future in waiting)
        wrong = {(call, status) for call, status in ended if status not in (call.status, 503)}
        assert wrong == set()
        # Those that had a thread are answered; one that had none in time was refused, and may be repeated.
        assert {call for call, status in ended if status == call.status} == {call for call, _ in waiting}
        until(lambda: stuck_threads(client) == 0)
