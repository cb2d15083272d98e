"""`forebay history compact`: turn many small segments of history into few large ones in Parquet."""

from __future__ import annotations

from typing import Annotated

import typer

from forebay.cli.history import app
from forebay.cli.jobs import Job, TopicNames, job_command
from forebay.cli.pipeline import app as pipeline

MIB = 1024 * 1024


@job_command(
    app,
    "compact",
    examples=[
        "forebay history compact",
        "forebay history compact shop/orders --dry-run",
        "forebay history compact --settings shared.yaml --master spark://head:7077",
        "forebay history compact shop/orders --segments-min 2 --older-than 0 --json",
    ],
    formerly=pipeline,
)
def compact(
    job: Job,
    *,
    topics: TopicNames = None,
    target_mib: Annotated[
        int, typer.Option(metavar="MIB", min=1, max=65_536, help="One new segment is made of about so much.")
    ] = 256,
    segments_min: Annotated[
        int, typer.Option(metavar="N", min=1, help="So many small segments side by side are put together.")
    ] = 4,
    older_than: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="Leave alone what became history since.")
    ] = 60,
    ended_percent: Annotated[
        float,
        typer.Option(metavar="PERCENT", min=0, max=100, help="Rewrite a segment of which more than so much ended."),
    ] = 0,
    wait: Annotated[
        float, typer.Option(metavar="SECONDS", min=0, help="Wait so long for another compaction of a partition.")
    ] = 0,
) -> int:
    """Put small segments of history together on Spark, in Parquet, without the records that ended.

    Works beside the owner, from the data directory or from the store alone; readers go on. Deleted records are
    gone from the new segments, and of topics with cleanup "compact" those that a later one with their key
    superseded. May be ended anywhere and run again.
    """
    with job.on_spark(in_bytes=True) as (spark, shown):
        from forebay.compacting.planning import Rules
        from forebay.spark.jobs.compaction import run as compacted

        rules = Rules(
            target_bytes=target_mib * MIB,
            segments_min=segments_min,
            settle_ms=round(older_than * 1000),
            dead_share=ended_percent / 100,
        )
        report = compacted(
            spark, job.location, topics or (), rules=rules, wait_s=wait, dry_run=job.dry_run, progress=shown
        )
    return job.answer(report)
