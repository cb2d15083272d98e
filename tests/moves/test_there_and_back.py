"""A topic moves there and back while handles, streams and consumers of both sides stay attached to it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from forebay import EARLIEST, DeliveredRecord, Moved, Storage, Topic
from tests.ledger import Ledger
from tests.support.environments import directories
from tests.support.environments.directories import TOPIC, id_of
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.slow

MOVES = 4
EACH = 5


def _followed(topic: Topic, count: int) -> list[int]:
    """The offsets that a stream from the beginning shows, until there are so many."""
    stream = topic.follow(EARLIEST)
    return [next(stream).offset for _ in range(count)]


def test_subscriptions_streams_and_handles_go_on_exactly_over_moves(tmp_path: Path, ledger: Ledger) -> None:
    environment = directories.shared_fs(tmp_path)
    with environment.open("A") as a, environment.open("B") as b, ThreadPoolExecutor(2) as threads:
        logs: Sequence[Storage] = (a, b)
        a.create_topic(TOPIC).subscribe("s", start=EARLIEST)
        handles = [log.topic(TOPIC) for log in logs]
        streams = [threads.submit(_followed, handle, MOVES * EACH) for handle in handles]
        cursor = 0
        for move in range(MOVES):
            here, there = move % 2, (move + 1) % 2
            topic = handles[here]
            end = (move + 1) * EACH
            assert [topic.append(b"%d" % offset) for offset in range(end - EACH, end)] == list(range(end - EACH, end))
            consumer = topic.subscription("s").consumer("c")
            # What was not acknowledged on the other side is delivered again, and nothing before it.
            records: list[DeliveredRecord] = []
            while len(records) < end - cursor:
                records += consumer.take(end - cursor - len(records), wait_s=PATIENCE)
            assert [record.record.offset for record in records] == list(range(cursor, end))
            consumer.ack(*records[: EACH - 2])
            cursor += EACH - 2
            consumer.close()
            topic.subscription("s").flush()

            logs[here].seal_topic(TOPIC, target=id_of(logs[there]))
            with pytest.raises(Moved):
                topic.append(b"refused")
            ledger.count("moves", kind="there and back")
        handles[MOVES % 2].acquire()
        for stream in streams:
            assert stream.result(PATIENCE) == list(range(MOVES * EACH))
        assert [lag.end - lag.cursor for lag in handles[MOVES % 2].subscription("s").lag()] == [MOVES * EACH - cursor]
