"""Processes that consume and are killed: nothing that was stored as done comes again, everything else does.

A child is killed with SIGKILL inside the delivery of a record, so it stores nothing more. It runs this file.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import forebay
from forebay import EARLIEST

pytestmark = pytest.mark.slow

POISON = b"3"
DELIVERIES_MAX = 3


def consume(path: str, ends_at: bytes) -> None:
    """Say each record that is delivered and acknowledge it; the one that is named ends the process."""
    with forebay.open(path) as log:
        subscription = log.topic("shop/orders").subscribe("billing")
        with subscription.consumer() as consumer:
            for one in consumer.each(wait_s=0.05):
                sys.stdout.write(f"{one.record.offset} {one.attempt}\n")
                sys.stdout.flush()
                if one.record.value == ends_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                consumer.ack(one)
                if one.record.offset == 1:
                    subscription.flush()


def consume_batches(path: str, ends_at: bytes) -> None:
    """As `consume`, but takes as many records as there are before it handles them."""
    slow = {"progress": {"flush_interval_ms": 600_000}}
    with forebay.open(path, slow) as log, log.topic("shop/orders").subscribe("billing").consumer() as consumer:
        while taken := consumer.take(wait_s=0.05):
            for one in taken:
                sys.stdout.write(f"{one.record.offset} {one.attempt}\n")
                sys.stdout.flush()
                if one.record.value == ends_at:
                    os.kill(os.getpid(), signal.SIGKILL)
                consumer.ack(one)


def run(path: Path, ends_at: bytes, way: str = "each") -> tuple[int, list[tuple[int, int]]]:
    """How a child ended, and which records it got for the how-manieth time."""
    command = [sys.executable, __file__, str(path), ends_at.decode(), way]
    child = subprocess.run(command, capture_output=True, timeout=240, check=False)
    lines = child.stdout.decode().splitlines()
    return child.returncode, [(int(offset), int(attempt)) for offset, attempt in map(str.split, lines)]


def test_a_record_that_kills_its_process_is_spent_and_what_was_stored_as_done_stays_done(tmp_path: Path) -> None:
    with forebay.open(tmp_path) as log:
        topic = log.create_topic("shop/orders")
        topic.append_many([b"%d" % number for number in range(6)])
        topic.subscribe("billing", start=EARLIEST, deliveries_max=DELIVERIES_MAX, on_spent="drop")

    for life in range(1, DELIVERIES_MAX + 1):
        code, got = run(tmp_path, POISON)
        assert code == -signal.SIGKILL
        if life == 1:
            assert got == [(0, 1), (1, 1), (2, 1), (3, 1)]
        else:
            # 0 and 1 were stored as done. 2 was not, or was by the delivery of 3, which is stored before it is made.
            assert [offset for offset, _ in got][-1] == 3
            assert not {offset for offset, _ in got} & {0, 1}
        assert got[-1] == (3, life)

    code, got = run(tmp_path, b"none")

    assert code == 0
    assert got == [(4, 1), (5, 1)]
    with forebay.open(tmp_path) as log:
        assert [lag.lag for lag in log.topic("shop/orders").subscribe("billing").lag()] == [0]


def test_the_neighbours_of_a_record_that_kills_its_process_are_not_condemned_with_it(tmp_path: Path) -> None:
    with forebay.open(tmp_path) as log:
        topic = log.create_topic("shop/orders")
        topic.append_many([b"%d" % number for number in range(10)])
        topic.subscribe("billing", start=EARLIEST, deliveries_max=DELIVERIES_MAX, on_spent="dead_letter")

    lives = [run(tmp_path, POISON, "batches") for _ in range(DELIVERIES_MAX)]

    assert [code for code, _ in lives] == [-signal.SIGKILL] * DELIVERIES_MAX
    # Acknowledged in the first life, and not stored; from the second one on stored before the next record comes.
    first = [(0, 1), (1, 1), (2, 1), (3, 1)]
    assert [got for _, got in lives] == [first, [(0, 2), (1, 2), (2, 2), (3, 2)], [(3, 3)]]
    assert run(tmp_path, b"none", "batches") == (0, [(number, 2) for number in range(4, 10)])
    with forebay.open(tmp_path) as log:
        subscription = log.topic("shop/orders").subscription("billing")
        assert [letter.record.value for letter in subscription.dead_letters().letters()] == [POISON]
        assert [lag.lag for lag in subscription.lag()] == [0]


if __name__ == "__main__":
    (consume_batches if sys.argv[3] == "batches" else consume)(sys.argv[1], sys.argv[2].encode())
