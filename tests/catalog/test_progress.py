"""Cursors of readers: durable, apart from any owner, never going back by themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest

from forebay.errors import Invalid, Unavailable
from forebay.metadata import Compare, MemoryMetadata, Operation, Outcome
from forebay.progress import Progress, ProgressStore, ReaderName
from forebay.testing.simulated.clock import ManualClock
from forebay.testing.simulated.metadata import Fault, FaultyMetadata

TOPIC, NEXT_TOPIC = "ab" * 16, "cd" * 16
BILLING = ReaderName.of("shop", "orders", "billing")


def at(offset: int, *, incarnation: str = TOPIC, epoch: int = 1, note: str = "") -> Progress:
    return Progress(offset=offset, incarnation=incarnation, epoch=epoch, note=note)


def test_a_cursor_is_found_again_with_its_note() -> None:
    store = MemoryMetadata()
    ProgressStore(store, "/forebay", ManualClock()).ack_up_to(BILLING, {0: at(14, note="page 3")})

    found = ProgressStore(store, "/forebay", ManualClock()).get(BILLING, 0, TOPIC)

    assert found == at(14, note="page 3")


def test_a_late_acknowledgement_does_not_move_a_cursor_back() -> None:
    progress = ProgressStore(MemoryMetadata(), "/forebay", ManualClock())
    progress.ack_up_to(BILLING, {0: at(14)})

    standing = progress.ack_up_to(BILLING, {0: at(9), 1: at(3)})

    assert standing == {0: 14, 1: 3}


class Meeting(FaultyMetadata):
    """Lets another member act once, after the first has looked and before it commits."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__(MemoryMetadata())
        self._acts = [act]

    def transaction(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Outcome:
        if self._acts:
            self._acts.pop()()
        return super().transaction(compares, operations)


@pytest.mark.parametrize("before", [None, 2])
def test_an_acknowledgement_between_look_and_commit_is_not_undone(before: int | None) -> None:
    """I25: of two members that move a cursor at once, the one that was further wins."""
    store = Meeting(lambda: ProgressStore(store.inner, "/forebay", ManualClock()).ack_up_to(BILLING, {0: at(14)}))
    if before is not None:
        ProgressStore(store.inner, "/forebay", ManualClock()).ack_up_to(BILLING, {0: at(before)})
    progress = ProgressStore(store, "/forebay", ManualClock())

    assert progress.ack_up_to(BILLING, {0: at(9)}) == {0: 14}

    assert progress.get(BILLING, 0, TOPIC) == at(14)


def test_a_reset_may_go_back() -> None:
    progress = ProgressStore(MemoryMetadata(), "/forebay", ManualClock())
    progress.ack_up_to(BILLING, {0: at(14)})

    progress.reset(BILLING, 0, at(2))

    assert progress.get(BILLING, 0, TOPIC) == at(2)


def test_a_topic_created_again_starts_without_cursors() -> None:
    progress = ProgressStore(MemoryMetadata(), "/forebay", ManualClock())
    progress.ack_up_to(BILLING, {0: at(14)})

    assert progress.get(BILLING, 0, NEXT_TOPIC) is None
    assert progress.ack_up_to(BILLING, {0: at(1, incarnation=NEXT_TOPIC)}) == {0: 1}


def test_of_a_deleted_topic_cursors_go_and_those_of_one_created_again_stay() -> None:
    progress = ProgressStore(MemoryMetadata(), "/forebay", ManualClock())
    progress.ack_up_to(BILLING, {0: at(14), 1: at(3)})
    progress.ack_up_to(BILLING, {1: at(1, incarnation=NEXT_TOPIC)})

    for _ in range(2):
        progress.forget_topic("shop", "orders", TOPIC)

        assert progress.get(BILLING, 0, TOPIC) is None
        assert progress.get(BILLING, 1, NEXT_TOPIC) == at(1, incarnation=NEXT_TOPIC)


def test_a_cursor_outlives_the_owner_it_was_read_from() -> None:
    progress = ProgressStore(MemoryMetadata(), "/forebay", ManualClock())
    progress.ack_up_to(BILLING, {0: at(14, epoch=1)})

    progress.ack_up_to(BILLING, {0: at(22, epoch=2)})

    assert progress.get(BILLING, 0, TOPIC) == at(22, epoch=2)


def test_many_partitions_are_moved_in_few_transactions() -> None:
    faulty = FaultyMetadata(MemoryMetadata())
    progress = ProgressStore(faulty, "/forebay", ManualClock())

    progress.ack_up_to(BILLING, {partition: at(partition + 1) for partition in range(120)})

    assert faulty.calls["transaction"] == 3
    assert all(progress.get(BILLING, partition, TOPIC) == at(partition + 1) for partition in range(120))


@pytest.mark.parametrize("fault", list(Fault))
def test_an_acknowledgement_whose_answer_was_lost_counts_once(fault: Fault) -> None:
    faulty = FaultyMetadata(MemoryMetadata())
    progress = ProgressStore(faulty, "/forebay", ManualClock())
    faulty.inject(fault)

    if fault is Fault.FAIL_BEFORE:
        with pytest.raises(Unavailable):
            progress.ack_up_to(BILLING, {0: at(14)})
    assert progress.ack_up_to(BILLING, {0: at(15)}) == {0: 15}
    faulty.land()

    assert progress.get(BILLING, 0, TOPIC) == at(15)


def test_racing_acknowledgements_end_at_the_highest() -> None:
    progress = ProgressStore(MemoryMetadata(), "/forebay", ManualClock())

    def acknowledge(first: int) -> None:
        for offset in range(first, 100, 4):
            progress.ack_up_to(BILLING, {0: at(offset)})

    threads = [threading.Thread(target=acknowledge, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert progress.get(BILLING, 0, TOPIC) == at(99)


def test_readers_are_listed_and_forgotten() -> None:
    progress = ProgressStore(MemoryMetadata(), "/forebay", ManualClock())
    progress.ack_up_to(BILLING, {0: at(1), 1: at(1)})
    progress.ack_up_to(ReaderName.of("shop", "orders", "audit"), {0: at(1)})
    assert progress.readers("shop", "orders") == ["audit", "billing"]

    progress.forget(BILLING, partitions=2)

    assert progress.readers("shop", "orders") == ["audit"]


@pytest.mark.parametrize("name", ["", "..", "a/b", "a b", "x" * 101, "ä", "a\0"])
def test_a_reader_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(Invalid, match="reader's name"):
        ReaderName.of("shop", "orders", name)


def test_an_impossible_cursor_is_refused() -> None:
    progress = ProgressStore(MemoryMetadata(), "/forebay", ManualClock())

    with pytest.raises(Invalid, match="-1"):
        progress.ack_up_to(BILLING, {0: at(-1)})
    with pytest.raises(Invalid, match="4096"):
        progress.reset(BILLING, 0, at(1, note="x" * 5000))
