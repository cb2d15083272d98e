"""Errors on the wire: one row for each class, and the client raises what the broker raised."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import forebay
from forebay import errors
from forebay.appends.queue import QueueFull
from forebay.errors import (
    Conflict,
    Corrupt,
    DataLoss,
    ForebayError,
    Indeterminate,
    Invalid,
    Moved,
    NotReady,
    Throttled,
    TooLarge,
    UnknownConsumer,
    UnknownLoad,
    UnknownRouter,
    UnknownSubscription,
    UnknownTopic,
)
from forebay.wire.errors import (
    ERROR_TABLE,
    RETRY_SECONDS,
    decode_error,
    encode_error,
    row_of,
)


def _public_classes() -> set[type[ForebayError]]:
    named = [getattr(forebay, name) for name in forebay.__all__]
    inside = list(vars(errors).values())
    return {kind for kind in [*named, *inside] if isinstance(kind, type) and issubclass(kind, ForebayError)}


def test_every_public_error_class_has_exactly_one_row_in_both_directions() -> None:
    kinds = [row.kind for row in ERROR_TABLE]
    codes = [row.code for row in ERROR_TABLE]

    assert _public_classes() <= set(kinds)
    assert len(set(kinds)) == len(kinds) == len(set(codes))
    for row in ERROR_TABLE:
        sent = encode_error(row.kind("why"))
        assert (sent.status, type(decode_error(sent.status, sent.body))) == (row.status, row.kind)
        assert sent.retry_after_s == (RETRY_SECONDS if row.retries else None)


def test_statuses_are_those_of_the_contract() -> None:
    expected = {
        "invalid": 400, "offset_out_of_range": 400,
        "unauthenticated": 401, "forbidden": 403, "unknown_topic": 404, "unknown_load": 404,
        "unknown_router": 404, "unknown_subscription": 404, "unknown_consumer": 404,
        "conflict": 409,
        "too_large": 413, "moved": 421, "unsupported": 422, "unsupported_format": 422, "throttled": 429,
        "corrupt": 500, "data_loss": 500, "internal": 500, "unavailable": 503, "not_ready": 503, "closed": 503,
        "fenced": 503, "indeterminate": 504, "full": 507,
    }  # fmt: skip

    assert {row.code: row.status for row in ERROR_TABLE} == expected


@pytest.mark.parametrize(
    "error",
    [
        UnknownTopic("no topic shop/orders", topic="shop/orders"),
        UnknownLoad("no load one", topic="shop/orders"),
        UnknownRouter("no router eu"),
        UnknownSubscription("no subscription billing", topic="shop/orders"),
        UnknownConsumer("no consumer ab12", topic="shop/orders"),
        Conflict("out of step", shard="shop/orders[3]", producer=2**64 - 1, sequence=4, expected=0),
        Moved("elsewhere", shard="shop/orders[0]", holder="a1"),
        DataLoss("gone", shard="shop/orders[1]", start=0, stop=2**63 - 1, reason="lost"),
        Throttled("too much", retry_after_s=7),
        NotReady("recovering", replay_progress=0.25, shards_done=1, shards_total=4),
        TooLarge("a body of 9 bytes", limit=8),
        Invalid("nothing \u2028 \x00 \U0001f600 to add"),
    ],
)
def test_the_client_raises_the_same_class_with_the_same_detail(error: ForebayError) -> None:
    sent = encode_error(error)
    found = decode_error(sent.status, sent.body)

    assert (type(found), str(found), found.detail) == (type(error), str(error), error.detail)
    assert sent.retry_after_s == (
        getattr(error, "retry_after_s", None) or RETRY_SECONDS if row_of(type(error)).retries else None
    )


def test_a_part_of_a_second_to_wait_is_a_whole_one_in_the_header() -> None:
    sent = encode_error(Throttled("too much", retry_after_s=0.2))

    assert sent.retry_after_s == 1
    assert decode_error(sent.status, sent.body).detail == {"retry_after_s": 0.2}


def test_the_page_lists_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "wire.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (\d+) \| (.*?) ?\|$", page, re.MULTILINE)

    assert [(kind, code, int(status), "Retry-After" in more) for kind, code, status, more in rows] == [
        (row.kind.__name__, row.code, row.status, row.retries) for row in ERROR_TABLE
    ]


def test_a_class_without_a_row_goes_by_its_nearest_base() -> None:
    assert (row_of(QueueFull).code, row_of(QueueFull).status) == ("throttled", 429)
    assert row_of(type("Later", (UnknownTopic,), {})).code == "unknown_topic"


def test_an_unexpected_failure_is_sent_without_its_message() -> None:
    sent = encode_error(ValueError("secret /srv/forebay/data/token"))

    assert sent.status == 500
    assert b"secret" not in sent.body and b"srv" not in sent.body
    assert type(decode_error(sent.status, sent.body)) is ForebayError


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("/srv/forebay/shards/ab_0/0420.seg is damaged", "…/0420.seg is damaged"),
        ('run "forebay verify /srv/forebay/data"', 'run "forebay verify …/data"'),
        ("cannot lock /data/lock: busy", "cannot lock …/lock: busy"),
        ("store s3://user:secret@host/bucket/a/b fails", "store s3://host/bucket/a/b fails"),
        ("topic shop/orders[3] and /shop/orders", "topic shop/orders[3] and /shop/orders"),
        ("see https://example.org/a/b/c", "see https://example.org/a/b/c"),
        ("rate 3/4/5/6 of a/b/c/d", "rate 3/4/5/6 of a/b/c/d"),
    ],
)
def test_no_path_and_no_secret_of_the_server_is_sent(message: str, shown: str) -> None:
    sent = encode_error(Corrupt(message, shard="shop/orders[0]"), private=["/data"])

    assert str(decode_error(sent.status, sent.body)) == shown


def test_a_detail_names_no_path_either() -> None:
    sent = encode_error(Moved("elsewhere", holder="/srv/forebay/data"), private=[])

    assert json.loads(sent.body)["error"]["detail"] == {"holder": "…/data"}


def test_a_message_that_is_no_text_is_sent_all_the_same() -> None:
    sent = encode_error(Invalid("file \udcff is wrong"))

    assert str(decode_error(sent.status, sent.body)) == "file ? is wrong"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, Invalid),
        (404, UnknownTopic),
        (418, Invalid),
        (503, errors.Unavailable),
        (502, Indeterminate),
        (599, Indeterminate),
    ],
)
@pytest.mark.parametrize(
    "body", [b"", b"<html>", b"[" * 100_000, b'{"error":{}}', b'{"error":{"code":7,"message":""}}', b"\xff"]
)
def test_an_answer_of_another_server_is_judged_by_its_status(
    status: int, kind: type[ForebayError], body: bytes
) -> None:
    assert type(decode_error(status, body)) is kind


def test_a_code_of_a_newer_broker_is_judged_by_its_status_and_keeps_its_message() -> None:
    error = decode_error(
        409, b'{"error":{"code":"newer","message":"why","detail":{"topic":"a/b","args":[1],"odd":{}}}}'
    )

    assert (type(error), str(error), error.topic) == (Conflict, "why", "a/b")
