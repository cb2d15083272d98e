"""Upkeep of open tables: old snapshots are expired, and files that no snapshot names any more are removed.

What goes is the table's own: its metadata, and Parquet files in folders that bear its id. Files that a table merely
names, such as the history of a topic, are never touched here.
"""

from __future__ import annotations

import contextlib
import logging
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final

from forebay.blobs import DirectoryStore
from forebay.clock import SystemClock
from forebay.disk import SystemDisk
from forebay.settings import TableSettings
from forebay.spark.place.addresses import FILE

if TYPE_CHECKING:
    from pyiceberg.io import FileIO
    from pyiceberg.manifest import ManifestFile
    from pyiceberg.table import Table
    from pyiceberg.table.metadata import TableMetadata


logger = logging.getLogger(__name__)

EXPIRED: Final = "forebay.expired-since"
"""Of a table: its metadata before an expiry whose files are not removed yet."""
_SMALL: Final = {
    "write.metadata.delete-after-commit.enabled": "true",
    "commit.manifest-merge.enabled": "true",
}
_COMMIT: Final = re.compile(r"/snap-\d+-\d+-([0-9a-f-]{36})\.avro$")
"""The id of a commit in the name of its list of manifests."""


def properties_of(table: Table) -> dict[str, str]:
    """What keeps the metadata of a table small, as far as the user did not choose otherwise."""
    return {name: chosen for name, chosen in _SMALL.items() if name not in table.properties}


def own_folder(table: Table, name: str) -> str:
    """Where files of this table alone are written. Several tables may share one location, once one was renamed."""
    return f"{table.location()}/{name}/{table.metadata.table_uuid}"


def expire(table: Table, settings: TableSettings, now_ms: int, *, at_least: int = 1) -> int:
    """Expire the snapshots that are not kept any longer; how many. Branches, tags and the current one always stay.

    On return the manifests that only they named are gone, also those of an expiry that was cut short. Fewer than
    `at_least` wait for others.
    """
    from pyiceberg.exceptions import CommitFailedException
    from pyiceberg.table.update.snapshot import ExpireSnapshots

    if EXPIRED in table.properties:
        _remove_metadata(table, table.properties[EXPIRED])
    old = _old(table, settings, now_ms)
    try:
        if len(old) >= at_least:
            before = table.metadata_location
            with table.transaction() as changing:
                changing.set_properties({EXPIRED: before, **properties_of(table)})
                ExpireSnapshots(changing).by_ids(old).commit()
            _remove_metadata(table, before)
        if EXPIRED in table.properties:
            with table.transaction() as changing:
                changing.remove_properties(EXPIRED)
    except (CommitFailedException, ValueError) as error:
        table.refresh()
        name = ".".join(table.name())
        logger.info("%s was changed by another while snapshots were expired; the next run sees to it: %s", name, error)
        return 0
    return len(old) if len(old) >= at_least else 0


def _old(table: Table, settings: TableSettings, now_ms: int) -> list[int]:
    protected = {table.metadata.current_snapshot_id, *(ref.snapshot_id for ref in table.refs().values())}
    newest_first = sorted(table.snapshots(), key=lambda one: (one.sequence_number or 0, one.timestamp_ms), reverse=True)
    before = now_ms - settings.snapshots_kept_s * 1000
    # A reader may have begun with a snapshot up to the moment when the next one took its place, however old it was.
    followed = {one.snapshot_id: one.timestamp_ms for one in newest_first}
    for one in reversed(newest_first):
        if one.parent_snapshot_id is not None:
            followed[one.parent_snapshot_id] = one.timestamp_ms
    return [
        snapshot.snapshot_id
        for place, snapshot in enumerate(newest_first)
        if snapshot.snapshot_id not in protected
        and (place >= settings.snapshots_kept_max or followed[snapshot.snapshot_id] <= before)
    ]


def _remove_metadata(table: Table, before: str) -> None:
    """Remove manifests and their lists that the metadata named before, and no snapshot does now."""
    from pyiceberg.serializers import FromInputFile

    try:
        earlier: TableMetadata = FromInputFile.table_metadata(table.io.new_input(before))
    except FileNotFoundError:
        return  # too many commits ago
    known = {snapshot.snapshot_id for snapshot in table.snapshots()}
    kept = {manifest.manifest_path for manifest in _manifests(table)}
    for snapshot in earlier.snapshots:
        if snapshot.snapshot_id in known:
            continue
        try:
            manifests = snapshot.manifests(table.io)
        except FileNotFoundError:
            continue  # its list goes last
        paths = {manifest.manifest_path for manifest in manifests}
        for path in (paths | set(_merged(snapshot.manifest_list, paths))) - kept:
            delete_file(table, path)
        delete_file(table, snapshot.manifest_list)


def _merged(manifest_list: str, manifests: Iterable[str]) -> Iterator[str]:
    """Manifests that a commit wrote and merged into another one at once: PyIceberg leaves them."""
    commit = _COMMIT.search(manifest_list)
    if commit is None:
        return
    numbers = [int(found[1]) for path in manifests if (found := re.search(rf"/{commit[1]}-m(\d+)\.avro$", path))]
    for number in range(max(numbers, default=0)):
        yield f"{posixpath.dirname(manifest_list)}/{commit[1]}-m{number}.avro"


def delete_file(table: Table, address: str) -> None:
    _delete(table.io, address)


def _delete(io: FileIO, address: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        io.delete(address)


def _manifests(table: Table) -> Iterator[ManifestFile]:
    """Every manifest that some snapshot names, once."""
    seen: set[str] = set()
    for snapshot in table.snapshots():
        for manifest in snapshot.manifests(table.io):
            if manifest.manifest_path not in seen:
                seen.add(manifest.manifest_path)
                yield manifest


def named_files(table: Table) -> Iterator[str]:
    """The address of every file that some kept snapshot names."""
    for manifest in _manifests(table):
        for entry in manifest.fetch_manifest_entry(table.io, discard_deleted=True):
            yield entry.data_file.file_path


def remove_strays(table: Table, folder: str, *, grace_s: int, now_ms: int) -> int:
    """Remove Parquet files of the folder that no snapshot names once they are older than the grace; how many."""

    def named() -> Iterator[str]:
        table.refresh()
        return named_files(table)

    return remove_unnamed(table.io, folder, named, grace_s=grace_s, now_ms=now_ms)


def remove_unnamed(io: FileIO, folder: str, named: Callable[[], Iterable[str]], *, grace_s: int, now_ms: int) -> int:
    """Remove Parquet files of the folder that are not `named` once they are older than the grace; how many.

    They are of runs that were killed, or of snapshots that were expired. What a task had begun to write in a directory
    goes as well; a bucket forgets unfinished uploads by a rule of its own.
    """
    clear_uploads(folder, grace_s)
    present = _aged(io, folder, now_ms - grace_s * 1000)
    if not present:
        return 0
    # By name alone: names are unique, and one file has many addresses.
    kept = {posixpath.basename(address) for address in named()}
    strays = sorted(present - kept)
    for name in strays:
        _delete(io, f"{folder}/{name}")
    if strays:
        logger.info("%s: %d files that no snapshot names are removed", folder, len(strays))
    return len(strays)


def clear_uploads(folder: str, grace_s: int) -> None:
    """Remove files that a killed task had begun to write into a directory."""
    path = folder.removeprefix(FILE)
    with contextlib.closing(SystemDisk()) as disk:
        if folder.startswith(FILE) and disk.exists(path):
            DirectoryStore(path, disk=disk, clock=SystemClock()).open().abort_stale_uploads(grace_s)


def _aged(io: FileIO, folder: str, until_ms: int) -> set[str]:
    """The names of Parquet files in a folder that were not touched since."""
    from pyarrow.fs import FileSelector
    from pyiceberg.io.pyarrow import PyArrowFileIO

    if not isinstance(io, PyArrowFileIO):
        logger.info("%s cannot be listed through %s: files of killed runs stay there", folder, type(io).__name__)
        return set()
    scheme, netloc, path = PyArrowFileIO.parse_location(folder, io.properties)
    found = io.fs_by_scheme(scheme, netloc).get_file_info(FileSelector(path, allow_not_found=True))
    return {
        file.base_name
        for file in found
        if file.is_file
        and file.extension == "parquet"
        and file.mtime_ns is not None
        and file.mtime_ns // 1_000_000 <= until_ms
    }
