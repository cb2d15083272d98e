"""A condition to wait for, whose lock is never left taken by an exception that comes at any instant (Ctrl-C)."""

from __future__ import annotations

import threading
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    Condition = threading.Condition
else:

    class Condition(threading.Condition):
        """As Python's own, which enters and leaves in steps: an interrupt between two of them keeps its lock for ever.

        A `with` asks this one for its lock's own methods, and each of those is one step.
        """

        __enter__ = property(attrgetter("_lock.__enter__"))
        __exit__ = property(attrgetter("_lock.__exit__"))
