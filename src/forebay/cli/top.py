"""`forebay top`: how a broker or a data directory fares right now, again and again."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from forebay.cli.commands import command, root
from forebay.cli.interruptions import Interrupted
from forebay.cli.invocation import Invocation
from forebay.cli.terminal import draws, flush, say, say_table, table_of
from forebay.errors import ForebayError, Invalid, Unavailable, UnknownTopic

if TYPE_CHECKING:
    from rich.console import RenderableType

    from forebay.cli.brokers import BrokerCalls
    from forebay.records import GroupOffset
    from forebay.storage import Storage
    from forebay.storage.recorded import RecordedShard
    from forebay.surface.blocking import Log
    from forebay.topics import TopicName

PAGE_LINES = 24
"""How high a terminal is that does not say so."""
LINES_MIN = 3
"""So many rows of a table are shown even on a terminal that is too low for them."""

OnceOption = Annotated[bool, typer.Option("--once", help="Look once and end; there are no rates then.")]
IntervalOption = Annotated[float, typer.Option("--interval", metavar="SECONDS", help="How long between two looks.")]
PartitionsOption = Annotated[bool, typer.Option("--partitions", help="A row for each partition, not for each topic.")]


class ShardLook(NamedTuple):
    """A partition at one moment."""

    topic: str
    partition: int
    next: int | None
    """The next offset; `None` where it cannot be read."""
    behind: int | None
    """How many of its records are not history yet; `None` where there is no history or it is not known."""
    failure: str | None


class Look(NamedTuple):
    """What was seen at one moment."""

    at: float
    """By a clock that never goes back, in seconds."""
    title: str
    shards: Sequence[ShardLook]
    places: Sequence[tuple[str, GroupOffset]]
    """Where each group stands."""
    troubles: Sequence[str]


class LookTable(NamedTuple):
    """A part of what is shown; rows with the most to do come first."""

    heads: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


@command(
    root,
    "top",
    examples=[
        "forebay top --url http://127.0.0.1:7878",
        "forebay top --data /var/lib/forebay --interval 5",
        "forebay top --once --partitions",
    ],
    by_url=True,
)
def top(
    run: Invocation, *, once: OnceOption = False, interval: IntervalOption = 2.0, partitions: PartitionsOption = False
) -> None:
    """Show how a broker or a data directory fares, until Ctrl-C: records a second, lag of groups, what is degraded.

    Of a broker, topics are shown of which it has a partition open, and a token needs the right admin. A data directory
    is looked at beside the process that has it open.
    """
    if not interval > 0:
        raise Invalid(f"--interval is {interval}; give more than 0 seconds")
    from forebay.clock import SystemClock

    clock = SystemClock()
    before: Look | None = None
    with _looking(run) as look_now:
        if once:
            say_look(look_now(clock.monotonic()), None, by_partition=partitions)
            return
        try:
            with _shown() as show:
                while True:
                    try:
                        look = look_now(clock.monotonic())
                    except Unavailable as error:
                        # A broker that starts again is waited for; what was seen before is not shown as if it were now.
                        show(Look(clock.monotonic(), str(error), (), (), ()), None, partitions)
                    else:
                        show(look, before, partitions)
                        before = look
                    clock.sleep(interval)
        except Interrupted:
            # The way to end it.
            return


def say_look(look: Look, before: Look | None, *, by_partition: bool = False) -> None:
    """Write what was seen; rates are those since the look before."""
    say(look.title)
    for table in tables_of(look, before, by_partition=by_partition):
        say_table(table.heads, sorted(table.rows))
    for trouble in look.troubles:
        say(trouble)


def tables_of(look: Look, before: Look | None, *, by_partition: bool = False) -> Iterator[LookTable]:
    """The tables of a look: topics or partitions, then groups. Those that change most come first."""
    seconds = 0.0 if before is None else look.at - before.at
    known = {} if before is None else {(one.topic, one.partition): one.next for one in before.shards}
    sums: dict[str, _Sum] = defaultdict(_Sum)
    for one in look.shards:
        name = f"{one.topic}[{one.partition}]" if by_partition else one.topic
        sums[name].add(one, known.get((one.topic, one.partition)))
    if sums:
        heads = ("partition" if by_partition else "topic", *(() if by_partition else ("partitions",)))
        busiest = sorted(sums, key=lambda name: (-sums[name].failed, -sums[name].grown, name))
        rows = [
            (name, *(() if by_partition else (str(sums[name].count),)), *sums[name].cells(seconds)) for name in busiest
        ]
        yield LookTable((*heads, "next", "records/s", "not history", "failed"), rows)
    if look.places:
        yield _groups(look, before, seconds)


class _Sum:
    """The partitions of one row together."""

    def __init__(self) -> None:
        self.count = self.failed = self.grown = 0
        self._next: int | None = 0
        self._behind: int | None = None

    def add(self, one: ShardLook, before: int | None) -> None:
        """One that was not seen before has had its records before."""
        self.count += 1
        self.failed += one.failure is not None
        self._next = None if one.next is None or self._next is None else self._next + one.next
        if one.next is not None and before is not None:
            self.grown += one.next - before
        if one.behind is not None:
            self._behind = (self._behind or 0) + one.behind

    def cells(self, seconds: float) -> tuple[str, ...]:
        """The next offset, records a second, what is not history yet, and how many partitions have failed."""
        end = "?" if self._next is None else str(self._next)
        rate = f"{self.grown / seconds:.1f}" if seconds > 0 and self._next is not None else "-"
        return end, rate, "-" if self._behind is None else str(self._behind), str(self.failed)


def _groups(look: Look, before: Look | None, seconds: float) -> LookTable:
    """The lag of each group in each topic, and how quickly it grows."""
    lags, earlier = _lags(look), {} if before is None else _lags(before)
    rows = []
    for names in sorted(lags, key=lambda names: (-(lags[names] or 0), names)):
        lag, was = lags[names], earlier.get(names)
        grown = "-" if lag is None or was is None or seconds <= 0 else f"{(lag - was) / seconds:+.1f}"
        rows.append((*names, "?" if lag is None else str(lag), grown))
    return LookTable(("group", "topic", "lag", "lag/s"), rows)


def _lags(look: Look) -> dict[tuple[str, str], int | None]:
    """The lag of each group in each topic; `None` where a partition is not known."""
    found: dict[tuple[str, str], list[int | None]] = defaultdict(list)
    for group, standing in look.places:
        found[group, standing.topic].append(standing.lag)
    return {names: None if None in lag else sum(filter(None, lag)) for names, lag in found.items()}


@contextmanager
def _shown() -> Iterator[Callable[[Look, Look | None, bool], None]]:
    """A screen of its own on a terminal, as high as that is; else one look below the other."""
    if not draws():

        def said(look: Look, before: Look | None, by_partition: bool) -> None:  # noqa: FBT001 - called in one place
            say_look(look, before, by_partition=by_partition)
            flush()

        yield said
        return
    from rich.live import Live

    with Live(screen=True, auto_refresh=False) as live:

        def drawn(look: Look, before: Look | None, by_partition: bool) -> None:  # noqa: FBT001 - called in one place
            live.update(screen_of(look, before, by_partition=by_partition), refresh=True)

        yield drawn


def screen_of(look: Look, before: Look | None, *, by_partition: bool) -> RenderableType:
    """A look cut to the height of the terminal: troubles are always shown, rows that change least are left out."""
    from rich.console import Group
    from rich.text import Text

    tables = list(tables_of(look, before, by_partition=by_partition))
    height = shutil.get_terminal_size((80, PAGE_LINES)).lines
    # Title, and for each table an empty line, its heads and the line that counts what is left out.
    room = height - 1 - 3 * len(tables) - 2 * len(look.troubles)
    parts: list[RenderableType] = [Text(look.title, style="bold")]
    for place, table in enumerate(tables):
        shown = table.rows[: max(LINES_MIN, room // (len(tables) - place))]
        room -= len(shown)
        parts += [Text(""), table_of(table.heads, shown)]
        if len(table.rows) > len(shown):
            parts.append(Text(f"… and {len(table.rows) - len(shown)} more", style="dim"))
    parts += [Text(trouble, style="red") for trouble in look.troubles]
    return Group(*parts)


@contextmanager
def _looking(run: Invocation) -> Iterator[Callable[[float], Look]]:
    """What looks once, at the broker or at the data directory."""
    if run.url is None:
        with run.reader() as storage:
            yield lambda at: _directory_look(run, storage, at)
        return
    from forebay.cli.brokers import REACH_SECONDS, BrokerCalls

    url = run.url
    with run.reading() as log, BrokerCalls(url, timeout_s=REACH_SECONDS) as calls:
        yield lambda at: _broker_look(url, log, calls, at)


def _broker_look(url: str, log: Log, calls: BrokerCalls, at: float) -> Look:
    from forebay.client.transport import HttpCall
    from forebay.wire.messages import BrokerStatus, Health, Ready

    health = calls.ask(HttpCall(method="GET", path="/v1/health"), Health)
    ready = calls.ask(HttpCall(method="GET", path="/v1/ready"), Ready)
    status = calls.ask(HttpCall(method="GET", path="/v1/status"), BrokerStatus)
    shards = [
        ShardLook(
            one.topic,
            one.partition,
            one.offsets.next,
            None if one.export is None else one.offsets.next - one.export.exported,
            one.failure,
        )
        for one in status.partitions
    ]
    troubles = [f"degraded {shard.topic}[{shard.partition}]: {shard.message}" for shard in ready.degraded]
    troubles += [f"unreadable {value.key}: {value.message}" for value in status.unreadable]
    troubles += _failures(shards)
    troubles += [
        f"worker {worker.name}: {worker.failures} failures, {worker.stuck} stuck: {worker.error or 'no error'}"
        for worker in status.workers
        if worker.stuck or worker.error is not None
    ]
    up = f"up {health.uptime_s:.0f} s, {len(shards)} partitions open"
    return Look(at, f"{url}: {health.status}, version {health.version}, {up}", shards, _places(log), troubles)


def _directory_look(run: Invocation, log: Storage, at: float) -> Look:
    from forebay.directory import is_owned
    from forebay.topics import Engine

    shards: list[ShardLook] = []
    for spec in log.topics():
        has_history = spec.engine is Engine.SEGMENT
        # Else it was deleted meanwhile, and there is nothing to show.
        with suppress(UnknownTopic):
            shards += [_shard_look(log, spec.name, shard, has_history=has_history) for shard in log.recorded(spec.name)]
    owner = "open in another process" if is_owned(run.directory, run.disk) else "open in no other process"
    title = f"{run.directory}: {owner}, {len(shards)} partitions"
    return Look(at, title, shards, _places(log), _failures(shards))


def _shard_look(log: Storage, name: TopicName, shard: RecordedShard, *, has_history: bool) -> ShardLook:
    try:
        end = log.topic(name).offsets(shard.partition).next
    except UnknownTopic:
        raise
    except ForebayError as error:
        # Records in the memory or the database of another process are not to be seen from here: that is no failure.
        return ShardLook(str(name), shard.partition, None, None, str(error) if has_history else None)
    return ShardLook(str(name), shard.partition, end, max(0, end - shard.exported) if has_history else None, None)


def _failures(shards: Sequence[ShardLook]) -> list[str]:
    return [f"failed {one.topic}[{one.partition}]: {one.failure}" for one in shards if one.failure is not None]


def _places(log: Log) -> list[tuple[str, GroupOffset]]:
    return [(name, place) for name in log.groups() for place in log.group(name).offsets()]
