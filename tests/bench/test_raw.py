"""The lean drivers of peers, against answers as Redis and NATS send them: no server is needed."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from bench import load, payload, raw
from bench.cases import subscriptions
from bench.load import Server

PATIENCE = 20.0
ENTRIES = [(b"1700000000000-0", b"first"), (b"1700000000000-12", b"second")]


def entries(found: Sequence[tuple[bytes, bytes]]) -> bytes:
    parts = [
        b"*2\r\n$%d\r\n%s\r\n*2\r\n$1\r\nv\r\n$%d\r\n%s\r\n" % (len(entry), entry, len(value), value)
        for entry, value in found
    ]
    return b"*%d\r\n" % len(found) + b"".join(parts)


class Wire(asyncio.Transport):
    """Notes what is written, and answers it in pieces of a few bytes."""

    def __init__(self, connection: raw.LineConnection, answers: Sequence[bytes], piece: int) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self._connection = connection
        self._answers = iter(answers)
        self._piece = piece

    def write(self, data: Any) -> None:
        self.written.append(data)
        if data == b"PONG\r\n":
            return
        answer = next(self._answers)
        for first in range(0, len(answer), self._piece):
            asyncio.get_running_loop().call_soon(self._connection.data_received, answer[first : first + self._piece])


async def asked(
    kind: type[raw.LineConnection], answers: Sequence[bytes], use: Callable[[Any], Awaitable[Any]], piece: int = 7
) -> tuple[Any, list[bytes]]:
    connection = kind()
    wire = Wire(connection, answers, piece)
    connection.connection_made(wire)
    async with asyncio.timeout(PATIENCE):
        return await use(connection), wire.written


@pytest.mark.parametrize("piece", [1, 3, 1000])
def test_an_answer_is_whole_when_it_has_its_lines_however_it_comes(piece: int) -> None:
    replies = b"$3\r\n1-0\r\n$3\r\n1-1\r\n"

    async def use(connection: raw.LineConnection) -> bytes:
        return await connection.ask(*raw.Redis.append([b"a", b"b"], "t", 0))

    answer, written = asyncio.run(asked(raw.LineConnection, [replies], use, piece))

    assert answer == replies
    assert written == [raw.command("XADD", "t", "*", "v", b"a") + raw.command("XADD", "t", "*", "v", b"b")]


@pytest.mark.parametrize("piece", [1, 10, 1000])
def test_pages_of_redis_follow_the_last_entry_and_hold_the_values(piece: int) -> None:
    async def use(connection: raw.LineConnection) -> list[bytes]:
        return await raw.Redis.pages(connection, "t", 3, 2)

    answers = [entries(ENTRIES), entries([(b"1700000000001-0", b"third")])]
    pages, written = asyncio.run(asked(raw.LineConnection, answers, use, piece))

    assert [raw.Redis.values(page) for page in pages] == [[b"first", b"second"], [b"third"]]
    assert written[1] == raw.command("XRANGE", "t", b"(1700000000000-12", "+", "COUNT", 2)


def test_a_consumer_of_a_group_acknowledges_what_it_took_and_sees_the_end() -> None:
    read = b"*1\r\n*2\r\n$1\r\nt\r\n" + entries(ENTRIES)

    async def use(connection: raw.LineConnection) -> list[list[bytes]]:
        turn = subscriptions.redis_turn(connection, "g", "c")
        first = await turn([])
        return [first, await turn(first), await turn([])]

    found, written = asyncio.run(asked(raw.LineConnection, [read, b":2\r\n*-1\r\n", b"*-1\r\n"], use))

    assert found == [[entry for entry, _ in ENTRIES], [], []]
    assert written[1].startswith(raw.command("XACK", "t", "g", *[entry for entry, _ in ENTRIES]))
    assert not written[2].startswith(raw.command("XACK", "t", "g")[:10])


def test_a_connection_of_nats_answers_pings_and_leaves_them_out() -> None:
    ack = b'MSG inbox.0 1 24\r\n{"stream":"t", "seq": 1}\r\n'

    async def use(connection: raw.LineConnection) -> bytes:
        return await connection.ask(*raw.Nats.append([b"a"], "t", 0))

    answer, written = asyncio.run(asked(raw.NatsConnection, [raw.PING + ack], use, 1000))

    assert answer == ack
    assert written == [b"PUB t inbox.0 1\r\na\r\n", b"PONG\r\n"]
    assert raw.Nats.values(b"MSG t 1 inbox.0 1\r\na\r\nMSG t 1 inbox.0 1\r\nb\r\n") == [b"a", b"b"]


def test_a_load_counts_what_was_answered_and_refuses_other_answers() -> None:
    server = Server(0, os.getpid())

    async def ask() -> bytes:
        return b"+OK"

    took = asyncio.run(load.load(server, [ask, ask], b"+", 0.0))

    assert took.done == 2
    with pytest.raises(payload.Wrong):
        asyncio.run(load.load(server, [ask], b"$", 0.0))


def test_rates_and_processor_time_are_given_for_each_record() -> None:
    took = load.Load(done=10, seconds=2.0, server_cpu=0.01, client_cpu=0.02)

    assert took.figures("x", each=100) == {"x rate": 500.0, "x server": 10.0, "x client": 20.0}


def test_the_clock_of_a_process_is_its_processor_time() -> None:
    before = time.process_time()
    seen = load.cpu_of(os.getpid())
    after = time.process_time()

    assert before <= seen <= after
