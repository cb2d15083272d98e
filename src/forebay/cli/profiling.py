"""`forebay pipeline profile`: say what is in topics, as figures and as a page with plots."""

from __future__ import annotations

from typing import Annotated

import typer

from forebay.cli.commands import command
from forebay.cli.invocation import Invocation
from forebay.cli.job_answers import TopicNames, say_report
from forebay.cli.spark_options import (
    MASTER_DEFAULT,
    AsJson,
    ConfOption,
    DryRunOption,
    MasterOption,
    location_of,
    spark_session,
)
from forebay.cli.terminal import meter


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(
        app,
        "profile",
        examples=[
            "forebay pipeline profile shop/orders --html orders.html",
            "forebay pipeline profile --settings shared.yaml --resume counted --json",
        ],
    )(profile)


def profile(
    run: Invocation,
    *,
    topics: TopicNames = None,
    html: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a page with plots to FILE.", show_default=False)
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Keep in FILE what was counted, and pass over it next time.", show_default=False
        ),
    ] = None,
    dry_run: DryRunOption = False,
    as_json: AsJson = False,
    master: MasterOption = MASTER_DEFAULT,
    conf: ConfOption = None,
) -> int:
    """Count what is in topics: rates, sizes, keys and hot keys, tags, gaps, records that come late.

    Changes nothing and works beside the owner. Ends with code 6 if records that should be there cannot be read.
    """
    location = location_of(run)
    with spark_session("forebay profile", master, conf) as spark, meter("profile", in_bytes=True) as shown:
        from forebay.spark.jobs.profile import run as profiled

        report = profiled(spark, location, topics or (), html=html, resume=resume, dry_run=dry_run, progress=shown)
    return say_report(report, as_json=as_json)
