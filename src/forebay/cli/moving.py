"""`forebay topic seal`, `unseal`, `export` and `move`: a topic ends in one directory and goes on in another."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.cli.commands import command
from forebay.cli.invocation import AsJson, Invocation, TopicArgument
from forebay.cli.terminal import Meter, meter, readable_bytes, readable_time, say, say_json

if TYPE_CHECKING:
    from forebay.export import Lag
    from forebay.format.metadata.descriptor import ShardState
    from forebay.inspection.moves import TopicMove
    from forebay.shard.seal import OnFile
    from forebay.surface.blocking import TopicHandle
    from forebay.topics import TopicSpec

logger = logging.getLogger(__name__)

ToOption = Annotated[
    str, typer.Option("--to", metavar="DIR", help="The data directory that goes on with it; made if there is none.")
]

AcceptDamage = Annotated[
    bool,
    typer.Option(
        "--accept-damage",
        help="Go on without records in damaged frames that no other copy has; history names their offsets as damaged.",
    ),
]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    examples = ["forebay topic seal shop/orders", "forebay topic seal shop/orders --json"]
    command(app, "seal", examples=examples, by_url=True)(seal)
    command(app, "unseal", examples=["forebay topic unseal shop/orders"], by_url=True)(unseal)
    examples = ["forebay topic export shop/orders --settings shared.yaml"]
    command(app, "export", examples=examples, by_url=True)(export)
    command(
        app,
        "move",
        examples=[
            "forebay topic move shop/orders --data a --to b --settings shared.yaml",
            "forebay topic move shop/orders --data a --to b --set metadata.path=/var/lib/forebay/shared.sqlite "
            "--set storage.handoff_root=/mnt/handoff",
        ],
    )(move)


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


def unseal(run: Invocation, *, name: TopicArgument) -> None:
    """Take a sealed topic back into this directory, unless another has opened it by now."""
    if run.url is not None:
        from forebay.cli.brokers import asked_to
        from forebay.wire.messages import ShardList

        asked_to(run.url, name, "unseal", None, ShardList)
        with run.reading() as log:
            _say_open(log.topic(name))
        return
    with run.writer() as log:
        log.check_not_arrived(name)
        log.unseal_topic(name)
        # Asking opens it, and that is what takes it back.
        _say_open(log.topic(name))


def export(
    run: Invocation, *, name: TopicArgument, accept_damage: AcceptDamage = False, as_json: AsJson = False
) -> None:
    """Make everything appended so far history now, rather than at the next interval; say how far it reaches."""
    from forebay.topics import TopicName

    export_there = partial(_exported_here, run) if run.url is None else partial(_exported_asked, run.url)
    for partition, exported in enumerate(export_there(name, accept_damage=accept_damage)):
        if as_json:
            say_json({"topic": str(TopicName.parse(name)), "partition": partition, "exported": exported})
        else:
            say(f"{TopicName.parse(name)}[{partition}]: history ends at offset {exported}")


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

    with run.writer() as log, _progress(f"move {log.topic(name).name}") as on_file:
        moved = move_topic(log, name, to, on_file=on_file, accept_damage=accept_damage)
    item = _moved_item(moved)
    if as_json:
        say_json(item)
    else:
        _say_move(item)


def _sealed_here(run: Invocation, name: str, *, accept_damage: bool) -> list[dict[str, Any]]:
    with run.writer() as log:
        spec = log.topic(name).spec
        log.check_held_here(name)
        with _progress(f"seal {spec.name}") as on_file:
            states = log.seal_topic(name, on_file=on_file, accept_damage=accept_damage)
    return [sealed_item(spec, partition, state) for partition, state in enumerate(states)]


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


def _exported_here(run: Invocation, name: str, *, accept_damage: bool) -> list[int]:
    with run.writer() as log:
        spec = log.topic(name).spec
        log.check_held_here(name)
        if not all(shard.is_sealed for shard in log.recorded(name)):
            with _progress(f"export {spec.name}") as on_file:
                log.export_topic(name, on_file, accept_damage=accept_damage)
        return [shard.exported for shard in log.recorded(name)]


def _exported_asked(url: str, name: str, *, accept_damage: bool) -> list[int]:
    from forebay.cli.brokers import asked_to
    from forebay.wire.messages import Exporting, ShardList

    exported = asked_to(url, name, "export", Exporting(accept_damage=accept_damage), ShardList)
    return [shard.exported for shard in exported.shards]


def _say_open(topic: TopicHandle) -> None:
    for partition in range(topic.partitions):
        say(f"{topic.name}[{partition}]: open here at offset {topic.offsets(partition).next}")


def sealed_item(spec: TopicSpec, partition: int, state: ShardState) -> dict[str, Any]:
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


@contextmanager
def _progress(label: str) -> Iterator[OnFile]:
    """A bar on a terminal, and a line in the log for each file."""
    with meter(label, in_bytes=True) as shown:
        yield _Countdown(label, shown)


class _Countdown:
    """Turns what is left into what is done. A new partition starts with more left than the one before ended with."""

    def __init__(self, label: str, shown: Meter) -> None:
        self._label = label
        self._shown = shown
        self._total = self._left = 0

    def __call__(self, lag: Lag) -> None:
        if lag.files:
            left = readable_bytes(lag.bytes)
            logger.info("%s: %d files with %d records, %s, are left", self._label, lag.files, lag.records, left)
        if lag.bytes > self._left:
            self._total += lag.bytes
            self._shown.total(self._total)
            self._shown.advance(self._left)
        else:
            self._shown.advance(self._left - lag.bytes)
        self._left = lag.bytes
