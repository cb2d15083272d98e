"""The command line: topics, produce, consume, and the tools to look into a data directory.

The only room that knows the terminal. Every command loads the rooms it needs when it runs, so that
`forebay --version` answers at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code. `arguments` are those of the process unless given."""
    _fill_streams()
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words == ["--version"]:
        from forebay import __version__

        try:
            print(f"forebay {__version__}", flush=True)
        except OSError as error:
            from forebay.cli.failures import unwritten

            return unwritten(error)
        return 0
    try:
        from forebay.cli.app import run

        return run(words)
    except KeyboardInterrupt:
        # Before a command has begun, or behind its end: nothing is open.
        return 130


def _fill_streams() -> None:
    """Let streams that the caller has closed lead nowhere, so that no file opened later takes one's number."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            setattr(sys, name, os.fdopen(number, "w" if number else "r", encoding="utf-8"))
