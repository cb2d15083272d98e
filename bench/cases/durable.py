"""Single durable appends by few and many producers: threads, and coroutines of one event loop."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import forebay
from bench import payload, servers, stores
from bench.plan import Contender, Figures, Plan
from bench.results import Limit, Result, at_least, result

Produce = Callable[[forebay.Topic, Sequence[bytes], int], None]


def run(plan: Plan) -> Iterator[Result]:
    """All figures of the case."""
    contenders = dict(_contenders(plan))
    found = {name: figures.get("rate") for name, figures in plan.compare(contenders).items()}
    alone = found["threads 1"]
    assert alone is not None
    embedded = {name: found[name] for name in stores.EMBEDDED}
    for kind in ("threads", "asyncio"):
        for producers in plan.sizes.producers:
            ours = found[f"{kind} {producers}"]
            assert ours is not None
            peers: dict[str, float | None] = {"1 producer": alone} if (kind, producers) != ("threads", 1) else {}
            peers |= {"redis-benchmark c50": found["redis-benchmark c50"]}
            peers |= {f"nats {producers}": found[f"nats {producers}"]} if producers in _nats_counts(plan) else {}
            peers |= embedded if producers == 1 else {}
            last = kind == "asyncio" and producers == plan.sizes.producers[-1]
            limits: list[Limit] = []
            if last:
                nats = f"nats {producers}"
                limits = [at_least(40, "1 producer"), at_least(2, "redis-benchmark c50"), at_least(20, nats)]
            metric = f"append, fsync, {kind}, {producers} producers"
            yield result("durable", metric, "records/s", ours, peers, limits)


def _nats_counts(plan: Plan) -> tuple[int, ...]:
    return tuple(count for count in plan.sizes.producers if count != 8)


def _contenders(plan: Plan) -> Iterator[tuple[str, Contender | None]]:
    sizes = plan.sizes
    for kind, produce in (("threads", by_threads), ("asyncio", by_coroutines)):
        for producers in sizes.producers:
            yield f"{kind} {producers}", produced(plan, produce, producers)
    for name, store in stores.EMBEDDED.items():
        wanted = plan.peers and stores.available(name)
        yield name, _embedded(plan, name, store) if wanted else None
    has_redis = plan.servers and servers.available("redis") and servers.program("redis-benchmark") is not None
    yield "redis-benchmark c50", _redis(plan) if has_redis else None
    for producers in _nats_counts(plan):
        yield f"nats {producers}", _nats(plan, producers) if plan.servers and servers.available("nats") else None


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

    def one(share: Sequence[bytes]) -> None:
        for value in share:
            topic.append(value)

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


def _redis(plan: Plan) -> Contender:
    def contender() -> Figures:
        with servers.redis_server(plan.fresh(), durable=True) as port:
            return {"rate": servers.redis_benchmark(port, plan.sizes.durable_many, 50, payload.VALUE_BYTES)}

    return contender


def _nats(plan: Plan, producers: int) -> Contender:
    def contender() -> Figures:
        records = _share(plan, producers)[: 3 * plan.sizes.durable_single]
        with servers.opened("nats", plan.fresh(), durable=True) as stream:
            begun = time.perf_counter()
            stream.produce(records, producers)
            elapsed = time.perf_counter() - begun
            payload.check_count("nats", len(records), stream.count())
        return {"rate": len(records) / elapsed}

    return contender
