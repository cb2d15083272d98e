"""How a command ends: exit codes by family of error, one line for each, and no traceback for what is expected."""

from __future__ import annotations

import os
import sys
from typing import Final, TextIO

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
    """One line on stderr. If it cannot be written the exit code alone says so: what was done stays done."""
    line = " ".join(message.split())
    try:
        sys.stderr.write(f"forebay: {line}\n")
        sys.stderr.flush()
    except OSError:
        silence(sys.stderr)


def unwritten(error: OSError) -> int:
    """The exit code of one whose output cannot be written. Why is said, unless the reader of the output has gone."""
    silence(sys.stdout)
    if isinstance(error, BrokenPipeError):
        return BROKEN_PIPE
    complain(f"the output cannot be written: {error.strerror or error}")
    return UNAVAILABLE


def silence(stream: TextIO) -> None:
    """This stream has no reader any more: let what is still buffered, and the interpreter's last flush, go nowhere."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
    except (OSError, ValueError):
        # It is not a file, as in tests: nothing can be flushed into it later either.
        return
