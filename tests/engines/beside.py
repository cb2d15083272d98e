"""The segment engine with a second reader beside it: whatever is read, the one answers who does not own it."""

from __future__ import annotations

from typing import Any

from forebay.disk import SystemDisk
from forebay.engines import FollowingEngine, SegmentEngine
from forebay.shard import ShardContext
from forebay.testing.inside import inside
from forebay.topics import ShardRef, TopicSpec
from tests.engines.homes import SETTINGS, by_name
from tests.engines.lookup_homes import LookupSegmentHome, RestlessHome

READING = frozenset({"read", "read_by_key", "read_by_tag", "offset_at_time", "offsets", "published"})


class WatchedShard:
    """A shard of its owner, read beside it, each time by a look that is not older than the call."""

    def __init__(self, owned: Any, followed: Any) -> None:
        self._owned = owned
        self._followed = followed

    def __getattr__(self, name: str) -> Any:
        if name not in READING:
            return getattr(self._owned, name)
        # What was acknowledged may still wait to be shown to others.
        self._owned.commit()
        inside(self._followed).forget_looks()
        return getattr(self._followed, name)


class WatchedEngine:
    """Writes and deletes by the owner; reads beside it."""

    def __init__(self, owner: SegmentEngine, beside: FollowingEngine) -> None:
        self._owner = owner
        self._beside = beside
        self._watched: dict[str, WatchedShard] = {}

    def open_shard(self, ref: ShardRef) -> Any:
        if ref.id not in self._watched:
            self._watched[ref.id] = WatchedShard(self._owner.open_shard(ref), self._beside.open_shard(ref))
        # Asked each time: it says so once it is closed.
        self._owner.open_shard(ref)
        return self._watched[ref.id]

    def shards(self) -> list[Any]:
        return list(self._watched.values())

    def prepare(self, spec: TopicSpec) -> None:
        self._owner.prepare(spec)

    def close(self) -> None:
        self._beside.close()
        self._owner.close()

    def abandon(self) -> None:
        """No test of the contracts forks."""

    def delete_shard(self, ref: ShardRef) -> None:
        self._owner.delete_shard(ref)
        self._watched.pop(ref.id, None)


def watched(home: LookupSegmentHome, root: str) -> Any:
    """The engine of the home, and one that reads beside it."""
    owner = LookupSegmentHome.open(home).engine
    disk = SystemDisk()
    beside = FollowingEngine(
        f"{root}/shards",
        SETTINGS,
        disk=disk,
        clock=home.clock,
        around=ShardContext(home.metadata, SETTINGS, home.places(), "here", lambda: False),
        is_owned=lambda: True,
        is_known=lambda ref: True,
    )
    return by_name(WatchedEngine(owner, beside), home.metadata)


class BesideHome(LookupSegmentHome):
    """Everything is in the log that its owner writes."""

    def open(self) -> Any:
        return watched(self, self._root)


class BesideRestlessHome(RestlessHome):
    """Each append is sealed and made history at once, under the eyes of the reader."""

    def open(self) -> Any:
        return watched(self, self._root)
