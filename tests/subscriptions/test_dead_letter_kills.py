"""Processes that are killed with SIGKILL while they deliver, send dead letters or replay them: each record once.

A child is forked while no log is open, opens its own, and ends itself at a chosen step: before or after one of the
calls that change something.
"""

from __future__ import annotations

import os
import random  # noqa: TID251  # seeded: the same run again
import shutil
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

import forebay
from forebay import EARLIEST, SpentReason
from forebay.storage.cursors import Cursors, Reader
from forebay.storage.topic import Topic
from forebay.subscriptions.dispatch import Dispatch
from tests.support.soak import SOAK
from tests.support.waiting import until

pytestmark = pytest.mark.slow

POISON = {b"1", b"2", b"4", b"7"}
COUNT = 9
KILLS = 100 if SOAK else 3
Call = tuple[type, str]


def in_child(work: Callable[[], None]) -> int:
    """How a forked child ended that did this work: 0, or minus the number of the signal."""
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:  # noqa: BLE001 - the child ends here, whatever it was
            traceback.print_exc()
            os._exit(3)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killing_at(step: int, calls: Iterable[Call]) -> Iterator[None]:
    """Have this process, a child, die at its `step`th moment: before and after each of these calls there is one."""
    moments = iter(range(1_000_000))

    def moment() -> None:
        if next(moments) == step:
            die()

    for owner, name in calls:
        original = getattr(owner, name)

        def watched(*args: object, original: Callable[..., object] = original, **options: object) -> object:
            moment()
            result = original(*args, **options)
            moment()
            return result

        setattr(owner, name, watched)
    yield None


def work_off(subscription: forebay.Subscription, poison: set[bytes] = POISON) -> list[tuple[int, int]]:
    """Take and answer everything until nothing more comes; what was delivered for the how-manieth time."""
    found = []
    with subscription.consumer() as consumer:
        while taken := consumer.take():
            for one in taken:
                found.append((one.record.offset, one.attempt))
                if one.record.value in poison:
                    consumer.nack(one, delay_ms=0, error="poison")
                else:
                    consumer.ack(one)
    return found


def prepared(path: Path) -> None:
    """A log with records and a subscription whose dead letters go into two partitions."""
    with forebay.open(path) as log:
        topic = log.create_topic("shop/orders")
        log.create_topic("dead", partitions=2)
        topic.append_many([b"%d" % number for number in range(COUNT)], keys=[b"k%d" % n for n in range(COUNT)])
        topic.subscribe("s", start=EARLIEST, deliveries_max=3, on_spent="dead_letter", dead_letter_topic="dead")


SENDING: list[Call] = [
    (Topic, "append"),
    (Topic, "flush"),
    (Topic, "last_sequence"),
    (Dispatch, "letters_arrived"),
    (Cursors, "write"),
]


def test_a_kill_at_any_step_of_sending_leaves_each_dead_letter_once(tmp_path: Path) -> None:
    prepared(tmp_path / "first")
    steps = 0

    def send(path: Path, step: int) -> None:
        next(killing_at(step, SENDING))
        with forebay.open(path) as log:
            work_off(log.topic("shop/orders").subscription("s"))

    for step in range(1_000):
        path = tmp_path / f"log{step}"
        shutil.copytree(tmp_path / "first", path)
        code = in_child(lambda path=path, step=step: send(path, step))  # type: ignore[misc]
        if code == 0:
            break
        assert code == -signal.SIGKILL
        steps += 1
        with forebay.open(path) as log:
            subscription = log.topic("shop/orders").subscription("s")
            again = work_off(subscription)
            letters = subscription.dead_letters().letters()
            assert Counter(letter.record.value for letter in letters) == Counter(POISON), f"step {step}"
            assert subscription.lag()[0].lag == 0
            assert all(attempt <= 3 for _, attempt in again)
        shutil.rmtree(path)
    assert steps >= 20


REPLAYING: list[Call] = [
    (Reader, "reset"),
    (Reader, "forget"),
    (Topic, "append_many"),
    (Topic, "flush"),
    (Topic, "delete_by_offset"),
]


@pytest.mark.parametrize("to", [None, "wide"])
def test_a_replay_that_is_killed_at_any_step_and_run_again_brings_each_record_once(
    tmp_path: Path, to: str | None
) -> None:
    prepared(tmp_path / "first")
    with forebay.open(tmp_path / "first") as log:
        log.create_topic("wide", partitions=3)
        work_off(log.topic("shop/orders").subscription("s"))
    steps = 0

    def replay(path: Path, step: int) -> None:
        next(killing_at(step, REPLAYING))
        with forebay.open(path) as log:
            log.topic("dead").dead_letters().replay(to=to)

    for step in range(1_000):
        path = tmp_path / f"log{step}"
        shutil.copytree(tmp_path / "first", path)
        code = in_child(lambda path=path, step=step: replay(path, step))  # type: ignore[misc]
        if code == 0:
            break
        assert code == -signal.SIGKILL
        steps += 1
        with forebay.open(path) as log:
            letters = log.topic("dead").dead_letters()
            letters.replay(to=to)
            records = log.topic("wide").read() if to else log.topic("shop/orders").read(COUNT)
            assert Counter(record.value for record in records) == Counter(POISON), f"step {step}"
            assert letters.letters() == []
            assert log.groups() == ["s"]
        shutil.rmtree(path)
    assert steps >= 12


def test_a_record_that_kills_its_process_at_each_delivery_is_a_dead_letter_once_after_the_last(tmp_path: Path) -> None:
    prepared(tmp_path)
    poison = b"4"

    def consume() -> None:
        with forebay.open(tmp_path) as log, log.topic("shop/orders").subscription("s").consumer() as consumer:
            for one in consumer.each(wait_s=0.05):
                if one.record.value == poison:
                    die()
                consumer.ack(one)

    ends = [in_child(consume) for _ in range(4)]

    assert ends == [-signal.SIGKILL] * 3 + [0]
    with forebay.open(tmp_path) as log:
        subscription = log.topic("shop/orders").subscription("s")
        (letter,) = subscription.dead_letters().letters()
        assert (letter.record.value, letter.attempts, letter.reason) == (poison, 3, SpentReason.PROCESS_ENDED)
        assert work_off(subscription, set()) == []
        assert len(subscription.dead_letters().letters()) == 1
        assert subscription.lag()[0].lag == 0


def consume_under_load(path: Path, journal: Path, seed: int) -> None:
    """Append, and let two consumers take and acknowledge; each step is noted in the journal before the next begins."""
    chance = random.Random(seed)
    notes = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(*words: object) -> None:
        os.write(notes, (" ".join(map(str, words)) + "\n").encode())

    with forebay.open(path, {"progress": {"flush_interval_ms": 20}}) as log:
        topic = log.topic("shop/orders")
        subscription = topic.subscription("s")

        def work(number: int) -> None:
            with subscription.consumer(f"c{number}") as consumer:
                while True:
                    for one in consumer.take(5, wait_s=0.01):
                        note("taken", one.record.offset)
                        if chance.random() < 0.9:
                            consumer.ack(one)
                            note("acked", one.record.offset)
                        else:
                            consumer.nack(one, delay_ms=0)

        for number in range(2):
            threading.Thread(target=work, args=(number,), daemon=True).start()
        while True:
            topic.append_many([b"x"] * 10)
            acked = [line.split()[1] for line in journal.read_text().splitlines() if line.startswith("acked ")]
            subscription.flush()
            # Everything that was acknowledged before the flush is stored now.
            note("stored", *acked)


def test_kills_under_load_redeliver_what_was_not_acknowledged_and_nothing_that_is_stored_as_done(
    tmp_path: Path,
) -> None:
    path, journal = tmp_path / "log", tmp_path / "journal"
    with forebay.open(path) as log:
        log.create_topic("shop/orders").subscribe("s", start=EARLIEST, mode="shared")
    stored: set[str] = set()
    for life in range(KILLS):
        journal.write_text("")
        pid = os.fork()
        if pid == 0:
            consume_under_load(path, journal, life)
        until(lambda: journal.read_text().count("\nstored ") >= 3)  # with what was acknowledged, not empty
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        lines = [line.split() for line in journal.read_text().splitlines()]
        taken = {words[1] for words in lines if words and words[0] == "taken"}
        assert not taken & stored, "a record came again that was stored as done"
        stored |= {offset for words in lines if words and words[0] == "stored" for offset in words[1:]}

    with forebay.open(path) as log:
        topic = log.topic("shop/orders")
        subscription = topic.subscription("s")
        end = topic.offsets(0).next
        last = {str(offset) for offset, _ in work_off(subscription, set())}
        assert not last & stored
        assert subscription.lag()[0].cursor == end
    assert stored, "nothing was stored between the kills"


def test_everything_that_was_taken_and_not_acknowledged_comes_again_after_a_kill(tmp_path: Path) -> None:
    prepared(tmp_path)

    def take_all() -> None:
        with forebay.open(tmp_path) as log, log.topic("shop/orders").subscription("s").consumer() as consumer:
            taken = consumer.take()
            consumer.ack(taken[2], taken[5])
            log.topic("shop/orders").subscription("s").flush()
            consumer.ack(taken[0])
            die()

    assert in_child(take_all) == -signal.SIGKILL
    with forebay.open(tmp_path) as log:
        again = {offset for offset, _ in work_off(log.topic("shop/orders").subscription("s"), set())}

    assert set(range(COUNT)) - {0, 2, 5} <= again <= set(range(COUNT)) - {2, 5}
