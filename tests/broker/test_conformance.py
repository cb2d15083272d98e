"""`forebay conformance` passes on a broker, and fails on one that breaks a promise."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest

import forebay
from forebay.broker.routes import FoundRoute, Router
from forebay.broker.table import ROUTES
from forebay.clock import SystemClock
from forebay.service.principals import AccessScope
from forebay.service.tokens import Tokens
from forebay.testing.checks import conformance
from forebay.testing.checks.conformance import CHECKS, NAMESPACE_PREFIX, ConformanceProbe, Nonconforming, run_checks
from tests.support.brokers import START_SECONDS, RunningBroker, running_broker, server_settings
from tests.support.commands import invoke

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    with running_broker(tmp_path_factory.mktemp("broker") / "data", server_settings()) as broker:
        yield broker


def test_a_broker_passes_and_keeps_nothing_of_the_checks(broker: RunningBroker) -> None:
    result = invoke(["conformance", broker.url])

    assert result.exit_code == 0, result.stdout
    assert result.stdout.count("ok      ") == len(CHECKS)
    assert result.stdout.endswith(f"{len(CHECKS)} checks, 0 failed\n")
    with broker.client() as client:
        assert client.get("/v1/topics", params={"prefix": NAMESPACE_PREFIX}).json()["topics"] == []


def test_a_broker_that_asks_for_tokens_passes_with_one_that_has_every_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = server_settings(access="tokens")
    with forebay.open(tmp_path / "data") as log:
        tokens = Tokens(log.metadata, settings.metadata.prefix, SystemClock())
        secret = tokens.create("checks", scopes=tuple(AccessScope), prefixes=["*"]).secret.reveal()
    with running_broker(tmp_path / "data", settings) as broker:
        without = invoke(["conformance", broker.url])
        monkeypatch.setenv("FOREBAY_TOKEN", secret)
        result = invoke(["conformance", broker.url])

    assert result.exit_code == 0, result.stdout
    assert result.stdout.endswith(f"{len(CHECKS)} checks, 0 failed\n")
    assert secret not in result.stdout
    assert without.exit_code == 1
    assert "401" in without.stdout


class Noting(httpx.HTTPTransport):
    """Notes which routes of the table a client asks for."""

    def __init__(self) -> None:
        super().__init__()
        self._router = Router(ROUTES)
        self.routes: set[str] = set()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        found = self._router.find(request.method, request.url.raw_path.partition(b"?")[0])
        answer = super().handle_request(request)
        if isinstance(found, FoundRoute) and answer.is_success:
            self.routes.add(found.route.name)
        return answer


def test_every_route_of_the_table_is_checked(broker: RunningBroker) -> None:
    noting = Noting()
    with httpx.Client(base_url=broker.url, timeout=START_SECONDS, transport=noting) as client:
        assert [done for done in run_checks(client) if done.failure is not None] == []

    assert sorted({route.name for route in ROUTES} - noting.routes) == []


def test_no_broker_at_the_address_is_a_clear_refusal() -> None:
    result = invoke(["conformance", "http://127.0.0.1:1"])

    assert result.exit_code == 4
    assert "no broker answers at http://127.0.0.1:1" in result.stderr
    assert invoke(["conformance", "127.0.0.1:1"]).exit_code == 2


Page = dict[str, Any]


class Breaking(httpx.HTTPTransport):
    """Stands for a broker that breaks a promise: answers to matching requests are changed on their way."""

    def __init__(self, change: Callable[[httpx.Request, Any], Any]) -> None:
        super().__init__()
        self._change = change

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        answer = super().handle_request(request)
        if answer.headers.get("content-type") != "application/json":
            return answer
        answer.read()
        body = self._change(request, answer.json())
        return httpx.Response(answer.status_code, content=json.dumps(body).encode(), request=request)


def is_page(body: Any) -> bool:
    return isinstance(body, dict) and "caught_up" in body


def drop_a_record(_: httpx.Request, body: Any) -> Any:
    return {**body, "records": body["records"][:1] + body["records"][2:]} if is_page(body) else body


def repeat_a_record(_: httpx.Request, body: Any) -> Any:
    return {**body, "records": body["records"][:1] + body["records"]} if is_page(body) else body


def swap_records(_: httpx.Request, body: Any) -> Any:
    return {**body, "records": body["records"][::-1]} if is_page(body) else body


def name_another_next(_: httpx.Request, body: Any) -> Any:
    return {**body, "next": body["next"] + 1} if is_page(body) else body


def change_a_value(_: httpx.Request, body: Any) -> Any:
    if not is_page(body):
        return body
    return {**body, "records": [{**each, "value": str(each.get("value")).upper()} for each in body["records"]]}


def name_another_offset(request: httpx.Request, body: Any) -> Any:
    if request.method != "POST" or "ranges" not in body:
        return body
    return {**body, "ranges": [{**each, "first": each["first"] + 1} for each in body["ranges"]]}


def give_errors_another_shape(_: httpx.Request, body: Any) -> Any:
    return {"detail": body["error"]["message"]} if "error" in body else body


BROKEN: Final = (
    drop_a_record,
    repeat_a_record,
    swap_records,
    name_another_next,
    change_a_value,
    name_another_offset,
    give_errors_another_shape,
)


@pytest.mark.parametrize("change", BROKEN, ids=lambda change: change.__name__)
def test_a_broker_that_breaks_a_promise_fails(
    broker: RunningBroker, change: Callable[[httpx.Request, Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = (
        conformance.check_records_are_read_as_they_were_sent,
        conformance.check_pages_follow_each_other_without_a_gap,
        conformance.check_wrong_requests_are_refused_in_one_shape,
    )
    monkeypatch.setattr(conformance, "CHECKS", few)

    with httpx.Client(base_url=broker.url, timeout=START_SECONDS, transport=Breaking(change)) as client:
        found = list(run_checks(client))

    assert len(found) == len(few)
    assert [done.name for done in found if done.failure is not None]


def test_a_broker_that_stores_a_repeat_again_fails(broker: RunningBroker) -> None:
    class Forgetful(httpx.HTTPTransport):
        def handle_request(self, request: httpx.Request) -> httpx.Response:
            request.url = request.url.copy_remove_param("producer").copy_remove_param("sequence")
            return super().handle_request(request)

    with httpx.Client(base_url=broker.url, timeout=START_SECONDS, transport=Forgetful()) as client:
        probe = ConformanceProbe(client)
        with pytest.raises(Nonconforming, match="the ranges of a repeat"):
            conformance.check_a_repeated_append_is_stored_once(probe)
        probe.remove_topics()


class Rewriting(httpx.HTTPTransport):
    """Stands for a broker that leaves something unheeded: requests are changed on their way to one that heeds it."""

    def __init__(self, change: Callable[[httpx.Request], httpx.Request]) -> None:
        super().__init__()
        self._change = change

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return super().handle_request(self._change(request))


def look_in_partition_0(request: httpx.Request) -> httpx.Request:
    if request.method == "GET" and "key" in request.url.params:
        request.url = request.url.copy_set_param("partition", "0")
    return request


def ignore_the_partition_of_a_record(request: httpx.Request) -> httpx.Request:
    if request.method != "POST" or not request.content.startswith(b"["):
        return request
    records = [{name: each[name] for name in each if name != "partition"} for each in json.loads(request.content)]
    headers = {name: text for name, text in request.headers.items() if name != "content-length"}
    return httpx.Request("POST", request.url, headers=headers, json=records)


def forget_keys(request: httpx.Request) -> httpx.Request:
    request.headers.pop("idempotency-key", None)
    return request


def reserve_offsets_that_are_read_as_the_end(request: httpx.Request) -> httpx.Request:
    if request.url.path.endswith("/commit"):
        request = httpx.Request("POST", request.url, json={**json.loads(request.content), "offset": 3})
    return request


def make_another_topic_of_another_spelling(request: httpx.Request) -> httpx.Request:
    if request.url.path == "/v1/watch":
        request.url = request.url.copy_remove_param("topic").copy_add_param("topic", "conformance/none")
    return request


@pytest.mark.parametrize(
    ("change", "check"),
    [
        (look_in_partition_0, conformance.check_a_key_is_found_without_its_partition),
        (ignore_the_partition_of_a_record, conformance.check_a_record_goes_to_the_partition_that_it_names),
        (forget_keys, conformance.check_a_repeat_is_known_after_partitions_were_added),
        (reserve_offsets_that_are_read_as_the_end, conformance.check_lag_ends_at_what_can_be_read),
        (
            make_another_topic_of_another_spelling,
            conformance.check_a_topic_that_is_named_in_two_ways_is_watched_once,
        ),
    ],
    ids=lambda one: one.__name__,
)
def test_a_broker_that_leaves_something_unheeded_fails(
    broker: RunningBroker,
    change: Callable[[httpx.Request], httpx.Request],
    check: Callable[[ConformanceProbe], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(conformance, "CHECKS", (check,))
    with httpx.Client(base_url=broker.url, timeout=START_SECONDS, transport=Rewriting(change)) as client:
        (done,) = run_checks(client)
    assert done.failure is not None
