"""`forebay table lake`: bring what is new in a topic into a typed table."""

from __future__ import annotations

from typing import Annotated

import typer

from forebay.cli.jobs import Job, WhereOption, job_command
from forebay.cli.options import TableFormatOption, TopicArgument
from forebay.cli.pipeline import app as pipeline
from forebay.cli.table import app

SchemaOption = Annotated[
    str | None,
    typer.Option(
        metavar="SCHEMA",
        help="Columns as in SQL, or a file with them; for avro a file with the Avro schema.",
        show_default=False,
    ),
]


@job_command(
    app,
    "lake",
    examples=[
        'forebay table lake shop/orders --table shop.orders_typed --schema "id BIGINT, total DOUBLE"',
        "forebay table lake shop/orders --to lake/orders --schema orders.ddl --dry-run",
        "forebay table lake shop/orders --table shop.orders_typed --format avro --schema order.avsc",
        "forebay table lake shop/orders --table shop.eu --schema orders.ddl --where \"tag = 'eu'\"",
        "forebay table lake shop/orders --table lake/orders --table-format delta --schema orders.ddl",
        "forebay table lake shop/orders --to lake/orders --schema orders.ddl --url http://127.0.0.1:7878",
    ],
    formerly=pipeline,
    by_url=True,
)
def lake(
    job: Job,
    *,
    name: TopicArgument,
    table: Annotated[
        str | None,
        typer.Option(
            metavar="NAMESPACE.NAME",
            help="A table, made if there is none; one of Delta may also be named by its path or address.",
            show_default=False,
        ),
    ] = None,
    table_format: TableFormatOption = "iceberg",
    to: Annotated[
        str | None, typer.Option(metavar="DIR", help="A directory of Parquet files instead.", show_default=False)
    ] = None,
    value_format: Annotated[str, typer.Option("--format", help="What values are: json, avro or raw.")] = "json",
    schema: SchemaOption = None,
    where: WhereOption = None,
    commit_records: Annotated[int, typer.Option(help="About how many records one commit brings.", min=1)] = 5_000_000,
    skip_lost: Annotated[
        bool, typer.Option("--skip-lost", help="Go on where records were lost or evicted before they were brought.")
    ] = False,
) -> int:
    """Bring what is new in a topic into a typed table, each record once.

    The table knows how far it has the topic, so that a run that was ended anywhere is simply repeated; it also keeps
    the condition of --where, and refuses another. Rows whose value does not fit the schema go to a side table,
    NAME_bad or DIR/bad, with the reason.
    """
    with job.on_spark() as (spark, shown):
        from forebay.spark.jobs.lake import run as brought

        report = brought(
            spark,
            job.location,
            name,
            table=table,
            table_format=table_format,
            directory=to,
            format=value_format,
            schema=schema,
            where=where,
            commit_records=commit_records,
            fail_on_data_loss=not skip_lost,
            dry_run=job.dry_run,
            progress=shown,
        )
    return job.answer(report)
