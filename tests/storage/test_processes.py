"""A log and the life of processes: readers beside the owner, kills, forks, signals, exits. All in real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import psutil
import pytest

import forebay
from forebay.testing.inside import inside
from tests.ledger import Ledger
from tests.storage.children import ACTS, SMALL
from tests.storage.rig import QUICK, values
from tests.support.processes import Child, hear, tell
from tests.support.waiting import until

pytestmark = pytest.mark.slow

Start: TypeAlias = Callable[..., Child]

ROOT = Path(__file__).parents[2]


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "log")


@pytest.fixture
def start(path: str) -> Iterator[Start]:
    """Start a child that does something to the log; whatever happens, none is left behind."""
    children: list[Child] = []

    def started(act: str, *arguments: str) -> Child:
        assert act in ACTS
        command = [sys.executable, "-m", "tests.storage.children", act, path, *arguments]
        pipe = subprocess.PIPE
        child = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        children.append(child)
        return child

    yield started
    for child in children:
        child.kill()
        child.communicate()


def hear_out(child: Child) -> list[str]:
    """All that a child still says. What an end in the middle of a line leaves is not a fact."""
    assert child.stdout is not None
    said = child.stdout.read()
    child.wait(60)
    return said.rpartition("\n")[0].splitlines()


def test_a_second_process_follows_across_rotations_and_sealing(start: Start, path: str) -> None:
    with forebay.open(path, SMALL) as log:
        topic = log.create_topic("t")
        topic.append(b"0" + b"x" * 200)
        reader = start("follow", "1000")
        assert hear(reader) == "ready"

        for number in range(1, 1000):
            topic.append(b"%d" % number + b"x" * 200)
            if number % 300 == 0:
                topic.rotate()

        assert hear_out(reader) == [f"{number} {number}" for number in range(1000)]
        assert reader.returncode == 0
        until(lambda: list(Path(path).glob("shards/*/*.idx")))


@pytest.mark.parametrize("durability", ["disk", "fsync"])
def test_what_an_owner_acknowledged_before_it_was_killed_is_read_by_everyone(
    start: Start, path: str, durability: str, ledger: Ledger
) -> None:
    owner = start("append_for_ever", durability)
    assert hear(owner) == "ready"
    reader = start("follow", "150")
    assert hear(reader) == "ready"
    for _ in range(150):
        hear(owner)
    assert hear_out(reader) == [f"{number} {number}" for number in range(150)]

    owner.kill()
    acked = [int(line) for line in hear_out(owner) if line]
    ledger.count("kills", figure="owner")

    with forebay.open(path, SMALL, read_only=True) as beside:
        found = [record.offset for record in beside.topic("t").read()]
        assert found == list(range(len(found)))
        assert len(found) > (acked[-1] if acked else 149)
    with forebay.open(path, SMALL) as log:
        topic = log.topic("t")
        assert [record.offset for record in topic.read()] == found
        assert topic.recovery().exact
        assert not topic.recovery().clean
        assert topic.append(b"next") == len(found)


def test_a_reader_never_sees_beyond_what_the_owner_published(path: str) -> None:
    with forebay.open(path, SMALL) as log, forebay.open(path, SMALL, read_only=True) as beside:
        topic = log.create_topic("t", durability="memory")
        topic.append_many([b"published"] * 3)
        topic.flush()
        for _ in range(3):
            topic.append(b"queued")

        published = inside(topic).wal().head
        assert len(list(beside.topic("t").read())) <= inside(topic).wal().head
        assert published >= 3
        topic.flush()
        assert len(list(beside.topic("t").read())) == 6


def test_a_second_writer_is_refused_while_the_owner_lives_and_not_after(start: Start, path: str) -> None:
    owner = start("append_for_ever", "disk")
    assert hear(owner) == "ready"
    assert hear(start("open_for_writing")).startswith(f"Unavailable: {path} is open for writing already")

    owner.kill()
    owner.wait(60)

    assert hear(start("open_for_writing")) == "opened"


def test_a_deletion_that_a_kill_interrupts_is_finished_at_the_next_opening(start: Start, path: str) -> None:
    with forebay.open(path, SMALL) as log:
        log.create_topic("t", partitions=2).append_many([b"v"] * 20, keys=[b"%d" % n for n in range(20)])
        kept = log.create_topic("kept")
        kept.append(b"kept")
    child = start("delete_and_die")
    child.wait(60)
    assert child.returncode == -signal.SIGKILL
    assert len(list(Path(path).glob("shards/*"))) > 1

    with forebay.open(path, SMALL) as log:
        assert [spec.topic for spec in log.topics()] == ["kept"]
        assert [entry.name for entry in Path(path).glob("shards/*")] == [f"{kept.spec.topic_id}_0"]
        assert log.create_topic("t").append(b"new") == 0


def test_after_a_fork_the_child_is_refused_and_the_parent_goes_on(start: Start, path: str) -> None:
    """The child had inherited the locks and kept them alive after its parent's death."""
    parent = start("fork_once")
    _, pid, *answers = hear(parent).split(" ")
    assert answers == ["closed"] * 9
    tell(parent)
    assert hear(parent) == "parent 1 1"
    tell(parent)
    parent.wait(60)
    assert parent.returncode == -signal.SIGKILL
    child = psutil.Process(int(pid))
    assert not [file.path for file in child.open_files() if file.path.startswith(path)]

    with forebay.open(path, SMALL) as log:
        assert values(log.topic("t").read(partition=0)) == [b"before", b"after"]
    child.kill()


def test_forks_under_load_harm_neither_side(start: Start, path: str, ledger: Ledger) -> None:
    parent = start("fork_under_load", "8")

    assert hear_out(parent) == ["{0} True"], parent.stderr and parent.stderr.read()
    assert parent.returncode == 0
    ledger.count("forks under load", n=8)
    with forebay.open(path, SMALL) as log:
        assert log.topic("t").recovery().clean


def test_a_reader_goes_on_through_the_death_of_one_owner_and_the_work_of_the_next(start: Start, path: str) -> None:
    owner = start("append_for_ever", "disk")
    assert hear(owner) == "ready"
    hear(owner)
    with forebay.open(path, SMALL, read_only=True) as beside:
        stream = beside.topic("t").follow(0, timeout=60)
        seen = [next(stream).offset for _ in range(50)]
        owner.kill()
        owner.wait(60)
        for _ in range(3):
            with forebay.open(path, SMALL) as log:
                topic = log.topic("t")
                topic.append_many([b"more"] * 5)
                topic.rotate()
                end = topic.offsets().next
                seen += [next(stream).offset for _ in range(end - len(seen))]

    assert seen == list(range(end))


def test_workers_of_a_prefork_server_open_their_own(start: Start, path: str) -> None:
    server = start("prefork", "3")

    assert hear_out(server) == ["[0, 0, 0] 2"]
    assert server.returncode == 0


def test_interrupts_inside_append_lose_and_double_nothing(start: Start, path: str) -> None:
    child = start("interrupted_appends")

    said = hear_out(child)

    assert child.returncode == 0, child.stderr and child.stderr.read()
    assert said == ["0 lost, 0 doubled"]
    with forebay.open(path, SMALL) as log:
        assert log.topic("t").recovery().clean


@pytest.mark.parametrize("way", ["return", "exit", "error", "thread", "daemon", "nowait"])
def test_a_process_that_ends_without_closing_ends_clean(start: Start, path: str, way: str) -> None:
    child = start("append_and_exit", way)
    said = hear_out(child)

    assert child.returncode == {"exit": 3, "error": 1}.get(way, 0)
    assert child.stderr is not None
    errors = child.stderr.read()
    assert errors == "" or (way == "error" and "RuntimeError: on purpose" in errors), errors
    with forebay.open(path, SMALL) as log:
        topic = log.topic("t")
        assert topic.recovery().clean
        found = values(topic.read())
        assert found[:50] == [b"%d" % n for n in range(50)]
        assert len(found) == {"thread": 60, "nowait": 150}.get(way, len(found))
        assert not said or int(said[0]) == 149


@pytest.mark.parametrize("way", ["appending", "with", "threads", "idle"])
def test_a_terminated_process_closes_and_ends_by_the_signal(start: Start, path: str, way: str) -> None:
    """The closing waited in the main thread for what an append of that same thread held."""
    child = start("wait_for_signal", way)
    assert hear(child) == "ready"
    if way == "threads":
        until(lambda: any(file.stat().st_size > 2000 for file in Path(path).glob("shards/*/*.seg")))

    child.terminate()
    child.wait(60)

    assert child.returncode == -signal.SIGTERM
    with forebay.open(path, QUICK) as log:
        assert log.topic("t").recovery().clean or log.topic("t").offsets().next == 0


def test_what_a_program_itself_does_about_a_signal_is_left_alone(start: Start, path: str) -> None:
    child = start("wait_for_signal", "own")
    assert hear(child) == "ready"

    os.kill(child.pid, signal.SIGTERM)
    child.wait(60)

    assert child.returncode == 7
    with forebay.open(path, QUICK) as log:
        assert log.topic("t").recovery().clean or log.topic("t").offsets().next == 0
