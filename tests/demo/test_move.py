"""The part of the demo that moves a topic, at toy size."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo.move import move_a_topic, read_in_order
from forebay import Record

COUNT = 2_500


def test_the_moved_topic_is_one_stream_and_its_reader_resumes(tmp_path: Path) -> None:
    move = move_a_topic(tmp_path / "demo", COUNT)

    assert (move.sealed_at, move.from_history, move.from_log) == (COUNT, COUNT, COUNT)
    assert move.acknowledged == move.resumed_at == COUNT // 2
    assert move.objects > 0
    assert move.decision == f"next offset {COUNT} by sealed state, exact"


def test_the_demo_notices_a_record_that_is_missing() -> None:
    records = [_shipment(0), _shipment(2)]

    with pytest.raises(SystemExit, match="offset 1 was expected"):
        read_in_order(records, 0)


def _shipment(offset: int) -> Record:
    return Record(
        partition=0, offset=offset, timestamp=0, key=None, value=b"shipment %d" % offset, tag=None, headers=()
    )
