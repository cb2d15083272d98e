"""How a client is made: addresses, tokens, certificates; and what it shows of them."""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import aio
from tests.support.brokers import running_broker
from tests.support.proxies import cutting_proxy

SECRET = "fbt_not-for-your-eyes"
NO_BROKER = "http://127.0.0.1:9"


@pytest.mark.parametrize("url", ["", "127.0.0.1:80", "ftp://host", "http://", "http://h/?q=1", "http://user:pw@host"])
def test_an_address_that_is_none_is_refused_without_a_password_in_the_message(url: str) -> None:
    with pytest.raises(forebay.Invalid) as refused:
        forebay.connect(url)

    assert "pw" not in str(refused.value)


@pytest.mark.parametrize("token", ["", "line\nbreak", "sp ace", "ümlaut"])
def test_a_token_that_no_header_carries_is_refused_and_not_shown(token: str) -> None:
    with pytest.raises(forebay.Invalid) as refused:
        forebay.connect(NO_BROKER, token=token)

    assert not token or token not in str(refused.value)


def test_a_token_is_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(forebay.Invalid, match="SHOP_TOKEN"):
        forebay.connect(NO_BROKER, token="${SHOP_TOKEN}")
    monkeypatch.setenv("SHOP_TOKEN", SECRET)

    forebay.connect(NO_BROKER, token="${SHOP_TOKEN}").close()


def test_a_token_is_shown_nowhere() -> None:
    with forebay.connect(NO_BROKER, token=SECRET, timeout_s=0.01) as log:
        with pytest.raises(forebay.Unavailable) as refused:
            log.topics()
        with pytest.raises(TypeError) as unpicklable:
            pickle.dumps(log)
        with pytest.raises(TypeError):
            pickle.dumps(aio.connect(NO_BROKER, token=SECRET))

        seen = [repr(log), str(log), repr(vars(log)), str(unpicklable.value), *map(repr, _chain(refused.value))]
        assert not [text for text in seen if SECRET in text]


def _chain(error: BaseException | None) -> list[BaseException]:
    return [] if error is None else [error, *_chain(error.__cause__ or error.__context__)]


def test_certificates_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(forebay.Invalid, match="cannot be read"):
        forebay.connect("https://127.0.0.1", verify=tmp_path / "none.pem")


def test_a_broker_that_is_not_there_is_unavailable_when_the_time_is_up() -> None:
    with forebay.connect(NO_BROKER, timeout_s=0.05) as log:
        with pytest.raises(forebay.Unavailable, match="tried"):
            log.topics()
        with pytest.raises(forebay.Unavailable, match="cannot be reached"):
            log.create_topic("shop/orders")


def test_a_client_goes_on_with_the_broker_that_follows(tmp_path: Path) -> None:
    with cutting_proxy(NO_BROKER) as proxy, forebay.connect(proxy.url) as log:
        with running_broker(tmp_path) as first:
            proxy.target = first.url
            topic = log.create_topic("shop/orders", durability="fsync")
            following = topic.follow(timeout=60)
            assert topic.append(b"a") == 0
            assert next(following).value == b"a"
        ack = topic.append_nowait(b"b")
        with running_broker(tmp_path) as second, following:
            proxy.target = second.url

            assert ack.result(60) == 1
            assert topic.append(b"c") == 2
            assert [next(following).value for _ in range(2)] == [b"b", b"c"]
            assert [record.value for record in topic.read()] == [b"a", b"b", b"c"]


@pytest.mark.slow
def test_threads_append_at_the_same_time_and_each_record_is_there_once(tmp_path: Path) -> None:
    with running_broker(tmp_path) as broker, forebay.connect(broker.url) as log:
        topic = log.create_topic("shop/orders", partitions=3)

        def append(thread: int) -> None:
            for number in range(20):
                topic.append(b"%d-%d" % (thread, number), key=b"%d" % thread if number % 2 else None)

        _in_threads([lambda thread=thread: append(thread) for thread in range(5)])  # type: ignore[misc]

        values = [record.value for record in topic.read()]
        assert sorted(filter(None, values)) == sorted(b"%d-%d" % (t, n) for t in range(5) for n in range(20))
        assert {record.partition for record in topic.read() if record.key is None} == {0, 1, 2}


def _in_threads(calls: list[Callable[[], None]]) -> None:
    failed: list[BaseException] = []

    def run(call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - handed to the test
            failed.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def test_an_append_that_may_be_split_is_sent_in_parts(tmp_path: Path) -> None:
    with running_broker(tmp_path) as broker, forebay.connect(broker.url) as log:
        topic = log.create_topic("shop/large")
        values = [b"%06d" % number + bytes(3_000) for number in range(4_000)]

        assert list(topic.append_many(values, atomic=False)) == list(range(4_000))
        with pytest.raises(forebay.Invalid, match="send less"):
            topic.append_many(values, atomic=False, producer=7, sequence=0)

        assert [record.value for record in topic.read()] == values


def test_a_task_that_is_cancelled_leaves_the_log_usable(tmp_path: Path) -> None:
    async def use(url: str) -> list[bytes | None]:
        async with aio.connect(url) as log:
            topic = await log.create_topic("shop/orders")
            following = asyncio.ensure_future(anext(aiter(topic.follow())))
            await asyncio.sleep(0)
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await topic.append(b"a")
            return [record.value async for record in topic.read()]

    with running_broker(tmp_path) as broker:
        assert asyncio.run(use(broker.url)) == [b"a"]


def test_a_log_is_closed_in_order_although_a_stream_of_it_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running_broker(tmp_path) as broker:
        with forebay.connect(broker.url) as log:
            topic = log.create_topic("shop/orders")
            following = topic.follow(timeout=0.01)
            assert list(following) == []
        with pytest.raises(forebay.Closed):
            next(following)
        following.close()

    assert not [record for record in caplog.records if record.name == "asyncio"]
    assert "forebay-client" not in {thread.name for thread in threading.enumerate()}


def test_a_forked_child_is_refused_and_leaves_the_parent_s_connections_alone(tmp_path: Path) -> None:
    with running_broker(tmp_path) as broker, forebay.connect(broker.url) as log:
        topic = log.create_topic("shop/orders")
        following, producer = topic.follow(), topic.producer()
        waiting = topic.append_nowait(b"a")
        assert waiting.result(60) == 0
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            # Whatever happens here, pytest must not go on in the child.
            try:
                os.write(writing, "\n".join(_refusals(log, topic, following, producer)).encode())
            finally:
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as said:
            found = said.read().splitlines()
        os.waitpid(child, 0)

        assert len(found) == 4
        assert all("opened before a fork: open it in the child" in line for line in found)
        assert topic.append(b"b") == 1
        assert [next(following).value for _ in range(2)] == [b"a", b"b"]
        producer.close()


def _refusals(log: Any, topic: Any, following: Any, producer: Any) -> list[str]:
    """What a forked child is told by each handle; to close them is harmless there."""
    found = []
    calls: list[Callable[[], object]] = [
        lambda: topic.append(b"child"),
        lambda: next(following),
        lambda: producer.append_nowait(b"child"),
        log.topics,
    ]
    for call in calls:
        try:
            call()
        except forebay.Closed as error:
            found.append(str(error))
    following.close()
    producer.close()
    log.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("what", ["append", "flush", "follow", "close"])
def test_an_interrupt_ends_the_call_and_loses_nothing_that_was_acknowledged(tmp_path: Path, what: str) -> None:
    with running_broker(tmp_path) as broker, cutting_proxy(broker.url) as proxy:
        log = forebay.connect(proxy.url)
        topic = log.create_topic("shop/orders", durability="fsync")
        assert topic.append(b"kept") == 0
        following = topic.follow()
        producer = topic.producer(linger_ms=0)
        # From here on no answer comes.
        proxy.cut_every_answer(0 if what != "follow" else None)
        if what in ("flush", "close"):
            producer.append_nowait(b"queued")
        calls: dict[str, Callable[[], object]] = {
            "append": lambda: topic.append(b"in doubt"),
            "flush": producer.flush,
            "follow": lambda: next(following),
            "close": log.close,
        }
        timer = threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            calls[what]()
        timer.join()
        proxy.cut_every_answer(None)
        if what != "close":
            # The log is of use still.
            assert topic.append(b"after") >= 1
        log.close()
        assert "forebay-client" not in {thread.name for thread in threading.enumerate()}
    with forebay.open(tmp_path) as kept:
        values = [record.value for record in kept.topic("shop/orders").read()]
        assert values[0] == b"kept"
        assert values.count(b"in doubt") <= 1
        assert values.count(b"queued") <= 1
