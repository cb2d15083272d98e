"""A batch that goes to several partitions and fails in some: the client says which, why, and what stands."""

from __future__ import annotations

from pathlib import Path

import pytest

import forebay
from forebay.clock import SystemClock
from forebay.partitioning import partition_of_key
from tests.support.brokers import running_broker


def test_a_batch_that_fails_in_one_partition_says_which_and_what_stands(tmp_path: Path) -> None:
    """The client once knew of no partition, and repeated what could not succeed until its time was up."""
    keys = [b"k%d" % number for number in range(99)]
    first, second = (next(key for key in keys if partition_of_key(key, 2) == number) for number in (0, 1))
    with running_broker(tmp_path / "log") as broker, forebay.connect(broker.url) as log:
        topic = log.create_topic("t", partitions=2, cap_records=2, on_full="reject_new")
        topic.append_many([b"0", b"1"], partition=1)

        clock = SystemClock()
        begun = clock.monotonic()
        ack = topic.append_many_nowait([b"a", b"b", b"c"], keys=[first, second, first])
        with pytest.raises(forebay.Indeterminate, match="repeat only what is missing"):
            ack.result()
        assert clock.monotonic() - begun < 30
        assert [tuple(found) for found in ack.ranges] == [(0, 0, 2)]
        [(partition, failure)] = ack.failures.items()
        assert partition == 1
        assert isinstance(failure, forebay.Full)
        assert (failure.topic, failure.partition) == ("default/t", 1)
        assert [record.value for record in topic.read(partition=0)] == [b"a", b"c"]

        both = topic.append_many_nowait([b"d"] * 2, keys=[first, second])
        with pytest.raises(forebay.Full):
            both.result()
        assert list(both.failures) == [0], "refused as a whole, for the first reason that was found"
        assert both.ranges == ()
        one = topic.append_many_nowait([b"e"], partition=1)
        with pytest.raises(forebay.Full):
            one.result()
        assert list(one.failures) == [1]
        good = log.create_topic("good").append_many_nowait([b"x"])
        good.result()
        assert good.failures == {}
