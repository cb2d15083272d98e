"""A record that no consumer can do: it becomes a dead letter, is looked at, repaired and brought back.

python examples/poison_records.py DIRECTORY

1  the consumer fails at one record, each time it is delivered
2  after the third delivery it goes to the dead-letter topic, and the others are done meanwhile
3  an operator sees where it comes from and why it failed, and has the program repaired
4  the dead letter is replayed into its topic, and done
"""

from __future__ import annotations

import json
import sys

import forebay


def read_order(record: forebay.Record, *, is_repaired: bool) -> str:
    """The customer of an order. Before the repair, an order without a customer is an error."""
    order = json.loads(record.value or b"")
    return str(order.get("customer", "unknown") if is_repaired else order["customer"])


def consume(orders: forebay.Subscription, *, is_repaired: bool) -> list[str]:
    """Do everything that is due; the customers of the orders that were done."""
    done = []
    with orders.consumer() as consumer:
        while taken := consumer.take(wait_s=0.5):
            for delivered in taken:
                try:
                    done.append(read_order(delivered.record, is_repaired=is_repaired))
                except KeyError as error:
                    consumer.nack(delivered, delay_ms=10, error=f"no field {error}")
                else:
                    consumer.ack(delivered)
    return done


def main(directory: str) -> list[list[str]]:
    """Walk through all of it; the customers that were done before and after the repair."""
    with forebay.open(directory) as log:
        topic = log.create_topic("shop/orders", exist_ok=True)
        billing = topic.subscribe("billing", deliveries_max=3, on_spent="dead_letter")
        for customer in ("Ada", None, "Grace"):
            order = {"amount": 7} if customer is None else {"amount": 7, "customer": customer}
            topic.append(json.dumps(order).encode())

        before = consume(billing, is_repaired=False)

        letters = billing.dead_letters()
        for letter in letters.letters():
            print(f"{letter.topic}[{letter.record.partition}] offset {letter.record.offset}")  # noqa: T201
            print(f"failed {letter.attempts} times, last: {letter.reason}, {letter.error}")  # noqa: T201

        print(f"{letters.replay()} replayed")  # noqa: T201
        after = consume(billing, is_repaired=True)
        print(f"done: {before}, then {after}")  # noqa: T201
    return [before, after]


if __name__ == "__main__":
    main(sys.argv[1])
