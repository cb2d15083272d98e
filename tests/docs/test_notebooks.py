"""The notebooks in examples/ run from top to bottom, and say what stands below their cells."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any, Final

import pytest

EXAMPLES: Final = Path(__file__).parents[2] / "examples"
NOTEBOOKS: Final = sorted(EXAMPLES.glob("*.ipynb"))
OUTPUT_CHARACTERS_MAX: Final = 2_000


def _code_cells(path: Path) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]


def _stored(cell: dict[str, Any]) -> str:
    """What a notebook keeps of what the cell wrote; anything but text on stdout is refused."""
    assert all((output["output_type"], output["name"]) == ("stream", "stdout") for output in cell["outputs"])
    return "".join("".join(output["text"]) for output in cell["outputs"])


def ran(path: Path) -> list[str]:
    """Run the cells after each other, as a reader would; what each writes."""
    names: dict[str, Any] = {"__name__": "__main__"}
    said = []
    for number, cell in enumerate(_code_cells(path)):
        with contextlib.redirect_stdout(io.StringIO()) as written:
            exec(compile("".join(cell["source"]), f"{path.name}, code cell {number}", "exec"), names)
        said.append(written.getvalue())
    return said


def test_there_is_a_notebook() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small_and_was_run_from_top_to_bottom(path: Path) -> None:
    cells = _code_cells(path)

    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert sum(len(_stored(cell)) for cell in cells) <= OUTPUT_CHARACTERS_MAX
    assert str(Path.home()) not in path.read_text()


@pytest.mark.spark
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("spark")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_says_what_it_shows(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    assert ran(path) == [_stored(cell) for cell in _code_cells(path)]
