"""One hung shard, and twenty: every route answers for another topic, and what hung ends in order when the disk answers.

The routes come from the table: a new one is called here as `tests/broker/test_rights.py` calls it, or is named with the
reason why it may wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

import httpx
import pytest

import forebay
import forebay.aio
from forebay import Settings
from forebay.aio.workers import READ, SHARD
from forebay.broker.routes import Route
from forebay.broker.table import ROUTES
from forebay.executor import Executor
from forebay.records import EARLIEST
from tests.broker.test_rights import right_request
from tests.support.brokers import RunningBroker, running_broker
from tests.support.hanging import PLACES, HungPlace
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.slow

ANSWER_SECONDS: Final = 30.0
"""In ordinary time an answer takes some milliseconds: so long only one takes that waits for what hangs."""
ENDING: Final = ("seal_topic", "delete_topic", "delete_router", "delete_group", "delete_subscription", "unseal_topic")
"""Routes that end what others need: called last."""
QUERIES: Final[dict[str, dict[str, str]]] = {"get_usage": {"topic": "shop/orders"}}
"""`GET /v1/usage` without a topic adds up the files of every topic, the hung ones too: it waits for their disk, and no
other call waits for it."""


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


FIRST: Final = {
    "files": HungCall("POST", "/v1/topics/{topic}/records", 200, '[{"value": "y"}]'),
    "store": HungCall("POST", "/v1/topics/{topic}/export", 200),
    "metadata": HungCall("POST", "/v1/groups/billing/commit", 200, '{"topic": "{topic}", "offset": 1}'),
}
"""What is called first, and hangs."""


@pytest.fixture(params=sorted(PLACES))
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[HungPlace]:
    found = HungPlace(monkeypatch, request.param)
    yield found
    found.answers.set()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings.load(
        None,
        {
            "server": {"port": 0, "heartbeat_interval_ms": 100, "reads_waiting_per_principal_max": 1000},
            "storage": {"mode": "shared_fs"},
            "store": {"root": f"{tmp_path}/store"},
            "metadata": {"path": f"{tmp_path}/meta.sqlite"},
            "wal": {"free_bytes_min": 0},
        },
        environment={},
    )


@pytest.fixture
def data(tmp_path: Path, settings: Settings) -> Path:
    with forebay.open(tmp_path / "data", settings) as log:
        for name in ("shop/orders", "shop/copy"):
            log.create_topic(name).append(b"first", key=b"k")
        log.topic("shop/orders").subscribe("s", start=EARLIEST)
        log.group("billing").commit("shop/orders", 1)
        forebay.Routers(log).create("one", sources=["shop/orders"], destination="shop/copy")
    return tmp_path / "data"


def hang(
    broker: RunningBroker, client: httpx.Client, place: HungPlace, pool: ThreadPoolExecutor, *, topics: int, each: int
) -> list[tuple[HungCall, Future[httpx.Response]]]:
    """Topics at which calls hang from now on, with so many calls of each kind waiting at each."""
    names = [f"hung/t{number}" for number in range(topics)]
    paths = [f"/v1/topics/{name}" for name in names]
    ids = []
    for path in paths:
        assert client.put(path).status_code == 201
        assert client.post(f"{path}/records", json=[{"value": "x", "key": "k"}]).status_code == 200
        assert client.post(f"{path}/rotate").status_code == 204
        ids.append(client.get(path).json()["topic_id"])
    place.hang(*zip(ids, names, strict=True))
    if place.name == "store":
        # What the background has exported by now does not hang: there must be more.
        for path in paths:
            assert client.post(f"{path}/records", json=[{"value": "x"}]).status_code == 200

    def begun(call: HungCall) -> list[tuple[HungCall, Future[httpx.Response]]]:
        headers = {"content-type": "application/json"}
        asked = [(call.path.replace("{topic}", name), call.body.replace("{topic}", name)) for name in names]
        return [(call, pool.submit(client.request, call.method, url, content=b, headers=headers)) for url, b in asked]

    waiting = begun(FIRST[place.name])
    until(lambda: len(place.held) == topics)
    for _ in range(each):
        for call in CALLS:
            waiting += begun(call._replace(path=f"/v1/topics/{{topic}}/{call.path}"))
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


def test_a_broker_that_has_no_more_threads_for_what_hangs_says_so(
    data: Path, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running_broker(data, settings) as broker, broker.client() as client:
        assert client.get("/v1/health").json()["status"] == "ok"
        monkeypatch.setattr(Executor, "is_degraded", property(lambda _: True))
        assert client.get("/v1/health").json()["status"] == "degraded"
        [worker] = [each for each in client.get("/v1/status").json()["workers"] if each["name"] == "forebay-aio"]
        assert "they are refused" in worker["error"]


@pytest.mark.parametrize(("topics", "each"), [(1, max(SHARD.threads, READ.threads)), (20, 1)])
def test_every_route_answers_for_another_topic_while_calls_at_some_hang(
    data: Path, settings: Settings, place: HungPlace, topics: int, each: int
) -> None:
    with (
        running_broker(data, settings) as broker,
        ThreadPoolExecutor(400) as pool,
        httpx.Client(base_url=broker.url, timeout=PATIENCE, limits=httpx.Limits(max_connections=None)) as client,
    ):
        try:
            waiting = hang(broker, client, place, pool, topics=topics, each=each)
            found = statuses_elsewhere(client)
            assert found.keys() == {route.name for route in ROUTES}
            assert {name: status for name, status in found.items() if status >= 500} == {}
            until(lambda: stuck_threads(client) > 0)
            assert client.get("/v1/health").json()["status"] == "ok", "there are threads for others"
        finally:
            place.answers.set()
        ended = Counter((call, future.result(PATIENCE).status_code) for call, future in waiting)
        wrong = {(call, status) for call, status in ended if status not in (call.status, 503)}
        assert wrong == set()
        # Those that had a thread are answered; one that had none in time was refused, and may be repeated.
        assert {call for call, status in ended if status == call.status} == {call for call, _ in waiting}
        until(lambda: stuck_threads(client) == 0)
