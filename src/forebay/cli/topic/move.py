"""`forebay topic move`: a topic goes on in another data directory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.cli.commands import command
from forebay.cli.invocation import Invocation
from forebay.cli.options import AsJson, TopicArgument
from forebay.cli.terminal import say, say_json
from forebay.cli.topic import app
from forebay.cli.topic.progress import AcceptDamage, export_progress

if TYPE_CHECKING:
    from forebay.inspection.moves import TopicMove

ToOption = Annotated[
    str, typer.Option("--to", metavar="DIR", help="The data directory that goes on with it; made if there is none.")
]


@command(
    app,
    "move",
    examples=[
        "forebay topic move shop/orders --data a --to b --settings shared.yaml",
        "forebay topic move shop/orders --data a --to b --set metadata.path=/var/lib/forebay/shared.sqlite "
        "--set storage.handoff_root=/mnt/handoff",
    ],
)
def move(
    run: Invocation,
    *,
    name: TopicArgument,
    to: ToOption,
    accept_damage: AcceptDamage = False,
    as_json: AsJson = False,
) -> None:
    """Move a topic to another data directory that shares the metadata store.

    Everything that can be known is checked before anything is sealed. May be interrupted at any moment: the same
    command again finishes it. Where the other directory is open in a process, that process goes on with the topic
    at its next append; else it is opened here for a moment.
    """
    from forebay.inspection.moves import move_topic

    with run.writer() as log, export_progress(f"move {log.topic(name).name}") as on_file:
        moved = move_topic(log, name, to, on_file=on_file, accept_damage=accept_damage)
    item = _moved_item(moved)
    if as_json:
        say_json(item)
    else:
        _say_move(item)


def _moved_item(moved: TopicMove) -> dict[str, Any]:
    return {
        "topic": moved.topic,
        "from": moved.source,
        "to": moved.target,
        "target": moved.target_id,
        "shards": [{"partition": partition, "next": next_} for partition, next_ in enumerate(moved.next_offsets)],
        "taken": moved.is_taken,
        "seconds": moved.seconds,
        "left": list(moved.left),
    }


def _say_move(item: dict[str, Any]) -> None:
    for shard in item["shards"]:
        at = f"sealed at next offset {shard['next']}" if shard["next"] is not None else "is there already"
        say(f"{item['topic']}[{shard['partition']}]: {at}")
    there = f"{item['to']} (directory {item['target']})"
    if item["taken"]:
        took = f" {item['seconds']:.3f} s after the seal began" if item["seconds"] is not None else ""
        say(f"{item['topic']} is open for appends in {there}{took}")
    else:
        say(f"{item['topic']} is promised to {there}: the process that has it open goes on at its next append")
    for path in item["left"]:
        say(f"files are left in {path}")
