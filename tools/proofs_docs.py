"""Write the map of docs/invariants.md, from each invariant to the tests that prove it: `python tools/proofs_docs.py`.

A test says so itself: `@pytest.mark.proves("I12")`. The tests are read, not imported.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
TARGET = ROOT / "docs" / "invariants.md"
HEADING = "## Which tests show it\n"
MAP = """
This map is generated from the marks of the tests (`@pytest.mark.proves`) by `python tools/proofs_docs.py`. "Broken by
hand" says that `tests/mutants` breaks it on purpose, and that the checks name it then.

| name | broken by hand | shown by |
|---|---|---|
"""


def invariants() -> list[str]:
    """The names in the table of promises."""
    return re.findall(r"^\| (I\d+) \|", TARGET.read_text(encoding="utf-8").partition(HEADING)[0], re.MULTILINE)


def proofs() -> dict[str, list[str]]:
    """By invariant the tests that are marked as its proof."""
    found = defaultdict[str, list[str]](list)
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if "mark.proves(" in text:
            for test, name in _marks(ast.parse(text)):
                found[name].append(f"{path.relative_to(ROOT)}::{test}")
    return dict(found)


def broken_by_hand() -> set[str]:
    """The invariants that deliberate breaks are expected to break."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "mutants").glob("*.py")]
    return {name for text in texts for name in re.findall(r'"(I\d+)"', text)}


def page() -> str:
    """The whole page: the promises as they stand, and the map."""
    head = TARGET.read_text(encoding="utf-8").partition(HEADING)[0]
    found, broken = proofs(), broken_by_hand()
    rows = [
        f"| {name} | {'yes' if name in broken else ''} | {', '.join(f'`{test}`' for test in found.get(name, ()))} |\n"
        for name in invariants()
    ]
    return f"{head}{HEADING}{MAP}{''.join(rows)}"


def _marks(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for mark in node.decorator_list:
                match mark:
                    case ast.Call(func=ast.Attribute(attr="proves"), args=names):
                        yield from ((node.name, ast.literal_eval(name)) for name in names)
                    case _:
                        continue


if __name__ == "__main__":
    TARGET.write_text(page(), encoding="utf-8")
