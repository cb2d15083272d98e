"""Definitions of topics from memory: no read while changes are followed, and never outdated for longer than stated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import forebay
from forebay import Storage, UnknownTopic
from forebay.definitions import FOLLOW_SECONDS, STALE_SECONDS, Definitions
from forebay.errors import Corrupt, Indeterminate, Unavailable
from forebay.format.metadata.keys import topic_key
from forebay.metadata import Entry, MemoryMetadata, Put, Watch
from forebay.settings import Settings
from forebay.testing.inside import inside
from forebay.testing.simulated.clock import ManualClock
from forebay.testing.simulated.metadata import Fault, FaultyMetadata
from forebay.topics import TopicName, TopicSpec
from tests.storage.rig import QUICK
from tests.support.waiting import until

ORDERS = TopicName("shop", "orders")


class Follower:
    """The definitions as one of several processes has them. It follows changes when the test says so."""

    def __init__(self, inner: MemoryMetadata) -> None:
        self.clock = ManualClock(seed=id(self) % 1000)
        self.metadata = FaultyMetadata(inner)
        self.definitions = Definitions(self.metadata, "/forebay", self.clock)
        self.watch: Watch = self.definitions.watch()
        self.definitions.follow(self.watch)

    def create(self) -> TopicSpec:
        spec = self.definitions.new_spec(ORDERS, partitions=1, durability=None, engine=None, compression="none")
        return self.definitions.create(spec, exist_ok=False).spec

    def follow(self) -> None:
        self.definitions.follow(self.watch)

    def add_partition(self) -> TopicSpec:
        return self.definitions.alter(ORDERS, lambda spec: spec.altered(partitions=spec.partitions + 1)).spec

    def reads(self, act: Callable[[], object]) -> int:
        """How many reads of the metadata store something takes."""
        self.metadata.calls = {}
        act()
        return sum(count for method, count in self.metadata.calls.items() if method != "transaction")


@pytest.fixture
def inner() -> MemoryMetadata:
    return MemoryMetadata()


@pytest.fixture
def here(inner: MemoryMetadata) -> Follower:
    return Follower(inner)


@pytest.fixture
def there(inner: MemoryMetadata) -> Follower:
    return Follower(inner)


def test_what_was_found_once_is_found_again_without_a_read(here: Follower) -> None:
    spec = here.create()

    assert here.reads(lambda: here.definitions.find(ORDERS)) == 1
    assert here.reads(lambda: here.definitions.find(ORDERS)) == 0
    assert here.definitions.find(ORDERS).spec == spec


def test_what_is_known_is_said_without_a_read_and_only_while_changes_are_followed(
    here: Follower, there: Follower
) -> None:
    spec = there.create()
    assert here.reads(lambda: here.definitions.known(ORDERS)) == 0
    assert here.definitions.known(ORDERS) is None, "not asked for yet"
    here.definitions.find(ORDERS)
    assert here.reads(lambda: here.definitions.known(ORDERS)) == 0
    assert here.definitions.known(ORDERS) == spec

    here.clock.advance(STALE_SECONDS + 1)
    assert here.definitions.known(ORDERS) is None
    here.follow()
    there.definitions.begin_deletion(ORDERS)
    here.follow()
    assert here.definitions.known(ORDERS) is None


@pytest.mark.parametrize("is_remembered", [True, False])
def test_a_change_by_another_process_is_obeyed_with_the_next_step(
    here: Follower,
    there: Follower,
    is_remembered: bool,  # noqa: FBT001
) -> None:
    there.create()
    if is_remembered:
        here.definitions.find(ORDERS)

    altered = there.add_partition()
    here.follow()

    assert here.definitions.find(ORDERS).spec == altered
    assert here.reads(lambda: here.definitions.find(ORDERS)) == 0
    assert FOLLOW_SECONDS < 1


def test_a_topic_that_another_process_has_deleted_is_unknown_and_its_successor_is_found(
    here: Follower, there: Follower
) -> None:
    first = there.create()
    here.definitions.find(ORDERS)

    there.definitions.begin_deletion(ORDERS)
    assert here.definitions.follow(here.watch).deleted == {ORDERS}
    assert here.definitions.gone([first]) == [first]
    with pytest.raises(UnknownTopic):
        here.definitions.find(ORDERS)

    second = there.create()
    here.follow()
    assert here.definitions.find(ORDERS).spec == second
    assert second.topic_id != first.topic_id
    assert here.definitions.gone([first, second]) == [first]


def test_definitions_that_are_listed_to_be_used_are_remembered(here: Follower, there: Follower) -> None:
    spec = there.create()
    assert here.definitions.all_to_use().specs == [spec]
    assert here.reads(lambda: here.definitions.find(ORDERS)) == 0
    altered = there.add_partition()
    here.follow()
    assert here.definitions.find(ORDERS).spec == altered


def test_changes_that_arrive_late_do_not_undo_what_was_read_since(here: Follower, there: Follower) -> None:
    there.create()
    there.definitions.begin_deletion(ORDERS)
    second = there.create()
    assert here.definitions.find(ORDERS).spec == second

    here.follow()

    assert here.reads(lambda: here.definitions.find(ORDERS)) == 0
    assert here.definitions.find(ORDERS).spec == second


@pytest.mark.parametrize("change", ["alter", "delete", "create"])
def test_what_this_process_changes_it_finds_at_once(here: Follower, there: Follower, change: str) -> None:
    """Also where it has not seen yet that another process has deleted the topic before."""
    first = there.create()
    here.definitions.find(ORDERS)
    if change == "alter":
        altered = here.add_partition()
        assert here.definitions.find(ORDERS).spec == altered
    elif change == "delete":
        here.definitions.begin_deletion(ORDERS)
        with pytest.raises(UnknownTopic):
            here.definitions.find(ORDERS)
    else:
        there.definitions.begin_deletion(ORDERS)
        second = here.create()
        assert here.definitions.find(ORDERS).spec == second != first


@pytest.mark.parametrize("fault", [Fault.FAIL_AFTER, Fault.TIME_OUT])
def test_a_deletion_whose_answer_is_lost_leaves_nothing_remembered(here: Follower, fault: Fault) -> None:
    here.create()
    here.definitions.find(ORDERS)
    here.metadata.inject(fault)

    with pytest.raises(Indeterminate):
        here.definitions.begin_deletion(ORDERS)

    assert here.reads(lambda: fault is Fault.FAIL_AFTER or here.definitions.find(ORDERS)) == (fault is Fault.TIME_OUT)
    here.metadata.land()
    if fault is Fault.FAIL_AFTER:
        with pytest.raises(UnknownTopic):
            here.definitions.find(ORDERS)


def test_without_answers_of_the_watch_what_is_remembered_counts_for_a_second(here: Follower, there: Follower) -> None:
    there.create()
    here.definitions.find(ORDERS)
    altered = there.add_partition()

    here.clock.advance(STALE_SECONDS)
    assert here.definitions.find(ORDERS).spec.partitions == 1, "within the stated time it may be outdated"
    here.clock.advance(0.001)

    assert here.definitions.find(ORDERS).spec == altered
    assert here.reads(lambda: here.definitions.find(ORDERS)) == 1, "until the watch answers, each time is a read"
    here.follow()
    assert here.reads(lambda: here.definitions.find(ORDERS)) == 0


def test_a_store_that_does_not_answer_is_not_covered_up_for_longer_than_that(here: Follower) -> None:
    here.create()
    here.definitions.find(ORDERS)
    here.metadata.inject(Fault.FAIL_BEFORE, method="get", count=100)

    here.definitions.find(ORDERS)
    here.clock.advance(STALE_SECONDS + 0.001)

    with pytest.raises(Unavailable):
        here.definitions.find(ORDERS)


def test_a_watch_that_has_lost_its_place_leaves_nothing_remembered(here: Follower, there: Follower) -> None:
    there.create()
    here.definitions.find(ORDERS)
    altered = there.add_partition()
    here.metadata.compact_watches()

    with pytest.raises(Unavailable):
        here.follow()
    here.definitions.unfollow()

    assert here.definitions.find(ORDERS).spec == altered
    here.watch = here.definitions.watch()
    here.follow()
    assert here.reads(lambda: here.definitions.find(ORDERS)) == 1
    assert here.reads(lambda: here.definitions.find(ORDERS)) == 0


def test_a_read_that_a_change_overtakes_is_not_remembered(
    here: Follower, there: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the change, which was seen before, would never be obeyed."""
    there.create()
    get = FaultyMetadata.get
    altered: list[TopicSpec] = []

    def overtaken(metadata: FaultyMetadata, key: str) -> Entry | None:
        found = get(metadata, key)
        if metadata is here.metadata and not altered:
            altered.append(there.add_partition())
            here.follow()
        return found

    monkeypatch.setattr(FaultyMetadata, "get", overtaken)
    assert here.definitions.find(ORDERS).spec.partitions == 1

    assert here.definitions.find(ORDERS).spec == altered[0]


def test_a_process_remembers_a_limited_number_of_definitions(here: Follower, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.definitions.REMEMBERED_MAX", 3)
    names = [TopicName("shop", f"t{number}") for number in range(5)]
    for name in names:
        spec = here.definitions.new_spec(name, partitions=1, durability=None, engine=None, compression="none")
        here.definitions.create(spec, exist_ok=False)
    for name in names:
        here.definitions.find(name)

    assert [here.reads(partial(here.definitions.find, name)) for name in reversed(names[2:])] == [0, 0, 0]
    assert here.reads(lambda: here.definitions.find(names[0])) == 1


def test_two_processes_on_one_database_go_by_each_others_changes(tmp_path: Path) -> None:
    settings = {**QUICK, "metadata": {"path": str(tmp_path / "shared.sqlite")}}
    with forebay.open(tmp_path / "a", settings) as here, forebay.open(tmp_path / "b", settings) as there:
        first = here.create_topic("shop/orders")
        until(lambda: there.topic("shop/orders").partitions == 1)
        here.alter_topic("shop/orders", partitions=3)
        until(lambda: there.topic("shop/orders").partitions == 3)
        held = there.topic("shop/orders")
        here.alter_topic("shop/orders", partitions=4)
        until(lambda: held.partitions == 4)
        here.delete_topic("shop/orders")
        second = here.create_topic("shop/orders")
        until(lambda: there.topic("shop/orders").spec == second.spec != first.spec)


def test_nothing_is_kept_of_a_topic_that_was_created_here_and_deleted_by_another_process(tmp_path: Path) -> None:
    """It was never looked up by its name here, so the change alone did not say which topic it was."""
    settings = Settings.load(overrides={**QUICK, "metadata": {"path": str(tmp_path / "shared.sqlite")}})
    with (
        Storage.open(tmp_path / "a", settings, clock=ManualClock()) as here,
        Storage.open(tmp_path / "b", settings, clock=ManualClock(seed=1)) as there,
    ):
        inside(here).follow_changes()
        here.create_topic("shop/orders")
        assert inside(here).entries()["handles"] == 1

        there.delete_topic("shop/orders")
        inside(here).follow_changes()

        assert inside(here).entries()["handles"] == 0


@pytest.mark.parametrize("is_first", [True, False])
def test_a_definition_that_cannot_be_read_keeps_no_other_topic_from_being_followed(
    tmp_path: Path,
    is_first: bool,  # noqa: FBT001
) -> None:
    settings = Settings.load(overrides=QUICK)
    with Storage.open(tmp_path / "log", settings, clock=ManualClock()) as log:
        orders = log.create_topic("shop/orders")
        metadata = inside(log).metadata
        if not is_first:
            inside(log).follow_changes()
        metadata.transaction([], [Put(topic_key("shop", "damaged", prefix="/forebay"), b"{}")])
        elsewhere = Definitions(metadata, "/forebay", ManualClock(seed=1))
        inside(log).follow_changes()
        altered = elsewhere.alter(ORDERS, lambda spec: spec.altered(partitions=2)).spec
        inside(log).follow_changes()

        assert orders.spec == altered
        with pytest.raises(Corrupt):
            log.topic("shop/damaged")


def test_a_topic_whose_creation_was_lost_and_that_was_deleted_at_once_is_not_revived(
    here: Follower, there: Follower, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Found by review: the repetition created a topic of the id whose deletion is noted, to be removed with it."""
    get, lost = (
        FaultyMetadata.get,
        here.definitions.new_spec(ORDERS, partitions=1, durability=None, engine=None, compression="none"),
    )
    here.metadata.inject(Fault.FAIL_AFTER)
    deleted: list[TopicSpec] = []

    def overtaken(metadata: FaultyMetadata, key: str) -> Entry | None:
        if metadata is here.metadata and not deleted:
            deleted.extend(there.definitions.begin_deletion(ORDERS))
        return get(metadata, key)

    monkeypatch.setattr(FaultyMetadata, "get", overtaken)
    created, is_new = here.definitions.create(lost, exist_ok=False)

    assert deleted == [lost]
    assert is_new
    assert here.definitions.get(ORDERS) == created
    assert created.topic_id != lost.topic_id


@pytest.mark.parametrize("fault", [Fault.FAIL_AFTER, Fault.TIME_OUT])
def test_a_creation_whose_answer_was_lost_is_recognised(here: Follower, fault: Fault) -> None:
    here.metadata.inject(fault)
    spec = here.definitions.new_spec(ORDERS, partitions=1, durability=None, engine=None, compression="none")

    created, is_new = here.definitions.create(spec, exist_ok=False)

    assert is_new
    assert (created == spec) == (fault is Fault.FAIL_AFTER)
    here.metadata.land()
    assert here.definitions.get(ORDERS) == created
