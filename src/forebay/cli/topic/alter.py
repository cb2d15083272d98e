"""`forebay topic alter`: other limits for a topic, or more partitions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, cast

import typer

from forebay.cli.commands import command
from forebay.cli.failures import complain
from forebay.cli.invocation import Invocation
from forebay.cli.options import AsJson, TopicArgument
from forebay.cli.terminal import say, say_json
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
from forebay.cli.topic.show import limits_line, spec_item
from forebay.errors import Invalid

if TYPE_CHECKING:
    from forebay.topics import TopicChanges

PartitionsOption = Annotated[int | None, typer.Option(help="More partitions than now.", show_default=False)]
LossOption = Annotated[bool, typer.Option("--allow-loss", help="Even if records end at once by a new limit.")]


@command(
    app,
    "alter",
    examples=[
        "forebay topic alter shop/orders --ttl 30d --cap-bytes 50GiB",
        "forebay topic alter shop/orders --cap-bytes none",
        "forebay topic alter shop/orders --partitions 8",
    ],
    by_url=True,
)
def alter(
    run: Invocation,
    *,
    name: TopicArgument,
    partitions: PartitionsOption = None,
    cap_records: CapRecordsOption = None,
    cap_bytes: CapBytesOption = None,
    ttl: TtlOption = None,
    on_full: OnFullOption = None,
    cleanup: CleanupOption = None,
    compact_lag: CompactLagOption = None,
    dispatch: DispatchOption = None,
    on_owner_loss: OwnerLossOption = None,
    allow_loss: LossOption = False,
    as_json: AsJson = False,
) -> None:
    """Change the limits of a topic or its dispatch, or add partitions to it.

    A limit that would end records at once is refused without --allow-loss. Partitions can only be added, and keys
    then hash again: new records of a key may go to another partition than its older ones, which stay where they are.
    The dispatch changes only while the topic has no subscriptions.
    """
    limits = parse_limits(cap_records, cap_bytes, ttl, on_full, cleanup, compact_lag, dispatch, on_owner_loss)
    changes = cast("TopicChanges", limits)
    if partitions is not None:
        changes["partitions"] = partitions
    if not changes:
        raise Invalid("nothing is to be changed: give --partitions, --cap-records, --cap-bytes, --ttl or a policy")
    with run.writing() as log:
        before = log.topic(name).spec
        spec = log.alter_topic(name, allow_loss=allow_loss, **changes)
    if spec.partitions > before.partitions:
        complain(
            f"{spec.name}: keys hash again over {spec.partitions} partitions: the order of a key's records holds from "
            "here on, not across the change"
        )
    if as_json:
        say_json(spec_item(spec))
    else:
        say(f"{spec.name}: {spec.partitions} partitions, {limits_line(spec_item(spec))}")
