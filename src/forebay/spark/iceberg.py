"""Iceberg catalogs as settings describe them, and what the rest of this room needs to know of a table.

The one room that opens such a catalog. Knows settings and PyIceberg; knows nothing of topics' histories or Spark.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final

from forebay.errors import Invalid, Unavailable, Unsupported
from forebay.spark.location import Location
from forebay.topics import TopicName

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.table import Table

NAME: Final = "forebay"
DATABASE: Final = "catalog.db"
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
    try:
        from pyiceberg.catalog import load_catalog
    except ImportError as error:
        raise Unsupported(f'open tables need PyIceberg ({error}): pip install "forebay[spark]"') from error
    settings = location.settings().table
    warehouse = warehouse_of(location)
    properties = {"type": settings.catalog, **file_properties(location)}
    if warehouse is not None:
        properties["warehouse"] = warehouse
    uri = settings.uri or _database(settings.catalog, warehouse)
    if uri is not None:
        properties["uri"] = uri
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return load_catalog(NAME, **properties)
    except Exception as error:
        raise Unavailable(
            f"the {settings.catalog} catalog of the settings, table.uri, does not open: {error}"
        ) from error


def warehouse_of(location: Location) -> str | None:
    """Where tables keep their metadata, as an address; `None` if the catalog itself is to say."""
    settings = location.settings()
    chosen = settings.table.warehouse
    if chosen is None and settings.store.backend == "directory" and settings.store.root:
        chosen = f"{settings.store.root}/tables"
    elif chosen is None and settings.store.backend == "directory" and location.path is not None:
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
            "name a database in table.uri, such as sqlite:////var/lib/forebay/catalog.db"
        )
    directory = Path(warehouse.removeprefix("file://"))
    directory.mkdir(parents=True, exist_ok=True)
    return f"sqlite:///{directory}/{DATABASE}"


def file_properties(location: Location) -> dict[str, str]:
    """What reading and writing the files of tables asks for, by the names of PyIceberg."""
    return {**_files(location), **_texts(location.settings().table.options)}


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


def find_table(catalog: Catalog, topic: TopicName) -> Table | None:
    """The table of a topic, if there is one."""
    from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError

    try:
        return catalog.load_table(identifier(topic))
    except (NoSuchTableError, NoSuchNamespaceError):
        return None
