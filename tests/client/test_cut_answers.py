"""Connections are cut at every byte: the client adds no record twice, loses none, and reads each once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Final

import pytest

import forebay
from forebay.client import RemoteLog, RemoteTopic
from forebay.client.blocking import RemoteAck
from tests.support.brokers import running_broker
from tests.support.proxies import CuttingProxy, cutting_proxy
from tests.support.soak import SOAK

BYTES = 700
"""More than an append or its answer has, with all headers."""
STEP: Final = 1 if SOAK else 47
"""From one place of a cut to the next."""


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CuttingProxy]:
    with (
        running_broker(tmp_path_factory.mktemp("cut") / "data") as broker,
        cutting_proxy(broker.url) as proxy,
    ):
        yield proxy


@pytest.fixture
def log(proxy: CuttingProxy) -> Iterator[RemoteLog]:
    with forebay.connect(proxy.url) as log:
        yield log


def appended(topic: RemoteTopic, cut: Callable[[int], None], step: int) -> tuple[list[bytes], list[int]]:
    """What was appended while connections were cut, and the offsets that the client was given."""
    values, offsets = [], []
    for place in range(0, BYTES, step):
        cut(place)
        value = b"%d" % place
        if place % (2 * step):
            offsets.append(topic.append(value, key=b"k"))
            values.append(value)
        else:
            batch = [value + b"-%d" % row for row in range(3)]
            offsets += topic.append_many(batch, keys=[b"%d" % row for row in range(3)])
            values += batch
    return values, offsets


@pytest.mark.slow
@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("where", ["answer", "request"])
def test_what_is_appended_over_cut_connections_is_there_once(
    log: RemoteLog, proxy: CuttingProxy, where: str, partitions: int
) -> None:
    check_cuts(log, proxy, where, partitions, step=47)


@pytest.mark.slow
@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("where", ["answer", "request"])
def test_what_is_appended_over_connections_that_are_cut_anywhere_is_there_once(
    log: RemoteLog, proxy: CuttingProxy, where: str, partitions: int
) -> None:
    check_cuts(log, proxy, where, partitions, step=1 if SOAK else 3)


def check_cuts(log: RemoteLog, proxy: CuttingProxy, where: str, partitions: int, *, step: int) -> None:
    topic = log.create_topic(f"cut/{where}-{partitions}-{step}", partitions=partitions)
    before = proxy.cuts

    values, offsets = appended(topic, proxy.cut_answer if where == "answer" else proxy.cut_request, step)
    (proxy.cut_answer if where == "answer" else proxy.cut_request)(1 << 40)

    records = list(topic.read())
    assert proxy.cuts - before > BYTES // step // 4
    assert Counter(record.value for record in records) == Counter(values)
    assert sorted(record.offset for record in records) == sorted(offsets)
    by_value = {record.value: record.offset for record in records}
    assert [by_value[value] for value in values] == offsets
    for partition in range(partitions):
        singles = [int(r.value or b"") for r in records if r.partition == partition and b"-" not in (r.value or b"")]
        assert singles == sorted(singles)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["answer", "request"])
def test_batches_of_a_producer_over_cut_connections_are_there_once_and_in_order(
    log: RemoteLog, proxy: CuttingProxy, where: str
) -> None:
    topic = log.create_topic(f"cut/batches-{where}", partitions=3)
    cut, before = (proxy.cut_answer if where == "answer" else proxy.cut_request), proxy.cuts
    sent: list[tuple[bytes, RemoteAck]] = []
    with topic.producer(linger_ms=0) as producer:
        for place in range(0, BYTES, STEP):
            cut(place)
            for row in range(6):
                value = b"%d-%d" % (place, row)
                sent.append((value, producer.append_nowait(value, key=b"%d" % row)))
            producer.flush()
    cut(1 << 40)

    assert proxy.cuts - before > BYTES // STEP // 4
    records = list(topic.read())
    assert Counter(record.value for record in records) == Counter(value for value, _ in sent)
    offsets = {record.value: record.offset for record in records}
    assert [ack.result(0) for _, ack in sent] == [offsets[value] for value, _ in sent]
    order = {value: number for number, (value, _) in enumerate(sent)}
    for partition in range(3):
        numbers = [order[record.value or b""] for record in records if record.partition == partition]
        assert numbers == sorted(numbers)


@pytest.mark.slow
@pytest.mark.parametrize("where", ["answer", "request"])
def test_commits_over_cut_connections_move_a_group_once(log: RemoteLog, proxy: CuttingProxy, where: str) -> None:
    """Every commit expects the one before it: one that was made twice, or not at all, would be refused."""
    topic = log.create_topic(f"cut/commits-{where}")
    topic.append_many([b"%d" % number for number in range(BYTES + 1)])
    group = log.group(f"cut-{where}")
    cut, before, at = (proxy.cut_answer if where == "answer" else proxy.cut_request), proxy.cuts, 0
    for number, place in enumerate(range(0, BYTES, STEP), 1):
        cut(place)
        assert group.commit(topic.name, number, expected=at, note=f"n{number}") == number
        at = number
    cut(1 << 40)

    assert proxy.cuts - before > BYTES // STEP // 4
    assert group.fetch(topic.name) == at
    assert group.note(topic.name) == f"n{at}"


def test_what_is_queued_over_cut_connections_is_there_once_and_in_order(log: RemoteLog, proxy: CuttingProxy) -> None:
    topic = log.create_topic("cut/queued")
    acks = []
    for place in range(0, BYTES, 29):
        proxy.cut_answer(place)
        acks += [topic.append_nowait(b"%d-%d" % (place, row)) for row in range(3)]

    assert [ack.result(60) for ack in acks] == list(range(len(acks)))
    proxy.cut_answer(1 << 40)
    values = [record.value for record in topic.read()]
    assert values == [b"%d-%d" % (place, row) for place in range(0, BYTES, 29) for row in range(3)]


@pytest.mark.slow
def test_what_is_read_over_cut_connections_comes_once(log: RemoteLog, proxy: CuttingProxy) -> None:
    topic = log.create_topic("cut/read")
    topic.append_many([b"%d" % number for number in range(200)])

    for place in range(0, BYTES, 37):
        proxy.cut_answer(place)
        assert [record.offset for record in topic.read(100)] == list(range(100, 200))


@pytest.mark.slow
def test_a_follower_over_cut_connections_gets_every_record_once(log: RemoteLog, proxy: CuttingProxy) -> None:
    topic = log.create_topic("cut/follow", partitions=2)
    with topic.follow(timeout=60) as following:
        for place in range(0, BYTES, 61):
            topic.append(b"%d" % place)
            proxy.cut_answer(place)
            topic.append(b"%d+" % place)
            assert {next(following).value for _ in range(2)} == {b"%d" % place, b"%d+" % place}


@pytest.mark.slow
def test_a_stream_that_is_cut_goes_on_with_the_next_record(proxy: CuttingProxy, log: RemoteLog) -> None:
    """The follower alone goes through the proxy: every cut is one of its stream, or of the answer that begins it."""
    with forebay.connect(proxy.target) as direct:
        topic = direct.create_topic("cut/stream", partitions=2)
        appended = 0
        with log.topic(topic.name).follow(forebay.EARLIEST, timeout=60) as following:
            for place in range(0, BYTES, STEP):
                before = proxy.cuts
                proxy.cut_answer(place)
                while proxy.cuts == before:
                    topic.append(b"%d" % appended, partition=appended % 2)
                    assert next(following).value == b"%d" % appended
                    appended += 1
            proxy.cut_answer(1 << 40)
            topic.append(b"last")
            assert next(following).value == b"last"


@pytest.mark.slow
def test_an_append_that_never_gets_an_answer_is_in_doubt_and_stored_once(proxy: CuttingProxy, log: RemoteLog) -> None:
    topic = log.create_topic("cut/doubt")
    with forebay.connect(proxy.url, timeout_s=0.4) as hasty:
        other = hasty.topic("cut/doubt")
        proxy.cut_every_answer(10)
        with pytest.raises(forebay.Indeterminate, match="may have been done"):
            other.append(b"once")
        with pytest.raises(forebay.Unavailable):
            other.offsets()
        proxy.cut_every_answer(None)
        assert other.append(b"next") == 1

    assert [record.value for record in topic.read()] == [b"once", b"next"]


def test_calls_that_change_topics_and_groups_come_to_one_over_cut_connections(
    log: RemoteLog, proxy: CuttingProxy
) -> None:
    topic = log.create_topic("cut/calls")
    topic.append_many([b"a", b"b", b"c"])
    group = log.group("cut")
    proxy.cut_answer(0)
    assert group.commit("cut/calls", 2, expected=0) == 2
    proxy.cut_answer(0)
    with pytest.raises(forebay.Indeterminate):
        log.create_topic("cut/made")
    proxy.cut_answer(0)
    log.delete_topic("cut/made")
    with pytest.raises(forebay.UnknownTopic):
        log.topic("cut/made")
    with pytest.raises(forebay.UnknownTopic):
        log.delete_topic("cut/made")
