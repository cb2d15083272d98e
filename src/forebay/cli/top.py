"""`forebay top`: how a broker fares right now, again and again: rates, lag, partitions, what is degraded."""

from __future__ import annotations

import sys
from collections import defaultdict
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from forebay.cli.commands import command, root
from forebay.cli.invocation import Invocation
from forebay.cli.options import URL_VARIABLE
from forebay.cli.terminal import flush, say, say_table
from forebay.errors import Invalid

if TYPE_CHECKING:
    from forebay.cli.brokers import BrokerCalls
    from forebay.records import GroupOffset
    from forebay.surface.blocking import Log
    from forebay.wire.messages import BrokerStatus, Health, Ready

CLEAR = "\x1b[H\x1b[2J"
"""Empties a terminal."""

OnceOption = Annotated[bool, typer.Option("--once", help="Look once and end; there are no rates then.")]
IntervalOption = Annotated[float, typer.Option("--interval", metavar="SECONDS", help="How long between two looks.")]


class BrokerLook(NamedTuple):
    """What a broker said at one moment."""

    at: float
    """By a clock that never goes back, in seconds."""
    health: Health
    ready: Ready
    status: BrokerStatus
    places: list[tuple[str, GroupOffset]]
    """Where each group stands."""


@command(root, "top", examples=["forebay top --url http://127.0.0.1:7878", "forebay top --once"], by_url=True)
def top(run: Invocation, *, once: OnceOption = False, interval: IntervalOption = 2.0) -> None:
    """Show how a broker fares, until Ctrl-C: records appended a second, how far groups are behind, what is degraded.

    A token needs the right admin. Topics are listed of which the broker has a partition open.
    """
    if run.url is None:
        raise Invalid(f"name the broker to look at by --url or {URL_VARIABLE}")
    if not interval > 0:
        raise Invalid(f"--interval is {interval}; give more than 0 seconds")
    from forebay.cli.brokers import BrokerCalls
    from forebay.clock import SystemClock

    clock = SystemClock()
    before: BrokerLook | None = None
    with run.reading() as log, BrokerCalls(run.url) as calls:
        while True:
            look = _look(log, calls, clock.monotonic())
            if sys.stdout.isatty():
                say(CLEAR)
            say_look(run.url, look, before)
            flush()
            if once:
                return
            before = look
            clock.sleep(interval)


def _look(log: Log, calls: BrokerCalls, at: float) -> BrokerLook:
    from forebay.client.transport import HttpCall
    from forebay.wire.messages import BrokerStatus, Health, Ready

    health = calls.ask(HttpCall(method="GET", path="/v1/health"), Health)
    ready = calls.ask(HttpCall(method="GET", path="/v1/ready"), Ready)
    status = calls.ask(HttpCall(method="GET", path="/v1/status"), BrokerStatus)
    places = [(name, place) for name in log.groups() for place in log.group(name).offsets()]
    return BrokerLook(at, health, ready, status, places)


def say_look(url: str, look: BrokerLook, before: BrokerLook | None) -> None:
    """Write what was seen; rates are those since the look before."""
    health, partitions = look.health, look.status.partitions
    say(f"{url}: {health.status}, version {health.version}, up {health.uptime_s:.0f} s, {len(partitions)} partitions")
    known = {} if before is None else {(one.topic, one.partition): one.offsets.next for one in before.status.partitions}
    seconds = 0.0 if before is None else look.at - before.at
    sums: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0, 0])
    for one in partitions:
        behind = 0 if one.export is None else one.export.behind_records
        # One that was opened since has had its records before.
        grown = one.offsets.next - known.get((one.topic, one.partition), one.offsets.next)
        for place, more in enumerate((1, grown, behind, one.failure is not None)):
            sums[one.topic][place] += more
    if sums:
        rows = [
            (topic, count, f"{grown / seconds:.1f}" if seconds > 0 else "-", behind, failed)
            for topic, (count, grown, behind, failed) in sorted(sums.items())
        ]
        say_table(("topic", "partitions", "records/s", "not history", "failed"), rows)
    if look.places:
        lags: dict[tuple[str, str], list[int | None]] = defaultdict(list)
        for group, standing in look.places:
            lags[group, standing.topic].append(standing.lag)
        lines = [(*names, "?" if None in lag else sum(filter(None, lag))) for names, lag in sorted(lags.items())]
        say_table(("group", "topic", "lag"), lines)
    for shard in look.ready.degraded:
        say(f"degraded {shard.topic}[{shard.partition}]: {shard.message}")
    for one in partitions:
        if one.failure is not None:
            say(f"failed {one.topic}[{one.partition}]: {one.failure}")
    for worker in look.status.workers:
        if worker.stuck or worker.error is not None:
            say(f"worker {worker.name}: {worker.failures} failures, {worker.stuck} stuck: {worker.error or 'no error'}")
