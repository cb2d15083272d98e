"""Child processes of tests: talking with one a line at a time, and processes that end themselves with kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Any, Final, NoReturn, TypeAlias

Child: TypeAlias = subprocess.Popen[str]
_GROUP: Final = "FOREBAY_KILLED_GROUP"


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


def die() -> NoReturn:
    """End this process at once, as the kernel would."""
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a killed process does not go on")


def die_at(kind: Any, name: str, *, before: bool = False, call: int = 1) -> None:
    """Die before or behind a call of this method or function."""
    whole, calls = getattr(kind, name), []

    def dying(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if before and len(calls) == call:
            die()
        result = whole(*arguments, **options)
        if len(calls) == call:
            die()
        return result

    setattr(kind, name, dying)


def die_together() -> None:
    """Let `die_with_all`, wherever this process has Spark do its work, end this one and its JVM as well."""
    os.environ[_GROUP] = str(os.getpgrp())


def die_with_all() -> NoReturn:
    """End the driver with its JVM, and then this worker of theirs, all without a word."""
    os.killpg(int(os.environ[_GROUP]), signal.SIGKILL)
    die()
