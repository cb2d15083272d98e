"""Standard streams as callers leave them: closed, full, or with one line that does not end; and Ctrl-C at the start."""

from __future__ import annotations

import shlex
import subprocess
import sys
from io import BytesIO
from pathlib import Path

import pytest

from forebay.cli.produce import command as produce
from tests.cli.rig import COMMAND, filled

pytestmark = pytest.mark.slow

always_full = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a device that is always full")

INTERRUPTED_AT_THE_START = """
import sys

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "typer":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting())
from forebay.cli import main
sys.exit(main(["topic", "list"]))
"""
OPENED_FIRST = """
import os, sys
from forebay.cli import main
main(["--version"])
print(os.open(os.devnull, os.O_RDONLY), file=sys.stderr)
"""


def _by_shell(line: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["sh", "-c", line], capture_output=True, check=False)


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_no_error_and_change_no_exit_code(tmp_path: Path, closed: str) -> None:
    data = shlex.quote(str(filled(tmp_path / "log", rotations=0, records=3).directory))
    command = shlex.join(COMMAND)

    read = _by_shell(f"{command} consume shop/orders --data {data} {closed}")
    refused = _by_shell(f"{command} consume shop/nothing --data {data} {closed}")
    produced = _by_shell(f"{command} produce shop/orders --data {data} {closed} </dev/null")

    assert [outcome.returncode for outcome in (read, refused, produced)] == [0, 2, 0]
    assert read.stderr == b""


def test_no_file_takes_the_number_of_a_closed_stream() -> None:
    opened = _by_shell(f"{shlex.join([sys.executable, '-c', OPENED_FIRST])} <&- >&-")

    assert int(opened.stderr) > 2


@always_full
@pytest.mark.parametrize("words", ["consume shop/orders", "topic show shop/orders", "topic list --json", "dump"])
def test_output_that_cannot_be_written_is_said_in_one_line(tmp_path: Path, words: str) -> None:
    data = shlex.quote(str(filled(tmp_path / "log").directory))

    ended = _by_shell(f"{shlex.join(COMMAND)} {words} --data {data} >/dev/full")

    assert ended.stderr.decode() == "forebay: the output cannot be written: No space left on device\n"
    assert ended.returncode == 4


@always_full
@pytest.mark.parametrize("words", ["--version", "--help", "topic --help"])
def test_help_that_cannot_be_written_is_said_in_one_line(words: str) -> None:
    ended = _by_shell(f"{shlex.join(COMMAND)} {words} >/dev/full")

    assert ended.stderr.decode() == "forebay: the output cannot be written: No space left on device\n"
    assert ended.returncode == 4


@always_full
def test_messages_that_cannot_be_written_change_no_exit_code(tmp_path: Path) -> None:
    """Else whichever caller appended everything, and could not say so, would be run again."""
    data = shlex.quote(str(filled(tmp_path / "log", rotations=0, records=3).directory))
    command = shlex.join(COMMAND)

    produced = _by_shell(f"echo 4 | {command} produce shop/orders --data {data} 2>/dev/full")
    refused = _by_shell(f"{command} consume shop/nothing --data {data} 2>/dev/full")
    misspelt = _by_shell(f"{command} consumed 2>/dev/full")
    read = _by_shell(f"{command} consume shop/orders --data {data}")

    assert [outcome.returncode for outcome in (produced, refused, misspelt)] == [0, 2, 2]
    assert read.stdout.splitlines() == [b"0-0", b"0-1", b"0-2", b"4"]


def test_ctrl_c_before_a_command_has_begun_says_nothing() -> None:
    ended = subprocess.run([sys.executable, "-c", INTERRUPTED_AT_THE_START], capture_output=True, check=False)

    assert (ended.returncode, ended.stderr) == (130, b"")


def test_lines_are_put_together_from_chunks_of_any_size() -> None:
    text = b"one\n\ntwo" + b"x" * 10 + b"\n" + b"y" * 7

    class Trickle(BytesIO):
        def read1(self, size: int | None = -1, /) -> bytes:
            return super().read1(step)

    for step in range(1, len(text) + 2):
        lines = [line for line in produce.lines_of(Trickle(text), "stdin") if line is not None]
        assert lines == [b"one", b"", b"twoxxxxxxxxxx", b"yyyyyyy"], step
