"""The steps of a repair, in a form that a person and a program can read, and where they put what they replace."""

from __future__ import annotations

import enum

import msgspec

from forebay.disk import Disk, make_directories
from forebay.wal.recovery.resume import ASIDE


class Action(enum.StrEnum):
    """What is to be done."""

    REBUILD_INDEX = "rebuild index"
    REBUILD_CHECKPOINT = "rebuild checkpoint"
    FETCH = "fetch again"
    """A local file, from the store."""
    UPLOAD = "upload again"
    """An object, from the local file."""
    RECORD = "record anew"
    """What the catalog says of an object that is sound."""
    LEAVE = "leave"
    """Nothing: it goes by itself."""
    CANNOT = "cannot repair"


CHANGES = frozenset(Action) - {Action.LEAVE, Action.CANNOT}
"""What changes something when it is done."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One step of a repair. `set_aside` names where the old bytes go, or went; empty if there were none."""

    action: Action
    shard: str
    file: str
    why: str
    set_aside: str = ""
    done: bool = False
    offsets: tuple[int, int] | None = None

    def __str__(self) -> str:
        kept = f" (the old one {'is' if self.done else 'goes'} in {self.set_aside})" if self.set_aside else ""
        held = f" offsets [{self.offsets[0]}, {self.offsets[1]})" if self.offsets is not None else ""
        return f"{'done: ' if self.done else ''}{self.action} {self.shard} {self.file}{held}: {self.why}{kept}"


class Aside:
    """Where a shard keeps what was replaced. Names no place twice, so that a plan can name it beforehand."""

    def __init__(self, disk: Disk, directory: str) -> None:
        self.directory = f"{directory}/{ASIDE}"
        self._disk = disk
        self._taken = set(disk.list_directory(self.directory) if disk.exists(self.directory) else [])

    def free(self, name: str) -> str:
        """A path for what has this name."""
        number = next(number for number in range(1, len(self._taken) + 2) if f"{name}.{number}" not in self._taken)
        self._taken.add(f"{name}.{number}")
        return f"{self.directory}/{name}.{number}"

    def make(self) -> None:
        """When it returns, there is such a directory."""
        make_directories(self._disk, self.directory)
