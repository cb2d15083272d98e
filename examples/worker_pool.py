"""A pool of workers that share the records of a topic: each record goes to one of them, and comes again if it fails.

    python examples/worker_pool.py DIRECTORY

Mode `shared` keeps no order and needs none here: a thumbnail is made of each picture on its own. One worker fails now
and then, and one leaves in the middle of its work; what they had is done by the others.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter

import forebay

PICTURES = 60
WORKERS = 3


def work(pool: forebay.Subscription, number: int, done: Counter[bytes]) -> None:
    """One worker: takes a few pictures at a time, until all are done."""
    with pool.consumer(f"worker {number}") as consumer:
        while any(lag.lag for lag in pool.lag()):
            for delivered in consumer.take(5, wait_s=0.2):
                picture = delivered.record.value or b""
                if number == 0 and delivered.attempt == 1 and picture.endswith(b"3.png"):
                    consumer.nack(delivered, delay_ms=10, error="out of memory")
                    continue
                if number == 1 and sum(done.values()) > PICTURES // 2:
                    # It leaves with work in its hands: the others get it at once.
                    return
                done[picture] += 1
                consumer.ack(delivered)


def main(directory: str) -> Counter[bytes]:
    """Fill the topic, run the pool, and say which pictures were done how often."""
    done: Counter[bytes] = Counter()
    with forebay.open(directory) as log:
        pictures = log.create_topic("photos/uploaded", partitions=2, exist_ok=True)
        pool = pictures.subscribe("thumbnails", mode="shared")
        pictures.append_many([b"%d.png" % number for number in range(PICTURES)])
        workers = [threading.Thread(target=work, args=(pool, number, done)) for number in range(WORKERS)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        left = sum(lag.lag for lag in pool.lag())
    print(f"{len(done)} pictures done, {left} left")  # noqa: T201
    return done


if __name__ == "__main__":
    main(sys.argv[1])
