"""`forebay consume`: read a topic from a place on, and follow it if asked to."""

from __future__ import annotations

import contextlib
import enum
import sys
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Annotated

import typer

from forebay.cli.commands import command, root
from forebay.cli.failures import complain
from forebay.cli.invocation import Invocation
from forebay.cli.options import CountOption, PartitionOption, TopicArgument
from forebay.cli.terminal import PagedTable, as_json, draws, readable_time, say, write
from forebay.errors import DataLoss, Invalid
from forebay.records import EARLIEST, LATEST, Gap, Position, Reason, Record
from forebay.wire.positions import END, parse_start, parse_stop

if TYPE_CHECKING:
    from forebay.surface.blocking import TopicHandle

VALUE_CHARACTERS_MAX = 60
ROWS_DRAWN = 50
"""So many rows of a table are drawn together."""


class OutputFormat(enum.StrEnum):
    """How records are written."""

    VALUE = "value"
    JSON = "json"
    TABLE = "table"
    RAW = "raw"


FromOption = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="PLACE",
        help="earliest, latest, an offset, a time in ISO 8601 or as 1935903600000ms "
        "[default: earliest, with --follow latest].",
        show_default=False,
    ),
]
UntilOption = Annotated[
    str | None,
    typer.Option(
        metavar="PLACE", help="end (as it is now), an offset or a time, which is not read any more.", show_default=False
    ),
]
FollowOption = Annotated[bool, typer.Option("--follow", "-f", help="Go on with new records as they come.")]
TimeoutOption = Annotated[
    float | None, typer.Option(help="With --follow: end when nothing came for so many seconds.", show_default=False)
]
FormatOption = Annotated[
    OutputFormat,
    typer.Option(
        "--format", help="The value and a new line; a JSON object per line; columns; the value and nothing else."
    ),
]
LossOption = Annotated[bool, typer.Option("--fail-on-loss", help="End with code 6 at a lost or damaged range.")]


@command(
    root,
    "consume",
    examples=[
        "forebay consume shop/orders",
        "forebay consume shop/orders --from latest --follow",
        "forebay consume shop/orders --partition 2 --from 1000 --until 2000 --format json",
        "forebay consume shop/orders --from 2031-05-06T00:00:00Z --until 2031-05-07T00:00:00Z",
        "forebay consume shop/orders --format json | forebay produce shop/copy --format json",
    ],
    by_url=True,
)
def consume(
    run: Invocation,
    *,
    name: TopicArgument,
    start: FromOption = None,
    until: UntilOption = None,
    follow: FollowOption = False,
    timeout: TimeoutOption = None,
    count: CountOption = None,
    partition: PartitionOption = None,
    output: FormatOption = OutputFormat.VALUE,
    fail_on_loss: LossOption = False,
) -> int:
    """Read the records of a topic, also while another process appends to it.

    Ranges without records are reported in band: on stderr, or with --format json as {"gap": …} in their place.
    """
    first = parse_start(start, "--from") if start is not None else LATEST if follow else EARLIEST
    last = parse_stop(until) if until is not None else None
    if timeout is not None and (not follow or timeout < 0):
        raise Invalid("--timeout is a number of seconds to wait with --follow")
    if count is not None and count < 0:
        raise Invalid(f"--count is {count}; give 0 or more")
    with run.reading(name) as log:
        topic = log.topic(name)
        printer = Printer(topic, output, fail_on_loss=fail_on_loss, at_once=follow)
        stream = _Stream(topic, partition, printer.gap)
        left = count
        # Left before the end, it is closed while its topics are still open.
        with contextlib.closing(stream.follow(first, last, timeout) if follow else stream.read(first, last)) as records:
            try:
                while left != 0 and (record := next(records, None)) is not None:
                    printer.record(record)
                    if follow:
                        # A user who waits for new records wants each of them at once.
                        sys.stdout.flush()
                    left = None if left is None else left - 1
            finally:
                printer.flush()
    return 0


class _Stream:
    """The records of a topic between two places."""

    def __init__(self, topic: TopicHandle, partition: int | None, on_gap: Callable[[int, Gap], None]) -> None:
        self._topic = topic
        self._partition = partition
        self._on_gap = on_gap
        if partition is not None and not 0 <= partition < topic.partitions:
            raise Invalid(f"partition is {partition}; {topic.name} has 0 to {topic.partitions - 1}")
        self._chosen = range(topic.partitions) if partition is None else range(partition, partition + 1)

    def read(self, start: Position, until: Position | None) -> Generator[Record, None, None]:
        """What is there now."""
        self._check(start, until)
        for number in self._chosen:
            stop = self._stop(number, until)
            with self._topic.read(start, stop=stop, partition=number, on_gap=self._on_gap) as records:
                yield from records

    def follow(self, start: Position, until: Position | None, timeout: float | None) -> Generator[Record, None, None]:
        """What is there and what comes, until every partition has reached its end."""
        self._check(start, until)
        if until == END:
            yield from self.read(start, until)
            return
        waiting = set(self._chosen)
        with self._topic.follow(start, partition=self._partition, timeout=timeout, on_gap=self._on_gap) as records:
            for record in records:
                if until is not None and _is_behind(record, until):
                    waiting.discard(record.partition)
                elif record.partition in waiting:
                    yield record
                    if until == Position.at_offset(record.offset + 1):
                        waiting.discard(record.partition)
                if not waiting:
                    return

    def _stop(self, partition: int, until: Position | None) -> int:
        end = self._topic.offsets(partition).next
        if until is None or until == END:
            return end
        if until.kind == "offset":
            return min(end, until.value)
        found = self._topic.offset_at_time(until.value, partition)
        return end if found is None else found

    def _check(self, *places: Position | None) -> None:
        by_offset = any(place is not None and place.kind == "offset" for place in places)
        if by_offset and len(self._chosen) > 1:
            raise Invalid(
                f"{self._topic.name} has {self._topic.partitions} partitions and an offset is a place in one of "
                "them: add --partition"
            )


def _is_behind(record: Record, until: Position) -> bool:
    return (record.offset if until.kind == "offset" else record.timestamp) >= until.value


class Printer:
    """Writes records and gaps in the format asked for."""

    def __init__(self, topic: TopicHandle, output: OutputFormat, *, fail_on_loss: bool, at_once: bool = True) -> None:
        """Without `at_once` rows may wait for others, until `flush`: it is quicker where they are many."""
        self._topic = topic
        self._output = output
        self._fail_on_loss = fail_on_loss
        self._rows_max = 1 if at_once else ROWS_DRAWN
        self._rows: list[tuple[object, ...]] = []
        self._drawn: PagedTable | None = None
        if output is OutputFormat.TABLE and draws():
            self._drawn = PagedTable("partition", "offset", "time", "key", "tag", "value", widths=(9, 10, 24, 16, 8, 5))
        elif output is OutputFormat.TABLE:
            say(f"{'partition':>9}  {'offset':>10}  {'time':24}  {'key':16}  {'tag':8}  value")

    def record(self, record: Record) -> None:
        """Write one record."""
        if self._output is OutputFormat.VALUE:
            write((record.value or b"") + b"\n")
        elif self._output is OutputFormat.RAW:
            write(record.value or b"")
        elif self._output is OutputFormat.JSON:
            from forebay.wire.items import plain_item

            say(as_json({"topic": self._topic.name, **plain_item(record)}))
        elif self._drawn is not None:
            tag = _shown(record.tag.encode()) if record.tag is not None else ""
            self._rows.append(
                (
                    record.partition,
                    record.offset,
                    readable_time(record.timestamp),
                    _shown(record.key, 16),
                    tag,
                    _shown(record.value),
                )
            )
            if len(self._rows) >= self._rows_max:
                self.flush()
        else:
            time = readable_time(record.timestamp)
            columns = f"{record.partition:>9}  {record.offset:>10}  {time:24}"
            say(f"{columns}  {_shown(record.key, 16):16}  {record.tag or '':8}  {_shown(record.value)}".rstrip())

    def flush(self) -> None:
        """Show the rows that wait to be drawn."""
        rows, self._rows = self._rows, []
        if self._drawn is not None and rows:
            self._drawn.say(rows)

    def gap(self, partition: int, gap: Gap) -> None:
        """Report a range without records, in its place."""
        self.flush()
        place = f"{self._topic.name}[{partition}]"
        if self._fail_on_loss and gap.reason in (Reason.LOST, Reason.DAMAGED):
            raise DataLoss(
                f'{place}: offsets {gap} cannot be read; "forebay verify" says more',
                start=gap.start,
                stop=gap.stop,
                reason=gap.reason.name.lower(),
            )
        if self._output is OutputFormat.JSON:
            reason = gap.reason.name.lower()
            shown = {"partition": partition, "start": gap.start, "stop": gap.stop, "reason": reason}
            say(as_json({"topic": self._topic.name, "gap": shown}))
        else:
            sys.stdout.flush()
            complain(f"gap {place} {gap}")


def _shown(content: bytes | None, characters_max: int = VALUE_CHARACTERS_MAX) -> str:
    """Bytes for a column: one line, nothing that a terminal would obey, not too long."""
    if content is None:
        return "-"
    text = content[: 4 * characters_max].decode("utf-8", "replace")
    plain = "".join(character if character.isprintable() else "·" for character in text)
    return plain if len(plain) <= characters_max else f"{plain[: characters_max - 1]}…"
