"""What other processes do in tests of the command line: `python -m tests.cli.children <act> …`.

They end as by kill -9, at the place that they are given.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from forebay.cli import main
from forebay.metadata.sqlite.store import SqliteMetadata
from forebay.settings import Settings
from forebay.storage import Storage
from tests.storage.rig import wal_of


def die() -> None:
    """kill -9."""
    os.kill(os.getpid(), signal.SIGKILL)


def command_killed_at(place: str, *words: str) -> None:
    """Run a command that dies right before, or right after, its n-th transaction with the metadata store."""
    when, _, number = place.partition(":")
    left = int(number)
    transaction: Callable[..., Any] = SqliteMetadata.transaction

    def dying(self: SqliteMetadata, *arguments: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0 and when == "before":
            die()
        outcome = transaction(self, *arguments)
        if left == 0:
            die()
        return outcome

    SqliteMetadata.transaction = dying  # type: ignore[method-assign, assignment]
    sys.exit(main(words))


def owner_killed(
    path: str, settings: str, exported: str, appended: str, durability: str, deleted: str = "", before: str = ""
) -> None:
    """Append numbers, export the first ones, and die with the rest in the log alone, each in a frame of its own.

    At the end delete those with offsets in `deleted`, as `12-15`, and all below `before`, if they are given.
    """
    log = Storage.open(path, Settings.load(settings))
    topic = log.create_topic("shop/orders", durability=durability, on_owner_loss="take_over")
    for number in range(int(appended)):
        topic.append(b"%d" % number, key=b"k%d" % number, tag="eu", headers=[("n", b"%d" % number)])
        wal_of(topic).commit()
        if number + 1 == int(exported):
            log.export_topic("shop/orders")
    if deleted:
        start, _, stop = deleted.partition("-")
        topic.delete_by_offset(int(start), int(stop))
    if before:
        topic.delete_before(int(before))
    die()


if __name__ == "__main__":
    {act.__name__: act for act in (command_killed_at, owner_killed)}[sys.argv[1]](*sys.argv[2:])
