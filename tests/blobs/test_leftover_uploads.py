"""Uploads that never ended: found by whatever names the options have, aborted if they are ours, else named."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import parse_qs, urlsplit

import pytest

from forebay.blobs import BlobStore, open_store
from forebay.blobs.objects.leftovers import bucket_address, service_options
from forebay.disk import SystemDisk
from forebay.errors import Invalid, Unavailable
from forebay.settings import StoreSettings
from forebay.testing.simulated.clock import ManualClock
from tests.blobs.scripted import Answer, Request, Respond, answering

LONG_AGO = "2001-02-03T04:05:06.000Z"
KEYS = {"access_key_id": "the-key", "secret_access_key": "the-secret"}


def listing(*keys: str, more: str = "") -> Answer:
    """A page of unfinished uploads; `more` is what it says of the next one."""
    entries = "".join(
        f"<Upload><Key>{key}</Key><UploadId>u{number}</UploadId><Initiated>{LONG_AGO}</Initiated></Upload>"
        for number, key in enumerate(keys)
    )
    body = f"<ListMultipartUploadsResult>{more}{entries}</ListMultipartUploadsResult>"
    return Answer(200, body.encode())


def listed(*pages: Answer) -> Respond:
    """These pages one after another; every abort is fine."""
    left = list(pages)

    def respond(request: Request) -> Answer:
        return left.pop(0) if request.method == "GET" else Answer(204)

    return respond


def bucket(endpoint: str, root: str = "bucket/p", options: Mapping[str, str] | None = None) -> BlobStore:
    chosen = {"endpoint": endpoint, **KEYS} if options is None else options
    settings = StoreSettings(backend="s3", root=root, options={**chosen, "allow_http": True})
    return open_store(settings, disk=SystemDisk(), clock=ManualClock())


def aborted(seen: list[Request]) -> list[tuple[str, str]]:
    parts = [urlsplit(request.path) for request in seen if request.method == "DELETE"]
    return [(part.path, parse_qs(part.query)["uploadId"][0]) for part in parts]


@pytest.mark.parametrize(("root", "below"), [("bucket/p", "p/"), ("bucket", "")])
def test_only_uploads_under_keys_of_ours_are_aborted(root: str, below: str) -> None:
    page = listing(f"{below}t_0/1.seg", f"{below}a b/c", f"{below}.hidden", f"{below}t_0//x", f"{below}t_0/2.seg")
    with answering(listed(page)) as (endpoint, seen):
        assert bucket(endpoint, root).abort_stale_uploads(3600) == 2

    assert aborted(seen) == [(f"/bucket/{below}t_0/1.seg", "u0"), (f"/bucket/{below}t_0/2.seg", "u4")]


def test_an_endpoint_with_a_password_in_it_is_asked_and_shown_nowhere() -> None:
    with answering(listed(listing("p/t_0/1.seg"))) as (endpoint, seen):
        store = bucket(endpoint.replace("://", "://user:hunter2@"))
        assert store.abort_stale_uploads(3600) == 1
    assert aborted(seen) == [("/bucket/p/t_0/1.seg", "u0")]

    with pytest.raises(Unavailable, match="cannot list unfinished uploads") as refused:
        store.abort_stale_uploads(3600)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("name", ["endpoint", "aws_endpoint_url"])
@pytest.mark.parametrize(
    "address", ["http://127.0.0.1:many", "127.0.0.1:9000", "localhost", "http://", "http://a b", ""]
)
def test_an_endpoint_that_is_none_is_refused_by_name(name: str, address: str) -> None:
    """The library takes it, and panics over the first request."""
    with pytest.raises(Invalid, match=rf"store\.options\.{name} is no address of a service: write it as https://"):
        bucket("", options={name: address, **KEYS})


def test_a_long_list_is_followed_to_its_end() -> None:
    next_page = "<NextKeyMarker>p/a</NextKeyMarker><NextUploadIdMarker>u0</NextUploadIdMarker>"
    more = f"<IsTruncated>true</IsTruncated>{next_page}"
    with answering(listed(listing("p/a", more=more), listing("p/b"))) as (endpoint, seen):
        assert bucket(endpoint).abort_stale_uploads(3600) == 2

    assert parse_qs(urlsplit(seen[1].path).query)["key-marker"] == ["p/a"]


@pytest.mark.parametrize(
    "answer",
    [
        Answer(200, b"<html><p>not a list</html>"),
        Answer(200, b""),
        listing("p/a", more="<IsTruncated>true</IsTruncated>"),
        Answer(200, b"<R><Upload><Key>p/a</Key></Upload></R>"),
    ],
    ids=["no list", "nothing", "no next page", "no upload"],
)
def test_an_answer_that_is_no_list_is_named(answer: Answer) -> None:
    with (
        answering(listed(answer)) as (endpoint, _),
        pytest.raises(Unavailable, match="s3://bucket/p does not list unfinished uploads as S3 does"),
    ):
        bucket(endpoint).abort_stale_uploads(3600)


def test_credentials_and_endpoint_may_have_any_name_that_the_library_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    with answering(listed(listing("p/a"))) as (endpoint, seen):
        named = {"aws_endpoint_url": endpoint, "AWS_ACCESS_KEY_ID": "the-key", "aws_secret_access_key": "the-secret"}
        assert bucket("", options=named).abort_stale_uploads(3600) == 1
    assert "Credential=the-key/" in seen[0].headers["authorization"]

    with answering(listed(listing("p/a"))) as (endpoint, seen):
        for name, value in {**KEYS, "session_token": "the-token", "endpoint_url": endpoint}.items():
            monkeypatch.setenv(f"AWS_{name.upper()}", value)
        assert bucket("", options={}).abort_stale_uploads(3600) == 1
    assert seen[0].headers["x-amz-security-token"] == "the-token"


def test_the_library_goes_where_the_variables_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """So whoever looks for what its uploads left must go there too."""
    with answering(lambda _: Answer(404)) as (endpoint, seen):
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        assert bucket("", options=KEYS).stat("k") is None

    assert [request.path for request in seen] == ["/bucket/p/k"]


@pytest.mark.parametrize(
    ("options", "address"),
    [
        ({}, "https://s3.us-east-1.amazonaws.com/bucket"),
        ({"region": "eu-west-1"}, "https://s3.eu-west-1.amazonaws.com/bucket"),
        (
            {"default_region": "eu-west-1", "virtual_hosted_style_request": "true"},
            "https://bucket.s3.eu-west-1.amazonaws.com",
        ),
        ({"endpoint": "https://s3.example.com/"}, "https://s3.example.com/bucket"),
        (
            {"endpoint": "https://bucket.example.com", "virtual_hosted_style_request": True},
            "https://bucket.example.com",
        ),
    ],
)
def test_the_bucket_is_where_the_library_finds_it(options: Mapping[str, object], address: str) -> None:
    assert bucket_address(service_options(options, {}), "bucket") == address


def test_without_an_access_key_or_through_a_proxy_it_is_left_to_the_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    with answering(listed()) as (endpoint, seen):
        assert bucket(endpoint, options={"endpoint": endpoint}).abort_stale_uploads(3600) == 0
        proxied = {"endpoint": endpoint, "proxy_url": "http://proxy.invalid:1", **KEYS}
        assert bucket(endpoint, options=proxied).abort_stale_uploads(3600) == 0

    assert seen == []


def test_a_number_is_an_option_of_the_connection_too() -> None:
    settings = StoreSettings(backend="s3", root="bucket", options={**KEYS, "pool_max_idle_per_host": 3})

    assert open_store(settings, disk=SystemDisk()).name == "s3://bucket"
