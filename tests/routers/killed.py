"""A process that fills a topic and routes it, until it is killed: `python -m tests.routers.killed ROOT RUN`.

It says a line for every batch that was acknowledged to it.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from random import Random  # noqa: TID251 - seeded

import forebay
from forebay.records import EARLIEST
from forebay.routers import Routers, rules

TAGS = ("a", "b", "c")
COPIED_HEADERS_MAX = 2
"""What destinations take here: some records of the source have more, and are skipped."""
PRODUCER = 77


def opened(root: Path) -> forebay.Storage:
    """The log, with source, destinations and routers in it."""
    log = forebay.open(root, {"wal": {"rotate_bytes_max": 65_536, "producers_max": 64}})
    log.create_topic("source", partitions=3, durability="fsync", exist_ok=True)
    log.create_topic("disk", partitions=4, durability="disk", exist_ok=True)
    log.create_topic("synced", partitions=2, durability="fsync", exist_ok=True)
    routers = Routers(log)
    if not routers.all():
        routers.create("spread", sources=["source"], destination="disk", start=EARLIEST, tags=["a", "b"], key="tag")
        routers.create("plain", sources=["source"], destination="synced", start=EARLIEST, key_prefix=b"k1")
    return log


def main(root: str, run: str) -> None:
    vars(rules)["COPIED_HEADERS_MAX"] = COPIED_HEADERS_MAX
    chance = Random(int(run))
    with opened(Path(root)) as log:
        source, target = log.topic("source"), log.topic("synced")
        routers = Routers(log)
        routers.start()
        for turn in itertools.count():
            for partition in range(3):
                last = source.last_sequence(PRODUCER, partition)
                sequence = 0 if last is None else last + 1
                # What a batch has follows from its place: a run that was killed leaves no doubt about what it appended.
                count = 1 + (sequence * 7 + partition) % 20
                numbers = [f"{partition}-{sequence}-{number}" for number in range(count)]
                source.append_many(
                    [number.encode() for number in numbers],
                    keys=[b"k%d" % (hash_of(number) % 13) for number in numbers],
                    tags=[TAGS[hash_of(number) % 3] for number in numbers],
                    headers=[[("h", b"")] * (3 if is_refused(number) else 1) for number in numbers],
                    partition=partition,
                    producer=PRODUCER,
                    sequence=sequence,
                )
                print(partition, sequence, flush=True)  # noqa: T201 - to the test
            if chance.random() < 0.05:
                start = source.offsets(0).earliest
                source.delete_by_offset(start + 5, start + 6, partition=0)
            target.append(b"other", producer=1_000_000 * (int(run) + 1) + turn, sequence=0)


def is_refused(text: str) -> bool:
    """Whether the record has more headers than destinations take."""
    return hash_of(text) % 11 == 0


def hash_of(text: str) -> int:
    """The same number in every process."""
    return sum(ord(letter) * (place + 1) for place, letter in enumerate(text))


if __name__ == "__main__":
    main(*sys.argv[1:])
