"""etcd goes away while one shard runs out of reserved offsets: that shard waits alone, and no owner outlives its lease.

Offsets are reserved in the metadata store ahead of need, so a shard goes on without the store until it has used what is
reserved. etcd is stopped (SIGSTOP: it takes requests and answers none) or killed (connections are refused).
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay import Ack, Fenced, ForebayError, Indeterminate, Moved, Storage, Topic, Unavailable
from forebay.clock import SystemClock
from forebay.settings import MetadataSettings, RuntimeSettings, Settings, StorageSettings, StoreSettings, WalSettings
from forebay.storage.background import commit
from forebay.testing.inside import inside
from tests.support.etcd import Cluster, running
from tests.support.waiting import PATIENCE, until

RESERVED = 64
LEASE_S = 3_600
"""No lease ends by itself while a test runs: a test that wants its end puts the clock of the log forward."""
CLASSES = ("fsync", "disk", "memory")
HOW = ("stopped", "killed")


class ForwardClock(SystemClock):
    """The machine's clock, which a test puts forward: to the log it is as if it had been paused for so long."""

    ahead_s = 0.0

    def boottime(self) -> float:
        return super().boottime() + self.ahead_s


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Cluster]:
    """One that this test may stop."""
    (tmp_path / "etcd").mkdir()
    with running(tmp_path / "etcd", 1) as cluster:
        yield cluster


def leave(etcd: Cluster, how: str) -> None:
    if how == "killed":
        etcd.members[0].kill()
    else:
        etcd.members[0].signal(signal.SIGSTOP)


def come_back(etcd: Cluster, how: str) -> None:
    if how == "stopped":
        etcd.members[0].signal(signal.SIGCONT)
    etcd.start_all()


class EtcdEnvironment:
    """A log in mode `shared_fs` whose topics have all been used once: each has `RESERVED` offsets and some."""

    def __init__(self, root: Path, etcd: Cluster, *, request_timeout_ms: int) -> None:
        self.clock = ForwardClock()
        self.log = Storage.open(
            root / "data", _settings(root, etcd, request_timeout_ms=request_timeout_ms), clock=self.clock
        )
        self.appended: dict[str, list[bytes]] = {}

    def topic(self, name: str, durability: str) -> Topic:
        topic = self.log.create_topic(name, durability=durability)
        self.appended[topic.name] = []
        self.append(topic, 1)
        return topic

    def append(self, topic: Topic, count: int) -> None:
        """Append records, each acknowledged: alone, queued for a committer, and as a batch in turn."""
        appended = self.appended[topic.name]
        for _ in range(count):
            first, value = len(appended), b"%d" % len(appended)
            match first % 3:
                case 0:
                    offset = topic.append(value)
                case 1:
                    offset = topic.append_nowait(value).result(PATIENCE)
                case _:
                    offset = topic.append_many([value])[0]
            assert offset == first
            appended.append(value)

    def use_up(self, topic: Topic) -> None:
        """Append all that is reserved for the topic, in one batch."""
        writer = inside(topic).wal().writer
        values = [b"%d" % number for number in range(writer.end, writer.reserved_end)]
        assert list(topic.append_many(values)) == list(range(writer.reserved_end - len(values), writer.reserved_end))
        self.appended[topic.name] += values

    def epochs(self, topics: list[Topic]) -> list[int]:
        return [topic.status().open[0].epoch for topic in topics]

    def check(self, topics: list[Topic]) -> None:
        """Every acknowledged record stands at its offset, and no other record does."""
        for topic in topics:
            assert [record.value for record in topic.read()] == self.appended[topic.name]


def _settings(root: Path, etcd: Cluster, *, request_timeout_ms: int) -> Settings:
    return Settings(
        wal=WalSettings(free_bytes_min=0, reserve_records_min=RESERVED),
        runtime=RuntimeSettings(committers=1),
        storage=StorageSettings(mode="shared_fs"),
        store=StoreSettings(root=f"{root}/store"),
        metadata=MetadataSettings(
            backend="etcd",
            endpoints=etcd.endpoints,
            lease_ttl_s=LEASE_S,
            request_timeout_ms=request_timeout_ms,
        ),
    )


def refusal_of(topic: Topic) -> ForebayError:
    """Why the topic takes no append."""
    with pytest.raises(ForebayError) as refused:
        topic.append(b"refused")
    return refused.value


def test_shards_that_wait_for_a_stopped_etcd_hold_up_no_other(
    etcd: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is one committer, and more shards wait than it could serve: no thread is begun in the place of another."""
    monkeypatch.setattr(commit, "STUCK_SECONDS", 1e9)
    environment = EtcdEnvironment(tmp_path, etcd, request_timeout_ms=round(2 * PATIENCE * 1000))
    with environment.log:
        hungry = [environment.topic(f"hungry-{name}", name) for name in ("fsync", "disk")]
        others = [environment.topic(f"other-{name}", name) for name in CLASSES]
        epochs = environment.epochs([*hungry, *others])
        leave(etcd, "stopped")
        try:
            for topic in hungry:
                environment.use_up(topic)
            waiting: list[Ack] = [topic.append_nowait(b"%d" % topic.offsets().next) for topic in hungry]
            for topic in others:
                environment.append(topic, RESERVED // 2)

            assert [ack.done for ack in waiting] == [False, False]
        finally:
            come_back(etcd, "stopped")
        for topic, ack in zip(hungry, waiting, strict=True):
            environment.appended[topic.name].append(b"%d" % ack.result(PATIENCE))
        for topic in [*hungry, *others]:
            environment.append(topic, 2 * RESERVED)

        environment.check([*hungry, *others])
        assert environment.epochs([*hungry, *others]) == epochs, "no shard was lost, so none was acquired again"


@pytest.mark.parametrize("how", HOW)
def test_without_etcd_the_shard_that_ran_out_fails_alone_and_goes_on_when_etcd_is_back(
    etcd: Cluster, tmp_path: Path, how: str
) -> None:
    environment = EtcdEnvironment(tmp_path, etcd, request_timeout_ms=500)
    with environment.log:
        hungry = environment.topic("hungry", "fsync")
        others = [environment.topic(f"other-{name}", name) for name in CLASSES]
        epochs = environment.epochs([hungry, *others])
        leave(etcd, how)
        try:
            environment.use_up(hungry)
            for _ in range(2):
                refused = refusal_of(hungry)
                assert type(refused) is Unavailable, "nothing was done, and no other owner has the shard"
                assert etcd.endpoints[0] in str(refused)
                assert "check metadata.endpoints" in str(refused)
                for topic in others:
                    environment.append(topic, RESERVED // 4)
            environment.check([hungry, *others])
        finally:
            come_back(etcd, how)
        for topic in [hungry, *others]:
            environment.append(topic, 2 * RESERVED)

        environment.check([hungry, *others])
        assert environment.epochs([hungry, *others]) == epochs, "no shard was lost, so none was acquired again"


@pytest.mark.parametrize("how", HOW)
def test_without_etcd_no_shard_is_written_past_the_end_of_its_lease(etcd: Cluster, tmp_path: Path, how: str) -> None:
    environment = EtcdEnvironment(tmp_path, etcd, request_timeout_ms=500)
    with environment.log:
        hungry = environment.topic("hungry", "fsync")
        others = [environment.topic(f"other-{name}", name) for name in CLASSES]
        topics = [hungry, *others]
        epochs = environment.epochs(topics)
        leave(etcd, how)
        try:
            environment.use_up(hungry)
            assert isinstance(refusal_of(hungry), Unavailable)
            for topic in others:
                environment.append(topic, RESERVED // 4)
            environment.check(topics)
            environment.clock.ahead_s = LEASE_S

            refused = {topic.name: [attempt(topic, b"late %d" % number) for number in range(3)] for topic in topics}
            for errors in ([error for _, error in tried] for tried in refused.values()):
                assert all(isinstance(error, Fenced | Indeterminate | Unavailable) for error in errors)
                assert not any(isinstance(error, Moved) for error in errors), "no other owner has come"
        finally:
            come_back(etcd, how)

        for topic in topics:
            tried = refused[topic.name]
            until(lambda tried=tried, topic=topic: goes_on(topic, tried))  # type: ignore[misc]
            # What was being written as the lease ended is in doubt and may be there. Nothing else that was refused is.
            in_doubt = [value for value, error in tried if isinstance(error, Indeterminate)]
            found = [record.value for record in topic.read(on_gap=lambda partition, gap: None)]
            acked = environment.appended[topic.name]
            assert found[: len(acked)] == acked
            assert found[-1] == tried[-1][0], "the append that was acknowledged last"
            assert set(found[len(acked) : -1]) <= set(in_doubt), topic.name
        assert all(now > before for now, before in zip(environment.epochs(topics), epochs, strict=True))


def attempt(topic: Topic, value: bytes) -> tuple[bytes, ForebayError | None]:
    """Append a value that no other append has; why it was refused, if it was."""
    try:
        topic.append(value)
    except ForebayError as error:
        return value, error
    return value, None


def goes_on(topic: Topic, tried: list[tuple[bytes, ForebayError | None]]) -> bool:
    """Whether the topic takes an append by now, which is entered with those before it."""
    tried.append(attempt(topic, b"after %d" % len(tried)))
    return tried[-1][1] is None
