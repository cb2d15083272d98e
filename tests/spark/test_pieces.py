"""Pieces of a partition that lie elsewhere than where they were planned, found again one by one."""

from __future__ import annotations

import contextlib
from functools import partial
from pathlib import Path

from forebay.settings import RetentionSettings
from forebay.spark.place.opening import opened
from forebay.spark.reading.options import ReadOptions
from forebay.spark.reading.pieces import PieceReader
from forebay.spark.reading.snapshot import ScanPiece
from forebay.spark.reading.view import look_again
from tests.spark.mixed import Mixed
from tests.support.environments import directories


def test_a_piece_of_the_log_whose_front_is_history_by_now_is_read_from_both(tmp_path: Path) -> None:
    nothing_kept = RetentionSettings(time_s=0, bytes_max=0, grace_s=0)
    mixed = Mixed(directories.shared_fs(tmp_path, retention=nothing_kept), partitions=1)
    mixed.filled.many(10)
    mixed.export()
    mixed.filled.many(10)
    assert directories.shard_of(mixed.filled.topic).history.retain() == 1
    spec = mixed.filled.topic.spec

    with opened(ReadOptions.parse(mixed.options).location) as found:
        again = partial(look_again, found, spec.topic_id, str(spec.name), 0)
        reader = PieceReader(found, f"{spec.topic_id}_0", [ScanPiece(0, 20, 0)], "it", again)
        with contextlib.closing(reader):
            at, seen = 0, list[int]()
            while at < 20 and (page := reader.read(at)).next > at:
                seen += [record.offset for batch in page.batches for record in batch.records(0)]
                at = page.next
    assert seen == list(range(20))
    mixed.close()
