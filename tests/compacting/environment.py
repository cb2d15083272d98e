"""A shard whose history is compacted while its owner goes on: step by step, in memory alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from forebay.appends.producer_window import ProducerWindow
from forebay.catalog import ShardCatalog
from forebay.catalog.removals import RecordedRemovals
from forebay.cleanup.collector import Collector
from forebay.compacting.merging import Merge, SegmentTarget, merge
from forebay.compacting.passes import Passes, ShardLease, Unit
from forebay.compacting.planning import Rules
from forebay.compacting.shard import CompactionOutlook, ShardCompaction
from forebay.errors import Fenced
from forebay.export import Exporter
from forebay.format.control.frames import Floor
from forebay.format.control.offsets import OffsetSet
from forebay.format.metadata.descriptor import SegmentDescriptor
from forebay.format.metadata.keys import compactor_key
from forebay.format.metadata.vectors import deleted_by
from forebay.history import Objects
from forebay.metadata import Absent, MetadataStore, Put, RevisionIs
from forebay.records import Gap, Reason
from forebay.testing.checks.catalogs import check_history, from_files, references_are_complete
from forebay.testing.checks.invariants import Violation
from forebay.testing.checks.moves import Operations, RecordingMetadata, commits_of
from forebay.testing.simulated.blobs import SimulatedBlobs
from forebay.testing.simulated.clock import ManualClock
from tests.support.environments.shard import KEYS, TOPIC, ShardEnvironment, history_of, stream

RULES: Final = Rules(settle_ms=0, segments_min=2)
LEASE: Final = compactor_key(KEYS.namespace, KEYS.topic, KEYS.partition, prefix=KEYS.prefix)
DAY_MS: Final = 86_400_000
GRACE_S: Final = 3_600
WINDOW: Final = (10, 10)


class CompactionEnvironment:
    """Four exported files. What is promised of references is checked at every commit, the rest when asked for."""

    def __init__(self) -> None:
        clock = ManualClock(seed=1)
        self.blobs = SimulatedBlobs(clock=clock)
        self.shard_environment = ShardEnvironment(blobs=self.blobs, clock=clock)
        self.violations: list[Violation] = []
        self.metadata = RecordingMetadata(self.shard_environment.metadata, on_commit=self._committed)
        self.deleted: set[int] = set()
        self.earliest = 0
        self.exporter = self.exporter_on(self.metadata)
        for _ in range(4):
            self.grow()

    def exporter_on(self, metadata: MetadataStore) -> Exporter:
        """The owner's, which asks this store; so does what it collects."""
        self._asked = metadata
        return self.shard_environment.exporter(catalog=self.catalog(metadata))

    def catalog(self, metadata: MetadataStore | None = None) -> ShardCatalog:
        return self.shard_environment.catalog(metadata or self.metadata)

    def _committed(self, operations: Operations) -> None:
        for commit in commits_of(KEYS, [operations]):
            files = {f"/{key}": content for key, content in self.blobs.contents.items()}
            self.violations += references_are_complete(commit.pieces, from_files(files, ""))

    # What an owner does meanwhile

    def grow(self) -> None:
        """One more file becomes history."""
        self.shard_environment.append(5)
        self.shard_environment.seal()
        self.exporter.export(self.shard_environment.shard.wal.files)

    def delete(self) -> None:
        """Records of history end."""
        gone = OffsetSet.of([3, 4, 5, 12])
        RecordedRemovals(self.catalog()).record(self.shard_environment.epoch, gone)
        self.deleted |= set(gone)

    def move_floor(self, offset: int = 7) -> None:
        """The front of history ends, and leaves the catalog."""
        removals = RecordedRemovals(self.catalog())
        removals.record(self.shard_environment.epoch, OffsetSet(), Floor(offset, offset, Reason.CAP))
        removals.drop_below(self.shard_environment.epoch, offset)
        self.earliest = offset

    def sweep(self) -> None:
        """A day later: whatever is old enough and not needed goes."""
        self.shard_environment.clock.jump(DAY_MS)
        asked, catalog = self._asked, self.catalog(self._asked)
        scope = self.shard_environment.scope(
            self.exporter, catalog=catalog, is_compacting=lambda: asked.get(LEASE) is not None
        )
        Collector(self.shard_environment.clock, GRACE_S).collect(scope)

    def take_over(self) -> None:
        """The owner dies, and the next epoch goes on."""
        self.shard_environment.reopen()
        self.exporter = self.exporter_on(self.metadata)

    # What must hold

    def broken(self) -> list[Violation]:
        """Everything that is not as promised."""
        catalog = self.shard_environment.catalog()
        pieces, frontier = catalog.descriptors(), catalog.frontier().next
        files = {f"/{key}": content for key, content in self.blobs.contents.items()}
        checked = check_history(
            self.shard_environment.acked(),
            pieces,
            frontier,
            from_files(files, ""),
            self.shard_environment.local_files(),
            floor=self.earliest,
        )
        return [*self.violations, *checked]

    def visible(self) -> dict[int, bytes | None]:
        """What a reader of history alone sees, who knows what was deleted."""
        gone = RecordedRemovals(self.shard_environment.catalog()).deleted()
        with history_of(self.shard_environment) as history:
            found = stream(history, self.shard_environment.catalog().pieces()[0].descriptor.start)
        assert all(piece.reason is Reason.DELETED for piece in found if isinstance(piece, Gap))
        return {piece[0]: piece[1] for piece in found if not isinstance(piece, Gap) and _lives(piece[0], gone, self)}

    def expected(self) -> dict[int, bytes]:
        kept = {offset for offset in self.shard_environment.appended if offset >= self.earliest} - self.deleted
        return {offset: value for offset, value in self.shard_environment.appended.items() if offset in kept}

    def check(self) -> None:
        assert self.broken() == []
        assert self.visible() == self.expected()


def _lives(offset: int, gone: OffsetSet, environment: CompactionEnvironment) -> bool:
    return offset not in gone and offset >= environment.earliest


class Compactor:
    """One run of compaction, whose steps are reported one by one; `close` is its death."""

    def __init__(self, environment: CompactionEnvironment, metadata: MetadataStore | None = None) -> None:
        self._environment = environment
        self._metadata = metadata or environment.metadata
        self._objects = Objects(environment.blobs, read_ahead_bytes=512)
        self.session = self._metadata.session(5)
        self.compaction = ShardCompaction(
            environment.catalog(self._metadata), TOPIC, self._objects, readable=lambda _: True, manifest=lambda _: ()
        )
        self.is_over = False
        self.is_refused = False
        self.held = RevisionIs(LEASE, -1)

    def steps(self) -> Iterator[str]:
        """Do it; stops behind each step."""
        taken = self._metadata.transaction([Absent(LEASE)], [Put(LEASE, b"compactor", self.session.id)])
        self.is_refused = not taken.succeeded
        if self.is_refused:
            return
        self.held = RevisionIs(LEASE, taken.revision)
        yield "lease"
        while (outlook := self.look()).rewrites:
            yield "look"
            target = self.target()
            done = False
            for rewrite in outlook.rewrites:
                made: list[SegmentDescriptor] = []
                for task in self.compaction.merges(rewrite, outlook):
                    made.append(self._merge(task, outlook.ended, target))
                    yield "write"
                done = self.compaction.finish(rewrite, made, target, self.held) or done
                yield "swap"
            if not done:
                break
        self.session.close()
        self.is_over = True
        yield "end"

    def run(self) -> None:
        """All of it, by the passes that a job goes by."""
        taken = self._metadata.transaction([Absent(LEASE)], [Put(LEASE, b"compactor", self.session.id)])
        assert taken.succeeded
        self.held = RevisionIs(LEASE, taken.revision)
        passes = Passes(self.compaction, self.target, self.write, self.look, WINDOW)
        passes.run(ShardLease(self.held, self._check))
        assert passes.failures == []
        self.session.close()

    def close(self) -> None:
        """Die: the lease ends, nothing else is undone."""
        self.session.close()
        self._objects.close()

    def _check(self) -> None:
        if not self.session.alive():
            raise Fenced("the lease was lost")

    def look(self) -> CompactionOutlook:
        return self.compaction.outlook(RULES, self._environment.shard_environment.clock.now_ms())

    def target(self) -> SegmentTarget:
        return SegmentTarget(
            self._environment.blobs, "directory", "compaction", self._environment.shard_environment.clock.now_ms()
        )

    def write(self, units: Sequence[Unit]) -> Iterator[SegmentDescriptor | str]:
        for unit in units:
            assert unit.window == WINDOW
            yield self._merge(unit.task, deleted_by(unit.ended), self.target())

    def _merge(self, task: Merge, ended: OffsetSet, target: SegmentTarget) -> SegmentDescriptor:
        token = self._environment.shard_environment.clock.random_bytes(8).hex()
        return merge(task, ended, self._objects, target, token=token, window=ProducerWindow(*WINDOW))
