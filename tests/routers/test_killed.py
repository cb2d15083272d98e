"""kill -9 of a process that runs routers, again and again: nothing is doubled and nothing is missing."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random  # noqa: TID251 - seeded
from typing import Final

import pytest

from forebay.partitioning import partition_of_key
from forebay.routers import Routers, rules
from forebay.storage import Topic
from tests.ledger import Ledger
from tests.routers.killed import COPIED_HEADERS_MAX, opened
from tests.support.processes import hear
from tests.support.soak import SOAK
from tests.support.waiting import until

KILLS: Final = 200 if SOAK else 6


@pytest.mark.slow
def test_routers_that_are_killed_double_nothing_and_miss_nothing(
    tmp_path: Path, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "COPIED_HEADERS_MAX", COPIED_HEADERS_MAX)
    chance = Random(5)
    acknowledged = 0
    for run in range(KILLS):
        command = [sys.executable, "-m", "tests.routers.killed", str(tmp_path), str(run)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            for _ in range(chance.randrange(1, 120)):
                hear(child)
                acknowledged += 1
            child.kill()
        ledger.count("kills of a process with routers", of="kill -9")

    with opened(tmp_path) as log:
        source, disk, synced = log.topic("source"), log.topic("disk"), log.topic("synced")
        routers = Routers(log)
        with routers.running():
            until(lambda: [status.lag for status in routers.statuses()] == [0, 0])
        alive = [record for record in source.read() if len(record.headers) <= COPIED_HEADERS_MAX]
        refused = {record.value for record in source.read() if len(record.headers) > COPIED_HEADERS_MAX}
        routed = Counter(record.value for record in disk.read())
        plain = Counter(record.value for record in synced.read() if record.value != b"other")

        assert len(alive) >= acknowledged
        assert refused and not refused & (routed.keys() | plain.keys())
        _check(routed, [record.value for record in alive if record.tag in ("a", "b")])
        _check(plain, [record.value for record in alive if (record.key or b"").startswith(b"k1")])
        _check_order(disk)
        ledger.count("records routed through kills", n=sum(routed.values()) + sum(plain.values()))


def _check(found: Counter[bytes | None], expected: list[bytes | None]) -> None:
    """Everything that is there once; beyond that only what was deleted later in the source, once too."""
    assert not [value for value, count in found.items() if count > 1], "doubled"
    assert not [value for value in expected if value not in found], "missing"


def _check_order(topic: Topic) -> None:
    """By the rule the tag is the key; within a partition of the source the order is kept."""
    for partition in range(topic.partitions):
        last: dict[int, tuple[int, int]] = {}
        for record in topic.read(partition=partition):
            assert record.key is not None
            assert partition_of_key(record.key, topic.partitions) == partition
            assert record.tag == record.key.decode()
            source, *place = map(int, (record.value or b"").split(b"-"))
            assert tuple(place) > last.get(source, (-1, -1)), "out of order"
            last[source] = (place[0], place[1])
