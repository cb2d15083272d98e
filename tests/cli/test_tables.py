"""Tables: drawn to fit a terminal, plain columns to a pipe."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

import forebay
from forebay.cli import terminal
from forebay.cli.terminal import PagedTable, draws, say_table
from tests.cli.rig import COMMAND, Shell

HEADS = ("topic", "partitions", "size")
ROWS = [("shop/orders", 12, "1.5 KiB"), ("shop/[bold]a-rather-long-name-of-a-topic", 3, "12 B")]


@pytest.fixture
def on_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "draws", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.delenv("NO_COLOR", raising=False)


def _plain(shown: bytes) -> list[str]:
    return re.sub(r"\x1b\[[0-9;]*m", "", shown.decode()).splitlines()


def test_a_pipe_gets_plain_columns(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    say_table(HEADS, ROWS)

    assert capsysbinary.readouterr().out.decode().splitlines() == [
        "topic                                     partitions  size",
        "shop/orders                               12          1.5 KiB",
        "shop/[bold]a-rather-long-name-of-a-topic  3           12 B",
    ]


@pytest.mark.usefixtures("on_terminal")
def test_a_terminal_gets_a_table_that_fits_and_lacks_nothing(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    say_table(HEADS, ROWS)

    shown = capsysbinary.readouterr().out
    lines = _plain(shown)
    assert b"\x1b[1m" in shown and all(len(line) <= 40 for line in lines)
    assert lines[1].split() == ["shop/orders", "12", "1.5", "KiB"] and lines[1].endswith("1.5 KiB")
    assert "".join(line.split(" ")[0] for line in lines[2:]) == "shop/[bold]a-rather-long-name-of-a-topic"
    assert lines[2].split()[-2:] == ["12", "B"] or lines[2].split()[-1] == "B"


@pytest.mark.usefixtures("on_terminal")
def test_pages_of_a_table_have_one_head_and_the_same_columns(capsysbinary: pytest.CaptureFixture[bytes]) -> None:
    table = PagedTable("name", "lag")
    table.say([("shop/orders", 100)])
    table.say([("a", 5)])

    assert _plain(capsysbinary.readouterr().out) == ["name         lag", "shop/orders  100", "a              5"]


def test_a_terminal_that_cannot_draw_gets_plain_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "dumb")
    assert not draws()


@pytest.mark.slow
def test_one_command_draws_on_a_terminal_and_writes_columns_to_a_pipe(tmp_path: Path) -> None:
    with forebay.open(str(tmp_path / "log"), {"wal": {"free_bytes_min": 0}}) as log:
        log.create_topic("shop/orders")
    piped = Shell(tmp_path / "log").ok("topic", "list").out
    ours, theirs = pty.openpty()

    words = [*COMMAND, "topic", "list", "--data", str(tmp_path / "log")]
    with os.fdopen(ours, "rb", buffering=0) as screen:
        subprocess.run(words, stdout=theirs, check=True, env={**os.environ, "TERM": "xterm", "COLUMNS": "120"})
        os.close(theirs)
        shown = screen.read(65536)

    assert "\x1b" not in piped and b"\x1b[1m" in shown
    assert [line.split() for line in _plain(shown)] == [line.split() for line in piped.splitlines()]


def _on_a_terminal(*words: str) -> bytes:
    """What a command shows on a screen of 120 columns."""
    ours, theirs = pty.openpty()
    with os.fdopen(ours, "rb", buffering=0) as screen:
        ran = subprocess.run(
            [*COMMAND, *words], stdout=theirs, check=False, env={**os.environ, "TERM": "xterm", "COLUMNS": "120"}
        )
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # the end of what a terminal has
            while page := screen.read(65536):
                shown += page
    assert ran.returncode in (0, 1), shown
    return shown


@pytest.mark.slow
def test_records_and_the_doctors_answers_are_drawn_on_a_terminal_and_plain_in_a_pipe(tmp_path: Path) -> None:
    data = str(tmp_path / "log")
    with forebay.open(data, {"wal": {"free_bytes_min": 0}}) as log:
        topic = log.create_topic("shop/orders")
        topic.append_many(
            [b"value-%d" % number for number in range(120)],
            keys=[b"\x1b[31mred" if number == 60 else b"key" for number in range(120)],
            tags=["\x1b[32mg" if number == 61 else None for number in range(120)],
        )
        topic.delete_by_offset(70, 80)
    shell = Shell(tmp_path / "log")

    shown = _on_a_terminal("consume", "shop/orders", "--format", "table", "--data", data)
    piped = shell.ok("consume", "shop/orders", "--format", "table").out
    doctor = _on_a_terminal("doctor", "--data", data)

    rows = _plain(shown)
    assert b"\x1b[1m" in shown and b"\x1b[31m" not in shown and b"\x1b[32m" not in shown
    assert rows[0].split() == ["partition", "offset", "time", "key", "tag", "value"]
    assert [row.split()[1] for row in rows[1:]] == [str(n) for n in range(120) if not 70 <= n < 80]
    assert {row.index("value-") for row in rows[1:]} == {rows[0].index("value")}
    assert "\x1b[1m" not in piped and len(piped.splitlines()) == 111
    assert piped.splitlines()[0] == "partition      offset  time                      key               tag       value"
    answers = _plain(doctor)
    assert b"\x1b[1m" in doctor and answers[0].split() == ["verdict", "check", "answer"]
    assert all(len(line) <= 120 for line in answers)
    assert not shell.run("doctor").out.startswith("verdict")


@pytest.mark.slow
def test_help_and_tables_to_a_pipe_load_no_library_that_draws(tmp_path: Path) -> None:
    code = f"""
import sys
from forebay.cli import main
main(["topic", "create", "shop/orders", "--data", {str(tmp_path / "log")!r}])
main(["topic", "list", "--data", {str(tmp_path / "log")!r}])
main(["--help"])
print(sorted(name for name in sys.modules if name.partition(".")[0] in ("rich", "pyspark")))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert ended.stdout.splitlines()[-1] == "[]"
