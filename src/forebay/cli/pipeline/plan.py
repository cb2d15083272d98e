"""`forebay pipeline plan`: what a pipeline would do if it ran now."""

from __future__ import annotations

from typing import Annotated

import typer

from forebay.cli.commands import command
from forebay.cli.invocation import Invocation
from forebay.cli.options import MASTER_DEFAULT, AsJson, ConfOption, MasterOption
from forebay.cli.pipeline import app
from forebay.cli.pipeline.declared import FileArgument, checked_pipeline, flaws_by_line, pipeline_session, say_outline

CheckOption = Annotated[
    bool, typer.Option("--check", help="Start Spark as well, and check the SQL: columns, functions, types.")
]


@command(
    app,
    "plan",
    examples=["forebay pipeline plan revenue.yml", "forebay pipeline plan revenue.yml --check --json"],
    by_url=True,
)
def plan(
    run: Invocation,
    *,
    file: FileArgument,
    check: CheckOption = False,
    as_json: AsJson = False,
    master: MasterOption = MASTER_DEFAULT,
    conf: ConfOption = None,
) -> None:
    """Show what a pipeline would do if it ran now: offsets and bytes to read, steps, sinks, checkpoints.

    Without --check no Spark is started. Changes nothing.
    """
    pipeline, outlined = checked_pipeline(run, file, conf)
    if check:
        with pipeline_session(run, pipeline, master) as spark:
            from forebay.spark.pipelines.views import build, own_session

            with flaws_by_line(), own_session(spark, pipeline.spark) as session:
                build(session, pipeline, outlined.location)
    say_outline(outlined, as_json=as_json)
