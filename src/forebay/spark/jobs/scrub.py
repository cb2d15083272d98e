"""Scrub: is all of history as it was written? Every object is read whole, by executors side by side.

Checked are the catalog by its rules (no gap, no overlap, the recorded end), and of every object its size, etag and
hash, every frame and checksum, that its frames fill exactly its offsets, and that its index fits. Reads only, beside
the owner of the topics; with `repair`, what is damaged is then mended from its other copy where there is one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec

from forebay.catalog.shard import Piece
from forebay.clock import SystemClock
from forebay.directory import LogDirectory
from forebay.disk import SystemDisk
from forebay.errors import Invalid
from forebay.format.metadata.descriptor import SegmentDescriptor
from forebay.inspection.directory import ExpectedShard
from forebay.inspection.findings import REACH, Finding, Severity
from forebay.inspection.findings import Report as Exam
from forebay.inspection.history.catalog import HistoryPlaces, judge
from forebay.inspection.history.exam import HistoryExam
from forebay.inspection.history.objects import ObjectExam
from forebay.inspection.repair import repair_shard
from forebay.inspection.steps import Action, Step
from forebay.spark.jobs.report import Figure, JobProgress, JobReport, JobShard, findings_of, parts_of, refs_at, summed
from forebay.spark.jobs.resume import Notes
from forebay.spark.jobs.units import spread
from forebay.spark.place.location import Location
from forebay.spark.place.opening import Opened, opened
from forebay.topics import ShardRef

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BUNDLE_BYTES: Final = 64 * 1024 * 1024
BUNDLE_PIECES: Final = 64
"""A unit of work holds so much at most: objects may be small, and a unit has its price."""
AGAIN: Final = "scrub again; if it stays, look at the executors' logs"


class Bundle(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive pieces of one shard, to be examined together."""

    topic: str
    partition: int
    shard_id: str
    pieces: tuple[SegmentDescriptor, ...]

    @property
    def shard(self) -> str:
        return f"{self.topic}[{self.partition}]"

    @property
    def bytes(self) -> int:
        return sum(piece.bytes for piece in self.pieces)

    @property
    def offsets(self) -> tuple[int, int]:
        return self.pieces[0].start, self.pieces[-1].end


class ExaminedPieces(msgspec.Struct, frozen=True, array_like=True):
    """What the pieces of a bundle turned out to be, each with what is wrong with it."""

    findings: tuple[tuple[Finding, ...], ...]
    bytes: int


@dataclass(kw_only=True)
class _Shard(JobShard):
    """One partition, and what of it is to be looked at."""

    pieces: list[SegmentDescriptor]


def run(
    spark: SparkSession,
    location: Location,
    topics: Sequence[str] = (),
    *,
    quick: bool = False,
    repair: bool = False,
    notes: str | None = None,
    dry_run: bool = False,
    progress: JobProgress | None = None,
) -> JobReport:
    """Examine all history of these topics, or of all. Raises only where there is nothing to look at.

    With `quick` objects are looked for and not read. `notes` is a file for what was found sound: a run that names it
    again passes over that. With `repair` a data directory that no process has open is mended; with `dry_run` too, it is
    only said how.
    """
    clock = SystemClock()
    begun = clock.monotonic()
    if repair and location.path is None:
        raise Invalid("repair needs the data directory, where the other copies are: name it with path or --data")
    known = Notes(notes, read_only=dry_run)
    with opened(location) as found:
        shards = [shard_at(found, ref) for ref in refs_at(found, topics)]
    steps: list[Step] = []
    if not dry_run or repair:
        examine_all(spark, location, shards, known, quick=quick, progress=progress)
        damaged = [shard for shard in shards if any(found.severity is Severity.ERROR for found in shard.findings)]
        if repair and damaged:
            steps = _repaired(location, damaged, apply=not dry_run)
            if not dry_run:
                _look_again(location, damaged)
                examine_all(spark, location, damaged, known, quick=quick, progress=None)
    return _report(shards, steps, dry_run=dry_run, seconds=clock.monotonic() - begun)


def shard_at(found: Opened, ref: ShardRef) -> _Shard:
    """A partition: the catalog is judged here, and what it names is listed."""
    place, history = _subject(found, ref)
    exam = Exam()
    recorded = history.read()
    if not recorded.is_empty:
        floor = recorded.state.earliest if recorded.state is not None else 0
        judge(recorded, place, exam, floor=floor)
    catalog = HistoryExam(found.disk, place, history, recorded, exam, quick=False, on_bytes=None)
    pieces = [piece.descriptor for piece in catalog.opened()]
    kept = [piece for piece in pieces if piece.gap is None]
    elsewhere = [piece for piece in kept if found.stores.is_elsewhere(piece.store)]
    if elsewhere:
        what = f"{len(elsewhere)} segments lie in another data directory, the first in {elsewhere[0].store}"
        offsets = (elsewhere[0].start, elsewhere[-1].end)
        exam.add(Severity.NOTE, f"{what}: not checked", "scrub it by its path", shard=place.name, offsets=offsets)
    kept = [piece for piece in kept if piece not in elsewhere]
    figures: dict[str, Figure] = {
        "objects": len(kept),
        "gaps": len(pieces) - len(kept) - len(elsewhere),
        "records": sum(piece.records for piece in kept),
        "bytes": sum(piece.bytes for piece in kept),
    }
    return _Shard(ref=ref, pieces=kept, findings=exam.findings, figures=figures)


def _subject(found: Opened, ref: ShardRef) -> tuple[ExpectedShard, HistoryPlaces]:
    """The partition as an examination takes it; its directory only where there is a data directory."""
    directory = f"{found.directory.shards}/{ref.id}" if found.directory is not None else ""
    history = HistoryPlaces(found.metadata, found.stores, found.catalog(ref).keys, ref.spec.topic_id)
    return ExpectedShard(ref.id, str(ref), directory, ref.spec, ref.partition), history


def _bundles(shards: Sequence[_Shard], known: Notes) -> Iterator[Bundle]:
    for shard in shards:
        held: list[SegmentDescriptor] = []
        left = [piece for piece in shard.pieces if _note(piece) not in known]
        shard.figures["sound_before"] = len(shard.pieces) - len(left)
        for piece in left:
            if held and (len(held) == BUNDLE_PIECES or sum(p.bytes for p in held) + piece.bytes > BUNDLE_BYTES):
                yield _bundle(shard, held)
                held = []
            held.append(piece)
        if held:
            yield _bundle(shard, held)


def _bundle(shard: _Shard, pieces: Sequence[SegmentDescriptor]) -> Bundle:
    name, partition = shard.place
    return Bundle(name, partition, shard.ref.id, tuple(pieces))


def _note(piece: SegmentDescriptor) -> str:
    return f"{piece.store} {piece.object_key} {piece.etag} {piece.content_hash}"


def examine_all(
    spark: SparkSession,
    location: Location,
    shards: Sequence[_Shard],
    known: Notes,
    *,
    quick: bool,
    progress: JobProgress | None,
) -> None:
    """Examine what is left to be; findings and figures go to the shards, what is sound to the notes."""
    by_place = {shard.place: shard for shard in shards}
    outcomes = spread(
        spark,
        list(_bundles(shards, known)),
        partial(examine, location, quick=quick),
        unit_type=Bundle,
        result_type=ExaminedPieces,
        progress=progress,
        weight=lambda bundle: bundle.bytes,
    )
    for bundle, result, error in outcomes:
        shard = by_place[bundle.topic, bundle.partition]
        if result is None:
            what = f"{len(bundle.pieces)} objects could not be examined: {error}"
            shard.findings.append(_finding(bundle.shard, what, AGAIN, bundle.offsets))
            continue
        sound = [piece for piece, found in zip(bundle.pieces, result.findings, strict=True) if not found]
        if not quick:
            known.add(map(_note, sound))
        shard.count("sound", len(sound))
        wrong = dict(zip(bundle.pieces, result.findings, strict=True))
        for piece in _still_there(location, shard, [piece for piece, found in wrong.items() if found]):
            shard.count("damaged")
            shard.findings.extend(wrong[piece])


def _still_there(location: Location, shard: _Shard, pieces: Sequence[SegmentDescriptor]) -> Sequence[SegmentDescriptor]:
    """Those that the catalog still names: an owner goes on meanwhile, and what it replaced may be gone."""
    if not pieces:
        return ()
    with opened(location) as found:
        now = {_note(piece) for piece in found.catalog(shard.ref).descriptors()}
    return [piece for piece in pieces if _note(piece) in now]


def examine(location: Location, bundle: Bundle, *, quick: bool) -> ExaminedPieces:
    """What a task does: read every object of the bundle."""
    read = 0
    findings: list[tuple[Finding, ...]] = []
    with opened(location) as found:
        for piece in bundle.pieces:
            exam = Exam()
            copy = ObjectExam(found.stores, bundle.shard_id, bundle.shard, exam, quick=quick, on_bytes=None).examine(
                Piece(piece, 0)
            )
            if not copy.reachable:
                offsets = (piece.start, piece.end)
                exam.findings.append(_finding(bundle.shard, copy.flaw, REACH, offsets, file=copy.where))
            read += exam.object_bytes
            findings.append(tuple(exam.findings))
    return ExaminedPieces(tuple(findings), read)


def _repaired(location: Location, damaged: Sequence[_Shard], *, apply: bool) -> list[Step]:
    """Mend these shards, which no process may have open; `Unavailable` if one has."""
    assert location.path is not None
    clock = SystemClock()
    with contextlib.closing(SystemDisk()) as disk:
        directory = LogDirectory.take(location.path, disk, clock)
        try:
            with opened(location, read_only=not apply) as found:
                return [
                    step
                    for place, history in (_subject(found, shard.ref) for shard in damaged)
                    for step in repair_shard(
                        place, found.settings.wal, disk=disk, clock=clock, history=history, apply=apply
                    )
                ]
        finally:
            directory.release()


def _look_again(location: Location, damaged: Sequence[_Shard]) -> None:
    """On return these shards are as they are now, with nothing found yet."""
    with opened(location) as found:
        for shard in damaged:
            fresh = shard_at(found, shard.ref)
            shard.pieces, shard.findings, shard.figures = fresh.pieces, fresh.findings, fresh.figures


def _report(shards: Sequence[_Shard], steps: Sequence[Step], *, dry_run: bool, seconds: float) -> JobReport:
    parts = parts_of(shards)
    findings = [*findings_of(shards), *map(_finding_of, steps)]
    totals = summed(parts)
    damaged = sum(finding.severity is Severity.ERROR for finding in findings)
    checked = f"{totals.get('objects', 0)} objects in {len(shards)} partitions"
    verdict = "to be examined" if dry_run and not damaged else f"{damaged} problems" if damaged else "all sound"
    return JobReport(
        job="scrub",
        summary=f"{checked}: {verdict}",
        dry_run=dry_run,
        figures=totals,
        parts=parts,
        findings=tuple(findings),
        seconds=seconds,
    )


def _finding_of(step: Step) -> Finding:
    is_lost = step.action is Action.CANNOT
    return Finding(
        severity=Severity.WARNING if is_lost else Severity.NOTE,
        what=str(step),
        next_step="restore it from a backup" if is_lost else "nothing to do" if step.done else "repair without dry run",
        shard=step.shard,
        offsets=step.offsets,
    )


def _finding(shard: str, what: str, step: str, offsets: tuple[int, int], file: str = "") -> Finding:
    return Finding(severity=Severity.ERROR, what=what, next_step=step, shard=shard, offsets=offsets, file=file)
