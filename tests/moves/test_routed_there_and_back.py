"""Topics move there and back while routers of both sides run between them and watchers stay attached to them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import pytest

from forebay import EARLIEST, Storage, Topic
from forebay.routers import Routers
from tests.ledger import Ledger
from tests.live.test_watchers import room, taken
from tests.protocol.above import hasten
from tests.support.environments import directories
from tests.support.environments.directories import id_of
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.slow

SOURCE: Final = "shop/source"
TARGET: Final = "shop/target"
MOVES: Final = 4
EACH: Final = 6


def _watched(topic: Topic, count: int) -> list[int]:
    """The offsets that a watcher of an event loop gets from the first record on, until there are so many."""

    async def watch() -> list[int]:
        async with room() as here:
            return [record.offset for record in await taken(here.watch(topic), count)]

    return asyncio.run(watch())


def _arrived(log: Storage, count: int) -> Topic:
    target = log.topic(TARGET)
    until(lambda: target.offsets().next >= count)
    return target


def _move(logs: Sequence[Storage], name: str, here: int) -> None:
    there = 1 - here
    logs[here].seal_topic(name, target=id_of(logs[there]))
    logs[there].topic(name).acquire()


@pytest.mark.parametrize("moved", [(SOURCE, TARGET), (TARGET, SOURCE), (SOURCE,), (TARGET,)], ids=" ".join)
def test_routers_and_watchers_go_on_exactly_over_moves(
    moved: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ledger: Ledger
) -> None:
    hasten(monkeypatch)
    monkeypatch.setattr("forebay.routers.running.PAUSE_SECONDS_MAX", 0.1)
    environment = directories.shared_fs(tmp_path)
    with ThreadPoolExecutor(4) as threads, environment.open("A") as a, environment.open("B") as b:
        logs: Sequence[Storage] = (a, b)
        for name in (SOURCE, TARGET):
            a.create_topic(name)
        a_routers, b_routers = Routers(a), Routers(b)
        a_routers.create("r", sources=[SOURCE], destination=TARGET, start=EARLIEST, tags=["x"])
        everything, wanted = 2 * EACH * MOVES, [b"x%d" % number for number in range(EACH * MOVES)]
        watched = {
            (log.path, name): threads.submit(_watched, log.topic(name), count)
            for log in logs
            for name, count in ((SOURCE, everything), (TARGET, len(wanted)))
        }
        owner = dict.fromkeys((SOURCE, TARGET), 0)
        with a_routers.running(), b_routers.running():
            for move in range(MOVES):
                source = logs[owner[SOURCE]].topic(SOURCE)
                for number in range(move * EACH, (move + 1) * EACH):
                    for tag in "xy":
                        source.append(b"%s%d" % (tag.encode(), number), tag=tag)
                if move % 2:
                    # The other moves come while records are on their way.
                    logs[owner[SOURCE]].export_topic(SOURCE)
                    _arrived(logs[owner[TARGET]], (move + 1) * EACH)
                for name in moved:
                    _move(logs, name, owner[name])
                    owner[name] = 1 - owner[name]
                    ledger.count("moves", kind="with routers and watchers")
            target = _arrived(logs[owner[TARGET]], len(wanted))
        assert [record.value for record in target.read()] == wanted
        logs[owner[TARGET]].export_topic(TARGET)
        for (_, name), stream in watched.items():
            assert stream.result(PATIENCE) == list(range(everything if name == SOURCE else len(wanted)))
