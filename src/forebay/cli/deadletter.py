"""`forebay deadletter`: records that a subscription delivered as often as it may, and did not get done."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from forebay.cli.commands import command, group
from forebay.cli.failures import complain
from forebay.cli.invocation import Invocation
from forebay.cli.options import AsJson, CountOption, YesOption
from forebay.cli.subscription import subscribable
from forebay.cli.terminal import confirm, readable_time, say, say_json, say_table
from forebay.errors import Invalid
from forebay.records import LetterPlace

if TYPE_CHECKING:
    from forebay.records import DeadLetter
    from forebay.surface import DeadLetters, Log

app = group("deadletter", help="List, show, replay and purge dead letters of subscriptions.")

Topic = Annotated[
    str,
    typer.Argument(metavar="TOPIC", help="The topic that is subscribed to; without a subscription, where they lie."),
]
Name = Annotated[
    str | None, typer.Argument(metavar="[SUBSCRIPTION]", help="Those of this subscription.", show_default=False)
]
LettersOption = Annotated[
    list[str] | None,
    typer.Option(
        "--letter", metavar="PARTITION:OFFSET", help="This one, as list names it; may be repeated.", show_default=False
    ),
]
AllOption = Annotated[bool, typer.Option("--all", help="All that are there now.")]

_OTHERS_MAX: Final = 1_000
"""So many of the letters that a replay has left are looked at."""
_PLACE: Final = re.compile(r"([0-9]{1,9}):([0-9]{1,19})")


@command(
    app,
    "list",
    examples=[
        "forebay deadletter list shop/orders billing",
        "forebay deadletter list shop/orders.billing.dead_letters --json",
    ],
    by_url=True,
)
def list_letters(
    run: Invocation, *, topic: Topic, name: Name = None, count: CountOption = None, as_json: AsJson = False
) -> None:
    """List dead letters: where each lies and comes from, how often it was delivered, and why it is there."""
    if count is not None and count < 1:
        raise Invalid(f"--count is {count}; give 1 or more")
    with run.reading(topic) as log:
        letters = _letters(log, topic, name)
        rows = []
        for letter in _listed(letters, 100 if count is None else count):
            if as_json:
                say_json(_item(letter))
            else:
                rows.append(_table_row(letter))
    if rows:
        say_table(("letter", "from", "subscription", "attempts", "reason", "vouched", "error"), rows)


@command(app, "show", examples=["forebay deadletter show shop/orders billing --letter 0:17"], by_url=True)
def show(
    run: Invocation,
    *,
    topic: Topic,
    name: Name = None,
    letter: Annotated[str, typer.Option("--letter", metavar="PARTITION:OFFSET", help="As list names it.")],
    as_json: AsJson = False,
) -> None:
    """Show one dead letter whole, with the record as it was."""
    place = _parsed(letter)
    with run.reading(topic) as log:
        found = _letters(log, topic, name).get(place.offset, place.partition)
    if as_json:
        say_json(_item(found))
        return
    item = _item(found)
    say_table(("", ""), [(field, value) for field, value in item.items() if field != "record"])
    say_table(("record", ""), [(field, value) for field, value in item["record"].items()])


@command(
    app,
    "replay",
    examples=[
        "forebay deadletter replay shop/orders billing --all",
        "forebay deadletter replay shop/orders billing --letter 0:17 --to shop/repaired",
    ],
    by_url=True,
)
def replay(
    run: Invocation,
    *,
    topic: Topic,
    name: Name = None,
    letters: LettersOption = None,
    all_letters: AllOption = False,
    to: Annotated[
        str | None,
        typer.Option(metavar="TOPIC", help="Into this topic [default: where each comes from].", show_default=False),
    ] = None,
    origins: Annotated[
        list[str] | None,
        typer.Option(
            "--origin",
            metavar="TOPIC",
            help="Also records that say they come from this topic, and that nothing vouches for; may be repeated.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Append dead letters again, each exactly once, and remove them. One that was interrupted is run again."""
    chosen = _chosen(letters, is_all=all_letters)
    with run.writing() as log:
        found = _letters(log, topic, name)
        count = found.replay(chosen, to=to, origins=origins or ())
        if chosen is None:
            _complain_of_others(found)
    _say_count("replayed", found.topic, count, as_json=as_json)


@command(app, "purge", examples=["forebay deadletter purge shop/orders billing --all --yes"], by_url=True)
def purge(
    run: Invocation,
    *,
    topic: Topic,
    name: Name = None,
    letters: LettersOption = None,
    all_letters: AllOption = False,
    yes: YesOption = False,
    as_json: AsJson = False,
) -> None:
    """Delete dead letters. There is no way back."""
    chosen = _chosen(letters, is_all=all_letters)
    with run.writing() as log:
        found = _letters(log, topic, name)
        what = "all dead letters" if chosen is None else f"{len(chosen)} dead letters"
        confirm(f"{what} in {found.topic}" + (f" of {name}" if name is not None else ""), yes=yes)
        count = found.purge(chosen)
    _say_count("purged", found.topic, count, as_json=as_json)


def _listed(letters: DeadLetters, count: int) -> Iterator[DeadLetter]:
    """The first `count` dead letters, a page at a time; complains if there are more."""
    last: LetterPlace | None = None
    left = count
    while left and (page := letters.letters(left, after=last)):
        yield from page
        last, left = page[-1].place, left - len(page)
    if last is not None and not left and letters.letters(1, after=last):
        complain(f"{letters.topic} has more dead letters than these {count}: raise --count")


def _complain_of_others(letters: DeadLetters) -> None:
    """Say which records a replay of all has passed over."""
    others = [letter for letter in _listed(letters, _OTHERS_MAX) if not letter.is_vouched]
    for origin in sorted({letter.topic for letter in others}):
        complain(
            f"records of {letters.topic} say that they are dead letters of {origin}, and nothing vouches for that: "
            f"they stay. Look at them (forebay deadletter list), then replay them with --origin {origin}, or purge them"
        )


def _table_row(letter: DeadLetter) -> tuple[object, ...]:
    return (
        _place(letter),
        f"{letter.topic}[{letter.record.partition}]@{letter.record.offset}",
        letter.subscription,
        letter.attempts,
        letter.reason,
        "yes" if letter.is_vouched else "no",
        (letter.error or "")[:60],
    )


def _letters(log: Log, topic: str, name: str | None) -> DeadLetters:
    handle = subscribable(log, topic)
    return handle.dead_letters() if name is None else handle.subscription(name).dead_letters()


def _chosen(letters: list[str] | None, *, is_all: bool) -> list[LetterPlace] | None:
    if is_all == bool(letters):
        raise Invalid("which dead letters are meant is not clear: give --letter PARTITION:OFFSET, or --all")
    return None if is_all else [_parsed(letter) for letter in letters or ()]


def _parsed(text: str) -> LetterPlace:
    found = _PLACE.fullmatch(text)
    if found is None:
        raise Invalid(f"--letter is {text!r:.80}; give PARTITION:OFFSET, as 0:17")
    return LetterPlace(int(found[1]), int(found[2]))


def _place(letter: DeadLetter) -> str:
    return f"{letter.place.partition}:{letter.place.offset}"


def _item(letter: DeadLetter) -> dict[str, Any]:
    from forebay.wire.items import plain_item

    return {
        "letter": _place(letter),
        "topic": letter.topic,
        "subscription": letter.subscription,
        "attempts": letter.attempts,
        "reason": letter.reason,
        "error": letter.error,
        "at": readable_time(letter.at),
        "is_vouched": letter.is_vouched,
        "record": plain_item(letter.record),
    }


def _say_count(what: str, topic: str, count: int, *, as_json: bool) -> None:
    if as_json:
        say_json({"topic": topic, what: count})
    else:
        say(f"{topic}: {count} dead letters {what}")
