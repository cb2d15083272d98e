"""Google's store has no emulator that could be trusted: here only the shape of the requests to it is checked."""

from __future__ import annotations

import pytest

from forebay.blobs import BlobChanged, BlobStore, open_store
from forebay.disk import SystemDisk
from forebay.settings import MIB
from forebay.testing.simulated.clock import ManualClock
from tests.blobs.scripted import DATE, Answer, Request, Respond, answering, found
from tests.support.servers import store_settings

BEGUN = b"<InitiateMultipartUploadResult><UploadId>u1</UploadId></InitiateMultipartUploadResult>"
DONE = b"<CompleteMultipartUploadResult><ETag>&quot;e&quot;</ETag></CompleteMultipartUploadResult>"
LISTED = b"""<ListBucketResult><Contents><Key>p/a/k</Key><Size>3</Size><ETag>"e"</ETag>
<LastModified>2026-11-15T09:44:54.000Z</LastModified></Contents></ListBucketResult>"""


def gcs(endpoint: str) -> BlobStore:
    options = {"base_url": endpoint, "bearer_token": "a-token", "allow_http": True}
    return open_store(store_settings("gcs", "bucket/p", options, {}), disk=SystemDisk(), clock=ManualClock())


def google(request: Request) -> Answer:
    """The answers that a bucket with one object would give."""
    tags = {"ETag": '"e"', "x-goog-generation": "7", "Last-Modified": DATE}
    if request.method == "POST":
        return Answer(200, BEGUN if "uploads" in request.path else DONE, tags)
    if request.method == "GET" and "list-type" in request.path:
        return Answer(200, LISTED)
    if request.method == "GET":
        return Answer(206, b"abc", {**tags, "Content-Range": "bytes 0-2/3"})
    return found(3) if request.method == "HEAD" else Answer(200 if request.method == "PUT" else 204, headers=tags)


def test_a_create_asks_for_generation_nought() -> None:
    with answering(google) as (endpoint, seen):
        put = gcs(endpoint).put_if_absent("a/k", b"abc")

    assert put
    assert put.stat.version == "7"
    (request,) = seen
    assert (request.method, request.path, request.body) == ("PUT", "/bucket/p%2Fa%2Fk", b"abc")
    assert request.headers["x-goog-if-generation-match"] == "0"
    assert request.headers["authorization"] == "Bearer a-token"


@pytest.mark.parametrize("status", [409, 412])
def test_a_lost_create_looks_at_what_is_there(status: int) -> None:
    def taken(request: Request) -> Answer:
        return Answer(status) if request.method == "PUT" else google(request)

    with answering(taken) as (endpoint, seen):
        assert not gcs(endpoint).put_if_absent("a/k", b"abc")

    assert [request.method for request in seen] == ["PUT", "HEAD"]


def test_a_read_asks_for_its_range_of_that_very_object() -> None:
    with answering(google) as (endpoint, seen):
        assert gcs(endpoint).get_range("a/k", 0, 3, etag="e") == b"abc"

    assert seen[0].headers["range"] == "bytes=0-2"
    assert seen[0].headers["if-match"] == '"e"'
    changed: Respond = lambda _: Answer(412)  # noqa: E731
    with answering(changed) as (endpoint, _), pytest.raises(BlobChanged):
        gcs(endpoint).get_range("a/k", 0, 3, etag="old")


def test_a_large_upload_goes_in_parts_and_is_completed() -> None:
    with answering(google) as (endpoint, seen):
        gcs(endpoint).upload("a/big", (bytes(MIB) for _ in range(12)))

    assert seen[0].path == "/bucket/p%2Fa%2Fbig?uploads="
    assert seen[-1].method == "POST"
    assert "uploadId=u1" in seen[-1].path
    parts = [request for request in seen if request.method == "PUT"]
    assert sorted(len(part.body) // MIB for part in parts) == [2, 5, 5]
    assert all("partNumber=" in part.path for part in parts)


def test_a_list_asks_for_its_folder() -> None:
    with answering(google) as (endpoint, seen):
        assert [stat.key for stat in gcs(endpoint).list("a")] == ["a/k"]

    assert "prefix=p%2Fa%2F" in seen[0].path
