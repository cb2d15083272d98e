"""`forebay records`: find and delete single records of a topic."""

from __future__ import annotations

import base64
import binascii
import contextlib
import re
from bisect import bisect_left
from collections.abc import Generator
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
    from forebay.topics import TopicSpec

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


@command(app, "erase", examples=["forebay records erase shop/orders --key 42 --yes"], by_url=True)
def erase(
    run: Invocation,
    *,
    name: TopicArgument,
    key: KeyOption = None,
    key_b64: CodedKeyOption = None,
    yes: YesOption = False,
    as_json: AsJson = False,
) -> None:
    """Delete every record of a key, in all partitions and tiers, and say where its bytes still lie.

    From its return on no reader gets them. Files and objects are never changed: the bytes go when those are compacted.
    """
    wanted = _key(key, key_b64)
    _check_one(key=wanted)
    assert wanted is not None
    with run.writing() as log:
        topic = log.topic(name)
        confirm(f"every record of {topic.name} with key {key or key_b64}", yes=yes)
        places: dict[int, list[int]] = {}
        count = 0
        for partition in range(topic.partitions):
            # Where they lay can be asked only before they go; what comes in between goes and is counted.
            stream = topic.read_by_key(wanted, history=True, partition=partition)
            places[partition] = [record.offset for record in stream]
            count += topic.delete_by_key(wanted, partition=partition)
    left = _remains(run, topic.spec, places)
    item: dict[str, Any] = {"topic": topic.name, "deleted": count, "remains": left}
    if as_json:
        say_json(item)
        return
    say(f"{topic.name}: {count} records deleted, no reader sees them again")
    for place in left:
        where = f"{place['place']}, {readable_bytes(place['bytes'])}"
        say(f"  their bytes remain in {where} ({place['tier']}) until {place['until']}")


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


def _remains(run: Invocation, spec: TopicSpec, places: dict[int, list[int]]) -> list[dict[str, Any]]:
    """Each file and object with bytes of the records at these offsets, by partition, until it is compacted."""
    return _local_remains(run, spec, places) if run.url is None else _asked_remains(run.url, spec, places)


def _asked_remains(url: str, spec: TopicSpec, places: dict[int, list[int]]) -> list[dict[str, Any]]:
    """As a broker says: it names its log files by their offsets, and nothing of what was set aside."""
    from forebay.cli.brokers import BrokerCalls
    from forebay.client.topics import topic_path
    from forebay.client.transport import HttpCall
    from forebay.storage.usage import Tier
    from forebay.wire.messages import SegmentList

    left = []
    with BrokerCalls(url) as calls:
        for partition, offsets in places.items():
            start: int | None = 0 if offsets else None
            while start is not None:
                query = {"partition": str(partition), "start": str(start)}
                call = HttpCall(method="GET", path=f"{topic_path(spec.name)}/segments", query=query)
                page = calls.ask(call, SegmentList)
                for file in page.local:
                    if _has(offsets, file.start, file.end):
                        tier = Tier.SEALED if file.sealed else Tier.LOG
                        place = f"log file [{file.start}, {file.end})"
                        left.append(_left(partition, tier, place, file.bytes or 0))
                left += [
                    _left(partition, Tier.HISTORY, piece.object, piece.bytes)
                    for piece in page.history
                    if piece.object is not None and _has(offsets, piece.start, piece.end)
                ]
                start = page.next
    return left


def _left(partition: int, tier: str, place: str, size: int, until: str = "compaction") -> dict[str, Any]:
    return {"partition": partition, "tier": tier, "place": place, "bytes": size, "until": until}


def _local_remains(run: Invocation, spec: TopicSpec, places: dict[int, list[int]]) -> list[dict[str, Any]]:
    from forebay.cli.directory import database_of, look_at, pieces_of
    from forebay.storage.usage import Tier, bytes_below
    from forebay.topics import Engine

    found = look_at(run)
    if not any(places.values()):
        return []
    if spec.engine is Engine.ROCKSDB:
        database = database_of(found)
        if not run.disk.exists(database):
            return []
        until = "RocksDB compacts the files that have them"
        size = bytes_below(run.disk, database)
        return [{"tier": Tier.DATABASE, "place": database, "bytes": size, "until": until}]
    left = []
    for place in found.places():
        offsets = places.get(place.partition, []) if place.spec == spec else []
        for piece in pieces_of(found, place, run.disk) if offsets else ():
            # What was set aside is not known by offsets, and may have them.
            if piece.tier is Tier.ASIDE or _has(offsets, piece.start, piece.stop):
                until = "you remove what was set aside" if piece.tier is Tier.ASIDE else "compaction"
                left.append(_left(place.partition, piece.tier, piece.place, piece.bytes, until))
    return left


def _has(offsets: list[int], start: int, stop: int) -> bool:
    """Whether any of the offsets, which are sorted, lies in `[start, stop)`."""
    at = bisect_left(offsets, start)
    return at < len(offsets) and offsets[at] < stop
