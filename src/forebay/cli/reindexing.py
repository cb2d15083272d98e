"""`forebay pipeline reindex`: make indexes of history anew where they lack something."""

from __future__ import annotations

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
        "reindex",
        examples=["forebay pipeline reindex --settings shared.yaml --dry-run", "forebay pipeline reindex shop/orders"],
    )(reindex)


def reindex(
    run: Invocation,
    *,
    topics: TopicNames = None,
    dry_run: DryRunOption = False,
    as_json: AsJson = False,
    master: MasterOption = MASTER_DEFAULT,
    conf: ConfOption = None,
) -> int:
    """Make indexes in the store anew that are damaged, missing, or written before there were look-ups by key and tag.

    Works beside the owner. No index is overwritten by another: the catalog names the new one. Ends with code 6 if
    a segment itself is damaged.
    """
    location = location_of(run)
    with spark_session("forebay reindex", master, conf) as spark, meter("reindex", in_bytes=False) as shown:
        from forebay.spark.jobs.reindex import run as reindexed

        report = reindexed(spark, location, topics or (), dry_run=dry_run, progress=shown)
    return say_report(report, as_json=as_json)
