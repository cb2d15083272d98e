"""A broker that recovers many shards says how far it is, from the first moment on, and serves nothing else until then.

Once with a gate, so that every step of the progress is seen, and once as a process that was killed before.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Final, Self

import httpx
import pytest

import forebay
from forebay.broker.table import ROUTES
from forebay.clock import SystemClock
from forebay.settings import Settings
from forebay.shard import SegmentShard
from forebay.storage import Storage
from tests.ledger import Ledger
from tests.support.brokers import BrokerCommand, running_broker
from tests.support.soak import SOAK
from tests.support.waiting import PATIENCE, until

SHARDS: Final = 1_000 if SOAK else 240
RECORDS: Final = 1_000 if SOAK else 20
"""In each shard."""
GATED: Final = 60
STEP: Final = 6
ROOT: Final = Path(__file__).parents[2]
BEHIND_THE_GATE: Final = [
    (route.method, route.path.format_map(dict.fromkeys(route.labels, "x")))
    for route in ROUTES
    if not route.before_ready
]


def progress_of(client: httpx.Client) -> float:
    """How far the broker is; it must say that it is not ready."""
    answer = client.get("/v1/ready")
    assert answer.status_code == httpx.codes.SERVICE_UNAVAILABLE, answer.text
    return refused_progress(answer)


def refused_progress(answer: httpx.Response) -> float:
    error: dict[str, Any] = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (503, "not_ready"), answer.text
    assert int(answer.headers["retry-after"]) >= 1
    found: float = error["detail"]["replay_progress"]
    return found


class Gate:
    """Lets so many shards be opened as a test allows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened_log = threading.Event()
        self._shards = threading.Semaphore(0)
        open_log, open_shard = Storage.open, SegmentShard.open

        def gated_log(*arguments: Any, **named: Any) -> Storage:
            assert self.opened_log.wait(PATIENCE)
            return open_log(*arguments, **named)

        def gated_shard(*arguments: Any, **named: Any) -> SegmentShard:
            assert self._shards.acquire(timeout=PATIENCE)
            return open_shard(*arguments, **named)

        monkeypatch.setattr(Storage, "open", gated_log)
        monkeypatch.setattr(SegmentShard, "open", gated_shard)

    def let_through(self, count: int) -> None:
        """Have so many more shards be opened."""
        self._shards.release(count)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Hold nothing any more, whatever has failed."""
        self.opened_log.set()
        self.let_through(GATED)


@pytest.mark.slow
def test_every_step_of_a_recovery_is_seen_and_no_route_is_served_before_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with forebay.open(tmp_path / "data") as log:
        topic = log.create_topic("shop/orders", partitions=GATED)
        for partition in range(GATED):
            topic.append(b"v", partition=partition)
    gate = Gate(monkeypatch)
    settings = Settings.load(None, {"server": {"port": 0}, "runtime": {"openers": 1}}, environment={})
    with running_broker(tmp_path / "data", settings, ready=False) as broker, gate, broker.client() as client:
        assert progress_of(client) == 0.0, "the log is not even open"
        gate.opened_log.set()
        until(lambda: progress_of(client) == 0.5)  # all are acquired, none is opened
        seen = [0.5]
        for done in range(STEP, GATED, STEP):
            gate.let_through(STEP)
            before = seen[-1]
            while seen[-1] < before + 0.02:
                seen.append(progress_of(client))
            assert seen == sorted(seen)
            # A slow machine has written a mark more to some shards: they are not all of one size.
            assert seen[-1] < 0.6 + done / GATED / 2, "no more shards are open"
            assert client.get("/v1/health").json()["status"] == "starting"
        assert "forebay_replay_progress 0." in client.get("/metrics").text
        for method, path in BEHIND_THE_GATE:
            assert seen[-1] <= refused_progress(client.request(method, path)) < 1.0, path
        gate.let_through(GATED)
        until(lambda: client.get("/v1/ready").status_code == httpx.codes.OK)
        assert client.get("/v1/ready").json() == {"ready": True, "replay_progress": 1.0, "degraded": []}
        assert client.get("/v1/topics/shop/orders/offsets").json()["partitions"][-1]["next"] == 1


def test_only_a_broker_that_is_ready_says_that_all_is_recovered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_done, may_return, recover = threading.Event(), threading.Event(), Storage.recover

    def recover_and_wait(self: Storage, on_progress: Any) -> Any:
        found = recover(self, on_progress)
        is_done.set()
        assert may_return.wait(PATIENCE)
        return found

    monkeypatch.setattr(Storage, "recover", recover_and_wait)
    with running_broker(tmp_path / "data", ready=False) as broker, broker.client() as client:
        assert is_done.wait(PATIENCE)
        try:
            assert 0.99 < progress_of(client) < 1.0
        finally:
            may_return.set()


class Looks:
    """What a client sees that asks again and again while a broker recovers."""

    def __init__(self) -> None:
        self.progress: list[float] = []
        self.slowest = 0.0
        """How long an answer took at most, in seconds."""

    def run(self, client: httpx.Client) -> None:
        """Ask until the broker is ready: how far it is, and in turn for what it does not serve yet."""
        now = SystemClock().monotonic
        for number in range(1_000_000):
            begun = now()
            answer = client.get("/v1/ready")
            self.slowest = max(self.slowest, now() - begun)
            if answer.status_code == httpx.codes.OK:
                self.progress.append(answer.json()["replay_progress"])
                return
            self.progress.append(refused_progress(answer))
            method, path = BEHIND_THE_GATE[number % len(BEHIND_THE_GATE)]
            other = client.request(method, path)
            if other.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                assert client.get("/v1/ready").status_code == httpx.codes.OK, f"{path} was served too early"
        raise AssertionError("the broker does not become ready")


@pytest.mark.slow
def test_a_killed_broker_recovers_many_shards_with_progress_from_its_first_answer(
    tmp_path: Path, ledger: Ledger
) -> None:
    words = [sys.executable, "-m", "tests.broker.seeding", str(tmp_path / "data"), str(SHARDS), str(RECORDS)]
    assert subprocess.run(words, cwd=ROOT, check=False).returncode == -signal.SIGKILL
    looks = Looks()
    now = SystemClock().monotonic
    with BrokerCommand(tmp_path / "data") as broker:
        begun = now()
        with httpx.Client(base_url=broker.url, timeout=PATIENCE) as client:
            looks.run(client)
            seconds = now() - begun
            assert [client.get("/v1/ready").status_code for _ in range(20)] == [httpx.codes.OK] * 20
            status = client.get("/v1/status").json()["partitions"]
        code, logged = broker.end(signal.SIGTERM)
    assert code == 0, logged
    assert looks.progress == sorted(looks.progress)
    assert looks.progress.count(1.0) == 1, "only a broker that is ready says that it is done"
    assert len(status) == SHARDS
    assert {each["offsets"]["next"] for each in status} == {RECORDS}
    between = {each for each in looks.progress if 0 < each < 1}
    assert len(between) >= (20 if SOAK else 1)
    ledger.count("records recovered by a broker", n=SHARDS * RECORDS, shards=str(SHARDS))
    ledger.count("recovery of a broker: milliseconds until it is ready", n=round(seconds * 1000))
    ledger.count("recovery of a broker: steps of its progress that were seen", n=len(between))
    ledger.count("recovery of a broker: slowest answer of /v1/ready in ms", n=round(looks.slowest * 1000))
