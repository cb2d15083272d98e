"""What is wrong is said in one line with the right exit code, and nothing is changed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import forebay
from forebay.cli.failures import EXIT_CODES, exit_code
from tests.cli.rig import Outcome, Shell, changed, filled, one_line, snapshot

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    return filled(tmp_path_factory.mktemp("cli") / "log")


def _refused(outcome: Outcome, code: int) -> bool:
    return outcome.code == code and one_line(outcome.err) and outcome.out == "" and "Traceback" not in outcome.err


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["consume", "shop/nothing"], 2),
        (["topic", "show", "shop/nothing"], 2),
        (["topic", "delete", "shop/nothing", "--yes"], 2),
        (["topic", "seal", "shop/nothing"], 2),
        (["topic", "unseal", "shop/nothing"], 2),
        (["topic", "export", "shop/nothing"], 2),
        (["topic", "move", "shop/orders", "--to", "elsewhere"], 2),
        (["topic", "move", "shop/orders"], 2),
        (["shard", "salvage", "shop/nothing", "--list"], 2),
        (["shard", "salvage", "shop/orders"], 2),
        (["produce", "shop/nothing"], 2),
        (["verify", "shop/nothing"], 2),
        (["repair", "shop/nothing"], 2),
        (["consume", "a/b/c"], 2),
        (["consume", "shop orders"], 2),
        (["consume", ""], 2),
        (["consume", "../../etc"], 2),
        (["topic", "create", "bad name"], 2),
        (["topic", "create", "t", "--partitions", "0"], 2),
        (["topic", "create", "t", "--partitions", "many"], 2),
        (["topic", "create", "t", "--durability", "eternal"], 2),
        (["topic", "create", "t", "--durability", "replicated"], 2),
        (["topic", "create", "t", "--engine", "rocksdb", "--durability", "memory"], 2),
        (["topic", "create", "t", "--compression", "lz4"], 2),
        (["topic", "create", "t", "--durability", "fsync", "--engine", "memory"], 2),
        (["topic", "create", "shop/orders"], 3),
        (["topic", "list", "--set", "wal.unknown=1"], 2),
        (["topic", "list", "--set", "nonsense"], 2),
        (["topic", "list", "--set", "wal.sync_interval_ms=-1"], 2),
        (["topic", "list", "--set", "wal.sync_interval_ms=soon"], 2),
        (["topic", "list", "--settings", "absent.yaml"], 2),
        (["topic", "list", "--log-format", "xml"], 2),
        (["topic", "create", "t", "--engine", "tape"], 2),
        (["topic", "create", "t", "--on-full", "reject-new"], 2),
        (["topic", "create", "t", "--cap-records", "0"], 2),
        (["topic", "create", "t", "--cleanup", "compact", "--ttl", "1h"], 2),
        (["group", "show", "a b"], 2),
        (["group", "reset", "../g", "t", "--to", "earliest"], 2),
        (["topic", "list", "--unknown"], 2),
        (["topic", "frobnicate"], 2),
        (["frobnicate"], 2),
        (["consume"], 2),
        (["dump", "absent.seg"], 2),
        (["dump", "absent.seg", "--key", "x"], 2),
    ],
)
@pytest.mark.proves("I30")
def test_a_wrong_call_is_refused_and_changes_nothing(shell: Shell, words: list[str], code: int) -> None:
    before = snapshot(shell.directory)

    outcome = shell.run(*words)

    assert _refused(outcome, code), outcome
    assert snapshot(shell.directory) == before


@pytest.mark.parametrize(
    "words",
    [
        ["topic", "list"],
        ["topic", "show", "t"],
        ["topic", "delete", "t", "--yes"],
        ["topic", "seal", "t"],
        ["topic", "unseal", "t"],
        ["topic", "export", "t"],
        ["topic", "move", "t", "--to", "elsewhere"],
        ["shard", "salvage", "t", "--list"],
        ["shard", "salvage", "t", "--append"],
        ["consume", "t"],
        ["produce", "t"],
        ["verify"],
        ["repair"],
        ["repair", "--apply"],
        ["dump"],
    ],
)
def test_a_directory_that_is_not_ours_is_refused_and_not_made(tmp_path: Path, words: list[str]) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "letter.txt").write_text("dear")

    assert _refused(Shell(tmp_path / "absent").run(*words), 2)
    assert _refused(Shell(foreign).run(*words), 2)
    assert _refused(Shell(foreign / "letter.txt").run(*words), 2)
    assert sorted(os.listdir(tmp_path)) == ["foreign"] and os.listdir(foreign) == ["letter.txt"]


def test_creating_a_topic_in_a_foreign_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")

    assert _refused(Shell(tmp_path).run("topic", "create", "t"), 2)
    assert os.listdir(tmp_path) == ["letter.txt"]


def test_a_wrong_topic_does_not_leave_a_new_directory_behind(tmp_path: Path) -> None:
    assert _refused(Shell(tmp_path / "new").run("topic", "create", "bad name"), 2)
    assert _refused(Shell(tmp_path / "new").run("topic", "create", "t", "--partitions", "-1"), 2)
    assert os.listdir(tmp_path) == []


def test_a_topic_in_memory_would_end_with_the_command(tmp_path: Path) -> None:
    assert _refused(Shell(Path(":memory:")).run("topic", "create", "t"), 2)


def test_a_directory_that_cannot_be_written_is_unavailable() -> None:
    # A file system that no caller may write to, root included: Linux has the one, macOS the other.
    sealed = Path("/sys") if Path("/sys").is_dir() else Path("/System")

    assert _refused(Shell(sealed / "forebay").run("topic", "create", "t"), 4)


def test_a_path_through_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")

    outcome = Shell(tmp_path / "file" / "log").run("topic", "create", "t")

    assert outcome.code in (2, 4) and one_line(outcome.err)


def test_writers_are_refused_while_another_has_the_directory(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log")
    with forebay.open(str(shell.directory)):
        for words in (
            ["produce", "shop/orders"],
            ["topic", "create", "t"],
            ["topic", "delete", "shop/orders", "--yes"],
        ):
            assert _refused(shell.run(*words, stdin=b"x\n"), 4)


def test_a_newer_version_is_not_taken_for_damage(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log")
    marker = shell.directory / "forebay.json"
    changed(marker, lambda content: json.dumps({**json.loads(content), "format": 2}).encode())
    before = snapshot(shell.directory)

    for words in (["topic", "list"], ["consume", "shop/orders"], ["produce", "shop/orders"], ["verify"], ["repair"]):
        outcome = shell.run(*words)

        assert _refused(outcome, 8) and "upgrade" in outcome.err
    assert snapshot(shell.directory) == before


def test_damage_met_while_reading_has_its_own_code(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log")
    changed(shell.directory / "forebay.json", lambda content: b"{")

    assert _refused(shell.run("consume", "shop/orders"), 6)


def test_every_error_has_an_exit_code() -> None:
    families = [forebay.ForebayError]
    for family in families:
        families += family.__subclasses__()
    codes = {family.__name__: exit_code(family("x")) for family in families if family is not forebay.ForebayError}

    assert all(code > 1 for code in codes.values())
    assert {code for _, code in EXIT_CODES} == {2, 3, 4, 5, 6, 7, 8}
    assert codes["UnknownTopic"] == 2 and codes["DataLoss"] == 6 and codes["Moved"] == 4 and codes["Fenced"] == 7


def test_settings_come_from_file_environment_and_options_in_this_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = filled(tmp_path / "log")
    file = tmp_path / "settings.yaml"
    file.write_text("wal: {frame_bytes_max: 65536}\n")
    large = b"x" * 70_000 + b"\n"

    by_file = shell.run("produce", "shop/orders", "--settings", str(file), stdin=large)
    monkeypatch.setenv("FOREBAY_WAL__FRAME_BYTES_MAX", "131072")
    by_environment = shell.run("produce", "shop/orders", "--settings", str(file), stdin=large)
    by_option = shell.run("produce", "shop/orders", "--set", "wal.frame_bytes_max=65536", stdin=large)

    assert (by_file.code, by_environment.code, by_option.code) == (2, 0, 2)
