"""Examples in the documents run as written, so they cannot rot."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import pytest

_ROOT: Final = Path(__file__).parents[2]
_BLOCK: Final = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def _pages() -> list[Path]:
    pages = [_ROOT / "README.md", *sorted((_ROOT / "docs").rglob("*.md"))]
    return [page for page in pages if _BLOCK.search(page.read_text())]


@pytest.mark.parametrize("page", _pages(), ids=lambda page: str(page.relative_to(_ROOT)))
def test_python_examples_of_a_page_run_in_order(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = page.read_text()
    names: dict[str, object] = {"__name__": "__main__"}
    monkeypatch.chdir(tmp_path)

    for block in _BLOCK.finditer(text):
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block[1], page.name, "exec"), names)
