"""A wire between a store and one member of etcd that can be cut at a chosen moment."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

from tests.support.waiting import PATIENCE


class Proxy:
    """Passes bytes on, or loses them as told."""

    def __init__(self, endpoint: str) -> None:
        parts = urlsplit(endpoint)
        self._target = (parts.hostname or "", parts.port or 0)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.endpoint = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self.lose_answers = False
        """Requests arrive; instead of an answer the connection is cut."""
        self.on_request: Callable[[], None] = lambda: None
        self._spawn(self._accept)

    def close(self) -> None:
        """Cut everything; from now on connections are refused."""
        for one in (self._listening, *self._open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE)
        for one in (self._listening, *self._open):
            one.close()

    def _spawn(self, work: Callable[..., None], *arguments: socket.socket) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listening.accept()
                far = socket.create_connection(self._target)
                self._open += [near, far]
                self._spawn(self._ask, near, far)
                self._spawn(self._answer, far, near)

    def _ask(self, near: socket.socket, far: socket.socket) -> None:
        with contextlib.suppress(OSError):
            for piece in _pieces(near):
                self.on_request()
                far.sendall(piece)
        _cut(near, far)

    def _answer(self, far: socket.socket, near: socket.socket) -> None:
        with contextlib.suppress(OSError):
            for piece in _pieces(far):
                if self.lose_answers:
                    break
                near.sendall(piece)
        _cut(near, far)


def _pieces(source: socket.socket) -> Iterator[bytes]:
    while piece := source.recv(65_536):
        yield piece


def _cut(*both: socket.socket) -> None:
    for one in both:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
