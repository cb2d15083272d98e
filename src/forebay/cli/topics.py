"""`forebay topic`: create, list, delete; what else there is below it comes from its own modules."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.cli import altering, moving, showing
from forebay.cli.asking import YesOption, confirm
from forebay.cli.commands import Commands, command
from forebay.cli.invocation import AsJson, Invocation, TopicArgument
from forebay.cli.limits import (
    CapBytesOption,
    CapRecordsOption,
    CleanupOption,
    CompactLagOption,
    OnFullOption,
    TtlOption,
    parse_limits,
)
from forebay.cli.showing import spec_item
from forebay.cli.terminal import PagedTable, flush, meter, readable_time, say, say_json
from forebay.errors import Conflict

if TYPE_CHECKING:
    from forebay.surface.blocking import Log
    from forebay.topics import TopicSpec

PAGE_TOPICS = 1000
"""Topics that are read at once."""

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Create, list, show, alter, copy, seal, move and delete topics.",
)

DurabilityOption = Annotated[
    str | None,
    typer.Option(help="fsync, disk (the default), memory or ephemeral: when an append returns.", show_default=False),
]
EngineOption = Annotated[str | None, typer.Option(help="segment (the default), rocksdb or memory.", show_default=False)]


@command(
    app,
    "create",
    examples=[
        "forebay topic create shop/orders --partitions 4 --durability fsync",
        "forebay topic create logs/web --compression zstd:3 --exist-ok",
        "forebay topic create shop/carts --engine rocksdb --ttl 7d --cap-bytes 10GiB",
    ],
    by_url=True,
)
def create(
    run: Invocation,
    *,
    name: TopicArgument,
    partitions: Annotated[int, typer.Option(help="How many partitions.")] = 1,
    durability: DurabilityOption = None,
    engine: EngineOption = None,
    compression: Annotated[str, typer.Option(help="none, zstd or zstd:LEVEL.")] = "none",
    cap_records: CapRecordsOption = None,
    cap_bytes: CapBytesOption = None,
    ttl: TtlOption = None,
    on_full: OnFullOption = None,
    cleanup: CleanupOption = None,
    compact_lag: CompactLagOption = None,
    exist_ok: Annotated[bool, typer.Option("--exist-ok", help="Fine if it exists; it stays as it is.")] = False,
) -> None:
    """Create a topic, and the data directory if there is none yet."""
    from forebay.topics import TopicName, TopicSpec

    parsed = TopicName.parse(name)
    limits = parse_limits(cap_records, cap_bytes, ttl, on_full, cleanup, compact_lag)
    # Checked before anything is made: a wrong name must not leave a new directory behind.
    spec = TopicSpec.create(
        parsed,
        topic_id="0" * 32,
        created_at=0,
        partitions=partitions,
        durability=durability,
        engine=engine,
        compression=compression,
        **limits,
    )
    with run.writing(create=True) as log:
        if not exist_ok and any(spec.name == parsed for spec in log.topics(str(parsed), limit=1)):
            raise Conflict(f"topic {parsed} exists already: add --exist-ok to leave it as it is", topic=parsed)
        topic = log.create_topic(
            name,
            partitions=partitions,
            durability=spec.durability,
            engine=spec.engine,
            compression=compression,
            exist_ok=exist_ok,
            **limits,
        )
    say(f"{topic.name}: {topic.partitions} partitions, {topic.spec.durability}, id {topic.spec.topic_id}")


@command(app, "list", examples=["forebay topic list", "forebay topic list --json | jq -r .name"], by_url=True)
def list_topics(run: Invocation, *, as_json: AsJson = False) -> None:
    """List all topics, also while another process has the directory open."""
    table = PagedTable("topic", "partitions", "durability", "engine", "compression", "created")
    with run.reading() as log:
        for page in _pages(log):
            if as_json:
                for spec in page:
                    say_json(spec_item(spec))
            else:
                table.say([_cells(spec) for spec in page])
            # Before the next page is read: with many topics that takes a while.
            flush()


def _pages(log: Log) -> Iterator[list[TopicSpec]]:
    """All topics by name, read page by page."""
    page = log.topics(limit=PAGE_TOPICS)
    while page:
        yield page
        page = log.topics(after=page[-1].name, limit=PAGE_TOPICS)


def _cells(spec: TopicSpec) -> tuple[object, ...]:
    created = readable_time(spec.created_at)
    return spec.name, spec.partitions, spec.durability, spec.engine, spec.compression, created


@command(app, "delete", examples=["forebay topic delete shop/orders --yes"], by_url=True)
def delete(
    run: Invocation,
    *,
    name: TopicArgument,
    yes: YesOption = False,
) -> None:
    """Delete a topic with all its records. There is no way back."""
    with run.writing() as log:
        spec = log.topic(name).spec
        confirm(f"{spec.name} with all its records", yes=yes)
        with meter(f"delete {spec.name}", in_bytes=False):
            log.delete_topic(name)
    say(f"{spec.name} is deleted")


showing.register(app)
altering.register(app)
moving.register(app)
