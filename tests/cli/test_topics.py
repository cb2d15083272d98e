"""`forebay topic`: what it makes, shows and removes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import forebay
from forebay.cli import terminal
from forebay.format.metadata.keys import topic_key
from forebay.format.metadata.value import encode_value
from forebay.metadata import MetadataStore, Put
from forebay.storage import Storage
from forebay.testing.inside import inside
from forebay.topics import TopicSpec
from tests.cli.rig import Shell, filled, one_line, snapshot


def test_a_topic_is_created_listed_shown_and_deleted(tmp_path: Path) -> None:
    shell = Shell(tmp_path / "log")

    created = shell.ok("topic", "create", "shop/orders", "--partitions", "3", "--durability", "fsync")
    listed = shell.ok("topic", "list", "--json").items
    shown = shell.ok("topic", "show", "shop/orders", "--json").items[0]
    shell.ok("topic", "delete", "shop/orders", "--yes")

    assert "shop/orders" in created.out
    assert [(topic["name"], topic["partitions"], topic["durability"]) for topic in listed] == [
        ("shop/orders", 3, "fsync")
    ]
    assert [shard["partition"] for shard in shown["shards"]] == [0, 1, 2]
    assert shell.ok("topic", "list").out == ""


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_the_first_of_many_topics_are_shown_before_the_last_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    shell = Shell(tmp_path / "log")
    with forebay.open(str(shell.directory)) as log:
        spec = log.create_topic("shop/orders", durability="fsync").spec
        _define(inside(log).metadata, [replace(spec, topic=f"t{number:04}") for number in range(3000)])
    shown, at_look = 0, []
    write, topics = terminal.write, Storage.topics

    def counted(content: bytes) -> None:
        nonlocal shown
        shown += content.count(b"\n")
        write(content)

    def looked(log: Storage, *arguments: Any, **options: Any) -> list[TopicSpec]:
        at_look.append(shown)
        return topics(log, *arguments, **options)

    monkeypatch.setattr(terminal, "write", counted)
    monkeypatch.setattr(Storage, "topics", looked)

    lines = shell.ok("topic", "list", *options).out.splitlines()

    heads = 0 if options else 1
    assert at_look == [0, 1000 + heads, 2000 + heads, 3000 + heads, 3001 + heads]
    assert len(lines) == 3001 + heads
    assert len({line.index("fsync") for line in lines[heads:] if not options}) <= 1


def _define(metadata: MetadataStore, specs: Sequence[TopicSpec]) -> None:
    """Put definitions as they are: quicker than to create the topics."""
    puts = [Put(topic_key(spec.namespace, spec.topic), encode_value(spec)) for spec in specs]
    for first in range(0, len(puts), 100):
        metadata.transaction([], puts[first : first + 100])


def test_show_gives_offsets_files_and_the_recovery_to_come(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log", rotations=2, records=20)

    shown = shell.ok("topic", "show", "shop/orders", "--json").items[0]
    text = shell.ok("topic", "show", "shop/orders").out

    shard = shown["shards"][0]
    assert shard["offsets"]["next"] == 60
    assert "next offset 60" in shard["recovery"] and "clean stop" in shard["recovery"]
    assert shard["failure"] is None
    assert shard["files"] >= 5 and shard["bytes"] > 0
    assert shard["recovery"] in text and "next 60" in text


def test_show_and_list_change_nothing(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log")
    before = snapshot(shell.directory)

    shell.ok("topic", "show", "shop/orders")
    shell.ok("topic", "list")

    assert snapshot(shell.directory) == before


def test_show_works_beside_the_owner(tmp_path: Path) -> None:
    shell = Shell(tmp_path / "log")
    with forebay.open(str(shell.directory)) as log:
        log.create_topic("shop/orders").append(b"one")

        shown = shell.ok("topic", "show", "shop/orders", "--json").items[0]
        text = shell.ok("topic", "show", "shop/orders").out

    assert shown["owned"] is True
    assert shown["shards"][0]["offsets"]["next"] == 1
    assert shown["shards"][0]["recovery"] is None
    assert "another process has the directory open" in text


def test_a_topic_in_its_owners_memory_can_be_shown_but_not_read(tmp_path: Path) -> None:
    shell = Shell(tmp_path / "log")
    shell.ok("topic", "create", "fleeting", "--durability", "ephemeral")

    shown = shell.ok("topic", "show", "fleeting").out
    read = shell.run("consume", "fleeting")

    assert "default/fleeting" in shown and "memory of its owner" in shown
    assert read.code == 2 and one_line(read.err)


def test_show_says_why_a_partition_would_be_refused(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log")
    newest = shell.segments()[-1]
    newest.write_bytes(b"\xff" * 200)

    shown = shell.ok("topic", "show", "shop/orders", "--json").items[0]

    assert "header" in shown["shards"][0]["failure"]


def test_a_second_creation_is_a_conflict_unless_that_is_fine(tmp_path: Path) -> None:
    shell = Shell(tmp_path / "log")
    shell.ok("topic", "create", "orders", "--partitions", "2")

    again = shell.run("topic", "create", "orders")
    fine = shell.ok("topic", "create", "orders", "--exist-ok")

    assert again.code == 3 and one_line(again.err) and "--exist-ok" in again.err
    assert "2 partitions" in fine.out


def test_deleting_without_a_terminal_needs_a_word(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log")
    records = shell.ok("consume", "shop/orders").out

    refused = shell.run("topic", "delete", "shop/orders")

    assert refused.code == 2 and one_line(refused.err) and "--yes" in refused.err
    assert shell.ok("consume", "shop/orders").out == records
