"""What other processes do to a log: `python -m tests.storage.children <act> <path> …`.

Each line a child writes is a fact the parent may rely on: it is written after the call returned.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

import forebay
from forebay import EARLIEST, Closed, ForebayError
from forebay.clock import SystemClock
from tests.storage.rig import QUICK

SMALL = {**QUICK, "wal": {**QUICK["wal"], "rotate_bytes_max": 16_384, "cache_bytes_max": 4096}}


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def append_for_ever(path: str, durability: str) -> None:
    """Append and say each offset once it is acknowledged."""
    log = forebay.open(path, SMALL)
    topic = log.create_topic("t", durability=durability, exist_ok=True)
    say("ready")
    number = topic.offsets().next
    while True:
        offset = topic.append(b"%d" % number + b"x" * 200)
        say(str(offset))
        number += 1


def append_and_exit(path: str, way: str) -> None:
    """Append without closing and end in one of several ways."""
    log = forebay.open(path, SMALL)
    topic = log.create_topic("t")
    for number in range(50):
        topic.append(b"%d" % number)
    if way == "daemon":
        threading.Thread(target=_append_on, args=(topic,), daemon=True).start()
    if way == "thread":
        threading.Thread(target=topic.append_many, args=([b"late"] * 10,)).start()
    if way == "error":
        raise RuntimeError("on purpose")
    if way == "exit":
        sys.exit(3)
    if way == "nowait":
        say(str([topic.append_nowait(b"queued").offset for _ in range(100)][-1]))


def _append_on(topic: forebay.Topic) -> None:
    with contextlib.suppress(Closed):
        while True:
            topic.append(b"more")


def wait_for_signal(path: str, way: str) -> None:
    """Append in the main thread, or only in others, or sit still, until a signal comes."""
    with contextlib.ExitStack() as stack:
        log = forebay.open(path, SMALL)
        if way == "with":
            stack.enter_context(log)
        topic = log.create_topic("t", durability="fsync")
        if way == "own":
            signal.signal(signal.SIGTERM, _exit_with_seven)
        say("ready")
        if way == "threads":
            for _ in range(3):
                threading.Thread(target=_append_on, args=(topic,), daemon=True).start()
        if way in ("idle", "threads"):
            SystemClock().sleep(600)
        with contextlib.suppress(Closed):
            while True:
                topic.append_many([b"v"] * 3)
        SystemClock().sleep(600)


def _exit_with_seven(number: int, frame: FrameType | None) -> None:
    sys.exit(7)


class Interrupts:
    """Ctrl-C every few milliseconds; it strikes only while `inside`."""

    def __init__(self) -> None:
        self.inside = False
        self.ended = threading.Event()
        signal.signal(signal.SIGINT, self._strike)
        threading.Thread(target=self._send, daemon=True).start()

    def _strike(self, number: int, frame: FrameType | None) -> None:
        if self.inside:
            self.inside = False
            raise KeyboardInterrupt

    def _send(self) -> None:
        while not self.ended.wait(0.003):
            os.kill(os.getpid(), signal.SIGINT)


def interrupted_appends(path: str) -> None:
    """Ctrl-C inside append, again and again: the log goes on, and what was acknowledged is there."""
    acked: dict[int, bytes] = {}
    with forebay.open(path, SMALL) as log:
        topic = log.create_topic("t")
        interrupts = Interrupts()
        struck, number = 0, 0
        while struck < 60 or len(acked) <= 60:
            value = b"%d" % number
            number += 1
            try:
                try:
                    interrupts.inside = True
                    offset = topic.append(value)
                finally:
                    interrupts.inside = False
            except KeyboardInterrupt:
                struck += 1
            except ForebayError:
                # Until the log has healed by itself appends are refused.
                SystemClock().sleep(0.001)
            else:
                acked[offset] = value
        interrupts.ended.set()
        found = {record.offset: record.value for record in topic.read(on_gap=lambda *_: None)}
        lost = [offset for offset, value in acked.items() if found.get(offset) != value]
        doubled = len(found) - len(set(found.values()))
        say(f"{len(lost)} lost, {doubled} doubled")


def fork_once(path: str) -> None:
    """In the child every handle says that it is closed; the parent goes on; the child outlives it."""
    log = forebay.open(path, SMALL)
    topic = log.create_topic("t", partitions=2)
    memory = log.create_topic("m", durability="ephemeral")
    for each in (topic, memory):
        each.append(b"before", partition=0)
    stream = topic.follow(EARLIEST)
    next(stream)
    child = os.fork()
    if child == 0:
        calls: list[Callable[[], object]] = [
            lambda: topic.append(b"v", partition=0),
            lambda: topic.append(b"v", partition=1),
            lambda: topic.append_nowait(b"v", partition=0),
            lambda: list(topic.read()),
            lambda: next(stream),
            lambda: memory.append(b"v"),
            lambda: list(memory.read()),
            log.topics,
            lambda: log.topic("t"),
        ]
        say(f"child {os.getpid()} {' '.join(_said_closed(call) for call in calls)}")
        log.close()
        SystemClock().sleep(90)
        os._exit(0)
    sys.stdin.readline()
    say(f"parent {topic.append(b'after', partition=0)} {memory.append(b'after')}")
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGKILL)


def _said_closed(call: Callable[[], object]) -> str:
    try:
        call()
    except Closed as error:
        return "closed" if "before a fork" in str(error) else f"closed-without-saying-why:{error}".replace(" ", "_")
    except BaseException as error:  # noqa: BLE001  # reported to the parent
        return f"{type(error).__name__}:{error}".replace(" ", "_")
    return "worked"


def fork_under_load(path: str, forks: str) -> None:
    """Fork again and again while threads append, read and follow; each child finds its handles closed at once."""
    log = forebay.open(path, SMALL)
    topic = log.create_topic("t", partitions=2)
    memory = log.create_topic("m", durability="ephemeral")
    stop = threading.Event()

    def load(number: int) -> None:
        while not stop.is_set():
            topic.append(b"x" * 100, partition=number % 2)
            memory.append(b"x")
            if number == 0:
                topic.append_nowait(b"y", partition=1).result()
                next(topic.follow(EARLIEST, timeout=0))

    threads = [threading.Thread(target=load, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    codes = set()
    for number in range(int(forks)):
        child = os.fork()
        if child == 0:
            calls = [lambda: topic.append(b"v", partition=0), lambda: memory.append(b"v"), lambda: list(topic.read())]
            reported = all(_said_closed(call) == "closed" for call in calls)
            log.close()
            with forebay.open(f"{path}-{number}", SMALL) as own:
                own.create_topic("t").append(b"v")
            os._exit(0 if reported else 1)
        codes.add(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    stop.set()
    for thread in threads:
        thread.join()
    records = list(topic.read(partition=0))
    say(f"{codes} {[record.offset for record in records] == list(range(len(records)))}")
    log.close()


def prefork(path: str, workers: str) -> None:
    """A server that opens before it forks: each worker opens a log of its own."""
    main = forebay.open(f"{path}/main", SMALL)
    main.create_topic("t").append(b"main")
    children = []
    for number in range(int(workers)):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with forebay.open(f"{path}/{number}", SMALL) as log:
                    log.create_topic("t").append_many([b"%d" % number] * 10)
                    code = 0 if len(list(log.topic("t").read())) == 10 else 2
            finally:
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    main.topic("t").append(b"still")
    say(f"{codes} {len(list(main.topic('t').read()))}")
    main.close()


def follow(path: str, count: str) -> None:
    """Follow read-only from the start and say every record."""
    with forebay.open(path, SMALL, read_only=True) as log:
        topic = log.topic("t")
        say("ready")
        for seen, record in enumerate(topic.follow(EARLIEST, timeout=50), start=1):
            say(f"{record.offset} {bytes(record.value or b'').rstrip(b'x').decode()}")
            if seen == int(count):
                return


def open_for_writing(path: str) -> None:
    """Say what opening says."""
    try:
        forebay.open(path, SMALL).close()
    except ForebayError as error:
        say(f"{type(error).__name__}: {error}")
    else:
        say("opened")


def delete_and_die(path: str) -> None:
    """Begin to delete a topic and be killed in the middle of it."""
    from forebay.disk import SystemDisk  # noqa: PLC0415

    log = forebay.open(path, SMALL)
    unlink = SystemDisk.unlink
    calls: Iterator[int] = iter(range(3))

    def dying(self: SystemDisk, path: str) -> None:
        if next(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        unlink(self, path)

    SystemDisk.unlink = dying  # type: ignore[method-assign]
    log.delete_topic("t")


def burst(path: str, asked: str) -> None:
    """Append to many topics three times each, beside readers of all of them; say what was seen, as JSON."""
    wanted = json.loads(asked)
    if "allowed" in wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted["allowed"], wanted["allowed"]))
    settings = {"wal": {"free_bytes_min": 0}, "runtime": {"descriptors_max": wanted["descriptors_max"]}}
    errors: list[str] = []
    counts: list[int] = []

    def work(topics: list[forebay.Topic], turns: int) -> None:
        for _ in range(turns):
            for topic in topics:
                try:
                    topic.append(b"x" * 100)
                    list(topic.read(EARLIEST))
                except ForebayError as error:
                    errors.append(f"{type(error).__name__}: {error}")

    def count() -> None:
        with contextlib.suppress(OSError):
            counts.append(len(os.listdir("/proc/self/fd")))

    def together(turns: int) -> None:
        threads = [threading.Thread(target=work, args=(part, turns)) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                count()
                thread.join(0.002)

    with forebay.open(path, settings) as log:
        topics = [log.create_topic(f"t{n}", durability=wanted["durability"]) for n in range(wanted["topics"])]
        parts = [topics[n :: wanted["threads"]] for n in range(wanted["threads"])]
        together(1)
        hoard = _hoard() if wanted.get("hoard") else []
        together(2)
        for fd in hoard:
            os.close(fd)
        records = [len(list(topic.read(EARLIEST))) for topic in topics]
    say(json.dumps({"errors": errors, "most": max(counts), "records": records, "hoarded": len(hoard)}))


def _hoard() -> list[int]:
    """Every descriptor that the process may still open."""
    held: list[int] = []
    while True:
        try:
            held.append(os.open(os.devnull, os.O_RDONLY))
        except OSError:
            return held


ACTS: dict[str, Callable[..., None]] = {
    act.__name__: act
    for act in (
        append_for_ever,
        append_and_exit,
        wait_for_signal,
        interrupted_appends,
        fork_once,
        fork_under_load,
        prefork,
        follow,
        open_for_writing,
        delete_and_die,
        burst,
    )
}

if __name__ == "__main__":
    ACTS[sys.argv[1]](*sys.argv[2:])
