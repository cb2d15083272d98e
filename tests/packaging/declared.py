"""What pyproject.toml declares, and what the modules of the package import."""

from __future__ import annotations

import ast
import importlib.metadata
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT: Final = Path(__file__).parents[2]
SOURCE: Final = ROOT / "src"
PROJECT: Final[dict[str, Any]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: Final[dict[str, list[str]]] = PROJECT["optional-dependencies"]
OURS: Final = {"forebay", "pyspark_forebay"}
NOT_FOR_USERS: Final = {"bench", "dev", "docs"}
"""Extras of a checkout: what works on Forebay needs, and no module of it imports."""


def required(extra: str | None = None) -> set[str]:
    """The distributions that the package itself names, with those of an extra, and of extras that it names in turn."""
    names = set[str]()
    for line in PROJECT["dependencies"] + (EXTRAS[extra] if extra else []):
        requirement = Requirement(line)
        if requirement.name == "forebay":
            names = names.union(*(required(other) for other in requirement.extras))
        else:
            names.add(canonicalize_name(requirement.name))
    return names


def closure(extra: str | None = None) -> set[str]:
    """The distributions that an installation of the package with an extra has, as those that are here require them."""
    seen = set[tuple[str, str]]()
    lines = PROJECT["dependencies"] + (EXTRAS[extra] if extra else [])
    waiting = [Requirement(line) for line in lines]
    while waiting:
        requirement = waiting.pop()
        if requirement.name == "forebay":
            waiting += [Requirement(line) for other in requirement.extras for line in EXTRAS[other]]
            continue
        for of in ("", *requirement.extras):
            if (key := (canonicalize_name(requirement.name), of)) not in seen:
                seen.add(key)
                waiting += _requirements(requirement.name, of)
    return {name for name, _ in seen}


def _requirements(distribution: str, extra: str) -> Iterator[Requirement]:
    for line in importlib.metadata.requires(distribution) or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            yield requirement


@cache
def distributions() -> dict[str, set[str]]:
    """By top-level module the distributions that bring it."""
    found = importlib.metadata.packages_distributions()
    return {module: {canonicalize_name(name) for name in names} for module, names in found.items()}


@cache
def imports() -> dict[str, set[str]]:
    """By module of the package the foreign top-level modules that it imports, at its top or inside a function."""
    return {_name(path): set(_foreign(ast.parse(path.read_text()))) for path in sorted(SOURCE.rglob("*.py"))}


def _name(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


def _foreign(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), level=0):
                found = [module]
            case _:
                continue
        tops = {name.partition(".")[0] for name in found}
        yield from tops - sys.stdlib_module_names - OURS
