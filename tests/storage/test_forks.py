"""In a forked child every handle of the parent refuses at once, whatever its threads held at the fork."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import forebay
from forebay import EARLIEST, Closed, Storage, Topic
from forebay.locks import Rank, RankedCondition
from forebay.storage.acks import Ack, BatchAck, Share
from forebay.testing.inside import inside
from tests.storage.rig import QUICK

CHILD_SECONDS = 30


def _calls(log: Storage, topic: Topic) -> list[Callable[[], object]]:
    """What a program may do with the handles that it has. Made before the fork, called in the child."""
    stream, lookup = topic.follow(EARLIEST), topic.read_by_key(b"k")
    queued, reader, group = Ack(0), topic.reader("r"), log.group("g")
    batch = BatchAck("t", [Share(0, 1, None), Share(1, 1, None)])
    _, single = topic.appender.prepare(b"v", *[None] * 8)
    return [
        lambda: topic.append(b"v"),
        lambda: topic.append_many([b"v"]),
        lambda: topic.append_nowait(b"v"),
        lambda: topic.append_many_nowait([b"v"]),
        lambda: topic.append_arrow_nowait(pa.record_batch({"value": [b"v"]})),
        lambda: topic.appender.queue_if_open(single, ()),
        topic.acquire,
        topic.offsets,
        topic.flush,
        lambda: list(topic.read()),
        lambda: next(stream),
        lambda: next(lookup),
        lambda: topic.delete_by_key(b"k"),
        queued.result,
        batch.result,
        reader.offset,
        lambda: reader.ack_up_to(0),
        lambda: reader.reset(0),
        reader.forget,
        lambda: group.commit(topic.name, 0, ack="cached"),
        lambda: group.fetch(topic.name),
        group.offsets,
        group.delete,
        log.topics,
        log.groups,
        lambda: log.topic(topic.name),
        lambda: log.create_topic("other"),
        lambda: log.alter_topic(topic.name, cap_records=9),
        lambda: log.delete_topic(topic.name),
        log.run_retention,
        log.workers,
    ]


def _refused(calls: list[Callable[[], object]]) -> list[str]:
    """Which of the calls did anything else than refuse by name."""
    wrong = []
    for place, call in enumerate(calls):
        try:
            wrong.append(f"{place}: {call()!r}")
        except Closed as error:
            if "before a fork" not in str(error):
                wrong.append(f"{place}: {error}")
        except BaseException as error:  # noqa: BLE001 - reported to the parent
            wrong.append(f"{place}: {error!r}")
    return wrong


def _in_child(work: Callable[[], list[str]]) -> str:
    """What a forked child answers; it is ended if it hangs."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(CHILD_SECONDS)
        os.write(writing, "\n".join(work()).encode())
        os._exit(0)
    os.close(writing)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    with os.fdopen(reading) as answer:
        return answer.read()


@pytest.mark.timeout(4 * CHILD_SECONDS)
@pytest.mark.plain_locks
@pytest.mark.parametrize("engine", ["segment", "rocksdb", "memory"])
def test_the_child_is_refused_though_threads_of_its_parent_held_every_lock(tmp_path: Path, engine: str) -> None:
    """A lock that is held at the fork is held for ever in the child: the thread that would release it is not there."""
    with forebay.open(tmp_path / "log", QUICK) as log:
        topic = log.create_topic("t", engine=engine, durability="ephemeral" if engine == "memory" else None)
        topic.append(b"v", key=b"k")
        calls = _calls(log, topic)
        locks = _locks_of(log, inside(topic).shard())
        held, let_go = threading.Event(), threading.Event()

        def hold() -> None:
            # In no order, so not for ever: a worker may be inside one and want another.
            taken = [lock for lock in locks if lock.acquire(timeout=0.2)]
            held.set()
            let_go.wait(2 * CHILD_SECONDS)
            for lock in taken:
                lock.release()

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        try:
            answer = _in_child(lambda: [*_refused(calls), *_closed_without_a_thread(log)])
        finally:
            let_go.set()
            thread.join()

        assert answer == ""
        topic.append(b"the parent goes on")


def _closed_without_a_thread(log: Storage) -> list[str]:
    log.close()
    return [thread.name for thread in threading.enumerate() if thread is not threading.current_thread()]


def _locks_of(*parts: object) -> list[Any]:
    """Every lock that is an attribute of the parts, or of what they are made of."""
    kinds = type(threading.Lock()), type(threading.RLock()), type(RankedCondition(Rank.LEAF, "a condition"))
    found: dict[int, Any] = {}
    seen: set[int] = set()
    todo = list(parts)
    while todo:
        part = todo.pop()
        if id(part) in seen or not type(part).__module__.startswith("forebay."):
            continue
        seen.add(id(part))
        if type(part).__module__.startswith(("forebay.metadata", "forebay.disk")):
            continue  # at rest while the process forks, or abandoned by the child
        for value in getattr(part, "__dict__", {}).values():
            if isinstance(value, kinds):
                found[id(value)] = value
            elif isinstance(value, tuple | list):
                todo.extend(value)
            else:
                todo.append(value)
    return list(found.values())
