"""The segment engine with a second reader beside it: whatever is read, the one answers who does not own it."""

from __future__ import annotations

from typing import Any

from forebay.disk import SystemDisk
from forebay.engines import FollowingEngine, SegmentEngine
from forebay.engines.operations import LookupEngine
from forebay.progress import ProgressStore
from forebay.shard import ShardRef, Surroundings
from forebay.testing.inside import inside
from tests.engines.homes import SETTINGS
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


class WatchedEngine(LookupEngine[Any]):
    """Writes and deletes by the owner; reads beside it."""

    def __init__(self, owner: SegmentEngine, beside: FollowingEngine, progress: ProgressStore) -> None:
        super().__init__(progress)
        self._owner = owner
        self._beside = beside

    def _open(self, ref: ShardRef) -> WatchedShard:
        return WatchedShard(self._owner.open_shard(ref), self._beside.open_shard(ref))

    def close(self) -> None:
        self._beside.close()
        self._owner.close()

    def _close(self, shard: WatchedShard) -> None:
        """Both engines do."""

    def _abandon(self, shard: WatchedShard) -> None:
        """No test of the contracts forks."""

    def _remove(self, ref: ShardRef, shard: WatchedShard | None) -> None:
        self._owner.delete_shard(ref)


def watched(home: LookupSegmentHome, root: str) -> Any:
    """The engine of the home, and one that reads beside it."""
    owner = LookupSegmentHome.open(home)
    disk = SystemDisk()
    beside = FollowingEngine(
        f"{root}/shards",
        SETTINGS,
        disk=disk,
        clock=home.clock,
        around=Surroundings(home.metadata, SETTINGS, home.places(), "here", lambda: False),
        is_owned=lambda: True,
        is_known=lambda ref: True,
    )
    return WatchedEngine(owner, beside, ProgressStore(home.metadata, SETTINGS.metadata.prefix))


class BesideHome(LookupSegmentHome):
    """Everything is in the log that its owner writes."""

    def open(self) -> Any:
        return watched(self, self._root)


class BesideRestlessHome(RestlessHome):
    """Each append is sealed and made history at once, under the eyes of the reader."""

    def open(self) -> Any:
        return watched(self, self._root)
