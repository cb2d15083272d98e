"""The connection of a process to a broker: one for all threads of a place, and no place waits for another's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest

from forebay.spark.place import broker
from forebay.spark.place.broker import BrokerLink, BrokerPlace
from forebay.spark.place.location import Location

LOCATION = Location(broker="http://127.0.0.1:1")
SECONDS = 30.0


@pytest.fixture
def places() -> Iterator[list[BrokerPlace]]:
    with ExitStack() as held:
        yield [held.enter_context(closing(BrokerPlace(LOCATION))) for _ in range(2)]


def test_threads_that_ask_at_once_get_one_link(places: list[BrokerPlace], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[BrokerLink] = []
    late = threading.Event()

    def make(location: Location) -> BrokerLink:
        late.wait(0.2)
        made.append(BrokerLink(location))
        return made[-1]

    monkeypatch.setattr(broker, "BrokerLink", make)
    ready = threading.Barrier(4)

    def ask(_: int) -> BrokerLink:
        ready.wait(SECONDS)
        return places[0].link

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(ask, range(4)))

    assert len(made) == 1
    assert all(link is made[0] for link in found)


def test_the_link_of_one_place_is_made_while_that_of_another_is(
    places: list[BrokerPlace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cached property of Python 3.11 has one lock for all instances, and none from 3.12 on."""
    both = threading.Barrier(2)

    def make(location: Location) -> BrokerLink:
        both.wait(SECONDS)
        return BrokerLink(location)

    monkeypatch.setattr(broker, "BrokerLink", make)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(lambda place: place.link, places)

    assert first is not second
