"""What a server shows those who read a topic as a whole, as Spark does: where its records lie, and their stored bytes.

A reader of that kind plans once and reads later, past the log, so everything is shown as it is stored: what was
deleted since is in it, and the reader leaves out what had ended when it planned. For threads that may wait for the
metadata store, a disk and a store.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, NamedTuple

from forebay.blobs import BlobMissing
from forebay.blobs.seam import check_key, check_range
from forebay.bulk import SharedStore
from forebay.catalog import ShardCatalog, ShardKeys
from forebay.clock import Clock
from forebay.disk import Disk
from forebay.errors import Forbidden, Unsupported
from forebay.format.files.segment import may_be_history
from forebay.locks import Rank, RankedLock
from forebay.metadata import MetadataStore
from forebay.pages import Page
from forebay.places import Places, shared_place
from forebay.settings import Settings
from forebay.shard import SegmentShard
from forebay.storage.shards import Shards
from forebay.topics import Engine, ShardRef, TopicSpec, refs_of
from forebay.views.look import LoadsSeen, ViewedShard
from forebay.views.snapshot import ShardView
from forebay.wal.files import FileList, SealedFile
from forebay.wal.removals import Removals

VIEWERS_KEPT: Final = 256
"""Of so many topics the descriptors are remembered that the last look has read."""


class StoredRange(NamedTuple):
    """The bytes `[start, stop)` of an object, which must have this etag if one is given."""

    store: str
    key: str
    start: int
    stop: int
    etag: str | None = None


class OwnedLog:
    """The log of a partition in the process that has it, as a look takes it. Nothing where another directory has it."""

    def __init__(self, shards: Shards, ref: ShardRef) -> None:
        self.head = 0
        self.files = FileList()
        self.removals = Removals()
        self._shards = shards
        self._ref = ref

    def refresh(self) -> None:
        """Take note of the log as it is now. Opens the shard if it is this directory's and not open."""
        shard = self._shards.read(self._ref)
        if not isinstance(shard, SegmentShard):
            self.head, self.files, self.removals = 0, FileList(), Removals()
            return
        wal = shard.wal
        wal.bring_up()
        self.head, self.files = wal.head, FileList(wal.files.all)
        now = wal.writer.removals
        self.removals = Removals(now.deletes, now.floor)

    def close(self) -> None:
        """Nothing: the files are the owner's."""


class TopicViewer:
    """One topic, looked at again and again. For one thread at a time."""

    def __init__(self, shards: list[ViewedShard], loads: LoadsSeen) -> None:
        """`loads` is what the shards have seen of loads."""
        self._shards = shards
        self._loads = loads

    @property
    def partitions(self) -> int:
        """How many it looks at."""
        return len(self._shards)

    def look(self) -> list[ShardView]:
        """All partitions, with a bulk load in all of them or in none."""
        return self._loads.whole(lambda: [shard.look() for shard in self._shards])


class TopicViews:
    """Topics on engine `segment` as they lie. Made by the owner of a data directory; for many threads."""

    def __init__(
        self,
        shards: Shards,
        places: Places,
        metadata: MetadataStore,
        settings: Settings,
        *,
        holder: str,
        disk: Disk,
        clock: Clock,
    ) -> None:
        self._shards = shards
        self._places = places
        self._metadata = metadata
        self._settings = settings
        self._holder = holder
        self._disk = disk
        self._clock = clock
        self._idle: OrderedDict[str, TopicViewer] = OrderedDict()
        """Viewers that no thread uses, by the id of their topic. A thread takes one out, and puts it back."""
        self._lock = RankedLock(Rank.LEAF, "storage.idle_views")

    @property
    def store(self) -> SharedStore | None:
        """The store of history, if other machines reach it: without anything secret."""
        return shared_place(self._settings, self._places.store_name)

    def look(self, spec: TopicSpec) -> list[ShardView]:
        """Every partition at one moment; `Unsupported` for a topic that only its owner can read."""
        if spec.engine is not Engine.SEGMENT:
            raise Unsupported(
                f'{spec.name} lives on engine "{spec.engine}", which only its owner reads: Spark reads topics on '
                'engine "segment"; copy the records to one',
                topic=spec.name,
            )
        with self._lock:
            viewer = self._idle.pop(spec.topic_id, None)
        if viewer is None or viewer.partitions != spec.partitions:
            loads = LoadsSeen()
            viewer = TopicViewer([self._viewed(ref, loads) for ref in refs_of(spec)], loads)
        found = viewer.look()
        with self._lock:
            self._idle[spec.topic_id] = viewer
            if len(self._idle) > VIEWERS_KEPT:
                self._idle.popitem(last=False)
        return found

    def page(self, ref: ShardRef, offset: int, bytes_max: int) -> tuple[Page | None, int]:
        """Records of the log from `offset` on as they are stored, and where the log ends.

        No page where no file of the log has that offset, as when it is history by now, or in another directory. An
        empty one at the end.
        """
        shard = self._shards.read(ref)
        if not isinstance(shard, SegmentShard):
            return None, shard.offsets().next
        return shard.wal.read(offset, bytes_max), shard.wal.head

    def bytes(self, ref: ShardRef, wanted: StoredRange) -> bytes:
        """Bytes of a segment of this partition's history, or of its index; fewer at its end.

        `BlobMissing` if it is gone. `Forbidden` for what no plan names: other objects, other files of the shard, and a
        log file that still grows, for it has bytes that no reader may see yet.
        """
        store, key, start, stop, etag = wanted
        check_range(start, stop)
        shard, _, name = check_key(key).partition("/")
        is_file = self._places.has_files(store)
        if shard != ref.id or not may_be_history(name, is_file=is_file):
            raise _not_planned(ref, key)
        if not self._places.knows(store):
            raise BlobMissing(f"{key} lies in {store!a:.80}, which is not reached from here: ask for the plan again")
        found = self._places.range(store, key, start, stop, etag)
        # Looked at behind the read: a file that is sealed by now had no bytes that were not published.
        if is_file and self._grows(ref, name):
            raise _not_planned(ref, key)
        return found

    def _grows(self, ref: ShardRef, name: str) -> bool:
        """Whether this file of a shard directory is one of the log that is not sealed."""
        shard = self._shards.read(ref)
        files = shard.wal.files.all if isinstance(shard, SegmentShard) else ()
        return any(not isinstance(file, SealedFile) and file.path.endswith(f"/{name}") for file in files)

    def _viewed(self, ref: ShardRef, loads: LoadsSeen) -> ViewedShard:
        keys = ShardKeys(ref.spec.namespace, ref.spec.topic, ref.partition, self._settings.metadata.prefix)
        catalog = ShardCatalog(self._metadata, keys, ref.spec.topic_id, self._places.manifest, clock=self._clock)
        return ViewedShard(ref, catalog, OwnedLog(self._shards, ref), loads, holder=self._holder, disk=self._disk)


def _not_planned(ref: ShardRef, key: str) -> Forbidden:
    return Forbidden(f"{key!a:.200} is no object of {ref}: ask for those that its plan names", shard=ref)
