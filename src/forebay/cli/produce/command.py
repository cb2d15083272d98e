"""`forebay produce`: lines, JSON lines or files into a topic, at full speed or at a given rate."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, BinaryIO

import typer

from forebay.arguments import PRODUCER_MAX
from forebay.cli.commands import command, root
from forebay.cli.failures import complain
from forebay.cli.invocation import Invocation
from forebay.cli.options import AsJson, TopicArgument
from forebay.cli.produce.input import Defaults, InputFormat, InputRecord, read_records
from forebay.cli.produce.sender import RecordLimits, Sender, SentTally, groups_of
from forebay.cli.terminal import meter, readable_bytes, say_json
from forebay.errors import ForebayError, Invalid

FILE_BYTES_MAX = 64 * 1024 * 1024
CHUNK_BYTES = 256 * 1024

InputsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="FILE", help="What to read; - or nothing is stdin.")
]
FormatOption = Annotated[
    InputFormat, typer.Option("--format", help="A value per line, a JSON object per line, or one record per file.")
]
KeyOption = Annotated[str | None, typer.Option(help="The key of every record.", show_default=False)]
SeparatorOption = Annotated[str | None, typer.Option(help="Each line is KEY, this text, VALUE.", show_default=False)]
TagOption = Annotated[str | None, typer.Option(help="The tag of every record.", show_default=False)]
PartitionOption = Annotated[int | None, typer.Option(help="Append there, not where the key says.", show_default=False)]
RateOption = Annotated[float | None, typer.Option(help="At most so many records a second.", show_default=False)]
BatchOption = Annotated[int, typer.Option(help="Append up to so many records at once.")]
ProducerOption = Annotated[
    int | None, typer.Option(help="Append as this idempotent producer; its sequence goes on.", show_default=False)
]


@command(
    root,
    "produce",
    examples=[
        "printf 'paid\\nshipped\\n' | forebay produce shop/orders",
        "forebay produce shop/orders orders.csv --key-separator , --rate 1000",
        "forebay produce shop/orders orders.jsonl --format json --producer 7",
        "forebay produce media/images *.png --format file --tag png",
    ],
    by_url=True,
)
def produce(
    run: Invocation,
    *,
    name: TopicArgument,
    inputs: InputsArgument = None,
    input_format: FormatOption = InputFormat.LINES,
    key: KeyOption = None,
    key_separator: SeparatorOption = None,
    tag: TagOption = None,
    partition: PartitionOption = None,
    rate: RateOption = None,
    batch: BatchOption = 5000,
    producer: ProducerOption = None,
    as_json: AsJson = False,
) -> int:
    """Append records to a topic, from stdin or from files.

    JSON lines have "value" or "value_b64" and may have "key", "key_b64", "tag", "headers", "timestamp" (ms) and
    "partition": what "forebay consume --format json" writes. A bad line ends the command; its number is named,
    and everything before it has been appended and is counted in the summary on stderr.
    """
    from forebay.clock import SystemClock

    _check(key, key_separator, rate, batch, producer, input_format)
    defaults = Defaults(
        key=None if key is None else _as_bytes(key),
        key_separator=None if key_separator is None else _as_bytes(key_separator),
        tag=tag,
        partition=partition,
    )
    tally = SentTally(SystemClock())
    try:
        with run.writing() as log, meter(f"produce {name}", in_bytes=False) as shown:
            topic = log.topic(name)
            sender = Sender(topic, run.interruptions, shown, tally, rate=rate, producer=producer)
            limits = RecordLimits(topic.partitions, run.settings.wal.frame_bytes_max)
            records = (limits.checked(record) for record in _records(inputs or ["-"], input_format, defaults))
            tally.start()
            for group in groups_of(records, sender.batch_of(batch), limits.batch_bytes):
                sender.send(group)
    except (ForebayError, KeyboardInterrupt):
        if tally.started is not None:
            _report(tally, as_json=as_json)
        raise
    _report(tally, as_json=as_json)
    return 0


def _check(
    key: str | None,
    key_separator: str | None,
    rate: float | None,
    batch: int,
    producer: int | None,
    input_format: InputFormat,
) -> None:
    if key is not None and key_separator is not None:
        raise Invalid("--key and --key-separator both name a key: give one")
    if key_separator is not None and (not key_separator or input_format is not InputFormat.LINES):
        raise Invalid("--key-separator is a text that parts the key from the value of a line (--format lines)")
    if rate is not None and not rate > 0:
        raise Invalid(f"--rate is {rate}; give more than 0 records a second")
    if not 1 <= batch <= 100_000:
        raise Invalid(f"--batch is {batch}; allowed: 1 to 100000")
    if producer is not None and not 1 <= producer <= PRODUCER_MAX:
        raise Invalid(f"--producer is {producer}; allowed: 1 to {PRODUCER_MAX}")


def _as_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _report(tally: SentTally, *, as_json: bool) -> None:
    seconds = tally.seconds
    rate = tally.records / seconds if seconds > 0 else 0.0
    if as_json:
        item = {"records": tally.records, "bytes": tally.bytes, "seconds": round(seconds, 3), "offsets": tally.offsets}
        say_json(item)
        return
    places = ", ".join(f"partition {one} offsets [{low}, {high})" for one, (low, high) in sorted(tally.offsets.items()))
    size = readable_bytes(tally.bytes)
    complain(f"{tally.records} records, {size} in {seconds:.2f} s ({rate:.0f}/s){': ' if places else ''}{places}")


def _records(inputs: Sequence[str], input_format: InputFormat, defaults: Defaults) -> Iterator[InputRecord | None]:
    for path in inputs:
        shown = "stdin" if path == "-" else path
        with _opened(path) as stream:
            if input_format is InputFormat.FILE:
                yield _whole_file(stream, shown, defaults)
            else:
                yield from read_records(lines_of(stream, shown), shown, input_format, defaults)


def _whole_file(stream: BinaryIO, shown: str, defaults: Defaults) -> InputRecord:
    try:
        content = stream.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise Invalid(f"{shown} cannot be read: {error.strerror or error}") from error
    if len(content) > FILE_BYTES_MAX:
        raise Invalid(f"{shown} has more than {FILE_BYTES_MAX} bytes: too large for one record")
    return InputRecord(shown, content, defaults.key, defaults.tag, (), None, defaults.partition)


def lines_of(stream: BinaryIO, shown: str) -> Iterator[bytes | None]:
    """Complete lines as they come; `None` where nothing more can be had without waiting."""
    begun: list[bytes] = []
    size = 0
    while True:
        try:
            chunk = stream.read1(CHUNK_BYTES)  # type: ignore[attr-defined]
        except OSError as error:
            raise Invalid(f"{shown} cannot be read: {error.strerror or error}") from error
        if not chunk:
            break
        first, *further = chunk.split(b"\n")
        begun.append(first)
        size += len(first)
        if further:
            yield b"".join(begun)
            yield from further[:-1]
            begun, size = further[-1:], len(further[-1])
        if size > FILE_BYTES_MAX:
            raise Invalid(f"{shown} has a line of more than {FILE_BYTES_MAX} bytes: too large for one record")
        if further:
            yield None
    if size:
        yield b"".join(begun)


@contextlib.contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
    if path == "-":
        yield sys.stdin.buffer
        return
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(open(path, "rb"))
        except OSError as error:
            raise Invalid(f"{path} cannot be read: {error.strerror or error}") from error
        yield file
