"""The packages that Forebay uses, of its core and of each extra, as the metadata of the installed package has them."""

from __future__ import annotations

import importlib.metadata
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Final

CORE: Final = ""
"""In place of an extra: what every installation has."""
_NOT_FOR_USERS: Final = frozenset({"all", "bench", "dev", "docs", "testing"})
_REQUIREMENT: Final = re.compile(r"""([\w.-]+)[^;]*(?:;\s*extra\s*==\s*['"]([\w-]+)['"])?""")


def declared() -> Mapping[str, tuple[str, ...]]:
    """The packages of the core and of each extra for users; nothing where Forebay runs without being installed."""
    try:
        lines = importlib.metadata.requires("forebay") or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found: defaultdict[str, list[str]] = defaultdict(list)
    for line in lines:
        requirement = _REQUIREMENT.match(line)
        if requirement is not None and (requirement[2] or CORE) not in _NOT_FOR_USERS:
            found[requirement[2] or CORE].append(requirement[1])
    return {extra: tuple(names) for extra, names in found.items()}


def extra_with(module: str) -> str | None:
    """The smallest extra that brings a module, by its name or by that of a package around it."""
    package = module.partition(".")[0].replace("_", "-")
    having = [extra for extra, names in declared().items() if extra != CORE and package in names]
    return min(having, key=lambda extra: (len(declared()[extra]), extra), default=None)


def version_of(package: str) -> str | None:
    """The version of a package that is installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
