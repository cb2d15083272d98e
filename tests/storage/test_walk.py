"""How far a record walks: Python calls, files and frames from the caller to the bytes, as upper limits.

The limits only come down. A change that needs more steps shows here before a benchmark notices it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final

import pytest

import forebay
from forebay.settings import Settings
from tests.ledger import Ledger
from tests.storage.rig import QUICK

pytestmark = pytest.mark.plain_locks  # only a test pays for the check of their order

SOURCE: Final = str(Path(forebay.__file__).parent)
APPEND_CALLS_MAX: Final = 33
APPEND_FILES_MAX: Final = 12
"""Those that decide something about the append: how bytes are laid out, written, timed and counted is left out."""
APPEND_FRAMES_MAX: Final = 6
"""Between `Topic.append` and the file's `write_at`."""
READ_FRAMES_MAX: Final = 8
"""From the stream to the bytes of the object, both counted."""
ROUNDS: Final = 5
"""Some rounds do what is due now and then, as the look for free space: the shortest is what every append pays."""
QUIET: Final = {"wal": {**QUICK["wal"], "sync_interval_ms": 60_000}, "runtime": QUICK["runtime"]}


class Walk:
    """The calls into the package that one thread makes, each with its callers, innermost first."""

    def __init__(self) -> None:
        self.calls: list[CodeType] = []
        self.stacks: list[list[CodeType]] = []

    @contextmanager
    def noted(self) -> Iterator[None]:
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(SOURCE):
            self.calls.append(frame.f_code)
            self.stacks.append(list(_callers(frame)))

    @property
    def files(self) -> set[str]:
        """The modules above `format`, `disk`, `clock` and `meter`."""
        names = {code.co_filename.removeprefix(f"{SOURCE}/") for code in self.calls}
        return {name for name in names if not name.startswith(("format/", "disk/", "clock", "meter"))}

    def depth(self, outer: str, inner: str) -> int:
        """The fewest frames from a call of `outer` to one of `inner` below it, both counted."""
        names = [[code.co_qualname for code in stack] for stack in self.stacks]
        return min(stack.index(outer) + 1 for stack in names if stack[0] == inner and outer in stack)


def _callers(frame: FrameType | None) -> Iterator[CodeType]:
    while frame is not None:
        if frame.f_code.co_filename.startswith(SOURCE):
            yield frame.f_code
        frame = frame.f_back


def _walk(act: Callable[[], object]) -> Walk:
    """The shortest of some rounds."""
    walks = []
    for _ in range(ROUNDS):
        walk = Walk()
        with walk.noted():
            act()
        walks.append(walk)
    return min(walks, key=lambda walk: len(walk.calls))


def test_a_single_durable_append_takes_few_steps_to_the_disk(tmp_path: Path, ledger: Ledger) -> None:
    with forebay.open(tmp_path, settings=Settings.load(overrides=QUIET)) as log:
        topic = log.create_topic("orders", durability="fsync")
        topic.append(b"the first makes the file")

        walk = _walk(lambda: topic.append(b"an order"))

        frames = walk.depth("Topic.append", "SystemFile.write_at") - 1
        ledger.count("steps of an append", len(walk.calls), figure="calls")
        ledger.count("steps of an append", len(walk.files), figure="files")
        ledger.count("steps of an append", frames, figure="frames")
        assert len(walk.calls) <= APPEND_CALLS_MAX
        assert len(walk.files) <= APPEND_FILES_MAX
        assert frames <= APPEND_FRAMES_MAX


def test_a_read_from_history_takes_few_frames_to_the_bytes(tmp_path: Path, ledger: Ledger) -> None:
    _history(tmp_path)
    with forebay.open(tmp_path / "b", settings=_shared(tmp_path)) as log:
        topic = log.topic("orders")
        topic.append(b"this directory owns the topic from here on")

        walk = Walk()
        with walk.noted():
            first = next(iter(topic.read(0)))

        assert first.value == b"in history"
        frames = walk.depth("Stream._pages", "ReadAhead.read_at")
        ledger.count("steps of a read", frames, figure="frames")
        assert frames <= READ_FRAMES_MAX


def _shared(tmp_path: Path) -> Settings:
    return Settings.load(
        overrides={
            **QUIET,
            "storage": {"mode": "shared_fs"},
            "store": {"root": f"{tmp_path}/store"},
            "metadata": {"path": f"{tmp_path}/metadata.sqlite"},
        }
    )


def _history(tmp_path: Path) -> None:
    """A topic whose records are in the store, because the directory that wrote them was closed."""
    with forebay.open(tmp_path / "a", settings=_shared(tmp_path)) as log:
        log.create_topic("orders").append(b"in history")
