"""Runs a broker in this process: binds, recovers behind the gate, serves, and ends in order at a signal.

bind → answer "not ready" → open the log → recover its shards → serve → (signal) end streams → commit → close
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path, PurePath
from typing import Final

import uvicorn
import uvloop

from forebay.aio.log import AsyncLog
from forebay.broker.app import Broker
from forebay.broker.guard import Guard, GuardedProtocol
from forebay.broker.heap import SettledHeap
from forebay.broker.table import ROUTES
from forebay.broker.tls import ServerCertificate, TlsListener
from forebay.clock import SystemClock
from forebay.directory import IN_MEMORY
from forebay.errors import Unavailable
from forebay.lifecycle import StopSignals
from forebay.routers import AsyncRouters
from forebay.service.placement import Alone
from forebay.service.quotas import Quotas
from forebay.service.service import Service
from forebay.service.stored import look_at_definitions
from forebay.service.tokens import TokenBook
from forebay.settings import RuntimeSettings, ServerSettings, Settings
from forebay.wire import bodies

logger = logging.getLogger(__name__)

SWITCH_SECONDS: Final = 0.0005
"""How long a thread may keep the interpreter from the event loop."""
ROOM_SECONDS: Final = 1.0
"""How long a request waits for room in a full append queue before it is answered with 429."""
WAIT_SECONDS: Final = 30.0
"""How long a request waits for a thread before it is answered with 503: half of what a client waits by default."""
BACKLOG: Final = 2048


class _Server(uvicorn.Server):
    """Leaves signals to the process."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(path: str | PurePath, settings: Settings, *, on_bound: Callable[[str], None]) -> None:
    """Serve the log at `path` until SIGTERM or SIGINT. For the main thread.

    `on_bound` is called with the address once it is bound, before shards are recovered. A second signal ends the
    process at once.
    """
    allow_descriptors(settings)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.setswitchinterval(SWITCH_SECONDS)
        runner.run(_until_signal(path, settings, on_bound))


async def _until_signal(path: str | PurePath, settings: Settings, on_bound: Callable[[str], None]) -> None:
    heap = SettledHeap()
    process = BrokerRun(path, settings, heap)
    loop = asyncio.get_running_loop()
    with bound_socket(settings.server) as bound, StopSignals(lambda: loop.call_soon_threadsafe(process.stop)):
        try:
            await process.run(bound, on_bound)
        finally:
            heap.end()


class BrokerRun:
    """One broker from its start to its end. For one event loop."""

    def __init__(self, path: str | PurePath, settings: Settings, heap: SettledHeap | None = None) -> None:
        """`Invalid` says what is wrong with the files of TLS. `heap` is given where the process is the broker's own."""
        self._heap = heap
        self._path = path
        self._settings = settings
        self.certificate = ServerCertificate.of(settings.server)
        self._clock = SystemClock()
        self.guard = Guard(settings.server)
        self.broker = Broker(
            ROUTES,
            settings=settings.server,
            guard=self.guard,
            clock=self._clock,
            private=private_places(path, settings),
        )
        self._config = _config(self.broker, settings.server, self.guard)
        self._server = _Server(self._config)
        self._listening: asyncio.Task[None] | None = None

    def stop(self) -> None:
        """Begin to end: take no new requests, end streams, finish the rest. Harmless when repeated. In the loop."""
        self.broker.begin_ending()
        self._server.should_exit = True
        if self._listening is not None:
            self._listening.cancel()

    async def run(self, bound: socket.socket, on_bound: Callable[[str], None]) -> None:
        """Serve until `stop` is called. Raises why the log could not be opened, once every caller has its answer."""
        if self._heap is not None:
            self._heap.begin()
        watching = [
            asyncio.create_task(self.guard.run()),
            asyncio.create_task(self.broker.lag.run()),
            asyncio.create_task(self.broker.watch_rights()),
            asyncio.create_task(self.broker.watch_degraded()),
        ]
        if self.certificate is None:
            serving = asyncio.create_task(self._server.serve(sockets=[bound]))
        else:
            serving = asyncio.create_task(self._server.serve(sockets=[]))
            listener = TlsListener(bound, self.certificate, self.guard, self._connection)
            self._listening = asyncio.create_task(listener.run())
            watching += [self._listening, asyncio.create_task(self.certificate.run())]
        on_bound(url_of(bound, self._settings.server))
        try:
            async with (
                AsyncLog(
                    self._path, self._settings, commits_each_turn=True, room_s=ROOM_SECONDS, wait_s=WAIT_SECONDS
                ) as log,
                self._tokens(log) as tokens,
                self._routers(log) as routers,
            ):
                recovering = asyncio.create_task(self._recover(log, tokens, routers))
                await asyncio.wait((recovering, serving), return_when=asyncio.FIRST_COMPLETED)
                if recovering.done():
                    # Raises what kept all shards closed; single ones only degrade the broker.
                    recovering.result()
                await serving
                # A signal may have come first: the log is closed under the recovery, whose end is of no use any more.
                recovering.cancel()
                await asyncio.gather(recovering, return_exceptions=True)
                await self.broker.finish()
                logger.info("no request is left: closing the log")
        finally:
            self.stop()
            for task in watching:
                task.cancel()
            await serving
        logger.info("the broker has stopped: everything that it acknowledged is durable")

    def _connection(self) -> GuardedProtocol:
        return GuardedProtocol(self._config, self._server.server_state, {}, guard=self.guard)

    @asynccontextmanager
    async def _tokens(self, log: AsyncLog) -> AsyncIterator[TokenBook | None]:
        """The tokens that callers show, followed while the broker runs; `None` where none are asked for."""
        if self._settings.server.access != "tokens":
            yield None
            return
        tokens = TokenBook(log.metadata, self._settings.metadata.prefix, self._clock)
        await asyncio.to_thread(tokens.start)
        try:
            yield tokens
        finally:
            await asyncio.to_thread(tokens.close)

    @asynccontextmanager
    async def _routers(self, log: AsyncLog) -> AsyncIterator[AsyncRouters]:
        """The routers of the log. They are started once it is recovered, and stop before it is closed."""
        routers = AsyncRouters(log, clock=self._clock)
        try:
            yield routers
        finally:
            await routers.stop()

    async def _recover(self, log: AsyncLog, tokens: TokenBook | None, routers: AsyncRouters) -> None:
        _, recovered, _ = await asyncio.gather(
            asyncio.to_thread(bodies.load_arrow),
            log.recover(self.broker.note_progress),
            asyncio.to_thread(look_at_definitions, log.metadata, prefix=self._settings.metadata.prefix),
        )
        unreadable = await log.unreadable_values()
        for failed in recovered.failed:
            logger.error("%s is not served: %s", failed.ref, failed.error)
        quotas = Quotas(self._settings.server, self._clock)
        on_deleted = (lambda: None) if self._heap is None else self._heap.note_deleted
        service = Service(log, quotas=quotas, placement=Alone(), tokens=tokens, routers=routers, on_deleted=on_deleted)
        if self._heap is not None:
            self._heap.freeze()
        self.broker.become_ready(service, recovered, unreadable)
        await routers.start()
        logger.info("ready: %d shards are open, %d are degraded", recovered.opened, len(recovered.failed))


def private_places(path: str | PurePath, settings: Settings) -> tuple[str, ...]:
    """Where the data lies on this machine, as it may stand in an error: no answer names it. Longest first."""
    store = settings.store.root if settings.store.is_directory else None
    given = (str(path), settings.wal.dir, settings.metadata.path, settings.storage.handoff_root, store)
    named = {place for place in given if place is not None and place != IN_MEMORY}
    return tuple(sorted(named | {str(Path(place).absolute()) for place in named}, key=len, reverse=True))


def allow_descriptors(settings: Settings) -> None:
    """Let this process open as many files as the operator allows at most, unless the settings say how many it keeps.

    Half of them are for log files (`runtime.descriptors_max`), the other half for connections and everything else.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if settings.runtime.descriptors_max == RuntimeSettings().descriptors_max and soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@contextmanager
def bound_socket(settings: ServerSettings) -> Iterator[socket.socket]:
    """The socket that clients connect to; `Unavailable` says why the address cannot be bound."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind((settings.host, settings.port))
            bound.listen(BACKLOG)
        except OSError as error:
            raise Unavailable(
                f"cannot bind {settings.host}:{settings.port}: {error.strerror}; stop what has it, or choose another "
                "address with server.host and server.port"
            ) from error
        bound.setblocking(False)
        yield bound


def url_of(bound: socket.socket, settings: ServerSettings) -> str:
    """Where clients reach the broker."""
    host, port = bound.getsockname()[:2]
    scheme = "http" if settings.tls_cert is None else "https"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def _config(broker: Broker, settings: ServerSettings, guard: Guard) -> uvicorn.Config:
    return uvicorn.Config(
        broker,
        http=partial(GuardedProtocol, guard=guard),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=max(1, settings.idle_timeout_ms // 1000),
        timeout_graceful_shutdown=max(1, settings.stop_timeout_ms // 1000),
    )
