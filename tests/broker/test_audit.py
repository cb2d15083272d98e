"""The audit log of a broker: each change and each refusal is one line, which names the caller and no secret."""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import forebay
from forebay.broker.audit import LINES_MAX, AuditLog
from forebay.broker.table import ROUTES
from forebay.cli.logs import LogFormat, logging_to_stderr
from forebay.clock import SystemClock
from forebay.service.tokens import NewToken, Tokens
from forebay.testing.simulated.clock import ManualClock
from tests.support.brokers import RunningBroker, running_broker, server_settings

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Audited:
    """A broker that asks for tokens, one that reads and one that may do everything, and what it logs."""

    def __init__(self, broker: RunningBroker, tokens: dict[str, NewToken], stderr: io.StringIO) -> None:
        self.broker = broker
        self.tokens = tokens
        self._stderr = stderr

    def client(self, name: str | None, **headers: str) -> httpx.Client:
        client = self.broker.client()
        client.headers.update(headers)
        if name is not None:
            client.headers["authorization"] = f"Bearer {self.tokens[name].secret.reveal()}"
        return client

    def text(self) -> str:
        """All that was logged so far; the lines of requests that were answered are complete."""
        while self.broker.process.broker.traffic.under_way:
            pass
        turned = threading.Event()
        self.broker.loop.call_soon_threadsafe(turned.set)
        assert turned.wait(30)
        return self._stderr.getvalue()

    def lines(self, logger: str = "forebay.audit") -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.text().splitlines()]
        return [line for line in lines if line["logger"] == logger]


@pytest.fixture(params=[False, True], ids=["quiet", "verbose"])
def audited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Audited]:
    stderr = io.StringIO()
    settings = server_settings(access="tokens")
    with forebay.open(tmp_path / "data") as log:
        tokens = Tokens(log.metadata, settings.metadata.prefix, SystemClock())
        made = {
            "reader": tokens.create("reader", scopes=["read"], prefixes=["shop/"]),
            "root": tokens.create("root", scopes=["read", "write", "delete", "admin"], prefixes=["*"]),
        }
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stderr)
        with (
            logging_to_stderr(LogFormat.JSON, verbose=request.param),
            running_broker(tmp_path / "data", settings) as broker,
        ):
            yield Audited(broker, made, stderr)


def test_every_change_is_one_line_that_names_the_caller_and_its_token(audited: Audited) -> None:
    with audited.client("root", **{"x-request-id": "mine-1", "traceparent": TRACE}) as client:
        assert client.put("/v1/topics/shop/orders").status_code == 201
        assert client.patch("/v1/topics/shop/nothing", json={"cap_records": 5}).status_code == 404
        client.get("/v1/topics/shop/orders")
        client.post("/v1/topics/shop/orders/records", json=[{"value": "x"}])

    created, patched = audited.lines()

    assert created["message"].startswith("put_topic of shop/orders by root (token ")
    wanted = {
        "route": "put_topic", "topic": "shop/orders", "outcome": "done", "status": 201, "principal": "root",
        "token_id": audited.tokens["root"].token.token_id, "client": "127.0.0.1", "request_id": "mine-1",
        "traceparent": TRACE,
    }  # fmt: skip
    assert wanted.items() <= created.items()
    assert (patched["route"], patched["outcome"], patched["status"]) == ("patch_topic", "failed", 404)
    assert "shop/nothing" in patched["error"]


def test_every_refusal_is_one_line(audited: Audited) -> None:
    with audited.client("reader") as client:
        assert client.put("/v1/topics/shop/orders").status_code == 403
        assert client.post("/v1/topics/shop/orders/records", json=[{"value": "x"}]).status_code == 403
        assert client.get("/metrics").status_code == 403
        client.headers["authorization"] = "Bearer fbt_wrong"
        assert client.get("/v1/topics").status_code == 401
        assert client.get("/metrics").status_code == 401
        del client.headers["authorization"]
        assert client.get("/v1/topics/shop/%0Aorders").status_code == 401

    lines = audited.lines()

    token_id = audited.tokens["reader"].token.token_id
    assert [(line["route"], line["status"], line["principal"], line["token_id"]) for line in lines] == [
        ("put_topic", 403, "reader", token_id),
        ("append_records", 403, "reader", token_id),
        ("get_metrics", 403, "reader", token_id),
        ("list_topics", 401, "-", None),
        ("get_metrics", 401, "-", None),
        ("get_topic", 401, "-", None),
    ]
    assert {line["outcome"] for line in lines} == {"refused"}
    assert "\n" not in lines[-1]["message"]


def test_no_secret_is_logged(audited: Audited) -> None:
    for name in ("reader", "root"):
        with audited.client(name) as client:
            client.put("/v1/topics/shop/orders")
            client.get("/v1/topics")
            secret = audited.tokens[name].secret.reveal()
            client.get(f"/v1/topics/shop/orders?token={secret}")
            client.headers["authorization"] = f"Basic {secret}"
            client.get("/v1/topics")
            client.headers["authorization"] = f"Bearer {secret}x"
            client.get("/v1/topics")
    logged = [line for line in audited.text().splitlines() if json.loads(line)["logger"] != "httpx"]
    assert logged
    assert "fbt_" not in "".join(logged)


def test_reads_are_logged_where_it_is_asked_for(audited: Audited, request: pytest.FixtureRequest) -> None:
    with audited.client("root", traceparent=TRACE) as client:
        client.put("/v1/topics/shop/orders")
        client.post("/v1/topics/shop/orders/records", json=[{"value": "x"}, {"value": "y"}])
        client.get("/v1/topics/shop/orders/records", params={"start": "1"})

    lines = audited.lines("forebay.broker.traffic")

    if "quiet" in request.node.name:
        assert lines == []
        return
    appended, read = (line for line in lines if line["route"].endswith("_records"))
    assert {"topic": "shop/orders", "partition": 0, "offset": 0, "traceparent": TRACE}.items() <= appended.items()
    assert {"topic": "shop/orders", "partition": 0, "offset": 1, "status": 200}.items() <= read.items()
    assert all(line["request_id"] for line in (appended, read))


def test_a_flood_without_tokens_is_written_in_part_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    audit = AuditLog(clock)
    fields = {"route": "list_topics", "principal": "-", "token_id": None, "client": "127.0.0.1"}
    with caplog.at_level(logging.INFO, "forebay.audit"):
        for _ in range(LINES_MAX + 1000):
            audit.note(401, fields)
        assert len(caplog.records) == LINES_MAX
        audit.note(403, fields)
        assert vars(caplog.records[-1])["fields"]["left_out"] == 1000
        audit.note(401, fields)
        assert len(caplog.records) == LINES_MAX + 1
        clock.advance(3600)
        for _ in range(LINES_MAX + 7):
            audit.note(401, fields)
    assert len(caplog.records) == 2 * LINES_MAX + 1
    assert vars(caplog.records[-LINES_MAX])["fields"]["left_out"] == 1


def test_every_route_that_changes_something_is_audited_but_for_records_and_cursors() -> None:
    frequent = {"append_records", "commit_offset", "flush_topic", "stage_rows"}
    frequent |= {"attach_consumer", "pull_records", "ack_records", "nack_records", "detach_consumer"}
    frequent |= {"flush_subscription"}
    changing = {route.name for route in ROUTES if route.method != "GET" and not route.is_stream}
    assert {route.name for route in ROUTES if route.is_audited} == changing - frequent
