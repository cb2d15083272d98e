"""`forebay dump`, `forebay verify`, `forebay repair`: look into a data directory, and mend what is derived."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from forebay.cli.commands import command
from forebay.cli.failures import DAMAGE, UNAVAILABLE
from forebay.cli.invocation import Invocation
from forebay.cli.terminal import as_json as json_of
from forebay.cli.terminal import meter, readable_bytes, say, say_json
from forebay.errors import Invalid, UnknownTopic

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forebay.inspection import Report
    from forebay.topics import TopicName

OneTopic = Annotated[
    str | None,
    typer.Argument(metavar="TOPIC", help="This topic alone; else the whole directory.", show_default=False),
]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON, one object per line.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    command(
        app,
        "dump",
        examples=[
            "forebay dump",
            "forebay dump data/shards/*/*.seg --records",
            "forebay dump data/shards/*/00000000000000000000-00000001.idx --json",
            "forebay dump data/shards/*/checkpoint data/shards/*/live data/forebay.json",
            "forebay dump --key /forebay/topics/",
            "forebay dump --catalog shop/orders --partition 0",
        ],
    )(dump)
    command(
        app,
        "verify",
        examples=["forebay verify", "forebay verify shop/orders --json", "forebay verify --data /var/lib/forebay"],
    )(verify)
    command(app, "repair", examples=["forebay repair", "forebay repair --apply"])(repair)


def dump(
    run: Invocation,
    *,
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE",
            help="Files of a data directory: *.seg, *.idx, checkpoint, live, forebay.json. None: the metadata store.",
        ),
    ] = None,
    records: Annotated[bool, typer.Option("--records", help="The records of segments too.")] = False,
    key: Annotated[
        str | None, typer.Option(help="Metadata keys that begin so.", metavar="PREFIX", show_default=False)
    ] = None,
    catalog: Annotated[
        str | None,
        typer.Option(help="The state and the catalogued history of this topic.", metavar="TOPIC", show_default=False),
    ] = None,
    partition: Annotated[
        int | None, typer.Option(help="With --catalog: this partition alone.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write down what stands in files of a data directory, item by item, whole or not. Changes nothing."""
    if sum((bool(files), key is not None, catalog is not None)) > 1:
        raise Invalid("files, --key and --catalog each choose what is written down: give one of them")
    if partition is not None and catalog is None:
        raise Invalid("--partition chooses from the history of a topic: name it with --catalog")
    if not files:
        found = _metadata_items(run, key) if catalog is None else _catalog_items(run, catalog, partition)
        for item in found:
            _say_item(item, as_json=as_json)
        return
    from forebay.inspection import dump as items_of

    for path in files:
        if os.path.isdir(path):
            raise Invalid(f"{path} is a directory: name files in it, such as shards/*/*.seg of a data directory")
        if not as_json and len(files) > 1:
            say(f"{path}:")
        for item in items_of(run.disk, path, records=records):
            _say_item({"file": path, **item} if as_json else item, as_json=as_json)


def _metadata_items(run: Invocation, key: str | None) -> Iterator[dict[str, Any]]:
    from forebay.clock import SystemClock
    from forebay.directory import LogDirectory
    from forebay.inspection import dump_metadata
    from forebay.inspection.directory import metadata_of

    below = _own_keys(run.settings.metadata.prefix, key or "")
    directory = LogDirectory.look(run.directory, run.disk)
    with metadata_of(directory, run.settings, run.disk, SystemClock()) as store:
        entries = store.range(below)
    return dump_metadata(entries)


def _own_keys(prefix: str, beginning: str) -> str:
    """What keys to show begin with: those of this installation alone, for others may share the metadata store."""
    own = f"{prefix}/"
    if own.startswith(beginning):
        return own
    if not beginning.startswith(own):
        raise Invalid(
            f'--key "{beginning}" is outside of metadata.prefix: keys of this installation begin with {own}; to see '
            "those of another, name its prefix with --set metadata.prefix=…"
        )
    return beginning


def _catalog_items(run: Invocation, name: str, partition: int | None) -> Iterator[dict[str, Any]]:
    from forebay.clock import SystemClock
    from forebay.format.metadata.keys import shard_prefix
    from forebay.inspection import dump_catalog
    from forebay.inspection.directory import look

    topic = _known_topic(run, name)
    found = look(run.directory, run.settings, run.disk, SystemClock())
    spec = next(spec for spec in found.topics if spec.name == topic)
    if partition is not None and not 0 <= partition < spec.partitions:
        raise Invalid(f"{spec.name} has the partitions 0 to {spec.partitions - 1}, not {partition}")
    for number in range(spec.partitions) if partition is None else [partition]:
        prefix = shard_prefix(spec.namespace, spec.topic, number, prefix=found.prefix)
        yield from dump_catalog(f"{spec.name}[{number}]", list(found.below(prefix)))


def _say_item(item: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        say_json(item)
        return
    fields = [f"{name}={_shown(value)}" for name, value in item.items() if name != "kind"]
    say(" ".join([f"{item['kind']:10}", *fields]))


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = value if isinstance(value, str) else json_of(value)
    plain = text if text.isprintable() and text and " " not in text else json_of(text)
    return plain if not isinstance(value, dict | list) else json_of(value)


def verify(
    run: Invocation,
    *,
    name: OneTopic = None,
    quick: Annotated[bool, typer.Option("--quick", help="Do not read the objects of the history.")] = False,
    as_json: AsJson = False,
) -> int:
    """Check everything: every checksum and frame, indexes, checkpoints, sequence, metadata, history, database.

    Changes nothing and may run while another process has the directory open. Ends with code 0 if all is sound
    (notes and warnings do not count), with 6 if anything is damaged and with 4 if only a store cannot be reached.
    Each finding says what to do next.
    """
    from forebay.clock import SystemClock
    from forebay.inspection import verify as verified

    topic = _known_topic(run, name)
    with meter("verify", in_bytes=True) as shown:
        report = verified(
            run.directory,
            run.settings,
            disk=run.disk,
            clock=SystemClock(),
            topic=topic,
            quick=quick,
            on_total=shown.total,
            on_bytes=shown.advance,
        )
    for item in (*report.findings, *report.histories):
        if as_json:
            say_json(msgspec.to_builtins(item))
        else:
            say(str(item))
    _say_summary(report, as_json=as_json)
    if report.is_open:
        return UNAVAILABLE
    return 0 if report.is_clean else DAMAGE


def _say_summary(report: Report, *, as_json: bool) -> None:
    counts = {
        "shards": report.shards,
        "files": report.files,
        "bytes": report.bytes,
        "frames": report.frames,
        "records": report.records,
        "objects": report.objects,
        "object_bytes": report.object_bytes,
    }
    if as_json:
        say_json({"clean": report.is_clean, "findings": len(report.findings), **counts})
        return
    size = readable_bytes(report.bytes)
    verdict = "all sound" if report.is_clean else "NOT ALL CHECKED" if report.is_open else "DAMAGED"
    objects = f"; {report.objects} objects, {readable_bytes(report.object_bytes)}" if report.objects else ""
    say(
        f"{verdict}: {report.shards} shards, {report.files} segment files, {size}, "
        f"{report.frames} frames, {report.records} records{objects}"
    )


def _known_topic(run: Invocation, name: str | None) -> TopicName | None:
    """The topic asked for, which must exist."""
    if name is None:
        return None
    from forebay.topics import TopicName

    parsed = TopicName.parse(name)
    with run.reader() as log:
        if all(spec.name != parsed for spec in log.topics()):
            raise UnknownTopic(f'there is no topic {parsed}: see "forebay topic list" for what there is', topic=parsed)
    return parsed


def repair(
    run: Invocation,
    *,
    name: OneTopic = None,
    apply: Annotated[bool, typer.Option("--apply", help="Do it. Else it is only said what would be done.")] = False,
    as_json: AsJson = False,
) -> int:
    """Mend local files from the store and objects from local files; rebuild indexes and checkpoints.

    Without --apply it is only said what would be done. Only bytes with the catalogued hash are copied, and what is
    replaced is kept in the shard's aside/. Needs the directory for itself, and for objects that no living process
    owns the shard elsewhere. Ends with code 6 if something is damaged that cannot be repaired.
    """
    from forebay.clock import SystemClock
    from forebay.inspection import CHANGES, Action
    from forebay.inspection import repair as repaired

    topic = _known_topic(run, name)
    with meter("repair", in_bytes=True) as shown:
        steps = repaired(
            run.directory,
            run.settings,
            disk=run.disk,
            clock=SystemClock(),
            topic=topic,
            apply=apply,
            on_total=shown.total,
            on_bytes=shown.advance,
        )
    for step in steps:
        if as_json:
            say_json(msgspec.to_builtins(step))
        else:
            say(str(step))
    planned = [step for step in steps if step.action in CHANGES]
    if not as_json:
        if not planned:
            say("nothing to repair" if not steps else "nothing else to repair")
        elif not apply:
            say(f'{len(planned)} steps planned, nothing changed: run "forebay repair --apply" to do them')
        else:
            say(f'{len(planned)} steps done: run "forebay verify" to see that all is sound')
    return DAMAGE if any(step.action is Action.CANNOT for step in steps) else 0
