"""`forebay group`: where consumer groups and readers stand."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.cli.commands import command, group
from forebay.cli.invocation import Invocation
from forebay.cli.options import AsJson, PartitionOption, ToOption, YesOption
from forebay.cli.terminal import confirm, say, say_json, say_table
from forebay.errors import Conflict, ForebayError
from forebay.wire.positions import parse_start

if TYPE_CHECKING:
    from forebay.records import GroupOffset

logger = logging.getLogger(__name__)

app = group("group", help="List, show, reset and delete consumer groups.")

Name = Annotated[str, typer.Argument(metavar="GROUP", help="The name of the group or reader.")]


@command(app, "list", examples=["forebay group list", "forebay group list --json"], by_url=True)
def list_groups(run: Invocation, *, as_json: AsJson = False) -> None:
    """List the groups and readers that have a place in any topic."""
    with run.reading() as log:
        names = log.groups()
    for name in names:
        if as_json:
            say_json({"group": name})
        else:
            say(name)


@command(app, "show", examples=["forebay group show billing", "forebay group show billing --json"], by_url=True)
def show(run: Invocation, *, name: Name, as_json: AsJson = False) -> None:
    """Show how far a group has come in each partition: everything below its offset is done, the lag is not."""
    places = _places(run, name)
    if not places:
        logger.warning('%s has no place in any topic: see "forebay group list" for the names that have', name)
    if as_json:
        for place in places:
            say_json({"group": name, **_shown(place), "lag": place.lag})
    elif places:
        rows = [
            (place.topic, place.partition, place.offset, _known(place.end), _known(place.lag), place.note)
            for place in places
        ]
        say_table(("topic", "partition", "offset", "end", "lag", "note"), rows)
        for place in places:
            if place.failure is not None:
                logger.warning("%s[%d]: its end is not known here: %s", place.topic, place.partition, place.failure)


@command(
    app,
    "reset",
    examples=[
        "forebay group reset billing shop/orders --to earliest",
        "forebay group reset billing shop/orders --to 2031-05-06T00:00:00Z --partition 2",
    ],
    by_url=True,
)
def reset(
    run: Invocation,
    *,
    name: Name,
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.")],
    to: ToOption,
    partition: PartitionOption = None,
    as_json: AsJson = False,
) -> None:
    """Set the place of a group in a topic, also to an earlier one: it then reads again from there."""
    position = parse_start(to, "--to")
    with run.writing() as log:
        places, handle = log.group(name), log.topic(topic)
        for number in range(handle.partitions) if partition is None else [partition]:
            # Checked in all before it is set in the first.
            end, offset = handle.offsets(number).next, handle.resolve(position, number)
            if offset > end:
                raise Conflict(f"{handle.name}[{number}] ends at {end}, before {offset}: name a place up to there")
        standing = places.reset(topic, position, partition)
    for number, offset in standing.items():
        item: dict[str, Any] = {"group": name, "topic": handle.name, "partition": number, "offset": offset}
        if as_json:
            say_json(item)
        else:
            say(f"{name} stands at {offset} in {handle.name}[{number}]")


@command(app, "delete", examples=["forebay group delete billing --yes"], by_url=True)
def delete(run: Invocation, *, name: Name, yes: YesOption = False) -> None:
    """Forget every place of a group, in all topics. Its readers begin again."""
    from forebay.storage.deadletters import REPLAY_READER

    with run.writing() as log:
        # Who has the directory may have a replay forgotten that is noted as unfinished: its error asks for that.
        places = log.group(REPLAY_READER if name == REPLAY_READER else name)
        confirm(f"every place of {name}", yes=yes)
        count = places.delete()
    say(f"{name}: {count} places forgotten")


def _places(run: Invocation, name: str) -> list[GroupOffset]:
    from forebay.topics import Engine

    with run.reading() as log:
        places = log.group(name).offsets()
        if run.url is not None:
            return places
        in_databases = {str(spec.name) for spec in log.topics() if spec.engine is Engine.ROCKSDB}
    if not any(place.failure is not None and place.topic in in_databases for place in places):
        return places
    try:
        # The database can be opened by the owner of the directory alone: be that, if no other process is.
        with run.writer() as log:
            return log.group(name).offsets()
    except ForebayError:
        return places


def _shown(place: GroupOffset) -> dict[str, Any]:
    fields = place._asdict()
    return fields if place.failure is not None else {key: fields[key] for key in fields if key != "failure"}


def _known(number: int | None) -> str:
    return "?" if number is None else str(number)
