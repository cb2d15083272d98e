"""`forebay history backfill`: bring rows of files or of a table into a topic, once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.cli.history import app
from forebay.cli.jobs import Job, job_command
from forebay.cli.options import TopicArgument, assigned
from forebay.cli.pipeline import app as pipeline
from forebay.errors import Invalid

if TYPE_CHECKING:
    from forebay.spark.jobs.backfill import Source
    from forebay.spark.place.location import Location

FromOption = Annotated[
    list[str] | None,
    typer.Option("--from", metavar="PATH", help="Files, or directories of files; may be repeated.", show_default=False),
]
TableOption = Annotated[
    str | None, typer.Option("--from-table", metavar="NAMESPACE.NAME", help="An Iceberg table.", show_default=False)
]
KindOption = Annotated[str, typer.Option("--format", help="What files are: parquet, json, csv, text or orc.")]
ReaderOption = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="NAME=VALUE", help="An option of Spark's reader of files.", show_default=False),
]
ColumnOption = Annotated[
    list[str] | None,
    typer.Option(
        "--column",
        metavar="NAME=SQL",
        help="What value, key, tag, timestamp, partition or headers is made of.",
        show_default=False,
    ),
]
OrderOption = Annotated[
    list[str] | None,
    typer.Option(
        "--order-by",
        metavar="SQL",
        help="A column or expression of the rows, or file; may be repeated [default: timestamp, then file and line].",
        show_default=False,
    ),
]
IdOption = Annotated[
    str | None,
    typer.Option("--id", metavar="ID", help="The same id never brings anything twice.", show_default=False),
]
EachOption = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="So many files in one load; else all rows or none.", show_default=False),
]


@job_command(
    app,
    "backfill",
    examples=[
        "forebay history backfill shop/orders --from old/orders --column key=customer --column timestamp=at",
        "forebay history backfill shop/orders --from old.csv --format csv --option header=true --dry-run",
        "forebay history backfill shop/orders --from-table shop.old_orders --id orders-2025",
        "forebay history backfill shop/orders --from old/orders --url http://127.0.0.1:7878",
    ],
    formerly=pipeline,
    by_url=True,
)
def backfill(
    job: Job,
    *,
    name: TopicArgument,
    paths: FromOption = None,
    from_table: TableOption = None,
    kind: KindOption = "parquet",
    options: ReaderOption = None,
    columns: ColumnOption = None,
    order_by: OrderOption = None,
    backfill_id: IdOption = None,
    files_each: EachOption = None,
    attach_timeout_s: Annotated[
        float, typer.Option("--attach-timeout", metavar="SECONDS", help="How long to wait for the topic's owner.")
    ] = 120.0,
) -> int:
    """Bring rows of files or of a table into a topic by bulk load, each once.

    All rows of a load appear at once, or none. In each partition they lie in the order of their timestamps, else by
    file name and line. Run it again after an interruption: what the topic has is left out.
    Without --id, the id is worked out from the files, their sizes and times, and the columns.
    """
    chosen = assigned("--column", columns, example="key=customer")
    reading = assigned("--option", options, example="header=true")
    with job.on_spark() as (spark, shown):
        from forebay.spark.jobs.backfill import run as brought

        report = brought(
            spark,
            job.location,
            name,
            _source(job.location, paths or (), from_table, kind, reading),
            columns=chosen,
            order_by=order_by or (),
            backfill_id=backfill_id,
            files_each=files_each,
            attach_seconds=attach_timeout_s,
            dry_run=job.dry_run,
            progress=shown,
        )
    return job.answer(report)


def _source(location: Location, paths: Sequence[str], table: str | None, kind: str, options: dict[str, str]) -> Source:
    from forebay.spark.jobs.backfill import Files, Table

    if bool(paths) == (table is not None):
        raise Invalid("a backfill reads files or a table: give --from or --from-table")
    return (
        Table(location=location, name=table)
        if table is not None
        else Files(paths=tuple(paths), kind=kind, options=options)
    )
