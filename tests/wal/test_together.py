"""Many threads at once: appenders, readers and upkeep on one shard of the real file system."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest

from forebay.disk.system import SystemDisk
from forebay.errors import Unavailable
from forebay.testing.checks.history import AppendAnswered, AppendOutcome, Begun, Event, Reading, ShardEvents
from forebay.testing.checks.invariants import check_log, stream_is_gapless
from forebay.topics import Durability
from tests.ledger import Ledger
from tests.support.soak import SOAK
from tests.wal.rig import SMALL, Rig, stage

APPENDERS: Final = 3
APPENDS: Final = 2_000 if SOAK else 150
RECORDS: Final = APPENDERS * sum(1 + number % 3 for number in range(APPENDS))


class Crowd:
    """Everybody who works on the shard, and what they were answered."""

    def __init__(self, rig: Rig[SystemDisk]) -> None:
        self.rig = rig
        self.events: list[list[Event]] = [[] for _ in range(APPENDERS)]
        self.ended = threading.Event()

    def append(self, name: int) -> None:
        for number in range(APPENDS):
            attempt = name * APPENDS + number
            values = tuple(f"{name}.{number}.{place}".encode() for place in range(1 + number % 3))
            offset = self._append(values, number)
            self.events[name] += [
                Begun(attempt, values, str(name)),
                AppendAnswered(attempt, AppendOutcome.ACKED, offset),
            ]
            if name == 0 and number % (APPENDS // 5) == 0:
                self._rotate()

    def _append(self, values: tuple[bytes, ...], timestamp: int) -> int:
        """A single record as a topic appends it: without the queue where nothing waits there."""
        if len(values) == 1:
            return self.rig.append_row((values[0], None, None, (), timestamp))
        return self.rig.wal.acknowledge(stage(self.rig.wal, values, None, timestamp))

    def _rotate(self) -> None:
        """Full files are left alone while they are synced, which on a busy machine may be all the time."""
        while True:
            with contextlib.suppress(Unavailable):
                self.rig.wal.rotate()
                return

    def follow(self) -> Reading:
        """Read from 0 to the last record, waiting at the end."""
        steps: list[tuple[int, bytes | None]] = []
        offset = 0
        while offset < RECORDS:
            if not self.rig.wal.wait(offset, timeout=30):
                raise AssertionError(f"no record came behind {offset}")
            page = self.rig.read(offset, bytes_max=700)
            assert not page.events
            for batch in page.batches:
                steps += list(enumerate(batch.values(), start=batch.base))
            offset = page.next
        return Reading(start=0, steps=tuple(steps), end=offset, next=offset)

    def keep_up(self) -> None:
        while not self.ended.is_set():
            self.rig.clock.advance(0.5)
            self.rig.shard.upkeep.maintain()


@pytest.mark.parametrize("durability", [Durability.DISK, Durability.FSYNC, Durability.MEMORY])
def test_appenders_readers_and_upkeep_do_not_disturb_each_other(
    durability: Durability, tmp_path: Path, ledger: Ledger
) -> None:
    rig = Rig(SystemDisk(descriptors_max=8), durability, settings=SMALL, directory=str(tmp_path / "shard")).open()
    crowd = Crowd(rig)

    with ThreadPoolExecutor(max_workers=APPENDERS + 3) as pool:
        upkeep = pool.submit(crowd.keep_up)
        readers = [pool.submit(crowd.follow) for _ in range(2)]
        appenders = [pool.submit(crowd.append, name) for name in range(APPENDERS)]
        _finish(appenders)
        readings = _finish(readers)
        crowd.ended.set()
        upkeep.result()

    history = ShardEvents(durability, [event for events in crowd.events for event in events])
    rig.shard.upkeep.close()
    again = Rig(SystemDisk(), durability, epoch=rig.epoch, settings=SMALL, directory=rig.directory).open()
    for reading in (*readings, again.reading()):
        assert list(stream_is_gapless(reading)) == []
        assert check_log(history, reading) == []
    assert len(again.wal.files.all) > 3
    ledger.count("histories of threads", durability=durability.value)
    again.wal.close()


def _finish(futures: list[Future[Reading]] | list[Future[None]]) -> list[Reading]:
    found = [future.result() for future in futures]
    return [reading for reading in found if reading is not None]


def test_a_reader_of_class_memory_sees_what_another_thread_is_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The append is acknowledged already: a read that came while a commit was under way found nothing, and ended."""
    rig = Rig(SystemDisk(), Durability.MEMORY, directory=str(tmp_path / "shard")).open()
    rig.append()
    rig.wal.commit()
    wal, found = rig.wal, Future[int]()
    write = wal.writer.write

    def slow(*frames: object) -> object:
        reader = threading.Thread(target=lambda: found.set_result(rig.read(1).next))
        reader.start()
        reader.join(0.2)  # Long enough for a read that does not wait; one that does goes on behind this commit.
        return write(*frames)  # type: ignore[arg-type]

    wal.acknowledge(stage(wal, (b"second",), None, 1))
    with monkeypatch.context() as patch:
        patch.setattr(wal.writer, "write", slow)
        wal.commit()

    assert found.result(30) == 2
    wal.close()
