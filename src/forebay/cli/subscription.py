"""`forebay subscription`: readers whose records are delivered, acknowledged one by one, and delivered again."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from forebay.cli.commands import command, group
from forebay.cli.consume import OutputFormat, Printer
from forebay.cli.failures import complain
from forebay.cli.interruptions import Interrupted
from forebay.cli.invocation import Invocation
from forebay.cli.options import AsJson, CountOption, OneTopic, PartitionOption, ToOption, TopicArgument, YesOption
from forebay.cli.terminal import confirm, flush, readable_time, say, say_json, say_table
from forebay.errors import Corrupt, Invalid, UnknownTopic, UnsupportedFormat
from forebay.wire.positions import parse_start

if TYPE_CHECKING:
    from forebay.records import SubscriptionLag
    from forebay.surface import Log, SubscribableTopic
    from forebay.topics import SubscriptionChanges, SubscriptionOptions, SubscriptionSpec

app = group("subscription", help="Create, list, show, alter, pause, resume, move, consume and delete subscriptions.")

Name = Annotated[str, typer.Argument(metavar="SUBSCRIPTION", help="The name of the subscription.")]
ModeOption = Annotated[str, typer.Option(help="exclusive, failover, shared or key-shared.")]
FromOption = Annotated[str, typer.Option("--from", metavar="PLACE", help="earliest, latest, an offset or a time.")]
WindowOption = Annotated[
    int | None,
    typer.Option(metavar="N", help="Offsets that a partition is delivered ahead [default: 4000].", show_default=False),
]
AckTimeoutOption = Annotated[
    int | None,
    typer.Option(metavar="MS", help="When an unanswered record comes again [default: 30000].", show_default=False),
]
BackoffMinOption = Annotated[
    int | None, typer.Option(metavar="MS", help="The delay after a first nack [default: 1000].", show_default=False)
]
BackoffMaxOption = Annotated[
    int | None, typer.Option(metavar="MS", help="What doubling it ends at [default: 60000].", show_default=False)
]
DeliveriesOption = Annotated[
    int | None, typer.Option(metavar="N", help="How often a record is delivered.", show_default=False)
]
OnSpentOption = Annotated[
    str | None,
    typer.Option(metavar="POLICY", help="Then: block (the default), drop or dead-letter.", show_default=False),
]
DeadLetterOption = Annotated[
    str | None,
    typer.Option(
        metavar="TOPIC", help="Where dead letters go [default: TOPIC.SUBSCRIPTION.dead_letters].", show_default=False
    ),
]
NewWindowOption = Annotated[
    int | None, typer.Option("--window", metavar="N", help="Offsets that a partition is delivered ahead.")
]
NewAckTimeoutOption = Annotated[
    int | None, typer.Option("--ack-timeout-ms", metavar="MS", help="When an unanswered record comes again.")
]
NewBackoffMinOption = Annotated[
    int | None, typer.Option("--backoff-min-ms", metavar="MS", help="The delay after a first nack.")
]
NewBackoffMaxOption = Annotated[
    int | None, typer.Option("--backoff-max-ms", metavar="MS", help="What doubling it ends at.")
]
NewDeliveriesOption = Annotated[
    str | None,
    typer.Option("--deliveries-max", metavar="N|none", help="How often a record is delivered; none: any number."),
]
NewOnSpentOption = Annotated[
    str | None, typer.Option("--on-spent", metavar="POLICY", help="Then: block, drop or dead-letter.")
]
NewDeadLetterOption = Annotated[
    str | None, typer.Option("--dead-letter-topic", metavar="TOPIC", help="Where dead letters go.")
]
FollowOption = Annotated[bool, typer.Option("--follow", "-f", help="Go on with records as they come.")]
NackOption = Annotated[bool, typer.Option("--nack", help="Refuse each record, so that it comes again.")]
ErrorOption = Annotated[
    str | None, typer.Option(metavar="TEXT", help="With --nack: why, for the dead letter.", show_default=False)
]
FormatOption = Annotated[OutputFormat, typer.Option("--format", help="As for consume.")]
TAKEN_AT_ONCE = 100
WAIT_S = 0.5


@command(
    app,
    "create",
    examples=[
        "forebay subscription create shop/orders billing --mode shared --from earliest",
        "forebay subscription create shop/orders mails --deliveries-max 5 --on-spent dead-letter",
    ],
    by_url=True,
)
def create(
    run: Invocation,
    *,
    topic: TopicArgument,
    name: Name,
    mode: ModeOption = "exclusive",
    start: FromOption = "latest",
    window: WindowOption = None,
    ack_timeout_ms: AckTimeoutOption = None,
    backoff_min_ms: BackoffMinOption = None,
    backoff_max_ms: BackoffMaxOption = None,
    deliveries_max: DeliveriesOption = None,
    on_spent: OnSpentOption = None,
    dead_letter_topic: DeadLetterOption = None,
    as_json: AsJson = False,
) -> None:
    """Create a subscription, or find one that is as these options say. Its first records are those from --from on."""
    position = parse_start(start, "--from")
    given = _given(window, ack_timeout_ms, backoff_min_ms, backoff_max_ms, on_spent, dead_letter_topic)
    options = cast("SubscriptionOptions", {"mode": mode.replace("-", "_"), **given})
    if deliveries_max is not None:
        options["deliveries_max"] = deliveries_max
    with run.writing() as log:
        spec = subscribable(log, topic).subscribe(name, start=position, **options).spec
    if as_json:
        say_json(_item(spec))
    else:
        say(f"{spec.namespace}/{spec.topic} has the subscription {spec.name}, {spec.mode}")


@command(
    app, "list", examples=["forebay subscription list", "forebay subscription list shop/orders --json"], by_url=True
)
def list_subscriptions(run: Invocation, *, topic: OneTopic = None, as_json: AsJson = False) -> None:
    """List the subscriptions of a topic, or of all topics."""
    with run.reading() as log:
        found = _of_all_topics(log) if topic is None else subscribable(log, topic).subscriptions()
    if as_json:
        for spec in found:
            say_json(_item(spec))
    elif found:
        rows = [
            (f"{spec.namespace}/{spec.topic}", spec.name, spec.mode, "paused" if spec.is_paused else "", _limit(spec))
            for spec in found
        ]
        say_table(("topic", "name", "mode", "", "deliveries"), rows)


@command(
    app,
    "show",
    examples=["forebay subscription show shop/orders billing", "forebay subscription show t s --json"],
    by_url=True,
)
def show(run: Invocation, *, topic: TopicArgument, name: Name, as_json: AsJson = False) -> None:
    """Show a subscription: how it delivers, how far it is stored in each partition, and how much is not done."""
    with run.reading(topic) as log:
        subscription = subscribable(log, topic).subscription(name)
        spec, lags = subscription.spec, subscription.lag()
    if as_json:
        say_json({**_item(spec), "partitions": [_lag_item(lag) for lag in lags]})
        return
    rows: list[tuple[object, ...]] = [
        ("topic", f"{spec.namespace}/{spec.topic}"),
        ("mode", spec.mode),
        ("state", "paused" if spec.is_paused else "active"),
        ("deliveries", _limit(spec)),
        ("ack time-out", f"{spec.ack_timeout_ms / 1000:g} s"),
        ("created", readable_time(spec.created_at)),
    ]
    say_table((spec.name, ""), rows)
    say_table(
        ("partition", "cursor", "done above", "end", "lag"),
        [(lag.partition, lag.cursor, lag.done_above, lag.end, lag.lag) for lag in lags],
    )


@command(
    app,
    "alter",
    examples=[
        "forebay subscription alter shop/orders billing --ack-timeout-ms 60000 --window 10000",
        "forebay subscription alter shop/orders billing --deliveries-max none",
        "forebay subscription alter shop/orders mails --deliveries-max 5 --on-spent dead-letter",
    ],
    by_url=True,
)
def alter(
    run: Invocation,
    *,
    topic: TopicArgument,
    name: Name,
    window: NewWindowOption = None,
    ack_timeout_ms: NewAckTimeoutOption = None,
    backoff_min_ms: NewBackoffMinOption = None,
    backoff_max_ms: NewBackoffMaxOption = None,
    deliveries_max: NewDeliveriesOption = None,
    on_spent: NewOnSpentOption = None,
    dead_letter_topic: NewDeadLetterOption = None,
    as_json: AsJson = False,
) -> None:
    """Change how a subscription delivers, from now on; what is not said stays as it is.

    What becomes of spent records changes only while no consumer is attached. The mode cannot be changed.
    """
    given = _given(window, ack_timeout_ms, backoff_min_ms, backoff_max_ms, on_spent, dead_letter_topic)
    changes = cast("SubscriptionChanges", given)
    if deliveries_max is not None:
        changes["deliveries_max"] = _deliveries(deliveries_max)
    if not changes:
        raise Invalid("nothing is to be changed: give --window, --ack-timeout-ms, --deliveries-max or another limit")
    with run.writing() as log:
        spec = subscribable(log, topic).subscription(name).alter(**changes)
    if as_json:
        say_json(_item(spec))
    else:
        say(
            f"{spec.name}: deliveries {_limit(spec)}; ack time-out {spec.ack_timeout_ms} ms, back-off "
            f"{spec.backoff_min_ms} to {spec.backoff_max_ms} ms, window {spec.window_records_max}"
        )


@command(app, "pause", examples=["forebay subscription pause shop/orders billing"], by_url=True)
def pause(run: Invocation, *, topic: TopicArgument, name: Name) -> None:
    """Have a subscription deliver nothing until it is resumed."""
    with run.writing() as log:
        subscribable(log, topic).subscription(name).pause()
    say(f"{name} is paused")


@command(app, "resume", examples=["forebay subscription resume shop/orders billing"], by_url=True)
def resume(run: Invocation, *, topic: TopicArgument, name: Name) -> None:
    """Have a subscription go on after a pause."""
    with run.writing() as log:
        subscribable(log, topic).subscription(name).resume()
    say(f"{name} goes on")


@command(
    app,
    "seek",
    examples=[
        "forebay subscription seek shop/orders billing --to earliest",
        "forebay subscription seek shop/orders billing --to 2031-05-06T00:00:00Z --partition 2",
    ],
    by_url=True,
)
def seek(
    run: Invocation,
    *,
    topic: TopicArgument,
    name: Name,
    to: ToOption,
    partition: PartitionOption = None,
    as_json: AsJson = False,
) -> None:
    """Have a subscription go on at another place, also an earlier one. What was acknowledged there is forgotten."""
    position = parse_start(to, "--to")
    with run.writing() as log:
        standing = subscribable(log, topic).subscription(name).seek(position, partition=partition)
    for number, offset in standing.items():
        if as_json:
            say_json({"subscription": name, "topic": topic, "partition": number, "offset": offset})
        else:
            say(f"{name} stands at {offset} in {topic}[{number}]")


@command(app, "peek", examples=["forebay subscription peek shop/orders billing --count 3 --format table"], by_url=True)
def peek(
    run: Invocation,
    *,
    topic: TopicArgument,
    name: Name,
    count: CountOption = None,
    partition: PartitionOption = None,
    output: FormatOption = OutputFormat.VALUE,
) -> None:
    """Show the first records that are not done, without taking them: no more than about 4 MiB of them."""
    wanted = _checked(count, 10)
    with run.reading(topic) as log:
        handle = subscribable(log, topic)
        records = handle.subscription(name).peek(wanted, partition=partition)
        printer = Printer(handle, output, fail_on_loss=False)
        for record in records:
            printer.record(record)


@command(
    app,
    "consume",
    examples=[
        "forebay subscription consume shop/orders billing",
        "forebay subscription consume shop/orders billing --follow --format json",
        "forebay subscription consume shop/orders billing --count 10 --nack",
    ],
    by_url=True,
)
def consume(
    run: Invocation,
    *,
    topic: TopicArgument,
    name: Name,
    count: CountOption = None,
    follow: FollowOption = False,
    nack: NackOption = False,
    error: ErrorOption = None,
    output: FormatOption = OutputFormat.VALUE,
) -> None:
    """Take records that are due, write them, and acknowledge each once it is written.

    Ends when nothing more is due, or after --count; with --follow by Ctrl-C.
    """
    if error is not None and not nack:
        raise Invalid("--error says why a record is refused: add --nack")
    left = None if count is None else _checked(count, 1)
    with run.writing() as log, run.interruptions.heeded():
        handle = subscribable(log, topic)
        printer = Printer(handle, output, fail_on_loss=False)
        with handle.subscription(name).consumer("forebay subscription consume") as consumer:
            try:
                while left != 0:
                    taken = consumer.take(min(left or TAKEN_AT_ONCE, TAKEN_AT_ONCE), wait_s=WAIT_S)
                    if not taken and not follow:
                        break
                    for delivered in taken:
                        printer.record(delivered.record)
                    # Written first: a record whose reader went away is delivered again.
                    flush()
                    _ = consumer.nack(*taken, error=error) if nack else consumer.ack(*taken)
                    left = None if left is None else left - len(taken)
            except Interrupted:
                complain("stopped")
            if consumer.lost:
                complain(f"{consumer.lost} offsets of {handle.name} came too fast and were delivered to no consumer")


@command(app, "delete", examples=["forebay subscription delete shop/orders billing --yes"], by_url=True)
def delete(run: Invocation, *, topic: TopicArgument, name: Name, yes: YesOption = False) -> None:
    """Remove a subscription with its place. Its dead letters stay."""
    with run.writing() as log:
        handle = subscribable(log, topic)
        with suppress(Corrupt, UnsupportedFormat):
            # Asked for first, so that a name that is not there is not asked about.
            handle.subscription(name)
        confirm(f"the subscription {name} of {topic}", yes=yes)
        handle.delete_subscription(name)
    say(f"{name} is deleted")


def subscribable(log: Log, topic: str) -> SubscribableTopic:
    """A topic of a directory or a broker: both serve subscriptions."""
    return cast("SubscribableTopic", log.topic(topic))


def _given(
    window: int | None,
    ack_timeout_ms: int | None,
    backoff_min_ms: int | None,
    backoff_max_ms: int | None,
    on_spent: str | None,
    dead_letter_topic: str | None,
) -> dict[str, Any]:
    """The options that were given, as the library names them."""
    options = {
        "window_records_max": window,
        "ack_timeout_ms": ack_timeout_ms,
        "backoff_min_ms": backoff_min_ms,
        "backoff_max_ms": backoff_max_ms,
        "on_spent": None if on_spent is None else on_spent.replace("-", "_"),
        "dead_letter_topic": dead_letter_topic,
    }
    return {option: value for option, value in options.items() if value is not None}


def _deliveries(text: str) -> int | None:
    if text == "none":
        return None
    if not text.isascii() or not text.isdecimal() or not 0 < len(text) < 10:
        raise Invalid(f"--deliveries-max is {text!r:.80}; give a number, or none for any number of times")
    return int(text)


def _of_all_topics(log: Log) -> list[SubscriptionSpec]:
    """Every subscription; those of a topic that is deleted meanwhile went with it."""
    found: list[SubscriptionSpec] = []
    for spec in log.topics():
        with suppress(UnknownTopic):
            found += subscribable(log, str(spec.name)).subscriptions()
    return found


def _checked(count: int | None, default: int) -> int:
    if count is not None and count < 1:
        raise Invalid(f"--count is {count}; give 1 or more")
    return default if count is None else count


def _limit(spec: SubscriptionSpec) -> str:
    """How often a record is delivered, and what becomes of it then."""
    if spec.deliveries_max is None:
        return "any number"
    to = "" if spec.dead_letter_topic is None else f" to {spec.dead_letter_topic}"
    return f"{spec.deliveries_max}, then {spec.on_spent}{to}"


def _item(spec: SubscriptionSpec) -> dict[str, Any]:
    import msgspec

    found: dict[str, Any] = msgspec.to_builtins(spec)
    del found["namespace"], found["is_ending"]
    return found | {"topic": f"{spec.namespace}/{spec.topic}"}


def _lag_item(lag: SubscriptionLag) -> dict[str, Any]:
    """What the stored cursor says: what a consumer holds, its own process alone knows."""
    return {name: getattr(lag, name) for name in ("partition", "cursor", "done_above", "end", "lag")}
