"""`forebay topic create`: a new topic, and the data directory if there is none yet."""

from __future__ import annotations

from typing import Annotated

import typer

from forebay.cli.commands import command
from forebay.cli.invocation import Invocation
from forebay.cli.options import TopicArgument
from forebay.cli.terminal import say
from forebay.cli.topic import app
from forebay.cli.topic.limits import (
    CapBytesOption,
    CapRecordsOption,
    CleanupOption,
    CompactLagOption,
    DispatchOption,
    OnFullOption,
    OwnerLossOption,
    TtlOption,
    parse_limits,
)
from forebay.errors import Conflict

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
    dispatch: DispatchOption = None,
    on_owner_loss: OwnerLossOption = None,
    exist_ok: Annotated[bool, typer.Option("--exist-ok", help="Fine if it exists; it stays as it is.")] = False,
) -> None:
    """Create a topic, and the data directory if there is none yet."""
    from forebay.topics import TopicName, TopicSpec

    parsed = TopicName.parse(name)
    limits = parse_limits(cap_records, cap_bytes, ttl, on_full, cleanup, compact_lag, dispatch, on_owner_loss)
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
