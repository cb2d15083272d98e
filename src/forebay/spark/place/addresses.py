"""Where an object of history lies, as an address that engines other than Forebay understand.

Knows what the names of stores in descriptors mean for a location; opens nothing.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from forebay.format.metadata.descriptor import SegmentDescriptor

if TYPE_CHECKING:
    from forebay.spark.place.broker import BrokerPlace
    from forebay.spark.place.opening import Opened

FILE: Final = "file://"
_SCHEMES: Final = {"s3": "s3", "gcs": "gs", "azure": "abfs"}
_SPARK_SCHEMES: Final = {"s3a": "s3", "s3n": "s3", "abfss": "abfs"}
"""Other words for a scheme that mean the same store."""
_PATTERN: Final = re.compile(r"[\\*?\[\]{}]")
"""What Spark takes for more than itself in the name of a file to read."""


def address_of(found: Opened | BrokerPlace, descriptor: SegmentDescriptor) -> str | None:
    """The address of the object; `None` if it lies where only its owner finds it."""
    prefix = _prefixes(found).get(descriptor.store)
    return None if prefix is None else f"{prefix}{descriptor.object_key}"


def key_of(found: Opened | BrokerPlace, address: str) -> str | None:
    """The key of the object with this address; `None` if it lies in none of the stores of the location."""
    for prefix in _prefixes(found).values():
        if address.startswith(prefix):
            return address.removeprefix(prefix)
    return None


def literal(address: str) -> str:
    """The address as it is given to Spark's readers, which otherwise take some characters in it for a pattern."""
    return _PATTERN.sub(r"\\\g<0>", address)


def canonical(address: str) -> str:
    """One name for one place: a path without links, also of `file:`; else the URL without needless slashes."""
    scheme, separator, rest = address.partition(":/")
    if not separator or scheme == "file":
        return str(Path(f"/{rest}" if separator else address).resolve())
    return f"{_SPARK_SCHEMES.get(scheme, scheme)}:/{posixpath.normpath(rest)}"


def _prefixes(found: Opened | BrokerPlace) -> dict[str, str]:
    """What the address of every object begins with, by the name of its store."""
    places, settings = found.places, found.settings
    prefixes: dict[str, str] = {}
    if found.directory is not None:
        prefixes[places.loads_name] = _directory(found.directory.loads)
    root = settings.store.root if settings.is_shared else settings.storage.handoff_root
    if places.store is not None and root is not None:
        scheme = _SCHEMES.get(settings.store.backend)
        prefixes[places.store_name] = _directory(root) if scheme is None else f"{scheme}://{root}/"
    return prefixes


def _directory(path: str) -> str:
    # Not quoted: neither Spark nor PyIceberg takes "%20" for a space.
    return f"{FILE}{PurePosixPath(path)}/"
