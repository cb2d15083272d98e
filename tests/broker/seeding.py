"""A process that fills a log and dies without closing it: `python -m tests.broker.seeding PATH SHARDS RECORDS`."""

from __future__ import annotations

import sys

import forebay
from tests.support.processes import die

PARTITIONS = 20
"""Of each topic."""
VALUE_BYTES = 100


def seed(path: str, shards: int, records: int) -> None:
    """Topics with so many shards in all and so many records in each of them; then end as kill -9 does."""
    log = forebay.open(path)
    values = [b"%0*d" % (VALUE_BYTES, number) for number in range(records)]
    for first in range(0, shards, PARTITIONS):
        count = min(PARTITIONS, shards - first)
        topic = log.create_topic(f"seeded/t{first // PARTITIONS}", durability="disk", partitions=count)
        for partition in range(count):
            topic.append_many(values, partition=partition)
    die()


if __name__ == "__main__":
    seed(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
