"""An owner in a process of its own, and what another data directory must not change by looking at its topic.

`python -m tests.looking <root> <rest of its life: "wait" or "die">` is that owner.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import forebay
from forebay.catalog import ShardKeys, StoredState, read_state
from forebay.clock import SystemClock
from forebay.disk import SystemDisk
from forebay.metadata import SqliteMetadata
from forebay.settings import Settings
from tests.support.processes import Child, hear

TOPIC: Final = "shop/orders"
UNUSED: Final = "shop/unused"
GROUP: Final = "billing"
EXPORTED: Final = 3
"""So many records of the owner are in history; two more are on its disk alone."""
VALUES: Final = [b"0", b"1", b"2", b"3", b"4"]


def shared(root: Path) -> dict[str, dict[str, object]]:
    """Settings of directories that share the metadata store and the history below `root`."""
    return {
        "storage": {"mode": "shared_fs"},
        "store": {"root": f"{root}/history"},
        "metadata": {"path": f"{root}/meta.sqlite"},
        "wal": {"free_bytes_min": 0, "reserve_records_min": 64},
        "export": {"interval_s": 600, "at_close_seconds_max": 0},
    }


def settings_of(root: Path) -> Settings:
    """The same, checked."""
    return Settings.load(overrides=shared(root))


def begin_owner(root: Path, then: str) -> Child:
    """An owner that has done its work; with "die" it is gone."""
    command = [sys.executable, "-m", "tests.looking", str(root), then]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]
    )
    assert hear(child) == "ready"
    if then == "die":
        assert child.wait() == 9
    return child


def end_owner(child: Child) -> None:
    """Without a word, if it is not gone already."""
    child.kill()
    child.wait()
    assert child.stdin is not None and child.stdout is not None
    child.stdin.close()
    child.stdout.close()


def recorded(root: Path, topic: str = TOPIC) -> StoredState | None:
    """The state of the topic's only partition, with its revision."""
    namespace, _, name = topic.partition("/")
    settings = settings_of(root)
    path = settings.metadata.path
    assert path is not None
    store = SqliteMetadata(path, disk=SystemDisk(), clock=SystemClock(), busy_timeout_ms=5000, read_only=True)
    try:
        return read_state(store, ShardKeys(namespace, name, 0, settings.metadata.prefix).state)
    finally:
        store.close()


def main(root: str, then: str) -> None:
    log = forebay.open(Path(root, "a"), settings_of(Path(root)))
    log.create_topic(UNUSED, durability="fsync", cap_records=1000)
    topic = log.create_topic(TOPIC, durability="fsync", cap_records=1000, on_owner_loss="take_over")
    for value in VALUES[:EXPORTED]:
        topic.append(value, key=b"k", tag="t", producer=7, sequence=int(value))
    log.export_topic(TOPIC)
    for value in VALUES[EXPORTED:]:
        topic.append(value, key=b"k", tag="t", producer=7, sequence=int(value))
    log.group(GROUP).commit(TOPIC, len(VALUES))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    if then == "wait":
        sys.stdin.readline()
    os._exit(9)


if __name__ == "__main__":
    main(*sys.argv[1:])
