"""A real object store behind a line that loses, delays and refuses: repeated until done, nothing is lost or double."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar
from urllib.parse import urlsplit

import pytest

from forebay import ForebayError
from forebay.cleanup.collector import named_by
from forebay.settings import ExportSettings, RetentionSettings
from forebay.storage import Storage
from forebay.storage.background import cleanup, history
from forebay.testing.inside import inside
from forebay.testing.simulated.clock import ManualClock
from tests.blobs.scripted import DROPPED, Answer, Request, answering, forwarded
from tests.history.test_servers_killed import Bucket
from tests.ledger import Ledger
from tests.support.environments import directories
from tests.support.environments.directories import TOPIC, Environment, numbers, shard_of, told
from tests.support.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("moves-servers")]

T = TypeVar("T")

FAULTS: Final = ("lost before", "lost after", "500 after", "503", "429", "cut off")
SHARE_OF_256: Final = 64
ATTEMPTS: Final = 500


class Line:
    """Between a client and the server; of the requests so many go wrong, each in the next of the ways."""

    def __init__(self, port: int, seed: int) -> None:
        self._port = port
        self._chance = ManualClock(seed=seed)
        self.is_flaky = True
        self.met: list[str] = []

    def respond(self, request: Request) -> Answer:
        fault = ""
        if self.is_flaky and self._chance.random_bytes(1)[0] < SHARE_OF_256:
            fault = FAULTS[len(self.met) % len(FAULTS)]
            self.met.append(fault)
        if fault in ("lost before", "503", "429"):
            return DROPPED if fault == "lost before" else Answer(int(fault))
        answer = forwarded(request, self._port)
        if fault in ("lost after", "500 after"):
            return DROPPED if fault == "lost after" else Answer(500)
        is_cut = fault == "cut off" and request.method == "GET" and len(answer.body) > 1
        return dataclasses.replace(answer, cut=len(answer.body) // 2) if is_cut else answer


@pytest.fixture
def line(bucket: Bucket) -> Line:
    return Line(urlsplit(bucket.endpoint).port or 0, seed=1)


@pytest.fixture
def environment(tmp_path: Path, folder: str, line: Line, monkeypatch: pytest.MonkeyPatch) -> Iterator[Environment]:
    for worker in (cleanup, history):
        monkeypatch.setattr(worker, "LOOK_SECONDS", 0.05)
    monkeypatch.setattr(history, "RETRY_SECONDS", 0.05)
    with answering(line.respond) as (endpoint, _):
        yield directories.object_store(
            tmp_path,
            endpoint,
            folder,
            export=ExportSettings(bytes_min=0, sweep_interval_s=1, orphan_grace_s=0, at_close_seconds_max=0),
            retention=RetentionSettings(check_interval_s=1, time_s=0, bytes_max=0, grace_s=0),
        )


def insisted(call: Callable[[], T]) -> T:
    """What it comes to in the end, repeated as long as it fails."""
    for _ in range(ATTEMPTS):
        try:
            return call()
        except ForebayError:
            continue
    raise AssertionError("never done")


def unnamed(log: Storage) -> set[str]:
    """Objects that history does not name; what it names and is not there fails."""
    places = inside(log).places
    assert places.store is not None
    named = named_by(shard_of(log.topic(TOPIC)).history.catalog)
    keys = {stat.key for stat in places.store.list()}
    assert named <= keys
    return keys - named


def used(environment: Environment, name: str, end: int) -> int:
    """Append in one directory, read everything, and give the topic up; where it ends then."""
    log = insisted(lambda: environment.open(name))
    try:
        topic = insisted(lambda: log.topic(TOPIC) if end else log.create_topic(TOPIC))
        for first in range(end, end + 20, 5):
            topic.append_many([b"%d" % number for number in range(first, first + 5)])
            topic.rotate()
        insisted(lambda: log.export_topic(TOPIC))
        assert insisted(lambda: told(topic.read())) == numbers(0, end + 20)
        insisted(lambda: log.seal_topic(TOPIC))
    finally:
        log.close()
    return end + 20


def test_nothing_is_lost_or_left_by_a_line_that_loses_every_fourth_request(
    environment: Environment, line: Line, ledger: Ledger
) -> None:
    end = 0
    for name in "ABAB":
        end = used(environment, name, end)
    line.is_flaky = False

    with environment.open("A") as a:
        assert told(a.topic(TOPIC).read()) == numbers(0, end)
        until(lambda: not unnamed(a))
    for fault in FAULTS:
        assert fault in line.met
        ledger.count("requests to a store gone wrong", line.met.count(fault), fault=fault)
