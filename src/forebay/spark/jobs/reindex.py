"""Reindex: every segment of history has an index that is sound and has look-ups by key and tag.

An index that is damaged or missing is made again from its segment. One that was written before there were look-ups is
not overwritten: a new one lies beside it under a key of its own, and one transaction makes the descriptor name that
one. Readers in flight keep the old, which is swept later. May run beside the owner, and be ended and run again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from forebay import manifests
from forebay.blobs import BlobStore
from forebay.catalog.shard import Piece
from forebay.clock import SystemClock
from forebay.errors import Conflict, Corrupt, ForebayError
from forebay.format.files.segment import INDEX_SUFFIX, index_name
from forebay.format.frame.head import Verdict
from forebay.format.index import sections as index_format
from forebay.format.index.sections import SectionKind
from forebay.format.metadata.descriptor import DescriptorKind, SegmentDescriptor
from forebay.inspection.findings import Report as Exam
from forebay.inspection.history.objects import ObjectExam
from forebay.places import is_private
from forebay.spark.jobs.report import JobProgress, JobReport, JobShard, findings_of, parts_of, refs_at, summed
from forebay.spark.jobs.units import spread
from forebay.spark.place.location import Location
from forebay.spark.place.opening import Opened, opened
from forebay.topics import ShardRef

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOOKUPS: Final = {SectionKind.SIZES, SectionKind.KEY_POSTINGS, SectionKind.TAG_POSTINGS}
TOKEN_BYTES: Final = 8
AGAIN: Final = "run reindex again"


class Indexed(msgspec.Struct, frozen=True, array_like=True):
    """A segment to be looked at."""

    topic: str
    partition: int
    shard_id: str
    descriptor: SegmentDescriptor


class Judged(msgspec.Struct, frozen=True, array_like=True):
    """What its index turned out to be. With a key, a new one lies there and has so many bytes."""

    flaw: str
    key: str | None = None
    bytes: int = 0


@dataclass(kw_only=True)
class _Shard(JobShard):
    """One partition."""

    pieces: list[Piece]
    opened: dict[int, Sequence[SegmentDescriptor]]
    """What each piece stands for, by where it starts."""
    rebuilt: dict[str, Judged] = field(default_factory=dict)


def run(
    spark: SparkSession,
    location: Location,
    topics: Sequence[str] = (),
    *,
    dry_run: bool = False,
    progress: JobProgress | None = None,
) -> JobReport:
    """See to it that all history of these topics, or of all, has sound indexes with look-ups.

    Segments in files of a data directory are left out: their indexes are the business of `forebay repair`.
    """
    clock = SystemClock()
    begun = clock.monotonic()
    with opened(location, read_only=dry_run) as found:
        shards = [_looked_at(found, ref) for ref in refs_at(found, topics)]
        _judge(spark, location, shards, dry_run=dry_run, progress=progress)
        if not dry_run:
            for shard in shards:
                _name(found, shard)
    parts = parts_of(shards)
    totals = summed(parts)
    count = totals.get("to_be_rebuilt" if dry_run else "rebuilt", 0)
    return JobReport(
        job="reindex",
        summary=f"{count} of {totals.get('segments', 0)} indexes {'to be ' if dry_run else ''}made again",
        dry_run=dry_run,
        figures=totals,
        parts=parts,
        findings=findings_of(shards),
        seconds=clock.monotonic() - begun,
    )


def _looked_at(found: Opened, ref: ShardRef) -> _Shard:
    pieces = found.catalog(ref).pieces()
    listed = {
        piece.descriptor.start: found.manifest(piece.descriptor)
        if piece.descriptor.kind is DescriptorKind.MANIFEST
        else [piece.descriptor]
        for piece in pieces
    }
    shard = _Shard(ref=ref, pieces=pieces, opened=listed)
    indexed = [descriptor for each in listed.values() for descriptor in each if _has_index(descriptor)]
    shard.figures["segments"] = sum(not is_private(descriptor) for descriptor in indexed)
    local = sum(map(is_private, indexed))
    if local:
        shard.figures["in_directories"] = local
    return shard


def _has_index(descriptor: SegmentDescriptor) -> bool:
    return descriptor.kind in (DescriptorKind.FRAMES, DescriptorKind.PARQUET)


def _units(shards: Sequence[_Shard]) -> Iterator[Indexed]:
    for shard in shards:
        name, partition = shard.place
        for listed in shard.opened.values():
            for descriptor in listed:
                if _has_index(descriptor) and not is_private(descriptor):
                    yield Indexed(name, partition, shard.ref.id, descriptor)


def _judge(
    spark: SparkSession, location: Location, shards: Sequence[_Shard], *, dry_run: bool, progress: JobProgress | None
) -> None:
    """Look at every index and, unless nothing is to be done, make new ones; what became of each goes to its shard."""
    by_place = {shard.place: shard for shard in shards}
    outcomes = spread(
        spark,
        list(_units(shards)),
        partial(judge, location, rebuild=not dry_run),
        unit_type=Indexed,
        result_type=Judged,
        progress=progress,
    )
    for unit, judged, error in outcomes:
        shard = by_place[unit.topic, unit.partition]
        if judged is None:
            shard.report(
                f"the index of {unit.descriptor.object_key} was not made again: {error}", AGAIN, unit.descriptor
            )
        elif not judged.flaw:
            shard.count("sound")
        elif dry_run:
            shard.count("to_be_rebuilt")
        else:
            shard.rebuilt[unit.descriptor.object_key] = judged


def judge(location: Location, unit: Indexed, *, rebuild: bool) -> Judged:
    """What a task does: read the index; if it is not as it should be, read the segment and store a new one.

    Raises `Corrupt` if the segment itself is damaged.
    """
    with opened(location) as found:
        store = found.stores.of(unit.descriptor.store)
        flaw = _flaw(store, unit.descriptor)
        if not flaw or not rebuild:
            return Judged(flaw)
        exam = Exam()
        shard = f"{unit.topic}[{unit.partition}]"
        copy = ObjectExam(found.stores, unit.shard_id, shard, exam, quick=False, on_bytes=None).examine(
            Piece(unit.descriptor, 0)
        )
        if not copy.intact or not copy.whole_index:
            raise Corrupt(f'{copy.where} is damaged itself ({copy.flaw}): run "forebay history scrub"')
        if len(copy.whole_index) == unit.descriptor.index_bytes:
            # The very bytes that were catalogued: what stands under the key now was never meant to.
            store.upload(unit.descriptor.index_object, [copy.whole_index])
            return Judged(flaw)
        # Never the name of an earlier attempt: a sweep may be about to remove that one.
        token = found.clock.random_bytes(TOKEN_BYTES).hex()
        key = f"{index_name(unit.descriptor.object_key).removesuffix(INDEX_SUFFIX)}-{token}{INDEX_SUFFIX}"
        store.upload(key, [copy.whole_index])
        return Judged(flaw, key, len(copy.whole_index))


def _flaw(store: BlobStore, descriptor: SegmentDescriptor) -> str:
    """What is wrong with the index of a segment; empty if nothing is."""
    stat = store.stat(descriptor.index_object)
    if stat is None:
        return "it is missing"
    content = memoryview(store.get_range(descriptor.index_object, 0, stat.size))
    try:
        decoded = index_format.decode_index(content)
        found = index_format.read_sections(
            lambda position, length: bytes(content[position : position + length]), len(content)
        )
        if isinstance(found, Verdict) or isinstance(decoded, Verdict):
            return f"its footer is {decoded.value if isinstance(decoded, Verdict) else 'damaged'}"
        footer, sections = found
        for section in sections:
            index_format.check_section(content[section.position : section.position + section.length], section)
    except Corrupt as error:
        return str(error)
    if footer.content_hash.hex() != descriptor.content_hash or len(content) != descriptor.index_bytes:
        return "it is of another segment"
    return "" if {section.kind for section in sections} >= LOOKUPS else "it has no look-ups"


def _name(found: Opened, shard: _Shard) -> None:
    """Make the catalog name the new indexes, piece by piece."""
    catalog = found.catalog(shard.ref)
    for piece in shard.pieces:
        listed = shard.opened[piece.descriptor.start]
        rebuilt = [judged for one in listed if (judged := shard.rebuilt.get(one.object_key)) is not None]
        if not rebuilt:
            continue
        try:
            now_ms = found.clock.now_ms()
            renewed = [_renewed(one, shard.rebuilt.get(one.object_key), now_ms) for one in listed]
            if renewed != list(listed) and not catalog.replace([piece], _standing_for(found, piece, renewed)):
                raise Conflict("the catalog changed meanwhile")
        except ForebayError as error:
            shard.report(f"new indexes are not named yet: {error}", AGAIN, piece.descriptor)
            continue
        for judged in rebuilt:
            shard.count("rebuilt")
            shard.count("without_lookups" if judged.flaw == "it has no look-ups" else "damaged")


def _renewed(descriptor: SegmentDescriptor, judged: Judged | None, now_ms: int) -> SegmentDescriptor:
    if judged is None or judged.key is None:
        return descriptor
    # As of now: for as long as the grace, the sweep leaves the old index to those who read by it.
    return msgspec.structs.replace(descriptor, index_key=judged.key, index_bytes=judged.bytes, created_at=now_ms)


def _standing_for(found: Opened, piece: Piece, renewed: Sequence[SegmentDescriptor]) -> SegmentDescriptor:
    """What takes the place of a piece: the descriptor itself, or a manifest that lists those it stood for."""
    old = piece.descriptor
    if old.kind is not DescriptorKind.MANIFEST:
        return renewed[0]
    store = found.stores.of(old.store)
    prefix = f"{old.object_key.rpartition('/')[0]}/"
    listed = manifests.write(store, prefix, renewed, store_name=old.store, created_at=found.clock.now_ms())
    return msgspec.structs.replace(listed, load_id=old.load_id)
