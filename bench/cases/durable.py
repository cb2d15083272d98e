"""Single durable appends in this process by few and many producers: threads, and coroutines of one event loop.

The peers are libraries in this process too. RocksDB joins the syncs of threads that write at once, as far as its Python
package lets them; LMDB and SQLite let one writer in after the other and are shown with one. Servers stand beside the
broker, in the case `http`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import forebay
from bench import payload, stores
from bench.plan import Contender, Figures, Plan
from bench.results import Limit, Result, at_least, result

Produce = Callable[[forebay.Topic, Sequence[bytes], int], None]


def run(plan: Plan) -> Iterator[Result]:
    """All figures of the case."""
    found = {name: figures.get("rate") for name, figures in plan.compare(dict(_contenders(plan))).items()}
    alone = found["threads 1"]
    assert alone is not None
    for kind in ("threads", "asyncio"):
        for producers in plan.sizes.producers:
            ours = found[f"{kind} {producers}"]
            assert ours is not None
            peers: dict[str, float | None] = {"1 producer": alone} if (kind, producers) != ("threads", 1) else {}
            if producers == 1:
                peers |= {name: found[name] for name in stores.EMBEDDED}
            else:
                peers["rocksdb, as many threads"] = found[f"rocksdb {producers}"]
            last = kind == "asyncio" and producers == plan.sizes.producers[-1]
            limits: list[Limit] = [at_least(40, "1 producer")] if last else []
            metric = f"append, fsync, in process, {kind}, {producers} producers"
            yield result("durable", metric, "records/s", ours, peers, limits)


def _contenders(plan: Plan) -> Iterator[tuple[str, Contender | None]]:
    sizes = plan.sizes
    for kind, produce in (("threads", by_threads), ("asyncio", by_coroutines)):
        for producers in sizes.producers:
            yield f"{kind} {producers}", produced(plan, produce, producers)
    for name, store in stores.EMBEDDED.items():
        wanted = plan.peers and stores.available(name)
        yield name, _embedded(plan, name, store) if wanted else None
    has_rocks = plan.peers and stores.available("rocksdb")
    for producers in sizes.producers[1:]:
        yield f"rocksdb {producers}", _rocks(plan, producers) if has_rocks else None


def _share(plan: Plan, producers: int) -> Sequence[bytes]:
    count = min(plan.sizes.durable_many, plan.sizes.durable_single * producers)
    return payload.values(plan.sizes.durable_many + plan.sizes.durable_single)[:count]


def produced(plan: Plan, produce: Produce, producers: int) -> Contender:
    """The rate of single durable appends by so many producers."""

    def contender() -> Figures:
        records = _share(plan, producers)
        with stores.opened(stores.Forebay, plan.fresh(), durable=True) as store:
            store.topic.append_many([b"first"])
            begun = time.perf_counter()
            produce(store.topic, records, producers)
            elapsed = time.perf_counter() - begun
            found = list(store.values())[1:]
            payload.check("forebay", sorted(records), sorted(found))
        return {"rate": len(records) / elapsed}

    return contender


def by_threads(topic: forebay.Topic, records: Sequence[bytes], producers: int) -> None:
    """Append with a thread for each producer; the only one is the calling thread."""
    in_threads(topic.append, records, producers)


def in_threads(write: Callable[[Any], object], records: Sequence[Any], producers: int) -> None:
    """Write each record by one of so many threads; the only one is the calling thread."""

    def one(share: Sequence[Any]) -> None:
        for value in share:
            write(value)

    if producers == 1:
        one(records)
        return
    threads = [threading.Thread(target=one, args=(records[number::producers],)) for number in range(producers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def by_coroutines(topic: forebay.Topic, records: Sequence[bytes], producers: int) -> None:
    """Append with a coroutine of one event loop for each producer."""

    async def one(share: Sequence[bytes]) -> None:
        for value in share:
            await topic.append_nowait(value)

    async def everyone() -> None:
        await asyncio.gather(*[one(records[number::producers]) for number in range(producers)])

    asyncio.run(everyone())


def _embedded(plan: Plan, name: str, kind: type[Any]) -> Contender:
    def contender() -> Figures:
        records = _share(plan, 1)
        with stores.opened(kind, plan.fresh(), durable=True) as store:
            prepared = [store.prepare([value], first) for first, value in enumerate(records)]
            begun = time.perf_counter()
            for one in prepared:
                store.write(one)
            elapsed = time.perf_counter() - begun
            payload.check(name, records, store.values())
        return {"rate": len(records) / elapsed}

    return contender


def _rocks(plan: Plan, producers: int) -> Contender:
    """RocksDB written to by a thread for each producer."""

    def contender() -> Figures:
        records = _share(plan, producers)
        with stores.opened(stores.RocksDb, plan.fresh(), durable=True) as store:
            prepared = [store.prepare([value], first) for first, value in enumerate(records)]
            begun = time.perf_counter()
            in_threads(store.write, prepared, producers)
            elapsed = time.perf_counter() - begun
            payload.check("rocksdb", records, store.values())
        return {"rate": len(records) / elapsed}

    return contender
