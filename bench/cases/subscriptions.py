"""A subscription over HTTP beside a consumer group of Redis: consumers take records and acknowledge them.

Each consumer has a connection. One request acknowledges what it took before and takes the next 100: a pull of the
broker, and at Redis `XACK` and `XREADGROUP` in one pipeline. The client finds in each answer what it has to
acknowledge, and decodes nothing else while it is timed. The usual Python clients of Redis and NATS stand beside it.
Every record must reach one consumer, once. Mode `shared`: the peers keep no order by key.

In process: what it costs to store a cursor while one record is not acknowledged, and more and more behind it are.
"""

# ruff: noqa: PLC0415 - what is not installed is left out

from __future__ import annotations

import asyncio
import itertools
import statistics
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import msgspec
import uvloop

import forebay
from bench import payload, raw, servers, stores, web
from bench.cases.http import METRICS, texts
from bench.load import Load, Server, Watch
from bench.plan import Contender, Figures, Plan
from bench.results import Result, at_most, result

TAKEN = 100
"""Records that a consumer takes at once."""
CAREFUL_SECONDS = 2.0
"""So long after its start a subscription stores each delivery before it is made; figures are taken after it."""
PATIENCE = 120.0
STORED_TAKEN = 10_000
CURSOR_MS = 50
"""What a cursor may take, however many are acknowledged behind it: each is looked at, none by the interpreter."""
USUAL_PARTS = {"redis": 4, "nats": 20}
"""Of the records, the usual client of a peer gets one part in so many."""

Turn = Callable[[list[Any]], Awaitable[list[Any]]]
"""Acknowledges what was taken and takes more; what that was."""


def run(plan: Plan) -> Iterator[Result]:
    """All figures of the case."""
    contenders: dict[str, Contender | None] = {"forebay": _ours(plan)}
    for name, make in (("redis", _redis), ("redis-py", _redis_py), ("nats-py", _nats_py)):
        is_there = plan.servers and servers.available(name.removesuffix("-py"))
        contenders[name] = make(plan) if is_there else None
    found = plan.compare(contenders)
    for consumers, (metric, said, unit) in itertools.product(plan.sizes.consumers, METRICS):
        figure = f"{consumers} {metric}"
        peers = {name: figures.get(figure) for name, figures in found.items() if name != "forebay"}
        what = "taken and acknowledged" if metric == "rate" else said
        name = f"{what}, shared, {consumers} consumers, batches of {TAKEN}"
        yield result("subscriptions", name, unit, found["forebay"][figure], peers)
    yield from _cursors(plan)


def _cursors(plan: Plan) -> Iterator[Result]:
    counts = plan.sizes.acked
    found = plan.compare({str(count): _cursor_stored(plan, count) for count in counts})
    for count, metric in itertools.product(counts, ("clock", "processor time")):
        fewest = {} if count == counts[0] else {f"{counts[0]:,} acknowledged": found[str(counts[0])][metric]}
        name = f"store a cursor with {count:,} acknowledged behind it, {metric}"
        yield result("subscriptions", name, "ms", found[str(count)][metric], fewest, [at_most(CURSOR_MS)])


def _cursor_stored(plan: Plan, count: int) -> Contender:
    """The first record is never acknowledged; one more behind it is before each time that the cursor is stored."""
    times = plan.sizes.cursor_times

    def contender() -> Figures:
        with stores.opened_ours(plan.fresh(), "disk") as topic:
            total = count + times + 1
            for values in payload.batches(payload.values(total)):
                topic.append_many(values)
            options: Any = {"mode": "shared", "window_records_max": total}
            subscription = topic.subscribe("cursor", start=forebay.EARLIEST, **options)
            with subscription.consumer(unacked_max=STORED_TAKEN) as consumer:
                [_, *rest] = consumer.take(2, wait_s=PATIENCE)
                done = consumer.ack(*rest)
                while done < count:
                    done += consumer.ack(*consumer.take(min(STORED_TAKEN - 1, count - done), wait_s=PATIENCE))
                figures = _stores_timed(subscription, consumer, times)
            [lag] = subscription.lag()
            payload.check_count("records that are not done", 1, lag.end - lag.cursor - lag.done_above)
        return figures

    return contender


def _stores_timed(subscription: forebay.Subscription, consumer: forebay.Consumer, times: int) -> Figures:
    clocks, cpus = [], []
    for _ in range(times):
        consumer.ack(*consumer.take(1, wait_s=PATIENCE))
        clock, cpu = time.perf_counter(), time.process_time()
        subscription.flush()
        clocks.append(time.perf_counter() - clock)
        cpus.append(time.process_time() - cpu)
    return {"clock": statistics.median(clocks) * 1e3, "processor time": statistics.median(cpus) * 1e3}


async def _raced(server: Server, turns: Sequence[Turn], count: int, held: Sequence[Any] = ()) -> tuple[Load, list[Any]]:
    """Consumers take and acknowledge until all records are done; the first of them holds some already."""
    taken = [list(held)]
    done, watch = 0, Watch(server)

    async def consume(turn: Turn, mine: list[Any]) -> None:
        nonlocal done
        while True:
            done += len(mine)
            mine = await turn(mine)
            if mine:
                taken.append(mine)
            elif done >= count:
                return
            else:
                await asyncio.sleep(0)

    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(*[consume(turn, [] if number else list(held)) for number, turn in enumerate(turns)])
    return watch.read(count), list(itertools.chain.from_iterable(taken))


def _check(name: str, count: int, taken: Sequence[Any]) -> None:
    payload.check_count(f"what consumers of {name} took", count, len(taken))
    payload.check_count(f"what consumers of {name} took once", count, len(set(taken)))


# Ours


class _Place(msgspec.Struct):
    offset: int


class _Taken(msgspec.Struct):
    record: _Place


class _Answer(msgspec.Struct):
    records: list[_Taken]


_ANSWERS = msgspec.json.Decoder(_Answer)


def _ours(plan: Plan) -> Contender:
    count = plan.sizes.subscribed

    async def consume(server: Server) -> Figures:
        figures: Figures = {}
        for consumers in plan.sizes.consumers:
            async with web.connected(server.port, consumers) as connections:
                await web.until_ready(connections[0])
                turns = [await _turn(one, consumers, number) for number, one in enumerate(connections)]
                held = await turns[0]([])
                await asyncio.sleep(CAREFUL_SECONDS)
                took, taken = await _raced(server, turns, count, held)
                _check("forebay", count, taken)
                figures |= took.figures(str(consumers))
        return figures

    def contender() -> Figures:
        path = plan.fresh()
        with forebay.open(path) as log:
            topic = log.create_topic("bench/t", durability="disk")
            for batch in payload.batches(texts(count)):
                topic.append_many(batch)
        with web.served("broker", path) as server:
            return uvloop.run(consume(server))

    return contender


async def _turn(connection: web.Connection, consumers: int, number: int) -> Turn:
    """Attach a consumer; how it acknowledges and takes."""
    path = f"/v1/topics/bench/t/subscriptions/workers-{consumers}"
    options = {"start": "earliest", "mode": "shared", "window_records_max": 100_000}
    await connection.body(web.request_bytes("PUT", path, msgspec.json.encode(options)))
    path = f"{path}/consumers/c{number}"
    await connection.body(web.request_bytes("PUT", path, b'{"unacked_max": %d}' % TAKEN))
    head = f"POST {path}/pull HTTP/1.1\r\nhost: {web.HOST}\r\ncontent-length: ".encode()

    async def turn(done: list[Any]) -> list[Any]:
        offsets = ",".join(map(str, done)).encode()
        body = b'{"ack":{"0":[%s]},"max":%d}' % (offsets, TAKEN)
        answer = await connection.body(head + b"%d\r\n\r\n%s" % (len(body), body))
        return [one.record.offset for one in _ANSWERS.decode(answer).records]

    return turn


# Peers


def _redis(plan: Plan) -> Contender:
    count = plan.sizes.subscribed

    async def consume(server: Server) -> Figures:
        figures: Figures = {}
        async with raw.connected(raw.Redis, server, max(plan.sizes.consumers)) as connections:
            for batch in payload.batches(texts(count)):
                await connections[0].ask(*raw.Redis.append(batch, "t", 0))
            for consumers in plan.sizes.consumers:
                group = f"workers-{consumers}"
                await connections[0].ask(raw.command("XGROUP", "CREATE", "t", group, "0"), 1)
                turns = [redis_turn(one, group, f"c{number}") for number, one in enumerate(connections[:consumers])]
                took, taken = await _raced(server, turns, count)
                _check("redis", count, taken)
                figures |= took.figures(str(consumers))
        return figures

    def contender() -> Figures:
        with servers.redis_server(plan.fresh(), durable=False) as server:
            return uvloop.run(consume(server))

    return contender


def redis_turn(connection: raw.LineConnection, group: str, name: str) -> Turn:
    """How a consumer of a group acknowledges and takes; the ids that it took."""
    take = raw.command("XREADGROUP", "GROUP", group, name, "COUNT", TAKEN, "STREAMS", "t", ">")
    nothing_done = b":0\r\n"

    async def turn(done: list[Any]) -> list[Any]:
        acks = raw.command("XACK", "t", group, *done) if done else b""
        answer = await connection.ask(acks + take, lambda head: _group_lines(head if done else nothing_done + head))
        if not done:
            answer = nothing_done + answer
        # The count of what was acknowledged, five lines of the stream, then entries whose third line is the id.
        return answer.split(b"\r\n")[_GROUP_HEAD + 2 :: raw.ENTRY_LINES]

    return turn


_GROUP_HEAD = 6


def _group_lines(head: bytes) -> int | None:
    """Lines of an answer to `XACK` and `XREADGROUP`; without the first where nothing was acknowledged."""
    lines = head.split(b"\r\n", _GROUP_HEAD)
    missing = 1 if lines[0] == b":0" else 0
    if len(lines) > 2 and lines[1] == b"*-1":
        return 2 - missing
    if len(lines) <= _GROUP_HEAD:
        return None
    return _GROUP_HEAD + raw.ENTRY_LINES * int(lines[_GROUP_HEAD - 1][1:]) - missing


def _redis_py(plan: Plan) -> Contender:
    """The usual client: a thread and a connection for each consumer."""
    count = plan.sizes.subscribed // USUAL_PARTS["redis"]

    def contender() -> Figures:
        import redis

        figures: Figures = {}
        with servers.redis_server(plan.fresh(), durable=False) as server:
            stream = servers.RedisStream(server.port)
            for values in payload.batches(texts(count)):
                stream.write(values)
            client: Any = redis.Redis(host=servers.HOST, port=server.port)
            for consumers in plan.sizes.consumers:
                group = f"workers-{consumers}"
                client.xgroup_create("usual", group, id="0")
                figures |= _threads(server, consumers, count, group)
            client.close()
            stream.close()
        return figures

    return contender


def _threads(server: Server, consumers: int, count: int, group: str) -> Figures:
    import redis

    taken: list[list[bytes]] = []

    def consume(name: str) -> None:
        own: Any = redis.Redis(host=servers.HOST, port=server.port)
        while answer := own.xreadgroup(group, name, {"usual": ">"}, count=TAKEN):
            entries = [entry for entry, _ in answer[0][1]]
            own.xack("usual", group, *entries)
            taken.append(entries)
        own.close()

    threads = [threading.Thread(target=consume, args=[f"c{number}"]) for number in range(consumers)]
    watch = Watch(server)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = watch.read(count)
    _check("redis-py", count, list(itertools.chain.from_iterable(taken)))
    return took.figures(str(consumers))


def _nats_py(plan: Plan) -> Contender:
    """The usual client: a durable pull consumer, fetched by tasks of one loop."""
    count = plan.sizes.subscribed // USUAL_PARTS["nats"]

    def contender() -> Figures:
        with servers.nats_server(plan.fresh(), durable=False) as server:
            return asyncio.run(_nats_figures(plan, server, count))

    return contender


async def _nats_figures(plan: Plan, server: Server, count: int) -> Figures:
    import nats

    figures: Figures = {}
    client = await nats.connect(f"nats://{servers.HOST}:{server.port}")
    stream = client.jetstream()
    await stream.add_stream(name="t", subjects=["t"])
    for values in payload.batches(texts(count)):
        await asyncio.gather(*[stream.publish("t", value) for value in values])
    for consumers in plan.sizes.consumers:
        pulls = [await stream.pull_subscribe("t", durable=f"workers-{consumers}") for _ in range(consumers)]
        took, taken = await _raced(server, [_nats_turn(one) for one in pulls], count)
        _check("nats-py", count, [message.metadata.sequence.stream for message in taken])
        figures |= took.figures(str(consumers))
    await client.close()
    return figures


def _nats_turn(subscription: Any) -> Turn:
    async def turn(done: list[Any]) -> list[Any]:
        for message in done:
            await message.ack()
        try:
            found: list[Any] = await subscription.fetch(TAKEN, timeout=0.2)
        except TimeoutError:
            return []
        return found

    return turn
