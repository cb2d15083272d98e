"""What every log that serves subscriptions must do with spent records, however it is reached.

Inherit `DeadLetterContract`, or `LastingDeadLetterContract` where records outlive their log, and give it a fixture
`home`, as for the contracts of `surface`.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from forebay.errors import Conflict, Invalid, UnknownTopic
from forebay.records import EARLIEST, HEADERS_MAX, DeadLetter, DeliveryState, LetterPlace, SpentReason
from forebay.surface import Consumer, Log, SubscribableTopic, Subscription
from forebay.testing.contracts.subscriptions import numbers, topic_of
from forebay.testing.contracts.surface import PATIENT_S, SurfaceHome

MEBIBYTE = 1024 * 1024
LARGEST = 8 * MEBIBYTE - 1024 - 16
"""A value that an append takes by the settings as they are, and not a byte more."""
DEAD = "shop/orders.billing.dead_letters"


def spend(consumer: Consumer, poison: set[bytes], error: str | None = None) -> None:
    """Take and answer everything until nothing more comes: what is poison is refused each time."""
    while taken := consumer.take():
        for one in taken:
            if one.record.value in poison:
                consumer.nack(one, delay_ms=0, error=error)
            else:
                consumer.ack(one)


def values(letters: list[DeadLetter]) -> list[bytes | None]:
    """The values of the records that the letters are."""
    return [letter.record.value for letter in letters]


class DeadLetterContract:
    """The suite. A test's name is its claim."""

    @pytest.fixture
    def log(self, home: SurfaceHome) -> Iterator[Log]:
        with home.open() as log:
            yield log

    @pytest.fixture
    def topic(self, log: Log) -> SubscribableTopic:
        log.create_topic("shop/orders")
        return topic_of(log)

    @pytest.fixture
    def billing(self, topic: SubscribableTopic) -> Subscription:
        return topic.subscribe("billing", start=EARLIEST, deliveries_max=2, on_spent="dead_letter")

    # Definitions

    def test_the_topic_is_named_after_the_subscription_or_given_and_is_made_where_it_is_missing(
        self, log: Log, topic: SubscribableTopic, billing: Subscription
    ) -> None:
        log.create_topic("shop/there", partitions=3)

        given = topic.subscribe("given", deliveries_max=2, on_spent="dead_letter", dead_letter_topic="shop/there")
        made = topic.subscribe("made", deliveries_max=2, on_spent="dead_letter", dead_letter_topic="elsewhere")

        assert billing.spec.dead_letter_topic == billing.dead_letters().topic == DEAD
        assert (given.spec.dead_letter_topic, made.spec.dead_letter_topic) == ("shop/there", "default/elsewhere")
        assert log.topic("shop/there").partitions == 3
        assert {spec.topic for spec in log.topics()} >= {"orders.billing.dead_letters", "elsewhere"}
        again = topic.subscribe("made", deliveries_max=2, on_spent="dead_letter", dead_letter_topic="default/elsewhere")
        assert again.spec == made.spec
        with pytest.raises(Conflict, match="dead_letter_topic"):
            topic.subscribe("made", deliveries_max=2, on_spent="dead_letter", dead_letter_topic="another")

    def test_names_that_are_too_long_together_make_a_shorter_one(self, log: Log) -> None:
        log.create_topic(f"shop/{'t' * 100}")
        topic = topic_of(log, f"shop/{'t' * 100}")

        made = [
            topic.subscribe(f"{'s' * 99}{end}", deliveries_max=1, on_spent="dead_letter").spec.dead_letter_topic
            for end in "ab"
        ]

        assert len(set(made)) == 2

    @pytest.mark.parametrize(
        "options",
        [
            {"on_spent": "dead_letter"},
            {"deliveries_max": 2, "on_spent": "drop", "dead_letter_topic": "shop/dead"},
            {"deliveries_max": 2, "dead_letter_topic": "shop/dead"},
            {"deliveries_max": 2, "on_spent": "dead_letter", "dead_letter_topic": "shop/orders"},
            {"deliveries_max": 2, "on_spent": "dead_letter", "dead_letter_topic": "/orders/"},
        ],
    )
    def test_options_that_cannot_be_are_refused(
        self, log: Log, topic: SubscribableTopic, options: dict[str, object]
    ) -> None:
        with pytest.raises(Invalid):
            topic.subscribe("billing", **options)  # type: ignore[arg-type]
        assert topic.subscriptions() == []
        assert [spec.topic for spec in log.topics()] == ["orders"]

    def test_a_circle_is_refused(self, log: Log, topic: SubscribableTopic) -> None:
        for name in ("b", "c"):
            log.create_topic(name)
        topic.subscribe("s", deliveries_max=1, on_spent="dead_letter", dead_letter_topic="b")
        topic_of(log, "b").subscribe("s", deliveries_max=1, on_spent="dead_letter", dead_letter_topic="c")

        with pytest.raises(Invalid, match="circle"):
            topic_of(log, "c").subscribe("s", deliveries_max=1, on_spent="dead_letter", dead_letter_topic="shop/orders")

        assert topic_of(log, "c").subscriptions() == []

    def test_a_subscription_without_dead_letters_says_so(self, topic: SubscribableTopic) -> None:
        with pytest.raises(Invalid, match="on_spent"):
            topic.subscribe("billing").dead_letters()

    # Sending

    def test_a_spent_record_is_a_dead_letter_once_and_then_counts_as_done(
        self, topic: SubscribableTopic, billing: Subscription
    ) -> None:
        topic.append(b"good", key=b"a")
        topic.append(b"bad", key=b"k", tag="t", headers={"h": b"1", "n": None}, timestamp=77)
        with billing.consumer() as consumer:
            spend(consumer, {b"bad"}, error="no such customer")
            (lag,) = billing.lag()
            assert (lag.cursor, lag.lag, lag.spent, lag.dead_letters) == (2, 0, 0, 1)

        (letter,) = billing.dead_letters().letters()

        assert (letter.topic, letter.subscription, letter.attempts) == ("shop/orders", "billing", 2)
        assert (letter.reason, letter.error) == (SpentReason.NACK, "no such customer")
        assert letter.record == next(iter(topic.read(1)))
        assert (letter.record.headers, letter.record.tag) == ((("h", b"1"), ("n", None)), "t")
        assert abs(letter.at - 77) > 1000
        assert billing.dead_letters().get(letter.place.offset) == letter
        with pytest.raises(Invalid, match="no dead letter at offset 99"):
            billing.dead_letters().get(99)

    def test_the_reason_says_how_the_last_delivery_ended(self, topic: SubscribableTopic) -> None:
        topic.append_many(numbers(3))
        subscription = topic.subscribe(
            "slow", start=EARLIEST, mode="shared", deliveries_max=1, on_spent="dead_letter", ack_timeout_ms=50
        )
        with subscription.consumer("works") as works:
            with subscription.consumer("leaves") as leaves:
                leaves.take(1)
            (one,) = works.take(1)
            works.nack(one)
            works.take(1)
            while subscription.lag()[0].dead_letters < 3:
                assert works.take(wait_s=PATIENT_S / 20) == []

        found = {letter.record.value: (letter.reason, letter.error) for letter in subscription.dead_letters().letters()}
        assert found == {
            b"0": (SpentReason.CONSUMER_LEFT, None),
            b"1": (SpentReason.NACK, None),
            b"2": (SpentReason.ACK_TIMEOUT, None),
        }

    def test_spent_records_are_sent_in_order_once_all_before_them_is_done(
        self, topic: SubscribableTopic, billing: Subscription
    ) -> None:
        topic.append_many(numbers(4))
        with billing.consumer() as consumer:
            consumer.nack(*consumer.take()[1:], delay_ms=0)
            again = consumer.take()
            consumer.nack(*again, delay_ms=0)
            assert consumer.take() == []
            assert billing.dead_letters().letters() == []
            assert (billing.lag()[0].spent, billing.lag()[0].cursor) == (3, 0)

        with billing.consumer() as consumer:
            (first,) = consumer.take()
            consumer.ack(first)
            assert consumer.take() == []

            assert values(billing.dead_letters().letters()) == numbers(3, 1)
            assert billing.lag()[0].lag == 0

    def test_a_seek_back_makes_a_second_dead_letter(self, topic: SubscribableTopic, billing: Subscription) -> None:
        topic.append_many(numbers(2))
        with billing.consumer() as consumer:
            spend(consumer, {b"1"})

        for _ in range(2):
            billing.seek(EARLIEST)
            with billing.consumer() as consumer:
                spend(consumer, {b"1"})

        assert values(billing.dead_letters().letters()) == [b"1", b"1", b"1"]

    def test_dead_letters_of_many_partitions_and_keys_all_arrive(self, log: Log) -> None:
        log.create_topic("many", partitions=3)
        log.create_topic("dead", partitions=2)
        topic = topic_of(log, "many")
        topic.append_many(numbers(40), keys=[b"k%d" % (number % 5) if number % 3 else None for number in range(40)])
        subscription = topic.subscribe(
            "s", start=EARLIEST, mode="key_shared", deliveries_max=1, on_spent="dead_letter", dead_letter_topic="dead"
        )
        with subscription.consumer() as consumer:
            spend(consumer, set(numbers(20, 10)))  # type: ignore[arg-type]

        letters = subscription.dead_letters().letters()
        assert sorted(values(letters), key=lambda value: int(value or b"")) == numbers(20, 10)
        for letter in letters:
            if letter.record.key is not None:
                found = topic_of(log, "dead").read_by_key(letter.record.key, history=True)
                assert letter.record.value in [record.value for record in found]

    def test_a_deleted_dead_letter_topic_has_a_named_state_and_nothing_is_lost(
        self, log: Log, topic: SubscribableTopic, billing: Subscription
    ) -> None:
        topic.append_many(numbers(3))
        with billing.consumer() as consumer:
            log.delete_topic(DEAD)
            spend(consumer, {b"1"})
            (lag,) = billing.lag()
            assert (lag.state, lag.spent, lag.cursor) == (DeliveryState.DEAD_LETTERS_DELETED, 1, 1)
            assert DEAD in (lag.failure or "")
            with pytest.raises(UnknownTopic):
                billing.dead_letters()

            log.create_topic(DEAD)
            for _ in range(50):
                if billing.lag()[0].dead_letters:
                    break
                assert consumer.take(wait_s=PATIENT_S / 50) == []

            assert values(billing.dead_letters().letters()) == [b"1"]
            assert (billing.lag()[0].state, billing.lag()[0].failure) == (DeliveryState.DELIVERING, None)

    def test_a_full_dead_letter_topic_has_a_named_state_and_nothing_is_lost(
        self, log: Log, topic: SubscribableTopic, billing: Subscription
    ) -> None:
        log.alter_topic(DEAD, cap_records=1, on_full="reject_new")
        topic.append_many(numbers(3))
        with billing.consumer() as consumer:
            spend(consumer, {b"0", b"1", b"2"})
            assert billing.lag()[0].state is DeliveryState.DEAD_LETTERS_FULL
            log.alter_topic(DEAD, cap_records=None, on_full="discard_old")
            for _ in range(50):
                if not billing.lag()[0].spent:
                    break
                assert consumer.take(wait_s=PATIENT_S / 50) == []

        assert values(billing.dead_letters().letters()) == numbers(3)

    # Operators

    def test_letters_are_listed_page_by_page(self, topic: SubscribableTopic, billing: Subscription) -> None:
        topic.append_many(numbers(5))
        with billing.consumer() as consumer:
            spend(consumer, set(numbers(5)))  # type: ignore[arg-type]
        letters = billing.dead_letters()

        first = letters.letters(2)
        second = letters.letters(2, after=first[-1].place)
        third = letters.letters(2, after=second[-1].place)

        assert values(first + second + third) == numbers(5)
        assert letters.letters(2, after=third[-1].place) == []
        with pytest.raises(Invalid):
            letters.letters(0)

    def test_a_list_holds_a_few_mebibytes_and_goes_on(self, topic: SubscribableTopic, billing: Subscription) -> None:
        large = [b"%d" % number * MEBIBYTE for number in range(6)]
        for value in large:
            topic.append(value)
        with billing.consumer() as consumer:
            spend(consumer, set(large))
        letters = billing.dead_letters()

        pages = [letters.letters()]
        while page := letters.letters(after=pages[-1][-1].place):
            pages.append(page)

        assert [letter.record.value for page in pages for letter in page] == large
        assert max(len(page) for page in pages) <= 4

    def test_a_record_that_just_fits_its_topic_becomes_a_dead_letter_and_comes_back(
        self, topic: SubscribableTopic, billing: Subscription
    ) -> None:
        large = b"v" * LARGEST
        topic.append(large)
        topic.append(b"many", headers=[(f"h{number}", b"1") for number in range(HEADERS_MAX)])
        topic.append(b"good")
        with billing.consumer() as consumer:
            spend(consumer, {large, b"many"}, error="\u20ac" * 500)
        letters = billing.dead_letters()

        found = letters.letters(1)
        found += letters.letters(1, after=found[0].place)
        assert values(found) == [large, b"many"]
        assert [len(letter.record.headers) for letter in found] == [0, HEADERS_MAX]
        assert [lag.lag for lag in billing.lag()] == [0]
        assert letters.replay() == 2
        assert [(record.value, len(record.headers)) for record in topic.read(3)] == [(large, 0), (b"many", HEADERS_MAX)]

    def test_a_replay_brings_records_back_as_they_were_each_once(self, log: Log) -> None:
        log.create_topic("shop/orders", partitions=2)
        topic = topic_of(log)
        topic.append_many(numbers(6), partition=1, headers=[{"h": b"%d" % number} for number in range(6)], tags="t")
        subscription = topic.subscribe("billing", start=EARLIEST, deliveries_max=1, on_spent="dead_letter")
        with subscription.consumer() as consumer:
            spend(consumer, set(numbers(6)))  # type: ignore[arg-type]
        letters = subscription.dead_letters()
        chosen = [letter.place for letter in letters.letters()][1:3]

        assert letters.replay(chosen) == 2
        assert letters.replay(chosen) == 0
        assert letters.replay([]) == 0
        assert letters.replay([LetterPlace(0, 99), LetterPlace(7, 0)]) == 0

        back = list(topic.read(6, partition=1))
        assert [(record.value, record.tag, record.headers) for record in back] == [
            (b"1", "t", (("h", b"1"),)),
            (b"2", "t", (("h", b"2"),)),
        ]
        assert values(letters.letters()) == [b"0", b"3", b"4", b"5"]
        assert letters.replay() == 4
        assert [record.value for record in topic.read(8, partition=1)] == [b"0", b"3", b"4", b"5"]
        assert letters.letters() == []
        assert log.groups() == ["billing"]

    def test_a_replay_goes_elsewhere_if_it_is_asked_to(
        self, log: Log, topic: SubscribableTopic, billing: Subscription
    ) -> None:
        log.create_topic("fixed", partitions=3)
        topic.append_many(numbers(9), keys=[b"k%d" % (number % 4) for number in range(9)])
        with billing.consumer() as consumer:
            spend(consumer, set(numbers(9)))  # type: ignore[arg-type]

        with pytest.raises(UnknownTopic):
            billing.dead_letters().replay(to="nowhere")
        with pytest.raises(Invalid, match="into itself"):
            billing.dead_letters().replay(to=DEAD)
        assert billing.dead_letters().replay(to="fixed") == 9

        fixed = topic_of(log, "fixed")
        assert sorted(record.value or b"" for record in fixed.read()) == numbers(9)
        assert [record.value for record in fixed.read_by_key(b"k1", history=True)] == [b"1", b"5"]

    def test_operations_are_about_one_subscription_or_the_whole_topic(self, log: Log, topic: SubscribableTopic) -> None:
        log.create_topic("dead")
        topic_of(log, "dead").append(b"no letter")
        topic.append_many(numbers(3))
        subscriptions = [
            topic.subscribe(name, start=EARLIEST, deliveries_max=1, on_spent="dead_letter", dead_letter_topic="dead")
            for name in ("one", "two")
        ]
        for subscription in subscriptions:
            with subscription.consumer() as consumer:
                spend(consumer, {b"1"})

        assert [len(subscription.dead_letters().letters()) for subscription in subscriptions] == [1, 1]
        whole = topic_of(log, "dead").dead_letters()
        assert [letter.subscription for letter in whole.letters()] == ["one", "two"]
        assert subscriptions[0].dead_letters().purge() == 1
        assert [letter.subscription for letter in whole.letters()] == ["two"]
        assert whole.purge([letter.place for letter in whole.letters()]) == 1
        assert [record.value for record in topic_of(log, "dead").read()] == [b"no letter"]

    def test_a_dead_letter_of_a_dead_letter_keeps_both_origins(
        self, log: Log, topic: SubscribableTopic, billing: Subscription
    ) -> None:
        topic.append(b"bad")
        with billing.consumer() as consumer:
            spend(consumer, {b"bad"})
        second = topic_of(log, DEAD).subscribe(
            "again", start=EARLIEST, deliveries_max=1, on_spent="dead_letter", dead_letter_topic="grave"
        )
        with second.consumer() as consumer:
            spend(consumer, {b"bad"})

        (letter,) = second.dead_letters().letters()
        assert (letter.topic, letter.subscription) == (DEAD, "again")
        assert second.dead_letters().replay() == 1
        assert [letter.topic for letter in billing.dead_letters().letters()] == ["shop/orders", "shop/orders"]


class LastingDeadLetterContract(DeadLetterContract):
    """The suite for logs whose records outlive them."""

    def test_why_a_record_is_spent_survives_a_restart(self, home: SurfaceHome) -> None:
        with home.open() as log:
            log.create_topic("shop/orders")
            topic = topic_of(log)
            topic.append_many(numbers(3))
            billing = topic.subscribe("billing", start=EARLIEST, deliveries_max=1, on_spent="dead_letter")
            with billing.consumer() as consumer:
                taken = consumer.take()
                consumer.nack(taken[1], error="first")
                consumer.ack(taken[2])
                # 0 is with the consumer, so 1 waits; leaving makes 0 spent as well.
                assert billing.dead_letters().letters() == []
            assert values(billing.dead_letters().letters()) == [b"0", b"1"]

        with home.open() as log:
            billing = topic_of(log).subscribe("billing")
            letters = billing.dead_letters().letters()
            assert [letter.error for letter in letters] == [None, "first"]
            with billing.consumer() as consumer:
                assert consumer.take() == []
            assert len(billing.dead_letters().letters()) == 2

    def test_a_record_that_waits_for_one_before_it_is_sent_after_a_restart_with_its_reason(
        self, home: SurfaceHome
    ) -> None:
        with home.open() as log:
            log.create_topic("shop/orders")
            topic = topic_of(log)
            topic.append_many(numbers(2))
            billing = topic.subscribe("billing", start=EARLIEST, deliveries_max=2, on_spent="dead_letter")
            with billing.consumer() as consumer:
                for _ in range(2):
                    consumer.nack(consumer.take()[-1], delay_ms=0, error="no")

        with home.open() as log, topic_of(log).subscribe("billing").consumer() as consumer:
            (first,) = consumer.take()
            consumer.ack(first)
            assert consumer.take() == []
            (letter,) = topic_of(log).subscription("billing").dead_letters().letters()
            assert (letter.record.value, letter.attempts) == (b"1", 2)
            assert (letter.reason, letter.error) == (SpentReason.NACK, "no")
