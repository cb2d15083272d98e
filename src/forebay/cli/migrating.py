"""`forebay pipeline migrate`: bring the history of topics into another store."""

from __future__ import annotations

from typing import Annotated

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
        "migrate",
        examples=[
            "forebay pipeline migrate --settings old.yaml --to new.yaml --dry-run",
            "forebay pipeline migrate shop/orders --settings old.yaml --to new.yaml",
            "forebay pipeline migrate shop/orders --settings old.yaml --to new.yaml --remove-old",
        ],
    )(migrate)


def migrate(
    run: Invocation,
    *,
    topics: TopicNames = None,
    to: Annotated[str, typer.Option(metavar="FILE", help="Settings in YAML that name the new store.")],
    remove_old: Annotated[
        bool, typer.Option("--remove-old", help="Remove old objects whose copies the catalog names.")
    ] = False,
    dry_run: DryRunOption = False,
    as_json: AsJson = False,
    master: MasterOption = MASTER_DEFAULT,
    conf: ConfOption = None,
) -> int:
    """Copy the history of topics into another store, verified, and make the catalog name the copies.

    The topics are sealed, or nobody has them open. One transaction switches a partition. Run it again after an
    interruption. From then on the topics are opened with the settings of --to. Ends with code 6 if an object is
    damaged or could not be copied; its partition stays as it was.
    """
    location = location_of(run)
    from forebay.spark.location import Location

    given = {"settings": to} | ({} if location.path is None else {"path": location.path})
    target = Location.parse(given)
    with spark_session("forebay migrate", master, conf) as spark, meter("migrate", in_bytes=True) as shown:
        from forebay.spark.jobs.migrate import run as migrated

        report = migrated(spark, location, target, topics or (), remove_old=remove_old, dry_run=dry_run, progress=shown)
    return say_report(report, as_json=as_json)
