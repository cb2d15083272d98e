"""Who may do what over HTTP: every route of the table with callers of every kind."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest

import forebay
from forebay.broker.routes import Route
from forebay.broker.table import ROUTES
from forebay.clock import SystemClock
from forebay.service.principals import AccessScope, Principal
from forebay.service.service import Service
from forebay.service.tokens import Tokens
from tests.support.brokers import RunningBroker, running_broker, server_settings


class Caller(NamedTuple):
    """Someone with a token."""

    name: str
    scopes: tuple[AccessScope, ...]
    prefix: str


CALLERS = (
    *(Caller(f"{scope}-shop", (scope,), "shop/") for scope in AccessScope),
    *(Caller(f"{scope}-all", (scope,), "*") for scope in AccessScope),
    Caller("everything-else", tuple(AccessScope), "other/"),
    Caller("near-miss", tuple(AccessScope), "sho/"),
)
ROOT = Caller("root", tuple(AccessScope), "*")


class Served(NamedTuple):
    """A broker that asks for tokens, and the secrets of its callers by their names."""

    broker: RunningBroker
    secrets: dict[str, str]

    def client(self, caller: str | None) -> httpx.Client:
        """A client with the token of this caller, or without one."""
        client = self.broker.client()
        if caller is not None:
            client.headers["authorization"] = f"Bearer {self.secrets[caller]}"
        return client


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = tmp_path_factory.mktemp("rights") / "data"
    settings = server_settings(access="tokens", heartbeat_interval_ms=100)
    with forebay.open(path) as log:
        tokens = Tokens(log.metadata, settings.metadata.prefix, SystemClock())
        secrets = {
            caller.name: tokens.create(caller.name, scopes=caller.scopes, prefixes=[caller.prefix]).secret.reveal()
            for caller in (*CALLERS, ROOT)
        }
        for name in ("shop/orders", "shop/copy", "other/orders"):
            log.create_topic(name).append(b"first", key=b"k")
            log.group("billing").commit(name, 1)
        forebay.Routers(log).create("one", sources=["shop/orders"], destination="shop/copy")
    with running_broker(path, settings) as broker:
        yield Served(broker, secrets)


def right_request(route: Route) -> dict[str, Any]:
    """A right request of this route, on the topic shop/orders."""
    path = route.path.format(
        namespace="shop",
        topic="orders",
        group="billing",
        load="one",
        backfill="one",
        router="one",
        subscription="s",
        consumer="c",
    )
    where = {"topic": "shop/orders"}
    bodies: dict[str, Any] = {
        "erase_key": {"key": "k"},
        "patch_topic": {"cap_records": 1000},
        "copy_topic": {"target": "shop/copy"},
        "append_records": [{"value": "x"}],
        "commit_offset": {**where, "offset": 1},
        "reset_group": {**where, "to": "earliest"},
        "put_load": {"segments": []},
        "put_backfill": {"fingerprint": "f", "loads": 1},
        "put_router": {"sources": ["shop/orders"], "destination": "shop/copy"},
        "put_rule": {"tags": ["eu"]},
        "patch_subscription": {"ack_timeout_ms": 1000},
        "seek_subscription": {"to": "earliest"},
        "nack_records": {"offsets": {}},
        "watch_many_topics": {"topics": ["shop/orders"]},
    }
    queries: dict[str, Any] = {
        "find_offset": {"at": "latest"},
        "get_sequence": {"producer": 1},
        "delete_records": {"key": "k"},
        "fetch_offset": where,
        "get_dead_letter": {"offset": 0},
        "watch_topics": where,
    }
    return {
        "method": route.method,
        "url": path,
        "json": bodies.get(route.name),
        "params": queries.get(route.name),
    }


def _status(client: httpx.Client, route: Route) -> int:
    """The status of the answer; of a stream that is all that is looked at."""
    with client.stream(**right_request(route)) as answer:
        return answer.status_code


OF_THE_BROKER = {"get_metrics", "get_status", "get_usage"}
"""They concern no single topic: a caller needs the right on all."""
LISTS = {"list_topics", "list_groups", "get_group", "list_routers"}
"""Everyone may ask: the answer has what the caller may see."""


OF_A_ROUTER = {"get_router", "put_rule", "pause_router", "resume_router", "delete_router"}


def _may(caller: Caller, route: Route) -> bool:
    scopes = set(route.scopes)
    if route.needs_all_scopes:
        return scopes <= set(caller.scopes) and caller.prefix in ("shop/", "*")
    if route.name == "delete_group":
        # It has places in two namespaces.
        return AccessScope.READ in caller.scopes and caller.prefix == "*"
    return bool(scopes & set(caller.scopes)) and caller.prefix in ("shop/", "*")


@pytest.mark.slow
@pytest.mark.parametrize("caller", CALLERS, ids=lambda caller: caller.name)
@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_a_caller_may_do_what_the_table_says(served: Served, route: Route, caller: Caller) -> None:
    with served.client(caller.name) as client:
        status = _status(client, route)
    if not route.scopes or route.name in LISTS:
        assert status == 200
    elif route.name in OF_THE_BROKER:
        assert status == (200 if caller.prefix == "*" and set(route.scopes) & set(caller.scopes) else 403)
    elif route.name in OF_A_ROUTER and caller.prefix not in ("shop/", "*"):
        # A router between topics that the caller has no right on is unknown to it.
        is_held = set(route.scopes) <= set(caller.scopes) or not route.needs_all_scopes
        assert status == (404 if is_held else 403)
    elif _may(caller, route):
        assert status not in (401, 403)
    else:
        assert status == 403
    if route.name in ("delete_topic", "seal_topic", "delete_group", "delete_router"):
        _restore(served)


def _restore(served: Served) -> None:
    with served.client("root") as root:
        root.post("/v1/topics/shop/orders/unseal")
        assert root.put("/v1/topics/shop/orders", json={"exist_ok": True}).is_success
        root.delete("/v1/routers/one")
        between = {"sources": ["shop/orders"], "destination": "shop/copy"}
        assert root.put("/v1/routers/one", json=between).status_code == 201
        for name in ("shop/orders", "shop/copy", "other/orders"):
            assert root.post("/v1/groups/billing/commit", json={"topic": name, "offset": 0}).status_code == 200


@pytest.mark.parametrize("route", [r for r in ROUTES if "{topic}" in r.path], ids=lambda route: route.name)
def test_a_caller_without_the_right_learns_nothing_of_the_form(served: Served, route: Route) -> None:
    wrong = {**right_request(route), "content": b"no form at all", "params": {"unknown": "x"}}
    del wrong["json"]
    with served.client("near-miss") as client, client.stream(**wrong) as answer:
        assert answer.status_code == 403
        assert "near-miss has no scope" in answer.read().decode()


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
@pytest.mark.parametrize("value", [None, "Bearer fbt_wrong", "Basic abc", "Bearer", "Bearer " + "x" * 5000])
def test_without_a_valid_token_only_what_all_may_see_is_answered(
    served: Served, route: Route, value: str | None
) -> None:
    with served.client(None) as client:
        if value is not None:
            client.headers["authorization"] = value
        status = _status(client, route)
    assert status == (401 if route.scopes else 200)


def test_lists_show_what_the_caller_may_see(served: Served) -> None:
    with served.client("read-shop") as client:
        assert [topic["name"] for topic in client.get("/v1/topics").json()["topics"]] == ["shop/copy", "shop/orders"]
        places = client.get("/v1/groups/billing").json()["places"]
        assert {place["topic"] for place in places} == {"shop/copy", "shop/orders"}
        groups = client.get("/v1/groups").json()["groups"]
        assert [name for name in groups if not name.startswith("router-")] == ["billing"]
    with served.client("near-miss") as client:
        assert client.get("/v1/topics").json() == {"topics": [], "after": None}
        assert client.get("/v1/groups").json()["groups"] == []
        assert client.get("/v1/watch", params={"topic": ["shop/orders"]}).status_code == 403


def test_groups_are_listed_page_by_page_to_those_who_may_see_them(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"g{number}" for number in range(5)]
    with served.client("root") as root:
        for number, name in enumerate(names):
            topic = ("shop/orders", "other/orders")[number % 2]
            assert root.post(f"/v1/groups/{name}/commit", json={"topic": topic, "offset": 0}).status_code == 200
    seen = {"read-shop": ["billing", "g0", "g2", "g4"], "everything-else": ["billing", "g1", "g3"]}
    seen |= {"read-all": ["billing", *names], "near-miss": [], "write-shop": []}
    for caller, expected in seen.items():
        for limit in (1, 2, 3, 100):
            with served.client(caller) as client:
                pages = list(_pages(client, limit))
            assert [name for page in pages for name in page if not name.startswith("router-")] == expected
            assert all(len(page) == limit for page in pages[:-1]) and len(pages[-1]) <= limit
    with served.client("root") as root:
        assert root.get("/v1/groups", params={"after": "g2", "limit": 1}).json() == {"groups": ["g3"], "after": "g3"}
        assert root.get("/v1/groups", params={"limit": 0}).status_code == 400

    # The client asks until there are no more.
    groups = Service.groups

    async def at_most_two(
        self: Service, who: Principal, *, after: str | None = None, limit: int
    ) -> tuple[list[str], str | None]:
        return await groups(self, who, after=after, limit=min(limit, 2))

    monkeypatch.setattr(Service, "groups", at_most_two)
    with forebay.connect(served.broker.url, token=served.secrets["read-shop"]) as log:
        assert log.groups() == seen["read-shop"]
    with served.client("root") as root:
        for name in names:
            assert root.delete(f"/v1/groups/{name}").status_code == 204


def _pages(client: httpx.Client, limit: int) -> Iterator[list[str]]:
    after: dict[str, str] = {}
    while True:
        page = client.get("/v1/groups", params={"limit": limit, **after}).json()
        yield page["groups"]
        if page["after"] is None:
            return
        after = {"after": page["after"]}


def test_a_topic_that_does_not_exist_is_not_told_from_one_that_is_forbidden(served: Served) -> None:
    with served.client("read-shop") as client:
        answers = [client.get(f"/v1/topics/other/{name}").json() for name in ("orders", "nothing")]
        texts = {str(answer).replace("nothing", "orders") for answer in answers}
        assert len(texts) == 1


def test_no_secret_is_in_answers_or_logs(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG"), served.client("read-shop") as client:
        texts = [client.put("/v1/topics/shop/new").text, client.get("/v1/topics").text, client.get("/nothing").text]
        client.headers["authorization"] = "Bearer fbt_not_a_token_at_all"
        texts.append(client.get("/v1/topics").text)
    seen = "\n".join([*texts, *(f"{record.getMessage()} {vars(record)}" for record in caplog.records)])
    assert "fbt_" not in seen


def test_a_revoked_token_is_refused_soon(served: Served) -> None:
    tokens = Tokens(served.broker.metadata(), server_settings().metadata.prefix, SystemClock())
    made = tokens.create("short-lived", scopes=["read"], prefixes=["*"])
    with served.broker.client() as client:
        client.headers["authorization"] = f"Bearer {made.secret.reveal()}"
        while client.get("/v1/topics").status_code != 200:
            pass  # until the broker has seen it
        tokens.revoke(made.token.token_id)
        while client.get("/v1/topics").status_code != 401:
            pass


def test_an_idempotency_key_of_one_caller_is_not_that_of_another(served: Served) -> None:
    found = []
    for caller in ("write-shop", "write-all", "write-shop"):
        with served.client(caller) as client:
            answer = client.post(
                "/v1/topics/shop/copy/records", json=[{"value": caller}], headers={"idempotency-key": "the same"}
            )
            assert answer.status_code == 200, answer.text
            found.append(answer.json()["ranges"])
    assert found[0] == found[2] != found[1]
