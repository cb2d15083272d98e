"""Asking before something goes for good."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from forebay.errors import Invalid

YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask. Needed where no one can answer.")]


def confirm(what: str, *, yes: bool) -> None:
    """Return if `what` may be deleted; raises unless the user says so."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise Invalid(f"{what} would be deleted: add --yes to do it")
    typer.confirm(f"Delete {what}?", abort=True, err=True)
