"""Delta tables: the one module that knows them. Needs neither Spark nor a jar.

A commit is one file of the table's log that exactly one writer can create. It adds Parquet files that lie already where
they are, records in its own metadata which offsets it brought, and in transactions of the application how far the table
has a topic or a query. Delta takes the same transaction twice: a writer looks at the table first, and a commit is
refused as soon as another came between.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import unquote

import pyarrow as pa

from forebay.clock import SystemClock
from forebay.disk import SystemDisk
from forebay.errors import Conflict, Invalid, Unavailable, Unsupported
from forebay.settings import TableSettings
from forebay.spark.place.addresses import FILE
from forebay.spark.place.location import Location
from forebay.spark.tables.catalog import file_properties, files_io, warehouse_of
from forebay.spark.tables.commit import (
    OFFSETS,
    TOPIC,
    TOPIC_ID,
    WHERE,
    Overtaken,
    Ranges,
    TableChange,
    already_there,
    decode_ranges,
)
from forebay.spark.tables.delta_stats import stats_of
from forebay.spark.tables.upkeep import remove_unnamed

if TYPE_CHECKING:
    from deltalake import CommitProperties, DeltaTable, Field, Schema, Transaction
    from deltalake.transaction import AddAction


FOLDER: Final = "delta"
"""Below the warehouse: tables that are named and not given by their address."""
LOG: Final = "_delta_log"
QUERY: Final = "forebay.query."
"""With the id of a query behind it: the transaction that counts its batches."""
PLACE: Final = "forebay.topic."
"""With the id of a topic behind it: how many partitions it had. With `.` and a partition: its next offset."""
_OPTIONS: Final = {
    "s3.endpoint": "AWS_ENDPOINT_URL",
    "s3.region": "AWS_REGION",
    "s3.access-key-id": "AWS_ACCESS_KEY_ID",
    "s3.secret-access-key": "AWS_SECRET_ACCESS_KEY",
    "s3.session-token": "AWS_SESSION_TOKEN",
}
"""What the files of a table ask for, by the names of the settings and of deltalake."""
_MAPPING: Final = "delta.columnMapping.mode"
_RULES: Final = ("delta.generationExpression", "delta.identity.", "delta.invariants")
"""Of a column: rules for its values, which Forebay neither checks nor works out."""
_WIDER: Final = {
    "byte": ("short", "integer", "long"),
    "short": ("integer", "long"),
    "integer": ("long",),
    "float": ("double",),
}
"""Types that hold every value of a narrower one."""


class _Creation(NamedTuple):
    """What a table is made with."""

    schema: Schema
    configuration: Mapping[str, str]


def address_of_table(location: Location, name: str | tuple[str, str]) -> str:
    """Where the table of a name lies: `NAMESPACE.NAME` in the warehouse of the settings, else the address itself."""
    if isinstance(name, str) and ("/" in name or "://" in name):
        address = name.rstrip("/")
        return address if "://" in address else f"{FILE}{Path(address).absolute()}"
    namespace, _, table = name.rpartition(".") if isinstance(name, str) else (name[0], ".", name[1])
    if not (namespace and table):
        raise Invalid(f"{name!r} names no table: write NAMESPACE.NAME, such as shop.orders, or a path such as ./orders")
    warehouse = warehouse_of(location)
    if warehouse is None:
        raise Invalid(f"table.warehouse is not set: say where {namespace}.{table} lies, or give its path")
    return f"{warehouse.rstrip('/')}/{FOLDER}/{namespace}/{table}"


class DeltaLakeTable:
    """A `FormatTable` by its address, or by its name in the warehouse of the settings. It holds nothing open."""

    def __init__(self, location: Location, name: str | tuple[str, str]) -> None:
        self.name = name if isinstance(name, str) else ".".join(name)
        self.address = address_of_table(location, name)
        self._location = location
        self._clock = SystemClock()
        self._found: DeltaTable | None = None
        self._creation: _Creation | None = None
        """What a new table is made with, until it is committed."""

    def look(self) -> bool:
        self._found = self._at()
        return self._found is not None

    def _at(self, version: int | None = None) -> DeltaTable | None:
        """The table at a version, or as it is now; `None` if there is none."""
        if self.address.startswith(FILE) and not Path(f"{self._path}/{LOG}").is_dir():
            return None
        _require()
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError, TableNotFoundError

        try:
            return DeltaTable(self._path, version=version, storage_options=self._options())
        except TableNotFoundError:
            return None
        except (DeltaError, OSError) as error:
            raise Unavailable(f"the Delta table {self.address} does not open: {error}") from error

    @property
    def _path(self) -> str:
        """The address as deltalake takes it: a local path is not quoted."""
        return self.address.removeprefix(FILE)

    def _options(self) -> dict[str, str]:
        known = file_properties(self._location)
        options = {ours: known[name] for name, ours in _OPTIONS.items() if name in known}
        if options.get("AWS_ENDPOINT_URL", "").startswith("http://"):
            options["AWS_ALLOW_HTTP"] = "true"
        return options

    def make(self, schema: pa.Schema, properties: Mapping[str, str], *, new: bool = False) -> None:
        if self.look():
            if new:
                raise already_there(self.name)
            self._check_writable()
            return
        kept = f"interval {self._location.settings().table.snapshots_kept_s} seconds"
        configuration = {"delta.logRetentionDuration": kept, "delta.deletedFileRetentionDuration": kept, **properties}
        creation = _Creation(_delta_schema(schema, self.name), configuration)
        if new:
            self._creation = creation
            return
        self._create_empty(creation)
        self._sync(0)
        self.look()

    def _create_empty(self, creation: _Creation) -> None:
        """Make the table by a commit of its own, if no other writer is faster. It may have properties of ours."""
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError

        try:
            DeltaTable.create(
                self._path,
                schema=creation.schema,
                configuration=creation.configuration,
                storage_options=self._options(),
                raise_if_key_not_exists=False,
            )
        except DeltaError as error:
            if not self.look():
                raise Unavailable(f"the Delta table {self.address} cannot be made: {error}") from error

    def _create(self, creation: _Creation, change: TableChange) -> None:
        """Make the table by the commit of a change; `Overtaken` if there is one. Deltalake refuses properties that it
        does not know here.
        """
        from deltalake.exceptions import DeltaError
        from deltalake.transaction import create_table_with_add_actions

        try:
            create_table_with_add_actions(
                self._path,
                creation.schema,
                self._actions(change),
                mode="error",
                configuration=creation.configuration,
                storage_options=self._options(),
                commit_properties=_no_retry(self._said(change), self._transactions(change)),
            )
        except DeltaError as error:
            if not self.look():
                raise Unavailable(f"the Delta table {self.address} cannot be made: {error}") from error
            raise Overtaken(str(error)) from error

    def _check_writable(self) -> None:
        """`Unsupported` names what the table asks of its writers that Forebay does not do."""
        found = self.table.metadata()
        asked = [
            name
            for name, value in found.configuration.items()
            if name.startswith("delta.constraints.") or (name == _MAPPING and value != "none")
        ]
        for field in self.table.schema().fields:
            asked += [f"{rule} of the column {field.name}" for rule in field.metadata if rule.startswith(_RULES)]
        if found.partition_columns:
            asked.append(f"partitions by {', '.join(found.partition_columns)}")
        if asked:
            raise Unsupported(f"the Delta table {self.name} has {asked[0]}, which Forebay does not write: name another")

    @property
    def table(self) -> DeltaTable:
        """The table as deltalake has it."""
        assert self._found is not None, "look or make comes first"
        return self._found

    def close(self) -> None:
        self._found = None

    def fit(self, schema: pa.Schema) -> None:
        known = {field.name: field for field in self.table.schema().fields}
        given = _delta_schema(schema, self.name).fields
        for field in given:
            if field.name in known:
                self._check_type(field, known[field.name])
        missing = [field for field in given if field.name not in known]
        if missing:
            try:
                with _refused():
                    self.table.alter.add_columns(missing, commit_properties=_no_retry())
            except Overtaken as error:
                raise Conflict(f"{self.name} was changed by another job meanwhile: run it again ({error})") from error
            self.look()

    def check(self, schema: pa.Schema) -> pa.Schema:
        columns = self._creation.schema if self._creation is not None else self.table.schema()
        known = {field.name: field for field in columns.fields}
        if known.keys() != set(schema.names):
            raise Invalid(
                f"the table {self.name} has the columns {', '.join(known)}, the rows have {', '.join(schema.names)}: "
                "name another table, or make them equal"
            )
        for field in _delta_schema(schema, self.name).fields:
            self._check_type(field, known[field.name])
        # Files have the types of the table: what is narrower is made wider as it is written.
        wider = pa.schema(columns)
        return pa.schema([wider.field(name) for name in schema.names])

    def _check_type(self, ours: Field, theirs: Field) -> None:
        """`Invalid` if the table has the column as a type that the rows' type does not fit into."""
        given, known = (json.loads(field.to_json()) for field in (ours, theirs))
        if (given["nullable"] and not known["nullable"]) or not _type_fits(given["type"], known["type"]):
            raise Invalid(
                f"column {ours.name} of the table {self.name} is {_shown(known)}, and the rows have {_shown(given)}: "
                "cast it, or name another table"
            )

    def file_schema(self, schema: pa.Schema) -> pa.Schema:
        return schema

    def version(self) -> object:
        return self.table.version() if self._creation is None else None

    def where(self) -> str:
        return self.table.metadata().configuration.get(WHERE, "") if self._found is not None else ""

    def topic_id(self) -> str:
        return self.table.metadata().configuration.get(TOPIC_ID, "") if self._found is not None else ""

    def next_offsets(self) -> dict[int, int]:
        topic_id = self.topic_id()
        if not topic_id:
            return {}
        place = f"{PLACE}{topic_id}"
        count = self.table.transaction_version(place) or 0
        found = {number: self.table.transaction_version(f"{place}.{number}") for number in range(count)}
        return {number: end for number, end in found.items() if end is not None}

    def last_batch(self, query_id: str) -> int:
        found = self.table.transaction_version(f"{QUERY}{query_id}")
        return -1 if found is None else found

    def commits(self) -> Iterator[Ranges]:
        for entry in self.table.history():
            if OFFSETS in entry:
                yield decode_ranges(entry[OFFSETS])

    def files(self) -> dict[str, Mapping[str, Any]]:
        return {} if self._found is None else files_in(self._found, self.address)

    def named_files(self, settings: TableSettings, now_ms: int) -> Iterator[str]:
        before = now_ms - settings.snapshots_kept_s * 1000
        followed: int | None = None
        for entry in self.table.history(settings.snapshots_kept_max):
            # A reader may have begun with a version up to the moment when the next one took its place.
            if followed is not None and followed <= before:
                break
            followed = entry["timestamp"]
            found = self._at(entry["version"])
            if found is not None:
                yield from files_in(found, self.address)

    def lists_removed(self) -> bool:
        return False  # what it says of a file has no bounds of keys and values

    def folder(self, name: str) -> str:
        return f"{self.address}/{name}"

    def give_up(self, folder: str) -> None:
        """Nothing: others may write into the folder. `remove_strays` sees to it once there is a table."""

    def expire(self, settings: TableSettings, now_ms: int, *, at_least: int = 1) -> int:
        if self.table.version() % at_least:
            return 0  # the log is read from end to end to count: not behind every batch of a stream
        before = now_ms - settings.snapshots_kept_s * 1000
        old = sum(entry["timestamp"] <= before for entry in self.table.history()[1:])
        if old < at_least:
            return 0
        # The log that leads to a version is removed up to a checkpoint, by Delta's own rule for its age.
        self.table.create_checkpoint()
        self._sync(self.table.version())
        self.table.cleanup_metadata()
        left = sum(entry["timestamp"] <= before for entry in self.table.history()[1:])
        return int(old - left)

    def remove_strays(self, folder: str, settings: TableSettings, now_ms: int) -> int:
        def named() -> Iterator[str]:
            self.look()
            yield from self.files()
            # Removed from the table, by other programs too, and still named by versions that are kept. Delta counts
            # in hours: those that were begun stay.
            yield from set(self._removed(0)) - set(self._removed(math.ceil(settings.snapshots_kept_s / 3600)))

        io = files_io(self._location, folder)
        return remove_unnamed(io, folder, named, grace_s=settings.orphan_grace_s, now_ms=now_ms)

    def _removed(self, hours: int) -> list[str]:
        return list(self.table.vacuum(retention_hours=hours, dry_run=True, enforce_retention_duration=False))

    def attempt(self, change: TableChange) -> None:
        creation, self._creation = self._creation, None
        if creation is not None:
            self._create(creation, change)
        else:
            self._add(self.table, change)
        self.look()
        self._sync(self.table.version())

    def _add(self, table: DeltaTable, change: TableChange) -> None:
        self._claim(change)
        with _refused():
            table.create_write_transaction(
                self._actions(change),
                "overwrite" if change.replace else "append",
                table.schema(),
                commit_properties=_no_retry(self._said(change), self._transactions(change)),
            )

    def _claim(self, change: TableChange) -> None:
        """Record whose table it is, before it has anything of that topic."""
        offsets = change.offsets
        if offsets is None or offsets.topic_id == self.topic_id():
            return
        with _refused():
            self.table.alter.set_table_properties(
                {TOPIC: offsets.topic, TOPIC_ID: offsets.topic_id},
                raise_if_not_exists=False,
                commit_properties=_no_retry(),
            )

    def _said(self, change: TableChange) -> dict[str, str]:
        return change.offsets.as_properties() if change.offsets is not None else {}

    def _transactions(self, change: TableChange) -> list[Transaction]:
        from deltalake import Transaction

        found = []
        if change.offsets is not None and change.offsets.ends is not None:
            ends, place = change.offsets.ends, f"{PLACE}{change.offsets.topic_id}"
            count = max(self.table.transaction_version(place) or 0, max(ends, default=-1) + 1)
            found.append(Transaction(place, count))
            found += [Transaction(f"{place}.{partition}", end) for partition, end in ends.items()]
        if change.batch is not None:
            found.append(Transaction(f"{QUERY}{change.batch.query_id}", change.batch.number))
        return found

    def _actions(self, change: TableChange) -> list[Any]:
        from deltalake.transaction import RemoveAction

        present, now_ms = self.files() if change.removed else {}, self._clock.now_ms()
        gone = [
            RemoveAction(self._relative(address), True, now_ms, present[address]["size_bytes"], {})
            for address in sorted(change.removed)
        ]
        return [*gone, *(self._added(address, now_ms) for address in change.added)]

    def _added(self, address: str, now_ms: int) -> AddAction:
        from deltalake.transaction import AddAction

        with files_io(self._location, address).new_input(address).open() as file:
            stats = stats_of(file)
            size = file.seek(0, 2)
        return AddAction(self._relative(address), size, {}, now_ms, True, stats)

    def _relative(self, address: str) -> str:
        """A file as the log names it: below the table by its path there, elsewhere by its whole address."""
        return address.removeprefix(f"{self.address}/")

    def _sync(self, version: int) -> None:
        """Make the commit of a local table durable, which deltalake does not: a crash of the machine keeps it too."""
        if not self.address.startswith(FILE):
            return
        folder = f"{self._path}/{LOG}"
        with contextlib.closing(SystemDisk()) as disk:
            for name in disk.list_directory(folder):
                if name.startswith(f"{version:020d}") or name == "_last_checkpoint":
                    with contextlib.closing(disk.open(f"{folder}/{name}", writable=True)) as file:
                        file.sync()
            disk.sync_directory(folder)


def files_in(table: DeltaTable, address: str) -> dict[str, Mapping[str, Any]]:
    """The files of a version by their addresses, each with its action; the log has their names quoted."""
    actions = pa.table(table.get_add_actions(flatten=False)).to_pylist()
    found = {}
    for action in actions:
        path = unquote(action["path"])
        found[path if "://" in path else f"{FILE}{path}" if path.startswith("/") else f"{address}/{path}"] = action
    return found


def _require() -> None:
    try:
        import deltalake  # noqa: F401 - whether it is there
    except ImportError as error:
        raise Unsupported(f'Delta tables need deltalake ({error}): pip install "forebay[lake]"') from error


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """A commit that another writer's was in the way of."""
    from deltalake.exceptions import CommitFailedError

    try:
        yield
    except CommitFailedError as error:
        raise Overtaken(str(error)) from error


def _no_retry(said: dict[str, str] | None = None, transactions: list[Transaction] | None = None) -> CommitProperties:
    """Else deltalake would try again behind whatever another has committed, and rows could be there twice."""
    from deltalake import CommitProperties

    return CommitProperties(custom_metadata=said or None, max_commit_retries=0, app_transactions=transactions or None)


def _delta_schema(schema: pa.Schema, name: str) -> Any:
    """The columns as Delta has them; `Invalid` names one that it cannot have."""
    _require()
    from deltalake import Schema

    for field in schema:
        try:
            Schema.from_arrow(pa.schema([field]))
        except Exception as error:
            raise Invalid(
                f"the Delta table {name} cannot have the column {field.name}, {field.type}: {error}"
            ) from error
    return Schema.from_arrow(schema)


def _type_fits(ours: Any, theirs: Any) -> bool:
    """Whether a column of the table takes values of our type, both as the log of a table writes them."""
    if isinstance(ours, str) or isinstance(theirs, str):
        return bool(ours == theirs or (isinstance(ours, str) and theirs in _WIDER.get(ours, ())))
    if ours["type"] != theirs["type"]:
        return False
    if ours["type"] == "struct":
        there = {field["name"]: field for field in ours["fields"]}
        return there.keys() == {field["name"] for field in theirs["fields"]} and all(
            _type_fits(there[field["name"]]["type"], field["type"]) for field in theirs["fields"]
        )
    inner = ("elementType",) if ours["type"] == "array" else ("keyType", "valueType")
    return all(_type_fits(ours[name], theirs[name]) for name in inner)


def _shown(column: Mapping[str, Any]) -> str:
    return f"{_type_shown(column['type'])}{'' if column['nullable'] else ' not null'}"


def _type_shown(kind: Any) -> str:
    if isinstance(kind, str):
        return kind
    if kind["type"] == "struct":
        fields = (f"{field['name']}: {_type_shown(field['type'])}" for field in kind["fields"])
        return f"struct<{', '.join(fields)}>"
    if kind["type"] == "array":
        return f"array<{_type_shown(kind['elementType'])}>"
    return f"map<{_type_shown(kind['keyType'])}, {_type_shown(kind['valueType'])}>"
