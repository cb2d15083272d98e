"""Counts what is written to the metadata store: how long each change takes, and descriptors of segments."""

from __future__ import annotations

from collections.abc import Sequence

from forebay.catalog.shard import is_descriptor_key
from forebay.metadata import Compare, Entry, MetadataStore, Operation, Outcome, Put, Session, Watch
from forebay.meter import LogMeter, Metric


class MeteredMetadata:
    """A `MetadataStore` that counts the transactions it hands on. Holds no lock while it waits for the store."""

    def __init__(self, store: MetadataStore, meter: LogMeter) -> None:
        self._store = store
        self._meter = meter

    def get(self, key: str) -> Entry | None:
        """See `MetadataStore`."""
        return self._store.get(key)

    def range(self, prefix: str, *, start_after: str | None = None, limit: int | None = None) -> list[Entry]:
        """See `MetadataStore`."""
        return self._store.range(prefix, start_after=start_after, limit=limit)

    def transaction(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Outcome:
        """See `MetadataStore`."""
        puts = [operation for operation in operations if isinstance(operation, Put)]
        if not puts:
            return self._store.transaction(compares, operations)
        with self._meter.timed(Metric.METADATA_PUT_SECONDS):
            outcome = self._store.transaction(compares, operations)
        descriptors = sum(is_descriptor_key(put.key) for put in puts)
        if outcome.succeeded and descriptors:
            self._meter.add(Metric.METADATA_DESCRIPTOR_WRITES, descriptors)
        return outcome

    def watch(self, prefix: str, from_revision: int | None = None) -> Watch:
        """See `MetadataStore`."""
        return self._store.watch(prefix, from_revision)

    def session(self, ttl_s: float) -> Session:
        """See `MetadataStore`."""
        return self._store.session(ttl_s)

    def session_alive(self, session: str) -> bool:
        """See `MetadataStore`."""
        return self._store.session_alive(session)

    def end_session(self, session: str) -> None:
        """See `MetadataStore`."""
        self._store.end_session(session)

    def revision(self) -> int:
        """See `MetadataStore`."""
        return self._store.revision()

    def close(self) -> None:
        """See `MetadataStore`."""
        self._store.close()

    def abandon(self) -> None:
        """See `MetadataStore`."""
        self._store.abandon()
