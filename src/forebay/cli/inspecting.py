"""`forebay dump`, `forebay verify`, `forebay repair`: look into a data directory, and mend what is derived."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from forebay.cli.commands import command
from forebay.cli.failures import DAMAGE
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
    as_json: AsJson = False,
) -> None:
    """Write down what stands in files of a data directory, item by item, whole or not. Changes nothing."""
    if files and key is not None:
        raise Invalid("--key chooses from the metadata store: leave the files out")
    if not files:
        for item in _metadata_items(run, key):
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
    from forebay.inspection import dump_metadata
    from forebay.inspection.directory import metadata_of
    from forebay.storage.directory import LogDirectory

    directory = LogDirectory.look(run.directory, run.disk)
    with metadata_of(directory, run.settings, run.disk, SystemClock()) as store:
        entries = store.range(key if key is not None else "")
    return dump_metadata(entries)


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


def verify(run: Invocation, *, name: OneTopic = None, as_json: AsJson = False) -> int:
    """Check everything: every checksum and frame, indexes, footers, checkpoints, sequence, metadata.

    Changes nothing and may run while another process has the directory open. Ends with code 0 if all is sound
    (notes and warnings do not count) and with 6 if anything is damaged. Each finding says what to do next.
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
            on_total=shown.total,
            on_bytes=shown.advance,
        )
    for finding in report.findings:
        if as_json:
            say_json(msgspec.to_builtins(finding))
        else:
            say(str(finding))
    _say_summary(report, as_json=as_json)
    return 0 if report.is_clean else DAMAGE


def _say_summary(report: Report, *, as_json: bool) -> None:
    counts = {
        "shards": report.shards,
        "files": report.files,
        "bytes": report.bytes,
        "frames": report.frames,
        "records": report.records,
    }
    if as_json:
        say_json({"clean": report.is_clean, "findings": len(report.findings), **counts})
        return
    size = readable_bytes(report.bytes)
    verdict = "all sound" if report.is_clean else "DAMAGED"
    say(
        f"{verdict}: {report.shards} shards, {report.files} segment files, {size}, "
        f"{report.frames} frames, {report.records} records"
    )


def _known_topic(run: Invocation, name: str | None) -> TopicName | None:
    """The topic asked for, which must exist."""
    if name is None:
        return None
    from forebay.topics import TopicName

    parsed = TopicName.parse(name)
    with run.reader() as log:
        if all(spec.name != parsed for spec in log.topics()):
            raise UnknownTopic(f'there is no topic {parsed}: see "forebay topic list" for what there is')
    return parsed


def repair(
    run: Invocation,
    *,
    name: OneTopic = None,
    apply: Annotated[bool, typer.Option("--apply", help="Do it. Else it is only said what would be done.")] = False,
    as_json: AsJson = False,
) -> int:
    """Rebuild indexes and checkpoints from segments. Without --apply it is only said what would be done.

    Segments are never changed, and what is replaced is kept in the shard's aside/. Needs the directory for
    itself. Ends with code 6 if something is damaged that cannot be rebuilt.
    """
    from forebay.clock import SystemClock
    from forebay.inspection import repair as repaired
    from forebay.inspection.repair import Action

    topic = _known_topic(run, name)
    steps = repaired(run.directory, run.settings, disk=run.disk, clock=SystemClock(), topic=topic, apply=apply)
    for step in steps:
        if as_json:
            say_json(msgspec.to_builtins(step))
        else:
            say(str(step))
    planned = [step for step in steps if step.action in (Action.REBUILD_INDEX, Action.REBUILD_CHECKPOINT)]
    if not as_json:
        if not planned:
            say("nothing to rebuild")
        elif not apply:
            say(f'{len(planned)} steps planned, nothing changed: run "forebay repair --apply" to do them')
        else:
            say(f'{len(planned)} steps done: run "forebay verify" to see that all is sound')
    return DAMAGE if any(step.action is Action.CANNOT for step in steps) else 0
