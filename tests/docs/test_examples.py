"""Examples in the documents run as written, so they cannot rot."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from _pytest.mark import ParameterSet

_ROOT: Final = Path(__file__).parents[2]
_BLOCK: Final = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def _pages() -> Iterator[ParameterSet]:
    for page in (_ROOT / "README.md", *sorted((_ROOT / "docs").rglob("*.md"))):
        examples = "".join(_BLOCK.findall(page.read_text()))
        if examples:
            marks = [pytest.mark.spark, pytest.mark.timeout(300)] if "forebay.spark" in examples else []
            yield pytest.param(page, id=str(page.relative_to(_ROOT)), marks=marks)


@pytest.mark.parametrize("page", list(_pages()))
def test_python_examples_of_a_page_run_in_order(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    text = page.read_text()
    names: dict[str, object] = {"__name__": "__main__"}
    if request.node.get_closest_marker("spark"):
        # The page's session is this one, as there is one in a process; a relative path starts where it was started.
        monkeypatch.chdir(request.getfixturevalue("spark")._jvm.System.getProperty("user.dir"))
    else:
        monkeypatch.chdir(tmp_path)

    for block in _BLOCK.finditer(text):
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block[1], page.name, "exec"), names)
