"""`forebay table register`: compacted history as an Iceberg table, without copying it."""

from __future__ import annotations

from forebay.cli.commands import command
from forebay.cli.invocation import Invocation
from forebay.cli.jobs import say_report
from forebay.cli.options import AsJson, DryRunOption, TopicArgument
from forebay.cli.pipeline import app as pipeline
from forebay.cli.spark import location_of
from forebay.cli.table import app


@command(
    app,
    "register",
    examples=[
        "forebay table register shop/orders",
        "forebay table register shop/orders --settings shared.yaml --json",
        "forebay table register shop/orders --dry-run",
    ],
    formerly=pipeline,
)
def register_table(
    run: Invocation,
    topic: TopicArgument,
    *,
    dry_run: DryRunOption = False,
    as_json: AsJson = False,
) -> int:
    """Let an Iceberg table name the Parquet files that compaction made of a topic, and no others. Needs no Spark.

    The catalog is the one of the settings, table.…; left out, a SQLite file in the directory tables. The table has
    the topic's name and is made if it is not there. Snapshots older than table.snapshots_kept_s are expired.
    """
    from forebay.spark.jobs.register import run as registered

    return say_report(registered(location_of(run), topic, dry_run=dry_run), as_json=as_json)
