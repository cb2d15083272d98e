"""Examples in the documents run as written, so they cannot rot."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from _pytest.mark import ParameterSet

from forebay import Settings
from forebay.spark.pipelines.file.checking import check_pipeline
from forebay.spark.pipelines.file.parsing import load_pipeline

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_ROOT: Final = Path(__file__).parents[2]
_PAGES: Final = (_ROOT / "README.md", *sorted((_ROOT / "docs").rglob("*.md")))
_BLOCK: Final = re.compile(r"^```(python|console|yaml)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_FILE: Final = re.compile(r"# ([\w-]+\.ya?ml)\n")
"""A block that begins so is that file, for the commands and programs of its page. With .yml it is a pipeline."""
_PIPELINE: Final = re.compile(r"# [\w-]+\.yml\n")
_VARIABLE: Final = re.compile(r"(?<!\$)\$\{(\w+)\}")
_SERVED: Final = "broker.md"
"""Its examples need a broker, which `tests/broker/test_guide.py` starts for them."""
_OTHERS_FILES: Final = "cli.md"
"""Its commands name files that only its reader has."""


def _commands(block: str) -> list[str]:
    """The command lines of ours in a block; others, such as make, are not for a test."""
    lines = [line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ ")]
    return [line for line in lines if re.search(r"(^|\| )forebay ", line)]


def _pages() -> Iterator[ParameterSet]:
    for page in _PAGES:
        if page.name in (_SERVED, _OTHERS_FILES):
            continue
        blocks = list(_BLOCK.finditer(page.read_text()))
        examples = "".join(block[2] for block in blocks if block[1] == "python")
        commands = [line for block in blocks if block[1] == "console" for line in _commands(block[2])]
        if examples or commands:
            marks = [pytest.mark.spark] if "forebay.spark" in examples else []
            marks += [pytest.mark.slow] if commands else []
            yield pytest.param(page, id=str(page.relative_to(_ROOT)), marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize("page", list(_pages()))
def test_examples_of_a_page_run_in_order(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    text = page.read_text()
    names: dict[str, object] = {"__name__": "__main__"}
    if request.node.get_closest_marker("spark"):
        # The page's session is this one, as there is one in a process; a relative path starts where it was started.
        session = request.getfixturevalue("spark")
        request.addfinalizer(lambda: _drop_views(session))
        monkeypatch.chdir(session._jvm.System.getProperty("user.dir"))
    else:
        monkeypatch.chdir(tmp_path)

    for block in _BLOCK.finditer(text):
        if block[1] == "console":
            _run_commands(block[2])
        elif block[1] == "yaml":
            file = _FILE.match(block[2])
            if file is not None:
                Path(file[1]).write_text(block[2])
        else:
            line = text.count("\n", 0, block.start(2))
            exec(compile("\n" * line + block[2], page.name, "exec"), names)


def _drop_views(session: SparkSession) -> None:
    """Views of a page's session end with its test, for the tests after it use the same session."""
    for table in session.catalog.listTables():
        if table.isTemporary:
            session.catalog.dropTempView(table.name)


def test_every_command_of_a_page_is_run() -> None:
    ran = {page for mark in _pages() for page in mark.values if isinstance(page, Path)}

    unseen = [page for page in _PAGES if page not in ran and page.name not in (_OTHERS_FILES, _SERVED)]

    assert [page.name for page in unseen for block in _BLOCK.finditer(page.read_text()) if _commands(block[2])] == []


def _yaml(*, pipelines: bool) -> Iterator[ParameterSet]:
    for page in _PAGES:
        text = page.read_text()
        for block in _BLOCK.finditer(text):
            if block[1] == "yaml" and bool(_PIPELINE.match(block[2])) == pipelines:
                line = text.count("\n", 0, block.start(2))
                yield pytest.param(block[2], id=f"{page.relative_to(_ROOT)}:{line}")


@pytest.mark.parametrize("example", list(_yaml(pipelines=False)))
def test_settings_in_the_pages_are_valid(example: str, tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(example)

    Settings.load(str(file), environment=dict.fromkeys(_VARIABLE.findall(example), "something"))


@pytest.mark.parametrize("example", list(_yaml(pipelines=True)))
def test_pipelines_in_the_pages_are_sound(example: str, tmp_path: Path) -> None:
    file = tmp_path / "pipeline.yml"
    file.write_text(example)

    check_pipeline(load_pipeline(str(file)))


def _run_commands(block: str) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for command in _commands(block):
        ended = subprocess.run(
            ["bash", "-c", command], env={**os.environ, "PATH": path}, capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, f"{command}\n{ended.stderr}"
