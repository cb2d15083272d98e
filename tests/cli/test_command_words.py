"""A command is found by its words: in the file that they name, and under the words it had before."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
import typer
from typer.testing import Result

import forebay.cli
from forebay.cli.app import app
from tests.cli.rig import one_line
from tests.cli.test_help_and_docs import COMMANDS
from tests.cli.test_without_data import ON_SPARK, WORDS, home, made
from tests.support.commands import invoke

__all__ = ["home", "made"]
ROOM: Final = Path(forebay.cli.__file__).parent
MOVED: Final = {
    "pipeline compact": "history compact",
    "pipeline scrub": "history scrub",
    "pipeline reindex": "history reindex",
    "pipeline migrate": "history migrate",
    "pipeline backfill": "history backfill",
    "pipeline profile": "history profile",
    "pipeline lake": "table lake",
    "pipeline register": "table register",
}
"""The old words of commands, each with its new ones."""


def _file_of(path: Sequence[str]) -> Path:
    """Where the words lead: topic/seal.py, produce/command.py of a package, or group.py for all of a group."""
    for count in range(len(path), 0, -1):
        place = ROOM.joinpath(*path[:count])
        for file in (place.with_suffix(".py"), place / "command.py"):
            if file.is_file():
                return file
    raise AssertionError(f"no file of cli is named by {' '.join(path)}")


@pytest.mark.parametrize(("path", "command"), COMMANDS, ids=[" ".join(path) for path, _ in COMMANDS])
def test_a_command_lives_in_the_file_that_its_words_name(path: tuple[str, ...], command: Any) -> None:
    body = inspect.unwrap(command.callback)

    assert Path(inspect.getfile(body)) == _file_of(path)


def test_every_old_word_is_hidden_and_has_the_options_of_the_new_one() -> None:
    tree: Any = typer.main.get_command(app)
    hidden = {
        f"{group} {name}"
        for group, below in tree.commands.items()
        for name, command in getattr(below, "commands", {}).items()
        if command.hidden
    }

    assert hidden == set(MOVED)
    for old, new in MOVED.items():
        (was, _), (now, name) = old.split(), new.split()
        known = {tuple(option.opts) for option in tree.commands[was].commands[name].params}
        assert known == {tuple(option.opts) for option in tree.commands[now].commands[name].params}, old


@pytest.mark.slow
@pytest.mark.parametrize("old", MOVED)
def test_an_old_word_fails_as_the_new_one_does_and_names_it(old: str) -> None:
    arguments = {"pipeline migrate": ["--to", "new.yaml"]}.get(old, ["shop/orders"])

    before, after = (_run(words, *arguments, "--set", "nonsense") for words in (old, MOVED[old]))

    assert before.exit_code == after.exit_code == 2
    assert one_line(after.stderr) and before.stdout == after.stdout
    assert before.stderr == f"{_note(old)}{after.stderr}"


@pytest.mark.usefixtures("home")
def test_an_old_word_does_what_the_new_one_does() -> None:
    arguments = WORDS["table register"].split()

    before, after = (_run(words, *arguments) for words in ("pipeline register", "table register"))

    assert (before.exit_code, _said(before)) == (0, _said(after))
    assert "shop/orders[0]" in after.stdout and before.stderr == f"{_note('pipeline register')}{after.stderr}"


@pytest.mark.spark
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("home", "spark")
def test_an_old_word_of_a_job_does_what_the_new_one_does() -> None:
    for old in ("pipeline compact", "pipeline lake"):
        words = ON_SPARK[MOVED[old]].split()

        before, after = _run(old, *words), _run(MOVED[old], *words)

        assert after.exit_code == 0, after.output
        assert (before.exit_code, _said(before)) == (0, _said(after))
        assert before.stderr == f"{_note(old)}{after.stderr}"


def _run(words: str, *arguments: str) -> Result:
    return invoke([*words.split(), *arguments])


def _said(ended: Result) -> str:
    """The report of a job but for the time it took."""
    return re.sub(r", [0-9.]+ s$", "", ended.stdout.rstrip())


def _note(old: str) -> str:
    return f'forebay: "forebay {old}" is now "forebay {MOVED[old]}"; the old words go on working\n'
