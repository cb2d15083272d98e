"""Deliberate breaks of what a broker and its client promise over HTTP: a check of that promise must name each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

import forebay
import forebay.appends.producer_window
import forebay.appends.queue
import forebay.broker.records
import forebay.storage.append
from forebay.client.lanes import ProducerLane, ProducerLanes, Target
from forebay.client.transport import CallAttempts
from forebay.errors import Full
from forebay.partitioning import partitions_of_key
from forebay.storage.cursors import Cursors
from forebay.testing.checks import conformance
from forebay.testing.checks.conformance import ConformanceProbe, run_checks
from forebay.topics import TopicName
from tests.client.test_life_after_errors import (
    test_a_lane_is_not_used_for_other_records_after_an_attempt_in_doubt as check_lane,
)
from tests.ledger import Ledger
from tests.storage.rig import QUICK
from tests.storage.test_grown_repeats import (
    test_an_append_that_partitions_overtake_is_refused_and_comes_in_once as check_gate,
)
from tests.support.brokers import RunningBroker, running_broker
from tests.support.proxies import CuttingProxy, cutting_proxy

pytestmark = pytest.mark.slow

Break = Callable[[pytest.MonkeyPatch], None]


def _content_not_compared(patch: pytest.MonkeyPatch) -> None:
    for module in (forebay.appends.queue, forebay.appends.producer_window):
        patch.setattr(module, "check_content", lambda *_: None)


BROKEN: Final[dict[str, tuple[Break, Callable[[ConformanceProbe], None]]]] = {
    "a key is looked up in partition 0 only": (
        lambda patch: patch.setattr(forebay.broker.records, "partitions_of_key", lambda *_: [0]),
        conformance.check_a_key_is_found_without_its_partition,
    ),
    "a key is looked up by today's number of partitions only": (
        lambda patch: patch.setattr(
            forebay.broker.records,
            "partitions_of_key",
            lambda key, count, _, real=partitions_of_key: real(key, count, ()),
        ),
        conformance.check_a_key_is_found_without_its_partition,
    ),
    "the partition of a record is ignored": (
        lambda patch: patch.setattr(forebay.storage.append, "resolve_named", lambda partition, *_: (partition, None)),
        conformance.check_a_record_goes_to_the_partition_that_it_names,
    ),
    "a repeat is looked for by today's number of partitions only": (
        lambda patch: patch.setattr(forebay.storage.append, "numbers_calls", lambda _: False),
        conformance.check_a_repeat_is_known_after_partitions_were_added,
    ),
    "the topic that a request means is not looked at": (
        lambda patch: patch.setattr(TopicName, "means", lambda *_: True),
        conformance.check_a_request_that_means_a_deleted_topic_is_refused,
    ),
    "the records of a repeat are not compared": (
        _content_not_compared,
        conformance.check_a_repeat_with_other_records_is_refused,
    ),
    "of the records of a repeat only the number is compared": (
        lambda patch: patch.setattr(forebay.appends.queue, "content_checksum", lambda columns: columns.count),
        conformance.check_a_repeat_with_other_records_is_refused,
    ),
    "stored cursors are not looked at": (
        lambda patch: patch.setattr(Cursors, "every", lambda _: iter(())),
        conformance.check_the_lag_of_a_subscription_is_measured_before_a_consumer_comes,
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broker_that_breaks_a_promise_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, ledger: Ledger
) -> None:
    mutate, check = BROKEN[name]
    mutate(monkeypatch)
    monkeypatch.setattr(conformance, "CHECKS", (check,))
    monkeypatch.setattr(conformance, "WAIT_SECONDS", 1.0)

    with running_broker(tmp_path / "data") as broker, broker.client() as client:
        (done,) = run_checks(client)

    ledger.count("mutants caught", n=int(done.failure is not None))
    assert done.failure is not None


def test_an_attempt_that_comes_in_behind_the_look_of_its_repeat_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forebay.appends.queue, "check_generation", lambda *_: None)
    with forebay.open(tmp_path / "log", QUICK) as log:
        topic = log.create_topic("t", partitions=4)
        with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
            check_gate((log, topic))


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[RunningBroker]:
    with running_broker(tmp_path / "data") as broker:
        yield broker


@pytest.fixture
def proxy(broker: RunningBroker) -> Iterator[CuttingProxy]:
    with cutting_proxy(broker.url) as proxy:
        yield proxy


def test_a_sequence_that_is_used_again_after_a_doubt_is_named(
    broker: RunningBroker, proxy: CuttingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CallAttempts, "is_in_doubt", False)

    with pytest.raises(AssertionError):
        check_lane(broker, proxy, monkeypatch, Full)


def test_a_lane_that_goes_on_after_a_reset_is_named(
    broker: RunningBroker, proxy: CuttingProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lane is kept while its append is in doubt, and carries the next one with the same sequence."""
    taken: list[ProducerLane] = []
    take: Any = ProducerLanes.take

    def kept(lanes: ProducerLanes, target: Target) -> ProducerLane:
        taken.append(taken[1] if len(taken) == 2 else take(lanes, target))
        return taken[-1]

    monkeypatch.setattr(ProducerLanes, "take", kept)

    with pytest.raises(AssertionError, match="its sequence names other records now"):
        check_lane(broker, proxy, monkeypatch, Full)
