"""The metadata store of a log that is opened read-only: everything can be read, and cursors alone are written."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from forebay.errors import Closed, Unsupported
from forebay.format.metadata.keys import all_progress_prefix
from forebay.locks import Rank, RankedLock
from forebay.metadata import Compare, DeleteRange, Entry, MetadataStore, Operation, Outcome, Session, Watch


class ConsumerMetadata:
    """A `MetadataStore` that refuses every change but that of a cursor. Safe for concurrent calls from threads.

    `writable` opens the store for writing. It is called at the first acknowledgement, so that a process which only
    reads needs no permission to write.
    """

    def __init__(self, reading: MetadataStore, prefix: str, writable: Callable[[], MetadataStore]) -> None:
        self._reading = reading
        self._cursors = all_progress_prefix(prefix=prefix)
        self._open = writable
        self._lock = RankedLock(Rank.IO, "storage.consumer_metadata")
        self._writing: MetadataStore | None = None
        self._is_closed = False

    def get(self, key: str) -> Entry | None:
        """See `MetadataStore`."""
        return self._reading.get(key)

    def range(self, prefix: str, *, start_after: str | None = None, limit: int | None = None) -> list[Entry]:
        """See `MetadataStore`."""
        return self._reading.range(prefix, start_after=start_after, limit=limit)

    def watch(self, prefix: str, from_revision: int | None = None) -> Watch:
        """See `MetadataStore`."""
        return self._reading.watch(prefix, from_revision)

    def session_alive(self, session: str) -> bool:
        """See `MetadataStore`."""
        return self._reading.session_alive(session)

    def revision(self) -> int:
        """See `MetadataStore`."""
        return self._reading.revision()

    def transaction(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Outcome:
        """See `MetadataStore`; `Unsupported` if anything but a cursor would change."""
        for operation in operations:
            if isinstance(operation, DeleteRange) or not operation.key.startswith(self._cursors):
                raise Unsupported(
                    "this log is opened read-only: it writes nothing but the places of readers and groups"
                )
        return self._writable().transaction(compares, operations)

    def session(self, ttl_s: float) -> Session:
        """Refused: a log that is opened read-only owns nothing."""
        raise Unsupported("this log is opened read-only: it has no session that could own anything")

    def end_session(self, session: str) -> None:
        """Refused, as `session` is."""
        raise Unsupported("this log is opened read-only: it ends no session")

    def close(self) -> None:
        """See `MetadataStore`."""
        with self._lock:
            self._is_closed = True
            writing, self._writing = self._writing, None
        if writing is not None and writing is not self._reading:
            writing.close()
        self._reading.close()

    def abandon(self) -> None:
        """See `MetadataStore`."""
        self._lock = RankedLock(Rank.IO, "storage.consumer_metadata")
        if self._writing is not None:
            self._writing.abandon()
        self._reading.abandon()

    def _writable(self) -> MetadataStore:
        with self._lock:
            if self._is_closed:
                raise Closed("this log is closed")
            if self._writing is None:
                self._writing = self._open()
            return self._writing
