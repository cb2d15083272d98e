"""The Parquet segments of a topic as an Iceberg table, without copying: the table names the objects of history.

A registration makes the table name exactly the Parquet objects that the catalog of each partition names now, in one
snapshot; what is there already is left as it is, so it may be repeated at will. Objects are written down as named
before a snapshot names them, and stay so, and are not swept, while a kept snapshot does.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from forebay.cleanup.tables import TableObjects
from forebay.errors import Conflict, Unavailable, Unsupported
from forebay.format.metadata.descriptor import DescriptorKind, SegmentDescriptor
from forebay.format.metadata.keys import registrar_key
from forebay.format.parquet.file import SCHEMA
from forebay.metadata.leases import Lease, leased
from forebay.spark.jobs.reports import JobReport, Part
from forebay.spark.place.addresses import address_of, key_of
from forebay.spark.place.location import Location
from forebay.spark.place.opening import Opened, opened
from forebay.spark.tables.catalog import find_table, identifier, look_up_table, open_catalog
from forebay.spark.tables.upkeep import expire, named_files, properties_of
from forebay.topics import Engine, TopicName, TopicSpec, refs_of

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.manifest import DataFile
    from pyiceberg.table import Table


OFFSETS: Final = "forebay.offsets"
"""The property of a snapshot that says which offsets of each partition it shows, as `{"0": [[start, stop], …]}`."""
TOPIC_ID: Final = "forebay.topic-id"
LEASE_WAIT_SECONDS: Final = 30.0
LEASE_SECONDS: Final = 30.0


class _Change(NamedTuple):
    """What a registration has to do."""

    wanted: dict[int, list[tuple[str, SegmentDescriptor]]]
    """By partition: the addresses of its Parquet objects, in order."""
    added: list[str]
    removed: list[DataFile]

    @property
    def is_needed(self) -> bool:
        return bool(self.added or self.removed)


def run(location: Location, topic: str, *, dry_run: bool = False) -> JobReport:
    """Let the table of a topic name its compacted history as it is now; old snapshots are expired.

    The table has the name of the topic in the catalog of the settings (`table.…`), and is made if it is not there.
    Raises `Unavailable` while another registration of the topic runs, `Conflict` if another program changed the table.
    """
    name = TopicName.parse(topic)
    with opened(location, read_only=dry_run) as found:
        begun = found.clock.monotonic()
        spec = found.definitions.get(name)
        if spec.engine is not Engine.SEGMENT:
            raise Unsupported(f'{name} lives on engine "{spec.engine}" and has no history: copy it to a segment topic')
        if dry_run:
            change, expired = change_of(found, spec, look_up_table(location, identifier(name))), 0
        else:
            with contextlib.closing(open_catalog(location)) as catalog:
                change, expired = _leased(found, spec, catalog)
        return _report(name, change, expired, dry_run=dry_run, seconds=found.clock.monotonic() - begun)


def _leased(found: Opened, spec: TopicSpec, catalog: Catalog) -> tuple[_Change, int]:
    key = registrar_key(spec.namespace, spec.topic, prefix=found.settings.metadata.prefix)
    what = f"registration of {spec.name}"
    lease_s = max(LEASE_SECONDS, found.settings.metadata.lease_ttl_s)
    with (
        leased(found.metadata, key, what, ttl_s=lease_s, wait_s=LEASE_WAIT_SECONDS, clock=found.clock) as lease,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        table = find_table(catalog, identifier(spec.name)) or _made(catalog, spec)
        prefix = found.settings.metadata.prefix
        tabled = TableObjects(found.metadata, prefix, spec.namespace, spec.topic, spec.topic_id, clock=found.clock)
        change = change_of(found, spec, table)
        if change.is_needed:
            _name(found, spec, table, tabled, change, lease)
        expired = expire(table, found.settings.table, found.clock.now_ms())
        lease.check()
        tabled.put(_keys(found, named_files(table)), found.new_objects().store, held=[lease.held])
        return change, expired


def _made(catalog: Catalog, spec: TopicSpec) -> Table:
    catalog.create_namespace_if_not_exists((spec.namespace,))
    return catalog.create_table(identifier(spec.name), schema=SCHEMA, properties={TOPIC_ID: spec.topic_id})


def change_of(found: Opened, spec: TopicSpec, table: Table | None) -> _Change:
    wanted = {ref.partition: list(_parquet(found, found.catalog(ref).descriptors())) for ref in refs_of(spec)}
    present = {} if table is None else {file.file_path: file for file in _current(table)}
    addresses = {address for pieces in wanted.values() for address, _ in pieces}
    return _Change(
        wanted,
        sorted(addresses - present.keys()),
        [file for address, file in sorted(present.items()) if address not in addresses],
    )


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


def _current(table: Table) -> list[DataFile]:
    return [task.file for task in table.scan().plan_files()]


def _name(found: Opened, spec: TopicSpec, table: Table, tabled: TableObjects, change: _Change, lease: Lease) -> None:
    """Make the snapshot. Its objects are noted first, and seen to be history still: then no sweep takes them."""
    store = found.new_objects().store
    keys = {piece.object_key for pieces in change.wanted.values() for _, piece in pieces}
    tabled.put(tabled.objects(store) | keys, store, held=[lease.held])
    if change_of(found, spec, table).added != change.added:
        raise Conflict(f"the history of {spec.name} was compacted meanwhile: run it again")
    lease.check()
    from pyiceberg.exceptions import CommitFailedException, ValidationException
    from pyiceberg.io.pyarrow import parquet_file_to_data_file
    from pyiceberg.table import TableProperties

    with table.transaction() as changing:
        # The files have no ids for their columns: the table knows them by their names.
        mapping = table.schema().name_mapping.model_dump_json()
        kept = {TableProperties.DEFAULT_NAME_MAPPING: mapping, TOPIC_ID: spec.topic_id, **properties_of(table)}
        changing.set_properties(kept)
        shown = msgspec.json.encode({str(number): _runs(pieces) for number, pieces in change.wanted.items()}).decode()
        try:
            with changing.update_snapshot(snapshot_properties={OFFSETS: shown}).overwrite() as update:
                for file in change.removed:
                    update.delete_data_file(file)
                for address in change.added:
                    update.append_data_file(parquet_file_to_data_file(table.io, changing.table_metadata, address))
        except (CommitFailedException, ValidationException) as error:
            raise Conflict(f"the table of {spec.name} was changed by another program: {error}; run it again") from error


def _runs(pieces: list[tuple[str, SegmentDescriptor]]) -> list[tuple[int, int]]:
    """The offsets of pieces, those of neighbours together."""
    runs: list[tuple[int, int]] = []
    for _, piece in pieces:
        start = runs.pop()[0] if runs and runs[-1][1] == piece.start else piece.start
        runs.append((start, piece.end))
    return runs


def _keys(found: Opened, addresses: Iterable[str]) -> set[str]:
    return {key for address in addresses if (key := key_of(found, address)) is not None}


def _report(name: TopicName, change: _Change, expired: int, *, dry_run: bool, seconds: float) -> JobReport:
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
        summary=f"table {'.'.join(identifier(name))} names {len(pieces)} Parquet files: {done}",
        dry_run=dry_run,
        figures=dict(figures),
        parts=parts,
        seconds=seconds,
    )
