"""What routers must do, however they are reached. Knows the Protocols of `forebay.surface`.

Inherit `RouterContract`, and give it a fixture `routed`: a log, and its routers, which run.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import pytest

from forebay.errors import Conflict, Invalid, UnknownRouter, UnknownTopic
from forebay.records import EARLIEST, HEADERS_MAX, Position, Record
from forebay.routing import CONDITIONS_MAX, HeaderMatch, OnRefused, RouterState, RouterStatus
from forebay.surface import Log, Routers
from forebay.testing.contracts.subscriptions import topic_of
from forebay.testing.contracts.surface import PATIENT_S

LARGEST = 8 * 1024 * 1024 - 1024 - 16
"""A value that an append takes by the settings as they are, and not a byte more."""
RAW = b"\x00\xff"
"""Bytes that are no text."""


class RoutedLog(NamedTuple):
    """A log and its routers."""

    log: Log
    routers: Routers

    def topics(self, *names: str) -> None:
        """Create these topics."""
        for name in names:
            self.log.create_topic(name)

    def arrived(self, topic: str, count: int) -> list[Record]:
        """The first records of a topic, waited for."""
        with self.log.topic(topic).follow(EARLIEST, timeout=PATIENT_S) as stream:
            return list(itertools.islice(stream, count))

    def counted(self, name: str, count: int) -> dict[str, RouterStatus]:
        """How all routers fare once this one has counted so many records, which it does behind their append."""
        waiting = threading.Event()
        for _ in range(int(PATIENT_S / 0.05)):
            found = {status.router.name: status for status in self.routers.statuses()}
            if found[name].routed >= count:
                return found
            waiting.wait(0.05)
        raise AssertionError(f"{name} has not counted {count} records in {PATIENT_S:g} s")

    def waiting(self, name: str) -> RouterStatus:
        """How the router fares once something keeps it waiting, between two attempts."""
        waiting = threading.Event()
        for _ in range(int(PATIENT_S / 0.05)):
            found = self.routers.status(name)
            if found.failures:
                return found
            waiting.wait(0.05)
        raise AssertionError(f"{name} does not wait after {PATIENT_S:g} s")


def values(records: Iterable[Record]) -> list[bytes | None]:
    """The values alone."""
    return [record.value for record in records]


class RouterContract:
    """The suite. A test's name is its claim."""

    def test_a_circle_by_way_of_dead_letters_is_refused_whichever_comes_last(self, routed: RoutedLog) -> None:
        routed.topics("shop/orders", "shop/dead", "shop/far", "shop/other")
        orders = topic_of(routed.log)
        letters = partial(orders.subscribe, deliveries_max=1, on_spent="dead_letter")
        made = letters("first", dead_letter_topic="shop/dead")
        with pytest.raises(Invalid, match="circle: shop/dead → shop/orders → shop/dead"):
            routed.routers.create("back", sources=["shop/dead"], destination="shop/orders")

        routed.routers.create("on", sources=["shop/other"], destination="shop/far")
        routed.routers.create("back", sources=["shop/far"], destination="shop/orders")
        with pytest.raises(Invalid, match="circle"):
            letters("second", dead_letter_topic="shop/other")
        with pytest.raises(Invalid, match="circle"):
            made.alter(dead_letter_topic="shop/other")

        assert [spec.name for spec in orders.subscriptions()] == ["first"]
        assert {router.name for router in routed.routers.all()} == {"on", "back"}

    def test_a_record_that_just_fits_its_topic_is_routed_with_headers_and_one_that_fits_nowhere_is_counted(
        self, routed: RoutedLog
    ) -> None:
        routed.topics("a", "b", "c", "d")
        for source, destination in ("ab", "bc", "cd"):
            more = {f"{source}{number}": b"1" for number in range(CONDITIONS_MAX)}
            routed.routers.create(source, sources=[source], destination=destination, start=EARLIEST, set_headers=more)
        orders = routed.log.topic("a")
        orders.append(b"v" * LARGEST)
        orders.append(b"many", headers=[(f"h{number}", b"1") for number in range(HEADERS_MAX)])
        orders.append(b"good")

        assert [len(value or b"") for value in values(routed.arrived("d", 2))] == [LARGEST, 4]
        assert values(routed.arrived("c", 3))[1:] == [b"many", b"good"]
        status = routed.counted("c", 2)
        assert [status[name].lost for name in "abc"] == [{}, {}, {"too_large": 1}]

    def test_a_router_that_is_to_stop_waits_at_a_record_that_fits_nowhere(self, routed: RoutedLog) -> None:
        routed.topics("a", "b", "c", "d")
        for source, destination in ("ab", "bc", "cd"):
            more = {f"{source}{number}": b"1" for number in range(CONDITIONS_MAX)}
            made = routed.routers.create(
                source, sources=[source], destination=destination, start=EARLIEST, set_headers=more, on_refused="stop"
            )
        assert made == routed.routers.get("c")
        assert made.rule.on_refused is OnRefused.STOP
        orders = routed.log.topic("a")
        orders.append(b"before")
        orders.append(b"many", headers=[(f"h{number}", b"1") for number in range(HEADERS_MAX)])
        orders.append(b"behind")

        waiting = routed.waiting("c")
        assert waiting.state is RouterState.FAILING
        assert "offset 1 of default/c[0]" in waiting.failures["default/c[0]"]
        assert values(routed.arrived("d", 1)) == [b"before"]
        altered = routed.routers.alter("c", set_headers=more, on_refused="skip")
        assert altered.rule.on_refused is OnRefused.SKIP
        assert values(routed.arrived("d", 2)) == [b"before", b"behind"]
        assert routed.counted("c", 2)["c"].lost == {"too_large": 1}
        with pytest.raises(Invalid, match="skip"):
            routed.routers.alter("c", on_refused="perhaps")

    def test_records_are_routed_by_the_rule_with_bytes_of_any_kind(self, routed: RoutedLog) -> None:
        routed.topics("shop/orders", "shop/eu")
        made = routed.routers.create(
            "eu",
            sources=["shop/orders"],
            destination="shop/eu",
            start=EARLIEST,
            tags=["eu"],
            key_prefix=RAW,
            headers={"kind": None, "raw": RAW},
            key="header:kind",
            set_headers={"via": b"eu", "more": RAW},
            remove_headers=["raw"],
        )
        source = routed.log.topic("shop/orders")
        for tag, key in (("us", RAW), ("eu", b"k"), ("eu", RAW + b"1")):
            source.append(tag.encode(), key=key, tag=tag, headers=[("kind", b"a"), ("raw", RAW)], timestamp=7)

        [record] = routed.arrived("shop/eu", 1)
        assert (record.key, record.value, record.tag, record.timestamp) == (b"a", b"eu", "eu", 7)
        assert record.headers == (("kind", b"a"), ("via", b"eu"), ("more", RAW))
        assert made.rule.key_prefix == RAW
        assert made.rule.headers == (HeaderMatch("kind", None), HeaderMatch("raw", RAW))
        assert routed.routers.get("eu") == made

    def test_a_router_begins_where_it_is_asked_to(self, routed: RoutedLog) -> None:
        routed.topics("shop/orders", "to/latest", "to/earliest", "to/time")
        source = routed.log.topic("shop/orders")
        source.append_many([b"0", b"1", b"2"], timestamps=[10, 20, 30])

        for name, start in (("earliest", EARLIEST), ("time", Position.at_time(15))):
            routed.routers.create(name, sources=["shop/orders"], destination=f"to/{name}", start=start)
        routed.routers.create("latest", sources=["shop/orders"], destination="to/latest")
        source.append(b"3", timestamp=40)

        assert values(routed.arrived("to/latest", 1)) == [b"3"]
        assert values(routed.arrived("to/time", 3)) == [b"1", b"2", b"3"]
        assert values(routed.arrived("to/earliest", 4)) == [b"0", b"1", b"2", b"3"]

    def test_a_router_that_is_paused_waits_and_goes_on_by_its_new_rule(self, routed: RoutedLog) -> None:
        routed.topics("shop/orders", "shop/eu")
        source = routed.log.topic("shop/orders")
        made = routed.routers.create("eu", sources=["shop/orders"], destination="shop/eu", tags=["eu"])
        source.append(b"first", tag="eu")
        assert values(routed.arrived("shop/eu", 1)) == [b"first"]

        assert routed.routers.pause("eu").is_paused
        assert routed.routers.status("eu").state is RouterState.PAUSED
        altered = routed.routers.alter("eu", tags=["uk"])
        assert (altered.rule.tags, altered.version, altered.router_id) == (("uk",), made.version + 1, made.router_id)
        source.append(b"second", tag="eu")
        assert not routed.routers.resume("eu").is_paused
        assert not routed.routers.resume("eu").is_paused

        # The new rule holds within a second or two: until then the one before it passes these by.
        for _ in range(int(PATIENT_S)):
            source.append(b"third", tag="uk")
            with routed.log.topic("shop/eu").follow(EARLIEST, timeout=1.0) as stream:
                found = values(stream)
            if b"third" in found:
                break
        assert b"third" in found
        assert routed.routers.status("eu").state is RouterState.RUNNING

    def test_routers_are_listed_by_name_with_how_they_fare(self, routed: RoutedLog) -> None:
        assert routed.routers.all() == []
        assert routed.routers.statuses() == []
        routed.topics("shop/a", "shop/b", "shop/all")
        for name in ("z", "a"):
            routed.routers.create(name, sources=["shop/a", "shop/b"], destination="shop/all", tags=[name])
        routed.log.topic("shop/b").append(b"x", tag="z")
        routed.arrived("shop/all", 1)

        assert [router.name for router in routed.routers.all()] == ["a", "z"]
        found = routed.counted("z", 1)
        assert (found["z"].routed, found["a"].routed, found["z"].lost, found["z"].failures) == (1, 0, {}, {})
        assert [source.topic for source in found["z"].router.sources] == ["shop/a", "shop/b"]
        routed.log.delete_topic("shop/all")
        assert routed.routers.status("a").state is RouterState.DESTINATION_DELETED

    def test_a_router_that_was_deleted_is_unknown_and_its_name_is_free(self, routed: RoutedLog) -> None:
        routed.topics("shop/orders", "shop/eu")
        first = routed.routers.create("eu", sources=["shop/orders"], destination="shop/eu")

        routed.routers.delete("eu")
        for call in (routed.routers.delete, routed.routers.get, routed.routers.status, routed.routers.pause):
            with pytest.raises(UnknownRouter, match="forebay router list"):
                call("eu")
        with pytest.raises(UnknownRouter):
            routed.routers.alter("eu", tags=["eu"])
        again = routed.routers.create("eu", sources=["shop/orders"], destination="shop/eu")
        assert again.router_id != first.router_id

    def test_what_cannot_be_is_refused_and_nothing_is_stored(self, routed: RoutedLog) -> None:
        routed.topics("shop/orders", "shop/eu", "shop/far")
        create = routed.routers.create
        create("eu", sources=["shop/orders"], destination="shop/eu")

        with pytest.raises(Conflict, match="exists"):
            create("eu", sources=["shop/eu"], destination="shop/far")
        with pytest.raises(Invalid, match="circle: shop/eu → shop/orders → shop/eu"):
            create("back", sources=["shop/eu"], destination="shop/orders")
        with pytest.raises(UnknownTopic):
            create("r", sources=["shop/absent"], destination="shop/far")
        with pytest.raises(Invalid, match="brackets"):
            create("r", sources="shop/eu", destination="shop/far")
        with pytest.raises(Invalid, match="earliest, latest or a time"):
            create("r", sources=["shop/eu"], destination="shop/far", start=Position.at_offset(3))
        with pytest.raises(Invalid, match="header:NAME"):
            create("r", sources=["shop/eu"], destination="shop/far", key="what")
        for name in ("", "a/b", ".."):
            with pytest.raises(Invalid, match="router's name"):
                create(name, sources=["shop/eu"], destination="shop/far")
        assert [router.name for router in routed.routers.all()] == ["eu"]
