"""Every command explains itself, and docs/cli.md speaks of every command, option and exit code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import typer

import forebay
from forebay.cli import main
from forebay.cli.app import app
from forebay.cli.commands import COMMON
from forebay.cli.failures import EXIT_CODES
from tests.support.commands import invoke

_PAGE: Final = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()


def _commands(group: Any = None, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    found: Any = typer.main.get_command(app) if group is None else group
    for name, below in found.commands.items():
        if hasattr(below, "commands"):
            yield from _commands(below, (*path, name))
        elif not below.hidden:
            yield (*path, name), below


COMMANDS: Final = list(_commands())


def test_the_page_lists_exactly_the_commands_there_are() -> None:
    listed = re.findall(r"^\| \[`forebay ([a-z -]+)`\]", _PAGE, re.MULTILINE)

    assert sorted(listed) == sorted(" ".join(path) for path, _ in COMMANDS)


@pytest.mark.slow
@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=[" ".join(path) for path, _ in COMMANDS])
def test_every_command_has_examples_and_the_common_options(path: tuple[str, ...], command: Any) -> None:
    result = invoke([*path, "--help"])

    assert result.exit_code == 0
    assert "Examples:" in result.stdout and f"forebay {' '.join(path)}" in result.stdout
    assert all(option in result.stdout for option in ("--data", "--settings", "--set", "--log-format", "--verbose"))
    assert set(COMMON) <= {parameter.name for parameter in command.params}


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=[" ".join(path) for path, _ in COMMANDS])
def test_the_page_speaks_of_every_option(path: tuple[str, ...], command: Any) -> None:
    options = {
        max(parameter.opts, key=len)
        for parameter in command.params
        if parameter.param_type_name == "option" and parameter.name not in ("help", *COMMON)
    }

    assert {option for option in options if option not in _PAGE} == set()


def test_the_page_has_every_family_with_its_code() -> None:
    rows = dict(re.findall(r"^\| (\d+) \| (.*?) \|", _PAGE, re.MULTILINE))

    assert {family.__name__ for family, code in EXIT_CODES if f"`{family.__name__}`" not in rows[str(code)]} == set()


@pytest.mark.slow
def test_help_without_a_command_and_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "Usage: forebay" in "".join(capsys.readouterr())
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"forebay {forebay.__version__}\n"
    assert main(["--verbose", "--version"]) == 0
    assert capsys.readouterr().out == f"forebay {forebay.__version__}\n"
