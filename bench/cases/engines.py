"""The three engines beside plain RocksDB and SQLite: appends, look-ups and deletes of the same records."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

from bench import indexed, payload, stores
from bench.indexed import IndexedStore, Rows, Stream
from bench.plan import Contender, Figures, Plan
from bench.results import Result, result

ENGINES = ("memory", "rocksdb", "segment")
PEERS: dict[str, Callable[[Path], IndexedStore]] = {"plain rocksdb": indexed.RocksDb, "sqlite": indexed.Sqlite}
RECORDS_PER_KEY = 10
RECORDS_PER_TAG = 100
SINGLE_SHARE = 20
"""One record in so many is appended alone, behind those that come in batches."""

BATCHES = f"append, batches of {payload.BATCH}"
SINGLE = "append, one by one"
SCAN = "read all by offset"
METRICS = {
    BATCHES: "records/s",
    SINGLE: "records/s",
    SCAN: "records/s",
    "one record by offset, p50": "µs",
    "newest record by key, p50": "µs",
    f"{RECORDS_PER_TAG} records by tag, p50": "µs",
    "offset by time, p50": "µs",
    f"delete {RECORDS_PER_KEY} records by key, p50": "µs",
}


def run(plan: Plan) -> Iterator[Result]:
    """All figures of the case."""
    count = plan.sizes.records
    stream = Stream(count, keys=count // RECORDS_PER_KEY, tags=count // RECORDS_PER_TAG)
    together = count - count // SINGLE_SHARE
    batches = [stream.rows(first, min(first + payload.BATCH, together)) for first in range(0, together, payload.BATCH)]
    singles = stream.rows(together, count)
    contenders: dict[str, Contender | None] = {
        engine: _measured(plan, engine, partial(indexed.Forebay, engine=engine), stream, batches, singles)
        for engine in ENGINES
        if engine != "rocksdb" or stores.available("rocksdb")
    }
    for name, opened in PEERS.items():
        wanted = plan.peers and stores.available(name.split()[-1])
        contenders[name] = _measured(plan, name, opened, stream, batches, singles) if wanted else None
    found = plan.compare(contenders)
    for metric, unit in METRICS.items():
        peers = {name: found[name].get(metric) for name in PEERS}
        for engine in ENGINES:
            if engine in found:
                yield result("engines", f"{engine}: {metric}", unit, found[engine][metric], peers)


def _measured(
    plan: Plan,
    name: str,
    opened: Callable[[Path], IndexedStore],
    stream: Stream,
    batches: list[Rows],
    singles: Rows,
) -> Contender:
    def contender() -> Figures:
        with closing(opened(plan.fresh())) as store:
            begun = time.perf_counter()
            for rows in batches:
                store.append_many(rows)
            batched = time.perf_counter()
            columns = zip(singles.keys, singles.tags, singles.times, singles.values, strict=True)
            for offset, row in enumerate(columns, singles.first):
                store.append(offset, *row)
            ended = time.perf_counter()
            read = sum(1 for _ in store.values())
            scanned = time.perf_counter()
            payload.check_count(name, stream.count, read)
            values = [value for rows in batches for value in rows.values] + singles.values
            payload.check(name, values, store.values())
            return {
                BATCHES: singles.first / (batched - begun),
                SINGLE: len(singles.values) / (ended - batched),
                SCAN: stream.count / (scanned - ended),
                **_looked_up(name, store, stream, plan.sizes.lookups),
            }

    return contender


def _looked_up(name: str, store: IndexedStore, stream: Stream, times: int) -> Figures:
    """The median of each kind of look-up, then of deletes, each answer checked."""
    chance = random.Random(1)
    # All over the log, and of other keys each: what is deleted once is not there again.
    offsets = [chance.choice(stream.with_key(first)) for first in chance.sample(range(stream.keys), times)]

    def timed(ask: Callable[[int], object], expected: Callable[[int], object]) -> float:
        taken = []
        for offset in offsets:
            begun = time.perf_counter()
            found = ask(offset)
            taken.append(time.perf_counter() - begun)
            if found != expected(offset):
                raise payload.Wrong(f"{name} does not find what was written at {offset}, but {found!r}")
        return statistics.median(taken) * 1e6

    def newest(offset: int) -> tuple[int, bytes]:
        return stream.newest(offset), stream.value(stream.newest(offset))

    answers: list[tuple[Callable[[int], object], Callable[[int], object]]] = [
        (store.at, stream.value),
        (lambda offset: store.newest(stream.key(offset)), newest),
        (lambda offset: store.tagged(stream.tag(offset)), lambda at: [stream.value(n) for n in stream.with_tag(at)]),
        (lambda offset: store.at_time(stream.time(offset)), stream.first_at),
        (lambda offset: store.delete(stream.key(offset)), lambda offset: len(stream.with_key(offset))),
    ]
    asked = [metric for metric in METRICS if metric not in (BATCHES, SINGLE, SCAN)]
    figures = {metric: timed(*answer) for metric, answer in zip(asked, answers, strict=True)}
    timed(lambda offset: store.newest(stream.key(offset)), lambda _: None)
    deleted = sum(len(stream.with_key(offset)) for offset in offsets)
    payload.check_count(f"{name} (after deletes)", stream.count - deleted, sum(1 for _ in store.values()))
    return figures
