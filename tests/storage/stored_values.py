"""A log with a value of every kind that is stored by key, and the ways in which one of them may be unreadable."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

import pyarrow as pa
import pytest

import forebay
from forebay import EARLIEST, Storage
from forebay.bulk import BackfillPlan, LoadBatch
from forebay.cleanup.tables import tables_of
from forebay.clock import SystemClock
from forebay.format.checksum import crc32
from forebay.format.metadata.descriptor import LoadStatus
from forebay.loads.book import NEVER_OFFERED, AttachedPart, LoadBook
from forebay.loads.prepare import Load, LoadedShard
from forebay.metadata import MetadataStore
from forebay.routers import Routers
from forebay.service.stored import STORED_KINDS, kind_of
from forebay.service.tokens import Tokens
from forebay.settings import Settings
from forebay.subscriptions.definitions import SubscriptionStore
from forebay.testing.inside import inside
from forebay.topics import TopicName
from tests.storage.rig import QUICK

PREFIX: Final = "/forebay"
NEWER: Final = b'{"version":9,"min_reader":9,"crc":%d,"data":{}}' % crc32(b"{}", crc32(b"9,9,"))
"""A value that only later versions may read."""
DAMAGES: Final[dict[str, Callable[[bytes], bytes]]] = {
    "garbage": lambda value: b"\xffgarbage",
    "truncated": lambda value: value[: len(value) // 2],
    "empty": lambda value: b"",
    "newer": lambda value: NEWER,
}
CHOSEN: Final = {
    "place of a reader": "/progress/default/a/g/0",
    "place of a subscription": "/progress/default/a/s/0",
    "load": "/loads/done",
    "load that is not over": "/loads/waiting",
    "load that is attached in part": "/loads/standing",
    "topic": "/topics/default/a",
    "subscription": "/subscriptions/default/a/s",
    "router": "/routers/r",
}
"""Where there are several values, the one that is damaged; else the first that is of topic `a`, or the first."""
CASES: Final = tuple({**{kind.name: None for kind in STORED_KINDS if kind.holds is not None}, **CHOSEN})
"""The kinds whose values are read, and so can be unreadable."""


def shared_settings(home: Path) -> Settings:
    """Of a log whose history lies in a directory beside it."""
    overrides = {**QUICK, "storage": {"mode": "shared_fs"}, "store": {"root": f"{home}/store"}}
    return Settings.load(overrides=overrides)


def fill(log: Storage) -> None:
    """Have everything stored that is kept by key, but for what a deletion leaves."""
    for name in ("a", "b", "gone", "late"):
        topic = log.create_topic(name)
        topic.append_many([b"%d" % number for number in range(10)], keys=[b"%d" % (n % 3) for n in range(10)])
        log.export_topic(name)
        topic.delete_by_key(b"1")
        topic.append(b"last")
        topic.subscribe("s", start=EARLIEST)
    for name in ("a", "b"):
        log.group("g").commit(name, 3)
    Routers(log).create("r", sources=["a"], destination="b", start=EARLIEST)
    Routers(log).create("other", sources=["b"], destination="late", start=EARLIEST)
    _load(log)
    clock, store = SystemClock(), log.metadata
    SubscriptionStore(store, PREFIX, clock).make_letter_secret()
    Tokens(store, PREFIX, clock).create("ops", scopes=["admin"], prefixes=["*"])
    spec = log.topic("a").spec
    tables_of(store, PREFIX, spec, clock).put(["x"], inside(log).places.loads, formats=["delta"])


def _load(log: Storage) -> None:
    """A batch of a streaming query that is committed, a backfill that is planned, and a load that is not over."""
    loads = log.loads_of("a")
    rows = pa.record_batch({"value": pa.array([b"loaded"], pa.binary())})
    staged = loads.stage("done", rows)
    loads.offer("done", staged, batch=LoadBatch(query_id="q", batch_id=0))
    loads.wait("done", 10)
    loads.begin_backfill("once", BackfillPlan(fingerprint="f", loads=1))
    two = log.create_topic("two", partitions=2).spec
    book = LoadBook(log.metadata, PREFIX, SystemClock())
    standing = Load(
        status=LoadStatus.OFFERED,
        namespace=two.namespace,
        topic=two.topic,
        topic_id=two.topic_id,
        store="elsewhere",
        manifest=NEVER_OFFERED,
        created_at=0,
        shards=tuple(LoadedShard(partition=partition, records=1) for partition in range(2)),
    )
    book.offer("standing", standing)
    book.offer("waiting", standing)
    log.metadata.transaction([], [book.note("standing", 0, AttachedPart(0, 1))])


def make_seed(home: Path) -> Path:
    """A log with a value of every kind, closed. Of topic `gone` the deletion has only begun."""
    with forebay.open(home / "log", shared_settings(home)) as log:
        fill(log)
        log.delete_topic("late")
    with forebay.open(home / "log", shared_settings(home)) as log:
        # Its files stay: this process ends before it finishes the deletion.
        inside(log).definitions.begin_deletion(TopicName.parse("gone"))
    return home


def key_of(keys: list[str], kind: str) -> str:
    """The key of this kind that is damaged."""
    if kind in CHOSEN:
        return f"{PREFIX}{CHOSEN[kind]}"
    found = [key for key in keys if (of := kind_of(key, prefix=PREFIX)) is not None and of.name == kind]
    return min(found, key=lambda key: ("/default/a" not in key, key))


def stored_keys(home: Path) -> list[str]:
    """Every key of a closed log."""
    with closing(sqlite3.connect(home / "log" / "metadata.sqlite")) as database:
        return [key for (key,) in database.execute("SELECT key FROM entries ORDER BY key")]


def stored_value(home: Path, key: str) -> bytes | None:
    """What a closed log has at a key."""
    with closing(sqlite3.connect(home / "log" / "metadata.sqlite")) as database:
        row = database.execute("SELECT value FROM entries WHERE key = ?", (key,)).fetchone()
    return None if row is None else bytes(row[0])


def damage(home: Path, kind: str, what: str) -> str:
    """Overwrite the value of this kind in a closed log; its key."""
    key = key_of(stored_keys(home), kind)
    before = stored_value(home, key)
    assert before is not None
    with closing(sqlite3.connect(home / "log" / "metadata.sqlite")) as database, database:
        database.execute("UPDATE entries SET value = ? WHERE key = ?", (DAMAGES[what](before), key))
    return key


def names(log: Storage) -> set[str]:
    """The topics that are listed."""
    return {spec.topic for spec in log.topics()}


def use_others(log: Storage) -> Iterator[Callable[[], object]]:
    """Everything that must work whatever cannot be read."""
    other = log.topic("b")
    yield lambda: {"b", "two"} <= names(log) or pytest.fail("a topic is not listed")
    yield log.recover
    yield log.status
    yield lambda: other.append(b"more")
    yield lambda: [record.value for record in other.read()][-1] == b"more" or pytest.fail("not read")
    yield other.subscriptions
    yield lambda: consume(log)
    yield log.groups
    yield lambda: "b" in str(log.group("g").offsets()) or pytest.fail("a place is not listed")
    yield lambda: "other" in [each.name for each in Routers(log).all()] or pytest.fail("a router is not listed")
    yield log.usage
    yield lambda: log.loads_of("b").page()
    yield lambda: log.run_retention("b")
    yield lambda: log.export_topic("b")
    yield lambda: log.create_topic("new").append(b"1")
    yield lambda: log.topic("new").subscribe("s")
    yield lambda: log.delete_topic("new")


def consume(log: Storage) -> None:
    """One record of another topic's subscription is delivered and acknowledged."""
    with log.topic("b").subscription("s").consumer() as consumer:
        consumer.ack(*consumer.take(1))


def objects(home: Path) -> set[str]:
    """Every segment of history, and every one that a load has brought, with their indexes."""
    return {str(path.relative_to(home)) for path in (home / "store").rglob("*") if path.suffix in (".seg", ".idx")}


def value_at(store: MetadataStore, key: str) -> bytes | None:
    """What an open store has at a key."""
    entry = store.get(key)
    return None if entry is None else entry.value
