"""Batches of streaming queries as loads: of each batch one load is committed, whatever is repeated or fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from typing import Final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.clock import SystemClock
from forebay.definitions import Definitions
from forebay.disk import SystemDisk
from forebay.errors import Conflict, ForebayError, Invalid, UnknownTopic
from forebay.format.metadata.descriptor import LoadStatus
from forebay.format.metadata.keys import attached_key
from forebay.format.metadata.value import encode_value
from forebay.loads.book import NEVER_OFFERED, AttachedPart, LoadBook, StoredSink
from forebay.loads.prepare import Load, LoadedShard, Sink
from forebay.metadata import (
    Compare,
    Delete,
    Entry,
    MemoryMetadata,
    MetadataStore,
    Operation,
    Outcome,
    Put,
    RevisionIs,
    SqliteMetadata,
)
from forebay.metadata.etcd import EtcdMetadata
from forebay.settings import MetadataSettings
from forebay.testing.simulated.clock import ManualClock
from forebay.testing.simulated.metadata import Fault, FaultyMetadata
from forebay.topics import TopicName, TopicSpec
from tests.ledger import Ledger
from tests.support.etcd import running

NAME: Final = TopicName("shop", "orders")
IDS: Final = ("ab" * 16, "cd" * 16)


@pytest.fixture(
    params=["memory", "sqlite", pytest.param("etcd", marks=[pytest.mark.slow, pytest.mark.xdist_group("etcd")])]
)
def metadata(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[MetadataStore]:
    if request.param == "memory":
        yield MemoryMetadata()
    elif request.param == "sqlite":
        with closing(SqliteMetadata(f"{tmp_path}/m", disk=SystemDisk(), clock=SystemClock())) as store:
            yield store
    else:
        with running(tmp_path, 1) as cluster:
            settings = MetadataSettings(backend="etcd", endpoints=cluster.endpoints, lease_margin_s=1)
            with closing(EtcdMetadata.open(settings, clock=SystemClock())) as store:
                yield store


def _topic(metadata: MetadataStore, topic_id: str = IDS[0]) -> LoadBook:
    spec = TopicSpec.create(NAME, topic_id=topic_id, created_at=0, partitions=2)
    Definitions(metadata, "/forebay", ManualClock()).create(spec, exist_ok=True)
    return LoadBook(metadata, "/forebay", ManualClock())


def _load(batch: int, *, query: str = "q", topic_id: str = IDS[0], partitions: int = 2) -> Load:
    return Load(
        status=LoadStatus.OFFERED,
        namespace=NAME.namespace,
        topic=NAME.topic,
        topic_id=topic_id,
        store="store",
        manifest=NEVER_OFFERED,
        created_at=0,
        shards=tuple(LoadedShard(partition=partition, records=1) for partition in range(partitions)),
        sink=Sink(query_id=query, batch_id=batch),
    )


def _attach(metadata: MetadataStore, load_id: str, *partitions: int) -> None:
    """What the owner of a partition writes down when it attaches its part; refused once the load is over."""
    book = LoadBook(metadata, "/forebay", ManualClock())
    stored = book.find(load_id)
    assert stored is not None
    if stored.load.status is LoadStatus.OFFERED:
        for partition in partitions:
            note = Put(attached_key(load_id, partition), encode_value(AttachedPart(7, 8)))
            metadata.transaction([RevisionIs(book.key(load_id), stored.revision)], [note])


def _committed(metadata: MetadataStore) -> list[Load]:
    prefix = LoadBook(metadata, "/forebay", ManualClock()).key("")
    loads = [
        LoadBook(metadata, "/forebay", ManualClock()).get(entry.key.removeprefix(prefix)).load
        for entry in metadata.range(prefix)
    ]
    return [load for load in loads if load.status is LoadStatus.COMMITTED]


def _batches(metadata: MetadataStore) -> list[int]:
    return sorted(load.sink.batch_id for load in _committed(metadata) if load.sink is not None)


def test_a_batch_is_recorded_by_what_commits_its_load_and_not_before(metadata: MetadataStore) -> None:
    book = _topic(metadata)
    assert book.offer_batch("one", _load(0)) == "one"
    assert book.offer_batch("one", _load(0)) == "one", "harmless when repeated"
    assert book.sink(_load(0)).state.batch_id == -1
    _attach(metadata, "one", 0)
    assert book.commit("one").status is LoadStatus.OFFERED, "all partitions or none"
    assert book.sink(_load(0)).state.batch_id == -1
    _attach(metadata, "one", 1)
    revision = metadata.revision()

    assert book.commit("one").status is LoadStatus.COMMITTED

    assert metadata.revision() == revision + 1 or isinstance(metadata, EtcdMetadata)
    state = book.sink(_load(0)).state
    assert (state.batch_id, state.load_id, state.offered) == (0, "one", None)
    assert book.pending() == {}


def test_of_two_who_commit_a_load_at_once_both_learn_that_it_is_committed(
    metadata: MetadataStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The later one found the batch recorded, took the load for a repeat of itself, and failed to give it up."""
    book = _topic(metadata)
    book.offer_batch("one", _load(0))
    _attach(metadata, "one", 0, 1)
    sink = book.sink

    def sink_later(load: Load) -> StoredSink:
        monkeypatch.undo()
        assert LoadBook(metadata, "/forebay", ManualClock()).commit("one").status is LoadStatus.COMMITTED
        return sink(load)

    monkeypatch.setattr(book, "sink", sink_later)

    assert book.commit("one").status is LoadStatus.COMMITTED
    assert _batches(metadata) == [0]


def test_a_batch_that_the_topic_has_adds_nothing(metadata: MetadataStore) -> None:
    book = _topic(metadata)
    for batch, load_id in enumerate(("one", "two")):
        assert book.offer_batch(load_id, _load(batch)) == load_id
        _attach(metadata, load_id, 0, 1)
        book.commit(load_id)

    assert [book.offer_batch(f"again-{batch}", _load(batch)) for batch in (0, 1)] == [None, None]

    assert book.find("again-0") is None
    assert _batches(metadata) == [0, 1]
    assert book.offer_batch("other", _load(0, query="other query")) == "other"


def test_a_replay_goes_on_with_the_load_that_is_under_way(metadata: MetadataStore) -> None:
    book = _topic(metadata)
    book.offer_batch("one", _load(3))

    assert book.offer_batch("replay", _load(3)) == "one"
    with pytest.raises(Conflict, match="stop one of them"):
        book.offer_batch("next", _load(4))

    assert book.find("replay") is None
    _attach(metadata, "one", 0, 1)
    book.commit("one")
    assert book.offer_batch("replay", _load(3)) is None
    assert book.offer_batch("next", _load(4)) == "next"


def test_a_batch_whose_load_was_given_up_is_brought_by_another(metadata: MetadataStore) -> None:
    book = _topic(metadata)
    book.offer_batch("one", _load(0))
    _attach(metadata, "one", 0)
    book.give_up("one")

    assert book.offer_batch("replay", _load(0)) == "replay"
    _attach(metadata, "replay", 0, 1)

    assert book.commit("replay").status is LoadStatus.COMMITTED
    assert book.commit("one").status is LoadStatus.ABANDONED
    with pytest.raises(Conflict, match="committed"):
        book.give_up("replay")


def test_an_empty_batch_moves_the_sink_on(metadata: MetadataStore) -> None:
    book = _topic(metadata)
    assert book.offer_batch("empty", _load(5, partitions=0)) is None

    assert book.sink(_load(0)).state.batch_id == 5
    assert book.find("empty") is None
    assert book.offer_batch("late", _load(5)) is None
    assert book.offer_batch("next", _load(6)) == "next"
    assert book.offer_batch("empty", _load(6, partitions=0)) == "next", "what is under way for the batch goes first"


def test_a_second_load_of_a_batch_is_never_committed(metadata: MetadataStore) -> None:
    """Even one that was offered around all rules: the comparison in the committing transaction decides."""
    book = _topic(metadata)
    book.offer_batch("one", _load(0))
    book.offer("stray", _load(0))
    for load_id in ("one", "stray"):
        _attach(metadata, load_id, 0, 1)
    assert book.commit("stray").status is LoadStatus.COMMITTED

    assert book.commit("one").status is LoadStatus.ABANDONED

    assert len(_committed(metadata)) == 1


def test_a_topic_created_again_is_refused_by_name(metadata: MetadataStore) -> None:
    book = _topic(metadata)
    book.offer_batch("one", _load(0))
    _attach(metadata, "one", 0, 1)
    book.offer("stray", _load(1))
    book.commit("one")
    metadata.transaction([], [Delete("/forebay/topics/shop/orders")])
    with pytest.raises(UnknownTopic):
        book.offer_batch("gone", _load(1))
    _topic(metadata, IDS[1])

    with pytest.raises(Conflict, match="new checkpoint"):
        book.offer_batch("two", _load(1, topic_id=IDS[1]))
    book.forget_topic(IDS[0])
    with pytest.raises(Conflict, match="new checkpoint"):
        book.offer_batch("two", _load(0, topic_id=IDS[1]))
    assert book.offer_batch("two", _load(0, query="new", topic_id=IDS[1])) == "two"


class LookedAt(FaultyMetadata):
    """Notes the keys and prefixes that are read."""

    def __init__(self, inner: MetadataStore) -> None:
        super().__init__(inner)
        self.read: list[str] = []

    def get(self, key: str) -> Entry | None:
        self.read.append(key)
        return super().get(key)

    def range(self, prefix: str, *, start_after: str | None = None, limit: int | None = None) -> list[Entry]:
        self.read.append(prefix)
        return super().range(prefix, start_after=start_after, limit=limit)


def test_a_deletion_ends_the_loads_that_are_under_way_and_reads_no_other(metadata: MetadataStore) -> None:
    """It read every load of all topics: a streaming query leaves one for each batch."""
    seen = LookedAt(metadata)
    _topic(metadata)
    book = LoadBook(seen, "/forebay", ManualClock())
    for batch, load_id in enumerate(("one", "two")):
        book.offer_batch(load_id, _load(batch))
        _attach(metadata, load_id, 0, 1)
        assert book.commit(load_id).status is LoadStatus.COMMITTED
    book.offer("open", _load(2))
    seen.read.clear()

    book.forget_topic(IDS[1])
    assert list(book.pending()) == ["open"]
    book.forget_topic(IDS[0])

    assert (book.find("open"), book.pending()) == (None, {})
    assert {key for key in seen.read if "/loads/" in key} == {book.key("open")}
    assert all(book.find(load_id) is not None for load_id in ("one", "two")), "until a sweep, as after compaction"


def test_an_id_of_a_load_into_a_deleted_topic_is_not_one_into_the_next(metadata: MetadataStore) -> None:
    book = _topic(metadata)
    book.offer("one", _load(0))
    _attach(metadata, "one", 0, 1)
    assert book.commit("one").status is LoadStatus.COMMITTED
    metadata.transaction([], [Delete("/forebay/topics/shop/orders")])
    book.forget_topic(IDS[0])
    _topic(metadata, IDS[1])

    with pytest.raises(Conflict, match="brings something else"):
        book.offer("one", _load(0, topic_id=IDS[1]))


def test_names_that_would_be_other_keys_are_refused(metadata: MetadataStore) -> None:
    book = _topic(metadata)
    for load_id, query in (("", "q"), ("a/b", "q"), ("one", ""), ("one", "a/b")):
        with pytest.raises(Invalid, match="no name for"):
            book.offer_batch(load_id, _load(0, query=query))


class Interrupted(FaultyMetadata):
    """Something happens once, just before the next transaction reaches the store."""

    def __init__(self, inner: MetadataStore, meanwhile: Callable[[], object]) -> None:
        super().__init__(inner)
        self._meanwhile: Callable[[], object] | None = meanwhile

    def transaction(self, compares: Sequence[Compare], operations: Sequence[Operation]) -> Outcome:
        meanwhile, self._meanwhile = self._meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return super().transaction(compares, operations)


def test_of_two_commits_of_a_batch_at_once_one_is_refused() -> None:
    metadata = MemoryMetadata()
    book = _topic(metadata)
    book.offer_batch("one", _load(0))
    book.offer("stray", _load(0))
    for load_id in ("one", "stray"):
        _attach(metadata, load_id, 0, 1)
    late = LoadBook(Interrupted(metadata, lambda: book.commit("stray")), "/forebay", ManualClock())

    assert late.commit("one").status is LoadStatus.ABANDONED

    assert len(_committed(metadata)) == 1


def test_of_two_offers_of_a_batch_at_once_one_stands() -> None:
    metadata = MemoryMetadata()
    book = _topic(metadata)
    late = LoadBook(Interrupted(metadata, lambda: book.offer_batch("first", _load(0))), "/forebay", ManualClock())

    assert late.offer_batch("second", _load(0)) == "first"

    assert list(book.pending()) == ["first"]


class Driver:
    """A driver that brings one batch after the other, as Spark does: the next only when this one is in the topic."""

    def __init__(self, metadata: MetadataStore, batch: int, ids: Iterator[int]) -> None:
        self.metadata, self.batch = metadata, batch
        self._ids = ids
        self._load_id = f"load-{next(ids)}"

    def step(self, action: str) -> None:
        book = LoadBook(self.metadata, "/forebay", ManualClock())
        if action == "offer":
            standing = book.offer_batch(self._load_id, _load(self.batch))
            if standing is None:
                self.batch += 1
                self._load_id = f"load-{next(self._ids)}"
        elif action == "give up":
            if book.find(self._load_id) is not None:
                book.give_up(self._load_id)
            self._load_id = f"load-{next(self._ids)}"
        else:
            for load_id in book.pending():
                _attach(self.metadata, load_id, int(action == "attach 1"))
                if action == "commit":
                    book.commit(load_id)


ACTIONS: Final = st.sampled_from(["offer", "offer", "offer", "attach 0", "attach 1", "commit", "give up"])
FAULTS: Final = st.sampled_from([None, None, None, *Fault])


@given(st.lists(st.tuples(st.integers(0, 1), ACTIONS, FAULTS, st.booleans()), min_size=10, max_size=60))
def test_two_drivers_of_one_query_bring_every_batch_once(steps: list[tuple[int, str, Fault | None, bool]]) -> None:
    """Whatever order they come in, whatever metadata does, and with transactions that land late."""
    faulty = FaultyMetadata(MemoryMetadata())
    _topic(faulty)
    ids = count()
    drivers = [Driver(faulty, 0, ids), Driver(faulty, 0, ids)]
    for number, action, fault, landing in steps:
        if fault is not None:
            faulty.inject(fault)
        with suppress(ForebayError):
            drivers[number].step(action)
        faulty.heal()
        if landing:
            faulty.land()
        assert len(_batches(faulty.inner)) == len(set(_batches(faulty.inner)))
    goal = max(driver.batch for driver in drivers)
    for _ in range(4):
        for action in ("attach 0", "attach 1", "commit", "offer"):
            for driver in drivers:
                with suppress(ForebayError):
                    driver.step(action)
    faulty.land()
    done = _batches(faulty.inner)
    assert done == list(range(len(done)))
    assert len(done) >= goal
    assert LoadBook(faulty, "/forebay", ManualClock()).sink(_load(0)).state.batch_id == len(done) - 1


def test_metadata_that_fails_at_any_call_commits_the_batch_once(ledger: Ledger) -> None:
    def bring(metadata: MetadataStore) -> None:
        book = LoadBook(metadata, "/forebay", ManualClock())
        standing = book.offer_batch("one", _load(0))
        if standing is not None:
            _attach(metadata, standing, 0, 1)
            book.commit(standing)

    counted = FaultyMetadata(MemoryMetadata())
    _topic(counted)
    before = dict(counted.calls)
    bring(counted)
    for method, calls in counted.calls.items():
        for place in range(calls - before.get(method, 0)):
            for fault in list(Fault) if method == "transaction" else [Fault.FAIL_BEFORE]:
                faulty = FaultyMetadata(MemoryMetadata())
                _topic(faulty)
                faulty.inject(fault, method=method, after=place)
                with suppress(ForebayError):
                    bring(faulty)
                faulty.heal()
                faulty.land()
                bring(faulty)
                flaws = int(_batches(faulty.inner) != [0])
                ledger.count("sink through metadata faults", method=method, fault=fault.value)
                ledger.violation("sink through metadata faults", n=flaws, method=method, fault=fault.value)
                assert not flaws, (method, place, fault)


def test_a_load_of_no_query_is_stored_as_before() -> None:
    plain = msgspec.structs.replace(_load(0), sink=None)
    assert b"sink" not in encode_value(plain)
    assert b"directory" not in encode_value(plain)
