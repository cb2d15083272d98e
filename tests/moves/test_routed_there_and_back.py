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
TAGS: Final = "xxyxyyxxxyyx"
"""Of the records of each move. The router takes `x`. What follows a record is now and then one that it takes, and now
and then one that it leaves out: a router that passes over a single record misses one that it had to take.
"""
TAKEN: Final = TAGS.count("x")


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
        routers = Routers(a), Routers(b)
        routers[0].create("r", sources=[SOURCE], destination=TARGET, start=EARLIEST, tags=["x"])
        made = [(tag, b"%s%d" % (tag.encode(), number)) for number, tag in enumerate(TAGS * MOVES)]
        everything, wanted = len(made), [value for tag, value in made if tag == "x"]
        watched = {
            (log.path, name): threads.submit(_watched, log.topic(name), count)
            for log in logs
            for name, count in ((SOURCE, everything), (TARGET, len(wanted)))
        }
        owner = dict.fromkeys((SOURCE, TARGET), 0)
        with routers[0].running(), routers[1].running():
            for move in range(MOVES):
                source = logs[owner[SOURCE]].topic(SOURCE)
                for tag, value in made[move * len(TAGS) : (move + 1) * len(TAGS)]:
                    source.append(value, tag=tag)
                if move % 2:
                    # The other moves come while records are on their way.
                    logs[owner[SOURCE]].export_topic(SOURCE)
                    _arrived(logs[owner[TARGET]], (move + 1) * TAKEN).flush()
                    # So that movers begin where the next record comes, and not at one that has arrived.
                    until(lambda: routers[owner[SOURCE]].status("r").lag == 0)
                for name in moved:
                    _move(logs, name, owner[name])
                    owner[name] = 1 - owner[name]
                    ledger.count("moves", kind="with routers and watchers")
            target = _arrived(logs[owner[TARGET]], len(wanted))
        assert [record.value for record in target.read()] == wanted
        logs[owner[TARGET]].export_topic(TARGET)
        for (_, name), stream in watched.items():
            assert stream.result(PATIENCE) == list(range(everything if name == SOURCE else len(wanted)))
