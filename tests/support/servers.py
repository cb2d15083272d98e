"""Real object servers on 127.0.0.1 for tests: started on free ports, stopped afterwards.

`make setup` installs them, into `.venv/servers` and `.venv/azurite`. One that is missing or does not start
fails the test that wants it, never skips it.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import hmac
import http.client
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import formatdate
from pathlib import Path
from typing import Final

from forebay.blobs import open_store
from forebay.blobs.objects.signing import Credentials, signed_headers
from forebay.clock import SystemClock
from forebay.disk import SystemDisk
from forebay.settings import MIB, StoreSettings
from tests.support.ports import free_ports
from tests.support.waiting import PATIENCE

BUCKET: Final = "forebay-test"
ACCESS_KEY: Final = "forebaytestkey"
SECRET_KEY: Final = "forebay-test-secret-0123456789"
# Azurite's published development account: no secret of anybody's.
AZURE_ACCOUNT: Final = "devstoreaccount1"
AZURE_KEY: Final = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
START_SECONDS: Final = PATIENCE

_ENVIRONMENT: Final = Path(sys.prefix)
_SERVERS: Final = _ENVIRONMENT / "servers" / "bin"
_NODE: Final = _ENVIRONMENT / "azurite" / "node"
_AZURITE: Final = _ENVIRONMENT / "azurite" / "node_modules" / ".bin" / "azurite-blob"


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running server and how to reach it."""

    name: str
    port: int
    process: subprocess.Popen[bytes]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        """End it at once, as a crash would."""
        self.process.kill()
        self.process.wait()


def is_installed(program: str) -> bool:
    """Whether `make setup` has put this server's program where it is looked for."""
    return (_SERVERS / program).exists()


@contextlib.contextmanager
def seaweed(directory: Path, *, volumes_max: int = 16, ports: Sequence[int] = ()) -> Iterator[Server]:
    """SeaweedFS with its S3 gateway and one bucket, in volumes of 64 MB.

    With the directory and the eight `ports` of one that was ended it takes its place.
    """
    ports = ports or free_ports(8)
    config = directory / "s3.json"
    credentials = [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}]
    identity = {"name": "test", "credentials": credentials, "actions": ["Admin", "Read", "Write", "List"]}
    config.write_text(json.dumps({"identities": [identity]}), encoding="utf-8")
    names = ["master.port", "master.port.grpc", "volume.port", "volume.port.grpc"]
    names += ["filer.port", "filer.port.grpc", "s3.port", "s3.port.grpc"]
    arguments = [f"-{name}={port}" for name, port in zip(names, ports, strict=True)]
    arguments += [f"-dir={directory}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-s3", f"-s3.config={config}"]
    arguments += ["-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false"]
    arguments += [
        "-master.volumeSizeLimitMB=64",
        f"-volume.max={volumes_max}",
        "-volume.minFreeSpace=0",
        "-master.electionTimeout=1s",
    ]
    with _running("seaweedfs", ports[6], [str(_SERVERS / "weed"), "server", *arguments], directory) as server:
        _until_answered(server, lambda: _make_s3_bucket(server))
        # Its gateway answers before its volumes do.
        patient = open_store(s3_settings(server.endpoint, "ready", retries_max=30), disk=SystemDisk())
        patient.upload("first", [b"1"])
        yield server


@contextlib.contextmanager
def moto(directory: Path) -> Iterator[Server]:
    """The S3 of moto, in memory, with one bucket."""
    (port,) = free_ports(1)
    command = [str(_SERVERS / "moto_server"), "-H", "127.0.0.1", "-p", str(port)]
    with _running("moto", port, command, directory) as server:
        _until_answered(server, lambda: _make_s3_bucket(server))
        yield server


@contextlib.contextmanager
def azurite(directory: Path) -> Iterator[Server]:
    """Azurite's blob service, with one container."""
    (port,) = free_ports(1)
    command = [
        str(_NODE),
        str(_AZURITE),
        "--blobHost",
        "127.0.0.1",
        "--blobPort",
        str(port),
        "--location",
        str(directory),
    ]
    command += ["--silent", "--disableTelemetry", "--skipApiVersionCheck", "--disableProductStyleUrl"]
    with _running("azurite", port, command, directory) as server:
        _until_answered(server, lambda: _make_container(server))
        yield server


def s3_settings(endpoint: str, prefix: str = "p", **changes: object) -> StoreSettings:
    """Settings of a store in the bucket of an S3 server."""
    options = {"endpoint": endpoint, "region": "us-east-1", "allow_http": True}
    options |= {"access_key_id": ACCESS_KEY, "secret_access_key": SECRET_KEY}
    return store_settings("s3", f"{BUCKET}/{prefix}", options, changes)


def azure_settings(endpoint: str, prefix: str = "p", **changes: object) -> StoreSettings:
    """Settings of a store in the container of an Azure server."""
    options = {"endpoint": f"{endpoint}/{AZURE_ACCOUNT}", "allow_http": True}
    options |= {"account_name": AZURE_ACCOUNT, "account_key": AZURE_KEY}
    return store_settings("azure", f"{BUCKET}/{prefix}", options, changes)


def store_settings(
    backend: str, root: str, options: Mapping[str, object], changes: Mapping[str, object]
) -> StoreSettings:
    """Settings with small parts, short time-outs and few retries, unless changed."""
    values: dict[str, object] = {"part_bytes": 5 * MIB, "request_timeout_ms": 10_000, "retries_max": 2, **changes}
    values["options"] = {**options, **values.get("options", {})}  # type: ignore[dict-item]
    return StoreSettings(backend=backend, root=root, **values)  # type: ignore[arg-type]


@contextlib.contextmanager
def _running(name: str, port: int, command: list[str], directory: Path) -> Iterator[Server]:
    """The server as a process of its own, ended whatever happens; its words are kept beside its files."""
    if not Path(command[0]).exists() or not all(Path(part).exists() for part in command[:2] if part.startswith("/")):
        raise AssertionError(f"{name} is not installed at {command[0]}: run make setup")
    with (directory / "output.txt").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, cwd=directory)
    try:
        yield Server(name=name, port=port, process=process)
    finally:
        # At once: nothing it keeps is wanted any more.
        process.kill()
        process.wait()


def _until_answered(server: Server, ask: Callable[[], int]) -> None:
    """Ask for the bucket until there is one, made now or found; a server that ends or stays silent is an error."""
    pause = threading.Event()
    answer: object = None
    for _ in range(int(START_SECONDS / 0.1)):
        try:
            answer = ask()
            if answer in (200, 201, 409):
                return
        except (OSError, http.client.HTTPException) as error:
            answer = error
        if server.process.poll() is not None:
            break
        pause.wait(0.1)
    raise AssertionError(f"{server.name} did not start on port {server.port}: last answer {answer!r}")


def _make_s3_bucket(server: Server) -> int:
    moment = datetime.fromtimestamp(SystemClock().now_ms() / 1000, UTC).strftime("%Y%m%dT%H%M%SZ")
    credentials = Credentials(ACCESS_KEY, SECRET_KEY)
    url = f"{server.endpoint}/{BUCKET}"
    headers = signed_headers("PUT", url, {}, credentials, region="us-east-1", moment=moment)
    return _answer(server, "PUT", f"/{BUCKET}", headers)


def _make_container(server: Server) -> int:
    date = formatdate(usegmt=True)
    headers = {"x-ms-date": date, "x-ms-version": "2021-08-06", "Content-Length": "0"}
    path = f"/{AZURE_ACCOUNT}/{BUCKET}"
    canonical = f"x-ms-date:{date}\nx-ms-version:2021-08-06\n/{AZURE_ACCOUNT}{path}\nrestype:container"
    text = "PUT" + "\n" * 12 + canonical
    digest = hmac.new(base64.b64decode(AZURE_KEY), text.encode(), hashlib.sha256).digest()
    headers["Authorization"] = f"SharedKey {AZURE_ACCOUNT}:{base64.b64encode(digest).decode()}"
    return _answer(server, "PUT", f"{path}?restype=container", headers)


def _answer(server: Server, method: str, path: str, headers: Mapping[str, str]) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        connection.request(method, path, headers=dict(headers))
        return connection.getresponse().status
    finally:
        connection.close()
