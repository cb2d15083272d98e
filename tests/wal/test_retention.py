"""Local files that history covers may go: from the front, after their time, and so that no crash leaves a gap."""

from __future__ import annotations

import errno
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from forebay.disk import replace_file
from forebay.disk.system import SystemDisk
from forebay.pages import Page
from forebay.records import Gap, Reason
from forebay.shard.tiers import LocalLog
from forebay.testing.checks.history import AppendOutcome
from forebay.testing.simulated.crashes import explore
from forebay.topics import Durability
from forebay.wal.files import FileList, SealedFile
from forebay.wal.readonly import FollowedLog
from forebay.wal.recovery.survey import CHECKPOINT_NAME, read_checkpoint
from forebay.wal.retention import drop_file, expired
from tests.ledger import Ledger
from tests.wal.rig import DIRECTORY, SMALL, Bare, BareRig, simulated
from tests.wal.scenarios import fail_next

FSYNC, DISK = Durability.FSYNC, Durability.DISK
LONG, FOREVER, ROOMY = 1e6, 1e12, 1 << 40


def _filled(files: int = 4) -> Bare:
    """Sealed files of three records each, and an active one."""
    rig = BareRig(simulated(), FSYNC).begin()
    rig.fill(files)
    rig.clock.advance(LONG)
    return rig


def _expired(rig: BareRig[Any], covered_end: int, **numbers: float) -> list[int]:
    """The first offsets of the files that may go."""
    limits: dict[str, Any] = {"time_s": FOREVER, "bytes_max": ROOMY, "grace_s": 0.0} | numbers
    now_ms, now = rig.clock.now_ms(), rig.clock.monotonic()
    found = expired(rig.wal.files, covered_end, now_ms=now_ms, now=now, **limits)
    return [file.start for file in found]


def _oldest(rig: BareRig[Any]) -> SealedFile:
    file = rig.wal.files.all[0]
    assert isinstance(file, SealedFile)
    return file


def _sizes(rig: Bare) -> list[int]:
    return [file.footer.segment_bytes if isinstance(file, SealedFile) else file.limit for file in rig.wal.files.all]


def test_only_what_is_old_covered_and_in_front_goes() -> None:
    rig = _filled()

    assert _expired(rig, 12) == []
    assert _expired(rig, 12, time_s=LONG) == [0, 3, 6, 9]
    assert _expired(rig, 12, time_s=LONG + 1) == []
    assert _expired(rig, 8, time_s=0) == [0, 3]
    assert _expired(rig, 2, time_s=0) == []
    assert _expired(rig, 13, time_s=0) == [0, 3, 6, 9], "never the active file"


def test_as_much_goes_as_the_limit_of_bytes_asks_for() -> None:
    rig = _filled()
    sizes = _sizes(rig)

    assert _expired(rig, 12, bytes_max=sum(sizes)) == []
    assert _expired(rig, 12, bytes_max=sum(sizes) - 1) == [0]
    assert _expired(rig, 12, bytes_max=sum(sizes[2:])) == [0, 3]
    assert _expired(rig, 12, bytes_max=sum(sizes[2:]) - 1) == [0, 3, 6]
    assert _expired(rig, 5, bytes_max=0) == [0]


def test_a_file_that_was_just_read_stays_and_so_does_all_behind_it() -> None:
    rig = _filled()
    rig.wal.tail.cache.clear()
    rig.read(4)
    assert [file.read_last for file in rig.wal.files.all[:2] if isinstance(file, SealedFile)] == [0.0, LONG]

    rig.clock.advance(59)
    assert _expired(rig, 12, time_s=0, grace_s=60) == [0]
    rig.clock.advance(1)
    assert _expired(rig, 12, time_s=0, grace_s=60) == [0, 3, 6, 9]


def test_the_newest_file_stays_even_when_it_is_sealed() -> None:
    """It alone says whose log it is, where it goes on, and which appends it remembers."""
    rig = _filled(2)

    sealed = rig.wal.files.all[:2]

    found = expired(FileList(sealed), 99, now_ms=rig.clock.now_ms(), now=0, time_s=0, bytes_max=0, grace_s=0)

    assert found == [sealed[0]]


def _read(log: LocalLog, offset: int, bytes_max: int = 1 << 20) -> Page:
    page = log.read(offset, bytes_max)
    assert page is not None
    return page


def test_below_the_files_a_reader_learns_who_else_may_know() -> None:
    rig = _filled()
    rig.wal.tail.cache.clear()
    follower = FollowedLog(rig.disk, rig.clock, DIRECTORY, SMALL, lambda: True)
    assert _read(follower, 0, bytes_max=1).next == 3
    for _ in range(2):
        drop_file(rig.disk, rig.wal.files, _oldest(rig))

    assert rig.wal.files.begins == 6
    assert sorted(rig.disk.list_directory(DIRECTORY))[0].startswith("00000000000000000006")
    for log in (rig.wal, follower):
        for offset in (5, 0):  # a follower goes on reading a file that it has open, until it looks again
            assert log.read(offset) is None
        assert _read(log, 6).batches[0].base == 6
    assert BareRig(simulated(), FSYNC).begin().wal.files.read(0, 1) is None
    assert BareRig(simulated(), FSYNC).begin().wal.files.begins is None


def test_only_the_oldest_file_can_be_dropped() -> None:
    rig = _filled()
    with pytest.raises(AssertionError, match="only the oldest"):
        rig.wal.files.drop(rig.wal.files.all[1])


@pytest.mark.parametrize("kind", ["sync_directory", "unlink"])
def test_a_file_that_the_disk_does_not_let_go_stays_readable_and_goes_later(kind: str) -> None:
    rig = _filled()
    rig.wal.tail.cache.clear()
    fail_next(rig, kind, errno.EIO, suffix="")

    with pytest.raises(OSError, match="EIO"):
        drop_file(rig.disk, rig.wal.files, _oldest(rig))
    assert rig.read(0).batches[0].base == 0

    drop_file(rig.disk, rig.wal.files, _oldest(rig))
    assert rig.wal.files.begins == 3


def test_an_index_that_the_disk_does_not_let_go_is_a_leftover() -> None:
    rig = _filled()
    fail_next(rig, "unlink", errno.EIO, suffix=".idx")
    drop_file(rig.disk, rig.wal.files, _oldest(rig))

    facts = rig.surveyed()
    assert facts.leftovers == ["00000000000000000000-00000001.idx"]
    BareRig(rig.disk, FSYNC, epoch=1).begin(facts=facts)
    assert rig.surveyed().leftovers == []


def test_a_checkpoint_of_before_the_files_went_brings_none_of_them_back() -> None:
    """Written by one who did not know of it, as when two edit one file: what is there counts, and not what it lists."""
    rig = _filled()
    path = f"{DIRECTORY}/{CHECKPOINT_NAME}"
    listed = read_checkpoint(rig.disk, DIRECTORY)
    assert listed is not None and listed.files[0].start == 0
    file = rig.disk.open(path)
    before = file.read_at(file.size(), 0)
    for _ in range(2):
        drop_file(rig.disk, rig.wal.files, _oldest(rig))
    rig.append()
    whole = rig.reading_from(6)

    replace_file(rig.disk, path, before)
    again = BareRig(rig.disk, FSYNC, epoch=1).begin()

    assert again.surveyed().damage == []
    assert again.wal.files.begins == 6
    assert again.reading_from(6) == whole


@pytest.mark.slow
def test_no_crash_while_files_go_leaves_a_gap_or_takes_what_is_not_covered(ledger: Ledger) -> None:
    rig = _filled()
    whole = rig.reading()
    covered_end, begun = 9, len(rig.disk.trace)
    for start in _expired(rig, covered_end, time_s=0):
        assert _oldest(rig).start == start
        drop_file(rig.disk, rig.wal.files, _oldest(rig))
    rig.append(2)

    for state in explore(rig.disk.trace, range(begun, len(rig.disk.trace) + 1), states_max=10, names_max=16):
        ledger.count("crash states", scenario="retention", damage=state.damage.value)
        _judge(BareRig(state.disk(), FSYNC, epoch=9), whole.records, covered_end)


def _judge(rig: Bare, records: list[tuple[int, bytes | None]], covered_end: int) -> None:
    facts = rig.surveyed()
    assert facts.damage == []
    assert facts.begins <= covered_end
    rig.begin(facts=facts)
    begins = rig.wal.files.begins
    assert begins == facts.begins
    reading = rig.reading_from(begins)
    assert not reading.gaps
    assert reading.records[: len(records) - begins] == records[begins:]
    assert rig.append() is AppendOutcome.ACKED
    names = rig.disk.list_directory(DIRECTORY)
    segments = {name.removesuffix(".seg") for name in names if name.endswith(".seg")}
    assert {name.removesuffix(".idx") for name in names if name.endswith(".idx")} <= segments


@pytest.mark.slow
def test_readers_beside_retention_get_records_or_learn_that_they_are_below(tmp_path: Path) -> None:
    rig = BareRig(SystemDisk(descriptors_max=8), DISK, settings=SMALL, directory=str(tmp_path / "shard")).begin()
    rig.fill(60)
    rig.wal.tail.cache.clear()
    ended = threading.Event()

    def read() -> int:
        below = 0
        while not ended.is_set():
            for offset in range(0, 180, 7):
                page = rig.wal.read(offset, bytes_max=1)
                if page is None:
                    below += 1
                    continue
                assert not page.events
                assert page.batches[0].base == offset
        return below

    with ThreadPoolExecutor(max_workers=3) as pool:
        readers = [pool.submit(read) for _ in range(3)]
        try:
            for _ in range(50):
                drop_file(rig.disk, rig.wal.files, _oldest(rig))
                ended.wait(0.002)
        finally:
            ended.set()
        assert all(reader.result() for reader in readers)
    assert rig.wal.files.begins == 150


def test_a_front_that_went_by_itself_is_named_where_a_gap_in_the_log_begins() -> None:
    """The gap before the first file belongs to it, so `begins` lies before that gap."""
    rig = BareRig(simulated(), FSYNC).begin()
    rig.fill(1)
    rig.wal.skip_to_history(20)
    rig.append()
    rig.wal.rotate()
    rig.upkeep.seal_rotated()
    for _ in range(2):
        drop_file(rig.disk, rig.wal.files, _oldest(rig))

    assert rig.wal.files.begins == 4
    assert rig.surveyed().begins == 4
    assert rig.read(5).events == [Gap(5, 20, Reason.HISTORY)]
