"""What is said to etcd and what its errors mean: pure, no network."""

from __future__ import annotations

import json

import pytest

from forebay.errors import Invalid, Unavailable
from forebay.metadata import Absent, Delete
from forebay.metadata.etcd.keyspace import Keyspace, KeySpan, lease_from, lease_of, session_of, span_of
from forebay.metadata.etcd.refusals import AnswerLost, LoginNeeded, NotDone, Refused, failure_of
from forebay.metadata.etcd.wire import transaction_request


@pytest.mark.parametrize(
    ("status", "code", "message", "meaning"),
    [
        (503, 14, "etcdserver: no leader", NotDone),
        (429, 8, "etcdserver: too many requests", NotDone),
        (503, 14, "etcdserver: request timed out", AnswerLost),
        (503, 14, "etcdserver: request timed out, possibly due to previous leader failure", AnswerLost),
        (503, 14, "etcdserver: leader changed", AnswerLost),
        (503, 14, "etcdserver: server stopped", AnswerLost),
        (503, 14, "transport is closing", AnswerLost),
        (500, 2, "anything else", AnswerLost),
        (504, 4, "context deadline exceeded", AnswerLost),
        (401, 16, "etcdserver: invalid auth token", LoginNeeded),
        (400, 3, "etcdserver: revision of auth store is old", LoginNeeded),
        (404, 5, "etcdserver: requested lease not found", Refused),
        (403, 7, "etcdserver: permission denied", Refused),
        (400, 3, "etcdserver: request is too large", Refused),
        (429, 8, "etcdserver: mvcc: database space exceeded", Refused),
    ],
)
def test_only_what_certainly_was_not_done_may_be_repeated(
    status: int, code: int, message: str, meaning: type[Exception]
) -> None:
    plain = json.dumps({"error": message, "code": code, "message": message}).encode()
    streamed = json.dumps({"error": {"grpc_code": code, "http_code": status, "message": message}}).encode()

    assert type(failure_of(status, plain)) is meaning
    assert type(failure_of(status, streamed)) is meaning


@pytest.mark.parametrize("body", [b"", b"<html>Bad Gateway</html>", b"\xff\xfe", b"{}", b"[1]", b'{"error": 7}'])
def test_words_that_are_not_etcds_own_leave_the_outcome_open(body: bytes) -> None:
    assert isinstance(failure_of(502, body), AnswerLost)


def test_a_full_etcd_is_a_matter_of_time_and_other_refusals_are_not() -> None:
    full = Refused(8, "etcdserver: mvcc: database space exceeded").as_error()

    assert isinstance(full, Unavailable)
    assert "compact and defragment" in str(full)
    assert isinstance(Refused(3, "etcdserver: whatever").as_error(), Invalid)


def test_spans_lead_around_the_session_keys() -> None:
    keyspace = Keyspace("/p")

    assert keyspace.spans("/p/topics/") == [KeySpan(b"/p/topics/", b"/p/topics0")]
    assert keyspace.spans("") == [KeySpan(b"\0", b"/p/sessions/"), KeySpan(b"/p/sessions0", b"\0")]
    assert keyspace.spans("/p/s") == [KeySpan(b"/p/s", b"/p/sessions/"), KeySpan(b"/p/sessions0", b"/p/t")]
    assert keyspace.spans("/p/sessions") == [
        KeySpan(b"/p/sessions", b"/p/sessions/"),
        KeySpan(b"/p/sessions0", b"/p/sessiont"),
    ]
    assert keyspace.spans("/q")[0].behind(b"/q/5") == KeySpan(b"/q/5\0", b"/r")
    assert keyspace.spans("/q")[0].behind(b"/r").is_empty
    assert not span_of("\U0010ffff").behind(b"\xff").is_empty


def test_a_session_is_named_by_its_lease() -> None:
    lease = lease_from(b"\xff" * 8)

    assert session_of(lease) == "7fffffffffffffff"
    assert lease_of("7fffffffffffffff") == lease
    assert session_of(0) is None
    assert lease_from(bytes(8)) == 1
    assert [lease_of(text) for text in ("", "0" * 16, "8" + "0" * 15, "7FFFFFFFFFFFFFFF", "x" * 16)] == [None] * 5


def test_a_comparison_alone_asks_the_majority() -> None:
    """etcd answers a transaction without operations out of what the member happens to know."""
    request = transaction_request(Keyspace("/p"), [Absent("a")], [])

    asking = [{"request_range": {"key": b"/p/sessions/", "count_only": True}}]
    assert request["success"] == request["failure"] == asking
    assert "failure" not in transaction_request(Keyspace("/p"), [], [Delete("a")])
