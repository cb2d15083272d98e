"""`forebay table register`: compacted history as an open table, without copying it."""

from __future__ import annotations

from forebay.cli.commands import command
from forebay.cli.invocation import Invocation
from forebay.cli.jobs import say_report
from forebay.cli.options import AsJson, DryRunOption, TableFormatOption, TopicArgument
from forebay.cli.pipeline import app as pipeline
from forebay.cli.spark import location_of
from forebay.cli.table import app


@command(
    app,
    "register",
    examples=[
        "forebay table register shop/orders",
        "forebay table register shop/orders --settings shared.yaml --json",
        "forebay table register shop/orders --table-format delta",
        "forebay table register shop/orders --dry-run",
    ],
    formerly=pipeline,
)
def register_table(
    run: Invocation,
    topic: TopicArgument,
    *,
    table_format: TableFormatOption = "iceberg",
    dry_run: DryRunOption = False,
    as_json: AsJson = False,
) -> int:
    """Let a table name the Parquet files that compaction made of a topic, and no others. Needs no Spark.

    An Iceberg table has the topic's name in the catalog of the settings, table.…; left out, a SQLite file in the
    directory tables. A Delta table lies in delta/NAMESPACE/TOPIC in the warehouse. It is made if it is not there, and
    versions older than table.snapshots_kept_s are expired.
    """
    from forebay.spark.jobs.register import run as registered

    report = registered(location_of(run), topic, table_format=table_format, dry_run=dry_run)
    return say_report(report, as_json=as_json)
