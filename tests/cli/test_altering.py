"""`forebay topic create` with limits, `topic alter` and `topic copy`."""

from __future__ import annotations

from pathlib import Path

import pytest

import forebay
from tests.cli.rig import Shell, one_line

pytestmark = pytest.mark.slow


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    """A topic with a record in each of two partitions."""
    shell = Shell(tmp_path / "log")
    shell.ok("topic", "create", "t", "--engine", "rocksdb", "--partitions", "2")
    shell.ok(
        "produce", "t", "--format", "json", stdin=b"".join(b'{"value":"%d","key":"%d"}\n' % (n, n) for n in range(9))
    )
    return shell


def spec(shell: Shell, name: str = "t") -> dict[str, object]:
    return next(item for item in shell.ok("topic", "list", "--json").items if item["name"] == f"default/{name}")


def test_limits_are_given_as_people_write_them(shell: Shell) -> None:
    words = "--cap-records 1000 --cap-bytes 10GiB --ttl 7d --on-full reject-new --cleanup compact --compact-lag 12h"
    shell.ok("topic", "create", "limited", "--engine", "rocksdb", *words.split())

    found = spec(shell, "limited")
    assert (found["cap_records"], found["cap_bytes"], found["ttl_ms"]) == (1000, 10 * 2**30, 7 * 86_400_000)
    assert (found["on_full"], found["cleanup"], found["compact_lag_ms"]) == ("reject_new", "compact", 43_200_000)
    shown = shell.ok("topic", "show", "limited").out
    assert "keeps 1000 offsets, 10.0 GiB, for 604800 s (reject_new), compacted after 43200 s" in shown


@pytest.mark.parametrize(
    ("option", "text", "field", "value"),
    [
        ("--cap-bytes", "500MB", "cap_bytes", 500_000_000),
        ("--cap-bytes", "4096", "cap_bytes", 4096),
        ("--ttl", "1500ms", "ttl_ms", 1500),
        ("--ttl", "2w", "ttl_ms", 14 * 86_400_000),
        ("--ttl", "none", "ttl_ms", None),
        ("--cap-records", "12", "cap_records", 12),
    ],
)
def test_alter_changes_one_thing_and_leaves_the_rest(
    shell: Shell, option: str, text: str, field: str, value: object
) -> None:
    before = spec(shell)
    altered = shell.ok("topic", "alter", "t", option, text, "--allow-loss", "--json").items[0]
    assert altered == spec(shell) == {**before, field: value}


def test_added_partitions_come_with_a_warning(shell: Shell) -> None:
    altered = shell.ok("topic", "alter", "t", "--partitions", "5")

    assert "5 partitions, keeps everything" in altered.out and "keys hash again" in altered.err
    assert (spec(shell)["generation"], spec(shell)["earlier"]) == (2, [2])
    assert shell.ok("records", "get", "t", "--key", "3").out == "3\n"
    assert "hash again" not in shell.ok("topic", "alter", "t", "--ttl", "9w").err


def test_what_would_lose_records_needs_a_word(shell: Shell) -> None:
    refused = shell.run("topic", "alter", "t", "--cap-records", "1")
    assert refused.code == 3 and one_line(refused.err) and "--allow-loss" in refused.err
    assert spec(shell)["cap_records"] is None
    shell.ok("topic", "alter", "t", "--cap-records", "1", "--allow-loss")
    assert spec(shell)["cap_records"] == 1


@pytest.mark.parametrize(
    ("words", "reported"),
    [
        (["create", "x", "--engine", "granite"], "segment, memory, rocksdb"),
        (["create", "x", "--cap-bytes", "ten"], "--cap-bytes is 'ten'; give a size"),
        (["create", "x", "--cap-bytes", "5 elephants"], "give a size"),
        (["create", "x", "--ttl", "7"], "--ttl is '7'; give a time"),
        (["create", "x", "--ttl", "-7d"], "give a time"),
        (["create", "x", "--cap-records", "0"], "cap_records is 0"),
        (["create", "x", "--cap-records", "1e9"], "give a number"),
        (["create", "x", "--on-full", "reject-new"], "needs a cap"),
        (["create", "x", "--on-full", "burst", "--cap-records", "3"], "discard_old, reject_new"),
        (["create", "x", "--cleanup", "sweep"], "delete, compact"),
        (["create", "x", "--partitions", "0"], "1 to 1024"),
        (["create", "x", "--partitions", "1025"], "1 to 1024"),
        (["create", "x", "--engine", "rocksdb", "--durability", "memory"], 'use durability "disk"'),
        (["alter", "t"], "nothing is to be changed"),
        (["alter", "t", "--partitions", "1"], "can only be added"),
        (["alter", "t", "--partitions", "4096"], "1 to 1024"),
        (["alter", "none", "--ttl", "1d"], "no topic default/none"),
        (["alter", "t", "--on-full", "reject-new"], "needs a cap"),
        (["copy", "t", "t"], "into itself"),
        (["copy", "none", "x"], "no topic default/none"),
        (["copy", "t", "bad name"], "not a topic name"),
        (["copy", "t", "x", "--engine", "memory"], "copy_topic()"),
        (["copy", "t", "x", "--engine", "granite"], "segment, memory, rocksdb"),
        (["copy", "t", "x", "--partitions", "5000"], "1 to 1024"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(shell: Shell, words: list[str], reported: str) -> None:
    before = shell.ok("topic", "list", "--json").out
    refused = shell.run("topic", *words)
    assert refused.code == 2 and one_line(refused.err) and reported in refused.err, refused.err
    assert shell.ok("topic", "list", "--json").out == before


def test_a_copy_goes_to_another_engine_and_on_from_where_it_was(shell: Shell) -> None:
    first = shell.ok("topic", "copy", "t", "files", "--engine", "segment", "--durability", "fsync", "--json").items[0]
    shell.ok("produce", "t", stdin=b"late\n")
    second = shell.ok("topic", "copy", "t", "files").out

    assert (first["copied"], first["records"], first["gaps"]) == (9, {"source": 9, "target": 9}, [])
    assert (spec(shell, "files")["engine"], spec(shell, "files")["durability"]) == ("segment", "fsync")
    assert second == "default/t to default/files: 1 copied; 10 records there, 10 here\n"
    assert sorted(shell.ok("consume", "files").out.split()) == sorted(shell.ok("consume", "t").out.split())
    refused = shell.run("topic", "copy", "t", "files", "--engine", "rocksdb")
    assert refused.code == 2 and "leave --engine out" in refused.err


def test_a_copy_whose_counts_differ_says_so(shell: Shell) -> None:
    shell.ok("topic", "copy", "t", "files", "--engine", "segment")
    shell.ok("produce", "files", stdin=b"other\n")

    differs = shell.run("topic", "copy", "t", "files")

    assert differs.code == 1 and one_line(differs.err) and "9 records" in differs.err and "10" in differs.err


def test_a_directory_that_another_process_has_is_refused(shell: Shell) -> None:
    with forebay.open(str(shell.directory)):
        for words in (
            ["topic", "alter", "t", "--ttl", "1d"],
            ["topic", "copy", "t", "x"],
            ["records", "get", "t", "--key", "1"],
        ):
            refused = shell.run(*words)
            assert refused.code == 4 and one_line(refused.err), words
