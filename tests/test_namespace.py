"""The public names of `forebay` are one flat, sorted list, and nothing else is visible; old paths stay."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
import types
import typing
from collections.abc import Iterator
from typing import Final

import pyarrow as pa
import pytest

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
OLD_PATHS: Final = {
    "forebay.testing.blobs": "forebay.testing.simulated.blobs",
    "forebay.testing.catalogs": "forebay.testing.checks.catalogs",
    "forebay.testing.clock": "forebay.testing.simulated.clock",
    "forebay.testing.conformance": "forebay.testing.checks.conformance",
    "forebay.testing.crashes": "forebay.testing.simulated.crashes",
    "forebay.testing.cursors": "forebay.testing.checks.cursors",
    "forebay.testing.damage": "forebay.testing.simulated.damage",
    "forebay.testing.disk": "forebay.testing.simulated.disk",
    "forebay.testing.durability": "forebay.testing.simulated.durability",
    "forebay.testing.faults": "forebay.testing.simulated.faults",
    "forebay.testing.history": "forebay.testing.checks.history",
    "forebay.testing.interleavings": "forebay.testing.checks.interleavings",
    "forebay.testing.invariants": "forebay.testing.checks.invariants",
    "forebay.testing.metadata": "forebay.testing.simulated.metadata",
    "forebay.testing.moves": "forebay.testing.checks.moves",
    "forebay.testing.schedules": "forebay.testing.checks.schedules",
    "forebay.testing.trace": "forebay.testing.simulated.trace",
    "forebay.testing.volume": "forebay.testing.simulated.volume",
}


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


@pytest.mark.parametrize("old", OLD_PATHS)
def test_a_module_that_moved_is_the_same_module_under_its_old_path(old: str) -> None:
    found = importlib.import_module(old)

    assert found is importlib.import_module(OLD_PATHS[old])
    assert found.__name__ == OLD_PATHS[old]
    assert found.__spec__ is not None and found.__spec__.name == OLD_PATHS[old]
    assert getattr(importlib.import_module("forebay.testing"), old.rpartition(".")[2]) is found


def test_old_paths_come_first_in_a_program_of_their_own_and_others_stay_unknown() -> None:
    script = """
from forebay.testing.disk import SimulatedDisk
from forebay.testing import clock
import forebay.testing.trace, forebay.testing.simulated.disk, forebay.testing.simulated.clock, sys
assert SimulatedDisk is forebay.testing.simulated.disk.SimulatedDisk
assert clock is forebay.testing.simulated.clock and forebay.testing.trace.Trace
assert "forebay.testing.checks.conformance" not in sys.modules, "only what was asked for is loaded"
import forebay.testing.nowhere
"""

    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)

    assert ended.stderr.endswith("ModuleNotFoundError: No module named 'forebay.testing.nowhere'\n")


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
