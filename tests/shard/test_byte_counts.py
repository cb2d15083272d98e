"""The running byte count of a shard is what counting all of its tiers again gives, whatever has happened to it."""

from __future__ import annotations

import contextlib
import linecache
import sys
from collections.abc import Callable
from threading import Thread
from types import FrameType
from typing import Any, Final

import msgspec
import pytest

from forebay.appends.queue import AppendQueue, QueuedRecord, record_bytes
from forebay.appends.ticket import Ticket
from forebay.errors import ForebayError, Full, Unavailable
from forebay.format.columns.rows import Columns, encode_columns
from forebay.records import Headers
from forebay.shard.eviction import weigh
from forebay.shard.tiers import Tiers
from forebay.testing.inside import inside
from forebay.topics import OnFull
from forebay.wal.files import SealedFile
from forebay.wal.retention import drop_file
from tests.ledger import Ledger
from tests.shard.test_cover import ACTS, Model

WEIGHTS: Final = {**dict.fromkeys(ACTS, 2), "append": 6, "evict": 2, "fail": 1}
STEPS: Final = 40


class Capped(Model):
    """A shard that refuses appends at a cap that it never reaches, and one that evicts by it at times."""

    def __init__(self, mode: str, seed: int) -> None:
        super().__init__(mode, seed)
        self.adopt(1 << 40, OnFull.REJECT_NEW)

    def adopt(self, cap_bytes: int, on_full: OnFull) -> None:
        self.shard.adopt(msgspec.structs.replace(self.environment.spec, cap_bytes=cap_bytes, on_full=on_full))

    def append(self) -> None:
        """Single records and batches, with keys, tags and headers; some are still queued when the next is staged."""
        shard, chance = self.shard, self.chance
        tickets = []
        for _ in range(chance.randint(1, 4)):
            key, tag = chance.choice((None, b"", b"key")), chance.choice((None, "", "tág"))
            headers: Headers = chance.choice(((), (("name", b"value"), ("none", None))))
            value = chance.choice((None, b"", b"v" * chance.randint(0, 300)))
            if chance.random() < 0.5:
                entry = QueuedRecord(value, key, tag, headers, 1, None, Ticket())
                tickets.append(shard.stage_one(entry, record_bytes(value, key, tag, headers)))
            else:
                rows = chance.randint(1, 5)
                columns = Columns([value] * rows, [1] * rows, [key] * rows, [tag] * rows, [headers] * rows)
                tickets.append(shard.stage_many(encode_columns(columns), None, Ticket()))
        for ticket in tickets:
            first = shard.acknowledge(ticket)
            self.records.update((first + place, b"") for place in range(ticket.count))
        shard.flush()

    def fail(self) -> None:
        """The log fails under an append that waits, and is healed."""
        wal = self.shard.wal
        if wal.writer.active is not None:
            ticket = self.shard.stage_one(QueuedRecord(b"lost", None, None, (), 1, None, Ticket()), 20)
            wal.fail_file(wal.writer.active, OSError("the disk is away"))
            with pytest.raises(ForebayError):
                self.shard.acknowledge(ticket)
            assert wal.heal()

    def evict(self) -> None:
        held = self.shard.holding().bytes
        self.adopt(max(1, held * 3 // 4), OnFull.DISCARD_OLD)
        if not self.waiting:
            self.shard.evict(0)
        self.adopt(1 << 40, OnFull.REJECT_NEW)

    def reopen(self) -> None:
        super().reopen()
        self.adopt(1 << 40, OnFull.REJECT_NEW)

    def check(self) -> None:
        """The count, and a recount."""
        shard = self.shard
        held = shard.holding()
        assert held.bytes == weigh(inside(shard).tiers, held.earliest, held.head).bytes


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mode", ["shared_fs", "local"])
def test_the_count_is_what_a_recount_gives(mode: str, seed: int, ledger: Ledger) -> None:
    model = Capped(mode, seed)
    acts = {**ACTS, "append": Capped.append, "reopen": Capped.reopen, "evict": Capped.evict, "fail": Capped.fail}
    for _ in range(STEPS):
        act = model.chance.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        acts[act](model)
        model.check()
        ledger.count("byte counts", act=act)


def _entry(value: bytes) -> QueuedRecord:
    return QueuedRecord(value, None, None, (), 1, None, Ticket())


def test_an_append_at_a_cap_reads_no_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Capped("shared_fs", 1)
    model.append()
    shard = model.shard
    held = shard.holding().bytes
    model.adopt(held + 5 * 17, OnFull.REJECT_NEW)
    tickets = [shard.stage_one(_entry(b"1"), 17)]

    def never(*_: object) -> None:
        raise AssertionError("an append reads no tier")

    monkeypatch.setattr(Tiers, "read", never)
    monkeypatch.setattr(Tiers, "cover", never)
    tickets += [shard.stage_one(_entry(b"2"), 17) for _ in range(2)]
    for ticket in tickets:
        shard.acknowledge(ticket)
    tickets = [shard.stage_one(_entry(b"3"), 17) for _ in range(2)]
    with pytest.raises(Full):
        shard.stage_one(_entry(b"4"), 17)

    monkeypatch.undo()
    for ticket in tickets:
        shard.acknowledge(ticket)
    assert shard.holding().bytes == held + 5 * 17


def test_records_that_compaction_took_out_count_until_their_local_file_is_removed() -> None:
    model = Capped("shared_fs", 1)
    for _ in range(3):
        model.append()
        model.export()
    model.append()
    shard = model.shard
    before = shard.holding().bytes
    shard.deletes.delete_range(0, 3)
    model.compact()
    shard.history.retain()
    assert shard.holding().bytes == before

    for file in shard.wal.files.all[:-1]:
        assert isinstance(file, SealedFile)
        drop_file(model.environment.disk, shard.wal.files, file)

    assert shard.holding().bytes < before
    model.check()


def test_a_count_between_publication_and_answer_counts_an_append_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Capped("shared_fs", 1)
    shard = model.shard
    counted: list[int] = []
    acknowledge = AppendQueue.acknowledge

    def count() -> None:
        count = inside(shard).byte_count
        count.count()
        with count.lock:
            counted.append(count.known() or 0)

    def late(queue: AppendQueue) -> None:
        thread = Thread(target=count)
        thread.start()
        thread.join(30)
        acknowledge(queue)

    monkeypatch.setattr(AppendQueue, "acknowledge", late)
    shard.acknowledge(shard.stage_one(_entry(b"1"), 17))

    assert counted == [17]
    assert shard.holding().bytes == 17


class Interrupted:
    """Raises at the n-th line of the byte count: see `tests.wal.test_interrupts` for the lines that do not count."""

    def __init__(self, line: int) -> None:
        self.left = line

    def __call__(self, frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        if not frame.f_code.co_qualname.startswith("ByteCount."):
            return None
        if event == "line" and self.left > 0:
            source = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
            self.left -= not source.startswith("with ")
            if self.left == 0:
                raise KeyboardInterrupt(f"{frame.f_code.co_qualname}: {source}")
        return self


def _counted_through(model: Capped, interrupted: Interrupted) -> bool:
    """Appends and counts, one of which is interrupted; whether the count is what a recount gives when they are over."""
    shard, tickets = model.shard, list[Ticket]()
    count = inside(shard).byte_count

    def stage() -> None:
        entry = _entry(b"v")
        tickets.append(entry.ticket)
        shard.stage_one(entry, 17)

    def settle() -> None:
        for ticket in tickets:
            if ticket.count:
                shard.acknowledge(ticket)

    previous = sys.gettrace()
    for step in (stage, count.count, settle, shard.holding, stage, stage, settle):
        sys.settrace(interrupted)
        try:
            with contextlib.suppress(KeyboardInterrupt):
                step()
        finally:
            sys.settrace(previous)
    stage()
    settle()
    with count.lock:
        known = count.known()
    held = shard.holding()
    recount = weigh(inside(shard).tiers, held.earliest, held.head).bytes
    return known in (None, recount) and held.bytes == recount


def test_an_interrupt_at_any_line_of_the_count_leaves_it_right() -> None:
    """Found by review: the bytes of appends on their way were a number apart, and stayed wrong if one was cut short."""
    broken: list[int] = []
    model = Capped("shared_fs", 1)
    for line in range(1, 500):
        interrupted = Interrupted(line)
        if not _counted_through(model, interrupted):
            broken.append(line)
            model = Capped("shared_fs", 1)
        if interrupted.left > 0:
            break
    else:
        pytest.fail("there are more lines than expected")
    assert broken == []


def test_a_signal_that_comes_while_a_cap_is_checked_is_refused_the_log() -> None:
    """Found by review: an append in the handler waited for ever for the thread that it had interrupted."""
    model = Capped("shared_fs", 1)
    shard = model.shard
    with inside(shard).byte_count.lock:
        for work in (lambda: shard.stage_one(_entry(b"v"), 17), shard.holding):
            with pytest.raises(Unavailable, match="inside an append of the same log"):
                work()
    assert shard.acknowledge(shard.stage_one(_entry(b"v"), 17)) == 0
