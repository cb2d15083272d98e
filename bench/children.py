"""Steps that need a process of their own: to be killed, or to be weighed. `run(name, …)` here calls `name` there."""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forebay
from bench import exports, payload, stores
from forebay.blobs import BlobStore
from forebay.testing.inside import inside

FEW_DESCRIPTORS = 128
"""What a process that has many topics and uses few of them keeps open."""


def run(name: str, *arguments: object) -> dict[str, float]:
    """Run a step in a fresh interpreter; what it printed before it ended or was killed."""
    command = [sys.executable, "-m", "bench.children", name, json.dumps([str(a) for a in arguments])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[1])
    if done.returncode not in (0, -signal.SIGKILL) or not done.stdout:
        raise payload.Wrong(f"{name} ended with {done.returncode}: {done.stderr[-2000:]}")
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _die() -> None:
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def _answer(**figures: float) -> None:
    print(json.dumps(figures), flush=True)


def write_and_die(path: str, count: str, batch: str, rotates: str) -> None:
    """Append records and be killed."""
    settings = None if rotates == "True" else stores.FREE
    log = forebay.open(path, settings)
    topic = log.create_topic("bench/t", durability="disk")
    each = int(batch)
    window = payload.values(min(int(count), 1_000_000))
    for start in range(0, int(count), len(window)):
        part = window[: int(count) - start]
        if each == 1:
            for value in part:
                topic.append(value)
        else:
            for values in payload.batches(part, each):
                topic.append_many(values)
    if settings is None:
        _wait_until_sealed(Path(path))
    _answer(records=topic.offsets().next)
    _die()


def _wait_until_sealed(path: Path) -> None:
    """Sealing follows by itself: give it time, so that what is measured is not a race."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        segments = len(list(path.glob("shards/*/*.seg")))
        if len(list(path.glob("shards/*/*.idx"))) >= segments - 1:
            return
        time.sleep(0.05)


def _import_all() -> None:
    """Whatever is imported when first needed is not what is timed or weighed."""
    for name in ("pyarrow", "sqlite3", "forebay.storage", "forebay.format.columns.arrow"):
        importlib.import_module(name)


def recover(path: str, rotates: str) -> None:
    """From open() to the first append, imports done; then be killed again."""
    _import_all()
    settings = None if rotates == "True" else stores.FREE
    begun = time.perf_counter()
    log = forebay.open(path, settings)
    topic = log.topic("bench/t")
    offset = topic.append(b"first after the kill")
    seconds = time.perf_counter() - begun
    last = next(iter(topic.read(offset)))
    if last.value != b"first after the kill" or last.offset != offset:
        raise payload.Wrong("the first append after the restart is not there")
    _answer(seconds=seconds, offset=offset)
    _die()


def rocks_write_and_die(path: str, count: str, batch: str) -> None:
    """The same with RocksDB as it comes."""
    store = stores.RocksDb(Path(path), durable=False)
    records = payload.values(int(count))
    first = 0
    for values in payload.batches(records, int(batch)):
        store.write(store.prepare(values, first))
        first += len(values)
    _answer(records=first)
    _die()


def rocks_recover(path: str, count: str) -> None:
    """RocksDB from opening to the first put."""
    importlib.import_module("rocksdict")
    begun = time.perf_counter()
    store = stores.RocksDb(Path(path), durable=False)
    store.write(([b"first after the kill"], 2**63))
    seconds = time.perf_counter() - begun
    found = sum(1 for _ in store.values())
    payload.check_count("rocksdb", int(count) + 1, found)
    _answer(seconds=seconds)
    _die()


def make_topics(path: str, count: str) -> None:
    """Topics with one record each; how long each step took."""
    begun = time.perf_counter()
    log = forebay.open(path)
    topics = [log.create_topic(f"bench/t{number}") for number in range(int(count))]
    created = time.perf_counter()
    for number, topic in enumerate(topics):
        topic.append(b"%d" % number)
    appended = time.perf_counter()
    _answer(create=created - begun, append=appended - created)
    _die()


def open_topics(path: str, count: str, idle_seconds: str) -> None:
    """Open all topics after a kill, append one record to each, then idle; time, memory, descriptors and threads."""
    _import_all()
    gc.collect()
    resident = _resident()
    begun = time.perf_counter()
    log = forebay.open(path, {"runtime": {"descriptors_max": FEW_DESCRIPTORS}})
    log.recover()
    opened = time.perf_counter()
    topics = [log.topic(f"bench/t{number}") for number in range(int(count))]
    held = time.perf_counter()
    for topic in topics:
        topic.append(b"again")
    appended = time.perf_counter()
    for number, topic in enumerate(topics):
        values = [record.value for record in topic.read()]
        if not values or values[0] != b"%d" % number or values[-1] != b"again":
            raise payload.Wrong(f"topic {number} holds {values}")
    # Files that have been written to keep their descriptors until they are synced.
    time.sleep(float(idle_seconds))
    gc.collect()
    cpu = time.process_time()
    time.sleep(float(idle_seconds))
    cpu = time.process_time() - cpu
    _answer(
        open=opened - begun,
        append=appended - held,
        idle=cpu / float(idle_seconds),
        resident=(_resident() - resident) / 1e6,
        descriptors=len(os.listdir("/proc/self/fd")),
        threads=threading.active_count(),
        peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3,
    )
    _die()


def churn(path: str, count: str, engine: str) -> None:
    """Create topics, append to each and delete it; what is resident after a tenth of them and after all."""
    _import_all()
    total = int(count)
    log = forebay.open(":memory:" if engine == "in memory" else path, stores.FREE)
    early = 0
    begun = time.perf_counter()
    for number in range(total):
        if number == total // 10:
            early = _resident_now()
        topic = log.create_topic(f"bench/t{number}", engine=engine.removeprefix("in "))
        topic.append_many([b"%d" % number] * 10)
        if len(list(topic.read())) != 10:
            raise payload.Wrong(f"topic {number} does not hold what was appended")
        log.delete_topic(f"bench/t{number}")
    seconds = time.perf_counter() - begun
    resident = _resident_now()
    _answer(resident=resident / 1e6, early=early / 1e6, milliseconds=seconds / total * 1e3)
    _die()


def topics_in_use(path: str, count: str, cache_bytes_max: str) -> None:
    """Append to many topics and read each in turn, three times what their caches may hold; what is resident then."""
    _import_all()
    base = _resident_now()
    limit, total = int(cache_bytes_max), int(count)
    log = forebay.open(path, {"wal": {"free_bytes_min": 0}, "runtime": {"cache_bytes_max": limit}})
    topics = [log.create_topic(f"bench/t{number}") for number in range(total)]
    each = max(1, 3 * limit // total // 10_000)
    for turn in range(10):
        for topic in topics:
            topic.append_many([b"%d" % turn * 1000] * each)
            if next(iter(topic.read(turn * each))).offset != turn * each:
                raise payload.Wrong("an append is not there")
    resident = _resident_now()
    cached = inside(log).bounds.caches.bytes
    _answer(resident=(resident - base) / 1e6, appended=total * each * 10 * 1000 / 1e6, cached=cached / 1e6)
    _die()


def create_beside_deletion(path: str, count: str) -> None:
    """Create topics while another thread deletes one with many objects, and some more when nothing else is done."""
    _import_all()
    store = Path(path) / "store"
    settings = {"storage": {"mode": "shared_fs"}, "store": {"root": str(store)}}
    with forebay.open(Path(path) / "data", settings) as log:
        log.create_topic("bench/large").append(b"v")
        log.export_topic("bench/large")
        (exported,) = store.rglob("*.seg")
        # Objects beside the exported one, as many as a long history has: a deletion finds and removes each.
        for number in range(1, int(count)):
            exported.with_name(f"1-{number:032x}.seg").write_bytes(b"v")
        payload.check_count("objects", int(count), len(list(store.rglob("*.seg"))))
        deleting = threading.Thread(target=log.delete_topic, args=("bench/large",))
        begun = time.perf_counter()
        deleting.start()
        beside = _created(log, "beside", deleting.is_alive)
        deleting.join()
        seconds = time.perf_counter() - begun
        if list(store.rglob("*.seg")):
            raise payload.Wrong("the deletion left objects")
        left = iter(beside[:200])
        alone = _created(log, "alone", lambda: next(left, None) is not None)
    figures = {"median": statistics.median(beside) * 1e3, "slowest": max(beside) * 1e3}
    figures |= {"median alone": statistics.median(alone) * 1e3, "slowest alone": max(alone) * 1e3}
    _answer(**figures, deletion=seconds)


def _created(log: forebay.Storage, name: str, goes_on: Callable[[], bool]) -> list[float]:
    """How long each creation took, one after the other for as long as is said, at least one."""
    taken: list[float] = []
    while not taken or goes_on():
        begun = time.perf_counter()
        log.create_topic(f"bench/{name}{len(taken)}")
        taken.append(time.perf_counter() - begun)
    return taken


def _resident_now() -> int:
    gc.collect()
    return _resident()


def export_weighed(log: str, catalog: str, kind: str, place: str) -> None:
    """Export everything that is sealed; what that held over what an open log and an open store hold."""
    with exports.opened_topic(Path(log)) as topic, exports.opened_store(kind, place) as store:
        _warm(store)
        with exports.opened_catalog(Path(catalog), topic.spec.topic_id) as entries:
            before = _peak_from_now()
            exporter = exports.export(topic, entries, store)
            extra = _peak() - before
            records = sum(piece.records for piece in entries.descriptors())
    _answer(extra=extra / 1e6, bytes=exporter.bytes, records=records)


def history_weighed(log: str, catalog: str, kind: str, place: str) -> None:
    """Read all history; what that held over the same."""
    with exports.opened_topic(Path(log)) as topic, exports.opened_store(kind, place) as store:
        _warm(store)
        with exports.opened_catalog(Path(catalog), topic.spec.topic_id) as entries:
            before = _peak_from_now()
            with exports.opened_history(entries, store) as history:
                records = sum(batch.end - batch.base for batch in exports.batches_of(history))
            extra = _peak() - before
    _answer(extra=extra / 1e6, records=records)


def _warm(store: BlobStore) -> None:
    """What a library needs to be at work is not what is weighed."""
    _import_all()
    store.put_if_absent("warm", b"1")
    store.get_range("warm", 0, 1)


def _peak_from_now() -> int:
    """What is resident now; the peak counts from here."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return _resident()


def _peak() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


STEPS: dict[str, Callable[..., Any]] = {
    step.__name__: step
    for step in (
        write_and_die,
        recover,
        rocks_write_and_die,
        rocks_recover,
        make_topics,
        open_topics,
        churn,
        topics_in_use,
        create_beside_deletion,
        export_weighed,
        history_weighed,
    )
}

if __name__ == "__main__":
    STEPS[sys.argv[1]](*json.loads(sys.argv[2]))
