"""How a command ends: exit codes by family of error, one line for each, and no traceback for what is expected."""

from __future__ import annotations

import os
import sys
from typing import Final

from forebay.errors import (
    Closed,
    Conflict,
    Corrupt,
    Fenced,
    ForebayError,
    Indeterminate,
    Invalid,
    Unavailable,
    UnsupportedFormat,
)

PROBLEM: Final = 1
INVALID: Final = 2
UNAVAILABLE: Final = 4
DAMAGE: Final = 6
INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141

EXIT_CODES: Final[tuple[tuple[type[ForebayError], int], ...]] = (
    (UnsupportedFormat, 8),
    (Invalid, INVALID),
    (Conflict, 3),
    (Unavailable, UNAVAILABLE),
    (Indeterminate, 5),
    (Corrupt, DAMAGE),
    (Fenced, 7),
    (Closed, 7),
)
"""The first family that an error belongs to decides."""


def exit_code(error: ForebayError) -> int:
    """The exit code for an error of ours."""
    return next((code for family, code in EXIT_CODES if isinstance(error, family)), PROBLEM)


def complain(message: str) -> None:
    """One line on stderr."""
    line = " ".join(message.split())
    sys.stderr.write(f"forebay: {line}\n")
    sys.stderr.flush()


def silence_stdout() -> None:
    """Whoever read our output has gone: let what is still buffered, and the interpreter's last flush, go nowhere."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    except (OSError, ValueError):
        # Standard output is not a file, as in tests: nothing can be flushed into it later either.
        return
