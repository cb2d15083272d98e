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
from forebay.format.metadata.keys import deleted_key
from forebay.format.metadata.value import encode_value
from forebay.metadata import Delete, Entry, MemoryMetadata, Put
from forebay.settings import Settings
from forebay.shard import Owner, acquire
from forebay.shard.ownership import OwnerSession, Wanted
from forebay.storage.in_memory import InMemoryBackend
from forebay.storage.lifetime import Lifetime
from forebay.testing.simulated.clock import ManualClock
from forebay.testing.simulated.metadata import Fault, FaultyMetadata
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
class FailingEnvironment:
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


def environment_of(**settings: int) -> FailingEnvironment:
    clock = ManualClock()
    metadata = LaggingMetadata(clock)
    chosen = Settings.load(overrides={"metadata": settings})
    session = OwnerSession(metadata, 30, ":memory:")
    engine = BalkyEngine(chosen, clock=clock, metadata=metadata, owner_session=session)
    lifetime = Lifetime()
    backend = InMemoryBackend(chosen, metadata, engine, clock=clock, lifetime=lifetime)
    return FailingEnvironment(clock, metadata, engine, Storage(chosen, backend, clock=clock, lifetime=lifetime))


@pytest.fixture
def environment() -> FailingEnvironment:
    return environment_of()


def test_the_steps_of_the_creation_flow_are_register_visible_shards_in_this_order(
    environment: FailingEnvironment,
) -> None:
    steps: list[str] = []
    environment.metadata.on_read = lambda: steps.append(
        "visible" if environment.keys == ["/forebay/topics/shop/orders"] else "?"
    )
    environment.engine.refusal = lambda: steps.append("shards")

    topic = environment.log.create_topic("shop/orders", partitions=2)
    environment.metadata.on_read = lambda: None

    assert steps == ["visible", "shards"]
    assert environment.keys == ["/forebay/topics/shop/orders"], "shards are opened at their first use"
    assert topic.append(b"v", partition=1) == 0


def test_a_topic_that_is_visible_at_once_costs_one_read_and_no_wait(environment: FailingEnvironment) -> None:
    environment.log.create_topic("shop/orders", partitions=1024)

    assert environment.metadata.calls["get"] == 1
    assert environment.metadata.calls["transaction"] == 1
    assert environment.metadata.calls["range"] == 2, "deletions to be finished, and shards of an earlier topic"
    assert environment.clock.monotonic() == 0.0


def test_creation_waits_for_a_topic_that_shows_late(environment: FailingEnvironment) -> None:
    environment.metadata.shown_from = 12.0

    environment.log.create_topic("shop/orders")

    assert 12.0 <= environment.clock.monotonic() < 12.1
    assert [str(spec.name) for spec in environment.log.topics()] == ["shop/orders"]


@pytest.mark.parametrize(("settings", "waited"), [({}, 30), ({"topic_visible_timeout_s": 7}, 7)])
def test_a_topic_that_never_shows_is_undone_and_the_error_names_step_wait_and_way_out(
    settings: dict[str, int], waited: int
) -> None:
    environment = environment_of(**settings)
    environment.metadata.shown_from = 1e9

    with pytest.raises(
        Unavailable,
        match=rf"^shop/orders: step 2 of 3, .*not done after {waited} s \(metadata.topic_visible_timeout_s\).*"
        r"forebay doctor.*create the topic again; nothing of it is left$",
    ):
        environment.log.create_topic("shop/orders")

    assert environment.clock.monotonic() == waited
    assert environment.keys == []
    environment.metadata.shown_from = 0.0
    assert environment.log.create_topic("shop/orders", partitions=3).partitions == 3


@pytest.mark.parametrize(("settings", "waited"), [({}, 3), ({"shard_visible_timeout_s": 0}, 0)])
def test_shards_that_cannot_be_created_are_undone_and_the_error_names_step_wait_and_way_out(
    settings: dict[str, int], waited: int
) -> None:
    environment = environment_of(**settings)
    environment.engine.refusal = lambda: Unavailable("the shelf is locked")

    with pytest.raises(
        Unavailable,
        match=rf"^shop/orders: step 3 of 3, creating the shards, is not done after {waited} s "
        r"\(metadata.shard_visible_timeout_s\): the shelf is locked; .*create the topic again; nothing of it is left$",
    ):
        environment.log.create_topic("shop/orders", partitions=2)

    assert environment.clock.monotonic() == waited
    assert environment.keys == []
    environment.engine.refusal = lambda: None
    assert environment.log.create_topic("shop/orders").append(b"v") == 0


def test_an_engine_that_is_ready_a_little_later_is_waited_for(environment: FailingEnvironment) -> None:
    environment.engine.refusal = lambda: Unavailable("not yet") if environment.clock.monotonic() < 2.0 else None

    assert environment.log.create_topic("shop/orders").append(b"v") == 0
    assert 2.0 <= environment.clock.monotonic() < 2.1


@pytest.mark.parametrize(
    ("error", "kind"),
    [(OSError(28, "no space left"), Unavailable), (Corrupt("the shelf is damaged"), Corrupt)],
    ids=["disk", "damage"],
)
def test_an_engine_that_fails_for_good_is_not_waited_for_and_the_topic_is_undone(
    environment: FailingEnvironment, error: Exception, kind: type[ForebayError]
) -> None:
    environment.engine.refusal = lambda: error

    with pytest.raises(kind, match=r"no space left|the shelf is damaged") as raised:
        environment.log.create_topic("shop/orders")

    assert type(raised.value) is kind
    assert str(raised.value).endswith("; nothing of it is left")
    assert (environment.clock.monotonic(), environment.keys) == (0.0, [])


def test_an_interrupted_wait_undoes_the_topic_as_well(environment: FailingEnvironment) -> None:
    environment.metadata.shown_from = 1e9

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    environment.clock.sleep = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        environment.log.create_topic("shop/orders")

    assert environment.keys == []


def test_what_others_have_done_with_the_topic_meanwhile_is_undone_too(environment: FailingEnvironment) -> None:
    """It can be seen before its creation is over: a shard was opened, and a group has committed."""

    def use() -> Exception:
        environment.engine.refusal = lambda: Corrupt("the shelf is damaged")
        topic = environment.log.topic("shop/orders")
        topic.append(b"v", partition=0)
        environment.log.group("g").commit("shop/orders", 0, 1)
        assert len(environment.keys) == 4
        return Corrupt("the shelf is damaged")

    environment.engine.refusal = use

    with pytest.raises(Corrupt, match="nothing of it is left"):
        environment.log.create_topic("shop/orders", partitions=2)

    assert [key for key in environment.keys if not key.startswith("/forebay/late/")] == []


def test_a_topic_deleted_while_it_is_created_is_not_waited_for(environment: FailingEnvironment) -> None:
    environment.metadata.shown_from = 1e9

    def delete() -> None:
        environment.metadata.on_read = lambda: None
        environment.metadata.shown_from = 0.0
        Storage.delete_topic(environment.log, "shop/orders")

    environment.metadata.on_read = delete
    with pytest.raises(UnknownTopic, match="deleted while it was being created"):
        environment.log.create_topic("shop/orders")

    assert (environment.clock.monotonic(), environment.keys) == (0.0, [])


def _deleted_elsewhere(environment: FailingEnvironment) -> TopicSpec:
    """An earlier topic of that name, which another process deletes right now: it began after this one had looked."""
    earlier, inner = environment.spec(), environment.metadata.inner

    def begin() -> None:
        environment.metadata.on_read = lambda: None
        owner = Owner(inner.session(30).id, "elsewhere")
        acquire(inner, [Wanted(STATE, earlier.topic_id)], owner, clock=ManualClock())
        inner.transaction([], [Put(deleted_key(earlier.topic_id), encode_value(earlier))])

    environment.metadata.on_read = begin
    return earlier


def test_shards_of_an_earlier_topic_that_is_being_deleted_are_waited_for(environment: FailingEnvironment) -> None:
    earlier = _deleted_elsewhere(environment)
    begin = environment.metadata.on_read

    def end() -> None:
        if environment.clock.monotonic() >= 1.0:
            environment.metadata.on_read = lambda: None
            environment.metadata.inner.transaction([], [Delete(STATE), Delete(deleted_key(earlier.topic_id))])

    def begin_and_end() -> None:
        begin()
        environment.metadata.on_read = end

    environment.metadata.on_read = begin_and_end
    assert environment.log.create_topic("shop/orders").append(b"v") == 0
    assert 1.0 <= environment.clock.monotonic() < 1.1


def test_a_deletion_that_does_not_end_is_not_waited_for_any_longer(environment: FailingEnvironment) -> None:
    _deleted_elsewhere(environment)

    with pytest.raises(
        Unavailable,
        match=r"step 3 of 3.*after 3 s \(metadata.shard_visible_timeout_s\): "
        r"shop/orders\[0\] is still recorded as a shard of an earlier topic of that name.*nothing of it is left$",
    ):
        environment.log.create_topic("shop/orders")

    assert environment.log.topics() == []
    assert environment.log.create_topic("shop/orders").append(b"v") == 0, "what the other had begun is finished"


def test_shards_of_an_earlier_topic_of_that_name_are_forgotten(environment: FailingEnvironment) -> None:
    """A process that found the topic just before it was deleted has made the state after the deletion was over."""
    owner = Owner(environment.metadata.session(30).id, "elsewhere")
    acquire(environment.metadata, [Wanted(STATE, "f" * 32)], owner, clock=ManualClock())

    assert environment.log.create_topic("shop/orders").append(b"v") == 0


def test_an_undo_that_fails_is_told_as_indeterminate_and_creating_again_converges(
    environment: FailingEnvironment,
) -> None:
    def fail() -> Exception:
        environment.metadata.inject(Fault.FAIL_BEFORE, count=5)
        return Corrupt("the shelf is damaged")

    environment.engine.refusal = fail
    with pytest.raises(Indeterminate, match="the shelf is damaged; taking the topic back failed as well.*exist_ok"):
        environment.log.create_topic("shop/orders")
    environment.metadata.heal()
    left = environment.log.topic("shop/orders").spec

    environment.engine.refusal = lambda: None
    assert environment.log.create_topic("shop/orders", exist_ok=True).spec == left


def test_a_crash_after_registering_leaves_a_topic_that_the_next_create_completes(
    environment: FailingEnvironment,
) -> None:
    registered = environment.definitions().create(environment.spec(), exist_ok=False).spec

    with pytest.raises(Conflict, match="exists already"):
        environment.log.create_topic("shop/orders")
    assert environment.engine.asked == 0
    topic = environment.log.create_topic("shop/orders", exist_ok=True)

    assert topic.spec == registered
    assert environment.engine.asked == 1
    assert topic.append(b"v", partition=1) == 0


def test_a_crash_inside_the_undo_leaves_a_deletion_that_the_next_create_finishes(
    environment: FailingEnvironment,
) -> None:
    definitions = environment.definitions()
    registered = definitions.create(environment.spec(), exist_ok=False).spec
    definitions.withdraw(registered)
    assert DeletionNotes(environment.metadata, "/forebay", environment.clock).deleting() == [registered]

    topic = environment.log.create_topic("shop/orders")

    assert topic.spec.topic_id != registered.topic_id
    assert environment.keys == ["/forebay/topics/shop/orders"]


def test_an_engine_that_refuses_does_not_undo_a_topic_that_was_there(environment: FailingEnvironment) -> None:
    topic = environment.log.create_topic("shop/orders")
    topic.append(b"v")
    environment.engine.refusal = lambda: Unavailable("the shelf is locked")

    with pytest.raises(Unavailable, match="^the shelf is locked$"):
        environment.log.create_topic("shop/orders", exist_ok=True)

    assert values(topic.read()) == [b"v"]


def test_an_answer_that_got_lost_is_asked_for_again_and_makes_one_topic(environment: FailingEnvironment) -> None:
    for fault in (Fault.FAIL_AFTER, Fault.TIME_OUT):
        environment.metadata.inject(fault)
        topic = environment.log.create_topic("shop/orders")
        environment.metadata.land()
        assert [spec.topic_id for spec in environment.log.topics()] == [topic.spec.topic_id]
        environment.log.delete_topic("shop/orders")

    environment.metadata.inject(Fault.TIME_OUT, count=ATTEMPTS)
    with pytest.raises(Indeterminate, match="may exist now.*exist_ok"):
        environment.log.create_topic("shop/orders")
    assert environment.keys == []


def test_whatever_call_of_the_store_fails_the_topic_is_there_or_nothing_is(ledger: Ledger) -> None:
    """One call at a time, and the store works again afterwards."""
    sound = environment_of()
    sound.log.create_topic("shop/orders", partitions=2)
    faults = [(method, n, Fault.FAIL_BEFORE) for method, count in sound.metadata.calls.items() for n in range(count)]
    faults += [("transaction", 0, fault) for fault in (Fault.FAIL_AFTER, Fault.TIME_OUT)]
    for method, after, fault in faults:
        environment = environment_of()
        environment.metadata.calls.clear()
        environment.metadata.inject(fault, method=method, after=after)
        try:
            environment.log.create_topic("shop/orders", partitions=2)
        except Unavailable:
            assert environment.keys == []
        environment.metadata.heal()
        environment.metadata.land()
        assert environment.log.create_topic("shop/orders", partitions=2, exist_ok=True).append(b"v", partition=1) == 0
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


def test_a_deletion_left_over_names_the_topics_it_could_not_remove(environment: FailingEnvironment) -> None:
    registered = environment.definitions().create(environment.spec(), exist_ok=False).spec
    environment.definitions().withdraw(registered)
    environment.engine.keeps = True
    deletions = Deletions(
        environment.metadata,
        Settings(),
        environment.clock,
        holder="here",
        objects=None,
        drop=lambda ref: True,
        delete_shard=environment.engine.delete_shard,
        forget_topic=lambda spec: None,
    )

    assert deletions.finish() == [registered]
    with pytest.raises(Unavailable, match="not gone yet; try again"):
        environment.log.create_topic("shop/orders")
