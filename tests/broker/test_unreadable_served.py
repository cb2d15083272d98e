"""One stored value cannot be read, of each kind in turn: a broker serves all else, names it, and deletes it by name."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, cast

import httpx
import msgspec
import pytest

import forebay
from forebay.clock import SystemClock
from forebay.errors import Corrupt, UnsupportedFormat
from forebay.format.metadata.keys import subscription_key
from forebay.metadata import Put
from forebay.service.tokens import Tokens
from forebay.surface import SubscribableTopic
from tests.storage.stored_values import (
    CASES,
    DAMAGES,
    PREFIX,
    damage,
    key_of,
    make_seed,
    shared_settings,
    stored_keys,
    stored_value,
    value_at,
)
from tests.support.brokers import RunningBroker, running_broker, server_settings
from tests.support.commands import invoke
from tests.support.waiting import until

pytestmark = pytest.mark.slow

NAMED_AT_ONCE: Final = {"topic", "subscription", "router", "token"}
"""What is looked at when a broker starts; others are named once a call, or a worker, has met them."""
DELETED_AT: Final = {
    "topic": "topics/default/a",
    "subscription": "topics/default/a/subscriptions/s",
    "place of a subscription": "topics/default/a/subscriptions/s",
    "place of a reader": "groups/g",
    "router": "routers/r",
}


@pytest.fixture(scope="module")
def seed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seed(tmp_path_factory.mktemp("seed"))


@pytest.fixture
def home(seed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(seed, tmp_path / "home"))


@contextmanager
def served(home: Path, *, access: str = "loopback") -> Iterator[tuple[RunningBroker, httpx.Client]]:
    shared = shared_settings(home)
    settings = msgspec.structs.replace(server_settings(access=access), storage=shared.storage, store=shared.store)
    with running_broker(home / "log", settings) as broker, broker.client() as client:
        yield broker, client


def _unreadable(client: httpx.Client) -> list[str]:
    return [value["key"] for value in client.get("/v1/status").json()["unreadable"]]


@pytest.mark.proves("I12")
@pytest.mark.parametrize("what", ["garbage", "newer"])
@pytest.mark.parametrize("kind", CASES)
def test_a_broker_serves_all_else(home: Path, kind: str, what: str) -> None:
    key = damage(home, kind, what)
    damaged = stored_value(home, key)

    with served(home) as (broker, client):
        assert client.get("/v1/ready").is_success
        if kind in NAMED_AT_ONCE:
            assert _unreadable(client) == [key]
            assert client.get("/v1/health").json()["status"] == "degraded"
            assert "forebay_values_unreadable 1.0" in client.get("/metrics").text
        assert "default/b" in client.get("/v1/topics").text
        appended = client.post("/v1/topics/default/b/records", json=[{"value": "more"}])
        assert appended.is_success
        [place] = appended.json()["ranges"]
        read = client.get("/v1/topics/default/b/records", params={"start": place["first"]})
        assert read.json()["records"][0]["value"] == "more"
        for path in ("groups", "groups/g", "routers", "status", "topics/default/b/subscriptions", "usage"):
            assert client.get(f"/v1/{path}").is_success, path
        assert client.get("/v1/topics/default/b/loads").is_success
        if kind != "data directory":
            assert value_at(broker.metadata(), key) == damaged
        if kind in DELETED_AT:
            path = f"/v1/{DELETED_AT[kind]}"
            assert client.delete(path).is_success, client.delete(path).text
            until(lambda: key not in _unreadable(client))
        if kind == "load that is not over":
            assert client.post("/v1/topics/default/two/loads/waiting/abandon").is_success
        assert kind == "topic" or client.delete("/v1/topics/default/a").is_success
        assert client.get("/v1/topics/default/a").status_code == httpx.codes.NOT_FOUND
        if kind in NAMED_AT_ONCE - {"token"}:
            until(lambda: client.get("/v1/health").json()["status"] == "ok")


def test_a_value_that_a_call_meets_is_named_from_then_on(home: Path) -> None:
    with served(home) as (broker, client):
        key = key_of(stored_keys(home), "place of a reader")
        whole = value_at(broker.metadata(), key)
        assert whole is not None
        broker.metadata().transaction([], [Put(key, DAMAGES["newer"](whole))])
        assert client.get("/v1/health").json()["status"] == "ok"

        assert client.get("/v1/groups/g").is_success
        until(lambda: client.get("/v1/health").json()["status"] == "degraded")
        [value] = client.get("/v1/status").json()["unreadable"]
        assert value["key"] == key
        assert "upgrade" in value["message"]

        broker.metadata().transaction([], [Put(key, whole)])
        until(lambda: client.get("/v1/health").json()["status"] == "ok")


@pytest.mark.parametrize("what", ["garbage", "newer"])
def test_a_client_and_the_command_line_by_url_delete_a_subscription_that_cannot_be_read(home: Path, what: str) -> None:
    with served(home) as (broker, _), forebay.connect(broker.url) as log:
        key = subscription_key("default", "a", "s", prefix=PREFIX)
        topic = cast("SubscribableTopic", log.topic("a"))
        for _ in range(2):
            whole = value_at(broker.metadata(), key)
            assert whole is not None
            broker.metadata().transaction([], [Put(key, DAMAGES[what](whole))])
            with pytest.raises((Corrupt, UnsupportedFormat)):
                topic.subscribe("s")
            with pytest.raises((Corrupt, UnsupportedFormat)):
                topic.subscription("s")
            if value_at(broker.metadata(), key) != whole:
                topic.delete_subscription("s")
            assert topic.subscriptions() == []
            topic.subscribe("s")
        broker.metadata().transaction([], [Put(key, DAMAGES[what](b"{}"))])
        assert invoke(["--url", broker.url, "subscription", "delete", "a", "s", "--yes"]).exit_code == 0
        assert topic.subscriptions() == []


@pytest.mark.parametrize(
    ("kind", "path"), [("router", "/v1/routers/r"), ("place of a reader", "/v1/groups/g")], ids=["router", "group"]
)
def test_only_a_caller_with_the_right_to_all_it_may_touch_deletes_what_cannot_be_read(
    home: Path, kind: str, path: str
) -> None:
    """Of a router no topic is known; the place of a group says by its key which topic it is in."""
    with forebay.open(home / "log", shared_settings(home)) as log:
        tokens = Tokens(log.metadata, PREFIX, SystemClock())
        few = tokens.create("few", scopes=["read", "write", "admin"], prefixes=["default/b"]).secret.reveal()
        ops = tokens.create("all", scopes=["read", "write", "admin"], prefixes=["*"]).secret.reveal()
    key = damage(home, kind, "garbage")

    with served(home, access="tokens") as (broker, client):
        refused = client.delete(path, headers={"authorization": f"Bearer {few}"})
        assert refused.status_code == httpx.codes.FORBIDDEN
        assert value_at(broker.metadata(), key) is not None
        assert client.delete(path, headers={"authorization": f"Bearer {ops}"}).is_success
        assert value_at(broker.metadata(), key) is None


@pytest.mark.parametrize("what", ["garbage", "newer"])
def test_a_token_that_cannot_be_read_lets_no_caller_in_and_the_others_go_on(home: Path, what: str) -> None:
    with forebay.open(home / "log", shared_settings(home)) as log:
        tokens = Tokens(log.metadata, PREFIX, SystemClock())
        lost, kept = (tokens.create(name, scopes=["admin"], prefixes=["*"]) for name in ("lost", "kept"))
        key = f"{PREFIX}/tokens/{lost.token.token_id}"
        whole = value_at(log.metadata, key)
        assert whole is not None
        log.metadata.transaction([], [Put(key, DAMAGES[what](whole))])

    with served(home, access="tokens") as (broker, client):
        headers = {"authorization": f"Bearer {lost.secret.reveal()}"}
        assert client.get("/v1/topics", headers=headers).status_code == httpx.codes.UNAUTHORIZED
        headers = {"authorization": f"Bearer {kept.secret.reveal()}"}
        assert client.get("/v1/topics", headers=headers).is_success
        assert client.get("/v1/health").json()["status"] == "degraded"
        assert value_at(broker.metadata(), key) is not None
