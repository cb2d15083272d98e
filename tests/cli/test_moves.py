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
from tests.cli.environment import TOPIC, CommandEnvironment, child
from tests.cli.rig import Shell, filled, one_line, snapshot
from tests.ledger import Ledger

pytestmark = pytest.mark.slow

MODES = ["local", "shared_fs"]
TRANSACTIONS = 8
"""So many a move of this topic has at least."""


@pytest.fixture(params=MODES)
def environment(request: pytest.FixtureRequest, tmp_path: Path) -> CommandEnvironment:
    """Directory `a` has a topic with 22 records in one of two partitions."""
    return _furnished(tmp_path, request.param)


def _furnished(root: Path, mode: str = "shared_fs", **groups: dict[str, object]) -> CommandEnvironment:
    environment = CommandEnvironment(root, mode, **groups)
    environment.ok("a", "topic", "create", TOPIC, "--partitions", "2")
    environment.produce("a", 0, 22)
    return environment


def _id(environment: CommandEnvironment, directory: str) -> str:
    return str(environment.shown(directory)["directory_id"])


def test_a_moved_topic_goes_on_exactly_where_it_stopped(environment: CommandEnvironment) -> None:
    moved = environment.ok("a", "topic", "move", TOPIC, "--to", str(environment.root / "b"), "--json").items[0]
    environment.produce("b", 22, 30)

    assert moved["taken"] is True and moved["seconds"] > 0 and moved["left"] == []
    assert [shard["next"] for shard in moved["shards"]] == [22, 0]
    assert environment.numbers("b") == list(range(30))
    assert environment.files("a") == []
    shown = environment.shown("b")["shards"][0]
    assert shown["holder"] == _id(environment, "b") == moved["target"] and shown["offsets"]["next"] == 30


def test_a_move_says_what_it_did_and_twice_finds_it_done(environment: CommandEnvironment) -> None:
    words = ("topic", "move", TOPIC, "--to", str(environment.root / "b"))

    first, second = environment.ok("a", *words).out, environment.ok("a", *words).out

    assert f"{TOPIC}[0]: sealed at next offset 22" in first and "s after the seal began" in first
    assert f"{TOPIC}[0]: is there already" in second and "after the seal began" not in second
    assert environment.numbers("b") == list(range(22))
    assert environment.shown("b")["shards"][0]["epoch"] == environment.shown("a")["shards"][0]["epoch"]


def test_a_topic_moves_on_and_back(environment: CommandEnvironment) -> None:
    for step, (source, target) in enumerate([("a", "b"), ("b", "c"), ("c", "a")]):
        environment.ok(source, "topic", "move", TOPIC, "--to", str(environment.root / target))
        environment.produce(target, 22 + step, 23 + step)

    assert environment.numbers("a") == list(range(25))
    assert environment.files("b") == environment.files("c") == []


def test_an_empty_topic_moves(environment: CommandEnvironment) -> None:
    environment.ok("a", "topic", "create", "new")

    environment.ok("a", "topic", "move", "new", "--to", str(environment.root / "b"))
    environment.produce("b", 0, 1, "new")

    assert environment.shown("b", "new")["shards"][0]["offsets"]["next"] == 1


def test_the_process_that_has_the_target_open_goes_on_at_its_next_append(environment: CommandEnvironment) -> None:
    words = ("topic", "move", TOPIC, "--to", str(environment.root / "b"))
    with environment.open("b") as there:
        moved = environment.ok("a", *words)
        assert "goes on at its next append" in moved.out and environment.shown("a")["shards"][0]["target"] == _id(
            environment, "b"
        )

        assert there.topic(TOPIC).append(b"22", partition=0) == 22
        there.topic(TOPIC).acquire(1)
        again = environment.ok("a", *words, "--json").items[0]

        assert again["taken"] is True and again["left"] == []
    assert environment.numbers("b") == list(range(23)) and environment.files("a") == []


def _no_shared_metadata(environment: CommandEnvironment) -> None:
    shutil.move(environment.root / "shared.sqlite", environment.root / "a" / "metadata.sqlite")
    environment.file.write_text(json.dumps({"storage": {"handoff_root": f"{environment.root}/handoff"}}))


def _own_metadata(environment: CommandEnvironment) -> None:
    Shell(environment.root / "b").ok("topic", "create", "theirs")


def _foreign(environment: CommandEnvironment) -> None:
    (environment.root / "b").mkdir()
    (environment.root / "b" / "letter.txt").write_text("dear")


def _no_handoff(environment: CommandEnvironment) -> None:
    environment.file.write_text(json.dumps({"metadata": {"path": f"{environment.root}/shared.sqlite"}}))


def _a_copy(environment: CommandEnvironment) -> None:
    shutil.copytree(environment.root / "a", environment.root / "b")


def _other_installation(environment: CommandEnvironment) -> None:
    (environment.root / "other").mkdir()
    elsewhere = CommandEnvironment(environment.root / "other", "local")
    elsewhere.ok("b", "topic", "create", "theirs")
    elsewhere.produce("b", 0, 1, "theirs")
    shutil.move(environment.root / "other" / "b", environment.root / "b")


def _is_a_file(environment: CommandEnvironment) -> None:
    (environment.root / "b").write_text("x")


def _nothing(environment: CommandEnvironment) -> None:
    environment.ok("a", "topic", "create", "fleeting", "--durability", "ephemeral")


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
    tmp_path: Path, spoil: Callable[[CommandEnvironment], None], topic: str, target: str, code: int, reported: str
) -> None:
    environment = _furnished(tmp_path, "local")
    spoil(environment)
    before = environment.shown("a")["shards"][0]

    refused = environment.run("a", "topic", "move", topic, "--to", str(environment.root / target))

    after = environment.shown("a")["shards"][0]
    assert refused.code == code and one_line(refused.err) and reported in refused.err, refused
    assert (after["phase"], after["epoch"], after["target"]) == ("open", before["epoch"], None)
    environment.produce("a", 22, 23)
    assert environment.numbers("a") == list(range(23))


def test_a_wrong_topic_does_not_leave_a_new_directory_behind(environment: CommandEnvironment) -> None:
    assert environment.run("a", "topic", "move", "nothing", "--to", str(environment.root / "b")).code == 2
    assert not (environment.root / "b").exists()


def test_what_another_directory_has_is_refused_here_and_left_alone(environment: CommandEnvironment) -> None:
    environment.ok("a", "topic", "move", TOPIC, "--to", str(environment.root / "b"))
    before = snapshot(environment.root / "b")

    for words in (
        ["seal", TOPIC],
        ["export", TOPIC],
        ["unseal", TOPIC],
        ["move", TOPIC, "--to", str(environment.root / "c")],
    ):
        refused = environment.run("a", "topic", *words)
        assert refused.code == 4 and one_line(refused.err) and _id(environment, "b") in refused.err, words

    assert snapshot(environment.root / "b") == before
    assert environment.numbers("b") == list(range(22))
    assert not (environment.root / "c").exists()


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
    environment = _furnished(tmp_path)
    moved = environment.ok("a", "topic", "move", TOPIC, "--to", str(tmp_path / "b"), "--json").items[0]

    assert [(shard["partition"], shard["next"]) for shard in moved["shards"]] == [(0, 22), (1, 0), (2, 0)]
    assert {shard["holder"] for shard in environment.shown("b")["shards"]} == {_id(environment, "b")}


@pytest.mark.usefixtures("_adding_partitions")
def test_what_was_added_meanwhile_and_is_not_used_there_yet_is_not_said_to_be(tmp_path: Path) -> None:
    environment = _furnished(tmp_path)
    words = ("topic", "move", TOPIC, "--to", str(tmp_path / "b"))
    environment.ok("a", *words)
    with environment.open("b"):
        moved = environment.ok("a", *words, "--json").items[0]

    assert [(shard["partition"], shard["next"]) for shard in moved["shards"]] == [
        (0, None),
        (1, None),
        (2, None),
        (3, 0),
    ]
    assert moved["taken"] is False


def test_a_source_that_is_open_elsewhere_is_refused(tmp_path: Path) -> None:
    environment = _furnished(tmp_path)
    with environment.open("a") as log:
        for words in (["seal", TOPIC], ["move", TOPIC, "--to", "b"]):
            refused = environment.run("a", "topic", *words)
            assert refused.code == 4 and one_line(refused.err)
        assert log.topic(TOPIC).append(b"22", partition=0) == 22


def test_a_seal_says_where_it_ends_and_is_taken_back(environment: CommandEnvironment) -> None:
    sealed = environment.ok("a", "topic", "seal", TOPIC, "--json").items
    again = environment.ok("a", "topic", "seal", TOPIC).out
    shown = environment.shown("a")["shards"][0]
    text = environment.ok("a", "topic", "show", TOPIC).out
    exported = environment.ok("a", "topic", "export", TOPIC).out
    taken = environment.ok("a", "topic", "unseal", TOPIC).out

    assert [(item["partition"], item["next"], item["last_committed"]) for item in sealed] == [(0, 22, 21), (1, 0, -1)]
    assert sealed[0]["sealed_by"] == _id(environment, "a") and sealed[0]["sealed_at"] == shown["sealed_at"]
    assert f"{TOPIC}[0]: sealed at next offset 22 by directory {_id(environment, 'a')}" in again
    assert (shown["phase"], shown["last_committed"], shown["exported"]) == ("sealed", 21, 22)
    assert "last committed 21" in text and "this directory" in text
    assert f"{TOPIC}[0]: history ends at offset 22" in exported, "asking for it takes no seal back"
    assert f"{TOPIC}[0]: open here at offset 22" in taken
    environment.produce("a", 22, 23)
    assert environment.numbers("a") == list(range(23))


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


def test_a_seal_for_one_directory_is_taken_back_before_it_goes_to_another(environment: CommandEnvironment) -> None:
    with environment.open("b"):
        environment.ok("a", "topic", "move", TOPIC, "--to", str(environment.root / "b"))

    refused = environment.run("a", "topic", "move", TOPIC, "--to", str(environment.root / "c"))
    environment.ok("a", "topic", "unseal", TOPIC)
    environment.ok("a", "topic", "move", TOPIC, "--to", str(environment.root / "c"))

    assert refused.code == 4 and "topic unseal" in refused.err
    assert environment.numbers("c") == list(range(22))


def test_export_says_how_far_history_reaches_and_show_what_is_behind(tmp_path: Path) -> None:
    environment = _furnished(
        tmp_path, export={"interval_s": 86400}, wal={"free_bytes_min": 0, "rotate_bytes_max": 4096}
    )
    exported = environment.ok("a", "topic", "export", TOPIC, "--json").items
    with environment.open("a") as log, inside(log).workers.history.paused():
        topic = log.topic(TOPIC)
        topic.append_many([b"x" * 100] * 50, partition=0)
        topic.rotate()
        inside(topic).segment(0).upkeep.seal_rotated()

        shown = environment.shown("a")

    behind = shown["shards"][0]["behind"]
    assert [(item["partition"], item["exported"]) for item in exported] == [(0, 22), (1, 0)]
    assert shown["mode"] == "shared_fs" and shown["store_failure"] is None
    assert shown["shards"][0]["exported"] == 22 and shown["shards"][0]["last_committed"] == 71
    assert (behind["files"], behind["records"]) == (1, 50) and behind["bytes"] > 5000


def test_show_says_that_the_store_does_not_answer(tmp_path: Path) -> None:
    environment = _furnished(tmp_path)
    shutil.rmtree(tmp_path / "store")

    assert "is no store" in environment.shown("a")["store_failure"]
    assert "is no store" in environment.ok("a", "topic", "show", TOPIC).out


def test_progress_is_logged_file_by_file(tmp_path: Path) -> None:
    environment = _furnished(tmp_path, "local")
    for number in range(22, 24):
        environment.ok("a", "topic", "export", TOPIC)
        environment.produce("a", number, number + 1)

    sealed = environment.ok("a", "topic", "seal", TOPIC, "--verbose")

    left = [line.partition(f"seal {TOPIC}: ")[2].partition(",")[0] for line in sealed.err.splitlines()]
    assert [line for line in left if line] == [
        "1 files with 1 records",  # to be catalogued; then all of them go where others can read them
        "3 files with 24 records",
        "2 files with 2 records",
        "1 files with 1 records",
    ]


def test_log_files_kept_elsewhere_are_not_shared_with_the_target(tmp_path: Path) -> None:
    environment = CommandEnvironment(tmp_path, wal={"free_bytes_min": 0, "dir": f"{tmp_path}/logs"})
    environment.ok("a", "topic", "create", TOPIC)
    environment.produce("a", 0, 5)

    environment.ok("a", "topic", "move", TOPIC, "--to", str(tmp_path / "b"))

    assert LogDirectory.look(tmp_path / "b", SystemDisk()).shards == f"{tmp_path}/b/shards"
    assert [left.name for left in (tmp_path / "logs").iterdir()] == ["shards.json"]
    assert len(list((tmp_path / "b" / "shards").iterdir())) == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", range(1, TRANSACTIONS + 1))
def test_a_move_killed_at_any_transaction_is_finished_by_the_same_command(
    environment: CommandEnvironment, number: int, ledger: Ledger
) -> None:
    words = ("topic", "move", TOPIC, "--to", str(environment.root / "b"))
    when = "before" if number % 2 else "after"
    moving = child("command_killed_at", f"{when}:{number}", *words, *environment.words("a"))

    ended = subprocess.run(moving, capture_output=True, check=False)
    assert ended.returncode == -9, ended.stderr
    ledger.count("kills", figure="move")
    environment.ok("a", *words)
    environment.produce("b", 22, 30)

    assert environment.numbers("b") == list(range(30))
    assert environment.shown("b")["shards"][0]["offsets"]["next"] == 30
    assert environment.files("a") == [] and environment.run("b", "verify").code == 0
