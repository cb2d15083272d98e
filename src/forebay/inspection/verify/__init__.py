"""Is everything in a data directory as it was written? Look at all of it and change nothing.

Works offline and beside the owner. What a finding means and what to do about it stands in the finding.
"""

from __future__ import annotations

import contextlib

from forebay.clock import Clock
from forebay.directory import LogDirectory
from forebay.disk import Disk
from forebay.errors import Corrupt, UnsupportedFormat
from forebay.format.files.segment import parse_segment_name
from forebay.format.metadata.descriptor import SegmentDescriptor
from forebay.format.metadata.keys import all_shards_prefix
from forebay.format.metadata.value import decode_value
from forebay.inspection.directory import ExpectedShard, Inspected, inspected, metadata_of
from forebay.inspection.findings import UPGRADE, Report, Severity
from forebay.inspection.history.catalog import METADATA, HistoryPlaces
from forebay.inspection.verify.database import database_bytes, verify_database
from forebay.inspection.verify.shard import Progress, verify_shard
from forebay.metadata import MetadataStore, SqliteMetadata
from forebay.places import Stores, is_local
from forebay.settings import Settings
from forebay.topics import TopicName


def segment_bytes(disk: Disk, found: Inspected, topic: TopicName | None = None) -> int:
    """How many bytes of segment files a verification will walk."""
    total = 0
    for place in _chosen(found, disk, topic):
        names = disk.list_directory(place.directory) if disk.exists(place.directory) else []
        for name in names:
            if parse_segment_name(name) is not None:
                with (
                    contextlib.suppress(FileNotFoundError),
                    contextlib.closing(disk.open(f"{place.directory}/{name}")) as file,
                ):
                    total += file.size()
    return total


def object_bytes(found: Inspected, topic: TopicName | None = None) -> int:
    """How many bytes of catalogued objects a verification will read; those that manifests list are not counted."""
    shards = all_shards_prefix(prefix=found.prefix)
    of_topic = shards if topic is None else f"{shards}{topic}/"
    total = 0
    for entry in found.entries:
        if entry.key.startswith(of_topic) and "/segments/" in entry.key and not entry.key.endswith("/cur"):
            with contextlib.suppress(Corrupt, UnsupportedFormat):
                descriptor = decode_value(entry.value, SegmentDescriptor)[0]
                total += 0 if is_local(descriptor) else descriptor.bytes
    return total


def verify(
    path: str,
    settings: Settings,
    *,
    disk: Disk,
    clock: Clock,
    topic: TopicName | None = None,
    quick: bool = False,
    on_total: Progress | None = None,
    on_bytes: Progress | None = None,
) -> Report:
    """Look at the whole directory, or at one topic of it, and its history. Raises only if there is nothing to look at.

    With `quick` catalogued objects are only looked for, not read. `on_total` is called with how many bytes there are to
    be walked, `on_bytes` of those that were.
    """
    report = Report()
    try:
        directory = LogDirectory.look(path, disk)
    except Corrupt as error:
        report.add(Severity.ERROR, str(error), "then verify again", file=path)
        return report
    with contextlib.ExitStack() as stack:
        try:
            store = stack.enter_context(metadata_of(directory, settings, disk, clock))
            found = _metadata(directory, settings, disk, store, report)
        except Corrupt as error:
            report.add(Severity.ERROR, str(error), "then verify again", file=directory.metadata_path)
            return report
        stores = stack.enter_context(contextlib.closing(Stores(found, settings, disk=disk, clock=clock)))
        if on_total is not None:
            objects = 0 if quick else object_bytes(found, topic)
            on_total(segment_bytes(disk, found, topic) + objects + database_bytes(disk, found))
        for place in _chosen(found, disk, topic):
            state = found.state(place.spec, place.partition) if place.spec is not None else None
            if place.spec is None:
                what = "belongs to no topic"
                step = "restore the metadata store that knows it, or move it away"
                report.add(Severity.WARNING, what, step, file=place.directory)
            history = HistoryPlaces.of(place, store, stores, found.prefix)
            report.absorb(
                verify_shard(disk, place, state, owned=found.owned, history=history, quick=quick, on_bytes=on_bytes)
            )
        report.absorb(verify_database(disk, found, store, topic=topic, on_bytes=on_bytes))
    return report


def _chosen(found: Inspected, disk: Disk, topic: TopicName | None) -> list[ExpectedShard]:
    places = found.places()
    if topic is not None:
        return [place for place in places if place.spec is not None and place.spec.name == topic]
    return places + found.strangers(disk)


def _metadata(
    directory: LogDirectory, settings: Settings, disk: Disk, store: MetadataStore, report: Report
) -> Inspected:
    """What the metadata store says; what is wrong with it goes to the report."""
    for flaw in store.damage() if isinstance(store, SqliteMetadata) else ():
        step = "keep a copy, then restore a backup"
        report.add(Severity.ERROR, f"SQLite finds it damaged: {flaw}", step, file=directory.metadata_path)
    found = inspected(directory.path, settings, disk, store)
    for bad in found.bad:
        if "/segments/" in bad.key:
            # The look at the history of its shard says so.
            continue
        newer = isinstance(bad.error, UnsupportedFormat)
        step = UPGRADE if newer else METADATA
        report.add(Severity.ERROR, f"{bad.key}: {bad.error}", step, file=directory.metadata_path)
    return found
