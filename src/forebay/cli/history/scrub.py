"""`forebay history scrub`: read all of history and say what is not as it was written."""

from __future__ import annotations

from typing import Annotated

import typer

from forebay.cli.history import app
from forebay.cli.jobs import Job, TopicNames, job_command
from forebay.cli.pipeline import app as pipeline


@job_command(
    app,
    "scrub",
    examples=[
        "forebay history scrub",
        "forebay history scrub shop/orders --resume scrubbed --json",
        "forebay history scrub --settings shared.yaml --master spark://head:7077",
        "forebay history scrub --data data --repair --dry-run",
    ],
    formerly=pipeline,
)
def scrub(
    job: Job,
    *,
    topics: TopicNames = None,
    quick: Annotated[bool, typer.Option("--quick", help="Look for objects, do not read them.")] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Mend what is damaged from its other copy; needs the directory for itself.")
    ] = False,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Note in FILE what is sound, and pass over it next time.", show_default=False
        ),
    ] = None,
) -> int:
    """Check all of history on Spark: every checksum, footer, hash and index, and that no offset is missing.

    Works beside the owner, from the data directory or from the store alone. Ends with code 6 if anything is
    damaged, with 4 if only a store cannot be reached. --dry-run says what would be read; with --repair everything
    is read, and it is said what would be mended.
    """
    with job.on_spark(in_bytes=True) as (spark, shown):
        from forebay.spark.jobs.scrub import run as scrubbed

        report = scrubbed(
            spark,
            job.location,
            topics or (),
            quick=quick,
            repair=repair,
            notes=resume,
            dry_run=job.dry_run,
            progress=shown,
        )
    return job.answer(report)
