"""Fills a data directory with what the examples read: orders of a shop, clicks on its pages."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import forebay

BEGIN = datetime(2026, 3, 1, 9, tzinfo=UTC)
COUNTRIES = ("DE", "FR", "IT")
URLS = ("/", "/offers", "/cart", "/help", "/unlisted")


def orders(first: int, count: int) -> Iterator[dict[str, Any]]:
    """Orders, three a minute; some come a few minutes late, a few are free."""
    for number in range(first, first + count):
        late = timedelta(minutes=number % 7) if number % 5 == 0 else timedelta()
        yield {
            "order_id": f"o-{number}",
            "country": COUNTRIES[number * 7 % 3],
            "amount": "0.00" if number % 31 == 0 else f"{(number * 37) % 9000 / 100 + 1:.2f}",
            "at": (BEGIN + timedelta(seconds=20 * number) - late).isoformat(),
        }


def clicks(count: int) -> Iterator[dict[str, Any]]:
    """Clicks of seven visitors, who pause now and then."""
    at = BEGIN
    for number in range(count):
        at += timedelta(minutes=41) if number % 23 == 22 else timedelta(seconds=17 + number % 11)
        yield {"visitor": f"v-{number * 5 % 7}", "url": URLS[number * number % 5], "at": at.isoformat()}


def fill(directory: str) -> None:
    """Make the topics of the examples, with records in those that are read."""
    with forebay.open(directory) as log:
        shop, web = log.create_topic("shop/orders", partitions=2), log.create_topic("web/clicks", partitions=2)
        log.create_topic("shop/revenue", partitions=2)
        log.create_topic("web/sessions", partitions=2)
        append_orders(shop, 0, 600)
        for click in clicks(500):
            web.append(json.dumps(click).encode(), key=click["visitor"].encode())
        web.append(b"not a click", key=b"v-0")


def append_orders(topic: forebay.Topic, first: int, count: int) -> None:
    """More orders, from that one on."""
    for order in orders(first, count):
        topic.append(json.dumps(order).encode(), key=order["order_id"].encode())


if __name__ == "__main__":
    fill(sys.argv[1] if len(sys.argv) > 1 else "data")
