"""The Parquet segments of a topic as an open table, without copying: the table names the objects of history.

A registration makes the table name exactly the Parquet objects that the catalog of each partition names now, in one
commit; what is there already is left as it is, so it may be repeated at will. Objects are written down as named before
a commit names them, and stay so, and are not swept, while a kept version of some table of the topic does.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from forebay.cleanup.tables import TableObjects
from forebay.errors import Conflict, Invalid, Unavailable, Unsupported
from forebay.format.metadata.descriptor import DescriptorKind, SegmentDescriptor
from forebay.format.metadata.keys import registrar_key
from forebay.format.parquet.file import FIELD_IDS, SCHEMA
from forebay.format.parquet.ids import ids_of
from forebay.metadata.leases import Lease, leased
from forebay.spark.jobs.report import JobReport, Part
from forebay.spark.place.addresses import address_of, key_of
from forebay.spark.place.location import Location
from forebay.spark.place.opening import Opened, opened
from forebay.spark.tables.catalog import identifier
from forebay.spark.tables.commit import TOPIC_ID, FormatTable, Ranges, TableChange, TopicOffsets, commit
from forebay.spark.tables.formats import FORMATS, ICEBERG, open_format
from forebay.topics import Engine, TopicName, TopicSpec, refs_of

logger = logging.getLogger(__name__)

LEASE_WAIT_SECONDS: Final = 30.0
LEASE_SECONDS: Final = 30.0


class _Change(NamedTuple):
    """What a registration has to do."""

    wanted: dict[int, list[tuple[str, SegmentDescriptor]]]
    """By partition: the addresses of its Parquet objects, in order."""
    added: list[str]
    removed: list[str]

    @property
    def is_needed(self) -> bool:
        return bool(self.added or self.removed)


def run(location: Location, topic: str, *, table_format: str = ICEBERG, dry_run: bool = False) -> JobReport:
    """Let the table of a topic name its compacted history as it is now; old versions are expired.

    An Iceberg table has the name of the topic in the catalog of the settings (`table.…`); a table of the format
    `delta` lies in `delta/NAMESPACE/TOPIC` in the warehouse. It is made if it is not there.
    Raises `Unavailable` while another registration of the topic runs, `Conflict` if another program changed the table.
    """
    name = TopicName.parse(topic)
    with (
        opened(location, read_only=dry_run) as found,
        contextlib.closing(open_format(table_format, location, identifier(name))) as table,
    ):
        begun = found.clock.monotonic()
        spec = found.definitions.get(name)
        if spec.engine is not Engine.SEGMENT:
            raise Unsupported(f'{name} lives on engine "{spec.engine}" and has no history: copy it to a segment topic')
        table.look()
        if dry_run:
            change, expired = change_of(found, spec, table), 0
        else:
            change, expired = _leased(found, spec, table, table_format)
        return _report(table.name, name, change, expired, dry_run=dry_run, seconds=found.clock.monotonic() - begun)


def _leased(found: Opened, spec: TopicSpec, table: FormatTable, table_format: str) -> tuple[_Change, int]:
    key = registrar_key(spec.namespace, spec.topic, prefix=found.settings.metadata.prefix)
    what = f"registration of {spec.name}"
    lease_s = max(LEASE_SECONDS, found.settings.metadata.lease_ttl_s)
    with leased(found.metadata, key, what, ttl_s=lease_s, wait_s=LEASE_WAIT_SECONDS, clock=found.clock) as lease:
        table.make(SCHEMA, {TOPIC_ID: spec.topic_id})
        _check_ids(table)
        prefix = found.settings.metadata.prefix
        tabled = TableObjects(found.metadata, prefix, spec.namespace, spec.topic, spec.topic_id, clock=found.clock)
        change = change_of(found, spec, table)
        if change.is_needed:
            _name(found, spec, table, tabled, change, lease, table_format)
        settings = found.settings.table
        if (settings.snapshots_kept_s, settings.snapshots_kept_max) == (0, 1) and table.lists_removed():
            # Nothing of what was removed shall be left: an empty commit forgets the bounds of those files' columns.
            shown = TableChange(added=[], offsets=_offsets(spec, change))
            commit(table, shown, basis=lambda: table.files().keys(), check=lease.check)
        expired = table.expire(settings, found.clock.now_ms())
        lease.check()
        store = found.new_objects().store
        kept = {table_format: _named(found, table)}
        for other in FORMATS.keys() - {table_format}:
            kept[other] = _named_in(found, other, spec.name, tabled)
        formats = [each for each, named in kept.items() if named]
        tabled.put(frozenset[str]().union(*kept.values()), store, formats=formats, held=[lease.held])
        return change, expired


def _check_ids(table: FormatTable) -> None:
    """`Unsupported` if the table knows a column by another id than the files have for it: it would show another one."""
    ids = ids_of(table.file_schema(SCHEMA))
    other = sorted(name for name, number in ids.items() if number != FIELD_IDS[name])
    if other:
        raise Unsupported(
            f"column {other[0]} of the table {table.name} has the id {ids[other[0]]}, and {FIELD_IDS[other[0]]} in the "
            "files of history: it was made by another program, or a column was dropped and added again; remove the "
            "table from its catalog without its files, and register again"
        )


def _named(found: Opened, table: FormatTable) -> frozenset[str]:
    """The keys of all objects that a kept version of the table names."""
    addresses = table.named_files(found.settings.table, found.clock.now_ms())
    return frozenset(key for address in addresses if (key := key_of(found, address)) is not None)


def _named_in(found: Opened, table_format: str, name: TopicName, tabled: TableObjects) -> frozenset[str]:
    """What the topic's table of another format names. If that cannot be read, all that was noted before stays."""
    try:
        with contextlib.closing(open_format(table_format, found.location, identifier(name))) as table:
            return _named(found, table) if table.look() else frozenset()
    except Invalid:
        return frozenset()  # by these settings no such table can be made
    except (Unavailable, Unsupported) as error:
        logger.warning("%s: no object is given free, as its %s table cannot be read: %s", name, table_format, error)
        return tabled.objects(found.new_objects().store)


def change_of(found: Opened, spec: TopicSpec, table: FormatTable) -> _Change:
    wanted = {ref.partition: list(_parquet(found, found.catalog(ref).descriptors())) for ref in refs_of(spec)}
    present = table.files().keys()
    addresses = {address for pieces in wanted.values() for address, _ in pieces}
    return _Change(wanted, sorted(addresses - present), sorted(present - addresses))


def _parquet(found: Opened, descriptors: Iterable[SegmentDescriptor]) -> Iterator[tuple[str, SegmentDescriptor]]:
    for descriptor in descriptors:
        if descriptor.kind is DescriptorKind.PARQUET:
            address = address_of(found, descriptor)
            if address is None:
                raise Unavailable(
                    f"{descriptor.object_key} lies in {descriptor.store}, which these settings do not lead to: run it "
                    "with the settings, and the data directory, that the topic was compacted with"
                )
            yield address, descriptor


def _name(
    found: Opened,
    spec: TopicSpec,
    table: FormatTable,
    tabled: TableObjects,
    change: _Change,
    lease: Lease,
    table_format: str,
) -> None:
    """Commit. The objects are noted first, and seen to be history still: then no sweep takes them."""
    store = found.new_objects().store
    keys = {piece.object_key for pieces in change.wanted.values() for _, piece in pieces}
    before = tabled.formats()
    # Which tables name what an earlier version wrote down is not known before all of them were looked at.
    formats = {*before, table_format} if before or not tabled.is_some() else ()
    tabled.put(tabled.objects(store) | keys, store, formats=formats, held=[lease.held])
    if change_of(found, spec, table).added != change.added:
        raise Conflict(f"the history of {spec.name} was compacted meanwhile: run it again")
    wanted = TableChange(added=change.added, removed=frozenset(change.removed), offsets=_offsets(spec, change))
    commit(table, wanted, basis=lambda: table.files().keys(), check=lease.check)


def _offsets(spec: TopicSpec, change: _Change) -> TopicOffsets:
    """What the table shows of the topic."""
    shown: Ranges = {number: _runs(pieces) for number, pieces in change.wanted.items()}
    return TopicOffsets(topic=str(spec.name), topic_id=spec.topic_id, ranges=shown)


def _runs(pieces: list[tuple[str, SegmentDescriptor]]) -> list[tuple[int, int]]:
    """The offsets of pieces, those of neighbours together."""
    runs: list[tuple[int, int]] = []
    for _, piece in pieces:
        start = runs.pop()[0] if runs and runs[-1][1] == piece.start else piece.start
        runs.append((start, piece.end))
    return runs


def _report(table: str, name: TopicName, change: _Change, expired: int, *, dry_run: bool, seconds: float) -> JobReport:
    pieces = [piece for found in change.wanted.values() for _, piece in found]
    parts = tuple(
        Part(
            topic=str(name),
            partition=partition,
            figures={
                "files": len(found),
                "records": sum(piece.records for _, piece in found),
                "offsets": str(_runs(found)),
            },
        )
        for partition, found in sorted(change.wanted.items())
    )
    figures = {
        "files": len(pieces),
        "added": len(change.added),
        "removed": len(change.removed),
        "snapshots expired": expired,
    }
    done = f"{len(change.added)} files added, {len(change.removed)} removed" if change.is_needed else "nothing to do"
    return JobReport(
        job="register",
        summary=f"table {table} names {len(pieces)} Parquet files: {done}",
        dry_run=dry_run,
        figures=dict(figures),
        parts=parts,
        seconds=seconds,
    )
