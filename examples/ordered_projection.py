"""Balances of accounts, kept by several consumers: the bookings of an account are applied in order, by one at a time.

    python examples/ordered_projection.py DIRECTORY

Mode `key_shared` spreads accounts over consumers and keeps the order of each. Delivery is at least once, so each
balance remembers the offset of its last booking: one that comes again after a crash is recognised.
"""

from __future__ import annotations

import sys
import threading

import forebay

ACCOUNTS = 8
BOOKINGS = 120
CONSUMERS = 3


class Balances:
    """What each account has. A real one would be a table with the offset in a column."""

    def __init__(self) -> None:
        self.amounts: dict[bytes, int] = {}
        self._applied: dict[bytes, int] = {}
        self._lock = threading.Lock()

    def apply(self, booking: forebay.Record) -> None:
        """Book an amount. An account that is closed is not booked on any more, so the order matters."""
        account = booking.key or b""
        with self._lock:
            if booking.offset <= self._applied.get(account, -1):
                return
            self._applied[account] = booking.offset
            if booking.value == b"close":
                self.amounts[account] = 0
            else:
                self.amounts[account] = self.amounts.get(account, 0) + int(booking.value or b"0")


def project(subscription: forebay.Subscription, name: str, balances: Balances) -> None:
    """One consumer: applies what it is given until everything is done."""
    with subscription.consumer(name) as consumer:
        while any(lag.lag for lag in subscription.lag()):
            for delivered in consumer.take(10, wait_s=0.2):
                balances.apply(delivered.record)
                consumer.ack(delivered)


def main(directory: str) -> dict[bytes, int]:
    """Fill the topic, run the consumers, and give the balances."""
    balances = Balances()
    with forebay.open(directory) as log:
        bookings = log.create_topic("bank/bookings", partitions=2, exist_ok=True)
        subscription = bookings.subscribe("balances", mode="key_shared")
        for number in range(BOOKINGS):
            value = b"close" if number == BOOKINGS // 2 else b"%d" % (number % 10)
            bookings.append(value, key=b"account %d" % (number % ACCOUNTS))
        consumers = [
            threading.Thread(target=project, args=(subscription, f"consumer {number}", balances))
            for number in range(CONSUMERS)
        ]
        for consumer in consumers:
            consumer.start()
        for consumer in consumers:
            consumer.join()
    for account, amount in sorted(balances.amounts.items()):
        print(account.decode(), amount)  # noqa: T201
    return balances.amounts


if __name__ == "__main__":
    main(sys.argv[1])
