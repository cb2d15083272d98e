"""Compaction of topics in real data directories: history shows the same records, in fewer segments and bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.cleanup.tables import TableObjects
from forebay.clock import SystemClock
from forebay.compacting.planning import Rules
from forebay.errors import UnknownTopic, Unsupported
from forebay.format.columns.rows import Row as RowBytes
from forebay.format.columns.rows import encode_rows
from forebay.format.metadata.descriptor import DescriptorKind, LoadStatus
from forebay.format.metadata.keys import compactor_key
from forebay.loads.attach import DESCRIPTORS_MAX
from forebay.loads.book import LoadBook
from forebay.loads.prepare import LoadPlace, manifest_of, write_segment
from forebay.metadata import Put
from forebay.settings import ExportSettings, RetentionSettings
from forebay.storage import Topic
from forebay.testing.inside import inside
from forebay.testing.simulated.clock import ManualClock
from forebay.wal.files import SealedFile
from tests.compacting.directly import (
    AT_ONCE,
    catalog_of,
    check_sound,
    collect_without_grace,
    compacted,
    kinds_of,
    shown,
)
from tests.spark.mixed import Mixed
from tests.spark.topics import Row, rows_of
from tests.support.environments import directories
from tests.support.environments.directories import TOPIC, Environment
from tests.support.waiting import until

pytestmark = pytest.mark.slow

ENVIRONMENTS: dict[str, Callable[[Path], Environment]] = {
    "local": directories.local,
    "shared_fs": directories.shared_fs,
}
NO_COPIES = RetentionSettings(time_s=0, bytes_max=0, grace_s=0, check_interval_s=1)


@pytest.fixture(params=ENVIRONMENTS)
def environment(request: pytest.FixtureRequest, tmp_path: Path) -> Environment:
    return ENVIRONMENTS[request.param](tmp_path)


@pytest.fixture
def mixed(environment: Environment) -> Iterator[Mixed]:
    found = Mixed(environment, partitions=1)
    try:
        yield found
    finally:
        found.close()


def look_up(topic: Topic, rows: list[Row]) -> None:
    """Everything that can be asked for is answered as by the rows themselves."""
    keys = {row["key"] for row in rows if row["key"] is not None}
    for key in sorted(keys)[:6]:
        own = [row["offset"] for row in rows if row["key"] == key]
        assert [record.offset for record in topic.read_by_key(key, history=True)] == own
    for tag in sorted({row["tag"] for row in rows if row["tag"] is not None})[:3]:
        assert [record.offset for record in topic.read_by_tag(tag)] == [r["offset"] for r in rows if r["tag"] == tag]
    for row in rows[:: max(1, len(rows) // 7)]:
        wanted = next(other["offset"] for other in rows if other["timestamp"] >= row["timestamp"])
        assert topic.offset_at_time(row["timestamp"], partition=0) == wanted


@pytest.mark.slow
def test_every_tier_reads_the_same_before_and_after(mixed: Mixed, environment: Environment) -> None:
    mixed.every_tier()
    mixed.log.export_topic(mixed.topic)
    topic = mixed.filled.topic
    rows = mixed.rows
    assert shown(topic) == rows

    report = compacted(environment)

    assert report.is_clean and report.figures["rewrites"] == 1, report.lines()
    assert kinds_of(mixed.log, topic) == [DescriptorKind.PARQUET]
    assert shown(topic) == rows
    with environment.open("one", read_only=True) as beside:
        assert shown(beside.topic(mixed.topic)) == rows
        look_up(beside.topic(mixed.topic), rows)
    mixed.close()
    check_sound(environment)
    groups: dict[str, Any] = {} if environment.settings.storage.mode == "local" else {"retention": NO_COPIES}
    again = environment.open("one", **groups)
    mixed.log = again
    topic = again.topic(mixed.topic)
    assert shown(topic) == rows
    topic.append(b"more")
    _let_copies_go(topic)
    assert len(environment.files("one")) == 1, "all but the active file went"
    assert shown(topic)[:-1] == rows
    look_up(topic, rows)
    assert compacted(environment).summary == "nothing to do"
    again.close()
    check_sound(environment)


def _let_copies_go(topic: Topic) -> None:
    shard = directories.shard_of(topic)
    for file in shard.wal.files.all:
        if isinstance(file, SealedFile):
            # As if nobody had read from it for long.
            file.read_last = 0.0
    shard.history.retain()


def test_second_run_has_nothing_to_do_and_small_segments_are_put_together(
    mixed: Mixed, environment: Environment
) -> None:
    for _ in range(9):
        mixed.filled.many(50)
        mixed.export()
    rules = msgspec.structs.replace(AT_ONCE, target_bytes=30_000)

    first = compacted(environment, rules=rules)
    kinds = kinds_of(mixed.log, mixed.filled.topic)
    second = compacted(environment, rules=rules)

    assert first.figures["segments_before"] == 9 and 1 < int(first.figures["segments"] or 0) < 9
    assert second.summary == "nothing to do" and second.figures["rewrites"] == 0
    assert set(kinds) == {DescriptorKind.PARQUET}
    assert shown(mixed.filled.topic) == mixed.rows


def test_dry_run_tells_and_changes_nothing(mixed: Mixed, environment: Environment) -> None:
    for _ in range(3):
        mixed.filled.many(50)
        mixed.export()
    before = catalog_of(mixed.log, mixed.filled.topic).pieces()

    report = compacted(environment, dry_run=True)

    assert report.dry_run and report.figures["rewrites"] == 1 and report.figures["segments_to_read"] == 3
    assert catalog_of(mixed.log, mixed.filled.topic).pieces() == before


def test_young_segments_are_left_alone(mixed: Mixed, environment: Environment) -> None:
    for _ in range(4):
        mixed.filled.many(50)
        mixed.export()

    assert compacted(environment, rules=Rules()).summary == "nothing to do"
    assert compacted(environment, rules=Rules(settle_ms=0)).summary == "1 rewrite"


def test_deletes_give_their_bytes_back(mixed: Mixed, environment: Environment) -> None:
    mixed.filled.many(2_000)
    mixed.export()
    compacted(environment, rules=msgspec.structs.replace(AT_ONCE, segments_min=1))
    whole = catalog_of(mixed.log, mixed.filled.topic).descriptors()[0]
    mixed.delete(0, 100, 1_900)

    report = compacted(environment)

    after = catalog_of(mixed.log, mixed.filled.topic).descriptors()[0]
    assert report.figures["records_before"] == 2_000 and report.figures["records"] == 200
    assert after.bytes < whole.bytes // 2 and (after.start, after.end) == (whole.start, whole.end)
    assert shown(mixed.filled.topic) == mixed.rows
    assert compacted(environment).summary == "nothing to do"


def test_delete_that_comes_between_reading_and_swapping_holds(mixed: Mixed, environment: Environment) -> None:
    for _ in range(3):
        mixed.filled.many(100)
        mixed.export()

    report = compacted(environment, meanwhile=lambda: mixed.delete(0, 50, 150))

    assert kinds_of(mixed.log, mixed.filled.topic) == [DescriptorKind.PARQUET]
    # The pass after the swap applied it as well.
    assert report.figures["records"] == 200
    assert shown(mixed.filled.topic) == mixed.rows
    mixed.close()
    mixed.log = environment.open("one")
    assert shown(mixed.log.topic(mixed.topic)) == mixed.rows
    check_reader_beside(environment, mixed)


def check_reader_beside(environment: Environment, mixed: Mixed) -> None:
    with environment.open("one", read_only=True) as beside:
        assert shown(beside.topic(mixed.topic)) == mixed.rows


def test_newest_of_each_key_stays_where_a_topic_is_compacted(environment: Environment) -> None:
    with environment.open("one") as log:
        topic = log.create_topic(TOPIC, cleanup="compact", compact_lag_ms=0)
        for round_ in range(4):
            topic.append_many(
                [b"%d" % (round_ * 10 + n) for n in range(10)], keys=[b"k%d" % n for n in range(9)] + [None]
            )
            log.export_topic(TOPIC)
        topic.append_many([b"young"] * 3, keys=[b"k0", b"k1", b"other"])

        report = compacted(environment)

        assert report.is_clean, report.lines()
        (piece,) = catalog_of(log, topic).descriptors()
        assert (piece.start, piece.end, piece.records) == (0, 40, 13)
        inside(topic).drop_copies()
        newest = [b"9", b"19", b"29", *(b"%d" % number for number in range(30, 40)), *[b"young"] * 3]
        with environment.open("one", read_only=True) as beside:
            assert [record.value for record in beside.topic(TOPIC).read()] == newest
    with environment.open("one") as log:
        topic = log.topic(TOPIC)
        # Nobody deleted the others, yet readers pass over them in silence.
        assert [record.value for record in topic.read()] == newest
        assert [record.value for record in topic.read_by_key(b"k5", history=True)] == [b"35"]


def test_records_younger_than_the_lag_stay(environment: Environment) -> None:
    with environment.open("one") as log:
        topic = log.create_topic(TOPIC, cleanup="compact", compact_lag_ms=3_600_000)
        for _ in range(3):
            topic.append_many([b"v"] * 5, keys=[b"k"] * 5)
            log.export_topic(TOPIC)

        compacted(environment)

        assert [piece.records for piece in catalog_of(log, topic).descriptors()] == [15]


def test_appends_are_recognised_as_repeats_after_the_segment_that_held_them_was_compacted(
    environment: Environment,
) -> None:
    with environment.open("one") as log:
        topic = log.create_topic(TOPIC)
        for sequence in range(3):
            topic.append_many([b"a", b"b"], producer=7, sequence=sequence, partition=0)
            log.export_topic(TOPIC)
        topic.delete_by_offset(0, 3, partition=0)
        compacted(environment)
        log.seal_topic(TOPIC)
    with environment.open("two" if environment.settings.storage.mode != "local" else "one") as log:
        topic = log.topic(TOPIC)
        assert list(topic.append_many([b"a", b"b"], producer=7, sequence=1, partition=0)) == [2, 3]
        assert list(topic.append_many([b"c"], producer=7, sequence=3, partition=0)) == [6]


def test_sweep_takes_what_was_replaced_and_leaves_what_tables_name(tmp_path: Path) -> None:
    environment = directories.shared_fs(
        tmp_path, export=ExportSettings(orphan_grace_s=0, sweep_interval_s=1), retention=NO_COPIES
    )
    mixed = Mixed(environment, partitions=1)
    for _ in range(3):
        mixed.filled.many(50)
        mixed.export()
    compacted(environment)
    first = catalog_of(mixed.log, mixed.filled.topic).descriptors()[0].object_key
    mixed.delete(0, 10, 20)
    tabled = _tabled(mixed)
    store = inside(mixed.log).places.store
    assert store is not None
    tabled.put([first], store)
    compacted(environment)

    def kept() -> set[str]:
        """The objects that are left behind a collection. The background worker may collect beside it."""
        _sweep(mixed)
        return {stat.key for stat in store.list()}

    until(lambda: not [key for key in kept() if key.endswith(".seg")])
    assert kept() >= {first, first.replace(".parquet", ".idx")}
    tabled.put([], store)
    until(lambda: first not in kept())
    assert shown(mixed.filled.topic) == mixed.rows
    mixed.close()
    check_sound(environment)


def _tabled(mixed: Mixed) -> TableObjects:
    spec = mixed.filled.topic.spec
    metadata = directories.metadata_of(mixed.log)
    return TableObjects(metadata, "/forebay", spec.namespace, spec.topic, spec.topic_id, clock=ManualClock())


def _sweep(mixed: Mixed) -> list[str]:
    return inside(mixed.log).collect(mixed.filled.topic)


def test_segment_that_cannot_be_read_is_named_and_the_others_are_done(tmp_path: Path) -> None:
    environment = directories.shared_fs(tmp_path)
    mixed = Mixed(environment, partitions=2)
    for _ in range(3):
        for partition in range(2):
            mixed.filled.many(200, partition)
        mixed.export()
    piece = catalog_of(mixed.log, mixed.filled.topic).descriptors()[1]
    path = Path(str(environment.settings.store.root)) / piece.object_key
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)

    report = compacted(environment)

    (finding,) = report.findings
    assert not report.is_clean and finding.shard == f"{TOPIC}[0]" and finding.offsets == (0, 600)
    assert "left as it is" in finding.next_step
    assert kinds_of(mixed.log, mixed.filled.topic, 0) == [DescriptorKind.FRAMES] * 3
    assert kinds_of(mixed.log, mixed.filled.topic, 1) == [DescriptorKind.PARQUET]
    mixed.close()


def test_caps_count_what_is_left_after_compaction(tmp_path: Path) -> None:
    environment = directories.shared_fs(tmp_path, retention=NO_COPIES)
    with environment.open("one") as log:
        topic = log.create_topic(TOPIC, cap_bytes=10_000)
        for _ in range(8):
            topic.append_many([b"x" * 84] * 10)  # each counts for 100
            log.export_topic(TOPIC)
        shard = directories.shard_of(topic)
        assert shard.holding().bytes == 8_000
        topic.delete_by_offset(10, 70, partition=0)
        assert shard.holding().bytes == 8_000, "what is only deleted counts"
        compacted(environment)
        _let_copies_go(topic)
        assert shard.holding().bytes == 2_000, "what is gone does not"

        topic.append_many([b"x" * 84] * 80)
        assert shard.evict(2**50).records == 0 and shard.holding().bytes == 10_000
        topic.append_many([b"x" * 84] * 5)

        assert shard.evict(2**50).records == 5
        assert topic.offsets(0).earliest == 5


@pytest.mark.slow
def test_compacted_topic_moves_to_another_directory(environment: Environment) -> None:
    mixed = Mixed(environment, partitions=1)
    mixed.every_tier()
    mixed.export()
    compacted(environment)
    mixed.filled.many(50)
    rows = mixed.rows
    mixed.log.seal_topic(TOPIC)
    with environment.open("two") as other:
        topic = other.topic(TOPIC)
        assert shown(topic) == rows
        topic.append(b"here")
        assert shown(topic)[:-1] == rows
        look_up(topic, [row for row in shown(topic) if row["value"] != b"here"])
        directories.clear_up(mixed.log)
        assert environment.files("one") == [] and environment.aside("one") == [], "all of it was known to be history"
        assert DescriptorKind.PARQUET in kinds_of(other, topic)
    mixed.close()
    check_sound(environment, "two")


@pytest.mark.slow
def test_load_of_many_segments_is_compacted_inside_its_manifest(tmp_path: Path) -> None:
    environment = directories.shared_fs(tmp_path)
    with environment.open("one") as log:
        topic = log.create_topic(TOPIC)
        topic.append_many([b"first"] * 10)
        store = log.loads.store().store
        place = LoadPlace("many", topic.spec.topic_id, 0)
        segments = []
        for number in range(DESCRIPTORS_MAX + 10):
            rows: list[RowBytes] = [(b"%d" % number * 40, b"k%d" % number, None, (), number) for _ in range(3)]
            made = write_segment(store, place, f"{number}-0", [encode_rows(rows)], clock=SystemClock())
            assert made is not None
            segments.append((0, made))
        log.loads.offer(TOPIC, manifest_of("many", topic.spec.topic_id, segments), None)
        book = LoadBook(directories.metadata_of(log), "/forebay", ManualClock())
        until(lambda: book.get("many").load.status is LoadStatus.COMMITTED)
        before = shown(topic)
        assert catalog_of(log, topic).pieces()[1].descriptor.kind is DescriptorKind.MANIFEST

        report = compacted(environment, rules=msgspec.structs.replace(AT_ONCE, target_bytes=20_000))

        assert report.is_clean and report.figures["rewrites"] == 1, report.lines()
        assert catalog_of(log, topic).pieces()[1].descriptor.kind is DescriptorKind.MANIFEST
        kinds = kinds_of(log, topic)
        # The last is too small to be put together with anything.
        assert kinds[0] is DescriptorKind.FRAMES and set(kinds[1:-1]) == {DescriptorKind.PARQUET} and len(kinds) < 12
        assert shown(topic) == before
        inside(log).collect_directory()
    with environment.open("one", read_only=True) as beside:
        assert shown(beside.topic(TOPIC)) == before
    check_sound(environment)


def test_readers_in_flight_are_not_disturbed(environment: Environment) -> None:
    """Streams begun before go on behind it, though everything that they had planned with is gone."""
    mixed = Mixed(environment, partitions=1)
    for _ in range(4):
        mixed.filled.many(300)
        mixed.export()
    topic, rows = mixed.filled.topic, mixed.rows
    mixed.filled.many(10)
    if environment.settings.storage.mode != "local":
        inside(topic).drop_copies()
    with environment.open("one", read_only=True) as beside:
        streams = [topic.read(stop=1200, partition=0), beside.topic(TOPIC).read(stop=1200, partition=0)]
        seen = [rows_of(islice(stream, 5)) for stream in streams]
        for stream in streams:
            assert len(list(islice(stream, 250))) == 250

        compacted(environment)
        inside(topic).drop_copies()
        collect_without_grace(mixed.log, topic)
        kept = [path.name for path in environment.root.rglob("*.seg")]
        assert len(kept) == 1, "all that they read from before is gone"

        for stream, first in zip(streams, seen, strict=True):
            assert first == rows[:5]
            assert rows_of(iter(stream)) == rows[255:1200]
    mixed.close()


def test_bad_input_is_named(environment: Environment) -> None:
    with environment.open("one") as log:
        log.create_topic("shop/cache", durability="ephemeral")

        with pytest.raises(UnknownTopic, match="shop/none"):
            compacted(environment, ["shop/none"])
        with pytest.raises(Unsupported, match='engine "memory" and has no history'):
            compacted(environment, ["shop/cache"])
        assert compacted(environment).summary == "nothing to do"


def test_partition_that_another_compacts_is_left_to_it(mixed: Mixed, environment: Environment) -> None:
    for _ in range(3):
        mixed.filled.many(50)
        mixed.export()
    metadata = directories.metadata_of(mixed.log)
    session = metadata.session(30)
    key = compactor_key("shop", "orders", 0)
    metadata.transaction([], [Put(key, b"compaction elsewhere", session.id)])

    report = compacted(environment)

    (finding,) = report.findings
    assert "compaction elsewhere" in finding.what and finding.shard == "shop/orders[0]" and not report.is_clean
    session.close()
    assert compacted(environment).summary == "1 rewrite"
