"""What a partition is stored in: log files and history, listed without a store and page by page."""

from __future__ import annotations

from pathlib import Path

import forebay
from forebay.catalog import ShardCatalog, ShardKeys
from forebay.clock import SystemClock
from forebay.format.metadata.descriptor import gap_descriptor
from forebay.records import Gap, Reason
from forebay.storage import Storage


def test_pieces_that_were_replaced_are_left_out(tmp_path: Path) -> None:
    with forebay.open(tmp_path / "data") as log:
        topic = log.create_topic("shop/orders")
        for number in range(6):
            topic.append(b"%d" % number)
            topic.rotate()
        log.export_topic("shop/orders")
        catalog = ShardCatalog(
            log.metadata, ShardKeys("shop", "orders", 0, log.settings.metadata.prefix), topic.spec.topic_id,
            clock=SystemClock(),
        )  # fmt: skip
        new = gap_descriptor(Gap(1, 4, Reason.SKIPPED), topic_id=topic.spec.topic_id, epoch=1, created_at=1)
        assert catalog.replace(catalog.pieces()[1:4], new)

        for limit in (1, 2, 3, 100):
            assert _history(log, limit) == [(0, 1), (1, 4), (4, 5), (5, 6)]
        assert log.segments("shop/orders").history[1].gap == Gap(1, 4, Reason.SKIPPED)


def _history(log: Storage, limit: int) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    start: int | None = 0
    while start is not None:
        page = log.segments("shop/orders", start=start, limit=limit)
        assert len(page.history) <= limit
        found += [(piece.start, piece.end) for piece in page.history]
        start = page.next
    return found
