"""Progress of many: one flusher writes the cursors of all readers, few transactions, no reads, none goes back."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import pytest

from forebay.errors import Closed, Corrupt, ForebayError, Unavailable, UnsupportedFormat
from forebay.format.metadata.keys import progress_key, topic_key
from forebay.format.metadata.value import encode_value
from forebay.metadata import Compare, Delete, MemoryMetadata, MetadataStore, Operation, Outcome, Put
from forebay.progress import MOVES_MAX, NOTE_BYTES_MAX, Progress, ProgressStore, ReaderName
from forebay.settings import ProgressSettings
from forebay.storage.cursors import Cursors
from forebay.testing.simulated.clock import ManualClock
from forebay.testing.simulated.metadata import Fault, FaultyMetadata
from forebay.topics import TopicSpec

SETTINGS = ProgressSettings(flush_interval_ms=600_000, flush_records_min=1_000_000)


def spec_of(topic: str) -> TopicSpec:
    return TopicSpec(namespace="shop", topic=topic, topic_id=f"{topic.encode().hex():0>32.32}", partitions=4)


def at(offset: int, topic: str = "orders") -> Progress:
    return Progress(offset=offset, incarnation=spec_of(topic).topic_id)


def name_of(reader: str, topic: str = "orders") -> ReaderName:
    return ReaderName.of("shop", topic, reader)


class Desk:
    """The cursors of one process. Nothing is written in the background: a flush is a step of its own."""

    def __init__(self, inner: MetadataStore | None = None, *topics: str) -> None:
        self.inner = inner if inner is not None else MemoryMetadata()
        for topic in topics or ("orders",):
            key = topic_key("shop", topic, prefix="/forebay")
            self.inner.transaction([], [Put(key, encode_value(spec_of(topic)))])
        self.metadata = FaultyMetadata(self.inner)
        self.store = ProgressStore(self.metadata, "/forebay", ManualClock())
        self.cursors = Cursors(self.store, SETTINGS, ManualClock())
        self.cursors.worker.stop()

    def cached(self, reader: str, offset: int, *, topic: str = "orders", partition: int = 0) -> int:
        return self.cursors.commit(name_of(reader, topic), partition, at(offset, topic), ack="cached")

    def durable(self, reader: str, offset: int, *, topic: str = "orders", partition: int = 0) -> int:
        return self.cursors.commit(name_of(reader, topic), partition, at(offset, topic), ack="durable")

    def stored(self, reader: str, *, topic: str = "orders", partition: int = 0) -> int | None:
        """As another process finds it."""
        elsewhere = ProgressStore(self.inner, "/forebay", ManualClock())
        found = elsewhere.get(name_of(reader, topic), partition, spec_of(topic).topic_id)
        return found.offset if found is not None else None

    def asked(self) -> dict[str, int]:
        """How often each method of the metadata store was called since the last time."""
        calls, self.metadata.calls = self.metadata.calls, {}
        return calls


def test_a_cursor_that_is_known_moves_forward_without_a_read() -> None:
    desk = Desk()
    desk.durable("billing", 1)
    desk.cached("billing", 2)
    desk.asked()

    assert desk.durable("billing", 3) == 3
    assert desk.cached("billing", 4) == 4
    assert desk.cached("billing", 5) == 5
    desk.cursors.flush()

    assert desk.asked() == {"transaction": 2}
    assert desk.stored("billing") == 5


def test_the_cursors_of_many_readers_are_written_in_few_transactions() -> None:
    desk = Desk(None, "orders", "returns")
    readers = [(f"r{number}", topic) for number in range(2 * MOVES_MAX) for topic in ("orders", "returns")]
    for reader, topic in readers:
        desk.cached(reader, 1, topic=topic)
    desk.cursors.flush()
    desk.asked()

    for offset in (2, 3):
        for reader, topic in readers:
            desk.cached(reader, offset, topic=topic)
        desk.cursors.flush()

        assert desk.asked() == {"transaction": len(readers) // MOVES_MAX}
    assert {desk.stored(reader, topic=topic) for reader, topic in readers} == {3}


def test_of_cursors_that_another_process_has_moved_only_those_are_read_again() -> None:
    desk = Desk()
    readers = [f"r{number}" for number in range(MOVES_MAX)]
    for reader in readers:
        desk.cached(reader, 1)
    desk.cursors.flush()
    elsewhere = Desk(desk.inner)
    elsewhere.durable("r7", 9)
    elsewhere.durable("r33", 4)
    for reader in readers:
        desk.cached(reader, 6)
    desk.asked()

    desk.cursors.flush()

    asked = desk.asked()
    assert asked["get"] == 2
    assert asked["transaction"] <= 2 * 2 * 7
    assert desk.stored("r7") == 9, "a cursor never goes back"
    assert {desk.stored(reader) for reader in readers if reader != "r7"} == {6}
    assert desk.cached("r7", 8) == 9


def test_a_commit_behind_what_is_known_asks_where_the_cursor_stands() -> None:
    """An operator may have reset it in another process: the answer is that of the store, not of the memory."""
    desk = Desk()
    desk.durable("billing", 9)
    Desk(desk.inner).cursors.reset(name_of("billing"), 0, at(2))

    assert desk.durable("billing", 5) == 5
    assert desk.cached("billing", 4) == 5
    assert desk.stored("billing") == 5


@pytest.mark.parametrize("fault", list(Fault))
@pytest.mark.parametrize("step", range(4))
@pytest.mark.parametrize("lands", [True, False])
def test_a_lost_or_late_transaction_moves_no_cursor_back_and_loses_none(
    fault: Fault,
    step: int,
    lands: bool,  # noqa: FBT001
) -> None:
    """I25, at every transaction of two flushes; a transaction that timed out lands at last, or never."""
    desk = Desk()
    readers = [f"r{number}" for number in range(MOVES_MAX + 5)]
    for reader in readers:
        desk.cached(reader, 1)
    desk.cursors.flush()
    desk.metadata.inject(fault, after=step)
    highest = dict.fromkeys(readers, 1)
    for offset in (2, 3):
        for reader in readers:
            desk.cached(reader, offset)
        try:
            desk.cursors.flush()
        except Unavailable:
            assert fault is Fault.FAIL_BEFORE
        for reader in readers:
            stands = desk.stored(reader)
            assert stands is not None
            assert stands >= highest[reader]
            highest[reader] = stands
    if lands:
        desk.metadata.land()
    assert all((desk.stored(reader) or 0) >= highest[reader] for reader in readers)

    desk.cursors.end()

    assert {desk.stored(reader) for reader in readers} == {3}, "closing writes what is left"


@pytest.mark.parametrize(
    ("value", "error"),
    [(b"damaged", Corrupt), (encode_value(at(4), version=99, min_reader=99), UnsupportedFormat)],
    ids=["damaged", "of a newer version"],
)
def test_a_cursor_that_cannot_be_read_stops_no_other(value: bytes, error: type[ForebayError]) -> None:
    desk = Desk()
    key = progress_key("shop", "orders", "r3", 0, prefix="/forebay")
    for reader in ("r1", "r2", "r3", "r4", "r5"):
        desk.cached(reader, 4)
    desk.inner.transaction([], [Put(key, value)])

    with pytest.raises(error):
        desk.cursors.flush()

    assert desk.cursors.names() == ["r1", "r2", "r3", "r4", "r5"]
    assert [desk.stored(reader) for reader in ("r1", "r2", "r4", "r5")] == [4, 4, 4, 4]
    desk.inner.transaction([], [Delete(key)])
    desk.cursors.flush()
    assert desk.stored("r3") == 4, "it is tried again"


def test_notes_that_are_too_large_for_one_transaction_stop_no_reader() -> None:
    """A note of 4,096 bytes may take 24 KiB where it is stored: fifty of them are more than a transaction takes."""
    desk = Desk()
    readers = [f"r{number}" for number in range(MOVES_MAX)]
    for reader in readers:
        noted = Progress(offset=4, incarnation=spec_of("orders").topic_id, note="\x01" * NOTE_BYTES_MAX)
        desk.cursors.commit(name_of(reader), 0, noted, ack="cached")

    desk.cursors.end()

    assert {desk.stored(reader) for reader in readers} == {4}


def test_where_a_group_stands_is_seen_while_the_cursor_of_another_cannot_be_read() -> None:
    desk = Desk()
    key = progress_key("shop", "orders", "damaged", 0, prefix="/forebay")
    desk.cached("damaged", 4)
    desk.cached("whole", 5)
    desk.inner.transaction([], [Put(key, b"damaged")])

    assert [found.progress.offset for found in desk.cursors.of("whole")] == [5]
    assert desk.cursors.names() == ["damaged", "whole"]
    with pytest.raises(Corrupt):
        desk.cursors.of("damaged")


def test_a_cached_commit_after_the_end_is_refused_rather_than_lost() -> None:
    """The cursor is known here, so nothing else would say that the log is closed."""
    desk = Desk()
    desk.durable("billing", 1)
    desk.cursors.end()

    with pytest.raises(Closed):
        desk.cached("billing", 2)

    desk.cursors.end()
    assert desk.stored("billing") == 1


def test_an_end_that_failed_is_harmless_when_repeated() -> None:
    """The metadata store is closed right after it: nothing could be written later."""
    desk = Desk()
    desk.cached("billing", 1)
    desk.inner.transaction([], [Put(progress_key("shop", "orders", "billing", 0, prefix="/forebay"), b"damaged")])
    with pytest.raises(Corrupt):
        desk.cursors.end()
    desk.metadata.close()

    desk.cursors.end()


def test_a_reader_of_a_deleted_topic_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk(None, "orders", "returns")
    for reader in ("r1", "r2", "r3"):
        desk.cached(reader, 4)
        desk.cached(reader, 4, topic="returns")
    desk.inner.transaction([], [Delete(topic_key("shop", "returns", prefix="/forebay"))])

    with caplog.at_level(logging.WARNING):
        desk.cursors.flush()

    assert [desk.stored(reader) for reader in ("r1", "r2", "r3")] == [4, 4, 4]
    assert [desk.stored(reader, topic="returns") for reader in ("r1", "r2", "r3")] == [None, None, None]
    assert "was deleted" in caplog.text
    desk.asked()
    desk.cursors.flush()
    assert desk.asked() == {}, "nothing is left to be written"


def test_a_commit_while_the_cursors_of_a_deleted_topic_are_removed_leaves_none_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another process may not know yet that the topic is gone: its cursor would be listed for ever."""
    desk = Desk()
    elsewhere = Desk(desk.inner)
    for reader in ("r1", "r2", "r3"):
        elsewhere.durable(reader, 4)
    desk.inner.transaction([], [Delete(topic_key("shop", "orders", prefix="/forebay"))])
    transaction, moved = FaultyMetadata.transaction, list[int]()

    def overtaken(metadata: FaultyMetadata, compares: Sequence[Compare], operations: Sequence[Operation]) -> Outcome:
        if metadata is desk.metadata and not moved:
            moved.append(elsewhere.durable("r2", 5))
        return transaction(metadata, compares, operations)

    monkeypatch.setattr(FaultyMetadata, "transaction", overtaken)
    desk.store.forget_topic("shop", "orders", spec_of("orders").topic_id)

    assert moved == [5]
    assert desk.store.names() == []


def test_a_cursor_that_cannot_be_read_does_not_hold_up_the_deletion_of_its_topic() -> None:
    desk = Desk()
    for reader in ("r1", "r2", "r3"):
        desk.durable(reader, 4)
    desk.inner.transaction([], [Put(progress_key("shop", "orders", "r2", 0, prefix="/forebay"), b"damaged")])

    desk.store.forget_topic("shop", "orders", spec_of("orders").topic_id)

    assert desk.store.names() == ["r2"]


def test_commits_in_a_topic_and_in_an_earlier_one_of_its_name_are_written_one_after_the_other() -> None:
    """One key can be put once only in a transaction."""
    desk = Desk()
    desk.durable("billing", 4)
    later = Progress(offset=2, incarnation="f" * 32)
    desk.cached("billing", 6)
    spec = TopicSpec(namespace="shop", topic="orders", topic_id="f" * 32, partitions=4)
    desk.inner.transaction([], [Put(topic_key("shop", "orders", prefix="/forebay"), encode_value(spec))])
    desk.cursors.commit(name_of("billing"), 0, later, ack="cached")

    desk.cursors.flush()

    assert desk.cursors.at("billing", spec, 0) == later


def test_what_a_process_knows_of_a_deleted_topic_is_forgotten() -> None:
    desk = Desk(None, "orders", "returns")
    desk.durable("billing", 4)
    desk.durable("billing", 4, topic="returns")

    desk.cursors.forget_topic(spec_of("orders"))

    assert desk.store.known(name_of("billing"), 0, spec_of("orders").topic_id) is None
    assert desk.store.known(name_of("billing", "returns"), 0, spec_of("returns").topic_id) == at(4, "returns")


def test_a_process_remembers_a_limited_number_of_cursors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.progress.KNOWN_MAX", 10)
    topics = [f"t{number}" for number in range(8)]
    desk = Desk(None, *topics)
    for topic in topics:
        for partition in range(4):
            desk.durable("billing", 1, topic=topic, partition=partition)

    for topic in topics:
        for partition in range(4):
            assert desk.durable("billing", 2, topic=topic, partition=partition) == 2

    known = [
        desk.store.known(name_of("billing", topic), p, spec_of(topic).topic_id) for topic in topics for p in range(4)
    ]
    assert 0 < sum(found is not None for found in known) <= 10


NAMES = ("ab", "ab-c", "ab.c", "abc", "a", "b", "ab_")


def _listed(desk: Desk) -> Iterator[tuple[str, str, str, int]]:
    for entry in desk.inner.range("/forebay/progress/"):
        namespace, topic, reader, partition = entry.key.removeprefix("/forebay/progress/").split("/")
        yield namespace, topic, reader, int(partition)


@pytest.mark.parametrize("page", [1, 2, 3, 100])
def test_cursors_of_one_reader_are_found_among_those_of_others_by_ranges(
    monkeypatch: pytest.MonkeyPatch, page: int
) -> None:
    monkeypatch.setattr("forebay.progress.PAGE_KEYS", page)
    desk = Desk(None, "orders", "orders-old", "orders.new")
    for topic in ("orders", "orders-old", "orders.new"):
        for reader in NAMES if topic != "orders-old" else NAMES[:3]:
            for partition in range(4 if reader in ("ab", "b") else 1):
                desk.durable(reader, 1, topic=topic, partition=partition)
    everything = list(_listed(desk))

    assert desk.store.names() == sorted({reader for _, _, reader, _ in everything})
    for reader in (*NAMES, "nobody"):
        found = [(each.namespace, each.topic, reader, each.partition) for each in desk.cursors.of(reader)]
        assert found == sorted(each for each in everything if each[2] == reader)


def test_the_names_of_readers_are_found_without_a_look_at_every_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.progress.PAGE_KEYS", 10)
    desk = Desk()
    partitions = range(1_000)
    desk.store.ack_up_to(name_of("billing"), {partition: at(1) for partition in partitions})
    desk.store.ack_up_to(name_of("audit"), {0: at(1)})
    desk.asked()

    assert desk.store.names() == ["audit", "billing"]
    assert len(list(desk.store.of("audit"))) == 1

    assert desk.asked()["range"] <= 5
