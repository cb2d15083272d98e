"""One stored value cannot be read, of each kind in turn: all else is opened, listed, recovered, served and deleted."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Final

import httpx
import msgspec
import pytest

import forebay
from forebay import EARLIEST, Storage
from forebay.errors import UnsupportedFormat
from forebay.format.checksum import crc32
from forebay.routers import Routers
from forebay.settings import Settings
from forebay.testing.inside import inside
from forebay.topics import TopicName
from tests.storage.rig import QUICK
from tests.support.brokers import running_broker, server_settings
from tests.support.commands import invoke

pytestmark = pytest.mark.slow

DAMAGES: Final = {
    "garbage": b"\xffgarbage",
    "newer": b'{"version":9,"min_reader":9,"crc":%d,"data":{}}' % crc32(b"{}", crc32(b"9,9,")),
}
"""Bytes that are no value, and a value that only later versions may read."""
KINDS: Final = {
    "topic": "/forebay/topics/default/a",
    "deleted": "/deleted/",
    "late": "/late/",
    "state": "/a/0/state",
    "descriptor": "/a/0/segments/0",
    "cur": "/a/0/segments/cur",
    "vector": "/a/0/deletes/",
    "progress": "/progress/default/a/g/",
    "subscription": "/subscriptions/default/a/s",
    "its cursor": "/progress/default/a/s/",
    "router": "/routers/r",
}
"""A part of the key by which the seed's value of this kind is found."""


def _settings(home: Path) -> Settings:
    overrides = {**QUICK, "storage": {"mode": "shared_fs"}, "store": {"root": f"{home}/store"}}
    return Settings.load(overrides=overrides)


@pytest.fixture(scope="module")
def seed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log with everything that is stored by key, to be copied. Of topic `gone` the deletion has only begun."""
    home = tmp_path_factory.mktemp("seed")
    with forebay.open(home / "log", _settings(home)) as log:
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
        log.delete_topic("late")
    with forebay.open(home / "log", _settings(home)) as log:
        # Its files stay: nobody finishes it before the end of the process.
        inside(log).definitions.begin_deletion(TopicName.parse("gone"))
    return home


def _keys(home: Path) -> list[str]:
    with closing(sqlite3.connect(home / "log" / "metadata.sqlite")) as database:
        return [key for (key,) in database.execute("SELECT key FROM entries ORDER BY key")]


@pytest.fixture
def home(seed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(seed, tmp_path / "home"))


def damage(home: Path, kind: str, value: bytes) -> str:
    """Overwrite the value of this kind; its key."""
    key = next(key for key in _keys(home) if KINDS[kind] in key)
    with closing(sqlite3.connect(home / "log" / "metadata.sqlite")) as database, database:
        database.execute("UPDATE entries SET value = ? WHERE key = ?", (value, key))
    return key


def _names(log: Storage) -> set[str]:
    return {spec.topic for spec in log.topics()}


def _use_others(log: Storage) -> Iterator[Callable[[], object]]:
    """Everything that must work whatever cannot be read."""
    other = log.topic("b")
    yield lambda: {"b"} <= _names(log) or pytest.fail("a topic is not listed")
    yield log.recover
    yield log.status
    yield lambda: other.append(b"more")
    yield lambda: [record.value for record in other.read()][-1] == b"more" or pytest.fail("not read")
    yield other.subscriptions
    yield log.groups
    yield lambda: "b" in str(log.group("g").offsets()) or pytest.fail("a place is not listed")
    yield lambda: "other" in [each.name for each in Routers(log).all()] or pytest.fail("a router is not listed")
    yield log.usage
    yield lambda: log.run_retention("b")
    yield lambda: log.export_topic("b")
    yield lambda: log.create_topic("new").append(b"1")
    yield lambda: log.delete_topic("new")


@pytest.mark.parametrize("what", DAMAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_everything_else_works_and_it_can_be_deleted_by_name(home: Path, kind: str, what: str) -> None:
    damage(home, kind, DAMAGES[what])

    with forebay.open(home / "log", _settings(home)) as log:
        for step in _use_others(log):
            step()
        if kind == "router":
            Routers(log).delete("r")
        elif kind in ("progress", "its cursor"):
            log.group("g").delete()
        log.delete_topic("a")
        assert "a" not in _names(log)
    with forebay.open(home / "log", _settings(home)) as log:
        assert log.create_topic("a", exist_ok=True).append(b"again") is not None
        assert [record.value for record in log.topic("a").read()] == [b"again"]


@pytest.mark.parametrize("what", DAMAGES)
@pytest.mark.parametrize("kind", ["topic", "deleted", "progress", "router", "subscription"])
def test_a_broker_serves_all_else_and_deletes_the_topic_by_name(home: Path, kind: str, what: str) -> None:
    damage(home, kind, DAMAGES[what])
    shared = _settings(home)
    settings = msgspec.structs.replace(server_settings(), storage=shared.storage, store=shared.store)

    with running_broker(home / "log", settings) as broker, broker.client() as client:
        degraded = [shard["topic"] for shard in client.get("/v1/ready").json()["degraded"]]
        assert degraded == (["default/a"] if kind == "topic" else [])
        assert "default/b" in client.get("/v1/topics").text
        assert client.post("/v1/topics/default/b/records", json=[{"value": "more"}]).is_success
        for path in ("groups", "groups/g", "routers", "status", "topics/default/b/subscriptions"):
            assert client.get(f"/v1/{path}").is_success, path
        assert client.delete("/v1/topics/default/a").is_success
        assert client.get("/v1/topics/default/a").status_code == httpx.codes.NOT_FOUND


@pytest.mark.parametrize("what", DAMAGES)
def test_the_command_line_deletes_it_by_name(home: Path, what: str) -> None:
    damage(home, "topic", DAMAGES[what])
    file = home / "settings.yaml"
    file.write_text(f"storage: {{mode: shared_fs}}\nstore: {{root: {home}/store}}\n")

    words = ["--data", f"{home}/log", "--settings", str(file)]
    assert invoke([*words, "topic", "delete", "a", "--yes"]).exit_code == 0

    with forebay.open(home / "log", _settings(home)) as log:
        assert "a" not in _names(log)
        assert log.create_topic("a").append(b"again") == 0


def test_pages_of_topics_are_whole_though_one_cannot_be_read(home: Path) -> None:
    with forebay.open(home / "log", _settings(home)) as log:
        for name in ("c", "d", "e"):
            log.create_topic(name)
    damage(home, "topic", DAMAGES["garbage"])

    with forebay.open(home / "log", _settings(home)) as log:
        first = log.topics(limit=2)
        rest = log.topics(after=first[-1].name, limit=2)

        assert [[spec.topic for spec in page] for page in (first, rest)] == [["b", "c"], ["d", "e"]]


def test_nothing_is_swept_while_a_topic_cannot_be_read(home: Path) -> None:
    """What it has would look as if no topic had it."""
    key = damage(home, "topic", DAMAGES["newer"])

    with forebay.open(home / "log", _settings(home)) as log, pytest.raises(UnsupportedFormat, match=key):
        inside(log).collect_directory()
