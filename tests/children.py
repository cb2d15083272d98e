"""Talking with a child process that a test has started: a line at a time, either way."""

from __future__ import annotations

import subprocess
from typing import TypeAlias

Child: TypeAlias = subprocess.Popen[str]


def hear(child: Child) -> str:
    """The next line that the child says."""
    assert child.stdout is not None
    line = child.stdout.readline()
    assert line, "the child has ended"
    return line.rstrip("\n")


def tell(child: Child) -> None:
    """Let the child go on."""
    assert child.stdin is not None
    child.stdin.write("\n")
    child.stdin.flush()
