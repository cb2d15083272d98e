"""Data directories that bulk loads are attached to, stepped by hand, and what must hold of the topic afterwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Final, NamedTuple

from forebay.blobs import BlobStore
from forebay.blobs.directory import DirectoryStore
from forebay.catalog import ShardCatalog, ShardKeys
from forebay.definitions import Definitions
from forebay.errors import ForebayError
from forebay.format.columns.rows import Row, encode_rows
from forebay.format.metadata.descriptor import LoadStatus, SegmentDescriptor
from forebay.loads.book import LoadBook
from forebay.loads.prepare import Load, LoadManifest, LoadPlace, manifest_of, write_segment
from forebay.manifests import ManifestReader
from forebay.metadata import MemoryMetadata, MetadataStore
from forebay.places import LOADS, LOCAL
from forebay.records import Gap, Reason
from forebay.settings import Settings
from forebay.shard import SegmentShard
from forebay.storage.background.history import HistoryWorker
from forebay.testing.checks.catalogs import Fetch, check_history, references_are_complete
from forebay.testing.checks.history import AppendAnswered, AppendOutcome, Begun, ShardEvents, read_everything
from forebay.testing.checks.invariants import Violation
from forebay.testing.checks.moves import (
    Operations,
    commits_of,
    nothing_of_older_epochs,
    one_epoch_at_a_time,
    replayed,
)
from forebay.testing.simulated.clock import ManualClock
from forebay.testing.simulated.crashes import CrashState
from forebay.testing.simulated.disk import SimulatedDisk
from forebay.topics import Durability, ShardRef, TopicSpec
from tests.protocol.consuming import Consumer
from tests.support.environments.simulated import (
    GRACE_S,
    NAME,
    STORE,
    TOPIC_ID,
    SimulatedEnvironment,
    SimulatedOwner,
    committed_in,
)
from tests.wal.rig import stage

ACKED: Final = "acked"
LOAD: Final = "load-1"
_WAL: Final = {"free_bytes_min": 0, "reserve_records_min": 8, "cache_bytes_max": 4096}

Brought = dict[int, list[bytes]]
"""What a load brings, by partition."""


class AckedValue(NamedTuple):
    """A record that its caller learned of."""

    partition: int
    offset: int
    value: bytes


def settings_of(mode: str, **groups: dict[str, object]) -> Settings:
    """Small limits; in mode `local` topics may move by the store."""
    storage = {"mode": mode, **({"handoff_root": STORE} if mode == "local" else {})}
    archive = {} if mode == "local" else {"store": {"root": STORE}}
    grace = {"export": {"orphan_grace_s": GRACE_S}} if mode != "local" else {}
    return Settings.load(overrides={"wal": _WAL, "storage": storage, **archive, **grace, **groups})


class LoadEnvironment(SimulatedEnvironment):
    """What data directories share, and what is known of the topic."""

    def __init__(
        self,
        mode: str = "shared_fs",
        *,
        partitions: int = 1,
        durability: Durability = Durability.FSYNC,
        disk: SimulatedDisk | None = None,
        metadata: MemoryMetadata | None = None,
        blobs: BlobStore | None = None,
        seed: int = 1,
    ) -> None:
        disk = disk or SimulatedDisk(directories=["/a", "/a/shards", "/b", "/b/shards", STORE])
        super().__init__(settings_of(mode), disk=disk, metadata=metadata, blobs=blobs, seed=seed)
        self.disk.now_ms = self.clock.now_ms()
        self.violations: list[Violation] = []
        """Of what is promised at each commit."""
        self.spec = TopicSpec.create(
            NAME,
            topic_id=TOPIC_ID,
            created_at=0,
            partitions=partitions,
            durability=durability.value,
            on_owner_loss="take_over",
        )
        if metadata is None:
            Definitions(self.metadata, "/forebay", self.clock).create(self.spec, exist_ok=True)

    @classmethod
    def after(cls, state: CrashState, mode: str, *, partitions: int, durability: Durability) -> LoadEnvironment:
        """What a crash left: the disk, and the metadata store as of that moment, every session ended."""
        metadata = replayed(committed_in(state.notes))
        return cls(mode, partitions=partitions, durability=durability, disk=state.disk(), metadata=metadata, seed=99)

    def node(self, name: str = "a", *, metadata: MetadataStore | None = None) -> LoadOwner:
        """A process that has just started on this data directory."""
        return LoadOwner(self, name, metadata or self.faulty)

    def keys(self, partition: int) -> ShardKeys:
        return ShardKeys(NAME.namespace, NAME.topic, partition, "/forebay")

    def catalog(self, partition: int) -> ShardCatalog:
        return ShardCatalog(self.inner, self.keys(partition), TOPIC_ID, self._manifest, clock=ManualClock())

    def load(self, load_id: str = LOAD) -> Load:
        return LoadBook(self.inner, "/forebay", ManualClock()).get(load_id).load

    def acked(self) -> list[AckedValue]:
        """What callers learned of, earlier lives on this disk included."""
        return [note.payload for note in self.disk.trace.notes() if note.kind == ACKED]  # type: ignore[misc]

    # Looking, without a call that could fail

    @property
    def fetch(self) -> Fetch:
        """What lies under the keys that descriptors name, wherever that is."""
        return fetching(self.files(), getattr(self.blobs, "contents", None))

    def _manifest(self, descriptor: SegmentDescriptor) -> list[SegmentDescriptor]:
        name = descriptor.store
        root = f"/{name.removeprefix(LOADS)}/loads" if name.startswith(LOADS) else STORE
        store = self.blobs if self.blobs and root == STORE else DirectoryStore(root, disk=self.disk, clock=self.clock)
        return list(ManifestReader(store)(descriptor))

    def _committed(self, operations: Operations) -> None:
        super()._committed(operations)
        for partition in range(self.spec.partitions if hasattr(self, "spec") else 0):
            for commit in commits_of(self.keys(partition), [operations]):
                self.violations += references_are_complete(commit.pieces, self.fetch)


def fetching(files: dict[str, bytes], objects: dict[str, bytes] | None) -> Fetch:
    """Where descriptors lead to, among these files and objects."""

    def fetched(piece: SegmentDescriptor, key: str) -> bytes | None:
        for prefix, below in ((LOCAL, "shards"), (LOADS, "loads")):
            if piece.store.startswith(prefix):
                return files.get(f"/{piece.store.removeprefix(prefix)}/{below}/{key}")
        return objects.get(key) if objects is not None else files.get(f"{STORE}/{key}")

    return fetched


class LoadOwner(SimulatedOwner):
    """One process with one data directory."""

    def __init__(self, environment: LoadEnvironment, name: str, metadata: MetadataStore) -> None:
        self.environment = environment
        self.archiving = HistoryWorker(environment.clock, environment.settings, self._collect)
        self.archiving.worker.stop()
        super().__init__(environment, name, metadata, environment.store(), on_open=self.archiving.watch)
        self.loads = self.loads_by(self.archiving.alone_with)

    def _collect(self, shard: SegmentShard) -> list[str]:
        return self.cleanup.collect_owned(shard)

    def shard(self, partition: int = 0) -> SegmentShard:
        return self.engine.open_shard(ShardRef(self.environment.spec, partition))

    def append(self, partition: int = 0, count: int = 1) -> list[int]:
        """Append and wait until it is durable, whatever the class; the offsets."""
        wal = self.shard(partition).wal
        values = tuple(b"log %d/%d" % (partition, wal.queue.next + place) for place in range(count))
        first = wal.acknowledge(stage(wal, values, None, self.environment.clock.now_ms()))
        wal.flush()
        for place, value in enumerate(values):
            self.environment.disk.note(ACKED, AckedValue(partition, first + place, value))
        return list(range(first, first + count))

    def consume(self, partition: int = 0) -> None:
        """A consumer goes on from its cursor, as far as there is something for it."""
        Consumer(self.environment.disk, self.metadata).consume(self.shard(partition))

    def prepare(self, brought: Brought, load_id: str = LOAD, per_segment: int = 1000) -> LoadManifest:
        """Put the segments of a load where they belong."""
        segments = []
        for partition, values in brought.items():
            for first in range(0, len(values), per_segment):
                rows: list[Row] = [
                    (value, None, None, (), 5_000 + first + place)
                    for place, value in enumerate(values[first : first + per_segment])
                ]
                where = LoadPlace(load_id, TOPIC_ID, partition)
                made = write_segment(
                    self.loads.store().store, where, "0-0", [encode_rows(rows)], clock=self.environment.clock
                )
                assert made is not None
                segments.append((partition, made))
        return manifest_of(load_id, TOPIC_ID, segments)

    def offer(self, brought: Brought, load_id: str = LOAD, *, per_segment: int = 1000) -> Load:
        return self.loads.offer(str(NAME), self.prepare(brought, load_id, per_segment), None)

    def settle(self, load_id: str = LOAD, *, attempts: int = 12) -> Load:
        """Look again and again until the load is over and nothing waits for it here."""
        for _ in range(attempts):
            self.environment.clock.advance(10)
            self.loads.step()
            load = self.environment.load(load_id)
            if load.status is not LoadStatus.OFFERED and not self.paused():
                return load
        raise AssertionError(f"load {load_id} is {load.status}, paused are {self.paused()}")

    def paused(self) -> list[int]:
        return [shard.ref.partition for shard in self.engine.shards() if shard.wal.queue.is_paused]

    def stream(self, partition: int = 0, start: int = 0) -> list[tuple[int, bytes | None] | Gap]:
        """Records and gaps as a reader gets them, until there is nothing more for now."""
        shard = self.shard(partition)
        return list(read_everything(shard.read, shard.offsets().next, start).steps)

    def close(self) -> None:
        self.engine.close()
        self.places.close()
        self.owner_session.session.close()


def values(partition: int, count: int) -> list[bytes]:
    """What the tests load into a partition."""
    return [b"load %d/%d" % (partition, number) for number in range(count)]


def broken(
    environment: LoadEnvironment,
    node: LoadOwner,
    brought: Brought,
    load_id: str = LOAD,
    *,
    others: dict[int, LoadOwner] | None = None,
) -> list[Violation]:
    """Everything that is not as promised of a topic at rest, once the load is over. I15 to I20, all or none, I4, I7."""
    found = [*environment.violations]
    load = environment.load(load_id)
    for partition in range(environment.spec.partitions):
        catalog, files = environment.catalog(partition), environment.files()
        acked = [(offset, value) for p, offset, value in environment.acked() if p == partition]
        logs = {path: content for path, content in files.items() if "/shards/" in path and f"_{partition}/" in path}
        reported = _history(environment.spec.durability, acked)
        pieces, frontier = catalog.descriptors(), catalog.frontier().next
        found += check_history(reported, pieces, frontier, environment.fetch, logs)
        commits = commits_of(environment.keys(partition), environment.committed)
        found += [*one_epoch_at_a_time(commits), *nothing_of_older_epochs(commits)]
        found += _stream_holds((others or {}).get(partition, node), partition, acked, brought.get(partition, []), load)
    return found


def _history(durability: Durability, acked: Iterable[tuple[int, bytes]]) -> ShardEvents:
    history = ShardEvents(durability)
    for attempt, (offset, value) in enumerate(acked):
        history.add(Begun(attempt, (value,)))
        history.add(AppendAnswered(attempt, AppendOutcome.ACKED, offset))
    return history


def _stream_holds(
    node: LoadOwner, partition: int, acked: list[tuple[int, bytes]], brought: list[bytes], load: Load
) -> Iterator[Violation]:
    steps = node.stream(partition)
    expected = 0
    for step in steps:
        if step[0] != expected:
            yield Violation("I7", f"[{partition}] the stream goes from {expected} to {step[0]}")
        expected = step.stop if isinstance(step, Gap) else step[0] + 1
    if expected != node.shard(partition).offsets().next:
        yield Violation(
            "I7", f"[{partition}] the stream ends at {expected}, the log at {node.shard(partition).offsets()}"
        )
    records = {step[0]: step[1] for step in steps if not isinstance(step, Gap)}
    for offset, value in acked:
        if records.get(offset) != value:
            yield Violation(
                "I4", f"[{partition}] {value!r} was acknowledged at {offset}, there is {records.get(offset)!r}"
            )
    shown = [value for _, value in sorted(records.items()) if value is not None and value.startswith(b"load ")]
    if load.status is LoadStatus.COMMITTED and shown != brought:
        yield Violation("I22", f"[{partition}] of a committed load {len(shown)} of {len(brought)} records are shown")
    if load.status is not LoadStatus.COMMITTED and shown:
        yield Violation("I22", f"[{partition}] {len(shown)} records of a load that is {load.status} are shown")
    lost = [step for step in steps if isinstance(step, Gap) and step.reason not in (Reason.SKIPPED, Reason.LOST)]
    if lost:
        yield Violation("I17", f"[{partition}] holes {lost}")


def tolerated(work: Callable[[], object]) -> bool:
    """Try it; false if it failed with an error of ours."""
    try:
        work()
    except (ForebayError, OSError):
        return False
    return True
