"""Deliberate breaks of the opening of shards: a lock, an intent or the gate left out must be seen by the checks."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import pytest

import forebay
from forebay.engines.registry import Registry
from forebay.engines.segment import SegmentEngine
from forebay.errors import Moved
from forebay.shard.ownership import anywhere
from forebay.storage.shards import OwnerShards
from forebay.testing.checks.invariants import Violation
from forebay.testing.inside import inside
from forebay.topics import ShardRef
from tests.engines.test_registry import A, Shard
from tests.ledger import Ledger
from tests.mutants.breach import Breach
from tests.storage.rig import quick
from tests.support.waiting import PATIENCE

THREADS: Final = 2


def _opened_at_once() -> list[Violation]:
    """Threads that open one shard at once, each as far as another would get meanwhile."""
    registry, opened, others = Registry[Shard](), list[Shard](), threading.Event()

    def opening(ref: ShardRef) -> Shard:
        opened.append(Shard(ref))
        if len(opened) == THREADS:
            others.set()
        others.wait(0.1)
        return opened[-1]

    with ThreadPoolExecutor(THREADS) as threads:
        for call in [threads.submit(registry.open, A, opening) for _ in range(THREADS)]:
            call.result(PATIENCE)
    return [Violation("I19", f"one shard was opened {len(opened)} times")] if len(opened) != 1 else []


def _given_up_after_another_opened() -> list[Violation]:
    """A worker gives up a shard that it lost, and that another thread has opened again since."""
    registry = Registry[Shard]()
    lost = registry.open(A, Shard)
    registry.give_up(A.spec.topic_id, A.partition, lambda shard: None)
    registry.open(A, Shard)

    registry.give_up_this(lost, lambda: True, Shard.close)

    return [] if registry.shards() else [Violation("I19", "the shard of the present owner was closed")]


def _looked_at() -> list[Violation]:
    """A topic that was never used is looked at."""
    with tempfile.TemporaryDirectory() as root, forebay.open(f"{root}/log", quick()) as log:
        log.create_topic("t").offsets()
        return [Violation("I34", f"{shard.ref} was acquired by a look") for shard in inside(log).shards()]


def _refused(use: Callable[[forebay.Topic], object]) -> Callable[[], list[Violation]]:
    """A topic of this directory is used behind a gate that refuses it."""

    def show() -> list[Violation]:
        with tempfile.TemporaryDirectory() as root:
            with forebay.open(f"{root}/log", quick()) as log:
                log.create_topic("t").append(b"v")
            with forebay.open(f"{root}/log", quick(), may_own=lambda ref: False) as log:
                with contextlib.suppress(Moved):
                    use(log.topic("t"))
                return [Violation("I34", f"{shard.ref} was acquired past the gate") for shard in inside(log).shards()]

    return show


def _no_lock(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Registry, "lock", lambda registry, topic_id, partition: threading.RLock())


def _given_up_by_name(patch: pytest.MonkeyPatch) -> None:
    def give_up(registry: Registry[Shard], shard: Shard, may_close: object, closing: Callable[[Shard], None]) -> bool:
        registry.give_up(shard.ref.spec.topic_id, shard.ref.partition, lambda found: closing(found or shard))
        return True

    patch.setattr(Registry, "give_up_this", give_up)


def _reading_acquires(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(OwnerShards, "read", OwnerShards.own)


def _engine_not_asked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SegmentEngine, "may_own", lambda engine, ref: True)


def _gate_not_asked(patch: pytest.MonkeyPatch) -> None:
    def without(shards: OwnerShards, *arguments: object, **named: object) -> None:
        plain(shards, *arguments, **(named | {"may_own": anywhere}))  # type: ignore[arg-type]

    plain = OwnerShards.__init__
    patch.setattr(OwnerShards, "__init__", without)


MUTANTS: Final = (
    Breach("a shard is opened without its lock", _no_lock, _opened_at_once, "I19"),
    Breach("a lost shard is given up by name", _given_up_by_name, _given_up_after_another_opened, "I19"),
    Breach("the intent to read acquires", _reading_acquires, _looked_at, "I34"),
    Breach("a look does not ask whose the shard is", _engine_not_asked, _looked_at, "I34"),
    Breach("an append does not ask the gate", _gate_not_asked, _refused(lambda topic: topic.append(b"v")), "I34"),
    Breach("a read does not ask the gate", _gate_not_asked, _refused(lambda topic: list(topic.read())), "I34"),
)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_checks_see_an_opening_that_leaves_something_out(
    mutant: Breach, monkeypatch: pytest.MonkeyPatch, ledger: Ledger
) -> None:
    mutant.check_sound()
    mutant.check_caught(monkeypatch, ledger)
