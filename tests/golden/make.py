"""Write the golden data directory of the present format version. Run once per version; the result is kept for ever."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from forebay.records import Record
from forebay.settings import Settings
from forebay.storage import Storage, Topic
from forebay.testing.simulated.clock import ManualClock

TORN = b"\x07 a frame that never became whole"


def make(directory: Path) -> None:
    """The data directory and, beside it, what must be read from it."""
    data = directory / "data"
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    with Storage.open(str(data), Settings(), clock=ManualClock(1_800_000_000_000, seed=1)) as log:
        orders = log.create_topic("shop/orders", partitions=2, durability="fsync")
        clicks = log.create_topic("clicks", compression="zstd:3")
        for topic in (orders, clicks):
            _fill(topic)
        records = {name: [shown(record) for record in log.topic(name).read()] for name in ("shop/orders", "clicks")}
    _tear(data)
    (directory / "records.json").write_text(json.dumps(records, indent=1) + "\n")


def _fill(topic: Topic) -> None:
    """Sealed files of large and of re-framed small frames, and records in the active file."""
    topic.append_many([b"bulk %d" % n for n in range(300)], keys=[b"%d" % (n % 7) for n in range(300)], tags="eu")
    topic.rotate()
    for number in range(40):
        topic.append(b"single %d" % number, key=b"%d" % number, timestamp=1_800_000_000_000 - number)
    topic.rotate()
    topic.append(None, key=b"7", tag="gone", headers={"why": b"deleted", "by": None})
    topic.append(b"", headers=[("a", b"1"), ("a", b"2")])
    topic.append(b"once", key=b"once", producer=9, sequence=0)


def _tear(data: Path) -> None:
    """An append that was being written when the machine stopped."""
    for shard in sorted((data / "shards").iterdir()):
        newest = max(shard.glob("*.seg"))
        newest.write_bytes(newest.read_bytes() + TORN)
    (data / "lock").unlink(missing_ok=True)
    for leftover in [*data.glob("metadata.sqlite-*"), *data.glob("sessions/*")]:
        leftover.unlink()


def shown(record: Record) -> list[object]:
    """A record as JSON holds it."""
    return [
        record.partition,
        record.offset,
        record.timestamp,
        None if record.key is None else record.key.decode(),
        None if record.value is None else record.value.decode(),
        record.tag,
        [[name, None if value is None else value.decode()] for name, value in record.headers],
    ]


if __name__ == "__main__":
    make(Path(__file__).parent / sys.argv[1])
