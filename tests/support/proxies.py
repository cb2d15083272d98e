"""A TCP proxy for tests that cuts connections at the byte that a test names."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

CHUNK_BYTES = 65_536
CLOSE_SECONDS = 10


class CuttingProxy:
    """Passes bytes on, and cuts a connection when so many bytes of an answer, or of a request, have passed."""

    def __init__(self, target: str) -> None:
        self.target = target
        """The URL that connections are passed on to from now on."""
        self.url = ""
        self.cuts = 0
        """How many connections were cut."""
        self._answer_left: int | None = None
        self._request_left: int | None = None
        self._always: int | None = None
        self._passing: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def cut_answer(self, after: int) -> None:
        """Cut the connection of the next answer after so many of its bytes."""
        self._answer_left = after

    def cut_request(self, after: int) -> None:
        """Cut the connection of the next request after so many of its bytes."""
        self._request_left = after

    def cut_every_answer(self, after: int | None) -> None:
        """Cut every answer from now on; `None` for none."""
        self._always = self._answer_left = after

    async def serve(self, started: threading.Event) -> None:
        """Pass connections on until this is cancelled."""
        server = await asyncio.start_server(self._accepted, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            await self._close(server)

    async def _close(self, server: asyncio.Server) -> None:
        self._is_closed = True
        # A connection that was accepted a moment ago comes to _accepted in the next turns. asyncio would leave it open
        # for ever if the server were closed before that.
        asyncio.get_running_loop().remove_reader(server.sockets[0].fileno())
        await turns()
        server.close()
        for task in self._passing:
            task.cancel()
        await asyncio.gather(*self._passing, return_exceptions=True)
        # What was aborted is closed.
        await turns()

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._is_closed:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._pass_on(reader, writer))
        self._passing.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            """Close the connection however the task ends, also before its first step."""
            self._passing.discard(task)
            # At once: what a peer does not take any more would keep the connection open.
            writer.transport.abort()

        task.add_done_callback(ended)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        where = urlsplit(self.target)
        try:
            far_reader, far_writer = await asyncio.open_connection(where.hostname, where.port)
        except OSError:
            return
        pumps = (
            asyncio.create_task(self._pump(reader, far_writer, is_answer=False)),
            asyncio.create_task(self._pump(far_reader, writer, is_answer=True)),
        )
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            far_writer.transport.abort()
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool) -> None:
        with suppress(ConnectionError):
            while piece := await reader.read(CHUNK_BYTES):
                left = self._answer_left if is_answer else self._request_left
                if left is not None and len(piece) >= left:
                    if is_answer:
                        self._answer_left = self._always
                    else:
                        self._request_left = None
                    self.cuts += 1
                    writer.write(piece[:left])
                    await writer.drain()
                    writer.close()
                    with suppress(ConnectionError):
                        await asyncio.wait_for(writer.wait_closed(), CLOSE_SECONDS)
                    return
                if left is not None and is_answer:
                    self._answer_left = left - len(piece)
                elif left is not None:
                    self._request_left = left - len(piece)
                writer.write(piece)
                await writer.drain()


async def turns() -> None:
    """Let the event loop do what is ready, and what that makes ready."""
    for _ in range(10):
        await asyncio.sleep(0)


@contextmanager
def cutting_proxy(target: str) -> Iterator[CuttingProxy]:
    """A proxy in a thread."""
    proxy = CuttingProxy(target)
    started = threading.Event()
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[None]]] = []

    async def serve() -> None:
        serving = asyncio.create_task(proxy.serve(started))
        running.append((asyncio.get_running_loop(), serving))
        with suppress(asyncio.CancelledError):
            await serving

    thread = threading.Thread(target=asyncio.run, args=(serve(),), name="proxy")
    thread.start()
    try:
        assert started.wait(30)
        yield proxy
    finally:
        loop, serving = running[0]
        loop.call_soon_threadsafe(serving.cancel)
        thread.join()
