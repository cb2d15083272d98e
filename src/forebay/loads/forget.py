"""Removes the record of a bulk load that is over, once no history has named the load for long.

A reader looks the load up when it reads what the load brought. Once compaction has rewritten those records, or gaps
have taken their place, only readers that began before still ask: for them the record stays a while. The notes on its
parts go with it at the latest. Knows the metadata store alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from forebay.catalog import ShardCatalog
from forebay.catalog.entries import decode_entry, readable
from forebay.errors import Indeterminate
from forebay.format.metadata.descriptor import LoadStatus
from forebay.format.metadata.keys import load_key, offers_prefix
from forebay.format.metadata.value import encode_value
from forebay.loads.book import LoadBook, leave_gaps
from forebay.loads.prepare import Load
from forebay.metadata import Delete, DeleteRange, Entry, MetadataStore, Operation, Put, RevisionIs

logger = logging.getLogger(__name__)

PAGE_KEYS = 100


class EndedLoad(NamedTuple):
    """A load that is over, as found."""

    load_id: str
    load: Load
    entry: Entry


def finish_given_up(
    book: LoadBook, load_id: str, catalog_of: Callable[[int], ShardCatalog], *, created_at: int
) -> None:
    """On return gaps stand where a load that was given up is attached, and nothing is left to be done for it.

    Harmless when repeated, and beside others who do the same.
    """
    # Given up: no part of it is attached any more from then on.
    for partition in book.attached(load_id):
        leave_gaps(catalog_of(partition), load_id, created_at=created_at)
    book.end(load_id)


def ended_loads(metadata: MetadataStore, prefix: str) -> dict[str, list[EndedLoad]]:
    """Every load that is over, by the id of its topic. One that cannot be read is logged, and never forgotten."""
    found: dict[str, list[EndedLoad]] = {}
    after: str | None = None
    below = load_key("", prefix=prefix)
    while entries := metadata.range(below, start_after=after, limit=PAGE_KEYS):
        for entry, load in readable(entries, Load):
            if load.status is not LoadStatus.OFFERED:
                found.setdefault(load.topic_id, []).append(EndedLoad(entry.key.removeprefix(below), load, entry))
        after = entries[-1].key
    return found


def named_in(catalog: ShardCatalog) -> set[str]:
    """The loads that a history names."""
    pieces = [*(piece.descriptor for piece in catalog.pieces()), *catalog.descriptors()]
    return {piece.load_id for piece in pieces if piece.load_id is not None}


def forget_unnamed(
    metadata: MetadataStore, prefix: str, ended: Iterable[EndedLoad], named: set[str], *, now_ms: int, before_ms: int
) -> list[str]:
    """Forget those that no history names, each when that was so before `before_ms` already; their ids.

    What is left of notes about their parts goes with them.

    `named` was read after `ended`: what is over is attached nowhere any more.
    """
    forgotten: list[str] = []
    for load_id, load, entry in ended:
        if load_id in named:
            continue
        if load.unnamed_since is None:
            unknown = decode_entry(entry, Load)[1]
            noted = msgspec.structs.replace(load, unnamed_since=now_ms)
            _change(metadata, entry, [Put(entry.key, encode_value(noted, unknown=unknown))])
        elif load.unnamed_since < before_ms:
            gone: list[Operation] = [Delete(entry.key), DeleteRange(offers_prefix(load_id, prefix=prefix))]
            forgotten += [load_id] if _change(metadata, entry, gone) else []
    if forgotten:
        logger.info("forgot %d loads that no history names any more", len(forgotten))
    return forgotten


def _change(metadata: MetadataStore, entry: Entry, operations: Sequence[Operation]) -> bool:
    """Try once: what does not succeed now is due again at the next look."""
    try:
        return metadata.transaction([RevisionIs(entry.key, entry.mod_revision)], operations).succeeded
    except Indeterminate:
        return False
