"""The store in an SQLite file, between processes: races, kill -9, sessions of the dead, forks, a full disk.

A kill -9 cannot show a missing sync, for the page cache lives on; that SQLite syncs is its own promise
(synchronous=FULL).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import TypeAlias

import pytest

from forebay.metadata import Absent, Put, SessionEnded
from tests.ledger import Ledger
from tests.metadata.children import ACTS, open_store
from tests.support.processes import Child, hear, tell

pytestmark = pytest.mark.slow

Start: TypeAlias = Callable[..., Child]

ROOT = Path(__file__).parents[2]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "metadata.sqlite")


@pytest.fixture
def start(path: str) -> Iterator[Start]:
    """Start a child that does something to the file; whatever happens, none is left behind."""
    children: list[Child] = []

    def started(act: str, *arguments: str) -> Child:
        assert act in ACTS
        command = [sys.executable, "-m", "tests.metadata.children", act, path, *arguments]
        child = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        children.append(child)
        return child

    yield started
    for child in children:
        child.kill()
        child.communicate()


def finish(child: Child) -> list[str]:
    said = hear_out(child)
    assert child.returncode == 0
    return said.splitlines()


def hear_out(child: Child) -> str:
    """All a child still says; not by `communicate`, which forgets what was read ahead of the last line."""
    assert child.stdout is not None
    said = child.stdout.read()
    child.wait(60)
    return said


def test_of_three_processes_one_wins_every_round_and_no_increment_is_lost(
    path: str, start: Start, ledger: Ledger
) -> None:
    children = [start("contend", name, "60") for name in ("x", "y", "z")]
    for child in children:
        assert hear(child) == "ready"
    for child in children:
        tell(child)

    wins = Counter(line for child in children for line in finish(child))

    assert wins == Counter(f"won {number}" for number in range(60))
    with closing(open_store(path)) as store:
        counter = store.get("counter")
        assert counter is not None
        assert counter.value == b"180"
        assert store.revision() == 240
    ledger.count("compare-and-swaps", n=180, processes="3")


def test_after_kill_9_every_acknowledged_transaction_is_there_and_none_in_half(
    path: str, start: Start, ledger: Ledger
) -> None:
    acknowledged: dict[int, int] = {}
    following = 0
    for kills, acks in enumerate((1, 40, 7, 150, 3, 90), start=1):
        child = start("write_pairs", str(following))
        lines = [hear(child) for _ in range(acks)]
        child.send_signal(signal.SIGKILL)
        rest = hear_out(child).splitlines(keepends=True)
        for line in lines + [line for line in rest if line.endswith("\n")]:
            number, revision = map(int, line.split())
            acknowledged[number] = revision

        with closing(open_store(path)) as store:
            a, b = ([entry.key[2:] for entry in store.range(prefix)] for prefix in ("a/", "b/"))
            assert a == b == [f"{number:06}" for number in range(len(a))]
            for number, revision in acknowledged.items():
                entry = store.get(f"b/{number:06}")
                assert entry is not None
                assert (entry.value, entry.mod_revision) == (b"%d" % number * 300, revision)
            assert 0 <= len(a) - len(acknowledged) <= kills
            assert store.revision() == len(a)
            assert store.damage() == []
            following = len(a)
        ledger.count("kills")
    ledger.count("acknowledged transactions after kill -9", n=len(acknowledged))


def test_a_session_of_a_killed_process_has_ended(path: str, start: Start, ledger: Ledger) -> None:
    with closing(open_store(path)) as store, store.watch("leased") as watch:
        child = start("hold_session")
        session = hear(child)
        assert store.session_alive(session)
        assert store.get("leased") is not None
        assert not store.transaction([SessionEnded(session)], [Put("mine", b"")]).succeeded

        child.send_signal(signal.SIGKILL)
        child.wait(30)

        assert store.transaction([SessionEnded(session)], [Put("mine", b"")]).succeeded
        assert [entry.key for entry in store.range("")] == ["kept", "mine"]
        assert not store.session_alive(session)
        assert [change.entry is None for change in watch.poll(10.0)] == [False, True]
        assert list(Path(path).with_name("sessions").iterdir()) == []
    ledger.count("kills")


@pytest.mark.parametrize("way", ["get", "range", "absent", "watch", "read-only"])
def test_keys_of_a_killed_process_vanish_for_whichever_caller_looks(path: str, start: Start, way: str) -> None:
    with closing(open_store(path)) as store, store.watch("leased", from_revision=1) as watch:
        child = start("hold_session")
        hear(child)
        child.send_signal(signal.SIGKILL)
        child.wait(30)

        if way == "get":
            assert store.get("leased") is None
        elif way == "range":
            assert [entry.key for entry in store.range("", limit=2)] == ["kept"]
        elif way == "absent":
            outcome = store.transaction([Absent("leased")], [Put("leased", b"")])
            assert outcome.succeeded
            entry = store.get("leased")
            assert entry is not None
            assert entry.create_revision == outcome.revision
        elif way == "watch":
            changes = watch.poll(10.0)
            if len(changes) < 2:
                changes += watch.poll(10.0)
            assert [change.entry is None for change in changes] == [False, True]
        else:
            with closing(open_store(path, read_only=True)) as reader:
                assert reader.get("leased") is None
                assert [entry.key for entry in reader.range("", limit=2)] == ["kept"]


def test_a_watch_sees_every_change_of_another_process_once(path: str, start: Start) -> None:
    children = [start("put_many", f"w/{name}/", "60") for name in "ab"]
    for child in children:
        hear(child)
    with closing(open_store(path)) as store, store.watch("w/") as watch:
        for child in children:
            tell(child)
        seen: list[str] = []
        revisions: list[int] = []
        patience = 20
        while len(seen) < 120 and patience:
            changes = watch.poll(1.0)
            patience -= not changes
            seen += [change.key for change in changes]
            revisions += [change.revision for change in changes]

        assert sorted(seen) == [f"w/{name}/{number:03}" for name in "ab" for number in range(60)]
        assert revisions == sorted(set(revisions))
        assert watch.poll(0.05) == []
        for child in children:
            finish(child)


def test_a_read_only_process_sees_what_its_owner_committed(path: str, start: Start) -> None:
    with closing(open_store(path)) as owner:
        owner.transaction([], [Put("a", b"")])
        reader = start("read")
        tell(reader)
        assert hear(reader) == "a"

        owner.transaction([], [Put("b", b"")])
        tell(reader)
        assert hear(reader) == "a b"

    tell(reader)
    assert hear(reader) == "a b"
    writer = start("write_pairs", "0")
    hear(writer)
    writer.send_signal(signal.SIGKILL)
    writer.wait(30)
    tell(reader)
    assert hear(reader).startswith("a a/000000 ")


def test_forks_under_load_leave_the_parent_whole_and_children_free_to_open_their_own(path: str, start: Start) -> None:
    child = start("fork_under_load", "12")

    assert finish(child) == ["12 12 []"]


def test_a_forked_child_that_abandoned_its_handles_keeps_no_session_alive(path: str, start: Start) -> None:
    parent = start("hold_session_and_fork")
    session, orphan = hear(parent).split()
    with closing(open_store(path)) as store:
        assert store.session_alive(session)
        assert store.get("leased") is not None

        parent.send_signal(signal.SIGKILL)
        parent.wait(30)
        os.kill(int(orphan), 0)

        assert not store.session_alive(session)
        assert [entry.key for entry in store.range("")] == ["kept"]


def test_a_commit_that_finds_no_room_is_not_taken_for_done_and_the_store_goes_on(path: str, start: Start) -> None:
    said = finish(start("fill"))

    assert said == ["Indeterminate", "before", "after before"]
    with closing(open_store(path)) as store:
        assert [entry.key for entry in store.range("")] == ["after", "before"]
        assert store.damage() == []
