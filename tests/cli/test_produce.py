"""`forebay produce`: everything read is appended, counted and never lost silently."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import forebay
from tests.cli.rig import Shell, one_line

pytestmark = pytest.mark.slow


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    shell = Shell(tmp_path / "log")
    shell.ok("topic", "create", "shop/orders")
    return shell


def _records(shell: Shell) -> list[dict[str, object]]:
    return [
        {name: value for name, value in item.items() if name not in ("topic", "timestamp")}
        for item in shell.ok("consume", "shop/orders", "--format", "json").items
    ]


def test_each_line_is_a_value(shell: Shell) -> None:
    produced = shell.ok("produce", "shop/orders", stdin=b"paid\n\nshipped")

    assert [record["value"] for record in _records(shell)] == ["paid", "", "shipped"]
    assert "3 records" in produced.err and "offsets [0, 3)" in produced.err


def test_a_separator_parts_key_and_value_and_a_tag_is_for_all(shell: Shell) -> None:
    shell.ok("produce", "shop/orders", "--key-separator", ":", "--tag", "eu", stdin=b"42:paid:late\n43:\n")

    assert _records(shell) == [
        {"partition": 0, "offset": 0, "key": "42", "value": "paid:late", "tag": "eu"},
        {"partition": 0, "offset": 1, "key": "43", "value": "", "tag": "eu"},
    ]


def test_one_key_for_all(shell: Shell) -> None:
    shell.ok("produce", "shop/orders", "--key", "k", stdin=b"a\nb\n")

    assert [record["key"] for record in _records(shell)] == ["k", "k"]


def test_json_lines_carry_all_that_a_record_has(shell: Shell) -> None:
    line = {
        "value_b64": "/w==",
        "key": "k",
        "tag": "t",
        "timestamp": 7,
        "partition": 0,
        "headers": [["a", "x"], ["a", None], ["b", {"b64": "/w=="}]],
    }

    shell.ok("produce", "shop/orders", "--format", "json", stdin=json.dumps(line).encode() + b'\n\n{"value": null}\n')

    found = shell.ok("consume", "shop/orders", "--format", "json").items
    assert found[0] == {"topic": "shop/orders", "offset": 0, **line}
    assert found[1]["value"] is None


def test_what_consume_writes_can_be_produced_again(shell: Shell) -> None:
    shell.ok("topic", "create", "shop/copy")
    with forebay.open(str(shell.directory)) as log:
        orders = log.topic("shop/orders")
        orders.append(b"\xff\x00", key=b"\xfe", tag="é", headers=[("h", b"\xff"), ("h", None)], timestamp=-5)
        orders.append(None, headers={"a": b"", "b": "ü".encode()})

    written = shell.ok("consume", "shop/orders", "--format", "json")
    shell.ok("produce", "shop/copy", "--format", "json", stdin=written.raw)

    copied = shell.ok("consume", "shop/copy", "--format", "json").items
    assert [{**item, "topic": "shop/orders"} for item in copied] == written.items


def test_each_file_is_one_record(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"1\n1")
    (tmp_path / "two").write_bytes(b"")

    shell.ok("produce", "shop/orders", "--format", "file", str(tmp_path / "one"), str(tmp_path / "two"))

    assert [record["value"] for record in _records(shell)] == ["1\n1", ""]


def test_files_of_lines_are_read_one_after_the_other(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"1\n2\n")

    shell.ok("produce", "shop/orders", str(tmp_path / "one"), "-", stdin=b"3\n")

    assert [record["value"] for record in _records(shell)] == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("words", "stdin", "said"),
    [
        (["--key-separator", ":"], b"a:1\nb:2\nbad\nc:3\n", "stdin line 3 has no key separator"),
        (["--format", "json"], b'{"value":"1"}\n{"value":"2"}\n{nonsense\n', "stdin line 3 is not JSON"),
        (["--format", "json"], b'{"value":"1"}\n{"value":"2"}\n[]\n', "line 3 is not a JSON object"),
        (["--format", "json"], b'{"value":"1"}\n{"value":"2"}\n{"valeu":"3"}\n', "unknown field 'valeu'"),
        (["--format", "json"], b'{"value":"1"}\n{"value":"2"}\n{"key":"3"}\n', "neither"),
        (["--format", "json"], b'{"value":"1"}\n{"value":"2"}\n{"value":"3","value_b64":"MQ=="}\n', "both"),
        (["--format", "json"], b'{"value":"1"}\n{"value":"2"}\n{"value_b64":"%"}\n', "not base64"),
        (["--format", "json"], b'{"value":"1"}\n{"value":"2"}\n{"value":7}\n', "not a text"),
        (["--format", "json"], b'{"value":"1"}\n{"value":"2"}\n{"value":"","headers":[1]}\n', "headers"),
        (["--format", "json"], b'{"value":"1"}\n{"value":"2"}\n{"value":"","headers":[["a"]]}\n', "headers"),
        (["--format", "json"], b'{"value":"1"}\n{"value":"2"}\n{"value":"","timestamp":"now"}\n', "whole number"),
        (["--format", "json"], b'{"value":"1"}\n{"value":"2"}\n{"value":"","timestamp":1e99}\n', "whole number"),
        (["--format", "json"], b'{"value":"1"}\n{"value":"2"}\n{"value":"","partition":9}\n', "line 3: partition is 9"),
        (["--format", "json"], b'{"value":"1"}\n{"value":"2"}\n{"value":"","tag":""}\n', "line 3: tag has 0 bytes"),
        (["--format", "json"], b'{"value":"1"}\n{"value":"2"}\n{"value":"\\ud800"}\n', "line 3"),
        (["--format", "json"], b'{"value":"1"}\n{"value":"2"}\n{"gap":{}}\n', "gap"),
        (["--set", "wal.frame_bytes_max=65536"], b"1\n2\n" + b"x" * 70_000 + b"\n", "line 3: a record of"),
    ],
)
def test_a_bad_line_is_named_and_what_came_before_is_kept(
    shell: Shell, words: list[str], stdin: bytes, said: str
) -> None:
    produced = shell.run("produce", "shop/orders", *words, stdin=stdin)

    assert produced.code == 2
    summary, complaint = produced.err.splitlines()
    assert "2 records" in summary and said in complaint
    assert [record["value"] for record in _records(shell)] == ["1", "2"]


def test_an_unreadable_file_is_named_and_what_came_before_is_kept(shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "one").write_bytes(b"1\n")

    produced = shell.run("produce", "shop/orders", str(tmp_path / "one"), str(tmp_path / "absent"))

    assert produced.code == 2 and "absent cannot be read" in produced.err
    assert [record["value"] for record in _records(shell)] == ["1"]


def test_an_idempotent_producer_goes_on_with_its_sequence(shell: Shell) -> None:
    shell.ok("produce", "shop/orders", "--producer", "7", "--batch", "2", stdin=b"1\n2\n3\n")
    shell.ok("produce", "shop/orders", "--producer", "7", stdin=b"4\n")

    assert [record["value"] for record in _records(shell)] == ["1", "2", "3", "4"]
    with forebay.open(str(shell.directory)) as log:
        assert log.topic("shop/orders").last_sequence(7) == 2


def test_an_idempotent_producer_keeps_one_sequence_per_partition(tmp_path: Path) -> None:
    shell = Shell(tmp_path / "log")
    shell.ok("topic", "create", "shop/orders", "--partitions", "3")
    lines = b"".join(b"%d:%d\n" % (number, number) for number in range(50))

    for _ in range(2):
        shell.ok("produce", "shop/orders", "--producer", "7", "--key-separator", ":", stdin=lines)

    values = [int(line) for line in shell.ok("consume", "shop/orders").out.split()]
    assert sorted(values) == sorted([*range(50), *range(50)])


def test_the_summary_as_json_counts_exactly(shell: Shell) -> None:
    summary = shell.ok("produce", "shop/orders", "--json", stdin=b"aa\nbb\n").items[0]

    assert summary["records"] == 2 and summary["bytes"] == 4
    assert summary["offsets"] == {"0": [0, 2]}


def test_a_rate_is_kept(shell: Shell) -> None:
    summary = shell.ok("produce", "shop/orders", "--rate", "100", "--json", stdin=b"x\n" * 31).items[0]

    assert summary["records"] == 31
    assert summary["seconds"] >= 0.28


@pytest.mark.parametrize(
    "words",
    [
        ["--rate", "0"],
        ["--rate", "nan"],
        ["--batch", "0"],
        ["--producer", "0"],
        ["--key", "a", "--key-separator", ":"],
        ["--key-separator", ""],
        ["--key-separator", ":", "--format", "json"],
        ["--format", "xml"],
        ["--partition", "1"],
        ["--partition", "-1"],
    ],
)
def test_a_wrong_option_is_one_line_and_appends_nothing(shell: Shell, words: list[str]) -> None:
    produced = shell.run("produce", "shop/orders", *words, stdin=b"1\n")

    assert produced.code == 2
    assert one_line(produced.err.splitlines(keepends=True)[-1])
    assert _records(shell) == []
