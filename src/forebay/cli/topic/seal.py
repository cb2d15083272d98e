"""`forebay topic seal`: a topic ends here in order, so that it can go on elsewhere."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from forebay.cli.commands import command
from forebay.cli.invocation import Invocation
from forebay.cli.options import AsJson, TopicArgument
from forebay.cli.terminal import readable_time, say, say_json
from forebay.cli.topic import app
from forebay.cli.topic.progress import AcceptDamage, export_progress

if TYPE_CHECKING:
    from forebay.format.metadata.descriptor import ShardState
    from forebay.topics import TopicSpec


@command(app, "seal", examples=["forebay topic seal shop/orders", "forebay topic seal shop/orders --json"], by_url=True)
def seal(run: Invocation, *, name: TopicArgument, accept_damage: AcceptDamage = False, as_json: AsJson = False) -> None:
    """End a topic here in order: all of it becomes history, and the next owner goes on exactly there.

    Repeat it if it was interrupted. The next append, here or elsewhere, opens the topic again; in mode local without
    storage.handoff_root only this directory can.
    """
    seal_there = partial(_sealed_here, run) if run.url is None else partial(_sealed_asked, run.url)
    for item in seal_there(name, accept_damage=accept_damage):
        if as_json:
            say_json(item)
        else:
            say(_sealed_line(item))


def _sealed_here(run: Invocation, name: str, *, accept_damage: bool) -> list[dict[str, Any]]:
    with run.writer() as log:
        spec = log.topic(name).spec
        log.check_held_here(name)
        with export_progress(f"seal {spec.name}") as on_file:
            states = log.seal_topic(name, on_file=on_file, accept_damage=accept_damage)
    return [_sealed_item(spec, partition, state) for partition, state in enumerate(states)]


def _sealed_asked(url: str, name: str, *, accept_damage: bool) -> list[dict[str, Any]]:
    from forebay.cli.brokers import asked_to
    from forebay.topics import TopicName
    from forebay.wire.messages import Sealing, ShardList

    sealed = asked_to(url, name, "seal", Sealing(accept_damage=accept_damage), ShardList)
    return [
        {
            "topic": str(TopicName.parse(name)),
            "partition": shard.partition,
            "next": shard.next,
            "last_committed": None if shard.next is None else shard.next - 1,
            "sealed_by": shard.sealed_by,
            "sealed_at": shard.sealed_at,
            "target": shard.target,
        }
        for shard in sealed.shards
    ]


def _sealed_item(spec: TopicSpec, partition: int, state: ShardState) -> dict[str, Any]:
    """What is to be known of a sealed partition."""
    return {
        "topic": str(spec.name),
        "partition": partition,
        "next": state.next_offset,
        "last_committed": state.next_offset - 1,
        "sealed_by": state.sealed_by,
        "sealed_at": state.sealed_at,
        "target": state.target,
    }


def _sealed_line(item: dict[str, Any]) -> str:
    by = f"by directory {item['sealed_by']} at {readable_time(item['sealed_at'])}"
    bound = f", for directory {item['target']}" if item["target"] is not None else ""
    return f"{item['topic']}[{item['partition']}]: sealed at next offset {item['next']} {by}{bound}"
