"""`forebay shard salvage`: what a crash or a take-over has left behind is brought back, each record once."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from forebay.cli import shard
from forebay.cli.terminal import Meter
from forebay.cli.topic import delete
from tests.cli.environment import TOPIC, CommandEnvironment, child
from tests.cli.rig import Outcome, Shell, flip, one_line, snapshot
from tests.ledger import Ledger

pytestmark = pytest.mark.slow

SLOW_WAL: dict[str, object] = {
    "free_bytes_min": 0,
    "reserve_records_min": 64,
    "sync_interval_ms": 600_000,
    "mark_interval_ms": 600_000,
}
ORIGIN = ("forebay-origin-topic", "forebay-origin-partition", "forebay-origin-offset", "forebay-origin-epoch")


def _killed_owner(
    environment: CommandEnvironment, *more: str, exported: int, appended: int, durability: str = "fsync"
) -> None:
    words = [str(environment.root / "a"), str(environment.file), str(exported), str(appended), durability, *more]
    killed = subprocess.run(child("owner_killed", *words), capture_output=True, check=False)
    assert killed.returncode == -9, killed.stderr


@pytest.fixture
def environment(tmp_path: Path, ledger: Ledger) -> CommandEnvironment:
    """Directory `a` died with records 10 to 29 unexported, and `b` has taken the topic over."""
    environment = CommandEnvironment(tmp_path)
    _killed_owner(environment, exported=10, appended=30)
    ledger.count("kills", figure="owner before a take-over")
    environment.ok("b", "topic", "create", "other")
    environment.produce("b", 1000, 1001)
    return environment


def _salvage(environment: CommandEnvironment, *words: str) -> list[dict[str, Any]]:
    return environment.ok("b", "shard", "salvage", TOPIC, "--from", str(environment.root / "a"), *words, "--json").items


def _records(environment: CommandEnvironment, topic: str, directory: str = "b") -> list[dict[str, Any]]:
    lines = environment.ok(directory, "consume", topic, "--format", "json").items
    return [item for item in lines if "gap" not in item]


def _copies(environment: CommandEnvironment, topic: str) -> list[tuple[str, ...]]:
    """Value, key, tag, own header and origin of each copy."""
    return [
        (item["value"], item["key"], item["tag"], item["headers"]["n"], *(item["headers"][name] for name in ORIGIN))
        for item in _records(environment, topic)
        if ORIGIN[0] in item.get("headers", {})
    ]


def _expected(first: int, stop: int) -> list[tuple[str, ...]]:
    return [(f"{n}", f"k{n}", "eu", f"{n}", TOPIC, "0", f"{n}", "1") for n in range(first, stop)]


class Shown:
    """A meter that remembers what it was given, each for one partition or one topic."""

    def __init__(self) -> None:
        self.bars: dict[str, list[int]] = {}

    @contextmanager
    def __call__(self, label: str, *, in_bytes: bool) -> Iterator[Meter]:
        totals = self.bars[label] = [0, 0]

        class Bar:
            def total(self, amount: int) -> None:
                totals[1] = amount

            def advance(self, amount: int) -> None:
                totals[0] += amount

        yield Bar()


def test_how_far_salvaging_and_deleting_have_come_is_shown(
    environment: CommandEnvironment, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = Shown()
    monkeypatch.setattr(shard, "meter", shown)
    monkeypatch.setattr(delete, "meter", shown)

    _salvage(environment, "--append")
    environment.ok("b", "topic", "delete", TOPIC, "--yes")

    assert shown.bars == {f"salvage {TOPIC}[0]": [30, 30], f"delete {TOPIC}": [0, 0]}


@pytest.mark.slow
@pytest.mark.parametrize("way", ["left as it was", "set aside"])
def test_what_a_take_over_has_lost_is_brought_back_once(environment: CommandEnvironment, way: str) -> None:
    assert [item["value"] for item in _records(environment, TOPIC)] == [*map(str, range(10)), "1000"]
    if way == "set aside":
        with environment.open("a") as log:
            log.clear_moved()
        assert environment.files("a") == []
    before = snapshot(environment.root / "a")

    listed = _salvage(environment, "--list")
    planned = _salvage(environment, "--append", "--dry-run")
    first, second = _salvage(environment, "--append"), _salvage(environment, "--append")

    assert [(item["start"], item["stop"], item["records"], item["lost"]) for item in listed] == [
        (0, 10, 10, 0),
        (10, 30, 20, 20),
    ]
    assert [(item["copied"], item["present"]) for item in (*planned, *first, *second)] == [(20, 0), (20, 0), (0, 20)]
    assert _copies(environment, TOPIC) == _expected(10, 30)
    assert snapshot(environment.root / "a") == before, "the files are left alone"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deleted", "before", "left"), [("12-15", "", [10, 11, *range(15, 30)]), ("20-22", "18", [18, 19, *range(22, 30)])]
)
def test_what_was_deleted_before_it_was_lost_stays_deleted(
    tmp_path: Path, deleted: str, before: str, left: list[int]
) -> None:
    environment = CommandEnvironment(tmp_path)
    _killed_owner(environment, deleted, before, exported=10, appended=30)
    environment.ok("b", "topic", "create", "other")
    environment.produce("b", 1000, 1001)

    listed = _salvage(environment, "--list")
    planned, copied = _salvage(environment, "--append", "--dry-run"), _salvage(environment, "--append")

    assert sum(item["lost"] for item in listed) == planned[0]["copied"] == copied[0]["copied"] == len(left)
    assert [int(copy[0]) for copy in _copies(environment, TOPIC)] == left


@pytest.mark.slow
def test_lost_records_go_into_a_topic_of_their_own(environment: CommandEnvironment) -> None:
    planned = _salvage(environment, "--into", "rescued", "--dry-run")
    unmade = environment.run("b", "topic", "show", "rescued")
    first, second = _salvage(environment, "--into", "rescued"), _salvage(environment, "--into", "rescued")
    text = environment.ok(
        "b", "shard", "salvage", TOPIC, "--from", str(environment.root / "a"), "--into", "rescued"
    ).out

    assert (planned[0]["copied"], unmade.code) == (20, 2)
    assert [(item["copied"], item["present"]) for item in (*first, *second)] == [(20, 0), (0, 20)]
    assert "0 records of 2 files are copied to default/rescued, 20 were there already" in text
    assert _copies(environment, "rescued") == _expected(10, 30)
    assert len(_records(environment, TOPIC)) == 11, "the topic itself is untouched"
    assert environment.shown("b", "rescued")["durability"] == "fsync"


@pytest.mark.slow
def test_a_copy_broken_off_in_the_middle_is_gone_on_with(environment: CommandEnvironment) -> None:
    environment.ok("b", "topic", "create", "rescued")
    copied = _salvage(environment, "--into", "elsewhere")
    lines = environment.ok("b", "consume", "elsewhere", "--format", "json", "--count", "7").out
    environment.ok("b", "produce", "rescued", "--format", "json", stdin=lines.encode())

    rest = _salvage(environment, "--into", "rescued")

    assert (copied[0]["copied"], rest[0]["copied"], rest[0]["present"]) == (20, 13, 7)
    assert _copies(environment, "rescued") == _expected(10, 30)


@pytest.mark.slow
def test_damaged_frames_are_named_and_left_out(environment: CommandEnvironment) -> None:
    (path,) = (environment.root / "a" / "shards").glob("*/*10-00000001.seg")
    frames = [item for item in _dump(environment, path) if item["kind"] == "data"]
    flip(path, frames[5]["byte"] + 40)

    listed = _salvage(environment, "--list")[1]
    text = environment.ok("b", "shard", "salvage", TOPIC, "--from", str(environment.root / "a"), "--list").out
    copied = _salvage(environment, "--append")[0]

    assert listed["damaged"] == [{"byte": frames[5]["byte"], "bytes": frames[5]["bytes"]}]
    assert f"{frames[5]['bytes']} bytes at byte {frames[5]['byte']} are no whole frame" in text
    assert (copied["copied"], copied["damaged"]) == (19, 1)
    assert _copies(environment, TOPIC) == [copy for copy in _expected(10, 30) if copy[0] != "15"]


def _dump(environment: CommandEnvironment, path: Path) -> list[dict[str, Any]]:
    return Shell(environment.root / "a").ok("dump", str(path), "--json").items


@pytest.mark.slow
@pytest.mark.parametrize("segment", ["here", "in history"])
def test_a_torn_tail_is_brought_back_as_far_as_it_is_whole(tmp_path: Path, segment: str) -> None:
    environment = CommandEnvironment(tmp_path, wal=SLOW_WAL)
    _killed_owner(environment, exported=0, appended=20, durability="memory")
    (path,) = (tmp_path / "a" / "shards").glob("*/*.seg")
    frames = [item for item in _dump(environment, path) if item["kind"] == "data"]
    flip(path, frames[10]["byte"] + 40)
    environment.produce("a", 1000, 1001)
    source = tmp_path / "a"
    if segment == "in history":
        environment.ok("a", "topic", "export", TOPIC)
        source = tmp_path / "copy"
        shutil.copytree(tmp_path / "a", source, ignore=shutil.ignore_patterns("*.seg", "*.idx"))

    words = ("shard", "salvage", TOPIC, "--from", str(source))
    listed = environment.ok("a", *words, "--list", "--json").items
    copied = [environment.ok("a", *words, "--append", "--json").items[0]["copied"] for _ in range(2)]

    assert len(listed) == 1
    found = listed[0]
    assert (found["kind"], found["start"], found["stop"], found["records"], found["lost"]) == ("tail", 11, 20, 9, 9)
    assert [place["byte"] for place in found["damaged"]] == [0]
    assert copied == [9, 0]
    values = [item["value"] for item in _records(environment, TOPIC, "a")]
    assert values == [*map(str, range(10)), "1000", *map(str, range(11, 20))]


@pytest.mark.slow
def test_a_tail_whose_segment_is_nowhere_is_said_and_left_out(tmp_path: Path) -> None:
    environment = CommandEnvironment(tmp_path, "local", wal=SLOW_WAL)
    _killed_owner(environment, exported=0, appended=20, durability="memory")
    (path,) = (tmp_path / "a" / "shards").glob("*/*.seg")
    flip(path, [item for item in _dump(environment, path) if item["kind"] == "data"][10]["byte"] + 40)
    environment.produce("a", 1000, 1001)
    shutil.copytree(tmp_path / "a", tmp_path / "copy", ignore=shutil.ignore_patterns("*.seg", "*.idx"))

    words = ("shard", "salvage", TOPIC, "--from", str(tmp_path / "copy"))
    listed = environment.ok("a", *words, "--list")
    copied = environment.ok("a", *words, "--append")

    assert "its segment's header is gone" in listed.out
    assert "0 records of 1 files" in copied.out and "1 files whose header is gone" in copied.out


def _refused(outcome: Outcome, code: int, reported: str) -> bool:
    return outcome.code == code and one_line(outcome.err) and reported in outcome.err and not outcome.out


@pytest.mark.parametrize(
    ("words", "code", "reported"),
    [
        ([TOPIC], 2, "--list, --append or --into"),
        ([TOPIC, "--list", "--append"], 2, "one of them"),
        ([TOPIC, "--into", "x", "--append"], 2, "one of them"),
        ([TOPIC, "--list", "--dry-run"], 2, "--dry-run"),
        ([TOPIC, "--into", TOPIC], 2, "--append"),
        ([TOPIC, "--into", "bad name"], 2, "not a topic name"),
        ([TOPIC, "--into", "narrow"], 3, "1 partitions"),
        ([TOPIC, "--into", "fleeting"], 3, "memory engine"),
        ([TOPIC, "--list", "--partition", "2"], 2, "0 to 1"),
        ([TOPIC, "--list", "--partition", "-1"], 2, "0 to 1"),
        ([TOPIC, "--list", "--from", "absent"], 2, "not a Forebay data directory"),
        (["fleeting", "--append"], 2, "memory"),
        (["tree", "--append"], 2, "RocksDB"),
        (["shop/nothing", "--list"], 2, "shop/nothing"),
    ],
)
def test_a_wrong_call_is_refused(tmp_path: Path, words: list[str], code: int, reported: str) -> None:
    environment = CommandEnvironment(tmp_path)
    environment.ok("a", "topic", "create", TOPIC, "--partitions", "2")
    environment.ok("a", "topic", "create", "narrow")
    environment.ok("a", "topic", "create", "fleeting", "--engine", "memory")
    environment.ok("a", "topic", "create", "tree", "--engine", "rocksdb")

    assert _refused(environment.run("a", "shard", "salvage", *words), code, reported)


def test_where_nothing_was_set_aside_there_is_nothing_to_do(tmp_path: Path) -> None:
    environment = CommandEnvironment(tmp_path)
    environment.ok("a", "topic", "create", TOPIC)
    environment.produce("a", 0, 3)

    assert environment.ok("a", "shard", "salvage", TOPIC, "--list").out == ""
    assert "0 records of 0 files" in environment.ok("a", "shard", "salvage", TOPIC, "--into", "rescued").out
    assert environment.run("a", "topic", "show", "rescued").code == 2, "no topic is made for nothing"


def test_salvaging_where_another_directory_has_the_topic_is_refused(tmp_path: Path) -> None:
    environment = CommandEnvironment(tmp_path)
    environment.ok("a", "topic", "create", TOPIC)
    environment.produce("a", 0, 3)
    environment.ok("a", "topic", "move", TOPIC, "--to", str(tmp_path / "b"))

    assert _refused(environment.run("a", "shard", "salvage", TOPIC, "--append"), 4, "--from")
    assert environment.shown("b")["shards"][0]["holder"] == environment.shown("b")["directory_id"]
