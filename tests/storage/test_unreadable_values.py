"""One stored value cannot be read, of each kind in turn: all else is opened, listed, recovered, served and deleted."""

from __future__ import annotations

import inspect
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import pyarrow as pa
import pytest

import forebay
from forebay import EARLIEST, Storage
from forebay.bulk import LoadBatch
from forebay.cli.failures import DAMAGE, PROBLEM
from forebay.clock import SystemClock
from forebay.errors import Conflict, Corrupt, ForebayError, Unauthenticated, UnsupportedFormat
from forebay.format.metadata import keys
from forebay.metadata import Put
from forebay.routers import Routers
from forebay.service.stored import STORED_KINDS, kind_of, unreadable_in
from forebay.service.tokens import TokenBook, Tokens
from forebay.settings import Settings
from forebay.testing.inside import inside
from tests.storage.stored_values import (
    CASES,
    DAMAGES,
    PREFIX,
    damage,
    fill,
    key_of,
    make_seed,
    names,
    objects,
    shared_settings,
    stored_keys,
    stored_value,
    use_others,
    value_at,
)
from tests.support.commands import invoke
from tests.support.etcd import running

SOURCE: Final = Path(forebay.__file__).parent
CORRECTED: Final = {"data directory"}
"""Values that are written again by what opens the log, whatever stood there: no decision rests on them."""
LASTING: Final = {
    "deletion of a topic",
    "late objects of a deleted topic",
    "load",
    "load that is attached in part",
    "part of a load",
    "batch of a streaming query",
    "backfill",
    "secret of dead letters",
    "token",
}
"""Values that do not go with topic `a`, and that no call by name removes in these tests."""


@pytest.fixture(scope="module")
def seed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log with everything that is stored by key, to be copied."""
    return make_seed(tmp_path_factory.mktemp("seed"))


@pytest.fixture
def home(seed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(seed, tmp_path / "home"))


# The table


def test_every_key_that_there_is_is_of_one_kind() -> None:
    made = [function for name, function in inspect.getmembers(keys, inspect.isfunction) if name.endswith("_key")]
    assert len(made) > 20

    for function in made:
        given = inspect.signature(function).parameters.values()
        values = [7 if one.annotation == "int" else f"{one.name}-1" for one in given if one.name != "prefix"]
        key = function(*values, prefix=PREFIX)
        found = [kind.name for kind in STORED_KINDS if kind.pattern.fullmatch(key.removeprefix(PREFIX))]
        assert len(found) == 1, f"{key} of {function.__name__} is of these kinds: {found}"


def test_no_key_is_made_outside_the_table_of_keys() -> None:
    """Else there would be kinds of keys of which the table of kinds knows nothing."""
    made = re.compile(r"""f"{[a-z_.]*prefix}/[a-z]""")
    found = [
        str(path.relative_to(SOURCE)) for path in sorted(SOURCE.rglob("*.py")) if made.search(path.read_text("utf-8"))
    ]
    assert found == ["format/metadata/keys.py", "metadata/etcd/keyspace.py"]


def test_the_seed_has_a_value_of_every_kind_that_is_read_and_of_no_other(seed: Path) -> None:
    found = {kind.name if (kind := kind_of(key, prefix=PREFIX)) is not None else key for key in stored_keys(seed)}

    assert {kind.name for kind in STORED_KINDS if kind.holds is not None} <= found
    assert found <= {kind.name for kind in STORED_KINDS}


# The library


@pytest.mark.slow
@pytest.mark.proves("I12")
@pytest.mark.parametrize("what", DAMAGES)
@pytest.mark.parametrize("kind", CASES)
def test_everything_else_works_and_it_can_be_deleted_by_name(home: Path, kind: str, what: str) -> None:
    key = damage(home, kind, what)
    damaged = stored_value(home, key)

    with forebay.open(home / "log", shared_settings(home)) as log:
        for step in use_others(log):
            step()
        inside(log).loads.step()
        with suppress(ForebayError):
            inside(log).collect_directory()
        if kind not in CORRECTED:
            assert value_at(log.metadata, key) == damaged, "what cannot be read is neither deleted nor overwritten"
        _delete_by_name(log, kind)
        log.delete_topic("a")
        assert "a" not in names(log)
        assert inside(log).deletions.finish() == [], "nothing of a deleted topic is left"
    with forebay.open(home / "log", shared_settings(home)) as log:
        assert log.create_topic("a", exist_ok=True).append(b"again") is not None
        assert [record.value for record in log.topic("a").read()] == [b"again"]
        left = [value.key for value in unreadable_in(log.metadata.range(f"{PREFIX}/"), prefix=PREFIX)]
        assert left == ([key] if kind in LASTING else [])


def _delete_by_name(log: Storage, kind: str) -> None:
    if kind == "router":
        Routers(log).delete("r")
    elif kind in ("place of a reader", "place of a subscription"):
        log.group("g").delete()
    elif kind == "subscription":
        log.topic("a").delete_subscription("s")
        assert log.topic("a").subscriptions() == []
        assert log.topic("a").subscribe("s", start=EARLIEST).lag()[0].cursor == 0
    elif kind == "load that is not over":
        assert log.loads_of("two").abandon("waiting").status == "abandoned"


@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
def test_a_value_of_a_later_version_asks_for_an_upgrade_and_a_damaged_one_for_a_backup(home: Path, kind: str) -> None:
    key = key_of(stored_keys(home), kind)
    whole = stored_value(home, key)
    assert whole is not None
    for what, damaged in DAMAGES.items():
        with forebay.open(home / "log", shared_settings(home)) as log:
            log.metadata.transaction([], [Put(key, damaged(whole))])
            [found] = unreadable_in(log.metadata.range(f"{PREFIX}/"), prefix=PREFIX)

        assert found.key == key
        assert isinstance(found.error, UnsupportedFormat if what == "newer" else Corrupt)
        assert ("upgrade" in str(found)) == (what == "newer")
        assert ("backup" in str(found)) == (what != "newer")


@pytest.mark.parametrize("kind", ["topic", "subscription", "router"])
def test_it_is_logged_once_by_its_key_and_named_until_it_is_gone(
    home: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    key = key_of(stored_keys(home), kind)
    with forebay.open(home / "log", shared_settings(home)) as log:
        with caplog.at_level(logging.WARNING):
            # Of this very value nothing was logged before.
            log.metadata.transaction([], [Put(key, str(home).encode())])
            for _ in range(3):
                log.topics()
                Routers(log).all()
                if kind != "topic":
                    log.topic("a").subscriptions()
        assert len([line for line in caplog.messages if line.startswith(f"left out: {key}: ")]) == 1
        assert [value.key for value in log.unreadable_values()] == [key]

        log.metadata.transaction([], [Put(key, NEW_GARBAGE)])
        assert [value.key for value in log.unreadable_values()] == [key]
        _delete_by_name(log, kind)
        if kind == "topic":
            log.delete_topic("a")
        assert log.unreadable_values() == []


NEW_GARBAGE: Final = b"other garbage"


# What must not be guessed


@pytest.mark.proves("I25")
@pytest.mark.parametrize("what", DAMAGES)
@pytest.mark.parametrize("kind", ["place of a reader", "place of a subscription"])
def test_a_place_that_cannot_be_read_is_not_the_beginning(home: Path, kind: str, what: str) -> None:
    key = damage(home, kind, what)
    with forebay.open(home / "log", shared_settings(home)) as log:
        topic = log.topic("a")
        refused: dict[str, tuple[Callable[[], object], ...]] = {
            "place of a reader": (
                lambda: list(topic.reader("g").read()),
                lambda: log.group("g").commit("a", 5),
                lambda: topic.subscribe("g"),
            ),
            "place of a subscription": (
                lambda: topic.subscription("s").consumer().take(1),
                lambda: topic.subscription("s").peek(),
                lambda: topic.subscription("s").lag(),
            ),
        }
        for call in refused[kind]:
            with pytest.raises((Corrupt, UnsupportedFormat), match=key):
                call()
        assert value_at(log.metadata, key) == stored_value(home, key)


@pytest.mark.parametrize("what", DAMAGES)
def test_a_token_that_cannot_be_read_lets_no_caller_in(tmp_path: Path, what: str) -> None:
    clock = SystemClock()
    with forebay.open(tmp_path / "log") as log:
        tokens = Tokens(log.metadata, PREFIX, clock)
        made, other = (tokens.create(name, scopes=["admin"], prefixes=["*"]) for name in ("ops", "other"))
        book = TokenBook(log.metadata, PREFIX, clock)
        book.start()
        try:
            assert book.principal(made.secret.reveal()).name == "ops"
            key = keys.token_key(made.token.token_id, prefix=PREFIX)
            entry = log.metadata.get(key)
            assert entry is not None
            log.metadata.transaction([], [Put(key, DAMAGES[what](entry.value))])
            book.step()

            with pytest.raises(Unauthenticated):
                book.principal(made.secret.reveal())
            assert book.principal(other.secret.reveal()).name == "other"
            assert [token.name for token in tokens.all()] == ["other"]
            assert list(tokens.unreadable()) == [made.token.token_id]
            assert tokens.prune() == []
            with pytest.raises((Corrupt, UnsupportedFormat), match=key):
                tokens.revoke(made.token.token_id)
            tokens.remove_unreadable(made.token.token_id)
            assert tokens.unreadable() == {}
            with pytest.raises(Conflict):
                tokens.remove_unreadable(other.token.token_id)
        finally:
            book.close()


@pytest.mark.slow
@pytest.mark.proves("I18")
@pytest.mark.parametrize("what", DAMAGES)
@pytest.mark.parametrize(
    "kind",
    [
        "load",
        "load that is not over",
        "part of a load",
        "objects of tables",
        "segment of a shard",
        "end of the history of a shard",
        "state of a shard",
        "topic",
    ],
)
def test_no_object_is_collected_by_a_value_that_cannot_be_read(home: Path, kind: str, what: str) -> None:
    """What it names would look as if nothing named it. Everything is old enough to be collected."""
    damage(home, kind, what)
    settings = shared_settings(home)
    greedy = msgspec.structs.replace(
        settings, export=msgspec.structs.replace(settings.export, orphan_grace_s=0, sweep_interval_s=1)
    )
    with forebay.open(home / "log", shared_settings(home)) as log:
        gone = inside(log).deletions.finish()
        assert gone == [], "the deletion that had begun is finished, so that only what counts is left"
    before = objects(home)
    for name in before:
        os.utime(home / name, (1, 1))

    with forebay.open(home / "log", greedy) as log:
        log.recover()
        inside(log).loads.step()
        for collect in (inside(log).collect_directory, lambda: inside(log).collect(log.topic("a"))):
            with suppress(ForebayError):
                collect()

    assert before <= objects(home)


@pytest.mark.parametrize("what", DAMAGES)
@pytest.mark.parametrize("kind", ["load", "load that is not over", "part of a load"])
def test_a_load_that_cannot_be_read_keeps_no_other_object_from_being_collected(
    home: Path, kind: str, what: str
) -> None:
    key = damage(home, kind, what)
    settings = shared_settings(home)
    greedy = msgspec.structs.replace(settings, export=msgspec.structs.replace(settings.export, orphan_grace_s=0))
    with forebay.open(home / "log", greedy) as log:
        log.recover()
        orphans = []
        for name in ("a", "b"):
            # Of a load that was never offered.
            orphan = home / "store" / f"{log.topic(name).spec.topic_id}_0" / "loads" / f"never-{name}" / "x.seg"
            orphan.parent.mkdir(parents=True)
            orphan.write_bytes(b"orphan")
            os.utime(orphan, (1, 1))
            orphans.append(orphan)
        inside(log).collect_directory()

        assert [orphan.exists() for orphan in orphans] == [False, False]
        assert value_at(log.metadata, key) == stored_value(home, key)


@pytest.mark.proves("I18")
@pytest.mark.parametrize("what", DAMAGES)
def test_what_a_load_has_brought_is_kept_while_it_is_not_known_whether_the_load_is_over(home: Path, what: str) -> None:
    settings = shared_settings(home)
    greedy = msgspec.structs.replace(settings, export=msgspec.structs.replace(settings.export, orphan_grace_s=0))
    with forebay.open(home / "log", greedy) as log:
        log.recover()
        rows = pa.record_batch({"value": pa.array([b"waits"], pa.binary())})
        [staged] = log.loads_of("a").stage("unreadable", rows)
        log.metadata.transaction([], [Put(keys.load_key("unreadable", prefix=PREFIX), DAMAGES[what](b"{}"))])
        brought = [path for path in (home / "store").rglob("*") if "/loads/unreadable/" in str(path)]
        assert len(brought) == 2, staged
        for path in brought:
            os.utime(path, (1, 1))

        inside(log).collect_directory()
        inside(log).collect(log.topic("a"))

        assert all(path.exists() for path in brought)


def test_a_list_of_tables_that_cannot_be_read_keeps_only_its_topic_from_being_swept(home: Path) -> None:
    key = damage(home, "objects of tables", "garbage")
    with forebay.open(home / "log", shared_settings(home)) as log:
        log.recover()
        assert inside(log).collect(log.topic("b")) == []
        orphan = home / "store" / f"{log.topic('a').spec.topic_id}_0" / "1-orphan.seg"
        orphan.write_bytes(b"orphan")
        os.utime(orphan, (1, 1))
        with pytest.raises(Corrupt, match=key):
            inside(log).collect(log.topic("a"))
        assert orphan.exists()


@pytest.mark.parametrize("what", DAMAGES)
def test_a_batch_of_a_query_that_cannot_be_read_is_not_written_twice(home: Path, what: str) -> None:
    key = damage(home, "batch of a streaming query", what)
    with forebay.open(home / "log", shared_settings(home)) as log:
        loads = log.loads_of("a")
        with pytest.raises((Corrupt, UnsupportedFormat), match=key):
            loads.offer("again", [], batch=LoadBatch(query_id="q", batch_id=0))
        assert loads.offer("other", [], batch=LoadBatch(query_id="another", batch_id=0)) is None
        assert [record.value for record in log.topic("a").read()].count(b"loaded") == 1


@pytest.mark.parametrize("what", DAMAGES)
def test_a_load_that_may_be_committed_is_not_given_up(home: Path, what: str) -> None:
    key = damage(home, "load", what)
    with forebay.open(home / "log", shared_settings(home)) as log:
        with pytest.raises((Corrupt, UnsupportedFormat), match=key):
            log.loads_of("a").abandon("done")
        with pytest.raises((Corrupt, UnsupportedFormat), match=key):
            log.loads_of("b").abandon("done")
        assert value_at(log.metadata, key) == stored_value(home, key)


def test_a_load_that_cannot_be_read_is_given_up_only_in_the_topic_that_it_is_attached_to(home: Path) -> None:
    key = damage(home, "load that is attached in part", "garbage")
    with forebay.open(home / "log", shared_settings(home)) as log:
        with pytest.raises(Corrupt, match=key):
            log.loads_of("b").abandon("standing")
        assert value_at(log.metadata, key) == stored_value(home, key)


def test_a_subscription_that_cannot_be_read_is_not_deleted_while_a_consumer_is_attached(home: Path) -> None:
    with forebay.open(home / "log", shared_settings(home)) as log:
        topic = log.topic("a")
        key = keys.subscription_key("default", "a", "s", prefix=PREFIX)
        with topic.subscription("s").consumer() as consumer:
            assert consumer.take(1)
            log.metadata.transaction([], [Put(key, b"garbage")])
            with pytest.raises(Conflict):
                topic.delete_subscription("s")
        with pytest.raises(Corrupt, match=key):
            topic.subscribe("s")
        topic.delete_subscription("s")
        assert topic.subscriptions() == []


def test_a_subscription_that_is_restored_meanwhile_keeps_its_places(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = keys.subscription_key("default", "a", "s", prefix=PREFIX)
    whole = stored_value(home, key)
    assert whole is not None
    damage(home, "subscription", "garbage")
    with forebay.open(home / "log", shared_settings(home)) as log:
        cursors = inside(log).progress
        forget = type(cursors).forget

        def overtaken(self: object, *args: object, **named: object) -> None:
            log.metadata.transaction([], [Put(key, whole)])
            forget(cursors, *args, **named)  # type: ignore[arg-type]

        monkeypatch.setattr(type(cursors), "forget", overtaken)
        with pytest.raises(Conflict):
            log.topic("a").delete_subscription("s")
        assert log.topic("a").subscription("s").lag()[0].cursor == 0
        assert value_at(log.metadata, keys.progress_key("default", "a", "s", 0, prefix=PREFIX)) is not None


def test_nothing_is_swept_while_a_topic_cannot_be_read(home: Path) -> None:
    """What it has would look as if no topic had it."""
    key = damage(home, "topic", "newer")

    with forebay.open(home / "log", shared_settings(home)) as log, pytest.raises(UnsupportedFormat, match=key):
        inside(log).collect_directory()


def test_pages_of_topics_are_whole_though_one_cannot_be_read(home: Path) -> None:
    with forebay.open(home / "log", shared_settings(home)) as log:
        for name in ("c", "d", "e"):
            log.create_topic(name)
    damage(home, "topic", "garbage")

    with forebay.open(home / "log", shared_settings(home)) as log:
        first = log.topics(limit=2)
        rest = log.topics(after=first[-1].name, limit=2)

        assert [[spec.topic for spec in page] for page in (first, rest)] == [["b", "c"], ["d", "e"]]


# The command line


@pytest.fixture
def words(home: Path) -> list[str]:
    file = home / "settings.yaml"
    file.write_text(f"storage: {{mode: shared_fs}}\nstore: {{root: {home}/store}}\n")
    return ["--data", f"{home}/log", "--settings", str(file)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", CASES)
def test_the_command_line_lists_the_others_and_names_it(home: Path, words: list[str], kind: str) -> None:
    key = damage(home, kind, "garbage")

    for line in ("topic list", "group list", "router list", "token list", "subscription list b", "du"):
        answer = invoke([*words, *line.split()])
        assert answer.exit_code == 0, (line, answer.output)
    for line, code in (("doctor", PROBLEM), ("verify", DAMAGE)):
        answer = invoke([*words, line])
        assert answer.exit_code == code, (line, answer.output)
        assert key in answer.output, line


@pytest.mark.slow
@pytest.mark.parametrize("what", DAMAGES)
@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("topic", "topic delete a --yes"),
        ("subscription", "subscription delete a s --yes"),
        ("place of a subscription", "subscription delete a s --yes"),
        ("router", "router delete r --yes"),
        ("place of a reader", "group delete g --yes"),
        ("token", "token revoke"),
    ],
)
def test_the_command_line_deletes_it_by_name(home: Path, words: list[str], kind: str, line: str, what: str) -> None:
    key = damage(home, kind, what)
    name = [key.rpartition("/")[2]] if kind == "token" else []

    answer = invoke([*words, *line.split(), *name])

    assert answer.exit_code == 0, answer.output
    assert stored_value(home, key) is None
    if kind == "token":
        assert name[0] not in invoke([*words, "token", "list"]).output


# Other stores


@pytest.fixture(
    params=["memory", pytest.param("etcd", marks=[pytest.mark.slow, pytest.mark.xdist_group("etcd")])],
)
def elsewhere(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, Settings]]:
    """Where a log is whose metadata is not in SQLite, and its settings."""
    if request.param == "memory":
        yield ":memory:", Settings.load(overrides={})
        return
    with running(tmp_path, 1) as cluster:
        settings = shared_settings(tmp_path)
        metadata = msgspec.structs.replace(
            settings.metadata, backend="etcd", endpoints=cluster.endpoints, lease_margin_s=1
        )
        yield f"{tmp_path}/log", msgspec.structs.replace(settings, metadata=metadata)


def test_in_other_stores_everything_else_works_too(elsewhere: tuple[str, Settings]) -> None:
    """One after the other in one log, each mended before the next."""
    path, settings = elsewhere
    with Storage.open(path, settings) as log:
        if path == ":memory:":
            for name in ("a", "b", "two"):
                log.create_topic(name).append_many([b"1", b"2", b"3"])
                log.topic(name).subscribe("s", start=EARLIEST)
                log.group("g").commit(name, 1)
            Routers(log).create("other", sources=["b"], destination="two", start=EARLIEST)
            Routers(log).create("r", sources=["a"], destination="two", start=EARLIEST)
            Tokens(log.metadata, PREFIX, SystemClock()).create("ops", scopes=["admin"], prefixes=["*"])
        else:
            fill(log)
        stored = [entry.key for entry in log.metadata.range(f"{PREFIX}/")]
        cases = [kind for kind in CASES if any(_is_of(key, kind) for key in stored)]
        assert len(cases) >= 6
        for kind in cases:
            key = key_of(stored, kind)
            whole = value_at(log.metadata, key)
            assert whole is not None
            for bad in (DAMAGES["garbage"](whole), DAMAGES["newer"](whole)):
                log.metadata.transaction([], [Put(key, bad)])
                for step in _steps(log, path):
                    step()
                assert value_at(log.metadata, key) == bad
                whole_now = value_at(log.metadata, key)
                assert [value.key for value in unreadable_in(log.metadata.range(f"{PREFIX}/"), prefix=PREFIX)] == [key]
                assert whole_now == bad
            log.metadata.transaction([], [Put(key, whole)])
        log.metadata.transaction([], [Put(keys.subscription_key("default", "a", "s", prefix=PREFIX), b"bad")])
        log.topic("a").delete_subscription("s")
        log.metadata.transaction([], [Put(keys.topic_key("default", "a", prefix=PREFIX), b"bad")])
        log.delete_topic("a")
        assert list(unreadable_in(log.metadata.range(f"{PREFIX}/"), prefix=PREFIX)) == []


def _is_of(key: str, kind: str) -> bool:
    return key == key_of([key], kind) if (found := kind_of(key, prefix=PREFIX)) and found.name == kind else False


def _steps(log: Storage, path: str) -> Iterator[Callable[[], object]]:
    if path != ":memory:":
        yield from use_others(log)
        return
    other = log.topic("b")
    yield log.recover
    yield log.status
    yield lambda: other.append(b"more")
    yield lambda: [record.value for record in other.read()][-1] == b"more" or pytest.fail("not read")
    yield other.subscriptions
    yield lambda: "b" in str(log.group("g").offsets()) or pytest.fail("a place is not listed")
    yield lambda: "other" in [each.name for each in Routers(log).all()] or pytest.fail("a router is not listed")
