"""After a kill the lag of readers ends at what can be read, not at what was reserved; whoever asks gets one answer."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

import forebay
from forebay import EARLIEST, LATEST, DataLoss, Storage
from forebay.meter import Metric
from forebay.settings import Settings
from tests.storage.rig import QUICK, WatchedDisk, values
from tests.support.waiting import PATIENCE

CHILD: Final = """
import os, sys, forebay
log = forebay.open(sys.argv[1])
topic = log.create_topic("t", durability=sys.argv[2])
for number in range(10):
    topic.append(b"%d" % number)
topic.flush()
os.kill(os.getpid(), 9)
"""
RESERVED: Final = 65_536

pytestmark = pytest.mark.slow


def _killed(path: Path, durability: str) -> str:
    """A directory whose owner was killed after ten records."""
    words = [sys.executable, "-c", CHILD, str(path), durability]
    done = subprocess.run(words, env=dict(os.environ), check=False, timeout=PATIENCE)
    assert done.returncode == -signal.SIGKILL
    return str(path)


@pytest.fixture
def killed(tmp_path: Path) -> str:
    """One that had a topic of class `memory`."""
    return _killed(tmp_path / "log", "memory")


def _lags(log: Storage) -> list[object]:
    """The lag of the one group, as it answers itself and as the metrics show it."""
    (shown,) = (sample.value for sample in log.status().metrics if sample.metric is Metric.READER_LAG)
    return [*(place.lag for place in log.group("g").offsets()), shown]


def _seen_by_all(log: Storage, path: str) -> list[object]:
    """As `_lags`, in the owner and in a process beside it."""
    with forebay.open(path, QUICK, read_only=True) as beside:
        return [*_lags(log), *_lags(beside)]


def test_a_group_that_has_read_everything_has_no_lag(killed: str) -> None:
    with forebay.open(killed, QUICK) as log:
        topic, group = log.topic("t"), log.group("g")
        group.commit("t", 4)
        assert [(place.offset, place.end, place.lag) for place in group.offsets()] == [(4, 10, 6)]

        assert len(values(topic.read())) == 10
        group.commit("t", 10)

        assert [(place.offset, place.end, place.lag) for place in group.offsets()] == [(10, 10, 0)]
        assert topic.offsets().next == RESERVED
        assert topic.append(b"next") == RESERVED
        assert [place.lag for place in group.offsets()] == [RESERVED + 1 - 10]
        group.commit("t", RESERVED + 1)
        assert [place.lag for place in group.offsets()] == [0]


def test_a_group_that_stands_behind_the_gap_has_no_lag(killed: str) -> None:
    with forebay.open(killed, QUICK) as log:
        group = log.group("g")
        group.reset("t", LATEST)

        assert [(place.offset, place.end, place.lag) for place in group.offsets()] == [(RESERVED, 10, 0)]


def test_a_subscription_has_no_lag_once_it_has_acknowledged_everything(killed: str) -> None:
    with forebay.open(killed, QUICK) as log:
        subscription = log.topic("t").subscribe("s", start=EARLIEST)
        assert [lag.lag for lag in subscription.lag()] == [10]
        with subscription.consumer("c") as consumer:
            taken = consumer.take(10, wait_s=30)
            assert len(taken) == 10
            consumer.ack(*taken)
            assert [lag.lag for lag in subscription.lag()] == [0]
        assert [lag.lag for lag in subscription.lag()] == [0]


def test_a_reader_of_new_records_alone_begins_behind_the_gap(killed: str) -> None:
    with forebay.open(killed, QUICK) as log:
        topic = log.topic("t")
        first = topic.resolve(LATEST)
        topic.append(b"new")

        assert (first, values(topic.read(start=first))) == (RESERVED, [b"new"])


def test_every_process_and_the_metrics_give_one_answer_whatever_the_owner_has_done_since(killed: str) -> None:
    """Found by review: metrics counted what was reserved, and so did all once a delete had written the gap down."""
    with forebay.open(killed, QUICK) as log:
        log.group("g").commit("t", 4)
        assert _seen_by_all(log, killed) == [6, 6, 6, 6]
        assert log.topic("t").delete_before(2) == 2
        assert _seen_by_all(log, killed) == [6, 6, 6, 6]
    with forebay.open(killed, QUICK, read_only=True) as beside:
        assert _lags(beside) == [6, 6]
    with forebay.open(killed, QUICK) as log:
        log.topic("t").acquire()
        assert _seen_by_all(log, killed) == [6, 6, 6, 6]

        assert log.topic("t").append(b"next") == RESERVED
        log.topic("t").flush()
        assert _seen_by_all(log, killed) == [RESERVED + 1 - 4] * 4


def test_a_group_is_not_behind_records_that_were_in_memory_alone(tmp_path: Path) -> None:
    """Its topic goes on behind everything that the life before it had reserved; nothing of that can be read."""
    with forebay.open(_killed(tmp_path / "log", "ephemeral"), QUICK) as log:
        topic, group = log.topic("t"), log.group("g")
        group.commit("t", 4)
        assert _lags(log) == [0, 0]

        first = topic.append(b"next")
        group.reset("t", LATEST)
        topic.append(b"one more")

        assert (first, topic.offsets().earliest) == (RESERVED + 1, RESERVED + 1)
        assert [place.lag for place in group.offsets()] == [1]


def test_a_history_that_ends_in_a_gap_leaves_no_lag_either(tmp_path: Path) -> None:
    shared = {"storage": {"mode": "shared_fs"}, "store": {"root": str(tmp_path / "store")}}
    path, disk, settings = tmp_path / "log", WatchedDisk(), Settings.load(overrides={**QUICK, **shared})
    with pytest.raises(DataLoss), Storage.open(path, settings, disk=disk) as log:
        log.create_topic("t", durability="memory").append(b"0")
        log.topic("t").flush()

        def no_writes(kind: str, path: str) -> None:
            if kind == "write" and path.endswith(".seg"):
                raise OSError(errno.EIO, "no writes")

        disk.meet = no_writes
        log.topic("t").append(b"lost")
    disk.meet = lambda kind, path: None

    with Storage.open(path, settings, disk=disk) as log:
        (state,) = log.seal_topic("t")
        log.unseal_topic("t")
        log.group("g").reset("t", 0)

        assert state.next_offset == log.topic("t").offsets().next == RESERVED + 1
        assert _lags(log) == [1, 1]
        with Storage.open(path, settings, read_only=True) as beside:
            assert _lags(beside) == [1, 1]
