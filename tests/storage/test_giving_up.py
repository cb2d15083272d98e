"""Shards that are given up while others use them: no handle is left with a closed one."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import forebay
from forebay import Closed, Moved
from tests.storage.rig import QUICK

pytestmark = pytest.mark.slow


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
