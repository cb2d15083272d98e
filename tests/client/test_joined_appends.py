"""Records for which several tasks of a client wait share requests, and nothing else: each has its own outcome."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

import forebay
from forebay import aio
from forebay.client import appends as appends_module
from forebay.client.appends import PART_BYTES, Appends, many_records, one_record
from forebay.client.transport import CallAttempts, HttpCall, RefusedCall
from forebay.errors import Closed, Full, Indeterminate, Invalid, TooLarge
from forebay.service.service import AppendRecords, Service
from forebay.testing.simulated.clock import ManualClock
from forebay.wire.messages import AppendedRanges
from tests.support.brokers import running_broker
from tests.support.waiting import PATIENCE

T = TypeVar("T")
TASKS = 256


class GatedBroker:
    """Takes calls as a transport does, holds those that have a gate, and gives out offsets."""

    timeout_s = 60.0

    def __init__(self) -> None:
        self.calls: list[HttpCall] = []
        self.rows: list[int] = []
        self.began = asyncio.Event()
        self.gates: dict[int, asyncio.Event] = {}
        """By the number of the call: it goes on when this is set."""
        self.refuse: Callable[[list[bytes]], Exception | None] = lambda _: None
        self.cancelled = 0
        self.is_closed = False
        self._next: Counter[str] = Counter()

    def check_open(self) -> None:
        if self.is_closed:
            raise Closed("this log is closed")

    def attempts(self, call: HttpCall, timeout_s: float | None = None) -> CallAttempts:
        return CallAttempts(call, "http://x", timeout_s or self.timeout_s, ManualClock())

    def stream(self, call: HttpCall) -> AbstractAsyncContextManager[AsyncIterator[bytes]]:
        raise AssertionError("appends need no stream")

    async def call(self, call: HttpCall, decode: Callable[[bytes], T], attempts: CallAttempts | None = None) -> T:
        number, values = len(self.calls), values_of(call)
        self.calls.append(call)
        self.rows.append(len(values))
        self.began.set()
        try:
            if number in self.gates:
                await self.gates[number].wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        error = self.refuse(values)
        if error is not None:
            if attempts is not None and isinstance(error, Indeterminate):
                with pytest.raises(forebay.ForebayError):
                    attempts.pause_after(RefusedCall(error, 1 << 20))
            raise error
        partition = call.query.get("partition", "0")
        first, self._next[partition] = self._next[partition], self._next[partition] + len(values)
        said = {"partition": int(partition), "first": first, "count": len(values)}
        return decode(msgspec.json.encode({"ranges": [said], "offsets": list(range(first, first + len(values)))}))


def values_of(call: HttpCall) -> list[bytes]:
    if call.media == "application/octet-stream":
        return [call.content]
    if call.media == "application/json":
        return [str(item["value"]).encode() for item in msgspec.json.decode(call.content)["records"]]
    import pyarrow as pa  # noqa: PLC0415

    values: list[bytes] = pa.ipc.open_stream(call.content).read_all().column("value").to_pylist()
    return values


class JoiningClient:
    def __init__(self, partitions: int = 1) -> None:
        self.broker = GatedBroker()
        self.appends = Appends(self.broker, "/v1/topics/a/b", "a/b", ManualClock(), lambda: partitions)

    async def append(self, value: bytes, key: bytes | None = None, partition: int | None = None) -> int:
        records = one_record(value, key, None, None, None, partition, None, None, None)
        return (await self.appends.append(records)).offsets[0]

    def begin(self, *args: Any, **fields: Any) -> asyncio.Task[int]:
        return asyncio.create_task(self.append(*args, **fields))

    def hold(self, number: int) -> asyncio.Event:
        return self.broker.gates.setdefault(number, asyncio.Event())

    async def until_called(self, count: int) -> None:
        while len(self.broker.calls) < count:
            self.broker.began.clear()
            await self.broker.began.wait()


def run(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    return asyncio.run(asyncio.wait_for(work(), PATIENCE))


def test_what_tasks_append_in_one_turn_is_one_request() -> None:
    async def work() -> tuple[list[int], list[int]]:
        rig = JoiningClient()
        for _ in range(3):
            found = await asyncio.gather(*[rig.append(b"%d" % number) for number in range(TASKS)])
        return found, rig.broker.rows

    offsets, rows = run(work)

    assert rows == [TASKS] * 3
    assert offsets == list(range(2 * TASKS, 3 * TASKS)), "each has its own"


def test_what_comes_while_a_request_is_under_way_goes_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(appends_module, "OVERTAKE_S", PATIENCE)

    async def work() -> list[int]:
        rig = JoiningClient()
        gate, tasks = rig.hold(0), [rig.begin(b"0")]
        await rig.until_called(1)
        for number in range(1, 9):
            tasks.append(rig.begin(b"%d" % number))
            await asyncio.sleep(0)
        gate.set()
        assert await asyncio.gather(*tasks) == list(range(9))
        return rig.broker.rows

    assert run(work) == [1, 8]


def test_a_request_without_an_answer_keeps_others_back_for_a_moment_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(appends_module, "OVERTAKE_S", 0.001)

    async def work() -> None:
        rig = JoiningClient()
        gate, first = rig.hold(0), rig.begin(b"0")
        await rig.until_called(1)

        assert [await rig.append(b"1"), await rig.append(b"2")] == [0, 1]

        assert not first.done()
        gate.set()
        assert await first == 2
        assert {call.query["producer"] for call in rig.broker.calls[:2]} == {
            call.query["producer"] for call in rig.broker.calls
        }
        assert len({call.query["producer"] for call in rig.broker.calls}) == 2, "each at a time has a lane of its own"

    run(work)


@pytest.mark.parametrize("by_key", [False, True])
def test_a_partition_that_hangs_keeps_no_other_back(*, by_key: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(appends_module, "OVERTAKE_S", PATIENCE)

    async def work() -> list[int]:
        rig = JoiningClient(partitions=2)
        gate = rig.hold(0)
        places: list[dict[str, Any]] = [{"key": b"k%d" % n} if by_key else {"partition": n % 2} for n in range(8)]
        stuck = [rig.begin(b"x", **places[0])]
        await rig.until_called(1)
        rest = [rig.begin(b"x", **place) for place in places[1:]]
        await rig.until_called(2)
        done, _ = await asyncio.wait(rest, return_when=asyncio.FIRST_COMPLETED)
        assert done and not stuck[0].done()
        gate.set()
        await asyncio.gather(*stuck, *rest)
        return rig.broker.rows

    rows = run(work)

    assert len(rows) == 3 and sum(rows) == 8


def test_a_task_that_is_cancelled_changes_nothing_for_those_that_it_shares_a_request_with() -> None:
    async def work() -> GatedBroker:
        rig = JoiningClient()
        gate, tasks = rig.hold(0), [rig.begin(b"%d" % number) for number in range(3)]
        await rig.until_called(1)
        tasks[1].cancel()
        await asyncio.wait([tasks[1]])
        gate.set()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [int, asyncio.CancelledError, int]
        assert list(outcomes[::2]) == [0, 2]
        return rig.broker

    broker = run(work)

    assert broker.rows == [3] and broker.cancelled == 0


def test_a_record_whose_task_has_gone_before_it_was_sent_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(appends_module, "OVERTAKE_S", PATIENCE)

    async def work() -> list[int]:
        rig = JoiningClient()
        gate, first = rig.hold(0), rig.begin(b"0")
        await rig.until_called(1)
        second, third = rig.begin(b"1"), rig.begin(b"2")
        await asyncio.sleep(0)
        second.cancel()
        gate.set()
        assert [await first, await third] == [0, 1]
        return rig.broker.rows

    assert run(work) == [1, 1]


def test_a_request_for_which_no_task_waits_any_more_is_ended() -> None:
    async def work() -> int:
        rig = JoiningClient()
        rig.hold(0)
        tasks = [rig.begin(b"x") for _ in range(2)]
        await rig.until_called(1)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert await rig.append(b"next") == 0
        return rig.broker.cancelled

    assert run(work) == 1


@pytest.mark.parametrize("error", [Invalid("bad"), TooLarge("bad")])
def test_a_record_that_is_refused_fails_alone(error: Exception) -> None:
    async def work() -> list[int | BaseException]:
        rig = JoiningClient()
        rig.broker.refuse = lambda values: error if b"bad" in values else None
        values = [b"bad" if number == 5 else b"%d" % number for number in range(40)]
        return await asyncio.gather(*map(rig.append, values), return_exceptions=True)

    outcomes = run(work)

    assert [number for number, outcome in enumerate(outcomes) if not isinstance(outcome, int)] == [5]
    assert sorted(outcome for outcome in outcomes if isinstance(outcome, int)) == list(range(39))


def test_a_doubt_is_of_all_records_of_the_request_and_of_no_later_one() -> None:
    async def work() -> None:
        rig = JoiningClient()
        rig.broker.refuse = lambda values: Indeterminate("lost") if b"0" in values else None
        outcomes = await asyncio.gather(*[rig.append(b"%d" % n) for n in range(4)], return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [Indeterminate] * 4
        assert await rig.append(b"later") == 0
        first, second = rig.broker.calls
        assert first.query["producer"] != second.query["producer"], "its sequence may be the broker's already"

    run(work)


def test_one_request_brings_no_more_than_a_part() -> None:
    async def work() -> list[int]:
        rig = JoiningClient()
        value = bytes(PART_BYTES // 3)
        found = await asyncio.gather(*[rig.append(value) for _ in range(5)])
        assert sorted(found) == list(range(5))
        assert all(len(call.content) <= PART_BYTES + 4096 for call in rig.broker.calls)
        return rig.broker.rows

    assert run(work) == [2, 2, 1]


def test_batches_and_appends_with_a_sequence_of_the_caller_share_no_request() -> None:
    async def work() -> list[int]:
        rig = JoiningClient()
        batch = many_records(
            [b"x"], keys=None, tags=None, headers=None, timestamps=None, partition=None, producer=None, sequence=None,
            previous=None,
        )  # fmt: skip
        own = [one_record(b"x", None, None, None, None, 0, 7, number, None) for number in range(2)]
        await asyncio.gather(rig.append(b"x"), *map(rig.appends.append, [batch, batch, *own]), rig.append(b"x"))
        return sorted(rig.broker.rows)

    assert run(work) == [1, 1, 1, 1, 2]


def test_what_was_queued_before_comes_before_it() -> None:
    async def work() -> list[int]:
        rig = JoiningClient()
        gate = rig.hold(0)
        queued = rig.appends.nowait(one_record(b"first", None, None, None, None, None, None, None, None))
        later = [rig.begin(b"later") for _ in range(2)]
        await rig.until_called(1)
        gate.set()
        assert (await queued).offsets[0] < min(await asyncio.gather(*later))
        return rig.broker.rows

    assert run(work) in ([1, 2], [3])


def test_an_append_under_which_the_log_is_closed_may_be_there() -> None:
    async def work() -> None:
        rig = JoiningClient()
        rig.hold(0)
        task = rig.begin(b"x")
        await rig.until_called(1)
        rig.broker.is_closed = True
        task.cancel()
        with pytest.raises(Indeterminate, match="closed"):
            await task

    run(work)


def test_one_refused_partition_fails_the_records_for_it_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a broker, by tasks and by threads: requests are few, and every caller has its own offset or error."""
    calls: list[int] = []
    append = Service.append

    async def counted(service: Service, who: Any, name: Any, records: AppendRecords) -> Any:
        calls.append(1)
        if records.partition == 1:
            raise Full("no room")
        return await append(service, who, name, records)

    monkeypatch.setattr(Service, "append", counted)
    with running_broker(tmp_path / "data") as broker:
        with forebay.connect(broker.url) as log:
            log.create_topic("a/t", partitions=2)

        async def by_tasks() -> list[int | BaseException]:
            async with aio.connect(broker.url) as log:
                topic = await log.topic("a/t")
                some = [topic.append(b"%d" % number, partition=number % 2) for number in range(60)]
                return await asyncio.gather(*some, return_exceptions=True)

        outcomes = run(by_tasks)
        assert [isinstance(outcome, Full) for outcome in outcomes] == [False, True] * 30
        assert sorted(one for one in outcomes if isinstance(one, int)) == list(range(30))
        of_tasks, calls[:] = len(calls), []
        assert of_tasks <= 4

        with forebay.connect(broker.url) as log, ThreadPoolExecutor(40) as threads:
            topic, together = log.topic("a/t"), threading.Barrier(40)

            def one(number: int) -> list[int]:
                together.wait(PATIENCE)
                return [topic.append(b"t%d-%d" % (number, turn), partition=0) for turn in range(5)]

            offsets = [offset for found in threads.map(one, range(40)) for offset in found]
        assert sorted(offsets) == list(range(30, 230))
        assert len(calls) < 200, "threads share requests, too"


def test_the_fake_answer_is_what_a_broker_sends() -> None:
    assert msgspec.json.decode(b'{"ranges":[{"partition":0,"first":1,"count":2}]}', type=AppendedRanges).ranges
