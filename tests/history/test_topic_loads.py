"""Bulk loads as callers of a topic use them: staged, offered, attached, given up; what is not theirs is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest

import forebay
from forebay.bulk import BulkLoad, LoadBatch, LoadSegment
from forebay.clock import SystemClock
from forebay.errors import Conflict, Corrupt, Invalid, UnknownLoad, UnknownTopic, Unsupported
from forebay.format.columns.rows import encode_rows
from forebay.loads import book
from forebay.loads.prepare import LoadPlace, segment_of, write_segment
from forebay.loads.service import Loads
from forebay.loads.topic import TopicLoads
from forebay.storage import Storage

SHARED = {"storage": {"mode": "shared_fs"}}


def rows(*values: bytes) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"value": list(values)}, schema=pa.schema([("value", pa.binary())]))


@pytest.fixture(autouse=True)
def step(monkeypatch: pytest.MonkeyPatch) -> Callable[[Loads], None]:
    """What the worker of a log does for loads; it does nothing by itself here."""
    step = Loads.step
    monkeypatch.setattr(Loads, "step", lambda loads: None)
    return step


@pytest.fixture(params=["local", "shared_fs"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    settings: dict[str, object] = {"wal": {"free_bytes_min": 0}}
    if request.param == "shared_fs":
        settings |= SHARED | {"store": {"root": str(tmp_path / "store")}}
    with forebay.open(tmp_path / "log", settings) as log:
        log.create_topic("shop/orders", partitions=2)
        yield log


@pytest.fixture
def loads(log: Storage) -> TopicLoads:
    return log.loads_of("shop/orders")


def staged(loads: TopicLoads, load_id: str = "one") -> list[LoadSegment]:
    return [
        *loads.stage(load_id, rows(b"a", b"b")),
        *loads.stage(load_id, rows(b"c"), 1),
        *loads.stage(load_id, rows(b"d")),
    ]


def held(log: Storage, partition: int) -> list[bytes | None]:
    return [record.value for record in log.topic("shop/orders").read(partition=partition)]


def test_rows_come_in_behind_the_log_in_every_partition_at_once(log: Storage, loads: TopicLoads) -> None:
    log.topic("shop/orders").append(b"first", partition=0)
    segments = staged(loads)
    offered = loads.offer("one", segments)

    assert offered is not None and offered.status == "offered"
    assert held(log, 0) == [b"first"]
    ended = loads.attach("one")

    assert (ended.status, ended.is_over, ended.waiting) == ("committed", True, {})
    assert [(part.partition, part.start, part.records) for part in ended.parts] == [(0, 1, 3), (1, 0, 1)]
    assert held(log, 0) == [b"first", b"a", b"b", b"d"]
    assert held(log, 1) == [b"c"]
    assert loads.get("one") == loads.wait("one", 0) == ended
    assert log.topic("shop/orders").append(b"last", partition=0) == 4


def test_segments_that_the_caller_put_into_the_store_are_offered_too(log: Storage, loads: TopicLoads) -> None:
    target = loads.target("own")
    place = LoadPlace("own", target.topic_id, 1)
    made = write_segment(
        log.loads.store().store, place, "3-0", [encode_rows([(b"x", None, None, (), 5)])], clock=SystemClock()
    )
    assert made is not None

    loads.offer("own", [segment_of(1, made)], generation=target.generation)

    assert (target.partitions, target.prefixes[1]) == (2, place.prefix)
    assert target.shared == log.settings.is_shared
    assert loads.attach("own").status == "committed"
    assert held(log, 1) == [b"x"]


def test_an_offer_that_is_repeated_is_one_offer(log: Storage, loads: TopicLoads) -> None:
    segments = staged(loads)
    first = loads.offer("one", segments)

    again = loads.offer("one", segments)
    with pytest.raises(Conflict):
        loads.offer("one", segments[:1])
    loads.attach("one")
    loads.attach("one")
    late = loads.offer("one", segments)

    assert first == again
    assert late is not None and late.status == "committed"
    assert held(log, 0) == [b"a", b"b", b"d"]


def test_what_is_given_up_is_never_seen_and_cannot_be_offered_any_more(log: Storage, loads: TopicLoads) -> None:
    offered, never = staged(loads), staged(loads, "never")
    loads.offer("one", offered)

    ended = [loads.abandon("one"), loads.abandon("one"), loads.abandon("never"), loads.attach("one")]
    with pytest.raises(Conflict):
        loads.offer("never", never)

    assert {load.status for load in ended} == {"abandoned"}
    assert held(log, 0) == held(log, 1) == []


def test_a_load_that_is_committed_is_not_given_up(log: Storage, loads: TopicLoads) -> None:
    loads.offer("one", staged(loads))
    loads.attach("one")

    with pytest.raises(Conflict):
        loads.abandon("one")

    assert held(log, 1) == [b"c"]


@pytest.mark.parametrize(
    "key",
    [
        "",
        "x.seg",
        "{prefix}",
        "{prefix}.seg",
        "{prefix}../x.seg",
        "{prefix}more/x.seg",
        "{prefix}x.parquet",
        "{prefix}x\n.seg",
        "/{prefix}x.seg",
        "../{prefix}x.seg",
        "{topic_id}_1/loads/one/x.seg",
        "{topic_id}_0/loads/two/x.seg",
        "{topic_id}_0/00000000000000000000-00000001.seg",
        "00000000000000000000000000000000_0/loads/one/x.seg",
    ],
)
def test_a_segment_that_is_not_of_the_load_is_refused(log: Storage, loads: TopicLoads, key: str) -> None:
    segment = staged(loads)[0]
    target = loads.target("one")
    named = key.format(prefix=target.prefixes[0], topic_id=target.topic_id)

    with pytest.raises(Invalid, match="is no segment of load one"):
        loads.offer("one", [msgspec.structs.replace(segment, object_key=named)])

    with pytest.raises(UnknownLoad):
        loads.get("one")


def test_a_segment_is_named_once_and_for_its_own_partition(loads: TopicLoads) -> None:
    segments = staged(loads)

    with pytest.raises(Invalid, match="twice"):
        loads.offer("one", [segments[0], segments[0]])
    with pytest.raises(Invalid, match="partition"):
        loads.offer("one", [msgspec.structs.replace(segments[0], partition=1)])
    with pytest.raises(Invalid, match="partition"):
        loads.offer("one", [msgspec.structs.replace(segments[0], partition=7)])


@pytest.mark.parametrize(
    "lie",
    [
        {"records": 0},
        {"bytes": -1},
        {"index_bytes": 0},
        {"time_min": 2**62},
        {"content_hash": "x"},
        {"sparse": ((9, 1),)},
    ],
)
def test_what_cannot_be_is_refused(loads: TopicLoads, lie: dict[str, object]) -> None:
    with pytest.raises(Invalid, match="cannot be"):
        loads.offer("one", [msgspec.structs.replace(staged(loads)[0], **lie)])


@pytest.mark.parametrize(
    "lie",
    [
        {"records": 3},
        {"records": 1},
        {"time_max": 2**62},
        {"appended_max": 0},
        {"content_hash": "0" * 32},
        {"index_bytes": 1},
        {"bytes": 100_000},
    ],
)
def test_a_segment_that_does_not_hold_what_was_said_is_not_attached(
    log: Storage, loads: TopicLoads, lie: dict[str, object]
) -> None:
    loads.offer("one", [msgspec.structs.replace(staged(loads)[0], **lie)])

    with pytest.raises(Corrupt, match="not there as it was prepared"):
        loads.attach("one")

    assert loads.get("one").status == "offered"
    assert held(log, 0) == []
    assert loads.abandon("one").status == "abandoned"
    assert log.topic("shop/orders").append(b"next", partition=0) == 0


def test_a_load_of_another_topic_is_not_known(log: Storage, loads: TopicLoads) -> None:
    log.create_topic("shop/other", partitions=2)
    other = log.loads_of("shop/other")
    loads.offer("one", staged(loads))

    for call in (other.get, other.attach, other.abandon, lambda load_id: other.wait(load_id, 0)):
        with pytest.raises(UnknownLoad):
            call("one")
    with pytest.raises(Invalid):
        other.offer("one", staged(loads))
    with pytest.raises(Conflict):
        other.offer("one", staged(other))

    assert (other.page(), loads.get("one").status) == (([], None), "offered")


@pytest.mark.parametrize("load_id", ["", ".", "..", "a/b", "-a", "a" * 129, "ä", "a\n", "a b"])
def test_what_cannot_be_an_id_is_refused(loads: TopicLoads, load_id: str) -> None:
    for call in (loads.target, loads.get, loads.attach, loads.abandon, lambda load_id: loads.offer(load_id, [])):
        with pytest.raises(Invalid, match="load_id is"):
            call(load_id)


def test_a_topic_that_has_got_partitions_since_is_a_conflict(log: Storage, loads: TopicLoads) -> None:
    generation, segments = loads.target("one").generation, staged(loads)
    log.alter_topic("shop/orders", partitions=4)

    with pytest.raises(Conflict, match="4 partitions"):
        loads.offer("one", segments, generation=generation)

    assert loads.page() == ([], None)


def test_a_batch_of_a_query_comes_in_once(log: Storage, loads: TopicLoads) -> None:
    batch = LoadBatch(query_id="8c2e", batch_id=0)
    first, second = staged(loads, "first"), staged(loads, "second")

    offered = loads.offer("first", first, batch=batch)
    standing = loads.offer("second", second, batch=batch)
    loads.attach("first")
    after = loads.offer("second", second, batch=batch)
    repeated = loads.offer("first", first, batch=batch)
    empty = loads.offer("third", [], batch=LoadBatch(query_id="8c2e", batch_id=1))

    assert offered is not None and standing is not None and repeated is not None
    assert (offered.load_id, standing.load_id, offered.batch) == ("first", "first", batch)
    assert (after, repeated.status, empty) == (None, "committed", None)
    assert held(log, 0) == [b"a", b"b", b"d"]
    with pytest.raises(Invalid):
        loads.offer("fourth", [], batch=LoadBatch(query_id="a/b", batch_id=1))


def test_a_load_whose_time_is_over_is_given_up(log: Storage, loads: TopicLoads) -> None:
    loads.offer("one", staged(loads), timeout=0)

    assert loads.attach("one").status == "abandoned"
    assert held(log, 0) == []


def test_an_owner_attaches_what_was_offered_by_itself(
    log: Storage, loads: TopicLoads, step: Callable[[Loads], None]
) -> None:
    loads.offer("one", staged(loads))

    step(log.loads)

    assert loads.get("one").status == "committed"
    assert held(log, 1) == [b"c"]


def test_loads_are_listed_a_page_at_a_time(log: Storage, loads: TopicLoads, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(book, "PAGE_KEYS", 2)
    monkeypatch.setattr(book, "LOOKED_MAX", 4)
    log.create_topic("shop/other", partitions=2)
    for number in range(5):
        loads.offer(f"load-{number}", [])
        log.loads_of("shop/other").offer(f"a-{number}", [])

    found: list[BulkLoad] = []
    after: str | None = None
    for _ in range(20):
        page, after = loads.page(after=after, limit=3)
        assert len(page) <= 3
        found += page
        if after is None:
            break

    assert [load.load_id for load in found] == [f"load-{number}" for number in range(5)]


def test_topics_without_files_take_no_load(tmp_path: Path, log: Storage) -> None:
    log.create_topic("shop/live", durability="ephemeral")

    for call in (log.loads_of("shop/live").target, log.loads_of("shop/live").get):
        with pytest.raises(Unsupported):
            call("one")
    with pytest.raises(UnknownTopic):
        log.loads_of("shop/none").get("one")
    with forebay.open(":memory:") as memory, pytest.raises(Unsupported):
        memory.loads_of("shop/live")


def test_no_rows_are_no_segment(loads: TopicLoads) -> None:
    assert list(loads.stage("one", rows())) == []
    with pytest.raises(Invalid):
        loads.stage("one", rows(b"a"), 2)
    with pytest.raises(Invalid):
        loads.stage("one", [b"a"])
