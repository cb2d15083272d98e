"""`forebay shard salvage`: records that a shard has set aside are brought back; the other commands of `shard`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.cli import partitions
from forebay.cli.commands import Commands, command
from forebay.cli.invocation import AsJson, Invocation, TopicArgument
from forebay.cli.terminal import meter, say, say_json
from forebay.errors import Invalid

if TYPE_CHECKING:
    from forebay.inspection.salvage import Listed, Salvage
    from forebay.storage import Topic

app = typer.Typer(
    cls=Commands, no_args_is_help=True, rich_markup_mode=None, help="List and look after single partitions."
)
partitions.register(app)

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
    from forebay.inspection.salvage import salvages, target_of

    looking = list_only or dry_run
    with (
        run.reader() if looking else run.writer() as log,
        salvages(log, name, partition=partition, source=source) as found,
    ):
        if list_only:
            _say_files(found, as_json=as_json)
            return
        target = target_of(log, found, into, create=not dry_run)
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
