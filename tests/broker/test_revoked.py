"""Rights that end while an answer goes on: streams and reads that wait end with them, all others go on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import msgspec
import pytest

import forebay
from forebay.clock import SystemClock
from forebay.errors import Unauthenticated
from forebay.format.metadata.keys import token_key
from forebay.format.metadata.value import encode_value
from forebay.live import Watcher
from forebay.metadata import Put
from forebay.service.tokens import AccessToken, NewToken, Tokens
from forebay.wire.events import EventDecoder, ServerEvent
from tests.support.brokers import RunningBroker, running_broker, server_settings
from tests.support.waiting import async_until

SETTINGS = server_settings(access="tokens", heartbeat_interval_ms=600_000, wait_timeout_max_ms=600_000)
SECONDS = 60.0


class Served(NamedTuple):
    """A broker that asks for tokens, and its tokens."""

    broker: RunningBroker
    tokens: Tokens

    def made(self) -> NewToken:
        """A token that the broker accepts."""
        found = self.tokens.create("reader", scopes=["read"], prefixes=["shop/"])
        with self.client(found) as client:
            while client.get("/v1/topics").status_code != httpx.codes.OK:
                pass
        return found

    def client(self, token: NewToken) -> httpx.Client:
        client = self.broker.client()
        client.headers["authorization"] = f"Bearer {token.secret.reveal()}"
        return client

    def narrow(self, token: AccessToken, **changes: Any) -> None:
        """Store the token with other rights."""
        narrowed = msgspec.structs.replace(token, **changes)
        key = token_key(token.token_id, prefix=SETTINGS.metadata.prefix)
        self.broker.metadata().transaction([], [Put(key, encode_value(narrowed))])


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with forebay.open(tmp_path / "data") as log:
        for name in ("shop/orders", "shop/visits"):
            log.create_topic(name)
    with running_broker(tmp_path / "data", SETTINGS) as broker:
        yield Served(broker, Tokens(broker.metadata(), SETTINGS.metadata.prefix, SystemClock()))


@contextmanager
def last_event(client: httpx.Client, *names: str) -> Iterator[Callable[[], ServerEvent]]:
    """A stream that is open; waits for its end and gives the last event."""
    with client.stream("GET", "/v1/watch", params={"topic": list(names)}) as answer:
        assert answer.status_code == 200
        decoder, found = EventDecoder(), list[ServerEvent]()

        def last() -> ServerEvent:
            for chunk in answer.iter_raw():
                found.extend(decoder.feed(chunk))
            return found[-1]

        yield last


def code_of(event: ServerEvent) -> str:
    assert event.event == "error"
    found: str = msgspec.json.decode(event.text)["error"]["code"]
    return found


@pytest.mark.slow
def test_a_revoked_token_ends_its_streams_and_reads_that_wait_and_those_of_no_other(served: Served) -> None:
    gone, kept = served.made(), served.made()
    answers: dict[str, httpx.Response] = {}

    def poll(name: str, token: NewToken) -> None:
        with served.client(token) as client:
            answers[name] = client.get("/v1/topics/shop/orders/records", params={"wait_ms": 600_000})

    polls = [threading.Thread(target=poll, args=each) for each in (("gone", gone), ("kept", kept))]
    with (
        served.client(gone) as first,
        served.client(kept) as second,
        last_event(first, "shop/orders") as ended,
        last_event(second, "shop/orders") as going,
    ):
        for each in polls:
            each.start()
        wait_for_requests(served.broker, 2)

        served.tokens.revoke(gone.token.token_id)

        assert code_of(ended()) == "unauthenticated"
        polls[0].join(SECONDS)
        assert answers["gone"].status_code == 401
        assert "kept" not in answers
        served.tokens.revoke(kept.token.token_id)
        assert code_of(going()) == "unauthenticated"
        polls[1].join(SECONDS)
        assert answers["kept"].status_code == 401


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"prefixes": ("shop/orders",)}, {"scopes": ("write",)}])
def test_a_token_that_loses_a_right_ends_what_needs_it(served: Served, changes: dict[str, Any]) -> None:
    token = served.made()
    with served.client(token) as client, last_event(client, "shop/orders", "shop/visits") as ended:
        served.narrow(token.token, **changes)
        assert code_of(ended()) == "forbidden"


@pytest.mark.slow
def test_a_token_that_gets_another_right_leaves_its_streams_open(served: Served) -> None:
    token = served.made()
    with served.client(token) as client, last_event(client, "shop/orders") as ended:
        served.narrow(token.token, scopes=("read", "write"))
        with served.client(token) as other:
            while other.post("/v1/topics/shop/orders/records", json=[{"value": "a"}]).status_code == 403:
                pass
        served.broker.stop()
        assert ended().event != "error"


@pytest.mark.slow
def test_a_token_that_expires_ends_its_streams(served: Served) -> None:
    token = served.made()
    with served.client(token) as client, last_event(client, "shop/orders") as ended:
        served.narrow(token.token, expires_at=SystemClock().now_ms() + 1_000)
        assert code_of(ended()) == "unauthenticated"


def test_a_token_that_is_revoked_while_its_stream_begins_ends_it(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = served.made()
    begin, broker = Watcher.begin, served.broker.process.broker

    async def begin_and_revoke(watcher: Watcher[bytes]) -> None:
        await begin(watcher)
        await asyncio.to_thread(served.tokens.revoke, token.token.token_id)
        await async_until(lambda: not is_accepted())
        broker.check_rights()

    def is_accepted() -> bool:
        try:
            broker.service.authenticate(token.secret.reveal())
        except Unauthenticated:
            return False
        return True

    monkeypatch.setattr(Watcher, "begin", begin_and_revoke)
    with served.client(token) as client, last_event(client, "shop/orders") as ended:
        assert code_of(ended()) == "unauthenticated"


def wait_for_requests(broker: RunningBroker, count: int) -> None:
    """Return when so many requests are under way."""
    done = threading.Event()

    def look() -> None:
        if broker.process.broker.quota_counts().requests == count:
            done.set()
        else:
            broker.loop.call_later(0.005, look)

    broker.loop.call_soon_threadsafe(look)
    assert done.wait(SECONDS)
