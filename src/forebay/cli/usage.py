"""`forebay du`: how many bytes each topic takes, tier by tier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.cli.commands import command
from forebay.cli.invocation import AsJson, Invocation
from forebay.cli.terminal import readable_bytes, say_json, say_table
from forebay.errors import UnknownTopic

if TYPE_CHECKING:
    from forebay.inspection import Inspected

Name = Annotated[str | None, typer.Argument(metavar="[TOPIC]", help="This topic alone.", show_default=False)]


def register(app: typer.Typer) -> None:
    """Add the command."""
    command(app, "du", examples=["forebay du", "forebay du shop/orders --json"])(usage)


def usage(run: Invocation, *, name: Name = None, as_json: AsJson = False) -> None:
    """Say how many bytes each topic takes: in log files, sealed files, objects in the store, and set aside.

    Changes nothing. Topics on engine rocksdb share one database, which is counted as a whole; those in memory take no
    bytes on disk. Copies of one record in two tiers count in both.
    """
    from forebay.cli.holding import look_at

    found = look_at(run)
    items = _items(run, found, name)
    if as_json:
        for item in items:
            say_json(item)
        return
    rows = [
        (item["topic"] or "(rocksdb)", item["tier"], item["files"], readable_bytes(item["bytes"])) for item in items
    ]
    total = sum(item["bytes"] for item in items)
    say_table(("topic", "tier", "files", "size"), [*rows, ("total", "", "", readable_bytes(total))])


def _items(run: Invocation, found: Inspected, name: str | None) -> list[dict[str, Any]]:
    from forebay.cli.tiers import database_bytes, pieces_of
    from forebay.topics import Engine, TopicName

    wanted = TopicName.parse(name) if name is not None else None
    if wanted is not None and all(spec.name != wanted for spec in found.topics):
        raise UnknownTopic(f'there is no topic {wanted}: see "forebay topic list" for what there is', topic=wanted)
    sums: dict[tuple[str | None, str], list[int]] = {}
    engines = set()
    for spec in found.topics:
        if wanted in (None, spec.name):
            engines.add(spec.engine)
    for place in found.places():
        assert place.spec is not None
        if wanted in (None, place.spec.name):
            for piece in pieces_of(found, place, run.disk):
                count = sums.setdefault((str(place.spec.name), piece.tier), [0, 0])
                count[0], count[1] = count[0] + 1, count[1] + piece.bytes
    database = database_bytes(found, run.disk) if Engine.ROCKSDB in engines else None
    if database is not None:
        sums[None, database.tier] = [len(run.disk.list_directory(database.place)), database.bytes]
    return [
        {"topic": topic, "tier": tier, "files": files, "bytes": size}
        for (topic, tier), (files, size) in sorted(
            sums.items(), key=lambda entry: (entry[0][0] is None, *map(str, entry[0]))
        )
    ]
