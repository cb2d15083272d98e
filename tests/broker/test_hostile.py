"""Hostile requests against a broker in a process of its own: each is answered right, or refused in the one error shape.

No request leaves a traceback in the log, keeps the broker from answering the next one, or costs memory that stays.
"""

from __future__ import annotations

import gzip
import json
import re
import signal
import socket
import zlib
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import httpx
import psutil
import pyarrow as pa
import pytest
import zstandard

from forebay.wire.bodies import MediaType, encode_arrow
from tests.support.brokers import BrokerCommand

pytestmark = pytest.mark.slow

SECONDS: Final = 60.0
MIB: Final = 1 << 20
GROWTH_BYTES_MAX: Final = 256 * MIB
"""What all hostile requests together may leave the process with: buffers that the allocator keeps, no bodies."""
RECORDS: Final = "/v1/topics/shop/orders/records"


class RawAnswer(NamedTuple):
    """The first answer on a connection; status 0 if the broker closed it without one."""

    status: int
    headers: dict[str, str]
    body: bytes

    def code(self) -> str | None:
        """The code of the error, which has the one shape; `None` for an answer that is none."""
        if self.status < 400:
            return None
        error = json.loads(self.body)["error"]
        assert error.keys() == {"code", "message", "detail"}
        assert error["message"]
        code: str = error["code"]
        return code


class HostileClient:
    """Bytes of any kind to one broker."""

    def __init__(self, broker: BrokerCommand) -> None:
        self.broker = broker
        self.url = httpx.URL(broker.url)

    def connect(self) -> socket.socket:
        """A connection."""
        return socket.create_connection((self.url.host, self.url.port or 80), timeout=SECONDS)

    def send(self, *pieces: bytes, half_close: bool = False) -> RawAnswer:
        """Send these bytes on a connection of their own; the first answer."""
        with self.connect() as connection:
            try:
                for piece in pieces:
                    connection.sendall(piece)
                if half_close:
                    connection.shutdown(socket.SHUT_WR)
            except OSError:
                pass  # It was refused before all was sent.
            return read_raw(connection, b"")[0]

    def post(self, body: bytes, *, path: str = RECORDS, **headers: str) -> RawAnswer:
        """Send a body with its length."""
        lines = {
            "host": "localhost",
            "content-length": str(len(body)),
            **{n.replace("_", "-"): v for n, v in headers.items()},
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        return self.send(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body)

    def memory(self) -> int:
        """Bytes of memory that the process has."""
        return int(psutil.Process(self.broker.process.pid).memory_info().rss)


def read_raw(connection: socket.socket, got: bytes, *, method: str = "GET") -> tuple[RawAnswer, bytes]:
    """One answer, and the bytes behind it."""
    while b"\r\n\r\n" not in got:
        try:
            piece = connection.recv(65536)
        except ConnectionResetError:
            piece = b""
        if not piece:
            return RawAnswer(0, {}, b""), b""
        got += piece
    head, _, rest = got.partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
    length = 0 if method == "HEAD" else int(headers.get("content-length", 0))
    while len(rest) < length:
        rest += connection.recv(65536)
    return RawAnswer(int(lines[0].split()[1]), headers, rest[:length]), rest[length:]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostileClient]:
    """A client of one broker for all tests; in the end the broker still serves, in order and in little memory."""
    with BrokerCommand(
        tmp_path_factory.mktemp("hostile") / "data", "--set", f"server.body_bytes_max={8 * MIB}"
    ) as broker:
        client = HostileClient(broker)
        with broker.client() as asking:
            assert asking.put("/v1/topics/shop/orders", json={}).status_code == 201
            asking.post(RECORDS, json=[{"value": "x" * 1000}] * 1000)
            before = client.memory()
            yield client
            assert asking.post(RECORDS, json=[{"value": "fine"}]).status_code == 200
            grown = client.memory() - before
        code, logged = broker.end(signal.SIGTERM)
    assert grown < GROWTH_BYTES_MAX, f"{before / MIB:.0f} MiB before, {grown / MIB:.0f} MiB more after"
    assert code == 0
    assert "Traceback" not in logged
    assert not re.findall(r'"level": ?"(?:error|critical)".*', logged)


JSON_BODIES: Final[dict[str, tuple[bytes, int]]] = {
    "NaN": (b'[{"value": NaN}]', 400),
    "infinity": (b'[{"value": "a", "timestamp": Infinity}]', 400),
    "a huge number": (b'[{"value": "a", "timestamp": 1' + b"0" * 5000 + b"}]", 400),
    "a huge exponent": (b'[{"value": "a", "timestamp": 1e999999}]', 400),
    "a fraction": (b'[{"value": "a", "timestamp": 1.5}]', 400),
    "depth 10^5": (b"[" * 100_000, 400),
    "depth 10^5, closed": (b"[" * 100_000 + b"]" * 100_000, 400),
    "depth 10^5 in an unknown field": (b'[{"x": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}]", 400),
    "a lone surrogate": (b'[{"value": "\\ud800"}]', 400),
    "surrogates the wrong way round": (b'[{"value": "\\udc00\\ud800"}]', 400),
    "bytes that are no text": (b'[{"value": "\xff\xfe"}]', 400),
    "a byte order mark": (b'\xef\xbb\xbf[{"value": "a"}]', 400),
    "UTF-16": ('[{"value": "a"}]'.encode("utf-16"), 400),
    "a name twice": (b'[{"value": "a", "value": "b"}]', 200),
    "zero bytes behind": (b'[{"value": "a"}]\x00', 400),
    "nothing": (b"", 400),
    "null": (b"null", 400),
    "a number": (b"1", 400),
    "no records": (b"[]", 200),
    "a tag with a line end": (b'[{"value": "a", "tag": "x\\r\\nset-cookie: y"}]', 200),
    "a gap": (b'[{"gap": {"partition": 0, "start": 0, "stop": 1, "reason": "lost"}}]', 400),
    "a header without a name": (b'[{"value": "a", "headers": [["", "x"]]}]', 200),
}


@pytest.mark.parametrize("name", JSON_BODIES)
@pytest.mark.proves("I30")
def test_a_hostile_json_body_is_right_or_refused(hostile: HostileClient, name: str) -> None:
    body, status = JSON_BODIES[name]
    answer = hostile.post(body)
    assert answer.status == status, answer
    assert answer.code() == (None if status == 200 else "invalid")


BOMB: Final = b"[" + b" " * (64 * MIB)


@pytest.mark.parametrize(
    ("encoding", "body", "status"),
    [
        ("gzip", gzip.compress(BOMB, 1), 413),
        ("gzip", gzip.compress(gzip.compress(BOMB, 1), 9), 400),
        ("gzip", gzip.compress(b"[]")[:-4], 400),
        ("gzip", gzip.compress(b'[{"value": "a"}]') * 2, 400),
        ("gzip", zlib.compress(b"[]"), 400),
        ("zstd", zstandard.compress(BOMB, 1), 413),
        ("zstd", zstandard.compress(b"[]")[:-1], 400),
        ("zstd", b"\x28\xb5\x2f\xfd" + b"\xff" * 12, 400),
        ("gzip, gzip", b"[]", 422),
        ("br", b"[]", 422),
    ],
    ids=[
        "gzip that grows without end",
        "gzip in gzip",
        "gzip that was cut",
        "gzip twice",
        "zlib, not gzip",
        "zstd that grows without end",
        "zstd that was cut",
        "not zstd",
        "two encodings",
        "an unknown encoding",
    ],
)
@pytest.mark.proves("I30")
def test_a_compressed_body_is_limited_by_what_comes_out(
    hostile: HostileClient, encoding: str, body: bytes, status: int
) -> None:
    answer = hostile.post(body, content_encoding=encoding)
    assert answer.status == status, answer
    assert answer.code() == {400: "invalid", 413: "too_large", 422: "unsupported"}[status]


def _arrow(**columns: pa.Array) -> bytes:
    return encode_arrow([pa.record_batch(columns)])


VALUES: Final = pa.array([b"a", b"b"])
ARROW_BODIES: Final[dict[str, tuple[bytes, int]]] = {
    "plain": (_arrow(value=VALUES), 200),
    "sliced": (_arrow(value=pa.array([b"x", b"a", b"b", b"y"]).slice(1, 2)), 200),
    "large offsets": (_arrow(value=VALUES.cast(pa.large_binary())), 200),
    "text": (_arrow(value=pa.array(["a", "b"])), 200),
    "nulls only": (_arrow(value=pa.nulls(2)), 200),
    "numbers": (_arrow(value=pa.array([1, 2])), 400),
    "lists": (_arrow(value=pa.array([[b"a"], [b"b"]])), 400),
    "no value column": (_arrow(key=VALUES), 400),
    "an unknown column": (_arrow(value=VALUES, other=VALUES), 400),
    "no rows": (_arrow(value=pa.array([], pa.binary())), 200),
    "cut short": (_arrow(value=VALUES)[:-20], 400),
    "bytes behind": (_arrow(value=VALUES) + b"more", 400),
    "no stream": (b"ARROW1\0\0" * 10, 400),
    "lengths that lie": (_arrow(value=VALUES).replace(b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f"), 400),
    "nothing": (b"", 400),
}


@pytest.mark.parametrize("name", ARROW_BODIES)
def test_an_arrow_body_of_any_layout_is_right_or_refused(hostile: HostileClient, name: str) -> None:
    body, status = ARROW_BODIES[name]
    answer = hostile.post(body, content_type=str(MediaType.ARROW))
    assert answer.status == status, answer
    assert answer.code() == (None if status == 200 else "invalid")


@pytest.mark.parametrize("entries", [pa.DictionaryArray.from_arrays(pa.array([0] * 100_000), pa.array([b"x" * MIB]))])
def test_an_arrow_body_whose_entries_repeat_is_limited_by_what_comes_out(
    hostile: HostileClient, entries: pa.Array
) -> None:
    answer = hostile.post(_arrow(value=entries), content_type=str(MediaType.ARROW))
    assert answer.status in (400, 413), answer
    assert answer.code() in ("invalid", "too_large")


def _get(path: bytes, *headers: bytes) -> bytes:
    return b"GET " + path + b" HTTP/1.1\r\nhost: localhost\r\n" + b"".join(line + b"\r\n" for line in headers) + b"\r\n"


HEADS: Final[dict[str, tuple[bytes, int]]] = {
    "a slash that is encoded": (_get(b"/v1/topics/shop%2forders/records"), 404),
    "a slash that is encoded twice": (_get(b"/v1/topics/shop%252f/orders"), 400),
    "dots": (_get(b"/v1/topics/../../etc/passwd"), 404),
    "dots that are encoded": (_get(b"/v1/topics/%2e%2e/%2e%2e"), 400),
    "a zero byte": (_get(b"/v1/topics/shop/orders%00"), 404),
    "overlong UTF-8": (_get(b"/v1/topics/shop/%c0%af"), 404),
    "half an escape": (_get(b"/v1/topics/shop/%4"), 400),
    "line ends in a name": (_get(b"/v1/topics/shop/a%0d%0aset-cookie:%20x=1"), 400),
    "a whole address": (_get(b"http://other/v1/topics/shop/orders"), 200),
    "an address without a slash": (_get(b"v1/topics"), 400),
    "a star": (b"OPTIONS * HTTP/1.1\r\nhost: localhost\r\n\r\n", 404),
    "OPTIONS": (b"OPTIONS /v1/topics HTTP/1.1\r\nhost: localhost\r\n\r\n", 405),
    "TRACE": (b"TRACE /v1/topics HTTP/1.1\r\nhost: localhost\r\n\r\n", 405),
    "CONNECT": (b"CONNECT other:443 HTTP/1.1\r\nhost: localhost\r\n\r\n", 400),
    "a method of its own": (b"PURGE /v1/topics HTTP/1.1\r\nhost: localhost\r\n\r\n", 405),
    "Accept nonsense": (_get(RECORDS.encode(), b"accept: ;;;,,,q=x/\xff"), 406),
    "Accept of an image": (_get(RECORDS.encode(), b"accept: image/png"), 406),
    "an Authorization that is none": (_get(b"/v1/topics", b"authorization: Bearer"), 401),
    "a query that is no text": (_get(b"/v1/topics?prefix=%ff%fe"), 400),
    "a query of 10,000 parameters": (_get(b"/v1/topics?" + b"&".join(b"topic=a" for _ in range(1000))), 400),
    "a huge offset": (_get(RECORDS.encode() + b"?start=" + b"9" * 4000), 400),
    "a negative partition": (_get(RECORDS.encode() + b"?partition=-1"), 400),
    "an upgrade": (_get(b"/v1/topics", b"connection: upgrade", b"upgrade: websocket"), 200),
    "a request id with a control character": (_get(b"/v1/health", b"x-request-id: a\x0bb"), 400),
}


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.proves("I30")
def test_a_hostile_address_or_header_is_right_or_refused(hostile: HostileClient, name: str) -> None:
    sent, status = HEADS[name]
    answer = hostile.send(sent)
    assert answer.status == status, answer
    answer.code()
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize(
    "head",
    [
        b"content-length: 3\r\ncontent-length: 5\r\n",
        b"content-length: 3x\r\n",
        b"content-length: 99999999999999999999999\r\n",
        b"transfer-encoding: chunked, identity\r\ncontent-length: 3\r\n",
        b"content-length : 3\r\n",
        b"bad header\r\n",
        b"a\x00b: c\r\n",
    ],
)
def test_lengths_that_lie_are_refused(hostile: HostileClient, head: bytes) -> None:
    answer = hostile.send(b"POST %s HTTP/1.1\r\nhost: localhost\r\n%s\r\n[]" % (RECORDS.encode(), head))
    assert answer.status in (400, 413), answer
    assert answer.code() in ("bad_request", "too_large")


def test_a_chunked_body_without_an_end_is_refused_at_the_limit(hostile: HostileClient) -> None:
    """What comes behind the answer is thrown away for a while, so that the answer arrives; then the connection ends."""
    head = b"POST %s HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n" % RECORDS.encode()
    chunk = b"%x\r\n%s\r\n" % (MIB, b" " * MIB)
    before = hostile.memory()
    with hostile.connect() as connection:
        connection.sendall(head)
        for _ in range(64):
            connection.sendall(chunk)
        answer, _ = read_raw(connection, b"")
        grown = hostile.memory() - before
        with pytest.raises(OSError):
            while True:
                connection.sendall(chunk)
    assert (answer.status, answer.code()) == (413, "too_large")
    assert grown < 32 * MIB


def test_a_client_that_closes_its_half_gets_its_answer_or_none(hostile: HostileClient) -> None:
    whole = hostile.send(_get(b"/v1/health"), half_close=True)
    assert whole.status in (0, 200)
    cut = hostile.send(
        b"POST %s HTTP/1.1\r\nhost: localhost\r\ncontent-length: 10\r\n\r\n[]" % RECORDS.encode(), half_close=True
    )
    assert cut.status in (0, 400)


def test_requests_sent_at_once_are_answered_in_order(hostile: HostileClient) -> None:
    paths = [b"/v1/health", b"/nothing", b"/v1/topics/shop/orders", b"/v1/ready"]
    with hostile.connect() as connection:
        connection.sendall(b"".join(map(_get, paths)))
        rest, found = b"", []
        for _ in paths:
            answer, rest = read_raw(connection, rest)
            found.append(answer.status)
    assert found == [200, 404, 200, 200]


def test_the_head_of_an_answer_is_that_of_a_get_without_its_body(hostile: HostileClient) -> None:
    with hostile.connect() as connection:
        connection.sendall(b"HEAD /v1/topics/shop/orders HTTP/1.1\r\nhost: localhost\r\n\r\n" + _get(b"/v1/ready"))
        head, rest = read_raw(connection, b"", method="HEAD")
        assert (head.status, int(head.headers["content-length"]) > 0) == (200, True)
        following, _ = read_raw(connection, rest)
    assert json.loads(following.body)["ready"] is True


def test_what_records_carry_comes_back_in_bodies_and_never_in_headers(hostile: HostileClient) -> None:
    evil = "x\r\nset-cookie: a=1\r\n\r\n<script>"
    record: dict[str, Any] = {"value": evil, "key": evil, "tag": evil[:60], "headers": {evil: evil}}
    with hostile.broker.client() as client:
        assert client.put("/v1/topics/shop/evil", json={}).status_code == 201
        assert client.post("/v1/topics/shop/evil/records", json=[record]).status_code == 200
        for media in (MediaType.JSON, MediaType.NDJSON, MediaType.ARROW, MediaType.FRAMES):
            answer = client.get("/v1/topics/shop/evil/records", headers={"accept": str(media)})
            assert answer.status_code == 200
            assert "set-cookie" not in answer.headers
            assert evil not in str(answer.headers)
        (found,) = client.get("/v1/topics/shop/evil/records").json()["records"]
        assert {name: found[name] for name in record} == record
        with client.stream("GET", "/v1/watch", params={"topic": "shop/evil", "start": "earliest"}) as stream:
            text = b""
            for chunk in stream.iter_raw():
                text += chunk
                if b"data: " in text:
                    break
    assert b"\r\n" not in text


def test_large_bodies_that_are_refused_leave_nothing_behind(hostile: HostileClient) -> None:
    def refuse() -> int:
        for _ in range(10):
            assert hostile.post(b" " * (9 * MIB)).status == 413
            assert hostile.post(b'[{"value": "' + b"x" * (7 * MIB)).status == 400
        return hostile.memory()

    first = refuse()  # The allocator has then got what such bodies take.
    refuse()
    last = refuse()
    assert last - first < 64 * MIB, f"{first / MIB:.0f} MiB after 20 bodies, {last / MIB:.0f} MiB after 60"
