"""`forebay topic list`: all topics, page by page."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from forebay.cli.commands import command
from forebay.cli.invocation import Invocation
from forebay.cli.options import AsJson
from forebay.cli.terminal import PagedTable, flush, readable_time, say_json
from forebay.cli.topic import app
from forebay.cli.topic.show import spec_item

if TYPE_CHECKING:
    from forebay.surface.blocking import Log
    from forebay.topics import TopicSpec

PAGE_TOPICS = 1000
"""Topics that are read at once."""


@command(app, "list", examples=["forebay topic list", "forebay topic list --json | jq -r .name"], by_url=True)
def list_topics(run: Invocation, *, as_json: AsJson = False) -> None:
    """List all topics, also while another process has the directory open."""
    table = PagedTable("topic", "partitions", "durability", "engine", "compression", "created")
    with run.reading() as log:
        for page in _pages(log):
            if as_json:
                for spec in page:
                    say_json(spec_item(spec))
            else:
                table.say([_cells(spec) for spec in page])
            # Before the next page is read: with many topics that takes a while.
            flush()


def _pages(log: Log) -> Iterator[list[TopicSpec]]:
    """All topics by name, read page by page."""
    page = log.topics(limit=PAGE_TOPICS)
    while page:
        yield page
        page = log.topics(after=page[-1].name, limit=PAGE_TOPICS)


def _cells(spec: TopicSpec) -> tuple[object, ...]:
    created = readable_time(spec.created_at)
    return spec.name, spec.partitions, spec.durability, spec.engine, spec.compression, created
