"""`forebay records`: find and delete single records of a topic."""

from __future__ import annotations

import base64
import binascii
import contextlib
import re
from collections.abc import Callable, Generator
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from forebay.cli.commands import command, group
from forebay.cli.consume import OutputFormat, Printer
from forebay.cli.failures import PROBLEM
from forebay.cli.invocation import Invocation
from forebay.cli.options import AsJson, CountOption, PartitionOption, TopicArgument, YesOption
from forebay.cli.terminal import confirm, readable_bytes, say, say_json
from forebay.errors import Invalid
from forebay.wire.positions import parse_time

if TYPE_CHECKING:
    from forebay.records import Record
    from forebay.surface.blocking import TopicHandle

app = group("records", help="Find and delete single records by key, tag, time and offset.")

KeyOption = Annotated[str | None, typer.Option(help="Records with exactly this key.", show_default=False)]
CodedKeyOption = Annotated[str | None, typer.Option("--key-b64", help="The same, in base64.", show_default=False)]
TagOption = Annotated[str | None, typer.Option(help="Records with exactly this tag.", show_default=False)]
TimeOption = Annotated[
    str | None,
    typer.Option(metavar="TIME", help="The first record of each partition at or after this time.", show_default=False),
]
FormatOption = Annotated[OutputFormat, typer.Option("--format", help="As for consume.")]

_RANGE: Final = re.compile(r"([0-9]{1,19})-([0-9]{1,19})")


@command(
    app,
    "get",
    examples=[
        "forebay records get shop/orders --key 42",
        "forebay records get shop/orders --key 42 --history --format json",
        "forebay records get shop/orders --tag eu --count 10",
        "forebay records get shop/orders --at-time 2031-05-06T07:08:09Z",
    ],
    by_url=True,
)
def get(
    run: Invocation,
    *,
    name: TopicArgument,
    key: KeyOption = None,
    key_b64: CodedKeyOption = None,
    tag: TagOption = None,
    at_time: TimeOption = None,
    history: Annotated[bool, typer.Option("--history", help="All records of the key, not the newest alone.")] = False,
    partition: PartitionOption = None,
    count: CountOption = None,
    output: FormatOption = OutputFormat.VALUE,
) -> int:
    """Find records by key, tag or time. Ends with code 1 if there is none.

    By key the newest record is given, with --history all of them, oldest first.
    """
    wanted = _key(key, key_b64)
    _check_one(key=wanted, tag=tag, at_time=at_time)
    if history and wanted is None:
        raise Invalid("--history gives all records of a key: add --key")
    if count is not None and count < 0:
        raise Invalid(f"--count is {count}; give 0 or more")
    moment = parse_time(at_time, "--at-time") if at_time is not None else None
    found = 0
    with run.reading(name) as log:
        topic = log.topic(name)
        printer = Printer(topic, output, fail_on_loss=False)
        asked = _found(topic, wanted, tag, moment, history=history, partition=partition)
        # Left before the end, it is closed while its topic is still open.
        with contextlib.closing(asked) as records:
            for record in records:
                if found == count:
                    break
                printer.record(record)
                found += 1
    return 0 if found or count == 0 else PROBLEM


@command(
    app,
    "delete",
    examples=[
        "forebay records delete shop/orders --key 42 --yes",
        "forebay records delete shop/orders --tag test",
        "forebay records delete shop/orders --partition 0 --offsets 100-200 --yes",
        "forebay records delete shop/orders --partition 0 --before 1000000 --yes",
    ],
    by_url=True,
)
def delete(
    run: Invocation,
    *,
    name: TopicArgument,
    key: KeyOption = None,
    key_b64: CodedKeyOption = None,
    tag: TagOption = None,
    offsets: Annotated[
        str | None, typer.Option(metavar="A-B", help="Offsets from A on, below B.", show_default=False)
    ] = None,
    before: Annotated[int | None, typer.Option(metavar="N", help="All offsets below N.", show_default=False)] = None,
    partition: PartitionOption = None,
    yes: YesOption = False,
    as_json: AsJson = False,
) -> None:
    """Delete records: no reader sees them again. There is no way back.

    A delete takes what is there when it is given, and nothing that is appended later.
    """
    wanted = _key(key, key_b64)
    _check_one(key=wanted, tag=tag, offsets=offsets, before=before)
    bounds = _offsets(offsets) if offsets is not None else (0, 0)
    with run.writing() as log:
        topic = log.topic(name)
        what = next(
            text
            for given, text in (
                (wanted, f"key {key or key_b64}"),
                (tag, f"tag {tag}"),
                (offsets, f"offsets {offsets}"),
                (before, f"offsets below {before}"),
            )
            if given is not None
        )
        confirm(f"every record of {topic.name} with {what}", yes=yes)
        if wanted is not None:
            count = topic.delete_by_key(wanted, partition=partition)
        elif tag is not None:
            count = topic.delete_by_tag(tag, partition=partition)
        elif before is not None:
            count = topic.delete_before(before, partition)
        else:
            count = topic.delete_by_offset(*bounds, partition)
    if as_json:
        say_json({"topic": topic.name, "deleted": count})
    else:
        say(f"{topic.name}: {count} records deleted")


@command(
    app,
    "erase",
    examples=[
        "forebay records erase shop/orders --key 42 --yes",
        "forebay records erase shop/orders --key 42 --now --yes",
    ],
    by_url=True,
)
def erase(
    run: Invocation,
    *,
    name: TopicArgument,
    key: KeyOption = None,
    key_b64: CodedKeyOption = None,
    now: Annotated[
        bool, typer.Option("--now", help="Rewrite what holds them, without Spark, and remove the old files at once.")
    ] = False,
    yes: YesOption = False,
    as_json: AsJson = False,
) -> int:
    """Delete every record of a key, in all partitions and tiers, and say where its bytes still lie.

    From its return on no reader gets them. Their bytes go when the files and objects that have them are compacted, or
    with --now. Says, each time it is asked, every file that still holds them and what to run, and ends with code 1
    where --now has left some. Copies in other topics are named, and are erased there.
    """
    wanted = _key(key, key_b64)
    _check_one(key=wanted)
    assert wanted is not None
    erased_there = partial(_erased_here, run) if run.url is None else partial(_erased_asked, run.url)
    item = erased_there(name, wanted, now=now, asked=lambda topic: confirm(_every(topic, key or key_b64), yes=yes))
    if as_json:
        say_json(item)
    else:
        _say_erased(item)
    return PROBLEM if now and item["remains"] else 0


def _every(topic: str, key: str | None) -> str:
    return f"every record of {topic} with key {key}"


def _erased_here(run: Invocation, name: str, key: bytes, *, now: bool, asked: Callable[[str], None]) -> dict[str, Any]:
    with run.writer() as log:
        asked(log.topic(name).name)
        erased = log.erase_key(name, key, now=now)
    item = asdict(erased)
    return {
        "topic": erased.topic,
        "deleted": erased.deleted,
        "remains": item["remains"],
        "commands": erased.commands,
        "copies": item["copies"],
    }


def _erased_asked(url: str, name: str, key: bytes, *, now: bool, asked: Callable[[str], None]) -> dict[str, Any]:
    """As the broker says, which does it where the topic is."""
    import msgspec

    from forebay.cli.brokers import asked_to
    from forebay.topics import TopicName
    from forebay.wire.messages import ErasedItem, Erasing

    asked(str(TopicName.parse(name)))
    erasing = Erasing(key_b64=base64.b64encode(key).decode(), now=now)
    found: dict[str, Any] = msgspec.to_builtins(asked_to(url, name, "erase", erasing, ErasedItem))
    return found


def _say_erased(item: dict[str, Any]) -> None:
    say(f"{item['topic']}: {item['deleted']} records deleted, no reader sees them again")
    for place in item["remains"]:
        where = f"{place['place']}, {readable_bytes(place['bytes'])}"
        say(f"  their bytes remain in {where} ({place['tier']}) until {place['until']}")
    if item["commands"]:
        say("to remove them, run in this order:")
        for line in item["commands"]:
            say(f"  {line}")
    for copy in item["copies"]:
        say(f"{copy['topic']} may have copies ({copy['by']}): {copy['command']}")


def _found(
    topic: TopicHandle, key: bytes | None, tag: str | None, moment: int | None, *, history: bool, partition: int | None
) -> Generator[Record, None, None]:
    if key is not None:
        with topic.read_by_key(key, history=history, partition=partition) as stream:
            yield from stream
    elif tag is not None:
        with topic.read_by_tag(tag, partition=partition) as stream:
            yield from stream
    elif moment is not None:
        for number in range(topic.partitions) if partition is None else [partition]:
            offset = topic.offset_at_time(moment, number)
            if offset is not None:
                with topic.read(offset, stop=offset + 1, partition=number) as stream:
                    yield from stream


def _key(text: str | None, coded: str | None) -> bytes | None:
    if text is not None and coded is not None:
        raise Invalid("--key and --key-b64 both name a key: give one")
    if coded is not None:
        try:
            return base64.b64decode(coded, validate=True)
        except (binascii.Error, ValueError) as error:
            raise Invalid(f"--key-b64 is not base64: {error}") from error
    return None if text is None else text.encode("utf-8", "surrogateescape")


def _check_one(**given: object) -> None:
    if sum(value is not None for value in given.values()) != 1:
        names = " or ".join(f"--{name.replace('_', '-')}" for name in given)
        raise Invalid(f"what is meant is not clear: give {names}{', and one alone' if len(given) > 1 else ''}")


def _offsets(text: str) -> tuple[int, int]:
    found = _RANGE.fullmatch(text)
    if found is None:
        raise Invalid(f"--offsets is {text!r:.80}; give A-B, as 100-200: from 100 on, below 200")
    return int(found[1]), int(found[2])
