"""`forebay topic alter` and `forebay topic copy`: a topic with other limits, more partitions, or on another engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from forebay.cli.commands import command
from forebay.cli.failures import PROBLEM, complain
from forebay.cli.invocation import AsJson, Invocation, TopicArgument
from forebay.cli.limits import (
    CapBytesOption,
    CapRecordsOption,
    CleanupOption,
    CompactLagOption,
    OnFullOption,
    TtlOption,
    parse_limits,
)
from forebay.cli.showing import limits_line, spec_item
from forebay.cli.terminal import meter, say, say_json
from forebay.errors import Invalid, Unsupported

if TYPE_CHECKING:
    from forebay.storage import Copied
    from forebay.surface.blocking import Log, TopicHandle
    from forebay.topics import TopicChanges, TopicSpec

Source = Annotated[str, typer.Argument(metavar="SOURCE", help="The topic whose records are copied.")]
Target = Annotated[str, typer.Argument(metavar="TARGET", help="The topic that gets them; made if there is none.")]
PartitionsOption = Annotated[int | None, typer.Option(help="More partitions than now.", show_default=False)]
LossOption = Annotated[bool, typer.Option("--allow-loss", help="Even if records end at once by a new limit.")]


def register(app: typer.Typer) -> None:
    """Add the commands."""
    command(
        app,
        "alter",
        examples=[
            "forebay topic alter shop/orders --ttl 30d --cap-bytes 50GiB",
            "forebay topic alter shop/orders --cap-bytes none",
            "forebay topic alter shop/orders --partitions 8",
        ],
        by_url=True,
    )(alter)
    command(
        app,
        "copy",
        examples=[
            "forebay topic copy shop/orders shop/orders-by-key --engine rocksdb",
            "forebay topic copy shop/orders shop/wider --partitions 16",
        ],
        by_url=True,
    )(copy)


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
    allow_loss: LossOption = False,
    as_json: AsJson = False,
) -> None:
    """Change the limits of a topic, or add partitions to it.

    A limit that would end records at once is refused without --allow-loss. Partitions can only be added, and keys
    then hash again: new records of a key may go to another partition than its older ones, which stay where they are.
    """
    limits = parse_limits(cap_records, cap_bytes, ttl, on_full, cleanup, compact_lag)
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


def copy(
    run: Invocation,
    *,
    source: Source,
    target: Target,
    engine: Annotated[str | None, typer.Option(help="Of a new target: segment or rocksdb.", show_default=False)] = None,
    durability: Annotated[str | None, typer.Option(help="Of a new target: fsync or disk.", show_default=False)] = None,
    partitions: Annotated[int | None, typer.Option(help="Of a new target.", show_default=False)] = None,
    as_json: AsJson = False,
) -> int:
    """Copy the records of a topic, with keys, tags, headers and times, into another topic on any engine.

    A new target is like the source, but for what is said here. May be interrupted at any moment: the same command again
    goes on, doubles nothing, and later brings what has come since. Records get new offsets. Ends with code 1 if the
    counts differ in the end.
    """
    with run.writing() as log:
        spec = log.topic(source).spec
        if run.url is None:
            _refuse_memory(spec, engine)
        made = _target(log, spec, target, engine=engine, durability=durability, partitions=partitions)
        done = _copied(run, log, spec, made)
    if as_json:
        say_json(_copied_item(spec, made, done))
    else:
        say(f"{spec.name} to {made.name}: {done.copied} copied; {done.source} records there, {done.target} here")
        for number, gap in done.gaps:
            complain(f"gap {spec.name}[{number}] {gap}")
    if done.source != done.target:
        complain(
            f"{spec.name} has {done.source} records and {made.name} {done.target}: others append to the target or "
            "delete; else repeat the copy into a new topic"
        )
        return PROBLEM
    return 0


def _copied(run: Invocation, log: Log, spec: TopicSpec, made: TopicHandle) -> Copied:
    from forebay.storage import Copied, Storage

    if run.url is None:
        assert isinstance(log, Storage), "a directory is opened as one"
        with meter(f"copy {spec.name}", in_bytes=False) as shown:
            return log.copy_topic(spec.name, made.name, on_records=shown.advance)
    from forebay.cli.brokers import asked_to
    from forebay.wire.messages import CopiedItem, Copying

    found = asked_to(run.url, str(spec.name), "copy", Copying(target=made.name), CopiedItem)
    return Copied(found.copied, found.source, found.target, [(item.partition, item.gap()) for item in found.gaps])


def _copied_item(spec: TopicSpec, made: TopicHandle, done: Copied) -> dict[str, Any]:
    return {
        "source": str(spec.name),
        "target": made.name,
        "copied": done.copied,
        "records": {"source": done.source, "target": done.target},
        "gaps": [
            {"partition": number, "start": gap.start, "stop": gap.stop, "reason": gap.reason.name.lower()}
            for number, gap in done.gaps
        ],
    }


def _refuse_memory(spec: TopicSpec, engine: str | None) -> None:
    """`Unsupported` for records in the memory of another process, or of this one, which ends with the command."""
    from forebay.topics import Engine

    if Engine.MEMORY in (spec.engine, engine):
        raise Unsupported(
            "records in memory end with their process: copy them there, with copy_topic() of the log it has open"
        )


def _target(
    log: Log,
    spec: TopicSpec,
    name: str,
    *,
    engine: str | None,
    durability: str | None,
    partitions: int | None,
) -> TopicHandle:
    """The topic that gets the records. One that exists must be what was asked for."""
    from forebay.topics import TopicName

    found = next((known for known in log.topics() if known.name == TopicName.parse(name)), None)
    if found is not None:
        for what, asked in (("engine", engine), ("durability", durability), ("partitions", partitions)):
            if asked not in (None, getattr(found, what)):
                raise Invalid(f"{found.name} exists with {what} {getattr(found, what)}: leave --{what} out")
        return log.topic(name)
    same = engine in (None, spec.engine)
    return log.create_topic(
        name,
        engine=engine or spec.engine,
        durability=durability or (spec.durability if same else None),
        partitions=partitions or spec.partitions,
        compression=spec.compression,
        cap_records=spec.cap_records,
        cap_bytes=spec.cap_bytes,
        ttl_ms=spec.ttl_ms,
        on_full=spec.on_full,
        cleanup=spec.cleanup,
        compact_lag_ms=spec.compact_lag_ms,
    )
