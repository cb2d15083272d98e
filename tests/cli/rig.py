"""The command line run in this process, and directories to run it on."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import forebay
from tests.support.commands import invoke

COMMAND = [sys.executable, "-m", "forebay.cli"]


class Outcome(NamedTuple):
    """How a command ended."""

    code: int
    out: str
    err: str
    raw: bytes

    @property
    def items(self) -> list[dict[str, Any]]:
        """The JSON objects on stdout."""
        return [json.loads(line) for line in self.out.splitlines()]


class Shell:
    """Commands on one data directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def run(self, *words: str, stdin: bytes = b"") -> Outcome:
        """Run a command in this process. Anything but an exit code is a failure of the test."""
        result = invoke([*words, "--data", str(self.directory)], stdin=stdin)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return Outcome(result.exit_code, result.stdout, result.stderr, result.stdout_bytes)

    def ok(self, *words: str, stdin: bytes = b"") -> Outcome:
        """Run a command that must succeed."""
        outcome = self.run(*words, stdin=stdin)
        assert outcome.code == 0, outcome.err
        return outcome

    def shards(self) -> list[Path]:
        """The shard directories."""
        return sorted((self.directory / "shards").iterdir())

    def segments(self) -> list[Path]:
        """Every segment file, by shard and offset."""
        return [path for shard in self.shards() for path in sorted(shard.glob("*.seg"))]


def filled(directory: Path, *, rotations: int = 2, records: int = 20) -> Shell:
    """A directory with the topic shop/orders in one partition: sealed files, and an active one."""
    with forebay.open(str(directory)) as log:
        orders = log.create_topic("shop/orders", durability="fsync")
        for rotation in range(rotations + 1):
            orders.append_many([f"{rotation}-{number}".encode() for number in range(records)], tags="eu")
            if rotation < rotations:
                orders.rotate()
    return Shell(directory)


def snapshot(directory: Path) -> dict[str, bytes]:
    """Every file with its bytes, apart from what SQLite needs to share memory among readers."""
    found = {}
    for root, _, names in os.walk(directory):
        for name in names:
            if not name.endswith(("-shm", "-wal")):
                path = Path(root, name)
                found[str(path.relative_to(directory))] = path.read_bytes()
    return found


def flip(path: Path, byte: int) -> None:
    """Change one bit of one byte; a negative place counts from the end."""
    content = bytearray(path.read_bytes())
    content[byte] ^= 1
    path.write_bytes(content)


def changed(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Give the file other bytes."""
    path.write_bytes(change(path.read_bytes()))


def one_line(text: str) -> bool:
    """Whether it is a single line from us."""
    return text.startswith("forebay: ") and text.count("\n") == 1
