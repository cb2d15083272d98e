"""Iceberg catalogs as settings describe them, and what the rest of this room needs to know of a table.

The one room that opens such a catalog. Knows settings and PyIceberg; knows nothing of topics' histories or Spark.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from forebay.errors import Invalid, Unavailable, Unsupported
from forebay.spark.place.location import Location
from forebay.topics import TopicName

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.io import FileIO
    from pyiceberg.table import Table


NAME: Final = "forebay"
DATABASE: Final = "catalog.db"
_SQLITE: Final = "sqlite:///"
_FROM_STORE: Final = {
    "endpoint": "s3.endpoint",
    "region": "s3.region",
    "access_key_id": "s3.access-key-id",
    "secret_access_key": "s3.secret-access-key",
    "session_token": "s3.session-token",
}
"""What a store and the files of a table both ask for, by the names of each."""


def open_catalog(location: Location) -> Catalog:
    """The catalog that the settings of the location name; a SQLite file is made when it is not there.

    Raises `Invalid` or `Unavailable` that names the setting.
    """
    properties = _properties(location)
    database = _file_of(properties.get("uri"))
    if database is not None and location.settings().table.uri is None:
        database.parent.mkdir(parents=True, exist_ok=True)
    return _loaded(properties)


def look_up_table(location: Location, name: str | tuple[str, str]) -> Table | None:
    """The table of a name, if there is one, to be read: neither a catalog nor anything in it is made."""
    with _looking(location) as catalog:
        return find_table(catalog, name) if catalog is not None else None


def table_names(location: Location) -> list[str]:
    """The tables that there are."""
    with _looking(location) as catalog:
        if catalog is None:
            return []
        return [".".join(table) for space in catalog.list_namespaces() for table in catalog.list_tables(space)]


@contextlib.contextmanager
def _looking(location: Location) -> Iterator[Catalog | None]:
    """The catalog as it is, `None` if it was never made."""
    properties = _properties(location)
    database = _file_of(properties.get("uri"))
    if database is not None and not database.exists():
        yield None
        return
    with contextlib.closing(_loaded({**properties, "init_catalog_tables": "false"})) as catalog:
        yield catalog if _is_made(catalog) else None


def _is_made(catalog: Catalog) -> bool:
    """Whether a database has the tables of a catalog; other kinds are there or do not open."""
    engine = getattr(catalog, "engine", None)
    if engine is None:
        return True
    from sqlalchemy import inspect

    return bool(inspect(engine).has_table("iceberg_tables"))


def _properties(location: Location) -> dict[str, str]:
    settings = location.settings().table
    warehouse = warehouse_of(location)
    properties = {"type": settings.catalog, **file_properties(location)}
    if settings.catalog == "sql":
        # A stream keeps its connection for as long as it runs: one that the server has ended meanwhile is replaced.
        properties = {"pool_pre_ping": "true", **properties}
    if warehouse is not None:
        properties["warehouse"] = warehouse
    uri = settings.uri or _database(settings.catalog, warehouse)
    if uri is not None:
        properties["uri"] = uri
    return properties


def _loaded(properties: dict[str, str]) -> Catalog:
    try:
        from pyiceberg.catalog import load_catalog
    except ImportError as error:
        raise Unsupported(f'open tables need PyIceberg ({error}): pip install "forebay[lake]"') from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return load_catalog(NAME, **properties)
    except Exception as error:
        raise Unavailable(
            f"the {properties['type']} catalog of the settings, table.uri, does not open: {error}"
        ) from error


def _file_of(uri: str | None) -> Path | None:
    """The file of a SQLite database."""
    return Path(uri.removeprefix(_SQLITE).partition("?")[0]) if uri is not None and uri.startswith(_SQLITE) else None


def warehouse_of(location: Location) -> str | None:
    """Where tables keep their metadata, as an address; `None` if the catalog itself is to say."""
    settings = location.settings()
    chosen = settings.table.warehouse
    if chosen is None and settings.store.is_directory and settings.store.root:
        chosen = f"{settings.store.root}/tables"
    elif chosen is None and settings.store.is_directory and location.path is not None:
        chosen = f"{location.path}/tables"
    if chosen is None or "://" in chosen:
        return chosen
    return f"file://{Path(chosen).absolute()}"


def _database(kind: str, warehouse: str | None) -> str | None:
    """The SQLite file of a catalog that has no other address."""
    if kind != "sql":
        return None
    if warehouse is None or not warehouse.startswith("file://"):
        raise Invalid(
            "table.catalog is sql without table.uri, and the warehouse is no directory that a SQLite file could be in: "
            "name a directory in table.warehouse, which a location behind a broker always needs, or a database in "
            "table.uri, such as sqlite:////var/lib/forebay/catalog.db"
        )
    return f"{_SQLITE}{warehouse.removeprefix('file://')}/{DATABASE}"


def file_properties(location: Location) -> dict[str, str]:
    """What reading and writing the files of tables asks for, by the names of PyIceberg."""
    return {**_files(location), **_texts(location.settings().table.options)}


def files_io(location: Location, address: str) -> FileIO:
    """What reads and writes the files of tables at an address."""
    from pyiceberg.io import load_file_io

    return load_file_io(file_properties(location), address)


def _files(location: Location) -> dict[str, str]:
    store = location.settings().store
    if store.backend != "s3":
        return {}
    return {_FROM_STORE[name]: str(value) for name, value in store.options.items() if name in _FROM_STORE}


def _texts(options: Mapping[str, object]) -> dict[str, str]:
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in options.items()}


def identifier(topic: TopicName) -> tuple[str, str]:
    """What the table of a topic is called."""
    return (topic.namespace, topic.topic)


def find_table(catalog: Catalog, name: str | tuple[str, str]) -> Table | None:
    """The table of a name, if there is one."""
    from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

    try:
        return catalog.load_table(name)
    except (NoSuchTableError, NoSuchNamespaceError):
        return None
