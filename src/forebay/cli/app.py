"""All commands together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from forebay.cli import (
    conformance,
    consume,
    deadletter,
    du,
    dump,
    group,
    records,
    repair,
    router,
    serve,
    shard,
    subscription,
    token,
    top,
    verify,
)
from forebay.cli.commands import root
from forebay.cli.doctor import command as doctor
from forebay.cli.history import backfill, compact, migrate, profile, reindex, scrub
from forebay.cli.invocation import Options
from forebay.cli.options import (
    AssignmentsOption,
    DirectoryOption,
    LogFormatOption,
    SettingsOption,
    UrlOption,
    VerboseOption,
)
from forebay.cli.pipeline import plan
from forebay.cli.pipeline import run as run_declared
from forebay.cli.produce import command as produce
from forebay.cli.table import lake, register
from forebay.cli.topic import alter, copy, create, delete, export, move, seal, show, unseal
from forebay.cli.topic import list as list_topics

app = root
"""`forebay`, with every command: each module below registers its own when it is imported."""
MODULES = (
    *(alter, copy, create, delete, export, list_topics, move, seal, show, unseal),
    *(consume, produce, records, group, shard, du),
    *(dump, verify, repair, doctor),
    *(run_declared, plan),
    *(backfill, compact, migrate, profile, reindex, scrub),
    *(lake, register),
    *(subscription, deadletter),
    *(router, token, serve, top, conformance),
)

HELP = """Durable event streams: a fast local log in front, immutable sealed segments behind.

\b
Begin:
  forebay topic create shop/orders
  echo paid | forebay produce shop/orders
  forebay consume shop/orders --follow

The common options below may stand before or behind the command's name. Exit codes: 0 fine, 1 a problem was
found, 2 the call is wrong, 3 it clashes with what is there, 4 not now, 5 outcome unknown, 6 damage, 7 closed
or fenced, 8 written by a newer version, 130 interrupted.
"""


def _say_version(asked: bool) -> None:  # noqa: FBT001 - the signature is typer's
    if asked:
        from forebay import __version__

        typer.echo(f"forebay {__version__}")
        raise typer.Exit


@root.callback(help=HELP)
def common(
    ctx: typer.Context,
    *,
    directory: DirectoryOption = None,
    broker_url: UrlOption = None,
    settings_file: SettingsOption = None,
    assignments: AssignmentsOption = None,
    log_format: LogFormatOption = None,
    verbose: VerboseOption = None,
    version: Annotated[
        bool, typer.Option("--version", help="Say the version.", callback=_say_version, is_eager=True)
    ] = False,
) -> None:
    """Keep what was given before the command's name."""
    ctx.obj = Options(
        directory=directory,
        broker_url=broker_url,
        settings_file=settings_file,
        assignments=assignments or (),
        log_format=log_format,
        verbose=verbose,
    )


def run(words: Sequence[str]) -> int:
    """Run one command line; its exit code."""
    try:
        typer.main.get_command(root).main(list(words), prog_name="forebay")
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else 1
    raise AssertionError("a command always leaves")
