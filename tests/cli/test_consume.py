"""`forebay consume`: from where to where, in which form, and what is said about gaps."""

from __future__ import annotations

from pathlib import Path

import pytest

import forebay
from tests.cli.rig import Shell, filled, flip, one_line, snapshot

pytestmark = pytest.mark.slow


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    directory = tmp_path / "log"
    with forebay.open(str(directory)) as log:
        orders = log.create_topic("shop/orders")
        for number in range(10):
            orders.append(b"%d" % number, timestamp=1_000_000 + number * 1000)
    return Shell(directory)


def _values(shell: Shell, *words: str) -> list[int]:
    return [int(line) for line in shell.ok("consume", "shop/orders", *words).out.split()]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], range(10)),
        (["--from", "earliest"], range(10)),
        (["--from", "latest"], range(0)),
        (["--from", "7"], range(7, 10)),
        (["--from", "10"], range(0)),
        (["--from", "1005000ms"], range(5, 10)),
        (["--from", "1970-01-01T00:16:45"], range(5, 10)),
        (["--from", "1970-01-01T01:16:45+01:00"], range(5, 10)),
        (["--from", "2999-01-01"], range(0)),
        (["--until", "3"], range(3)),
        (["--until", "0"], range(0)),
        (["--until", "end"], range(10)),
        (["--until", "1003000ms"], range(3)),
        (["--until", "1970-01-01T00:16:43Z"], range(3)),
        (["--from", "2", "--until", "5"], range(2, 5)),
        (["--from", "5", "--until", "2"], range(0)),
        (["--count", "4"], range(4)),
        (["--count", "0"], range(0)),
        (["--partition", "0", "--from", "8"], range(8, 10)),
        (["--follow", "--from", "earliest", "--timeout", "0"], range(10)),
        (["--follow", "--timeout", "0"], range(0)),
        (["--follow", "--from", "4", "--until", "6"], range(4, 6)),
        (["--follow", "--from", "4", "--until", "1006000ms"], range(4, 6)),
        (["--follow", "--from", "4", "--until", "end"], range(4, 10)),
        (["--follow", "--from", "6", "--until", "4"], range(0)),
        (["--follow", "--from", "earliest", "--count", "3"], range(3)),
    ],
)
def test_records_between_two_places(shell: Shell, words: list[str], expected: range) -> None:
    assert _values(shell, *words) == list(expected)


def test_reading_changes_nothing(shell: Shell) -> None:
    before = snapshot(shell.directory)

    _values(shell)

    assert snapshot(shell.directory) == before


def test_a_topic_that_was_never_written_reads_as_empty(shell: Shell) -> None:
    shell.ok("topic", "create", "empty", "--partitions", "2")

    assert shell.ok("consume", "empty").out == ""
    assert shell.ok("consume", "empty", "--follow", "--timeout", "0").out == ""


def test_reading_beside_the_owner(shell: Shell) -> None:
    with forebay.open(str(shell.directory)) as log:
        log.topic("shop/orders").append(b"10")

        assert _values(shell) == list(range(11))


def test_the_forms_of_output(tmp_path: Path) -> None:
    shell = Shell(tmp_path / "log")
    with forebay.open(str(shell.directory)) as log:
        topic = log.create_topic("t")
        topic.append("é\x1b[31m".encode(), key=b"k", tag="eu", timestamp=0)
        topic.append(None, timestamp=0)
        topic.append(b"\xff" * 100, timestamp=2**60)

    value = shell.ok("consume", "t").raw
    raw = shell.ok("consume", "t", "--format", "raw").raw
    table = shell.ok("consume", "t", "--format", "table").out.splitlines()
    items = shell.ok("consume", "t", "--format", "json").items

    assert value == "é\x1b[31m\n\n".encode() + b"\xff" * 100 + b"\n"
    assert raw == "é\x1b[31m".encode() + b"\xff" * 100
    assert len(table) == 4 and "1970-01-01T00:00:00.000Z" in table[1] and "é·[31m" in table[1]
    assert table[3].endswith("…")
    assert items[0] == {
        "topic": "default/t",
        "partition": 0,
        "offset": 0,
        "timestamp": 0,
        "key": "k",
        "value": "é\x1b[31m",
        "tag": "eu",
    }


def test_partitions_are_read_one_after_the_other(tmp_path: Path) -> None:
    shell = Shell(tmp_path / "log")
    shell.ok("topic", "create", "shop/orders", "--partitions", "3")
    for partition in range(3):
        shell.ok("produce", "shop/orders", "--partition", str(partition), stdin=b"%d\n" % partition)

    assert _values(shell) == [0, 1, 2]
    assert _values(shell, "--partition", "1") == [1]
    assert sorted(_values(shell, "--follow", "--from", "earliest", "--timeout", "0")) == [0, 1, 2]


@pytest.mark.parametrize("words", [["--from", "0"], ["--until", "5"], ["--follow", "--from", "1"]])
def test_an_offset_needs_its_partition(tmp_path: Path, words: list[str]) -> None:
    shell = Shell(tmp_path / "log")
    shell.ok("topic", "create", "shop/orders", "--partitions", "2")

    refused = shell.run("consume", "shop/orders", *words)

    assert refused.code == 2 and one_line(refused.err) and "--partition" in refused.err


def test_a_damaged_range_is_reported_in_its_place(tmp_path: Path) -> None:
    shell = filled(tmp_path / "log", rotations=2, records=20)
    flip(shell.segments()[1], -20)

    read = shell.ok("consume", "shop/orders")
    items = shell.ok("consume", "shop/orders", "--format", "json").items
    strict = shell.run("consume", "shop/orders", "--fail-on-loss")

    assert "gap shop/orders[0] [20, 40) damaged" in read.err
    assert len(read.out.splitlines()) == 40
    assert items[20]["gap"] == {"partition": 0, "start": 20, "stop": 40, "reason": "damaged"}
    assert [item["offset"] for item in items if "offset" in item] == [*range(20), *range(40, 60)]
    assert strict.code == 6 and one_line(strict.err)
    assert len(strict.out.splitlines()) == 20


@pytest.mark.parametrize(
    "words",
    [
        ["--from", "-1"],
        ["--from", "yesterday"],
        ["--from", "99999999999999999999"],
        ["--until", "latest"],
        ["--count", "-1"],
        ["--timeout", "3"],
        ["--follow", "--timeout", "-1"],
        ["--partition", "1"],
        ["--format", "xml"],
        ["--from", f"{2**62}0ms"],
    ],
)
def test_a_wrong_place_is_one_line(shell: Shell, words: list[str]) -> None:
    refused = shell.run("consume", "shop/orders", *words)

    assert refused.code == 2 and one_line(refused.err)
    assert refused.out == ""
