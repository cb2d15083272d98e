"""`forebay topic seal`, `unseal`, `export` and `move`: exactly where a topic stops, it goes on."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from forebay.directory import LogDirectory
from forebay.disk import SystemDisk
from forebay.format.metadata.descriptor import ShardState
from forebay.storage import Storage
from forebay.testing.inside import inside
from tests.cli.house import TOPIC, House, child
from tests.cli.rig import Shell, filled, one_line, snapshot
from tests.ledger import Ledger

pytestmark = pytest.mark.slow

MODES = ["local", "shared_fs"]
TRANSACTIONS = 8
"""So many a move of this topic has at least."""


@pytest.fixture(params=MODES)
def house(request: pytest.FixtureRequest, tmp_path: Path) -> House:
    """Directory `a` has a topic with 22 records in one of two partitions."""
    return _furnished(tmp_path, request.param)


def _furnished(root: Path, mode: str = "shared_fs", **groups: dict[str, object]) -> House:
    house = House(root, mode, **groups)
    house.ok("a", "topic", "create", TOPIC, "--partitions", "2")
    house.produce("a", 0, 22)
    return house


def _id(house: House, directory: str) -> str:
    return str(house.shown(directory)["directory_id"])


def test_a_moved_topic_goes_on_exactly_where_it_stopped(house: House) -> None:
    moved = house.ok("a", "topic", "move", TOPIC, "--to", str(house.root / "b"), "--json").items[0]
    house.produce("b", 22, 30)

    assert moved["taken"] is True and moved["seconds"] > 0 and moved["left"] == []
    assert [shard["next"] for shard in moved["shards"]] == [22, 0]
    assert house.numbers("b") == list(range(30))
    assert house.files("a") == []
    shown = house.shown("b")["shards"][0]
    assert shown["holder"] == _id(house, "b") == moved["target"] and shown["offsets"]["next"] == 30


def test_a_move_says_what_it_did_and_twice_finds_it_done(house: House) -> None:
    words = ("topic", "move", TOPIC, "--to", str(house.root / "b"))

    first, second = house.ok("a", *words).out, house.ok("a", *words).out

    assert f"{TOPIC}[0]: sealed at next offset 22" in first and "s after the seal began" in first
    assert f"{TOPIC}[0]: is there already" in second and "after the seal began" not in second
    assert house.numbers("b") == list(range(22))
    assert house.shown("b")["shards"][0]["epoch"] == house.shown("a")["shards"][0]["epoch"]


def test_a_topic_moves_on_and_back(house: House) -> None:
    for step, (source, target) in enumerate([("a", "b"), ("b", "c"), ("c", "a")]):
        house.ok(source, "topic", "move", TOPIC, "--to", str(house.root / target))
        house.produce(target, 22 + step, 23 + step)

    assert house.numbers("a") == list(range(25))
    assert house.files("b") == house.files("c") == []


def test_an_empty_topic_moves(house: House) -> None:
    house.ok("a", "topic", "create", "new")

    house.ok("a", "topic", "move", "new", "--to", str(house.root / "b"))
    house.produce("b", 0, 1, "new")

    assert house.shown("b", "new")["shards"][0]["offsets"]["next"] == 1


def test_the_process_that_has_the_target_open_goes_on_at_its_next_append(house: House) -> None:
    words = ("topic", "move", TOPIC, "--to", str(house.root / "b"))
    with house.open("b") as there:
        moved = house.ok("a", *words)
        assert "goes on at its next append" in moved.out and house.shown("a")["shards"][0]["target"] == _id(house, "b")

        assert there.topic(TOPIC).append(b"22", partition=0) == 22
        there.topic(TOPIC).acquire(1)
        again = house.ok("a", *words, "--json").items[0]

        assert again["taken"] is True and again["left"] == []
    assert house.numbers("b") == list(range(23)) and house.files("a") == []


def _no_shared_metadata(house: House) -> None:
    shutil.move(house.root / "shared.sqlite", house.root / "a" / "metadata.sqlite")
    house.file.write_text(json.dumps({"storage": {"handoff_root": f"{house.root}/handoff"}}))


def _own_metadata(house: House) -> None:
    Shell(house.root / "b").ok("topic", "create", "theirs")


def _foreign(house: House) -> None:
    (house.root / "b").mkdir()
    (house.root / "b" / "letter.txt").write_text("dear")


def _no_handoff(house: House) -> None:
    house.file.write_text(json.dumps({"metadata": {"path": f"{house.root}/shared.sqlite"}}))


def _a_copy(house: House) -> None:
    shutil.copytree(house.root / "a", house.root / "b")


def _other_installation(house: House) -> None:
    (house.root / "other").mkdir()
    elsewhere = House(house.root / "other", "local")
    elsewhere.ok("b", "topic", "create", "theirs")
    elsewhere.produce("b", 0, 1, "theirs")
    shutil.move(house.root / "other" / "b", house.root / "b")


def _is_a_file(house: House) -> None:
    (house.root / "b").write_text("x")


def _nothing(house: House) -> None:
    house.ok("a", "topic", "create", "fleeting", "--durability", "ephemeral")


@pytest.mark.parametrize(
    ("spoil", "topic", "target", "code", "reported"),
    [
        (_no_shared_metadata, TOPIC, "b", 2, "metadata.path"),
        (_no_handoff, TOPIC, "b", 2, "storage.handoff_root"),
        (_own_metadata, TOPIC, "b", 3, "metadata store of its own"),
        (_foreign, TOPIC, "b", 2, "not a Forebay data directory"),
        (_is_a_file, TOPIC, "b", 2, "not a directory"),
        (_a_copy, TOPIC, "b", 3, "is a copy of"),
        (_other_installation, TOPIC, "b", 3, "belongs to another one"),
        (_nothing, TOPIC, "a", 2, "is to leave"),
        (_nothing, "fleeting", "b", 2, "memory of its owner"),
        (_nothing, "shop/nothing", "b", 2, "shop/nothing"),
        (_nothing, "bad name", "b", 2, "not a topic name"),
    ],
)
def test_what_speaks_against_a_move_is_said_before_anything_is_sealed(
    tmp_path: Path, spoil: Callable[[House], None], topic: str, target: str, code: int, reported: str
) -> None:
    house = _furnished(tmp_path, "local")
    spoil(house)
    before = house.shown("a")["shards"][0]

    refused = house.run("a", "topic", "move", topic, "--to", str(house.root / target))

    after = house.shown("a")["shards"][0]
    assert refused.code == code and one_line(refused.err) and reported in refused.err, refused
    assert (after["phase"], after["epoch"], after["target"]) == ("open", before["epoch"], None)
    house.produce("a", 22, 23)
    assert house.numbers("a") == list(range(23))


def test_a_wrong_topic_does_not_leave_a_new_directory_behind(house: House) -> None:
    assert house.run("a", "topic", "move", "nothing", "--to", str(house.root / "b")).code == 2
    assert not (house.root / "b").exists()


def test_what_another_directory_has_is_refused_here_and_left_alone(house: House) -> None:
    house.ok("a", "topic", "move", TOPIC, "--to", str(house.root / "b"))
    before = snapshot(house.root / "b")

    for words in (
        ["seal", TOPIC],
        ["export", TOPIC],
        ["unseal", TOPIC],
        ["move", TOPIC, "--to", str(house.root / "c")],
    ):
        refused = house.run("a", "topic", *words)
        assert refused.code == 4 and one_line(refused.err) and _id(house, "b") in refused.err, words

    assert snapshot(house.root / "b") == before
    assert house.numbers("b") == list(range(22))
    assert not (house.root / "c").exists()


@pytest.fixture
def _adding_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each topic has one more by the time that it is sealed."""
    sealing = Storage.seal_topic

    def added(log: Storage, name: str, **options: Any) -> list[ShardState]:
        log.alter_topic(name, partitions=log.topic(name).spec.partitions + 1)
        return sealing(log, name, **options)

    monkeypatch.setattr(Storage, "seal_topic", added)


@pytest.mark.usefixtures("_adding_partitions")
def test_partitions_that_are_added_meanwhile_move_too(tmp_path: Path) -> None:
    house = _furnished(tmp_path)
    moved = house.ok("a", "topic", "move", TOPIC, "--to", str(tmp_path / "b"), "--json").items[0]

    assert [(shard["partition"], shard["next"]) for shard in moved["shards"]] == [(0, 22), (1, 0), (2, 0)]
    assert {shard["holder"] for shard in house.shown("b")["shards"]} == {_id(house, "b")}


@pytest.mark.usefixtures("_adding_partitions")
def test_what_was_added_meanwhile_and_is_not_used_there_yet_is_not_said_to_be(tmp_path: Path) -> None:
    house = _furnished(tmp_path)
    words = ("topic", "move", TOPIC, "--to", str(tmp_path / "b"))
    house.ok("a", *words)
    with house.open("b"):
        moved = house.ok("a", *words, "--json").items[0]

    assert [(shard["partition"], shard["next"]) for shard in moved["shards"]] == [
        (0, None),
        (1, None),
        (2, None),
        (3, 0),
    ]
    assert moved["taken"] is False


def test_a_source_that_is_open_elsewhere_is_refused(tmp_path: Path) -> None:
    house = _furnished(tmp_path)
    with house.open("a") as log:
        for words in (["seal", TOPIC], ["move", TOPIC, "--to", "b"]):
            refused = house.run("a", "topic", *words)
            assert refused.code == 4 and one_line(refused.err)
        assert log.topic(TOPIC).append(b"22", partition=0) == 22


def test_a_seal_says_where_it_ends_and_is_taken_back(house: House) -> None:
    sealed = house.ok("a", "topic", "seal", TOPIC, "--json").items
    again = house.ok("a", "topic", "seal", TOPIC).out
    shown = house.shown("a")["shards"][0]
    text = house.ok("a", "topic", "show", TOPIC).out
    exported = house.ok("a", "topic", "export", TOPIC).out
    taken = house.ok("a", "topic", "unseal", TOPIC).out

    assert [(item["partition"], item["next"], item["last_committed"]) for item in sealed] == [(0, 22, 21), (1, 0, -1)]
    assert sealed[0]["sealed_by"] == _id(house, "a") and sealed[0]["sealed_at"] == shown["sealed_at"]
    assert f"{TOPIC}[0]: sealed at next offset 22 by directory {_id(house, 'a')}" in again
    assert (shown["phase"], shown["last_committed"], shown["exported"]) == ("sealed", 21, 22)
    assert "last committed 21" in text and "this directory" in text
    assert f"{TOPIC}[0]: history ends at offset 22" in exported, "asking for it takes no seal back"
    assert f"{TOPIC}[0]: open here at offset 22" in taken
    house.produce("a", 22, 23)
    assert house.numbers("a") == list(range(23))


@pytest.mark.parametrize("word", ["seal", "export"])
def test_damage_is_named_and_accepted_on_demand(tmp_path: Path, word: str) -> None:
    shell = filled(tmp_path / "log")
    newest = shell.segments()[-1]
    content = newest.read_bytes()
    newest.write_bytes(content.replace(b"2-7", b"2-x"))

    refused = shell.run("topic", word, "shop/orders")
    taken = shell.ok("topic", word, "shop/orders", "--accept-damage")

    assert refused.code == 6
    assert f"shop/orders[0]: {newest} is damaged at byte " in refused.err and "offsets [40, 60)" in refused.err
    assert "60" in taken.out


def test_a_seal_for_one_directory_is_taken_back_before_it_goes_to_another(house: House) -> None:
    with house.open("b"):
        house.ok("a", "topic", "move", TOPIC, "--to", str(house.root / "b"))

    refused = house.run("a", "topic", "move", TOPIC, "--to", str(house.root / "c"))
    house.ok("a", "topic", "unseal", TOPIC)
    house.ok("a", "topic", "move", TOPIC, "--to", str(house.root / "c"))

    assert refused.code == 4 and "topic unseal" in refused.err
    assert house.numbers("c") == list(range(22))


def test_export_says_how_far_history_reaches_and_show_what_is_behind(tmp_path: Path) -> None:
    house = _furnished(tmp_path, export={"interval_s": 86400}, wal={"free_bytes_min": 0, "rotate_bytes_max": 4096})
    exported = house.ok("a", "topic", "export", TOPIC, "--json").items
    with house.open("a") as log, inside(log).workers.history.paused():
        topic = log.topic(TOPIC)
        topic.append_many([b"x" * 100] * 50, partition=0)
        topic.rotate()
        inside(topic).segment(0).upkeep.seal_rotated()

        shown = house.shown("a")

    behind = shown["shards"][0]["behind"]
    assert [(item["partition"], item["exported"]) for item in exported] == [(0, 22), (1, 0)]
    assert shown["mode"] == "shared_fs" and shown["store_failure"] is None
    assert shown["shards"][0]["exported"] == 22 and shown["shards"][0]["last_committed"] == 71
    assert (behind["files"], behind["records"]) == (1, 50) and behind["bytes"] > 5000


def test_show_says_that_the_store_does_not_answer(tmp_path: Path) -> None:
    house = _furnished(tmp_path)
    shutil.rmtree(tmp_path / "store")

    assert "is no store" in house.shown("a")["store_failure"]
    assert "is no store" in house.ok("a", "topic", "show", TOPIC).out


def test_progress_is_logged_file_by_file(tmp_path: Path) -> None:
    house = _furnished(tmp_path, "local")
    for number in range(22, 24):
        house.ok("a", "topic", "export", TOPIC)
        house.produce("a", number, number + 1)

    sealed = house.ok("a", "topic", "seal", TOPIC, "--verbose")

    left = [line.partition(f"seal {TOPIC}: ")[2].partition(",")[0] for line in sealed.err.splitlines()]
    assert [line for line in left if line] == [
        "1 files with 1 records",  # to be catalogued; then all of them go where others can read them
        "3 files with 24 records",
        "2 files with 2 records",
        "1 files with 1 records",
    ]


def test_log_files_kept_elsewhere_are_not_shared_with_the_target(tmp_path: Path) -> None:
    house = House(tmp_path, wal={"free_bytes_min": 0, "dir": f"{tmp_path}/logs"})
    house.ok("a", "topic", "create", TOPIC)
    house.produce("a", 0, 5)

    house.ok("a", "topic", "move", TOPIC, "--to", str(tmp_path / "b"))

    assert LogDirectory.look(tmp_path / "b", SystemDisk()).shards == f"{tmp_path}/b/shards"
    assert [left.name for left in (tmp_path / "logs").iterdir()] == ["shards.json"]
    assert len(list((tmp_path / "b" / "shards").iterdir())) == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, TRANSACTIONS + 1))
def test_a_move_killed_at_any_transaction_is_finished_by_the_same_command(
    house: House, number: int, ledger: Ledger
) -> None:
    words = ("topic", "move", TOPIC, "--to", str(house.root / "b"))
    when = "before" if number % 2 else "after"
    moving = child("command_killed_at", f"{when}:{number}", *words, *house.words("a"))

    ended = subprocess.run(moving, capture_output=True, check=False)
    assert ended.returncode == -9, ended.stderr
    ledger.count("kills", figure="move")
    house.ok("a", *words)
    house.produce("b", 22, 30)

    assert house.numbers("b") == list(range(30))
    assert house.shown("b")["shards"][0]["offsets"]["next"] == 30
    assert house.files("a") == [] and house.run("b", "verify").code == 0
