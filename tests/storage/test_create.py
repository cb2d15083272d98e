"""A topic comes to be in three steps - registered, visible, shards ready - and a step that fails undoes the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest

import forebay
from forebay import Conflict, Indeterminate, Storage, Unavailable, UnknownTopic
from forebay.catalog.transact import ATTEMPTS
from forebay.cleanup.deleted_topics import DeletionNotes, Deletions
from forebay.definitions import Definitions
from forebay.engines import MemoryEngine
from forebay.errors import Corrupt, ForebayError
from forebay.metadata import Entry, MemoryMetadata
from forebay.settings import Settings
from forebay.shard import Owner, acquire
from forebay.shard.ownership import OwnerSession, Wanted
from forebay.storage.in_memory import InMemoryBackend
from forebay.storage.lifetime import Lifetime
from forebay.testing.clock import ManualClock
from forebay.testing.metadata import Fault, FaultyMetadata
from forebay.topics import ShardRef, TopicName, TopicSpec
from tests.ledger import Ledger
from tests.storage.rig import QUICK, values

STATE = "/forebay/storage/topics/shop/orders/0/state"


class LaggingMetadata(FaultyMetadata):
    """One whose reads do not show topics until `shown_from`, as if they were answered by a copy that lags behind."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__(MemoryMetadata())
        self.clock = clock
        self.shown_from = 0.0
        self.on_read: Callable[[], None] = lambda: None

    def get(self, key: str) -> Entry | None:
        self.on_read()
        found = super().get(key)
        return None if self._hides(key) else found

    def range(self, prefix: str, *, start_after: str | None = None, limit: int | None = None) -> list[Entry]:
        found = super().range(prefix, start_after=start_after, limit=limit)
        return [entry for entry in found if not self._hides(entry.key)]

    def _hides(self, key: str) -> bool:
        return key.startswith("/forebay/topics/") and self.clock.monotonic() < self.shown_from


class BalkyEngine(MemoryEngine):
    """One that cannot be made ready while `refusal` says why, and that removes no shard while `keeps` is true."""

    refusal: Callable[[], Exception | None] = staticmethod(lambda: None)
    keeps = False
    asked = 0

    def prepare(self, spec: TopicSpec) -> None:
        self.asked += 1
        error = self.refusal()
        if error is not None:
            raise error
        super().prepare(spec)

    def delete_shard(self, ref: ShardRef) -> None:
        if self.keeps:
            raise OSError(5, "no")
        super().delete_shard(ref)


@dataclasses.dataclass
class House:
    """A log in memory whose parts can be made to fail."""

    clock: ManualClock
    metadata: LaggingMetadata
    engine: BalkyEngine
    log: Storage

    @property
    def keys(self) -> list[str]:
        """All that is stored."""
        return [entry.key for entry in self.metadata.inner.range("/forebay/")]

    def definitions(self) -> Definitions:
        return Definitions(self.metadata, "/forebay", self.clock)

    def spec(self) -> TopicSpec:
        return self.definitions().new_spec(
            TopicName("shop", "orders"), partitions=2, durability="ephemeral", engine=None, compression="none"
        )


def house_of(**settings: int) -> House:
    clock = ManualClock()
    metadata = LaggingMetadata(clock)
    chosen = Settings.load(overrides={"metadata": settings})
    session = OwnerSession(metadata, 30, ":memory:")
    engine = BalkyEngine(chosen, clock=clock, metadata=metadata, owner_session=session)
    lifetime = Lifetime()
    backend = InMemoryBackend(chosen, metadata, engine, clock=clock, lifetime=lifetime)
    return House(clock, metadata, engine, Storage(chosen, backend, clock=clock, lifetime=lifetime))


@pytest.fixture
def house() -> House:
    return house_of()


def test_the_steps_of_the_creation_flow_are_register_visible_shards_in_this_order(house: House) -> None:
    steps: list[str] = []
    house.metadata.on_read = lambda: steps.append("visible" if house.keys == ["/forebay/topics/shop/orders"] else "?")
    house.engine.refusal = lambda: steps.append("shards")

    topic = house.log.create_topic("shop/orders", partitions=2)
    house.metadata.on_read = lambda: None

    assert steps == ["visible", "shards"]
    assert house.keys == ["/forebay/topics/shop/orders"], "shards are opened at their first use"
    assert topic.append(b"v", partition=1) == 0


def test_a_topic_that_is_visible_at_once_costs_one_read_and_no_wait(house: House) -> None:
    house.log.create_topic("shop/orders", partitions=1024)

    assert house.metadata.calls["get"] == 1
    assert house.metadata.calls["transaction"] == 1
    assert house.metadata.calls["range"] == 2, "deletions to be finished, and shards of an earlier topic"
    assert house.clock.monotonic() == 0.0


def test_creation_waits_for_a_topic_that_shows_late(house: House) -> None:
    house.metadata.shown_from = 12.0

    house.log.create_topic("shop/orders")

    assert 12.0 <= house.clock.monotonic() < 12.1
    assert [str(spec.name) for spec in house.log.topics()] == ["shop/orders"]


@pytest.mark.parametrize(("settings", "waited"), [({}, 30), ({"topic_visible_timeout_s": 7}, 7)])
def test_a_topic_that_never_shows_is_undone_and_the_error_names_step_wait_and_way_out(
    settings: dict[str, int], waited: int
) -> None:
    house = house_of(**settings)
    house.metadata.shown_from = 1e9

    with pytest.raises(
        Unavailable,
        match=rf"^shop/orders: step 2 of 3, .*not done after {waited} s \(metadata.topic_visible_timeout_s\).*"
        r"forebay doctor.*create the topic again; nothing of it is left$",
    ):
        house.log.create_topic("shop/orders")

    assert house.clock.monotonic() == waited
    assert house.keys == []
    house.metadata.shown_from = 0.0
    assert house.log.create_topic("shop/orders", partitions=3).partitions == 3


@pytest.mark.parametrize(("settings", "waited"), [({}, 3), ({"shard_visible_timeout_s": 0}, 0)])
def test_shards_that_cannot_be_created_are_undone_and_the_error_names_step_wait_and_way_out(
    settings: dict[str, int], waited: int
) -> None:
    house = house_of(**settings)
    house.engine.refusal = lambda: Unavailable("the shelf is locked")

    with pytest.raises(
        Unavailable,
        match=rf"^shop/orders: step 3 of 3, creating the shards, is not done after {waited} s "
        r"\(metadata.shard_visible_timeout_s\): the shelf is locked; .*create the topic again; nothing of it is left$",
    ):
        house.log.create_topic("shop/orders", partitions=2)

    assert house.clock.monotonic() == waited
    assert house.keys == []
    house.engine.refusal = lambda: None
    assert house.log.create_topic("shop/orders").append(b"v") == 0


def test_an_engine_that_is_ready_a_little_later_is_waited_for(house: House) -> None:
    house.engine.refusal = lambda: Unavailable("not yet") if house.clock.monotonic() < 2.0 else None

    assert house.log.create_topic("shop/orders").append(b"v") == 0
    assert 2.0 <= house.clock.monotonic() < 2.1


@pytest.mark.parametrize(
    ("error", "kind"),
    [(OSError(28, "no space left"), Unavailable), (Corrupt("the shelf is damaged"), Corrupt)],
    ids=["disk", "damage"],
)
def test_an_engine_that_fails_for_good_is_not_waited_for_and_the_topic_is_undone(
    house: House, error: Exception, kind: type[ForebayError]
) -> None:
    house.engine.refusal = lambda: error

    with pytest.raises(kind, match=r"no space left|the shelf is damaged") as raised:
        house.log.create_topic("shop/orders")

    assert type(raised.value) is kind
    assert str(raised.value).endswith("; nothing of it is left")
    assert (house.clock.monotonic(), house.keys) == (0.0, [])


def test_an_interrupted_wait_undoes_the_topic_as_well(house: House) -> None:
    house.metadata.shown_from = 1e9

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    house.clock.sleep = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        house.log.create_topic("shop/orders")

    assert house.keys == []


def test_what_others_have_done_with_the_topic_meanwhile_is_undone_too(house: House) -> None:
    """It can be seen before its creation is over: a shard was opened, and a group has committed."""

    def use() -> Exception:
        house.engine.refusal = lambda: Corrupt("the shelf is damaged")
        topic = house.log.topic("shop/orders")
        topic.append(b"v", partition=0)
        house.log.group("g").commit("shop/orders", 0, 1)
        assert len(house.keys) == 4
        return Corrupt("the shelf is damaged")

    house.engine.refusal = use

    with pytest.raises(Corrupt, match="nothing of it is left"):
        house.log.create_topic("shop/orders", partitions=2)

    assert [key for key in house.keys if not key.startswith("/forebay/late/")] == []


def test_a_topic_deleted_while_it_is_created_is_not_waited_for(house: House) -> None:
    house.metadata.shown_from = 1e9

    def delete() -> None:
        house.metadata.on_read = lambda: None
        house.metadata.shown_from = 0.0
        Storage.delete_topic(house.log, "shop/orders")

    house.metadata.on_read = delete
    with pytest.raises(UnknownTopic, match="deleted while it was being created"):
        house.log.create_topic("shop/orders")

    assert (house.clock.monotonic(), house.keys) == (0.0, [])


def test_shards_of_an_earlier_topic_of_that_name_are_waited_for(house: House) -> None:
    """Another process deletes it right now, and began after this one had looked."""
    owner = Owner(house.metadata.session(30).id, "elsewhere")
    acquire(house.metadata, [Wanted(STATE, "f" * 32)], owner, clock=ManualClock())
    with pytest.raises(Unavailable, match=r"after 3 s.*orders\[0\] is still recorded as a shard of an earlier topic"):
        house.log.create_topic("shop/orders")
    assert house.keys == [STATE]

    gone_at = house.clock.monotonic() + 1.0

    def leave() -> None:
        if house.clock.monotonic() >= gone_at:
            house.metadata.on_read = lambda: None
            house.metadata.inner.transaction([], [forebay.metadata.Delete(STATE)])

    house.metadata.on_read = leave
    assert house.log.create_topic("shop/orders").append(b"v") == 0


def test_an_undo_that_fails_is_told_as_indeterminate_and_creating_again_converges(house: House) -> None:
    def fail() -> Exception:
        house.metadata.inject(Fault.FAIL_BEFORE, count=5)
        return Corrupt("the shelf is damaged")

    house.engine.refusal = fail
    with pytest.raises(
        Indeterminate, match="the shelf is damaged; taking the topic back failed as well.*exist_ok=True"
    ):
        house.log.create_topic("shop/orders")
    house.metadata.heal()
    left = house.log.topic("shop/orders").spec

    house.engine.refusal = lambda: None
    assert house.log.create_topic("shop/orders", exist_ok=True).spec == left


def test_a_crash_after_registering_leaves_a_topic_that_the_next_create_completes(house: House) -> None:
    registered = house.definitions().create(house.spec(), exist_ok=False).spec

    with pytest.raises(Conflict, match="exists already"):
        house.log.create_topic("shop/orders")
    assert house.engine.asked == 0
    topic = house.log.create_topic("shop/orders", exist_ok=True)

    assert topic.spec == registered
    assert house.engine.asked == 1
    assert topic.append(b"v", partition=1) == 0


def test_a_crash_inside_the_undo_leaves_a_deletion_that_the_next_create_finishes(house: House) -> None:
    definitions = house.definitions()
    registered = definitions.create(house.spec(), exist_ok=False).spec
    definitions.withdraw(registered)
    assert DeletionNotes(house.metadata, "/forebay", house.clock).deleting() == [registered]

    topic = house.log.create_topic("shop/orders")

    assert topic.spec.topic_id != registered.topic_id
    assert house.keys == ["/forebay/topics/shop/orders"]


def test_an_engine_that_refuses_does_not_undo_a_topic_that_was_there(house: House) -> None:
    topic = house.log.create_topic("shop/orders")
    topic.append(b"v")
    house.engine.refusal = lambda: Unavailable("the shelf is locked")

    with pytest.raises(Unavailable, match="^the shelf is locked$"):
        house.log.create_topic("shop/orders", exist_ok=True)

    assert values(topic.read()) == [b"v"]


def test_an_answer_that_got_lost_is_asked_for_again_and_makes_one_topic(house: House) -> None:
    for fault in (Fault.FAIL_AFTER, Fault.TIME_OUT):
        house.metadata.inject(fault)
        topic = house.log.create_topic("shop/orders")
        house.metadata.land()
        assert [spec.topic_id for spec in house.log.topics()] == [topic.spec.topic_id]
        house.log.delete_topic("shop/orders")

    house.metadata.inject(Fault.TIME_OUT, count=ATTEMPTS)
    with pytest.raises(Indeterminate, match="may exist now.*exist_ok=True"):
        house.log.create_topic("shop/orders")
    assert house.keys == []


def test_whatever_call_of_the_store_fails_the_topic_is_there_or_nothing_is(ledger: Ledger) -> None:
    """One call at a time, and the store works again afterwards."""
    sound = house_of()
    sound.log.create_topic("shop/orders", partitions=2)
    faults = [(method, n, Fault.FAIL_BEFORE) for method, count in sound.metadata.calls.items() for n in range(count)]
    faults += [("transaction", 0, fault) for fault in (Fault.FAIL_AFTER, Fault.TIME_OUT)]
    for method, after, fault in faults:
        house = house_of()
        house.metadata.calls.clear()
        house.metadata.inject(fault, method=method, after=after)
        try:
            house.log.create_topic("shop/orders", partitions=2)
        except Unavailable:
            assert house.keys == []
        house.metadata.heal()
        house.metadata.land()
        assert house.log.create_topic("shop/orders", partitions=2, exist_ok=True).append(b"v", partition=1) == 0
    ledger.count("faults inside the creation of a topic", n=len(faults))


def test_a_database_that_cannot_be_opened_leaves_no_topic_and_frees_the_name(tmp_path: Path) -> None:
    with forebay.open(tmp_path / "log", {**QUICK, "metadata": {"shard_visible_timeout_s": 0}}) as log:
        (tmp_path / "log" / "rocksdb").write_text("in the way")

        with pytest.raises(Unavailable, match="step 3 of 3.*nothing of it is left"):
            log.create_topic("t", engine="rocksdb")

        assert log.topics() == []
        assert log.create_topic("t").append(b"v") == 0


def test_a_disk_that_is_not_mounted_leaves_no_topic(tmp_path: Path) -> None:
    quick = {**QUICK, "metadata": {"shard_visible_timeout_s": 0}, "wal": {"dir": str(tmp_path / "mount" / "wal")}}
    with forebay.open(tmp_path / "log", quick) as log:
        (tmp_path / "mount").rename(tmp_path / "unmounted")

        with pytest.raises(Unavailable, match="step 3 of 3.*where the log files lie, is not there.*mounted"):
            log.create_topic("t")

        (tmp_path / "unmounted").rename(tmp_path / "mount")
        assert log.topics() == []
        assert log.create_topic("t").append(b"v") == 0


def test_a_deletion_left_over_names_the_topics_it_could_not_remove(house: House) -> None:
    registered = house.definitions().create(house.spec(), exist_ok=False).spec
    house.definitions().withdraw(registered)
    house.engine.keeps = True
    deletions = Deletions(
        house.metadata,
        Settings(),
        house.clock,
        holder="here",
        objects=None,
        drop=lambda ref: True,
        delete_shard=house.engine.delete_shard,
        forget_topic=lambda spec: None,
    )

    assert deletions.finish() == [registered]
    with pytest.raises(Unavailable, match="not gone yet; try again"):
        house.log.create_topic("shop/orders")
