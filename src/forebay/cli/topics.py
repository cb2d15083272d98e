"""`forebay topic`: create, list, show, delete."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from forebay.cli.commands import Commands, command
from forebay.cli.invocation import Invocation
from forebay.cli.terminal import readable_bytes, readable_time, say, say_json, say_table
from forebay.errors import Conflict, ForebayError, Invalid

if TYPE_CHECKING:
    from forebay.inspection import Inspected, ShardPlace
    from forebay.storage import Storage
    from forebay.topics import TopicSpec

app = typer.Typer(cls=Commands, no_args_is_help=True, rich_markup_mode=None, help="Create, list, show, delete topics.")

Name = Annotated[str, typer.Argument(metavar="TOPIC", help="namespace/topic, or topic for default/topic.")]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON.")]


@command(
    app,
    "create",
    examples=[
        "forebay topic create shop/orders --partitions 4 --durability fsync",
        "forebay topic create logs/web --compression zstd:3 --exist-ok",
    ],
)
def create(
    run: Invocation,
    *,
    name: Name,
    partitions: Annotated[int, typer.Option(help="How many partitions.")] = 1,
    durability: Annotated[
        str | None,
        typer.Option(
            help="fsync, disk (the default), memory or ephemeral: when an append returns.", show_default=False
        ),
    ] = None,
    engine: Annotated[str | None, typer.Option(help="segment (the default) or memory.", show_default=False)] = None,
    compression: Annotated[str, typer.Option(help="none, zstd or zstd:LEVEL.")] = "none",
    exist_ok: Annotated[bool, typer.Option("--exist-ok", help="Fine if it exists; it stays as it is.")] = False,
) -> None:
    """Create a topic, and the data directory if there is none yet."""
    from forebay.topics import TopicName, TopicSpec

    parsed = TopicName.parse(name)
    # Checked before anything is made: a wrong name must not leave a new directory behind.
    TopicSpec.create(
        parsed,
        topic_id="0" * 32,
        created_at=0,
        partitions=partitions,
        durability=durability,
        engine=engine,
        compression=compression,
    )
    with run.writer(create=True) as log:
        if not exist_ok and any(spec.name == parsed for spec in log.topics()):
            raise Conflict(f"topic {parsed} exists already: add --exist-ok to leave it as it is")
        topic = log.create_topic(
            name,
            partitions=partitions,
            durability=durability,
            engine=engine,
            compression=compression,
            exist_ok=exist_ok,
        )
    say(f"{topic.name}: {topic.partitions} partitions, {topic.spec.durability}, id {topic.spec.topic_id}")


@command(app, "list", examples=["forebay topic list", "forebay topic list --json | jq -r .name"])
def list_topics(run: Invocation, *, as_json: AsJson = False) -> None:
    """List all topics, also while another process has the directory open."""
    with run.reader() as log:
        specs = log.topics()
    if as_json:
        for spec in specs:
            say_json(_spec_item(spec))
        return
    rows = [
        (spec.name, spec.partitions, spec.durability, spec.engine, spec.compression, readable_time(spec.created_at))
        for spec in specs
    ]
    if rows:
        say_table(("topic", "partitions", "durability", "engine", "compression", "created"), rows)


@command(app, "show", examples=["forebay topic show shop/orders", "forebay topic show shop/orders --json"])
def show(run: Invocation, *, name: Name, as_json: AsJson = False) -> None:
    """Show a topic: its definition and, per partition, offsets, files and how the next opening will recover it.

    Changes nothing. While another process has the directory open, what that process has published is shown.
    """
    from forebay.clock import SystemClock
    from forebay.inspection.directory import look

    with run.reader() as log:
        spec = log.topic(name).spec if _is_followable(log, name) else _spec(log, name)
        found = look(run.directory, run.settings, run.disk, SystemClock())
        places = [place for place in found.places() if place.spec == spec]
        item: dict[str, Any] = {**_spec_item(spec), "owned": found.owned, "directory": found.path}
        item["shards"] = [_shard_item(run, log, found, place) for place in places]
    if as_json:
        say_json(item)
    else:
        _say_topic(item)


def _spec(log: Storage, name: str) -> TopicSpec:
    from forebay.topics import TopicName

    parsed = TopicName.parse(name)
    return next(spec for spec in log.topics() if spec.name == parsed)


def _is_followable(log: Storage, name: str) -> bool:
    """Whether this process can open the topic: one in its owner's memory it cannot."""
    from forebay.topics import Engine, TopicName

    parsed = TopicName.parse(name)
    return all(spec.engine is Engine.SEGMENT for spec in log.topics() if spec.name == parsed)


def _spec_item(spec: TopicSpec) -> dict[str, Any]:
    fields = msgspec.structs.asdict(spec)
    del fields["namespace"], fields["topic"]
    return {"name": str(spec.name), **fields}


def _shard_item(run: Invocation, log: Storage, found: Inspected, place: ShardPlace) -> dict[str, Any]:
    from forebay.inspection import outlook

    assert place.spec is not None
    item: dict[str, Any] = {"partition": place.partition, "directory": place.directory}
    ahead = outlook(found, place, run.settings.wal, run.disk)
    state = found.state(place.spec, place.partition)
    item["epoch"] = state.epoch if state is not None else 0
    item["phase"] = str(state.phase) if state is not None else "new"
    if state is not None and state.sealed_at is not None:
        item |= {"sealed_by": state.sealed_by, "sealed_at": state.sealed_at, "last_committed": state.next_offset - 1}
    item["recovery"] = str(ahead.decision) if ahead.decision is not None else None
    item["failure"] = ahead.refusal
    item |= {"files": ahead.files, "bytes": ahead.bytes}
    if ahead.refusal is None:
        try:
            item["offsets"] = log.topic(str(place.spec.name)).offsets(place.partition)._asdict()
        except ForebayError as error:
            item["failure"] = str(error)
    return item


def _say_topic(item: dict[str, Any]) -> None:
    say(f"{item['name']}")
    for field in ("partitions", "durability", "engine", "compression", "generation", "topic_id"):
        say(f"  {field:12} {item[field]}")
    say(f"  {'created':12} {readable_time(item['created_at'])}")
    say(f"  {'owner':12} {'another process has the directory open' if item['owned'] else 'none at present'}")
    if item["engine"] == "memory":
        say("  its records live in the memory of its owner: no other process can see them")
    for shard in item["shards"]:
        offsets = shard.get("offsets", {})
        say(f"partition {shard['partition']}")
        say("  offsets      " + (" ".join(f"{name} {value}" for name, value in offsets.items()) or "unknown"))
        say(f"  state        {shard['phase']}, epoch {shard['epoch']}")
        if "sealed_at" in shard:
            sealed = f"by {shard['sealed_by']} at {readable_time(shard['sealed_at'])}"
            say(f"  sealed       {sealed}, last committed {shard['last_committed']}")
        if shard["recovery"] is not None:
            say(f"  recovery     {shard['recovery']}")
        if shard["failure"] is not None:
            say(f"  failure      {shard['failure']}")
        say(f"  files        {shard['files']}, {readable_bytes(shard['bytes'])} in {shard['directory']}")


@command(app, "delete", examples=["forebay topic delete shop/orders --yes"])
def delete(
    run: Invocation,
    *,
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask. Needed where nobody can be asked.")] = False,
) -> None:
    """Delete a topic with all its records. There is no way back."""
    with run.writer() as log:
        spec = log.topic(name).spec
        if not yes and not sys.stdin.isatty():
            raise Invalid(f"{spec.name} with all its records would be deleted: add --yes to do it")
        if not yes:
            typer.confirm(f"Delete {spec.name} with all its records?", abort=True, err=True)
        log.delete_topic(name)
    say(f"{spec.name} is deleted")
