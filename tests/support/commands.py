"""The command line in this process, as `typer.testing` runs it, but with its commands built once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import typer.main
import typer.testing

from forebay.cli.app import app

# `CliRunner` builds all commands again for each line that it runs, in a twelfth of a second of processor time.
typer.testing._get_command = cache(typer.main.get_command)  # type: ignore[attr-defined]


def invoke(words: Sequence[str], stdin: bytes = b"") -> typer.testing.Result:
    """Run one command line."""
    return typer.testing.CliRunner().invoke(app, words, input=stdin)
