"""Migrate: the history of topics from one store to another. Objects are copied and verified by executors, then one
transaction for each partition makes the catalog name the copies: one manifest in the new store stands for all of them.

No process may own the topic meanwhile: it is sealed, or its owner is gone. May be ended anywhere and run again. The old
objects stay until a run is asked to remove them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from forebay import manifests
from forebay.blobs import BlobStore, open_store
from forebay.catalog.shard import Piece
from forebay.cleanup.collector import Collector
from forebay.cleanup.tables import TableObjects
from forebay.clock import SystemClock
from forebay.errors import Conflict, ForebayError, Invalid, Unavailable, Unsupported
from forebay.format.files.segment import SEGMENT_SUFFIX
from forebay.format.metadata.descriptor import DescriptorKind, Phase, SegmentDescriptor
from forebay.loads.book import LoadBook
from forebay.metadata.leases import Lease, leased
from forebay.places import is_private
from forebay.spark.jobs.copying import CopiedObjects, Errand, copy, has_index
from forebay.spark.jobs.report import JobProgress, JobReport, JobShard, findings_of, parts_of, refs_at, summed
from forebay.spark.jobs.units import spread
from forebay.spark.place.location import Location
from forebay.spark.place.opening import Opened, opened
from forebay.topics import ShardRef, TopicSpec

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

AGAIN = "see to it, then run migrate again: what was copied is not copied twice"


@dataclass(kw_only=True)
class _Shard(JobShard):
    """One partition on its way."""

    pieces: list[Piece]
    opened: list[SegmentDescriptor]
    """All of its history, manifests opened."""
    revision: int
    """Of its state when it was looked at."""
    copied: dict[str, CopiedObjects] = field(default_factory=dict)


def run(
    spark: SparkSession,
    location: Location,
    to: Location,
    topics: Sequence[str] = (),
    *,
    remove_old: bool = False,
    dry_run: bool = False,
    progress: JobProgress | None = None,
) -> JobReport:
    """Bring the history of these topics, or of all, into the store of the settings of `to`.

    With `remove_old` objects of the old store are removed where the catalog names their copies, verified once more.
    Raises `Unavailable` by name for a topic that a process owns, `Unsupported` for what cannot be migrated, `Invalid`
    if it is the old store that `to` leads to.
    """
    clock = SystemClock()
    begun = clock.monotonic()
    settings = to.settings()
    if not settings.is_shared:
        raise Invalid('the settings to migrate to have no store: set storage.mode to "shared_fs" or "object_store"')
    with opened(location, read_only=dry_run, also=settings.store) as found:
        _check_stores(found, to)
        shards = [_looked_at(found, ref) for ref in refs_at(found, topics)]
        work = Migration(found, to, shards)
        if not dry_run:
            with closing(open_store(settings.store, disk=found.disk, clock=clock)) as store:
                store.probe()
                if remove_old:
                    work.refuse_same(store)
                work.copy(spark, progress)
                work.switch(store)
                if remove_old:
                    work.remove_old(store)
        else:
            work.plan()
    return work.report(dry_run=dry_run, seconds=clock.monotonic() - begun)


def _check_stores(found: Opened, to: Location) -> None:
    old, new = found.settings, to.settings()
    here, there = map(_metadata, (found.location, to))
    if here != there:
        raise Unsupported(
            f"the settings to migrate to name other metadata ({there}, not {here}): migrate moves objects, and the "
            "catalog stays where it is; name the same metadata store"
        )
    if (old.store.name, old.store.root) == (new.store.name, new.store.root) and old.is_shared:
        raise Invalid(f"the settings to migrate to name the same store, {new.store.root}: name another")


def _metadata(location: Location) -> str:
    """Which metadata store a location has."""
    found = location.settings().metadata
    if found.backend == "etcd":
        return f"etcd {','.join(sorted(found.endpoints))}{found.prefix}"
    return f"{found.path or f'{location.path}/metadata.sqlite'}{found.prefix}"


def _looked_at(found: Opened, ref: ShardRef) -> _Shard:
    """A partition that may be migrated; else an error that names it."""
    catalog = found.catalog(ref)
    stored = catalog.state()
    state = stored.state if stored is not None else None
    if state is not None and state.owner is not None and found.metadata.session_alive(state.owner):
        raise Unavailable(f"{ref} is owned by session {state.owner} in directory {state.holder}: seal or close it")
    if state is not None and state.phase is Phase.DELETING:
        raise Conflict(f"{ref} is being deleted: leave its topic out", shard=ref)
    pending = LoadBook(found.metadata, found.settings.metadata.prefix, found.clock).pending()
    pieces = catalog.pieces()
    waiting = [piece.descriptor.load_id for piece in pieces if piece.descriptor.load_id in pending]
    if waiting:
        raise Unavailable(f"{ref} has a part of load {waiting[0]}, which is not over: let it be, then migrate")
    opened = catalog.descriptors()
    elsewhere = [piece for piece in opened if found.stores.is_elsewhere(piece.store)]
    if elsewhere:
        raise Unavailable(
            f"{ref}: offsets [{elsewhere[0].start}, {elsewhere[0].end}) lie in {elsewhere[0].store}, another data "
            "directory: name it with path or --data, or export the topic there first"
        )
    return _Shard(
        ref=ref,
        pieces=pieces,
        opened=opened,
        revision=stored.revision if stored is not None else 0,
    )


class Migration:
    """One run."""

    def __init__(self, found: Opened, to: Location, shards: Sequence[_Shard]) -> None:
        self._found = found
        self._to = to
        self._new = to.settings().store
        self._shards = shards
        self._same_name = found.settings.store.name == self._new.name
        """Two directories: the catalog calls them alike, and nothing in it has to change."""
        for spec in {shard.ref.spec.topic_id: shard.ref.spec for shard in shards}.values():
            self._refuse_tabled(spec)

    def refuse_same(self, store: BlobStore) -> None:
        """Raise `Invalid` if the new store is the old one by another name: then the copies would go as the old."""
        old = self._old()
        for shard in self._shards[:1]:
            key = f"{shard.ref.id}/{self._found.clock.random_bytes(8).hex()}.probe"
            store.put_if_absent(key, b"")
            try:
                is_same = old.stat(key) is not None
            finally:
                store.delete(key)
            if is_same:
                raise Invalid(f"{store.name} is the old store itself: there is nothing to remove, leave that out")

    def plan(self) -> None:
        """Say what there is to copy."""
        for shard in self._shards:
            errands = list(self._errands(shard))
            shard.figures = {"objects": len(errands), "bytes": sum(errand.bytes for errand in errands)}

    def copy(self, spark: SparkSession, progress: JobProgress | None) -> None:
        """Copy what the new store does not have; what fails is a finding of its partition."""
        self.plan()
        by_place = {shard.place: shard for shard in self._shards}
        outcomes = spread(
            spark,
            [errand for shard in self._shards for errand in self._errands(shard)],
            partial(copy, self._found.location, self._to),
            unit_type=Errand,
            result_type=CopiedObjects,
            progress=progress,
            weight=lambda errand: errand.bytes,
        )
        for errand, copied, error in outcomes:
            shard = by_place[errand.topic, errand.partition]
            if copied is None:
                shard.report(f"{errand.descriptor.object_key} was not copied: {error}", AGAIN, errand.descriptor)
                continue
            shard.copied[errand.descriptor.object_key] = copied
            shard.count("there_before" if copied.was_there else "copied")

    def switch(self, store: BlobStore) -> None:
        """Make the catalog name the copies, partition by partition, where all of a partition is copied."""
        for shard in self._shards:
            if not shard.findings:
                try:
                    with self._uncompacted(shard):
                        shard.figures["switched"] = self.switch_shard(shard, store)
                except ForebayError as error:
                    shard.report(f"the catalog was not switched: {error}", AGAIN)

    def remove_old(self, store: BlobStore) -> None:
        """Remove old objects whose copies the catalog names and the new store has."""
        for shard in self._shards:
            if not shard.findings:
                try:
                    with self._uncompacted(shard):
                        shard.figures["removed"] = self._removed(shard, store)
                except ForebayError as error:
                    shard.report(f"old objects stay: {error}", AGAIN)

    def report(self, *, dry_run: bool, seconds: float) -> JobReport:
        """What was done."""
        parts = parts_of(self._shards)
        totals = summed(parts)
        doing = "to be copied" if dry_run else f"copied, {totals.get('there_before', 0)} were there"
        count = totals.get("objects" if dry_run else "copied", 0)
        return JobReport(
            job="migrate",
            summary=f"{count} objects of {len(self._shards)} partitions {doing}, into {self._new.name}",
            dry_run=dry_run,
            figures=totals,
            parts=parts,
            findings=findings_of(self._shards),
            seconds=seconds,
        )

    def _errands(self, shard: _Shard) -> Iterator[Errand]:
        (name, partition), stays = shard.place, self._stays(shard)
        manifests_here = [
            piece.descriptor
            for piece in shard.pieces
            if piece.descriptor.kind is DescriptorKind.MANIFEST and self._same_name
        ]
        for descriptor in [*manifests_here, *shard.opened]:
            if descriptor.gap is None and (self._same_name or descriptor.store != self._new.name):
                yield Errand(name, partition, descriptor, _key(shard, descriptor), keeps_index=stays)

    def _stays(self, shard: _Shard) -> bool:
        """Whether the catalog says of the new store what it says of the old one."""
        return self._same_name and not any(map(is_private, shard.opened))

    def _uncompacted(self, shard: _Shard) -> AbstractContextManager[Lease]:
        """No process compacts the partition meanwhile and names what lies in the old store; else `Unavailable`."""
        settings = self._found.settings.metadata
        return leased(
            self._found.metadata,
            self._found.catalog(shard.ref).keys.compactor,
            f"migration of {shard.ref}",
            ttl_s=settings.lease_ttl_s,
            wait_s=0.0,
            clock=self._found.clock,
        )

    def switch_shard(self, shard: _Shard, store: BlobStore) -> bool:
        """Whether the catalog names the new store for all of it, on return."""
        self._check_unowned(shard)
        created_at = self._found.clock.now_ms()
        renewed = [self._renewed(shard, descriptor, created_at) for descriptor in shard.opened]
        if renewed == shard.opened or self._stays(shard):
            if self._found.catalog(shard.ref).pieces() != shard.pieces:
                raise Conflict("the catalog changed meanwhile")
            return True
        manifest = manifests.write(store, f"{shard.ref.id}/", renewed, store_name=self._new.name, created_at=created_at)
        # Commit point: one descriptor now stands for all of it, and it names the new store.
        if not self._found.catalog(shard.ref).replace(shard.pieces, manifest):
            raise Conflict("the catalog changed meanwhile")
        return True

    def _check_unowned(self, shard: _Shard) -> None:
        now = self._found.catalog(shard.ref).state()
        if (now.revision if now is not None else 0) != shard.revision:
            raise Conflict("another process opened or changed the partition meanwhile")

    def _renewed(self, shard: _Shard, descriptor: SegmentDescriptor, created_at: int) -> SegmentDescriptor:
        copied = shard.copied.get(descriptor.object_key) if descriptor.gap is None else None
        if copied is None:
            return descriptor
        key = _key(shard, descriptor)
        # As of now: for as long as the grace, what was copied stays in a directory for those who read it.
        return msgspec.structs.replace(
            descriptor,
            store=self._new.name,
            object_key=key,
            etag=copied.etag,
            index_key=None,
            created_at=created_at,
        )

    def _removed(self, shard: _Shard, store: BlobStore) -> int:
        """How many objects of the old store went; none if a copy is not as catalogued."""
        self._check_unowned(shard)
        for descriptor in self._found.catalog(shard.ref).descriptors():
            if descriptor.gap is not None:
                continue
            there = store.stat(descriptor.object_key) if descriptor.store == self._new.name else None
            is_indexed = not has_index(descriptor) or store.stat(descriptor.index_object) is not None
            if there is None or (there.size, there.etag) != (descriptor.bytes, descriptor.etag) or not is_indexed:
                what = f"{descriptor.object_key} is not in the new store as catalogued: old objects stay"
                shard.report(what, AGAIN, descriptor)
                return 0
        collector = Collector(self._found.clock, self._found.settings.export.orphan_grace_s)
        return collector.clear(self._old(), f"{shard.ref.id}/", at_once=True)

    def _old(self) -> BlobStore:
        settings = self._found.settings
        if not settings.is_shared and settings.storage.handoff_root is None:
            raise Invalid("there is no old store to remove objects from: files of the directory go by themselves")
        return self._found.stores.of(settings.store.name if settings.is_shared else "directory")

    def _refuse_tabled(self, spec: TopicSpec) -> None:
        prefix = self._found.settings.metadata.prefix
        tabled = TableObjects(
            self._found.metadata, prefix, spec.namespace, spec.topic, spec.topic_id, clock=self._found.clock
        )
        if tabled.is_some():
            raise Unsupported(
                f"{spec.name} has an open table whose snapshots name objects of the old store: drop the table, migrate "
                "the topic and register it again"
            )


def _key(shard: _Shard, descriptor: SegmentDescriptor) -> str:
    """The key in the new store: the same, but for files of a data directory, which get that of an export."""
    if not is_private(descriptor):
        return descriptor.object_key
    if descriptor.header_start is None and descriptor.object_key.endswith(SEGMENT_SUFFIX):
        return f"{shard.ref.id}/{descriptor.epoch}-{descriptor.content_hash}{SEGMENT_SUFFIX}"
    return descriptor.object_key
