"""`forebay history profile`: say what is in topics, as figures and as a page with plots."""

from __future__ import annotations

from typing import Annotated

import typer

from forebay.cli.history import app
from forebay.cli.jobs import Job, TopicNames, WhereOption, job_command
from forebay.cli.pipeline import app as pipeline


@job_command(
    app,
    "profile",
    examples=[
        "forebay history profile shop/orders --html orders.html",
        "forebay history profile shop/orders --where \"tag = 'eu' AND offset >= 1000\" --columns key",
        "forebay history profile --settings shared.yaml --resume counted --json",
        "forebay history profile shop/orders --url http://127.0.0.1:7878",
    ],
    formerly=pipeline,
    by_url=True,
)
def profile(
    job: Job,
    *,
    topics: TopicNames = None,
    where: WhereOption = None,
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Count these alone of a record: key, value, headers, tag. Times always. [default: all]",
            show_default=False,
        ),
    ] = None,
    html: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write a page with plots to FILE.", show_default=False)
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Keep in FILE what was counted, and pass over it next time.", show_default=False
        ),
    ] = None,
) -> int:
    """Count what is in topics: rates, sizes, keys and hot keys, tags, gaps, records that come late.

    Changes nothing and works beside the owner. Ends with code 6 if records that should be there cannot be read.
    """
    with job.on_spark(in_bytes=True) as (spark, shown):
        from forebay.spark.jobs.profile import run as profiled

        report = profiled(
            spark,
            job.location,
            topics or (),
            where=where,
            columns=columns,
            html=html,
            resume=resume,
            dry_run=job.dry_run,
            progress=shown,
        )
    return job.answer(report)
