"""`forebay pipeline`: the work that Spark does. Each command has a module of its own and is added here."""

from __future__ import annotations

import typer

from forebay.cli import (
    backfilling,
    compacting,
    declared,
    laking,
    migrating,
    profiling,
    registering,
    reindexing,
    scrubbing,
)
from forebay.cli.commands import Commands

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Run pipelines and jobs over topics and their history on Spark.",
)

declared.register(app)
compacting.register(app)
scrubbing.register(app)
laking.register(app)
backfilling.register(app)
migrating.register(app)
reindexing.register(app)
profiling.register(app)
registering.register(app)
