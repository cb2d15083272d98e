"""The acknowledgement of an append that was not waited for: await it, ask it, or be called back."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator

from forebay.errors import Indeterminate
from forebay.wal.staging import Ticket

_LOCK = threading.Lock()


class Ack:
    """One append on its way. Settled by another thread, once; callbacks run there and must be quick."""

    __slots__ = ("_callbacks", "_ticket", "partition")

    def __init__(self, partition: int) -> None:
        self.partition = partition
        self._ticket = Ticket(self._settled)
        self._callbacks: list[Callable[[Ack], None]] | None = []

    @property
    def ticket(self) -> Ticket:
        """What the shard settles."""
        return self._ticket

    @property
    def done(self) -> bool:
        """Whether the outcome is known."""
        return self._ticket.done

    def result(self, timeout: float | None = None) -> int:
        """Wait for the first offset of the append, or the error it failed with.

        `Indeterminate` if the time is up: the append is still on its way, and this may be asked again.
        """
        if not self._ticket.done:
            settled = threading.Event()
            self.add_callback(lambda _: settled.set())
            if not settled.wait(timeout):
                raise Indeterminate(f"not acknowledged within {timeout} s: it may still be; ask again")
        return self._ticket.result()

    def add_callback(self, callback: Callable[[Ack], None]) -> None:
        """Call `callback(ack)` when the outcome is known; at once if it is already."""
        with _LOCK:
            if self._callbacks is not None:
                self._callbacks.append(callback)
                return
        callback(self)

    def __await__(self) -> Generator[object, None, int]:
        if not self._ticket.done:
            loop = asyncio.get_running_loop()
            settled = loop.create_future()

            def wake(_: Ack) -> None:
                loop.call_soon_threadsafe(_settle, settled)

            self.add_callback(wake)
            yield from settled
        return self._ticket.result()

    def _settled(self, _: Ticket) -> None:
        with _LOCK:
            callbacks, self._callbacks = self._callbacks, None
        for callback in callbacks or ():
            callback(self)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
