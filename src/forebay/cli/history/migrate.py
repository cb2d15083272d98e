"""`forebay history migrate`: bring the history of topics into another store."""

from __future__ import annotations

from typing import Annotated

import typer

from forebay.cli.history import app
from forebay.cli.jobs import Job, TopicNames, job_command
from forebay.cli.pipeline import app as pipeline


@job_command(
    app,
    "migrate",
    examples=[
        "forebay history migrate --settings old.yaml --to new.yaml --dry-run",
        "forebay history migrate shop/orders --settings old.yaml --to new.yaml",
        "forebay history migrate shop/orders --settings old.yaml --to new.yaml --remove-old",
    ],
    formerly=pipeline,
)
def migrate(
    job: Job,
    *,
    topics: TopicNames = None,
    to: Annotated[str, typer.Option(metavar="FILE", help="Settings in YAML that name the new store.")],
    remove_old: Annotated[
        bool, typer.Option("--remove-old", help="Remove old objects whose copies the catalog names.")
    ] = False,
) -> int:
    """Copy the history of topics into another store, verified, and make the catalog name the copies.

    The topics are sealed, or no process has them open. One transaction switches a partition. Run it again after an
    interruption. From then on the topics are opened with the settings of --to. Ends with code 6 if an object is
    damaged or could not be copied; its partition stays as it was.
    """
    from forebay.spark.place.location import Location

    given = {"settings": to} | ({} if job.location.path is None else {"path": job.location.path})
    target = Location.parse(given)
    with job.on_spark(in_bytes=True) as (spark, shown):
        from forebay.spark.jobs.migrate import run as migrated

        report = migrated(
            spark, job.location, target, topics or (), remove_old=remove_old, dry_run=job.dry_run, progress=shown
        )
    return job.answer(report)
