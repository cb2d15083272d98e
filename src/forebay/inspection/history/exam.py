"""The history of one shard under examination: the catalog by its rules, and every copy that it names.

What lies in a store is examined there; what lies in the data directory itself was examined with the local files
and is held against the catalog here. Reads only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from forebay.catalog import no_gap, no_overlap
from forebay.catalog.shard import Piece
from forebay.disk import Disk
from forebay.errors import ForebayError
from forebay.format.files.segment import parse_segment_name
from forebay.format.metadata.descriptor import DescriptorKind, SegmentDescriptor
from forebay.inspection.directory import ExpectedShard
from forebay.inspection.findings import REACH, Finding, Report, Severity
from forebay.inspection.history.catalog import METADATA, HistoryPlaces, StoredHistory, judge, summary
from forebay.inspection.history.objects import RESTORE_OBJECT, ObjectCopy, ObjectExam
from forebay.inspection.segments import REPAIR, RESTORE, Examined
from forebay.manifests import ManifestReader

Progress = Callable[[int], None]


@dataclass(slots=True)
class LocalFiles:
    """What the local files of a shard turned out to be. `missing` are offsets between them that no file holds."""

    names: list[str] = field(default_factory=list)
    files: list[Examined] = field(default_factory=list)
    missing: list[tuple[int, int]] = field(default_factory=list)
    earliest: int = 0
    """What is recorded of the floor."""

    @property
    def floor(self) -> int:
        """Nothing below is kept any more."""
        return max([self.earliest, *(file.earliest for file in self.files)])

    def twin_of(self, piece: SegmentDescriptor) -> Examined | None:
        """The file that has exactly the bytes that were catalogued, if there is one."""
        wanted = (piece.content_hash, piece.bytes)
        return next((file for file in self.files if (file.content_hash, file.bytes) == wanted), None)


class HistoryExam:
    """One look at the history of one shard."""

    def __init__(
        self,
        disk: Disk,
        place: ExpectedShard,
        history: HistoryPlaces,
        found: StoredHistory,
        report: Report,
        *,
        quick: bool,
        on_bytes: Progress | None,
    ) -> None:
        self.copies: list[ObjectCopy] = []
        """Every object that the catalog names."""
        self.lost: list[tuple[SegmentDescriptor, str]] = []
        """What is catalogued in this directory and is not there as it was, and why."""
        self._disk = disk
        self._place = place
        self._history = history
        self._found = found
        self._report = report
        self._objects = ObjectExam(history.stores, place.id, place.name, report, quick=quick, on_bytes=on_bytes)

    def run(self, local: LocalFiles) -> None:
        """Look at all of it; the local files were looked at before."""
        judge(self._found, self._place, self._report, floor=local.floor)
        self._report.histories.append(summary(self._found, self._place, self._history))
        elsewhere: list[SegmentDescriptor] = []
        for piece in self.opened():
            descriptor = piece.descriptor
            if descriptor.gap is not None:
                continue
            if self._history.stores.is_here(descriptor.store):
                self._local(descriptor, local)
            elif self._history.stores.is_elsewhere(descriptor.store):
                elsewhere.append(descriptor)
            else:
                self.copies.append(self._objects.examine(piece))
        if elsewhere:
            what = f"{len(elsewhere)} segments lie in another data directory, the first in {elsewhere[0].store}"
            offsets = (elsewhere[0].start, elsewhere[-1].end)
            self._add(Severity.NOTE, f"{what}: not checked here", "verify that directory too", offsets=offsets)
        for first, last, count in self.unreached():
            self._add(
                Severity.ERROR, f"{count} objects: {first.flaw}", REACH, offsets=(first.offsets[0], last.offsets[1])
            )
        self._compare(local)
        self._report.findings = [self._advised(finding, local) for finding in self._report.findings]

    def unreached(self) -> Iterator[tuple[ObjectCopy, ObjectCopy, int]]:
        """The first and the last object of each store that does not answer, and how many there are."""
        stores: dict[str, list[ObjectCopy]] = {}
        for copy in self.copies:
            if not copy.reachable:
                stores.setdefault(copy.descriptor.store, []).append(copy)
        for copies in stores.values():
            yield copies[0], copies[-1], len(copies)

    def opened(self) -> Iterator[Piece]:
        """The pieces, with those that a manifest lists in its place; they have the revision 0."""
        for piece in self._found.pieces:
            if piece.descriptor.kind is not DescriptorKind.MANIFEST:
                yield piece
                continue
            copy = self._objects.examine(piece)
            self.copies.append(copy)
            if copy.intact:
                yield from (Piece(inner, 0) for inner in self._listed(copy))

    def _listed(self, copy: ObjectCopy) -> Sequence[SegmentDescriptor]:
        manifest = copy.descriptor
        try:
            inner = ManifestReader(self._history.stores.of(manifest.store))(manifest)
            flaw = no_overlap(inner) or no_gap(manifest.start, inner, manifest.end)
        except ForebayError as error:
            inner, flaw = (), str(error)
        if flaw is not None:
            self._add(Severity.ERROR, f"what it lists: {flaw}", METADATA, file=copy.where, offsets=copy.offsets)
        return inner

    def _local(self, descriptor: SegmentDescriptor, local: LocalFiles) -> None:
        """A piece that is catalogued where it lies."""
        name = descriptor.object_key.rpartition("/")[2]
        path = f"{self._place.directory}/{name}"
        offsets = (descriptor.start, descriptor.end)
        file = next((file for file in local.files if file.name == name), None)
        if file is None:
            # Looked for again: an owner may have sealed it since the directory was listed.
            if not self._disk.exists(path):
                self.lost.append((descriptor, "is catalogued, but missing"))
                self._add(Severity.ERROR, "is catalogued, but missing", RESTORE, file=path, offsets=offsets)
            elif name in local.names:
                self.lost.append((descriptor, "cannot be read"))
        elif (file.start, file.end, file.content_hash) != (*offsets, descriptor.content_hash):
            what = f"is not what was catalogued (hash {file.content_hash}, expected {descriptor.content_hash})"
            self.lost.append((descriptor, what))
            self._add(Severity.ERROR, what, RESTORE, file=path, offsets=offsets)

    def _compare(self, local: LocalFiles) -> None:
        """Where a local file and an object have the same offsets, they must have the same bytes."""
        for copy in self.copies:
            file = next((file for file in local.files if file.name == copy.name and file.sealed), None)
            if file is None or file.damage or not copy.intact:
                continue
            if file.content_hash != copy.descriptor.content_hash:
                what = f"is whole, but differs from {copy.where}, which is whole too"
                path = f"{self._place.directory}/{file.name}"
                step = "find out which is right before you move either away"
                self._add(Severity.ERROR, what, step, file=path, offsets=copy.offsets)

    def _advised(self, finding: Finding, local: LocalFiles) -> Finding:
        """Where the other copy is sound, repairing helps."""
        if finding.next_step == RESTORE:
            offsets = finding.offsets or (0, 0)
            named = parse_segment_name(finding.file.rpartition("/")[2])
            starts = {copy.descriptor.start for copy in self.copies if copy.intact and copy.name}
            is_named = named is not None and named[0] in starts
            helps = is_named if offsets[0] == offsets[1] else self.is_held(offsets, as_files=True)
        elif finding.next_step == RESTORE_OBJECT:
            copies = (copy for copy in self.copies if copy.where == finding.file and not copy.index)
            helps = any(local.twin_of(copy.descriptor) for copy in copies)
        else:
            helps = False
        return msgspec.structs.replace(finding, next_step=REPAIR) if helps else finding

    def is_held(self, offsets: tuple[int, int], *, as_files: bool = False) -> bool:
        """Whether sound objects hold all of these offsets; with `as_files` those that local files are copies of."""
        sound = [copy.descriptor for copy in self.copies if copy.intact and (copy.name or not as_files)]
        held = [held for held in sound if held.end > offsets[0] and not _is_damaged(held, offsets)]
        return bool(held) and held[0].start <= offsets[0] and no_gap(offsets[0], held, offsets[1]) is None

    def _add(self, severity: Severity, what: str, step: str, *, offsets: tuple[int, int], file: str = "") -> None:
        self._report.add(severity, what, step, shard=self._place.name, file=file, offsets=offsets)


def _is_damaged(descriptor: SegmentDescriptor, offsets: tuple[int, int]) -> bool:
    """Whether the object was exported with damage that reaches into these offsets."""
    return any(start < offsets[1] and offsets[0] < stop for start, stop in descriptor.damaged)
