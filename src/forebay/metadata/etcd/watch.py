"""Watches: a stream of changes that begins again where it stood whenever its member is lost.

A thread of each watch reads the stream; `poll` takes what has come in. A stream that is silent for long is
opened again after a read that asks the majority, so a member that hangs or is cut off delays a watch, and
never ends it. Every stream begins one revision early: etcd before 3.5.16 forgets deletions *at* the revision it
compacts to and yet lets a watch begin there.
"""

from __future__ import annotations

import copy
import logging
import threading
from types import TracebackType
from typing import Self

import msgspec

from forebay.decoders import decoder
from forebay.errors import Closed, ForebayError, Unavailable
from forebay.locks import Rank, RankedCondition
from forebay.metadata.etcd.gateway import Gateway, ReplyStream
from forebay.metadata.etcd.keyspace import Keyspace, span_of
from forebay.metadata.etcd.refusals import Refused, failure_by
from forebay.metadata.etcd.wire import RangeReply, WatchMessage, WatchReply, span_request, watch_request
from forebay.metadata.seam import HISTORY_CHANGES_MAX, Change, Compacted

IDLE_S = 10.0
_JOIN_S = 2.0
_log = logging.getLogger(__name__)


class EtcdWatch:
    """A watch of an `EtcdMetadata`."""

    def __init__(
        self, gateway: Gateway, keyspace: Keyspace, prefix: str, start: int, *, idle_s: float = IDLE_S
    ) -> None:
        self._gateway = gateway
        self._keyspace = keyspace
        self._span = span_of(prefix)
        self._idle_s = idle_s
        self._next = start
        self._thread: threading.Thread | None = None
        self._mail = RankedCondition(Rank.STORE, "metadata.etcd_watch")
        self._changes: list[Change] = []
        self._arrived = start - 1
        """Every change up to and including this revision was handed out or lies in `_changes`."""
        self._stream: ReplyStream | None = None
        self._trouble: ForebayError | None = None
        self._lost: ForebayError | None = None
        self._closed = False

    @property
    def revision(self) -> int:
        return self._next - 1

    def poll(self, timeout_s: float) -> list[Change]:
        self._refuse_if_closed()
        if self._thread is None:
            self._begin()
        with self._mail:
            self._mail.wait_for(lambda: self._changes or self._lost or self._is_over(), timeout_s)
            self._refuse_if_closed()
            changes, self._changes = self._changes, []
            self._next = max(self._next, self._arrived + 1)
            self._mail.notify_all()
            failure = self._lost or self._trouble
        if failure is not None and not changes:
            raise copy.copy(failure) from failure
        return changes

    def close(self) -> None:
        if self._gateway.guard.is_forked:
            self._closed = True
            return
        with self._mail:
            self._closed = True
            self._mail.notify_all()
            if self._stream is not None:
                self._stream.interrupt()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self) -> None:
        self.check_kept()
        thread = threading.Thread(target=self._read_on, name="forebay-watch", daemon=True)
        with self._mail:
            self._refuse_if_closed()
            thread.start()
            self._thread = thread

    def _is_over(self) -> bool:
        return self._closed or self._gateway.ended

    def _refuse_if_closed(self) -> None:
        self._gateway.refuse_if_ended()
        if self._closed:
            raise Closed("this watch is closed: open another")

    def _read_on(self) -> None:
        """The thread: stream after stream, until the watch is over or has lost its place."""
        failures = 0
        while not self._is_over():
            try:
                self._follow()
                failures = 0
            except (Closed, Unavailable) as error:
                if isinstance(error, Compacted):
                    return self._give_up(error)
                if failures == 0:
                    _log.info("a watch begins again at revision %d: %s", self._arrived + 1, error)
                self._trouble = error
                self._gateway.pause(min(failures, 8))
                failures += 1
            except ForebayError as error:
                return self._give_up(error)
            except Exception as error:
                self._give_up(Closed(f"this watch has failed ({error!r}): open another"))
                raise
        return None

    def _follow(self) -> None:
        """Read one stream to its end."""
        start = self._arrived + 1
        self.check_kept()
        with self._gateway.stream("/v3/watch", watch_request(self._span, max(start - 1, 1)), self._idle_s) as stream:
            try:
                with self._mail:
                    self._stream = stream
                if self._is_over():
                    return
                for line in stream.lines():
                    self._take(_message(line))
                    if self._is_over():
                        return
            finally:
                with self._mail:
                    self._stream = None

    def check_kept(self) -> None:
        """Raise `Compacted` unless etcd still has every change from the next on. Asks the majority."""
        revision = max(self._arrived, 1)
        try:
            request = span_request(self._span, limit=1, revision=revision, keys_only=True)
            self._gateway.call("/v3/kv/range", request, RangeReply, repeatable=True)
        except Refused as error:
            if error.is_compacted:
                raise self._compacted(revision + 1) from error
            if not error.is_in_the_future:
                raise error.as_error() from error

    def _take(self, reply: WatchReply) -> None:
        if reply.canceled and reply.compact_revision:
            raise self._compacted(reply.compact_revision)
        if reply.canceled:
            raise Unavailable(f'etcd has ended the watch ("{reply.cancel_reason}")')
        self._trouble = None
        fresh = [event.change for event in reply.events if event.kv.mod_revision > self._arrived]
        if not fresh:
            return
        with self._mail:
            # A reader that does not poll holds up the stream, not the memory.
            self._mail.wait_for(lambda: len(self._changes) < HISTORY_CHANGES_MAX or self._is_over())
            self._changes += [change for change in fresh if not self._keyspace.is_hidden(change.key)]
            self._arrived = fresh[-1].revision
            self._mail.notify_all()

    def _compacted(self, compacted: int) -> Compacted:
        return Compacted.before(self._arrived + 1, compacted)

    def _give_up(self, error: ForebayError) -> None:
        with self._mail:
            self._lost = error
            self._mail.notify_all()


def _message(line: bytes) -> WatchReply:
    try:
        message = decoder(WatchMessage, strict=False).decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise Unavailable(f"etcd sent what is not understood: {line[:100]!r}") from error
    if message.error is not None:
        failure = failure_by(message.error.grpc_code, message.error.message)
        raise failure.as_error() if isinstance(failure, Refused) else Unavailable(str(failure))
    return message.result or WatchReply()
