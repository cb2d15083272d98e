"""The machine's disk: few descriptors for many handles, locks over a fork, and what names a boot."""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from forebay.disk import SystemDisk, descriptors, machine
from forebay.disk.descriptors import SystemFile
from forebay.errors import Unsupported
from tests.support.waiting import until


@pytest.fixture
def root(tmp_path: Path) -> str:
    return str(tmp_path)


@pytest.fixture
def disk() -> Iterator[SystemDisk]:
    disk = SystemDisk(descriptors_max=4)
    yield disk
    disk.abandon()


def test_many_clean_handles_share_few_descriptors(disk: SystemDisk, root: str) -> None:
    files = [disk.create(f"{root}/{number}") for number in range(20)]
    for number, file in enumerate(files):
        file.write_at(b"%d" % number, 0)
        file.sync()

    assert [file.read_at(9, 0) for file in files] == [b"%d" % number for number in range(20)]
    assert disk.descriptors_open <= 4


def test_a_handle_used_again_and_again_keeps_its_descriptor(disk: SystemDisk, root: str) -> None:
    hot = disk.create(f"{root}/hot")
    disk.unlink(f"{root}/hot")  # so that it could not be opened again

    for number in range(20):
        disk.create(f"{root}/{number}")
        assert hot.size() == 0


def test_dirty_handles_keep_their_descriptors_until_they_are_synced(disk: SystemDisk, root: str) -> None:
    files = [disk.create(f"{root}/{number}") for number in range(4)]
    for file in files:
        file.write_at(b"unsynced", 0)
    disk.release_idle()
    assert disk.descriptors_open == 4

    for file in files:
        file.sync()
    disk.release_idle()

    assert disk.descriptors_open == 0


class Counted(OrderedDict[SystemFile, None]):
    """Counts the handles that a search looks at."""

    looks = 0

    def __iter__(self) -> Iterator[SystemFile]:
        for file in super().__iter__():
            Counted.looks += 1
            yield file


def looks_for_each_write(root: str, descriptors_max: int, *, reads: bool) -> float:
    """Write to four times as many files as may be open, in turn; how many handles were looked at for each write."""
    table = descriptors.Descriptors(descriptors_max)
    for name, value in vars(table).items():
        if isinstance(value, OrderedDict):
            setattr(table, name, Counted())
    created = os.O_RDWR | os.O_CREAT
    files = [table.adopt(f"{root}/{descriptors_max}-{number}", created) for number in range(4 * descriptors_max)]
    Counted.looks = 0
    for turn in range(3):
        for file in files:
            file.write_at(b"unsynced", 8 * turn)
            if reads:
                file.read_at(8, 0)
    looks = Counted.looks / (3 * len(files))
    assert len(table) <= descriptors_max
    table.abandon()
    return looks


@pytest.mark.parametrize("reads", [False, True])
def test_finding_room_takes_as_many_steps_with_many_open_files_as_with_few(
    root: str, monkeypatch: pytest.MonkeyPatch, *, reads: bool
) -> None:
    monkeypatch.setattr(machine, "flush", lambda fd: None)

    few, many = (looks_for_each_write(root, count, reads=reads) for count in (8, 128))

    assert many <= few + 1
    assert many <= 6


def test_a_file_that_is_written_to_while_it_is_synced_for_room_is_synced_for_room_again(
    disk: SystemDisk, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushes = Flushes(monkeypatch)
    files = [disk.create(f"{root}/{number}") for number in range(4)]
    for file in files:
        file.write_at(b"before", 0)
    again = {file.path: file for file in files}

    def meet(path: str) -> None:
        if (file := again.pop(path, None)) is not None:
            file.write_at(b"beside", 0)

    flushes.meet = meet
    others = [disk.create(f"{root}/other-{number}") for number in range(4)]
    for file in others:
        file.write_at(b"other", 0)

    assert disk.descriptors_open <= 4
    assert sorted(flushes.paths[:8]) == sorted([file.path for file in files] * 2)
    assert [file.read_at(9, 0) for file in files] == [b"beside"] * 4


@pytest.mark.parametrize("synced", ["file by file", "as a file system"])
def test_a_file_that_its_owner_syncs_gives_its_descriptor_to_the_next(
    disk: SystemDisk, root: str, monkeypatch: pytest.MonkeyPatch, synced: str
) -> None:
    """A search for room has met it while it was dirty, and must meet it again."""
    flushes = Flushes(monkeypatch)
    files = [disk.create(f"{root}/{number}") for number in range(4)]
    for file in files:
        file.write_at(b"unsynced", 0)
    for number in range(2):
        disk.create(f"{root}/more-{number}").write_at(b"unsynced", 0)
    if synced == "as a file system":
        disk.sync_filesystem(root)
    else:
        for file in files[2:]:
            file.sync()
    flushes.paths.clear()

    for number in range(2, 4):
        disk.create(f"{root}/more-{number}").write_at(b"unsynced", 0)

    assert flushes.paths == []
    assert disk.descriptors_open <= 4


class Flushes:
    """Every sync of a file, by its path; those of `failing` fail, and `meet` is called inside each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.paths: list[str] = []
        self.failing: set[str] = set()
        self.meet: Callable[[str], object] = lambda path: None
        self._inner = machine.flush
        monkeypatch.setattr(machine, "flush", self._flush)

    def _flush(self, fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        self.paths.append(path)
        is_told = path in self.failing
        # The system tells once, the sync that came first.
        self.failing.discard(path)
        self.meet(path)
        if is_told:
            raise OSError(errno.EIO, "write-back failed")
        self._inner(fd)


def test_dirty_handles_beyond_the_limit_are_synced_before_their_descriptors_go(
    disk: SystemDisk, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushes = Flushes(monkeypatch)
    files = [disk.create(f"{root}/{number}") for number in range(20)]
    for turn in range(3):
        for number, file in enumerate(files):
            file.write_at(b"%d" % (number % 10), turn)
            assert disk.descriptors_open <= 4

    assert [file.read_at(9, 0) for file in files] == [b"%d" % (number % 10) * 3 for number in range(20)]
    assert set(flushes.paths) == {f"{root}/{number}" for number in range(20)}
    assert len(flushes.paths) <= 3 * 20


def test_the_error_of_a_sync_for_room_reaches_every_later_sync_of_that_handle_and_no_other(
    disk: SystemDisk, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system tells once; so the handle keeps the error, whoever asks, until it is closed."""
    flushes = Flushes(monkeypatch)
    files = [disk.create(f"{root}/{number}") for number in range(4)]
    for file in files:
        file.write_at(b"unsynced", 0)
    flushes.failing.add(f"{root}/0")

    others = [disk.create(f"{root}/other {number}") for number in range(4)]

    assert [flushes.failing, flushes.paths[0]] == [set(), f"{root}/0"]
    for _ in range(2):
        with pytest.raises(OSError, match="earlier sync of this file has failed: write-back failed") as raised:
            files[0].sync()
        assert (raised.value.errno, raised.value.filename) == (errno.EIO, f"{root}/0")
        with pytest.raises(OSError, match="write-back failed"):
            disk.sync_filesystem(root)
        files[0].write_at(b"later", 0)
    for file in [*files[1:], *others]:
        file.sync()
    files[0].close()
    disk.sync_filesystem(root)


def test_a_sync_waits_for_a_sync_for_room_of_the_same_file_and_hears_its_error(
    disk: SystemDisk, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two syncs at once the system tells one: the owner's would have returned though the bytes are lost."""
    flushes = Flushes(monkeypatch)
    files = [disk.create(f"{root}/{number}") for number in range(4)]
    for file in files:
        file.write_at(b"unsynced", 0)
    flushes.failing.add(f"{root}/0")
    is_inside, may_go_on = threading.Event(), threading.Event()
    answers: list[object] = []

    def meet(path: str) -> None:
        if path == f"{root}/0":
            flushes.meet = lambda path: None
            is_inside.set()
            assert may_go_on.wait(60)

    def answer(sync: Callable[[], None]) -> None:
        try:
            sync()
            answers.append(None)
        except OSError as error:
            answers.append(error.errno)

    flushes.meet = meet
    opening = threading.Thread(target=disk.create, args=(f"{root}/other",))
    opening.start()
    assert is_inside.wait(60)
    over = files[0]._cleaning
    assert over is not None
    owners = [
        threading.Thread(target=answer, args=(sync,)) for sync in (files[0].sync, lambda: disk.sync_filesystem(root))
    ]
    for owner in owners:
        owner.start()
    until(lambda: answers or len(over._cond._waiters) == len(owners))  # type: ignore[attr-defined]
    may_go_on.set()
    for thread in (opening, *owners):
        thread.join(60)

    assert answers == [errno.EIO, errno.EIO]


def test_a_sync_for_room_that_never_ends_is_not_waited_for_without_limit(
    disk: SystemDisk, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C before it began: the owner's sync waited for ever, and so did the closing of the log."""

    def interrupted(file: SystemFile, *claim: object) -> None:
        raise KeyboardInterrupt

    files = [disk.create(f"{root}/{number}") for number in range(4)]
    for file in files:
        file.write_at(b"unsynced", 0)
    with monkeypatch.context() as patched:
        patched.setattr(SystemFile, "_clean", interrupted)
        with pytest.raises(KeyboardInterrupt):
            disk.create(f"{root}/other")
    monkeypatch.setattr(descriptors, "CLEANING_WAIT_SECONDS", 0.01)

    for sync in (files[0].sync, lambda: disk.sync_filesystem(root)):
        with pytest.raises(OSError, match="has not ended") as raised:
            sync()
        assert (raised.value.errno, raised.value.filename) == (errno.ETIMEDOUT, f"{root}/0")
    files[0].close()
    disk.sync_filesystem(root)
    for file in files[1:]:
        file.write_at(b"again", 0)
        file.sync()
    disk.release_idle()
    assert disk.descriptors_open == 1, "only that of the handle whose sync never ended"


def test_a_dirty_handle_without_its_name_keeps_its_descriptor(disk: SystemDisk, root: str) -> None:
    nameless = disk.create(f"{root}/gone")
    nameless.write_at(b"unsynced", 0)
    disk.unlink(f"{root}/gone")

    for number in range(10):
        disk.create(f"{root}/{number}").write_at(b"unsynced", 0)

    assert nameless.read_at(9, 0) == b"unsynced"
    assert disk.descriptors_open <= 5


def test_a_scratch_handle_gives_its_descriptor_back_without_a_sync(
    disk: SystemDisk, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushes = Flushes(monkeypatch)
    for number in range(10):
        disk.create(f"{root}/{number}").close()
    files = [disk.open(f"{root}/{number}", writable=True, scratch=True) for number in range(10)]
    for turn in range(2):
        for file in files:
            file.write_at(b"%d" % turn, turn)
            assert disk.descriptors_open <= 4

    assert [file.read_at(9, 0) for file in files] == [b"01"] * 10
    assert flushes.paths == []


class Shortage:
    """The system opens no file while this disk has so many open, apart from the first few calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, disk: SystemDisk, number: int, allowed: int) -> None:
        self.met = 0
        opened = os.open

        def refuse(path: str, flags: int, mode: int = 0o777) -> int:
            if disk.descriptors_open >= allowed:
                self.met += 1
                raise OSError(number, os.strerror(number), path)
            return opened(path, flags, mode)

        monkeypatch.setattr(os, "open", refuse)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_where_no_more_may_be_opened_others_give_back_first(
    root: str, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    disk = SystemDisk(descriptors_max=100)
    disk.create(f"{root}/first").close()
    shortage = Shortage(monkeypatch, disk, number, allowed=3)

    files = [disk.create(f"{root}/{number}") for number in range(10)]
    for file in files:
        file.write_at(b"unsynced", 0)
    disk.sync_directory(root)
    lock = disk.lock(f"{root}/lock")

    assert shortage.met > 0 and lock is not None and disk.is_locked(f"{root}/lock")
    assert [file.read_at(9, 0) for file in files] == [b"unsynced"] * 10
    monkeypatch.undo()
    disk.close()


def test_a_shortage_that_this_disk_cannot_end_is_waited_for_and_then_raised(
    disk: SystemDisk, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float | None] = []
    shortage = Shortage(monkeypatch, disk, errno.EMFILE, allowed=0)

    def wait(event: threading.Event, seconds: float | None = None) -> bool:
        waits.append(seconds)
        if len(waits) == 3:
            monkeypatch.undo()
        return True

    monkeypatch.setattr(threading.Event, "wait", wait)
    disk.create(f"{root}/a").write_at(b"after the wait", 0)
    assert len(waits) == 3 and shortage.met == 3

    Shortage(monkeypatch, disk, errno.EMFILE, allowed=0)
    monkeypatch.setattr(descriptors, "SHORTAGE_WAITS_MAX", 2)
    with pytest.raises(OSError) as raised:
        disk.create(f"{root}/b")
    assert raised.value.errno == errno.EMFILE


def test_a_shortage_does_not_give_a_mount_another_name(
    disk: SystemDisk, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By that name an owner tells after a restart whether its unsynced records can have survived."""
    known = disk.identity(root)
    left = [errno.EMFILE, errno.ENFILE]
    opened = os.open

    def refuse(path: str, *args: Any, **kwargs: Any) -> Any:
        if left and path.startswith("/proc/self/fdinfo/"):
            raise OSError(left.pop(), "too many open files", path)
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse)

    assert disk.identity(root) == known and left == []


def test_a_truncated_handle_is_dirty_too(disk: SystemDisk, root: str) -> None:
    disk.create(f"{root}/a").truncate(100)

    disk.release_idle()

    assert disk.descriptors_open == 1


def test_syncing_the_file_system_cleans_every_handle(disk: SystemDisk, root: str) -> None:
    for number in range(10):
        disk.create(f"{root}/{number}").write_at(b"unsynced", 0)

    disk.sync_filesystem(root)

    assert disk.descriptors_open <= 4


def test_a_file_system_that_cannot_be_synced_leaves_the_handles_dirty(
    disk: SystemDisk, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(fd: int) -> bool:
        raise OSError(errno.EIO, "write-back failed")

    disk.create(f"{root}/a").write_at(b"unsynced", 0)
    monkeypatch.setattr(machine, "flush_filesystem", fail)

    with pytest.raises(OSError):
        disk.sync_filesystem(root)

    disk.release_idle()
    assert disk.descriptors_open == 1


def test_the_error_of_a_file_system_reaches_the_next_sync_of_every_file_that_was_dirty(
    disk: SystemDisk, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system reports it once: the next sync, of the file or of all, took its silence for success."""

    def fail(fd: int) -> bool:
        later.write_at(b"written meanwhile", 0)
        raise OSError(errno.EIO, "write-back failed")

    dirty, clean, later = (disk.create(f"{root}/{name}") for name in ("dirty", "clean", "later"))
    dirty.write_at(b"unsynced", 0)
    with monkeypatch.context() as patch:
        patch.setattr(machine, "flush_filesystem", fail)
        with pytest.raises(OSError, match="write-back failed"):
            disk.sync_filesystem(root)

    for file in (dirty, later):
        with pytest.raises(OSError, match="earlier sync of this file has failed: write-back failed"):
            file.sync()
    with pytest.raises(OSError, match="write-back failed"):
        disk.sync_filesystem(root)
    clean.write_at(b"unsynced", 0)
    clean.sync()
    for file in (dirty, later):
        file.close()
    disk.sync_filesystem(root)


def test_a_file_system_is_synced_by_one_thread_at_a_time(
    disk: SystemDisk, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two at once the system reports a lost write to one, and the other took the bytes for durable."""
    inside, is_inside, may_go_on = [0], threading.Event(), threading.Event()
    most: list[int] = []

    def flush(fd: int) -> bool:
        inside[0] += 1
        most.append(inside[0])
        is_inside.set()
        assert may_go_on.wait(60)
        inside[0] -= 1
        return True

    disk.create(f"{root}/a").write_at(b"unsynced", 0)
    monkeypatch.setattr(machine, "flush_filesystem", flush)
    threads = [threading.Thread(target=disk.sync_filesystem, args=(root,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert is_inside.wait(60)
    may_go_on.set()
    for thread in threads:
        thread.join(60)

    assert most == [1, 1, 1]


def test_where_the_file_system_tells_no_errors_every_dirty_file_is_asked(
    disk: SystemDisk, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    for number in range(3):
        disk.create(f"{root}/{number}").write_at(b"unsynced", 0)
    monkeypatch.setattr(machine, "flush_filesystem", lambda fd: False)
    monkeypatch.setattr(machine, "flush", asked.append)

    disk.sync_filesystem(root)

    assert len(asked) == 3


def test_a_failed_sync_leaves_the_handle_dirty(disk: SystemDisk, root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "write-back failed")

    file = disk.create(f"{root}/a")
    file.write_at(b"unsynced", 0)
    monkeypatch.setattr(machine, "flush", fail)

    with pytest.raises(OSError):
        file.sync()

    disk.release_idle()
    assert disk.descriptors_open == 1


def test_closing_gives_every_descriptor_back(disk: SystemDisk, root: str) -> None:
    files = [disk.create(f"{root}/{number}") for number in range(10)]
    for file in files:
        file.write_at(b"unsynced", 0)

    for file in files:
        file.close()

    assert disk.descriptors_open == 0


def test_a_closed_disk_holds_nothing_and_opens_nothing(root: str) -> None:
    before = set(os.listdir("/dev/fd"))
    disk = SystemDisk()
    file = disk.create(f"{root}/a")
    file.write_at(b"unsynced", 0)
    assert disk.lock(f"{root}/lock") is not None
    disk.sync_filesystem(root)

    disk.close()
    disk.close()

    assert set(os.listdir("/dev/fd")) == before
    assert not SystemDisk().is_locked(f"{root}/lock")
    for refused in (lambda: disk.open(f"{root}/a"), lambda: disk.lock(f"{root}/lock"), lambda: file.read_at(1, 0)):
        with pytest.raises(OSError, match="closed"):
            refused()


def test_a_failed_opening_leaks_nothing(disk: SystemDisk, root: str) -> None:
    before = len(os.listdir("/dev/fd"))

    for _ in range(3):
        with pytest.raises(IsADirectoryError):
            disk.open(root)
        with pytest.raises(FileNotFoundError):
            disk.open(f"{root}/none")

    assert len(os.listdir("/dev/fd")) == before


def test_threads_never_read_another_file_while_descriptors_change_hands(root: str) -> None:
    disk = SystemDisk(descriptors_max=2)
    files = [disk.create(f"{root}/{number}") for number in range(8)]
    for number, file in enumerate(files):
        file.write_at(bytes([number]) * 64, 0)
        file.sync()
    wrong: list[object] = []

    def read(start: int) -> None:
        try:
            for turn in range(400):
                number = (start + turn) % 8
                if files[number].read_at(64, 0) != bytes([number]) * 64:
                    wrong.append(number)
                files[number].write_at(bytes([number]) * 64, 0)
                files[number].sync()
        except OSError as error:
            wrong.append(error)

    _with_eager_switching([threading.Thread(target=read, args=(start,)) for start in (0, 3, 5)])

    assert wrong == []
    assert disk.descriptors_open <= 4
    disk.abandon()


def test_closing_beside_running_calls_leaks_nothing_and_only_says_closed(root: str) -> None:
    disk = SystemDisk()
    errors: list[int | None] = []

    for number in range(30):
        file = disk.create(f"{root}/{number}")

        def write(file: object = file) -> None:
            try:
                for _ in range(50):
                    file.write_at(b"x", 0)  # type: ignore[attr-defined]
            except OSError as error:
                errors.append(error.errno)

        _with_eager_switching([threading.Thread(target=write), threading.Thread(target=file.close)])

    assert set(errors) <= {errno.EBADF}
    assert disk.descriptors_open == 0
    disk.abandon()


def test_a_handle_closed_under_a_running_call_does_not_hand_its_descriptor_to_another_file(
    disk: SystemDisk, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pread = os.pread
    file = disk.create(f"{root}/a")
    file.write_at(b"mine", 0)

    def close_meanwhile(fd: int, length: int, position: int) -> bytes:
        file.close()
        disk.create(f"{root}/b").write_at(b"other", 0)
        return pread(fd, length, position)

    monkeypatch.setattr(os, "pread", close_meanwhile)

    assert file.read_at(4, 0) == b"mine"
    with pytest.raises(OSError):
        file.size()
    assert disk.descriptors_open == 1


def test_a_lock_file_replaced_while_it_is_being_locked_is_locked_afresh(
    disk: SystemDisk, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock
    turns = iter([True, False])

    def replace_once(fd: int, operation: int) -> None:
        if next(turns, False):
            os.unlink(f"{root}/lock")
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", replace_once)

    assert disk.lock(f"{root}/lock") is not None
    assert disk.lock(f"{root}/lock") is None


def test_those_who_ask_whether_a_lock_is_held_do_not_see_each_other(disk: SystemDisk, root: str) -> None:
    lock = disk.lock(f"{root}/lock")
    assert lock is not None
    lock.release()

    with open(f"{root}/lock", "rb") as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)
        assert not disk.is_locked(f"{root}/lock")


def test_asking_whether_a_lock_is_held_needs_no_permission_to_write(
    disk: SystemDisk, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = disk.lock(f"{root}/lock")
    assert lock is not None
    flags: list[int] = []
    opened = os.open

    def watched(path: str, how: int, *rest: int) -> int:
        flags.append(how)
        return opened(path, how, *rest)

    monkeypatch.setattr(os, "open", watched)

    assert disk.is_locked(f"{root}/lock")
    assert flags == [os.O_RDONLY | os.O_CLOEXEC]


def test_a_forked_child_that_abandons_the_disk_does_not_keep_the_lock(disk: SystemDisk, root: str) -> None:
    file = disk.create(f"{root}/a")
    assert disk.lock(f"{root}/lock") is not None
    abandoned, tell = os.pipe()
    wait, go = os.pipe()

    child = os.fork()
    if child == 0:
        try:
            os.close(go)
            disk.abandon()
            os.write(tell, b"1")
            os.read(wait, 1)
            os._exit(0 if _says_closed(disk, root) and file._fd == -1 else 1)
        finally:
            os._exit(2)
    os.close(wait)
    os.read(abandoned, 1)
    assert SystemDisk().lock(f"{root}/lock") is None, "abandoning must not unlock what the parent holds"
    disk.abandon()  # closes without unlocking, as the end of a process does
    taken = SystemDisk().lock(f"{root}/lock")
    for fd in (go, abandoned, tell):
        os.close(fd)

    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert taken is not None, "the child kept the lock alive"
    taken.release()


def test_a_released_lock_is_free_though_a_child_still_shares_it(disk: SystemDisk, root: str) -> None:
    lock = disk.lock(f"{root}/lock")
    assert lock is not None
    wait, go = os.pipe()

    child = os.fork()
    if child == 0:
        os.close(go)
        os.read(wait, 1)
        os._exit(0)
    os.close(wait)
    lock.release()
    taken = disk.lock(f"{root}/lock")
    os.close(go)
    os.waitpid(child, 0)

    assert taken is not None


def test_an_abandoned_disk_refuses_to_open_more(root: str) -> None:
    disk = SystemDisk()
    disk.create(f"{root}/a")
    before = len(os.listdir("/dev/fd"))

    disk.abandon()
    disk.abandon()

    assert _says_closed(disk, root)
    assert len(os.listdir("/dev/fd")) == before - 2  # the file, and its file system for syncs


def test_descriptors_are_not_inherited_by_programs(disk: SystemDisk, root: str) -> None:
    disk.create(f"{root}/a")
    disk.lock(f"{root}/lock")

    inherited = [fd for fd in map(int, os.listdir("/dev/fd")) if _is_below(fd, root) and os.get_inheritable(fd)]

    assert inherited == []


def test_an_unreadable_directory_is_an_error_and_not_an_absence(
    disk: SystemDisk, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> os.stat_result:
        raise PermissionError(errno.EACCES, "not allowed", path)

    monkeypatch.setattr(os, "stat", refuse)

    with pytest.raises(PermissionError):
        disk.exists(f"{root}/a")


def test_a_read_goes_on_after_the_system_gave_less(
    disk: SystemDisk, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pread = os.pread
    file = disk.create(f"{root}/a")
    file.write_at(bytes(range(100)), 0)
    monkeypatch.setattr(os, "pread", lambda fd, length, position: pread(fd, min(length, 7), position))

    assert file.read_at(50, 10) == bytes(range(10, 60))
    assert file.read_at(500, 90) == bytes(range(90, 100))


def test_the_mount_is_the_longest_point_above_the_path_and_the_topmost_there() -> None:
    mountinfo = (
        "22 1 0:20 / / rw - ext4 /dev/a rw\n"
        "23 22 0:21 / /srv rw - xfs /dev/b rw\n"
        "24 22 0:22 / /srv rw - xfs /dev/c rw\n"
        "25 22 0:23 / /srv/with\\040space rw - xfs /dev/d rw\n"
    )

    assert machine.mount_id(mountinfo, "/srv") == "24"
    assert machine.mount_id(mountinfo, "/srv/x") == "24"
    assert machine.mount_id(mountinfo, "/srvx") == "22"
    assert machine.mount_id(mountinfo, "/srv/with space/x") == "25"
    assert machine.mount_id("", "/srv") is None


def test_the_mount_of_a_path_is_the_one_that_the_list_of_mounts_names(root: str) -> None:
    listed = Path("/proc/self/mountinfo").read_text()
    for path in (root, "/", "/proc", "/dev/shm"):
        device, _, number = machine.mount(path).partition(".")
        assert (int(device), number) == (os.stat(path).st_dev, machine.mount_id(listed, os.path.realpath(path)))


def test_an_unknown_boot_is_never_taken_for_the_same(monkeypatch: pytest.MonkeyPatch, root: str) -> None:
    def missing(*_: object, **__: object) -> object:
        raise FileNotFoundError(errno.ENOENT, "no /proc here")

    monkeypatch.setattr("builtins.open", missing)

    assert SystemDisk().identity(root) != SystemDisk().identity(root)


def test_two_disks_of_one_boot_agree_on_its_identity(root: str) -> None:
    assert SystemDisk().identity(root) == SystemDisk().identity(root)


def test_windows_is_refused_before_anything_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")

    with pytest.raises(Unsupported, match="Windows"):
        SystemDisk()


def _with_eager_switching(threads: list[threading.Thread]) -> None:
    """Run them with so short a time slice that calls meet in the middle."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)


def _says_closed(disk: SystemDisk, root: str) -> bool:
    try:
        disk.create(f"{root}/after")
    except OSError as error:
        return error.errno == errno.EBADF
    return False


def _is_below(fd: int, root: str) -> bool:
    try:
        return os.readlink(f"/proc/self/fd/{fd}").startswith(root)
    except OSError:
        return False
