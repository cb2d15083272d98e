"""Reading everything: to Python records and to Arrow, from the active file and from sealed ones; and at the tail.

Everybody is iterated by the same loop and nothing of ours between: LMDB by its bare cursor, which gives key and value,
RocksDB and SQLite by theirs. A record of Forebay has seven fields. What was read is compared in a second pass.
"""

from __future__ import annotations

import shutil
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

import forebay
from bench import payload, stores
from bench.cases.recovery import killed
from bench.plan import Contender, Figures, Plan
from bench.results import Limit, Result, at_least, at_most, result
from forebay.testing.inside import inside


def run(plan: Plan) -> Iterator[Result]:
    """All figures of the case."""
    yield from _scans(plan)
    yield from _openings(plan)
    yield _follower(plan)


def _scans(plan: Plan) -> Iterator[Result]:
    count = plan.sizes.records
    contenders: dict[str, Contender | None] = {}
    for batch in (payload.BATCH, 1):
        for kind in ("active", "sealed"):
            name = f"{kind}, written {'one by one' if batch == 1 else f'by {batch}'}"
            contenders[name] = _ours(_log(plan, kind, batch), count)
    for name, store in stores.EMBEDDED.items():
        contenders[name] = _peer(plan, name, store) if plan.peers and stores.available(name) else None
    contenders["pyarrow IPC"] = _ipc(plan)
    found = plan.compare(contenders)
    embedded = {name: found[name].get("records") for name in stores.EMBEDDED}
    cpu = {name: found[name].get("cpu") for name in stores.EMBEDDED}
    ipc = {"pyarrow IPC": found["pyarrow IPC"].get("rows")}
    for name in contenders:
        if name.startswith(("active", "sealed")):
            ours = found[name]
            yield result("read", f"to records, {name}", "records/s", ours["records"], embedded, [at_least(1, "lmdb")])
            yield result("read", f"to records, {name}, processor time of a record", "µs", ours["cpu"], cpu)
            limits = [at_least(20e6), at_least(0.5, "pyarrow IPC")]
            yield result("read", f"to Arrow, {name}", "rows/s", found[name]["rows"], ipc, limits)


def exhaust(stream: Iterable[object]) -> None:
    """Take everything and keep nothing, in a loop that costs next to nothing itself."""
    deque(stream, maxlen=0)


def _log(plan: Plan, kind: str, batch: int) -> Path:
    """A log to read from: all in the active file, or that file rotated and sealed."""
    source = killed(plan, plan.sizes.records, batch, rotates=False)

    def make(path: Path) -> None:
        shutil.copytree(source, path / "data")
        if kind == "sealed":
            with forebay.open(str(path / "data"), stores.FREE) as log:
                log.topic("bench/t").rotate()

    return plan.shared(f"{source.parent.name}, {kind}", make) / "data"


def _ours(path: Path, count: int) -> Contender:
    def contender() -> Figures:
        records = payload.values(count)
        with forebay.open(str(path), stores.FREE) as log:
            topic = log.topic("bench/t")
            topic.offsets()
            begun = time.perf_counter()
            rows = sum(batch.num_rows for batch in topic.read_arrow(stop=count))
            cpu, middle = time.process_time(), time.perf_counter()
            exhaust(topic.read(stop=count))
            end, cpu = time.perf_counter(), time.process_time() - cpu
            payload.check_count("forebay (Arrow)", count, rows)
            payload.check("forebay", records, (record.value or b"" for record in topic.read(stop=count)))
            payload.check("forebay (Arrow)", records, _arrow_values(topic, count))
        return {"rows": count / (middle - begun), "records": count / (end - middle), "cpu": cpu / count * 1e6}

    return contender


def _arrow_values(topic: forebay.Topic, count: int) -> Iterator[bytes]:
    for batch in topic.read_arrow(stop=count):
        yield from batch.column("value").to_pylist()


def _peer(plan: Plan, name: str, kind: type[Any]) -> Contender:
    count = plan.sizes.records

    def make(path: Path) -> None:
        with stores.opened(kind, path, durable=False) as store:
            for number, values in enumerate(payload.batches(payload.values(count))):
                store.write(store.prepare(values, number * payload.BATCH))

    path = plan.shared(f"{name}, filled", make)

    def contender() -> Figures:
        with stores.opened(kind, path, durable=False) as store:
            cpu, begun = time.process_time(), time.perf_counter()
            exhaust(store.read())
            elapsed, cpu = time.perf_counter() - begun, time.process_time() - cpu
            payload.check(name, payload.values(count), store.values())
        return {"records": count / elapsed, "cpu": cpu / count * 1e6}

    return contender


def _ipc(plan: Plan) -> Contender:
    """The same rows, as pyarrow itself writes and reads them: a stream of batches of 1000."""
    count = plan.sizes.records

    def make(path: Path) -> None:
        source = _log(plan, "active", payload.BATCH)
        with forebay.open(str(source), stores.FREE) as log, pa.OSFile(str(path / "rows"), "wb") as sink:
            writer: Any = None
            for batch in log.topic("bench/t").read_arrow(stop=count):
                writer = writer or pa.ipc.new_stream(sink, batch.schema)
                writer.write_batch(batch, None)
            writer.close()

    path = plan.shared("pyarrow IPC", make)

    def contender() -> Figures:
        begun = time.perf_counter()
        with pa.OSFile(str(path / "rows"), "rb") as source, pa.ipc.open_stream(source) as reader:
            rows = sum(batch.num_rows for batch in reader)
        elapsed = time.perf_counter() - begun
        payload.check_count("pyarrow IPC", count, rows)
        return {"rows": count / elapsed}

    return contender


def _openings(plan: Plan) -> Iterator[Result]:
    """A reader somewhere in the middle: of a log that is open (hot), and of one that has just been opened (cold)."""
    count = plan.sizes.records
    path = _log(plan, "sealed", payload.BATCH)

    def first(topic: forebay.Topic, offset: int) -> float:
        begun = time.perf_counter()
        record = next(topic.read(offset))
        elapsed = time.perf_counter() - begun
        if record.value != payload.values(count)[offset]:
            raise payload.Wrong(f"forebay gave another record at {offset}")
        return elapsed * 1000

    def ours() -> Figures:
        begun = time.perf_counter()
        with forebay.open(str(path), stores.FREE) as log:
            topic = log.topic("bench/t")
            opened = (time.perf_counter() - begun) * 1000
            cold = opened + first(topic, count // 2)
            hot = sorted(first(topic, place) for place in range(0, count, max(1, count // 50)))
        return {"cold": cold, "hot": hot[len(hot) // 2]}

    found = plan.compare({"forebay": ours})["forebay"]
    limits: dict[str, list[Limit]] = {"hot": [at_most(2)], "cold": [at_most(50)]}
    for kind in ("hot", "cold"):
        yield result("read", f"opening a reader, {kind}", "ms", found[kind], {}, limits[kind])


def _follower(plan: Plan) -> Result:
    """A follower that keeps up is served from memory."""

    def ours() -> Figures:
        records = payload.values(plan.sizes.bulk_records)[:50_000]
        with stores.opened(stores.Forebay, plan.fresh(), durable=False) as store:
            topic: Any = store.topic
            topic.append(b"first")
            follower = topic.follow(forebay.EARLIEST, timeout=1)
            next(follower)
            counts = inside(topic).wal().counters
            hits, misses = counts.cache_hits, counts.cache_misses
            seen: list[bytes] = []
            for batch in payload.batches(records, 100):
                topic.append_many(batch)
                seen += [next(follower).value for _ in batch]
            payload.check("forebay", records, seen)
            hits, misses = counts.cache_hits - hits, counts.cache_misses - misses
        return {"rate": hits / max(1, hits + misses)}

    found = plan.compare({"forebay": ours})["forebay"]["rate"]
    return result("read", "tail cache hit rate of a follower that keeps up", "share", found, {}, [at_least(0.95)])
