"""Object stores on real servers: ended in the middle of things, filled with large objects, and cleared of leftovers."""

from __future__ import annotations

import http.client
import tracemalloc
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from forebay.blobs import BlobStore, open_store
from forebay.blobs.objects.signing import Credentials, query_text, signed_headers
from forebay.clock import SystemClock
from forebay.disk import SystemDisk
from forebay.errors import ForebayError, Indeterminate, Unavailable
from forebay.settings import MIB, StoreSettings
from forebay.testing.simulated.clock import ManualClock
from tests.blobs import large_objects
from tests.support import servers
from tests.support.servers import ACCESS_KEY, BUCKET, SECRET_KEY, Server, s3_settings

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("blob-servers")]

EXTRA_BYTES_MAX = 64 * MIB


def opened(settings: StoreSettings) -> BlobStore:
    return open_store(settings, disk=SystemDisk())


def test_a_large_upload_and_its_reading_hold_a_few_parts_in_memory(seaweed_server: Server, folder: str) -> None:
    moved = large_objects.moved(seaweed_server.endpoint, folder)

    assert moved["written"] == moved["read"] == large_objects.LARGE_BYTES
    assert moved["writing"] < EXTRA_BYTES_MAX
    assert moved["reading"] < EXTRA_BYTES_MAX


def test_a_bucket_that_is_named_by_its_url_is_the_same_store(seaweed_server: Server, folder: str) -> None:
    named = s3_settings(seaweed_server.endpoint, folder)
    by_url = StoreSettings(root=f"s3://{BUCKET}/{folder}/", options=named.options)

    opened(by_url).put_if_absent("first", b"1")

    assert by_url.name == named.name
    assert opened(named).get_range("first", 0, 1) == b"1"


def test_a_large_upload_to_a_directory_holds_a_few_pieces_in_memory(tmp_path: Path) -> None:
    store = opened(StoreSettings(root=str(tmp_path)))
    tracemalloc.start()
    try:
        store.upload("large.seg", (bytes(MIB) for _ in range(64)))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert most < 8 * MIB


def _then(server: Server, count: int) -> Iterator[bytes]:
    """Some pieces, then the end of the server, then more pieces."""
    for _ in range(count):
        yield bytes(MIB)
    server.kill()
    for _ in range(100):
        yield bytes(MIB)


def test_a_server_ended_in_mid_upload_and_mid_read_is_named_and_leaves_nothing_half(tmp_path: Path) -> None:
    content = bytes(range(256)) * (12 * MIB // 256)
    with servers.seaweed(tmp_path) as server:
        store = opened(s3_settings(server.endpoint, retries_max=1))
        store.upload("whole.seg", [content])

        with pytest.raises((Unavailable, Indeterminate), match=r"broken\.seg"):
            store.upload("broken.seg", _then(server, 12))

    with servers.seaweed(tmp_path) as server:
        patient = opened(s3_settings(server.endpoint, retries_max=30))
        assert patient.get_range("whole.seg", 0, len(content)) == content
        store = opened(s3_settings(server.endpoint, retries_max=1))
        assert [stat.key for stat in store.list()] == ["whole.seg"]
        assert store.stat("broken.seg") is None
        reader = store.read("whole.seg", 0, len(content), chunk_bytes=MIB, ahead=1)
        assert next(reader) == content[:MIB]

        server.kill()

        with pytest.raises(Unavailable, match=r"cannot read whole\.seg"):
            b"".join(reader)
        with pytest.raises(ForebayError, match="s3://"):
            store.put_if_absent("k", b"1")


def test_uploads_left_unfinished_are_aborted_once_they_are_old(seaweed_server: Server, folder: str) -> None:
    settings = s3_settings(seaweed_server.endpoint, folder)
    now_ms = SystemClock().now_ms()
    for key in (f"{folder}/a.seg", f"{folder}/b.seg", "elsewhere/c.seg"):
        assert _begin_upload(seaweed_server, key) == 200

    assert opened(settings).abort_stale_uploads(3600) == 0
    later = open_store(settings, disk=SystemDisk(), clock=ManualClock(now_ms + 600_000))
    assert later.abort_stale_uploads(3600) == 0
    assert later.abort_stale_uploads(300) == 2
    assert later.abort_stale_uploads(300) == 0


@pytest.mark.parametrize("kind", ["seaweed", "moto"])
def test_an_upload_whose_source_failed_is_not_left_unfinished(
    kind: str, request: pytest.FixtureRequest, folder: str
) -> None:
    server: Server = request.getfixturevalue(f"{kind}_server")
    settings = s3_settings(server.endpoint, folder)

    def failing() -> Iterator[bytes]:
        yield from [bytes(MIB)] * 12
        raise KeyError("the source failed")

    with pytest.raises(KeyError):
        opened(settings).upload("k.seg", failing())

    later = open_store(settings, disk=SystemDisk(), clock=ManualClock(SystemClock().now_ms() + 600_000))
    assert later.abort_stale_uploads(300) == 0


def test_credentials_come_from_the_service_chain_where_the_options_name_none(
    seaweed_server: Server, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)
    options = {"endpoint": seaweed_server.endpoint, "region": "us-east-1", "allow_http": True}
    store = opened(StoreSettings(backend="s3", root=f"{BUCKET}/{folder}", options=options))  # type: ignore[arg-type]

    assert store.put_if_absent("k", b"1")
    assert store.abort_stale_uploads(0) == 0


def test_a_long_list_comes_page_by_page(seaweed_server: Server, folder: str) -> None:
    store = opened(s3_settings(seaweed_server.endpoint, folder))
    keys = {f"d/{number:04}" for number in range(1_050)}
    for key in keys:
        store.put_if_absent(key, b"")

    assert {stat.key for stat in store.list("d")} == keys


def _begin_upload(server: Server, key: str) -> int:
    path = f"/{BUCKET}/{key}"
    moment = datetime.fromtimestamp(SystemClock().now_ms() / 1000, UTC).strftime("%Y%m%dT%H%M%SZ")
    query = {"uploads": ""}
    credentials = Credentials(ACCESS_KEY, SECRET_KEY)
    headers = signed_headers("POST", server.endpoint + path, query, credentials, region="us-east-1", moment=moment)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        connection.request("POST", f"{path}?{query_text(query)}", headers=headers)
        return connection.getresponse().status
    finally:
        connection.close()
