"""What every log must do that serves subscriptions of topics with dispatch `non_reliable`, however it is reached.

Inherit `LossyContract`, and give it a fixture `home`, as for the contracts of `surface`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forebay.errors import Conflict, Invalid
from forebay.records import EARLIEST
from forebay.surface import Log, SubscribableTopic
from forebay.testing.contracts.subscriptions import numbers, seen, topic_of
from forebay.testing.contracts.surface import PATIENT_S, SurfaceHome


class LossyContract:
    """The suite. A test's name is its claim."""

    @pytest.fixture
    def log(self, home: SurfaceHome) -> Iterator[Log]:
        with home.open() as log:
            yield log

    @pytest.fixture
    def topic(self, log: Log) -> SubscribableTopic:
        log.create_topic("shop/live", dispatch="non_reliable")
        return topic_of(log, "shop/live")

    def test_a_record_is_delivered_at_most_once_from_the_first_consumer_on(self, topic: SubscribableTopic) -> None:
        topic.append(b"before")
        subscription = topic.subscribe("screen")
        topic.append(b"also before")
        with subscription.consumer() as consumer:
            assert consumer.take() == []
            topic.append_many(numbers(3))
            taken = consumer.take()
            assert [(one.record.value, one.attempt) for one in taken] == [(b"0", 1), (b"1", 1), (b"2", 1)]
            assert (consumer.nack(*taken, delay_ms=0), consumer.ack(*taken), consumer.lost) == (0, 0, 0)
            assert consumer.take() == []
        topic.append(b"between")

        with subscription.consumer() as consumer:
            assert consumer.take() == []
            topic.append(b"after")
            assert seen(consumer.take(wait_s=PATIENT_S)) == [b"after"]

    def test_what_a_slow_consumer_misses_is_counted_and_it_goes_on_with_the_newest(
        self, topic: SubscribableTopic
    ) -> None:
        subscription = topic.subscribe("screen", window_records_max=4)
        with subscription.consumer() as consumer:
            topic.append_many(numbers(3))
            assert seen(consumer.take(1)) == [b"0"]
            topic.append_many(numbers(10, 3))

            assert seen(consumer.take()) == numbers(4, 9)
            assert (consumer.lost, subscription.lag()[0].lost) == (8, 8)
            topic.append_many(numbers(5))
            assert seen(consumer.take()) == numbers(4, 1)
            assert consumer.lost == 9

    def test_shared_records_go_to_one_consumer_each_and_each_sees_the_loss_since_it_came(
        self, topic: SubscribableTopic
    ) -> None:
        subscription = topic.subscribe("screens", mode="shared", window_records_max=10)
        with subscription.consumer() as first:
            topic.append_many(numbers(12))
            assert seen(first.take(3)) == numbers(3, 2)
            with subscription.consumer() as second:
                assert seen(second.take()) == numbers(7, 5)
                assert (first.lost, second.lost) == (2, 0)

    def test_nothing_is_stored_and_there_is_no_place_to_move(self, log: Log, topic: SubscribableTopic) -> None:
        subscription = topic.subscribe("screen")
        with subscription.consumer() as consumer:
            topic.append_many(numbers(3))
            consumer.ack(*consumer.take())
            assert subscription.peek() == []
        subscription.flush()

        assert log.groups() == []
        assert [(lag.cursor, lag.end, lag.lag) for lag in subscription.lag()] == [(3, 3, 0)]
        with pytest.raises(Invalid, match="non_reliable"):
            subscription.seek(EARLIEST)
        with pytest.raises(Invalid, match="non_reliable"):
            topic.subscribe("early", start=EARLIEST)
        for option in ({"deliveries_max": 3}, {"ack_timeout_ms": 5}, {"backoff_min_ms": 1}):
            with pytest.raises(Invalid, match="at most once"):
                topic.subscribe("other", **option)  # type: ignore[arg-type]
        assert [spec.name for spec in topic.subscriptions()] == ["screen"]

    def test_the_dispatch_changes_only_while_there_are_no_subscriptions(
        self, log: Log, topic: SubscribableTopic
    ) -> None:
        subscription = topic.subscribe("screen")
        with pytest.raises(Conflict, match="screen"):
            log.alter_topic("shop/live", dispatch="reliable")
        assert log.alter_topic("shop/live", partitions=2).dispatch == "non_reliable"

        subscription.delete()

        assert log.alter_topic("shop/live", dispatch="reliable").dispatch == "reliable"
        again = topic_of(log, "shop/live")
        again.append(b"kept", partition=0)
        with again.subscribe("screen", start=EARLIEST).consumer() as consumer:
            assert seen(consumer.take()) == [b"kept"]

    def test_a_paused_subscription_loses_what_is_too_far_behind(self, topic: SubscribableTopic) -> None:
        subscription = topic.subscribe("screen", window_records_max=2)
        with subscription.consumer() as consumer:
            subscription.pause()
            topic.append_many(numbers(5))
            assert consumer.take() == []
            subscription.resume()
            assert seen(consumer.take()) == numbers(2, 3)
            assert consumer.lost == 3

    def test_partitions_that_are_added_are_delivered_from_their_first_record_on(
        self, log: Log, topic: SubscribableTopic
    ) -> None:
        with topic.subscribe("screen").consumer() as consumer:
            assert consumer.take() == []
            log.alter_topic("shop/live", partitions=2)
            topic_of(log, "shop/live").append(b"added", partition=1)
            assert seen(consumer.take(wait_s=PATIENT_S)) == [b"added"]
