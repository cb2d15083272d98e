"""`forebay group`: list, show, reset, delete."""

from __future__ import annotations

from pathlib import Path

import pytest

import forebay
from tests.cli.rig import Shell, one_line

pytestmark = pytest.mark.slow


@pytest.fixture(params=["segment", "rocksdb"])
def shell(request: pytest.FixtureRequest, tmp_path: Path) -> Shell:
    """Group `billing` has done 4 and 10 of ten records in two partitions."""
    with forebay.open(str(tmp_path / "log")) as log:
        topic = log.create_topic("shop/orders", engine=request.param, partitions=2)
        for partition in range(2):
            topic.append_many([b"v"] * 10, timestamps=list(range(10)), partition=partition)
        log.group("billing").commit("shop/orders", 4, note="batch 7")
        log.group("billing").commit("shop/orders", 10, 1)
    return Shell(tmp_path / "log")


def standing(shell: Shell) -> list[tuple[int, int, int]]:
    items = shell.ok("group", "show", "billing", "--json").items
    return [(item["partition"], item["offset"], item["lag"]) for item in items]


def test_groups_are_listed_and_shown_with_their_lag(shell: Shell) -> None:
    assert shell.ok("group", "list").out == "billing\n"
    assert shell.ok("group", "list", "--json").items == [{"group": "billing"}]
    assert standing(shell) == [(0, 4, 6), (1, 10, 0)]
    assert "batch 7" in shell.ok("group", "show", "billing").out
    unknown = shell.ok("group", "show", "nobody")
    assert unknown.out == "" and 'nobody has no place in any topic: see "forebay group list"' in unknown.err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--to", "earliest"], [(0, 0, 10), (1, 0, 10)]),
        (["--to", "latest"], [(0, 10, 0), (1, 10, 0)]),
        (["--to", "7ms"], [(0, 7, 3), (1, 7, 3)]),
        (["--to", "2", "--partition", "1"], [(0, 4, 6), (1, 2, 8)]),
    ],
)
def test_a_group_is_set_to_every_kind_of_place(
    shell: Shell, words: list[str], expected: list[tuple[int, int, int]]
) -> None:
    said = shell.ok("group", "reset", "billing", "shop/orders", *words)
    assert "billing stands at" in said.out
    assert standing(shell) == expected


def test_a_deleted_group_has_no_place(shell: Shell) -> None:
    refused = shell.run("group", "delete", "billing")
    assert refused.code == 2 and one_line(refused.err) and "--yes" in refused.err
    assert "2 places forgotten" in shell.ok("group", "delete", "billing", "--yes").out
    assert shell.ok("group", "list").out == ""
    assert "0 places" in shell.ok("group", "delete", "billing", "--yes").out


@pytest.mark.parametrize(
    ("words", "code", "reported"),
    [
        (["show", "a b"], 2, "not a reader's name"),
        (["show", ".."], 2, "not a reader's name"),
        (["delete", "ä", "--yes"], 2, "not a reader's name"),
        (["reset", "a/b", "shop/orders", "--to", "earliest"], 2, "not a reader's name"),
        (["reset", "billing", "shop/none", "--to", "earliest"], 2, "no topic shop/none"),
        (["reset", "billing", "shop/orders", "--to", "soon"], 2, "--to is 'soon'"),
        (["reset", "billing", "shop/orders", "--to", "11"], 3, "ends at 10"),
        (["reset", "billing", "shop/orders", "--to", "1", "--partition", "4"], 2, "partition is 4"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_and_no_place_moves(
    shell: Shell, words: list[str], code: int, reported: str
) -> None:
    refused = shell.run("group", *words)
    assert refused.code == code and one_line(refused.err) and reported in refused.err, refused.err
    assert standing(shell) == [(0, 4, 6), (1, 10, 0)]


def test_groups_are_listed_beside_the_owner(shell: Shell) -> None:
    with forebay.open(str(shell.directory)):
        assert shell.ok("group", "list").out == "billing\n"
        assert shell.run("group", "delete", "billing", "--yes").code == 4


def test_a_group_of_topics_on_every_engine_is_shown_with_what_can_be_known(tmp_path: Path) -> None:
    shell = Shell(tmp_path / "log")
    with forebay.open(tmp_path / "log") as log:
        for engine in ("memory", "rocksdb", "segment"):
            log.create_topic(f"shop/{engine}", engine=engine).append_many([b"v"] * 3)
            log.group("billing").commit(f"shop/{engine}", 1)
        beside = {item["topic"]: item["lag"] for item in shell.ok("group", "show", "billing", "--json").items}

    alone = {item["topic"]: item["lag"] for item in shell.ok("group", "show", "billing", "--json").items}

    assert beside == {"shop/memory": None, "shop/rocksdb": None, "shop/segment": 2}
    assert alone["shop/rocksdb"] == alone["shop/segment"] == 2
