"""Two processes with one metadata store, under schedules made from seeds: what was acknowledged is kept.

No append is acknowledged into nothing, no offset stands for two records, and nothing that was acknowledged is lost
without a recorded yes, or a class that does not promise it. Over a store in memory, over SQLite and over a real etcd
both processes are simulated; children of this process are killed by SIGKILL, between two steps and inside of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from forebay.cleanup import deleted_topics
from forebay.clock import SystemClock
from forebay.disk import SystemDisk
from forebay.metadata import SqliteMetadata
from forebay.metadata.etcd import EtcdMetadata
from forebay.settings import MetadataSettings
from tests.ledger import Ledger
from tests.protocol.children import ChildStage
from tests.protocol.two_processes import OwnersSchedule, SimulatedStage, Stage, mode_of, run_schedule
from tests.support.etcd import Cluster, running
from tests.support.soak import SOAK

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]  # far more than needed: a shared machine may be busy

PARTS: Final = 4
STEPS: Final = 32
IN_MEMORY: Final = 1_000 if SOAK else 80
OVER_SQLITE: Final = 1_000 if SOAK else 60
OVER_ETCD: Final = 1_000 if SOAK else 16
KILLED: Final = 100 if SOAK else 3
KILLED_STEPS: Final = 40


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process answers by itself here: a deletion waits for none."""
    monkeypatch.setattr(deleted_topics, "OWNER_SECONDS", 0.0)


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("etcd"), 1) as cluster:
        yield cluster


def judge(seed: int, stage: Stage, ledger: Ledger, *, store: str, steps: int = STEPS) -> OwnersSchedule:
    """Run a schedule and count it; nothing may be broken."""
    schedule = run_schedule(seed, stage, steps=steps)
    ledger.count("schedules", mode=mode_of(seed), store=store)
    ledger.violation("schedules", n=len(schedule.violations), mode=mode_of(seed), store=store)
    ledger.count("appends", n=schedule.appends, store=store)
    ledger.count("kills", n=schedule.kills, store=store)
    assert schedule.violations == [], f"seed {seed}"
    return schedule


@pytest.mark.proves("I4", "I10", "I22", "I41")
@pytest.mark.parametrize("part", range(PARTS))
def test_no_schedule_of_two_processes_loses_what_was_acknowledged(part: int, ledger: Ledger) -> None:
    for seed in range(part, IN_MEMORY, PARTS):
        judge(seed, SimulatedStage(mode_of(seed)), ledger, store="memory")


def sqlite_store(path: Path) -> Callable[[], SqliteMetadata]:
    """Opens a handle on the file, as a process of its own does."""
    return lambda: SqliteMetadata(str(path), disk=SystemDisk(), clock=SystemClock())


@pytest.mark.proves("I4", "I10", "I22", "I41")
@pytest.mark.parametrize("part", range(PARTS))
def test_no_schedule_over_sqlite_loses_what_was_acknowledged(part: int, tmp_path: Path, ledger: Ledger) -> None:
    for seed in range(part, OVER_SQLITE, PARTS):
        (tmp_path / str(seed)).mkdir()
        opened = sqlite_store(tmp_path / str(seed) / "shared.sqlite")
        judge(seed, SimulatedStage(mode_of(seed), opened), ledger, store="sqlite")


@pytest.mark.proves("I4", "I10", "I22", "I41")
@pytest.mark.parametrize("part", range(PARTS))
def test_no_schedule_over_etcd_loses_what_was_acknowledged(part: int, etcd: Cluster, ledger: Ledger) -> None:
    settings = MetadataSettings(backend="etcd", endpoints=etcd.endpoints, lease_ttl_s=60, lease_margin_s=1)
    for seed in range(part, OVER_ETCD, PARTS):
        etcd.wipe()
        stage = SimulatedStage(mode_of(seed), lambda: EtcdMetadata.open(settings, clock=SystemClock()), settings)
        judge(seed, stage, ledger, store="etcd")


@pytest.mark.proves("I4", "I10", "I22", "I41")
@pytest.mark.parametrize("store", ["sqlite", "etcd"])
def test_no_kill_of_a_process_loses_what_was_acknowledged(
    store: str, tmp_path: Path, request: pytest.FixtureRequest, ledger: Ledger
) -> None:
    etcd: Cluster | None = request.getfixturevalue("etcd") if store == "etcd" else None
    for seed in range(KILLED):
        root = tmp_path / f"{store}-{seed}"
        root.mkdir()
        judge(seed, ChildStage(root, mode_of(seed), etcd), ledger, steps=KILLED_STEPS, store=f"{store}, children")
