"""Routers of a broker: it runs those of its directory, and serves them over HTTP to those who may use them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

import forebay
from forebay.clock import SystemClock
from forebay.records import EARLIEST
from forebay.service.tokens import Tokens
from tests.support.brokers import RunningBroker, running_broker, server_settings
from tests.support.waiting import until


def test_a_broker_runs_the_routers_of_its_directory(tmp_path: Path) -> None:
    with forebay.open(tmp_path) as log:
        log.create_topic("shop/orders", partitions=2)
        log.create_topic("shop/eu")
        forebay.Routers(log).create("eu", sources=["shop/orders"], destination="shop/eu", tags=["eu"])
    for turn in range(2):
        with running_broker(tmp_path, server_settings()) as broker, forebay.connect(broker.url) as log:
            log.topic("shop/orders").append_many([b"0", b"1"], keys=[b"a", b"b"], tags=["eu", "us"])
            stream = log.topic("shop/eu").follow(EARLIEST, timeout=240)
            assert [next(stream).value for _ in range(turn + 1)] == [b"0"] * (turn + 1)


TOPICS = ("shop/orders", "shop/eu", "own/in", "own/out", "secret/plans")


class Guarded:
    """A broker that asks for tokens, by the names of which clients are made."""

    def __init__(self, broker: RunningBroker, secrets: dict[str, str]) -> None:
        self._broker = broker
        self._secrets = secrets

    def client(self, name: str) -> httpx.Client:
        client = self._broker.client()
        client.headers["authorization"] = f"Bearer {self._secrets[name]}"
        return client


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    path = tmp_path_factory.mktemp("routers") / "data"
    settings = server_settings(access="tokens")
    with forebay.open(path) as log:
        tokens = Tokens(log.metadata, settings.metadata.prefix, SystemClock())
        for name in TOPICS:
            log.create_topic(name)
        given = {
            "root": (["read", "write", "delete", "admin"], ["*"]),
            "own": (["read", "write"], ["own/", "shop/"]),
            "reader": (["read"], ["own/"]),
            "half": (["read", "write"], ["own/in"]),
        }
        secrets = {
            name: tokens.create(name, scopes=scopes, prefixes=prefixes).secret.reveal()
            for name, (scopes, prefixes) in given.items()
        }
    with running_broker(path, settings) as broker:
        yield Guarded(broker, secrets)


def test_a_router_takes_read_on_its_sources_and_write_on_its_destination(guarded: Guarded) -> None:
    between = {"sources": ["own/in"], "destination": "own/out"}
    with guarded.client("own") as own, guarded.client("reader") as reader, guarded.client("half") as half:
        assert reader.put("/v1/routers/r", json=between).json()["error"]["detail"]["scope"] == "write"
        assert half.put("/v1/routers/r", json=between).status_code == 403
        assert own.put("/v1/routers/r", json={**between, "destination": "secret/plans"}).status_code == 403
        assert own.put("/v1/routers/r", json={**between, "sources": ["own/in", "secret/plans"]}).status_code == 403
        assert own.put("/v1/routers/r", json=between).status_code == 201

        # One that covers both topics may look; one that covers half of them knows of nothing.
        assert reader.get("/v1/routers/r").json()["router"]["destination"] == "own/out"
        assert reader.post("/v1/routers/r/pause").status_code == 403
        assert half.get("/v1/routers/r").json()["error"]["code"] == "unknown_router"
        assert half.delete("/v1/routers/r").status_code == 404
        assert half.get("/v1/routers").json() == {"routers": [], "after": None}
        assert [item["router"]["name"] for item in reader.get("/v1/routers").json()["routers"]] == ["r"]
        assert own.delete("/v1/routers/r").status_code == 204


def test_the_cursors_of_a_router_are_not_moved_by_those_who_read_its_sources(guarded: Guarded) -> None:
    with guarded.client("own") as own, guarded.client("reader") as reader:
        made = own.put("/v1/routers/kept", json={"sources": ["own/in"], "destination": "own/out"}).json()
        name = f"router-{made['router_id']}"
        assert name not in own.get("/v1/groups").json()["groups"]
        group = f"/v1/groups/{name}"
        asked = [
            reader.post(f"{group}/commit", json={"topic": "own/in", "offset": 0}),
            reader.post(f"{group}/reset", json={"topic": "own/in", "to": "latest"}),
            reader.delete(group, params={"topic": "own/in"}),
            reader.delete(group),
            reader.put(f"/v1/topics/own/in/subscriptions/{name}", json={}),
        ]
        assert {(answer.status_code, answer.json()["error"]["code"]) for answer in asked} == {(400, "invalid")}
        assert all("keeps for a router, a copy or a replay" in answer.json()["error"]["message"] for answer in asked)
        assert own.delete("/v1/routers/kept").status_code == 204


def test_a_circle_over_topics_of_others_is_refused_without_their_names(guarded: Guarded) -> None:
    with guarded.client("root") as root, guarded.client("own") as own:
        for name, source, target in (("a", "own/out", "secret/plans"), ("b", "secret/plans", "own/in")):
            made = root.put(f"/v1/routers/{name}", json={"sources": [source], "destination": target})
            assert made.status_code == 201, made.text
        closing = {"sources": ["own/in"], "destination": "own/out"}

        for client, shown in ((own, False), (root, True)):
            refused = client.put("/v1/routers/closing", json=closing)
            assert refused.status_code == 400
            assert "circle" in refused.text
            assert ("secret" in refused.text) is shown
        for name in ("a", "b"):
            assert root.delete(f"/v1/routers/{name}").status_code == 204


def test_a_list_comes_by_pages(guarded: Guarded) -> None:
    with guarded.client("own") as own:
        for number in range(5):
            put = {"sources": ["shop/orders"], "destination": "shop/eu", "rule": {"tags": [str(number)]}}
            assert own.put(f"/v1/routers/p{number}", json=put).status_code == 201
        found, after = [], None
        while True:
            page = own.get("/v1/routers", params={"limit": 2, **({} if after is None else {"after": after})}).json()
            found += [item["router"]["name"] for item in page["routers"]]
            after = page["after"]
            if after is None:
                break

        assert found == [f"p{number}" for number in range(5)]
        for name in found:
            own.delete(f"/v1/routers/{name}")


@pytest.mark.slow
def test_metrics_have_lag_records_losses_and_state_of_each_router(tmp_path: Path) -> None:
    with running_broker(tmp_path) as broker, forebay.connect(broker.url) as log, broker.client() as client:
        source = log.create_topic("shop/orders")
        log.create_topic("shop/eu")
        source.append_many([b"%d" % number for number in range(4)])
        source.delete_before(1)
        log.routers.create("eu", sources=["shop/orders"], destination="shop/eu", start=EARLIEST)

        def numbers() -> dict[str, float]:
            found = re.findall(r"^(forebay_router_\S+) (\S+)$", client.get("/metrics").text, re.MULTILINE)
            return {name: float(value) for name, value in found}

        until(lambda: numbers().get('forebay_router_lag{router="eu"}') == 0)
        seen = numbers()
        assert seen['forebay_router_records_total{router="eu"}'] == 3
        assert seen['forebay_router_state{router="eu",state="running"}'] == 1
        assert seen['forebay_router_state{router="eu",state="paused"}'] == 0
        log.routers.pause("eu")
        source.append_many([b"4", b"5"])
        until(lambda: numbers()['forebay_router_lag{router="eu"}'] == 2)
        assert numbers()['forebay_router_state{router="eu",state="paused"}'] == 1
        log.routers.delete("eu")
        assert not [name for name in numbers() if "eu" in name]


def test_a_deletion_whose_answer_was_lost_is_done(tmp_path: Path) -> None:
    """The repeat of the client finds no router any more: that is what it wanted."""
    with running_broker(tmp_path) as broker, forebay.connect(broker.url) as log:
        log.create_topic("shop/orders")
        log.create_topic("shop/eu")
        log.routers.create("eu", sources=["shop/orders"], destination="shop/eu")
        service = broker.process.broker.service.routers
        delete = service.delete
        lost: list[str] = []

        async def losing(who: object, name: str) -> None:
            await delete(who, name)  # type: ignore[arg-type]
            if not lost:
                lost.append(name)
                raise forebay.Indeterminate("cut")

        service.delete = losing  # type: ignore[method-assign]
        log.routers.delete("eu")

        assert lost == ["eu"]
        assert log.routers.all() == []
