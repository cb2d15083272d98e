"""What other processes do to a metadata file: `python -m tests.metadata.children <act> <path> …`.

Each line a child writes is a fact the parent may rely on: it is written after the call returned.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import sys
import threading
from collections.abc import Callable, Iterator

from forebay.clock import SystemClock
from forebay.disk import SystemDisk
from forebay.errors import Closed, ForebayError
from forebay.metadata import Absent, Put, RevisionIs, SqliteMetadata


def open_store(path: str, disk: SystemDisk | None = None, *, read_only: bool = False) -> SqliteMetadata:
    return SqliteMetadata(
        path, disk=disk or SystemDisk(), clock=SystemClock(), busy_timeout_ms=20_000, read_only=read_only
    )


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def contend(path: str, name: str, rounds: str) -> None:
    """Try to be the first in every round, and add one to a counter as many times."""
    store = open_store(path)
    say("ready")
    sys.stdin.readline()
    for number in range(int(rounds)):
        if store.transaction([Absent(f"round/{number}")], [Put(f"round/{number}", name.encode())]).succeeded:
            say(f"won {number}")
        while True:
            entry = store.get("counter")
            revision, value = (0, 0) if entry is None else (entry.mod_revision, int(entry.value))
            if store.transaction([RevisionIs("counter", revision)], [Put("counter", b"%d" % (value + 1))]).succeeded:
                break
    store.close()


def write_pairs(path: str, start: str) -> None:
    """Write two keys at a time, for ever, and say which are acknowledged."""
    store = open_store(path)
    number = int(start)
    while True:
        value = b"%d" % number * 300
        outcome = store.transaction(
            [Absent(f"a/{number:06}")], [Put(f"a/{number:06}", value), Put(f"b/{number:06}", value), Put("last", value)]
        )
        assert outcome.succeeded
        say(f"{number} {outcome.revision}")
        number += 1


def hold_session(path: str) -> None:
    """Own a key until asked to go, or killed."""
    store = open_store(path)
    session = store.session(30.0)
    store.transaction([], [Put("leased", b"", session=session.id), Put("kept", b"")])
    say(session.id)
    sys.stdin.readline()


def hold_session_and_fork(path: str) -> None:
    """Own a key; a forked child abandons everything and outlives its parent."""
    disk = SystemDisk()
    store = open_store(path, disk)
    session = store.session(30.0)
    store.transaction([], [Put("leased", b"", session=session.id), Put("kept", b"")])
    if os.fork() == 0:
        store.abandon()
        disk.abandon()
        session.close()
        store.close()
        say(f"{session.id} {os.getpid()}")
        sys.stdin.readline()
        return
    signal.pause()


def put_many(path: str, prefix: str, count: str) -> None:
    """Put keys one by one."""
    store = open_store(path)
    say("ready")
    sys.stdin.readline()
    for number in range(int(count)):
        store.transaction([], [Put(f"{prefix}{number:03}", b"%d" % number)])
    store.close()


def read(path: str) -> None:
    """Open read-only at every line of input and say what is there."""
    for _ in sys.stdin:
        store = open_store(path, read_only=True)
        say(" ".join(entry.key for entry in store.range("")))
        store.close()


def fork_under_load(path: str, forks: str) -> None:
    """Fork again and again while threads write; children find their handle closed and open their own."""
    store = open_store(path)
    session = store.session(30.0)
    stop = threading.Event()

    def load(name: str) -> None:
        number = 0
        # With a breath between two writes, else the children would hardly ever get their turn.
        while not stop.wait(0.001):
            store.transaction([], [Put(f"load/{name}", b"%d" % number)])
            number += 1

    threads = [threading.Thread(target=load, args=(name,), daemon=True) for name in "ab"]
    for thread in threads:
        thread.start()
    with store.watch("child/") as watch:
        seen = 0
        for number in range(int(forks)):
            child = os.fork()
            if child == 0:
                os._exit(_forked(store, session.alive, path, number))
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            seen += len(watch.poll(10.0))
    stop.set()
    for thread in threads:
        thread.join()
    assert session.alive()
    say(f"{seen} {len(store.range('child/'))} {store.damage()}")
    store.close()


def _forked(store: SqliteMetadata, alive: Callable[[], bool], path: str, number: int) -> int:
    try:
        store.get("a")
        return 1
    except Closed as error:
        if "left behind by a fork" not in str(error) or alive():
            return 2
    if any(target.startswith(path) for target in _open_files()):
        return 3
    store.close()
    own = open_store(path)
    own.transaction([], [Put(f"child/{number:03}", b"")])
    own.close()
    return 0


def _open_files() -> Iterator[str]:
    """What this process has open, where the system shows it."""
    if sys.platform == "linux":
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):
                yield os.readlink(f"/proc/self/fd/{descriptor}")


def fill(path: str) -> None:
    """Commit into a file that may not grow, and say what the store says."""
    store = open_store(path)
    store.transaction([], [Put("before", b"")])
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limit = os.stat(f"{path}-wal").st_size + 10_000
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        store.transaction([], [Put("big", b"x" * 400_000)])
    except ForebayError as error:
        say(type(error).__name__)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    say(" ".join(entry.key for entry in store.range("")))
    store.transaction([], [Put("after", b"")])
    say(" ".join(entry.key for entry in store.range("")))
    store.close()


ACTS: dict[str, Callable[..., None]] = {
    act.__name__: act
    for act in (contend, write_pairs, hold_session, hold_session_and_fork, put_many, read, fork_under_load, fill)
}

if __name__ == "__main__":
    ACTS[sys.argv[1]](*sys.argv[2:])
