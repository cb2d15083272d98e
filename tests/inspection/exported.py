"""A data directory whose sealed files are history too, in a store beside it; and both sides to be harmed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forebay.blobs import DirectoryStore
from forebay.catalog import ShardCatalog, ShardKeys
from forebay.clock import SystemClock
from forebay.disk import SystemDisk
from forebay.export import Exporter, Origin
from forebay.format.files.segment import parse_segment_name
from forebay.format.metadata.descriptor import SegmentDescriptor, ShardState
from forebay.format.metadata.value import decode_value
from forebay.metadata import MetadataStore, SqliteMetadata
from forebay.testing.simulated.clock import ManualClock
from forebay.topics import TopicSpec
from forebay.wal.files import FileList, SealedFile
from forebay.wal.recovery.survey import indexed_files
from tests.cli.rig import Outcome, Shell, filled, snapshot

KEYS = ShardKeys("shop", "orders", 0, "/forebay")


class HistoryShell(Shell):
    """Commands with the settings that name the store, and the metadata store if it is shared."""

    def __init__(self, directory: Path, root: Path, metadata: Path | None = None) -> None:
        super().__init__(directory)
        self.settings: dict[str, Any] = {"storage": {"handoff_root": str(root)}}
        if metadata is not None:
            self.settings["metadata"] = {"path": str(metadata)}

    def run(self, *words: str, stdin: bytes = b"") -> Outcome:
        given = [f"{group}.{name}={value}" for group, fields in self.settings.items() for name, value in fields.items()]
        return super().run(*words, *(word for setting in given for word in ("--set", setting)), stdin=stdin)


class Exported:
    """The topic shop/orders in one partition: sealed files of `records` each, exported, and an active one."""

    def __init__(self, path: Path, *, rotations: int = 3, records: int = 20) -> None:
        self.root = path / "store"
        self.shell = HistoryShell(filled(path / "log", rotations=rotations, records=records).directory, self.root)
        with contextlib.closing(SystemDisk()) as disk, self.metadata() as metadata:
            spec = decode_value(_only(metadata, "/forebay/topics/"), TopicSpec)[0]
            epoch = decode_value(_only(metadata, KEYS.state), ShardState)[0].epoch
            clock = SystemClock()
            with contextlib.closing(DirectoryStore(str(self.root), disk=disk, clock=clock).open()) as store:
                catalog = ShardCatalog(metadata, KEYS, spec.topic_id, clock=ManualClock())
                origin = Origin(spec.topic_id, 0, epoch, "tests", "directory")
                exporter = Exporter(origin, catalog, store, disk=disk, clock=clock)
                files = list(self._sealed(disk).values())
                for piece, file in zip(catalog.pieces(), files, strict=False):
                    catalog.replace([piece], exporter.copied(piece.descriptor, file, store, "directory"))
                exporter.export(FileList(files))

    @property
    def shard(self) -> Path:
        """The local files."""
        return self.shell.shards()[0]

    @contextlib.contextmanager
    def metadata(self) -> Iterator[MetadataStore]:
        """The metadata store, open for writing."""
        with contextlib.closing(SystemDisk()) as disk:
            path = str(self.shell.directory / "metadata.sqlite")
            with contextlib.closing(SqliteMetadata(path, disk=disk, clock=SystemClock())) as metadata:
                yield metadata

    def descriptors(self) -> list[SegmentDescriptor]:
        """The history as it is catalogued."""
        with self.metadata() as metadata:
            return ShardCatalog(metadata, KEYS, "", clock=ManualClock()).descriptors()

    def object(self, place: int, suffix: str = ".seg") -> Path:
        """The object of one piece of history, or its index."""
        return (self.root / self.descriptors()[place].object_key).with_suffix(suffix)

    def local(self, place: int, suffix: str = ".seg") -> Path:
        """The local file of one piece, or its index."""
        return self.shell.segments()[place].with_suffix(suffix)

    def content(self) -> dict[str, bytes]:
        """Everything on both sides but what was set aside."""
        both = {**snapshot(self.shell.directory), **{f"store/{k}": v for k, v in snapshot(self.root).items()}}
        return {name: content for name, content in both.items() if "/aside/" not in name}

    def _sealed(self, disk: SystemDisk) -> dict[str, SealedFile]:
        names = sorted(path.name for path in self.shard.iterdir() if parse_segment_name(path.name) is not None)
        return indexed_files(disk, str(self.shard), names)


def _only(metadata: MetadataStore, prefix: str) -> bytes:
    (entry,) = metadata.range(prefix)
    return entry.value
