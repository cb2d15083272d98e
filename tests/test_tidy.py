"""Style as a test that only tightens: sizes, names and words that no linter rule covers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Final, TypeAlias

import pytest

pytestmark = pytest.mark.xdist_group("tidy")  # all sources are parsed once

_ROOT: Final = Path(__file__).parents[1]
_FUNCTION_LINES_MAX: Final = 50
_ANYWHERE: Final = {"handler", "helper", "helpers", "manager", "util", "utils"}
_AS_A_THING: Final = _ANYWHERE | {"base", "common", "data", "info", "process"}
_FOREIGN_NAMES: Final = re.compile(r"data_?(source|frame|loss)", re.IGNORECASE)  # Spark's own words
_WORD: Final = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_UNFINISHED: Final = re.compile(r"\bTO[D]O\b|\bFIX[M]E\b|\bX{3}\b")
_PRIVATE: Final = re.compile(r"_(?!_)\w+|__\w*[^_]")
_PRIVATE_USES_MAX: Final = 39
"""How often tests look at what only a class or module itself should know: less with time, never more."""
_OUTSIDE: Final = re.compile(r"\bissue\s*#|(?<![\w.])/(?:home|opt|root|work)/", re.IGNORECASE)

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


def test_functions_are_short() -> None:
    long = [
        f"{where}: {function.name} has {lines} lines"
        for where, function in _functions("src", "tests", "tools")
        if (lines := (function.end_lineno or function.lineno) - function.lineno + 1) > _FUNCTION_LINES_MAX
    ]

    assert long == []


def test_every_module_says_what_it_is() -> None:
    assert [_name(path) for path in _modules("src", "tests") if not ast.get_docstring(_tree(path))] == []


def test_modules_and_classes_are_nouns_of_the_domain() -> None:
    vague = [_name(path) for path in _modules("src") if _words(path.stem) & _AS_A_THING]
    for path in _modules("src", "tests"):
        classes = [node.name for node in _definitions(path) if isinstance(node, ast.ClassDef)]
        vague += [f"{_name(path)}: {name}" for name in classes if _words(name) & _AS_A_THING]

    assert vague == []


def test_functions_are_named_for_what_they_do() -> None:
    functions = _functions("src", "tests", "tools")

    assert [f"{where}: {node.name}" for where, node in functions if _words(node.name) & _ANYWHERE] == []


def test_nothing_is_left_unfinished() -> None:
    assert list(_lines_with(_UNFINISHED)) == []


def test_project_speaks_of_itself_alone() -> None:
    assert list(_lines_with(_OUTSIDE)) == []


def test_locks_name_no_address() -> None:
    assert [path.name for path in _ROOT.glob("*.lock") if "/" in path.read_text()] == []


def test_tests_come_through_the_front_door() -> None:
    """Behind it through `forebay.testing.inside`, which alone knows how a log is put together."""
    ours = {name for path in _modules("src") for name in _private_names(_tree(path))}
    uses = [f"{_name(path)}:{use}" for path in _modules("tests") for use in _private_uses(_tree(path), ours)]

    assert len(uses) <= _PRIVATE_USES_MAX, "\n".join(uses)


def _private_uses(tree: ast.Module, ours: set[str]) -> Iterator[str]:
    """Where a module reads, imports or replaces a private name of the sources that is not a name of its own, too."""
    foreign, own = _imported_from_elsewhere(tree), _private_names(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                continue
            case ast.Attribute(value=ast.Name(id=of)) if of in foreign:
                continue
            case ast.Attribute(attr=name):
                names = [name]
            case ast.ImportFrom(module=str(module), names=imported) if module.startswith("forebay"):
                names = [alias.name for alias in imported]
            case ast.Call(func=ast.Attribute(attr="setattr") | ast.Name(id="getattr" | "setattr"), args=[_, given, *_]):
                names = [given.value] if isinstance(given, ast.Constant) and isinstance(given.value, str) else []
            case _:
                continue
        yield from (f"{node.lineno}: {name}" for name in names if name in ours and name not in own)


def _private_names(tree: ast.Module) -> set[str]:
    """The private names that a module defines: of fields, functions, classes and of its own."""
    names = set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case _:
                pass
    return {name for name in names if _PRIVATE.fullmatch(name)}


def _imported_from_elsewhere(tree: ast.Module) -> set[str]:
    """What comes from modules that are neither ours nor tests, by the names it has here."""
    names = set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in ("forebay", "tests"):
                continue
            case ast.ImportFrom(names=found) | ast.Import(names=found):
                names |= {alias.asname or alias.name for alias in found if not alias.name.startswith("forebay")}
            case _:
                continue
    return names


def _modules(*directories: str) -> list[Path]:
    return [path for directory in directories for path in sorted((_ROOT / directory).rglob("*.py"))]


def _functions(*directories: str) -> Iterator[tuple[str, Function]]:
    for path in _modules(*directories):
        for node in _definitions(path):
            if isinstance(node, Function):
                yield f"{_name(path)}:{node.lineno}", node


def _lines_with(pattern: re.Pattern[str]) -> Iterator[str]:
    for path in _texts():
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            if pattern.search(line):
                yield f"{_name(path)}:{number}: {line.strip()}"


def _texts() -> Iterator[Path]:
    yield from (_ROOT / "Makefile", _ROOT / "pyproject.toml", _ROOT / ".ci" / "run", *sorted(_ROOT.glob("*.md")))
    for directory in ("src", "tests", "tools", "docs", "demo", "bench"):
        for suffix in ("py", "md", "sh", "yaml"):
            yield from sorted((_ROOT / directory).rglob(f"*.{suffix}"))


def _words(identifier: str) -> set[str]:
    return {word.lower() for word in _WORD.findall(_FOREIGN_NAMES.sub("", identifier))}


def _name(path: Path) -> str:
    return str(path.relative_to(_ROOT))


@cache
def _definitions(path: Path) -> list[Function | ast.ClassDef]:
    return [node for node in ast.walk(_tree(path)) if isinstance(node, Function | ast.ClassDef)]


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))
