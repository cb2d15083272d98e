"""The database of engine `rocksdb` under examination: each shard of it, against itself and the metadata store.

Reads only. Beside an owner its files may be replaced while they are opened, so an error counts only if it is seen
again at a fresh look.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

from forebay.catalog import read_state
from forebay.disk import Disk
from forebay.engines.rocksdb.auditing import ShardAudit, stored_shards
from forebay.engines.rocksdb.database import RocksDatabase
from forebay.engines.rocksdb.layout import Keys
from forebay.errors import Corrupt, ForebayError, Unsupported, UnsupportedFormat
from forebay.format.metadata.descriptor import Phase, ShardState
from forebay.format.metadata.keys import state_key, topics_prefix
from forebay.format.metadata.value import decode_value
from forebay.inspection.directory import Inspected
from forebay.inspection.findings import INSTALL, UPGRADE, Report, Severity
from forebay.inspection.history.catalog import METADATA
from forebay.inspection.verify.shard import LOOKS, Progress
from forebay.metadata import MetadataStore
from forebay.storage.owner import ROCKSDB
from forebay.topics import Engine, TopicName, TopicSpec

RESTORE_DATABASE = f"restore the directory {ROCKSDB} from a backup"
COPY = f'the records are whole: write them again with "forebay topic copy", or {RESTORE_DATABASE}'

_ROWS = (".log", ".sst")


class _Shard(NamedTuple):
    spec: TopicSpec
    partition: int

    @property
    def name(self) -> str:
        return f"{self.spec.name}[{self.partition}]"

    @property
    def id(self) -> tuple[str, int]:
        return self.spec.topic_id, self.partition


def database_bytes(disk: Disk, found: Inspected) -> int:
    """How many bytes the files of the database have that hold rows."""
    path = f"{found.path}/{ROCKSDB}"
    total = 0
    for name in disk.list_directory(path) if disk.exists(path) else []:
        if name.endswith(_ROWS):
            with (
                contextlib.suppress(FileNotFoundError),
                contextlib.closing(disk.open(f"{path}/{name}")) as file,
            ):
                total += file.size()
    return total


def verify_database(
    disk: Disk,
    found: Inspected,
    store: MetadataStore,
    *,
    topic: TopicName | None = None,
    on_bytes: Progress | None = None,
) -> Report:
    """Everything about the topics on `rocksdb`, or about one of them. Changes nothing."""
    total = database_bytes(disk, found)
    report = Report()
    for look in range(LOOKS if found.owned else 1):
        meter = _Meter(total, None if look else on_bytes)
        report = DatabaseExam(disk, found, store, topic, meter.advance).run()
        meter.end()
        if report.is_clean:
            break
    return report


class _Meter:
    """Reports bytes walked, never of more than there are: rows lie compressed in their files."""

    def __init__(self, total: int, on_bytes: Progress | None) -> None:
        self._left = total
        self._on_bytes = on_bytes

    def advance(self, count: int) -> None:
        more = min(count, self._left)
        self._left -= more
        if more and self._on_bytes is not None:
            self._on_bytes(more)

    def end(self) -> None:
        self.advance(self._left)


class DatabaseExam:
    """One look at the database."""

    def __init__(
        self,
        disk: Disk,
        found: Inspected,
        store: MetadataStore,
        topic: TopicName | None,
        on_bytes: Callable[[int], None],
    ) -> None:
        self._path = f"{found.path}/{ROCKSDB}"
        self._database = RocksDatabase(self._path, disk, read_only=True)
        self._found = found
        self._store = store
        self._topic = topic
        self._on_bytes = on_bytes
        self._report = Report()

    def run(self) -> Report:
        """What was found."""
        with contextlib.closing(self._database):
            self._look()
        return self._report

    def _look(self) -> None:
        shards = [shard for shard in self._shards() if self._topic in (None, shard.spec.name)]
        if not self._database.is_made:
            for shard in shards:
                self._missing(shard)
            return
        if not shards and self._topic is not None:
            return
        try:
            self._database.open()
        except UnsupportedFormat as error:
            self._add(Severity.ERROR, str(error), UPGRADE)
            return
        except Unsupported as error:
            self._add(Severity.ERROR, f"is not checked: {error}", INSTALL)
            return
        except ForebayError as error:
            self._add(Severity.ERROR, f"cannot be opened, so none of its topics is checked: {error}", RESTORE_DATABASE)
            return
        for shard in shards:
            self._examine(shard)
        if self._topic is None:
            # What cannot be read was reported with the shards.
            with contextlib.suppress(Corrupt):
                self._strangers()

    def _shards(self) -> Iterator[_Shard]:
        for spec in self._found.topics:
            if spec.engine is Engine.ROCKSDB:
                yield from (_Shard(spec, partition) for partition in range(spec.partitions))

    def _examine(self, shard: _Shard) -> None:
        audit = ShardAudit(self._database, Keys(*shard.id), self._on_bytes)
        try:
            audit.run()
        except UnsupportedFormat as error:
            self._add(Severity.ERROR, str(error), UPGRADE, shard.name)
            return
        except ForebayError as error:
            self._add(Severity.ERROR, f"cannot be read: {error}", RESTORE_DATABASE, shard.name)
            return
        for flaw in audit.flaws:
            step = COPY if all(flaw.derived for flaw in audit.flaws) else RESTORE_DATABASE
            self._add(Severity.ERROR, flaw.what, step, shard.name, flaw.offsets)
        if audit.bounds is None and not audit.flaws:
            self._missing(shard)
            return
        report = self._report
        report.shards += 1
        report.frames += audit.entries
        report.records += audit.records
        report.bytes += audit.bytes
        # Behind the database: an owner raises the epoch before it writes.
        state = self._state(shard)
        if audit.bounds is not None and state is not None and audit.bounds.epoch > state.epoch:
            what = f"was written by epoch {audit.bounds.epoch}, the metadata store knows only {state.epoch}"
            self._add(Severity.ERROR, what, METADATA, shard.name)

    def _missing(self, shard: _Shard) -> None:
        """A shard that is not in the database: lost, if this directory had it before the database was looked at."""
        before, now = self._found.state(*shard), self._state(shard)
        if before is not None and now is not None and before.holder == now.holder == self._found.id:
            self._add(Severity.ERROR, "is not in the database, which had it", RESTORE_DATABASE, shard.name)

    def _state(self, shard: _Shard) -> ShardState | None:
        """The state as it is now; `None` if there is none that can be used."""
        spec = shard.spec
        key = state_key(spec.namespace, spec.topic, shard.partition, prefix=self._found.prefix)
        if any(bad.key == key for bad in self._found.bad):
            return None
        stored = read_state(self._store, key)
        if stored is None or stored.state.incarnation != spec.topic_id or stored.state.phase is Phase.DELETING:
            return None
        return stored.state

    def _strangers(self) -> None:
        known = {shard.id for shard in self._shards()}
        unknown = [shard for shard in stored_shards(self._database) if shard not in known]
        expected = self._found.leaving | (self._new_topics() if unknown else set())
        for topic_id, partition in unknown:
            if topic_id not in expected:
                what = f"holds partition {partition} of topic id {topic_id}, which belongs to no topic"
                self._add(Severity.WARNING, what, "restore the metadata store that knows it")

    def _new_topics(self) -> set[str]:
        """The ids of topics that were made or altered since the metadata store was looked at."""
        before = {(entry.key, entry.mod_revision) for entry in self._found.entries}
        entries = self._store.range(topics_prefix(prefix=self._found.prefix))
        return {
            decode_value(entry.value, TopicSpec)[0].topic_id
            for entry in entries
            if (entry.key, entry.mod_revision) not in before
        }

    def _add(
        self, severity: Severity, what: str, step: str, shard: str = "", offsets: tuple[int, int] | None = None
    ) -> None:
        self._report.add(severity, what, step, shard=shard, file=self._path, offsets=offsets)
