"""The command line: topics, produce, consume, and the tools to look into a data directory.

The only room that knows the terminal. Every command loads the rooms it needs when it runs, so that
`forebay --version` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code. `arguments` are those of the process unless given."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    if words == ["--version"]:
        from forebay import __version__

        print(f"forebay {__version__}")
        return 0
    from forebay.cli.app import run

    return run(words)
