"""Look-ups in a history that lies in a store alone: how long they take, and how much of it they read."""

from __future__ import annotations

import contextlib
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import forebay
from bench import payload
from bench.indexed import VALUES_MAX, Stream
from bench.plan import Figures, Plan
from bench.results import Result, at_most, result
from forebay import places
from forebay.blobs import DirectoryStore
from forebay.testing.inside import inside

RECORDS_PER_TAG = 10
COLD = 7
HOT_MS_MAX = 5
COLD_PERCENT_MAX = 1


class CountedStore(DirectoryStore):
    """A directory that counts what is read of its objects, whoever of its process reads."""

    read_bytes = 0
    _counting = threading.Lock()

    def get_range(self, key: str, start: int, stop: int, *, etag: str | None = None) -> bytes:
        return self._counted(super().get_range(key, start, stop, etag=etag))

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, int]], *, etag: str | None = None) -> list[bytes]:
        return [self._counted(found) for found in super().get_ranges(key, ranges, etag=etag)]

    def read(self, key: str, start: int, stop: int, **options: Any) -> Iterator[bytes]:
        return map(self._counted, super().read(key, start, stop, **options))

    def _counted(self, found: bytes) -> bytes:
        with self._counting:
            CountedStore.read_bytes += len(found)
        return found


def run(plan: Plan) -> Iterator[Result]:
    """All figures of the case."""
    count = plan.sizes.looked_up
    stream = Stream(count, keys=count, tags=count // RECORDS_PER_TAG)
    place = plan.shared("looked up", lambda path: _make(path, stream))
    held = sum(path.stat().st_size for path in (place / "store").rglob("*.seg"))
    figures = plan.compare({"forebay": lambda: _figures(plan, place, stream, held)})["forebay"]
    for name in _lookups(stream):
        of = f"{name}, history of {count:,} records"
        yield result("lookup", f"{of}, hot, p50", "ms", figures[f"{name} hot"], {}, [at_most(HOT_MS_MAX)])
        yield result("lookup", f"{of}, cold, p50", "ms", figures[f"{name} cold"])
        share = figures[f"{name} share"]
        yield result("lookup", f"{of}, cold, most read of it", "%", share, {}, [at_most(COLD_PERCENT_MAX)])


@contextlib.contextmanager
def _opened(place: Path) -> Iterator[Any]:
    """A log that keeps no local copy of what is in its store."""
    settings = {
        "storage": {"mode": "shared_fs"},
        "store": {"root": str(place / "store")},
        "retention": {"time_s": 0, "bytes_max": 0, "grace_s": 0},
    }
    with (
        mock.patch.object(places, "DirectoryStore", CountedStore),
        forebay.open(str(place / "data"), settings) as log,
    ):
        yield log


def _make(place: Path, stream: Stream) -> None:
    """The history: written, exported, its local copies dropped, and read back once."""
    with _opened(place) as log:
        topic = log.create_topic("bench/t", durability="disk")
        for first in range(0, stream.count, payload.BATCH):
            rows = stream.rows(first, min(first + payload.BATCH, stream.count))
            topic.append_many(rows.values, keys=rows.keys, tags=rows.tags, timestamps=rows.times)
        topic.rotate()
        log.export_topic("bench/t")
        inside(topic).history().retain()
        payload.check_count("history", stream.count, topic.offsets().exported)
        window = payload.values(min(stream.count, VALUES_MAX))
        for first in range(0, stream.count, len(window)):
            values = window[: stream.count - first]
            records = topic.read(first, stop=first + len(values))
            payload.check("history", values, (record.value or b"" for record in records))
    left = sum(path.stat().st_size for path in (place / "data").rglob("*.seg"))
    if left > payload.BATCH * payload.VALUE_BYTES:
        raise payload.Wrong(f"{left} bytes of history still lie beside the log")


Lookup = tuple[Callable[[Any, int], object], Callable[[int], object]]
"""What is asked of a topic, and what it must answer, by the offset of a record."""


def _lookups(stream: Stream) -> dict[str, Lookup]:
    return {
        "by key": (
            lambda topic, offset: [(found.offset, found.value) for found in topic.read_by_key(stream.key(offset))],
            lambda offset: [(offset, stream.value(offset))],
        ),
        "by a key that is not there": (
            lambda topic, offset: list(topic.read_by_key(stream.key(offset) + b"x")),
            lambda offset: [],
        ),
        f"{RECORDS_PER_TAG} by tag": (
            lambda topic, offset: [(found.offset, found.value) for found in topic.read_by_tag(stream.tag(offset))],
            lambda offset: [(found, stream.value(found)) for found in stream.with_tag(offset)],
        ),
        "by time": (lambda topic, offset: topic.offset_at_time(stream.time(offset)), stream.first_at),
    }


def _figures(plan: Plan, place: Path, stream: Stream, held: int) -> Figures:
    chance = random.Random(1)
    figures: Figures = {}
    for name, lookup in _lookups(stream).items():
        taken, shares = [], []
        for _ in range(COLD):
            with _opened(place) as log:
                topic = log.topic("bench/t")
                topic.offsets()
                before = CountedStore.read_bytes
                taken.append(_timed(topic, chance.randrange(stream.count), lookup))
            # Only now: what was fetched ahead and never used was read too.
            shares.append((CountedStore.read_bytes - before) / held * 100)
        if not min(shares) > 0:
            raise payload.Wrong(f"a look-up {name} read nothing of the store: its history lies elsewhere")
        with _opened(place) as log:
            topic = log.topic("bench/t")
            offsets = [chance.randrange(stream.count) for _ in range(plan.sizes.lookups)]
            for offset in offsets[: len(offsets) // 4]:
                _timed(topic, offset, lookup)
            hot = [_timed(topic, chance.randrange(stream.count), lookup) for _ in offsets]
        figures |= {
            f"{name} hot": statistics.median(hot),
            f"{name} cold": statistics.median(taken),
            f"{name} share": max(shares),
        }
    return figures


def _timed(topic: Any, offset: int, lookup: Lookup) -> float:
    ask, expected = lookup
    begun = time.perf_counter()
    found = ask(topic, offset)
    elapsed = time.perf_counter() - begun
    if found != expected(offset):
        raise payload.Wrong(f"the look-up of what was written at {offset} gives {found!r}")
    return elapsed * 1000
