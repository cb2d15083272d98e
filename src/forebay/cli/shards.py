"""`forebay shard salvage`: records that a shard has set aside are brought back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.cli.commands import Commands, command
from forebay.cli.invocation import AsJson, Invocation, TopicArgument
from forebay.cli.terminal import meter, say, say_json
from forebay.errors import Conflict, Invalid, Moved, UnknownTopic, Unsupported

if TYPE_CHECKING:
    from forebay.inspection import Inspected
    from forebay.inspection.salvage import Listed, Salvage
    from forebay.storage import Storage, Topic
    from forebay.storage.directory import LogDirectory

app = typer.Typer(cls=Commands, no_args_is_help=True, rich_markup_mode=None, help="Look after single partitions.")

PartitionOption = Annotated[int | None, typer.Option(help="This partition alone.", show_default=False)]
FromOption = Annotated[
    str | None,
    typer.Option(
        "--from", metavar="DIR", help="The data directory with the files [default: --data].", show_default=False
    ),
]
IntoOption = Annotated[
    str | None,
    typer.Option(metavar="TOPIC", help="Copy the records into this topic; made if there is none.", show_default=False),
]
AppendOption = Annotated[bool, typer.Option("--append", help="Append the records to their own topic again.")]
ListOption = Annotated[bool, typer.Option("--list", help="Only say what there is.")]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Say what would be copied; change nothing.")]


@command(
    app,
    "salvage",
    examples=[
        "forebay shard salvage shop/orders --list",
        "forebay shard salvage shop/orders --data b --from a --into shop/orders-rescued --dry-run",
        "forebay shard salvage shop/orders --data b --from a --append",
    ],
)
def salvage(
    run: Invocation,
    *,
    name: TopicArgument,
    partition: PartitionOption = None,
    source: FromOption = None,
    into: IntoOption = None,
    append: AppendOption = False,
    list_only: ListOption = False,
    dry_run: DryRunOption = False,
    as_json: AsJson = False,
) -> None:
    """Bring back records that were set aside: torn tails, and what another owner's take-over has left behind.

    --data names the directory that has the topic now, --from the one that has the files. Only records whose offsets
    the topic reports as lost are copied, each once, however often this is run, with headers that say where it comes
    from; what had been deleted before it was lost is not. Nothing is removed. Frames that are not whole are said and
    left out.
    """
    if (into is not None) + append + list_only != 1:
        raise Invalid("say what to do: --list, --append or --into TOPIC, one of them")
    if dry_run and list_only:
        raise Invalid("--list changes nothing: leave --dry-run out")
    looking = list_only or dry_run
    with run.reader() if looking else run.writer() as log, _salvages(run, log, name, partition, source) as found:
        if list_only:
            _say_files(found, as_json=as_json)
            return
        target = _target(log, found, into, create=not dry_run)
        for one in found:
            _copy(one, target, into, apply=not dry_run, as_json=as_json)


def _say_files(found: list[Salvage], *, as_json: bool) -> None:
    for one in found:
        for item in one.listed:
            shard = {"topic": one.topic.name, "partition": one.partition}
            if as_json:
                say_json({**shard, **_listed_item(item)})
                continue
            say(f"{one.topic.name}[{one.partition}] {item.path}: {_listed_line(item)}")
            for byte, count in item.damaged:
                say(f"  {count} bytes at byte {byte} are no whole frame")


def _copy(one: Salvage, target: Topic | None, into: str | None, *, apply: bool, as_json: bool) -> None:
    with meter(f"salvage {one.topic.name}[{one.partition}]", in_bytes=False) as shown:
        shown.total(sum(item.records for item in one.listed))
        counted = one.copy_to(target, apply=apply, on_records=shown.advance)
    damaged = sum(len(item.damaged) for item in one.listed)
    unreadable = sum(not item.readable for item in one.listed)
    name = target.name if target is not None else into
    if as_json:
        item: dict[str, Any] = {"topic": one.topic.name, "partition": one.partition, "into": name}
        item |= {"files": len(one.files), "copied": counted.copied, "present": counted.present}
        say_json(item | {"damaged": damaged, "unreadable": unreadable, "dry_run": not apply})
        return
    done = "are copied" if apply else "would be copied"
    say(
        f"{one.topic.name}[{one.partition}]: {counted.copied} records of {len(one.files)} files {done} to {name}, "
        f"{counted.present} were there already"
    )
    if damaged or unreadable:
        say(f"  left out: {damaged} places without a whole frame, {unreadable} files whose header is gone; see --list")


def _listed_item(item: Listed) -> dict[str, Any]:
    return {
        "path": item.path,
        "kind": "tail" if item.is_tail else "file",
        "readable": item.readable,
        "start": item.start,
        "stop": item.stop,
        "records": item.records,
        "lost": item.lost,
        "epochs": item.epochs,
        "damaged": [place._asdict() for place in item.damaged],
    }


def _listed_line(item: Listed) -> str:
    kind = "torn tail" if item.is_tail else "file"
    if not item.readable:
        return f"{kind}, its segment's header is gone: nothing in it can be checked"
    if item.start is None:
        return f"{kind} without records"
    epochs = ", ".join(map(str, item.epochs))
    return f"{kind}, offsets [{item.start}, {item.stop}), {item.records} records of epoch {epochs}, {item.lost} lost"


@contextlib.contextmanager
def _salvages(
    run: Invocation, log: Storage, name: str, partition: int | None, source: str | None
) -> Iterator[list[Salvage]]:
    """What there is of each partition."""
    from forebay.cli.holding import look_at
    from forebay.clock import SystemClock
    from forebay.inspection.directory import metadata_of
    from forebay.inspection.recorded import ShardHistory
    from forebay.inspection.salvage import Salvage, header_in_history, remains
    from forebay.inspection.stores import Stores
    from forebay.storage.directory import LogDirectory
    from forebay.topics import Engine

    topic, found = log.topic(name), look_at(run)
    if topic.spec.engine is not Engine.SEGMENT:
        where = "in the memory of its owner" if topic.spec.engine is Engine.MEMORY else "in a RocksDB database"
        raise Unsupported(f"{topic.name} lives {where}: it never sets anything aside")
    here = LogDirectory.look(run.directory, run.disk)
    directory = here if source is None else LogDirectory.look(source, run.disk)
    clock = SystemClock()
    stores = Stores(found, run.settings, disk=run.disk, clock=clock)
    with metadata_of(here, run.settings, run.disk, clock) as metadata, contextlib.closing(stores):
        salvages = []
        for place in found.places():
            if place.spec != topic.spec or place.partition not in _chosen(topic, partition):
                continue
            _check_holder(found, topic, place.partition)
            history = ShardHistory.of(place, metadata, stores, found.prefix)
            assert history is not None
            files = remains(
                run.disk,
                f"{directory.shards}/{place.id}",
                log_too=_is_left_behind(run, directory, found),
                header_of=header_in_history(history),
            )
            salvages.append(Salvage(run.disk, files, topic, place.partition))
        yield salvages


def _chosen(topic: Topic, partition: int | None) -> range:
    if partition is None:
        return range(topic.partitions)
    if not 0 <= partition < topic.partitions:
        raise Invalid(f"--partition is {partition}; {topic.name} has 0 to {topic.partitions - 1}")
    return range(partition, partition + 1)


def _check_holder(found: Inspected, topic: Topic, partition: int) -> None:
    """Only the directory that has the topic now can tell what is lost, and may append."""
    state = found.state(topic.spec, partition)
    if state is not None and state.holder not in (None, found.id):
        raise Moved(
            f"{topic.name}[{partition}] is in directory {state.holder} now, and {found.path} is {found.id}: name that "
            "one with --data, and the one that has the files with --from"
        )


def _is_left_behind(run: Invocation, directory: LogDirectory, found: Inspected) -> bool:
    """Whether the other directory was left as its process died, so that its files lie where they were written."""
    from forebay.storage.directory import is_owned

    return directory.id != found.id and not is_owned(directory.path, run.disk)


def _target(log: Storage, found: list[Salvage], into: str | None, *, create: bool) -> Topic | None:
    """The topic that is copied into; `None` if it does not exist and is not to be made."""
    from forebay.topics import Engine

    topic = found[0].topic
    if into is None:
        return topic
    try:
        target = log.topic(into)
    except UnknownTopic:
        if not create or not any(one.files for one in found):
            return None
        spec = topic.spec
        return log.create_topic(
            into, partitions=spec.partitions, durability=spec.durability, compression=spec.compression
        )
    if target.spec == topic.spec:
        raise Invalid(f"--into names {topic.name} itself: use --append to append the records there again")
    if target.spec.engine is not Engine.SEGMENT or target.partitions < topic.partitions:
        raise Conflict(
            f"{target.name} has {target.partitions} partitions on the {target.spec.engine} engine, and {topic.name} "
            f"{topic.partitions} on segments: name another topic, or one that does not exist yet"
        )
    return target
