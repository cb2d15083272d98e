"""The public names of `forebay` are one flat, sorted list, and nothing else is visible."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Iterator
from typing import Final

import pyarrow as pa

import forebay

INSIDE: Final = {
    "Floor",
    "Following",
    "Loads",
    "MetadataStore",
    "Page",
    "Progress",
    "Reach",
    "ReadShard",
    "RecordedShard",
    "SegmentPage",
    "Ticket",
    "TierUsage",
    "TopicViews",
}
"""Types that Forebay's own rooms pass to each other by methods of public classes."""


def test_public_names_are_sorted() -> None:
    assert list(forebay.__all__) == sorted(forebay.__all__)


def test_public_names_are_what_is_visible() -> None:
    visible = {name for name in dir(forebay) if not name.startswith("_") and name != "annotations"}
    rooms = {name for name in visible if isinstance(getattr(forebay, name), types.ModuleType)}

    assert visible - rooms == {name for name in forebay.__all__ if not name.startswith("_")}


def test_public_names_resolve() -> None:
    assert [name for name in forebay.__all__ if not hasattr(forebay, name)] == []


def test_what_public_calls_return_can_be_imported_from_the_package() -> None:
    public = [named for name in forebay.__all__ if inspect.isclass(named := getattr(forebay, name))]

    missing = {
        f"{owner.__name__}.{method} gives {kind.__name__}"
        for owner in public
        for method, kind in _returned(owner)
        if kind.__name__ not in INSIDE and getattr(forebay, kind.__name__, None) is not kind
    }

    assert missing == set()


def _returned(owner: type) -> Iterator[tuple[str, type]]:
    """The classes of this package in what public methods and properties return."""
    for name, member in inspect.getmembers(owner):
        call = member.fget if isinstance(member, property) else member
        if not name.startswith("_") and callable(call) and hasattr(call, "__annotations__"):
            returned = typing.get_type_hints(call, localns={"pa": pa}).get("return")
            yield from ((name, kind) for kind in _classes(returned) if kind.__module__.startswith("forebay"))


def _classes(hint: object) -> Iterator[type]:
    if inspect.isclass(origin := typing.get_origin(hint) or hint):
        yield origin
    for argument in typing.get_args(hint):
        yield from _classes(argument)
