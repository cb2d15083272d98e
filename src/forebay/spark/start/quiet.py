"""Python workers of Spark that run a part of Forebay end without a traceback when Spark has no more use for them.

Spark closes its connection to a worker in two ordinary cases: its task has rows enough, as for `LIMIT`, `first` and
`show`, or it was idle for a minute. The worker then cannot write what is left to write, and `pyspark.daemon` prints a
`BrokenPipeError` of its own for it. That says nothing, with almost every query. All other failures are printed as ever.
"""

from __future__ import annotations

import sys
import traceback
from types import ModuleType
from typing import Final

DAEMON: Final = "pyspark.daemon"


def quieten(main: ModuleType) -> None:
    """If this is a process of Spark's daemon, print no traceback for a connection that Spark has closed.

    `main` is the module that Python was started with. It is changed in this process alone: one worker, by a fork.
    """
    spec = getattr(main, "__spec__", None)
    if spec is not None and spec.name == DAEMON and getattr(main, "traceback", None) is traceback:
        main.traceback = _QuietTraceback(traceback.__name__)  # type: ignore[attr-defined]


class _QuietTraceback(ModuleType):
    """The module `traceback`, as the daemon uses it."""

    def __getattr__(self, name: str) -> object:
        return getattr(traceback, name)

    def print_exc(self) -> None:
        """Print the exception that is being handled, unless it says that Spark has closed the connection."""
        if not isinstance(sys.exception(), BrokenPipeError | ConnectionResetError):
            traceback.print_exc()
