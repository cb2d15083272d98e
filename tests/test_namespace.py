"""The public names of `forebay` are one flat, sorted list, and nothing else is visible."""

from __future__ import annotations

import types

import forebay


def test_public_names_are_sorted() -> None:
    assert list(forebay.__all__) == sorted(forebay.__all__)


def test_public_names_are_what_is_visible() -> None:
    visible = {name for name in dir(forebay) if not name.startswith("_") and name != "annotations"}
    rooms = {name for name in visible if isinstance(getattr(forebay, name), types.ModuleType)}

    assert visible - rooms == {name for name in forebay.__all__ if not name.startswith("_")}


def test_public_names_resolve() -> None:
    assert [name for name in forebay.__all__ if not hasattr(forebay, name)] == []
