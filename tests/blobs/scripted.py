"""Small HTTP servers that answer as a script says, for what no real server can be made to do."""

from __future__ import annotations

import contextlib
import http.client
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TypeAlias

_OF_ONE_CONNECTION = ("connection", "content-length", "transfer-encoding")
DATE = "Sun, 15 Nov 2026 09:44:54 GMT"


@dataclass(frozen=True, slots=True)
class Request:
    """What came in."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """What goes out; a status of 0 breaks the connection instead, `cut` breaks it after so many bytes of the body."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    cut: int | None = None


DROPPED = Answer(0)
Respond: TypeAlias = Callable[[Request], Answer]


@contextlib.contextmanager
def answering(respond: Respond) -> Iterator[tuple[str, list[Request]]]:
    """A server that answers by `respond`: where it is, and what it was asked."""
    seen: list[Request] = []

    class Exchange(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _exchange(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            headers = {name.lower(): value for name, value in self.headers.items()}
            request = Request(self.command, self.path, headers, body)
            seen.append(request)
            answer = respond(request)
            if answer.status == 0:
                self.close_connection = True
                return
            self.send_response(answer.status)
            for name, value in {"Content-Length": str(len(answer.body)), **answer.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.body[: answer.cut])
            self.close_connection = self.close_connection or answer.cut is not None

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _exchange  # noqa: N815

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Exchange)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", seen
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def in_turn(**scripts: list[Answer]) -> Respond:
    """For each method its answers one after another, the last one for ever."""
    scripts = {method: list(answers) for method, answers in scripts.items()}

    def respond(request: Request) -> Answer:
        answers = scripts[request.method.lower()]
        return answers.pop(0) if len(answers) > 1 else answers[0]

    return respond


def found(size: int, *, etag: str = "e") -> Answer:
    """The answer to a look at an object."""
    return Answer(200, bytes(size), {"ETag": f'"{etag}"', "Last-Modified": DATE})


def forwarded(request: Request, port: int) -> Answer:
    """What a real server on this machine answers to the request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.putrequest(request.method, request.path, skip_host=True, skip_accept_encoding=True)
        for name, value in request.headers.items():
            if name != "connection":
                connection.putheader(name, value)
        connection.endheaders(request.body)
        answer = connection.getresponse()
        kept = {name: value for name, value in answer.getheaders() if name.lower() not in _OF_ONE_CONNECTION}
        if request.method == "HEAD":
            kept["Content-Length"] = answer.getheader("Content-Length") or "0"
        return Answer(answer.status, answer.read(), kept)
    finally:
        connection.close()


def careless() -> Respond:
    """S3 as far as it goes, deaf to If-None-Match."""
    objects: dict[str, bytes] = {}

    def respond(request: Request) -> Answer:
        path = request.path.partition("?")[0]
        if request.method == "PUT":
            objects[path] = request.body
            return Answer(200, headers={"ETag": f'"{len(objects[path])}"'})
        if request.method == "POST":
            keys = re.findall(rb"<Key>(.*?)</Key>", request.body)
            for key in keys:
                objects.pop(f"{path}/{key.decode()}", None)
            deleted = b"".join(b"<Deleted><Key>%s</Key></Deleted>" % key for key in keys)
            return Answer(200, b"<DeleteResult>%s</DeleteResult>" % deleted)
        if request.method == "DELETE":
            objects.pop(path, None)
            return Answer(204)
        if path not in objects:
            return Answer(404)
        body = objects[path]
        headers = {"ETag": f'"{len(body)}"', "Last-Modified": DATE}
        if "range" in request.headers:
            headers["Content-Range"] = f"bytes 0-{len(body) - 1}/{len(body)}"
            return Answer(206, body, headers)
        return Answer(200, body, headers)

    return respond
