"""What erasing a key answers: how much was deleted, where bytes remain, and the commands that remove them. Pure."""

from __future__ import annotations

import base64
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Protocol

from forebay.topics import TopicName

TABLE_FORMAT: Final = "iceberg"
"""The format of a table for which a command names none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remnant:
    """A file or object that holds bytes of erased records, or of which that cannot be excluded."""

    partition: int
    tier: str
    """`log`, `sealed`, `aside`, `history`, `database`, or `elsewhere` for a partition that another process has."""
    place: str
    bytes: int
    until: str
    """What ends it."""
    command: str
    """What an operator runs so that it goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPlace:
    """A topic that may have got copies of the records. They are its own: erase the key there, too."""

    topic: str
    by: str
    """The router or subscription that sends records there."""
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Erasure:
    """What became of the records of one key in one topic."""

    topic: str
    deleted: int
    """How many records this call deleted; no reader gets them any more."""
    remains: tuple[Remnant, ...]
    """Everything that still has bytes of these records, or of ones that were deleted before."""
    copies: tuple[CopyPlace, ...]

    @property
    def commands(self) -> list[str]:
        """What is to be run, in this order, so that nothing remains; each once."""
        wanted = dict.fromkeys(remnant.command for remnant in self.remains)
        # What tables and operators keep is given free first: the rewriting then finds it so.
        return [*(one for one in wanted if not _is_rewriting(one)), *(one for one in wanted if _is_rewriting(one))]


def without_roots(erased: Erasure, roots: Sequence[str]) -> Erasure:
    """The same for callers who shall not learn where a server keeps its files: paths below one of these directories
    are shown as relative to it.
    """
    remains = []
    for remnant in erased.remains:
        root = next((root for root in roots if remnant.place.startswith(f"{root}/")), None)
        if root is not None:
            place = remnant.place.removeprefix(f"{root}/")
            is_path = shlex.quote(remnant.place) in remnant.command
            command = ErasureCommands.remove(place) if is_path else remnant.command
            remains.append(replace(remnant, place=place, command=command))
        else:
            remains.append(remnant)
    return replace(erased, remains=tuple(remains))


class ErasureCommands(NamedTuple):
    """The commands that an answer names for one topic and key."""

    topic: TopicName
    key: bytes

    @property
    def rewrite(self) -> str:
        """Has every file and object rewritten that this process may rewrite."""
        return self.erase(str(self.topic), now=True)

    def register(self, formats: Sequence[str]) -> str:
        """Lets the topic's tables, of these formats, name its history as it is now, and no older version of it."""
        chosen = ["" if each == TABLE_FORMAT else f" --table-format {each}" for each in formats or (TABLE_FORMAT,)]
        kept = "--set table.snapshots_kept_s=0 --set table.snapshots_kept_max=1"
        return " && ".join(f"forebay table register {self.topic}{each} {kept}" for each in chosen)

    def erase(self, topic: str, *, now: bool = False) -> str:
        """Erases the key in a topic."""
        text = self.key.decode("utf-8", "replace")
        is_text = text.encode() == self.key and text.isprintable() and not text.startswith("-")
        named = f"--key {shlex.quote(text)}" if is_text else f"--key-b64 {base64.b64encode(self.key).decode()}"
        return f"forebay records erase {topic} {named}{' --now' if now else ''} --yes"

    @staticmethod
    def remove(path: str) -> str:
        """Removes a file that is no part of any log."""
        return f"rm {shlex.quote(path)}"


class ShardErasure(Protocol):
    """The erasing of a key in one shard that this process owns. The records are deleted already."""

    def remains(self, key: bytes) -> list[Remnant]:
        """Every file and object that holds bytes of deleted records with this key, or may hold some."""

    def rewrite(self, key: bytes) -> None:
        """Rewrite what holds such bytes, and remove what it is in now, as far as this process may."""


class NothingLeft:
    """The erasing where records lie in memory alone; see `ShardErasure`."""

    def remains(self, key: bytes) -> list[Remnant]:
        """See `ShardErasure`: nothing."""
        return []

    def rewrite(self, key: bytes) -> None:
        """See `ShardErasure`: there is nothing to do."""


def _is_rewriting(command: str) -> bool:
    return " --now " in command
