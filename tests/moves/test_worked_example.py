"""The worked example of a move: A accepts 0..21, a consumer stands at 13, B goes on at 22, one stream across."""

from __future__ import annotations

import contextlib

import pytest

from forebay import Conflict, Moved, Topic
from forebay.format.metadata.descriptor import Phase
from forebay.progress import Progress, ProgressStore, ReaderName
from forebay.records import Record
from forebay.shard import NextSource
from forebay.storage import Storage
from forebay.testing.simulated.clock import ManualClock
from tests.ledger import Ledger
from tests.support.environments.directories import (
    TOPIC,
    Environment,
    clear_up,
    id_of,
    metadata_of,
    numbers,
    pieces_of,
    shard_of,
    state_of,
    told,
)

pytestmark = pytest.mark.slow

OWNERS = ("A", "B", "C")


class StoredReader:
    """A reader whose place is kept in the metadata store."""

    def __init__(self, log: Storage, topic: Topic, name: str = "billing") -> None:
        self._topic = topic
        self._store = ProgressStore(metadata_of(log), log.settings.metadata.prefix, ManualClock())
        self._name = ReaderName.of(topic.spec.namespace, topic.spec.topic, name)

    @property
    def next(self) -> int:
        """The first offset that it has not done."""
        progress = self._store.get(self._name, 0, self._topic.spec.topic_id)
        return progress.offset if progress is not None else 0

    def done(self, offset: int) -> None:
        """Everything up to this offset is done, it included."""
        progress = Progress(offset=offset + 1, incarnation=self._topic.spec.topic_id, epoch=shard_of(self._topic).epoch)
        self._store.ack_up_to(self._name, {0: progress})

    def rest(self) -> list[Record]:
        """What it has not done."""
        return list(self._topic.read(self.next, partition=0))


def produce(topic: Topic, first: int, stop: int, partition: int = 0) -> list[int]:
    """Append records whose value and sequence are their offset."""
    return [
        topic.append(b"%d" % number, producer=7, sequence=number, partition=partition) for number in range(first, stop)
    ]


def test_a_consumer_reads_one_stream_across_a_move(environment: Environment, ledger: Ledger) -> None:
    with environment.open("A") as a, environment.open("B") as b:
        topic = a.create_topic(TOPIC, durability="fsync")
        assert produce(topic, 0, 22) == list(range(22))
        StoredReader(a, topic).done(13)

        (sealed,) = a.seal_topic(TOPIC, target=id_of(b))

        assert (sealed.phase, sealed.next_offset, sealed.reserved_end) == (Phase.SEALED, 22, 22)
        assert (sealed.owner, sealed.sealed_by, sealed.target) == (None, id_of(a), id_of(b))
        with pytest.raises(Moved, match="sealed here at offset 22"):
            topic.append(b"late")
        taken = b.topic(TOPIC)
        assert produce(taken, 22, 30) == list(range(22, 30))
        decision = taken.recovery()
        assert (decision.next_offset, decision.source, decision.exact, decision.gap) == (
            22,
            NextSource.SEALED,
            True,
            None,
        )
        offsets = taken.offsets()
        assert (offsets.earliest, offsets.exported, offsets.next) == (0, 22, 30)
        consumer = StoredReader(b, taken)
        assert consumer.next == 14
        assert told(consumer.rest()) == numbers(14, 30)
        assert shard_of(taken).wal.files.begins == 22
        assert told(taken.follow(14, timeout=0)) == numbers(14, 30)
        consumer.done(29)
        assert state_of(b, taken).epoch == 2
    ledger.count("moves", mode=environment.settings.storage.mode)


@pytest.mark.proves("I21", "I26")
def test_three_owners_in_a_row_keep_one_stream_and_know_every_repeat(environment: Environment, ledger: Ledger) -> None:
    with contextlib.ExitStack() as stack:
        logs = {name: stack.enter_context(environment.open(name)) for name in OWNERS}
        logs["A"].create_topic(TOPIC, durability="fsync", compression="zstd")
        end = 0
        for turn, (name, then) in enumerate(zip(OWNERS * 2, (*OWNERS[1:], *OWNERS, None), strict=False)):
            log = logs[name]
            if turn >= 3:
                log.unseal_topic(TOPIC)
            topic = log.topic(TOPIC)
            assert produce(topic, max(0, end - 9), end) == list(range(max(0, end - 9), end)), "repeats are recognised"
            assert topic.last_sequence(7) == (end - 1 if end else None)
            with pytest.raises(Conflict, match="sequence"):
                topic.append(b"ahead", producer=7, sequence=end + 1)
            end = produce(topic, end, end + 10)[-1] + 1
            assert told(topic.read()) == numbers(0, end)
            if then is not None:
                log.seal_topic(TOPIC, target=id_of(logs[then]))
            ledger.count("moves", mode=environment.settings.storage.mode)
        pieces = pieces_of(logs["C"], topic)
        assert [(piece.start, piece.end) for piece in pieces] == [(start, start + 10) for start in range(0, 50, 10)]
        assert state_of(logs["C"], topic).epoch == 6


def test_files_of_the_old_owner_go_only_when_the_next_has_its_epoch(environment: Environment) -> None:
    with environment.open("A") as a, environment.open("B") as b:
        produce(a.create_topic(TOPIC), 0, 22)
        a.seal_topic(TOPIC, target=id_of(b))
        clear_up(a)
        assert environment.files("A") != [], "nobody has it yet"

        topic = b.topic(TOPIC)
        assert topic.offsets().next == 22
        clear_up(a)
        assert environment.files("A") != [], "a look gives nobody an epoch"
        topic.acquire()
        clear_up(a)

        assert environment.files("A") == []
        assert list((environment.root / "A" / "shards").iterdir()) == []
        assert told(topic.read()) == numbers(0, 22)


def test_an_empty_topic_moves(environment: Environment, ledger: Ledger) -> None:
    with environment.open("A") as a, environment.open("B") as b:
        a.create_topic(TOPIC, partitions=2)

        states = a.seal_topic(TOPIC, target=id_of(b))

        assert [(state.phase, state.next_offset) for state in states] == [(Phase.SEALED, 0)] * 2
        topic = b.topic(TOPIC)
        assert topic.recovery(1).next_offset == 0
        assert topic.append(b"first", partition=1) == 0
        assert told(topic.read()) == [(0, b"first")]
    ledger.count("moves", mode=environment.settings.storage.mode)


def test_every_partition_moves_with_its_own_offsets(environment: Environment, ledger: Ledger) -> None:
    with environment.open("A") as a, environment.open("B") as b:
        topic = a.create_topic(TOPIC, partitions=3)
        for partition, count in enumerate((5, 0, 22)):
            produce(topic, 0, count, partition)

        states = a.seal_topic(TOPIC, target=id_of(b))

        assert [state.next_offset for state in states] == [5, 0, 22]
        taken = b.topic(TOPIC)
        for partition, count in enumerate((5, 0, 22)):
            assert produce(taken, count, count + 3, partition) == list(range(count, count + 3))
            assert told(taken.read(0, partition=partition)) == numbers(0, count + 3)
    ledger.count("moves", n=3, mode=environment.settings.storage.mode)


def test_every_class_of_durability_moves_exactly(environment: Environment, ledger: Ledger) -> None:
    kinds = [(durability, packed) for durability in ("memory", "disk", "fsync") for packed in ("none", "zstd")]
    with environment.open("A") as a, environment.open("B") as b:
        for durability, packed in kinds:
            name = f"{durability}/{packed}"
            topic = a.create_topic(name, durability=durability, compression=packed)
            acks = [topic.append_nowait(b"%d" % number) for number in range(22)]

            (sealed,) = a.seal_topic(name)

            assert sealed.next_offset == 22
            assert [ack.result(60) for ack in acks] == list(range(22))
            taken = b.topic(name)
            assert taken.append(b"22") == 22
            assert told(taken.read()) == numbers(0, 23)
            assert pieces_of(b, taken)[-1].end == 22
    ledger.count("moves", n=len(kinds), mode=environment.settings.storage.mode)


def test_whichever_caller_is_not_the_target_learns_who_is(environment: Environment) -> None:
    with environment.open("A") as a, environment.open("B") as b, environment.open("C") as c:
        produce(a.create_topic(TOPIC), 0, 3)
        a.seal_topic(TOPIC, target=id_of(b))

        with pytest.raises(Moved, match=f"moved to directory .*{id_of(b)}"):
            c.topic(TOPIC).append(b"x")
        assert b.topic(TOPIC).append(b"3") == 3
        with pytest.raises(Moved, match=f"owned by the living session .* in directory .*{id_of(b)}"):
            c.topic(TOPIC).append(b"x")


def test_what_was_sealed_for_any_caller_is_promised_once_it_is_to_move(environment: Environment) -> None:
    with environment.open("A") as a:
        produce(a.create_topic(TOPIC), 0, 3)
        assert a.seal_topic(TOPIC)[0].target is None
    with environment.open("A") as a, environment.open("B") as b, environment.open("C") as c:
        assert a.seal_topic(TOPIC, target=id_of(b))[0].target == id_of(b)

        with pytest.raises(Moved, match=f"moved to directory .*{id_of(b)}"):
            c.topic(TOPIC).append(b"x")
        assert b.topic(TOPIC).append(b"3") == 3


def test_a_seal_is_taken_back_where_it_was_made_and_nothing_is_lost(environment: Environment) -> None:
    with environment.open("A") as a, environment.open("B") as b:
        topic = a.create_topic(TOPIC)
        produce(topic, 0, 22)
        a.seal_topic(TOPIC, target=id_of(b))

        a.unseal_topic(TOPIC)

        assert produce(topic, 20, 25) == list(range(20, 25))
        assert told(topic.read()) == numbers(0, 25)
        with pytest.raises(Moved):
            b.topic(TOPIC).append(b"x")


def test_a_sealed_topic_survives_that_everyone_stops(environment: Environment) -> None:
    with environment.open("A") as a:
        produce(a.create_topic(TOPIC), 0, 22)
        a.seal_topic(TOPIC)
    with environment.open("B") as b:
        assert produce(b.topic(TOPIC), 22, 24) == [22, 23]
    with environment.open("B") as b:
        topic = b.topic(TOPIC)
        assert topic.recovery().source is NextSource.LOCAL
        assert produce(topic, 22, 26) == [22, 23, 24, 25]
        assert told(topic.read()) == numbers(0, 26)
