"""Mend each copy of history from the other, then rebuild what is derived from segments: indexes and checkpoints.

A segment is replaced only by one with the catalogued content hash. First a plan, which changes nothing; the same
plan is then carried out, if asked to. What is replaced is kept in `aside/`, so that the evidence stays. May be
interrupted anywhere and repeated: a segment whose index was moved away is one that waits to be sealed, which
recovery knows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from forebay.appends.producer_window import ProducerWindow
from forebay.clock import Clock
from forebay.directory import LogDirectory
from forebay.disk import Disk, replace_file
from forebay.errors import Corrupt, ForebayError
from forebay.format.files.checkpoint import Checkpoint, CheckpointFile, decode_checkpoint, encode_checkpoint
from forebay.format.files.segment import HEADER_BYTES, decode_header, index_name, parse_segment_name, segment_name
from forebay.format.frame.head import Verdict
from forebay.format.index import sections as index_format
from forebay.inspection.directory import ExpectedShard, inspected, metadata_of
from forebay.inspection.findings import Report, Severity
from forebay.inspection.history.catalog import HistoryPlaces
from forebay.inspection.repair.history import HistoryMending, Mended
from forebay.inspection.segments import RESTORE, SegmentExam, StoredIndex
from forebay.inspection.steps import CHANGES, Action, Aside, Step
from forebay.inspection.verify import object_bytes, segment_bytes
from forebay.inspection.verify.shard import Progress
from forebay.places import Stores
from forebay.settings import Settings, WalSettings
from forebay.topics import TopicName
from forebay.wal.files import walked
from forebay.wal.recovery.survey import CHECKPOINT_NAME, TEMPORARY_SUFFIX, survey
from forebay.wal.scan import LogScan
from forebay.wal.sealing import index_of


def repair(
    path: str,
    settings: Settings,
    *,
    disk: Disk,
    clock: Clock,
    topic: TopicName | None = None,
    apply: bool = False,
    on_total: Progress | None = None,
    on_bytes: Progress | None = None,
) -> list[Step]:
    """The steps that are needed; with `apply`, carried out. `Unavailable` if another process has the directory.

    `on_total` and `on_bytes` are called with the bytes that the history asks to be walked.
    """
    LogDirectory.look(path, disk)
    directory = LogDirectory.take(path, disk, clock)
    with contextlib.ExitStack() as stack:
        stack.callback(directory.release)
        store = stack.enter_context(metadata_of(directory, settings, disk, clock, read_only=not apply))
        found = inspected(path, settings, disk, store)
        stores = stack.enter_context(contextlib.closing(Stores(found, settings, disk=disk, clock=clock)))
        places = [place for place in found.places() if topic is None or (place.spec and place.spec.name == topic)]
        if on_total is not None:
            on_total(segment_bytes(disk, found, topic) + object_bytes(found, topic))
        steps: list[Step] = []
        for place in places:
            history = HistoryPlaces.of(place, store, stores, found.prefix)
            steps += repair_shard(
                place, settings.wal, disk=disk, clock=clock, history=history, apply=apply, on_bytes=on_bytes
            )
        return steps


def repair_shard(
    place: ExpectedShard,
    settings: WalSettings,
    *,
    disk: Disk,
    clock: Clock,
    apply: bool,
    history: HistoryPlaces | None = None,
    on_bytes: Progress | None = None,
) -> list[Step]:
    """The same for one shard, which no other process may have open here."""
    mended = Mended([], {})
    if history is not None and not history.read().is_empty:
        mended = HistoryMending(place, history, disk=disk, on_bytes=on_bytes).run(apply=apply)
    if not disk.exists(place.directory):
        return mended.steps
    healed = {} if apply else mended.files
    derived = _ShardRepair(place, settings, disk, clock, healed).run(apply=apply)
    return mended.steps + derived


class _ShardRepair:
    """The repair of one shard."""

    def __init__(
        self, place: ExpectedShard, settings: WalSettings, disk: Disk, clock: Clock, healed: Mapping[str, bytes]
    ) -> None:
        self._healed = healed
        """Segments that other steps of the plan will have mended, each with what its index will hold."""
        self._place = place
        self._directory = place.directory
        self._settings = settings
        self._disk = disk
        self._clock = clock
        self._names = disk.list_directory(place.directory)
        self._segments = sorted({*healed, *(name for name in self._names if parse_segment_name(name) is not None)})
        self._aside = Aside(disk, place.directory)

    def run(self, *, apply: bool) -> list[Step]:
        plan = list(self._plan())
        if not apply or not any(step.action in CHANGES for step in plan):
            return plan
        for step in plan:
            if step.set_aside:
                self._move_aside(step)
        self._rebuild(plan)
        return [msgspec.structs.replace(step, done=step.action in CHANGES) for step in plan]

    def _plan(self) -> Iterator[Step]:
        for name in self._names:
            if name.endswith(TEMPORARY_SUFFIX):
                yield self._step(Action.LEAVE, name, "left by an interrupted step; the next opening removes it")
        if not self._segments:
            return
        flaw = self._flaw_of_newest() if self._segments[-1] not in self._healed else None
        if flaw is not None:
            yield self._step(Action.CANNOT, self._segments[-1], f"{flaw}; {RESTORE}")
            return
        indexes: dict[str, StoredIndex | None] = {}
        for name in self._segments[:-1]:
            indexes[name], step = self._index_step(name)
            if step is not None:
                yield step
        rebuilt = any(index is None for index in indexes.values())
        why = self._flaw_of_checkpoint(indexes, rebuilt=rebuilt)
        if why is not None:
            yield self._step(Action.REBUILD_CHECKPOINT, CHECKPOINT_NAME, why, replaces=CHECKPOINT_NAME in self._names)

    def _flaw_of_newest(self) -> str | None:
        """Why the end of the log is unknown, if it is: then nothing may be derived from it."""
        name = self._segments[-1]
        with contextlib.closing(self._disk.open(f"{self._directory}/{name}")) as file:
            header = decode_header(file.read_at(HEADER_BYTES, 0))
            if isinstance(header, Verdict):
                return f"its header is {header.value}"
            scan = LogScan(file, header, ProducerWindow(1, 1))
            try:
                scan.run(file.size(), proof=0)
            except ForebayError as error:
                return str(error)
        return None if scan.opened else "has no state frame"

    def _index_step(self, name: str) -> tuple[StoredIndex | None, Step | None]:
        """The index of a segment if it is sound, and what is to be done if it is not."""
        if name in self._healed:
            decoded = index_format.decode_index(self._healed[name])
            assert not isinstance(decoded, Verdict)
            return StoredIndex(self._healed[name], *decoded), None
        if index_name(name) not in self._names:
            if not self._holds_records(name):
                return None, None
            return None, self._step(Action.REBUILD_INDEX, index_name(name), "it is missing")
        report = Report()
        exam = SegmentExam(self._disk, self._directory, name, self._place.name, report)
        index = exam.index()
        if index is None:
            action = Action.CANNOT if exam.index_is_newer else Action.REBUILD_INDEX
            why = report.findings[-1].what
            return None, self._step(action, index_name(name), why, replaces=not exam.index_is_newer)
        return self._compared(name, exam, index, report)

    def _compared(
        self, name: str, exam: SegmentExam, index: StoredIndex, report: Report
    ) -> tuple[StoredIndex | None, Step | None]:
        """An index that holds by itself, held against its segment."""
        with contextlib.closing(self._disk.open(f"{self._directory}/{name}")) as file:
            header = exam.header(file, self._place.id)
            examined = exam.sealed(file, header, index) if header is not None else None
        errors = [finding for finding in report.findings if finding.severity is Severity.ERROR]
        if not errors:
            return index, None
        if examined is None or examined.damage:
            # The index is the witness of what the segment held: it stays.
            return index, self._step(Action.CANNOT, name, f"{errors[0].what}; {errors[0].next_step}")
        return None, self._step(Action.REBUILD_INDEX, index_name(name), errors[0].what, replaces=True)

    def _holds_records(self, name: str) -> bool:
        with contextlib.closing(self._disk.open(f"{self._directory}/{name}")) as file:
            header = decode_header(file.read_at(HEADER_BYTES, 0))
            if isinstance(header, Verdict):
                return False
            scan = LogScan(file, header, ProducerWindow(1, 1))
            with contextlib.suppress(Corrupt):
                scan.run(file.size(), proof=0)
            return scan.frames > 0

    def _flaw_of_checkpoint(self, indexes: dict[str, StoredIndex | None], *, rebuilt: bool) -> str | None:
        if CHECKPOINT_NAME not in self._names:
            return "it is missing" if indexes else None
        with contextlib.closing(self._disk.open(f"{self._directory}/{CHECKPOINT_NAME}")) as file:
            checkpoint = decode_checkpoint(file.read_at(file.size(), 0))
        if not isinstance(checkpoint, Checkpoint):
            return None if checkpoint is Verdict.NEWER else f"it is {checkpoint.value}"
        if rebuilt:
            return "indexes are rebuilt"
        ends = {(index.footer.start, index.footer.epoch): index.footer.end for index in indexes.values() if index}
        listed = {(entry.start, entry.epoch): entry.end for entry in checkpoint.files}
        # Less than there is may be listed: the last seal may have come after it. More may be too: it is the witness
        # of what is missing. Other than there is may not.
        here = {place: end for place, end in listed.items() if segment_name(*place) in self._segments}
        return None if here.items() <= ends.items() else "it does not agree with the indexes"

    def _move_aside(self, step: Step) -> None:
        self._aside.make()
        self._disk.rename(step.file, step.set_aside)
        self._disk.sync_directory(self._aside.directory)
        self._disk.sync_directory(self._directory)

    def _rebuild(self, plan: Sequence[Step]) -> None:
        wanted = {step.file for step in plan if step.action is Action.REBUILD_INDEX}
        facts = survey(self._disk, self._directory, self._settings, writable=False)
        try:
            for scan in facts.logs[:-1]:
                if index_name(scan.path) in wanted:
                    replace_file(self._disk, index_name(scan.path), index_of(walked(scan))[0])
            if any(step.action is Action.REBUILD_CHECKPOINT for step in plan):
                self._write_checkpoint(facts.logs[-1])
        finally:
            for scan in facts.logs:
                scan.file.close()

    def _write_checkpoint(self, newest: LogScan) -> None:
        checkpoint = Checkpoint(
            files=tuple(self._sealed()),
            durable=max(newest.start, newest.durable),
            rotated_at=self._clock.now_ms(),
            clean=newest.clean,
            clean_position=newest.stop if newest.clean else 0,
        )
        replace_file(self._disk, f"{self._directory}/{CHECKPOINT_NAME}", encode_checkpoint(checkpoint))

    def _sealed(self) -> Iterator[CheckpointFile]:
        present = self._disk.list_directory(self._directory)
        for name in self._segments[:-1]:
            if index_name(name) in present:
                with contextlib.closing(self._disk.open(f"{self._directory}/{index_name(name)}")) as file:
                    footer = index_format.decode_footer(file.read_at(file.size(), 0))
                if isinstance(footer, index_format.Footer):
                    yield CheckpointFile(footer.start, footer.epoch, footer.end)

    def _step(self, action: Action, name: str, why: str, *, replaces: bool = False) -> Step:
        path = f"{self._directory}/{name}"
        aside = self._aside.free(name) if replaces else ""
        return Step(action=action, shard=self._place.name, file=path, why=why, set_aside=aside)
