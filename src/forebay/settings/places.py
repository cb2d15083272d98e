"""What `store.root` and `storage.handoff_root` mean: a directory, or a bucket of an object store. Pure.

A place may be written as a path, as `bucket/prefix`, or as the URL that other tools show. What could mean two things
is refused by its name with what to write instead, for a wrong guess ends as a directory called `s3:` or as an answer
of a service that names no setting.
"""

from __future__ import annotations

import posixpath
import re
from typing import Final, NamedTuple

from forebay.errors import Invalid

BACKENDS: Final = {"s3": "s3", "s3a": "s3", "gs": "gcs", "az": "azure"}
"""The schemes of URLs of object stores, and the `store.backend` that each stands for."""
SCHEMES: Final = {"s3": "s3", "gcs": "gs", "azure": "az"}
"""The scheme that messages write for each backend."""
_URL: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):(/.*)", re.DOTALL)
_USER: Final = re.compile(r"//[^/]*@")


class StorePlace(NamedTuple):
    """A `store.backend` and the `store.root` for it, as a path or as `bucket/prefix`."""

    backend: str
    root: str


def directory_at(setting: str, text: str) -> str:
    """The directory that the text of a setting names: a path, or `file:///path`."""
    found = _URL.fullmatch(text)
    if found is None:
        path = text
    elif found[1].lower() == "file":
        path = _path_of(setting, text, found[2])
    else:
        raise Invalid(f"{setting} is {_shown(text)}, which is no directory: write a path, or file:///path")
    if not posixpath.normpath(path).strip("/"):
        raise Invalid(f"{setting} is {_shown(text)}, the whole file system: name a directory in it")
    return path


def store_at(backend: str, root: str) -> StorePlace:
    """The place that `store.backend` and `store.root` name. A URL of an object store says its backend itself."""
    found = _URL.fullmatch(root)
    named = BACKENDS.get(found[1].lower()) if found is not None else None
    if found is not None and named is not None:
        if backend not in ("directory", named):
            raise Invalid(
                f'store.root is {_shown(root)} and store.backend is "{backend}": set store.backend to "{named}", or '
                f"write {SCHEMES[backend]}://bucket/prefix"
            )
        return StorePlace(named, _bucket_of(root, found[2], f"{found[1].lower()}://bucket/prefix"))
    if backend == "directory":
        if found is not None and found[1].lower() != "file":
            raise Invalid(
                f"store.root is {_shown(root)}, which Forebay does not know: write a path, file:///path, "
                "s3://bucket/prefix, gs://bucket/prefix or az://container/prefix"
            )
        return StorePlace(backend, directory_at("store.root", root))
    bucket = root.partition("/")[0]
    if not bucket or ":" in bucket:
        raise Invalid(
            f'store.root is {_shown(root)}, which names no bucket, and store.backend is "{backend}": write '
            f"bucket/prefix, or {SCHEMES[backend]}://bucket/prefix"
        )
    return StorePlace(backend, root)


def _path_of(setting: str, text: str, rest: str) -> str:
    """The path of a URL that begins with file:, without the host, which may be this one alone."""
    if not rest.startswith("//"):
        return rest
    host, slash, path = rest[2:].partition("/")
    if host not in ("", "localhost") or not slash:
        raise Invalid(f"{setting} is {_shown(text)}, which names no path of this machine: write file:///path")
    return f"/{path}"


def _bucket_of(text: str, rest: str, example: str) -> str:
    """`bucket/prefix` of a URL, without slashes around it."""
    if _USER.match(rest):
        raise Invalid(
            f"store.root is {_shown(text)}, with a user: credentials belong into store.options; write {example}"
        )
    place = rest.removeprefix("//").strip("/")
    if not rest.startswith("//") or rest.startswith("///") or not place:
        raise Invalid(f"store.root is {_shown(text)}, which names no bucket: write {example}")
    return place


def _shown(text: str) -> str:
    """The text of a setting, without the user's part of a URL, which may hold a secret."""
    return repr(_USER.sub("//…@", text)[:100])
