"""Shards that are given up while others use them: no handle is left with a closed one."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

import forebay
from forebay import Closed, Moved
from forebay.engines import UnownedShards
from forebay.testing.inside import inside
from forebay.topics import ShardRef
from tests.storage.rig import QUICK
from tests.support.waiting import PATIENCE, until

MOMENT = 0.3
"""Long enough for what nothing keeps from happening."""

pytestmark = pytest.mark.slow


def test_a_shard_opened_while_a_lost_one_is_given_up_stays_open_and_is_looked_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker gave up by name: a shard that another thread had opened since was closed, and its upkeep ended."""
    with forebay.open(tmp_path / "log", QUICK) as log, ThreadPoolExecutor(1) as threads:
        topic, opened = log.create_topic("t"), []
        topic.append(b"0")
        lost, lose = inside(topic).segment(), UnownedShards.lose

        def use_meanwhile() -> None:
            inside(log).engine.retire(lost.ref)
            topic.append(b"1")

        def late(unowned: UnownedShards, ref: ShardRef) -> None:
            lose(unowned, ref)
            opened.append(threads.submit(use_meanwhile))
            wait(opened, MOMENT)

        monkeypatch.setattr(UnownedShards, "lose", late)
        lost.wal.fence("another owner has it")
        until(lambda: bool(opened))
        opened[0].result(PATIENCE)
        until(lambda: inside(log).engine.find(lost.ref) not in (None, lost))
        found = inside(topic).segment()

        assert inside(log).workers.sync.watches(found) and inside(log).workers.history.watches(found)
        assert topic.append(b"2") == 2 and inside(topic).segment() is found


def test_a_handle_used_while_its_topic_is_sealed_never_sees_a_closed_shard(tmp_path: Path) -> None:
    with forebay.open(tmp_path / "log", QUICK) as log:
        topic = log.create_topic("t")
        stop = threading.Event()
        seen: list[Exception] = []

        def use() -> None:
            while not stop.is_set():
                try:
                    topic.append(b"v")
                except Moved:
                    continue
                except Closed as error:
                    seen.append(error)

        threads = [threading.Thread(target=use) for _ in range(3)]
        for thread in threads:
            thread.start()
        ends = []
        for _ in range(10):
            ends.append(log.seal_topic("t")[0].next_offset)
            log.unseal_topic("t")
            topic.append(b"between")
        stop.set()
        for thread in threads:
            thread.join()

        assert ends == sorted(ends)
        after = topic.append(b"after")
        assert [record.offset for record in topic.read()] == list(range(after + 1))
        # A call that was under way when the shard was closed may say so; one that begins later does not.
        assert len(seen) <= 30
