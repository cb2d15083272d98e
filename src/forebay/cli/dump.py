"""`forebay dump`: write down what stands in the files and the metadata of a data directory."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forebay.cli.commands import command, root
from forebay.cli.directory import known_topic
from forebay.cli.invocation import Invocation
from forebay.cli.options import AsJson
from forebay.cli.terminal import as_json as json_of
from forebay.cli.terminal import say, say_json
from forebay.errors import Invalid

if TYPE_CHECKING:
    from collections.abc import Iterator


@command(
    root,
    "dump",
    examples=[
        "forebay dump",
        "forebay dump data/shards/*/*.seg --records",
        "forebay dump data/shards/*/00000000000000000000-00000001.idx --json",
        "forebay dump data/shards/*/checkpoint data/shards/*/live data/forebay.json",
        "forebay dump --key /forebay/topics/",
        "forebay dump --catalog shop/orders --partition 0",
    ],
)
def dump(
    run: Invocation,
    *,
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE",
            help="Files of a data directory: *.seg, *.idx, checkpoint, live, forebay.json. None: the metadata store.",
        ),
    ] = None,
    records: Annotated[bool, typer.Option("--records", help="The records of segments too.")] = False,
    key: Annotated[
        str | None, typer.Option(help="Metadata keys that begin so.", metavar="PREFIX", show_default=False)
    ] = None,
    catalog: Annotated[
        str | None,
        typer.Option(help="The state and the catalogued history of this topic.", metavar="TOPIC", show_default=False),
    ] = None,
    partition: Annotated[
        int | None, typer.Option(help="With --catalog: this partition alone.", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write down what stands in files of a data directory, item by item, whole or not. Changes nothing."""
    if sum((bool(files), key is not None, catalog is not None)) > 1:
        raise Invalid("files, --key and --catalog each choose what is written down: give one of them")
    if partition is not None and catalog is None:
        raise Invalid("--partition chooses from the history of a topic: name it with --catalog")
    if not files:
        found = _metadata_items(run, key) if catalog is None else _catalog_items(run, catalog, partition)
        for item in found:
            _say_item(item, as_json=as_json)
        return
    from forebay.inspection import dump as items_of

    for path in files:
        if os.path.isdir(path):
            raise Invalid(f"{path} is a directory: name files in it, such as shards/*/*.seg of a data directory")
        if not as_json and len(files) > 1:
            say(f"{path}:")
        for item in items_of(run.disk, path, records=records):
            _say_item({"file": path, **item} if as_json else item, as_json=as_json)


def _metadata_items(run: Invocation, key: str | None) -> Iterator[dict[str, Any]]:
    from forebay.clock import SystemClock
    from forebay.directory import LogDirectory
    from forebay.inspection import dump_metadata
    from forebay.inspection.directory import metadata_of

    below = _own_keys(run.settings.metadata.prefix, key or "")
    directory = LogDirectory.look(run.directory, run.disk)
    with metadata_of(directory, run.settings, run.disk, SystemClock()) as store:
        entries = store.range(below)
    return dump_metadata(entries)


def _own_keys(prefix: str, beginning: str) -> str:
    """What keys to show begin with: those of this installation alone, for others may share the metadata store."""
    own = f"{prefix}/"
    if own.startswith(beginning):
        return own
    if not beginning.startswith(own):
        raise Invalid(
            f'--key "{beginning}" is outside of metadata.prefix: keys of this installation begin with {own}; to see '
            "those of another, name its prefix with --set metadata.prefix=…"
        )
    return beginning


def _catalog_items(run: Invocation, name: str, partition: int | None) -> Iterator[dict[str, Any]]:
    from forebay.clock import SystemClock
    from forebay.format.metadata.keys import shard_prefix
    from forebay.inspection import dump_catalog
    from forebay.inspection.directory import look

    topic = known_topic(run, name)
    found = look(run.directory, run.settings, run.disk, SystemClock())
    spec = next(spec for spec in found.topics if spec.name == topic)
    if partition is not None and not 0 <= partition < spec.partitions:
        raise Invalid(f"{spec.name} has the partitions 0 to {spec.partitions - 1}, not {partition}")
    for number in range(spec.partitions) if partition is None else [partition]:
        prefix = shard_prefix(spec.namespace, spec.topic, number, prefix=found.prefix)
        yield from dump_catalog(f"{spec.name}[{number}]", list(found.below(prefix)))


def _say_item(item: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        say_json(item)
        return
    fields = [f"{name}={_shown(value)}" for name, value in item.items() if name != "kind"]
    say(" ".join([f"{item['kind']:10}", *fields]))


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = value if isinstance(value, str) else json_of(value)
    plain = text if text.isprintable() and text and " " not in text else json_of(text)
    return plain if not isinstance(value, dict | list) else json_of(value)
