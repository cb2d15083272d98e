"""One shard hangs in the middle of background work of one kind: all work on other shards goes on, of that kind too."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from forebay import Settings, Storage, Topic, workers
from forebay.shard import SegmentShard
from forebay.shard.history import ShardHistory
from forebay.storage.background import sync
from forebay.storage.background.limits import LimitsWorker
from forebay.testing.inside import inside
from forebay.wal.files import LogFile
from forebay.wal.sealing import Sealer
from tests.storage.rig import QUICK, WatchedDisk
from tests.storage.test_workers import Gate
from tests.support.waiting import until

pytestmark = pytest.mark.slow

CAP = 5


class HangingEnvironment:
    """A log with topics `a`, which hangs at a gate, and `b`, which must not notice."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(workers, "STUCK_SECONDS", 0.05)
        monkeypatch.setattr(sync, "STUCK_SECONDS", 0.05)
        self.patch = monkeypatch
        self.gate = Gate()
        self.disk = WatchedDisk()
        self.checked: Counter[str] = Counter()
        self.log = Storage.open(str(tmp_path / "log"), _settings(tmp_path), disk=self.disk)
        self.a, self.b = (self.log.create_topic(name, cap_records=CAP) for name in "ab")
        for topic in (self.a, self.b):
            topic.append(b"v")

    def hang(self, kind: str) -> None:
        """From now on this kind of work hangs for `a`, wherever it is done by a worker."""
        getattr(self, f"_hang_{kind}")()

    def _at_gate(self, is_a: object) -> None:
        if is_a and threading.current_thread().name.startswith("forebay-"):
            self.gate.wait()

    def _hang_sync(self) -> None:
        name = self.a.spec.topic_id
        self.disk.meet = lambda kind, path: self._at_gate(kind == "sync" and name in path and path.endswith(".seg"))

    def _hang_seal(self) -> None:
        self._wrap(Sealer, "seal", lambda sealer, log, *_: self.a.spec.topic_id in log.path)

    def _hang_export(self) -> None:
        history = inside(self.a).history()
        self._wrap(ShardHistory, "step", lambda found, *_: found is history)

    def _hang_limit(self) -> None:
        shard = inside(self.a).shard()
        self._wrap(LimitsWorker, "_keep", lambda worker, found: found is shard)

    def _hang_chore(self) -> None:
        shard = inside(self.a).shard()
        self._wrap(SegmentShard, "check_owner", lambda found: found is shard)

    def _hang_commit(self) -> None:
        shard = inside(self.a).shard()
        self._wrap(SegmentShard, "commit", lambda found: found is shard)

    def _wrap(self, where: type, name: str, is_a: Callable[..., bool]) -> None:
        real = getattr(where, name)

        def slowly(*args: object, **named: object) -> object:
            self._at_gate(is_a(*args))
            return real(*args, **named)

        self.patch.setattr(where, name, slowly)

    def count_checks(self) -> None:
        """Have the owner of each shard checked at every step, as after the end of its session, and count it by topic.

        The check itself would end the shard: see the test of a session that has ended.
        """

        def counted(shard: SegmentShard) -> None:
            self.checked[shard.ref.spec.topic] += 1

        self.patch.setattr(SegmentShard, "is_session_over", True)
        self.patch.setattr(SegmentShard, "check_owner", counted)

    def use(self, topic: Topic) -> int:
        """Give the workers something of each kind to do; the end of the topic."""
        end = topic.append_many([b"v"] * (2 * CAP))[-1] + 1
        topic.rotate()
        return end

    def is_served(self, topic: Topic, end: int, checked: int) -> bool:
        """Whether work of each kind was done since."""
        offsets = topic.offsets()
        unsealed: list[LogFile] = inside(topic).segment().upkeep.rotated()
        return (
            offsets.durable >= end
            and not unsealed
            and offsets.exported >= end
            and offsets.earliest >= end - CAP
            and self.checked[topic.spec.topic] > checked
        )


def _settings(tmp_path: Path) -> Settings:
    return Settings.load(
        overrides={
            **QUICK,
            "storage": {"mode": "shared_fs"},
            "store": {"root": f"{tmp_path}/store"},
            "metadata": {"path": f"{tmp_path}/meta.sqlite"},
            "export": {"bytes_min": 1, "at_close_seconds_max": 0},
            "retention": {"evict_interval_s": 1},
        }
    )


@pytest.mark.parametrize("kind", ["sync", "seal", "export", "limit", "chore"])
def test_a_shard_that_hangs_in_the_background_holds_up_nothing_of_another(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = HangingEnvironment(tmp_path, monkeypatch)
    with environment.log:
        environment.count_checks()
        environment.hang(kind)
        environment.a.append_many([b"v"] * (2 * CAP))
        if kind != "sync":
            environment.a.rotate()
        with environment.gate.reached_here():
            for _ in range(2):
                checked, end = environment.checked["b"], environment.use(environment.b)
                until(lambda end=end, checked=checked: environment.is_served(environment.b, end, checked))  # type: ignore[misc]
            environment.log.create_topic("c")
            environment.log.delete_topic("c")
            assert sum(status.stuck for status in environment.log.workers()) >= 1

        checked, end = environment.checked["a"], environment.use(environment.a)
        until(lambda: environment.is_served(environment.a, end, checked))
        until(lambda: sum(status.stuck for status in environment.log.workers()) == 0)


def test_an_ended_session_stops_every_shard_though_the_check_of_one_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = HangingEnvironment(tmp_path, monkeypatch)
    with environment.log:
        environment.hang("chore")
        a, b = (inside(topic).wal() for topic in (environment.a, environment.b))
        inside(environment.log).lose_session()
        with environment.gate.reached_here():
            until(lambda: b.fenced is not None)
            assert a.fenced is None
        until(lambda: a.fenced is not None)


def test_owners_whose_session_lives_are_looked_at_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work for a shard at every step took much of a processor where thousands of topics were idle."""
    environment = HangingEnvironment(tmp_path, monkeypatch)
    checked: list[str] = []
    with environment.log:
        monkeypatch.setattr(SegmentShard, "check_owner", lambda shard: checked.append(shard.ref.spec.topic))
        for _ in range(3):
            inside(environment.log).workers.cleanup.step()
        assert checked == []
        inside(environment.log).lose_session()
        inside(environment.log).workers.cleanup.step()
        assert set(checked) == {"a", "b"}


def test_a_commit_that_hangs_holds_up_no_commit_and_no_sync_of_another_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The queue of class memory was written by the thread of all syncs: a reservation that hung stopped them."""
    environment = HangingEnvironment(tmp_path, monkeypatch)
    with environment.log:
        environment.hang("commit")
        _ = environment.a.append_nowait(b"v")
        with environment.gate.reached_here():
            ended: list[object] = []
            environment.b.append_nowait(b"v").add_callback(ended.append)
            until(lambda: ended)
            until(lambda: environment.b.offsets().durable == 2)


def test_a_log_that_is_in_use_for_long_is_left_out_of_the_round_of_syncs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by an append that waits for the metadata store to reserve offsets."""
    environment = HangingEnvironment(tmp_path, monkeypatch)
    with environment.log:
        until(lambda: environment.a.offsets().durable == environment.b.offsets().durable == 1)
        held, go_on, wal = threading.Event(), threading.Event(), inside(environment.a).wal()
        environment.a.append(b"v")

        def hold() -> None:
            with wal.committing:
                held.set()
                assert go_on.wait(60)

        holder = threading.Thread(target=hold)
        holder.start()
        assert held.wait(60)
        for _ in range(3):
            end = environment.b.append(b"v") + 1
            until(lambda end=end: environment.b.offsets().durable >= end)  # type: ignore[misc]
        # A sync may take long on a busy disk; one that waits for the log in use would not end before it is free.
        until(lambda: [each.stuck for each in environment.log.workers() if each.name == "forebay-sync"] == [0])
        go_on.set()
        holder.join()
        until(lambda: environment.a.offsets().durable == 2)


def test_a_topic_that_is_deleted_while_it_is_exported_holds_up_no_other_topic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for its export under the lock that every opening, creation and deletion of a topic takes."""
    environment = HangingEnvironment(tmp_path, monkeypatch)
    with environment.log:
        environment.hang("export")
        environment.a.rotate()
        deleting = threading.Thread(target=environment.log.delete_topic, args=("a",))
        with environment.gate.reached_here():
            deleting.start()
            until(lambda: [spec.topic for spec in environment.log.topics()] == ["b"])
            fresh = environment.log.create_topic("c", partitions=2)
            assert fresh.append(b"v", partition=1) == 0
            environment.log.delete_topic("c")
            assert environment.b.append(b"v") == 1
            assert deleting.is_alive()
        deleting.join(60)
        assert not deleting.is_alive()
    assert not list(tmp_path.glob(f"*/shards/{environment.a.spec.topic_id}*"))
