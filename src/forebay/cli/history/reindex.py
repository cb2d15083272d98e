"""`forebay history reindex`: make indexes of history again where they lack something."""

from __future__ import annotations

from forebay.cli.history import app
from forebay.cli.jobs import Job, TopicNames, job_command
from forebay.cli.pipeline import app as pipeline


@job_command(
    app,
    "reindex",
    examples=["forebay history reindex --settings shared.yaml --dry-run", "forebay history reindex shop/orders"],
    formerly=pipeline,
)
def reindex(job: Job, *, topics: TopicNames = None) -> int:
    """Make indexes in the store again that are damaged, missing, or written before there were look-ups by key and tag.

    Works beside the owner. No index is overwritten by another: the catalog names the new one. Ends with code 6 if
    a segment itself is damaged.
    """
    with job.on_spark() as (spark, shown):
        from forebay.spark.jobs.reindex import run as reindexed

        report = reindexed(spark, job.location, topics or (), dry_run=job.dry_run, progress=shown)
    return job.answer(report)
