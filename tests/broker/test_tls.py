"""TLS of a broker: what clients see, certificates that change while it runs, and files that cannot be used."""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from forebay.broker.tls import HANDSHAKE, ServerCertificate
from forebay.errors import Invalid
from tests.support.brokers import RunningBroker, running_broker, server_settings
from tests.support.commands import invoke

SECONDS = 30.0


class Files(NamedTuple):
    """A certificate and its key in files, and what clients trust."""

    cert: Path
    key: Path
    authority: trustme.CA

    def issue(self) -> trustme.LeafCert:
        """Put a new certificate and its key into the files."""
        made = self.authority.issue_cert("127.0.0.1", "localhost")
        self.write(made)
        return made

    def write(self, made: trustme.LeafCert) -> None:
        self.cert.write_bytes(b"".join(pem.bytes() for pem in made.cert_chain_pems))
        self.key.write_bytes(made.private_key_pem.bytes())

    def trust(self) -> ssl.SSLContext:
        context = ssl.create_default_context()
        self.authority.configure_trust(context)
        return context


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def files(tmp_path: Path, authority: trustme.CA) -> Files:
    made = Files(tmp_path / "server.pem", tmp_path / "server.key", authority)
    made.issue()
    return made


@contextmanager
def serving(tmp_path: Path, files: Files, **server: int) -> Iterator[RunningBroker]:
    settings = server_settings(metrics=(), tls_cert=str(files.cert), tls_key=str(files.key), **server)
    with running_broker(tmp_path / "data", settings) as broker:
        yield broker


def client_of(broker: RunningBroker, files: Files) -> httpx.Client:
    return httpx.Client(base_url=broker.url, timeout=SECONDS, verify=files.trust())


def connect(broker: RunningBroker) -> socket.socket:
    url = httpx.URL(broker.url)
    assert url.port is not None
    return socket.create_connection((url.host, url.port), timeout=SECONDS)


def shown(broker: RunningBroker, files: Files) -> int:
    """The serial number of the certificate that a new connection is shown."""
    with files.trust().wrap_socket(connect(broker), server_hostname="127.0.0.1") as wrapped:
        found = wrapped.getpeercert()
    assert found is not None
    return int(str(found["serialNumber"]), 16)


def look(broker: RunningBroker) -> None:
    """What the broker does every second, twice: a change is used at the second."""
    assert broker.process.certificate is not None
    broker.process.certificate.look()
    broker.process.certificate.look()


def test_a_client_that_trusts_the_certificate_is_served(tmp_path: Path, files: Files) -> None:
    with serving(tmp_path, files) as broker, client_of(broker, files) as client:
        assert broker.url.startswith("https://127.0.0.1:")
        assert client.put("/v1/topics/shop/orders").status_code == 201
        for number in range(3):
            value = "x" * (number * 300_000)
            assert client.post("/v1/topics/shop/orders/records", json=[{"value": value}]).status_code == 200
        page = client.get("/v1/topics/shop/orders/records").json()
        assert [len(record["value"]) for record in page["records"]] == [0, 300_000, 600_000]
        with pytest.raises(httpx.ConnectError), httpx.Client(verify=True) as stranger:
            stranger.get(f"{broker.url}/v1/health")


@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_less_than_tls_1_2_is_refused(tmp_path: Path, files: Files) -> None:
    old = files.trust()
    old.set_ciphers("ALL:@SECLEVEL=0")
    old.minimum_version = ssl.TLSVersion.TLSv1
    old.maximum_version = ssl.TLSVersion.TLSv1_1
    with (
        serving(tmp_path, files) as broker,
        connect(broker) as connection,
        pytest.raises((ssl.SSLError, ConnectionError)),
    ):
        old.wrap_socket(connection, server_hostname="127.0.0.1")


def test_a_client_without_tls_is_cut_off_and_others_are_served(tmp_path: Path, files: Files) -> None:
    with serving(tmp_path, files) as broker:
        with connect(broker) as plain:
            plain.sendall(b"GET /v1/health HTTP/1.1\r\nhost: x\r\n\r\n")
            answer = b""
            try:
                while piece := plain.recv(65536):
                    answer += piece
            except ConnectionError:
                pass
        assert b"HTTP/1.1" not in answer
        with client_of(broker, files) as client:
            assert client.get("/v1/health").status_code == 200
        assert broker.process.guard.refused[HANDSHAKE] == 1


def test_a_handshake_that_never_ends_is_cut_off_in_time(tmp_path: Path, files: Files) -> None:
    with serving(tmp_path, files, request_timeout_ms=200) as broker, connect(broker) as silent:
        silent.sendall(b"\x16\x03\x01")
        assert silent.recv(1) == b"", "closed by the server"
        while broker.process.guard.connections:
            pass  # until the loop has seen the end of what it has closed


def test_connections_count_before_their_handshake(tmp_path: Path, files: Files) -> None:
    with serving(tmp_path, files, connections_per_address_max=2) as broker, connect(broker), connect(broker):
        with connect(broker) as third:
            third.settimeout(SECONDS)
            assert third.recv(1) == b"", "closed by the server"
        assert broker.process.guard.refused["too_many_connections"] == 1
    with serving(tmp_path, files, connections_per_address_max=1) as broker, client_of(broker, files) as client:
        assert client.get("/v1/health").status_code == 200


def test_handshakes_under_way_do_not_hold_up_the_end(tmp_path: Path, files: Files) -> None:
    with serving(tmp_path, files, stop_timeout_ms=600_000) as broker, connect(broker) as silent:
        while broker.process.guard.connections == 0:
            pass
        broker.stop()
        assert silent.recv(1) == b""


def test_a_new_certificate_is_used_by_new_connections_while_a_stream_goes_on(tmp_path: Path, files: Files) -> None:
    with serving(tmp_path, files) as broker, client_of(broker, files) as client:
        client.put("/v1/topics/shop/orders")
        before = shown(broker, files)
        with client.stream("GET", "/v1/watch", params={"topic": "shop/orders"}) as stream:
            lines = stream.iter_lines()

            files.issue()
            look(broker)

            after = shown(broker, files)
            assert after != before
            with client_of(broker, files) as other:
                assert other.post("/v1/topics/shop/orders/records", json=[{"value": "new"}]).status_code == 200
            assert any("new" in line for line in lines)


def test_broken_files_leave_the_old_certificate_in_use(tmp_path: Path, files: Files) -> None:
    with serving(tmp_path, files) as broker:
        before = shown(broker, files)
        for spoil in (lambda: files.cert.write_text("nothing"), files.cert.unlink):
            spoil()
            look(broker)
            assert shown(broker, files) == before
        files.issue()
        look(broker)
        assert shown(broker, files) != before


def test_broken_files_are_logged_once(files: Files, caplog: pytest.LogCaptureFixture) -> None:
    certificate = ServerCertificate(str(files.cert), str(files.key))
    with caplog.at_level(logging.ERROR):
        for path in (files.cert, files.key):
            files.issue()
            path.write_text("nothing")
            for _ in range(5):
                certificate.look()
        files.key.unlink()
        for _ in range(5):
            certificate.look()
    named = [(str(files.cert), "server.tls_cert"), (str(files.key), "server.tls_key"), (str(files.key), "cannot be")]
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(named)
    assert all(path in line and what in line for line, (path, what) in zip(lines, named, strict=True))


def test_half_of_a_change_is_not_used(files: Files) -> None:
    certificate = ServerCertificate(str(files.cert), str(files.key))
    before = certificate.context
    files.issue()
    certificate.look()
    assert certificate.context is before, "it may not be complete yet"
    certificate.look()
    assert certificate.context is not before


def _missing(files: Files) -> tuple[str, Path]:
    files.key.unlink()
    return "server.tls_key", files.key


def _a_directory(files: Files) -> tuple[str, Path]:
    files.cert.unlink()
    files.cert.mkdir()
    return "server.tls_cert", files.cert


def _no_certificate(files: Files) -> tuple[str, Path]:
    files.cert.write_bytes(files.key.read_bytes())
    return "server.tls_cert", files.cert


def _no_key(files: Files) -> tuple[str, Path]:
    files.key.write_bytes(files.cert.read_bytes())
    return "server.tls_key", files.key


def _another_key(files: Files) -> tuple[str, Path]:
    files.key.write_bytes(files.authority.issue_cert("localhost").private_key_pem.bytes())
    return "server.tls_key", files.key


def _encrypted(files: Files) -> tuple[str, Path]:
    key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    files.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"password"),
        )
    )
    return "server.tls_key", files.key


@pytest.mark.parametrize("spoil", [_missing, _a_directory, _no_certificate, _no_key, _another_key, _encrypted])
def test_files_that_cannot_be_used_are_named_before_anything_is_bound(tmp_path: Path, files: Files, spoil: Any) -> None:
    setting, path = spoil(files)
    with pytest.raises(Invalid) as raised:
        ServerCertificate(str(files.cert), str(files.key))
    assert str(raised.value).startswith(f"{setting}: {path} ")
    assert "PRIVATE KEY" not in str(raised.value)

    words = ["serve", "--data", str(tmp_path / "data"), "--set", "server.port=0"]
    words += ["--set", f"server.tls_cert={files.cert}", "--set", f"server.tls_key={files.key}"]
    ended = invoke(words)
    assert ended.exit_code == 2, ended.output
    assert setting in ended.output
    assert "serving" not in ended.stdout
