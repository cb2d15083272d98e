"""Who opens a partition for a load: its owner, else the directory that is asked; no record of another ends by it."""

from __future__ import annotations

import pytest

from forebay.format.metadata.descriptor import LoadStatus
from forebay.loads.book import LoadBook
from forebay.loads.prepare import ready_to_offer
from forebay.testing.simulated.clock import ManualClock
from tests.history.attached import LOAD, LoadEnvironment, LoadOwner, broken, values

BROUGHT = {0: values(0, 10), 1: values(1, 3)}


def _offer(node: LoadOwner, directory: str | None) -> None:
    manifest = node.prepare(BROUGHT)
    now = node.environment.clock.now_ms()
    load = ready_to_offer(
        node.loads.store(), node.environment.spec, manifest, created_at=now, expires_at=None, directory=directory
    )
    LoadBook(node.metadata, "/forebay", ManualClock()).offer(LOAD, load)


def _ended(environment: LoadEnvironment, node: LoadOwner) -> None:
    """The process of the node is gone, and did not export anything."""
    node.owner_session.session.close()


@pytest.mark.parametrize("mode", ["local", "shared_fs"])
def test_the_directory_that_is_asked_opens_what_no_caller_has(mode: str) -> None:
    environment = LoadEnvironment(mode, partitions=2)
    node, other = environment.node("a"), environment.node("b")
    _offer(node, "a")

    other.loads.step()
    assert environment.load().status is LoadStatus.OFFERED
    assert other.engine.shards() == []
    node.loads.step()

    assert environment.load().status is LoadStatus.COMMITTED
    assert broken(environment, node, BROUGHT) == []


@pytest.mark.parametrize("mode", ["local", "shared_fs"])
def test_who_held_a_partition_opens_it_for_a_load_whichever_caller_is_asked(mode: str) -> None:
    environment = LoadEnvironment(mode, partitions=2)
    first = environment.node("a")
    for partition in (0, 1):
        first.append(partition, 2)
    first.close()
    again, other = environment.node("a"), environment.node("b")
    _offer(again, "b" if mode == "shared_fs" else None)

    again.loads.step()

    assert environment.load().status is LoadStatus.COMMITTED
    assert other.engine.shards() == []
    assert broken(environment, again, BROUGHT) == []


def test_a_load_does_not_end_records_that_another_directory_has_not_exported() -> None:
    environment = LoadEnvironment("shared_fs", partitions=2)
    dead, asked = environment.node("a"), environment.node("b")
    dead.append(0, 5)
    _ended(environment, dead)
    _offer(asked, "b")

    asked.loads.step()
    progress = asked.loads.attach(LOAD)

    assert list(progress.elsewhere) == [0]
    assert "directory a has it" in progress.elsewhere[0]
    assert environment.load().status is LoadStatus.OFFERED
    back = environment.node("a")
    back.settle()
    assert broken(environment, back, BROUGHT, others={1: asked}) == []


def test_what_a_directory_left_in_order_is_taken_by_the_one_that_is_asked() -> None:
    environment = LoadEnvironment("shared_fs", partitions=2)
    left, asked = environment.node("a"), environment.node("b")
    left.append(0, 5)
    left.close()
    _offer(asked, "b")

    asked.loads.step()

    assert environment.load().status is LoadStatus.COMMITTED
    assert broken(environment, asked, BROUGHT) == []


def test_a_partition_that_is_promised_elsewhere_waits_for_its_new_owner() -> None:
    environment = LoadEnvironment("shared_fs", partitions=2)
    node, target, asked = environment.node("a"), environment.node("b"), environment.node("c")
    node.append(0, 5)
    shard = node.shard(0)
    node.engine.seal_shard(
        node.engine.open_shard(shard.ref), target="b", quiesce=lambda: node.archiving.forget(shard.ref.id)
    )
    _offer(asked, "c")

    asked.loads.step()
    assert environment.load().status is LoadStatus.OFFERED
    target.shard(0)
    target.settle()

    assert environment.load().status is LoadStatus.COMMITTED
    assert broken(environment, target, BROUGHT, others={1: asked}) == []


@pytest.mark.parametrize("by", ["who has what lacks it", "who has what has it"])
def test_a_load_that_its_topic_left_behind_half_way_is_given_up(by: str) -> None:
    environment = LoadEnvironment("local", partitions=2)
    first, second = environment.node("a"), environment.node("b")
    first.append(0, 2)
    first.append(1)
    brought = {0: values(0, 5), 1: values(1, 5)}
    first.offer(brought)
    first.engine.seal_shard(first.engine.open_shard(first.shard(1).ref), target="b", quiesce=lambda: None)
    assert second.append(1) == [1]
    second.loads.step()
    assert environment.load().status is LoadStatus.OFFERED, "as long as nothing waits for it, it may yet come back"
    assert [part.partition for part in first.loads.attach(LOAD).attached] == [0]
    node = first
    if by == "who has what lacks it":
        node = second
        first.engine.seal_shard(first.engine.open_shard(first.shard(0).ref), target="b", quiesce=lambda: None)
    assert node.append(0) == [7]

    assert node.settle().status is LoadStatus.ABANDONED

    assert [step[0] for step in node.stream(0)] == [0, 1, 2, 7]
    assert broken(environment, node, brought, others={1: second}) == []
