"""Is everything in a data directory as it was written? Look at all of it and change nothing.

Works offline and beside the owner. What a finding means and what to do about it stands in the finding.
"""

from __future__ import annotations

import contextlib

from forebay.clock import Clock
from forebay.disk import Disk
from forebay.errors import Corrupt, UnsupportedFormat
from forebay.format.segment import parse_segment_name
from forebay.inspection.directory import Inspected, ShardPlace, inspected, metadata_of
from forebay.inspection.findings import Report, Severity
from forebay.inspection.shard import Progress, verify_shard
from forebay.metadata import SqliteMetadata
from forebay.settings import Settings
from forebay.storage.directory import LogDirectory
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


def verify(
    path: str,
    settings: Settings,
    *,
    disk: Disk,
    clock: Clock,
    topic: TopicName | None = None,
    on_total: Progress | None = None,
    on_bytes: Progress | None = None,
) -> Report:
    """Look at the whole directory, or at one topic of it. Raises only if there is nothing to look at.

    `on_total` hears how many bytes of segments there are, `on_bytes` of those that were walked.
    """
    report = Report()
    try:
        directory = LogDirectory.look(path, disk)
    except Corrupt as error:
        report.add(Severity.ERROR, str(error), "then verify again", file=path)
        return report
    found = _metadata(directory, settings, disk, clock, report)
    if found is None:
        return report
    if on_total is not None:
        on_total(segment_bytes(disk, found, topic))
    for place in _chosen(found, disk, topic):
        state = found.state(place.spec, place.partition) if place.spec is not None else None
        if place.spec is None:
            what = "belongs to no topic"
            step = "restore the metadata store that knows it, or move it away"
            report.add(Severity.WARNING, what, step, file=place.directory)
        report.absorb(verify_shard(disk, place, state, owned=found.owned, on_bytes=on_bytes))
    return report


def _chosen(found: Inspected, disk: Disk, topic: TopicName | None) -> list[ShardPlace]:
    places = found.places()
    if topic is not None:
        return [place for place in places if place.spec is not None and place.spec.name == topic]
    return places + found.strangers(disk)


def _metadata(
    directory: LogDirectory, settings: Settings, disk: Disk, clock: Clock, report: Report
) -> Inspected | None:
    """What the metadata store says; `None`, with a finding, if it cannot be read at all."""
    try:
        with metadata_of(directory, settings, disk, clock) as store:
            for flaw in store.damage() if isinstance(store, SqliteMetadata) else ():
                step = "keep a copy, then restore a backup"
                report.add(Severity.ERROR, f"SQLite finds it damaged: {flaw}", step, file=directory.metadata_path)
            found = inspected(directory.path, settings, disk, store)
    except Corrupt as error:
        report.add(Severity.ERROR, str(error), "then verify again", file=directory.metadata_path)
        return None
    for bad in found.bad:
        newer = isinstance(bad.error, UnsupportedFormat)
        step = "upgrade: nothing is corrupt" if newer else "restore the metadata store from a backup"
        report.add(Severity.ERROR, f"{bad.key}: {bad.error}", step, file=directory.metadata_path)
    return found
