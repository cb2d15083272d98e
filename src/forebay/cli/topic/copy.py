"""`forebay topic copy`: the records of a topic into another topic on any engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.cli.commands import command
from forebay.cli.failures import PROBLEM, complain
from forebay.cli.invocation import Invocation
from forebay.cli.options import AsJson
from forebay.cli.terminal import meter, say, say_json
from forebay.cli.topic import app
from forebay.errors import Invalid, Unsupported

if TYPE_CHECKING:
    from forebay.storage import Copied
    from forebay.surface.blocking import Log, TopicHandle
    from forebay.topics import TopicLimits, TopicSpec

Source = Annotated[str, typer.Argument(metavar="SOURCE", help="The topic whose records are copied.")]
Target = Annotated[str, typer.Argument(metavar="TARGET", help="The topic that gets them; made if there is none.")]


@command(
    app,
    "copy",
    examples=[
        "forebay topic copy shop/orders shop/orders-by-key --engine rocksdb",
        "forebay topic copy shop/orders shop/wider --partitions 16",
    ],
    by_url=True,
)
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
    limits: TopicLimits = {
        "cap_records": spec.cap_records,
        "cap_bytes": spec.cap_bytes,
        "ttl_ms": spec.ttl_ms,
        "on_full": spec.on_full,
        "cleanup": spec.cleanup,
        "compact_lag_ms": spec.compact_lag_ms,
        "dispatch": spec.dispatch,
    }
    if same and durability in (None, spec.durability):
        limits["on_owner_loss"] = spec.loss_policy
    return log.create_topic(
        name,
        engine=engine or spec.engine,
        durability=durability or (spec.durability if same else None),
        partitions=partitions or spec.partitions,
        compression=spec.compression,
        **limits,
    )
