"""Ports on 127.0.0.1 for servers that cannot choose one themselves."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from typing import Final

_FIRST: Final = 12_000
_COUNT: Final = 20_000
"""All below the ports that systems give to connections: one that is free does not become a client's a moment later."""
_STEP: Final = 211
"""Workers that run at the same time begin apart, for their process numbers are near each other."""
_numbers: Final = itertools.count(os.getpid() * _STEP)


def free_ports(count: int) -> list[int]:
    """Ports that no process uses now, each given out once."""
    found: list[int] = []
    with contextlib.ExitStack() as held:
        for number in itertools.islice(_numbers, _COUNT):
            port = _FIRST + number % _COUNT
            with contextlib.suppress(OSError):
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
                found.append(port)
            if len(found) == count:
                return found
    raise AssertionError("no free port")
