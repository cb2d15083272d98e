"""All commands together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from forebay.cli import (
    conforming,
    consume,
    doctor,
    groups,
    inspecting,
    lookups,
    pipelines,
    produce,
    routers,
    serving,
    shards,
    tokens,
    top,
    topics,
    usage,
)
from forebay.cli.commands import Commands
from forebay.cli.invocation import (
    AssignmentsOption,
    DirectoryOption,
    LogFormatOption,
    Options,
    SettingsOption,
    UrlOption,
    VerboseOption,
)

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
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


@app.callback(help=HELP)
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


app.add_typer(topics.app, name="topic")
app.add_typer(shards.app, name="shard")
app.add_typer(lookups.app, name="records")
app.add_typer(groups.app, name="group")
app.add_typer(routers.app, name="router")
app.add_typer(tokens.app, name="token")
app.add_typer(pipelines.app, name="pipeline")
produce.register(app)
consume.register(app)
usage.register(app)
inspecting.register(app)
doctor.register(app)
serving.register(app)
top.register(app)
conforming.register(app)


def run(words: Sequence[str]) -> int:
    """Run one command line; its exit code."""
    try:
        typer.main.get_command(app).main(list(words), prog_name="forebay")
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else 1
    raise AssertionError("a command always leaves")
