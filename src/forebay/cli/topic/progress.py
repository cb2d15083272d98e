"""What the commands share that make a topic's records history: `seal`, `export` and `move`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.cli.terminal import Meter, meter, readable_bytes

if TYPE_CHECKING:
    from forebay.export import Lag
    from forebay.shard.seal import OnFile

logger = logging.getLogger(__name__)

AcceptDamage = Annotated[
    bool,
    typer.Option(
        "--accept-damage",
        help="Go on without records in damaged frames that no other copy has; history names their offsets as damaged.",
    ),
]


@contextmanager
def export_progress(label: str) -> Iterator[OnFile]:
    """A bar on a terminal, and a line in the log for each file."""
    with meter(label, in_bytes=True) as shown:
        yield _Countdown(label, shown)


class _Countdown:
    """Turns what is left into what is done. A new partition starts with more left than the one before ended with."""

    def __init__(self, label: str, shown: Meter) -> None:
        self._label = label
        self._shown = shown
        self._total = self._left = 0

    def __call__(self, lag: Lag) -> None:
        if lag.files:
            left = readable_bytes(lag.bytes)
            logger.info("%s: %d files with %d records, %s, are left", self._label, lag.files, lag.records, left)
        if lag.bytes > self._left:
            self._total += lag.bytes
            self._shown.total(self._total)
            self._shown.advance(self._left)
        else:
            self._shown.advance(self._left - lag.bytes)
        self._left = lag.bytes
