"""One shard under examination: each of its files, and whether together they make one unbroken sequence.

Reads only. Beside an owner, files may be replaced while they are read, so an error counts only if it is seen
again at a fresh look.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from forebay.catalog import no_gap
from forebay.disk import Disk
from forebay.errors import ForebayError, UnsupportedFormat
from forebay.format.files.checkpoint import Checkpoint, decode_checkpoint
from forebay.format.files.live import LIVE_BYTES, Live, decode_live
from forebay.format.files.segment import INDEX_SUFFIX, SEGMENT_SUFFIX, index_name, parse_segment_name, segment_name
from forebay.format.frame.head import Verdict
from forebay.format.metadata.descriptor import Phase, ShardState
from forebay.inspection.directory import ExpectedShard
from forebay.inspection.findings import UPGRADE, Report, Severity
from forebay.inspection.history.catalog import METADATA, HistoryPlaces, StoredHistory
from forebay.inspection.history.exam import HistoryExam, LocalFiles
from forebay.inspection.segments import REPAIR, RESTORE, Examined, SegmentExam
from forebay.wal.files import read_footer
from forebay.wal.recovery.resume import ASIDE
from forebay.wal.recovery.survey import CHECKPOINT_NAME, TEMPORARY_SUFFIX
from forebay.wal.tail import LIVE_NAME

LOOKS = 3
"""Beside an owner: how often a shard with errors is looked at before they are believed."""

Progress = Callable[[int], None]


def verify_shard(
    disk: Disk,
    place: ExpectedShard,
    state: ShardState | None,
    *,
    owned: bool,
    history: HistoryPlaces | None = None,
    quick: bool = False,
    on_bytes: Progress | None = None,
) -> Report:
    """Everything about one shard, with `history` what the catalog names too. Changes nothing.

    With `quick` objects are not read. The state is asked for again where there is a history to ask.
    """
    report = Report()
    for look in range(LOOKS if owned else 1):
        report = Report()
        exam = ShardExam(
            disk, place, state, report, owned=owned, history=history, quick=quick, on_bytes=None if look else on_bytes
        )
        try:
            exam.run()
        except OSError as error:
            report.add(Severity.ERROR, f"cannot be read: {error}", RESTORE, shard=place.name, file=place.directory)
        except ForebayError as error:
            report.add(Severity.ERROR, str(error), RESTORE, shard=place.name, file=place.directory)
        if report.is_clean:
            break
    return report


class ShardExam:
    """One look at one shard."""

    def __init__(
        self,
        disk: Disk,
        place: ExpectedShard,
        state: ShardState | None,
        report: Report,
        *,
        owned: bool,
        history: HistoryPlaces | None = None,
        quick: bool = False,
        on_bytes: Progress | None = None,
    ) -> None:
        self.found = StoredHistory(state=state)
        self.local = LocalFiles()
        self.history: HistoryExam | None = None
        """What became of the history, if there is any."""
        self._disk = disk
        self._place = place
        self._report = report
        self._owned = owned
        self._asked = history
        self._quick = quick
        self._on_bytes = on_bytes
        self._live: Live | None = None

    def run(self) -> None:
        """Look at all of it; findings go to the report."""
        self._report.shards = 1
        directory = self._place.directory
        exists = self._disk.exists(directory)
        # In this order: an owner goes on meanwhile, and what is read first must not speak of what came later.
        summary = self._content(CHECKPOINT_NAME) if exists else None
        published = self._content(LIVE_NAME) if exists else None
        names = self._disk.list_directory(directory) if exists else []
        if self._asked is not None:
            # Behind the list: a local copy goes only once the catalog has it.
            self.found = self._asked.read()
        if exists:
            self._look(names, summary, published)
        else:
            self._without_directory()
        if self._asked is not None and not self.found.is_empty:
            self.history = HistoryExam(
                self._disk,
                self._place,
                self._asked,
                self.found,
                self._report,
                quick=self._quick,
                on_bytes=self._on_bytes,
            )
            self.history.run(self.local)

    def _look(self, names: list[str], summary: bytes | None, published: bytes | None) -> None:
        segments = sorted(name for name in names if parse_segment_name(name) is not None)
        self._names(names, segments)
        if published is not None:
            self._live = self._decoded_live(published)
        files = self._examine(segments, set(names))
        state = self.found.state
        self.local = LocalFiles(names, files, earliest=state.earliest if state is not None else 0)
        self._link(files)
        if summary is not None:
            self._checkpoint(summary, files)
        self._against_state(files)

    def _is_history(self, start: int, stop: int) -> bool:
        """Whether the catalog has these offsets, and not as files of this directory."""
        stores = self._asked.stores if self._asked is not None else None
        pieces = [piece.descriptor for piece in self.found.pieces if piece.descriptor.end > start]
        if stores is None or not pieces or pieces[0].start > start or no_gap(start, pieces, stop) is not None:
            return False
        return not any(stores.is_here(piece.store) for piece in pieces if piece.start < stop)

    def _without_directory(self) -> None:
        state = self.found.state
        if state is None or not state.epoch or self._owned or state.phase is Phase.SEALED:
            return
        if state.holder is not None and self._asked is not None and self._asked.stores.holds_elsewhere(state.holder):
            return
        if state.reserved_in_log:
            step = "restore it from a backup: the shard is not opened without it"
            self._add(Severity.ERROR, "the shard has lost its directory, and with it its records here", step)
            return
        if not self._is_history(0, max(1, self.found.frontier)):
            self._add(Severity.WARNING, "the shard was opened before, but has no directory", "restore it if it had one")

    def _names(self, names: Sequence[str], segments: Sequence[str]) -> None:
        expected = {*segments, *map(index_name, segments), CHECKPOINT_NAME, LIVE_NAME, ASIDE}
        for name in names:
            if name in expected:
                continue
            path = f"{self._place.directory}/{name}"
            if name.endswith(TEMPORARY_SUFFIX):
                if not self._owned:
                    step = "nothing to do: the next opening removes it"
                    self._add(Severity.NOTE, "was left by an interrupted step", step, file=path)
            elif name.endswith(INDEX_SUFFIX):
                self._alone(name, segments)
            else:
                self._add(Severity.WARNING, "is no file of a shard", "move it elsewhere", file=path)
        if ASIDE in names:
            kept = self._disk.list_directory(f"{self._place.directory}/{ASIDE}")
            if kept:
                what = f"{len(kept)} files were set aside by recovery or repair"
                step = "look at them, then remove them when they are no longer wanted"
                self._add(Severity.NOTE, what, step, file=f"{self._place.directory}/{ASIDE}")

    def _alone(self, name: str, segments: Sequence[str]) -> None:
        """An index without its segment: left when a local copy went, or all that is left of one."""
        path = f"{self._place.directory}/{name}"
        segment = name.removesuffix(INDEX_SUFFIX) + SEGMENT_SUFFIX
        try:
            footer = read_footer(self._disk, path)
        except (OSError, UnsupportedFormat):
            footer = None
        offsets = (footer.start, footer.end) if footer is not None else None
        is_before = not segments or segment < segments[0]
        if is_before and offsets is not None and self._is_history(*offsets):
            step = "nothing to do: the next opening removes it"
            self._add(Severity.NOTE, "is the index of a local copy that is gone", step, file=path, offsets=offsets)
        else:
            what = f"is the index of a {SEGMENT_SUFFIX} file that is missing"
            self._add(Severity.ERROR, what, RESTORE, file=path, offsets=offsets)

    def _examine(self, segments: Sequence[str], present: set[str]) -> list[Examined]:
        """The files, oldest first, examined from the newest back: each proves how far the one before it reached."""
        found: list[Examined] = []
        proof = self._live.durable if self._live is not None and not self._owned else 0
        for name in reversed(segments):
            newest = name == segments[-1]
            examined = self._examine_file(name, present, newest=newest, proof=proof)
            if examined is None:
                proof = 0
                continue
            proof = examined.previous_end
            found.append(examined)
        return found[::-1]

    def _examine_file(self, name: str, present: set[str], *, newest: bool, proof: int) -> Examined | None:
        exam = SegmentExam(self._disk, self._place.directory, name, self._place.name, self._report)
        file = self._disk.open(f"{self._place.directory}/{name}")
        with contextlib.closing(file):
            size = file.size()
            self._report.files += 1
            self._report.bytes += size
            header = exam.header(file, self._place.id)
            examined = None
            if header is not None:
                index = exam.index() if index_name(name) in present else None
                if index is not None:
                    examined = exam.sealed(file, header, index)
                else:
                    published = newest and self._published(name)
                    limit = self._live.position if published and self._live is not None else size
                    examined = exam.log(file, header, size=limit, proof=proof, published=published)
                    if not newest and index_name(name) not in present and not self._owned:
                        step = "nothing to do: the next opening seals it"
                        self._add(Severity.NOTE, "is not sealed yet", step, file=file.path)
            if self._on_bytes is not None:
                self._on_bytes(size)
        return examined

    def _published(self, name: str) -> bool:
        live = self._live
        return self._owned and live is not None and segment_name(live.file_start, live.file_epoch) == name

    def _link(self, files: Sequence[Examined]) -> None:
        """Each file must begin where the one before it ended, or say why not."""
        expected, floor = 0, self.local.floor
        before: Examined | None = None
        for file in files:
            previous = expected if file.start == expected else file.previous_end
            path = f"{self._place.directory}/{file.name}"
            lowest = floor if before is None else expected
            if previous > lowest and not (before is None and self._is_history(lowest, previous)):
                what = "the file with these offsets is missing"
                self.local.missing.append((expected, previous))
                self._add(Severity.ERROR, what, RESTORE, file=path, offsets=(expected, previous))
            elif before is not None and previous < expected and (before.sealed or before.start > previous):
                what = "overlaps the file before it"
                self._add(Severity.ERROR, what, RESTORE, file=path, offsets=(previous, expected))
            expected, before = file.end, file
            for gap in file.catalogued:
                if not self._is_history(gap.start, gap.stop):
                    what = "leaves these offsets to the history, which does not have them"
                    self._add(Severity.ERROR, what, METADATA, file=path, offsets=(gap.start, gap.stop))

    def _checkpoint(self, content: bytes, files: Sequence[Examined]) -> None:
        path = f"{self._place.directory}/{CHECKPOINT_NAME}"
        checkpoint = decode_checkpoint(content)
        if checkpoint is Verdict.NEWER:
            self._add(Severity.ERROR, "was written by a newer version", UPGRADE, file=path)
            return
        if not isinstance(checkpoint, Checkpoint):
            self._add(Severity.ERROR, f"is {checkpoint.value}", REPAIR, file=path)
            return
        ends = {file.name: file.end for file in files}
        first = files[0].start if files else 0
        for entry in checkpoint.files:
            name = segment_name(entry.start, entry.epoch)
            is_gone = entry.end <= first and self._is_history(entry.start, entry.end)
            if name not in ends and entry.end > self.local.floor and not is_gone:
                what = f"lists {name}, which is missing"
                self._add(Severity.ERROR, what, RESTORE, file=path, offsets=(entry.start, entry.end))
            elif name in ends and ends[name] != entry.end:
                what = f"says that {name} ends at {entry.end}, but it ends at {ends[name]}"
                self._add(Severity.ERROR, what, REPAIR, file=path)
        end = files[-1].end if files else 0
        if checkpoint.durable > end:
            what = f"says that the log was durable up to {checkpoint.durable}, but it ends at {end}"
            self._add(Severity.ERROR, what, RESTORE, file=path, offsets=(end, checkpoint.durable))

    def _decoded_live(self, content: bytes) -> Live | None:
        live = decode_live(content[:LIVE_BYTES])
        if isinstance(live, Live):
            return live
        # Never synced, so a power loss may leave anything in it; a living owner rewrites it at each commit.
        severity = Severity.ERROR if self._owned or live is Verdict.NEWER else Severity.NOTE
        step = UPGRADE if live is Verdict.NEWER else "nothing to do: the next commit writes it again"
        self._add(severity, f"is {live.value}", step, file=f"{self._place.directory}/{LIVE_NAME}")
        return None

    def _against_state(self, files: Sequence[Examined]) -> None:
        newest = files[-1] if files else None
        state = self.found.state
        if self._place.spec is None or newest is None:
            return
        if state is None:
            step = "restore the metadata store, or move the shard's directory away to start afresh"
            self._add(Severity.ERROR, "has a log, but the metadata store knows no state of it", step)
        elif state.incarnation != self._place.spec.topic_id:
            what = f"its recorded state is of another topic, {state.incarnation}"
            self._add(Severity.ERROR, what, "restore the metadata store")
        elif newest.epoch > state.epoch:
            what = f"its log is of epoch {newest.epoch}, the metadata store knows only {state.epoch}"
            self._add(Severity.ERROR, what, "restore a newer backup of the metadata store")
        elif state.phase is Phase.SEALED and newest.end > state.next_offset:
            what = f"was sealed at {state.next_offset}, but its log goes to {newest.end}"
            step = "find out which is right before you move either away"
            self._add(Severity.ERROR, what, step, offsets=(state.next_offset, newest.end))

    def _content(self, name: str) -> bytes | None:
        """The whole of a small file; `None` if there is none."""
        try:
            file = self._disk.open(f"{self._place.directory}/{name}")
        except FileNotFoundError:
            return None
        with contextlib.closing(file):
            return file.read_at(file.size(), 0)

    def _add(
        self,
        severity: Severity,
        what: str,
        next_step: str,
        *,
        file: str = "",
        offsets: tuple[int, int] | None = None,
    ) -> None:
        self._report.add(severity, what, next_step, shard=self._place.name, file=file, offsets=offsets)
